"""Linear attention with RoPE, decay and bias, in two independent forms that must agree: a double sum and a recurrence.

As in RoFormer (2104.09864, eq. 19) the numerator is rotated and the denominator is not. Decay and bias multiply the
terms of both sums. Both forms compute in float64 and round once to the dtype of q.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.reference.attention import causal_mask, group_heads, require_bias, require_qkv
from ropewalk.reference.rotate import InvFreq, rotate
from ropewalk.shapes import Float, Shaped
from ropewalk.spec.rope import PAIRINGS, Pairing

__all__ = ["elu_plus_one", "linear_attention_by_recurrence", "linear_attention_by_sum"]

Q = Float[Tensor, "batch heads q_seq dim"]
K = Float[Tensor, "batch kv_heads k_seq dim"]
V = Float[Tensor, "batch kv_heads k_seq v_dim"]
Out = Float[Tensor, "batch heads q_seq v_dim"]
FeatureMap = Callable[[Tensor], Tensor]
# The logarithm of the decay per token: one number per head, or one per sequence, head and token.
Decay = Float[Tensor, "decay_heads"] | Float[Tensor, "batch decay_heads k_seq"]


def elu_plus_one(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Feature map elu(x) + 1: x + 1 if x > 0, exp(x) otherwise (Katharopoulos et al., 2006.16236, eq. 7).

    The result is positive if exp(x) is: for x >= -745 in float64, -103 in float32, -92 in bfloat16, -17 in float16.
    The usual form `torch.nn.functional.elu(x) + 1` is exactly 0 in float32 for x below about -17.

    Args:
        x: Tensor of any shape.

    Returns:
        Tensor of the shape and dtype of x.

    >>> elu_plus_one(torch.tensor([2.0, 0.0])).tolist()
    [3.0, 1.0]
    >>> bool(elu_plus_one(torch.tensor(-80.0)) > 0)
    True
    """
    # The inner choice keeps the gradient of the unused branch finite. A clamp has no gradient at 0 from torch 2.15 on.
    return torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, 0, x)))


def linear_attention_by_sum(
    q: Q,
    k: K,
    v: V,
    *,
    inv_freq: InvFreq | None = None,
    positions: Shaped[Tensor, "*ids k_seq"] | None = None,
    q_positions: Shaped[Tensor, "*ids q_seq"] | None = None,
    pairing: Pairing = "interleaved",
    causal: bool = False,
    q_map: FeatureMap = elu_plus_one,
    k_map: FeatureMap = elu_plus_one,
    decay: Decay | None = None,
    bias: Float[Tensor, "*#any q_seq k_seq"] | None = None,
    normalize: bool = True,
    scale: float = 1.0,
) -> Out:
    """Linear attention as a double sum: sum_n w_mn (R_m phi(q_m) . R_n psi(k_n)) v_n / sum_n w_mn phi(q_m) . psi(k_n).

    RoFormer, 2104.09864, eq. 19, with weights w_mn = exp(bias_mn + g_{n+1} + ... + g_m), which are 1 without bias and
    decay. If attention is not causal, the decay is exp(g |m - n|). Without `inv_freq` nothing is rotated
    (Katharopoulos et al., 2006.16236, eq. 4). With it, the weights of the values can be negative and need not sum to 1.
    A row whose denominator is 0 is 0.

    Args:
        q: Queries [batch, heads, q_seq, dim].
        k: Keys [batch, kv_heads, k_seq, dim]; heads is a multiple of kv_heads.
        v: Values [batch, kv_heads, k_seq, v_dim].
        inv_freq: Frequencies [pairs] or [heads, pairs]. Default: no rotation.
        positions: Positions of the keys [k_seq] or [batch, k_seq]. Default: 0 .. k_seq-1.
        q_positions: Positions of the queries [q_seq] or [batch, q_seq]. Default: the last of `positions`.
        pairing: Pairing of the rotated features.
        causal: Whether later keys are masked.
        q_map: Feature map phi of the queries.
        k_map: Feature map psi of the keys.
        decay: Logarithms g of the decay per token: [kv_heads], [heads], [batch, kv_heads, k_seq] or
            [batch, heads, k_seq]. Default: no decay.
        bias: Logarithm of a factor on each term: [q_seq, k_seq], [heads, q_seq, k_seq] or
            [batch, heads, q_seq, k_seq]. Default: no bias.
        normalize: Whether to divide by the denominator.
        scale: Factor on the result if it is not divided.

    Returns:
        Tensor [batch, heads, q_seq, v_dim] in the dtype of q.

    Raises:
        RopewalkError: If shapes or dtypes do not match, or if positions are passed without frequencies.

    >>> q = k = torch.zeros(1, 1, 2, 2)  # equal weights: the mean of the visible values
    >>> v = torch.tensor([[[[1.0], [3.0]]]])
    >>> linear_attention_by_sum(q, k, v, causal=True).flatten().tolist()
    [1.0, 2.0]
    >>> halved = torch.tensor([0.5]).log()  # the first value has half the weight of the second: (0.5 + 3) / 1.5
    >>> linear_attention_by_sum(q, k, v, causal=True, decay=halved).flatten().tolist()
    [1.0, 2.3333332538604736]
    """
    dtype = q.dtype
    q, k, v, rotated_q, rotated_k = _features(
        q, k, v, inv_freq, positions, q_positions, pairing, causal, q_map, k_map, decay
    )
    require_bias(bias, q, k, asked="linear attention")
    weights = _decays(decay, q, k, causal)
    if bias is not None:
        weights = weights * torch.exp(bias.double())
    weights = weights * causal_mask(q.shape[-2], k.shape[-2], q.device) if causal else weights
    numerator = ((rotated_q @ rotated_k.transpose(-1, -2)) * weights) @ v
    if not normalize:
        return (scale * numerator).to(dtype)
    denominator = ((q @ k.transpose(-1, -2)) * weights).sum(dim=-1, keepdim=True)
    return (numerator / torch.where(denominator == 0, torch.inf, denominator)).to(dtype)


