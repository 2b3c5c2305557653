"""build_rotary_frequencies and apply_rope: RoPE as two functions, without a module."""

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice, require_count, require_even, shown
from ropewalk.kernels.constructors import arange, default_device, ones, placed
from ropewalk.kernels.precision import FLOATS, working_dtype
from ropewalk.kernels.types import Layout
from ropewalk.nn.memory_layout import check_strided
from ropewalk.nn.rotary.spec_numbers import plain_frequencies
from ropewalk.ops import cos_sin, rotate
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import PAIRINGS, Pairing

__all__ = ["apply_rope", "build_rotary_frequencies"]


def build_rotary_frequencies(
    dim_head: int, max_seq_len: int, base: float = 10_000.0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of m * base^(-2i/dim_head) for positions m = 0 .. max_seq_len-1.

    Angles are formed in float64 and rounded once. A float32 angle would be off by 8e-3 at position 131072.

    Args:
        dim_head: How many features a head has, even.
        max_seq_len: How many positions the tables have.
        base: The base of the frequencies.
        device: Where the tables are made; the default device unless given.

    Returns:
        cos and sin, each float32 [1, 1, max_seq_len, dim_head / 2].

    Raises:
        RopewalkError: dim_head is odd, or the base or the length cannot be used.

    >>> cos, sin = build_rotary_frequencies(dim_head=4, max_seq_len=3)
    >>> cos.shape, round(cos[0, 0, 2, 0].item(), 4)  # cos 2
    (torch.Size([1, 1, 3, 2]), -0.4161)
    """
    dim = require_even(dim_head, asked="build_rotary_frequencies(dim_head)", do="pass an even dim_head")
    length = require_count(
        max_seq_len, asked="build_rotary_frequencies(max_seq_len)", do="pass how many positions", at_least=0
    )
    target = default_device() if device is None else torch.device(device)
    # Angles are formed in float64, which MPS does not have.
    there = torch.device("cpu") if target.type in ("meta", "mps") else target
    inv_freq = placed(plain_frequencies(Plain(base).base, dim), there)
    positions = arange(length, device=there)
    one = ones((), dtype=torch.float64, device=there)
    cos, sin = cos_sin(positions, inv_freq, None, one, torch.float32)
    return cos[None, None].to(target), sin[None, None].to(target)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing = "interleaved") -> Tensor:
    """Rotates x by the first `seq` rows of cos and sin, in one pass over memory, with gradients in everything.

    (a, b) -> (a cos - b sin, a sin + b cos) for each pair (RoFormer, 2104.09864, eq. 34), computed in float32 (float64
    for float64) and rounded once. Rows past the length of x are not used: one table is enough for every shorter
    sequence.

    Args:
        x: [batch, heads, seq, dim].
        cos: [1 or batch, 1 or heads, seq or more, dim / 2], float32 or float64.
        sin: Like cos.
        pairing: Which features form a pair: "interleaved" or "half".

    Returns:
        x rotated, in its dtype.

    Raises:
        RopewalkError: The tables do not fit x, or were cast with a model and have lost their angles.

    >>> cos, sin = build_rotary_frequencies(dim_head=2, max_seq_len=8)
    >>> x = torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2)
    >>> apply_rope(x, cos, sin)[0, 0, 2].tolist() == [cos[0, 0, 2, 0].item(), sin[0, 0, 2, 0].item()]
    True
    """
    require_choice(pairing, PAIRINGS, asked="apply_rope(pairing=...)")
    _check(x, cos, sin)
    working, seq = working_dtype(x), x.shape[2]
    tables = [_narrow(table, seq).to(working) for table in (cos, sin)]
    return rotate(x, None, tables[0], tables[1], Layout(pairing == "interleaved", 0, -2))[0]


def _narrow(table: Tensor, seq: int) -> Tensor:
    """The rows of the tokens; without dimensions that all batches and heads share."""
    table = table[0, 0] if table.shape[:2] == (1, 1) else table
    return table if table.shape[-2] == seq else table[..., :seq, :]


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        check_strided(tensor, asked=f"apply_rope({name})")
        if not isinstance(tensor, Tensor) or tensor.dim() != 4 or tensor.dtype not in FLOATS:
            raise RopewalkError(
                asked=f"apply_rope({name})",
                expected="a torch.Tensor, floating-point, of 4 dimensions: x [batch, heads, seq, dim]",
                got=f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else shown(tensor),
                do="build_rotary_frequencies makes cos and sin; for other layouts use RotaryEmbedding",
            )
        if name != "x" and (tensor.dtype not in (torch.float32, torch.float64) or tensor.device != x.device):
            raise RopewalkError(
                asked=f"apply_rope({name})",
                expected=f"float32 or float64 on {x.device}, where x is",
                got=f"{tensor.dtype} on {tensor.device}",
                do="build the tables anew: one that was cast with a model has lost its angles",
            )
    fits = cos.shape == sin.shape and all(cos.shape[i] in (1, x.shape[i]) for i in (0, 1))
    if not fits or cos.shape[2] < x.shape[2] or 2 * cos.shape[3] != x.shape[3]:
        raise RopewalkError(
            asked="apply_rope(x, cos, sin)",
            expected="x [batch, heads, seq, dim]; cos and sin alike, [1 or batch, 1 or heads, seq or more, dim/2]",
            got=f"x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}",
            do="build_rotary_frequencies(dim, seq) makes cos and sin that fit",
        )
