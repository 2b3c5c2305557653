"""Export to ONNX with the node RotaryEmbedding of opset 23: values in onnxruntime, and which calls get the node."""

import pytest
import torch
from torch import Tensor, nn

from ropewalk import RopeSpec, RotaryEmbedding, Yarn, qk_norm_rope
from ropewalk.hub import onnx_rotary_nodes
from ropewalk.kernels.rotate.onnx import rotate
from ropewalk.kernels.types import Layout
from ropewalk.reference import assert_within_budget
from ropewalk.reference import rotate as reference
from ropewalk.spec import AcrossHeads
from strategies import theta, vector

# Specs, and the dimension of the sequence.
CASES = [
    (RopeSpec(8), -2),
    (RopeSpec(8, rotary_dim=4, pairing="half"), -3),
    (RopeSpec(8, rotary_dim=6, rotary_slice="trailing"), -3),
    (RopeSpec(8, rotary_dim=4, rotary_slice="trailing", pairing="half"), -2),
]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seq_dim", [-2, -3])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_node_computes_the_rotation_in_every_shape(interleaved, seq_dim, lead, dtype):
    # onnx.RotaryEmbedding of torch is the formula of the node's definition.
    x = vector(0, *lead, 5, 8).to(dtype)
    positions, pairing = torch.arange(5) + 1000, "interleaved" if interleaved else "half"
    working = torch.float64 if dtype == torch.float64 else torch.float32
    for start, dim, batched in ((0, 8, False), (0, 4, False), (2, 6, False), (0, 8, True)):
        if batched and (not lead or len(lead) > 2):
            continue
        ids = positions + torch.arange(lead[0])[:, None] if batched else positions
        options = {"pairing": pairing, "rotary_slice": "trailing" if start else "leading"}
        angles = ids.double()[..., None] * theta(dim)
        cos, sin = angles.cos().to(working), angles.sin().to(working)
        rows = torch.cat((torch.zeros_like(cos[..., :2, :]), cos, cos), -2), torch.cat((sin[..., :2, :], sin, sin), -2)
        heads_last = seq_dim == -3
        given = x.unsqueeze(-2) if heads_last and not lead else x.transpose(-2, -3) if heads_last else x
        if batched and heads_last and len(lead) == 1:
            continue  # [seq, heads, dim] has no batch
        layout = Layout(interleaved, start, seq_dim)
        y = rotate(given, None, *rows, layout, row=2)[0]
        y = y.squeeze(-2) if heads_last and not lead else y.transpose(-2, -3) if heads_last else y
        for index in range(lead[0]) if batched else [slice(None)]:
            truth = reference(x[index].double(), ids[index] if batched else ids, theta(dim), **options)
            shape = {"rotary_dim": dim, **options}
            if dtype == torch.float64:
                assert torch.allclose(y[index], truth, rtol=0, atol=1e-13)
            else:
                assert_within_budget(y[index], truth, **shape)
        back = rotate(rotate(given, None, *rows, layout, row=2)[0], None, *rows, layout, row=2, conjugate=True)[0]
        assert torch.allclose(back, given, atol=0.03 if dtype == torch.bfloat16 else 1e-5)


class Ropes(nn.Module):
    """Both pairings, slices and orders of dimensions, QK-norm, frequencies per head, and a float16 rotation."""

    def __init__(self):
        super().__init__()
        self.ropes = nn.ModuleList(RotaryEmbedding(spec, seq_dim=seq_dim) for spec, seq_dim in CASES)
        self.scaled = RotaryEmbedding(RopeSpec(8, Yarn(10_000, factor=4, trained_length=64), pairing="half", sign=-1))
        self.per_head = RotaryEmbedding(RopeSpec(8, AcrossHeads(50.0, num_heads=4)))
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, q: Tensor, positions: Tensor) -> list[Tensor]:
        out = []
        for rope in self.ropes:
            x = q if rope.seq_dim == -2 else q.transpose(1, 2)
            out.append(rope(x, positions=positions))
        out += [self.scaled(q, positions=positions[0]), self.per_head(q, positions=positions)]
        out += [self.ropes[0](q.half() if q.dtype == torch.float32 else q, positions=positions)]
        return out + list(qk_norm_rope(q, q[:, :1], self.ropes[0], q_weight=self.weight, positions=positions))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the exporter warns of its own parts
def test_the_node_in_onnxruntime(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    module = Ropes().eval()
    q, positions = vector(0, 2, 4, 7, 8).float(), torch.arange(14).view(2, 7)
    seq = torch.export.Dim("seq", min=2, max=4096)
    shapes = {"dynamic_shapes": ({2: seq}, {1: seq}), "opset_version": 23, "dynamo": True, "verbose": False}
    with onnx_rotary_nodes():
        program = torch.onnx.export(module, (q, positions), **shapes)
    assert program is not None
    kinds = [node.op_type for node in program.model_proto.graph.node]
    # All but the one with frequencies per head.
    assert kinds.count("RotaryEmbedding") == len(CASES) + 4
    path = tmp_path / "rope.onnx"
    program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    q, positions = vector(1, 2, 4, 40, 8).float(), torch.arange(80).view(2, 40) * 1601 - 700
    results = session.run(None, {names[0]: q.numpy(), names[1]: positions.numpy()})
    expected = module(q.double(), positions)
    assert len(results) == len(expected) == len(CASES) + 5
    for result, truth in zip(results, expected, strict=True):
        result = torch.as_tensor(result)
        bound = 2e-3 if result.dtype == torch.float16 else 2e-6
        assert (result.double() - truth.double()).abs().max() < bound


def targets(rope, *inputs):
    graph = torch.export.export(rope, inputs).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_only_exports_in_the_block_get_the_node():
    rope, x = RotaryEmbedding(8), vector(0, 1, 2, 5, 8).float()
    expected, compiled = rope(x), torch.compile(rope, backend="eager", fullgraph=True)
    node = "onnx.RotaryEmbedding.opset23"
    assert node not in targets(rope, x)
    with onnx_rotary_nodes():
        assert node in targets(rope, x)
        assert node in targets(rope, x[:, :, :1]), "one token"
        assert node not in targets(RotaryEmbedding(8, backend="torch"), x)
        # Eager and compiled calls keep their backends, bit for bit.
        assert torch.equal(rope(x), expected)
        assert torch.equal(compiled(x), expected)
    assert node not in targets(rope, x)


def test_an_error_in_the_block_ends_it():
    rope, x = RotaryEmbedding(8), vector(0, 1, 2, 5, 8).float()
    with pytest.raises(ZeroDivisionError), onnx_rotary_nodes():
        raise ZeroDivisionError
    assert "onnx.RotaryEmbedding.opset23" not in targets(rope, x)
