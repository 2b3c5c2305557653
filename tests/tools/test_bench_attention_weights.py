"""ropewalk bench attention on a GPU: decays, biases, functions of fla with a decay, the clock.

The cases run on a CPU with small shapes. No test depends on a time.
"""

import json
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

from ropewalk.reference import alibi_bias, linear_attention_by_sum
from ropewalk.spec.rope import RopeSpec
from ropewalk.tools.bench import attention as bench_attention
from ropewalk.tools.bench import attention_paths, attention_record, floors, timing
from ropewalk.tools.bench.attention import AttentionCase
from ropewalk.tools.bench.attention import bench_attention as command
from ropewalk.tools.bench.attention_paths import PEERS, PLAIN, WEIGHTS, AttentionPath
from ropewalk.tools.bench.attention_record import faster_from
from ropewalk.tools.bench.attention_truth import LIMITS, Truth
from ropewalk.tools.bench.floors import attention_floors
from ropewalk.tools.bench.records import write_record
from slow import slow
from tools.test_bench_attention import TINY, drawn, lines_of

RATIOS = {"ropewalk decay": 1.15, "ropewalk ALiBi": 1.15, "ropewalk T5": 2.0}
RATIOS |= {"ropewalk ALiBi, two-way": 2.0, "ropewalk T5, two-way": 2.0}
SAME = {"fla retention": "ropewalk retention", "fla lightning": "ropewalk lightning"}
SAME["fla simple GLA"] = "ropewalk token decay"


def fake_decays(monkeypatch, *, factor=1.0):
    """The functions of fla with a decay, [batch, seq, heads, dim], as explicit sums times `factor`."""

    def summed(q, k, v, g, scale):
        q, k, v, g = (x.transpose(1, 2) for x in (q * scale, k, v, g[..., None]))
        until = g.to(q.dtype).cumsum(2)
        kept = torch.exp(until - until.transpose(-1, -2)).tril()
        return factor * ((q @ k.transpose(-1, -2)) * kept @ v).transpose(1, 2), None

    def retention(q, k, v, scale):
        heads = torch.arange(q.shape[2])
        return summed(q, k, v, torch.log(1 - 2.0 ** (-5.0 - heads)).expand(q.shape[:3]), scale)

    def lightning(q, k, v, layer_idx, num_layers, scale):
        heads = q.shape[2]
        g = -(8 / heads * (1 - layer_idx / num_layers)) * torch.arange(heads)
        return summed(q, k, v, g.expand(q.shape[:3]), scale)

    for name, members in {
        "fla.ops.retention": {"chunk_retention": retention},
        "fla.ops.lightning_attn": {"chunk_lightning_attn": lightning},
        "fla.ops.simple_gla": {"chunk_simple_gla": summed},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        attention_paths, "_fla_function", lambda module, name, device: getattr(sys.modules[module], name)
    )


@pytest.mark.parametrize(
    ("seq", "work"), [(140, "forward"), (140, "forward+backward"), slow(530, "forward"), slow(530, "forward+backward")]
)
def test_decays_and_biases_are_checked_and_timed(seq, work):
    lines = lines_of(AttentionCase((2, 2, seq, 8), "float32", work, sweep=False, group="weights"))
    assert lines.keys() == WEIGHTS.keys() == {PLAIN, *RATIOS}
    assert all(limits.keys() == lines.keys() for limits in floors.ATTENTION_MS.values())
    assert all(line.ms > 0 and 0 < line.error <= LIMITS["float32"] for line in lines.values())
    assert {line.difference for line in lines.values()} == {None}


@pytest.mark.parametrize(("kind", "other"), [("decay", "rope"), ("two-way t5", "t5 and rope"), ("gated", "retention")])
def test_a_path_of_another_kind_is_wrong(kind, other, monkeypatch):
    """The reference distinguishes decays, biases and directions."""
    monkeypatch.setitem(WEIGHTS, "altered", AttentionPath(attention_paths.ours(other), kind))
    line = lines_of(AttentionCase((1, 2, 40, 8), "float32", sweep=False, group="weights"))["altered"]
    assert line.ms is None
    assert line.error > 0.01


def test_the_reference_of_two_ways_is_the_whole_sum():
    tensors = drawn((1, 2, 600, 8))[:3]
    whole = linear_attention_by_sum(
        *(x.double() for x in tensors),
        inv_freq=torch.as_tensor(RopeSpec(8).inv_freq()),
        bias=alibi_bias(torch.arange(600), torch.arange(600), 2),
    )
    truth = Truth("two-way alibi", tensors, None)
    assert torch.allclose(truth.parts[0], whole[:, :, truth.tokens], rtol=0, atol=1e-12)


@pytest.mark.parametrize("work", ["forward", "forward+backward"])
def test_functions_of_fla_with_a_decay_agree_with_ours(monkeypatch, work):
    case = AttentionCase((2, 3, 40, 8), "float32", work, sweep=False, group="peers")
    assert lines_of(case).keys() == set(SAME.values())
    fake_decays(monkeypatch)
    lines = lines_of(case)
    assert lines.keys() == PEERS.keys()
    assert all(line.ms > 0 for line in lines.values())
    assert all(0 < lines[name].difference < 1e-5 for name in SAME)
    assert {lines[name].difference for name in SAME.values()} == {None}
    assert {name: path.beside for name, path in PEERS.items() if path.beside} == SAME
    fake_decays(monkeypatch, factor=1.02)
    assert [round(lines_of(case)[name].difference, 4) for name in SAME] == [0.02] * 3


