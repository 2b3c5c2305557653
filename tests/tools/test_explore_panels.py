"""The sentences of the explorer's panels, under Node.js, against Python."""

import json
import re

import numpy as np
import pytest

from ropewalk.spec import AcrossHeads, Explicit, LongRope, Plain, Proportional, RopeSpec, Yarn
from ropewalk.theory import first_negative_distance
from tools.explore_node import ask

LLAMA = RopeSpec(128, pairing="half")
YARN = RopeSpec(64, Yarn(10_000, 8, 4096))
MEANS = (
    "(theta, n) => { const s = Curves.octaveMeans(theta, n); let x; do x = s.next(); while (!x.done); return x.value; }"
)


def drawn(panel, spec, context, b=None, **places):
    """What a panel draws for a state."""
    return drawn_all(panel, [(spec, context, b)], **places)[0]


def drawn_all(panel, cases, **places):
    usual = {"bName": "", "trained": 4096, "position": 100, "distance": 100, "heads": 8, "head": 0, "record": 0}
    states = [
        {**usual, "a": spec.to_json(), "b": b and b.to_json(), "context": context, **places}
        for spec, context, b in cases
    ]
    code = f"""question[1].map((x) => {{
      const state = {{ ...x, a: specs.check(JSON.parse(x.a)), b: x.b && specs.check(JSON.parse(x.b)) }};
      const {{ summary, charts, table }} = panels[question[0]].draw(state, {MEANS});
      return {{ summary, charts, rows: table.rows() }};
    }})"""
    return ask(code, [panel, states])


def test_the_first_negative_score_is_that_of_theory():
    specs = [LLAMA, RopeSpec(128, Plain(500_000)), YARN, RopeSpec(96, Plain(10_000), rotary_dim=96)]
    for spec, panel in zip(specs, drawn_all("score", [(spec, 131_072, None) for spec in specs]), strict=True):
        first = first_negative_distance(spec.inv_freq(), limit=131_073)
        assert first is not None
        assert re.search(rf"The first distance with a negative score is {first:,}[.,]( |$)", panel["summary"])
    assert "No distance up to 1,000 has" in drawn("score", LLAMA, 1000)["summary"]


def test_the_first_wrong_position_is_the_first():
    for angles, words in (("exact", "computes them in float64"), ("float32", "rounds them to float32")):
        said = drawn("precision", RopeSpec(128, angles=angles), 4096)["summary"]
        assert "the error reaches 1 rad at position 257." in said
        assert words in said
    assert "stays below 1 rad up to position 256." in drawn("precision", LLAMA, 256)["summary"]


def test_pairs_that_do_not_rotate_are_not_divided_by_infinity():
    said = drawn("rule", RopeSpec(128, Proportional(factor=8, fraction=0.25)), 4096)["summary"]
    assert "divided by 8; pairs 16–63 do not rotate" in said


@pytest.mark.parametrize("rule", [Explicit(np.array([1.0, 0.5])), AcrossHeads(num_heads=2)])
def test_no_frequencies_are_invented_for_a_rule_that_has_none_without_it(rule):
    spec = RopeSpec(4, rule)
    for panel in ("wavelength", "rule", "compare"):
        result = drawn(panel, spec, 4096)
        assert "has no frequencies without the rule" in result["summary"]
        assert result["rows"]
        assert "without the rule" not in [line["name"] for chart in result["charts"] for line in chart["lines"]]


def test_another_rule_states_what_it_does_not_keep():
    code = "((notes) => [specs.withRule(specs.check(question[0]), question[1], 4096, notes), notes])([])"
    explicit = json.loads(RopeSpec(4, Explicit(np.array([1.0, 0.5]))).to_json())
    spec, notes = ask(code, [explicit, "NTK"])
    assert spec["frequencies"]["base"] == 10_000
    assert notes == ["base: explicit frequencies does not have one; 10000 is used"]
    _, notes = ask(code, [json.loads(YARN.to_json()), "Llama3"])
    assert len(notes) == 1
    assert notes[0].startswith("amplitude: 1.2")
    assert ask(code, [json.loads(YARN.to_json()), "Yarn"])[1] == []


def test_a_place_in_a_picture_names_the_lines_with_a_point_there():
    lines = [
        {"name": "faster", "xs": [0, 1], "ys": [2, 2]},
        {"name": "unchanged", "xs": [2, 3], "ys": [1, 1]},
        {"name": "mean", "xs": [0, 2, 2, 9], "ys": [5, 5, 6, 6], "steps": True},
    ]
    answers = ask("question[1].map((x) => Chart.readings(question[0], x))", [lines, [2.9, 0.2, 100]])
    assert answers[0] == {"value": 3, "readings": [["unchanged", 1], ["mean", 6]]}
    assert answers[1] == {"value": 0, "readings": [["faster", 2], ["mean", 5]]}
    assert answers[2]["value"] == 3


