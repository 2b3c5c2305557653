"""The registry: every backend passes the parity suite, a new one takes thirty lines, and a wrong one is rejected."""

import inspect
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch

import ropewalk as rw
from kernels.backend_parity import CHECKS, check_backend
from kernels.present import PRESENT, QUICK
from kernels.triton_device import DEVICE
from nn.linear_cases import direct_sums
from ropewalk import RopewalkError
from ropewalk.kernels.backend import OPERATIONS, Backend, Operation, backends, register
from ropewalk.kernels.linear.torch import linear_attention
from ropewalk.kernels.types import Layout, Sums, line_up
from ropewalk.ops.dispatch import choose, find, with_shortcut
from ropewalk.reference import rotate
from ropewalk.reference.budget import BudgetError
from slow import slow, slow_except
from strategies import theta, vector


@pytest.mark.parametrize("name", slow_except(QUICK, PRESENT))
def test_every_backend_passes_the_parity_suite(name):
    assert check_backend(name)


def tiny_backend() -> Backend:
    def cos_sin(positions, inv_freq, radix_table, amplitude, dtype, axes):
        angles = positions.double().unsqueeze(-1) * inv_freq
        return (amplitude * angles.cos()).to(dtype), (amplitude * angles.sin()).to(dtype)

    def one_row(positions, inv_freq, radix_table, amplitude, dtype, axes):
        return None if inv_freq.dim() == 1 and axes is None else "frequencies per head, or axes"

    def rotate_one(x, cos, sin, layout, row, conjugate=False):
        c, s = (line_up(table, x, layout.seq_dim, row) for table in (cos, -sin if conjugate else sin))
        y, pairs = x.to(cos.dtype, copy=True), cos.shape[-1]
        part = y[..., layout.start : layout.start + 2 * pairs]
        a, b = (part[..., 0::2], part[..., 1::2]) if layout.interleaved else part.split(pairs, dim=-1)
        a[...], b[...] = a * c - b * s, a * s + b * c
        return y.to(x.dtype)

    def rotate(q, k, cos, sin, layout, row=0, conjugate=False):
        return tuple(rotate_one(x, cos, sin, layout, row, conjugate) for x in (q, k) if x is not None)

    def norm_rotate(tensors, weights, cos, sin, layout, norm, row=0):
        wide = [x.to(cos.dtype) for x in tensors]
        scaled = [x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() for x in wide]
        scaled = [x if w is None else x * (w + norm.plus_one) for x, w in zip(scaled, weights, strict=True)]
        return [rotate_one(y, cos, sin, layout, row).to(x.dtype) for x, y in zip(tensors, scaled, strict=True)]

    def linear(q, k, v, before, layout, causal, cu_seqlens=None):
        sums = None if before is None else Sums.from_flat(before, k.x.shape[1], q.x.shape[-1], v.shape[-1])
        out, after = linear_attention(q, k, v, sums, layout, causal, cu_seqlens)
        return out, after.flat()

    operations = {"rotate": rotate, "norm_rotate": norm_rotate, "linear_attention": linear}
    made = {name: Operation(run) for name, run in operations.items()}
    return Backend("tiny", made | {"cos_sin": Operation(cos_sin, supports=one_row)})


def watched(backend: Backend, calls: Counter, wrong: str) -> Backend:
    """The backend with its calls counted, and the first result of one operation off by a hundredth."""

    def watch(name, run):
        def call(*arguments, **options):
            calls[name] += 1
            first, *rest = run(*arguments, **options)
            return (first * 1.01 if name == wrong else first, *rest)

        return call

    return replace(backend, operations={n: replace(o, run=watch(n, o.run)) for n, o in backend.operations.items()})


@pytest.fixture
def registered_tiny():
    undone = []

    def make(wrong: str = "") -> Counter:
        calls = Counter()
        undone.append(register(watched(tiny_backend(), calls, wrong)))
        return calls

    yield make
    for undo in reversed(undone):
        undo()


