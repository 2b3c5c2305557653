"""Position ids as tensors, made on the device and without asking it anything.

Ranges and packed sequences; grids of patches; text with images between, as Qwen's models count it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_float, as_int, require_count, shown

__all__ = [
    "centred_positions",
    "grid_positions",
    "mrope_positions",
    "packed_positions",
    "positions_of_lengths",
    "range_positions",
    "text_positions",
]


def range_positions(length: int, offset: int | Tensor, device: torch.device | str | None) -> Tensor:
    """offset .. offset + length - 1: [length] for one offset, [batch, length] for an offset a sequence [batch].

    >>> range_positions(3, torch.tensor([0, 7]), torch.device("cpu")).tolist()
    [[0, 1, 2], [7, 8, 9]]
    """
    if isinstance(offset, Tensor) and offset.dim() == 1:
        return torch.arange(length, device=device) + offset.to(device).unsqueeze(-1)
    return torch.arange(length, device=device) + (offset.to(device) if isinstance(offset, Tensor) else offset)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Positions of `total` tokens of sequences laid end to end, each counted from 0.

    `cu_seqlens` are the ends of the sequences, from 0 on, as flash-attention takes them. Tokens past the last end are
    padding; they go on counting from it.

    >>> packed_positions(torch.tensor([0, 3, 5]), 6).tolist()
    [0, 1, 2, 0, 1, 0]
    """
    tokens = torch.arange(total, device=cu_seqlens.device)
    starts = torch.searchsorted(cu_seqlens.to(tokens.dtype), tokens, right=True) - 1
    return tokens - cu_seqlens[starts].to(tokens.dtype)


def positions_of_lengths(lengths: Tensor, total: int) -> Tensor:
    """Positions of `total` tokens of sequences laid end to end, from the length of each: `packed_positions`.

    >>> positions_of_lengths(torch.tensor([3, 2]), 5).tolist()
    [0, 1, 2, 0, 1]
    """
    ends = torch.cumsum(lengths.to(torch.int64), 0)
    return packed_positions(torch.cat((ends.new_zeros(1), ends)), total)


def text_positions(
    length: int, axes: int, offset: int | Tensor = 0, *, device: torch.device | str | None = None
) -> Tensor:
    """Tokens of text for a model with several axes, on all of which they stand alike: [axes, length].

    An offset a sequence, [batch], gives [axes, batch, length]. To decode after `mrope_positions`, the offset is how
    many tokens the cache holds plus the delta.

    >>> text_positions(2, axes=3, offset=7).tolist()
    [[7, 8], [7, 8], [7, 8]]
    """
    device = offset.device if isinstance(offset, Tensor) and device is None else device
    positions = range_positions(length, offset, device)
    return positions.expand(_count(axes, "text_positions(axes=...)"), *positions.shape)


def grid_positions(*sizes: int, merge: int = 1, device: torch.device | str | None = None) -> Tensor:
    """The cells of a grid, row by row, one position an axis: [axes, cells].

    `merge` orders the last two axes by blocks of merge x merge cells, block by block, as Qwen's vision towers lay out
    the patches that they will merge.

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
            expected="two sizes or more, of which the last two are multiples of merge",
            got=f"{sizes}",
            do="pad the image to whole blocks, or leave merge out",
        )
    cells = torch.stack(torch.meshgrid(*[torch.arange(size, device=device) for size in sizes], indexing="ij"))
    *front, height, width = cells.shape
    blocks = cells.view(*front, height // merge, merge, width // merge, merge)
    return blocks.transpose(-3, -2).reshape(len(sizes), -1)


def centred_positions(height: int, width: int, *, device: torch.device | str | None = None) -> Tensor:
    """Centres of patches from -1 to 1 over the image, whatever its size, times 2π: float64 [2, height * width].

    DINOv3 forms its angles from 2π times these coordinates, y first; with Plain(100) over `Axes.repeated(2, head_dim)`
    they give its rotation.

    >>> [round(y / math.pi, 4) for y in centred_positions(2, 1)[0].tolist()]  # -1/2 and 1/2, times 2π
    [-1.0, 1.0]
    """
    rows, columns = grid_positions(height, width, device=device).to(torch.float64)
    return 2 * math.pi * torch.stack((2 * (rows + 0.5) / height - 1, 2 * (columns + 0.5) / width - 1))


def mrope_positions(
    runs: Sequence[int | Sequence[float]], *, device: torch.device | str | None = None
) -> tuple[Tensor, int]:
    """Time, height and width of the tokens of text and images, [3, seq], and the delta for decoding.

    Each run is a number of text tokens, or (t, h, w), the grid of an image or video after merging, or (t, h, w, step)
    with the positions from frame to frame. Text counts on, alike on all axes; a grid starts where the count stands, and
    the count goes on max(h, w) farther, as transformers 5 computes it for Qwen2-VL (2409.12191, section 2.1; other code
    goes on from the largest position on any axis, which differs for films longer than they are wide). The delta is the
    largest position + 1 - seq: a token decoded when the cache holds n stands at n + delta on all axes.

    >>> positions, delta = mrope_positions([2, (1, 1, 2), 1])  # two tokens, an image of 1 x 2, a token
    >>> positions.tolist(), delta
    ([[0, 1, 2, 2, 4], [0, 1, 2, 2, 4], [0, 1, 2, 3, 4]], 0)
    """
    parts, count, largest = [torch.empty(3, 0, dtype=torch.int64, device=device)], 0, -1
    for run in runs:
        tokens = as_int(run)
        if tokens is not None and tokens >= 0:
            parts.append(text_positions(tokens, 3, count, device=device))
            count += tokens
            largest = max(largest, count - 1)
            continue
        time, height, width, step = _grid(run)
        cells = grid_positions(time, height, width, device=device)
        # Steps are rounded down after they are multiplied, as the models were trained.
        frames = (cells[0] * step).to(torch.int64)
        parts.append(torch.cat((frames[None], cells[1:])) + count)
        largest = max(largest, count + max(int((time - 1) * step), height - 1, width - 1))
        count += max(height, width)
    positions = torch.cat(parts, dim=1)
    return positions, largest + 1 - positions.shape[1]


def _grid(run: Any) -> tuple[int, int, int, float]:
    if isinstance(run, list | tuple) and len(run) in (3, 4):
        sizes, step = [as_int(size) for size in run[:3]], as_float(run[3]) if len(run) == 4 else 1
        if all(size is not None and size > 0 for size in sizes) and step is not None and step >= 0:
            return sizes[0], sizes[1], sizes[2], step  # pyright: ignore[reportReturnType]
    raise RopewalkError(
        asked="mrope_positions(runs)",
        expected="a number of text tokens, or (t, h, w), or (t, h, w, step), a run",
        got=shown(run),
        do="divide the height and width of image_grid_thw by the merge size first",
    )


def _count(number: object, asked: str) -> int:
    return require_count(number, asked=asked, do="pass a whole number above 0")
