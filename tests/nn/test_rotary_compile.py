"""torch.compile, torch.export and ONNX: whole graphs, few of them, and the values of eager mode."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from nn.module import module_for
from ropewalk import RopeSpec, RotaryEmbedding, qk_norm_rope
from ropewalk.reference import assert_within_budget, rotate
from ropewalk.spec import AcrossHeads, Plain
from slow import slow
from strategies import theta, vector


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(seq: int, seed: int = 0):
    return vector(seed, 2, 4, seq, 8).float(), vector(seed + 1, 2, 2, seq, 8).float()


@pytest.mark.parametrize("pairing", ["interleaved", slow("half")])
@pytest.mark.parametrize("where", ["range", "positions", slow("offsets"), slow("cu_seqlens"), slow("angles")])
def test_one_graph_for_every_length_and_one_for_a_single_token(pairing, where):
    rope, counter = RotaryEmbedding(8, pairing=pairing), CompileCounter()

    def arguments(seq):
        return {
            "range": {},
            "positions": {"positions": torch.arange(seq) + 3},
            "offsets": {"offset": torch.tensor([3, 9])},
            "cu_seqlens": {"cu_seqlens": torch.tensor([0, 1, seq])},
            "angles": {"angles": rope.at(torch.arange(seq))},
        }[where]

    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend=counter)
    for seq in (7, 19, 64, 301, 33, 2):
        q, k = inputs(seq)
        for a, b in zip(compiled(q, k, **arguments(seq)), rope(q, k, **arguments(seq)), strict=True):
            assert torch.allclose(a, b, atol=1e-6)
    assert counter.frame_count == 1
    for start in range(3):
        q, k = inputs(1, seed=start)
        compiled(q, k, **arguments(1))
    assert counter.frame_count == 2


@pytest.mark.parametrize("arguments", [{}, {"offset": 5}])
def test_what_eager_calls_keep_does_not_concern_a_graph(arguments):
    rope, counter = RotaryEmbedding(8), CompileCounter()
    compiled = torch.compile(lambda q, k: rope(q, k, **arguments), fullgraph=True, dynamic=True, backend=counter)
    q, k = inputs(7)
    for start in range(0, 4000, 600):
        rope(*inputs(1), offset=start)
        compiled(q, k)
    assert counter.frame_count == 1


def graph_of(call, *given):
    """The functions that a compiler sees in a call."""
    seen = []

    def backend(graph, example_inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(call, fullgraph=True, backend=backend)(*given)
    return " ".join(seen)


def test_the_c_kernel_is_an_op_but_for_one_token():
    rope = RotaryEmbedding(8)
    assert "ropewalk.rotate" in graph_of(rope, *inputs(7))
    assert "ropewalk.rotate" not in graph_of(rope, *inputs(1))
    assert "ropewalk.rotate" not in graph_of(RotaryEmbedding(8, backend="torch"), *inputs(7))
    forced = RotaryEmbedding(8, backend="native")
    assert "ropewalk.rotate" in graph_of(forced, *inputs(1))
    weight = torch.ones(8)
    assert "ropewalk.norm_rotate" in graph_of(lambda q, k: qk_norm_rope(q, k, forced, q_weight=weight), *inputs(7))
    learned = RotaryEmbedding(8, learned=True)
    assert "ropewalk.rotate" not in graph_of(learned, *inputs(7))


def test_a_length_that_depends_on_data():
    rope = RotaryEmbedding(8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def some(x, mask):
        ids = mask.nonzero().squeeze(-1)
        return rope(x[:, :, ids], positions=ids)

    x, mask = vector(0, 1, 2, 9, 8).float(), torch.arange(9) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.allclose(some(x, mask), rope(x)[:, :, ::2], atol=1e-6)


@pytest.mark.parametrize("which", [0, 1])
def test_only_what_needs_a_gradient_gets_a_graph(which):
    rope, both = RotaryEmbedding(8), list(inputs(7))
    both[which].requires_grad_()
    for call in (rope, torch.compile(rope, fullgraph=True, backend="aot_eager")):
        outputs = call(*both)
        assert [y.requires_grad for y in outputs] == [which == 0, which == 1]
        outputs[which].sum().backward()


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_norm_and_rotation_are_one_graph(eps):
    rope, counter, weight = RotaryEmbedding(8), CompileCounter(), vector(5, 8).float()

    def call(q, k):
        return qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight, eps=eps)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for seq in (7, 19, 33):
        for a, b in zip(compiled(*inputs(seq)), call(*inputs(seq)), strict=True):
            assert torch.allclose(a, b, atol=1e-6)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_compiled_with_backward(dtype):
    rope, weight = RotaryEmbedding(8), vector(5, 8).float()

    def gradients(call):
        leaves = [x.to(dtype).requires_grad_() for x in inputs(7)] + [weight.clone().requires_grad_()]
        outputs = call(leaves[0], leaves[1], leaves[2], leaves[2])
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])

    def eager(q, k, a, b):
        return qk_norm_rope(q, k, rope, q_weight=a, k_weight=b)

    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(compiled), gradients(eager), strict=True):
        assert torch.allclose(a, b, atol=1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_by_torchscript_follows_its_input():
    rope, weight = RotaryEmbedding(8), torch.ones(8)
    x, y = vector(0, 1, 2, 7, 8).float(), vector(1, 1, 2, 7, 8).float()
    calls = {
        "range": lambda x: rope(x) * 1.0,
        "positions": lambda x: rope(x, positions=torch.arange(7)) * 1.0,
        "norm": lambda x: qk_norm_rope(x, x, rope, q_weight=weight)[0] * 1.0,
        "in place": lambda x: rope.rotate_(x * 1.0),
    }
    for name, call in calls.items():
        call(x)
        traced = torch.jit.trace(call, (x,), check_trace=False)
        assert torch.allclose(traced(y), call(y), atol=1e-6), name


def test_in_place_is_traced_too():
    rope = RotaryEmbedding(8)
    q, k = inputs(7)
    expected = rope(q, k)
    torch.compile(rope.rotate_, fullgraph=True, backend="eager")(q, k)
    assert torch.allclose(q, expected[0], atol=1e-6)
    assert torch.allclose(k, expected[1], atol=1e-6)


def test_an_offset_that_counts_up_is_one_graph():
    rope, counter = RotaryEmbedding(8), CompileCounter()
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend=counter)
    q, _ = inputs(1)
    for offset in (5, 6, 7, 100, 4095):
        assert torch.allclose(compiled(q, offset=offset), rope(q, offset=offset), atol=1e-6)
    assert counter.frame_count <= 2


def test_twelve_layers_with_twelve_specs_are_one_graph():
    counter = CompileCounter()
    q, _ = inputs(7)
    for i in range(12):
        # Each with frequencies and an amplitude of its own.
        frequencies, amplitude = theta(8, 10_000.0 * (i + 1)), 1 + i / 10
        layer = module_for(q, frequencies, amplitude)
        layer.compile(fullgraph=True, dynamic=True, backend=counter)
        truth = rotate(q.double(), torch.arange(7), frequencies, amplitude=amplitude)
        assert_within_budget(layer(q), truth, rotary_dim=8)
    assert counter.frame_count <= 2, "one graph per layer would pass the recompile limit"


@pytest.mark.slow
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_forward_and_backward(pairing, dtype):
    rope = RotaryEmbedding(RopeSpec(8, rotary_dim=6, rotary_slice="trailing", pairing=pairing))
    compiled = torch.compile(rope, fullgraph=True, dynamic=True)
    for seq, start in ((7, 0), (19, 100_000), (1, 5)):
        x, cotangent = vector(0, 2, 3, seq, 8).to(dtype), vector(1, 2, 3, seq, 8).to(dtype)
        positions = torch.arange(seq) + start
        shape = {"rotary_dim": 6, "pairing": pairing, "rotary_slice": "trailing"}
        options = {"pairing": pairing, "rotary_slice": "trailing"}
        y = compiled(x.requires_grad_(), positions=positions)
        assert_within_budget(y.detach(), rotate(x.detach().double(), positions, theta(6), **options), **shape)
        (gradient,) = torch.autograd.grad(y, x, cotangent)
        truth = rotate(cotangent.double(), positions, theta(6), conjugate=True, **options)
        assert_within_budget(gradient, truth, **shape)
    # What was compiled leaves nothing behind.
    assert_within_budget(rope(x.detach()), rotate(x.detach().double(), torch.arange(1), theta(6), **options), **shape)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["frequencies per head", "amplitude", "float32 angles", "transposed ids"])
def test_inductor_serves_every_spec(case):
    x, ids = vector(0, 2, 3, 5, 8).float(), torch.arange(10).view(5, 2).t()
    rope = {
        "frequencies per head": lambda: RotaryEmbedding(RopeSpec(8, AcrossHeads(50.0, num_heads=3))),
        "amplitude": lambda: module_for(x, theta(8), 1.5),
        "float32 angles": lambda: RotaryEmbedding(RopeSpec(8, Plain(50.0), angles="float32")),
        "transposed ids": lambda: RotaryEmbedding(8),
    }[case]()
    compiled = torch.compile(rope, fullgraph=True)
    assert torch.allclose(compiled(x, positions=ids * 20_000), rope(x, positions=ids * 20_000), atol=1e-6)
    assert torch.allclose(compiled(x), rope(x), atol=1e-6)


@pytest.mark.slow
def test_functorch_inside_a_compiled_function():
    rope, x = RotaryEmbedding(8), vector(0, 5, 8)
    ids, tangent = vector(1, 5), vector(2, 5)

    def along(ids):
        return torch.func.jvp(lambda ids: rope(x, positions=ids), (ids,), (tangent,))[1]

    def gradient(ids):
        return torch.func.grad(lambda ids: (rope(x, positions=ids) ** 3).sum())(ids)

    for function in (along, gradient):
        compiled = torch.compile(function, backend="aot_eager")
        assert torch.allclose(compiled(ids), function(ids), atol=1e-12)


@pytest.mark.slow
def test_inductor_with_learned_frequencies_and_frequencies_a_head():
    rope = RotaryEmbedding(RopeSpec(8, AcrossHeads(50.0, num_heads=3)), learned=True)
    assert rope.log_scale is not None
    x, cotangent = vector(0, 2, 3, 5, 8).float(), vector(1, 2, 3, 5, 8).float()
    gradients = []
    for function in (torch.compile(rope, fullgraph=True), rope):
        (function(x) * cotangent).sum().backward()
        gradients.append(rope.log_scale.grad)
        rope.log_scale.grad = None
    assert torch.allclose(*gradients, rtol=1e-5)


@pytest.mark.slow
def test_a_model_compiled_in_inference_mode_and_then_trained():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.rope, self.linear = RotaryEmbedding(8, pairing="half"), nn.Linear(8, 8)

        def forward(self, x):
            return self.rope(self.linear(x))

    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True)
    x = vector(0, 2, 5, 8).float()
    with torch.inference_mode():
        first = compiled(x)
    compiled(x).sum().backward()
    assert layer.linear.weight.grad is not None
    assert torch.allclose(first, layer(x), atol=1e-6)


def test_export_with_a_dynamic_length():
    rope = RotaryEmbedding(8, pairing="half")
    q, k = inputs(7)
    seq = torch.export.Dim("seq", min=2, max=4096)
    program = torch.export.export(rope, (q, k), dynamic_shapes=({2: seq}, {2: seq}))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("ropewalk" in target for target in targets), "what is exported would need ropewalk"
    for length in (7, 100, 2):
        q, k = inputs(length, seed=length)
        for a, b in zip(program.module()(q, k), rope(q, k), strict=True):
            assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.filterwarnings("default")  # the exporter warns of its own parts
def test_onnx_in_onnxruntime(pairing, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")

    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.rope = RotaryEmbedding(RopeSpec(8, Plain(10_000), pairing=pairing))

        def forward(self, q, positions):
            return self.rope(q, positions=positions)

    q, positions = vector(0, 1, 4, 7, 8).float(), torch.arange(7) + 5000
    seq = torch.export.Dim("seq", min=2, max=4096)
    path = tmp_path / "rope.onnx"
    program = torch.onnx.export(
        Rotated(), (q, positions), dynamo=True, dynamic_shapes=({2: seq}, {0: seq}), verbose=False
    )
    assert program is not None
    program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    for length, start in ((7, 5000), (40, 131_000)):
        q, positions = vector(length, 1, 4, length, 8).float(), torch.arange(length) + start
        (result,) = session.run(None, {names[0]: q.numpy(), names[1]: positions.numpy()})
        truth = rotate(q.double(), positions, theta(8), pairing=pairing)
        assert (torch.as_tensor(result).double() - truth).abs().max() < 1e-6
