"""The shortcut of a rope: its results, bit for bit, and its errors are those of the general path."""

import itertools
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ropewalk import DynamicNTK, RopeSpec, RopewalkError, RotaryEmbedding, XPos, Yarn
from ropewalk.kernels.backend import Backend, Operation, register, registered
from ropewalk.kernels.rotate.torch import rotate as rotate_by_torch
from ropewalk.spec.rope import PAIRINGS
from slow import slow
from strategies import vector

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def warm(*arguments: Any, **options: Any) -> RotaryEmbedding:
    """A module with a shortcut, which has remembered a range."""
    rope = RotaryEmbedding(*arguments, **options)
    dim = rope.spec.head_dim
    for dtype in (torch.float64, torch.float32):
        rope(
            torch.zeros(1, 1, 300, dim, dtype=dtype) if rope.seq_dim == -2 else torch.zeros(1, 300, 1, dim, dtype=dtype)
        )
    return rope


class Counted:
    """A shortcut that counts the calls that it computes."""

    def __init__(self, shortcut: Any) -> None:
        self.right, self.remember, self.computed = shortcut, shortcut.remember, 0

    def _count(self, result: Any) -> Any:
        self.computed += result is not None
        return result

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._count(self.right(*arguments, **options))

    def rotate_(self, *arguments: Any, **options: Any) -> Any:
        return self._count(self.right.rotate_(*arguments, **options))


def counted(rope: RotaryEmbedding) -> Counted:
    shortcut = rope._source.shortcut = Counted(rope._source.shortcut)
    return shortcut


def outcome(call: Any, *arguments: Any, **options: Any) -> list[Any]:
    """The bits of the results, or the text of the error."""
    try:
        results = call(*arguments, **options)
    except RopewalkError as error:
        return [type(error).__name__, str(error)]
    results = results if isinstance(results, tuple) else (results,)
    return [(y.dtype, y.stride(), y.requires_grad, y.detach().contiguous().view(torch.uint8).tolist()) for y in results]


