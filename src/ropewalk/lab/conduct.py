"""conduct: train all runs of an experiment, several at a time, and judge its statements. It can be resumed."""

import dataclasses
import json
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ropewalk.errors import RopewalkError
from ropewalk.lab.checkpoints import require_same
from ropewalk.lab.experiment import Arm, Experiment, Outcome, about, judge
from ropewalk.lab.export import export, load_weights, whole_state
from ropewalk.lab.ranks import on_rank_0, rank_and_ranks
from ropewalk.lab.run import Run, make_task
from ropewalk.lab.training import Interrupted, RunResult, Settings, Training, Wish, config_of, side_by_side, training

__all__ = [
    "Findings",
    "Progress",
    "conduct",
    "default_jobs",
    "incomplete",
    "performing",
    "result_of",
    "runs_of",
    "with_seed",
]

# Called with a run, its step and its loss.
Progress = Callable[[Run, int, float], None]


@dataclass(frozen=True)
class Findings:
    """What an experiment has found.

    Attributes:
        experiment: The experiment, with the statements that are judged.
        size: Size of its models.
        arms: Its arms, with those of the user.
        seeds: The seeds.
        results: Results by label, one mapping per seed.
        outcomes: The verdict on each statement.
    """

    experiment: Experiment
    size: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    results: tuple[dict[str, RunResult], ...]
    outcomes: tuple[Outcome, ...]


def runs_of(arms: Sequence[Arm], seeds: Sequence[int]) -> list[Run]:
    """All runs, each once, parents before children, and one seed after the other.

    >>> [run.seed for run in runs_of([Arm("rope", Run("rope"))], [0, 1])]
    [0, 1]
    """
    runs: dict[str, Run] = {}
    for seed in seeds:
        for arm in arms:
            for run in _family(with_seed(arm.run, seed)):
                runs.setdefault(run.key, run)
    return sorted(runs.values(), key=lambda run: len(list(_family(run))))


def with_seed(run: Run, seed: int) -> Run:
    """The run and its parents with another seed."""
    parent = None if run.parent is None else with_seed(run.parent, seed)
    return dataclasses.replace(run, seed=seed, parent=parent)


def _family(run: Run) -> Iterator[Run]:
    if run.parent is not None:
        yield from _family(run.parent)
    yield run


def conduct(
    experiment: Experiment,
    arms: Sequence[Arm],
    size: str,
    seeds: Sequence[int],
    settings: Settings,
    out: Path,
    *,
    jobs: int = 1,
    abreast: int = 1,
    progress: Progress | None = None,
) -> Findings:
    """Train what is not trained yet, and judge.

    Args:
        experiment: The experiment.
        arms: Its arms, with seed 0.
        size: Size of the models.
        seeds: The seeds.
        settings: How runs are computed.
        out: Folder of all runs; a run that is complete there is not repeated, and an incomplete one is resumed.
        jobs: Number of processes that train at the same time, for one rank.
        abreast: Number of runs that one process trains at the same time, one step of each after the other.
        progress: Called after every validation.

    Returns:
        The findings.

    Raises:
        RopewalkError: If a run cannot be trained.
        Interrupted: After Ctrl-C, when every process has written a checkpoint.
    """
    runs = runs_of(arms, seeds)
    waiting = [runs[i] for i in on_rank_0(lambda: incomplete(runs, settings, out))]
    if rank_and_ranks()[1] > 1 or jobs == 1 or len(waiting) < 2:
        _perform_here(waiting, settings, out, progress, count=abreast)
    else:
        for generation in _generations(waiting):
            _perform_in_processes(generation, settings, out, jobs, progress)
    results = tuple({arm.label: _read_result(with_seed(arm.run, seed), out) for arm in arms} for seed in seeds)
    # Statements about arms that were left out are left out too.
    statements = tuple(x for x in experiment.statements if all(about(x, of_seed) for of_seed in results))
    experiment = dataclasses.replace(experiment, statements=statements)
    outcomes = tuple(judge(statement, results) for statement in statements)
    return Findings(experiment, size, tuple(arms), tuple(seeds), results, outcomes)


def performing(
    run: Run,
    settings: Settings,
    out: Path,
    *,
    stop: Wish | None = None,
    report: Callable[[int, float], None] | None = None,
) -> Training[None]:
    """Train one run, and write its model and its result to the folder `out`/KEY. It yields after every step."""
    folder, task = out / run.key, make_task(run)
    try:
        parent = None if run.parent is None else load_weights(run.parent, out / run.parent.key / "model")
        steps = training(run, settings, folder, parent=parent, task=task, stop=stop, report=report)
        model, result = yield from steps
        state = whole_state(model)

        def write() -> None:
            export(model, run, folder / "model", state)
            part = folder / "result.part"
            entries = {"config": config_of(run, settings, task.digest), **dataclasses.asdict(result)}
            part.write_text(json.dumps({"run": run.as_json(), **entries}), encoding="utf-8")
            part.rename(_result_file(run, out))

        on_rank_0(write)
    except OSError as error:
        raise RopewalkError(
            asked=f"files of a run in {folder}",
            expected="a disk with room for its losses, its model and its result",
            got=f"{type(error).__name__}: {error}",
            do="free some space, and use --resume: the last complete checkpoint is kept",
        ) from error


