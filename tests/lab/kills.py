"""Kill `ropewalk lab run` with SIGKILL after a random step, and resume it."""

import hashlib
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["kill_and_resume", "weights_of", "whole_run"]

STEPS = 12
COMMAND = ["run", "convergence", "--only", "rope", "--seeds", "1", "--device", "cpu", "--jobs", "1"]
COMMAND += ["--steps", str(STEPS), "--every", "1", "--save-every", "1"]


def whole_run(out: Path, ranks: int) -> Path:
    """A run that is not killed; with several ranks torchrun starts it."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [sys.executable, "-m", *(torchrun if ranks > 1 else []), "ropewalk.lab", *COMMAND, "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return out


def kill_and_resume(out: Path, ranks: int, seed: int) -> int:
    """Kill all ranks of a run after a random step, resume it to the end, and return the step of its checkpoint."""
    last = random.Random(seed).randrange(2, STEPS - 1)
    processes = _start(out, ranks)
    while not any(_lines(path) > last for path in out.glob("*/losses.jsonl")):
        assert all(process.exitcode is None for process in processes)
        os.sched_yield()
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
        assert process.exitcode == -signal.SIGKILL
    steps = [int(path.name.removeprefix("step-")) for path in out.glob("*/step-*")]
    assert not list(out.glob("*/result.json"))
    for process in (resumed := _start(out, ranks, "--resume")):
        process.join()
    assert [process.exitcode for process in resumed] == [0] * ranks
    return max(steps)


def _start(out: Path, ranks: int, *options: str) -> list[BaseProcess]:
    """Processes that run the command as torchrun's do. They are forked from one that has imported it already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ropewalk.tools.lab.command", "ropewalk.lab.conduct", "lab.preloaded_text"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*COMMAND, "--out", str(out), *options]
    processes = [context.Process(target=_rank, args=(words, rank, ranks, port)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return list(processes)


def _rank(words: list[str], rank: int, ranks: int, port: int) -> None:
    if ranks > 1:
        fields = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in fields.items()})
    sys.argv = ["ropewalk.lab", *words]
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing):
        runpy.run_module("ropewalk.lab", run_name="__main__")


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def weights_of(out: Path) -> str:
    """A hash of the weights of the only run in a folder."""
    (path,) = out.glob("*/model/model.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()
