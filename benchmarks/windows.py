"""Times attention in a window, with the construction of its mask, next to causal SDPA and transformers' sliding window.

python benchmarks/windows.py [--tokens 65536] [--window 1024] [--rounds 15]

Needs a CUDA device. q, k and v are (1, 16, tokens, 128) in bfloat16. The result is first compared with softmax in
float64 for some queries. Wall-clock times, each call with a synchronization, in interleaved rounds in random order.
Exits with 1 if a result is wrong, if ours is less than 8 times as fast as SDPA, or if it takes more than 1.5 times as
long as transformers' window. These floors are for the default sizes.
"""

import argparse
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

import ropewalk as rw

HEADS, DIM = 16, 128
OURS, SDPA, PEER = "rw.attention(window=...)", "SDPA, causal, no window", "transformers' flex sliding window"
# Their time over ours must be at least this.
FLOORS = {SDPA: 8.0, PEER: 1 / 1.5}
LARGEST_ERROR = 2.0**-7


def peers(q: Tensor, k: Tensor, v: Tensor, window: int) -> dict[str, Callable[[], Tensor]]:
    calls: dict[str, Callable[[], Tensor]] = {
        SDPA: lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        OURS: lambda: rw.attention(q, k, v, window=window),
    }
    if importlib.util.find_spec("transformers") is not None:
        from transformers.integrations.flex_attention import flex_attention_forward
        from transformers.masking_utils import flex_attention_mask, sliding_window_causal_mask_function

        layer, tokens = torch.nn.Identity().eval(), q.shape[2]

        def transformers_window() -> Tensor:
            sees = sliding_window_causal_mask_function(window)
            mask = flex_attention_mask(
                batch_size=1, q_length=tokens, kv_length=tokens, mask_function=sees, device=q.device
            )
            return flex_attention_forward(layer, q, k, v, mask, scaling=DIM**-0.5)[0].transpose(1, 2)

        calls[PEER] = transformers_window
    return calls


def relative_error(y: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int) -> float:
    """The error of the last 64 queries against softmax in float64."""
    tokens = q.shape[2]
    first = max(0, tokens - 64 - window)
    queries, keys, values = q[:, :, -64:].double(), k[:, :, first:].double(), v[:, :, first:].double()
    ahead = torch.arange(tokens - 64, tokens, device=q.device)[:, None] - torch.arange(first, tokens, device=q.device)
    scores = queries @ keys.mT * DIM**-0.5
    exact = scores.masked_fill((ahead < 0) | (ahead >= window), -torch.inf).softmax(-1) @ values
    return float((y[:, :, -64:].double() - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shape = 1, HEADS, arguments.tokens, DIM
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls = peers(q, k, v, arguments.window)
    times: dict[str, list[float]] = {name: [] for name in calls}
    wrong = False
    with torch.no_grad():
        for name, call in calls.items():
            y = call()  # compiles
            if name != SDPA:
                error = relative_error(y, q, k, v, arguments.window)
                print(f"{name}: relative error {error:.1e}")
                wrong = wrong or not error < LARGEST_ERROR
            call()
        for _ in range(arguments.rounds):
            for name in random.sample(list(calls), len(calls)):
                torch.cuda.synchronize()
                start = time.perf_counter()
                calls[name]()
                torch.cuda.synchronize()
                times[name].append((time.perf_counter() - start) * 1e3)
    ours = statistics.median(times[OURS])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:36} {median:8.3f} ms   {median / ours:5.2f} x ours")
        wrong = wrong or median / ours < FLOORS.get(name, 0.0)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
