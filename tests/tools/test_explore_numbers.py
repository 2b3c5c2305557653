"""What the explorer's panels draw and say, under Node.js: every curve, mark, area, table and number against Python."""

import dataclasses
import re
from itertools import pairwise

import numpy as np
import torch

from ropewalk.reference import alibi_slopes, rotate_by_spec, t5_bucket
from ropewalk.spec import AcrossHeads, Explicit, Llama3, Plain, Proportional, RopeSpec, Yarn
from ropewalk.theory import band_means, bands, decay_curve, periods, plain_inv_freq, score_sum
from tools.explore_node import ask

YARN = RopeSpec(64, Yarn(10_000, 8, 4096))
LLAMA = RopeSpec(128, Llama3(), pairing="half")
# A spec, a context and B.
CASES = [
    (RopeSpec(128, pairing="half"), 300, None),
    (YARN, 9000, LLAMA),
    (RopeSpec(64, Yarn(10_000, 8, 4096, policy="deepseek", mscale_all_dim=1.0)), 20_000, None),
    (LLAMA, 20_000, YARN),
    (RopeSpec(32, rotary_dim=24, pairing="half", rotary_slice="trailing"), 500, None),
    (RopeSpec(32, rotary_dim=24), 500, None),
    (RopeSpec(8, AcrossHeads(num_heads=3)), 2000, None),
    (RopeSpec(16, Proportional(factor=2, fraction=0.5), sign=-1), 700, None),
    (RopeSpec(16, Plain(500), sign=-1, angles="float32"), 700, None),
]
POSITION, DISTANCE, TRAINED, HEADS, HEAD = 100, 37, 1000, 12, 1
PLACES = {"position": POSITION, "distance": DISTANCE, "trained": TRAINED, "heads": HEADS, "head": HEAD, "record": 1}
MEANS = "(...x) => { const s = Curves.octaveMeans(...x); let y; do y = s.next(); while (!y.done); return y.value; }"
LEARNED = {"name": "t5", "num_buckets": 16, "max_distance": 50, "heads": [[b * h for b in range(16)] for h in range(4)]}
CURVES = [
    {"title": "first", "verdicts": "", "note": "", "x": "step", "y": "loss", "log": False, "lines": []},
    {"title": "second", "verdicts": "Yes.", "note": "Measured.", "x": "length", "y": "loss", "log": True, "lines": [
        {"name": "one", "xs": [64, 256], "ys": [1.5, 2.5]}, {"name": "two", "xs": [128], "ys": [3.5]},
    ]},
]  # fmt: skip


def drawn(panel, cases=CASES, biases=(), lab=()):
    """Each case, and what a panel draws for it."""
    states = [
        {"preset": "", "bName": "", **PLACES, "a": spec.to_json(), "b": b and b.to_json(), "context": context}
        for spec, context, b in cases
    ]
    code = f"""((panels) => question[1].map((x) => {{
      const state = {{ ...x, a: specs.check(JSON.parse(x.a)), b: x.b && specs.check(JSON.parse(x.b)) }};
      const {{ table, ...rest }} = panels[question[0]].draw(state, {MEANS});
      return {{ ...rest, rows: table.rows() }};
    }}))(makePanels(specs, {{ rules: schema, presets: [], biases: question[2], lab: question[3] }}))"""
    return zip(cases, ask(code, [panel, states, biases, lab]), strict=True)


def of_head(spec):
    """The spec of the head that is shown."""
    return dataclasses.replace(spec, frequencies=Explicit(spec.inv_freq()[HEAD])) if spec.inv_freq().ndim == 2 else spec


def shown_specs(spec, b):
    return [of_head(spec)] if b is None else [of_head(spec), b]


def score(spec, context, gaps):
    sums = 2 * spec.amplitude(context) ** 2 * score_sum(gaps, spec.inv_freq(context))
    return (sums + spec.head_dim - spec.rotated_dim) * spec.softmax_scale / spec.head_dim


def close(got, expected, scale=0.0):
    """Equal up to rounding. JSON has null for what is not finite."""
    got, expected = np.array(got, dtype=np.float64), np.array(expected, dtype=np.float64)
    expected[~np.isfinite(expected)] = np.nan
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12 * scale)


