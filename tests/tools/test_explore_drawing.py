"""Where the explorer draws what it computes, in a browser: pixels against the labels of the axes, and the controls."""

from itertools import pairwise

import numpy as np
import pytest

from ropewalk.spec import RopeSpec, Yarn
from ropewalk.theory import band_means, bands, decay_curve, periods, plain_inv_freq, score_sum
from ropewalk.tools.explore.page import page_data, page_html
from tools.explore_browser import Visit, browser, wait_until_drawn

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("explorer")]

# The pixels of all that a chart draws, and the number on each label of an axis with the pixel of its line.
CHART = """() => {
  const svg = document.querySelector("#picture .frame svg");
  const at = (element, x, y) => {
    const { x: u, y: v } = new DOMPoint(x, y).matrixTransform(element.getScreenCTM());
    return [u, v];
  };
  const number = (name, element) => Number(element.getAttribute(name));
  const ends = (line) => ["1", "2"].map((i) => at(line, number(`x${i}`, line), number(`y${i}`, line)));
  const ticks = [...svg.querySelectorAll("line.grid")].map((line) => {
    const box = line.nextElementSibling.getBoundingClientRect();
    return {
      value: Number(line.nextElementSibling.textContent.replaceAll(",", "").replace("−", "-")),
      ends: ends(line), label: [box.x + box.width / 2, box.y + box.height / 2],
    };
  });
  const points = (path) => path.getAttribute("d").slice(1).split(/[ML]/).map((x) => at(path, ...x.split(" ")));
  return {
    ticks,
    dots: [...svg.querySelectorAll("circle")].map((dot) => at(dot, number("cx", dot), number("cy", dot))),
    paths: [...svg.querySelectorAll("path.line")].map(points),
    marks: [...svg.querySelectorAll("line.mark")].map(ends),
    areas: [...svg.querySelectorAll("rect.area")].map((area) => {
      const x = number("x", area);
      return [at(area, x, 0)[0], at(area, x + number("width", area), 0)[0]];
    }),
  };
}"""
# The vector, its tip, and the start, the middle and the end of its trail, per circle.
CIRCLES = """() => [...document.querySelectorAll("#picture figure svg")].map((box) => {
  const [vector, tip, trail] = ["vector", "tip", "trail"].map((name) => box.querySelector(`.${name}`));
  const along = (share) => trail.getPointAtLength(share * trail.getTotalLength());
  const numbers = (element, ...names) => names.map((name) => Number(element.getAttribute(name)));
  return [numbers(vector, "x2", "y2"), numbers(tip, "cx", "cy"), ...[0, 0.5, 1].map(along).map(({ x, y }) => [x, y])];
})"""


@pytest.fixture(scope="module")
def chromium():
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("drawing") / "page.html"
    file.write_text(page_html(page_data()), encoding="utf-8")
    return file


@pytest.fixture
def visit(chromium, page_file):
    context = chromium.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
    visit = Visit(context, page_file)
    yield visit
    context.close()
    assert visit.complaints == []


def fill(page, name, value):
    page.locator(f"#{name}").fill(str(value))
    page.locator(f"#{name}").press("Tab")
    wait_until_drawn(page)


def press(page, name):
    page.locator(f"#{name}").press("ArrowRight")
    wait_until_drawn(page)


def axes(chart, log_x, log_y):
    """What gives the pixel of a value on each axis, from the first and the last label of the axis."""
    scales = []
    for axis, log in ((0, log_x), (1, log_y)):
        # The lines across an axis have the same pixel of it at both ends.
        ticks = [x for x in chart["ticks"] if x["ends"][0][axis] == x["ends"][1][axis]]
        assert len(ticks) >= 3
        for tick in ticks:
            assert abs(tick["label"][axis] - tick["ends"][0][axis]) < 3
        f = np.log if log else np.asarray
        (low, high), (start, end) = zip(
            *((f(x["value"]), x["ends"][0][axis]) for x in (ticks[0], ticks[-1])), strict=True
        )
        # Numbers grow to the right and upwards.
        assert (end - start) * (1, -1)[axis] * (high - low) > 100
        scales.append(lambda x, f=f, a=low, b=high, u=start, v=end: u + (f(x) - a) / (b - a) * (v - u))
    return scales


def test_dots_and_marks_are_where_the_labels_say(visit):
    page = visit.open("panel=wavelength&rule=Plain&head_dim=64&context=9000&trained=300")
    chart = page.evaluate(CHART)
    x, y = axes(chart, log_x=False, log_y=True)
    waves = periods(RopeSpec(64).inv_freq())
    np.testing.assert_allclose(chart["dots"], np.transpose([x(np.arange(32)), y(waves)]), atol=0.05)
    for length, mark in zip((300, 9000), chart["marks"], strict=True):
        np.testing.assert_allclose([end[1] for end in mark], y(length), atol=0.05)


