"""Rules for longer contexts: published figures, and the laws that hold between them."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ropewalk import RopeSpec, RopewalkError, RotaryEmbedding
from ropewalk.spec import (
    FLOAT64,
    NTK,
    AcrossHeads,
    DynamicNTK,
    Explicit,
    Frequencies,
    Llama3,
    LongRope,
    NTKByParts,
    NTKFixed,
    NTKMixed,
    Plain,
    PositionInterpolation,
    Proportional,
    XPos,
    Yarn,
)
from ropewalk.theory import decay_curve

bases = st.floats(2.0, 1e8)
factors = st.floats(1.0, 256.0)
lengths = st.integers(64, 1 << 20)
dims = st.integers(2, 128).map(lambda pairs: 2 * pairs)


@st.composite
def rules(draw, dim: int):
    """Any rule, for a rotary_dim."""
    base, factor, length = draw(bases), draw(factors), draw(lengths)
    low, span = draw(st.floats(0.1, 4)), draw(st.floats(0.1, 40))
    divisors = st.lists(st.floats(1, 64), min_size=dim // 2, max_size=dim // 2)
    short, long = draw(divisors), draw(divisors)
    fraction, bend, mscale = draw(st.floats(0, 1)), draw(st.floats(0.1, 2)), draw(st.floats(0.1, 2))
    truncate, ramp, heads = draw(st.booleans()), draw(st.sampled_from(["index", "ratio"])), draw(st.integers(1, 4))
    explicit = draw(st.lists(st.floats(-4, 4), min_size=dim // 2, max_size=dim // 2))
    # As calls still to be made: the checker of types must not run while Hypothesis draws.
    return draw(
        st.sampled_from(
            [
                lambda: Plain(base),
                lambda: PositionInterpolation(base, factor),
                lambda: NTK(base, factor),
                lambda: DynamicNTK(base, factor, length),
                lambda: NTKFixed(base, factor),
                lambda: NTKMixed(base, factor, bend),
                lambda: NTKByParts(base, factor, length, low, low + span),
                lambda: Llama3(base, factor, length, low, low + span),
                lambda: Yarn(base, factor, length, low + span, low, truncate, ramp),
                lambda: Yarn(base, factor, length, mscale=0.7, mscale_all_dim=mscale, policy="deepseek"),
                lambda: LongRope(base, short, long, length, factor),
                lambda: Proportional(base, fraction, factor),
                lambda: Explicit(explicit),
                lambda: AcrossHeads(base, heads),
            ]
        )
    )


def test_yarn_of_gpt_oss():
    rule = Yarn(150_000, 32, 4096, truncate=False)
    assert rule.correction_range(64) == pytest.approx((8.092779115512402, 17.39802450158856), rel=1e-15)
    assert dataclasses.replace(rule, truncate=True).correction_range(64) == (8, 18)
    assert rule.amplitude() == pytest.approx(1.3465735902799727, rel=1e-15)
    found = rule.evaluate(64)[[0, 9, 31]]
    np.testing.assert_allclose(found, [1, 0.03170569618466377, 3.0235114281192144e-07], rtol=1e-14)


def test_yarn_of_deepseek():
    rule = Yarn(1e4, 40, 4096, mscale=1.0, mscale_all_dim=1.0, policy="deepseek")
    raw = dataclasses.replace(rule, truncate=False).correction_range(64)
    assert raw == pytest.approx((10.472240810318025, 22.513440636877274), rel=1e-15)
    assert rule.correction_range(64) == (10, 23)
    np.testing.assert_allclose(rule.evaluate(64)[[11, 23]], [0.03900692656714386, 3.33380358040831e-05], rtol=1e-14)
    assert Yarn(1e4, 40, 4096).amplitude() == pytest.approx(1.3688879454113936, rel=1e-15)
    assert (rule.amplitude(), rule.softmax_scale) == (1.0, pytest.approx(1.8738542070926265, rel=1e-15))
    lite = dataclasses.replace(rule, mscale=0.707, mscale_all_dim=0.707)
    assert (lite.amplitude(), lite.softmax_scale) == (1.0, pytest.approx(1.5896261651208736, rel=1e-15))


@pytest.mark.parametrize(
    ("rule", "dim", "reach", "amplitude"),
    [
        (Yarn(1e6, 4, 32768), 128, (23, 40), 1.138629436111989),
        (Yarn(1e4, 16, 4096), 128, (20, 46), 1.2772588722239782),
        (Yarn(1e4, 2, 4096), 128, (20, 46), 1.0693147),
        (Yarn(1e4, 8, 4096), 128, (20, 46), 1.2079442),
    ],
)
def test_yarn_of_qwen_and_llama_2(rule, dim, reach, amplitude):
    assert rule.correction_range(dim) == reach
    assert rule.amplitude() == pytest.approx(amplitude, abs=5e-8)


def test_yarn_in_bands():
    plain = Plain().evaluate(128)
    for ramp, at_30 in (("ratio", 0.003935989), ("index", 0.008526844)):
        found = Yarn(1e4, 16, 4096, ramp=ramp).evaluate(128)
        assert found[30] == pytest.approx(at_30, abs=5e-10)
        assert found[63] == pytest.approx(7.217387e-6, abs=5e-13)
        kept, divided = np.isclose(found, plain, rtol=1e-12), np.isclose(found, plain / 16, rtol=1e-12)
        assert (kept.sum(), divided.sum(), (~kept & ~divided).sum()) == (21, 18, 25)
        assert kept[:21].all()
        assert divided[46:].all()


def test_llama_3_1():
    found, plain = Llama3(500_000, 8, 8192).evaluate(128), Plain(500_000).evaluate(128)
    at = [28, 29, 63]
    np.testing.assert_allclose(
        found[at], [0.003211445994752591, 0.002166570763503359, 3.068925988914511e-07], rtol=1e-14
    )
    ratios = [0.82817, 0.64374, 0.49351, 0.37112, 0.27143, 0.19021, 0.125]
    np.testing.assert_allclose((found / plain)[29:36], ratios, atol=5e-6)
    assert (found == plain).sum() == 29
    assert np.isclose(found, plain / 8, rtol=1e-14).sum() == 29


def test_equal_bounds_are_a_step():
    # Llama 4 Scout: low_freq_factor = high_freq_factor = 1. Kimi K2: beta_fast = beta_slow = 1.
    plain = Plain(5e5).evaluate(128)
    for found in (Llama3(5e5, 16, 8192, 1, 1).evaluate(128), Yarn(5e5, 16, 8192, 1, 1, ramp="ratio").evaluate(128)):
        rotates_once = 8192 * plain / (2 * math.pi) >= 1
        np.testing.assert_allclose(found, np.where(rotates_once, plain, plain / 16), rtol=1e-14)
    index = Yarn(5e4, 32, 4096, 1.0, 1.0).correction_range(64)
    assert index[1] - index[0] == 1


def test_longrope_of_phi_3_5():
    assert LongRope(1e4, [1.0], [1.0], 4096, 32).amplitude() == pytest.approx(1.1902380714238083, rel=1e-15)


@pytest.mark.parametrize(
    ("rule", "dim", "length", "base"),
    [
        (DynamicNTK(1e4, 2, 4096), 128, 8192, 30527.7367488067),
        (DynamicNTK(1e4, 2, 2048), 128, 4096, 30527.737),
        (DynamicNTK(1e4, 2, 2048), 128, 8192, 72195.860),
        (NTK(1e4, 2), 128, None, 20221.262),
        (NTK(1e4, 4), 128, None, 40889.942),
        (NTK(1e4, 8), 128, None, 82684.623),
        (NTK(1e4, 16), 128, None, 167198.739),
        (NTK(1e4, 32), 128, None, 338096.946),
        (NTK(1e4, 2), 64, None, 20452.229),
        (NTK(1e4, 4), 64, None, 41829.366),
        (NTK(1e4, 8), 64, None, 85550.376),
        (NTK(1e4, 1000), 128, None, 11_158_839.925),
    ],
)
def test_ntk_is_another_base(rule, dim, length, base):
    found = rule.evaluate(dim, length)
    np.testing.assert_allclose(found, Plain(base).evaluate(dim), rtol=1e-7)
    # theta_1 = base^(-2/d) gives the base back to the digits that were printed.
    assert found[1] ** (-dim / 2) == pytest.approx(base, abs=6e-4)


def test_xpos_abf_and_granularity():
    # Effective long context (2309.16039), section on granularity: the mean step of ln(theta) is ln(base) / (d/2).
    assert 1 / (math.log(1e4) + math.log(50)) == pytest.approx(0.0762, abs=5e-5)
    steps = -np.diff(np.log(Plain(5e5).evaluate(128)))
    np.testing.assert_allclose(1 / (steps * 64), 0.0762, atol=5e-5)


def test_position_interpolation_in_figures():
    # 2306.15595, figure 5: B(s)/d, half of the mean partial sum, is 16.25 at 0 and stays above 1 within 4096.
    curve = decay_curve(np.arange(4096.0), Plain(1e4).evaluate(128)) / 2
    assert curve[0] == pytest.approx(16.25)
    assert curve.min() == pytest.approx(1.1159, abs=5e-5)
    # 2309.16039: the granularity of PI by 4.
    assert 0.25 / math.log(1e4) == pytest.approx(0.0271, abs=5e-5)


@pytest.mark.parametrize(("below", "distinct"), [(512, 385), (4096, 769), (32768, 1153)])
def test_bfloat16_cannot_count(below, distinct):
    assert torch.arange(below).bfloat16().unique().numel() == distinct


@given(bases, dims, lengths)
def test_a_factor_of_one_is_plain(base, dim, length):
    plain = Plain(base).evaluate(dim)
    same = [
        PositionInterpolation(base, 1),
        NTK(base, 1),
        NTKFixed(base, 1),
        NTKMixed(base, 1),
        NTKByParts(base, 1, length),
        Llama3(base, 1, length),
        Yarn(base, 1, length),
        Yarn(base, 1, length, ramp="ratio"),
        Proportional(base, 1, 1),
        LongRope(base, [1.0] * (dim // 2), [1.0] * (dim // 2), length, 1),
        AcrossHeads(base, 1),
    ]
    for rule in same:
        np.testing.assert_allclose(rule.evaluate(dim).ravel(), plain, rtol=1e-13)
        assert rule.amplitude() == 1
    # Of DynamicNTK it is true up to the trained length alone.
    grown = DynamicNTK(base, 1, length)
    np.testing.assert_array_equal(grown.evaluate(dim, length), plain)
    if dim > 4:
        assert (grown.evaluate(dim, 2 * length)[1:] < plain[1:]).all()


@given(bases, factors, lengths, dims, st.sampled_from(["index", "ratio"]), st.booleans())
def test_yarn_lies_between_plain_and_linear(base, factor, length, dim, ramp, truncate):
    found = Yarn(base, factor, length, truncate=truncate, ramp=ramp).evaluate(dim)
    plain = Plain(base).evaluate(dim)
    assert (found <= plain * (1 + 1e-12)).all()
    assert (found >= PositionInterpolation(base, factor).evaluate(dim) * (1 - 1e-12)).all()


@given(bases, factors, dims)
def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest_by_the_factor(base, factor, dim):
    assume(dim >= 4)
    found, plain = NTK(base, factor).evaluate(dim), Plain(base).evaluate(dim)
    assert found[0] == 1
    assert found[-1] == pytest.approx(plain[-1] / factor, rel=1e-11)
    for rule in (NTKFixed(base, factor), NTKMixed(base, factor)):
        assert rule.evaluate(dim)[-1] == pytest.approx(plain[-1] / factor, rel=1e-11)
        assert (np.diff(rule.evaluate(dim)) <= 0).all()


@given(bases, factors, lengths, dims, st.floats(0.1, 4), st.floats(0.1, 40))
def test_llama_3_and_yarn_of_the_paper_are_ntk_by_parts(base, factor, length, dim, low, span):
    parts = NTKByParts(base, factor, length, low, low + span).evaluate(dim)
    np.testing.assert_array_equal(Llama3(base, factor, length, low, low + span).evaluate(dim), parts)
    np.testing.assert_array_equal(Yarn(base, factor, length, low + span, low, ramp="ratio").evaluate(dim), parts)
    # The formula of the paper, as it is printed.
    plain = Plain(base).evaluate(dim)
    gamma = np.clip((length * plain / (2 * math.pi) - low) / span, 0, 1)
    np.testing.assert_allclose(parts, (1 - gamma) * plain / factor + gamma * plain, rtol=1e-9)


@given(bases, factors, lengths, dims, st.floats(1.0, 8.0))
def test_dynamic_ntk_is_ntk_with_a_factor_that_grows(base, factor, length, dim, times):
    n = int(length * times)
    factor_there = factor * n / length - (factor - 1)
    found = DynamicNTK(base, factor, length).evaluate(dim, n)
    np.testing.assert_allclose(found, NTK(base, max(1, factor_there)).evaluate(dim), rtol=1e-12)


@given(st.integers(0, 64), bases, factors)
def test_proportional_rotates_the_first_pairs_and_no_others(rotated_dim, base, factor):
    found = Proportional(base, rotated_dim / 64, factor).evaluate(128)
    assert np.count_nonzero(found) == rotated_dim
    np.testing.assert_allclose(found[:rotated_dim], PositionInterpolation(base, factor).evaluate(128)[:rotated_dim])


@given(st.data(), dims)
def test_every_spec_goes_through_json(data, dim):
    rule = data.draw(rules(dim))()
    spec = RopeSpec(dim, rule)
    again = RopeSpec.from_json(spec.to_json())
    assert again == spec
    assert hash(again) == hash(spec)
    for length in (None, 10_000_000):
        np.testing.assert_array_equal(again.inv_freq(length), spec.inv_freq(length))
        assert again.amplitude(length) == spec.amplitude(length)
    assert again.softmax_scale == spec.softmax_scale


def test_longrope_switches_after_the_trained_length():
    rule = LongRope(1e4, [1.0, 2.0], [3.0, 4.0], 100, short_amplitude=1.5, long_amplitude=2.5)
    for length, divisors, amplitude in ((None, [1, 2], 1.5), (100, [1, 2], 1.5), (101, [3, 4], 2.5)):
        np.testing.assert_allclose(rule.evaluate(4, length), [1 / divisors[0], 0.01 / divisors[1]])
        assert rule.amplitude(length) == amplitude


def test_amplitudes_by_policy():
    def amplitude(policy, **fields):
        return Yarn(1e4, 40, 4096, policy=policy, **fields).amplitude()

    g = 0.1 * math.log(40) + 1
    assert amplitude("transformers", mscale=2.0) == g != amplitude("deepseek", mscale=2.0) == pytest.approx(2 * g - 1)
    assert amplitude("vllm", mscale=2.0, mscale_all_dim=1.0) == g
    assert amplitude("transformers", attention_factor=0.5) == amplitude("deepseek", attention_factor=0.5) == 0.5
    assert amplitude("vllm", attention_factor=0.5) == 0.5 * g
    assert amplitude("transformers", mscale=1.0, mscale_all_dim=0.0) == g
    assert amplitude("transformers", mscale=0.0, mscale_all_dim=1.0) == g
    assert amplitude("deepseek", mscale=0.0) == 1
    for policy in ("transformers", "vllm"):
        assert Yarn(1e4, 40, 4096, mscale=1.0, mscale_all_dim=1.0, policy=policy).softmax_scale == 1


YARN, LONG = {"factor": 4, "trained_length": 4096}, {"base": 1e4, "short_factor": [1], "long_factor": [1]}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PositionInterpolation(1e4, 0.5),
            r"PositionInterpolation\(factor=...\)\nexpected: a finite number of at least 1, and below 1e30\ngot: ",
        ),
        (lambda: NTK(1e4, math.nan), "NTK\\(factor"),
        (lambda: NTK(1e4, 2).evaluate(2), "a rotary_dim of at least 4"),
        (lambda: RopeSpec(2, DynamicNTK(1e4, 2, 64)), "a rotary_dim of at least 4"),
        (lambda: DynamicNTK(1e4, 2, 1), "trained_length=...\\)\nexpected: an integer of at least 2"),
        (lambda: DynamicNTK(1e4, 2, 2048.0), "trained_length"),
        (lambda: NTKMixed(1e4, 2, 0), "bend"),
        (lambda: Llama3(5e5, 8, 8192, 4, 1), "high_freq_factor not below low_freq_factor"),
        (lambda: Llama3(5e5, 8, 8192, 4, 1e10), "a number of rotations from 1e-9 to 1e9"),
        (lambda: NTKByParts(1.0, 8, 8192), "base=...\\)\nexpected: a finite number above 1"),
        (lambda: Yarn(**YARN, beta_fast=1, beta_slow=32), "beta_fast not below beta_slow"),
        (lambda: Yarn(**YARN, beta_fast=0), "beta_fast=...\\)\nexpected: a finite number above 0"),
        (lambda: Yarn(**YARN, ramp="ration"), "did you mean 'ratio'"),
        (lambda: Yarn(**YARN, policy="hf"), "'transformers' or 'deepseek' or 'vllm'"),
        (lambda: Yarn(**YARN, truncate=1), "True or False"),
        (lambda: Yarn(**YARN, attention_factor=0), "attention_factor"),
        (lambda: Yarn(**YARN, mscale=-1), "mscale"),
        (lambda: Yarn(**YARN, mscale="1"), "mscale"),
        (lambda: LongRope(**LONG | {"short_factor": [0]}, trained_length=64), "finite numbers above 0"),
        (lambda: LongRope(**LONG | {"long_factor": "1"}, trained_length=64), "finite numbers above 0"),
        (lambda: LongRope(**LONG, trained_length=64).evaluate(4), "2 numbers in short_factor"),
        (lambda: LongRope(**LONG, trained_length=64, short_amplitude=1.0), "together"),
        (lambda: Proportional(1e4, 1.5), "a number from 0 to 1"),
        (
            lambda: LongRope(**LONG, trained_length=64, attention_factor=1.0, short_amplitude=1.0, long_amplitude=1.0),
            "or",
        ),
        (lambda: NTK(1e4, 1e308), "below 1e30"),
        (lambda: DynamicNTK(1e4, 2, 10**25), r"at most 2\^53"),
        (lambda: Yarn(1e4, 2, 10**400), r"at most 2\^53"),
        (lambda: Yarn(**YARN, mscale=np.array([1.0, 2.0])), "mscale"),
        (lambda: Yarn(**YARN, mscale=0j), "mscale"),
        (lambda: Yarn(**YARN, mscale=False), "mscale"),
        (lambda: XPos(10**400), r"at most 2\^53"),
        (lambda: XPos(8, gamma=1e-320), "gamma above 1e-6"),
        (lambda: Proportional(1e4, 0.5, 0.5), "at least 1"),
    ],
)
def test_what_no_rule_can_be_is_refused(make, message):
    with pytest.raises(RopewalkError, match=message):
        make()


def test_every_rule_is_final_frozen_and_has_its_fields_in_json():
    for name, known in Frequencies.known.items():
        rule: Any = known
        assert rule.__final__, name
        assert rule.__dataclass_params__.frozen, name
        assert rule.__doc__ is not None
        assert ">>>" in rule.__doc__, name


def test_a_rule_says_what_it_is_called_and_nothing_else_has_a_list_of_rules():
    rules = [rule for rule in Frequencies.known.values() if rule.__module__.startswith("ropewalk.")]
    for names in ([rule.label for rule in rules], [rule.option for rule in rules], [rule.rope_type for rule in rules]):
        present = [name for name in names if name is not None]
        assert len(set(present)) == len(present)
    assert all(rule.label != rule.__name__ for rule in rules)
    assert set(Frequencies.rope_types()) >= {
        "default",
        "linear",
        "dynamic",
        "yarn",
        "longrope",
        "llama3",
        "proportional",
    }
    # Commands accept the rope type of a rule as well as its name, and neither is a name of another rule.
    options = {rule.option: rule for rule in rules if rule.option is not None}
    for rope_type, rule in Frequencies.rope_types().items():
        assert options.get(rope_type, rule) is rule
        assert Frequencies.option_for(rope_type) == (rule.option or rope_type)
    for rule in rules:
        fields: Any = dataclasses.fields(rule)  # pyright: ignore[reportArgumentType]
        assert set(rule.config_keys) <= {field.name for field in fields}, rule
        if rule.option is not None:
            # These are what a command line can specify.
            needed = {field.name for field in fields if field.default is dataclasses.MISSING}
            assert needed <= {"base", "factor", "trained_length"}, rule


@pytest.mark.parametrize(
    "rule",
    [
        Plain(5e5),
        PositionInterpolation(1e4, 3),
        Llama3(5e5, 8, 8192, 1, 4),
        Proportional(1e4, 0.25),
        Proportional(1e4, 0.25, 4),
        Yarn(1e6, 4, 32_768, truncate=False, mscale=0.5, mscale_all_dim=1.0),
        LongRope(1e4, [1.0, 2.0], [3.0, 4.0], 4096, 32),
        LongRope(1e4, [1.0, 2.0], [3.0, 4.0], 4096, short_amplitude=1.1, long_amplitude=1.2),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_a_rule_reads_the_parameters_that_it_writes(rule):
    parameters = rule.to_config(4)["rope_parameters"]
    assert Frequencies.rope_types()[parameters["rope_type"]] is type(rule)
    assert json.loads(json.dumps(parameters)) == parameters
    assert type(rule).from_parameters(parameters) == rule


@pytest.mark.usefixtures("as_a_user")
def test_parameters_that_are_no_rule_are_refused():
    assert Llama3.from_parameters({"factor": None}) == Llama3()
    with pytest.raises(RopewalkError, match=r"LongRope from rope parameters\nexpected: the fields base, short_factor"):
        LongRope.from_parameters({"rope_theta": 1e4})
    with pytest.raises(RopewalkError, match=r"Plain\(base=...\)"):
        Plain.from_parameters({"rope_theta": "many"})


def test_a_rule_in_a_class_of_its_own_is_written_to_configs_json_and_command_lines():
    before = dict(Frequencies.known)
    try:

        @dataclasses.dataclass(frozen=True)
        class Halved(Frequencies):
            option: ClassVar[str | None] = "halved"
            rope_type: ClassVar[str | None] = "halved"
            config_keys: ClassVar[Mapping[str, str]] = {"base": "rope_theta", "share": "halved_share"}

            base: float = 10_000.0
            share: float = 0.5

            def evaluate(self, rotary_dim, length=None, arithmetic=FLOAT64):
                return self.share / arithmetic.powers(self.base, rotary_dim)

        spec = RopeSpec(4, Halved(100.0, 0.25))
        assert Halved.label == "Halved"
        parameters = spec.to_config("transformers")["rope_parameters"]
        assert parameters == {"rope_type": "halved", "rope_theta": 100.0, "halved_share": 0.25}
        assert Frequencies.rope_types()["halved"].from_parameters(parameters) == spec.frequencies
        assert RopeSpec.from_json(spec.to_json()) == spec
        assert "halved" in {rule.option for rule in Frequencies.known.values()}
    finally:
        Frequencies.known.clear()
        Frequencies.known.update(before)


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.7, 32.0])
@pytest.mark.parametrize(("dim", "bend"), [(64, 0.625), (128, 0.625), (96, 1.3)])
def test_mixed_ntk_in_float32_is_vllms_to_the_last_bit(dim, bend, factor):
    inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    rate = torch.tensor(factor).log() / (dim / 2) ** bend
    expected = inv_freq / torch.exp(rate * torch.arange(1, dim // 2 + 1).float() ** bend)
    spec = RopeSpec(dim, NTKMixed(10_000, factor, bend), angles="float32")
    assert torch.equal(RotaryEmbedding(spec).inv_freq, expected)
