"""ropewalk bench cpu: the paths, the output, and that a wrong path gets no time. No test depends on a time."""

import io
import json
import re
from typing import Any

import pytest
import torch
from rich.console import Console

from ropewalk.tools.bench import cpu as bench_cpu
from ropewalk.tools.bench import peers
from ropewalk.tools.bench.cpu import Case, cases, measure
from ropewalk.tools.bench.truth import Truth
from tools.command import ropewalk


def lines_of(case, **options):
    lines: dict[str, Any] = {line.path: line for line in measure(case, rounds=1, compiled=False, **options)}
    return lines


@pytest.mark.parametrize("work", ["forward", "forward, grad", "forward+backward"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_path_with_the_pairing_is_timed(dtype, pairing, work):
    lines = lines_of(Case(64, dtype, pairing, "transposed", work))
    expected = {"copy", "ropewalk", "ropewalk, torch", "transformers' formula"}
    if pairing == "interleaved":
        expected |= {"complex product", "seed, table cut", "seed, table gathered", "rotary-embedding-torch"}
    assert set(lines) == expected
    assert lines["ropewalk"].error_over_budget <= 1
    assert lines["ropewalk"].ratio_to_ropewalk == 1
    assert lines["copy"].share_of_copy == 1
    moved = 2 * 64 * 40 * 128 * (4 if dtype == "float32" else 2) * (2 if work == "forward+backward" else 1)
    for line in lines.values():
        if line.ms is not None:
            assert line.gb_per_s == pytest.approx(moved / line.ms * 1e-6)
            assert line.share_of_copy == pytest.approx(lines["copy"].ms / line.ms)


def test_decoding_is_checked_at_its_position():
    lines = lines_of(Case(1, "float32", "interleaved", "contiguous", "forward"))
    assert all(line.ms is not None for line in lines.values())
    assert lines["transformers' formula"].error_over_budget > 0


@pytest.mark.parametrize("work", ["forward", "forward+backward"])
def test_a_wrong_path_gets_no_time(monkeypatch, work):
    def wrong_way(positions, dim, dtype, pairing):
        right = peers.transformers_formula(positions, dim, dtype, pairing)
        return lambda q, k: tuple(2 * x - y for x, y in zip((q, k), right(q, k), strict=True))

    def wrong_backward(positions, dim, dtype, pairing):
        right = peers.transformers_formula(positions, dim, dtype, pairing)

        def rotate(q, k):
            return tuple(y.detach() + 0 * x + (x - x.detach()) for x, y in zip((q, k), right(q, k), strict=True))

        return rotate

    monkeypatch.setitem(peers.PEERS, "wrong", (wrong_way, False))
    monkeypatch.setitem(peers.PEERS, "wrong backward", (wrong_backward, False))
    lines = lines_of(Case(64, "float32", "half", "contiguous", work))
    assert lines["wrong"].ms is None
    assert lines["wrong"].error_over_budget > 1000
    assert (lines["wrong backward"].ms is None) == (work == "forward+backward")
    shown = Console(width=80, record=True, file=io.StringIO())
    shown.print(bench_cpu._table(Case(64, "float32", "half", "contiguous", work), list(lines.values())))
    assert "wrong  " in shown.export_text()


def test_our_own_path_beyond_its_budget_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(bench_cpu, "cases", lambda quick: [Case(8, "float32", "half", "contiguous", "forward")])
    assert bench_cpu.bench_cpu(quick=True) == 0
    monkeypatch.setattr(Truth, "errors", lambda *arguments: (1.5, 0.0))
    assert bench_cpu.bench_cpu(quick=True) == 1
    assert "wrong" in capsys.readouterr().out


def test_nan_is_an_infinite_error():
    x = torch.ones(1, 1, 2, 4)
    inv_freq = torch.tensor([1.0, 0.1], dtype=torch.float64)
    truth = Truth.of_rotation(x, torch.arange(2), inv_freq, "half", False)
    right = truth.value.float()
    assert truth.errors(right)[0] <= 1
    assert truth.errors(right + 0.1)[1] == pytest.approx(0.1 / 2**0.5, rel=1e-4)
    right[0, 0, 1, 3] = torch.nan
    assert min(truth.errors(right)) == torch.inf
    assert truth.errors(truth.value) == (torch.inf, torch.inf)
    assert truth.errors(right[..., :1, :]) == (torch.inf, torch.inf)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_peer_that_is_right_at_most_tokens_or_almost_right_gets_no_time(monkeypatch, dtype):
    def one_token_wrong(positions, dim, kind, pairing):
        right = peers.transformers_formula(positions, dim, kind, pairing)

        def rotate(q, k):
            q, k = right(q, k)
            q[:, :, 300] = 0
            return q, k

        return rotate

    def mixed(positions, dim, kind, pairing):
        right = peers.transformers_formula(positions, dim, kind, pairing)
        return lambda q, k: tuple(0.98 * y + 0.02 * x for x, y in zip((q, k), right(q, k), strict=True))

    monkeypatch.setitem(peers.PEERS, "one token wrong", (one_token_wrong, False))
    monkeypatch.setitem(peers.PEERS, "mixed", (mixed, False))
    lines = lines_of(Case(512, dtype, "half", "contiguous", "forward"))
    assert lines["transformers' formula"].ms is not None
    assert lines["one token wrong"].ms is None
    assert lines["mixed"].ms is None


def test_cases():
    assert len(set(cases(quick=False))) == 24
    assert {case.work for case in cases(quick=True)} == {"forward"}


@pytest.mark.slow
def test_the_compiled_forms():
    lines = {line.path for line in measure(Case(16, "float32", "half", "transposed", "forward"), 1, compiled=True)}
    assert {"ropewalk, compiled", "transformers' formula, compiled"} <= lines


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    # Two of its cases: the others have the same paths, and take a minute.
    some = {case.dtype: case for case in cases(quick=True)}
    assert set(some) == {"float32", "bfloat16"}
    monkeypatch.setattr(bench_cpu, "cases", lambda quick: list(some.values()) if quick else [])
    target = tmp_path / "figures.json"
    result = ropewalk("bench", "cpu", "--quick", "--json", str(target))
    assert result.returncode == 0, result.stderr
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    record = json.loads(target.read_text(encoding="utf-8"))
    assert record["command"] == "ropewalk bench cpu --quick"
    assert {"date", "hardware", "versions", "rounds"} <= set(record)
    assert [case["dtype"] for case in record["cases"]] == list(some)
    for case in record["cases"]:
        assert next(line for line in case["lines"] if line["path"] == "ropewalk")["error_over_budget"] <= 1


@pytest.mark.parametrize("arguments", [("bench", "--backends"), ("bench", "cpu", "--backends")])
def test_backends_are_listed_with_their_reasons(arguments):
    result = ropewalk(*arguments)
    assert result.returncode == 0
    assert "torch: ready" in result.stdout
    assert "native: ready (" in result.stdout
    assert re.search(r"triton: (ready|PyTorch sees no CUDA device)", result.stdout)


def test_an_output_that_cannot_be_written_is_rejected_before_timing(tmp_path):
    result = ropewalk("bench", "cpu", "--json", str(tmp_path / "nowhere" / "figures.json"))
    assert result.returncode == 2
    assert "create the folder first" in result.stderr
    assert "Traceback" not in result.stderr
