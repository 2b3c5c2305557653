"""The commands `ropewalk lab list`, `show`, `run` and `compare`: what is trained, shown and written."""

import dataclasses
import difflib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.tools.output import processor, require_writable_file, require_writable_folder, write_json

if TYPE_CHECKING:
    import torch

    from ropewalk.lab.conduct import Progress as Report
    from ropewalk.lab.experiment import Arm, Experiment
    from ropewalk.lab.run import Run
    from ropewalk.lab.training import Settings

__all__ = ["EVERY", "Options", "compare", "list_experiments", "run", "show"]


# Steps between validations, seeds and folder, if nothing else is chosen.
EVERY = 25
SEEDS = 0, 1, 2
OUT = Path("runs/lab")


@dataclass(frozen=True)
class Options:
    """Options of `ropewalk lab run`, as the command line has them."""

    name: str
    size: str
    seeds: tuple[int, ...]
    others: tuple[str, ...]
    only: tuple[str, ...]
    device: str | None
    out: Path
    resume: bool
    plot: str | None
    json_file: str | None
    steps: int | None
    every: int
    saved_every: int | None
    jobs: int | None
    abreast: int
    text: str | None
    dtype: str | None
    compiled: bool
    parallel: str
    record: str | None

    @property
    def command(self) -> str:
        """The command with the options that change figures."""
        return shlex.join(self._words)

    @property
    def continuing(self) -> str:
        """The command that continues this one."""
        words = [*self._words, *_options(plot=self.plot, json=self.json_file, save_every=self.saved_every)]
        abreast = None if self.abreast == 1 else self.abreast
        parallel = None if self.parallel == "ddp" else self.parallel
        words += _options(jobs=self.jobs, abreast=abreast, parallel=parallel, out=self.out)
        return shlex.join([*words, *(["--compile"] if self.compiled else []), "--resume"])

    @property
    def _words(self) -> list[str]:
        words = ["ropewalk", "lab", "run", self.name, *_options(size=self.size, seeds=len(self.seeds))]
        words += _options(first_seed=self.seeds[0] or None)
        for name, values in (("with", self.others), ("only", self.only)):
            words += [word for value in values for word in _options(**{name: value})]
        every = None if self.every == EVERY else self.every
        return words + _options(steps=self.steps, every=every, text=self.text, device=self.device, dtype=self.dtype)


def _options(**values: object) -> list[str]:
    """Options as words of a command, without those that are None."""
    chosen = {name.replace("_", "-"): str(value) for name, value in values.items() if value is not None}
    return [word for name, value in chosen.items() for word in (f"--{name}", value)]


def list_experiments(json_file: str | None = None) -> int:
    """Print all experiments."""
    from ropewalk.lab.experiments import EXPERIMENTS
    from ropewalk.tools.lab.sheet import print_list

    console = _console(json_file, asked="ropewalk lab list")
    print_list(console, list(EXPERIMENTS.values()))
    if json_file is not None:
        write_json([_described(x) for x in EXPERIMENTS.values()], json_file)
    return 0


def show(name: str, size: str, json_file: str | None = None) -> int:
    """Print one experiment."""
    from ropewalk.tools.lab.sheet import print_experiment

    console = _console(json_file, asked=f"ropewalk lab show {name}")
    experiment = _experiment(name, size, asked="ropewalk lab show")
    arms = experiment.arms(size)
    print_experiment(console, experiment, size, arms)
    if json_file is not None:
        write_json({**_described(experiment), "runs": {x.label: x.run.as_json() for x in arms}}, json_file)
    return 0


