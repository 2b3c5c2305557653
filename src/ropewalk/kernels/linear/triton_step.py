"""One token of linear attention after a state, in one launch: feature maps, rotation, decay, new sums, quotient."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# Type checkers do not know that a tl.constexpr argument accepts plain values, and is its value in a kernel.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.kernels.constructors import empty_like, new_empty
from ropewalk.kernels.linear.triton_features import EXP, NOTHING, mapped
from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.signature import is_eager, signature
from ropewalk.kernels.triton_launch import LAUNCHES, Launch
from ropewalk.kernels.types import Layout

__all__ = ["SMALLEST", "linear_step"]

# Columns of values per program. Few, because there are few heads in a step.
COLUMNS = 16
# As in linear/torch.py: with weights, denominators up to this are 0.
SMALLEST = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps


@triton.jit
def _features(x, feature, WIDTH: tl.constexpr, MAP: tl.constexpr, SHIFTED: tl.constexpr):
    """Load the features of a row. Padding is 0."""
    raw = tl.load(x + feature, mask=(feature >= 0) & (feature < WIDTH), other=NOTHING[MAP]).to(tl.float32)
    shift = tl.zeros((1,), tl.float32)
    if MAP == EXP and SHIFTED:
        every = tl.arange(0, feature.shape[0])
        shift += tl.max(tl.load(x + every, mask=every < WIDTH, other=-float("inf")).to(tl.float32), axis=0)
    return tl.reshape(mapped(raw[None, :], shift, MAP), (feature.shape[0],))


@triton.jit
def _rotated(
    x, plain, cos, sin, feature, WIDTH: tl.constexpr, PAIRS: tl.constexpr, START: tl.constexpr,
    INTERLEAVED: tl.constexpr, MAP: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Return the rotated features of a row. The other member of each pair is loaded again, which costs little."""
    rotated = plain
    if PAIRS:
        at = feature - START
        inside = (at >= 0) & (at < 2 * PAIRS)
        if INTERLEAVED:
            pair, is_first = at // 2, at % 2 == 0
            other = tl.where(is_first, feature + 1, feature - 1)
        else:
            pair, is_first = at % PAIRS, at < PAIRS
            other = tl.where(is_first, feature + PAIRS, feature - PAIRS)
        c = tl.load(cos + pair, mask=inside, other=1.0)
        s = tl.load(sin + pair, mask=inside, other=0.0)
        mate = _features(x, tl.where(inside, other, feature), WIDTH, MAP, SHIFTED)
        rotated = plain * c + tl.where(is_first, -mate, mate) * s
    return rotated