def says(summary, *expected):
    """The numbers of a sentence, in their order."""
    text = summary.replace("Llama 3", "").replace(" × 10⁻", "e-").replace("10⁻", "1e-").replace("−", "-")
    text = text.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789"))
    found = re.findall(r"(?<![\w.])(?:∞|-?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?)", text)
    numbers = [float(x.replace(",", "").replace("∞", "inf")) for x in found]
    assert len(numbers) == len(expected), summary
    for x, number, value in zip(found, numbers, expected, strict=True):
        # Four digits, or three with a power of ten.
        assert number == value or abs(number - value) <= (6e-3 if "e" in x else 6e-4) * abs(value), (summary, value)


def over_distance(chart, context):
    """The distances of a chart, whose lines share them, with its mark."""
    xs = np.array(chart["lines"][0]["xs"])
    assert xs[0] == 0
    assert xs[-1] == context
    assert (np.diff(xs) > 0).all()
    assert len(xs) == context + 1 or context > len(xs) > 1000
    assert [mark["x"] for mark in chart["marks"]] == [DISTANCE]
    says(chart["marks"][0]["label"], DISTANCE)
    return xs


def rows_of_lines(rows, lines):
    """A table has some of the points of the lines, the first and the last among them."""
    at = [lines[0]["xs"].index(row[0]) for row in rows]
    assert [at[0], at[-1]] == [0, len(lines[0]["xs"]) - 1]
    assert [row[1:] for row in rows] == [[line["ys"][i] for line in lines] for i in at]


def test_rotation():
    for (spec, context, _), panel in drawn("rotation"):
        one = of_head(spec)
        theta, pairs = one.inv_freq(context), one.rotated_dim // 2
        # Row f is what the rotation makes of feature f.
        features = torch.eye(spec.head_dim, dtype=torch.float64)[:, None]
        matrix = rotate_by_spec(features, one, torch.tensor([POSITION]), length=context)[:, 0]
        used = [[int(x) for x in row[1].split(", ")] for row in panel["rows"]]
        first = spec.head_dim - spec.rotated_dim if spec.rotary_slice == "trailing" else 0
        assert sorted(x for pair in used for x in pair) == list(range(first, first + spec.rotated_dim))
        angles = POSITION * theta
        cos, sin = ([float(matrix[f, (f, g)[k]]) for f, g in used] for k in (0, 1))
        columns = [np.arange(pairs), theta, angles, angles / (2 * np.pi), cos, sin]
        close([[row[0], *row[2:]] for row in panel["rows"]], np.transpose(columns), scale=POSITION)
        chosen = [circle["pair"] for circle in panel["circles"]]
        assert chosen == sorted(set(chosen))
        assert [len(chosen), chosen[0], chosen[-1]] == [min(pairs, 24), 0, pairs - 1]
        assert [circle["features"] for circle in panel["circles"]] == [used[i] for i in chosen]
        close(
            [[circle["angle"], circle["theta"]] for circle in panel["circles"]], [[angles[i], theta[i]] for i in chosen]
        )
        amplitude = spec.amplitude(context)
        close(panel["length"], amplitude)
        completed = (periods(theta) <= POSITION).sum()
        ends = (0, abs(theta[0]), pairs - 1, abs(theta[-1]))
        says(panel["summary"], POSITION, completed, pairs, *ends, *([] if amplitude == 1 else [amplitude]))


def test_wavelengths():
    for (spec, context, b), panel in drawn("wavelength"):
        waves = [periods(x.inv_freq(context)) for x in shown_specs(spec, b)]
        trained = getattr(spec.frequencies, "trained_length", TRAINED)
        plain = None if isinstance(spec.frequencies, Plain | AcrossHeads) else periods(plain_inv_freq(spec))
        (chart,) = panel["charts"]
        expected = waves if plain is None else [plain, *waves]
        for line, ys in zip(chart["lines"], expected, strict=True):
            close(line["xs"], np.arange(len(ys)))
            close(line["ys"], ys)
        assert [mark["y"] for mark in chart["marks"]] == [trained, context]
        for mark in chart["marks"]:
            says(mark["label"], mark["y"])
        a = waves[0]
        columns = [np.arange(len(a)), of_head(spec).inv_freq(context), a, trained / a, context / a]
        if b is not None:
            columns.append(np.append(waves[1], np.full(len(a), np.nan))[: len(a)])
        close(panel["rows"], np.transpose(columns))
        old, now = ((a if plain is None else plain) <= trained).sum(), (a <= context).sum()
        says(panel["summary"], trained, old, len(a), context, now, len(a), a.max())


