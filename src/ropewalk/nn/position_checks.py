"""Checks of the tensors that say where tokens are: position ids, ends of packed sequences, rows of a batch.

Everything in nn that accepts them shares these checks. Each is told by `asked` what its caller was asked, which is the
first line of the error. A message is formatted only when it is raised: to print a length, a compiler would have to
specialize on it.
"""

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, shown
from ropewalk.kernels.torch_internals import is_plain
from ropewalk.nn.memory_layout import check_strided

__all__ = [
    "as_signed",
    "check_ends",
    "check_finite",
    "check_ids",
    "check_index",
    "check_positions",
    "described",
    "may_look",
]

# Dtypes that can count: bfloat16 has no 257, float16 no 2049.
_COUNTING = {torch.float32, torch.float64, torch.uint8, torch.int8}
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
_COUNTING |= {torch.int16, torch.int32, torch.int64} | _UNSIGNED


def may_look(ids: Tensor) -> bool:
    """Whether the values of `ids` can be read without a device synchronization or a graph break.

    >>> may_look(torch.arange(2)), may_look(torch.arange(2, device="meta"))
    (True, False)
    """
    return is_plain(ids) and ids.device.type == "cpu"


def check_ids(
    ids: Tensor,
    *,
    asked: str,
    shape: str | None = None,
    dims: tuple[int, ...] = (1, 2),
    whole: bool = False,
    axes: int = 1,
) -> None:
    """Raise unless `ids` is a tensor of a dtype that can count and of an accepted rank.

    Complex, bool and half-precision tensors are rejected; `whole` rejects float32 and float64 too. With several `axes`
    the first dimension must be `axes`, and `dims` and `shape` are ignored.

    >>> try:
    ...     check_ids(torch.tensor([True]), asked="a doctest")
    ... except RopewalkError as error:
    ...     print(error.asked, "|", error.got)
    a doctest | torch.bool [1]
    """
    check_strided(ids, asked=asked)
    if axes > 1:
        dims, shape = (2, 3), f"[{axes}, seq] or [{axes}, batch, seq]"
    counts = isinstance(ids, Tensor) and ids.dtype in _COUNTING
    if counts and ids.dim() in dims and not (whole and ids.is_floating_point()) and (axes == 1 or len(ids) == axes):
        if ids.dtype == torch.uint64:
            _check_uint64(ids, asked)
        return
    raise RopewalkError(
        asked=asked,
        expected=f"a tensor {shape or '[seq] or [batch, seq]'} of whole numbers"
        + ("" if whole else ", float32 or float64"),
        got=f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else shown(ids),
        do="wrap them: torch.tensor(...)"
        if not isinstance(ids, Tensor)
        else "give them that shape; ropewalk.positions makes them for several axes"
        if counts
        else "pass int64; half-precision floats cannot count past 256 or 2048",
    )


def _check_uint64(ids: Tensor, asked: str) -> None:
    """Raise unless int64 holds every number: that of 2^63 would be negative."""
    if may_look(ids) and not bool((ids.view(torch.int64) < 0).any()):
        return
    raise RopewalkError(
        asked=asked,
        expected="whole numbers below 2^63; int64 where their values are not looked at, on a GPU or under a compiler",
        got=f"{ids.dtype} {list(ids.shape)}",
        do="pass int64",
    )


def as_signed(ids: Tensor) -> Tensor:
    """`ids` that `check_ids` accepted, with int64 for the unsigned dtypes for which torch has few operations.

    >>> as_signed(torch.tensor([3], dtype=torch.uint16)).dtype, as_signed(torch.tensor([3.0])).dtype
    (torch.int64, torch.float32)
    """
    return ids.to(torch.int64) if ids.dtype in _UNSIGNED else ids


def check_positions(
    positions: Tensor, x: Tensor, *, asked: str, seq_dim: int = -2, batched: bool = True, axes: int = 1
) -> None:
    """Raise unless `positions` has one number per token of `x` and per axis, on the device of `x`.

    >>> check_positions(torch.arange(3), torch.zeros(2, 3, 8), asked="a doctest")
    """
    check_ids(positions, asked=asked, axes=axes)
    leading = positions.shape[:-1] if axes == 1 else positions.shape[1:-1]
    rows = len(leading) == 0 or (batched and leading[0] in (1, x.shape[0]))
    if positions.shape[-1] != x.shape[seq_dim] or not rows:
        seq, first = x.shape[seq_dim], "" if axes == 1 else f"{axes}, "
        raise RopewalkError(
            asked=asked,
            expected=f"positions [{first}{seq}]" + (f" or [{first}{x.shape[0]}, {seq}]" if batched else ""),
            got=f"{list(positions.shape)}, for a tensor of shape {list(x.shape)}",
            do="give each token its position; the batch is the first dimension of x",
        )
    if positions.device != x.device:
        raise RopewalkError(
            asked=asked,
            expected=f"positions on {x.device}, where x is",
            got=f"positions on {positions.device}",
            do=f"make them there, or move them once: positions.to({str(x.device)!r})",
        )


def check_finite(positions: Tensor, *, asked: str) -> None:
    """Raise if a position is NaN or infinite.

    >>> check_finite(torch.tensor([0.5]), asked="a doctest")
    """
    if positions.is_floating_point() and not torch.isfinite(positions).all():
        got, do = "NaN or infinity", "look at what made them"
        raise RopewalkError(asked=asked, expected="finite positions", got=got, do=do)


def check_ends(cu_seqlens: Tensor, seq: int, *, asked: str) -> None:
    """Raise unless `cu_seqlens` are cumulated lengths from 0 to at most `seq`.

    >>> check_ends(torch.tensor([0, 2, 5]), 5, asked="a doctest")
    """
    ends = cu_seqlens.tolist()
    if ends[:1] != [0] or ends != sorted(ends) or ends[-1] > seq:
        raise RopewalkError(
            asked=asked,
            expected=f"ends of sequences that start at 0, never fall, and reach at most {seq}, the number of tokens",
            got=f"{ends if len(ends) <= 12 else [*ends[:11], '...']}",
            do="cumulate the lengths and put a 0 before them; lay all sequences of a batch end to end",
        )


def check_index(index: Tensor, sequences: int, device: torch.device, *, asked: str, number: int | None = None) -> None:
    """Raise unless `index` names rows of a batch of `sequences`: `number` of them, or any number.

    >>> check_index(torch.tensor([1, 1]), 2, torch.device("cpu"), asked="a doctest")
    """
    fits = isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and index.device == device
    fits = fits and index.dim() == 1 and number in (None, len(index))
    if fits and (not may_look(index) or bool(((index >= 0) & (index < sequences)).all())):
        return
    raise RopewalkError(
        asked=asked,
        expected=f"whole numbers [{'any' if number is None else number}] from 0 to {sequences - 1}, on {device}",
        got=f"{index.tolist()}" if fits else described(index),
        do="pass, for each sequence that goes on, the one that it goes on from",
    )


def described(x: object) -> str:
    """A tensor as an error shows it: dtype, shape and device; anything else by its repr.

    >>> described(torch.zeros(2, 3))
    'torch.float32 [2, 3] on cpu'
    """
    return f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else shown(x)
