"""Checks of index tensors: position ids, cumulated lengths of packed sequences, and rows of a batch.

All modules in `nn` share these checks. The argument `asked` is the first line of the error: the call and the argument
that were rejected. A message is formatted only when it is raised: formatting a length under torch.compile would
specialize the graph on it.
"""

import itertools

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, shown, warn
from ropewalk.kernels.constructors import ones_like
from ropewalk.kernels.torch_internals import is_plain
from ropewalk.nn.memory_layout import check_strided

__all__ = [
    "as_signed",
    "can_read_values",
    "check_ends",
    "check_finite",
    "check_ids",
    "check_index",
    "check_key_mask",
    "check_packed",
    "check_positions",
    "described",
    "warn_if_positions_restart",
    "warn_if_row_is_hidden",
]

# Dtypes for positions. bfloat16 cannot represent 257, and float16 cannot represent 2049.
_COUNTING = {torch.float32, torch.float64, torch.uint8, torch.int8}
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
_COUNTING |= {torch.int16, torch.int32, torch.int64} | _UNSIGNED


def can_read_values(ids: Tensor) -> bool:
    """Whether the values of `ids` can be read without a device synchronization or a graph break.

    >>> can_read_values(torch.arange(2)), can_read_values(torch.arange(2, device="meta"))
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
    """Raise unless `ids` has a dtype that represents positions exactly, and an accepted number of dimensions.

    Complex, bool and half-precision tensors are rejected.

    Args:
        ids: Tensor to check.
        asked: The first line of the error.
        shape: The accepted shapes, as text for the error. None is "[seq] or [batch, seq]".
        dims: The accepted numbers of dimensions.
        whole: Reject float32 and float64 too.
        axes: Number of position axes. If it is above 1, the first dimension must be `axes`, and `dims` and `shape` are
            ignored.

    Raises:
        RopewalkError: If the dtype or the shape is not accepted.

    >>> try:
    ...     check_ids(torch.tensor([True]), asked="a doctest")
    ... except RopewalkError as error:
    ...     print(error.asked, "|", error.got)
    a doctest | torch.bool [1]
    """
    check_strided(ids, asked=asked)
    if axes > 1:
        dims, shape = (2, 3), f"[{axes}, seq] or [{axes}, batch, seq]"
    is_exact = isinstance(ids, Tensor) and ids.dtype in _COUNTING
    if is_exact and ids.dim() in dims and not (whole and ids.is_floating_point()) and (axes == 1 or len(ids) == axes):
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
        else "reshape them; the functions in ropewalk.positions return positions for several axes"
        if is_exact
        else "pass int64; bfloat16 and float16 do not represent every integer above 256 and 2048",
    )


def _check_uint64(ids: Tensor, asked: str) -> None:
    """Raise unless every number fits int64: 2^63 would become negative."""
    if can_read_values(ids) and not bool((ids.view(torch.int64) < 0).any()):
        return
    raise RopewalkError(
        asked=asked,
        expected="whole numbers below 2^63; on a GPU or under torch.compile, where values are not checked, int64",
        got=f"{ids.dtype} {list(ids.shape)}",
        do="pass int64",
    )


def as_signed(ids: Tensor) -> Tensor:
    """Return `ids`, converted to int64 if the dtype is uint16, uint32 or uint64, for which torch has few operations.

    >>> as_signed(torch.tensor([3], dtype=torch.uint16)).dtype, as_signed(torch.tensor([3.0])).dtype
    (torch.int64, torch.float32)
    """
    return ids.to(torch.int64) if ids.dtype in _UNSIGNED else ids


def check_positions(
    positions: Tensor, x: Tensor, *, asked: str, seq_dim: int = -2, batched: bool = True, axes: int = 1
) -> None:
    """Raise unless `positions` has one number per token of `x` and per axis, on the device of `x`.

    Args:
        positions: [seq] or [batch, seq]; with several axes [axes, seq] or [axes, batch, seq].
        x: Tensor whose dimension `seq_dim` is the sequence.
        asked: The first line of the error.
        seq_dim: Dimension of the sequence in `x`.
        batched: Whether the first dimension of `x` is a batch.
        axes: Number of position axes.

    Raises:
        RopewalkError: If the dtype, the shape or the device does not match.

    >>> check_positions(torch.arange(3), torch.zeros(2, 3, 8), asked="a doctest")
    """
    check_ids(positions, asked=asked, axes=axes)
    leading = positions.shape[:-1] if axes == 1 else positions.shape[1:-1]
    rows_match = len(leading) == 0 or (batched and leading[0] in (1, x.shape[0]))
    if positions.shape[-1] != x.shape[seq_dim] or not rows_match:
        seq, first = x.shape[seq_dim], "" if axes == 1 else f"{axes}, "
        do = "pass one position per token; the batch is the first dimension of x"
        # The other layout of q and k.
        if x.dim() == 4 and positions.shape[-1] == x.shape[-5 - seq_dim]:
            layout = "[batch, heads, seq, head_dim]" if seq_dim == -3 else "[batch, seq, heads, head_dim]"
            do = f"if q and k are {layout}, create the module with seq_dim={-5 - seq_dim}"
        raise RopewalkError(
            asked=asked,
            expected=f"positions [{first}{seq}]" + (f" or [{first}{x.shape[0]}, {seq}]" if batched else ""),
            got=f"{list(positions.shape)}, for a tensor of shape {list(x.shape)}",
            do=do,
        )
    if positions.device != x.device:
        raise RopewalkError(
            asked=asked,
            expected=f"positions on {x.device}, the device of x",
            got=f"positions on {positions.device}",
            do=f"create them on that device, or move them once: positions.to({str(x.device)!r})",
        )


def check_finite(positions: Tensor, *, asked: str) -> None:
    """Raise if a position is NaN or infinite.

    >>> check_finite(torch.tensor([0.5]), asked="a doctest")
    """
    if positions.is_floating_point() and not torch.isfinite(positions).all():
        got, do = "NaN or infinity", "check the code that computes the positions"
        raise RopewalkError(asked=asked, expected="finite positions", got=got, do=do)


def check_ends(cu_seqlens: Tensor, seq: int, *, asked: str) -> None:
    """Raise unless `cu_seqlens` are cumulated lengths from 0 to at most `seq`.

    >>> check_ends(torch.tensor([0, 2, 5]), 5, asked="a doctest")
    """
    ends = cu_seqlens.tolist()
    if ends[:1] == [0] and ends == sorted(ends) and ends[-1] < seq:
        warn(
            asked=asked,
            expected="cumulated lengths that end at the number of tokens",
            got="a smaller end: the tokens after it belong to no sequence",
            do="pass the cumulative sum of all lengths; if these tokens are padding, ignore this warning",
        )
    if ends[:1] != [0] or ends != sorted(ends) or ends[-1] > seq:
        raise RopewalkError(
            asked=asked,
            expected=f"cumulated lengths that start at 0, never decrease, and end at {seq} at most, the token count",
            got=f"{ends if len(ends) <= 12 else [*ends[:11], '...']}",
            do="pass the cumulative sum of the lengths with a 0 before it; concatenate the sequences of a batch",
        )


def check_index(index: Tensor, sequences: int, device: torch.device, *, asked: str, number: int | None = None) -> None:
    """Raise unless `index` contains row indices of a batch.

    Args:
        index: int32 or int64 [number].
        sequences: Number of rows of the batch.
        device: Required device.
        asked: The first line of the error.
        number: Required number of indices; None accepts any number.

    Raises:
        RopewalkError: If the dtype, the shape, the device or a value is not accepted.

    >>> check_index(torch.tensor([1, 1]), 2, torch.device("cpu"), asked="a doctest")
    """
    fits = isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and index.device == device
    fits = fits and index.dim() == 1 and number in (None, len(index))
    if fits and (not can_read_values(index) or bool(((index >= 0) & (index < sequences)).all())):
        return
    raise RopewalkError(
        asked=asked,
        expected=f"whole numbers [{'any' if number is None else number}] from 0 to {sequences - 1}, on {device}",
        got=f"{index.tolist()}" if fits else described(index),
        do="pass, for each row of the new batch, the row of the old batch that it continues",
    )


def described(x: object) -> str:
    """Format a value for an error: dtype, shape and device of a tensor, and the repr of anything else.

    >>> described(torch.zeros(2, 3))
    'torch.float32 [2, 3] on cpu'
    """
    return f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else shown(x)


def check_key_mask(
    key_mask: Tensor,
    shape: tuple[int, int],
    device: torch.device,
    *,
    asked: str,
    dims: str = "[batch, keys]",
    do: str = "True is a visible key; pass ids != padding, or mask.bool()",
) -> None:
    """Raise unless `key_mask` has one bool per key.

    Args:
        key_mask: Mask to check.
        shape: Required shape.
        device: Required device.
        asked: The first line of the error.
        dims: Names of the dimensions, for the error.
        do: The last line of the error.

    Raises:
        RopewalkError: If the dtype, the shape or the device does not match.

    >>> check_key_mask(torch.tensor([[True]]), (1, 1), torch.device("cpu"), asked="a doctest")
    """
    fits = isinstance(key_mask, Tensor) and key_mask.dtype == torch.bool and tuple(key_mask.shape) == shape
    if not fits or key_mask.device != device:
        raise RopewalkError(
            asked=asked,
            expected=f"bool {list(shape)} on {device}: {dims}",
            got=described(key_mask),
            do=do,
        )


def check_packed(
    cu_seqlens: Tensor, batch: int, seq: int, device: torch.device, *, asked: str, at_least: int = 1
) -> None:
    """Raise unless `cu_seqlens` are cumulated lengths of sequences that are packed in a batch of 1.

    Args:
        cu_seqlens: Tensor to check.
        batch: Number of rows of the packed tensor.
        seq: Number of its tokens.
        device: Required device.
        asked: The first line of the error.
        at_least: Smallest number of cumulated lengths.

    Raises:
        RopewalkError: If there is more than one row, or if the dtype, the shape, the device or a value does not match.

    >>> check_packed(torch.tensor([0, 2, 5]), 1, 5, torch.device("cpu"), asked="a doctest")
    """
    if batch != 1:
        raise RopewalkError(
            asked=asked,
            expected="a batch of 1 that contains the concatenated sequences",
            got=f"a batch of {batch}",
            do="concatenate them: x.flatten(0, 1).unsqueeze(0)",
        )
    check_ids(cu_seqlens, asked=asked, shape="[sequences + 1]", dims=(1,), whole=True)
    if cu_seqlens.device != device or len(cu_seqlens) < at_least:
        raise RopewalkError(
            asked=asked,
            expected=f"cumulated lengths that start at 0, on {device}; at least {at_least}",
            got=described(cu_seqlens),
            do="put a 0 before the cumulated lengths, and move them to the device of the tokens",
        )
    if can_read_values(cu_seqlens):
        check_ends(cu_seqlens, seq, asked=asked)


def warn_if_row_is_hidden(key_mask: Tensor, *, asked: str) -> None:
    """Warn if a mask hides every key of a sequence: True is probably padding in it. Only CPU tensors are read.

    >>> warn_if_row_is_hidden(torch.tensor([[True, False], [False, True]]), asked="a doctest")
    """
    if not can_read_values(key_mask) or not key_mask.numel():
        return
    seen = key_mask.any(-1)
    if not bool(seen.all()):
        warn(
            asked=asked,
            expected="True for the keys that are visible",
            got="a row without True: its queries see no key",
            do="if True is padding in this mask, as in key_padding_mask of torch.nn, pass ~mask",
        )


def warn_if_positions_restart(positions: Tensor, key_mask: Tensor | None, *, asked: str) -> None:
    """Warn if positions within a row start again, as in packed sequences. Only CPU tensors are read.

    A position starts again if it is smaller than the one before and occurs earlier in the row.

    Args:
        positions: [seq] or [batch, seq].
        key_mask: bool [batch, seq]. Tokens where it is False are padding, and are ignored. None for no padding.
        asked: The first line of the warning.

    >>> warn_if_positions_restart(torch.tensor([0, 1, 2]), None, asked="a doctest")
    """
    if not can_read_values(positions) or positions.shape[-1] < 2 or not positions.numel():
        return
    rows = as_signed(positions).reshape(-1, positions.shape[-1])
    # This costs less than the search below, and is almost always enough.
    if not bool((rows[:, 1:] < rows[:, :-1]).any()):
        return
    visible = ones_like(rows, dtype=torch.bool) if key_mask is None else key_mask.cpu()
    for row, mask in zip(*torch.broadcast_tensors(rows, visible), strict=True):
        ids = row[mask].tolist()
        earlier: set[float] = set()
        for before, here in itertools.pairwise(ids):
            earlier.add(before)
            if here < before and here in earlier:
                warn(
                    asked=asked,
                    expected="positions that increase within a row: without cu_seqlens a row is one sequence",
                    got="a position that is smaller than the one before, and occurs earlier in the row",
                    do="for packed sequences pass cu_seqlens=, so that each only sees itself",
                )
                return
