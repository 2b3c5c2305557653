"""`ropewalk demo`: what it prints and writes, and its measurements against transformers and float64."""

import contextlib
import dataclasses
import io
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from rich.console import Console

import ropewalk as rw
from ropewalk.claims import CHAPTERS, Verdict
from ropewalk.hub.bundled import bundled_config, bundled_names
from ropewalk.hub.configs.model import read_model
from ropewalk.tools.demo import command, sheet, speed
from ropewalk.tools.demo.formula import formula_of
from ropewalk.tools.demo.statements import STATEMENTS, false_statements
from ropewalk.tools.demo.steps import Steps
from slow import slow
from tools.command import Outcome, ropewalk

ROOT = Path(__file__).parent.parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
POSITIONS = (1_000, 10_000, 100_000, 1_000_000)
# One config of each kind of rotation.
KINDS = (
    *("gemma-3-4b", "deepseek-v3", "gpt-neox-20b", "gpt-j-6b", "phi-3-mini-128k", "qwen2-vl-7b", "llama-4-scout"),
    *("smollm3-3b", "vicuna-7b-v1.5-16k", "mistral-7b-v0.3-params", "modernbert-base", "internlm2-chat-7b"),
)


# A model whose rules are computed in no time.
SMALL = {"model_type": "llama", "head_dim": 8, "num_hidden_layers": 2, "max_position_embeddings": 64}


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Times a few calls on small tensors, instead of seconds."""
    for name, value in {"SECONDS": 0.0, "TOKENS": 8, "Q_HEADS": 2, "K_HEADS": 1}.items():
        patch.setattr(speed, name, value)
    patch.setattr(command, "POINTS", 4)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Works in an empty folder with a small config."""
    shorten(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("small.json").write_text(json.dumps(SMALL))


@pytest.fixture
def undrawn(monkeypatch):
    """Without pictures, which take longer than everything else."""
    monkeypatch.setattr(command, "_draw", lambda *_: "none")


@pytest.fixture
def short(undrawn, monkeypatch):
    """Without pictures, statements and a longer context."""
    monkeypatch.setattr("ropewalk.tools.demo.statements.false_statements", list)
    refused = rw.RopewalkError(asked="a longer context", expected="a test of it", got="another test", do="nothing")
    monkeypatch.setattr(command, "_extended", lambda _: refused)


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """The output of the command without arguments, in the folder in which it ran."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        patch.setattr(command, "_draw", lambda *_: "none")
        patch.chdir(tmp_path_factory.mktemp("default"))
        return ropewalk("demo"), Path.cwd()


def specs_of(path: Path) -> dict[str, rw.RopeSpec | None]:
    return dict(read_model(path).layers)


def rotating(name: str) -> rw.RopeSpec:
    return next(spec for spec in specs_of(CONFIGS / f"{name}.json").values() if spec is not None)


@pytest.mark.parametrize("name", bundled_names())
def test_bundled_configs_describe_the_rope_of_the_tested_ones(name):
    path = bundled_config(name)
    assert path is not None
    assert specs_of(path) == specs_of(CONFIGS / f"{name}.json")
    assert read_model(path).lengths == read_model(CONFIGS / f"{name}.json").lengths
    assert read_model(path).kinds is not None, "the number of layers is in the config"


def test_names_that_are_not_bundled():
    assert {"llama-2-7b", "llama-3.1-8b", "gemma-3-4b", "gpt-neox-20b", "qwen3-8b"} <= set(bundled_names())
    for name in ("", "llama", "/etc/passwd", "../configs/llama-2-7b", "llama-2-7b.json"):
        assert bundled_config(name) is None


def test_a_demo_has_less_than_60_lines_of_80_columns_and_two_pictures():
    result = ropewalk("demo", "small.json", "--json", "demo.json")
    assert result.returncode == 0, result.stdout + result.stderr
    check_lines(result)
    record = json.loads(Path("demo.json").read_text(encoding="utf-8"))
    assert record["pictures"] == ["build/demo/agreement.png", "build/demo/wavelengths.png"]
    assert all(Path(picture).read_bytes().startswith(b"\x89PNG") for picture in record["pictures"])
    assert [row["position"] for row in record["agreement"]] == list(POSITIONS)
    assert all(row["ratio"] > 0 for row in record["speed"])
    assert [entry["id"] for entry in record["statements"]] == list(STATEMENTS)
    assert record["extension"]["length"] == 256
    assert record["agrees"] is True


def check_lines(result: Outcome) -> None:
    out, progress = result.stdout.splitlines(), result.stderr.splitlines()
    assert len(out) < 60
    assert max(map(len, [*out, *progress])) <= 80
    assert [line for line in out if line != line.rstrip()] == []
    assert [line.split(".")[0] for line in out if re.match(r"\d\. ", line)] == list("1234567")


@pytest.mark.parametrize("name", [slow(name) for name in KINDS])
@pytest.mark.usefixtures("undrawn")
def test_every_kind_of_model_can_be_demonstrated(name):
    # A path of this machine may be longer than a line.
    shutil.copy(CONFIGS / f"{name}.json", "config.json")
    result = ropewalk("demo", "config.json")
    assert result.returncode == 0, result.stdout + result.stderr
    check_lines(result)
    run_code(result, CONFIGS / f"{name}.json")


def test_the_default_is_a_bundled_config(default):
    result, folder = default
    assert result.returncode == 0, result.stderr
    check_lines(result)
    # Here the lines of progress count too.
    assert len(result.stdout.splitlines()) + len(result.stderr.splitlines()) < 60
    assert specs_of(folder / "build/demo/llama-3.1-8b.json") == specs_of(CONFIGS / "llama-3.1-8b.json")
    assert "1. The RoPE of llama-3.1-8b: Llama 3's rule (by parts)" in result.stdout
    assert "131,072 → 524,288 positions" in result.stdout
    assert re.search(r"without fine-tuning: llama3.*\n.*with fine-tuning: llama3", result.stdout, re.DOTALL)
    with contextlib.chdir(folder):
        run_code(result, CONFIGS / "llama-3.1-8b.json")


def run_code(result: Outcome, config: Path) -> None:
    """Runs the code that the demo prints, and compares its module with a config."""
    section = result.stdout.split("2. The module\n")[1].split("\n\n")[0]
    names: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rw.RopeConfigWarning)
        exec(textwrap.dedent(section), names)
    rope = names["rope"]
    assert isinstance(rope, rw.RotaryEmbedding)
    assert rope.spec in specs_of(config).values()


@pytest.mark.usefixtures("undrawn")
def test_layers_with_a_window_are_not_the_ones_that_are_demonstrated():
    result = ropewalk("demo", "gemma-3-4b")
    assert 'rw.load_spec("build/demo/gemma-3-4b.json")["full_attention"]' in result.stdout
    assert "sliding_attention: plain RoPE" in result.stdout
    # Its config does not contain the trained length, so nothing is extended.
    assert "--trained" in result.stdout
    assert "ropewalk extend" not in result.stdout
    run_code(result, CONFIGS / "gemma-3-4b.json")


@pytest.mark.usefixtures("undrawn")
def test_json_on_standard_output_is_the_only_output():
    result = ropewalk("demo", "gpt-j-6b", "--json", "-", "--plots", "here", encoding="ascii")
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["inspection"]["name"] == "gpt-j-6b"
    assert record["config"] == str(Path("here") / "gpt-j-6b.json")
    assert "PyTorch" in result.stderr
    assert not Path("build").exists()


def test_without_matplotlib_the_demo_names_the_extra_and_goes_on(monkeypatch):
    for name in ("ropewalk.tools.pictures", "ropewalk.tools.demo.plot", "ropewalk.tools.inspect.plot"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = ropewalk("demo", "small.json", "--json", "demo.json")
    assert result.returncode == 0
    assert "pip install 'ropewalk[plots]'" in result.stdout
    assert json.loads(Path("demo.json").read_text(encoding="utf-8"))["pictures"] == []
    check_lines(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "one of the bundled"),
        (["llama-3.1-7b"], "did you mean 'llama-3.1-8b'?"),
        (["meta-llama/Llama-3.1-8B"], "hf download meta-llama/Llama-3.1-8B"),
        (["broken.json"], "not JSON"),
        (["bert.json"], "RoPE"),
        (["unknown.json"], "--pairing half"),
        (["--plots", "/proc/nowhere"], "a folder that can be written"),
        (["--plots", "broken.json"], "a folder that can be written"),
        (["--json", "nowhere/demo.json"], "in an existing folder"),
        (["--json", "/proc/demo.json"], "a folder that can be written"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_message_with_four_parts_and_exit_code_2(arguments, message):
    Path("broken.json").write_text("{", encoding="utf-8")
    Path("bert.json").write_text('{"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}')
    Path("unknown.json").write_text('{"model_type": "brand-new", "head_dim": 64, "rope_theta": 1e4}')
    result = ropewalk("demo", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert all(part in result.stderr for part in ("asked:", "expected:", "got:", "do this:"))
    assert "Traceback" not in result.stderr
    # Outputs are checked before anything is read or measured.
    assert ("PyTorch" in result.stderr) is False


@pytest.mark.parametrize("name", ["agreement.png", "wavelengths.png", "llama-3.1-8b.json"])
def test_a_folder_in_the_place_of_an_output_is_refused_before_anything_is_measured(name):
    (Path("build/demo") / name).mkdir(parents=True)
    result = ropewalk("demo")
    assert (result.returncode, result.stdout) == (2, "")
    assert all(part in result.stderr for part in ("asked:", "expected:", "got:", "do this:"))
    assert name in result.stderr
    assert "PyTorch" not in result.stderr
    assert [path.name for path in Path("build/demo").iterdir()] == [name], "nothing was written"


@pytest.mark.usefixtures("short")
def test_a_copy_of_a_bundled_config_is_written_once_and_an_edited_one_is_kept_and_used():
    path, copy = bundled_config("llama-2-7b"), Path("build/demo/llama-2-7b.json")
    assert path is not None
    copy.parent.mkdir(parents=True)
    shutil.copy(path, copy)
    written = copy.stat().st_ino
    result = ropewalk("demo", "llama-2-7b")
    assert (result.returncode, copy.stat().st_ino) == (0, written), "the same file is not written again"
    assert "differs from the bundled" not in result.stdout
    edited = json.dumps(json.loads(copy.read_text(encoding="utf-8")) | {"rope_theta": 123_456.0})
    copy.write_text(edited, encoding="utf-8")
    result = ropewalk("demo", "llama-2-7b")
    assert result.returncode == 0, result.stdout + result.stderr
    assert copy.read_text(encoding="utf-8") == edited
    assert "base 123,456" in result.stdout
    assert "which differs from the bundled one" in " ".join(result.stdout.split())
    check_lines(result)
    run_code(result, copy)
    copy.write_text("{", encoding="utf-8")
    result = ropewalk("demo", "llama-2-7b")
    assert result.returncode == 2
    assert "not JSON" in result.stderr


@pytest.mark.usefixtures("short")
def test_a_narrow_terminal_cuts_no_figure():
    result = ropewalk("demo", "small.json", columns=60)
    assert result.returncode == 0, result.stderr
    assert "…" not in result.stdout
    assert "1,000,000" in result.stdout
    sections = [part for part in re.split(r"(?m)^(?=\d\. )", result.stdout) if not part.startswith(("2.", "7."))]
    assert max(len(line) for part in sections for line in part.splitlines()) <= 60


@pytest.mark.usefixtures("undrawn")
def test_a_path_is_preferred_to_a_bundled_name():
    Path("llama-2-7b").mkdir()
    Path("llama-2-7b/config.json").write_text(json.dumps(SMALL | {"model_type": "qwen3"}))
    result = ropewalk("demo", "llama-2-7b", "--json", "demo.json")
    assert result.returncode == 0
    record = json.loads(Path("demo.json").read_text(encoding="utf-8"))
    assert record["inspection"]["model_type"] == "qwen3"
    assert record["config"] == "llama-2-7b"
    assert not Path("build/demo/llama-2-7b.json").exists()


@pytest.mark.usefixtures("undrawn")
def test_what_is_printed_can_be_typed_also_for_a_path_with_spaces():
    Path("my models").mkdir()
    shutil.copy("small.json", "my models/config.json")
    result = ropewalk("demo", "my models")
    run_code(result, Path("small.json"))
    section = result.stdout.split("7. What to type next")[1]
    commands = [shlex.split(line, comments=True) for line in section.splitlines() if "  ropewalk " in line]
    assert [command[1] for command in commands] == ["inspect", "extend", "demo"]
    for _, *arguments in commands[:2]:
        assert ropewalk(*arguments).returncode == 0, arguments


def test_the_program_is_named_by_its_path_if_it_is_not_on_the_search_path(monkeypatch):
    def printed() -> str:
        console = Console(width=80)
        with console.capture() as capture:
            console.print(sheet.next_commands("config.json", 8192, "a.png"))
        return capture.get()

    monkeypatch.setattr(sys, "argv", [".venv/bin/ropewalk", "demo"])
    monkeypatch.setenv("PATH", "")
    assert ".venv/bin/ropewalk inspect config.json" in printed()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "  ropewalk inspect config.json" in printed()


@pytest.mark.usefixtures("undrawn")
def test_a_pairing_for_an_unknown_family_is_in_the_code_too():
    Path("unknown.json").write_text('{"model_type": "brand-new", "head_dim": 64, "rope_theta": 1e4}')
    result = ropewalk("demo", "unknown.json", "--pairing", "half")
    assert result.returncode == 0, result.stderr
    assert 'rw.load_spec("unknown.json", pairing="half")' in result.stdout
    # The config has no length, so there is nothing to extend; the demo says what to do, and goes on.
    assert "--trained" in result.stdout
    assert "ropewalk verify" in result.stdout


@pytest.mark.parametrize("broken", [{"pairing": "interleaved"}, {"rotary_dim": 4}, {"frequencies": rw.Plain(9_999.0)}])
@pytest.mark.usefixtures("short")
def test_a_wrong_module_is_exit_code_1(monkeypatch, broken):
    layer_of = sheet.main_layer

    def wrong(inspection):
        layer, spec = layer_of(inspection)
        return layer, dataclasses.replace(spec, **broken)

    monkeypatch.setattr(sheet, "main_layer", wrong)
    result = ropewalk("demo", "small.json", "--json", "demo.json")
    assert result.returncode == 1
    assert "WRONG" in result.stdout
    assert "bit for bit" not in result.stdout
    assert json.loads(Path("demo.json").read_text(encoding="utf-8"))["agrees"] is False


@pytest.mark.usefixtures("undrawn")
def test_a_measurement_that_contradicts_its_verdict_is_exit_code_1(monkeypatch):
    entries = false_statements()
    finding = dataclasses.replace(entries[0].finding, stated=True)
    contradicted = [dataclasses.replace(entries[0], finding=finding), *entries[1:]]
    monkeypatch.setattr("ropewalk.tools.demo.statements.false_statements", lambda: contradicted)
    result = ropewalk("demo", "small.json")
    assert result.returncode == 1
    assert "WRONG VERDICT" in result.stdout


@pytest.mark.usefixtures("short")
def test_without_a_formula_the_demo_says_that_agreement_with_transformers_is_not_shown():
    shutil.copy(CONFIGS / "falcon-7b.json", "config.json")
    result = ropewalk("demo", "config.json", "--json", "demo.json")
    assert result.returncode == 0, result.stderr
    check_lines(result)
    section = " ".join(result.stdout.split("3. Agreement")[1].split("4. Speed")[0].split())
    assert "Agreement with transformers is not shown for this model: no formula is written for the family" in section
    assert "bit for bit" not in section
    record = json.loads(Path("demo.json").read_text(encoding="utf-8"))
    assert "falcon" in record["not_compared_with_transformers"]
    assert [row["to_formula"] for row in record["agreement"]] == [None] * len(POSITIONS)


@pytest.mark.parametrize(
    ("name", "classes", "sizes"),
    [
        ("llama-3.1-8b", "llama.Llama", {}),
        ("qwen2.5-7b-instruct-yarn", "qwen2.Qwen2", {}),
        ("gpt-neox-20b", "gpt_neox.GPTNeoX", {}),
        ("phi-3-mini-128k", "phi3.Phi3", {}),
    ],
)
def test_the_formula_is_that_of_transformers(name, classes, sizes):
    package, prefix = classes.split(".")
    modeling = pytest.importorskip(f"transformers.models.{package}.modeling_{package}")
    from transformers import AutoConfig

    config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**config)
    spec = rotating(name)
    module = getattr(modeling, f"{prefix}RotaryEmbedding")(config)
    for position in POSITIONS:
        positions = torch.arange(position - 5, position + 1)
        q, k = torch.randn(1, 4, 6, spec.head_dim), torch.randn(1, 2, 6, spec.head_dim)
        cos, sin = module(q, positions[None])
        rotated, rest = q[..., : cos.shape[-1]], q[..., cos.shape[-1] :]
        expected_q, expected_k = modeling.apply_rotary_pos_emb(rotated, k[..., : cos.shape[-1]], cos, sin)
        length = position + 1 if spec.varies else None
        by_formula = formula_of(spec, positions, torch.float32, length=length)(q, k)
        assert torch.equal(by_formula[0], torch.cat((expected_q, rest), dim=-1))
        assert torch.equal(by_formula[1], torch.cat((expected_k, k[..., cos.shape[-1] :]), dim=-1))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-j-6b", "qwen2-vl-7b", "phi-3-mini-128k", "llama-4-scout"])
def test_speed_is_measured_for_every_kind_of_rotation(name):
    rows = speed.measure(rotating(name), "cpu")
    assert [row.case for row in rows] == ["8 tokens, forward", "8 tokens, forward and backward", "one token, forward"]
    assert all(row.ropewalk_ms > 0 and row.formula_ms > 0 for row in rows)
    assert all(row.ratio == row.formula_ms / row.ropewalk_ms for row in rows)


@pytest.mark.gpu
def test_speed_is_measured_on_the_device():
    rows = speed.measure(rotating("llama-3.1-8b"), "cuda")
    assert all(row.ratio > 0 for row in rows)


@pytest.mark.usefixtures("short")
def test_the_times_are_named_wall_clock_and_a_gpu_has_finished_before_the_clock_stops(monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("finished"))
    speed._finished(lambda: events.append("call"), 3, "cuda")()
    speed._finished(lambda: events.append("call"), 1, "cpu")()
    assert events == ["call", "call", "call", "finished", "call"]
    assert "4. Speed (wall clock): " in ropewalk("demo", "small.json").stdout


# Claims whose verdict, reading or source a review disputed.
DISPUTED = {
    *("linear.denominator-random", "linear.encodings", "linear.bias-quadratic", "code.negative-id", "decay.score"),
    *("decay.figure", "derivation.one-g", "order.indistinguishable", "order.qk-unchanged", "decay.farther-lower"),
    *("derivation.original-score", "rotation.needs-m", "rotation.theta-mixed", "decay.pair-index", "heads.range"),
    *("heads.relative", "linear.kernel", "linear.lookup", "derivation.unique", "decay.random"),
    *("absolute.sinusoid-behind-w", "code.subscript", "derivation.g-arguments", "rotation.columns"),
    *("rotation.q-and-v", "absolute.relative-is-absolute", "order.captures"),
}
# What the cited source itself states: a number in a note, table 2 of a paper, and theorem 2.1 of a paper.
STATED_BY = {"decay.s20": "002", "men.table-2": "2405.14591", "pi.bound": "2306.15595"}


def test_the_three_statements_do_not_hold_are_not_disputed_and_are_made_by_their_source():
    claims = {claim.id: claim for chapter in CHAPTERS for claim in chapter.claims}
    assert len(STATEMENTS) == 3
    assert all(claims[name].verdict is Verdict.FAILS for name in STATEMENTS)
    assert DISPUTED.isdisjoint(STATEMENTS)
    assert {name: claims[name].places[0].source.key for name in STATEMENTS} == STATED_BY


def test_paraphrases_have_no_quotation_marks(default):
    section = default[0].stdout.split("6. Three false statements, paraphrased")[1].split("7. What")[0]
    assert not set(section) & set('“”"«»„')
    text = " ".join(section.split())
    for entry in false_statements():
        assert f": {entry.claim.statement} measured: {entry.finding.measured}" in text


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_steps_are_a_bar_in_a_terminal_and_lines_elsewhere():
    for stream, moves in ((Terminal(), True), (io.StringIO(), False)):
        console = Console(file=stream, force_terminal=moves, width=80, _environ={"TERM": "xterm"})
        output = io.StringIO()
        with Steps(console, total=2) as steps:
            steps.begin("loading PyTorch")
            steps.show(Console(file=output, width=80), "the result")
            steps.begin("timing")
        assert ("\x1b[" in stream.getvalue()) is moves
        assert "loading PyTorch" in stream.getvalue()
        assert output.getvalue() == "the result\n"
        if not moves:
            assert stream.getvalue() == "[1/2] loading PyTorch\n[2/2] timing\n"


def test_progress_is_on_the_terminal_before_pytorch_is_loaded():
    # A package that stops at its import takes the place of torch: what is on the screen by then came before it.
    Path("torch.py").write_text("import sys; sys.stdout.flush(); raise SystemExit(9)")
    main, side = pty.openpty()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
        "TERM": "xterm",
        "COLUMNS": "80",
    }
    command = [sys.executable, "-m", "ropewalk", "demo"]
    code = subprocess.run(command, env=environment, stdout=side, stderr=side, check=False).returncode
    os.close(side)
    # Linux ends the data of a closed terminal with an error.
    shown = b""
    with contextlib.suppress(OSError):
        while data := os.read(main, 65536):
            shown += data
    os.close(main)
    assert code == 9
    text = shown.decode()
    assert "loading PyTorch" in text
    # The first answer is there too: it needs no torch.
    assert "base 500,000" in text


def test_make_demo_passes_the_config_and_shows_what_pip_does():
    dry = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo", "CONFIG=some folder/config.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert 'ropewalk demo "some folder/config.json" --plots build/demo' in dry
    assert "pip install" in dry
    assert "--quiet" not in dry, "pip shows what it downloads"
    dry = subprocess.run(["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "ropewalk demo --plots build/demo" in dry


def test_the_page_of_commands_names_every_bundled_config():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    section = page.split("## `ropewalk demo`")[1].split("\n## ")[0]
    assert set(re.findall(r"`([a-z][a-z0-9.-]*-[a-z0-9.-]+)`", section)) == set(bundled_names())
