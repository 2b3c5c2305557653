"""A state of linear attention is bound to the encoding that changed its keys and values by `encode_heads`."""

import copy
import dataclasses
import itertools
import json
import pickle
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import ropewalk as rw
from nn.test_placements import AFTER, BATCH, DIM, EXACT, HEADS, SEQ, WIDTH, DoubledRope, X, layer_of, made
from ropewalk.nn.encodings.absolute import LearnedEncoding, SinusoidalEncoding
from slow import slow
from strategies import vector

Q = vector(0, BATCH, HEADS, SEQ, WIDTH)


class Halved(rw.Encoding):
    """Halves all keys: an encoding of a user, which does not say what its options are."""

    name = "halved"

    def encode_heads(self, q, k, v, positions=None, *, k_positions=None):
        return q, k / 2, v


class Divided(Halved):
    """One that says so."""

    name = "divided"

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by: float = by

    @property
    def state_identity(self) -> str:
        return f"Divided({self.by})"

    def encode_heads(self, q, k, v, positions=None, *, k_positions=None):
        return q, k / self.by, v


class MySines(SinusoidalEncoding):
    pass


# All of them differ in what a state contains, or can.
ENCODINGS: dict[str, Any] = {
    "None": None,
    "rope": rw.RotaryEmbedding(WIDTH),
    "rope and a hook": DoubledRope(rw.RotaryEmbedding(WIDTH)),
    "learned scores": made("learned", "scores"),
    "learned projection": made("learned", "projection"),
    "another length": LearnedEncoding(WIDTH, length=17, placement="scores").double(),
    "sinusoidal scores": made("sinusoidal", "scores"),
    "sinusoidal projection": made("sinusoidal", "projection"),
    "another base": SinusoidalEncoding(WIDTH, base=500.0, placement="scores"),
    "a base that is almost the same": SinusoidalEncoding(WIDTH, base=10_000.000001, placement="scores"),
    "a subclass": MySines(WIDTH, placement="scores"),
    "a user's": Halved(),
    "a user's, by 3": Divided(3.0),
    "a user's, by 5": Divided(5.0),
}
SAME: dict[str, Any] = {
    "None": rw.Encoding(),
    "rope": rw.encoding("rope", dim=DIM, num_heads=HEADS),
    "learned scores": made("learned", "scores", seed=40),
    "sinusoidal scores": SinusoidalEncoding(WIDTH, base=10_000, placement="scores"),
    "a user's": Halved(),
    "a user's, by 3": Divided(3.0),
}


def parts(state: rw.LinearState | None = None, **options: Any) -> Any:
    part = Q[:, :, :3] if state is None else Q[:, :, 3:]
    return rw.linear_attention(part, part, part, state=state, **options)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_state_of_another_encoding_is_refused(name):
    _, state = parts(rope=ENCODINGS[name], return_state=True)
    for other, encoding in ENCODINGS.items():
        if other == name:
            continue
        with pytest.raises(rw.RopewalkError) as error:
            parts(state, rope=encoding)
        assert error.value.asked == "linear_attention(state=...)"
        assert error.value.expected != error.value.got
        assert error.value.do.endswith("start with None")
    for same in (ENCODINGS[name], SAME.get(name, ENCODINGS[name])):
        parts(state, rope=same)


@pytest.mark.usefixtures("as_a_user")
def test_the_error_names_both():
    _, state = parts(rope=ENCODINGS["sinusoidal scores"], return_state=True)
    with pytest.raises(rw.RopewalkError) as error:
        parts(state, rope=ENCODINGS["learned projection"])
    assert error.value.expected == "a state of LearnedEncoding(4, length=16, placement='projection')"
    assert error.value.got == "a state of SinusoidalEncoding(4, base=10000.0, placement='scores')"
    with pytest.raises(rw.RopewalkError) as error:
        parts(state)
    assert error.value.expected == "a state of no encoding of the heads"
    _, state = parts(return_state=True)
    with pytest.raises(rw.RopewalkError) as error:
        parts(state, rope=ENCODINGS["a user's"])
    assert (error.value.expected, error.value.got) == ("a state of Halved", "a state of no encoding of the heads")


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "state_dict": lambda state: rw.LinearState.from_state_dict(state.state_dict()),
    "replace": dataclasses.replace,
    "to": lambda state: state.to("cpu"),
    "detach": lambda state: state.detach(),
    "reorder": lambda state: state.reorder(torch.arange(BATCH)),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("treatment", COPIES)
