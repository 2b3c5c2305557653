"""The gradient of a band, from what the kernels of a GPU store per tile of factors and per chunk."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ropewalk.kernels.constructors import arange, zeros

__all__ = ["band_gradient"]


def band_gradient(near: Tensor, far: Tensor, window: int) -> Tensor:
    """Return the gradient of the logarithms of the band [heads, 2 * window + 1].

    Args:
        near: Gradients of tiles of factors [parts, batch, heads, tiles, queries, keys]. The keys of the first tile are
            before the queries, by the smallest multiple of their number that the window needs. Those of the next tile
            follow them.
        far: Gradients of keys beyond the band, before and after [heads, 2].
        window: Window of the band.

    >>> near, far = torch.zeros(1, 1, 1, 1, 2, 2), torch.tensor([[1.0, 2.0]])
    >>> near[..., 1, 0] = 5.0  # key - query = -1
    >>> band_gradient(near, far, 1).tolist()
    [[6.0, 0.0, 2.0]]
    """
    tiles, rows, columns = near.shape[3:]
    before = (window + rows - 2) // rows * rows
    # Lines of rows + columns numbers, read as lines of one number less, are shifted by one each: diagonals become
    # columns.
    width = rows + columns - 1
    lines = pad(near.sum((0, 1)).flip(-1), (0, rows)).flatten(-2)[..., : rows * width]
    diagonals = lines.unflatten(-1, (rows, width)).sum(-2)
    tile, column = arange(tiles, device=near.device)[:, None], arange(width, device=near.device)
    difference = (tile * columns - before + columns - 1 - column).clamp(-window, window) + window
    result = zeros((len(diagonals), 2 * window + 1), dtype=torch.float32, device=near.device)
    result.index_add_(1, difference.flatten(), diagonals.flatten(1))
    result[:, 0] += far[:, 0]
    result[:, -1] += far[:, 1]
    return result