def positions_of(rope: RotaryEmbedding, seq: int, batch: int) -> list[dict[str, Any]]:
    ids = torch.arange(seq) * 3 + 5
    per_batch = ids + torch.arange(batch)[:, None] * 1000
    return [
        {},
        {"offset": 0},
        {"offset": 37},
        {"positions": ids},
        {"positions": ids.to(torch.int32)},
        {"positions": ids.flip(0) - 9},
        {"positions": per_batch},
        {"positions": ids[None]},
        {"positions": per_batch.repeat_interleave(2, 1)[:, ::2]},
        {"angles": rope.at(ids)},
        {"angles": rope.at(per_batch)},
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seq_dim", [-2, -3])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_results_are_those_of_the_general_path(pairing, seq_dim, dtype):
    for spec in (RopeSpec(16, pairing=pairing), RopeSpec(20, Yarn(factor=4), pairing=pairing, rotary_dim=12)):
        rope = warm(spec, seq_dim=seq_dim)
        for batch, seq in ((1, 1), (2, 5)):
            shapes = [(batch, heads, seq, spec.head_dim) for heads in (3, 2)]
            both = [vector(i, *shape).to(dtype) for i, shape in enumerate(shapes)]
            both = both if seq_dim == -2 else [x.transpose(1, 2) for x in both]
            for options in positions_of(rope, seq, batch):
                angles = options.get("angles")
                if angles is not None and dtype == torch.float64:
                    options = {"angles": tuple(table.double() for table in angles)}
                # Positions of float64 tensors need float64 angles, which the table does not have.
                from_shortcut = not ("positions" in options and dtype == torch.float64)
                for tensors in (both, both[:1]):
                    rope(tensors[0], offset=0)
                    shortcut = counted(rope)
                    assert outcome(rope, *tensors, **options) == outcome(rope.forward, *tensors, **options)
                    assert shortcut.computed == from_shortcut, (options, dtype)
                    copies = [[x.clone() for x in tensors] for _ in range(2)]
                    results = rope.rotate_(*copies[0], **options)
                    assert (results if len(tensors) == 2 else (results,)) == tuple(copies[0])
                    expected = rope.forward(*copies[1], **options)
                    for y, truth in zip(copies[0], expected if len(tensors) == 2 else (expected,), strict=True):
                        assert torch.equal(y, truth)
                    assert shortcut.computed == 2 * from_shortcut
                    rope._source.shortcut = shortcut.right


@pytest.mark.parametrize("form", ["offset", "angles"])
def test_gradients_are_those_of_the_general_path(form):
    rope = warm(8)
    q, k = (vector(i, 2, heads, 5, 8).float().requires_grad_() for i, heads in enumerate((3, 2)))
    options = {"offset": 9} if form == "offset" else {"angles": rope.at(torch.arange(9, 14))}
    shortcut, cotangents = counted(rope), [vector(9, *x.shape).float() for x in (q, k)]
    mine, general = (
        [*results, *torch.autograd.grad(results, (q, k), cotangents, create_graph=True)]
        for results in (rope(q, k, **options), rope.forward(q, k, **options))
    )
    assert shortcut.computed == 1
    assert all(torch.equal(x, y) for x, y in zip(mine, general, strict=True))
    torch.autograd.gradcheck(lambda x: warm(8)(x, offset=3), vector(0, 2, 2, 8).requires_grad_())
    # A graph of both would include the keys.
    assert not rope(q, k.detach(), **options)[1].requires_grad
    assert shortcut.computed == 1


def test_a_backward_detects_that_angles_of_the_caller_were_written():
    rope, x = warm(8), torch.ones(1, 1, 3, 8, requires_grad=True)
    cos, sin = rope.at(torch.arange(3))
    y = rope(x, angles=(cos, sin))
    cos.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_results_do_not_keep_each_other_alive():
    rope, x = warm(8), torch.ones(1, 1, 3, 8, requires_grad=True)
    y = rope(x)
    reference = weakref.ref(y)
    del y
    assert reference() is None


class Doubled(RotaryEmbedding):
    def forward(self, q: Tensor, k: Tensor | None = None, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * super().forward(q, k, **options)  # pyright: ignore[reportCallIssue, reportArgumentType, reportOperatorIssue]


def test_what_surrounds_forward_still_runs():
    x = vector(0, 1, 2, 3, 8).float()
    expected = warm(8)(x)
    doubled = Doubled(8)
    assert torch.equal(doubled(x), 2 * expected)
    assert torch.equal(doubled(x), 2 * expected)
    rope, seen = warm(8), []
    removals = [
        rope.register_forward_hook(lambda *_: seen.append("after")),
        rope.register_forward_pre_hook(lambda *_: seen.append("before")),
        nn.modules.module.register_module_forward_hook(lambda *_: seen.append("global")),
        nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append("global before")),
    ]
    rope(x)
    assert sorted(seen) == ["after", "before", "global", "global before"]
    for number, removal in enumerate(removals):
        # Each of them alone.
        seen.clear()
        removal.remove()
        rope(x)
        assert len(seen) == 3 - number
    removal = nn.modules.module.register_module_full_backward_hook(lambda *_: seen.append("global backward"))
    rope(x.clone().requires_grad_()).sum().backward()
    assert seen == ["global backward"]
    removal.remove()
    handle = rope.register_full_backward_hook(lambda *_: seen.append("backward"))
    rope(x.clone().requires_grad_()).sum().backward()
    assert seen[-1] == "backward"
    handle.remove()
    general, rope.forward = rope.forward, lambda *arguments, **options: "another forward"  # pyright: ignore[reportAttributeAccessIssue]
    assert rope(x) == "another forward"
    rope.forward = general
    assert torch.equal(rope(x), expected)


def test_a_module_that_was_compiled_in_place():
    rope, seen = warm(8), []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    rope.compile(backend=backend)
    rope(X)
    assert len(seen) == 1


@pytest.mark.parametrize("registered", ["before", "after"])
def test_hooks_of_a_module_that_is_compiled(registered):
    torch.compile(warm(8), backend="eager")(X)
    rope, seen = warm(8), []
    compiled: Any = torch.compile(rope, backend="eager")
    if registered == "after":
        compiled(X)
    rope.register_forward_hook(lambda *_: seen.append("hook"))
    compiled(X)
    assert seen == ["hook"]


def test_profilers_see_the_module():
    rope = warm(8)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, with_stack=True, acc_events=True) as profile:
        rope(X)
    assert any("nn.Module: RotaryEmbedding" in event.name for event in profile.events() or ())


