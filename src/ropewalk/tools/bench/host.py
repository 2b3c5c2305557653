"""`ropewalk bench host`: the host time of every public eager call for one token, next to what a host cannot go below.

Linear attention with RoPE is timed for one token after a state, and on a GPU for a long sequence.
`python -m ropewalk.tools.bench.host` needs only torch. Calls follow each other, and nobody waits for their results. All
of them are timed in interleaved rounds.
"""

import argparse
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.nn.rotary.functions import apply_rope
from ropewalk.nn.rotary.qk_norm import qk_norm_rope
from ropewalk.ops import backend_reasons
from ropewalk.spec.rope import Pairing
from ropewalk.tools.bench import timing
from ropewalk.tools.bench.bare import bare_function, bare_launch, bare_norm_function, copied
from ropewalk.tools.bench.floors import host_floors, host_limit, host_limit_us
from ropewalk.tools.bench.host_linear import CALLS, HEADS, LENGTH, Sequences, linear_calls, linear_yardsticks
from ropewalk.tools.bench.host_linear import DIM as LINEAR_DIM
from ropewalk.tools.bench.records import shown_missed, write_record
from ropewalk.tools.bench.timing import Candidate
from ropewalk.tools.bench.truth import Truth, true_norms, true_rotations
from ropewalk.tools.output import package_version, processor, require_writable_file

__all__ = ["HostLine", "bench_host", "measure", "measure_linear", "measure_token"]

Q_HEADS, K_HEADS, DIM, POSITION, EPS = 32, 8, 128, 1000, 1e-6
PAIRING: Pairing = "half"
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
EMPTY, COPY, COPY_Q, LAUNCH = "empty_like", "copy", "copy of q", "launch"
BACKWARD = ", fwd+bwd"

# The lower bound of a call: how often each path of `_bare` is part of it.
Floor = dict[str, int]


@dataclass(frozen=True)
class Call:
    """A public call.

    Attributes:
        name: The call as it is written, and "grad" with an autograd graph or "fwd+bwd" with its backward pass.
        run: The call.
        floor: Its lower bound.
        truths: The correct results.
        outputs: A call that returns the tensors to check, if it is not `run`.
    """

    name: str
    run: Callable[[], Any]
    floor: Floor
    truths: Sequence[Truth]
    outputs: Callable[[], Any] | None = None

    def error(self) -> float:
        """The largest error of a result, in error budgets."""
        results = (self.outputs or self.run)()
        results = [results] if isinstance(results, Tensor) else results
        return max(truth.errors(y)[0] for truth, y in zip(self.truths, results, strict=True))


@dataclass(frozen=True)
class HostLine:
    """A row of the table. A call with a wrong result has no time. What calls are compared with has no ratio.

    Attributes:
        path: The name of the call.
        us: The host time per call in microseconds.
        floor: The lower bound in words.
        floor_us: The lower bound in microseconds.
        ratio: `us / floor_us`.
        error_over_budget: The largest error of a result, at most 1.
    """

    path: str
    us: float | None
    floor: str | None = None
    floor_us: float | None = None
    ratio: float | None = None
    error_over_budget: float | None = None