def test_what_the_rule_changes():
    for (spec, context, _), panel in drawn("rule"):
        theta, amplitude = of_head(spec).inv_freq(context), spec.amplitude(context)
        (chart,) = panel["charts"]
        if isinstance(spec.frequencies, AcrossHeads):
            close(chart["lines"][0]["ys"], theta)
            close(panel["rows"], np.transpose([np.arange(len(theta)), theta]))
            says(panel["summary"], amplitude)
            continue
        plain = plain_inv_freq(spec)
        ratio, runs = theta / plain, bands(theta, plain)
        kinds = [f"k-{run.kind}" for run in runs for _ in range(run.first, run.last + 1)]
        points = sorted(
            (x, y, line["colour"]) for line in chart["lines"] for x, y in zip(line["xs"], line["ys"], strict=True)
        )
        assert [(x, kind) for x, _, kind in points] == list(enumerate(kinds))
        close([y for _, y, _ in points], ratio)
        areas = [{"from": run.first - 0.5, "to": run.last + 0.5, "kind": f"k-{run.kind}"} for run in runs]
        assert chart["areas"] == areas
        # The page shows frequencies without the rule without the sign.
        close(
            np.abs([row[:4] for row in panel["rows"]]),
            np.abs(np.transpose([np.arange(len(theta)), plain, theta, ratio])),
        )
        said = [context]
        for run in runs:
            said += [run.first] if run.first == run.last else [run.first, run.last]
            if run.kind == "between":
                inside = ratio[run.first : run.last + 1]
                said += [1 / inside.max(), 1 / inside.min()]
            elif run.kind == "interpolated":
                said.append(1 / ratio[run.first])
        said += [amplitude, *([] if spec.softmax_scale == 1 else [spec.softmax_scale])]
        # YaRN's ramp runs between the pairs with 32 and with 1 rotations, rounded outwards.
        ramp = theta.size * np.log(4096 / (2 * np.pi * np.array([32, 1]))) / np.log(10_000)
        said += [np.floor(ramp[0]), np.ceil(ramp[1])] if isinstance(spec.frequencies, Yarn) else []
        says(panel["summary"], *said)


def test_decay_bound():
    for (spec, context, b), panel in drawn("decay"):
        thetas = [x.inv_freq(context) for x in shown_specs(spec, b)]
        (chart,) = panel["charts"]
        xs = over_distance(chart, context)
        curves, octaves = chart["lines"][: len(thetas)], chart["lines"][len(thetas) :]
        edges = [*octaves[0]["xs"][::2], context]
        assert edges[:2] == [1, 32]
        means = [band_means(decay_curve(np.arange(context), theta), edges) for theta in thetas]
        for theta, line, steps, of_steps in zip(thetas, curves, octaves, means, strict=True):
            close(line["ys"], decay_curve(xs, theta), scale=context)
            assert steps["xs"] == [x for low, high in pairwise(edges) for x in (low, high)]
            close(steps["ys"], np.repeat(of_steps, 2), scale=1)
        close([row[1:] for row in panel["rows"]], np.transpose(means), scale=1)
        for row, (low, high) in zip(panel["rows"], pairwise(edges), strict=True):
            says(row[0], low, high - 1)
        rises, lowest = np.flatnonzero(np.diff(means[0]) > 0), int(means[0].argmin())
        where = [context]
        if len(rises):
            where = [edges[rises[0]], edges[rises[0] + 1] - 1, means[0].min(), edges[lowest], edges[lowest + 1] - 1]
        says(panel["summary"], *where, DISTANCE, *(decay_curve(DISTANCE, theta) for theta in thetas))


def test_constant_query():
    for (spec, context, b), panel in drawn("score"):
        (chart,) = panel["charts"]
        xs, both = over_distance(chart, context), shown_specs(spec, b)
        for one, line in zip(both, chart["lines"], strict=True):
            close(line["ys"], score(one, context, xs), scale=context)
        rows_of_lines(panel["rows"], chart["lines"])
        negative = np.flatnonzero(score(both[0], context, np.arange(context + 1)) < 0)
        first = negative[0] if len(negative) else context
        assert ("No distance" in panel["summary"]) == (len(negative) == 0)
        says(panel["summary"], DISTANCE, *(score(one, context, DISTANCE) for one in both), first)