@torch.no_grad()
def test_copies_keep_it(treatment):
    scores, projection, plain = (
        layer_of(encoding, rw.LinearAttention) for encoding in (*(made("sinusoidal", p) for p in AFTER[::-1]), None)
    )
    for state in (scores.make_state(BATCH), scores.step(X[:, :3])[1]):
        treated = COPIES[treatment](state)
        assert treated.encoding == state.encoding == "SinusoidalEncoding(4, base=10000.0, placement='scores')"
        for other in (projection, plain):
            with pytest.raises(rw.RopewalkError, match=r"got: +a state of SinusoidalEncoding"):
                other.step(X[:, 3:], COPIES[treatment](state))
        expected = scores.step(X[:, 3:], state)
        y, after = scores.step(X[:, 3:], treated)
        assert torch.equal(y, expected[0])
        assert after.encoding == state.encoding


@pytest.mark.usefixtures("as_a_user")
def test_saved_states_of_earlier_versions():
    """Their text has no entry for it, and no encoding had the hook. A state without one is saved as they saved it."""
    _, state = parts(return_state=True)
    saved = state.state_dict()
    assert set(json.loads(bytes(saved["about"].tolist()))) == {"spec", "feature_map", "learned"}
    loaded = rw.LinearState.from_state_dict(saved)
    assert loaded.encoding is None
    assert torch.equal(parts(loaded), parts(state))
    with pytest.raises(rw.RopewalkError, match=r"got: +a state of no encoding of the heads"):
        parts(loaded, rope=ENCODINGS["learned scores"])
    # A pickle has the attributes that the class had.
    old = rw.LinearState.__new__(rw.LinearState)
    vars(old).update({name: value for name, value in vars(state).items() if name != "encoding"})
    assert torch.equal(parts(old), parts(state))


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("value", [7, True, ["LearnedEncoding"], {"name": "learned"}])
def test_a_saved_encoding_that_is_no_text(value):
    _, state = parts(return_state=True)
    about = {"spec": None, "feature_map": "elu", "learned": False, "encoding": value}
    text = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    with pytest.raises(
        rw.RopewalkError, match="about as JSON text with spec, feature_map, learned and, if there are any"
    ):
        rw.LinearState.from_state_dict(state.state_dict() | {"about": text})


@pytest.mark.parametrize("name", ["sinusoidal projection", *map(slow, ("rope", "None", "learned scores", "by 3"))])
@torch.no_grad()
def test_compiled_steps(name):
    torch._dynamo.reset()
    counter, layer = CompileCounter(), layer_of(ENCODINGS.get(name, Divided(3.0)), rw.LinearAttention)
    step, state = torch.compile(layer.step, fullgraph=True, backend=counter), layer.make_state(BATCH)
    outputs, identity = [], state.encoding
    for token in X.split(1, dim=1):
        y, state = step(token, state)
        outputs.append(y)
        assert state.encoding == identity
    assert torch.allclose(torch.cat(outputs, dim=1), layer(X), **EXACT)
    # One for position 0 and one for the others, with every encoding.
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.usefixtures("as_a_user")
@torch.no_grad()
def test_a_compiled_step_refuses_too():
    torch._dynamo.reset()
    states = {placement: layer_of(made("learned", placement), rw.LinearAttention).step(X)[1] for placement in AFTER}
    for placement, other in itertools.permutations(AFTER):
        step = torch.compile(layer_of(made("learned", placement), rw.LinearAttention).step, backend="eager")
        with pytest.raises(rw.RopewalkError, match=f"got: .*placement='{other}'"):
            step(X, copy.copy(states[other]))
