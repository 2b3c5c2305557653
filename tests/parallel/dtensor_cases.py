"""Calls with DTensors on several ranks, next to plain tensors in one process."""

import functools
import threading
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ropewalk as rw
from parallel.cases import encoding_of
from ropewalk import parallel
from ropewalk.nn.rotary.angle_source import AngleSource

__all__ = ["bad_cases", "calls", "layers", "meshes_of_two_dimensions"]

BATCH, HEADS, SEQ, DIM, V_DIM = 4, 4, 7, 8, 6
MOST = 1e-12


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def distributed(x, mesh, placements):
    """x as a DTensor that is a leaf. A dimension of size 1 is replicated."""
    own = [Replicate() if p.is_shard() and x.shape[p.dim] == 1 else p for p in placements]
    return distribute_tensor(x, mesh, own).requires_grad_()


def compare(mesh, placements, run, tensors, parameters=(), most=MOST):
    """Outputs and gradients of a call with DTensors are those with plain tensors."""

    def cleared():
        for parameter in parameters:
            parameter.grad = None

    def outputs(arguments) -> list[Any]:
        results = run(*arguments)
        return [results] if isinstance(results, torch.Tensor) else list(results)

    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = outputs(leaves)
    weights = [drawn(*y.shape, seed=9) for y in expected]
    cleared()
    torch.stack([(y * w).sum() for y, w in zip(expected, weights, strict=True)]).sum().backward()
    # Angles that are passed do not depend on learned frequencies.
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    of_parameters = [parameter.grad.clone() for parameter in parameters]
    cleared()
    shards = [distributed(x, mesh, placements) for x in tensors]
    results = outputs(shards)
    assert all(isinstance(y, DTensor) for y in results)
    assert tuple(results[0].placements) == tuple(placements)
    parts = [(y * distribute_tensor(w, mesh, y.placements)).sum() for y, w in zip(results, weights, strict=True)]
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    total.backward()
    pairs: list[Any] = [*zip(results, expected, strict=True)]
    pairs += [(x.grad, leaf.grad) for x, leaf in zip(shards, leaves, strict=True)]
    pairs += [(parameter.grad, grad) for parameter, grad in zip(parameters, of_parameters, strict=True)]
    errors = [(full(a) - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in pairs]
    assert max(errors) <= most, errors


def rotation(kind, options, norm, placement, mesh):
    rope = rw.RotaryEmbedding(DIM, learned=kind == "learned").double()
    weights = [drawn(DIM, seed=i).requires_grad_() for i in (1, 2)] if norm else []

    def run(q, k):
        if norm:
            return rw.qk_norm_rope(q, k, rope, q_weight=weights[0], k_weight=weights[1], **options)
        return rope(q, k, **options)

    tensors = drawn(BATCH, HEADS, SEQ, DIM), drawn(BATCH, 2, SEQ, DIM, seed=1)
    compare(mesh, [placement] * mesh.ndim, run, tensors, [*rope.parameters(), *weights])


def attention(kind, linear, kv_heads, placement, mesh):
    tensors = drawn(BATCH, HEADS, SEQ, DIM), drawn(BATCH, kv_heads, SEQ, DIM, seed=1)
    values, options, parameters = drawn(BATCH, kv_heads, SEQ, V_DIM, seed=2), {}, []
    if kind == "decay":
        options["decay"] = (-drawn(HEADS).abs()).requires_grad_()
        parameters.append(options["decay"])
    elif kind == "decay per token":
        options["decay"] = (-drawn(BATCH, kv_heads, SEQ).abs()).requires_grad_()
        parameters.append(options["decay"])
    elif kind == "mask":
        options["key_mask"] = drawn(BATCH, SEQ) > -1
        options["key_mask"][:, 0] = True
    elif kind == "positions":
        ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
        options |= {"positions": ids} if linear else {"q_positions": ids, "k_positions": ids}
        options["rope" if linear else "encoding"] = encoding_of("rope")
    elif kind != "none":
        encoding = encoding_of(kind)
        options[("bias" if kind in ("alibi", "t5") else "rope") if linear else "encoding"] = encoding
        parameters += encoding.parameters()
    function = functools.partial(rw.linear_attention if linear else rw.attention, **options)
    compare(mesh, [placement], function, (*tensors, values), parameters)


def uneven(mesh):
    """Seven tokens, and three sequences, on two or four ranks."""
    rope = rw.RotaryEmbedding(DIM)
    for placement in (Shard(0), Shard(2)):
        compare(mesh, [placement], rope, (drawn(3, HEADS, SEQ, DIM), drawn(3, 2, SEQ, DIM)))


def placements_that_differ(mesh):
    """Queries that are cut and keys that are not are rotated apart."""
    rope, q, k = rw.RotaryEmbedding(DIM), drawn(BATCH, HEADS, SEQ, DIM), drawn(BATCH, 1, SEQ, DIM)
    rotated: Any = rope(distribute_tensor(q, mesh, [Shard(1)]), distribute_tensor(k, mesh, [Replicate()]))
    for y, expected in zip(rotated, rope(q, k), strict=True):
        torch.testing.assert_close(full(y), expected, atol=MOST, rtol=0)
    assert [y.placements for y in rotated] == [(Shard(1),), (Replicate(),)]


def dtensor_positions(mesh):
    rope, q = rw.RotaryEmbedding(DIM), drawn(BATCH, HEADS, SEQ, DIM)
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    for placement, own in ((Shard(2), Shard(1)), (Shard(2), Replicate()), (Shard(0), Shard(0)), (Shard(1), Shard(1))):
        y = rope(distribute_tensor(q, mesh, [placement]), positions=distribute_tensor(ids, mesh, [own]))
        torch.testing.assert_close(full(y), rope(q, positions=ids), atol=MOST, rtol=0)


def rules_that_vary(mesh):
    """The length is that of the whole sequence."""
    rope = rw.RotaryEmbedding(rw.RopeSpec(DIM, rw.DynamicNTK(10_000, factor=2, trained_length=4)))
    q = drawn(BATCH, HEADS, SEQ, DIM)
    torch.testing.assert_close(full(rope(distribute_tensor(q, mesh, [Shard(2)]))), rope(q), atol=MOST, rtol=0)


def unrotated(mesh):
    rope, q = rw.RotaryEmbedding(DIM), drawn(BATCH, HEADS, SEQ, DIM)
    shards = distribute_tensor(q, mesh, [Shard(2)])
    torch.testing.assert_close(full(rope.unrotate(rope(shards))), q, atol=MOST, rtol=0)


def kernels_and_tables(mesh):
    """A kernel rotates, and cos and sin have as many rows as this rank has tokens."""
    # A forced backend raises where it does not support the tensors.
    rope, rows, range_at = rw.RotaryEmbedding(DIM, backend="native"), [], AngleSource.range_at

    def noted(self, start, seq, *arguments, **options):
        rows.append((start, seq))
        return range_at(self, start, seq, *arguments, **options)

    q = drawn(BATCH, HEADS, 64, DIM).float()
    expected = rw.RotaryEmbedding(DIM)(q, offset=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AngleSource, "range_at", noted)
        y = rope(distribute_tensor(q, mesh, [Shard(2)]), offset=5)
    part = 64 // mesh.size()
    assert rows == [(5 + part * mesh.get_local_rank(), part)], rows
    assert torch.equal(full(y), expected)
    weight = torch.ones(DIM)
    shards = distribute_tensor(q, mesh, [Shard(1)])
    for y in rw.qk_norm_rope(shards, shards, rope, q_weight=weight, k_weight=weight):
        assert torch.equal(full(y), rw.qk_norm_rope(q, q, rope, q_weight=weight, k_weight=weight)[0])


def calls(world) -> dict[str, Any]:
    """Every call with every placement, on two ranks."""
    found: dict[str, Any] = {"uneven": uneven, "placements that differ": placements_that_differ}
    found |= {"positions": dtensor_positions, "length": rules_that_vary, "unrotate": unrotated}
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    # Copies, which may be passed to any rope.
    cos_sin = tuple(x.clone() for x in rw.RotaryEmbedding(DIM).at(torch.arange(SEQ) + 3, dtype=torch.float64))
    placings = {"range": {}, "offset": {"offset": 5}, "ids": {"positions": ids[0]}, "ids per row": {"positions": ids}}
    placings |= {"offsets": {"offset": torch.arange(BATCH)}, "angles": {"angles": cos_sin}}
    placings["packed"] = {"cu_seqlens": torch.tensor([0, 3, SEQ])}
    parts = {"batch": Shard(0), "heads": Shard(1), "sequence": Shard(2), "replicated": Replicate()}
    for part, placement in parts.items():
        for name, options in placings.items():
            for kind in ("rope", "learned"):
                for norm in (False, True):
                    case = functools.partial(rotation, kind, options, norm, placement)
                    found[f"{'qk_norm_rope' if norm else 'rope'}, {kind}, {part}, {name}"] = case
        if part == "sequence":
            continue
        for linear in (False, True):
            kinds = ["none", "rope", "xpos", "learned", "alibi", "t5", "mask", "positions"]
            for kind in [*kinds, "decay", "decay per token"] if linear else kinds:
                for kv_heads in (4, 2, 1):
                    case = functools.partial(attention, kind, linear, kv_heads, placement)
                    found[f"{'linear' if linear else 'softmax'}, {kind}, {part}, {kv_heads} kv_heads"] = case
    return found


def layer_of(kind, linear, kv_heads) -> Any:
    torch.manual_seed(0)
    encoding = None if kind == "none" else encoding_of(kind)
    layer = rw.LinearAttention if linear else rw.Attention
    return layer(HEADS * DIM, HEADS, num_kv_heads=kv_heads, encoding=encoding, qkv_bias=True).double()


def parallel_layer(kind, linear, kv_heads, how, mesh):
    """Output, gradients and decoding of a layer whose projections are DTensors."""
    plain, layer = layer_of(kind, linear, kv_heads), layer_of(kind, linear, kv_heads)
    x, weights = drawn(2, SEQ, HEADS * DIM).requires_grad_(), drawn(2, SEQ, HEADS * DIM, seed=1)
    expected = plain(x)
    (expected * weights).sum().backward()
    of_x, x = x.grad, x.detach()
    if how == "plan":
        parallelize_module(layer, mesh, parallel.plan(layer))
    elif how == "DTensors between":
        cut = ("q_proj", "k_proj", "v_proj") if kv_heads > 1 else ("q_proj",)
        styles = {name: ColwiseParallel(use_local_output=False) for name in cut}
        parallelize_module(layer, mesh, {**styles, "o_proj": RowwiseParallel()})
    else:
        distribute_module(layer, mesh)
        x = distribute_tensor(x, mesh, [Shard(0) if how == "batch" else Replicate()])
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    (y * (distribute_tensor(weights, mesh, y.placements) if isinstance(y, DTensor) else weights)).sum().backward()
    pairs = [(y, expected), (leaf.grad, of_x)]
    pairs += [(a.grad, b.grad) for a, b in zip(layer.parameters(), plain.parameters(), strict=True)]
    errors = [(full(a) - b).abs().max().item() for a, b in pairs]
    assert max(errors) <= 10 * MOST, errors
    if isinstance(x, DTensor):
        return
    with torch.inference_mode():
        if linear:
            state, outputs = layer.make_state(2), []
            for token in x.split(1, dim=1):
                output, state = layer.step(token, state)
                outputs.append(output)
        else:
            cache = layer.make_cache(2, 16)
            assert cache.num_kv_heads == max(1, kv_heads // mesh.size())
            outputs = [layer(token, cache=cache) for token in x.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, atol=10 * MOST, rtol=0)


def layers(world) -> dict[str, Any]:
    """Layers with every encoding, on two ranks."""
    return {
        f"{'linear' if linear else 'softmax'}, {kind}, {kv_heads} kv_heads, {how}": functools.partial(
            parallel_layer, kind, linear, kv_heads, how
        )
        for linear in (False, True)
        for kind in ("none", "rope", "learned", "alibi", "t5")
        for kv_heads in (4, 2, 1)
        for how in ("plan", "DTensors between", "batch", "replicated")
    }


def meshes_of_two_dimensions(world) -> dict[str, Any]:
    """Batch and heads, or batch and sequence, cut by a mesh of two dimensions."""

    def of_mesh(placements, run, kv_heads, mesh):
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        tensors = [drawn(BATCH, heads, SEQ, DIM, seed=heads) for heads in (HEADS, kv_heads, kv_heads)]
        compare(both, placements, run, tensors)

    rope, alibi = encoding_of("rope"), encoding_of("alibi")

    def both_rotated(q, k, v):
        return rope(q, k)

    found = {
        "rotation of batch and heads": ((Shard(0), Shard(1)), both_rotated),
        "rotation of batch and sequence": ((Shard(0), Shard(2)), both_rotated),
        "rotation of a sequence that is cut twice": ((Shard(2), Shard(2)), both_rotated),
        "softmax": ((Shard(0), Shard(1)), functools.partial(rw.attention, encoding=alibi)),
        "linear": ((Shard(0), Shard(1)), functools.partial(rw.linear_attention, rope=rope, bias=alibi)),
        "heads that are cut twice": ((Shard(1), Shard(1)), functools.partial(rw.attention, encoding=alibi)),
    }
    return {
        name: functools.partial(of_mesh, placements, run, 4)
        for name, (placements, run) in found.items()
        if not name.startswith("rotation")
    } | {
        name: functools.partial(of_rotation, placements, run)
        for name, (placements, run) in found.items()
        if name.startswith("rotation")
    }


def of_rotation(placements, run, mesh):
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    tensors = drawn(BATCH, HEADS, SEQ, DIM), drawn(BATCH, 2, SEQ, DIM)
    compare(both, placements, lambda q, k: run(q, k, None), tensors)


def refused(call, *words):
    with pytest.raises(rw.RopewalkError) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


def bad_input(mesh):
    """Errors on every rank, before anything is exchanged."""
    x, rope = drawn(BATCH, HEADS, SEQ, DIM), rw.RotaryEmbedding(DIM)

    def as_(placement, y=x):
        return distribute_tensor(y, mesh, [placement])

    partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    refused(lambda: rope(partial), "Partial", "redistribute")
    refused(
        lambda: rw.attention(partial, as_(Replicate()), as_(Replicate())), "attention(q)", "Partial", "batch or heads,"
    )
    refused(lambda: rope(partial), "batch, heads or sequence,")
    refused(lambda: rope(as_(Shard(3))), "features of a head")
    refused(lambda: rope(as_(Shard(2)), x), "k as a plain tensor")
    # Parts of other sizes than those of torch.chunk would be rotated at the positions of other tokens.
    counts = [1] * (mesh.size() - 1) + [SEQ - mesh.size() + 1]
    for dim in (1, 2):
        whole = x if dim == 2 else drawn(BATCH, SEQ, 3, DIM)
        part = whole.split(counts, dim)[mesh.get_local_rank()].contiguous()
        uneven = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())
        refused(lambda y=uneven: rope(y), "torch.chunk", "positions=")
    for function in (rw.attention, rw.linear_attention):
        refused(
            lambda f=function: f(*[as_(Shard(2))] * 3),
            f"ropewalk.parallel.{function.__name__}",
            "a sequence that is cut",
        )
        refused(
            lambda f=function: f(as_(Shard(0)), as_(Shard(1)), as_(Shard(0))), "cut along heads", "q cut along batch"
        )
        refused(lambda f=function: f(as_(Shard(0)), x, as_(Shard(0))), "k as a plain tensor")
        three = [as_(Shard(1), x[:, :3])] * 3
        refused(lambda f=function, y=three: f(*y), "multiples of", "3 heads")
    across = rw.encoding("rope-across-heads", dim=HEADS * DIM, num_heads=HEADS)
    refused(lambda: rw.attention(*[as_(Shard(1))] * 3, encoding=across), "different frequencies", "redistribute")
    refused(lambda: across.rope(as_(Shard(1))), "different frequencies", "redistribute")
    refused(lambda: rw.qk_norm_rope(as_(Shard(1)), as_(Shard(0)), rope), "cut along")
    plain = layer_of("rope", linear=False, kv_heads=4)
    refused(lambda: plain(as_(Shard(0), drawn(BATCH, SEQ, HEADS * DIM))), "distribute_module")
    distribute_module(plain, mesh)
    refused(lambda: plain(as_(Shard(1), drawn(BATCH, SEQ, HEADS * DIM))), "ropewalk.parallel")
    # Ranks that share the tokens would have different heads.
    shards = parallel.Shards(mesh, SEQ * mesh.size())
    for function in (parallel.attention, parallel.linear_attention):
        for dim, name in ((0, "batch"), (1, "heads")):
            cut = [as_(Shard(dim))] * 3
            refused(lambda f=function, y=cut: f(*y, shards=shards), f"parts of the {name}", 'mesh["tp"] cuts')
        assert function(*[as_(Replicate())] * 3, shards=shards).shape == x.shape
    refused(lambda: parallel.plan(torch.nn.Linear(2, 2)), "Attention or LinearAttention")
    refused(lambda: parallel.plan("model"), "a torch.nn.Module")


def meshes_that_differ(mesh):
    x = drawn(BATCH, HEADS, SEQ, DIM)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    q, k = (distribute_tensor(x, both[name], [Shard(1)]) for name in ("data", "model"))
    refused(lambda: rw.attention(q, k, k), "one mesh")
    refused(lambda: rw.linear_attention(q, k, k), "one mesh")


def heads_that_ranks_do_not_divide(mesh):
    layer = rw.Attention(3 * DIM, 3).double()
    parallelize_module(layer, mesh, parallel.plan(layer))
    refused(lambda: layer(drawn(1, 5, 3 * DIM)), "multiples of", "num_heads 3")
    refused(lambda: layer.make_cache(1, 8), "multiples of", "num_heads 3")
    # With four ranks the last one would have no key head.
    layer = rw.Attention(3 * mesh.size() * DIM, 3 * mesh.size(), num_kv_heads=3).double()
    parallelize_module(layer, mesh, parallel.plan(layer))
    refused(lambda: layer.make_cache(1, 8), "multiples of", "num_kv_heads 3")


def gradients_of_one_row(kind, mesh):
    """A rank without rows takes part in the sums of the gradients of parameters."""
    encoding = encoding_of(kind)
    weights = [x.requires_grad_() for x in (*encoding.parameters(), -drawn(HEADS).abs())]
    rows = [drawn(1, HEADS, SEQ, DIM, seed=i) for i in range(3)]
    name = "bias" if kind == "t5" else "rope"
    calls_of = {
        "softmax": lambda q, k, v: rw.attention(q, k, v, encoding=encoding),
        "lse": lambda q, k, v: (
            rw.attention(q, k, v, encoding=encoding, return_lse=True)[1]
            + rw.attention(q, k, v, encoding=encoding).sum(-1)
        ),
        "linear": lambda q, k, v: rw.linear_attention(q, k, v, **{name: encoding}),
        "decay": lambda q, k, v: rw.linear_attention(q, k, v, decay=weights[-1]),
    }
    if kind == "learned":
        calls_of["rotation"] = lambda q, k, v: encoding(q)
    for call, run in calls_of.items():
        results: list[Any] = []
        for tensors in (
            [x.clone().requires_grad_() for x in rows],
            [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in rows],
        ):
            found = torch.autograd.grad(full(run(*tensors)).square().sum(), [*tensors, *weights], allow_unused=True)
            results.append([None if x is None else full(x) for x in found])
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None), call
            if a is not None:
                torch.testing.assert_close(b, a, atol=MOST, rtol=MOST)