def test_alibi_and_t5():
    for learned in ([], [LEARNED]):
        for (_, context, _), panel in drawn("bias", [CASES[0], CASES[2]], biases=learned):
            alibi, t5 = panel["charts"]
            xs = over_distance(alibi, context)
            assert (over_distance(t5, context) == xs).all()
            slopes = alibi_slopes(HEADS).numpy()[[0, 5, 11]]
            for slope, line in zip(slopes, alibi["lines"], strict=True):
                close(line["ys"], -slope * xs)
            lengths = {"num_buckets": 16, "max_distance": 50} if learned else {"num_buckets": 32, "max_distance": 128}
            buckets = t5_bucket(-torch.tensor(xs).long(), causal=True, **lengths).numpy()
            numbers = np.array(LEARNED["heads"][:3])[:, buckets] if learned else [buckets]
            assert [line["ys"] for line in t5["lines"]] == np.array(numbers).tolist()
            for x, *values in panel["rows"]:
                i = int(np.flatnonzero(xs == x)[0])
                close(values, [*(-slopes * x), buckets[i], *([row[i] for row in numbers] if learned else [])])
            added = [y for head, slope in zip((1, 6, 12), slopes, strict=True) for y in (head, -slope * DISTANCE)]
            bucket = buckets[int(np.flatnonzero(xs == DISTANCE)[0])]
            factor = np.exp(-slopes[-1] * DISTANCE)
            drawn_heads = [3, 4] if learned else []
            says(panel["summary"], DISTANCE, HEADS, *added, 12, factor, bucket, lengths["num_buckets"], *drawn_heads)


def test_two_specs():
    cases = [case for case in CASES if not isinstance(case[0].frequencies, AcrossHeads)]
    for (spec, context, b), panel in drawn("compare", cases):
        other = b or dataclasses.replace(spec, frequencies=Plain(spec.frequencies.base))
        one, two = (x.inv_freq(context)[: min(spec.rotated_dim, other.rotated_dim) // 2] for x in (spec, other))
        ratios, scores = panel["charts"]
        close(ratios["lines"][0]["xs"], np.arange(len(one)))
        close(ratios["lines"][0]["ys"], np.abs(one / two))
        close(panel["rows"], np.transpose([np.arange(len(one)), one, two, np.abs(one / two), one - two]), scale=1)
        xs = over_distance(scores, context)
        a, of_b = score(spec, context, xs), score(other, context, xs)
        for line, ys in zip(scores["lines"], (a, of_b, a - of_b), strict=True):
            close(line["ys"], ys, scale=context)
        sentences = panel["summary"].split(" Different:")[0].replace("All other fields are equal.", "")
        said = [np.isclose(one, two, rtol=1e-9, atol=0).sum(), len(one)]
        if spec.rotated_dim != other.rotated_dim:
            said += [spec.rotated_dim // 2, other.rotated_dim // 2, len(one)]
        widest = np.abs(a - of_b).argmax()
        says(sentences, *said, *([] if (a == of_b).all() else [xs[widest], (a - of_b)[widest]]))


def test_precision():
    for (spec, context, _), panel in drawn("precision"):
        theta = torch.as_tensor(of_head(spec).inv_freq(context))

        def error(m, dtype, theta=theta):
            m = torch.as_tensor(m, dtype=torch.float64)[:, None]
            product = m.float().to(dtype).double() * theta.float().to(dtype).double()
            return (product.float().to(dtype).double() - m * theta).abs().amax(1).numpy()

        (chart,) = panel["charts"]
        xs = np.array(chart["lines"][0]["xs"])
        assert [xs[0], xs[-1]] == [1, context]
        for line, dtype in zip(chart["lines"], (torch.float32, torch.bfloat16), strict=True):
            close(line["ys"], error(xs, dtype), scale=context)
        rows_of_lines(panel["rows"], chart["lines"])
        assert [(mark.get("x"), mark.get("y")) for mark in chart["marks"]] == [(None, 1), (POSITION, None)]
        wrong = np.flatnonzero(error(np.arange(1, context + 1), torch.bfloat16) >= 1)
        at_position = [error([POSITION], dtype)[0] for dtype in (torch.float32, torch.bfloat16)]
        said = re.sub(r"b?float\d\d", "", panel["summary"])
        says(said, POSITION, *at_position, 1, wrong[0] + 1 if len(wrong) else context)


def test_lab():
    ((_, panel),) = drawn("lab", CASES[:1], lab=CURVES)
    lines = panel["charts"][0]["lines"]
    assert [{name: line[name] for name in ("name", "xs", "ys")} for line in lines] == CURVES[1]["lines"]
    assert panel["rows"] == [[64, 1.5, None], [128, None, 3.5], [256, 2.5, None]]
    assert panel["summary"] == "Yes. Measured."