def test_a_difference_without_a_number_is_infinite():
    x = torch.ones(2, 3)
    assert bench_attention._difference(x * 1.5, x) == 0.5
    assert bench_attention._difference(x * torch.nan, x) == torch.inf
    assert bench_attention._difference(x[:1], x) == torch.inf


def test_every_call_by_the_clock_is_waited_for():
    events = []
    candidates = [timing.Candidate(name, lambda name=name: events.append(name)) for name in "ab"]
    assert bench_attention._clock(candidates, 3, lambda: events.append("wait")).keys() == {"a", "b"}
    assert events[0] == "wait"
    assert events[2::2] == ["wait"] * 10


def test_times_by_the_clock_belong_to_a_gpu(monkeypatch):
    monkeypatch.setattr(bench_attention, "_clock", lambda candidates, rounds: {"a": 0.5})
    assert bench_attention._clock_times([], 1, "cuda", bench_attention.CLOCKED) == {"a": 0.5}
    assert bench_attention._clock_times([], 1, "cuda", bench_attention.CLOCKED + 1) == {}
    assert bench_attention._clock_times([], 1, "cpu", 64) == {}


def gpu_case(group, times, *, shape=(1, 16, 65536, 64), work="forward", sweep=False, **options):
    lines = [
        {"path": path, "ms": ms, "wall_ms": ms, "temporaries_over_qkv": 0.5, "difference": None} | options
        for path, ms in times.items()
    ]
    return {"shape": list(shape), "dtype": "bfloat16", "work": work, "sweep": sweep, "group": group, "lines": lines}


@pytest.mark.parametrize("shape", floors.ATTENTION_MS)
@pytest.mark.parametrize("work", ["forward", "forward+backward"])
def test_decays_and_biases_beyond_a_limit_miss_their_floors(shape, work):
    times = {path: limits[work != "forward"] for path, limits in floors.ATTENTION_MS[shape].items()}

    def missed(changed):
        return attention_floors("cuda", [gpu_case("weights", times | changed, shape=shape, work=work)], [])

    title = f"{shape}, bfloat16, weights, {work}"
    assert missed({}) == []
    for path, most in times.items():
        assert missed({path: 1.01 * most}) == [f"{title}: {path} takes {1.01 * most:.3g} ms, above {most}"]
        assert missed({path: None}) == [f"{title}: {path} has no time"]


def test_functions_of_fla_that_differ_from_ours_miss_a_floor():
    times = {"ropewalk retention": 1.0, "fla retention": 1.0}
    title = "(1, 16, 65536, 64), bfloat16, peers, forward"
    for difference, words in ((0.01, []), (0.011, ["0.011"]), (torch.inf, ["inf"])):
        case = gpu_case("peers", times)
        case["lines"][1]["difference"] = difference
        expected = [f"{title}: fla retention differs from ropewalk by {word}, above 0.01" for word in words]
        assert attention_floors("cuda", [case], []) == expected
    assert attention_floors("cuda", [gpu_case("peers", {"ropewalk retention": None})], []) == [
        f"{title}: ropewalk retention has no time"
    ]


def test_linear_attention_that_loses_by_the_clock_misses_a_floor():
    def missed(seq, ours, **options):
        times = {PLAIN: 0.1, "softmax (SDPA)": 0.2}
        case = gpu_case("lengths", times, shape=(1, 16, seq, 64), sweep=True)
        case["lines"][0] |= {"wall_ms": ours} | options
        return attention_floors("cuda", [case], [])

    assert missed(4096, 0.19) == missed(2048, 0.3) == []
    (words,) = missed(4096, 0.21)
    assert words.endswith(f"{PLAIN} is not faster than softmax by the clock")
    # A record without times by the clock has not measured them.
    case = gpu_case("lengths", {PLAIN: 0.1, "softmax (SDPA)": 0.2}, shape=(1, 16, 4096, 64), sweep=True)
    for line in case["lines"]:
        del line["wall_ms"]
    del case["group"]
    assert attention_floors("cuda", [case], []) == []


def test_the_crossing_point_by_the_clock_and_on_the_device():
    def case(seq, work, device, clock):
        paths = {PLAIN: (1.0, 1.0), "softmax (SDPA)": (device, clock)}
        lines = [{"path": path, "ms": ms, "wall_ms": wall} for path, (ms, wall) in paths.items()]
        return {"shape": [1, 16, seq, 64], "work": work, "sweep": True, "lines": lines}

    # Faster at 1024, but not at 2048: only the lengths from 4096 on count.
    clocks = {65536: 9.0, 1024: 1.1, 2048: 0.9, 4096: 1.1, 8192: None}
    cases = [case(seq, "forward", 2.0, clock) for seq, clock in clocks.items()]
    cases.append(case(1024, "forward+backward", 0.5, 0.5))
    assert faster_from(cases, "forward", "ms") == 1024
    assert faster_from(cases, "forward", "wall_ms") == 4096
    assert faster_from(cases, "forward+backward", "ms") is None
    shown = attention_record.shown_crossing({"device": "cuda", "cases": cases})
    assert "on the device:\n  forward                               1024\n" in shown
    assert "by the clock:\n  forward                               4096\n" in shown
    assert "  forward+backward                     never\n" in shown