def run(options: Options) -> int:
    """Train, judge, print, and write what was asked for.

    Args:
        options: The options.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        RopewalkError: If an option is invalid, which is checked before anything is trained, or if a run fails.
    """
    console = _console(options.json_file, asked=f"ropewalk lab run {options.name}")
    if options.plot is not None:
        # Fails now, not after the training, if matplotlib is not installed.
        importlib.import_module("ropewalk.tools.lab.plot")
        from ropewalk.tools.pictures import require_picture

        require_picture(options.plot, asked=f"ropewalk lab run --plot {options.plot}")
    experiment = _experiment(options.name, options.size, asked="ropewalk lab run")
    if options.record is not None:
        return _show_record(Path(options.record), options, console)
    with _process_group(options) as settings:
        from ropewalk.lab.conduct import conduct, default_jobs
        from ropewalk.lab.ranks import on_rank_0, rank_and_ranks
        from ropewalk.lab.training import Interrupted

        rank, ranks = rank_and_ranks()
        arms = _arms(experiment, options, settings)
        on_rank_0(lambda: _require_folder(options, arms))
        jobs = options.jobs or (default_jobs(settings.device) if ranks == 1 else 1)
        if rank != 0:
            console.quiet = True
        if options.resume:
            console.print(on_rank_0(lambda: _resumed(arms, options)))
        registered = {_first_steps(arm.run) for arm in experiment.arms(options.size)}
        other_steps = options.steps is not None and registered != {options.steps}
        judged = _without_statements(experiment) if other_steps else experiment
        try:
            with _progress(console, arms, options.seeds, options.out, shown=rank == 0) as report:
                findings = conduct(
                    judged,
                    arms,
                    options.size,
                    options.seeds,
                    settings,
                    options.out,
                    jobs=jobs,
                    abreast=options.abreast,
                    progress=report,
                )
        except Interrupted as reason:
            console.print(f"{reason}; to continue: {options.continuing}", soft_wrap=True)
            return 130
        if rank != 0:
            return 0
        from ropewalk.lab.record import as_json

        record = as_json(findings, settings, hardware=_hardware(settings.device), command=options.command)
        _show(findings, options, console)
        if other_steps:
            numbers = " or ".join(map(str, sorted(registered)))
            console.print(f"\nno verdicts: --steps {options.steps} is not the registered number, {numbers}")
        if options.json_file is not None:
            write_json(record, options.json_file)
        console.print(f"\nmodels and losses: {options.out}", soft_wrap=True)
    return 0


def compare(folders: Sequence[Path], plot: str | None = None, json_file: str | None = None) -> int:
    """Print runs side by side."""
    console = _console(json_file, asked="ropewalk lab compare")
    from ropewalk.lab.conduct import result_of

    stored: list[dict[str, Any]] = []
    for folder in dict.fromkeys(folders):
        path = folder / "result.json"
        if not path.is_file():
            raise RopewalkError(
                asked=f"ropewalk lab compare {folder}",
                expected="the folder of a complete run, with result.json",
                got="no such file" if folder.is_dir() else "a file" if folder.exists() else "no such folder",
                do=f"compare the runs in it: {folder}/*"
                if any(folder.glob("*/result.json"))
                else "complete it with `ropewalk lab run NAME --resume`, or choose folders of --out",
            )
        stored.append({"folder": str(folder), **_result_file(path)})
    stored.sort(key=lambda x: (x["run"]["encoding"], x["run"]["seed"]))
    results = dict(zip(_labels(stored), map(result_of, stored), strict=True))
    from ropewalk.tools.lab.sheet import print_comparison

    print_comparison(console, results)
    if plot is not None:
        from ropewalk.tools.lab.plot import plot_runs

        plot_runs(results, [x["run"]["encoding"] for x in stored], plot)
    if json_file is not None:
        write_json(stored, json_file)
    return 0


def _result_file(path: Path) -> dict[str, Any]:
    fields: Any = None
    with suppress(ValueError):
        fields = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(fields, dict) or not {"run", "curves", "config"} <= fields.keys():
        raise RopewalkError(
            asked=f"ropewalk lab compare {path.parent}",
            expected=f"the result of a run in {path}",
            got="another file",
            do="delete it, and run the experiment again with --resume",
        )
    return fields


def _labels(stored: Sequence[dict[str, Any]]) -> list[str]:
    """One label per run: encoding, seed and whatever else differs, and the folder where nothing does."""
    always, hidden = ("encoding", "seed"), {"parent", "lengths", "digest", "source of encoding"}
    runs = [{**x["config"], "continues": (x["run"]["parent"] or {}).get("encoding")} for x in stored]
    names = [x for x in runs[0] if x not in (*always, *hidden) and len({str(run.get(x)) for run in runs}) > 1]
    labels = [
        ", ".join([f"{run['encoding']}, seed {run['seed']}", *(f"{name} {_shown(name, run)}" for name in names)])
        for run in runs
    ]
    return [
        f"{label}, {x['folder']}" if labels.count(label) > 1 else label for label, x in zip(labels, stored, strict=True)
    ]


def _shown(name: str, run: dict[str, Any]) -> Any:
    return "of the standard library" if name == "text" and run.get(name) is None else run.get(name)


def _console(json_file: str | None, *, asked: str) -> Console:
    # If JSON is written to standard output, everything else goes to standard error.
    if json_file is not None:
        require_writable_file(json_file, asked=f"{asked} --json {json_file}")
    return Console(stderr=json_file == "-", highlight=False, markup=False)