def test_nothing_is_changed_without_a_note():
    code = """question.map(([raw]) => {
      const notes = [];
      specs.check(raw, notes);
      return notes;
    })"""
    plain, ntk = {"rule": "Plain"}, {"rule": "NTK"}
    wrong_sign, small = ask(code, [[{"sign": 0, "frequencies": plain}], [{"head_dim": 2, "frequencies": ntk}]])
    assert wrong_sign == ["sign: 0 is not one of 1, -1; 1 is used"]
    assert small == ["head_dim: 2 was changed to 4, the least for this rule"]


def test_a_verdict_on_decay_needs_means_over_whole_octaves():
    for context in (4096, 4097, 6000):
        assert "means over octaves fall through all" in drawn("decay", LLAMA, context)["summary"]
    said = drawn("decay", LLAMA, 65_536)["summary"]
    assert "first rise after distances 8,192–16,383; the lowest is 4.659, at 8,192–16,383." in said
    assert "too short" in drawn("decay", LLAMA, 40)["summary"]
    still = RopeSpec(4, Explicit(np.zeros(2)))
    assert "are equal through all distances below 4,096." in drawn("decay", still, 4096)["summary"]
    # 1024 pairs: the page computes the means over 2¹⁶ distances, and a larger context does not change that.
    wide = drawn("decay", RopeSpec(2048), 1_048_576)["summary"]
    assert "fall through all distances below 65,536, the farthest that this page computes." in wide
    # Of two specs, the wider one limits both.
    both = drawn("decay", RopeSpec(64), 1_048_576, RopeSpec(2048))
    assert both["rows"][-1][0] == "32,768–65,535"


def test_two_specs_are_equal_in_everything_or_name_what_differs():
    def compared(one, two):
        return drawn("compare", one, 4096, two)["summary"]

    assert "All other fields are equal" in compared(YARN, YARN)
    quick = RopeSpec(64, Yarn(10_000, 8, 4096, beta_fast=16))
    assert "beta_fast 32 and 16" in compared(YARN, quick)
    one, other = (RopeSpec(4, Explicit(np.array([x, 0.1])), rotary_dim=4) for x in (1.0, -1.0))
    assert "1 of 2 pairs has the same frequency" in compared(one, other)
    assert "inv_freq" in compared(one, other)
    short, long = (RopeSpec(4, LongRope(10_000, [1, 1], [1, x], 64)) for x in (2, 64))
    assert "Different: long_factor." in compared(short, long)
    heads = [RopeSpec(64, AcrossHeads(10_000, num_heads=n)) for n in (4, 8)]
    assert "in head 0" in compared(*heads)
    assert "num_heads 4 and 8" in compared(*heads)


def test_a_range_is_that_of_all_its_pairs():
    divisors = [31.07, 53.45, 40.23, 33.14, 36.21]
    spec = RopeSpec(14, LongRope(10_000, [1.0] * 7, [1.0, *divisors, 60.0], 64))
    assert "pairs 1–5 divided by 31.07 to 53.45" in drawn("rule", spec, 4096)["summary"]


def test_a_distance_between_drawn_points_is_called_so():
    assert "negative score is 1,707." in drawn("score", LLAMA, 2047)["summary"]
    far = RopeSpec(128, Plain(500_000))
    assert "negative score is 18,438, between two drawn points." in drawn("score", far, 131_072)["summary"]


def test_two_specs_name_what_differs():
    still = RopeSpec(128, Proportional(fraction=0.25))
    said = drawn("compare", still, 4096, still)["summary"]
    assert said == (
        "64 of 64 pairs have the same frequency. The scores are equal at all drawn distances. "
        "All other fields are equal."
    )
    said = drawn("compare", LLAMA, 4096, RopeSpec(128, Plain(500_000), pairing="half"))["summary"]
    assert said.startswith("1 of 64 pairs has the same frequency.")
    assert said.endswith("Different: base 10,000 and 500,000.")
    assert "B is A without its rule, until you choose" in drawn("compare", YARN, 4096)["summary"]
    with_b = drawn("score", LLAMA, 4096, YARN)
    assert with_b["summary"].startswith("A (plain RoPE): At distance")
    assert with_b["charts"][0]["lines"][0]["name"] == "A: plain RoPE"
    other = RopeSpec(128, still.frequencies, pairing="half", sign=-1)
    assert "Different: pairing interleaved and half; sign 1 and −1." in drawn("compare", still, 4096, other)["summary"]
    deepseek = RopeSpec(64, Yarn(10_000, 8, 4096, policy="deepseek", mscale_all_dim=1.0))
    assert "amplitude 1.20794 and" in drawn("compare", YARN, 4096, deepseek)["summary"]
    assert "softmax scale 1 and 1.459" in drawn("compare", YARN, 4096, deepseek)["summary"]
