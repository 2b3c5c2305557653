"""Shardings, encodings and decays, and their results on one rank."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import ropewalk as rw
from nn.linear_cases import drawn
from nn.weighted_cases import rule_of, t5
from ropewalk import parallel

__all__ = ["ENCODINGS", "KINDS", "LENGTH", "SHARDINGS", "Sharding", "case_of", "check", "encoding_of"]

LENGTH, HEADS, DIM, V_DIM = 160, 4, 8, 3
BUCKETS = (8, 20)


class Sharding(NamedTuple):
    """How 160 tokens are cut."""

    layout: str = "contiguous"
    ends: tuple[int, ...] | None = None
    uneven: bool = False

    def shards(self, mesh, **options) -> parallel.Shards:
        lengths: Any = LENGTH
        if self.uneven:
            # A rank with one token, and a last rank with none.
            lengths = [150, 10] if mesh.size() == 2 else [100, 1, 59, 0]
        return parallel.Shards(mesh, lengths, self.layout, self.ends, **options)

    @property
    def batch(self) -> int:
        return 2 if self.ends is None else 1


SHARDINGS = {
    "contiguous": Sharding(),
    "uneven": Sharding(uneven=True),
    "zigzag": Sharding("zigzag"),
    "packed": Sharding(ends=(0, 3, 70, 70, 100, LENGTH)),
    "packed uneven": Sharding(ends=(0, 3, 120, 130, LENGTH), uneven=True),
    "packed zigzag": Sharding("zigzag", (0, 32, 32, 96, LENGTH)),
}

ENCODINGS = ("none", "rope", "half", "xpos", "learned", "alibi", "t5")
KINDS = ("none", "rope", "xpos", "learned", "alibi", "t5", "t5 learned", "per query head", "per token", "functions")


def encoding_of(name, *, causal=True) -> Any:
    """An encoding of 4 heads of 8 features in float64, or None."""
    if name == "none":
        return None
    if name == "t5":
        encoding = t5(HEADS, BUCKETS, causal=causal).double()
        torch.nn.init.normal_(encoding.weight, generator=torch.Generator().manual_seed(0))
        return encoding
    if name == "alibi":
        return rw.encoding(name, dim=HEADS * DIM, num_heads=HEADS).double()
    if name == "xpos":
        return rw.RotaryEmbedding(rw.RopeSpec(DIM, xpos=rw.XPos(2 * LENGTH))).double()
    pairing = "half" if name == "half" else "interleaved"
    return rw.RotaryEmbedding(DIM, pairing=pairing, learned=name == "learned").double()


def case_of(kind, batch, dtype=torch.float64):
    """The arguments of linear attention, and its parameters."""
    options: dict[str, Any] = {}
    if kind in ("rope", "xpos", "learned"):
        options["rope"] = encoding_of(kind)
    elif kind in ("alibi", "t5", "t5 learned"):
        options["bias"] = encoding_of(kind.split()[0])
    elif kind == "functions":
        options |= {"feature_map": (torch.exp, "relu"), "rope": encoding_of("rope"), "bias": encoding_of("t5")}
    elif kind == "none":
        options["rope"] = rw.encoding("none", dim=HEADS * DIM, num_heads=HEADS)
    else:
        tensor = rule_of(kind, batch, HEADS, 2, LENGTH, dtype).tensor
        assert tensor is not None
        options |= {"decay": tensor.requires_grad_(), "rope": encoding_of("half")}
    if kind == "t5 learned":
        options["rope"] = encoding_of("learned")
    modules = [x for x in options.values() if isinstance(x, torch.nn.Module)]
    return options, [x for module in modules for x in module.parameters()]


def inputs(batch, kv_heads=2, dtype=torch.float64):
    return [x.requires_grad_() for x in drawn(batch, HEADS, kv_heads, LENGTH, DIM, V_DIM, dtype)]


def check(shards, whole, parts, parameters, compute, tolerance=1e-13):
    """Compare outputs and gradients of ranks with those of one rank.

    Args:
        shards: The shards.
        whole: A function of nothing that returns the outputs of one rank, and the tensors of all tokens.
        parts: Tensors of the tokens of this rank.
        parameters: Parameters that all ranks have.
        compute: A function of `parts` that returns the outputs of this rank.
        tolerance: Largest error over the largest number.
    """
    truth, tensors = whole()
    cotangent = torch.randn(truth.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(truth)
    expected = torch.autograd.grad(truth, [*tensors, *parameters], cotangent)
    out = compute(*parts)
    leaves = [*parts, *parameters]
    results = torch.autograd.grad(out, leaves, shards.cut(cotangent, 2), allow_unused=True)
    # A rank without tokens does not use the parameters.
    results = [torch.zeros_like(x) if result is None else result for result, x in zip(results, leaves, strict=True)]
    assert out.dtype == truth.dtype
    errors = [error_of(out, shards.cut(truth, 2), truth.abs().max())]
    largest = max(x.abs().max() for x in expected)
    for i, (result, x) in enumerate(zip(results, expected, strict=True)):
        if i < len(parts):
            errors.append(error_of(result, shards.cut(x, 2), largest))
        else:
            # The gradient of a parameter is the share of this rank.
            share = result.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(share)
            errors.append(error_of(share, x, largest))
    # After the last exchange: a rank that failed before would leave the others waiting.
    assert max(errors) <= tolerance, errors


def error_of(x, truth, largest):
    """The largest error over `largest`; infinity for NaN."""
    assert x.shape == truth.shape
    error = ((x - truth).abs().max() / largest).item() if x.numel() else 0.0
    return error if error == error else float("inf")


def assert_near(x, truth, largest, tolerance):
    error = error_of(x, truth, largest)
    assert error <= tolerance, error


def linear_case(sharding, kind, mesh):
    batch = sharding.batch
    (q, k, v), (options, parameters) = inputs(batch), case_of(kind, batch)
    shards = sharding.shards(mesh)
    ends = None if sharding.ends is None else torch.tensor(sharding.ends)
    local = dict(options)
    decay, tensors = options.get("decay"), [q, k, v]
    if decay is not None:
        per_token = decay.dim() == 3
        tensors, parameters = ([*tensors, decay], parameters) if per_token else (tensors, [*parameters, decay])

    def compute(q, k, v, decay=None):
        given = local if decay is None else local | {"decay": decay}
        return parallel.linear_attention(q, k, v, shards=shards, **given)

    def whole():
        return rw.linear_attention(q, k, v, cu_seqlens=ends, **options), tensors

    parts = [shards.cut(x.detach(), 2).requires_grad_() for x in tensors]
    check(shards, whole, parts, parameters, compute)


def softmax_case(sharding, name, method, mesh):
    shards, (q, k, v) = sharding.shards(mesh), inputs(sharding.batch, kv_heads=4)
    ends = None if sharding.ends is None else torch.tensor(sharding.ends)
    for causal, window in ((True, None), (True, 17), (False, None), (False, 45)):
        encoding = encoding_of(name, causal=causal)
        options = {"encoding": encoding, "causal": causal, "window": window}
        parts = [shards.cut(x.detach(), 2).requires_grad_() for x in (q, k, v)]
        check(
            shards,
            lambda options=options: (rw.attention(q, k, v, cu_seqlens=ends, **options), [q, k, v]),
            parts,
            [] if encoding is None else list(encoding.parameters()),
            lambda *x, options=options: parallel.attention(*x, shards=shards, method=method, **options),
        )


def state_case(sharding, kind, mesh):
    """The state after all tokens, and the outputs after an initial state."""
    batch, shards = sharding.batch, sharding.shards(mesh)
    (q, k, v), (options, _) = inputs(batch), case_of(kind, batch)
    ends = None if sharding.ends is None else torch.tensor(sharding.ends)
    rows = batch if ends is None else len(sharding.ends or ()) - 1
    per_token = options.get("decay") is not None and options["decay"].dim() == 3
    local = options | ({"decay": shards.cut(options["decay"], 2)} if per_token else {})
    parts = [shards.cut(x, 2) for x in (q, k, v)]
    with torch.no_grad():
        state = None
        for _ in range(2):
            truth, after = rw.linear_attention(q, k, v, cu_seqlens=ends, state=state, return_state=True, **options)
            out, end = parallel.linear_attention(*parts, shards=shards, state=state, return_state=True, **local)
            assert_near(out, shards.cut(truth, 2), truth.abs().max(), 1e-13)
            pairs: list[Any] = [(end.above, after.above), (end.below, after.below)]
            pairs += zip(end.near or (), after.near or (), strict=True)
            pairs += [] if after.log_decay is None else [(end.log_decay, after.log_decay)]
            for x, expected in pairs:
                finite = expected.isfinite()
                assert torch.equal(x[~finite], expected[~finite])
                assert_near(x[finite], expected[finite], expected[finite].abs().max().clamp_min(1), 1e-13)
            assert (end.near is None, end.log_decay is None) == (after.near is None, after.log_decay is None)
            positions = [torch.as_tensor(x.start(rows)).expand(rows).tolist() for x in (end, after)]
            assert positions[0] == positions[1]
            state = after


def gradients_of_states_case(sharding, kind, mesh):
    """Gradients of the state before, and from the state after, of which every rank computes the same loss."""
    batch, shards = sharding.batch, sharding.shards(mesh)
    ends = None if sharding.ends is None else torch.tensor(sharding.ends)
    options, parameters = case_of(kind, batch)
    tensors = [x.detach() for x in inputs(batch)]
    with torch.no_grad():
        _, first = rw.linear_attention(*tensors, cu_seqlens=ends, return_state=True, **options)
    per_token = options.get("decay") is not None and options["decay"].dim() == 3
    local = options | ({"decay": shards.cut(options["decay"], 2)} if per_token else {})
    cotangents = [drawn_like(x, seed) for seed, x in enumerate((first.above, first.below))]
    whole_out = torch.randn(batch, HEADS, LENGTH, V_DIM, generator=torch.Generator().manual_seed(1)).double()
    results = []
    call: Any
    for call, leaves, of_output, share in (
        (functools.partial(rw.linear_attention, cu_seqlens=ends, **options), tensors, whole_out, 1.0),
        (
            functools.partial(parallel.linear_attention, shards=shards, **local),
            [shards.cut(x, 2) for x in tensors],
            shards.cut(whole_out, 2),
            1 / shards.ranks,
        ),
    ):
        leaves = [x.clone().requires_grad_() for x in leaves]
        sums = [x.detach().clone().requires_grad_() for x in (first.above, first.below)]
        state = replace(first, above=sums[0], below=sums[1])
        out, after = call(*leaves, state=state, return_state=True)
        outputs, weights = [out, after.above, after.below], [of_output, *(share * x for x in cotangents)]
        wanted = [*leaves, *sums, *parameters]
        found = torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
        results.append([torch.zeros_like(x) if y is None else y for x, y in zip(wanted, found, strict=True)])
    truth, ours = results
    largest, errors = max(x.abs().max() for x in truth), []
    for i, (y, x) in enumerate(zip(ours, truth, strict=True)):
        if i < len(tensors):
            errors.append(error_of(y, shards.cut(x, 2), largest))
        else:
            share = y.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(share)
            errors.append(error_of(share, x, largest))
    assert max(errors) <= 1e-13, errors


def zero_keys_case(mesh):
    """Keys of zeros are near as others are: their gradients have the weights of their distances."""
    shards, bias = parallel.Shards(mesh, LENGTH, "zigzag"), encoding_of("t5")
    q, k, v = (x.detach() for x in inputs(1))
    k[:, :, ::3] = 0.0
    options: dict[str, Any] = {"bias": bias, "feature_map": "identity", "normalize": False}
    near = {"bias": bias, "feature_map": "identity", "positions": torch.arange(LENGTH)}
    state, leaves, results = rw.linear_state(k, v, **near), [], []
    for call, tensors, share in (
        (rw.linear_attention, (q, k, v), 1.0),
        (
            functools.partial(parallel.linear_attention, shards=shards),
            [shards.cut(x, 2) for x in (q, k, v)],
            1 / shards.ranks,
        ),
    ):
        leaves = [x.clone().requires_grad_() for x in tensors]
        _, after = call(*leaves, state=state, return_state=True, **options)
        out = rw.linear_attention(q, k, v, state=after, **options)
        results.append([out, after.near, *torch.autograd.grad(share * out.sin().sum(), leaves[1:])])
    (truth, last, *whole), (ours, near_last, *parts) = results
    assert_near(ours, truth, truth.abs().max(), 1e-13)
    assert torch.equal(last.positions, near_last.positions)
    for x, y in zip(whole, parts, strict=True):
        assert_near(y, shards.cut(x, 2), x.abs().max(), 1e-12)


def drawn_like(x, seed):
    return torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))


def join_case(sharding, mesh):
    """All tokens in order, and the sum of the gradients of the ranks."""
    shards, x = sharding.shards(mesh), inputs(2)[0].detach()
    part = shards.cut(x, 2).clone().requires_grad_()
    cotangents = [drawn_like(x, rank) for rank in range(shards.ranks)]
    for dim in (2, -2):
        joined = shards.join(part, dim)
        (gradient,) = torch.autograd.grad(joined, part, cotangents[shards.rank])
        assert torch.equal(joined, x)
        torch.testing.assert_close(gradient, shards.cut(torch.stack(cotangents).sum(0), 2), rtol=0, atol=1e-13)


def both_directions_case(sharding, kind, mesh):
    """Without causality every query reads all keys of its sequence."""
    shards, (q, k, v), (options, parameters) = sharding.shards(mesh), inputs(sharding.batch), case_of(kind, 1)
    ends = None if sharding.ends is None else torch.tensor(sharding.ends)
    check(
        shards,
        lambda: (rw.linear_attention(q, k, v, cu_seqlens=ends, causal=False, **options), [q, k, v]),
        [shards.cut(x.detach(), 2).requires_grad_() for x in (q, k, v)],
        parameters,
        lambda *x: parallel.linear_attention(*x, shards=shards, causal=False, **options),
    )


def grouped_case(method, mesh):
    """Several query heads per key head, with values of another width."""
    shards, (q, k, v) = SHARDINGS["zigzag"].shards(mesh), inputs(2)
    encoding = encoding_of("t5")
    check(
        shards,
        lambda: (rw.attention(q, k, v, encoding=encoding), [q, k, v]),
        [shards.cut(x.detach(), 2).requires_grad_() for x in (q, k, v)],
        list(encoding.parameters()),
        lambda *x: parallel.attention(*x, shards=shards, encoding=encoding, method=method),
    )


def replaced_parameters_case(mesh):
    """Gradients of parameters that a functional call has replaced."""
    shards, (q, k, v) = SHARDINGS["contiguous"].shards(mesh), inputs(2, kv_heads=4)
    encoding, results = encoding_of("t5"), {}
    weight = torch.randn(encoding.weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weight.requires_grad_()
    for method in ("gather", "ring"):

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.bias = encoding

            def forward(self, *x, method=method):
                return parallel.attention(*x, shards=shards, encoding=self.bias, method=method)

        parts = [shards.cut(x.detach(), 2).requires_grad_() for x in (q, k, v)]
        out = torch.func.functional_call(Layer(), {"bias.weight": weight}, tuple(parts))
        results[method] = torch.autograd.grad(out.square().sum(), [*parts, weight])
    for a, b in zip(*results.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    out = parallel.attention(*parts, shards=shards, encoding=encoding, method="ring")
    with torch.no_grad():
        encoding.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def no_rows_case(method, mesh):
    """A batch of 0 has outputs and gradients of 0 rows, as on one rank."""
    for layout in ("contiguous", "zigzag"):
        shards = parallel.Shards(mesh, LENGTH, layout)
        parts = [shards.cut(x.detach()[:0], 2).requires_grad_() for x in inputs(2, kv_heads=4)]
        if method == "linear":
            out, state = parallel.linear_attention(*parts, shards=shards, bias=encoding_of("t5"), return_state=True)
            assert len(state.above) == 0
        else:
            out = parallel.attention(*parts, shards=shards, encoding=encoding_of("t5"), method=method)
        assert out.shape == (0, HEADS, LENGTH // mesh.size(), V_DIM)
        assert [x.shape for x in torch.autograd.grad(out.sum(), parts)] == [x.shape for x in parts]


def alone_case(which, mesh):
    """Ranks without tokens have a gradient of 0 of what only others read, if nothing else needs one."""
    shards = parallel.Shards(mesh, [LENGTH, *[0] * (mesh.size() - 1)])
    q, k, v = (shards.cut(x.detach(), 2) for x in inputs(2))
    linear, bias = torch.nn.Linear(DIM, DIM, dtype=torch.float64), encoding_of("t5").requires_grad_(False)
    leaf: torch.Tensor = linear.weight
    options: dict[str, Any] = {"feature_map": (torch.nn.Sequential(linear, torch.nn.Softplus()), "elu")}
    if which == "a state":
        tokens = [x.detach() for x in inputs(2)[1:]]
        state = rw.linear_state(*tokens, bias=bias, positions=torch.arange(LENGTH))
        assert state.near is not None
        leaf, options = state.near.values.requires_grad_(), {"bias": bias, "state": state}
    (gradient,) = torch.autograd.grad(parallel.linear_attention(q, k, v, shards=shards, **options).sum(), leaf)
    assert bool(gradient.any()) == bool(shards.local)


def nan_case(mesh):
    """NaN in one packed sequence does not reach gradients of another."""
    shards = parallel.Shards(mesh, LENGTH, "zigzag", (0, 80, LENGTH))
    q, k, v = inputs(1)
    decay = rule_of("per token", 1, HEADS, 2, LENGTH).tensor
    assert decay is not None
    parts = [shards.cut(x.detach(), 2).requires_grad_() for x in (q, k, v, decay)]
    first = shards.indices < 80
    with torch.no_grad():
        parts[2][:, :, first] = float("nan")
    out = parallel.linear_attention(*parts[:3], shards=shards, decay=parts[3])
    gradients = torch.autograd.grad(out[:, :, ~first].sum(), parts)
    assert all(x[:, :, ~first].isfinite().all() for x in gradients)


def penalty(compute, tensors, cotangent, chosen):
    """The sum of squares of the gradients of some tensors: its gradients are second derivatives."""
    gradients = torch.autograd.grad(compute(*tensors), [tensors[i] for i in chosen], cotangent, create_graph=True)
    return torch.stack([x.square().sum() for x in gradients]).sum()


def second_derivatives_case(sharding, kind, method, chosen, mesh):
    """A loss of the gradients of tokens: those of q alone, of v alone, or of all."""
    shards, batch = sharding.shards(mesh), sharding.batch
    ends = None if sharding.ends is None else torch.tensor(sharding.ends)
    tensors, options, parameters = [x.detach() for x in inputs(batch, kv_heads=2 if method is None else 4)], {}, []
    if method is None:
        options, parameters = case_of(kind, batch)
        if kind == "per token":
            tensors.append(options.pop("decay").detach())
    elif kind != "none":
        options["encoding"] = encoding_of(kind)
        parameters = list(options["encoding"].parameters())
    run = rw.linear_attention if method is None else rw.attention
    of_ranks = parallel.linear_attention if method is None else parallel.attention
    local = options if method is None else options | {"method": method}

    def whole(q, k, v, *decay):
        return run(q, k, v, cu_seqlens=ends, **options, **({"decay": decay[0]} if decay else {}))

    def part(q, k, v, *decay):
        return of_ranks(q, k, v, shards=shards, **local, **({"decay": decay[0]} if decay else {}))

    cotangent = torch.randn(batch, HEADS, LENGTH, V_DIM, generator=torch.Generator().manual_seed(1)).double()
    results = []
    # The fused kernels of SDPA have first derivatives only.
    with sdpa_kernel(SDPBackend.MATH):
        for compute, leaves, of_output in (
            (whole, tensors, cotangent),
            (part, [shards.cut(x, 2) for x in tensors], shards.cut(cotangent, 2)),
        ):
            leaves = [x.clone().requires_grad_() for x in leaves]
            wanted = [*leaves, *parameters]
            loss = penalty(compute, leaves, of_output, chosen)
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            results.append([torch.zeros_like(x) if y is None else y for x, y in zip(wanted, found, strict=True)])
    truth, ours = results
    largest = max(1e-3, *(x.abs().max() for x in truth))
    errors = [error_of(y, shards.cut(x, 2), largest) for y, x in zip(ours, truth[: len(tensors)], strict=False)]
    for y, x in zip(ours[len(tensors) :], truth[len(tensors) :], strict=True):
        share = y.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(share)
        errors.append(error_of(share, x, largest))
    assert max(errors) <= 1e-12, errors


def second_derivatives_of_a_ring_case(mesh):
    """An error on every rank."""
    shards = parallel.Shards(mesh, LENGTH)
    parts = [shards.cut(x.detach(), 2).requires_grad_() for x in inputs(1, kv_heads=4)]
    out = parallel.attention(*parts, shards=shards, method="ring")
    with pytest.raises(rw.RopewalkError, match="the gradient of a gradient"):
        torch.autograd.grad(out.sum(), parts, create_graph=True)


def linear_cases(world):
    cases: dict[str, Any] = {"NaN": nan_case, "keys of zeros": zero_keys_case}
    cases["no rows"] = functools.partial(no_rows_case, "linear")
    cases |= {f"alone, {which}": functools.partial(alone_case, which) for which in ("a state", "a query map")}
    cases |= {
        f"{name}, {kind}": functools.partial(linear_case, sharding, kind)
        for name, sharding in SHARDINGS.items()
        for kind in KINDS
    }
    for name, sharding in SHARDINGS.items():
        cases[f"join, {name}"] = functools.partial(join_case, sharding)
        for kind in ("none", "xpos", "t5 learned", "per token") if "packed" not in name else ("t5", "per query head"):
            cases[f"gradients of states, {name}, {kind}"] = functools.partial(gradients_of_states_case, sharding, kind)
        for kind in KINDS:
            cases[f"states, {name}, {kind}"] = functools.partial(state_case, sharding, kind)
        for kind in ("none", "rope", "xpos", "learned"):
            cases[f"both directions, {name}, {kind}"] = functools.partial(both_directions_case, sharding, kind)
    for name, kinds in (("contiguous", ("none", "learned", "t5", "per token")), ("uneven", ("none", "per token"))):
        for kind in kinds:
            for chosen in ((0, 1, 2), (0,), (2,)):
                case = functools.partial(second_derivatives_case, SHARDINGS[name], kind, None, chosen)
                cases[f"second derivatives of {chosen}, {name}, {kind}"] = case
    for name, kind in (("zigzag", "per token"), ("packed", "t5 learned")):
        case = functools.partial(second_derivatives_case, SHARDINGS[name], kind, None, (0, 1, 2))
        cases[f"second derivatives, {name}, {kind}"] = case
    return cases


def softmax_cases(world):
    more: dict[str, Any] = {f"grouped, {name}": functools.partial(grouped_case, name) for name in ("gather", "ring")}
    more |= {f"no rows, {name}": functools.partial(no_rows_case, name) for name in ("gather", "ulysses", "ring")}
    return (
        more
        | {"replaced parameters": replaced_parameters_case, "derivatives of a ring": second_derivatives_of_a_ring_case}
        | {
            f"second derivatives, {name}, {kind}, {method}": functools.partial(
                second_derivatives_case, SHARDINGS[name], kind, method, (0, 1, 2)
            )
            for name in ("uneven", "zigzag")
            for kind in ("none", "t5")
            for method in ("gather", "ulysses")
        }
        | {
            f"{name}, {encoding}, {method}": functools.partial(softmax_case, sharding, encoding, method)
            for name, sharding in SHARDINGS.items()
            for encoding in ENCODINGS
            for method in ("gather", "ulysses", "ring")
        }
    )
