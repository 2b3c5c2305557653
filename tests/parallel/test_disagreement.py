"""Ranks that disagree, that have invalid arguments or that end: every other rank raises an error."""

import copy
import functools
import os
import pickle
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ropewalk as rw
from parallel.cases import LENGTH, encoding_of, inputs
from parallel.ranks import TIMEOUT, failures_on_ranks, on_ranks
from ropewalk import parallel
from ropewalk.kernels.torch_internals import timeout_of
from ropewalk.parallel.agreement import cpu_group

pytestmark = pytest.mark.xdist_group("ranks")


def refused(call, *words):
    """Raise unless the call raises a RopewalkError with these words."""
    with pytest.raises(rw.RopewalkError) as info:
        call()
    assert all(word in str(info.value) for word in words), str(info.value)


def parts(shards, **options):
    return [shards.cut(x.detach(), 2) for x in inputs(2 if shards.sequences is None else 1, **options)]


def shards_differ(mesh):
    rank = mesh.get_local_rank()
    refused(lambda: parallel.Shards(mesh, 8 + rank), "the same call on all ranks", "(4, 4)", "(5, 4)")
    assert parallel.Shards(mesh, [4, 4] if rank else (4, 4)).length == 8
    refused(lambda: parallel.Shards(mesh, 8, cu_seqlens=5 if rank else None), "whole numbers" if rank else "an error")
    refused(lambda: parallel.Shards(mesh, 8, "zigzag" if rank else "contiguous"), "layout zigzag", "layout contiguous")
    refused(lambda: parallel.Shards(mesh, 8, cu_seqlens=[0, 3 + rank, 8]), "cu_seqlens [0, 3, 8]")


def invalid_shards(mesh):
    refused(lambda: parallel.Shards(mesh, 10, "zigzag"), "a multiple of 4 tokens", "got:      10")
    refused(lambda: parallel.Shards(mesh, 16, "zigzag", [0, 4, 10, 16]), "every packed sequence", "6 in sequence 1")
    refused(lambda: parallel.Shards(mesh, [3, 5], "zigzag"), "the same number of tokens")
    refused(lambda: parallel.Shards(mesh, [3, 5, 7]), "a list of 2 numbers")
    refused(lambda: parallel.Shards(mesh, 0), "at least 1 token")
    refused(lambda: parallel.Shards(mesh, 8, cu_seqlens=[0, 5]), "from 0 to 8")
    refused(lambda: parallel.Shards(mesh, 8, "rings"), "layout")
    refused(lambda: parallel.Shards("cpu", 8), "a DeviceMesh")
    refused(lambda: parallel.Shards(mesh, 8, check_calls=3), "check_calls")
    shards = parallel.Shards(mesh, 8)
    refused(lambda: shards.cut(torch.ones(2, 7), 1), "all tokens: 8")
    refused(lambda: shards.join(torch.ones(2, 8), 1), "the tokens of this rank: 4")


def mesh_of_two_dimensions(mesh):
    both = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "cp"))
    refused(lambda: parallel.Shards(both, 8), "one dimension", "dp, cp", 'mesh["cp"]')
    assert parallel.Shards(both["cp"], 8).ranks == mesh.size()


def mesh_of_gpus(mesh):
    # A mesh for tensors on GPUs, and a process group that cannot read them.
    gpus = init_device_mesh("cuda", (mesh.size(),))
    refused(lambda: parallel.Shards(gpus, 8), "connects devices of type cuda", "cuda:gloo", "a mesh of CPUs")
    # The group for exchanges on the CPU waits as long as that of the mesh, not 30 minutes.
    group = cpu_group(gpus)
    assert group is not gpus.get_group()
    assert timeout_of(group, "cpu") == TIMEOUT


