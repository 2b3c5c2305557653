"""Random calls over ranks: what a call has is drawn from its number, and compared with the same call on one rank.

Float64, and errors up to 1e-12 of the largest number: sums of random numbers cancel, and one rank adds them in another
order.
"""

import functools
import random
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ropewalk as rw
from nn.linear_cases import drawn
from nn.weighted_cases import t5
from parallel.cases import error_of
from ropewalk import parallel

__all__ = ["linear_calls", "softmax_calls"]

TOLERANCE = 1e-12
CALLS = 100
# Positions past the tokens: those of an initial state.
EARLIER = 10


class Cut(NamedTuple):
    """How many tokens each rank has, and where packed sequences end."""

    lengths: int | list[int]
    layout: Any
    ends: list[int] | None

    @property
    def total(self) -> int:
        return self.lengths if isinstance(self.lengths, int) else sum(self.lengths)


class Results(NamedTuple):
    """What a call has computed: tensors of tokens, which ranks have parts of, and what all ranks have."""

    out: torch.Tensor
    state: list[torch.Tensor]
    fields: tuple[object, ...]
    of_tokens: list[torch.Tensor]
    shared: list[torch.Tensor]


def cut_of(chance: random.Random, ranks: int) -> Cut:
    """Few tokens, so that shards are often shorter than a window, and some ranks without any."""
    kind = chance.choice(["even", "uneven", "zigzag", "packed", "packed uneven", "packed zigzag"])
    if kind == "zigzag":
        return Cut(2 * ranks * chance.randint(1, 6), "zigzag", None)
    if kind == "packed zigzag":
        parts = [2 * ranks * chance.choice([0, 1, 1, 2, 3]) for _ in range(chance.randint(1, 4))] + [2 * ranks]
        ends = [sum(parts[:i]) for i in range(len(parts) + 1)]
        return Cut(ends[-1], "zigzag", ends)
    lengths: Any = chance.choice([1, 2, 3, chance.randint(4, 30), chance.randint(30, 70)])
    if "uneven" in kind:
        lengths = [chance.choice([0, 0, 1, 2, 5, 20]) for _ in range(ranks)]
        lengths[chance.randrange(ranks)] += 1
    cut = Cut(lengths, "contiguous", None)
    if "packed" not in kind:
        return cut
    return cut._replace(ends=[0, *sorted(chance.randint(0, cut.total) for _ in range(chance.randint(0, 4))), cut.total])


