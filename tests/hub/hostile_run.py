"""Hostile model folders, each converted in a process of its own, with little time and memory.

    PYTHONPATH=tests python -m hub.hostile_run 2000

Every conversion ends within the limits: with an output in which no private word is, or with one error of ropewalk's
that does not contain it, and nothing written. No file outside of the model is opened, and none inside is changed.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from hub.checkpoints import llama
from hub.hostile_folders import SECRET, hostile
from ropewalk.errors import RopewalkError
from ropewalk.hub import UnprovenError, convert_checkpoint, verify_conversion
from waiting import HANG

MEGABYTES, SECONDS = 200, 2.0


@dataclass(frozen=True)
class Made:
    """A folder with a hostile model in it: the model, the output to write, and what is outside of the model."""

    folder: Path
    model: Path
    out: Path

    @property
    def outside(self) -> Path:
        return self.folder / "outside"


def attempt(case: Made, seed: int) -> str:
    """The outcome in words: "converted" or "refused"; anything else is a fault. Runs in a process of its own."""
    outside, opened = os.path.realpath(case.outside), list[str]()

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str):
            # A link that is not followed is opened as itself, which fails.
            parent, name = os.path.split(args[0])
            nofollow = args[2] & os.O_NOFOLLOW
            place = os.path.join(os.path.realpath(parent), name) if nofollow else os.path.realpath(args[0])
            if place.startswith((outside, "/dev/", "/etc/")) or SECRET in place:
                opened.append(place)

    sys.addaudithook(watch)
    try:
        if seed % 10 == 0:
            # The hostile folder as the output that is proven, and as the source.
            right = llama(case.folder / "right")
            for pair in ((right, case.model), (case.model, right)):
                with contextlib.suppress(RopewalkError):
                    verify_conversion(*pair)
        convert_checkpoint(case.model, case.out, to="interleaved", verify=True)
        outcome = "converted"
    except (RopewalkError, UnprovenError) as error:
        text = str(error)
        outcome = "refused"
        if SECRET in text:
            outcome = "a private word in the error"
        elif len(text) > 20_000 or "\x1b" in text or (isinstance(error, RopewalkError) and text.count("\n") != 3):
            outcome = f"an error that is no message: {text[:300]!r}"
        elif isinstance(error, UnprovenError):
            outcome = f"unproven: {text[:300]!r}"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {str(error)[:300]!r}"
    return f"opened {opened[0]}" if opened else outcome


def look(case: Made, outcome: str, existed: bool) -> str:
    """The outcome, or what is wrong with what is on the disk afterwards."""
    if outcome not in ("converted", "refused"):
        return outcome
    partial = case.folder / "out.ropewalk-partial"
    if partial.is_dir() and not partial.is_symlink():
        return "a partial output is left"
    if outcome == "refused":
        return outcome if existed or not os.path.lexists(case.out) else "an output of what was refused"
    for path in case.out.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            return f"no regular file: {path}"
        if path.is_file() and SECRET.encode() in path.read_bytes():
            return f"a private word in {path}"
        source = case.model / path.relative_to(case.out)
        if stat.S_IMODE(path.stat().st_mode) & ~stat.S_IMODE(source.stat().st_mode):
            return f"wider permissions: {path}"
    return outcome


def state(folder: Path) -> dict[str, tuple[int, int, int]]:
    """What is in a folder: kind and permissions, size and time of change."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(place, name))
            found[os.path.join(place, name)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


@dataclass(frozen=True)
class Used:
    """What a process took: seconds, seconds of a processor, megabytes."""

    seconds: float = 0.0
    processor: float = 0.0
    megabytes: float = 0.0

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s, {self.processor:.2f} s of a processor, {self.megabytes:.0f} MB"

    def most(self, other: "Used") -> "Used":
        """The larger of each."""
        return Used(*map(max, astuple(self), astuple(other)))


def in_child(work: Callable[[], str], limit: float) -> tuple[str, Used]:
    """What `work` says in a process of its own that is ended after `limit` seconds, and what that took."""
    reading, writing = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if not child:
        # Not a handler in Python, which would wait for a call that never returns.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            os.write(writing, work().encode(errors="replace"))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status, usage = os.wait4(child, 0)
    used = Used(time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
    return (f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else said), used


def make(folder: Path, seed: int) -> str:
    """Makes the folder of a seed; the paths of model and output, and what was done."""
    case, names = hostile(folder, seed)
    return json.dumps([str(case.model), str(case.out), ", ".join(names)])


def run(seeds: range, limit: float) -> Iterator[tuple[int, str, str, Used]]:
    """Each folder: its seed, what was done to it, the outcome, and what it took."""
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        try:
            # In a process of its own, too: what it leaves in memory is not counted as the conversion's.
            made, _ = in_child(lambda folder=folder, seed=seed: make(folder, seed), HANG)
            if not made.startswith("["):
                raise RuntimeError(f"the folder of seed {seed} cannot be made: {made}")
            model, out, names = json.loads(made)
            case = Made(folder, Path(model), Path(out))
            before, existed = (state(case.outside), state(case.model)), os.path.lexists(case.out)
            outcome, used = in_child(lambda case=case, seed=seed: attempt(case, seed), limit)
            outcome = look(case, outcome, existed)
            if outcome in ("converted", "refused"):
                outcome = outcome if (state(case.outside), state(case.model)) == before else "the source was changed"
                outcome = outcome if used.megabytes <= MEGABYTES else "too much memory"
                outcome = outcome if used.processor <= SECONDS else "too much time"
            yield seed, names, outcome, used
        finally:
            for place, _, _ in os.walk(folder):
                os.chmod(place, 0o700)
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Converts hostile model folders, each in a process of its own.")
    parser.add_argument("count", type=int, help="how many folders")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--limit",
        type=float,
        default=SECONDS,
        help="seconds per folder by the clock; 2 s of a processor hold always",
    )
    options = parser.parse_args()
    outcomes, most = Counter[str](), Used()
    for seed, names, outcome, used in run(range(options.first, options.first + options.count), options.limit):
        most = most.most(used)
        right = outcome in ("converted", "refused")
        outcomes[outcome if right else "faults"] += 1
        if not right:
            sys.stdout.write(f"seed {seed} ({names}): {outcome}; {used}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{options.count} folders: {dict(outcomes)}; at most {most}\n")
    return min(outcomes["faults"], 1)


if __name__ == "__main__":
    sys.exit(main())