def test_the_tables_of_a_record(tmp_path, monkeypatch):
    benchmarks = Path(__file__).parent.parent.parent / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    render = runpy.run_path(str(benchmarks / "render.py"))
    weights = {PLAIN: 0.4} | {path: 0.4 * ratio for path, ratio in RATIOS.items()}
    peers = gpu_case("peers", dict.fromkeys(PEERS, 0.5))
    peers["lines"][1]["difference"] = 0.002
    lengths = {PLAIN: 0.2, "softmax (SDPA)": 0.3}
    cases = [gpu_case("weights", weights), peers]
    cases += [gpu_case("lengths", lengths, work=work, sweep=True) for work in ("forward", "forward+backward")]
    write_record({"command": "bench", "cases": cases}, str(tmp_path / "attention_gpu.json"), missed=[])
    render["read_from"](tmp_path)
    blocks = render["BLOCKS"]
    shape = "| (1, 16, 65536, 64), forward |"
    assert f"{shape} 0.4 | 1.15 × | 1.15 × | 2.00 × | 2.00 × | 2.00 × |" in blocks["linear-weights"]("")
    text = blocks["linear-peers"]("")
    assert f"{shape} 0.5 (fla: 0.5) | 0.5 (fla: 0.5) | 0.5 (fla: 0.5) |" in text
    assert "at most 2.0e-03" in text
    text = blocks["linear-clock"]("")
    assert "| 65536 | 0.2 | 0.3 | 0.2 | 0.3 |" in text
    assert "faster from 65536 tokens on forward, and from 65536 with the backward pass" in text


def test_one_part_alone(monkeypatch, tmp_path, capsys):
    cases = [*TINY[:1], AttentionCase((1, 2, 40, 8), "float32", sweep=False, group="weights")]
    monkeypatch.setattr(bench_attention, "attention_cases", lambda device, quick: cases)
    target = tmp_path / "figures.json"
    assert command(str(target), quick=True, device="cpu", only="lengths") == 0
    record = json.loads(target.read_text(encoding="utf-8"))
    assert record["command"] == "ropewalk bench attention --device cpu --quick --only lengths"
    assert [case["group"] for case in record["cases"]] == ["lengths"]
    capsys.readouterr()
    # Cases of other groups belong to a GPU.
    monkeypatch.setattr(bench_attention, "_device", lambda device, asked: "cuda")
    monkeypatch.setattr(bench_attention, "_hardware", lambda device: {"gpu": "none"})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    measured = bench_attention.measure
    monkeypatch.setattr(bench_attention, "measure", lambda case, rounds, device, left_out: measured(case, 1, "cpu"))
    assert command(str(target), only="weights") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "Growth" not in out
    record = json.loads(target.read_text(encoding="utf-8"))
    assert [line["path"] for line in record["cases"][0]["lines"]].count("ropewalk T5, two-way") == 1
    assert len(record["cases"]) == 1


@pytest.mark.slow
def test_an_interrupted_run_is_continued(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_attention, "attention_cases", lambda device, quick: TINY[:2])
    target, measured = tmp_path / "figures.json", bench_attention.measure
    seen = []

    def measure(case, *rest):
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(case)
        return measured(case, *rest)

    monkeypatch.setattr(bench_attention, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        command(str(target), quick=True, device="cpu")
    first = json.loads(target.read_text(encoding="utf-8"))["cases"]
    assert len(first) == 1
    monkeypatch.setattr(bench_attention, "measure", lambda case, *rest: seen.append(case) or measured(case, *rest))
    capsys.readouterr()
    assert command(str(target), quick=True, device="cpu", resume=True) == 0
    cases = json.loads(target.read_text(encoding="utf-8"))["cases"]
    assert cases[0] == first[0]
    assert [tuple(case["shape"]) for case in cases] == [case.shape for case in TINY[:2]]
    assert seen == list(TINY[:2])
    assert "1 of 2 is in" in capsys.readouterr().err


def test_functions_of_fla_need_fla_and_a_gpu(monkeypatch):
    theirs = [path for path in PEERS.values() if path.tokens_first]
    assert [path.maker(40, 8, torch.float32, "cuda") for path in theirs] == [None] * 3
    fake = types.ModuleType("fla.ops.retention")
    vars(fake)["chunk_retention"] = len
    monkeypatch.setitem(sys.modules, "fla.ops.retention", fake)
    monkeypatch.setattr(attention_paths, "installed", lambda package: True)
    assert attention_paths._fla_function("fla.ops.retention", "chunk_retention", "cuda") is len
    assert attention_paths._fla_function("fla.ops.retention", "chunk_retention", "cpu") is None