def one_row(mesh):
    """A batch of 1, or one token, on two ranks: the second has none."""
    tensors = [drawn(1, HEADS, SEQ, DIM, seed=i) for i in range(3)]
    mask, decay = torch.ones(1, SEQ, dtype=torch.bool), -drawn(1, HEADS, SEQ).abs()
    whole = rw.attention(*tensors, key_mask=mask), rw.linear_attention(*tensors, decay=decay)
    shards = [distribute_tensor(x, mesh, [Shard(0)]) for x in tensors]
    parts = rw.attention(*shards, key_mask=mask), rw.linear_attention(*shards, decay=decay)
    for y, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(full(y), expected, atol=MOST, rtol=0)
    rope, q, ids = rw.RotaryEmbedding(DIM), drawn(BATCH, HEADS, 1, DIM), torch.tensor([9])
    for options in ({"positions": ids}, {"offset": torch.arange(BATCH)}, {"angles": rope.at(ids, dtype=torch.float64)}):
        y = rope(distribute_tensor(q, mesh, [Shard(2)]), **options)
        torch.testing.assert_close(full(y), rope(q, **options), atol=MOST, rtol=0)


def weights_of_fsdp(mesh):
    """FSDP cuts weights of projections between calls: caches and heads are those of one process."""
    x, plain = drawn(2, SEQ, HEADS * DIM), layer_of("alibi", linear=False, kv_heads=4)
    layer = layer_of("alibi", linear=False, kv_heads=4)
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        fully_shard(projection, mesh=mesh)
    fully_shard(layer, mesh=mesh)
    layer.k_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(layer(x), plain(x), atol=MOST, rtol=0)
    assert layer.make_cache(1, 4).num_kv_heads == 4
    both = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("fsdp", "tp"))
    for kind in ("alibi", "t5"):
        layer, plain = (layer_of(kind, linear=False, kv_heads=4) for _ in range(2))
        parallelize_module(layer, both["tp"], parallel.plan(layer))
        fully_shard(layer, mesh=both["fsdp"])
        cache = layer.make_cache(2, SEQ)
        assert cache.num_kv_heads == 4
        with torch.no_grad():
            torch.testing.assert_close(layer(x, cache=cache), plain(x), atol=MOST, rtol=0)


