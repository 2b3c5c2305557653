"""Gradients of decay and band, from what the kernels of a GPU store per row, segment and chunk."""

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, zeros
from ropewalk.kernels.linear.segments import Plan

__all__ = ["band_gradient", "decay_gradient"]


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


def decay_gradient(
    plan: Plan, of_keys: Tensor, of_ends: Tensor, of_total: Tensor | None, products: Tensor | None, shape: torch.Size
) -> Tensor:
    """Return the gradient of the logarithms of the decay.

    G is the sum of the logarithms up to a token. Within a segment, the gradient of a logarithm is the sum of those of
    the later G, and of the decay to the segment's end. A query's G has the gradient do . o without a denominator, and 0
    with one, where a common factor cancels.

    Args:
        plan: Segments of the tokens.
        of_keys: Gradients of -G by the keys [batch, state_heads, seq].
        of_ends: Gradients of the decay to the end of each segment [batch, state_heads, segments].
        of_total: Gradients of the decay to the end of each sequence [sequences * state_heads], or None.
        products: Products of outputs and cotangents [batch, heads, seq], or None.
        shape: Shape of the decay.

    >>> plan, of_keys = Plan.of(torch.ones(1, 1, 3, 4), None, 2), torch.tensor([[[1.0, 2.0, 4.0]]])
    >>> decay_gradient(plan, of_keys, torch.tensor([[[8.0, 0.0]]]), None, None, torch.Size([1, 1, 3])).tolist()
    [[[5.0, 6.0, -4.0]]]
    """
    batch, states, keys = of_keys.shape
    rows = -of_keys.double()
    if products is not None:
        rows += products.unflatten(1, (states, -1)).sum(2)
    token = arange(keys, device=rows.device)
    if plan.begins is None:
        segment = token // plan.segment
        end = ((segment + 1) * plan.segment).clamp_max(keys)
        last, sequence = plan.number - 1, token * 0
    else:
        pairs = plan.begins[: 2 * plan.number].unflatten(0, (-1, 2))
        segment = (torch.searchsorted(pairs[:, 0].contiguous(), token, right=True) - 1).clamp_min(0)
        sequence = plan.begins[2 * plan.number : 3 * plan.number][segment]
        end = pairs[:, 1][segment]
        last = plan.starts[1:][sequence] - 1 if plan.starts is not None else 0
    later = torch.cat([rows.flip(-1).cumsum(-1).flip(-1), rows[..., :1] * 0], dim=-1)
    result = later[..., :-1] - later[..., end] + of_ends.double()[..., segment]
    if of_total is not None:
        totals = of_total.unflatten(0, (-1, states)).double()
        each = totals[:, :, None] if plan.begins is None else totals.t()[None][..., sequence]
        result += torch.where(segment == last, each, 0.0)
    if plan.begins is not None:
        # Tokens after the last sequence.
        result = torch.where(token < end, result, 0.0)
    result = result.sum(-1, keepdim=True) if shape[2] == 1 and keys > 1 else result
    return (result.sum(0, keepdim=True) if shape[0] == 1 and batch > 1 else result).float()
