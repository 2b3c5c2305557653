"""Linear attention on a GPU by Triton kernels: its interface, and which kernels compute a call."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ropewalk.kernels.constructors import new_empty
from ropewalk.kernels.linear.stored import triton as stored
from ropewalk.kernels.linear.triton_call import Sizes
from ropewalk.kernels.linear.triton_prepare import aligned, prepare, readable, stores
from ropewalk.kernels.torch_internals import current_device
from ropewalk.kernels.types import NO_WEIGHTING, Layout, Side, Weighting

__all__ = ["empty_saved", "linear_attention", "linear_attention_backward"]


def linear_attention(
    q: Side,
    k: Side,
    v: Tensor,
    before: Tensor | None,
    layout: Layout,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    weighting: Weighting = NO_WEIGHTING,
) -> tuple[Tensor, ...]:
    """Return the outputs, the sums after the last key, and tensors for the backward.

    Sums are float32 [sequences * state_heads, width * (v_dim + 1)], as in `Sums.flat`. The tensor for the backward
    contains the inverse denominators and the running sums. Arguments are those of `linear.torch.linear_attention`,
    except that `before`, the sums over earlier keys, is flat.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, v = torch.zeros(1, 1, 2, 2, device=device), torch.tensor([[[[1.0], [3.0]]]], device=device)
    >>> side, layout = Side(x, "elu"), Layout(False, 0, -2)
    >>> linear_attention(side, side, v, None, layout, causal=True)[0].flatten().tolist()
    [1.0, 2.0]
    """
    # Triton launches on the current device.
    if v.device.type == "cuda" and current_device() != v.device.index:
        with torch.cuda.device(v.device):
            return linear_attention(q, k, v, before, layout, causal, cu_seqlens, weighting)
    if stores(q.x, v, weighting, causal):
        return stored.linear_attention(q, k, v, before, layout, causal, cu_seqlens, weighting)
    x, call, addresses = prepare(q, k, v, before, layout, causal, cu_seqlens, weighting, None)
    return cast(tuple[Tensor, ...], call.forward(x, addresses, cu_seqlens))


def empty_saved(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, weighting: Weighting
) -> tuple[Tensor, ...]:
    """Return tensors shaped as those that `linear_attention` returns for its backward, for fake tensors.

    >>> x = torch.ones(1, 2, 300, 4, device="meta", dtype=torch.bfloat16)
    >>> [list(tensor.shape) for tensor in empty_saved(x, x, x, None, True, NO_WEIGHTING)]
    [[1024]]
    """
    if stores(q, v, weighting, causal):
        return stored.empty_saved(q, k, v, cu_seqlens, weighting)
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    length = Sizes(q, k, v, causal, weighting, sequences).saved().length
    return (new_empty(v, (length,), dtype=torch.float32),)


class Gradients(NamedTuple):
    """Gradients of linear attention. That of the band is None unless it was asked for.

    >>> Gradients(*torch.zeros(4, 1)).band is None
    True
    """

    q: Tensor
    k: Tensor
    v: Tensor
    before: Tensor
    band: Tensor | None = None


def linear_attention_backward(
    cotangent: Tensor,
    total_cotangent: Tensor | None,
    q: Side,
    k: Side,
    v: Tensor,
    results: Sequence[Tensor],
    layout: Layout,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    weighting: Weighting = NO_WEIGHTING,
    learned: bool = False,
) -> Gradients:
    """Return the gradients of q, k, v and of the initial sums, and if `learned` that of the band.

    There is no gradient of a decay: from rows it would be a difference of large sums, in which few digits are left.

    With dn = do / den and dden = -(do . o) / den: dq_i is computed from S_i dn_i and dden_i z_i; dk_j from T_j v_j and
    the sum of dden_i q_i; dv_j = T_j^T R k_j, where T_j is the sum of (R q_i) dn_i^T over i >= j.

    Args:
        cotangent: Cotangent of the outputs.
        total_cotangent: Cotangent of the sums after the last key, or None.
        q: Queries, as in `linear_attention`; the other arguments too.
        k: Keys.
        v: Values.
        results: Results of `linear_attention`.
        layout: Layout of the rotation.
        causal: Whether attention was causal.
        cu_seqlens: Ends of packed sequences.
        weighting: Factors on the terms.
        learned: Whether the gradient of the band is needed.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, v = torch.zeros(1, 1, 2, 2, device=device), torch.tensor([[[[1.0], [3.0]]]], device=device)
    >>> side, layout = Side(x, "elu"), Layout(False, 0, -2)
    >>> results = linear_attention(side, side, v, None, layout, causal=True)
    >>> dv = linear_attention_backward(torch.ones_like(v), None, side, side, v, results, layout, causal=True).v
    >>> dv.flatten().tolist()  # the first value has weight 1 in the first output and 1/2 in the second
    [1.5, 0.5]
    """
    if v.device.type == "cuda" and current_device() != v.device.index:
        with torch.cuda.device(v.device):
            arguments = cotangent, total_cotangent, q, k, v, results, layout, causal, cu_seqlens, weighting, learned
            return linear_attention_backward(*arguments)
    if stores(q.x, v, weighting, causal):
        arguments = cotangent, total_cotangent, q, k, v, results, layout, causal, cu_seqlens, weighting
        return Gradients(*stored.linear_attention_backward(*arguments))
    # These are not part of the signature. Hooks of saved tensors may return them with other strides.
    out, saved = aligned(results[0]), aligned(results[2])
    last = None if total_cotangent is None else aligned(total_cotangent)
    cotangent = readable(cotangent)
    x, call, addresses = prepare(q, k, v, None, layout, causal, cu_seqlens, weighting, cotangent)
    gradients = call.backward(x, addresses, cu_seqlens, cotangent, out, saved, last, learned=learned)
    return Gradients(*cast(tuple[Tensor, ...], gradients))
