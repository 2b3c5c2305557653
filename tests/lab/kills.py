"""Kill `ropewalk lab run` with SIGKILL after a random step, and resume it."""

import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["kill_and_resume", "weights_of", "whole_run"]

STEPS = 40
COMMAND = ["run", "convergence", "--only", "rope", "--seeds", "1", "--device", "cpu", "--jobs", "1"]
COMMAND += ["--steps", str(STEPS), "--every", "1", "--save-every", "1"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def _command(out: Path, ranks: int, *options: str) -> list[str]:
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [*start, "ropewalk.lab", *COMMAND, "--out", str(out), *options]


def whole_run(out: Path, ranks: int) -> Path:
    """A run that is not killed."""
    subprocess.run(_command(out, ranks), check=True, capture_output=True, env=ENVIRONMENT)
    return out


def kill_and_resume(out: Path, ranks: int, seed: int) -> int:
    """Kill all processes of a run after a random step, resume it to the end, and return the step of its checkpoint."""
    last = random.Random(seed).randrange(2, STEPS - 1)
    # A new session, so that all its processes can be killed at once.
    with subprocess.Popen(
        _command(out, ranks), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT, start_new_session=True
    ) as process:
        while process.poll() is None and not any(_lines(path) > last for path in out.glob("*/losses.jsonl")):
            os.sched_yield()
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.stderr and process.stderr.read()
    steps = [int(path.name.removeprefix("step-")) for path in out.glob("*/step-*")]
    assert not list(out.glob("*/result.json"))
    subprocess.run(_command(out, ranks, "--resume"), check=True, capture_output=True, env=ENVIRONMENT)
    return max(steps)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def weights_of(out: Path) -> str:
    """A hash of the weights of the only run in a folder."""
    (path,) = out.glob("*/model/model.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()
