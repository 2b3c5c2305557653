"""Checks of tables of cos and sin that a caller passes, with fixes for the tables of other libraries."""

from typing import NoReturn

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, shown
from ropewalk.kernels.precision import working_dtype
from ropewalk.nn.memory_layout import check_strided, is_strided
from ropewalk.nn.rotary.call import Angles

__all__ = ["advice_on_width", "check_angles"]

_HALVES = (torch.bfloat16, torch.float16)


def check_angles(angles: object, x: Tensor, pairs: int, seq_dim: int, call: str = "rope") -> Angles:
    """Return cos and sin in the working dtype of x, if their shapes match x.

    Tables of flash-attention and Liger have the dtype of q, so bfloat16 and float16 are accepted and converted to
    float32. The precision that they lost stays lost.

    Args:
        angles: The argument to check: a tuple of cos and sin.
        x: The tensor to rotate.
        pairs: Number of pairs.
        seq_dim: Dimension of the sequence.
        call: The function, as errors name it.

    Returns:
        cos and sin.

    Raises:
        RopewalkError: If a shape, dtype or device does not match.

    >>> x = torch.ones(3, 4)
    >>> check_angles((torch.ones(3, 2), torch.zeros(3, 2)), x, 2, -2)[0].shape
    torch.Size([3, 2])
    """
    if isinstance(angles, tuple) and len(angles) == 2 and all(isinstance(table, Tensor) for table in angles):
        cos, sin = angles
        work = working_dtype(x)
        fits = is_strided(cos) and is_strided(sin) and cos.shape == sin.shape and cos.dtype == sin.dtype
        fits = fits and cos.device == sin.device == x.device
        fits = fits and (cos.dtype == work or (cos.dtype in _HALVES and work == torch.float32))
        if fits and _tables_fit(cos, x, pairs, seq_dim):
            return (cos, sin) if cos.dtype == work else (cos.to(work), sin.to(work))
    _raise_angles(angles, x, pairs, seq_dim, call)


def advice_on_width(table: Tensor, pairs: int) -> str | None:
    """Return the fix for tables of full width, in which each number is stored twice; None for any other width.

    transformers stores cos(m theta_i) at i and i + pairs, for pairs (i, i + pairs). Code for interleaved pairs stores
    it at 2i and 2i + 1. The values show which of the two it is, if they can be read.

    Args:
        table: cos or sin [..., width].
        pairs: Number of pairs.

    >>> advice_on_width(torch.tensor([[1.0, 0.5, 1.0, 0.5]]), 2)
    'cos[..., :2], because the table contains each number twice'
    >>> advice_on_width(torch.ones(3, 2), 2) is None
    True
    """
    if pairs == 0 or table.shape[-1] != 2 * pairs:
        return None
    halves, in_a_row = f"cos[..., :{pairs}]", "cos[..., ::2]"
    if table.device.type == "cpu" and not torch.compiler.is_compiling() and type(table) is Tensor:
        of_halves = torch.equal(table[..., :pairs], table[..., pairs:])
        of_rows = torch.equal(table[..., ::2], table[..., 1::2])
        if of_halves != of_rows:
            return f"{halves if of_halves else in_a_row}, because the table contains each number twice"
    return f"{halves}, or {in_a_row} if the table contains each number twice in a row"


def _tables_fit(table: Tensor, x: Tensor, pairs: int, seq_dim: int) -> bool:
    dims = table.dim()
    if dims not in (2, 3, 4) or tuple(table.shape[-2:]) != (x.shape[seq_dim], pairs):
        return False
    if dims == 3:
        return x.dim() > -seq_dim and table.shape[0] in (1, x.shape[0])
    if dims == 4:
        heads = x.shape[-3 if seq_dim == -2 else -2] if x.dim() >= 3 else 0
        batches = table.shape[0] == 1 or (x.dim() == 4 and table.shape[0] == x.shape[0])
        return x.dim() in (3, 4) and table.shape[1] in (1, heads) and batches
    return True


def _raise_angles(angles: object, x: Tensor, pairs: int, seq_dim: int, call: str) -> NoReturn:
    """Raise the error for cos and sin that do not match, with a fix for the tables of other libraries."""
    for table in angles if isinstance(angles, tuple) else ():
        check_strided(table, asked=f"{call}(..., angles=...)")
    seq = x.shape[seq_dim]
    do = "call rope.at(positions), with dtype=torch.float64 for float64, on the device of the input"
    if isinstance(angles, tuple) and len(angles) == 2 and all(isinstance(table, Tensor) for table in angles):
        cos, sin = angles
        got = f"cos {cos.dtype} {list(cos.shape)} on {cos.device}, sin {sin.dtype} {list(sin.shape)} on {sin.device}"
        do = _advice(cos, sin, x, pairs, seq_dim) or do
    elif isinstance(angles, Tensor) and angles.is_complex():
        got, do = f"{angles.dtype} {list(angles.shape)}", "pass angles=(freqs.real, freqs.imag)"
    else:
        got = shown(angles) if isinstance(angles, Tensor) else repr(type(angles))
        do = "pass a tuple: angles=(cos, sin)" if isinstance(angles, list) and len(angles) == 2 else do
    raise RopewalkError(
        asked=f"{call}(..., angles=...) for {x.dtype} of shape {list(x.shape)} on {x.device}",
        expected=f"cos and sin [{seq}, {pairs}], [batch, {seq}, {pairs}] or [1 or batch, heads, {seq}, {pairs}], as "
        "rope.at(positions) returns them; float32, bfloat16 or float16 (float64 for float64)",
        got=got,
        do=do,
    )


def _advice(cos: Tensor, sin: Tensor, x: Tensor, pairs: int, seq_dim: int) -> str | None:
    """The fix for tables of a shape or dtype that other libraries use; None for any other."""
    seq, shape, slices = x.shape[seq_dim], tuple(cos.shape), []
    heads = x.shape[-3 if seq_dim == -2 else -2] if x.dim() >= 3 else 0
    if cos.shape != sin.shape or cos.dim() not in (2, 3, 4):
        return None
    if shape[-3:] == (seq, 1, pairs):
        return "pass cos.squeeze(-2), and the same for sin: tables that all heads share have no dimension for heads"
    if cos.dim() == 4 and shape[1:] == (seq, heads, pairs) != (heads, seq, pairs):
        return "pass cos.transpose(1, 2), and the same for sin: tables are [batch, heads, seq, pairs] for any seq_dim"
    if shape[-2] > seq:
        # Tables of the whole context: the tokens use the first rows.
        slices.append(("cos[:seq]" if cos.dim() == 2 else "cos[..., :seq, :]") + f" with seq = {seq}")
    width = advice_on_width(cos, pairs)
    if width is not None:
        slices.append(width)
    if shape == (heads, seq, pairs):
        slices.append("cos[None] for tables per head, [1 or batch, heads, seq, d/2]: three dimensions are a batch")
    if slices:
        return "pass " + ", then ".join(slices) + "; and the same for sin"
    if cos.dim() == 4 and shape[-2:] == (seq, pairs):
        return "rotate q and k in two calls: tables per head must have as many heads as the tensor"
    narrower = x.dtype != torch.float64 and cos.is_floating_point() and cos.device == sin.device == x.device
    if narrower and _tables_fit(cos, x, pairs, seq_dim):
        return "cast both: cos.to(torch.float32), and the same for sin"
    return None
