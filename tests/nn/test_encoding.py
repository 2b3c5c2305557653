"""Every encoding by its name: what it computes, what it says of itself, and what PyTorch may do to it."""

import copy
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import formulas
from ropewalk import LogTemperature, RopeSpec, RopewalkError, RotaryEmbedding, XPos, Yarn, reference
from ropewalk.nn.encodings.by_name import ENCODINGS, Encoding, EncodingName, encoding, options_of
from ropewalk.nn.encodings.rotary import AcrossHeadsEncoding, RopeOptions, RotaryEncoding, XPosEncoding
from ropewalk.reference import Projections, multi_head_attention, rotate
from ropewalk.spec import DynamicNTK
from slow import slow, slow_except
from strategies import seeds, theta, vector

DIM, HEADS, LENGTH = 8, 2, 64
XPOS = RopeSpec(4, xpos=XPos(LENGTH))
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "learned": {"length": LENGTH},
    "sinusoidal": {},
    "recurrent": {},
    "multiplicative": {"length": LENGTH},
    "concatenated": {"width": 6},
    "t5": {"num_buckets": 8, "max_distance": 16},
    "alibi": {},
    "rope": {},
    "rope-across-heads": {},
    "xpos": {"spec": XPOS},
}
NAMES = list(OPTIONS)
# hook, relative, length, usable with linear attention, scale, parameters
SAID = {
    "none": (None, True, None, True, None, 0),
    "learned": ("embed", False, LENGTH, True, None, LENGTH * DIM),
    "sinusoidal": ("embed", False, None, True, None, 0),
    "recurrent": ("embed", True, None, True, None, 2 * DIM * DIM + DIM),
    "multiplicative": ("embed", False, LENGTH, True, None, LENGTH * DIM),
    "concatenated": ("embed", False, None, True, None, DIM * (DIM + 6)),
    "t5": ("bias", True, None, True, 1.0, 8 * HEADS),
    "alibi": ("bias", True, None, True, None, 0),
    "rope": ("rotate", True, None, True, None, 0),
    "rope-across-heads": ("rotate", True, None, True, None, 0),
    "xpos": ("rotate", True, LENGTH, True, None, 0),
}
X, Q, K = vector(0, 2, 5, DIM), vector(1, 2, HEADS, 5, 4), vector(2, 2, HEADS, 5, 4)
IDS = torch.tensor([[3, 4, 5, 6, 7], [9, 1, 2, 40, 5]])


def made(name: str, seed: int = 0, **options: Any) -> Any:
    """In float64, with parameters drawn from the seed."""
    found: Encoding = encoding(name, dim=DIM, num_heads=HEADS, **OPTIONS[name] | options).double()
    for number, parameter in enumerate(found.parameters()):
        parameter.data = vector(seed + number, *parameter.shape)
    return found


def hooks(found: Encoding, x=X, q=Q, k=K, positions: Any = None) -> list[Any]:
    """What all hooks give; positions for the bias are a range where there are none."""
    places = torch.arange(x.shape[-2]) if positions is None else positions
    return [found.embed(x, positions), *found.rotate(q, k, positions), found.bias(places, places)]


def same(a: list[Any], b: list[Any], **tolerance: float) -> bool:
    pairs = list(zip(a, b, strict=True))
    if tolerance:
        return all(u is v is None or torch.allclose(u, v, **tolerance) for u, v in pairs)
    return all(u is v is None or torch.equal(u, v) for u, v in pairs)


def test_the_names_are_all_there():
    assert list(ENCODINGS) == NAMES == list(SAID) == list(typing.get_args(EncodingName))


@pytest.mark.parametrize("name", NAMES)
def test_type_checkers_are_told_the_options_and_the_class_of_each_name(name):
    def parameters(function: Any) -> dict[str, inspect.Parameter]:
        """By name, without the sizes and `name`; a TypedDict of options is one of them."""
        found = inspect.signature(function).parameters.values()
        return {p.name: p.replace(kind=p.KEYWORD_ONLY) for p in found if p.name not in ("name", "dim", "num_heads")}

    told = {
        typing.get_args(inspect.signature(f).parameters["name"].annotation): f for f in typing.get_overloads(encoding)
    }
    assert set(told) == {(name,) for name in NAMES}
    overload = told[name,]
    assert inspect.signature(overload).return_annotation is type(made(name))
    assert parameters(overload) == ({} if name == "none" else parameters(ENCODINGS[name]))