def other_modules(mesh):
    """Models around the layers: a table that embeds, one key head, a projection that was replaced, buffers."""
    x = drawn(2, SEQ, HEADS * DIM)
    table = rw.encoding("learned", dim=HEADS * DIM, num_heads=HEADS, length=SEQ).double()
    model = torch.nn.ModuleDict({"table": table, "layer": layer_of("none", linear=False, kv_heads=1)})
    model["layer"].encoding = table
    expected = model["layer"](table.embed(x))
    parallelize_module(model, mesh, parallel.plan(model))
    y = model["layer"](table.embed(x))
    torch.testing.assert_close(y, expected, atol=10 * MOST, rtol=0)
    y.sum().backward()
    layer = layer_of("none", linear=False, kv_heads=1)
    parallelize_module(layer, mesh, parallel.plan(layer))
    layer(x).sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    replaced = layer_of("rope", linear=False, kv_heads=4)
    replaced.q_proj = torch.nn.Sequential(replaced.q_proj)
    with torch.no_grad():
        assert replaced(x, cache=replaced.make_cache(2, SEQ)).shape == x.shape
    favor = rw.LinearAttention(HEADS * DIM, HEADS, feature_map="favor").double()
    # torch's linear layers refuse a batch that ranks do not divide.
    x = drawn(BATCH, SEQ, HEADS * DIM)
    expected = favor(x)
    distribute_module(favor, mesh)
    y = favor(distribute_tensor(x, mesh, [Shard(0)]))
    torch.testing.assert_close(full(y), expected, atol=10 * MOST, rtol=0)


