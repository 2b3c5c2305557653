"""cos and sin of one rope in a call of another rope raise if the other would have computed different ones."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ropewalk as rw
from ropewalk.nn.rotary import angle_makers

pytestmark = pytest.mark.usefixtures("as_a_user")

P = torch.arange(3, 8)
X = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))


def rope_of(frequencies=None, *, head_dim=8, module=None, **fields):
    spec = rw.RopeSpec(head_dim, rw.Plain() if frequencies is None else frequencies, **fields)
    return rw.RotaryEmbedding(spec, **(module or {}))


def calls(rope):
    """Every call of a rope that accepts angles, by its name in errors."""
    yield "rope(", lambda angles: rope(X, X, angles=angles)
    yield "rope(", lambda angles: rope(X, angles=angles)
    yield "rope.rotate_(", lambda angles: rope.rotate_(X.clone(), X.clone(), angles=angles)
    yield "rope.rotate_(", lambda angles: rope.rotate_(X.clone(), angles=angles)
    yield "rope.unrotate(", lambda angles: rope.unrotate(X, angles=angles)
    yield "qk_norm_rope(", lambda angles: rw.qk_norm_rope(X, X, rope, angles=angles)


OTHERS = {
    "base": (rope_of(), rope_of(rw.Plain(500_000.0)), "base=500000"),
    "rule": (rope_of(), rope_of(rw.PositionInterpolation(10_000.0, 4)), "PositionInterpolation"),
    "attention factor": (rope_of(rw.Yarn(10_000.0, 4)), rope_of(rw.Yarn(10_000.0, 4, attention_factor=1.0)), "Yarn"),
    "sign": (rope_of(), rope_of(sign=-1), "sign=-1"),
    "sections": (
        rope_of(axes=rw.Axes.interleaved((2, 2))),
        rope_of(axes=rw.Axes.chunked((2, 2))),
        "axes=",
    ),
    "explicit": (rope_of(), rope_of(rw.Explicit([1.0, 0.5, 0.25, 0.125])), "Explicit"),
    "length-dependent": (rope_of(rw.DynamicNTK(1e4, 2.0, 8)), rope_of(rw.DynamicNTK(1e4, 4.0, 8)), "factor=4"),
    "rule for the length": (rope_of(), rope_of(rw.DynamicNTK(1e4, 4.0, 8)), "DynamicNTK"),
    "learned": (rope_of(module={"learned": True}), rope_of(module={"learned": True}), "learned"),
    "only one learned": (rope_of(), rope_of(module={"learned": True}), "learned"),
    "per head": (rope_of(rw.AcrossHeads(1e4, 2)), rope_of(rw.AcrossHeads(1e5, 2)), "AcrossHeads"),
}


def angles_of(rope):
    length = {"length": 16} if rope.spec.varies else {}
    axes = rope.spec.axes
    return rope.at(P if axes is None else torch.stack([P] * axes.count), **length)


@pytest.mark.parametrize("name", OTHERS)
def test_every_call_raises(name):
    rope, other, words = OTHERS[name]
    for one, two in ((rope, other), (other, rope)):
        mine, others = angles_of(one), angles_of(two)
        for call_name, call in calls(one):
            call(mine)
            with pytest.raises(rw.RopewalkError, match="another rope") as error:
                call(others)
            assert error.value.asked.startswith(call_name)
            assert words in error.value.expected + error.value.got
            assert "rope.at(positions)" in error.value.do
            # Copies are the user's own.
            call(tuple(x.clone() for x in others))


@pytest.mark.parametrize(
    "other",
    [rope_of(xpos=rw.XPos(64)), rope_of(query_temperature=rw.StepTemperature(0.1, 4))],
    ids=["xpos", "query temperature"],
)
@pytest.mark.parametrize("role", ["q", "k"])
def test_factors_of_queries_and_keys_raise(other, role):
    plain, angles = rope_of(), other.at(P, role=role)
    other(X, angles=angles, role=role)
    with pytest.raises(rw.RopewalkError, match="another rope"):
        plain(X, angles=angles)
    with pytest.raises(rw.RopewalkError, match="another rope"):
        other(X, angles=plain.at(P), role=role)


SAME = {
    "itself": lambda rope: rope,
    "equal": lambda rope: rw.RotaryEmbedding(8),
    "the same spec": lambda rope: rw.RotaryEmbedding(rope.spec),
    "an equal spec": lambda rope: rw.RotaryEmbedding(rw.RopeSpec.from_json(rope.spec.to_json())),
    "a copy": copy.deepcopy,
    "pickled": lambda rope: pickle.loads(pickle.dumps(rope)),
    "the other pairing": lambda rope: rw.RotaryEmbedding(8, pairing="half"),
    "a wider head": lambda rope: rope_of(head_dim=16, rotary_dim=8),
    "the last features": lambda rope: rope_of(head_dim=16, rotary_dim=8, rotary_slice="trailing"),
    "the other layout": lambda rope: rw.RotaryEmbedding(8, seq_dim=-3),
    "a limit": lambda rope: rw.RotaryEmbedding(8, context_length=64, check_ids=True),
    "another backend": lambda rope: rw.RotaryEmbedding(8, backend="torch"),
    "float32": lambda rope: rope_of(angles="float32"),
    "equal numbers": lambda rope: rope_of(rw.Explicit(rope.spec.inv_freq().tolist())),
    "a factor of 1": lambda rope: rope_of(rw.PositionInterpolation(10_000.0, 1)),
}


@pytest.mark.parametrize("name", SAME)
def test_ropes_that_compute_the_same_angles_share_them(name):
    rope = rw.RotaryEmbedding(8)
    other = SAME[name](rope)
    for one, two in ((rope, other), (other, rope)):
        x = torch.ones(1, 5, 5, two.spec.head_dim)
        two(x, x, angles=one.at(P))
        two.unrotate(x, angles=one.at(P))


def test_another_length_of_one_rule_is_not_another_rope():
    rope = rope_of(rw.DynamicNTK(1e4, 2.0, 8))
    for length in (8, 16, torch.tensor([32])):
        rope(X, angles=rope.at(P, length=length), length=64)
        rw.RotaryEmbedding(rope.spec)(X, angles=rope.at(P, length=length))


def test_learned_frequencies_are_shared_as_an_object():
    rope, tied = (rw.RotaryEmbedding(8, learned=True) for _ in range(2))
    tied.log_scale = rope.log_scale
    tied(X, angles=rope.at(P))
    # The parameter of a module can be replaced: by load_state_dict(assign=True), or by a sharded one.
    angles = rope.at(P)
    rope.load_state_dict({"log_scale": torch.ones(4)}, assign=True)
    rope(X, angles=angles)
    with pytest.raises(rw.RopewalkError, match="another rope"):
        copy.deepcopy(rope)(X, angles=rope.at(P))
    dropped = rw.RotaryEmbedding(8, learned=True)
    angles = dropped.at(P)
    del dropped
    gc.collect()
    with pytest.raises(rw.RopewalkError, match="another rope"):
        rope(X, angles=angles)


def test_angles_that_a_user_changed_or_built_are_accepted():
    rope, (cos, sin) = rw.RotaryEmbedding(8), rw.RotaryEmbedding(8, base=500.0).at(P)
    for change in (
        lambda x: x[:],
        lambda x: x.to(torch.bfloat16),
        lambda x: x[None],
        lambda x: x.detach(),
        lambda x: torch.cat([x[:2], x[2:]]),
        lambda x: x * 1,
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
    ):
        rope(X, X, angles=(change(cos), change(sin)))
    rope(X, angles=(torch.ones(5, 4), torch.zeros(5, 4)))


def test_angles_stay_plain(tmp_path):
    angles = rw.RotaryEmbedding(8).at(P)
    assert type(angles) is tuple
    assert [type(x) for x in angles] == [torch.Tensor] * 2
    assert not vars(angles[0])
    torch.save(angles, tmp_path / "angles.pt")
    torch.testing.assert_close(torch.load(tmp_path / "angles.pt", weights_only=True), angles)


@pytest.fixture
def nothing_made():
    angle_makers.MAKERS.clear()


@pytest.mark.usefixtures("nothing_made")
@pytest.mark.parametrize("learned", [False, True])
def test_remembered_tensors_are_released(learned):
    rope = rw.RotaryEmbedding(8, learned=learned)
    angles = rope.at(P)
    assert list(angle_makers.MAKERS) == [id(angles[0])]
    cos, log_scale = weakref.ref(angles[0]), None if rope.log_scale is None else weakref.ref(rope.log_scale)
    loss = rope(X, angles=angles).sum()
    del angles
    if learned:
        loss.backward()
    del loss, rope
    gc.collect()
    assert cos() is None
    assert log_scale is None or log_scale() is None


@pytest.mark.usefixtures("nothing_made")
def test_the_number_of_entries_is_bounded():
    rope, other = rw.RotaryEmbedding(8), rw.RotaryEmbedding(8, base=500.0)
    kept = [rope.at(P) for _ in range(angle_makers._MOST // 4)]
    released = [rope.at(P) for _ in range(angle_makers._MOST // 2)]
    del released
    for _ in range(4):
        kept.append(rope.at(P))
        blocks = [rope.at(P) for _ in range(angle_makers._MOST // 4)]
        del blocks
        assert len(angle_makers.MAKERS) <= angle_makers._MOST
    # Those that are alive are still known.
    for angles in kept:
        with pytest.raises(rw.RopewalkError, match="another rope"):
            other(X, angles=angles)
    many = [rope.at(P) for _ in range(2 * angle_makers._MOST)]
    assert len(angle_makers.MAKERS) <= angle_makers._MOST
    for angles in many:
        rope(X, angles=angles)


@pytest.mark.usefixtures("nothing_made")
def test_an_id_that_is_used_again_is_another_tensor():
    other, rope = rw.RotaryEmbedding(8, base=500.0), rw.RotaryEmbedding(8)
    angles = other.at(P)
    cos, sin = torch.ones(5, 4), torch.zeros(5, 4)
    for learned in (None, tuple(weakref.ref(x) for x in (other, angles[1]))):
        angle_makers.MAKERS[id(cos)] = weakref.ref(angles[0]), other.spec, learned
        rope(X, angles=(cos, sin))
    del angles
    gc.collect()
    rope(X, angles=(cos, sin))
    mine = rope.at(P)
    angle_makers.MAKERS[id(mine[0])] = angle_makers.MAKERS[id(cos)]
    rope(X, angles=mine)


class Mixed(torch.nn.Module):
    """A mistake in a model: one rope rotates by the angles of another."""

    def __init__(self):
        super().__init__()
        self.rope, self.other = rw.RotaryEmbedding(8), rw.RotaryEmbedding(8, base=500.0)

    def forward(self, x):
        return self.rope(x, angles=self.other.at(torch.arange(3, 8)))


GRAPHS = {
    "compile": lambda model: torch.compile(model, fullgraph=True, backend="eager")(X),
    "export": lambda model: torch.export.export(model, (X,)).module()(X),
    "trace": lambda model: torch.jit.trace(model, X, check_trace=False)(X),
    "vmap": lambda model: torch.func.vmap(model)(X[None])[0],
    "jvp": lambda model: torch.func.jvp(model, (X,), (X,))[0],
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_happens_inside_a_graph(name):
    model = Mixed()
    with pytest.raises(rw.RopewalkError, match="another rope"):
        model(X)
    expected = model.rope(X, angles=tuple(x.clone() for x in model.other.at(P)))
    torch.testing.assert_close(GRAPHS[name](model), expected)


def test_nothing_happens_for_angles_that_enter_a_graph():
    model = Mixed()
    angles = model.other.at(P)
    compiled = torch.compile(lambda x, angles: model.rope(x, angles=angles), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X, angles), model.rope(X, angles=tuple(x.clone() for x in angles)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(X)).shape == X.shape
        assert model.rope(mode.from_tensor(X), angles=angles).shape == X.shape