def _experiment(name: str, size: str, *, asked: str) -> "Experiment":
    from ropewalk.lab.decoder import SIZES
    from ropewalk.lab.experiments import EXPERIMENTS

    require_choice(size, tuple(SIZES), asked=f"{asked} --size")
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        raise RopewalkError(
            asked=f"{asked} {name}",
            expected=f"one of {len(EXPERIMENTS)} experiments",
            got=repr(name),
            do=f"did you mean {near[0]!r}?" if near else "use a name that `ropewalk lab list` prints",
        )
    return EXPERIMENTS[name]


def _described(experiment: "Experiment") -> dict[str, Any]:
    names = ("name", "question", "metric", "direction", "rates", "undecided")
    statements = [{"text": x.text, "source": x.source} for x in experiment.statements]
    return {name: getattr(experiment, name) for name in names} | {"statements": statements}


def _arms(experiment: "Experiment", options: Options, settings: "Settings") -> "list[Arm]":
    arms = experiment.arms(options.size)
    if options.only:
        known = [arm.label for arm in arms]
        chosen = {require_choice(label, known, asked="ropewalk lab run --only") for label in options.only}
        arms = [arm for arm in arms if arm.label in chosen]
    arms += [experiment.arm_for(encoding, options.size) for encoding in options.others]
    arms = [arm._replace(run=_changed(arm.run, options)) for arm in arms]
    for arm in arms:
        _check_encoding(arm.run, settings)
    return arms


def _check_encoding(run: "Run", settings: "Settings") -> None:
    """Fail now, not when other runs are complete."""
    from ropewalk.lab.decoder import SIZES
    from ropewalk.lab.encodings import make_encoding
    from ropewalk.lab.trial import require_forward

    # A module of the user is usually in the working folder, which `python -m` has in its path and a script does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    size = SIZES[run.size]
    if ":" in run.encoding:
        require_forward(run, settings)
    else:
        make_encoding(run.encoding, dim=size.dim, num_heads=size.heads, length=run.length)


def _changed(run: "Run", options: Options) -> "Run":
    """The run with the options of the command line. Steps of a run that continues another are in proportion."""
    parent = None if run.parent is None else _changed(run.parent, options)
    steps = run.steps
    if options.steps is not None and steps > 0:
        steps = max(1, round(steps * options.steps / _first_steps(run)))
    return dataclasses.replace(run, steps=steps, text=options.text, parent=parent)


def _first_steps(run: "Run") -> int:
    """The number of steps of the run that was trained first: of the run, or of what it continues."""
    return run.steps if run.parent is None else _first_steps(run.parent)


def _without_statements(experiment: "Experiment") -> "Experiment":
    """Statements are about arms that are trained for the registered number of steps."""
    return dataclasses.replace(experiment, statements=())


def _require_folder(options: Options, arms: "Sequence[Arm]") -> None:
    from ropewalk.lab.conduct import runs_of

    require_writable_folder(options.out, asked=f"ropewalk lab run --out {options.out}")
    present = [run for run in runs_of(arms, options.seeds) if (options.out / run.key).exists()]
    if present and not options.resume:
        raise RopewalkError(
            asked=f"ropewalk lab run {options.name} --out {options.out}",
            expected="a folder without runs of this experiment, or --resume",
            got=f"{len(present)} of its runs, for example {options.out / present[0].key}",
            do="add --resume to use and continue them, or choose another folder",
        )


def _resumed(arms: "Sequence[Arm]", options: Options) -> str:
    """What --resume finds: complete runs, runs with a checkpoint, and others."""
    from ropewalk.lab.checkpoints import last_checkpoint
    from ropewalk.lab.conduct import runs_of

    folders = [options.out / run.key for run in runs_of(arms, options.seeds)]
    waiting = [folder for folder in folders if not (folder / "result.json").exists()]
    steps = sorted(step for folder in waiting if (step := last_checkpoint(folder)))
    text = f"found: {len(folders) - len(waiting)} of {len(folders)} runs complete"
    if steps:
        text += f"; checkpoints of others at step {', '.join(map(str, steps))}"
    rest = len(waiting) - len(steps)
    return text + (f"; without a result and a checkpoint: {rest}" if rest else "")


