"""What linear attention is held to: the reference in float64, and the same formula run in a dtype."""

from typing import get_args

import torch

from ropewalk.kernels.types import FeatureMapName
from ropewalk.reference import linear_attention_by_sum

NAMES = get_args(FeatureMapName)

# The formulas of the feature maps, apart from the kernels' own. Below 0 elu(x) + 1 is exp(x); above it the exponential
# is of 0, so that its gradient is finite.
FORMULAS = {
    "elu": lambda x: torch.where(x > 0, x + 1, torch.exp(x.clamp_max(0))),
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x) ** 2,
    "identity": lambda x: x,
    "exp": torch.exp,
}


def drawn(batch, heads, kv_heads, seq, dim, v_dim, dtype=torch.float64, *, keys=None, seed=0, device="cpu"):
    """q, k, v of a seed. Not centred, so that the identity has denominators away from 0."""
    random = torch.Generator().manual_seed(seed)
    keys = seq if keys is None else keys
    shapes = (batch, heads, seq, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, v_dim)
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    return tuple(x.to(device, dtype) for x in (q * 0.5 + 0.75, k * 0.5 + 0.75, v))


def exact(q, k, v, rope=None, *, causal=True, feature_map="elu", positions=None):
    """The reference's sum over pairs, in float64."""
    spec = {} if rope is None else {"inv_freq": rope.inv_freq.cpu(), "pairing": rope.spec.pairing}
    if positions is not None:
        spec["positions"] = positions.cpu()
    maps = (feature_map, feature_map) if isinstance(feature_map, str) or callable(feature_map) else feature_map
    maps = [FORMULAS[one] if isinstance(one, str) else one for one in maps]
    return linear_attention_by_sum(
        *(x.double().cpu() for x in (q, k, v)), **spec, causal=causal, q_map=maps[0], k_map=maps[1]
    )


def formula(q, k, v, rope=None, *, causal=True, feature_map="elu"):
    """Every step of the sum in the dtype of q, with angles that are exact."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    fq, fk = FORMULAS[feature_map](q), FORMULAS[feature_map](k)
    rotated = [fq, fk]
    if rope is not None:
        rotated = []
        for x in (fq, fk):
            inv_freq, keys = rope.inv_freq.to(x.device), k.shape[-2]
            ids = torch.arange(keys - x.shape[-2], keys, device=x.device)
            angle = ids.double()[:, None] * inv_freq
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            interleaved = rope.spec.pairing == "interleaved"
            a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
            u, w = a * cos - b * sin, a * sin + b * cos
            rotated.append(torch.stack([u, w], dim=-1).flatten(-2) if interleaved else torch.cat([u, w], dim=-1))
    scores, plain = rotated[0] @ rotated[1].transpose(-1, -2), fq @ fk.transpose(-1, -2)
    if causal:
        late = k.shape[-2] - q.shape[-2]
        scores, plain = scores.tril(late), plain.tril(late)
    return (scores @ v) / plain.sum(dim=-1, keepdim=True)


def recurrence(q, k, v, rope):
    """The recurrence over tokens in the dtype of q, with angles that are exact."""
    fq, fk = FORMULAS["elu"](q), FORMULAS["elu"](k)
    rotated = [rope(x) for x in (fq, fk)]
    above, below, outputs = 0, 0, []
    for a, b, c, d, e in zip(*(x.unbind(dim=2) for x in (fq, fk, *rotated, v)), strict=True):
        above, below = above + d[..., None] * e[..., None, :], below + b
        outputs.append((c[..., None] * above).sum(dim=-2) / (a * below).sum(dim=-1, keepdim=True))
    return torch.stack(outputs, dim=2)


def error(x, truth):
    """How far x is from the truth, as a share of it."""
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