def test_a_backend_takes_thirty_lines():
    code = [line for line in inspect.getsourcelines(tiny_backend)[0] if line.strip()]
    assert len(code) <= 30


def test_all_four_operations_use_it(registered_tiny):
    calls = registered_tiny()
    rope, x = rw.RotaryEmbedding(8, backend="tiny"), vector(0, 1, 2, 5, 8).float()
    rope(x, positions=torch.arange(5))
    assert set(calls) == {"cos_sin", "rotate"}
    rw.qk_norm_rope(x, x, rope)
    rw.linear_attention(x, x, x, rope=rw.RotaryEmbedding(8), backend="tiny")
    assert set(calls) == set(OPERATIONS)


def test_the_parity_suite_accepts_it(registered_tiny):
    calls = registered_tiny()
    assert check_backend("tiny") == list(OPERATIONS)
    assert set(calls) == set(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_parity_suite_rejects_a_wrong_one(operation, registered_tiny):
    registered_tiny(wrong=operation)
    with pytest.raises(BudgetError):
        CHECKS[operation]("tiny")


@pytest.mark.slow
def test_it_computes_what_is_compiled_and_what_needs_gradients_too(registered_tiny):
    calls = registered_tiny()
    rope, x = rw.RotaryEmbedding(8, backend="tiny"), vector(0, 1, 2, 5, 8).float().requires_grad_()
    # A rotation keeps norms.
    torch.testing.assert_close(torch.autograd.grad(rope(x).square().sum(), x)[0], 2 * x.detach())
    calls.clear()
    compiled = torch.compile(lambda y: rope(y, positions=torch.arange(5)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), rotate(x, torch.arange(5), theta(8)))
    assert set(calls) == {"cos_sin", "rotate"}
    out, state = rw.linear_attention(x, x, x, backend="tiny", return_state=True)
    again = rw.linear_attention(x, x, x, backend="tiny", state=state)
    expected_out, *sums = direct_sums(x, x, x)
    expected, *_ = direct_sums(x, x, x, sums=sums)
    torch.testing.assert_close(again, expected)
    gradients = [
        torch.autograd.grad(b.sum() + a.square().sum(), x)[0] for a, b in ((out, again), (expected_out, expected))
    ]
    torch.testing.assert_close(*gradients)


def test_it_is_chosen_by_itself_where_it_says_so(registered_tiny):
    calls = registered_tiny()
    rope, x = rw.RotaryEmbedding(8), vector(0, 1, 2, 5, 8).float()
    rope(x, positions=torch.arange(5))
    assert not calls
    tiny = next(backend for backend in backends() if backend.name == "tiny")
    undo = register(replace(tiny, devices=("cpu",)))
    try:
        rope(x, positions=torch.arange(5))
        fresh = rw.RotaryEmbedding(8)
        assert torch.equal(fresh(x), fresh(x))
    finally:
        undo()
    assert set(calls) == {"cos_sin", "rotate"}


def test_a_forced_backend_says_why_it_cannot(registered_tiny):
    registered_tiny()
    x = vector(0, 1, 2, 5, 8).float()
    with pytest.raises(
        RopewalkError, match=r"backend='tiny'\nexpected: a call that it supports\ngot:      a transform"
    ):
        torch.func.vmap(rw.RotaryEmbedding(8, backend="tiny"))(x)
    with pytest.raises(RopewalkError, match="'tiny' or 'native'"):
        rw.RotaryEmbedding(8, backend="tinny")
    learned = rw.RotaryEmbedding(8, backend="tiny", learned=True)
    with pytest.raises(RopewalkError, match="gradients of cos and sin"):
        learned(x)
    only_rotates = Backend("rotates", {"rotate": Operation(run=print)}, why_missing=lambda: None)
    undo = register(only_rotates)
    try:
        with pytest.raises(RopewalkError, match=r"linear_attention, which it does not support, for torch\.float32"):
            rw.linear_attention(x, x, x, backend="rotates")
    finally:
        undo()
    undo = register(replace(only_rotates, why_missing=lambda: "it is a Tuesday"))
    try:
        with pytest.raises(RopewalkError, match="it is a Tuesday"):
            rw.RotaryEmbedding(8, backend="rotates")
    finally:
        undo()


def test_a_forced_backend_that_no_compiler_may_use_is_not_replaced(registered_tiny):
    registered_tiny()
    tiny = next(backend for backend in backends() if backend.name == "tiny")
    eager_only = {name: replace(operation, opaque=False) for name, operation in tiny.operations.items()}
    undo = register(replace(tiny, operations=eager_only))
    try:
        rope, x = rw.RotaryEmbedding(8, backend="tiny"), vector(0, 1, 2, 5, 8).float()
        assert torch.equal(rope(x), rope(x))
        # In one graph a compiler raises an error of its own around ours.
        with pytest.raises(RuntimeError, match="RopewalkError"):
            torch.compile(rope, fullgraph=True, backend="eager")(x)
    finally:
        undo()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("mine", "a Backend"),
        (Backend("mine", {"rotat": Operation(run=print)}), "did you mean 'rotate'"),
        (Backend("mine", {"rotate": print}), r"wrap the function: {'rotate': Operation\(run=function\)}"),
    ],
)
def test_what_cannot_be_registered(backend, message):
    before = backends()
    with pytest.raises(RopewalkError, match=message):
        register(backend)
    assert backends() == before