def test_options_that_every_rotary_encoding_passes_on_are_the_modules():
    module = set(inspect.signature(RotaryEmbedding).parameters) - {"head_dim", "base", "pairing", "seq_dim"}
    assert set(RopeOptions.__annotations__) == module


def test_the_page_says_what_they_say_of_themselves():
    page = (Path(__file__).parents[2] / "docs" / "encodings.md").read_text(encoding="utf-8")
    row = r"^\| `([\w-]+)` \| (\S+?):? .*?\| (\w+).*? \| .*? \| (yes|no)(?:, as [^|]*)? \| .*? \|$"
    rows = re.findall(row, page, re.MULTILINE)
    for name, hook, relative, linear in rows:
        said = SAID[name]
        assert (hook.rstrip(",;:"), relative == "yes", linear == "yes") == (said[0] or "–", said[1], said[3]), name
    assert [row[0] for row in rows] == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("positions", [None, torch.arange(5) + 7, IDS], ids=["range", "ids", "ids of a batch"])
def test_one_interface(name, positions):
    found = made(name)
    hook, relative, length, linear, scale, parameters = SAID[name]
    assert isinstance(found, Encoding)
    assert (found.name, found.relative, found.length, found.linear, found.scale) == (
        name,
        relative,
        length,
        linear,
        scale,
    )
    assert sum(parameter.numel() for parameter in found.parameters()) == parameters
    assert list(found.buffers()) == []
    x, q, k, bias = hooks(found, positions=positions)
    assert (x.shape, q.shape, k.shape) == (X.shape, Q.shape, K.shape)
    assert torch.equal(x, X) == (hook != "embed")
    assert torch.equal(q, Q) == torch.equal(k, K) == (hook != "rotate")
    assert (bias is None) == (found.distance_bias() is None) == (hook != "bias")
    places = torch.arange(5) if positions is None else positions
    assert (found.score_mod(places, places) is None) == (bias is None)
    if bias is not None:
        assert bias.shape == (*places.shape[:-1], HEADS, 5, 5)


@pytest.mark.parametrize("name", NAMES)
@given(seeds, st.integers(1, 20))
def test_relative_is_what_a_shift_shows(name, seed, shift):
    found = made(name, seed)
    weights = Projections(*vector(seed + 50, 4, DIM, DIM))

    def attention(positions):
        given = {"embed": found.embed, "rotate": found.rotate, "bias": found.bias}
        return multi_head_attention(X, weights, num_heads=HEADS, positions=positions, causal=True, **given)

    before, after = attention(IDS), attention(IDS + shift)
    assert torch.allclose(before, after, rtol=1e-9, atol=1e-9) == found.relative


def test_a_query_temperature_is_absolute():
    found = made("rope", spec=RopeSpec(4, query_temperature=LogTemperature(2)))
    (q, k), (far_q, far_k) = found.rotate(Q, K, IDS), found.rotate(Q, K, IDS + 9)
    assert not torch.allclose(q @ k.mT, far_q @ far_k.mT)
    assert not found.relative


@pytest.mark.parametrize("positions", [IDS[1], IDS], ids=["ids", "ids of a batch"])
@given(seed=seeds)
def test_absolute_encodings_are_the_references(positions, seed):
    for name in ("learned", "multiplicative"):
        found = made(name, seed)
        truth = getattr(reference, name)(X, positions, found.weight)
        assert torch.allclose(found.embed(X, positions), truth, rtol=0, atol=1e-10)
    found = made("concatenated", seed, width=3, length=50)
    truth = reference.concatenated(X, positions, found.weight, found.projection.weight)
    assert torch.allclose(found.embed(X, positions), truth, rtol=0, atol=1e-10)
    found = made("concatenated", seed, base=100.0)
    table = reference.sinusoidal_table(torch.arange(LENGTH), 6, 100.0)
    truth = reference.concatenated(X, positions, table, found.projection.weight)
    assert torch.allclose(found.embed(X, positions), truth, rtol=0, atol=1e-10)
    found = made("recurrent", seed)
    truth = reference.recurrent(X, positions, found.input_weight, found.state_weight, found.input_bias)
    assert torch.allclose(found.embed(X, positions), truth, rtol=0, atol=1e-10)