@pytest.mark.parametrize("warmed", [False, True])
def test_checkpoints_save_the_same_in_both_passes(warmed):
    rope = warm(8) if warmed else RotaryEmbedding(8)
    q = X.clone().requires_grad_()
    y = checkpoint(lambda x: rope(x, offset=7).sin().sum(), q, use_reentrant=False)
    rope(X, offset=10_000)
    y.backward()  # pyright: ignore[reportAttributeAccessIssue]
    expected = torch.autograd.grad(warm(8)(q, offset=7).sin().sum(), q)[0]
    torch.testing.assert_close(q.grad, expected)


def test_cos_and_sin_of_a_backend_are_not_those_of_the_next():
    keep, calls = RotaryEmbedding(8, base=99.0), []
    right = registered("native").operations["cos_sin"].run

    def wrong(*arguments: Any) -> Any:
        calls.append(1)
        return tuple(0 * table for table in right(*arguments))

    undo = register(Backend("wrong", {"cos_sin": Operation(run=wrong)}, devices=("cpu",)))
    keep(X)
    undo()
    assert len(calls) == 1
    expected = RotaryEmbedding(8, base=99.0, backend="torch")(X)
    torch.testing.assert_close(RotaryEmbedding(8, base=99.0)(X), expected)
    torch.testing.assert_close(keep(X), expected)


def test_the_layout_cannot_be_replaced():
    with pytest.raises(AttributeError):
        warm(8).layout = None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_class_whose_forward_was_replaced(monkeypatch):
    rope, x = warm(8), torch.ones(1, 2, 3, 8)
    monkeypatch.setattr(RotaryEmbedding, "forward", lambda *arguments, **options: "replaced")
    assert rope(x) == "replaced"


def test_whatever_intercepts_calls_sees_the_operations():
    rope, x = warm(8), vector(0, 1, 2, 3, 8).float()
    shortcut, expected = counted(rope), rope(x)
    assert shortcut.computed == 1

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Log():
        rope(x)
    assert any("mul" in name for name in seen)
    torch.testing.assert_close(torch.func.vmap(rope)(x), expected)
    torch.func.jvp(rope, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        rope(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(rope, (x,), check_trace=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        rope(mode.from_tensor(x))
    rope(x.to("meta"))
    graph = make_fx(rope)(x)
    assert any("mul" in str(node.target) for node in graph.graph.nodes)
    torch.autograd.grad(rope(x.requires_grad_()), x, torch.ones(3, *x.shape), is_grads_batched=True)
    assert shortcut.computed == 2  # the last forward, whose backward is batched


class LeafTracer(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def test_a_tracer_of_modules_sees_a_leaf():
    model = nn.Sequential(warm(8))
    graph = LeafTracer().trace(model)
    assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "output"]


def test_a_compiled_module_has_one_graph():
    rope, x = warm(8), vector(0, 1, 2, 3, 8).float()
    shortcut, expected = counted(rope), rope.forward(x)
    for compiled in (
        torch.compile(rope, backend="eager", fullgraph=True),
        torch.compile(lambda x: rope(x), backend="eager", fullgraph=True),
    ):
        torch.testing.assert_close(compiled(x), expected)
    assert shortcut.computed == 0


class Subclass(Tensor):
    pass


BAD: dict[str, Any] = {
    "no tensor": ("text",),
    "keys that are no tensor": (torch.ones(1, 2, 3, 8), 5),
    "another width": (torch.ones(1, 2, 3, 6),),
    "another length": (torch.ones(1, 2, 3, 8), torch.ones(1, 2, 4, 8)),
    "another dtype": (torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8).double()),
    "integers": (torch.ones(1, 2, 3, 8, dtype=torch.int32),),
    "one dimension": (torch.ones(8),),
    "sparse": (torch.ones(1, 3, 8).to_sparse(),),
    "three tensors": (torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8)),
    "complex": (torch.ones(1, 2, 3, 8, dtype=torch.complex64),),
}
X = vector(0, 2, 2, 3, 8).float()
BAD_OPTIONS: list[dict[str, Any]] = [
    {"offset": 62},
    {"offset": 64},
    {"offset": 1 << 70},
    {"offset": 2.5},
    {"offset": True},
    {"offset": "1"},
    {"offset": [1]},
    {"offset": 1, "positions": torch.arange(3)},
    {"positions": torch.arange(4)},
    {"positions": torch.arange(62, 65)},
    {"positions": torch.arange(6).view(2, 3) + 62},
    {"positions": torch.arange(9).view(3, 3)},
    {"positions": torch.arange(3).view(3, 1)},
    {"positions": torch.tensor([0.0, float("nan"), 1.0])},
    {"positions": torch.tensor([True, False, True])},
    {"positions": [0, 1, 2]},
    {"positions": torch.arange(3).to("meta")},
    {"angles": (torch.ones(3, 4),)},
    {"angles": [torch.ones(3, 4), torch.ones(3, 4)]},
    {"angles": (torch.ones(3, 8), torch.ones(3, 8))},
    {"angles": (torch.ones(4, 4), torch.ones(4, 4))},
    {"angles": (torch.ones(3, 4), torch.ones(3, 3))},
    {"angles": (torch.ones(3, 3, 4), torch.ones(3, 3, 4))},
    {"angles": (torch.ones(3, 4).double(), torch.ones(3, 4).double())},
    {"theta": 5.0},
    {"cu_seqlens": torch.tensor([0, 9])},
    {"role": "v"},
]


@pytest.mark.parametrize("name", BAD)
def test_tensors_that_are_refused_have_the_errors_of_the_general_path(name):
    rope = warm(8)
    results = [outcome(call, *BAD[name]) for call in (rope, rope.forward)]
    assert results[0] == results[1]
    assert results[0][0] in ("RopewalkError", "ArgumentError")


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=lambda options: "-".join(options))
def test_options_that_are_refused_have_the_errors_of_the_general_path(options):
    rope = RotaryEmbedding(8, context_length=64)
    rope(torch.ones(1, 1, 60, 8))
    assert rope._source.shortcut is not None
    for tensors in ((X,), (X, X)):
        results = [outcome(call, *tensors, **options) for call in (rope, rope.forward)]
        assert results[0] == results[1]
        assert results[0][0] in ("RopewalkError", "ArgumentError")


