"""The gradient of a band, from what the kernels of a GPU store per segment and chunk."""

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, zeros

__all__ = ["band_gradient"]


def band_gradient(near: Tensor, far: Tensor, window: int, lead: int) -> Tensor:
    """Return the gradient of the logarithms of the band [heads, 2 * window + 1].

    Args:
        near: Sums of diagonals [lane blocks, batch, heads, segments, chunks, visits, 2 * chunk].
        far: Gradients of keys beyond the band, before and after [lane blocks, batch, heads, segments, 2].
        window: Window of the band.
        lead: Tokens by which the first visited chunk is before a chunk.

    >>> near, far = torch.zeros(1, 1, 1, 1, 1, 1, 4), torch.tensor([1.0, 2.0]).expand(1, 1, 1, 1, 2)
    >>> near[..., 1] = 5.0  # the diagonal, after key - query = -1
    >>> band_gradient(near, far, 1, 0).tolist()
    [[1.0, 5.0, 2.0]]
    """
    visits, chunk = near.shape[5], near.shape[6] // 2
    by_visit = near.sum((0, 1, 3, 4))
    visit, place = arange(visits, device=near.device)[:, None], arange(2 * chunk, device=near.device)
    difference = (visit * chunk - lead + place - (chunk - 1)).clamp(-window, window) + window
    result = zeros((len(by_visit), 2 * window + 1), dtype=torch.float32, device=near.device)
    result.index_add_(1, difference.flatten(), by_visit.flatten(1))
    beyond = far.sum((0, 1, 3))
    result[:, 0] += beyond[:, 0]
    result[:, -1] += beyond[:, 1]
    return result