@given(seeds, st.floats(1.5, 1e6), st.integers(-(2**40), 2**40), st.sampled_from([torch.int64, torch.float64]))
def test_sinusoidal_is_the_references_at_any_position(seed, base, start, dtype):
    found = encoding("sinusoidal", dim=DIM, num_heads=HEADS, base=base)
    positions = (torch.arange(5) + start).to(dtype) + (0 if dtype == torch.int64 else 0.25)
    assert torch.allclose(found.embed(X, positions), reference.sinusoidal(X, positions, base), rtol=0, atol=1e-10)
    for low in (torch.float32, torch.bfloat16, torch.float16):
        x = X.to(low)
        assert torch.equal(found.embed(x, positions), reference.sinusoidal(x, positions, base))


def test_rotary_encodings_are_the_references():
    found, whole, xpos = made("rope", base=100.0, pairing="half"), made("rope-across-heads", base=100.0), made("xpos")
    q, k = found.rotate(Q, K, IDS, k_positions=IDS + 1)
    assert torch.allclose(q, rotate(Q, IDS, theta(4, 100.0), pairing="half"), atol=1e-10)
    assert torch.allclose(k, rotate(K, IDS + 1, theta(4, 100.0), pairing="half"), atol=1e-10)
    # Before the heads are split: one rotation over the width of the model.
    wide = rotate(Q.transpose(1, 2).flatten(2), IDS, theta(DIM, 100.0))
    split = wide.view(2, 5, HEADS, 4).transpose(1, 2)
    assert torch.allclose(whole.rotate(Q, K, IDS)[0], split, atol=1e-10)
    for rotated, x, role in zip(xpos.rotate(Q, K, IDS[1]), (Q, K), "qk", strict=True):
        assert torch.allclose(rotated, formulas.rotate_by_spec(x, XPOS, IDS[1], role=role), atol=1e-10)


