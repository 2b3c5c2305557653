"""Expected values of linear attention: its sums in float64, and the same formula computed in a dtype.

No code is shared with the kernels: feature maps, rotations and sums are written from the papers.
"""

from typing import get_args

import torch

from formulas import rotate_by_spec
from ropewalk.kernels.types import FeatureMapName

NAMES = get_args(FeatureMapName)

# elu(x) + 1 is exp(x) below 0 (2006.16236, eq. 7). The inner choice keeps the gradient of the unused branch finite.
FORMULAS = {
    "elu": lambda x: torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, 0, x))),
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x) ** 2,
    "identity": lambda x: x,
    "exp": torch.exp,
}


def drawn(batch, heads, kv_heads, seq, dim, v_dim, dtype=torch.float64, *, keys=None, seed=0, device="cpu"):
    """Random q, k, v. Their mean is not 0, so that denominators of the identity map are not near 0."""
    random = torch.Generator().manual_seed(seed)
    keys = seq if keys is None else keys
    shapes = (batch, heads, seq, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, v_dim)
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    return tuple(x.to(device, dtype) for x in (q * 0.5 + 0.75, k * 0.5 + 0.75, v))


def feature_maps(feature_map):
    """The maps of queries and of keys as functions: names stand for their formulas, functions for themselves."""
    maps = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    return [
        FORMULAS[name_or_function] if isinstance(name_or_function, str) else name_or_function
        for name_or_function in maps
    ]


def direct_sums(q, k, v, rope=None, *, causal=True, feature_map="elu", positions=None, sums=None):
    """Linear attention as sums over all pairs of tokens, in the dtype of q, with exact angles (2104.09864, eq. 19).

    It reads the fields of `rope.spec`, and calls neither the module nor a kernel. An output without a feature above 0
    in its denominator is 0.

    Args:
        q: Queries, at the last of the positions of the keys.
        k: Keys.
        v: Values.
        rope: A RotaryEmbedding, or None.
        causal: Whether later keys are masked.
        feature_map: A name, a function, or one of either for queries and one for keys.
        positions: Positions of the keys [keys] or [batch, keys]. Default: 0 .. keys-1.
        sums: Sums before the first key: [batch, kv_heads, features, v_dim] and [batch, kv_heads, features].

    Returns:
        The outputs, and the two sums after the last key.
    """
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    q_map, k_map = feature_maps(feature_map)
    plain_q, plain_k = q_map(q), k_map(k)
    rotated_q, rotated_k = plain_q, plain_k
    if rope is not None:
        ids = torch.arange(keys) if positions is None else positions
        rotated_q = rotate_by_spec(plain_q, rope.spec, ids[..., keys - queries :], role="q")
        rotated_k = rotate_by_spec(plain_k, rope.spec, ids, role="k")
    sums_after = torch.einsum("bhnd,bhnv->bhdv", rotated_k, v), plain_k.sum(dim=2)
    plain_k, rotated_k, values = (x.repeat_interleave(group, dim=1) for x in (plain_k, rotated_k, v))
    scores, plain_scores = rotated_q @ rotated_k.transpose(-1, -2), plain_q @ plain_k.transpose(-1, -2)
    if causal:
        scores, plain_scores = scores.tril(keys - queries), plain_scores.tril(keys - queries)
    numerator, denominator = scores @ values, plain_scores.sum(dim=-1, keepdim=True)
    if sums is not None:
        above, below = (x.repeat_interleave(group, dim=1) for x in sums)
        numerator = numerator + rotated_q @ above
        denominator = denominator + plain_q @ below[..., None]
        sums_after = sums_after[0] + sums[0], sums_after[1] + sums[1]
    is_empty = denominator == 0
    out = (numerator / denominator.masked_fill(is_empty, 1.0)).masked_fill(is_empty, 0.0)
    return out, *sums_after


def exact(q, k, v, rope=None, **options):
    """The outputs of `direct_sums` in float64 on the CPU."""
    return direct_sums(*(x.double().cpu() for x in (q, k, v)), rope, **options)[0]


def formula(q, k, v, rope=None, **options):
    """The outputs of `direct_sums`, every step in the dtype of q: the errors that the plain formula has in it."""
    return direct_sums(q, k, v, rope, **options)[0]


def recurrence(q, k, v, rope):
    """The recurrence over tokens in the dtype of q, with exact angles."""
    features = [FORMULAS["elu"](x) for x in (q, k)]
    rotated = [rotate_by_spec(x, rope.spec, torch.arange(x.shape[2])) for x in features]
    above, below, outputs = 0, 0, []
    for a, b, c, d, e in zip(*(x.unbind(dim=2) for x in (*features, *rotated, v)), strict=True):
        above, below = above + d[..., None] * e[..., None, :], below + b
        outputs.append((c[..., None] * above).sum(dim=-2) / (a * below).sum(dim=-1, keepdim=True))
    return torch.stack(outputs, dim=2)


def error(x, truth):
    """The relative error of x, in the Euclidean norm."""
    return ((x.double().cpu() - truth).norm() / truth.norm()).item()


def with_gradients(f, inputs, cotangent):
    """The output of f and the gradients of its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    return [out, *torch.autograd.grad(out, leaves, cotangent.to(out.device, out.dtype))]


def next_positions(state):
    """The positions of the next tokens, one per sequence: a tensor in the state, not an int."""
    assert isinstance(state.position, torch.Tensor)
    return state.position.tolist()
