"""ropewalk bench attention: paths, checks, records, fits and pictures. No test depends on a time."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ropewalk.errors import RopewalkError
from ropewalk.reference import elu_plus_one, linear_attention_by_sum, rotate
from ropewalk.tools.bench import attention as bench_attention
from ropewalk.tools.bench import attention_paths, attention_record, timing
from ropewalk.tools.bench.attention import AttentionCase, attention_cases, measure
from ropewalk.tools.bench.attention import bench_attention as command
from ropewalk.tools.bench.attention_paths import PATHS, AttentionPath
from ropewalk.tools.bench.attention_record import exponent, growth
from ropewalk.tools.bench.attention_truth import Truth, checked_tokens
from ropewalk.tools.cli import app
from slow import slow

OURS = {"softmax (SDPA)", *(f"ropewalk linear{kind}" for kind in ("", " + RoPE", " + ALiBi", " + T5"))}
RECORD_KEYS = {"command", "date", "device", "hardware", "versions", "rounds", "cases", "growth", "missed", "digest"}
TINY = [AttentionCase((1, 2, seq, 8), "float32") for seq in (1024, 2048)]


def lines_of(case, **options):
    lines, rounds = measure(case, 1, "cpu", **options)
    assert rounds == 1
    by_path: dict[str, Any] = {line.path: line for line in lines}
    assert len(by_path) == len(lines)
    return by_path


def drawn(shape, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random).to(dtype) for _ in range(4)]


@pytest.mark.parametrize("work", ["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seq", [20, slow(600)])
def test_every_path_is_checked_and_timed(seq, dtype, work):
    lines = lines_of(AttentionCase((2, 1, seq, 8), dtype, work))
    assert set(lines) == OURS
    tensor = 2 * seq * 8 * (4 if dtype == "float32" else 2)
    results = tensor * (1 if work == "forward" else 4)
    for line in lines.values():
        assert line.ms > 0
        assert 0 < line.error <= bench_attention.LIMITS[dtype]
        assert line.peak_bytes >= results
        assert line.temporaries_over_qkv == (line.peak_bytes - results) / (3 * tensor)


def test_the_cases():
    cpu = attention_cases("cpu", quick=False)
    assert [case.shape for case in cpu] == [(1, 8, 2**n, 64) for n in range(8, 15)]
    assert {(case.dtype, case.work, case.sweep) for case in cpu} == {("float32", "forward", True)}
    cuda = attention_cases("cuda", quick=False)
    for work in ("forward", "forward+backward"):
        swept = [case.shape for case in cuda if case.work == work and case.sweep]
        assert swept == [(1, 16, 2**n, 64) for n in (16, 10, 11, 12, 13, 14, 15, 17, 18)]
        assert AttentionCase((4, 16, 8192, 128), "bfloat16", work, sweep=False) in cuda
        for group in ("weights", "peers"):
            shapes = [case.shape for case in cuda if (case.group, case.work) == (group, work)]
            assert shapes == [(1, 16, 65_536, 64), (4, 16, 8192, 128)]
    assert cuda[-1] == AttentionCase((1, 4, 1_048_576, 64), "bfloat16", "forward", sweep=False)
    for device, start in attention_record.FIT_FROM.items():
        quick = attention_cases(device, quick=True)
        assert set(quick) <= set(attention_cases(device, quick=False))
        assert len({case.shape[2] for case in quick if case.sweep and case.shape[2] >= start}) == 2


def test_peak_memory_is_what_a_call_uses_at_the_same_time():
    x = torch.ones(1, 8, 128, 64)
    assert bench_attention._peak_bytes(lambda: x.clone(), "cpu") == x.nbytes
    assert bench_attention._peak_bytes(lambda: x.clone() * x.clone(), "cpu") == 3 * x.nbytes
    assert bench_attention._peak_bytes(lambda: x.clone().mul_(2).clone().mul_(2), "cpu") == 2 * x.nbytes
    assert bench_attention._peak_bytes(lambda: x, "cpu") is None


def no_rope(seq, dim, dtype, device):
    return attention_paths.linear(seq, dim, dtype, device)


def last_token_wrong(seq, dim, dtype, device):
    right = attention_paths.linear_rope(seq, dim, dtype, device)

    def attend(q, k, v):
        out = right(q, k, v).clone()
        out[:, -1:, -1] *= 1.1
        return out

    return attend


def wrong_backward(seq, dim, dtype, device):
    right = attention_paths.linear_rope(seq, dim, dtype, device)
    return lambda q, k, v: right(q, k.detach() + 0.9 * (k - k.detach()), v)


def no_number(seq, dim, dtype, device):
    right = attention_paths.linear_rope(seq, dim, dtype, device)
    return lambda q, k, v: right(q, k, v) * torch.nan


def broken(seq, dim, dtype, device):
    raise ValueError("no kernel for this shape\nand more")


@pytest.mark.parametrize("work", ["forward", "forward+backward"])
def test_a_wrong_path_gets_no_time_and_a_failing_one_a_note(monkeypatch, work):
    for maker in (no_rope, last_token_wrong, wrong_backward, no_number, broken):
        monkeypatch.setitem(PATHS, maker.__name__, AttentionPath(maker, "rope"))
    lines = lines_of(AttentionCase((1, 2, 600, 8), "float32", work))
    assert all(lines[path].ms is not None for path in OURS)
    assert lines["no_rope"].ms is None
    assert lines["no_rope"].error > 0.1
    assert lines["last_token_wrong"].error == pytest.approx(0.1, rel=1e-3)
    assert lines["last_token_wrong"].ms is None
    assert (lines["wrong_backward"].ms is None) == (work == "forward+backward")
    assert lines["no_number"].error == torch.inf
    assert lines["broken"].note == "ValueError: no kernel for this shape"
    shown = attention_record.shown_case(
        {"shape": (1, 2, 600, 8), "dtype": "float32", "work": work, "rounds": 1}
        | {"lines": [vars(line) for line in lines.values()]}
    )
    assert "wrong" in shown
    assert "    ValueError: no kernel for this shape\n" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_our_own_failure_is_not_hidden(monkeypatch):
    monkeypatch.setitem(PATHS, "ropewalk linear", AttentionPath(broken, "linear"))
    with pytest.raises(ValueError, match="no kernel"):
        lines_of(TINY[0])


def test_the_truth_is_the_reference_at_its_tokens():
    *tensors, cotangent = drawn((2, 3, 700, 8))
    tokens = checked_tokens(700, middle=False)
    assert tokens.tolist() == [*range(512), *range(684, 700)]
    assert checked_tokens(10, middle=True).tolist() == list(range(10))
    assert set(range(2000, 2064)) <= set(checked_tokens(4000, middle=True).tolist())
    sparse = torch.zeros_like(cotangent)
    sparse[:, :, tokens] = cotangent[:, :, tokens]
    leaves = [x.double().requires_grad_() for x in tensors]
    whole = linear_attention_by_sum(*leaves, causal=True)
    grads = torch.autograd.grad(whole, leaves, sparse.double())
    truth = Truth("linear", tensors, sparse)
    for part, right, rows in zip(truth.parts, (whole, *grads), [tokens, *[truth.sampled] * 3], strict=True):
        assert torch.allclose(part, right[:, :, rows], rtol=0, atol=1e-12)
    results = [x.detach().float() for x in (whole, *grads)]
    assert truth.error(results) < 1e-6
    assert truth.error(results[:1]) == torch.inf
    assert truth.error([x.double() for x in results]) == torch.inf
    assert truth.error([results[0], results[1], results[3], results[2]]) > 0.5


def fake_fla(monkeypatch):
    """The interfaces of flash-linear-attention, [batch, seq, heads, dim], as explicit sums."""

    def seen(q, k):
        return (q @ k.transpose(-1, -2)).tril()

    def chunks(q, k, v, scale, normalize):
        q, k, v = (x.transpose(1, 2) for x in (q * scale, k, v))
        above = seen(q, k) @ v
        return (above / seen(q, k).sum(-1, keepdim=True) if normalize else above).transpose(1, 2), None

    def divide(out, q, k, scale, z_init, reverse, cu_seqlens):
        below = seen(*(x.transpose(1, 2) for x in (q * scale, k))).sum(-1, keepdim=True)
        return out / below.transpose(1, 2), None

    def rotary(x, cos, sin, interleaved):
        theta = 10_000.0 ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
        pairing = "interleaved" if interleaved else "half"
        return rotate(x.transpose(1, 2), torch.arange(x.shape[1]), theta, pairing=pairing).transpose(1, 2)

    for name, members in {
        "fla.ops.linear_attn": {"chunk_linear_attn": chunks},
        "fla.ops.linear_attn.utils": {"normalize_with_z_state": divide},
        "fla.modules.rotary.ops": {"rotary_embedding": rotary},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(attention_paths, "installed", lambda package: True)
    monkeypatch.setattr("ropewalk.tools.bench.peers.installed", lambda package: True)
    monkeypatch.setattr(timing, "DEVICE", "cpu")


def test_the_functions_of_fla_compute_the_expected_attention(monkeypatch):
    tensors = drawn((2, 3, 40, 8))[:3]
    theirs = [path for name, path in PATHS.items() if name.startswith("fla")]
    assert [path.maker(40, 8, torch.float32, "cuda") for path in theirs] == [None] * 3
    fake_fla(monkeypatch)
    for path in theirs:
        assert path.maker(40, 8, torch.float32, "cpu") is None
        attend: Any = path.maker(40, 8, torch.float32, "cuda")
        candidate: Any = bench_attention._candidate("fla", path, attend, tensors, [])
        assert Truth(path.kind, tensors, None).error(candidate.outputs()) < 1e-5
    q, k, v = (x.double() for x in tensors)
    exact = Truth("numerator", tensors, None).parts[0]
    assert torch.allclose((elu_plus_one(q) @ elu_plus_one(k).transpose(-1, -2)).tril() @ v, exact)


def test_device_times_are_converted_to_milliseconds(monkeypatch):
    monkeypatch.setattr(timing, "device_times", lambda candidates, rounds: {"a": 1500.0})
    assert bench_attention._times([], 3, "cuda") == {"a": 1.5}


def test_the_exponent_of_made_up_times():
    lengths = [1024 * 2**n for n in range(5)]
    assert exponent(lengths, [3e-4 * n**1.25 for n in lengths]) == pytest.approx(1.25)
    # By hand: log2 times 0, 2, 3 at log2 lengths -1, 0, 1 have the slope (3 - 0) / 2.
    assert exponent([1, 2, 4], [1.0, 4.0, 8.0]) == pytest.approx(1.5)
    assert exponent([1024], [1.0]) is None


def made_up(*, softmax_ms=1.0):
    """A record in which, from 1024 on, the time of linear attention grows as N and that of softmax as N squared."""
    cases = []
    for seq in (512, 1024, 2048, 4096):
        times = {"softmax (SDPA)": softmax_ms * (seq / 1024) ** 2, "ropewalk linear + RoPE": 2 * seq / 1024}
        times = {path: 77.0 if seq == 512 else ms for path, ms in times.items()}
        shared = {"peak_bytes": seq * 64, "temporaries_over_qkv": 0.5, "error": 1e-6, "note": None}
        case = {"shape": [1, 2, seq, 8], "dtype": "float32", "work": "forward", "sweep": True, "rounds": 1}
        cases.append(case | {"lines": [{"path": path, "ms": ms} | shared for path, ms in times.items()]})
    cases.append(cases[-1] | {"sweep": False, "shape": [4, 2, 4096, 8]})
    return {"command": "", "device": "cpu", "cases": cases, "growth": growth("cpu", cases)}


def test_growth_is_that_of_the_upper_part_of_the_sweep():
    record = made_up()
    assert [(fit["path"], fit["from"], fit["to"]) for fit in record["growth"]] == [
        ("softmax (SDPA)", 1024, 4096),
        ("ropewalk linear + RoPE", 1024, 4096),
    ]
    assert [fit["exponent"] for fit in record["growth"]] == pytest.approx([2, 1])
    shown = attention_record.shown_growth(record)
    assert "softmax (SDPA)                        2.00\n" in shown
    only = [case | {"lines": case["lines"][:1]} for case in record["cases"][:2]]
    assert growth("cpu", only)[0]["exponent"] is None
    assert growth("cuda", record["cases"]) == []


def test_softmax_is_skipped_if_a_call_would_take_too_long():
    measured = made_up(softmax_ms=400.0)["cases"][:4]
    longer = AttentionCase((1, 2, 8192, 8), "float32")
    why = bench_attention._why_left_out
    assert why("softmax (SDPA)", longer, measured) == "skipped: one call would take about 26 s"
    assert why("ropewalk linear + RoPE", longer, measured) is None
    assert why("softmax (SDPA)", AttentionCase((1, 2, 4096, 8), "float32"), measured) is None
    assert why("softmax (SDPA)", AttentionCase((1, 2, 8192, 8), "float32", "forward+backward"), measured) is None
    assert why("softmax (SDPA)", longer, []) is None
    measured = [case | {"work": "forward+backward"} for case in made_up(softmax_ms=20.0)["cases"][:4]]
    both = AttentionCase((1, 2, 8192, 8), "float32", "forward+backward")
    assert why("softmax (SDPA)", both, measured, "cuda") == "skipped: one call would take about 1.3 s"
    assert why("softmax (SDPA)", both, measured, "cpu") is None
    measured = made_up(softmax_ms=400.0)["cases"][:4]
    lines = lines_of(TINY[0], left_out=lambda path: why(path, longer, measured))
    assert lines["softmax (SDPA)"].ms is None
    assert lines["softmax (SDPA)"].note.startswith("skipped")


@pytest.fixture
def _tiny(monkeypatch):
    monkeypatch.setattr(bench_attention, "attention_cases", lambda device, quick: TINY)


@pytest.mark.usefixtures("_tiny")
def test_the_command_writes_table_record_and_picture(tmp_path, capsys):
    target, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    assert command(str(target), quick=True, plot=str(picture), device="cpu") == 0
    out, err = capsys.readouterr()
    assert max(len(line) for line in out.splitlines() if not line.startswith("picture: ")) <= 80
    assert "measuring 2 of 2: (1, 2, 2048, 8)" in err
    assert "measuring" not in out
    assert f"picture: {picture}" in out
    record = json.loads(target.read_text(encoding="utf-8"))
    assert record["command"] == "ropewalk bench attention --device cpu --quick"
    assert set(record) == RECORD_KEYS
    assert record["hardware"]["threads"] == torch.get_num_threads()
    assert torch.__version__.startswith(record["versions"]["torch"])  # without +cu128 in wheels of PyPI
    assert [case["shape"] for case in record["cases"]] == [[1, 2, 1024, 8], [1, 2, 2048, 8]]
    for case in record["cases"]:
        assert set(case) == {"shape", "dtype", "work", "sweep", "group", "rounds", "lines"}
        assert case["group"] == "lengths"
        assert {line["path"] for line in case["lines"]} == OURS
        for line in case["lines"]:
            keys = {"path", "ms", "peak_bytes", "temporaries_over_qkv", "error"}
            # The time of a CPU is by the clock, and no path computes the same as another one.
            absent = {"note", "wall_ms", "difference"}
            assert set(line) == keys | absent
            assert None not in [line[key] for key in keys]
            assert [line[key] for key in absent] == [None] * 3
    assert {fit["path"] for fit in record["growth"]} == OURS
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000

    again = tmp_path / "again.png"
    assert command(plot=str(again), from_file=str(target)) == 0
    assert again.read_bytes() == picture.read_bytes()
    # The output is the same except for the paragraph on the hardware.
    assert capsys.readouterr().out.splitlines()[:-1] == out.split("\n\n", 1)[1].splitlines()[:-1]


@pytest.mark.usefixtures("_tiny")
def test_json_is_the_only_standard_output_and_a_wrong_path_of_ours_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setitem(PATHS, "ropewalk linear + RoPE", AttentionPath(no_rope, "rope"))
    assert command("-", quick=True, device="cpu") == 1
    out, err = capsys.readouterr()
    wrong = json.loads(out)["cases"][0]["lines"][-1]
    assert (wrong["path"], wrong["ms"]) == ("ropewalk linear + RoPE", None)
    assert "wrong" in err


@pytest.mark.parametrize("works", [["forward"], ["forward", "forward+backward"]])
def test_the_picture_names_every_path_with_its_powers(works, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    from ropewalk.tools.bench import attention_plot

    record = made_up()
    cases = [case | {"work": work} for work in works for case in record["cases"]]
    record |= {"cases": cases, "growth": growth("cpu", cases)}
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    attention_plot.draw(record, str(tmp_path / "a.png"))
    (figure,) = figures
    assert len(figure.axes) == len(works) + 1
    assert all(axes.get_xscale() == axes.get_yscale() == "log" for axes in figure.axes)
    labels = [text.get_text() for text in figure.legends[0].texts]
    powers = {1: ["$N^{2.00}$", "$N^{1.00}$"], 2: ["(a) $N^{2.00}$, (b) $N^{2.00}$", "(a) $N^{1.00}$, (b) $N^{1.00}$"]}
    paths = ("softmax (SDPA)", "ropewalk linear + RoPE")
    assert labels == [f"{path}:  {power}" for path, power in zip(paths, powers[len(works)], strict=True)]
    assert figure.axes[0].lines[0].get_xdata().tolist() == [512, 1024, 2048, 4096]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "'cpu' or 'cuda'"),
        ({"json_file": "nowhere/figures.json"}, "create the folder first"),
        ({"plot": "figures.txt"}, "use one of .png, .svg, .pdf"),
        ({"plot": "-"}, "a file name with the suffix of a picture format"),
        ({"from_file": "nothing.json"}, "No such file"),
        ({"from_file": "text.json"}, "JSONDecodeError"),
        ({"from_file": "other.json"}, "KeyError: 'growth'"),
        ({"from_file": "list.json"}, "a record that `ropewalk bench attention --json FILE` wrote"),
        ({"from_file": "single.json"}, "no case of a sweep"),
        ({"from_file": "record.json", "quick": True}, "leave them out"),
        ({"from_file": "record.json", "device": "cpu"}, "leave them out"),
        ({"from_file": "record.json", "json_file": "b.json"}, "leave them out"),
        ({"from_file": "record.json", "only": "lengths"}, "leave them out"),
        ({"from_file": "record.json", "resume": True}, "leave them out"),
        ({"resume": True}, "--json FILE, the file of the run"),
        ({"resume": True, "json_file": "-"}, "--json FILE, the file of the run"),
        ({"resume": True, "json_file": "text.json", "device": "cpu"}, "JSONDecodeError"),
        ({"resume": True, "json_file": "list.json", "device": "cpu"}, "a record of the same command"),
        ({"resume": True, "json_file": "record.json", "device": "cpu"}, "another command"),
        ({"only": "all"}, "'lengths' or 'weights' or 'peers'"),
        ({"only": "weights", "device": "cpu"}, "the cases over N alone"),
        ({"only": "peers", "plot": "a.png"}, "use --only lengths"),
    ],
)
def test_bad_input_is_rejected_before_timing(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = made_up()
    texts = {
        "record": json.dumps(record),
        "text": "no JSON",
        "other": '{"cases": []}',
        "list": "[]",
        "single": json.dumps(record | {"cases": record["cases"][-1:]}),
    }
    for name, text in texts.items():
        Path(f"{name}.json").write_text(text, encoding="utf-8")
    with pytest.raises(RopewalkError) as caught:
        command(**options)
    assert message in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json" for name in texts}


@pytest.mark.parametrize(
    "start", [["-m", "ropewalk", "bench", "attention"], slow(["-m", "ropewalk.tools.bench.attention"])]
)
def test_missing_cuda_is_exit_code_2(start):
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command_line = [sys.executable, *start, "--device", "cuda"]
    result = subprocess.run(command_line, capture_output=True, text=True, check=False, env=hidden)
    assert result.returncode == 2
    assert "expected: a CUDA device and Triton" in result.stderr
    assert "or --device cpu" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_only_torch_is_required(tmp_path):
    code = (
        "import sys\nfor name in ('typer', 'rich', 'matplotlib'): sys.modules[name] = None\n"
        "from ropewalk.tools.bench import attention as bench_attention\n"
        "from ropewalk.tools.bench.attention import AttentionCase\n"
        "bench_attention.attention_cases = lambda *options: [AttentionCase((1, 2, 64, 8), 'float32')]\n"
        "sys.argv[1:] = {}\nbench_attention.main()"
    )
    measured = ["--device", "cpu", "--quick"]
    for arguments, expected in ((measured, 0), ([*measured, "--plot", str(tmp_path / "a.png")], 2)):
        run = [sys.executable, "-c", code.format(arguments)]
        result = subprocess.run(run, capture_output=True, text=True, check=False)
        assert result.returncode == expected, result.stderr
        assert ("pip install 'ropewalk[plots]'" in result.stderr) == (expected == 2)
        assert "profiler" not in result.stderr


def test_help():
    result = CliRunner().invoke(app, ["bench", "attention", "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    for option in ("--json", "--quick", "--plot", "--device", "--only", "--resume", "--from"):
        assert option in result.stdout
