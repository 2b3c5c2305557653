"""`ropewalk`: the commands and their options. What a command does is imported when it is called."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    name="ropewalk",
    help="Position in transformers: check what is said about RoPE, and time it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from ropewalk import __version__

        typer.echo(f"ropewalk {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def verify(
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the ledger as JSON; - for standard output.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", metavar="DIR", help="Write pictures (PNG) into this folder.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="TEXT", help="Measure the statements whose id has TEXT in it. May be repeated."),
    ] = None,
) -> None:
    """Measure every statement in the ledger: what notes and papers say of position encodings.

    Exits with 1 if a measurement contradicts a recorded verdict.
    """
    from ropewalk.tools.verify import verify as run

    raise typer.Exit(run(json_file=json, plots=plots, only=only or ()))


bench = typer.Typer(
    help="Time rotation and attention on this machine, against a copy and others.", no_args_is_help=True
)
app.add_typer(bench, name="bench", invoke_without_command=True)


@bench.callback()
def _bench(
    backends: Annotated[bool, typer.Option("--backends", help="Say which backends are there, and why not.")] = False,
) -> None:
    if backends:
        from rich.console import Console

        from ropewalk.tools.bench_cpu import show_backends

        show_backends(Console(highlight=False))
        raise typer.Exit


@bench.command()
def cpu(
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON; - for standard output.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Forward alone, few rounds, nothing compiled: half a minute.")
    ] = False,
    backends: Annotated[bool, typer.Option("--backends", help="Say which backends are there, and stop.")] = False,
) -> None:
    """Time copy, ropewalk and its peers on the CPU: prefill and decode, both pairings, both memory layouts.

    All take turns; medians are shown. A path that is wrong gets no time. Exits with 1 if one of ours is.
    """
    from ropewalk.tools.bench_cpu import bench_cpu

    raise typer.Exit(bench_cpu(json_file=json, quick=quick, backends=backends))


@bench.command()
def gpu(
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON; - for standard output.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One case of each kind, few rounds, nothing compiled: half a minute.")
    ] = False,
) -> None:
    """Time copy, ropewalk and its peers on a GPU: forward, backward, decoding, norm and rotation in one.

    All take turns, from an empty cache; medians are shown. A path that is wrong gets no time. Exits with 1 if one of
    ours is. Where typer is not installed: python -m ropewalk.tools.bench_gpu.
    """
    from ropewalk.tools.bench_gpu import bench_gpu

    raise typer.Exit(bench_gpu(json_file=json, quick=quick))


@bench.command()
def attention(
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON; - for standard output.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three lengths, few rounds: a quarter of a minute.")] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE.png", help="Draw time and memory against N.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="cpu|cuda", help="What to time. CUDA where there is one.")
    ] = None,
    from_file: Annotated[
        str | None, typer.Option("--from", metavar="FILE", help="Measure nothing: show, or draw, what --json wrote.")
    ] = None,
) -> None:
    """Time attention against N: softmax, linear attention without and with RoPE, and fla's where it is installed.

    All take turns; medians, peak memory, and the power of N by which time grows. A path that is wrong gets no time.
    Exits with 1 if one of ours is. Where typer is not installed: python -m ropewalk.tools.bench_attention.
    """
    from ropewalk.tools.bench_attention import bench_attention

    raise typer.Exit(bench_attention(json_file=json, quick=quick, plot=plot, device=device, from_file=from_file))


def main() -> None:
    """Runs the command line. A user's mistake is printed as what it says, without a traceback."""
    from ropewalk.errors import RopewalkError

    try:
        app()
    except RopewalkError as error:
        typer.echo(error, err=True)
        raise SystemExit(2) from None