def test_the_built_in_backends_are_there_before_any_other():
    code = "from ropewalk.kernels.backend import backends; print([backend.name for backend in backends()])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['native', 'triton', 'torch']"


def test_undoing_twice_or_out_of_order_takes_nothing_else_away():
    first = register(Backend("mine", {"rotate": Operation(run=print)}))
    second = register(Backend("mine", {}))
    first()
    assert backends()[0].operations == {}
    second()
    assert "rotate" in backends()[0].operations
    first()
    first()
    assert "mine" not in [backend.name for backend in backends()]


def test_replacing_a_backend_and_undoing_it_leaves_the_order():
    before = [backend.name for backend in backends()]
    torch_backend = next(backend for backend in backends() if backend.name == "torch")
    undo = register(replace(torch_backend))
    assert backends()[0].name == "torch"
    undo()
    assert [backend.name for backend in backends()] == before


def test_a_warm_module_follows_the_registry(registered_tiny):
    rope, x = rw.RotaryEmbedding(8), vector(0, 1, 2, 5, 8).float()
    expected = [rope(x), rope(x)][1]
    calls = registered_tiny()
    tiny = next(backend for backend in backends() if backend.name == "tiny")
    undo = register(replace(tiny, devices=("cpu",)))
    torch.testing.assert_close(rope(x), expected)
    undo()
    assert calls["rotate"] == 1
    assert torch.equal(rope(x), expected)
    assert torch.equal(rope(x), expected)
    assert calls["rotate"] == 1


@pytest.mark.skipif("triton" not in PRESENT, reason="asks Triton's interpreter")
def test_a_forced_backend_is_asked_at_every_call():
    # The second call finds its range in the cache, and must not go around what the backend supports.
    rope, x = rw.RotaryEmbedding(8, backend="triton"), vector(0, 1, 2, 5, 8).float()
    assert with_shortcut("rotate", x.device, "triton") is None
    where = x.to(DEVICE)
    rope = rope.to(DEVICE)
    assert torch.equal(rope(where), rope(where))
    meta = rw.RotaryEmbedding(8, backend="triton")
    for _ in range(2):
        with pytest.raises(RopewalkError, match="tensors that are not on a CUDA device"):
            meta(x.to("meta"))