def threads(mesh):
    """Parameters are those of the module after calls in several threads."""
    encoding = encoding_of("t5")
    weight, shards = encoding.weight, [distribute_tensor(drawn(1, HEADS, 3, DIM), mesh, [Replicate()])] * 3

    def calls_of_thread():
        for _ in range(20):
            rw.attention(*shards, encoding=encoding)

    both = [threading.Thread(target=calls_of_thread) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert encoding.weight is weight


def one_rank_is_wrong(mesh):
    """An error of one rank is one of all."""
    rank, both = mesh.get_local_rank(), init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("tp", "cp"))
    shards = parallel.Shards(both["cp"], 2 * SEQ * mesh.size())
    x = drawn(1, HEADS, shards.positions.shape[0], DIM)
    k = DTensor.from_local(x, both["tp"], [Shard(2) if rank else Shard(1)], run_check=False)
    q = DTensor.from_local(x, both["tp"], [Shard(1)], run_check=False)
    for function in (parallel.attention, parallel.linear_attention):
        with pytest.raises(rw.RopewalkError):
            function(q, k, q, shards=shards)


def bad_cases(world) -> dict[str, Any]:
    """What must raise, and set-ups that are easily wrong."""
    found: dict[str, Any] = {"bad input": bad_input, "kernels": kernels_and_tables, "one row": one_row}
    found |= {
        f"gradients of one row, {kind}": functools.partial(gradients_of_one_row, kind) for kind in ("t5", "learned")
    }
    found |= {"weights of FSDP": weights_of_fsdp, "other modules": other_modules, "threads": threads}
    found["one rank is wrong"] = one_rank_is_wrong
    found["heads that ranks do not divide"] = heads_that_ranks_do_not_divide
    if world == 2:
        return found
    found |= {"meshes that differ": meshes_that_differ, "uneven": uneven, "positions": dtensor_positions}
    for linear, kind in ((False, "t5"), (True, "t5"), (True, "decay per token")):
        for kv_heads in (4, 1):
            case = functools.partial(attention, kind, linear, kv_heads, Shard(1))
            found[f"{'linear' if linear else 'softmax'}, {kind}, {kv_heads} kv_heads"] = case
    return found