def calls_differ(mesh):
    shards, rank = parallel.Shards(mesh, LENGTH), mesh.get_local_rank()
    q, k, v = parts(shards, kv_heads=4)
    ropes = [rw.RotaryEmbedding(8, base=10_000 * (1 + rank)), rw.RotaryEmbedding(8)]
    refused(lambda: parallel.attention(q, k, v, shards=shards, encoding=ropes[0]), "base=20000.0", "base=10000.0")
    refused(lambda: parallel.attention(q, k, v, shards=shards, window=5 + rank), "window 5", "window 6")
    refused(lambda: parallel.attention(q, k, v, shards=shards, method="ring" if rank else "gather"), "method ring")
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, rope=ropes[0]), "base=20000.0")
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, normalize=bool(rank)), "normalize")
    biases = [rw.encoding("t5", dim=32, num_heads=4, causal=True, max_distance=n) for n in (64, 128)]
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, bias=biases[rank]), "max_distance=64")
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, bias=encoding_of("alibi"), length=16 + rank))
    decay = -torch.ones(2, 4, 80 - rank, dtype=torch.float64)
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, decay=decay), "[2, 4, 79]")
    numbers = [-1.0, -1.0] if rank else -torch.ones(4, dtype=torch.float64)
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, decay=numbers), "decay")
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, backend="mine" if rank else None), "mine")
    favor = rw.FavorFeatures(8, 16, seed=rank)
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, feature_map=favor), "seed=0", "seed=1")
    needs = [x.detach().requires_grad_(i == rank) for i, x in enumerate((q, k, v))]
    refused(lambda: parallel.attention(*needs, shards=shards), "gradients of q, k, v")
    state = rw.linear_state(k, v, feature_map="relu" if rank else "elu")
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, state=state), "relu")
    # Any tensor of a state, and any parameter of a feature map: their backward pass has an exchange.
    state = rw.linear_state(k, v, bias=encoding_of("t5"), positions=torch.arange(k.shape[2]))
    assert state.near is not None
    values = state.near.values.clone().requires_grad_(bool(rank))
    changes = {"below": state.below.clone().requires_grad_(bool(rank))}, {"near": state.near._replace(values=values)}
    for changed in changes:
        given = {"state": replace(state, **changed), "bias": encoding_of("t5")}
        refused(lambda given=given: parallel.linear_attention(q, k, v, shards=shards, **given), "gradients [False, ")
    learned = torch.nn.Linear(8, 8, dtype=torch.float64).requires_grad_(bool(rank))
    maps = torch.nn.Sequential(learned, torch.nn.Softplus())
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, feature_map=maps), "[True]", "[False]")
    dtypes = [x.float() if rank else x for x in (q, k, v)]
    refused(lambda: parallel.linear_attention(*dtypes, shards=shards), "torch.float32", "torch.float64")
    misspelt = {"methd": "ring"} if rank else {}
    refused(lambda: parallel.attention(q, k, v, shards=shards, **misspelt), "methd")
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, **misspelt), "methd")
    # Only one rank has a wrong number of tokens: the others raise as well.
    wrong = [x[:, :, : x.shape[2] - rank] for x in (q, k, v)]
    refused(lambda: parallel.attention(*wrong, shards=shards), "the 80 tokens of rank 1")
    refused(lambda: parallel.linear_attention(*wrong, shards=shards), "the 80 tokens of rank 1")
    assert parallel.attention(q, k, v, shards=shards, encoding=ropes[1]).shape == q.shape[:3] + v.shape[3:]


def shards_of_calls_differ(mesh):
    """A rank that has created several Shards, all of which the other ranks have created too, passes another one."""
    pairs = [
        [parallel.Shards(mesh, LENGTH, layout) for layout in ("contiguous", "zigzag")],
        [parallel.Shards(mesh, LENGTH), parallel.Shards(mesh, [60, 100])],
        [parallel.Shards(mesh, LENGTH, cu_seqlens=[0, end, LENGTH]) for end in (40, 120)],
    ]
    words = [("layout contiguous", "layout zigzag"), ("(80, 80)", "(60, 100)"), ("[0, 40, 160]", "[0, 120, 160]")]
    for pair, different in zip(pairs, words, strict=True):
        shards = pair[mesh.get_local_rank()]
        tensors = parts(shards, kv_heads=4)
        for method in ("gather", "ulysses", "ring"):
            refused(functools.partial(parallel.attention, *tensors, shards=shards, method=method), *different)
        refused(functools.partial(parallel.linear_attention, *tensors, shards=shards), *different)
        refused(functools.partial(shards.join, tensors[0], 2), *different)


def autocast_differs(mesh):
    shards, rank = parallel.Shards(mesh, LENGTH), mesh.get_local_rank()
    q, k, v = parts(shards, kv_heads=4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(rank)):
        for method in ("gather", "ulysses", "ring"):
            refused(
                lambda m=method: parallel.attention(q, k, v, shards=shards, method=m),
                "autocast torch.bfloat16",
                "autocast none",
            )
        refused(lambda: parallel.linear_attention(q, k, v, shards=shards), "autocast none")


