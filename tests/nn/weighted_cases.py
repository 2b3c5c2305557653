"""Expected values of linear attention with a decay or a bias, and the cases that cover all pairs of their options.

No code is shared with the kernels: weights are products of exp(g) from token to token, or exponentials of a bias that
is written from the papers, and both sums run over all pairs of tokens. Everything is computed in the dtype of q.
"""

import itertools
import random
from typing import Any, NamedTuple

import torch

import ropewalk as rw
from formulas import rotate_by_spec
from nn.linear_cases import drawn, feature_maps

DECAYS = ("per key head", "per query head", "per token", "per token and query head")
KINDS = (*DECAYS, "alibi", "t5")


class Rule(NamedTuple):
    """What weights the terms.

    Args:
        kind: One of `KINDS`, or "plain".
        tensor: The decay, or T5's numbers [buckets, heads]; None for "alibi" and "plain".
        buckets: num_buckets and max_distance of T5.
    """

    kind: str
    tensor: torch.Tensor | None = None
    buckets: tuple[int, int] = (32, 128)

    def options(self, heads, *, causal=True, tensor=None) -> dict[str, Any]:
        """The arguments of linear_attention. `tensor` replaces that of the rule, and receives gradients."""
        tensor = self.tensor if tensor is None else tensor
        if self.kind == "plain":
            return {}
        if self.kind in DECAYS:
            return {"decay": tensor}
        if self.kind == "alibi":
            return {"bias": rw.encoding("alibi", dim=8 * heads, num_heads=heads)}
        encoding: Any = t5(heads, self.buckets, causal=causal)
        # Not a new parameter: gradients, and transforms of functions, go to the tensor itself.
        del encoding.weight
        encoding.weight = tensor
        return {"bias": encoding}

    def part(self, start, stop) -> "Rule":
        """The rule of the tokens start .. stop-1."""
        tensor = self.tensor
        return self if tensor is None or tensor.dim() < 3 else self._replace(tensor=tensor[..., start:stop])


def t5(heads, buckets, *, causal):
    num_buckets, max_distance = buckets
    return rw.encoding(
        "t5", dim=8 * heads, num_heads=heads, causal=causal, num_buckets=num_buckets, max_distance=max_distance
    )


def rule_of(kind, batch, heads, kv_heads, seq, dtype=torch.float64, *, seed=0, buckets=(32, 128), strength=0.2) -> Rule:
    """A rule with random numbers: decays between 0 and -strength per token."""
    source = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=source, dtype=torch.float64)

    tensor = None
    if kind in DECAYS:
        count = heads if "query" in kind else kv_heads
        tensor = -strength * uniform(*((batch, count, seq) if "token" in kind else (count,)))
    elif kind == "t5":
        tensor = 2 * uniform(buckets[0], heads) - 1
    return Rule(kind, None if tensor is None else tensor.to(dtype), buckets)


def t5_bucket(distance, causal, num_buckets, max_distance):
    """The bucket of key - query (1910.10683 and its published code), with edges compared as whole numbers.

    Half of the buckets of a side are one distance wide. Distance d is in bucket e + j of the others, where j is the
    largest number with (d / e)^(n - e) >= (max / e)^j, for n buckets of the side and e = n // 2.
    """
    buckets, first = num_buckets, 0
    if not causal:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    wide = buckets - exact
    steps = [j for j in range(wide) if max_distance**j * exact ** (wide - j) <= distance**wide]
    return first + exact + steps[-1]


def t5_bias(weight, q_ids, k_ids, buckets, *, causal):
    """[batch or 1, heads, queries, keys] from numbers [buckets, heads] and positions [batch or 1, tokens]."""
    farthest = buckets[1]
    table = torch.tensor([t5_bucket(d, causal, *buckets) for d in range(-farthest, farthest + 1)])
    distance = (k_ids[:, None, :] - q_ids[:, :, None]).clamp(-farthest, farthest) + farthest
    return weight[table[distance]].permute(0, 3, 1, 2)


