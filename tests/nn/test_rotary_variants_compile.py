"""Specs of every kind under torch.compile: no graph break, one graph for every length, gradients."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ropewalk import RopeSpec, RotaryEmbedding
from ropewalk.spec import Axes, DynamicNTK, LogTemperature, LongRope, Proportional, StepTemperature, XPos, Yarn
from slow import slow_except
from strategies import vector

DIM = 16
LONG = LongRope(1e4, [1.0 + i for i in range(8)], [2.0 + i for i in range(8)], 8, 32)
SPECS = {
    "dynamic": RopeSpec(DIM, DynamicNTK(1e4, 2, 8), pairing="half"),
    "long": RopeSpec(DIM, LONG),
    "two amplitudes": RopeSpec(DIM, LongRope(1e4, [1.0] * 8, [2.0] * 8, 8, short_amplitude=1.0, long_amplitude=1.5)),
    "yarn": RopeSpec(DIM, Yarn(1e4, 4, 64), pairing="half"),
    "proportional": RopeSpec(DIM, Proportional(1e4, 0.5), pairing="half"),
    "axes": RopeSpec(DIM, Yarn(1e4, 4, 64), axes=Axes.interleaved([4, 2, 2]), pairing="half"),
    "xpos": RopeSpec(DIM, xpos=XPos(1024)),
    "temperature": RopeSpec(DIM, query_temperature=StepTemperature(0.1, 4)),
    "temperature of a part": RopeSpec(DIM, rotary_dim=8, query_temperature=LogTemperature(4)),
    "float32": RopeSpec(DIM, LONG, angles="float32"),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def positions_for(spec: RopeSpec, length: int) -> torch.Tensor:
    ids = torch.arange(length)
    return ids if spec.axes is None else torch.stack([ids + a for a in range(spec.axes.count)])


# Dynamo of torch 2.15 does not trace the checks of jaxtyping.
@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("name", slow_except(["dynamic", "axes", "xpos"], SPECS))
def test_one_graph_serves_every_length(name):
    spec = SPECS[name]
    rope = RotaryEmbedding(spec)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(rope, backend=counter, fullgraph=True, dynamic=True)
    for length in (5, 9, 13, 40):
        q, k = vector(length, 2, 4, length, DIM).float(), vector(length + 1, 2, 2, length, DIM).float()
        where = {"positions": positions_for(spec, length), "length": torch.tensor([length, 3])}
        for mine, eager in zip(compiled(q, k, **where), rope(q, k, **where), strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynamic", "long", "axes", "xpos", "temperature of a part"])
def test_inductor_forward_and_backward(name):
    spec = SPECS[name]
    rope = RotaryEmbedding(spec)
    compiled = torch.compile(rope, fullgraph=True)
    where = {"positions": positions_for(spec, 9), "length": torch.tensor([9, 30])}
    results = []
    for function in (rope, compiled):
        q, k = (vector(seed, 2, 3, 9, DIM).float().requires_grad_() for seed in (0, 1))
        rotated = function(q, k, **where)
        (rotated[0] * vector(2, 2, 3, 9, DIM).float() + rotated[1] ** 2).sum().backward()
        results.append((*rotated, q.grad, k.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", slow_except(["dynamic", "xpos"], (name for name, spec in SPECS.items() if spec.angles == "exact"))
)
def test_gradients(name):
    spec = SPECS[name]
    rope = RotaryEmbedding(spec)
    ids, length = positions_for(spec, 3), torch.tensor([9])
    q, k = (vector(seed, 1, 2, 3, DIM).requires_grad_() for seed in (0, 1))
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, positions=ids, length=length), (q, k))
    # Learned frequencies, and positions that are not whole, have derivatives too.
    learned = RotaryEmbedding(spec, learned=True)
    where = ids.double().requires_grad_()
    start = torch.empty(learned.inv_freq.shape, dtype=torch.float64).uniform_(-0.1, 0.1)

    def by_scale(scale, where):
        swapped = {"log_scale": scale}
        given = {"positions": where, "length": length}
        return torch.func.functional_call(learned, swapped, (q.detach(), k.detach()), given)

    scale = start.requires_grad_()
    if spec.query_temperature is None:
        assert torch.autograd.gradcheck(by_scale, (scale, where))


@pytest.mark.slow
def test_the_ops_gradients_are_those_of_the_formula():
    """Compiled, cos and sin come from an op with a backward of its own: axes and amplitudes included."""
    spec = SPECS["axes"]
    rope = RotaryEmbedding(spec, learned=True)
    x, where = vector(0, 2, 3, 5, DIM), positions_for(spec, 5).double() + 0.25
    xpos = RotaryEmbedding(SPECS["xpos"])
    calls = [
        lambda w, function=rope: function(x, positions=w),
        lambda w, function=xpos: function(x, positions=w[0], role="q"),
    ]
    for call in calls:
        grads = []
        for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            w = where.clone().requires_grad_()
            rope.zero_grad()
            (run(w) * vector(7, 2, 3, 5, DIM)).sum().backward()
            grads.append((w.grad, next(rope.parameters()).grad))
        torch.testing.assert_close(grads[0][0], grads[1][0])
        if grads[0][1] is not None:
            torch.testing.assert_close(grads[0][1], grads[1][1])
