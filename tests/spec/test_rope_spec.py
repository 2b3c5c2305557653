"""RopeSpec: a value with a JSON form, that refuses what no rotation can be."""

import dataclasses
import json
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopeSpec, RopewalkError
from ropewalk.spec import AcrossHeads, Explicit, Frequencies, Plain
from strategies import bases, pairings


@st.composite
def spec_fields(draw):
    """A class of frequencies, its arguments, and the other fields of a spec.

    The check of annotations samples lists at random, which no strategy may do, so that tests construct the values.
    """
    pairs = draw(st.integers(1, 16))
    rotary_pairs = draw(st.integers(1, pairs))
    rule, arguments = draw(
        st.one_of(
            st.tuples(st.just(Plain), st.tuples(bases)),
            st.tuples(st.just(AcrossHeads), st.tuples(bases, st.integers(1, 8))),
            st.tuples(
                st.just(Explicit),
                st.tuples(st.lists(st.floats(-10, 10), min_size=rotary_pairs, max_size=rotary_pairs)),
            ),
        )
    )
    return (
        rule,
        arguments,
        {
            "head_dim": 2 * pairs,
            "rotary_dim": 2 * rotary_pairs,
            "pairing": draw(pairings),
            "rotary_slice": draw(st.sampled_from(["leading", "trailing"])),
            "sign": draw(st.sampled_from([1, -1])),
        },
    )


def spec_of(fields):
    rule, arguments, others = fields
    return RopeSpec(frequencies=rule(*arguments), **others)


@given(spec_fields())
def test_json_keeps_every_field(fields):
    spec = spec_of(fields)
    again = RopeSpec.from_json(spec.to_json())
    assert again == spec
    assert hash(again) == hash(spec)
    np.testing.assert_array_equal(again.inv_freq(), spec.inv_freq())
    assert pickle.loads(pickle.dumps(spec)) == spec


@given(spec_fields())
def test_the_sign_negates_the_frequencies(fields):
    spec = spec_of(fields)
    other = dataclasses.replace(spec, sign=-spec.sign)
    assert other != spec
    np.testing.assert_array_equal(other.inv_freq(), -spec.inv_freq())


@pytest.mark.usefixtures("as_a_user")
def test_defaults_are_roformers():
    spec = RopeSpec(128)
    assert (spec.pairing, spec.sign, spec.rotary_dim, spec.frequencies) == ("interleaved", 1, 128, Plain(10_000.0))
    assert (spec.amplitude(), spec.softmax_scale, spec.inv_freq().shape) == (1.0, 1.0, (64,))
    assert spec == RopeSpec(128, rotary_dim=128) == RopeSpec(np.int64(128))


def test_frequencies_are_of_the_rotated_part():
    np.testing.assert_array_equal(RopeSpec(64, rotary_dim=16).inv_freq(), Plain().evaluate(16))


