"""The JavaScript of the explorer against Python, under Node.js: rules, curves, and the texts that it copies."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ropewalk.errors import RopewalkError
from ropewalk.reference.bias import alibi_slopes, t5_bucket
from ropewalk.spec import NTK, Frequencies, NTKFixed, Proportional, RopeSpec, Yarn
from ropewalk.theory import band_means, classify, decay_curve, plain_inv_freq, score_sum
from ropewalk.tools.explore.presets import PAGE_RULES, describe_rules
from tools.explore_node import ask
from tools.explore_parity import NUMBERS, difference
from tools.explore_specs import random_specs

TESTS = Path(__file__).parents[1]
SPEC = RopeSpec(128, Yarn(1_000_000, 4, 32768), pairing="half")


@pytest.mark.parametrize("count", [1300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_rules_have_the_frequencies_of_python(count):
    # In a process without jaxtyping's checks, with which ten thousand specs take four times as long.
    seed = random.randrange(1 << 32)
    command = [sys.executable, "-m", "tools.explore_parity", str(count), str(seed)]
    result = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True)
    worst = json.loads(result.stdout)
    assert len(worst) == len(PAGE_RULES)
    assert max(worst.values()) <= 1e-14, f"seed {seed}: {worst}"


@pytest.mark.parametrize(
    "mutant",
    [
        "NTKFixed.evaluate = (rule, dim) => Rules.plain(NaN, dim)",
        "NTKFixed.amplitude = () => NaN",
        "NTKFixed.evaluate = (rule, dim) => Rules.plain(rule.base, dim)",
    ],
)
def test_a_wrong_rule_is_noticed(mutant):
    spec = RopeSpec(8, NTKFixed(factor=4))
    (answer,) = ask(f"(Rules.known.{mutant}, question.map((x) => {NUMBERS}(x, null)))", [json.loads(spec.to_json())])
    try:
        worst = difference(spec, None, answer)
    except AssertionError:
        return
    assert worst > 1e-14


def test_the_page_computes_every_rule_of_the_library():
    ours = {name for name, rule in Frequencies.known.items() if rule.__module__.startswith("ropewalk.spec.")}
    assert ours == set(PAGE_RULES) == set(describe_rules())
    assert set(ask("Object.keys(Rules.known)")) == ours
    varying = {name for name in ours if Frequencies.known[name].varies}
    assert set(ask("Object.keys(Rules.known).filter((name) => Rules.known[name].varies)")) == varying


def test_what_a_rule_does_to_pairs_is_that_of_theory():
    specs = [SPEC, RopeSpec(8, Proportional(fraction=0.5)), RopeSpec(64, NTK(factor=8)), RopeSpec(64)]
    pairs = [(spec.inv_freq(), plain_inv_freq(spec)) for spec in specs]
    kinds = ask("question.map((x) => Curves.classify(...x))", [[a.tolist(), b.tolist()] for a, b in pairs])
    assert kinds == [classify(*both) for both in pairs]


def test_curves_are_those_of_theory():
    theta = SPEC.inv_freq()
    gaps = ask("Curves.distances(131072, 2048)")
    assert gaps[0] == 0
    assert gaps[-1] == 131072
    assert gaps == sorted(set(map(int, gaps)))
    assert 1000 < len(gaps) <= 2048
    score, decay = ask(
        "[Curves.scoreSum, Curves.decayCurve].map((f) => f(question, Curves.distances(131072, 2048)))", theta.tolist()
    )
    tolerance = 1e-12 * (1 + np.array(gaps) * theta.max())
    assert (np.abs(score - score_sum(gaps, theta)) <= tolerance).all()
    assert (np.abs(decay - decay_curve(gaps, theta)) <= tolerance).all()


def test_means_over_octaves_are_those_of_theory():
    theta = RopeSpec(64).inv_freq()
    run = "(steps) => { let x; do x = steps.next(); while (!x.done); return x.value; }"
    bands = ask(f"({run})(Curves.octaveMeans(Float64Array.from(question), 9000))", theta.tolist())
    edges = [*(band["low"] for band in bands), 9000]
    assert edges == [1, 32, 64, 128, 256, 512, 1024, 2048, 4096, 9000]
    means = [band["mean"] for band in bands]
    assert means == pytest.approx(band_means(decay_curve(np.arange(9000), theta), edges).tolist(), rel=1e-12)


def test_biases_are_those_of_the_reference():
    counts = (1, 2, 3, 8, 12, 64)
    for count, slopes in zip(counts, ask("question.map(Curves.alibiSlopes)", counts), strict=True):
        assert slopes == pytest.approx(alibi_slopes(count).tolist(), rel=1e-15)
    shapes = [[32, 128], [32, 20], [5, 7], [4, 1000]]
    code = "question.map(([b, f]) => Array.from({length: 300}, (_, d) => Curves.t5Bucket(Curves.t5Starts(b, f), d)))"
    for (buckets, farthest), got in zip(shapes, ask(code, shapes), strict=True):
        relative = -torch.arange(300)
        expected = t5_bucket(relative, causal=True, num_buckets=buckets, max_distance=farthest)
        assert got == expected.tolist()


def test_errors_of_angles_are_those_of_the_dtypes():
    theta = SPEC.inv_freq()
    positions = [1, 255, 257, 4096, 131071, 5_000_001]
    answer = ask(
        "['float32', 'bfloat16'].map((x) => Curves.angleError(...question, Curves[x]))", [theta.tolist(), positions]
    )
    exact = np.outer(positions, theta)
    for dtype, got in zip((torch.float32, torch.bfloat16), answer, strict=True):
        m, t = torch.tensor(positions, dtype=torch.float64), torch.as_tensor(theta)
        # In float32 steps, as a GPU rounds: the product of two rounded numbers, rounded once.
        product = (m.float().to(dtype).double()[:, None] * t.float().to(dtype).double()).float().to(dtype).double()
        expected = np.abs(product.numpy() - exact).max(axis=1)
        assert got == pytest.approx(expected.tolist(), abs=0, rel=1e-12)


def test_copied_texts_make_the_same_spec():
    specs = random_specs(130, random.randrange(1 << 32))
    sent = [json.loads(spec.to_json()) for spec in specs]
    code = """question.map((raw) => {
      const spec = specs.check(raw);
      let config = null;
      try { config = specs.asConfig(spec); } catch (error) { if (!(error instanceof RangeError)) throw error; }
      return [specs.asCode(spec), specs.asJson(spec), config];
    })"""
    for spec, (program, text, config) in zip(specs, ask(code, sent), strict=True):
        names: dict[str, object] = {}
        exec(program, names)
        assert names["spec"] == spec
        assert RopeSpec.from_json(text) == spec
        try:
            expected = spec.to_config("transformers")
        except RopewalkError:
            assert config is None
        else:
            assert_same_config(json.loads(config), json.loads(json.dumps(expected)))


def assert_same_config(got, expected):
    assert got.keys() == expected.keys()
    assert got.get("max_position_embeddings") == expected.get("max_position_embeddings")
    got, expected = got["rope_parameters"], expected["rope_parameters"]
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        # A base or an amplitude that was computed differs in its last bits.
        assert got[key] == (pytest.approx(value, rel=1e-14) if isinstance(value, float) else value)


def test_a_link_has_every_spec_in_full():
    specs = random_specs(130, random.randrange(1 << 32))
    code = """question.map((raw) => {
      const a = specs.check(raw);
      const state = {
        panel: 'decay', preset: 'x & y', from: 'x & y', a, b: a, bName: '<b>',
        trained: 9, context: 99, position: 1, distance: 2, heads: 3, head: 0, record: 0,
      };
      const [read, notes] = specs.read(specs.write(state), ['rotation', 'decay']);
      return [read, state, notes];
    })"""
    answers = ask(code, [json.loads(spec.to_json()) for spec in specs])
    for read, state, notes in answers:
        assert read == state
        assert notes == []


HOSTILE = [
    "",
    "rule=<script>alert(1)</script>&base=<img src=x onerror=alert(1)>",
    "panel=__proto__&rule=constructor&b.rule=toString",
    "rule=Yarn&factor=NaN&trained_length=1e18&base=-Infinity&head_dim=1e99&rotary_dim=7&context=Infinity&position=-5",
    "rule=Explicit&inv_freq=1,2,x&head_dim=4",
    "rule=Explicit&inv_freq=" + "1," * 5000 + "1",
    "rule=LongRope&short_factor=1,1&long_factor=1",
    "rule=LongRope&short_factor=1;2&long_factor=1;2",
    "rule=Explicit&inv_freq=1,2;3&head_dim=4",
    "rule=Yarn&truncate=maybe&ramp=up&policy=mine&beta_fast=1&beta_slow=2&__proto__=1",
    "rule=NTK&head_dim=2&factor=0",
    "rule=AcrossHeads&num_heads=1e9&head_dim=2048",
    "rule=LongRope&short_amplitude=1&short_factor=1&long_factor=2&head_dim=2",
    "%E0%A4%A&rule=%",
    "rule=Plain&" + "x" * 300_000,
]


def test_a_hostile_link_becomes_a_valid_state_or_none():
    code = """question.map((text) => {
      const [state, notes] = specs.read(text, ['rotation', 'decay']);
      if (!state) return [null, notes];
      for (const spec of [state.a, state.b]) {
        if (spec) [Rules.invFreq(spec, state.context)].flat().forEach((row) => {
          if (!row.every(Number.isFinite)) throw new Error(text);
        });
      }
      return [state, notes];
    })"""
    answers = ask(code, HOSTILE)
    for text, (state, notes) in zip(HOSTILE, answers, strict=True):
        if state is None:
            assert len(text) in (0, len(HOSTILE[-1])) or "%" in text
            continue
        assert notes, text
        assert state["panel"] == "rotation"
        assert 2 <= state["context"] <= 1 << 40
        for spec in (state["a"], state["b"]):
            if spec is not None:
                RopeSpec.from_json(json.dumps(spec))
    said = " ".join(answers[3][1])
    assert all(name in said for name in ("factor", "trained_length", "base", "head_dim", "context", "position"))