def alibi_bias(heads, q_ids, k_ids, dtype):
    """-slope |m - n| with slopes 2^(-8h/heads), h = 1 .. heads, for a power of 2 (2108.12409, section 3)."""
    slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)], dtype=torch.float64)
    return (-slopes[:, None, None] * (q_ids[:, None, :, None] - k_ids[:, None, None, :]).abs()).to(dtype)


def decay_products(decay, heads, keys, *, causal):
    """Products of exp(g_j) over n < j <= m; if not causal, exp(g |m - n|): [batch or 1, heads, keys, keys]."""
    g = decay[None, :, None].expand(1, -1, keys) if decay.dim() == 1 else decay
    g = g.repeat_interleave(heads // g.shape[1], dim=1)
    if not causal:
        ids = torch.arange(keys)
        return torch.exp(g[..., :1, None] * (ids[:, None] - ids).abs())
    rows, row = [], g.new_zeros(*g.shape[:2], 0)
    for m in range(keys):
        row = torch.cat([row * torch.exp(g[..., m : m + 1]), g.new_ones(*g.shape[:2], 1)], dim=-1)
        rows.append(torch.cat([row, g.new_zeros(*g.shape[:2], keys - m - 1)], dim=-1))
    return torch.stack(rows, dim=-2) if rows else g.new_ones(*g.shape[:2], 0, 0)


def settled(rule, key_mask, ids, *, causal):
    """The rule and the positions if hidden tokens after the last visible one do not decay."""
    if key_mask is None or not causal:
        return rule, ids
    ahead = key_mask.flip(-1).cumsum(-1).flip(-1) > 0
    if rule.kind == "alibi":
        last = torch.where(ahead, ids, torch.zeros_like(ids)).amax(-1, keepdim=True)
        ids = torch.where(ahead, ids, last)
    if rule.kind in DECAYS:
        g = rule.tensor
        g = g[None, :, None] if g.dim() == 1 else g
        rule = rule._replace(tensor=torch.where(ahead[:, None], g, torch.zeros_like(g)))
    return rule, ids


def expected(
    q, k, v, rule, rope=None, *, feature_map="elu", causal=True, normalize=True, scale=None, positions=None,
    key_mask=None, cu_seqlens=None,
):  # fmt: skip
    """Linear attention with weights, as sums over all pairs of tokens in the dtype of q."""
    if cu_seqlens is not None:
        outputs = [q.new_zeros(*q.shape[:3], v.shape[-1])[:, :, cu_seqlens[-1] :]]
        for start, stop in reversed(list(itertools.pairwise(cu_seqlens.tolist()))):
            one = [x[:, :, start:stop] for x in (q, k, v)]
            ids, seen = (None if x is None else x[..., start:stop] for x in (positions, key_mask))
            options = {"feature_map": feature_map, "causal": causal, "normalize": normalize, "scale": scale}
            part = rule.part(start, stop)
            outputs.insert(0, expected(*one, part, rope, positions=ids, key_mask=seen, **options))
        return torch.cat(outputs, dim=2)
    (_, heads, queries, _), keys = q.shape, k.shape[2]
    if not keys:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    ids = (torch.arange(keys) if positions is None else positions).reshape(-1, keys)
    q_map, k_map = feature_maps(feature_map)
    plain_q, plain_k = q_map(q), k_map(k)
    rotated_q, rotated_k = plain_q, plain_k
    if rope is not None:
        rotated_q = rotate_by_spec(plain_q, rope.spec, ids[:, keys - queries :], role="q")
        rotated_k = rotate_by_spec(plain_k, rope.spec, ids, role="k")
    weights = _weights(rule, heads, keys, queries, ids, key_mask, causal, q.dtype)
    above, below = [], []
    # One head after the other: the weights of one are [batch, queries, keys].
    for head in range(heads):
        shared = head * k.shape[1] // heads
        factor = weights(head)
        scores = (rotated_q[:, head] @ rotated_k[:, shared].transpose(-1, -2)) * factor
        above.append(scores @ v[:, shared])
        below.append(((plain_q[:, head] @ plain_k[:, shared].transpose(-1, -2)) * factor).sum(-1, keepdim=True))
    numerator, denominator = torch.stack(above, dim=1), torch.stack(below, dim=1)
    if not normalize:
        return numerator if scale is None else scale * numerator
    is_empty = denominator == 0
    return (numerator / denominator.masked_fill(is_empty, 1.0)).masked_fill(is_empty, 0.0)


def recurrence(q, k, v, rule, rope):
    """One token after the other in the dtype of q: sums that decay, and T5's keys within its window one by one."""
    heads, group, dtype = q.shape[1], q.shape[1] // k.shape[1], q.dtype
    features = [feature_maps("elu")[0](x) for x in (q, k)]
    rotated = [rotate_by_spec(x, rope.spec, torch.arange(x.shape[2])) for x in features]
    tokens = [
        x if x.shape[1] == heads else x.repeat_interleave(group, dim=1) for x in (*features, *rotated, v)
    ]  # fmt: skip
    keys, far = k.shape[2], torch.ones(1, heads, 1, dtype=dtype)
    kept, near = torch.ones(1, heads, 1, dtype=dtype), torch.zeros(1, heads, 0, dtype=dtype)
    if rule.kind == "alibi":
        kept = torch.exp(alibi_bias(heads, torch.ones(1, 1), torch.zeros(1, 1), dtype)[..., 0])
    elif rule.kind == "t5":
        last = torch.exp(
            t5_bias(rule.tensor, torch.tensor([[200]]), torch.arange(201)[None], rule.buckets, causal=True)
        )
        window = 1 + max(int((last[0, head, 0] != last[0, head, 0, 0]).nonzero()[0, 0]) for head in range(heads))
        near, far = last[:, :, 0, window - 1 :].flip(-1), last[:, :, 0, :1]
    else:
        g = rule.tensor[None, :, None] if rule.tensor.dim() == 1 else rule.tensor
        kept = torch.exp(g.repeat_interleave(heads // g.shape[1], dim=1).expand(-1, -1, keys))
    above, below, outputs, width = 0, 0, [], near.shape[-1]
    for m in range(keys):
        one = kept[..., m : m + 1] if kept.shape[-1] > 1 else kept
        enters = m - width if width else m
        above, below = above * one[..., None], below * one
        if enters >= 0:
            a, b, c = tokens[3][:, :, enters], tokens[1][:, :, enters], tokens[4][:, :, enters]
            above, below = above + a[..., None] * c[..., None, :], below + b
        numerator = denominator = torch.zeros(1, heads, 1, dtype=dtype)
        if enters >= 0:
            numerator = far * (tokens[2][:, :, m, :, None] * above).sum(-2)
            denominator = far * (tokens[0][:, :, m] * below).sum(-1, keepdim=True)
        if width:
            part = slice(max(0, m - width + 1), m + 1)
            factor = near[..., : m + 1 - part.start].flip(-1)[:, :, None]
            scores = tokens[2][:, :, m : m + 1] @ tokens[3][:, :, part].transpose(-1, -2) * factor
            plain = tokens[0][:, :, m : m + 1] @ tokens[1][:, :, part].transpose(-1, -2) * factor
            numerator = numerator + (scores @ tokens[4][:, :, part])[:, :, 0]
            denominator = denominator + plain.sum(-1)
        outputs.append(numerator / denominator)
    return torch.stack(outputs, dim=2)


def _weights(rule, heads, keys, queries, ids, key_mask, causal, dtype):
    """A function of the head that returns its weights [batch or 1, queries, keys]."""
    rule, ids = settled(rule, key_mask, ids, causal=causal)
    hidden = torch.zeros(1, queries, keys, dtype=torch.bool)
    if causal:
        hidden = hidden | torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    if key_mask is not None:
        hidden = hidden | ~key_mask[:, None]
    last = ids[:, keys - queries :]

    def weights(head):
        if rule.kind == "plain":
            factor = torch.ones((), dtype=dtype)
        elif rule.kind in DECAYS:
            tensor = rule.tensor if rule.tensor.dim() == 3 else rule.tensor[None, :, None]
            one = tensor[:, head * tensor.shape[1] // heads][:, None]
            one = one[0, :, 0] if rule.tensor.dim() == 1 else one
            factor = decay_products(one, 1, keys, causal=causal)[:, 0, keys - queries :]
        elif rule.kind == "alibi":
            factor = torch.exp(alibi_bias(heads, last, ids, dtype)[:, head])
        else:
            factor = torch.exp(t5_bias(rule.tensor[:, head : head + 1], last, ids, rule.buckets, causal=causal)[:, 0])
        return torch.where(hidden, torch.zeros((), dtype=dtype), factor.to(dtype))

    return weights


def assert_same(out, truth, tolerance=1e-10):
    """At most `tolerance` apart, or that part of the largest number if it is above 1."""
    assert out.shape == truth.shape
    assert out.isfinite().all()
    if truth.numel():
        assert (out - truth).abs().max() <= tolerance * truth.abs().max().clamp_min(1.0)


FACTORS = {
    "dim": (16, 64, 128),
    "seq": (1, 2, 63, 64, 65, 1000, 4096),
    "pairing": ("interleaved", "half", None),
    "feature_map": ("elu", "relu", "squared_relu", "identity", "exp"),
    "kind": ("per key head", "per query head", "per token", "alibi", "t5", "plain"),
    "normalize": (True, False),
    "causal": (True, False),
    "packed": (False, True),
    "grouped": (False, True),
    "masked": (False, True),
}
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def is_possible(case) -> bool:
    """A decay per token has a direction."""
    return not (case.get("kind") == "per token" and case.get("causal") is False)


def pairs_of(case) -> set[Pair]:
    return set(itertools.combinations(sorted(case.items()), 2))


def all_pairs() -> set[Pair]:
    """Every possible pair of values of two factors."""
    names = sorted(FACTORS)
    pairs = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in FACTORS[a] for y in FACTORS[b]
    }  # fmt: skip
    return {pair for pair in pairs if is_possible(dict(pair))}


def covering_cases() -> list[dict[str, Any]]:
    """Cases that together have every pair: each is the best of several random ones that have a pair not yet covered."""
    source, missing, cases = random.Random(0), all_pairs(), []
    while missing:
        pair = dict(min(missing, key=repr))
        candidates = [{name: source.choice(values) for name, values in FACTORS.items()} | pair for _ in range(60)]
        best = max(filter(is_possible, candidates), key=lambda case: len(pairs_of(case) & missing))
        cases.append(best)
        missing -= pairs_of(best)
    return cases


def call_of(case, *, v_dim=5, seed=0):
    """q, k, v, the rule, the rope, and the other options of a case."""
    seq, batch = case["seq"], 1 if case["packed"] else 2
    heads, kv_heads = (4, 2) if case["grouped"] else (2, 2)
    q, k, v = drawn(batch, heads, kv_heads, seq, case["dim"], v_dim, seed=seed)
    # Exponentials of 128 features and thousands of keys stay within 1e10.
    rule = rule_of(case["kind"], batch, heads, kv_heads, seq, seed=seed)
    rope = None if case["pairing"] is None else rw.RotaryEmbedding(case["dim"], pairing=case["pairing"])
    options = {"feature_map": case["feature_map"], "causal": case["causal"], "normalize": case["normalize"]}
    if not case["normalize"]:
        options["scale"] = 0.5
    if case["packed"]:
        rest = 2 if seq > 2 else 0
        options["cu_seqlens"] = torch.tensor([0, seq // 3, seq // 3, seq - rest])
    if case["masked"]:
        seen = torch.rand(batch, seq, generator=torch.Generator().manual_seed(seed + 1)) < 0.7
        seen[:, -seq // 5 :] = False
        seen[:, 0] = True
        options["key_mask"] = seen
    return (q, k, v), rule, rope, options