def test_angles_of_another_rope_are_refused():
    rope, angles = warm(8), RotaryEmbedding(8, base=5.0).at(torch.arange(3))
    results = [outcome(call, X, angles=angles) for call in (rope, rope.forward)]
    assert results[0] == results[1]
    assert results[0][0] == "RopewalkError"


def test_calls_that_are_unusual_are_right():
    rope = warm(8)
    negated = torch.ones(1, 2, 3, 8, dtype=torch.complex64).conj().imag
    torch.testing.assert_close(rope(negated), rope.forward(negated.clone()))
    frequencies = torch.polar(torch.ones(3, 4), torch.arange(12.0).view(3, 4)).conj()
    angles = frequencies.real, frequencies.imag
    expected = rope.forward(X, angles=(angles[0].clone(), angles[1].clone()))
    torch.testing.assert_close(rope(X, angles=angles), expected)
    assert type(rope(X.as_subclass(Subclass))) is Subclass
    assert torch.equal(rope(nn.Parameter(X)), rope.forward(X))
    halves = tuple(table.bfloat16() for table in rope.at(torch.arange(3)))
    assert torch.equal(rope(X, angles=halves), rope.forward(X, angles=halves))
    assert rope(X[:, :, :0]).shape == (2, 2, 0, 8)
    # A NaN whose bits are all ones must not be rounded to 0.
    bits = torch.full((3, 4), -1, dtype=torch.int32).view(torch.float32)
    assert rope(X.bfloat16(), angles=(bits, bits)).isnan().all()
    for learned in (0, 1):
        tables = [table.requires_grad_(number == learned) for number, table in enumerate(rope.at(torch.arange(3)))]
        assert rope(X, angles=tuple(tables)).requires_grad


def test_specs_without_a_shortcut():
    for spec in (RopeSpec(8, DynamicNTK(factor=2, trained_length=4)), RopeSpec(8, xpos=XPos(64))):
        rope = RotaryEmbedding(spec)
        rope(X, X)
        assert rope._source.shortcut is None
    assert RotaryEmbedding(8, learned=True)._source.shortcut is None
    rope = RotaryEmbedding(8, check_ids=True)
    rope(X)
    assert rope._source.shortcut is None