def test_ids_of_a_batch_belong_to_the_batch_and_not_to_the_heads():
    for name in ("learned", "sinusoidal", "recurrent", "multiplicative", "concatenated"):
        found, x = made(name), vector(5, 2, 2, 5, DIM)
        together = found.embed(x, IDS)
        for b in range(2):
            assert torch.allclose(together[b], found.embed(x[b], IDS[b]), atol=1e-12), name
        assert torch.allclose(found.embed(x, IDS[:1]), found.embed(x, IDS[0]), atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name):
    found, x, q, k = made(name), X.clone().requires_grad_(), Q.clone().requires_grad_(), K.clone().requires_grad_()

    def call(x, q, k, *parameters):
        # What it does not change is made another tensor: gradcheck takes no output that is an input.
        return [result * 1.0 for result in hooks(found, x, q, k, IDS) if result is not None]

    assert torch.autograd.gradcheck(call, (x, q, k, *found.parameters()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_keep_the_dtype_and_are_near_the_truth(name, dtype):
    found = made(name)
    x, q, k = (part.to(dtype) for part in (X, Q, K))
    for module in (copy.deepcopy(found).to(dtype), copy.deepcopy(found).float()):
        exact = copy.deepcopy(module).double()
        truth = hooks(exact, x.double(), q.double(), k.double(), IDS)
        for i, (result, right) in enumerate(zip(hooks(module, x, q, k, IDS)[:3], truth, strict=False)):
            assert result.dtype == dtype
            # Concatenated sines are rounded to half precision before their product.
            bound = torch.finfo(dtype).eps * (right.abs() + 4)
            if name == "concatenated" and i == 0:
                bound = bound + product_error(module.projection.weight, x)
            assert ((result.double() - right).abs() <= bound).all(), name


def product_error(weight, x):
    """The bound on sums of products in float32, in any order: n units in the last place of the sum of magnitudes.

    (Higham, Accuracy and Stability, eq. 3.5.) Processors add in different orders. Sines are at most 1.
    """
    weight, count = weight.double().abs(), weight.shape[-1]
    magnitudes = torch.cat((x.double().abs(), torch.ones(*x.shape[:-1], count - x.shape[-1]).double()), -1)
    return count * torch.finfo(torch.float32).eps / 2 * (magnitudes @ weight.mT)


@pytest.mark.usefixtures("as_a_user")  # torch 2.15 does not trace the checks of types
@pytest.mark.parametrize("name", slow_except(["rope", "t5", "learned"], NAMES))
@pytest.mark.parametrize("given", ["range", slow("ids"), slow("ids of a batch")])
def test_compiled_in_one_graph(name, given):
    torch._dynamo.reset()
    found = made(name)

    def call(x, q, k, positions):
        return hooks(found, x, q, k, positions)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for seq in (5, 4, 3):
        arguments = X[:, :seq], Q[:, :, :seq], K[:, :, :seq]
        positions = {"range": None, "ids": IDS[1, :seq], "ids of a batch": IDS[:, :seq]}[given]
        assert same(compiled(*arguments, positions), call(*arguments, positions), rtol=0, atol=1e-12)


# Another value for each option; it must be seen in a result, in the module, or as an error.
OTHERS: dict[str, dict[str, Any]] = {
    "learned": {"length": 10, "head_dim": 4, "placement": "scores"},
    "sinusoidal": {"base": 50.0, "head_dim": 4, "placement": "projection"},
    "multiplicative": {"length": 10},
    "concatenated": {"width": 4, "length": 50, "base": 50.0},
    "t5": {"causal": True, "num_buckets": 16, "max_distance": 6},
    "rope": {
        "spec": RopeSpec(4, sign=-1),
        "head_dim": 6,
        "base": 50.0,
        "pairing": "half",
        "at_length": 9,
        "context_length": 10,
        "learned": True,
        "backend": "nothing",
        "check_ids": True,
    },
    "rope-across-heads": {
        "head_dim": 6,
        "base": 50.0,
        "pairing": "half",
        "context_length": 10,
        "learned": True,
        "backend": "nothing",
        "check_ids": True,
    },
    "xpos": {
        "spec": RopeSpec(4, xpos=XPos(LENGTH, gamma=0.5)),
        "head_dim": 6,
        "at_length": 9,
        "context_length": 10,
        "learned": True,
        "backend": "nothing",
        "check_ids": True,
    },
}


def outcome(name: str, sizes: dict[str, int], **options: Any) -> Any:
    torch.manual_seed(0)
    try:
        found = encoding(name, **{"dim": DIM, "num_heads": HEADS} | sizes, **OPTIONS[name] | options)
        for parameter in found.parameters():
            torch.nn.init.normal_(parameter)
        parts = hooks(found, X, Q, K, IDS)
        return repr(found), [None if part is None else part.tolist() for part in parts]
    except RopewalkError as error:
        return str(error)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_matters(name):
    assert set(options_of(name)) == set(OTHERS.get(name, {}))
    before = outcome(name, {})
    assert before == outcome(name, {})
    assert not isinstance(before, str)
    for option, other in OTHERS.get(name, {}).items():
        assert outcome(name, {}, **{option: other}) != before, option
    # The number of heads matters to vectors that are added to heads.
    placed: dict[str, Any] = {"placement": "scores"} if "placement" in options_of(name) else {}
    for size, other in (("dim", 12), ("num_heads", 4)):
        if size in inspect.signature(ENCODINGS[name]).parameters:
            assert outcome(name, {size: other}, **placed) != outcome(name, {}, **placed), size
    assert "an integer of at least 1" in outcome(name, {"dim": 0})
    assert "an integer of at least 1" in outcome(name, {"num_heads": True})


def test_what_a_rotary_encoding_says_of_its_spec():
    yarn = RopeSpec(4, Yarn(1e4, 4.0, 64, mscale=1.0, mscale_all_dim=0.7, policy="deepseek"))
    found = made("rope", spec=yarn)
    assert yarn.softmax_scale != 1.0
    assert found.scale == pytest.approx(yarn.softmax_scale / 2.0)
    assert made("rope", context_length=99).length == 99
    assert made("xpos", context_length=32).length == 32
    assert made("xpos", context_length=99).length == LENGTH
    narrow: Any = encoding("rope", dim=10, num_heads=3, head_dim=4)
    assert narrow.rope.spec.head_dim == 4
    assert isinstance(made("rope").rope, RotaryEmbedding)
    kinds = [type(made(name)) for name in ("rope", "rope-across-heads", "xpos")]
    assert kinds == [RotaryEncoding, AcrossHeadsEncoding, XPosEncoding]


def test_a_rule_that_varies_is_given_its_length_once():
    spec = RopeSpec(4, DynamicNTK(1e4, 2.0, 16))
    found = made("rope", spec=spec, at_length=64)
    rotated = found.rotate(Q, K, IDS)
    assert same([*rotated], [formulas.rotate_by_spec(x, spec, IDS, length=64) for x in (Q, K)], atol=1e-10)
    # A step has the frequencies of its prefill.
    assert torch.equal(found.rotate(Q[:, :, :2], K[:, :, :2], IDS[:, :2])[1], rotated[1][:, :, :2])
    assert "at_length=64" in repr(found)