@contextmanager
def _process_group(options: Options) -> "Iterator[Settings]":
    """Settings of this rank; a process group in between, if torchrun started this process."""
    import torch
    import torch.distributed as dist

    from ropewalk.lab.training import Settings

    for name, value, choices in (
        ("parallel", options.parallel, ("ddp", "fsdp", "context")),
        ("dtype", options.dtype or "float32", ("float32", "bfloat16")),
    ):
        require_choice(value, choices, asked=f"ropewalk lab run --{name}")
    if options.parallel != "ddp" and "WORLD_SIZE" not in os.environ and not dist.is_initialized():
        raise RopewalkError(
            asked=f"ropewalk lab run --parallel {options.parallel}",
            expected="the ranks of torchrun",
            got="one process",
            do=f"start it with torchrun --nproc-per-node 2 -m ropewalk.lab run {options.name} ..., or omit --parallel",
        )
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    kind = options.device or ("cuda" if torch.cuda.device_count() > local_rank else "cpu")
    require_choice(kind, ("cpu", "cuda"), asked="ropewalk lab run --device")
    if kind == "cuda" and not torch.cuda.is_available():
        raise RopewalkError(
            asked="ropewalk lab run --device cuda",
            expected="a CUDA device that torch can use",
            got="none",
            do="omit --device, or install a build of torch for CUDA",
        )
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # The same bits whatever the number of cores.
        torch.set_num_threads(1)
    dtype: Any = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    parallel: Any = options.parallel
    settings = Settings(device, dtype, parallel, options.compiled, options.every, options.saved_every)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
        try:
            yield settings
        finally:
            dist.destroy_process_group()
    else:
        yield settings


@contextmanager
def _progress(
    console: Console, arms: "Sequence[Arm]", seeds: Sequence[int], out: Path, *, shown: bool
) -> "Iterator[Report]":
    """A bar over all steps, and a line per complete run."""
    from ropewalk.lab.conduct import runs_of, with_seed

    waiting = [run for run in runs_of(arms, seeds) if not (out / run.key / "result.json").exists()]
    labels = {with_seed(arm.run, seed).key: arm.label for arm in arms for seed in seeds}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))
    total = sum(run.steps for run in waiting)
    steps = {run.key: 0 for run in waiting}
    complete = 0
    with bar:
        task = bar.add_task(f"{len(waiting)} runs", total=total or 1)

        def report(run: "Run", step: int, loss: float) -> None:
            nonlocal complete
            steps[run.key] = step
            label = labels.get(run.key, run.encoding)
            bar.update(task, completed=sum(steps.values()), description=f"{label}, seed {run.seed}, loss {loss:.3f}")
            if step == run.steps and shown and not console.quiet:
                complete += 1
                # Not on the terminal, where the bar shows it.
                if not console.is_terminal:
                    console.print(f"{complete} of {len(waiting)}: {label}, seed {run.seed}, loss {loss:.4f}")

        yield report


def _show(findings: Any, options: Options, console: Console) -> None:
    from ropewalk.tools.lab.sheet import print_findings

    print_findings(console, findings)
    if options.plot is not None:
        from ropewalk.tools.lab.plot import plot_findings

        plot_findings(findings, options.plot)


def _show_record(path: Path, options: Options, console: Console) -> int:
    from ropewalk.lab.record import read_findings

    asked = f"ropewalk lab run {options.name} --from {path}"
    # What a command without other options has.
    plain = dataclasses.replace(
        options, seeds=SEEDS, others=(), only=(), device=None, out=OUT, resume=False, json_file=None, steps=None,
        every=EVERY, saved_every=None, jobs=None, abreast=1, text=None, dtype=None, compiled=False, parallel="ddp",
    )  # fmt: skip
    words = {"others": "with", "json_file": "json", "saved_every": "save-every", "compiled": "compile"}
    names = [
        f"--{words.get(field.name, field.name)}"
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != getattr(plain, field.name)
    ]
    if names:
        raise RopewalkError(
            asked=f"{asked} {' '.join(names)}",
            expected="only --plot beside --from, which trains nothing",
            got=" and ".join(names),
            do=f"omit {' and '.join(names)}, or omit --from to train",
        )
    findings = read_findings(path, asked=asked)
    if findings.experiment.name != options.name:
        raise RopewalkError(
            asked=asked,
            expected=f"a record of {options.name}",
            got=f"one of {findings.experiment.name}",
            do=f"use ropewalk lab run {findings.experiment.name} --from {path}",
        )
    if options.size not in ("micro", findings.size):
        raise RopewalkError(
            asked=f"{asked} --size {options.size}",
            expected=f"--size {findings.size}, of which the record is",
            got=options.size,
            do="omit --size",
        )
    _show(findings, options, console)
    return 0


def _hardware(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, one thread per run"
