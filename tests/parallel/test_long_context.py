"""examples/long_context.py: trains, survives being killed, and refuses checkpoints of other runs."""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "long_context.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TINY = ["--length", "128", "--dim", "32", "--layers", "1", "--heads", "2", "--batch", "2", "--lr", "0.01"]
# If a rank is aborted, it shows where each of its threads was.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
# A start is seconds. What takes longer than this waits for something that will not happen.
TIMEOUT = 300

pytestmark = pytest.mark.xdist_group("ranks")


def run(*options: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    start = TORCHRUN if ranks == 2 else [sys.executable]
    command = [*start, str(SCRIPT), *TINY, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT, env=ENVIRONMENT)


def losses_in(text: str) -> dict[int, float]:
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return {line["step"]: line["loss"] for line in lines}


def children_of(parent: int) -> list[int]:
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [pid for pid, ppid in (map(int, line.split()) for line in table.splitlines()) if ppid == parent]


def kill_after_step(step: int, out: Path, errors: Path) -> str:
    """Kill torchrun and its ranks, which write a checkpoint after each step. Return the losses that they have shown."""
    command = [*TORCHRUN, str(SCRIPT), *TINY, "--steps", "1000000", "--every", "1", "--out", str(out), "--json", "-"]
    with (
        errors.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=ENVIRONMENT) as process,
    ):
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(step)]
        for pid in [process.pid, *children_of(process.pid)]:
            os.kill(pid, signal.SIGKILL)
        # The pipe ends when every rank has ended. The last line can be half a line.
        lines += [line for line in process.stdout if line.endswith("}\n")]
    assert all(lines), errors.read_text()
    return "".join(lines)


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(tmp_path):
    out, log = tmp_path / "killed", tmp_path / "killed.jsonl"
    before = kill_after_step(6, out, tmp_path / "errors")
    step = max(int(path.name.removeprefix("step-")) for path in out.glob("step-*"))
    assert step >= 5
    # What is left if a rank is killed while it writes a checkpoint, and the log.
    (out / "unfinished").mkdir(exist_ok=True)
    (out / "unfinished" / "__0_0.distcp").write_bytes(b"half")
    log.write_text(before + '{"step": 9')
    steps = max(30, step + 5)
    resumed = run("--steps", steps, "--out", out, "--json", log, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resumed from {out}/step-{step}" in resumed.stdout
    assert [path.name for path in out.iterdir()] == [f"step-{steps}"]

    whole = run("--steps", steps, "--out", tmp_path / "whole", "--json", tmp_path / "whole.jsonl")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    losses = losses_in((tmp_path / "whole.jsonl").read_text())
    assert len(losses) == steps
    assert losses_in(log.read_text()) == losses
    shown = losses_in(before)
    assert shown == {step: losses.get(step, loss) for step, loss in shown.items()}

    # The output of a whole run.
    difference = re.search(r"those of one rank: relative difference (\S+)", whole.stdout)
    assert difference
    assert 0 < float(difference[1]) < 1e-10
    assert sum(losses[x] for x in range(steps - 4, steps + 1)) < 0.8 * sum(losses[x] for x in range(1, 6))
    assert re.search(r"tokens per second\npeak memory of the whole process, per rank: \d+, \d+ MiB\n", whole.stdout)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("long_context", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_without_a_checkpoint_is_not_mistaken_for_an_older_one(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/long-context-20200101-000000/step-5").mkdir(parents=True)
    started, _ = example.choose_folder(argparse.Namespace(resume=False, out=None))
    assert example.choose_folder(argparse.Namespace(resume=True, out=None)) == (started, 0)


def test_batches_are_functions_of_seed_and_step(example):
    text = torch.arange(251, dtype=torch.uint8)
    batches = [example.read_batch(text, seed, step, 4, 16) for seed, step in ((0, 1), (0, 1), (1, 1), (0, 2))]
    (inputs, targets), again, *others = batches
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, again[0])
    assert not any(torch.equal(inputs, x) for x, _ in others)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    out = tmp_path_factory.mktemp("one_rank") / "out"
    result = run("--steps", 3, "--out", out, "--attention", "linear", "--encoding", "alibi", "--json", "-", ranks=1)
    assert result.returncode == 0, result.stderr
    return out, result


def test_one_rank_without_torchrun(one_rank):
    out, result = one_rank
    # Standard output is what a machine reads.
    assert len(losses_in(result.stdout)) == 3
    assert result.stderr.startswith("linear attention, alibi, contiguous, float32, on c")
    assert [path.name for path in out.iterdir()] == ["step-3"]


@pytest.mark.slow
def test_a_checkpoint_of_another_number_of_ranks_is_an_error_on_every_rank(one_rank):
    out, _ = one_rank
    result = run("--steps", 5, "--out", out, "--attention", "linear", "--encoding", "alibi", "--resume")
    assert result.returncode != 0
    for rank in (0, 1):
        message = (
            f"rank {rank}: error: asked:    to resume from {out}/step-3\n  expected: ranks 1\n  got:      ranks 2\n"
        )
        assert message in result.stderr
    assert [path.name for path in out.iterdir()] == ["step-3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume", "--attention", "linear"], "expected: encoding alibi\n  got:      encoding rope\n"),
        ([], "--out: {out} has a checkpoint of step 3; pass --resume, or another folder"),
    ],
    ids=["other options", "a folder in use"],
)
def test_mistakes_are_errors(one_rank, options, message):
    out, _ = one_rank
    result = run("--out", out, *options, ranks=1)
    assert result.returncode != 0
    assert message.format(out=out) in result.stderr
    assert "Traceback" not in result.stderr