def _decays(decay: Tensor | None, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return exp(g_{n+1} + ... + g_m), or exp(g |m - n|) unless causal, as [batch or 1, heads, q_seq, k_seq]."""
    (_, heads, queries, _), keys = q.shape, k.shape[-2]
    if decay is None:
        return q.new_ones(1, heads, 1, 1)
    g = decay.double()[None, :, None].expand(1, -1, keys) if decay.dim() == 1 else decay.double()
    g = g.repeat_interleave(heads // g.shape[1], dim=1)
    tokens = torch.arange(keys, device=k.device)
    if not causal:
        return torch.exp(g[..., :1, None] * (tokens[keys - queries :, None] - tokens).abs())
    # Entry n of row m is that of row m-1 and g_m, if n < m.
    row = torch.zeros_like(g)
    rows: list[Tensor] = []
    for m in range(keys):
        row = row + g[..., m : m + 1] * (tokens < m)
        rows.append(row)
    return torch.exp(torch.stack(rows, dim=-2))[..., keys - queries :, :] if rows else q.new_ones(1, heads, queries, 0)


def linear_attention_by_recurrence(
    q: Q,
    k: K,
    v: V,
    *,
    inv_freq: InvFreq | None = None,
    positions: Shaped[Tensor, "*ids k_seq"] | None = None,
    q_positions: Shaped[Tensor, "*ids q_seq"] | None = None,
    pairing: Pairing = "interleaved",
    causal: bool = False,
    q_map: FeatureMap = elu_plus_one,
    k_map: FeatureMap = elu_plus_one,
    decay: Decay | None = None,
    normalize: bool = True,
    scale: float = 1.0,
) -> Out:
    """`linear_attention_by_sum` as a recurrence over tokens, with a state of constant size.

    S_n = e^{g_n} S_{n-1} + (R_n psi(k_n)) v_n^T;  z_n = e^{g_n} z_{n-1} + psi(k_n);
    o_m = (R_m phi(q_m))^T S / phi(q_m)^T z. A causal query uses the state after its own token. Any other query uses the
    final state. Keys are rotated once, when they are added to the state.

    Args:
        q: Queries [batch, heads, q_seq, dim].
        k: Keys [batch, kv_heads, k_seq, dim]; heads is a multiple of kv_heads.
        v: Values [batch, kv_heads, k_seq, v_dim].
        inv_freq: Frequencies [pairs] or [heads, pairs]. Default: no rotation.
        positions: Positions of the keys [k_seq] or [batch, k_seq]. Default: 0 .. k_seq-1.
        q_positions: Positions of the queries [q_seq] or [batch, q_seq]. Default: the last of `positions`.
        pairing: Pairing of the rotated features.
        causal: Whether later keys are masked.
        q_map: Feature map phi of the queries.
        k_map: Feature map psi of the keys.
        decay: As in `linear_attention_by_sum`, if attention is causal.
        normalize: Whether to divide by the denominator.
        scale: Factor on the result if it is not divided.

    Returns:
        Tensor [batch, heads, q_seq, v_dim] in the dtype of q.

    Raises:
        RopewalkError: If shapes or dtypes do not match, if positions are passed without frequencies, or if there is a
            decay and attention is not causal.

    >>> q = k = torch.zeros(1, 1, 2, 2)
    >>> linear_attention_by_recurrence(q, k, torch.tensor([[[[1.0], [3.0]]]]), causal=True).flatten().tolist()
    [1.0, 2.0]
    """
    if decay is not None and not causal:
        raise RopewalkError(
            asked="linear_attention_by_recurrence(decay=..., causal=False)",
            expected="a decay only if attention is causal: the recurrence runs in one direction",
            got="causal=False",
            do="use linear_attention_by_sum",
        )
    dtype = q.dtype
    q, k, v, rotated_q, rotated_k = _features(
        q, k, v, inv_freq, positions, q_positions, pairing, causal, q_map, k_map, decay
    )
    queries, keys = q.shape[-2], k.shape[-2]
    state = v.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    norm = v.new_zeros(*q.shape[:2], k.shape[-1])
    outputs: list[Tensor] = []
    for n in range(keys):
        if decay is not None:
            g = decay if decay.dim() == 1 else decay[:, :, n]
            kept = torch.exp(g.double()).repeat_interleave(q.shape[1] // g.shape[-1], dim=-1)
            state, norm = kept[..., None, None] * state, kept[..., None] * norm
        state = state + rotated_k[:, :, n, :, None] * v[:, :, n, None, :]
        norm = norm + k[:, :, n]
        m = n - (keys - queries)
        if causal and m >= 0:
            outputs.append(_read(rotated_q[:, :, m], q[:, :, m], state, norm, normalize, scale))
    if not causal:
        outputs = [_read(rotated_q[:, :, m], q[:, :, m], state, norm, normalize, scale) for m in range(queries)]
    return (torch.stack(outputs, dim=2) if outputs else v.new_zeros(*q.shape[:3], v.shape[-1])).to(dtype)


def _read(rotated_q: Tensor, q: Tensor, state: Tensor, norm: Tensor, normalize: bool, scale: float) -> Tensor:
    numerator = (rotated_q.unsqueeze(-1) * state).sum(dim=-2)
    if not normalize:
        return scale * numerator
    denominator = (q * norm).sum(dim=-1, keepdim=True)
    return numerator / torch.where(denominator == 0, torch.inf, denominator)


def _features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inv_freq: InvFreq | None,
    positions: Tensor | None,
    q_positions: Tensor | None,
    pairing: Pairing,
    causal: bool,
    q_map: FeatureMap,
    k_map: FeatureMap,
    decay: Decay | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return phi(q), psi(k), v, R phi(q), R psi(k), with key heads repeated for the query heads that share them."""
    require_qkv(q, k, v, causal=causal, asked="linear attention")
    _require_decay(decay, q, k, causal)
    require_choice(pairing, PAIRINGS, asked="linear attention (pairing=...)")
    k, v = group_heads(k, q.shape[1]), group_heads(v, q.shape[1]).double()
    q, k = q_map(q.double()), k_map(k.double())
    queries, keys = q.shape[-2], k.shape[-2]
    has_positions = positions is not None or q_positions is not None
    if (inv_freq is None and has_positions) or (inv_freq is not None and q_positions is None and queries > keys):
        raise RopewalkError(
            asked="linear attention with RoPE",
            expected="positions only together with inv_freq, and q_positions if there are more queries than keys",
            got=f"inv_freq {'set' if inv_freq is not None else 'None'}, {queries} queries, {keys} keys",
            do="pass inv_freq to rotate, and q_positions for the positions of the queries",
        )
    if inv_freq is None:
        return q, k, v, q, k
    positions = torch.arange(keys, device=k.device) if positions is None else positions
    q_positions = positions[..., keys - queries :] if q_positions is None else q_positions
    rotated_q = rotate(q, q_positions, inv_freq, pairing=pairing)
    return q, k, v, rotated_q, rotate(k, positions, inv_freq, pairing=pairing)


def _require_decay(decay: Tensor | None, q: Tensor, k: Tensor, causal: bool) -> None:
    """Raise unless `decay` has one number g <= 0 per head, or if causal also one per sequence, head and token."""
    if decay is None:
        return
    shapes = [(heads,) for heads in (k.shape[1], q.shape[1])]
    if causal:
        shapes += [(len(k), heads, k.shape[2]) for (heads,) in shapes]
    elif q.shape[2] != k.shape[2]:
        raise RopewalkError(
            asked="linear attention (decay=..., causal=False)",
            expected="as many queries as keys",
            got=f"{q.shape[2]} and {k.shape[2]}",
            do="pass q, k and v of the same tokens",
        )
    expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
    if tuple(decay.shape) not in shapes or not bool((decay <= 0).all()):
        raise RopewalkError(
            asked="linear attention (decay=...)",
            expected=f"numbers of at most 0 of shape {expected}",
            got=f"shape {list(decay.shape)}, largest {decay.max().item() if decay.numel() else 'none'}",
            do="pass the logarithm of the factor per token: log(0.9) for 0.9",
        )
