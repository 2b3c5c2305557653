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
            before the queries, by as many tiles as the window needs.
        far: Gradients of keys beyond the band, before and after [heads, 2].
        window: Window of the band.

    >>> near, far = torch.zeros(1, 1, 1, 1, 2, 2), torch.tensor([[1.0, 2.0]])
    >>> near[..., 1, 0] = 5.0  # key - query = -1
    >>> band_gradient(near, far, 1).tolist()
    [[6.0, 0.0, 2.0]]
    """
    tiles, chunk = near.shape[3], near.shape[5]
    before = (window + chunk - 2) // chunk
    # Rows of 2 * chunk numbers, read as rows of one number less, are shifted by one each: diagonals become columns.
    rows = pad(near.sum((0, 1)).flip(-1), (0, chunk)).flatten(-2)[..., : chunk * (2 * chunk - 1)]
    diagonals = rows.unflatten(-1, (chunk, 2 * chunk - 1)).sum(-2)
    tile, column = arange(tiles, device=near.device)[:, None], arange(2 * chunk - 1, device=near.device)
    difference = ((tile - before) * chunk + chunk - 1 - column).clamp(-window, window) + window
    result = zeros((len(diagonals), 2 * window + 1), dtype=torch.float32, device=near.device)
    result.index_add_(1, difference.flatten(), diagonals.flatten(1))
    result[:, 0] += far[:, 0]
    result[:, -1] += far[:, 1]
    return result
