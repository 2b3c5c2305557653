"""Encodings as texts: options, classes of a user, and mistakes."""

import pytest
import torch

import ropewalk as rw
from ropewalk.lab.encodings import make_encoding
from ropewalk.lab.experiments.text import ALL_ENCODINGS
from ropewalk.lab.variants import Bfloat16Angles, GrowingBias, PositionsZero, WrongSign
from ropewalk.nn.encodings.bias import AlibiBias
from ropewalk.nn.encodings.rotary import RotaryEncoding

SIZES = {"dim": 32, "num_heads": 2, "length": 24}


@pytest.mark.parametrize("name", ALL_ENCODINGS)
def test_every_encoding_has_a_text(name):
    assert make_encoding(name, **SIZES).name == name


def spec_of(text):
    encoding = make_encoding(text, **SIZES)
    assert isinstance(encoding, RotaryEncoding)
    return encoding.rope.spec


def test_options_and_rules():
    assert spec_of("rope rule=pi factor=4 base=100 pairing=half part=0.5") == rw.RopeSpec(
        16, rw.PositionInterpolation(100, factor=4), rotary_dim=8, pairing="half"
    )
    assert spec_of("rope rule=yarn factor=4").frequencies == rw.Yarn(factor=4, trained_length=24)
    assert make_encoding("learned", **SIZES).length == 24
    assert make_encoding("sinusoidal placement=scores", **SIZES).placement == "scores"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rop", "expected: one of none, learned"),
        ("rope base", "'base'"),
        ("rope base=1 base=2", "each once"),
        ("rope rule=magic factor=2", "rule=pi, ntk, by-parts or yarn"),
        ("no_such_module:Class", "No module named"),
        ("ropewalk.lab.variants:Missing", "Missing"),
        ("math:sqrt", "other parameters have defaults"),
        ("torch.nn:Identity", "a subclass of ropewalk.Encoding"),
        ("ropewalk.lab.variants:PositionsZero width=3", "width"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(rw.RopewalkError, match=message):
        make_encoding(text, **SIZES)


def test_wrong_encodings_are_wrong():
    q, k = torch.randn(2, 1, 2, 300, 16, dtype=torch.float64)
    scores = {}
    for name in ("rope", *(f"ropewalk.lab.variants:{x.__name__}" for x in (PositionsZero, WrongSign, Bfloat16Angles))):
        encoding = make_encoding(name, **SIZES)
        rotated = [encoding.rotate(q, k, torch.arange(300) + shift) for shift in (0, 300)]
        scores[name.rpartition(":")[2]] = [a @ b.transpose(-1, -2) for a, b in rotated]
    near, far = scores["rope"]
    assert torch.allclose(near, far, atol=1e-9)
    assert torch.allclose(scores["PositionsZero"][0], q @ k.transpose(-1, -2))
    assert not torch.allclose(*scores["WrongSign"], atol=1)
    assert torch.allclose(scores["Bfloat16Angles"][0][..., :256, :256], near[..., :256, :256])
    assert not torch.allclose(scores["Bfloat16Angles"][1], near, atol=1)
    at = torch.arange(3)
    assert torch.equal(GrowingBias(2).bias(at, at), -AlibiBias(2).bias(at, at))
