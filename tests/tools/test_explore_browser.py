"""The explorer in a browser: what a person does with it. One browser for all tests; a missing one is an error."""

import json
import random
import re
import shutil

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe

from ropewalk.hub.bundled import bundled_names
from ropewalk.spec import Llama3, Plain, RopeSpec
from ropewalk.theory import decay_curve, score_sum
from ropewalk.tools.explore.page import page_data, page_html
from ropewalk.tools.explore.presets import Preset
from tools.explore_browser import Visit, browser, wait_until_drawn
from tools.explore_parity import LENGTHS, NUMBERS, difference
from tools.explore_specs import random_specs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("explorer")]

# Typed arrays are no JSON.
LISTS = "(key, value) => (ArrayBuffer.isView(value) ? Array.from(value) : value)"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"'&lt; \u202e $&"
PANELS = ("rotation", "wavelength", "rule", "decay", "score", "bias", "compare", "precision", "lab")
CURVE = {
    "title": "length: loss by length",
    "verdicts": "Which one?",
    "note": HOSTILE,
    "x": "length",
    "y": "loss [nats]",
    "log": True,
    "lines": [{"name": name, "xs": [64, 128], "ys": [1.5, y]} for name, y in (("rope", 2.5), (HOSTILE, 1.25))],
}
BIAS = {"name": "t5", "num_buckets": 32, "max_distance": 128, "heads": [[-0.25 * b for b in range(32)]]}


@pytest.fixture(scope="module")
def chromium():
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    preset = Preset(HOSTILE, RopeSpec(64, Llama3(), pairing="half"), 8192, 10**18, (HOSTILE,), ("no xPos",))
    data = page_data([preset], [BIAS])
    data["first"] = next(i for i, preset in enumerate(data["presets"]) if preset["name"] == "llama-3.1-8b")
    file = tmp_path_factory.mktemp("explorer") / "page.html"
    file.write_text(page_html({**data, "lab": [CURVE, {**CURVE, "title": "second"}]}), encoding="utf-8")
    return file