def test_a_curve_is_where_the_labels_say(visit):
    page = visit.open("panel=score&rule=Plain&head_dim=64&context=300&distance=30")
    chart = page.evaluate(CHART)
    x, y = axes(chart, log_x=True, log_y=False)
    gaps = np.arange(1, 301)
    curve = np.transpose([x(gaps), y(score_sum(gaps, RopeSpec(64).inv_freq()) / 32)])
    # The places in a path are rounded to a tenth.
    np.testing.assert_allclose(chart["paths"], [curve], atol=0.1)
    np.testing.assert_allclose([end[0] for end in chart["marks"][0]], x(30), atol=0.05)


def test_the_areas_of_a_rule_are_where_its_pairs_are(visit):
    page = visit.open("panel=rule&rule=Yarn&head_dim=64&factor=8&trained_length=4096")
    chart = page.evaluate(CHART)
    x, _ = axes(chart, log_x=False, log_y=True)
    spec = RopeSpec(64, Yarn(10_000, 8, 4096))
    runs = bands(spec.inv_freq(), plain_inv_freq(spec))
    edges = [[x(run.first - 0.5), x(run.last + 0.5)] for run in runs]
    np.testing.assert_allclose(chart["areas"], edges, atol=0.05)


@pytest.mark.parametrize(("sign", "amplitude"), [(1, 1), (-1, 2), (1, 0.5)])
def test_vectors_rotate_counter_clockwise_with_a_trail_behind(visit, sign, amplitude):
    rule = f"rule=Yarn&factor=1&policy=vllm&attention_factor={amplitude}"
    page = visit.open(f"panel=rotation&{rule}&head_dim=8&sign={sign}&position=13")
    circles = np.array(page.evaluate(CIRCLES))
    theta = sign * np.array([1, 0.1, 0.01, 0.001])
    radius = 38 * min(amplitude, 1)
    # The trail has the last six positions, less than a rotation. The y of a screen points down.
    behind = theta * np.minimum(6, 1.9 * np.pi / np.abs(theta))
    for name, column, share in (("vector", 0, 0), ("tip", 1, 0), ("start", 2, 1), ("middle", 3, 0.5), ("end", 4, 0)):
        angle = 13 * theta - share * behind
        expected = radius * np.transpose([np.cos(angle), -np.sin(angle)])
        np.testing.assert_allclose(circles[:, column], expected, atol=0.02, err_msg=name)


def test_the_theme_and_reset_do_what_they_say(visit):
    page = visit.open()
    first, colours = page.evaluate("explorer.state()"), []
    for _ in range(3):
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.click("#theme")
    assert colours[0] == colours[2] != colours[1]
    page.click("#pin")
    fill(page, "heads", 3)
    page.click("#tab-score")
    page.click("#reset")
    wait_until_drawn(page)
    assert page.evaluate("explorer.state()") == first
    assert first["b"] is None
    assert page.locator("#compare").input_value() == "none"


def test_sliders_move_the_open_table_and_say_their_values(visit):
    page = visit.open("panel=rotation&rule=Yarn&head_dim=8&context=2048&position=12&trained_length=512&heads=9")
    page.locator("#numbers").evaluate("x => x.open = true")
    for position in (12, 13, 14):
        row = page.locator("#table tbody tr").first
        row.locator("td").nth(2).get_by_text(str(position), exact=True).wait_for()
        press(page, "position-slider")
    sliders = page.locator("input[type=range]").evaluate_all("all => all.map((x) => x.id)")
    assert len(sliders) >= 8
    for slider in sliders:
        press(page, slider)
        said = page.locator(f"#{slider}").get_attribute("aria-valuetext").replace(",", "")
        assert float(said) == float(page.locator(f"#{slider.removesuffix('-slider')}").input_value()), slider


def test_means_over_octaves_follow_the_context(visit):
    page = visit.open("panel=decay&rule=Plain&head_dim=16&context=300")
    page.locator("#numbers").evaluate("x => x.open = true")
    theta = RopeSpec(16).inv_freq()
    for context in (300, 700, 300):
        fill(page, "context", context)
        edges = [x for x in (1, 32, 64, 128, 256, 512) if 1.5 * x <= context] + [context]
        rows = page.locator("#table tbody tr").evaluate_all(
            "all => all.map((x) => [...x.children].map((y) => y.textContent))"
        )
        assert [row[0] for row in rows] == [f"{low}–{high - 1}" for low, high in pairwise(edges)]
        means = band_means(decay_curve(np.arange(context), theta), edges)
        assert [float(row[1]) for row in rows] == pytest.approx(means.tolist(), rel=1e-5)
