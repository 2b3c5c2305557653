"""RoPE as two functions, without a module: build_rotary_frequencies and apply_rope."""

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice, require_count, require_even, shown
from ropewalk.kernels.constructors import arange, default_device, ones, placed
from ropewalk.kernels.precision import FLOATS, working_dtype
from ropewalk.kernels.types import Layout
from ropewalk.nn.memory_layout import check_strided
from ropewalk.nn.rotary.spec_numbers import plain_frequencies
from ropewalk.nn.rotary.tables import advice_on_width
from ropewalk.ops import cos_sin, rotate
from ropewalk.signatures import checks_names
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import PAIRINGS, Pairing

__all__ = ["apply_rope", "build_rotary_frequencies"]


@checks_names
def build_rotary_frequencies(
    dim_head: int, max_seq_len: int, base: float = 10_000.0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of m * base^(-2i/dim_head) for positions m = 0 .. max_seq_len-1.

    Angles are computed in float64 and rounded once. A float32 angle would have an error of 8e-3 at position 131072.

    Args:
        dim_head: Number of features per head. It must be even.
        max_seq_len: Number of positions, which is the number of rows of the tables.
        base: Base of the frequencies.
        device: Device of the tables; None for the default device.

    Returns:
        cos and sin, each float32 [1, 1, max_seq_len, dim_head / 2].

    Raises:
        RopewalkError: If `dim_head` is odd, or if `base` or `max_seq_len` is invalid.

    >>> cos, sin = build_rotary_frequencies(dim_head=4, max_seq_len=3)
    >>> cos.shape, round(cos[0, 0, 2, 0].item(), 4)  # cos 2
    (torch.Size([1, 1, 3, 2]), -0.4161)
    """
    dim = require_even(dim_head, asked="build_rotary_frequencies(dim_head)", do="pass an even dim_head")
    length = require_count(
        max_seq_len, asked="build_rotary_frequencies(max_seq_len)", do="pass the number of positions", at_least=0
    )
    target = default_device() if device is None else torch.device(device)
    # Angles are computed in float64, which MPS does not have.
    compute_device = torch.device("cpu") if target.type in ("meta", "mps") else target
    inv_freq = placed(plain_frequencies(Plain(base).base, dim), compute_device)
    positions = arange(length, device=compute_device)
    one = ones((), dtype=torch.float64, device=compute_device)
    cos, sin = cos_sin(positions, inv_freq, None, one, torch.float32)
    return cos[None, None].to(target), sin[None, None].to(target)


@checks_names
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing = "interleaved") -> Tensor:
    """Rotate x by the first `seq` rows of cos and sin, in one pass over memory. Differentiable in x, cos and sin.

    (a, b) -> (a cos - b sin, a sin + b cos) for each pair (RoFormer, 2104.09864, eq. 34), computed in float32 (float64
    for float64) and rounded once. Rows past the length of x are ignored, so one table works for every shorter
    sequence.

    Args:
        x: Queries or keys [batch, heads, seq, dim].
        cos: Table [1 or batch, 1 or heads, seq or more, dim / 2], float32 or float64.
        sin: Table of the same shape and dtype as `cos`.
        pairing: "interleaved" pairs (0, 1), (2, 3), ...; "half" pairs (i, i + dim/2).

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        RopewalkError: If the tables do not match x, or if they are bfloat16 or float16, which are too inexact.

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
    """Return the first `seq` rows, without the dimensions for batch and heads if both are 1."""
    table = table[0, 0] if table.shape[:2] == (1, 1) else table
    return table if table.shape[-2] == seq else table[..., :seq, :]


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        check_strided(tensor, asked=f"apply_rope({name})")
        if not isinstance(tensor, Tensor) or tensor.dim() != 4 or tensor.dtype not in FLOATS:
            raise RopewalkError(
                asked=f"apply_rope({name})",
                expected="a floating-point torch.Tensor with 4 dimensions: x [batch, heads, seq, dim], cos and sin "
                "[1 or batch, 1 or heads, seq or more, dim/2]",
                got=f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else shown(tensor),
                do=_advice(x, tensor)
                or "create cos and sin with build_rotary_frequencies; for other layouts use RotaryEmbedding",
            )
        if name != "x" and (tensor.dtype not in (torch.float32, torch.float64) or tensor.device != x.device):
            raise RopewalkError(
                asked=f"apply_rope({name})",
                expected=f"float32 or float64 on {x.device}, the device of x",
                got=f"{tensor.dtype} on {tensor.device}",
                do="build the tables again; a table that was cast with a model is no longer exact",
            )
    fits = cos.shape == sin.shape and all(cos.shape[i] in (1, x.shape[i]) for i in (0, 1))
    if not fits or cos.shape[2] < x.shape[2] or 2 * cos.shape[3] != x.shape[3]:
        raise RopewalkError(
            asked="apply_rope(x, cos, sin)",
            expected="x [batch, heads, seq, dim]; cos and sin both [1 or batch, 1 or heads, seq or more, dim/2]",
            got=f"x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}",
            do=(_advice(x, cos) if cos.shape == sin.shape else None)
            or "create cos and sin with build_rotary_frequencies(dim, seq)",
        )


def _advice(x: object, table: object) -> str | None:
    """The fix for tables of other libraries: full width, or without dimensions for batch and heads; else None."""
    if not isinstance(x, Tensor) or x.dim() != 4 or not isinstance(table, Tensor) or table is x or not table.dim():
        return None
    if table.is_complex():
        return "pass freqs.real as cos and freqs.imag as sin, as [1 or batch, 1 or heads, seq, dim/2]"
    width = advice_on_width(table, x.shape[-1] // 2)
    dims = {2: "cos[None, None]", 3: "cos[:, None]"}.get(table.dim())
    steps = [step for step in (width, dims and f"{dims} for batch and heads") if step]
    return f"pass {', then '.join(steps)}; and the same for sin" if steps else None
