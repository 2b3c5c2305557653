"""Functions that return position ids as tensors, without a device synchronization. Public as `ropewalk.positions`.

They cover ranges, packed sequences, grids of patches, and text with images as Qwen's models number it (M-RoPE).
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_float, as_int, require_count, shown
from ropewalk.kernels.constructors import arange, empty, new_zeros, zeros_like

__all__ = [
    "centred_positions",
    "grid_positions",
    "jittered_positions",
    "mrope_positions",
    "packed_positions",
    "positions_of_lengths",
    "range_positions",
    "text_positions",
]


def range_positions(length: int, offset: int | Tensor, device: torch.device | str | None) -> Tensor:
    """Consecutive positions: offset .. offset + length - 1.

    Args:
        length: The number of tokens.
        offset: The position of the first token: an int, a tensor of one number, or a tensor [batch] with one offset per
            sequence.
        device: The device of the result; None for the default device.

    Returns:
        int64 [length], or [batch, length] for one offset per sequence.

    >>> range_positions(3, torch.tensor([0, 7]), torch.device("cpu")).tolist()
    [[0, 1, 2], [7, 8, 9]]
    """
    if isinstance(offset, Tensor) and offset.dim() == 1:
        return arange(length, device=device) + offset.to(device).unsqueeze(-1)
    return arange(length, device=device) + (offset.to(device) if isinstance(offset, Tensor) else offset)


def packed_positions(cu_seqlens: Tensor, total: int, offset: int | Tensor | None = None) -> Tensor:
    """Positions of packed sequences, which are stored end to end.

    Args:
        cu_seqlens: [sequences + 1], whole numbers: 0, then the end of each sequence, as in flash-attention.
        total: The number of tokens. Those past the last end are padding, and count from 0.
        offset: The position of the first token of each sequence: an int, or a tensor [sequences] with one offset per
            sequence. None is 0.

    Returns:
        int64 [total], on the device of `cu_seqlens`.

    >>> packed_positions(torch.tensor([0, 3, 5]), 6).tolist()
    [0, 1, 2, 0, 1, 0]
    >>> packed_positions(torch.tensor([0, 3, 5]), 6, torch.tensor([7, 20])).tolist()
    [7, 8, 9, 20, 21, 0]
    """
    ends = cu_seqlens.to(torch.int64).contiguous()
    tokens = arange(total, device=ends.device)
    sequence = torch.searchsorted(ends, tokens, right=True) - 1
    within = tokens - ends[sequence]
    if offset is None:
        return within
    # Tensor operations only: a traced or exported graph supports any number of sequences.
    if isinstance(offset, Tensor) and offset.dim():
        starts = offset.to(ends.device).expand_as(ends[1:])
        return within + torch.cat((starts, zeros_like(ends[:1])))[sequence]
    return within + offset * (tokens < ends[-1])


def positions_of_lengths(lengths: Tensor, total: int, offset: int | Tensor | None = None) -> Tensor:
    """`packed_positions` from the lengths of the sequences instead of their ends.

    Args:
        lengths: [sequences], whole numbers: the number of tokens of each sequence.
        total: The number of tokens. Those past the last sequence are padding, and count from 0.
        offset: The position of the first token of each sequence, as in `packed_positions`.

    Returns:
        int64 [total], on the device of `lengths`.

    >>> positions_of_lengths(torch.tensor([3, 2]), 5).tolist()
    [0, 1, 2, 0, 1]
    """
    ends = torch.cumsum(lengths.to(torch.int64), 0)
    return packed_positions(torch.cat((new_zeros(ends, 1), ends)), total, offset)


def text_positions(
    length: int, axes: int, offset: int | Tensor = 0, *, device: torch.device | str | None = None
) -> Tensor:
    """Positions of text in a model with several axes: the same on every axis.

    To decode after `mrope_positions`, the offset is the number of tokens in the cache plus the delta.

    Args:
        length: The number of tokens.
        axes: The number of axes.
        offset: The position of the first token: an int, or a tensor [batch] with one offset per sequence.
        device: The device of the result; None for that of `offset`, or the default device.

    Returns:
        int64 [axes, length], or [axes, batch, length] for one offset per sequence.

    Raises:
        RopewalkError: If `axes` is not an integer of at least 1.

    >>> text_positions(2, axes=3, offset=7).tolist()
    [[7, 8], [7, 8], [7, 8]]
    """
    device = offset.device if isinstance(offset, Tensor) and device is None else device
    positions = range_positions(length, offset, device)
    return positions.expand(_count(axes, "text_positions(axes=...)"), *positions.shape)


def grid_positions(*sizes: int, merge: int = 1, device: torch.device | str | None = None) -> Tensor:
    """Positions of the cells of a grid, row by row, with one position per axis.

    Args:
        *sizes: The sizes of the axes, two or more: (height, width), or (time, height, width).
        merge: Order the last two axes by blocks of merge x merge cells, block by block. Qwen's vision towers store
            patches in this order before they merge them.
        device: The device of the result; None for the default device.

    Returns:
        int64 [axes, cells].

    Raises:
        RopewalkError: If a size or `merge` is not an integer of at least 1, if there are fewer than two sizes, or if
            one of the last two sizes is not a multiple of `merge`.

    >>> grid_positions(2, 3).tolist()  # height 2, width 3
    [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    >>> grid_positions(2, 4, merge=2)[1].tolist()
    [0, 1, 0, 1, 2, 3, 2, 3]
    """
    sizes = tuple(_count(size, "grid_positions(*sizes)") for size in sizes)
    merge = _count(merge, "grid_positions(merge=...)")
    if len(sizes) < 2 or any(size % merge for size in sizes[-2:]):
        raise RopewalkError(
            asked=f"grid_positions{sizes} with merge={merge}",
            expected="two sizes or more; the last two are multiples of merge",
            got=f"{sizes}",
            do="pad the image to whole blocks, or omit merge",
        )
    cells = torch.stack(torch.meshgrid(*[arange(size, device=device) for size in sizes], indexing="ij"))
    *front, height, width = cells.shape
    blocks = cells.view(*front, height // merge, merge, width // merge, merge)
    return blocks.transpose(-3, -2).reshape(len(sizes), -1)


def centred_positions(height: int, width: int, *, device: torch.device | str | None = None) -> Tensor:
    """Centres of patches in coordinates from -1 to 1 over an image of any size, times 2π.

    DINOv3 computes its angles from 2π times these coordinates, y first. `Plain(100)` over `Axes.repeated(2, head_dim)`
    with these positions is its rotation.

    Args:
        height: The number of patches along y.
        width: The number of patches along x.
        device: The device of the result; None for the default device.

    Returns:
        float64 [2, height * width]: y, then x.

    Raises:
        RopewalkError: If a size is not an integer of at least 1.

    >>> [round(y / math.pi, 4) for y in centred_positions(2, 1)[0].tolist()]  # -1/2 and 1/2, times 2π
    [-1.0, 1.0]
    """
    rows, columns = grid_positions(height, width, device=device).to(torch.float64)
    return 2 * math.pi * torch.stack((2 * (rows + 0.5) / height - 1, 2 * (columns + 0.5) / width - 1))


def jittered_positions(
    positions: Tensor,
    *,
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Move and scale the positions of an image at random, as DINOv3 does in training ("RoPE-box jitter").

    p_a -> (p_a + s_a) j_a r, with s_a uniform in 2π (-shift, shift) and j_a log-uniform in (1/jitter, jitter) for each
    axis, and r log-uniform in (1/rescale, rescale) for all axes (DINOv3, 2508.10104, section 3.2). Draws are made in
    this order, in float32 on the CPU, so that timm's code makes the same ones with the same seed.

    Args:
        positions: [A, tokens] or [A, batch, tokens], as `centred_positions` returns them.
        shift: Largest shift, in coordinates from -1 to 1. None for no shift.
        jitter: Largest factor on an axis. At least 1. None for none.
        rescale: Largest factor on all axes. At least 1. DINOv3 was trained with 2. None for none.
        generator: Random numbers of the CPU. Default: torch's own.

    Returns:
        float64, shaped as `positions`.

    Raises:
        RopewalkError: If a range is not a finite number, below 0 for shift or below 1 for a factor.

    >>> positions = centred_positions(2, 2)
    >>> jittered = jittered_positions(positions, rescale=2, generator=torch.Generator().manual_seed(0))
    >>> ratio = jittered / positions
    >>> bool((ratio - ratio[0, 0]).abs().max() < 1e-12), 0.5 <= ratio[0, 0].item() <= 2
    (True, True)
    """
    for name, value, least in (("shift", shift, 0), ("jitter", jitter, 1), ("rescale", rescale, 1)):
        number = None if value is None else as_float(value)
        if value is not None and (number is None or not least <= number < math.inf):
            raise RopewalkError(
                asked=f"jittered_positions({name}=...)",
                expected=f"a number of at least {least}, or None",
                got=shown(value),
                do="pass the largest shift" if name == "shift" else "pass the largest factor",
            )
    moved = positions.to(torch.float64)

    def draw(count: int, largest: float) -> Tensor:
        numbers = empty(count, dtype=torch.float32, device="cpu").uniform_(-largest, largest, generator=generator)
        return numbers.view(-1, *[1] * (positions.dim() - 1)).to(positions.device)

    if shift is not None:
        moved = moved + 2 * math.pi * draw(positions.shape[0], shift).double()
    if jitter is not None:
        moved = moved * draw(positions.shape[0], math.log(jitter)).exp().double()
    return moved if rescale is None else moved * draw(1, math.log(rescale)).exp().double()


def mrope_positions(
    runs: Iterable[int | Sequence[float]], *, device: torch.device | str | None = None
) -> tuple[Tensor, int]:
    """Time, height and width positions of text and images (M-RoPE, 2409.12191, section 2.1), as in Qwen2-VL.

    A counter gives the next position. A text token has the value of the counter on all axes, and increases it by 1.
    The positions of a grid start at the counter, which then increases by max(h, w), as transformers 5 computes it for
    Qwen2-VL. Other code continues from the largest position on any axis. The two differ for videos that have more
    frames than their height and width. A token that is decoded after n cached tokens has the position n + delta on all
    axes.

    Args:
        runs: Each run is a number of text tokens; or (t, h, w), the grid of an image or a video after merging; or
            (t, h, w, step), where step is the distance in positions between frames. The product of frame index and
            step is rounded down.
        device: The device of the result; None for the default device.

    Returns:
        int64 [3, seq], and the delta for decoding: the largest position + 1 - seq.

    Raises:
        RopewalkError: If a run is neither a number of tokens nor a grid of sizes above 0.

    >>> positions, delta = mrope_positions([2, (1, 1, 2), 1])  # two tokens, an image of 1 x 2, one token
    >>> positions.tolist(), delta
    ([[0, 1, 2, 2, 4], [0, 1, 2, 2, 4], [0, 1, 2, 3, 4]], 0)
    """
    parts, count, largest = [empty(3, 0, dtype=torch.int64, device=device)], 0, -1
    for run in runs:
        tokens = as_int(run)
        if tokens is not None and tokens >= 0:
            parts.append(text_positions(tokens, 3, count, device=device))
            count += tokens
            largest = max(largest, count - 1)
            continue
        time, height, width, step = _grid(run)
        cells = grid_positions(time, height, width, device=device)
        # The models were trained with products rounded down, not with rounded steps.
        frames = (cells[0].to(torch.float32) * step).to(torch.int64)
        parts.append(torch.cat((frames[None], cells[1:])) + count)
        largest = max(largest, count + max(int((time - 1) * step), height - 1, width - 1))
        count += max(height, width)
    positions = torch.cat(parts, dim=1)
    return positions, largest + 1 - positions.shape[1]


def _grid(run: int | Sequence[float]) -> tuple[int, int, int, float]:
    if isinstance(run, list | tuple) and len(run) in (3, 4):
        sizes = [size for size in map(as_int, run[:3]) if size is not None and size > 0]
        step = as_float(run[3]) if len(run) == 4 else 1
        if len(sizes) == 3 and step is not None and step >= 0:
            return sizes[0], sizes[1], sizes[2], step
    raise RopewalkError(
        asked="mrope_positions(runs)",
        expected="per run a number of text tokens, or (t, h, w), or (t, h, w, step)",
        got=shown(run),
        do="divide the height and width of image_grid_thw by the merge size first",
    )


def _count(number: object, asked: str) -> int:
    return require_count(number, asked=asked, do="pass a whole number above 0")