@triton.jit(do_not_specialize=["row"])
def step_kernel(
    q, k, v, above, below, cos, sin, decay, out, new_above, new_below, row,
    q_b, q_h, k_b, k_h, v_b, v_h, o_b, o_h, decay_b, decay_h, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr,
    PAIRS: tl.constexpr, START: tl.constexpr, INTERLEAVED: tl.constexpr, Q_MAP: tl.constexpr, K_MAP: tl.constexpr,
    DECAYS: tl.constexpr, NORMALIZED: tl.constexpr, LEAST: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Process one head of the sums of one sequence, and COLUMNS of its values.

    HEADS is the number of heads of the sums. GROUP query heads share a head of the sums; SHARED heads of the sums share
    a key head.
    """
    BLOCKS: tl.constexpr = (V_DIM + COLUMNS - 1) // COLUMNS
    owner = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    batch, head = owner // HEADS, owner % HEADS
    feature = tl.arange(0, PADDED)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    known, inside = feature < WIDTH, column < V_DIM
    cosines, sines = cos + row.to(tl.int64) * PAIRS, sin + row.to(tl.int64) * PAIRS
    key = k + batch * k_b + (head // SHARED) * k_h
    plain_k = _features(key, feature, WIDTH, K_MAP, False)
    rotated_k = _rotated(key, plain_k, cosines, sines, feature, WIDTH, PAIRS, START, INTERLEAVED, K_MAP, False)
    value = tl.load(v + batch * v_b + (head // SHARED) * v_h + column, mask=inside, other=0.0).to(tl.float32)
    at = owner * (WIDTH * V_DIM) + feature[:, None] * V_DIM + column[None, :]
    mask = known[:, None] & inside[None, :]
    sums = tl.load(above + at, mask=mask, other=0.0)
    plain = tl.load(below + owner * WIDTH + feature, mask=known, other=0.0)
    if DECAYS:
        kept = tl.exp(tl.load(decay + batch * decay_b + head * decay_h).to(tl.float32))
        sums, plain = sums * kept, plain * kept
    sums += rotated_k[:, None] * value[None, :]
    plain += plain_k
    tl.store(new_above + at, sums, mask=mask)
    # A comparison of vectors, because the interpreter has no masks of scalars.
    tl.store(new_below + owner * WIDTH + feature, plain, mask=feature < tl.where(block == 0, WIDTH, 0))
    for member in range(0, GROUP):
        query_head = head * GROUP + member
        query = q + batch * q_b + query_head * q_h
        plain_q = _features(query, feature, WIDTH, Q_MAP, NORMALIZED)
        rotated_q = _rotated(
            query, plain_q, cosines, sines, feature, WIDTH, PAIRS, START, INTERLEAVED, Q_MAP, NORMALIZED
        )
        result = tl.sum(rotated_q[:, None] * sums, axis=0)
        if NORMALIZED:
            denominator = tl.sum(plain_q * plain, axis=0)
            result = result / tl.where(tl.abs(denominator) <= LEAST, float("inf"), denominator)
        else:
            result = result * scale
        target = out + batch * o_b + query_head * o_h + column
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)


def linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    above: Tensor,
    below: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    row: int,
    decay: Tensor | None,
    layout: Layout,
    maps: tuple[int, int],
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the output for one token, and the sums after it; None if the call is unusual in any way.

    Arguments are those of `linear.native.linear_step`.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> one = torch.ones(1, 1, 1, 1, device="cpu" if INTERPRETED else "cuda")
    >>> step = linear_step(one, one, one, 3 * one, one[0], None, None, 0, None, Layout(True, 0, -2), (3, 3), True, 1.0)
    >>> step[0].item()  # (3 + 1) / (1 + 1)
    2.0
    """
    if not is_eager():
        return None
    tensors = q, k, v, above, below, cos, sin, decay
    signed = signature(*tensors)
    if signed is None:
        return None
    key = "linear_step", signed[0], layout, maps, normalize, scale
    launch = LAUNCHES.get(key, key)
    if launch is key:
        launch = LAUNCHES.keep(key, _launch(tensors, layout, maps, normalize, scale))
    if launch is None:
        return None
    same = v.shape[-1] == q.shape[-1]
    out = empty_like(q) if same else new_empty(v, (*q.shape[:3], v.shape[-1]))
    new_above, new_below = empty_like(above), empty_like(below)
    results = out, new_above, new_below
    # A kernel needs an address for every tensor, also for those that it does not read.
    given = [below if x is None else x for x in tensors]
    addresses = (*signed[1], out.data_ptr(), new_above.data_ptr(), new_below.data_ptr(), row)
    launch(q.device, *given, *results, row, addresses=addresses)
    return results


def _launch(
    tensors: tuple[Any, ...], layout: Layout, maps: tuple[int, int], normalize: bool, scale: float
) -> Launch | None:
    """Return the launch for tensors of a signature, or None if the kernel does not support them."""
    q, k, v, above, below, cos, sin, decay = tensors
    if any(x is not None and (x.device != q.device or x.requires_grad) for x in tensors) and torch.is_grad_enabled():
        return None
    if not q.dim() == k.dim() == v.dim() == above.dim() == 4 or below.dim() != 3:
        return None
    (batch, heads, tokens, width), (kv_heads, v_dim), state_heads = q.shape, (k.shape[1], v.shape[3]), above.shape[1]
    shapes = (
        (k, (batch, kv_heads, 1, width)),
        (v, (batch, kv_heads, 1, v_dim)),
        (above, (batch, state_heads, width, v_dim)),
        (below, (batch, state_heads, width)),
    )
    if (
        tokens != 1
        or any(tuple(x.shape) != shape for x, shape in shapes)
        or 0 in (batch, heads, width, v_dim, kv_heads)
    ):
        return None
    if q.dtype not in FLOATS or q.dtype == torch.float64 or not q.dtype == k.dtype == v.dtype:
        return None
    if not above.dtype == below.dtype == torch.float32 or not (above.is_contiguous() and below.is_contiguous()):
        return None
    if (
        heads % kv_heads
        or state_heads not in (kv_heads, heads)
        or any(x.stride(3) != 1 for x in (q, k, v) if x.shape[3] > 1)
    ):
        return None
    if any(x is not None and x.device != q.device for x in tensors) or max(width, v_dim) > 256:
        return None
    pairs = 0
    if cos is not None and sin is not None:
        tables = cos.dim() == 2 and cos.shape == sin.shape and cos.is_contiguous() and sin.is_contiguous()
        if not tables or not cos.dtype == sin.dtype == torch.float32 or layout.start + 2 * cos.shape[1] > width:
            return None
        pairs = cos.shape[1]
    decay_strides = 0, 0
    if decay is not None:
        if tuple(decay.shape) not in ((state_heads,), (batch, state_heads, 1)):
            return None
        decay_strides = (0, decay.stride(0)) if decay.dim() == 1 else (decay.stride(0), decay.stride(1))
    elif state_heads != kv_heads:
        return None
    # `out` is shaped and strided as q, or contiguous.
    out_strides = empty_like(q, device="meta").stride() if v_dim == width else (heads * v_dim, v_dim, v_dim, 1)
    if out_strides[3] != 1 and v_dim > 1:
        return None
    numbers = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out_strides[:2], *decay_strides, scale)
    constants = {
        "HEADS": state_heads, "GROUP": heads // state_heads, "SHARED": state_heads // kv_heads, "WIDTH": width,
        "V_DIM": v_dim, "PAIRS": pairs, "START": layout.start if pairs else 0, "INTERLEAVED": layout.interleaved,
        "Q_MAP": maps[0], "K_MAP": maps[1], "DECAYS": decay is not None, "NORMALIZED": normalize,
        "LEAST": SMALLEST if decay is not None else 0.0, "PADDED": max(16, triton.next_power_of_2(width)),
        "COLUMNS": COLUMNS,
    }  # fmt: skip
    programs = batch * state_heads * -(-v_dim // COLUMNS)
    return Launch(step_kernel, programs, numbers, constants, warps=4)