def positions_past_a_limit(mesh):
    """Position 100 is on the last rank: the others raise too."""
    shards, linear = parallel.Shards(mesh, LENGTH), parallel.linear_attention
    q, k, v = parts(shards, kv_heads=4)
    for rope in (rw.RotaryEmbedding(8, context_length=100), rw.RotaryEmbedding(rw.RopeSpec(8, xpos=rw.XPos(100)))):
        for method in ("gather", "ulysses", "ring"):
            call = functools.partial(parallel.attention, q, k, v, shards=shards, encoding=rope, method=method)
            refused(call, "position 159", "below 100")
        refused(lambda r=rope: linear(q, k, v, shards=shards, rope=r), "position 159")
    # With a state, positions continue from it: 160, and 161 in the second sequence.
    state = rw.linear_state(k, v)
    for position in (1, torch.tensor([0, 1])):
        after, short = replace(state, position=position), rw.RotaryEmbedding(8, context_length=LENGTH)
        refused(lambda s=after, r=short: linear(q, k, v, shards=shards, rope=r, state=s), "position 160")
    packed = parallel.Shards(mesh, LENGTH, cu_seqlens=[0, 90, LENGTH])
    one, rope = [x[:1] for x in (q, k, v)], rw.RotaryEmbedding(8, context_length=90)
    assert parallel.attention(*one, shards=packed, encoding=rope).shape == one[0].shape[:3] + v.shape[3:]
    assert linear(*one, shards=packed, rope=rope).shape == one[0].shape[:3] + v.shape[3:]


def joins_differ(mesh):
    shards, rank = parallel.Shards(mesh, LENGTH), mesh.get_local_rank()
    x = torch.arange(80 * 4.0).reshape(1, 80, 4)
    refused(lambda: shards.join(x.double() if rank else x, 1), "torch.float32", "torch.float64")
    refused(lambda: shards.join(x[..., rank:], 1), "other sizes [1, 4]", "other sizes [1, 3]")
    refused(lambda: shards.join(x, 2 if rank else 1), "80 in dimension 2")
    refused(lambda: shards.join(x.squeeze(0) if rank else x, -2), "dimension 0", "dimension 1")
    refused(lambda: shards.join(x.detach().requires_grad_(bool(rank)), 1), "gradient True", "gradient False")
    assert shards.join(x, -2 if rank else 1).shape == (1, LENGTH, 4)


def invalid_calls(mesh):
    shards, packed = parallel.Shards(mesh, LENGTH), parallel.Shards(mesh, LENGTH, cu_seqlens=[0, 50, LENGTH])
    q, k, v = parts(shards, kv_heads=4)
    softmax, linear = parallel.attention, parallel.linear_attention
    refused(lambda: softmax(q, k, v, shards=mesh), "a Shards")
    refused(lambda: linear(q, k, v, shards=mesh), "a Shards")
    refused(lambda: softmax(q[:, :3], k[:, :3], v[:, :3], shards=shards, method="ulysses"), "multiples of the 2 ranks")
    refused(lambda: softmax(q, k[:, :1], v[:, :1], shards=shards, method="ulysses"), "4 heads and 1 kv_heads")
    refused(lambda: softmax(q, k, v, shards=shards, method="tree"), "method")
    refused(lambda: softmax(q, k, v, shards=shards, window=0), "window")
    refused(lambda: softmax(q, k, v, shards=packed), "a batch of 1")
    refused(lambda: linear(q, k, v, shards=packed), "a batch of 1")
    decay = -torch.ones(4, dtype=torch.float64)
    refused(lambda: linear(q, k, v, shards=shards, causal=False, decay=decay), "no decay, bias or state")
    refused(lambda: linear(q, k, v, shards=shards, causal=False, return_state=True), "no decay, bias or state")
    spec = rw.RopeSpec(8, rw.DynamicNTK(factor=2.0, trained_length=16))
    one = [x[:1] for x in (q, k, v)]
    refused(lambda: linear(*one, shards=packed, rope=rw.RotaryEmbedding(spec)), "do not depend on the length")
    # A length that is fixed is allowed, and one of each sequence is not.
    fixed = rw.encoding("rope", dim=32, num_heads=4, spec=spec, at_length=64)
    assert softmax(*one, shards=packed, encoding=fixed).shape == linear(*one, shards=packed, rope=fixed).shape
    refused(lambda: linear(*one, shards=packed, rope=rw.RotaryEmbedding(spec), length=torch.tensor([3, 4])))
    axes = rw.RotaryEmbedding(rw.RopeSpec(8, axes=rw.Axes.chunked((2, 2))))
    refused(lambda: linear(q, k, v, shards=shards, rope=axes), "one position per token")
    refused(lambda: softmax(q, k, v, shards=shards, encoding=axes), "one position per token")
    refused(lambda: softmax(q, k, v, shards=shards, encoding=rw.encoding("learned", dim=32, num_heads=4, length=9)))


