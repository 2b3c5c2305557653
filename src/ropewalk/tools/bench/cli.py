"""`ropewalk bench` and its options. What a command does is imported when it is called."""

from typing import Annotated

import typer

from ropewalk.tools.options import json_option

__all__ = ["bench"]

bench: typer.Typer = typer.Typer(
    help="""Time rotation and attention on this machine, against others.

\b
Examples:
  ropewalk bench --backends
  ropewalk bench cpu --quick --json figures.json
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)


Json = Annotated[str | None, json_option("the figures as JSON")]
ShowBackends = Annotated[bool, typer.Option("--backends", help="Say which backends are there, and why not.")]
OnlyBackends = Annotated[bool, typer.Option("--backends", help="Say which backends are there, and stop.")]
QuickCpu = Annotated[bool, typer.Option("--quick", help="Forward alone, few rounds, nothing compiled: half a minute.")]
QuickGpu = Annotated[
    bool, typer.Option("--quick", help="One case of each kind, few rounds, nothing compiled: half a minute.")
]
QuickAttention = Annotated[bool, typer.Option("--quick", help="Three lengths, few rounds: a quarter of a minute.")]
PlotFile = Annotated[str | None, typer.Option("--plot", metavar="FILE.png", help="Draw time and memory against N.")]
Device = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda", help="What to time. CUDA where there is one.")
]
FromRecord = Annotated[
    str | None, typer.Option("--from", metavar="FILE", help="Measure nothing: show, or draw, what --json wrote.")
]


@bench.callback()
def _bench(
    backends: ShowBackends = False,
) -> None:
    if backends:
        from rich.console import Console

        from ropewalk.tools.bench.cpu import show_backends

        show_backends(Console(highlight=False, markup=False))
        raise typer.Exit


@bench.command()
def cpu(
    json: Json = None,
    quick: QuickCpu = False,
    backends: OnlyBackends = False,
) -> None:
    """The rotation on the CPU, against a copy and peers.

    Prefill and decode, both pairings, both memory layouts. All take turns; medians are shown. A path that is wrong gets
    no time. Exits with 1 if one of ours is.

    \b
    Examples:
      ropewalk bench cpu --quick
      ropewalk bench cpu --json figures.json
    """
    from ropewalk.tools.bench.cpu import bench_cpu

    raise typer.Exit(bench_cpu(json_file=json, quick=quick, backends=backends))


@bench.command()
def gpu(
    json: Json = None,
    quick: QuickGpu = False,
) -> None:
    """The rotation on a GPU, against a copy and peers.

    Forward, backward, decoding, norm and rotation in one. All take turns, from an empty cache; medians are shown. A
    path that is wrong gets no time. Exits with 1 if one of ours is. Where typer is not installed: python -m
    ropewalk.tools.bench.gpu.

    \b
    Examples:
      ropewalk bench gpu --quick
    """
    from ropewalk.tools.bench.gpu import bench_gpu

    raise typer.Exit(bench_gpu(json_file=json, quick=quick))


@bench.command()
def attention(
    json: Json = None,
    quick: QuickAttention = False,
    plot: PlotFile = None,
    device: Device = None,
    from_file: FromRecord = None,
) -> None:
    """Softmax and linear attention against the length N.

    Softmax, linear attention without and with RoPE, and fla's where it is installed. All take turns; medians, peak
    memory, and the power of N by which time grows. A path that is wrong gets no time. Exits with 1 if one of ours is.
    Where typer is not installed: python -m ropewalk.tools.bench.attention.

    \b
    Examples:
      ropewalk bench attention --quick --device cpu --plot attention.png
      ropewalk bench attention --from figures.json
    """
    from ropewalk.tools.bench.attention import bench_attention

    raise typer.Exit(bench_attention(json_file=json, quick=quick, plot=plot, device=device, from_file=from_file))
