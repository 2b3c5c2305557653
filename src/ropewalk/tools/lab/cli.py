"""`ropewalk lab` and its options. The code of a command is imported when the command is called."""

from pathlib import Path
from typing import Annotated

import typer

from ropewalk.tools.options import json_option

__all__ = ["lab"]

lab: typer.Typer = typer.Typer(
    help="""Train small models, and compare encodings.

Experiments are registered: each states its question, its sources, its metric, and when it is undecided.

\b
Examples:
  ropewalk lab list
  ropewalk lab run convergence --size micro --seeds 3 --plot convergence.png
  ropewalk lab run extrapolation --with mymodule:MyEncoding
  torchrun --nproc-per-node 2 -m ropewalk.lab run convergence --parallel fsdp
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of an experiment; see `ropewalk lab list`.")]
ListJson = Annotated[str | None, json_option("all experiments as JSON")]
RunJson = Annotated[str | None, json_option("all figures as JSON")]
SizeName = Annotated[str, typer.Option("--size", metavar="micro|tiny|small", help="0.1, 1 or 10 million parameters.")]
Seeds = Annotated[int, typer.Option("--seeds", metavar="N", min=1, help="Number of seeds.")]
FirstSeed = Annotated[int, typer.Option("--first-seed", metavar="N", min=0, help="The first seed.")]
Others = Annotated[
    list[str] | None,
    typer.Option(
        "--with", metavar="ENCODING", help="Train another encoding too, or module:Class of your own. May be repeated."
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="ARM", help="Of the arms that are registered, only this one. May be repeated."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda", help="The device. Default: CUDA if available.")
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of models, checkpoints and losses.")]
Resume = Annotated[bool, typer.Option("--resume", help="Use what is in DIR, and continue what is incomplete.")]
PlotFile = Annotated[str | None, typer.Option("--plot", metavar="FILE.png", help="Plot the curves, with their spread.")]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="Train so many steps per run.")]
Every = Annotated[int, typer.Option("--every", metavar="N", min=1, help="Steps between validations.")]
SavedEvery = Annotated[
    int | None, typer.Option("--save-every", metavar="N", min=1, help="Steps between checkpoints. Default: at the end.")
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", min=1, help="Runs at a time. Default: the cores of a CPU; 1 on CUDA."),
]
Abreast = Annotated[
    int, typer.Option("--abreast", metavar="N", min=1, help="Runs that each process trains at the same time, on a GPU.")
]
TextFolder = Annotated[
    str | None,
    typer.Option(
        "--text",
        metavar="DIR",
        help="A folder of text files, or module:function that returns texts. Default: Python's standard library.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="float32|bfloat16", help="Default: bfloat16 on CUDA, by autocast.")
]
Compiled = Annotated[bool, typer.Option("--compile", help="Compile models. On CUDA, steps are CUDA graphs anyway.")]
Parallel = Annotated[
    str,
    typer.Option("--parallel", metavar="ddp|fsdp|context", help="How the ranks of torchrun share a run."),
]
FromRecord = Annotated[
    str | None, typer.Option("--from", metavar="FILE", help="Print or plot a file from --json; train nothing.")
]
Folders = Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, which are in DIR.")]


@lab.command("list")
def list_experiments(json: ListJson = None) -> None:
    """List the experiments.

    \b
    Example:
      ropewalk lab list
    """
    from ropewalk.tools.lab.command import list_experiments as run

    raise typer.Exit(run(json_file=json))


@lab.command()
def show(name: Name, size: SizeName = "micro", json: ListJson = None) -> None:
    """Show what an experiment asks, what it trains, and how it is judged.

    \b
    Example:
      ropewalk lab show extrapolation
    """
    from ropewalk.tools.lab.command import show as run

    raise typer.Exit(run(name, size, json_file=json))


@lab.command()
def run(
    name: Name,
    size: SizeName = "micro",
    seeds: Seeds = 3,
    first_seed: FirstSeed = 0,
    others: Others = None,
    only: Only = None,
    device: Device = None,
    out: Out = Path("runs/lab"),
    resume: Resume = False,
    plot: PlotFile = None,
    json: RunJson = None,
    steps: Steps = None,
    every: Every = 25,
    saved_every: SavedEvery = None,
    jobs: Jobs = None,
    abreast: Abreast = 1,
    text: TextFolder = None,
    dtype: Dtype = None,
    compiled: Compiled = False,
    parallel: Parallel = "ddp",
    record: FromRecord = None,
) -> None:
    """Train the models of an experiment, and print its verdicts.

    Ctrl-C ends it after the current step, with a checkpoint; --resume continues, and gives the same numbers.

    \b
    Examples:
      ropewalk lab run convergence --plot convergence.png --json convergence.json
      ropewalk lab run extrapolation --size tiny --device cuda
      ropewalk lab run convergence --with mymodule:MyEncoding --seeds 1
    """
    from ropewalk.tools.lab.command import Options
    from ropewalk.tools.lab.command import run as conduct

    options = Options(
        name=name,
        size=size,
        seeds=tuple(range(first_seed, first_seed + seeds)),
        others=tuple(others or ()),
        only=tuple(only or ()),
        device=device,
        out=out,
        resume=resume,
        plot=plot,
        json_file=json,
        steps=steps,
        every=every,
        saved_every=saved_every,
        jobs=jobs,
        abreast=abreast,
        text=text,
        dtype=dtype,
        compiled=compiled,
        parallel=parallel,
        record=record,
    )
    raise typer.Exit(conduct(options))


@lab.command()
def compare(runs: Folders, plot: PlotFile = None, json: RunJson = None) -> None:
    """Print runs side by side.

    \b
    Example:
      ropewalk lab compare runs/lab/* --plot runs.png
    """
    from ropewalk.tools.lab.command import compare as run

    raise typer.Exit(run(runs, plot=plot, json_file=json))