def incomplete(runs: Sequence[Run], settings: Settings, out: Path) -> list[int]:
    """Find the runs that have no result yet.

    Args:
        runs: Runs.
        settings: How they are computed.
        out: Folder of all runs.

    Returns:
        Their indices.

    Raises:
        RopewalkError: If a result was computed with other options.
    """
    waiting: list[int] = []
    for index, run in enumerate(runs):
        path = _result_file(run, out)
        if not path.exists():
            waiting.append(index)
            continue
        stored, config = _stored(path).get("config", {}), config_of(run, settings, make_task(run).digest)
        require_same(stored, config, asked=f"to use the result in {path.parent}")
    return waiting


@contextmanager
def _stops_on_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set. A second signal ends the process at once."""
    stop, before = threading.Event(), {}

    def request(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _perform_here(runs: Sequence[Run], settings: Settings, out: Path, progress: Progress | None, *, count: int) -> None:
    with _stops_on_signals() as stop:
        reports = [None if progress is None else _bound(progress, run) for run in runs]
        # Children need the weights of their parents, which are complete before.
        for generation in _generations(runs):
            steps = (
                performing(run, settings, out, stop=stop, report=report)
                for run, report in zip(runs, reports, strict=True)
                if run in generation
            )
            side_by_side(steps, settings.device, count=count)


def _generations(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs without a parent, their children, and so on."""
    depths = [len(list(_family(run))) for run in runs]
    return [[run for run, n in zip(runs, depths, strict=True) if n == depth] for depth in sorted(set(depths))]


def _bound(progress: Progress, run: Run) -> Callable[[int, float], None]:
    return lambda step, loss: progress(run, step, loss)


def _perform_in_processes(
    runs: Sequence[Run], settings: Settings, out: Path, jobs: int, progress: Progress | None
) -> None:
    # Not fork: threads of torch do not survive it.
    context = multiprocessing.get_context("spawn")
    wish = context.Event()
    with ExitStack() as stack:
        stop = stack.enter_context(_stops_on_signals())
        with _blocking_interrupts():
            manager = stack.enter_context(context.Manager())
            prepared = ProcessPoolExecutor(min(jobs, len(runs)), context, _prepare_process, (wish,))
            pool, messages = stack.enter_context(prepared), manager.Queue()
            try:
                waiting: list[Future[None]] = [
                    pool.submit(_perform_alone, run, settings, out, messages) for run in runs
                ]
            except BrokenProcessPool:
                raise _ended_abruptly(len(runs), jobs) from None
        by_key = {run.key: run for run in runs}
        while True:
            done = all(future.done() for future in waiting)
            _deliver(messages, by_key, progress, seconds=0.0 if done else 0.2)
            failed = any(future.done() and not future.cancelled() and future.exception() for future in waiting)
            if stop.is_set() or failed:
                # Others end after their step, with a checkpoint.
                wish.set()
                for future in waiting:
                    future.cancel()
            if done:
                break
    errors = [error for future in waiting if not future.cancelled() and (error := future.exception())]
    if stop.is_set():
        # The signal that stops this process may have ended others.
        errors = [error for error in errors if not isinstance(error, BrokenProcessPool)]
    # What stopped the others comes first.
    for error in sorted(errors, key=lambda x: isinstance(x, Interrupted | BrokenProcessPool)):
        if isinstance(error, BrokenProcessPool):
            raise _ended_abruptly(len(runs), jobs) from None
        raise error
    if stop.is_set():
        raise Interrupted("interrupted; complete runs are kept")


def _ended_abruptly(runs: int, jobs: int) -> RopewalkError:
    return RopewalkError(
        asked=f"{runs} runs in {min(jobs, runs)} processes",
        expected="processes that train until their runs end",
        got="one that ended abruptly: it crashed, or it was killed, for example without free memory",
        do="continue with --resume, with fewer --jobs if there was too little memory",
    )


@contextmanager
def _blocking_interrupts() -> Iterator[None]:
    """Processes that start in between do not get Ctrl-C, while they load either; this one gets it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _deliver(messages: Any, runs: dict[str, Run], progress: Progress | None, *, seconds: float) -> None:
    try:
        while True:
            key, step, loss = messages.get(timeout=seconds) if seconds else messages.get_nowait()
            if progress is not None:
                progress(runs[key], step, loss)
    except queue.Empty:
        return


# In a process of the pool: set when its runs should stop.
_wishes: list[Wish] = []


def _prepare_process(wish: Wish) -> None:
    torch.set_num_threads(1)
    # Ctrl-C reaches all processes of a terminal. The first one passes it on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _wishes[:] = [wish]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Nobody waits for this process if its parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _perform_alone(run: Run, settings: Settings, out: Path, messages: Any) -> None:
    def report(step: int, loss: float) -> None:
        messages.put((run.key, step, loss))

    side_by_side([performing(run, settings, out, stop=_wishes[0], report=report)], settings.device)


def _result_file(run: Run, out: Path) -> Path:
    return out / run.key / "result.json"


def _read_result(run: Run, out: Path) -> RunResult:
    return result_of(_stored(_result_file(run, out)))


def _stored(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RopewalkError(
            asked=f"the result in {path.parent}",
            expected=f"JSON in {path}",
            got=str(error),
            do=f"delete {path}, and run the experiment again",
        ) from None


def result_of(stored: Mapping[str, Any]) -> RunResult:
    """The result in a file result.json, or in a record."""
    curves = {name: [(x, y) for x, y in points] for name, points in stored["curves"].items()}
    return RunResult(curves, stored["seconds"], stored["tokens"], stored["digest"])


def default_jobs(device: torch.device) -> int:
    """As many processes as this one has cores on a CPU, and one on a GPU."""
    return len(os.sched_getaffinity(0)) if device.type == "cpu" and hasattr(os, "sched_getaffinity") else 1