def test_a_backend_that_is_registered_replaces_the_shortcut():
    rope, calls = warm(8), []

    def rotate(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return rotate_by_torch(*arguments, **options)

    undo = register(Backend("mine", {"rotate": Operation(run=rotate)}, devices=("cpu",)))
    for options in ({}, {"offset": 3}, {"positions": torch.arange(3)}, {"angles": rope.at(torch.arange(3))}):
        rope(X, **options)
    assert len(calls) == 4
    undo()
    rope(X)
    shortcut = counted(rope)
    rope(X)
    assert (len(calls), shortcut.computed) == (4, 1)


def test_a_backend_for_angles_computes_them():
    rope, calls = warm(8), []
    right = registered("native").operations["cos_sin"].run

    def cos_sin(*arguments: Any) -> Any:
        calls.append(1)
        return right(*arguments)

    undo = register(Backend("mine", {"cos_sin": Operation(run=cos_sin)}, devices=("cpu",)))
    try:
        for _ in range(3):
            rope(X, positions=torch.arange(3))
    finally:
        undo()
    assert len(calls) == 3


def test_writes_in_place_are_noted_and_refused_as_before():
    rope, x = warm(8), torch.ones(1, 2, 3, 8)
    shortcut, version = counted(rope), x._version
    rope.rotate_(x, offset=2)
    assert (shortcut.computed, x._version) == (1, version + 1)
    leaf = torch.ones(1, 2, 3, 8, requires_grad=True)
    shared = torch.ones(2, 1, 2, 3, 8)
    with torch.inference_mode():
        inside = torch.ones(1, 2, 3, 8)
        assert torch.equal(rope.rotate_(inside.clone(), offset=2), x)
    general = RotaryEmbedding(8, backend="torch")
    refused = [(leaf,), (leaf[:, :1],), (shared[0], shared[0]), (shared[0, :, :, :1].expand(1, 2, 3, 8),), (inside,)]
    refused.append((shared.flatten()[:48].view(1, 2, 3, 8), shared.flatten()[8:56].view(1, 2, 3, 8)))
    for tensors in refused:
        before = [t.clone() for t in tensors]
        texts = [outcome(module.rotate_, *tensors)[1] for module in (rope, general)]
        assert texts[0] == texts[1]
        assert all(torch.equal(t, old) for t, old in zip(tensors, before, strict=True))
    assert shortcut.computed == 2


def random_call(random: np.random.Generator, rope: RotaryEmbedding) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call, most of them valid."""

    def pick(*choices: Any) -> Any:
        return choices[random.integers(len(choices))]

    seq, batch, dim = pick(1, 1, 2, 5), pick(1, 2, 3), pick(8, 8, 8, 8, 6)
    dtype = pick(torch.float32, torch.float32, torch.bfloat16, torch.float64)
    tensors: list[Any] = []
    for heads in (3, 2)[: pick(1, 2)]:
        tokens = seq if random.random() < 0.97 else seq + 1
        lead = pick((batch, heads), (batch, heads), (batch, 2, heads), (heads,), ())
        x = torch.from_numpy(random.standard_normal((*lead, tokens, dim * 2))).to(dtype)
        tensors.append(pick(x[..., :dim].contiguous(), x[..., ::2], x[..., :dim], x[..., dim:]))
    ids = torch.from_numpy(random.integers(-5, pick(40, 300), pick((seq,), (batch, seq), (1, seq), (seq + 1,))))
    angles = rope.at(ids.abs(), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    options = pick(
        {},
        {"offset": int(random.integers(-3, 60))},
        {"positions": pick(ids, ids.to(torch.int32), ids.float(), ids.to(torch.int16))},
        {"angles": pick(angles, angles, angles[::-1], (angles[0].bfloat16(), angles[1].bfloat16()))},
        {"offset": pick(None, True, 1.5, torch.tensor(3), 10**30)},
    )
    return tensors, options | (
        pick({}, {}, {}, {"positions": None}, {"role": None}, {"role": "q"}, {"k_positions": ids})
    )


@pytest.mark.parametrize("calls", [1_000, *[slow(40_000)]])
def test_random_calls_have_the_outcome_of_the_general_path(calls):
    random = np.random.default_rng(calls)
    ropes = [
        warm(8, seq_dim=seq_dim, pairing=pairing, context_length=limit)
        for seq_dim, pairing, limit in itertools.product((-2, -3), PAIRINGS, (None, 300))
    ]
    computed = errors = 0
    with torch.no_grad():
        for number in range(calls):
            rope = ropes[number % len(ropes)]
            tensors, options = random_call(random, rope)
            result = outcome(rope.forward, *tensors, **options)
            shortcut = counted(rope)
            assert outcome(rope, *tensors, **options) == result, (tensors, options)
            rope._source.shortcut = shortcut.right
            computed += shortcut.computed
            errors += result[0] == "RopewalkError"
    assert computed > calls // 8
    assert errors > calls // 10