def names_of_one_rank(mesh):
    """Only the last rank passes a name that does not exist, or one argument too many."""
    last = mesh.get_local_rank() == mesh.size() - 1
    refused(lambda: parallel.Shards(mesh, 8, **({"layuot": "zigzag"} if last else {})), "layuot")
    refused(lambda: parallel.Shards(mesh, 8, "zigzag", *([None, True] if last else [])))
    refused(lambda: parallel.ShardedKVCache(mesh, 1, 1, 8, 4, **({"dtyp": 1} if last else {})), "dtyp")
    assert parallel.Shards(mesh, 8, layout="zigzag").length == 8


def rank_without_tokens(mesh):
    """A rank without tokens reads no state and calls no feature map. It raises what the others raise."""
    shards = parallel.Shards(mesh, [4] + [0] * (mesh.size() - 1))
    q, k, v = (shards.cut(x[:, :, :4].detach(), 2) for x in inputs(2))
    kv_heads, decay = k.shape[1], -torch.ones(4, dtype=torch.float64)

    def check(*words, of=lambda k, v: (k, v), made=None, **options):
        state = None if made is None else rw.linear_state(*of(*(x.detach()[:, :, :4] for x in inputs(2)[1:])), **made)
        refused(lambda: parallel.linear_attention(q, k, v, shards=shards, state=state, **options), *words)

    check("with decay", made={"decay": decay})
    check("without decay", made={}, decay=decay)
    check("sums", made={}, of=lambda k, v: (k, v[..., :-1]))
    check("feature map", made={"feature_map": "relu"})
    check("2 sequences", "3 and 3", made={}, of=lambda *x: (torch.cat([y, y[:1]]) for y in x))
    check("float32", made={}, of=lambda *x: (y.float() for y in x))
    t5 = encoding_of("t5")
    check(made={"bias": t5, "positions": torch.arange(4)}, bias=encoding_of("alibi"))
    check("heads", bias=rw.encoding("alibi", dim=16, num_heads=kv_heads))
    check("number of features", feature_map=(torch.exp, lambda x: torch.exp(x[..., :4])))
    check("last dimension", feature_map=(lambda x: x.mean(2, keepdim=True), torch.exp))
    check("a rope", length=7)
    rope = rw.RotaryEmbedding(rw.RopeSpec(8, rw.DynamicNTK(factor=2.0, trained_length=2)))
    out, state = parallel.linear_attention(q, k, v, shards=shards, rope=rope, return_state=True)
    assert (state.length, out.shape[2]) == (4, shards.lengths[shards.rank])
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, rope=rope, state=state), "length 8", "length 4")
    fixed = {"rope": rope, "state": state, "length": 4}
    assert parallel.linear_attention(q, k, v, shards=shards, **fixed).shape == out.shape
    # The exchanges of all ranks still belong together.
    assert shards.join(out, 2).shape[2] == 4


def states_of_other_calls(mesh):
    """States that one rank would refuse, on every rank or on the last one."""
    shards, packed = parallel.Shards(mesh, LENGTH), parallel.Shards(mesh, LENGTH, cu_seqlens=[0, 50, LENGTH])
    q, k, v = parts(shards)
    state, last = rw.linear_state(k, v), mesh.get_local_rank() == mesh.size() - 1

    def check(*words, over=shards, tensors=(q, k, v), **changes):
        changed = replace(state, **changes)
        refused(lambda: parallel.linear_attention(*tensors, shards=over, state=changed), *words)

    more = {name: torch.cat([getattr(state, name)] * 2) for name in ("above", "below")}
    check("a state of 2 sequences", "4 and 4", **more)
    check("a state of 2 sequences", "4 and 4", over=packed, tensors=[x[:1] for x in (q, k, v)], **more)
    check("torch.float32", below=state.below.float())
    check(below=state.below[..., :4] if last else state.below)
    check(length=7 if last else None)
    check(first=3 if last else 0)
    for rope in (3, "rope"):
        wrong = rope if last else None
        with pytest.raises((rw.RopewalkError, TypeError)):
            parallel.linear_attention(q, k, v, shards=shards, rope=wrong)
        with pytest.raises((rw.RopewalkError, TypeError)):
            parallel.attention(q, k, v, shards=shards, encoding=wrong)


