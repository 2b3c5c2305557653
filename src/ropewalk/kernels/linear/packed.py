"""Linear attention over packed sequences whose ends only the device knows."""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from ropewalk.kernels.linear.segments import Plan
from ropewalk.kernels.linear.torch import CHUNK, Features, Sums, divide

__all__ = ["attend_packed"]


def attend_packed(
    q: Features, k: Features, v: Tensor, before: Sums | None, cu_seqlens: Tensor, *, causal: bool, chunk: int = CHUNK
) -> tuple[Tensor, Sums]:
    """`linear_torch.attend` for each sequence of `cu_seqlens`, and their sums, [sequences, ..].

    For compilers, and calls that may not wait. Tokens are laid into chunks that no two sequences share. Which chunks a
    chunk reads is a matrix of zeros and ones, so that the work grows with the square of their number, and what is not
    finite reaches other sequences: in eager mode, where the host may look at the ends, they go one after the other.

    >>> ones = Features(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    >>> v, ends = torch.tensor([[[[1.0], [3.0], [7.0]]]]), torch.tensor([0, 2, 3])
    >>> attend_packed(ones, ones, v, None, ends, causal=True)[0].flatten().tolist()
    [1.0, 2.0, 7.0]
    """
    (_, kv_heads, length, width), v_dim = k.plain.shape, v.shape[-1]
    group, sequences = q.plain.shape[1] // kv_heads, len(cu_seqlens) - 1
    plan = Plan.of(k.plain, cu_seqlens, chunk)
    count, begins = plan.number, cast(Tensor, plan.begins)
    bounds, owner = begins[: 2 * count].view(count, 2), begins[2 * count :]
    slots = bounds[:, :1] + torch.arange(chunk, device=v.device)
    # A row of zeros behind the last token stands for what a chunk does not have.
    slots = torch.where(slots < bounds[:, 1:], slots, length).flatten()

    def cut(x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, 1))[0, :, slots].unflatten(1, (count, chunk))

    k_plain, k_turned, values = cut(k.plain), cut(k.turned), cut(v)
    q_plain, q_turned = (cut(x).unflatten(0, (kv_heads, group)).transpose(1, 2).flatten(2, 3) for x in q)
    own = (k_turned.transpose(-1, -2) @ values).flatten(2), k_plain.sum(dim=-2)
    start = [v.new_zeros(sequences, *shape) for shape in ((kv_heads, width, v_dim), (kv_heads, width))]
    first = [x.flatten(2).transpose(0, 1) for x in (start if before is None else before)]
    members = (owner == torch.arange(sequences, device=v.device)[:, None]).to(v.dtype)
    after = [x + members @ mine for x, mine in zip(first, own, strict=True)]
    if causal:
        number = torch.arange(count, device=v.device)
        reads = ((owner[:, None] == owner) & (number[:, None] > number)).to(v.dtype)
        earlier = [x[:, owner] + reads @ mine for x, mine in zip(first, own, strict=True)]
        scores = (q_turned @ k_turned.transpose(-1, -2)).unflatten(-2, (group, chunk)).tril().flatten(-3, -2)
        near, seen = scores @ values, k_plain.cumsum(dim=-2)
    else:
        earlier, near, seen = [x[:, owner] for x in after], 0.0, torch.zeros_like(k_plain)
    numerator = q_turned @ earlier[0].unflatten(-1, (width, v_dim)) + near
    below = (seen + earlier[1].unsqueeze(-2)).unsqueeze(2)
    denominator = (q_plain.unflatten(2, (group, chunk)) * below).sum(dim=-1).flatten(2, 3).unsqueeze(-1)
    out = divide(numerator, denominator).unflatten(2, (group, chunk)).transpose(1, 2).flatten(0, 1).flatten(1, 2)
    laid = v.new_zeros(kv_heads * group, length + 1, v_dim).index_copy(1, slots, out)
    shapes = (width, v_dim), (width,)
    left = Sums(*(x.transpose(0, 1).unflatten(-1, shape) for x, shape in zip(after, shapes, strict=True)))
    return laid[None, :, :length], left