def test_linear_attention_by_torch_is_torch_alone(registered_tiny):
    calls = registered_tiny()
    tiny = next(backend for backend in backends() if backend.name == "tiny")
    undo = register(replace(tiny, devices=("cpu",)))
    x, rope = vector(0, 1, 2, 5, 8).float(), rw.RotaryEmbedding(8, backend="torch")
    try:
        rw.linear_attention(x, x, x, rope=rope, backend="torch")
    finally:
        undo()
    assert calls["rotate"] == calls["linear_attention"] == 0


WEIGHTS = {
    "decay": {"decay": torch.tensor([-0.1, -0.2])},
    "alibi": {"bias": rw.encoding("alibi", dim=16, num_heads=2)},
    "t5": {"bias": rw.encoding("t5", dim=16, num_heads=2)},
    "no denominator": {"normalize": False},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_backend_without_weights_does_not_get_them(name, registered_tiny):
    calls = registered_tiny()
    tiny = next(backend for backend in backends() if backend.name == "tiny")
    asked = []

    def supports(*call):
        asked.append(call)

    linear = replace(tiny.operations["linear_attention"], supports=supports)
    undo = register(replace(tiny, operations={**tiny.operations, "linear_attention": linear}, devices=("cpu",)))
    x = vector(0, 1, 2, 5, 8).float()
    try:
        with pytest.raises(RopewalkError, match=r"got:      a decay, a bias, or normalize=False, for torch\.float32"):
            rw.linear_attention(x, x, x, backend="tiny", **WEIGHTS[name])
        out = rw.linear_attention(x, x, x, **WEIGHTS[name])
        assert not asked
        assert not calls["linear_attention"]
        rw.linear_attention(x, x, x)
        assert calls["linear_attention"] == 1
        assert asked
        assert all(weighting.is_plain() and causal for *_, weighting, causal in asked)
    finally:
        undo()
    assert torch.equal(out, rw.linear_attention(x, x, x, backend="torch", **WEIGHTS[name]))


@pytest.mark.parametrize("compiled", [False, slow(True)])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_backend_with_weights_gets_them(name, compiled):
    seen = []

    def run(q, k, v, before, layout, causal, cu_seqlens, weighting):
        seen.append(weighting)
        out, after = linear_attention(q, k, v, None, layout, causal, cu_seqlens, weighting=weighting)
        return out, after.flat()

    def f(q, k, v):
        options = {"decay": decay} if name == "decay" else WEIGHTS[name]
        return rw.linear_attention(q, k, v, backend=backend, **options)

    inputs = [vector(i, 1, 2, 5, 8).float().requires_grad_() for i in range(3)]
    decay = torch.tensor([-0.1, -0.2], requires_grad=True)
    learned = {"decay": [decay], "t5": list(WEIGHTS["t5"]["bias"].parameters())}.get(name, [])
    undo = register(Backend("weighted", {"linear_attention": Operation(run, weights=True)}))
    try:
        results = []
        for backend in ("torch", "weighted"):
            torch.compiler.reset()
            call = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled and backend == "weighted" else f
            out = call(*inputs)
            results.append([out, *torch.autograd.grad(out.square().sum(), [*inputs, *learned])])
    finally:
        undo()
    assert len(seen) == 1
    assert not seen[0].is_plain()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_threads_that_register_lose_nothing():
    undone: list = []

    def work(number):
        undone.append(register(Backend(f"thread {number}", {})))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {backend.name for backend in backends()}
    for undo in undone:
        undo()
    assert {f"thread {number}" for number in range(16)} <= names


def test_the_torch_backend_supports_everything():
    for operation in OPERATIONS:
        assert next(b for b in backends() if b.name == "torch").operations[operation].supports is None
    x = torch.ones(3, 4, device="meta")
    assert choose("rotate", None, (x, None, Layout(True, 0, -2)), (x,)).backend == "torch"
    assert find("rotate", "native", (x, None, Layout(True, 0, -2))) == "tensors that are not on the CPU"