@pytest.fixture
def visit(chromium, page_file):
    context = chromium.new_context(
        viewport={"width": 1400, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    visit = Visit(context, page_file)
    yield visit
    context.close()
    assert visit.complaints == []


def test_a_missing_browser_is_an_error(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="apt-get install chromium"), browser():
        pass


def state(page):
    return page.evaluate("explorer.state()")


def fill(page, name, value):
    """Type a value into a field and leave it."""
    page.locator(f"[id='{name}']").fill(str(value))
    page.locator(f"[id='{name}']").press("Tab")
    wait_until_drawn(page)


def summary(page, panel):
    page.click(f"#tab-{panel}")
    wait_until_drawn(page)
    return page.locator("#summary").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_panel_has_an_accessibility_violation(chromium, page_file, scheme):
    context = chromium.new_context(viewport={"width": 1400, "height": 900}, color_scheme=scheme)
    visit = Visit(context, page_file)
    page = visit.open()
    # Both specs, all fields and every table are visible.
    page.select_option("#rule", "Yarn")
    page.locator("details:has(#policy)").evaluate("x => x.open = true")
    page.select_option("#compare", "unscaled")
    for details in ("#numbers", "#text"):
        page.locator(details).evaluate("x => x.open = true")
    page.locator("#base").fill("-1")
    for panel in PANELS:
        page.click(f"#tab-{panel}")
        wait_until_drawn(page)
        assert page.locator("#table td").count() > 0
        result = Axe().run(page)
        assert result.violations_count == 0, f"{panel}: {result.generate_report()}"
    small = page.evaluate(
        "[...document.querySelectorAll('body *')].filter((x) => x.checkVisibility() && "
        "[...x.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && "
        "parseFloat(getComputedStyle(x).fontSize) < 14).map((x) => x.tagName)"
    )
    assert small == []
    context.close()
    assert visit.complaints == []


def test_the_page_computes_what_python_does(visit):
    page = visit.open()
    draw = random.Random(7)
    cases = [(spec, draw.choice(LENGTHS)) for spec in random_specs(260, 7)]
    sent = [[json.loads(spec.to_json()), length] for spec, length in cases]
    code = f"(cases) => JSON.stringify(cases.map((x) => {NUMBERS}(...x)), {LISTS})"
    answers = json.loads(page.evaluate(code, sent))
    assert max(difference(*case, answer) for case, answer in zip(cases, answers, strict=True)) <= 1e-14


@pytest.mark.parametrize("name", bundled_names())
def test_a_preset_is_the_spec_of_python(visit, name):
    page = visit.open()
    offered = [preset for preset in page_data()["presets"] if preset["name"].split(",")[0] == name]
    assert offered
    for preset in offered:
        page.select_option("#preset", preset["name"])
        wait_until_drawn(page)
        spec = RopeSpec.from_json(json.dumps(preset["spec"]))
        shown = state(page)
        assert RopeSpec.from_json(json.dumps(shown["a"])) == spec
        context = shown["context"]
        theta = page.evaluate("Array.from(Rules.invFreq(explorer.state().a, explorer.state().context))")
        assert np.allclose(theta, spec.inv_freq(context), rtol=1e-14, atol=0)
        for panel, curve in (("decay", decay_curve), ("score", None)):
            line = json.loads(
                page.evaluate(
                    "(panel) => {"
                    "const [{ lines }] = explorer.panels[panel].draw(explorer.state(), explorer.meansOf).charts;"
                    "return JSON.stringify([Array.from(lines[0].xs), Array.from(lines[0].ys)]); }",
                    panel,
                )
            )
            gaps, got = map(np.array, line)
            assert gaps.max() == context
            if curve is None:
                still = spec.head_dim - spec.rotated_dim
                sums = score_sum(gaps, spec.inv_freq(context)) * 2 * spec.amplitude(context) ** 2
                expected = (sums + still) * spec.softmax_scale / spec.head_dim
            else:
                expected = curve(gaps, spec.inv_freq(context))
            assert (np.abs(got - expected) <= 1e-12 * (1 + gaps * np.abs(spec.inv_freq(context)).max())).all()


# Each control: a new value, and a panel whose picture it changes.
CHANGES = [
    ("head_dim", 64, "rule"),
    ("rotary_dim", 32, "wavelength"),
    ("base", 12345, "wavelength"),
    ("factor", 3, "rule"),
    ("trained_length", 1000, "wavelength"),
    ("low_freq_factor", 2, "rule"),
    ("high_freq_factor", 9, "rule"),
    ("context", 3000, "decay"),
    ("position", 77, "rotation"),
    ("distance", 55, "score"),
    ("heads", 3, "bias"),
]


def test_every_control_changes_what_it_should(visit):
    page = visit.open()
    for name, value, panel in CHANGES:
        page.click(f"#tab-{panel}")
        wait_until_drawn(page)
        before = state(page), page.locator("#picture").inner_html()
        fill(page, name, value)
        after = state(page)
        key = name if name in after else None
        held = after[key] if key else after["a"]["frequencies"].get(name, after["a"].get(name))
        assert held == value
        assert page.locator("#picture").inner_html() != before[1], name
        slider = page.locator(f"#{name}-slider")
        # A step of the slider moves the field.
        slider.press("ArrowRight")
        wait_until_drawn(page)
        assert page.locator(f"#{name}").input_value() != str(value) or name == "rotary_dim"
        fill(page, name, value)
    page.select_option("#pairing", "interleaved")
    assert state(page)["a"]["pairing"] == "interleaved"
    for rule, description in page_data()["rules"].items():
        page.select_option("#rule", rule)
        wait_until_drawn(page)
        assert state(page)["a"]["frequencies"]["rule"] == rule
        page.locator("form details").evaluate_all("all => all.forEach((x) => x.open = true)")
        for field in description["fields"]:
            change_field(page, field)
        if rule == "AcrossHeads":
            fill(page, "head", 1)
            assert state(page)["head"] == 1
        spec = RopeSpec.from_json(json.dumps(state(page)["a"]))
        code = f"() => JSON.parse(JSON.stringify({NUMBERS}(explorer.state().a, 100000), {LISTS}))"
        assert difference(spec, 100_000, page.evaluate(code)) <= 1e-14
        copied = {}
        for kind, words in (("code", "as Python"), ("json", "as JSON")):
            page.click(f"[data-copy={kind}]")
            page.locator("#notes", has_text=f"Spec {words} copied").wait_for()
            copied[kind] = page.evaluate("navigator.clipboard.readText()")
        names: dict[str, object] = {}
        exec(copied["code"], names)
        assert names["spec"] == spec == RopeSpec.from_json(copied["json"])
    page.click("#pin")
    assert state(page)["b"] == state(page)["a"]
    page.click("#tab-lab")
    page.select_option("#record", label="second")
    wait_until_drawn(page)
    assert state(page)["record"] == 1
    page.click("#reset")
    wait_until_drawn(page)
    assert state(page)["preset"] == "llama-3.1-8b"


def change_field(page, field):
    """Give a field of a rule a value that is not its default."""
    name, kind = field["name"], field["kind"]
    shown = page.locator(f"[id='{name}']")
    assert shown.count() == (kind != "list")
    if kind == "list":
        return
    if kind == "flag":
        value = False
        shown.uncheck()
    elif kind == "choice":
        value = field["choices"][-1]
        shown.select_option(value)
    else:
        value = {"num_heads": 3, "fraction": 0.75}.get(name, 1.5 * (field["default"] or 1))
        if name.endswith("_amplitude"):
            # LongRope has two amplitudes, or none, or a factor.
            for other in ("attention_factor", "short_amplitude"):
                fill(page, other, "")
        fill(page, name, value)
        if name.endswith("_amplitude"):
            held = state(page)["a"]["frequencies"]
            assert held["short_amplitude"] == held["long_amplitude"] == value
            assert "both or none" in page.locator(f"#{name}-error").inner_text()
    assert state(page)["a"]["frequencies"][name] == value, name


def test_what_is_known_of_a_model_stays_with_it(visit):
    page = visit.open()
    page.select_option("#preset", HOSTILE)
    page.select_option("#compare", label="qwen2.5-7b-instruct-yarn")
    wait_until_drawn(page)
    notes = page.locator("#notes")
    assert "qwen2.5-7b-instruct-yarn: factor is 4, but" in notes.inner_text()
    fill(page, "base", 12345)
    page.click("[data-copy=json]")
    page.locator("#notes", has_text="Spec as JSON copied").wait_for()
    for opened in (page, visit.open(page.evaluate("location.hash.slice(1)"))):
        assert f"{HOSTILE}: no xPos" in opened.locator("#notes").text_content()
        assert "qwen2.5-7b-instruct-yarn: factor is 4, but" in notes.inner_text()
        assert "no xPos" in opened.locator("#lacks").inner_text()
    page = visit.open("preset=llama-2-7b&panel=decay")
    assert state(page)["preset"] == "llama-2-7b"
    assert state(page)["panel"] == "decay"
    for fragment in ("preset=llama-2-7b&rule=Yarn&head_dim=128", "rule=Plain&b.name=llama-2-7b&b.rule=Yarn"):
        page = visit.open(fragment)
        assert [state(page)[name] for name in ("preset", "from", "bName")] == ["", "", ""]
        assert page.locator("#lacks").is_hidden()


def test_a_without_its_rule_follows_a_until_it_is_kept(visit):
    page = visit.open("rule=Yarn&panel=compare")
    page.select_option("#compare", "unscaled")
    fill(page, "base", 500)
    assert state(page)["b"]["frequencies"] == {"rule": "Plain", "base": 500}
    page.click("#pin")
    fill(page, "base", 600)
    assert state(page)["b"]["frequencies"]["base"] == 500
    page.select_option("#compare", "unscaled")
    page.select_option("#rule", "Explicit")
    wait_until_drawn(page)
    assert state(page)["b"] is None
    assert "B was removed" in page.locator("#notes").inner_text()
    assert page.locator("#compare option[value=unscaled]").count() == 0


def test_text_that_cannot_be_copied_is_shown_and_stays_current(visit):
    page = visit.open("rule=Yarn")
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(); }")
    page.click("[data-copy=json]")
    page.locator("#notes", has_text="does not allow copying").wait_for()
    fill(page, "base", 12345)
    assert json.loads(page.locator("#code").inner_text())["frequencies"]["base"] == 12345
    assert page.locator("#code").get_attribute("aria-label") == "JSON of the spec"


def test_a_screen_reader_gets_the_sentence_and_the_changes(visit):
    page = visit.open("panel=rotation&rule=Plain&context=64&position=60")
    assert page.locator("#picture").get_attribute("role") == "group"
    assert page.locator("#spoken").text_content() == page.locator("#summary").inner_text()
    fill(page, "base", -1)
    assert page.locator("#base").get_attribute("aria-invalid") == "true"
    fill(page, "context", 32)
    assert "position: 60 was changed to 31" in page.locator("#context-error").inner_text()
    page.locator("#numbers").evaluate("x => x.open = true")
    summary(page, "score")
    assert page.locator("#picture").get_attribute("aria-label") is None
    assert page.locator("#table th[scope=row]").count() > 10


def test_fields_clamp_and_state_it(visit):
    page = visit.open()
    for name, value, kept in (
        ("base", "-5", 1.01),
        ("factor", "1e99", 1e6),
        ("context", "1000000000000000000", 2**40),
        ("head_dim", "7.5", 8),
        ("position", "1e18", None),
    ):
        fill(page, name, value)
        message = page.locator(f"#{name}-error").inner_text()
        assert "was changed to" in message
        held = float(page.locator(f"#{name}").input_value())
        assert held == (state(page)["context"] - 1 if kept is None else kept)
    fill(page, "base", "")
    assert "a number is needed" in page.locator("#base-error").inner_text()
    fill(page, "base", "10000")
    assert not page.locator("#base-error").is_visible()
    fill(page, "rotary_dim", "64")
    assert "was changed to 8" in page.locator("#rotary_dim-error").inner_text()
    assert page.locator("#rotary_dim").input_value() == "8"


def test_a_link_shows_the_same_view(visit):
    page = visit.open()
    page.select_option("#preset", "phi-3-mini-128k")
    page.select_option("#compare", label="deepseek-v3")
    fill(page, "distance", 4321)
    summary(page, "compare")
    page.click("#copy-link")
    page.locator("#notes", has_text="Link copied").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    expected, picture = state(page), page.locator("#picture").inner_html()
    assert page.evaluate("location.href") == link
    other = visit.open(link.split("#")[1])
    assert state(other) == expected
    assert other.locator("#picture").inner_html() == picture
    # A link that is followed inside the page.
    other.evaluate("location.hash = 'panel=rule&rule=NTK&factor=7'")
    other.locator("#panel-title", has_text="What the rule changes").wait_for()
    assert state(other)["a"]["frequencies"] == {"rule": "NTK", "base": 10000, "factor": 7}


def test_what_the_buttons_copy_makes_the_same_spec(visit):
    page = visit.open()
    page.select_option("#preset", "deepseek-v3")
    wait_until_drawn(page)
    copied = {}
    for kind, words in (("code", "as Python"), ("json", "as JSON"), ("config", "for transformers")):
        page.click(f"[data-copy={kind}]")
        page.locator("#notes", has_text=f"Spec {words} copied").wait_for()
        copied[kind] = page.evaluate("navigator.clipboard.readText()")
    spec = RopeSpec.from_json(json.dumps(state(page)["a"]))
    names: dict[str, object] = {}
    exec(copied["code"], names)
    assert names["spec"] == spec == RopeSpec.from_json(copied["json"])
    assert json.loads(copied["config"]) == json.loads(json.dumps(spec.to_config("transformers")))
    page.select_option("#rule", "NTKByParts")
    wait_until_drawn(page)
    assert page.locator("[data-copy=config]").is_disabled()
    assert "transformers has no rope type for NTK by parts" in page.locator("#why").inner_text()


def test_the_keyboard_alone_is_enough(visit):
    page = visit.open()
    reached: list[str] = []
    while len(reached) < 60:
        page.keyboard.press("Tab")
        name = page.evaluate("document.activeElement.id || document.activeElement.dataset.copy || ''")
        if name == "tab-rotation":
            for panel in (*PANELS[1:], PANELS[0]):
                page.keyboard.press("ArrowRight")
                assert page.evaluate("document.activeElement.id") == f"tab-{panel}"
        if name == "context-slider":
            context = state(page)["context"]
            page.keyboard.press("ArrowLeft")
            assert state(page)["context"] < context
        if name == "play":
            page.keyboard.press("Enter")
            assert page.locator("#play").inner_text() == "Pause"
            page.keyboard.press("Enter")
        # A visible frame shows where the keyboard is.
        if name not in ("", "table"):
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", name
        reached.append(name)
        if name == "config":
            break
    wanted = {
        "copy-link",
        "reset",
        "theme",
        "preset",
        "base",
        "base-slider",
        "rule",
        "context",
        "compare",
        "pin",
        "panel",
    }
    assert wanted | {"play", "code", "json", "config"} <= set(reached)


def test_play_moves_along_positions_and_stops_for_reduced_motion(visit):
    page = visit.open("panel=rotation&rule=Plain&position=5&context=8")
    page.click("#play")
    # At the end of the context it begins again.
    page.locator("#summary", has_text="At position 2,").wait_for()
    page.click("#play")
    stopped = state(page)["position"]
    assert stopped < 8
    # Someone who types a position does not want the next one.
    page.click("#play")
    page.focus("#position")
    assert page.locator("#play").inner_text() == "Play"
    page.emulate_media(reduced_motion="reduce")
    page.click("#reset")
    wait_until_drawn(page)
    before = state(page)["position"]
    assert page.locator("#play").inner_text() == "Next position"
    page.click("#play")
    assert state(page)["position"] == before + 1
    page.locator("#position").focus()
    assert page.locator("#play").inner_text() == "Next position"
    # Motion that is under way ends.
    page.emulate_media(reduced_motion="no-preference")
    page.click("#play")
    page.emulate_media(reduced_motion="reduce")
    page.get_by_role("button", name="Next position").wait_for()


def test_names_from_outside_are_text(visit):
    page = visit.open()
    page.select_option("#preset", index=1)
    wait_until_drawn(page)
    assert state(page)["preset"] == HOSTILE
    assert "context: 1000000000000000000 was changed to 1099511627776" in page.locator("#notes").inner_text()
    page.select_option("#compare", label=HOSTILE)
    for panel in PANELS:
        summary(page, panel)
    assert HOSTILE.split()[0] in page.locator("#summary").inner_text()
    assert page.locator("main img, main script").count() == 0
    hostile = visit.open(
        f"rule=%3Cimg%20src=x%20onerror=alert(1)%3E&preset={'%3Cb%3E' * 9}&b.rule=Plain&b.name=%3Cimg src=x%3E"
    )
    assert "is not one of" in hostile.locator("#notes").inner_text()
    # Neither name is that of the numbers.
    assert [state(hostile)[name] for name in ("preset", "from", "bName")] == ["", "", ""]
    assert "B: plain RoPE" in hostile.locator("#compare").inner_text()
    assert hostile.locator("main img").count() == 0


@pytest.mark.parametrize("width", [1400, 768, 400])
def test_nothing_is_wider_than_the_screen(visit, width):
    visit.page.set_viewport_size({"width": width, "height": 900})
    page = visit.open()
    for panel in PANELS:
        summary(page, panel)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width == 1400:
            # Every panel, without scrolling.
            assert page.evaluate("document.documentElement.scrollHeight") <= 900


# What of a text leaves its picture, and what label of a vertical line is over its curves, by at least a pixel.
MISPLACED = """Array.from(document.querySelectorAll("#picture .frame > svg")).flatMap((svg) => {
  const [outer, plot] = [svg, svg.querySelector("svg")].map((x) => x.getBoundingClientRect());
  const labels = Array.from(svg.querySelectorAll("text"), (text) => [text, text.getBoundingClientRect()]);
  const cut = labels.filter(([, box]) => box.left < outer.left - 1 || box.right > outer.right + 1);
  const marks = labels.filter(([text]) => /^(position|distance) [0-9]/.test(text.textContent));
  const over = marks.filter(([, box]) => box.bottom > plot.top + 5);
  return [...cut, ...over].map(([text]) => text.textContent);
})"""


@pytest.mark.parametrize("width", [1400, 768, 400])
def test_labels_are_whole_and_beside_the_curves(visit, width):
    visit.page.set_viewport_size({"width": width, "height": 900})
    for context in (4096, 100_000, 1_048_576, 100_000_000):
        page = visit.open(f"preset=llama-2-7b&panel=precision&context={context}&position=99999&distance=99999")
        for panel in ("precision", "decay", "score", "bias", "compare"):
            summary(page, panel)
            assert page.evaluate(MISPLACED) == [], (context, panel)


@pytest.mark.parametrize(("width", "height"), [(701, 900), (768, 1024), (768, 600), (1000, 700)])
def test_all_controls_are_in_reach_below_the_picture(visit, width, height):
    """Sideways, nothing of them is hidden: people scroll down."""
    visit.page.set_viewport_size({"width": width, "height": height})
    page = visit.open("preset=qwen2.5-7b-instruct-yarn")
    page.locator("#rule-fields details summary").click()
    assert page.evaluate("(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)(document.forms[0])") == 0


def test_a_link_without_a_rule_shows_a_model(visit):
    page = visit.open("panel=decay")
    assert (state(page)["preset"], state(page)["panel"]) == ("llama-3.1-8b", "decay")
    assert page.locator("#notes").inner_text() == ""
    page = visit.open("preset=nosuch&panel=decay")
    assert (state(page)["preset"], state(page)["panel"]) == ("llama-3.1-8b", "decay")
    assert "names a model that this page does not have; llama-3.1-8b is shown" in page.locator("#notes").inner_text()


def test_sliders_follow_the_fields_that_limit_them(visit):
    page = visit.open("rule=Plain&context=64&position=40&distance=20&head_dim=128&rotary_dim=64")
    fill(page, "context", 131_072)
    page.locator("#distance-slider").press("End")
    fill(page, "head_dim", 256)
    page.locator("#rotary_dim-slider").press("End")
    wait_until_drawn(page)
    assert state(page)["distance"] == 131_071
    assert state(page)["a"]["rotary_dim"] == 256


def test_numbers_that_the_page_changed_are_called_so(chromium, tmp_path):
    preset = Preset("odd", RopeSpec(64, Plain(1e15)), 4096, 4096, (), ())
    (tmp_path / "page.html").write_text(page_html(page_data([preset], [])), encoding="utf-8")
    context = chromium.new_context(viewport={"width": 1400, "height": 900})
    page = Visit(context, tmp_path / "page.html").open("preset=odd")
    page.get_by_role("tab", name="Decay bound").click()
    for place in ("#notes", "#lacks"):
        assert "1000000000000000 was changed to 1000000000000" in page.locator(place).inner_text()
    context.close()


def test_a_link_that_could_not_be_read_is_not_copied(visit):
    page = visit.open("rule=AcrossHeads&num_heads=64&head_dim=512&rotary_dim=512&preset=")
    page.select_option("#rule", "Explicit")
    wait_until_drawn(page)
    page.click("#pin")
    page.click("#copy-link")
    page.locator("#notes", has_text="The link would be too long").wait_for()


def test_a_button_tells_that_it_has_copied(visit):
    page = visit.open()
    for words in ("Copy link", "Copy as JSON"):
        button = page.get_by_role("button", name=words)
        handle = button.element_handle()
        button.click()
        page.get_by_role("button", name="Copied", exact=True).wait_for()
        page.wait_for_selector(f"button:has-text('{words}')")
        assert handle.inner_text() == words


def test_a_note_on_a_value_goes_with_the_value(visit):
    page = visit.open()
    fill(page, "position", 1.5)
    assert "1.5 was changed to 2" in page.locator("#position-error").inner_text()
    fill(page, "context", 2)
    assert state(page)["position"] == 1
    assert not page.locator("#position-error").is_visible()


def test_questions_of_a_new_user(visit):
    """Answers that are known from Python are in the sentence of a panel."""
    page = visit.open()
    page.select_option("#preset", "qwen2.5-7b-instruct-yarn")
    wait_until_drawn(page)
    assert state(page)["context"] == 131072
    assert re.search(r"pairs 0–23 unchanged; .* pairs 40–63 divided by 4", summary(page, "rule"))
    page.select_option("#preset", "llama-2-7b")
    fill(page, "context", 65536)
    assert "first rise after distances 8,192–16,383; the lowest is 4.659" in summary(page, "decay")
    page.select_option("#preset", "gpt-neox-20b")
    assert "12 pairs" in summary(page, "rotation")
    page.select_option("#preset", "llama-3.1-8b")
    assert "With bfloat16, the error reaches 1 rad" in summary(page, "precision")
    page.select_option("#compare", label="llama-2-7b")
    assert "1 of 64 pairs has the same frequency" in summary(page, "compare")