def encoding_of(name: str, heads: int, dim: int, chance: random.Random, cut: Cut, *, causal: bool = True) -> Any:
    most, options = cut.total + EARLIER, {"dim": heads * dim, "num_heads": heads}
    # The same table on all ranks.
    torch.manual_seed(0)
    if name == "t5":
        buckets = chance.choice([4, 8, 16])
        encoding = t5(heads, (buckets, buckets + chance.choice([2, 20, 100])), causal=causal).double()
        torch.nn.init.normal_(encoding.weight, generator=torch.Generator().manual_seed(0))
        return encoding
    if name == "learned":
        return rw.encoding(name, **options, length=most, placement="projection").double()
    if name == "sinusoidal":
        return rw.encoding(name, **options, placement="projection").double()
    if name in ("alibi", "rope-across-heads"):
        return rw.encoding(name, **options).double()
    frequencies = rw.DynamicNTK(factor=2.0, trained_length=max(2, cut.total // 3)) if name == "ntk" else rw.Plain()
    xpos = rw.XPos(most) if name == "xpos" else None
    spec = rw.RopeSpec(dim, frequencies, xpos=xpos, pairing=chance.choice(["half", "interleaved"]))
    return rw.RotaryEmbedding(spec, learned=name == "learned rope").double()


def rotations(heads: int, kv_heads: int) -> list[str]:
    """Those that softmax and linear attention support. Frequencies across heads have no groups."""
    names = ["none", "rope", "xpos", "learned rope"]
    return names + ["rope-across-heads"] * (heads == kv_heads)


def decay_of(name: str, batch: int, heads: int, kv_heads: int, seq: int, seed: int) -> torch.Tensor:
    strength = 50.0 if "strong" in name else 0.3
    count = heads if "query" in name else kv_heads
    sizes = (batch, count, seq) if "token" in name else (count,)
    source = torch.Generator().manual_seed(seed)
    decay = -strength * torch.rand(*sizes, generator=source, dtype=torch.float64)
    if "forgets" in name:
        decay[torch.rand(*sizes, generator=source) < 0.2] = -torch.inf
    return decay


def linear_call(number: int, mesh: Any) -> None:
    chance, source = random.Random(number), torch.Generator().manual_seed(number)
    cut = cut_of(chance, mesh.size())
    shards = parallel.Shards(mesh, cut.lengths, cut.layout, cut.ends)
    batch, rows = (chance.choice([1, 2, 3]),) * 2 if cut.ends is None else (1, len(cut.ends) - 1)
    heads, kv_heads = chance.choice([(4, 2), (4, 4), (4, 1), (1, 1)])
    dim = chance.choice([4, 8])
    v_dim = chance.choice([dim, dim, 1, 3])
    tensors = list(drawn(batch, heads, kv_heads, cut.total, dim, v_dim, torch.float64, seed=number))
    options: dict[str, Any] = {"causal": chance.random() < 0.85}
    decays = ["key head", "query head", "token", "token and query head", "strong token", "token that forgets"]
    rule = chance.choice(["none", "none", "alibi", "t5", "t5", *decays]) if options["causal"] else "none"
    if rule in ("alibi", "t5"):
        options["bias"] = encoding_of(rule, heads, dim, chance, cut)
    elif rule != "none":
        options["decay"] = decay_of(rule, batch, heads, kv_heads, cut.total, number)
    # By the length without packing, and tables in projections with values as wide as keys.
    more = ["ntk"] * (cut.ends is None) + ["sinusoidal", "learned"] * (v_dim == dim)
    rope = chance.choice([*rotations(heads, kv_heads), *more])
    if rope != "none":
        options["rope"] = encoding_of(rope, heads, dim, chance, cut)
    options["feature_map"] = chance.choice(["elu", "relu", "squared_relu", (torch.exp, "relu"), "identity"])
    if options["feature_map"] == "identity" or chance.random() < 0.3:
        options |= {"normalize": False, "scale": chance.choice([None, 0.5])}
    if options["feature_map"] in ("identity", "relu"):
        tensors[1][torch.rand(cut.total, generator=source).expand(tensors[1].shape[:3]) < 0.3] = 0.0
    state = None
    if options["causal"] and chance.random() < 0.5:
        state = earlier_state(number, chance, rows, (heads, kv_heads, dim, v_dim), options, cut)
        if rope == "ntk":
            options["length"] = cut.total + EARLIER
    compare(number, shards, cut, tensors, options, state, ends_in_state=options["causal"] and chance.random() < 0.6)


def earlier_state(number: int, chance: random.Random, rows: int, sizes: Any, options: Any, cut: Cut) -> rw.LinearState:
    heads, kv_heads, dim, v_dim = sizes
    seq, decay = chance.choice([1, 3, EARLIER]), options.get("decay")
    _, k, v = drawn(rows, heads, kv_heads, seq, dim, v_dim, torch.float64, seed=number + 7777)
    if decay is not None and decay.dim() == 3:
        decay = decay_of("token", rows, decay.shape[1], decay.shape[1], seq, number + 1)
    given = {name: options[name] for name in ("rope", "bias", "feature_map") if name in options}
    varies = isinstance(options.get("rope"), rw.RotaryEmbedding) and options["rope"].spec.varies
    length = {"length": cut.total + EARLIER} if varies else {}
    with torch.no_grad():
        state = rw.linear_state(k, v, decay=decay, **given, **length)
    return replace(state, position=torch.full((rows,), seq)) if chance.random() < 0.4 else state


def compare(number: int, shards: Any, cut: Cut, tensors: Any, options: Any, state: Any, *, ends_in_state: bool) -> None:
    """Compare one rank and all ranks: the output, the state, and the gradients of everything that needs one."""
    chance = random.Random(number + 1)
    needs = [chance.random() < 0.7 for _ in range(5)]
    decay = options.get("decay")
    modules = [x for x in (options.get("rope"), options.get("bias")) if x is not None]
    parameters = [x.requires_grad_(needs[4]) for module in modules for x in module.parameters()]
    per_token = decay is not None and decay.dim() == 3
    inputs = [*tensors, decay] if per_token else tensors
    ends = None if cut.ends is None else torch.tensor(cut.ends)
    results: list[Results] = []
    for whole in (True, False):
        leaves = [(x if whole else shards.cut(x, 2)).detach().clone() for x in inputs]
        leaves = [x.requires_grad_(need) for x, need in zip(leaves, needs, strict=False)]
        q, k, v = (x if chance.random() < 0.7 else x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves[:3])
        given, shared, before = dict(options), [x for x in parameters if needs[4]], state
        if decay is not None:
            given["decay"] = leaves[3] if per_token else decay.clone().requires_grad_(needs[3])
            shared += [] if per_token or not needs[3] else [given["decay"]]
        if state is not None:
            before = replace(state, above=state.above.clone().requires_grad_(), below=state.below.clone())
            shared.append(before.above)
        run: Any = functools.partial(rw.linear_attention, cu_seqlens=ends)
        if not whole:
            run = functools.partial(parallel.linear_attention, shards=shards)
        out, after = run(q, k, v, state=before, return_state=ends_in_state, **given), None
        if ends_in_state:
            out, after = out
        results.append(results_of(shards, out, after, leaves, shared, share=1.0 if whole else 1 / shards.ranks))
    check(number, shards, *results)


def results_of(shards: Any, out: Any, after: Any, leaves: Any, shared: Any, *, share: float) -> Results:
    """Compute gradients of a random loss of the output and the state, of which every rank computes a share."""
    source = torch.Generator().manual_seed(5)
    cotangent = torch.randn(*out.shape[:2], shards.length, out.shape[3], generator=source, dtype=torch.float64)
    loss = (out * (cotangent if share == 1.0 and out.shape[2] == shards.length else shards.cut(cotangent, 2))).sum()
    state: list[torch.Tensor] = []
    fields: tuple[object, ...] = ()
    if after is not None:
        state = [after.above, after.below, *([] if after.near is None else after.near[:2])]
        state += [] if after.log_decay is None else [after.log_decay]
        for x in state:
            finite = x.masked_fill(~x.isfinite(), 0.0)
            loss = loss + share * (finite * torch.randn(x.shape, generator=source, dtype=torch.float64)).sum()
        start = torch.as_tensor(after.start(len(after.above))).expand(len(after.above)).tolist()
        ids = None if after.near is None else after.near.positions.tolist()
        fields = after.spec, after.feature_map, after.learned, after.encoding, after.weighting, after.length, start, ids
    wanted = [x for x in leaves if x.requires_grad]
    needed = [*wanted, *shared]
    gradients = torch.autograd.grad(loss, needed, allow_unused=True) if needed else ()
    gradients = [torch.zeros_like(x) if y is None else y for x, y in zip(needed, gradients, strict=True)]
    return Results(
        out.detach(), [x.detach() for x in state], fields, gradients[: len(wanted)], gradients[len(wanted) :]
    )


def check(number: int, shards: Any, one: Results, ranks: Results) -> None:
    errors = [error_of(ranks.out, shards.cut(one.out, 2), one.out.abs().max().clamp_min(1e-3))]
    for x, truth in zip(ranks.state, one.state, strict=True):
        finite = truth.isfinite()
        assert torch.equal(x[~finite], truth[~finite]), number
        largest = truth[finite].abs().max().clamp_min(1.0) if finite.any() else 1.0
        errors.append(error_of(x[finite], truth[finite], largest))
    sizes = [x.abs().max() for x in (*one.of_tokens, *one.shared) if x.numel()]
    largest = max(sizes, default=torch.ones(())).clamp_min(1e-3)
    for x, truth in zip(ranks.of_tokens, one.of_tokens, strict=True):
        errors.append(error_of(x, shards.cut(truth, 2), largest))
    for x, truth in zip(ranks.shared, one.shared, strict=True):
        share = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(share)
        errors.append(error_of(share, truth, largest))
    # After the last exchange: a rank that failed before would leave the others waiting.
    assert ranks.fields == one.fields, (number, ranks.fields, one.fields)
    assert max(errors) <= TOLERANCE, (number, errors)


def softmax_call(number: int, mesh: Any) -> None:
    chance, ranks = random.Random(number), mesh.size()
    cut = cut_of(chance, ranks)
    shards = parallel.Shards(mesh, cut.lengths, cut.layout, cut.ends)
    batch = chance.choice([1, 2, 3]) if cut.ends is None else 1
    heads, kv_heads = chance.choice([(4, 2), (4, 4), (4, 1), (2 * ranks, ranks), (ranks, ranks)])
    dim = chance.choice([4, 8])
    tensors = drawn(batch, heads, kv_heads, cut.total, dim, chance.choice([dim, 3]), torch.float64, seed=number)
    methods = ["gather", "ring", "ring", *(["ulysses"] * 2 if heads % ranks == kv_heads % ranks == 0 else [])]
    options: dict[str, Any] = {"causal": chance.random() < 0.6, "window": chance.choice([None, None, 1, 2, 5, 17, 100])}
    options["scale"] = chance.choice([None, None, 0.3])
    name = chance.choice([*rotations(heads, kv_heads), "alibi", "t5", "t5"])
    encoding = None if name == "none" else encoding_of(name, heads, dim, chance, cut, causal=options["causal"])
    method, needs = chance.choice(methods), [chance.random() < 0.7 for _ in range(4)]
    parameters = [] if encoding is None else [x.requires_grad_(needs[3]) for x in encoding.parameters()]
    ends, results = None if cut.ends is None else torch.tensor(cut.ends), []
    runs: Any = (
        functools.partial(rw.attention, cu_seqlens=ends),
        functools.partial(parallel.attention, shards=shards, method=method),
    )
    for whole, run in zip((True, False), runs, strict=True):
        leaves = [(x if whole else shards.cut(x, 2)).detach().clone() for x in tensors]
        leaves = [x.requires_grad_(need) for x, need in zip(leaves, needs, strict=False)]
        out = run(*leaves, encoding=encoding, **options)
        shared = parameters if needs[3] else []
        results.append(results_of(shards, out, None, leaves, shared, share=1.0 if whole else 1 / ranks))
    check(number, shards, *results)


def _calls(run: Any) -> dict[str, Any]:
    return {str(number): functools.partial(run, number) for number in range(CALLS)}


def linear_calls(world: int) -> dict[str, Any]:
    return _calls(linear_call)


def softmax_calls(world: int) -> dict[str, Any]:
    return _calls(softmax_call)
