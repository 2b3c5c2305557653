"""Linear attention with RoPE, in two independent forms that must agree: the double sum and the recurrence.

As in RoFormer (2104.09864, eq. 19) the numerator is rotated and the denominator is not. Both forms compute in float64
and round once to the dtype of q.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.reference.attention import causal_mask, group_heads, require_qkv
from ropewalk.reference.rotate import InvFreq, rotate
from ropewalk.spec.rope import PAIRINGS, Pairing

__all__ = ["elu_plus_one", "linear_attention_by_recurrence", "linear_attention_by_sum"]

Q = Float[Tensor, "batch heads q_seq dim"]
K = Float[Tensor, "batch kv_heads k_seq dim"]
V = Float[Tensor, "batch kv_heads k_seq v_dim"]
Out = Float[Tensor, "batch heads q_seq v_dim"]
FeatureMap = Callable[[Tensor], Tensor]


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
    # The clamp keeps the gradient of the unused branch finite.
    return torch.where(x > 0, x + 1, torch.exp(x.clamp_max(0)))


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
) -> Out:
    """Linear attention as a double sum: sum_n [(R_m phi(q_m)) . (R_n psi(k_n))] v_n / sum_n phi(q_m) . psi(k_n).

    RoFormer, 2104.09864, eq. 19. Without `inv_freq` nothing is rotated (Katharopoulos et al., 2006.16236, eq. 4).
    With it, the weights of the values can be negative and need not sum to 1.

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

    Returns:
        Tensor [batch, heads, q_seq, v_dim] in the dtype of q.

    Raises:
        RopewalkError: If shapes or dtypes do not match, or if positions are passed without frequencies.

    >>> q = k = torch.zeros(1, 1, 2, 2)  # equal weights: the mean of the visible values
    >>> linear_attention_by_sum(q, k, torch.tensor([[[[1.0], [3.0]]]]), causal=True).flatten().tolist()
    [1.0, 2.0]
    """
    dtype = q.dtype
    q, k, v, rotated_q, rotated_k = _features(q, k, v, inv_freq, positions, q_positions, pairing, causal, q_map, k_map)
    mask = causal_mask(q.shape[-2], k.shape[-2], q.device) if causal else 1.0
    numerator = ((rotated_q @ rotated_k.transpose(-1, -2)) * mask) @ v
    denominator = ((q @ k.transpose(-1, -2)) * mask).sum(dim=-1, keepdim=True)
    return (numerator / denominator).to(dtype)


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
) -> Out:
    """`linear_attention_by_sum` as a recurrence over tokens, with a state of constant size.

    S_n = S_{n-1} + (R_n psi(k_n)) v_n^T;  z_n = z_{n-1} + psi(k_n);  o_m = (R_m phi(q_m))^T S / phi(q_m)^T z.
    A causal query uses the state after its own token. Any other query uses the final state. Keys are rotated once,
    when they are added to the state.

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

    Returns:
        Tensor [batch, heads, q_seq, v_dim] in the dtype of q.

    Raises:
        RopewalkError: If shapes or dtypes do not match, or if positions are passed without frequencies.

    >>> q = k = torch.zeros(1, 1, 2, 2)
    >>> linear_attention_by_recurrence(q, k, torch.tensor([[[[1.0], [3.0]]]]), causal=True).flatten().tolist()
    [1.0, 2.0]
    """
    dtype = q.dtype
    q, k, v, rotated_q, rotated_k = _features(q, k, v, inv_freq, positions, q_positions, pairing, causal, q_map, k_map)
    queries, keys = q.shape[-2], k.shape[-2]
    state = v.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    norm = v.new_zeros(*q.shape[:2], k.shape[-1])
    outputs: list[Tensor] = []
    for n in range(keys):
        state = state + rotated_k[:, :, n, :, None] * v[:, :, n, None, :]
        norm = norm + k[:, :, n]
        m = n - (keys - queries)
        if causal and m >= 0:
            outputs.append(_read(rotated_q[:, :, m], q[:, :, m], state, norm))
    if not causal:
        outputs = [_read(rotated_q[:, :, m], q[:, :, m], state, norm) for m in range(queries)]
    return (torch.stack(outputs, dim=2) if outputs else v.new_zeros(*q.shape[:3], v.shape[-1])).to(dtype)


def _read(rotated_q: Tensor, q: Tensor, state: Tensor, norm: Tensor) -> Tensor:
    return (rotated_q.unsqueeze(-1) * state).sum(dim=-2) / (q * norm).sum(dim=-1, keepdim=True)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return phi(q), psi(k), v, R phi(q), R psi(k), with key heads repeated for the query heads that share them."""
    require_qkv(q, k, v, causal=causal, asked="linear attention")
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
