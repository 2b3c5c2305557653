"""The rows of linear attention in `ropewalk bench host`: a long call, its backward pass, and a decode step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.tools.bench.attention_truth import LIMITS, Truth, checked_tokens
from ropewalk.tools.bench.bare import copied
from ropewalk.tools.bench.timing import Candidate

__all__ = ["CALLS", "LinearCall", "Sequences", "linear_calls", "linear_yardsticks"]

HEADS, DIM, LENGTH, PROMPT = 16, 64, 4096, 100

# The names of the rows. `linear` is linear_attention(q, k, v, rope=rope).
LONG, STEP, BACKWARD = f"linear, N={LENGTH}", "linear step", ", fwd+bwd"
SDPA, STATE = f"SDPA, N={LENGTH}", "copy of state"

# The number of calls per round: all launches of forward and backward passes must fit into the queue of the device.
CALLS = 50


@dataclass(frozen=True)
class LinearCall:
    """A call of linear attention.

    Attributes:
        name: Its name in the table.
        run: The call.
        floor: Its lower bound: how often each yardstick is part of it.
        error: Returns the largest relative error of its results, divided by the allowed one.
    """

    name: str
    run: Callable[[], object]
    floor: dict[str, int]
    error: Callable[[], float]


class Sequences:
    """q, k and v of a long sequence and of a prompt with the token after it, and a rope.

    Args:
        device: The device.
        dtype: The dtype.
        length: The number of tokens of the long sequence.
    """

    def __init__(self, device: str, dtype: torch.dtype, length: int = LENGTH) -> None:
        def draw(tokens: int) -> Tensor:
            return torch.randn(1, HEADS, tokens, DIM, device=device).to(dtype)

        self.rope: RotaryEmbedding = RotaryEmbedding(DIM).to(device)
        self.long: list[Tensor] = [draw(length) for _ in range(3)]
        self.leaves: list[Tensor] = [x.clone().requires_grad_() for x in self.long]
        self.cotangent: Tensor = draw(length)
        self.short: list[Tensor] = [draw(PROMPT + 1) for _ in range(3)]
        self.limit: float = LIMITS[str(dtype).removeprefix("torch.")]

    def whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The long call."""
        return linear_attention(q, k, v, rope=self.rope)

    def error(self) -> float:
        """The error of the long call, in allowed errors."""
        return Truth("rope", self.long, None).error([self.whole(*self.long)]) / self.limit

    def gradient_error(self) -> float:
        """The same for its output and gradients."""
        tokens = checked_tokens(self.cotangent.shape[2], middle=False).to(self.cotangent.device)
        sparse = torch.zeros_like(self.cotangent)
        sparse[:, :, tokens] = self.cotangent[:, :, tokens]
        out = self.whole(*self.leaves)
        results = [out.detach(), *torch.autograd.grad(out, self.leaves, sparse)]
        return Truth("rope", self.long, sparse).error(results) / self.limit


class Steps:
    """Decode steps. Every step continues from the state that the one before returned."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences: Sequences = sequences
        self.token: list[Tensor] = [x[:, :, PROMPT:].contiguous() for x in sequences.short]
        self.state: Any = self.prompt()[1]

    def prompt(self) -> tuple[Tensor, Any]:
        """The output of the prompt, and the state after it."""
        prompt = (x[:, :, :PROMPT] for x in self.sequences.short)
        return linear_attention(*prompt, rope=self.sequences.rope, return_state=True)

    def step(self) -> None:
        """The next token, always with the same q, k and v."""
        q, k, v = self.token
        _, self.state = linear_attention(q, k, v, rope=self.sequences.rope, state=self.state, return_state=True)

    def error(self) -> float:
        """The error of a prompt and the token after it, in allowed errors."""
        first, state = self.prompt()
        last, _ = linear_attention(*self.token, rope=self.sequences.rope, state=state, return_state=True)
        out = torch.cat((first, last), dim=2)
        return Truth("rope", self.sequences.short, None).error([out]) / self.sequences.limit


def linear_yardsticks(sequences: Sequences, launches: bool) -> list[Candidate]:
    """What the calls are compared with. `launches` for a GPU, where SDPA of the same tensors is one of them."""
    state = torch.randn(1, HEADS, DIM, DIM, device=sequences.cotangent.device)
    yardsticks = [Candidate(STATE, lambda: copied(state))]
    if not launches:
        return yardsticks

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    leaves, cotangent = sequences.leaves, sequences.cotangent
    return [
        *yardsticks,
        Candidate(SDPA, lambda: attention(*sequences.long)),
        Candidate(SDPA + BACKWARD, lambda: torch.autograd.grad(attention(*leaves), leaves, cotangent)),
    ]


def linear_calls(sequences: Sequences, launches: bool) -> list[LinearCall]:
    """The calls: on a GPU the long one, its forward and backward pass, and a step; on a CPU a step."""
    steps = Steps(sequences)
    if not launches:
        return [LinearCall(STEP, steps.step, {STATE: 1}, steps.error)]
    leaves, cotangent = sequences.leaves, sequences.cotangent
    return [
        LinearCall(LONG, lambda: sequences.whole(*sequences.long), {"launch": 3, "empty_like": 1}, sequences.error),
        LinearCall(
            LONG + BACKWARD,
            lambda: torch.autograd.grad(sequences.whole(*leaves), leaves, cotangent),
            {SDPA + BACKWARD: 1},
            sequences.gradient_error,
        ),
        LinearCall(STEP, steps.step, {"launch": 1, "empty_like": 3}, steps.error),
    ]