def test_a_rule_of_ones_own_needs_no_other_change():
    try:

        @dataclasses.dataclass(frozen=True)
        class Harmonic(Frequencies):
            varies = True
            first: float = 1.0

            def evaluate(self, rotary_dim, length=None, arithmetic=None) -> Any:
                return self.first / np.arange(1.0, rotary_dim // 2 + 1) / (length or 1)

            def amplitude(self, length=None, arithmetic=None):
                return 1.5 * (length or 1)

            @property
            def softmax_scale(self):
                return 0.25

        spec = RopeSpec(8, Harmonic(2.0))
        assert (spec.amplitude(), spec.amplitude(4), spec.softmax_scale) == (1.5, 6.0, 0.25)
        assert spec.inv_freq(length=2).tolist() == [1.0, 0.5, 1 / 3, 0.25]
        assert spec.inv_freq().tolist() == [2.0, 1.0, 2 / 3, 0.5]
        assert RopeSpec.from_json(spec.to_json()) == spec
    finally:
        Frequencies.known.pop("Harmonic")


def test_a_rule_that_is_none_is_refused():
    before = dict(Frequencies.known)

    class Loose(Frequencies):
        def evaluate(self, rotary_dim, length=None, arithmetic=None) -> Any:
            return np.ones(rotary_dim // 2)

    @dataclasses.dataclass(frozen=True)
    class Wide(Loose):
        def evaluate(self, rotary_dim, length=None, arithmetic=None) -> Any:
            return np.ones(rotary_dim)

    @dataclasses.dataclass(frozen=True)
    class Silent(Loose):
        def evaluate(self, rotary_dim, length=None, arithmetic=None) -> Any:
            return np.ones(rotary_dim // 2) / (length or 1)

    try:
        for rule, message in (
            (Loose(), "a frozen dataclass"),
            (Wide(), r"\[4\], one per pair, or one such row per head\ngot:      shape \[8\]"),
            (Silent(), "varies = True"),
        ):
            with pytest.raises(RopewalkError, match=message):
                RopeSpec(8, rule)
        with pytest.raises(RopewalkError, match="a name that no other rule has"):
            type("Plain", (Loose,), {})
    finally:
        Frequencies.known.clear()
        Frequencies.known.update(before)


def test_import_and_specs_need_no_torch():
    code = (
        "import sys, ropewalk as rw; rw.RopeSpec.from_json(rw.RopeSpec(64, rw.AcrossHeads(1e4, 8)).to_json());"
        "import ropewalk.theory; dir(rw); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"head_dim": 7},
            "head_dim=...\\)\nexpected: an even integer of at least 2\ngot:      7\ndo this:  pass an even",
        ),
        ({"head_dim": 0}, "even integer"),
        ({"head_dim": -4}, "even integer"),
        ({"head_dim": 8.0}, "even integer"),
        ({"head_dim": "8"}, "even integer"),
        ({"head_dim": True}, "even integer"),
        ({"head_dim": 8, "rotary_dim": 10}, "at most head_dim = 8\ngot:      rotary_dim = 10"),
        ({"head_dim": 8, "rotary_dim": 3}, "rotary_dim=...\\)\nexpected: an even integer"),
        ({"head_dim": 8, "rotary_dim": 0}, "even integer"),
        ({"head_dim": 8, "pairing": "halves"}, "did you mean 'half'"),
        ({"head_dim": 8, "pairing": None}, "'interleaved' or 'half'"),
        ({"head_dim": 8, "rotary_slice": "middle"}, "'leading' or 'trailing'"),
        ({"head_dim": 8, "frequencies": 10_000}, "wrap a base as Plain"),
        ({"head_dim": 8, "frequencies": [1.0] * 4}, "a list of frequencies as Explicit"),
        ({"head_dim": 8, "frequencies": Explicit([1.0, 2.0])}, "4 numbers, one per pair\ngot:      2"),
        ({"head_dim": 8, "frequencies": Explicit([[1.0], [2.0]])}, "4 numbers per head"),
        ({"head_dim": 8, "sign": 0}, "sign=...\\)\nexpected: 1"),
        ({"head_dim": 8, "sign": True}, "sign=...\\)\nexpected: 1"),
        ({"head_dim": 8, "axes": ((1.0,),)}, "axes=...\\)\nexpected: a value of Axes, or None"),
        ({"head_dim": 8, "xpos": 512}, "xpos=...\\)\nexpected: a value of XPos, or None"),
        (
            {"head_dim": 8, "query_temperature": 0.1},
            "query_temperature=...\\)\nexpected: a value of QueryTemperature, or None",
        ),
        ({"head_dim": 8, "angles": "bfloat16"}, "angles=...\\)\nexpected: 'exact' or 'float32'"),
    ],
)
def test_what_no_rotation_can_be_is_refused(arguments, message):
    with pytest.raises(RopewalkError, match=message):
        RopeSpec(**arguments)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("length", [0, -1, 2.5, "8", True])
def test_a_length_is_a_count(length):
    for method in (RopeSpec(8).inv_freq, RopeSpec(8).amplitude):
        with pytest.raises(RopewalkError, match=r"length=\.\.\.\nexpected: an integer of at least 1"):
            method(length)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the JSON text that RopeSpec.to_json wrote"),
        ("[]", 'no object with a "head_dim"'),
        ("{}", 'no object with a "head_dim"'),
        ('{"head_dim": 8, "head_dim": 16}', "occurs twice"),
        ("[" * 100_000, "RopeSpec.to_json"),
        (None, "RopeSpec.to_json"),
        ('{"head_dim": 8, "pairng": "half"}', "did you mean 'pairing'"),
        ('{"head_dim": 8, "frequencies": {"rule": "Plain", "base": NaN}}', "a finite number above 0"),
        ('{"head_dim": NaN}', "even integer"),
        ('{"head_dim": 8, "frequencies": null}', 'an object with a "rule"'),
    ],
)
def test_text_that_is_no_spec_is_refused(text, message):
    with pytest.raises(RopewalkError, match=message):
        RopeSpec.from_json(text)


def test_json_is_json():
    fields = json.loads(RopeSpec(8, Plain(math.pi)).to_json())
    assert fields["frequencies"] == {"rule": "Plain", "base": math.pi}
    assert set(fields) == {field.name for field in dataclasses.fields(RopeSpec)}


def test_errors_survive_pickling():
    with pytest.raises(RopewalkError) as caught:
        RopeSpec(7)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.got) == (str(caught.value), "7")


def test_importing_the_layers_imports_no_compiler():
    # torch's compiler takes seconds to import, which only those who compile should pay.
    script = (
        "import sys, torch; import ropewalk as rw\n"
        "rw.RotaryEmbedding(8)(torch.ones(3, 8)), rw.Attention(8, 2), rw.LinearAttention(8, 2), rw.encoding\n"
        "sys.exit('torch._dynamo' in sys.modules or 'sympy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
