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
from ropewalk.tools.demo import agreement, command, speed
from ropewalk.tools.demo.agreement import LIMIT, compare, rotation_error
from ropewalk.tools.demo.formula import formula_of
from ropewalk.tools.demo.statements import STATEMENTS
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
    monkeypatch.setattr(command, "_pictures", lambda *_: ([], "none"))


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """The output of the command without arguments, in the folder in which it ran."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        patch.setattr(command, "_pictures", lambda *_: ([], "none"))
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
    assert re.search(r"as it is: llama3.*\n.*with fine-tuning: llama3", result.stdout, re.DOTALL)
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


@pytest.mark.usefixtures("undrawn")
def test_a_pairing_for_an_unknown_family_is_in_the_code_too():
    Path("unknown.json").write_text('{"model_type": "brand-new", "head_dim": 64, "rope_theta": 1e4}')
    result = ropewalk("demo", "unknown.json", "--pairing", "half")
    assert result.returncode == 0, result.stderr
    assert 'rw.load_spec("unknown.json", pairing="half")' in result.stdout
    # The config has no length, so there is nothing to extend; the demo says what to do, and goes on.
    assert "--trained" in result.stdout
    assert "ropewalk verify" in result.stdout


@pytest.mark.usefixtures("undrawn")
def test_a_measurement_that_contradicts_is_exit_code_1(monkeypatch):
    monkeypatch.setattr(agreement, "LIMIT", 0.0)
    result = ropewalk("demo", "small.json")
    assert result.returncode == 1
    assert "WRONG" in result.stdout


@pytest.mark.parametrize(
    "name", ["llama-2-7b", "llama-3.1-8b", "gpt-j-6b", "gpt-neox-20b", "deepseek-v3", "qwen2-vl-7b", "phi-3-mini-128k"]
)
def test_the_rotation_agrees_with_the_formula_as_loaded_and_with_float64_if_exact(name):
    rows = compare(rotating(name), POSITIONS)
    assert [row.position for row in rows] == list(POSITIONS)
    assert all(row.to_formula <= LIMIT and row.exact <= LIMIT and row.agrees and row.same_tables for row in rows)
    # float32 angles have an error that grows with the position: that of the frequency, times the position.
    assert rows[-1].formula > 100 * LIMIT
    assert rows[-1].formula > 100 * rows[0].formula


def test_a_wrong_rotation_does_not_agree():
    spec = rw.RopeSpec(8, pairing="half")
    x = torch.randn(1, 2, 3, 8)
    y = rw.RotaryEmbedding(spec)(x)
    assert rotation_error(y, y.double(), spec) == 0
    assert (
        rotation_error(rw.RotaryEmbedding(dataclasses.replace(spec, pairing="interleaved"))(x), y.double(), spec) > 0.1
    )
    # An angle that is wrong by 1e-3 is an error of 1e-3, for every size of a pair.
    rotated = rw.RotaryEmbedding(dataclasses.replace(spec, frequencies=rw.Explicit((1.0, 0.1, 0.01, 0.002))))(x * 1e-5)
    right = rw.RotaryEmbedding(dataclasses.replace(spec, frequencies=rw.Explicit((1.0, 0.1, 0.01, 0.001))))(x * 1e-5)
    assert rotation_error(rotated, right.double(), spec) == pytest.approx(2e-3, rel=1e-2)
    # Features that are not rotated are copies.
    partial = rw.RopeSpec(8, rotary_dim=4)
    copied = torch.ones(1, 8)
    assert rotation_error(copied, copied.double(), partial) == 0
    copied[0, 7] += 1e-6
    assert rotation_error(copied, torch.ones(1, 8).double(), partial) == float("inf")
    assert rotation_error(torch.full((1, 8), torch.nan), torch.ones(1, 8).double(), spec) == float("inf")


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


def test_the_three_statements_do_not_hold_and_are_not_disputed():
    claims = {claim.id: claim for chapter in CHAPTERS for claim in chapter.claims}
    assert len(STATEMENTS) == 3
    assert all(claims[name].verdict is Verdict.FAILS for name in STATEMENTS)


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