def positions_past_a_table(mesh):
    shards = parallel.Shards(mesh, LENGTH)
    q, k, v = parts(shards, kv_heads=4)
    for placement, methods in (("scores", ("gather", "ulysses", "ring")), ("projection", ("ring", "linear"))):
        table = rw.encoding("learned", dim=32, num_heads=4, length=100, placement=placement).double()
        for method in methods:
            if method == "linear":
                call = functools.partial(parallel.linear_attention, q, k, v, shards=shards, rope=table)
            else:
                call = functools.partial(parallel.attention, q, k, v, shards=shards, encoding=table, method=method)
            refused(call, "position 159", "from 0 to 99")


def arguments_of_dtensors(mesh):
    """What a rank refuses after it was agreed that tensors are DTensors."""
    both = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("tp", "cp"))
    shards, last = parallel.Shards(both["cp"], LENGTH), mesh.get_local_rank() == mesh.size() - 1
    q, k, v = (DTensor.from_local(x, both["tp"], [Shard(1)]) for x in parts(shards, kv_heads=4))
    across = rw.encoding("rope-across-heads", dim=32, num_heads=4) if last else None
    refused(lambda: parallel.attention(q, k, v, shards=shards, encoding=across), "4 heads")
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, rope=across), "4 heads")
    decay = -torch.ones(1, 4) if last else -torch.ones(4)
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards, decay=decay), "decay")
    assert parallel.linear_attention(q, k, v, shards=shards).shape[:3] == q.shape[:3]


def devices_differ(mesh):
    shards = parallel.Shards(mesh, LENGTH)
    device = "meta" if mesh.get_local_rank() else "cpu"
    q, k, v = (x.to(device) for x in parts(shards, kv_heads=4))
    refused(lambda: parallel.attention(q, k, v, shards=shards))
    refused(lambda: parallel.linear_attention(q, k, v, shards=shards))


def shards_of_a_model(mesh):
    """Shards that were created in inference mode are used for training, and a copy of a model shares them."""
    with torch.inference_mode():
        shards = parallel.Shards(mesh, LENGTH, "zigzag")
    shared = copy.deepcopy({"shards": shards})["shards"]
    assert shared is shards
    q, k, v = (x.requires_grad_() for x in parts(shards, kv_heads=4))
    for method in ("gather", "ulysses", "ring"):
        parallel.attention(q, k, v, shards=shards, encoding=rw.RotaryEmbedding(8), method=method).sum().backward()
    assert q.grad is not None
    x = torch.ones(1, LENGTH, requires_grad=True)
    shards.join(shards.cut(x, 1), 1).sum().backward()
    assert x.grad is not None


def bad_cases(world):
    cases = (shards_differ, invalid_shards, mesh_of_two_dimensions, mesh_of_gpus, calls_differ, invalid_calls)
    cases += (shards_of_calls_differ, autocast_differs, positions_past_a_limit, joins_differ, names_of_one_rank)
    cases += (rank_without_tokens, states_of_other_calls, positions_past_a_table, arguments_of_dtensors)
    cases += (devices_differ, shards_of_a_model)
    return {case.__name__: case for case in cases}


def test_every_rank_raises(tmp_path):
    failures = failures_on_ranks(2, "parallel.test_disagreement", "bad_cases", tmp_path)
    assert {name: texts[0] for name, texts in failures.items() if texts} == {}


def ending_cases(world):
    """The last rank ends before a call. The others must raise, and store that they did."""

    def case(method, mesh):
        shards = parallel.Shards(mesh, LENGTH, check_calls=False)
        tensors = parts(shards, kv_heads=4)
        if shards.rank == world - 1:
            time.sleep(0.5)
            os._exit(0)
        run = parallel.linear_attention if method == "linear" else parallel.attention
        options = {} if method == "linear" else {"method": method}
        out = run(*tensors, shards=shards, **options)
        # A collective that was started is waited for.
        out.sum().item()

    name = os.environ["ROPEWALK_TEST_METHOD"]
    return {name: lambda mesh: case(name, mesh)}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["linear", "gather", "ulysses", "ring"])
def test_a_rank_that_ends_is_an_error_of_the_others(method, tmp_path, monkeypatch):
    monkeypatch.setenv("ROPEWALK_TEST_METHOD", method)
    with pytest.raises(Exception, match=r"Connection closed by peer|terminated|Connection reset|timed? ?out"):
        on_ranks(2, "parallel.test_disagreement", "ending_cases", tmp_path)
    # Rank 0 has stored that the call itself failed.
    stored = pickle.loads((tmp_path / "rank0").read_bytes())
    assert "RuntimeError" in stored[method]
    assert not (tmp_path / "rank1").exists()