class Token:
    """q, k and all that calls for one token need: weights, positions, leaves, cotangents."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.q: Tensor = torch.randn(1, Q_HEADS, 1, DIM, device=device).to(dtype)
        self.k: Tensor = torch.randn(1, K_HEADS, 1, DIM, device=device).to(dtype)
        self.weights: list[Tensor] = [(torch.rand(DIM, device=device) + 0.5).to(dtype) for _ in range(2)]
        self.leaves: list[Tensor] = [x.clone().requires_grad_() for x in (self.q, self.k)]
        self.learned: list[Tensor] = [weight.clone().requires_grad_() for weight in self.weights]
        self.cotangents: list[Tensor] = [torch.randn_like(x) for x in (self.q, self.k)]
        self.ids: Tensor = torch.tensor([POSITION], device=device)

    def both(self) -> list[Tensor]:
        """q and k."""
        return [self.q, self.k]


def _bare(token: Token, launch: Callable[[], object] | None) -> Iterator[Candidate]:
    """What calls are compared with. `launch` launches a kernel on a GPU."""
    q, k = token.q, token.k
    yield Candidate(EMPTY, lambda: torch.empty_like(q))
    yield Candidate(COPY, lambda: [torch.empty_like(x).copy_(x) for x in (q, k)])
    yield Candidate(COPY_Q, lambda: torch.empty_like(q).copy_(q))
    weight, inputs = token.weights[0], [*token.leaves, *token.learned]
    functions: dict[str, Any] = {
        "Function": bare_function(torch.empty_like),
        "copy Function": bare_function(copied),
        "Function(4)": bare_norm_function(torch.empty_like, weight),
        "copy Function(4)": bare_norm_function(copied, weight),
    }
    if launch is not None:
        yield Candidate(LAUNCH, launch)
        functions["launch Function"] = bare_function(torch.empty_like, launch)
        functions["launch Function(4)"] = bare_norm_function(torch.empty_like, weight, launch)
    for name, function in functions.items():
        arguments = inputs if name.endswith("(4)") else token.leaves
        yield from _with_backward(token, name, function, arguments, arguments)
    leaves = [torch.randn_like(q).requires_grad_() for _ in range(3)]
    plain = [x.detach() for x in leaves]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor]:
        return (scaled_dot_product_attention(query, key, value, is_causal=True),)

    yield Candidate("SDPA", lambda: attention(*plain))
    yield _with_backward(token, "SDPA", attention, leaves, leaves)[1]


def _with_backward(
    token: Token, name: str, function: Callable[..., Any], arguments: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Candidate, Candidate]:
    """The function with an autograd graph, and with its backward pass to `inputs`."""
    cotangents = token.cotangents[: len(function(*arguments))]
    return (
        Candidate(name, lambda: function(*arguments)),
        Candidate(name + BACKWARD, lambda: torch.autograd.grad(function(*arguments), inputs, cotangents)),
    )


def _rotations(token: Token, rope: RotaryEmbedding, launches: bool) -> Iterator[Call]:
    """The calls without gradients. `launches` for a GPU, where a launch takes most of the time."""
    q, k, ids, n = token.q, token.k, token.ids, POSITION
    rows, angles = ids[None], rope.at(ids)
    cos, sin = (table[None, None] for table in angles)
    two: Floor = {LAUNCH: 1, EMPTY: 2} if launches else {COPY: 1}
    one: Floor = {LAUNCH: 1, EMPTY: 1} if launches else {COPY_Q: 1}
    theta = rope.inv_freq
    truths = true_rotations(token.both(), [], ids, theta, PAIRING)
    yield Call("rope(q, k, offset=n)", lambda: rope(q, k, offset=n), two, truths)
    yield Call("rope(q, k, angles=a)", lambda: rope(q, k, angles=angles), two, truths)
    yield Call("rope(q, k, positions=[S])", lambda: rope(q, k, positions=ids), two, truths)
    yield Call("rope(q, k, positions=[B, S])", lambda: rope(q, k, positions=rows), two, truths)
    start = true_rotations(token.both(), [], torch.zeros_like(ids), theta, PAIRING)
    yield Call("rope(q, k)", lambda: rope(q, k), two, start)
    yield Call("rope(q, offset=n)", lambda: rope(q, offset=n), one, truths[:1])
    # Rotated again and again in place, so that the results are those of other tensors.
    own_q, own_k = q.clone(), k.clone()
    yield Call(
        "rope.rotate_(q, k, offset=n)",
        lambda: rope.rotate_(own_q, own_k, offset=n),
        {LAUNCH: 1} if launches else two,
        truths,
        lambda: rope.rotate_(q.clone(), k.clone(), offset=n),
    )
    inverse = [Truth.of_rotation(q, ids, theta, PAIRING, True)]
    yield Call("rope.unrotate(q, offset=n)", lambda: rope.unrotate(q, offset=n), one, inverse)
    yield Call("rope.shift(q, n)", lambda: rope.shift(q, n), one, truths[:1])
    yield Call("apply_rope(q, cos, sin)", lambda: apply_rope(q, cos, sin, PAIRING), one, truths[:1])
    angle = ids[:, None].double() * theta
    # The error of cos and sin is at most 2^-24.
    tables = [
        Truth(y, torch.full_like(y, 2.0**-24), torch.ones_like(y), torch.float32) for y in (angle.cos(), angle.sin())
    ]
    yield Call("rope.at([S])", lambda: rope.at(ids), {LAUNCH: 1, EMPTY: 2} if launches else {EMPTY: 2}, tables)
    normed = true_norms(token.both(), [], token.weights, ids, theta, PAIRING, EPS)
    for name, position in (("offset=n", {"offset": n}), ("angles=a", {"angles": angles})):
        norm = _norm(rope, token.weights, **position)
        yield Call(f"qk_norm_rope(q, k, {name})", lambda norm=norm: norm(q, k), two, normed)


def _norm(rope: RotaryEmbedding, weights: Sequence[Tensor], **position: Any) -> Callable[..., Any]:
    q_weight, k_weight = weights
    return lambda q, k: qk_norm_rope(q, k, rope, q_weight=q_weight, k_weight=k_weight, eps=EPS, **position)


def _gradients(token: Token, rope: RotaryEmbedding, launches: bool) -> Iterator[Call]:
    """The calls with an autograd graph, and with their backward pass."""
    leaves, angles, theta = token.leaves, rope.at(token.ids), rope.inv_freq
    rotated = true_rotations(token.both(), token.cotangents, token.ids, theta, PAIRING)
    normed = true_norms(token.both(), token.cotangents, token.weights, token.ids, theta, PAIRING, EPS)
    norm = _norm(rope, token.learned, angles=angles)
    for name, function, kind, inputs, truths in (
        ("rope(q, k, offset=n)", lambda q, k: rope(q, k, offset=POSITION), "Function", leaves, rotated),
        ("rope(q, k, angles=a)", lambda q, k: rope(q, k, angles=angles), "Function", leaves, rotated),
        ("qk_norm_rope(q, k)", norm, "Function(4)", [*leaves, *token.learned], normed),
    ):
        graph: Floor = {kind: 1, LAUNCH: 1} if launches else {f"copy {kind}": 1}
        whole: Floor = {f"{LAUNCH if launches else COPY} {kind}{BACKWARD}": 1}
        forward, backward = _with_backward(token, name, function, leaves, inputs)
        yield Call(f"{name}, grad", forward.run, graph, truths[:2])
        yield Call(backward.name, backward.run, whole, truths[2:])


def _in_words(floor: Floor) -> str:
    """A lower bound in words, at most 21 characters."""
    parts = (f"{count} {path}" if count > 1 else path for path, count in floor.items())
    return " + ".join(parts).removesuffix(BACKWARD)


def measure_token(
    token: Token, rounds: int, calls: int, wait: Callable[[], object], launch: Callable[[], object] | None = None
) -> list[HostLine]:
    """Time every call.

    Args:
        token: The tensors.
        rounds: The number of rounds.
        calls: The number of calls per round.
        wait: Waits for the device.
        launch: Launches a kernel, on a GPU.

    Returns:
        The rows: what calls are compared with, then the calls. A call with a wrong result has no time.
    """
    rope = RotaryEmbedding(DIM, pairing=PAIRING).to(token.q.device)
    bare, launches = list(_bare(token, launch)), launch is not None
    public = [*_rotations(token, rope, launches), *_gradients(token, rope, launches)]
    errors = {call.name: call.error() for call in public}
    right = [Candidate(call.name, call.run) for call in public if errors[call.name] <= 1]
    times = timing.host_times([*bare, *right], rounds, calls, wait)
    lines = [HostLine(candidate.name, times[candidate.name]) for candidate in bare]
    for call in public:
        floor, us = sum(count * times[path] for path, count in call.floor.items()), times.get(call.name)
        ratio = None if us is None else us / floor
        lines.append(HostLine(call.name, us, _in_words(call.floor), floor, ratio, errors[call.name]))
    return lines


def measure(device: str, rounds: int, calls: int) -> list[HostLine]:
    """Time every call on `device`, "cpu" or "cuda". For the other arguments see `measure_token`."""
    token = Token(device, DTYPES[device])
    if device == "cpu":
        return measure_token(token, rounds, calls, lambda: None)
    return measure_token(token, rounds, calls, torch.cuda.synchronize, bare_launch(token.q, token.k))


def measure_linear(
    sequences: Sequences, rounds: int, calls: int, wait: Callable[[], object], token: Sequence[HostLine]
) -> list[HostLine]:
    """Time linear attention.

    Args:
        sequences: The tensors.
        rounds: The number of rounds.
        calls: The number of calls per round, at most `CALLS` of which are used.
        wait: Waits for the device.
        token: The rows of `measure_token` in the same run: a launch and an allocation are yardsticks here too.

    Returns:
        The rows, as of `measure_token`.
    """
    times = {line.path: line.us for line in token if line.floor is None and line.us is not None}
    launches = LAUNCH in times
    bare, public = linear_yardsticks(sequences, launches), linear_calls(sequences, launches)
    errors = {call.name: call.error() for call in public}
    right = [Candidate(call.name, call.run) for call in public if errors[call.name] <= 1]
    times |= timing.host_times([*bare, *right], rounds, min(calls, CALLS), wait)
    lines = [HostLine(candidate.name, times[candidate.name]) for candidate in bare]
    for call in public:
        floor, us = sum(count * times[path] for path, count in call.floor.items()), times.get(call.name)
        ratio = None if us is None else us / floor
        lines.append(HostLine(call.name, us, _in_words(call.floor), floor, ratio, errors[call.name]))
    return lines


def _shown(device: str, lines: Sequence[HostLine]) -> str:
    """The table, at most 80 columns wide."""

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    header = f"{'us':>8}{'floor':>7}{'ratio':>7}{'most':>6}  floor is"
    text = [f"{'yardsticks of the same run':<29}{'us':>8}"]
    text += [f"{line.path:<29}{number(line.us, 1):>8}" for line in lines if line.floor is None]
    text += ["", f"{'call':<29}{header}"]
    for line in lines:
        if line.floor is None:
            continue
        most, most_us = host_limit(device, line.path), host_limit_us(device, line.path)
        limit = number(most, 2) if most_us is None else f"{most_us:.0f}us"
        text.append(
            f"{line.path:<29}{number(line.us, 1) or 'wrong':>8}{number(line.floor_us, 1):>7}"
            f"{number(line.ratio, 2):>7}{limit:>6}  {line.floor}"
        )
    return "\n".join(line.rstrip() for line in text) + "\n"


def bench_host(device: str | None = None, json_file: str | None = None, quick: bool = False) -> int:
    """Time every public eager call for one token and print a table. Exits with 1 if a result is wrong."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    asked = f"ropewalk bench host --device {device}"
    reasons = backend_reasons()
    reason = reasons["triton"]
    if require_choice(device, tuple(DTYPES), asked=asked) == "cuda" and (reason or not torch.cuda.is_available()):
        raise RopewalkError(
            asked=asked,
            expected="a CUDA device and Triton",
            got=reason or "no CUDA device",
            do="use a machine with a GPU, or --device cpu",
        )
    if json_file is not None:
        require_writable_file(json_file, asked=f"ropewalk bench host --json {json_file}")
    show = sys.stderr if json_file == "-" else sys.stdout
    rounds, calls = (5, 50) if quick else (31, 200)
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    dtype = str(DTYPES[device]).removeprefix("torch.")
    show.write(
        textwrap.fill(f"{gpu or processor()}: host time of one call, medians of {rounds} interleaved rounds.", 80)
        + "\n"
        f"q (1, {Q_HEADS}, 1, {DIM}), k (1, {K_HEADS}, 1, {DIM}), {dtype}, {PAIRING}; position n.\n"
        "grad: with an autograd graph; fwd+bwd: with autograd.grad. Function: one of\n"
        "autograd, of q and k, that computes nothing; (4): of q, k and two weights.\n"
        "ratio: us / floor; most: the limit for ropewalk, where there is one.\n"
        f"linear: linear_attention(q, k, v, rope=rope), (1, {HEADS}, N, {LINEAR_DIM}); step: one token\n"
        "with state= and return_state=True, interleaved.\n\n"
    )
    show.flush()
    lines = measure(device, rounds, calls)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    # On a CPU only a step is timed, which does not need a long sequence.
    sequences = Sequences(device, DTYPES[device], LENGTH if device == "cuda" else 1)
    linear = measure_linear(sequences, rounds, calls, wait, lines)
    show.write(_shown(device, [*lines, *linear]) + "\n")
    case = {"shape": [1, 1, Q_HEADS, K_HEADS, DIM], "dtype": dtype, "pairing": PAIRING}
    cases = [case | {"lines": [asdict(line) for line in lines]}]
    case = {"kind": "linear", "shape": [1, HEADS, LENGTH, LINEAR_DIM], "dtype": dtype, "pairing": "interleaved"}
    cases.append(case | {"lines": [asdict(line) for line in linear]})
    # Signatures of tensors are read in C, also for calls on a GPU.
    slower = [] if reasons["native"] is None else [f"all calls take longer: {reasons['native']}"]
    missed = slower + host_floors(device, cases)
    show.write(shown_missed(missed) + "\n")
    if json_file is not None:
        machine = {"machine": platform.machine(), "processor": processor(), "threads": torch.get_num_threads()}
        packages = ("torch", "triton")
        record = {
            "command": f"ropewalk bench host --device {device}" + (" --quick" if quick else ""),
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": {"gpu": gpu} | machine,
            "versions": {"python": platform.python_version()}
            | {package: package_version(package) for package in packages},
            "device": device,
            "rounds": rounds,
            "calls": calls,
            "cases": cases,
        }
        write_record(record, json_file, missed)
    return int(any(line.us is None for line in (*lines, *linear)))


def main() -> None:
    """`python -m ropewalk.tools.bench.host`."""
    parser = argparse.ArgumentParser(prog="python -m ropewalk.tools.bench.host", description=bench_host.__doc__)
    parser.add_argument("--device", metavar="cpu|cuda", help="the device; default: CUDA if available")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    options = parser.parse_args()
    try:
        raise SystemExit(bench_host(options.device, options.json, options.quick))
    except RopewalkError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
