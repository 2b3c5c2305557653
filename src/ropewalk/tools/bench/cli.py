"""`ropewalk bench` and its options. The code of a command is imported when the command is called."""

from typing import Annotated

import typer

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.tools.options import json_option

__all__ = ["bench"]

bench: typer.Typer = typer.Typer(
    help="""Time rotation and attention next to other libraries.

\b
Examples:
  ropewalk bench --backends
  ropewalk bench cpu --quick --json figures.json
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)


Json = Annotated[str | None, json_option("the figures as JSON")]
ShowBackends = Annotated[bool, typer.Option("--backends", help="List the backends, with the reason if one is missing.")]
OnlyBackends = Annotated[bool, typer.Option("--backends", help="List the backends and exit.")]
QuickCpu = Annotated[bool, typer.Option("--quick", help="Forward only, few rounds, no compiled forms: half a minute.")]
QuickGpu = Annotated[
    bool, typer.Option("--quick", help="One case per kind, few rounds, no compiled forms: half a minute.")
]
QuickAttention = Annotated[bool, typer.Option("--quick", help="Three lengths, few rounds: 15 seconds.")]
QuickHost = Annotated[bool, typer.Option("--quick", help="Few rounds: a few seconds.")]
OnlyWork = Annotated[
    str | None,
    typer.Option("--only", metavar="KIND", help="On a GPU: generate, forward or training alone."),
]
OnlyPart = Annotated[
    str | None,
    typer.Option("--only", metavar="PART", help="On a GPU: lengths, weights or peers alone."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Measure only the cases that the file of --json lacks.")]
QuickModels = Annotated[bool, typer.Option("--quick", help="Tiny models and few rounds.")]
PlotFile = Annotated[str | None, typer.Option("--plot", metavar="FILE.png", help="Plot time and memory against N.")]
Device = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda", help="The device. Default: CUDA if available.")
]
FromRecord = Annotated[
    str | None, typer.Option("--from", metavar="FILE", help="Print or plot a file from --json; measure nothing.")
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
    """Time the rotation on the CPU, next to other libraries.

    Times prefill and decoding, with both pairings and both memory layouts, next to a copy. Prints medians over
    interleaved rounds. A path with a wrong result gets no time. Exits with 1 if ropewalk has a wrong result.

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
    """Time the rotation on a GPU, next to other libraries.

    Times forward, backward, decoding, and RMSNorm fused with the rotation, next to a copy: on the device, by wall
    clock, and on the host. Prints medians over interleaved rounds. A path with a wrong result gets no time. Exits with
    1 if ropewalk has a wrong result.

    \b
    Examples:
      ropewalk bench gpu --quick
    """
    from ropewalk.tools.bench.gpu import bench_gpu

    raise typer.Exit(bench_gpu(json_file=json, quick=quick))


@bench.command()
def host(
    json: Json = None,
    quick: QuickHost = False,
    device: Device = None,
) -> None:
    """Time what the host needs for each public call with one token.

    Times rotations, in place or not, and RMSNorm fused with the rotation, with and without gradients, next to what a
    host cannot go below: allocations, copies, a bare launch, an autograd.Function that computes nothing. Prints medians
    over interleaved rounds. A call with a wrong result gets no time. Exits with 1 if there is one.

    \b
    Examples:
      ropewalk bench host --quick --device cpu
    """
    from ropewalk.tools.bench.host import bench_host

    raise typer.Exit(bench_host(device, json_file=json, quick=quick))


@bench.command()
def accelerate(
    json: Json = None,
    quick: QuickModels = False,
    device: Device = None,
    only: OnlyWork = None,
) -> None:
    """Time whole models of transformers before and after accelerate.

    On a GPU: forward pass, training step and generate, eager and compiled, next to Liger's rope, by wall clock and by
    the sum of the kernels. On a CPU: the share of the rotation in a forward pass. The models have random weights.
    Prints medians over interleaved rounds. Exits with 1 if results differ too much. Requires ropewalk[hf].

    \b
    Examples:
      ropewalk bench accelerate --quick --device cpu
    """
    import torch

    from ropewalk.tools.bench.accelerate import bench_accelerate
    from ropewalk.tools.bench.whole_models import bench_whole_models

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if require_choice(device, ("cpu", "cuda"), asked=f"ropewalk bench accelerate --device {device}") == "cpu":
        if only is not None:
            raise RopewalkError(
                asked=f"ropewalk bench accelerate --device cpu --only {only}",
                expected="--only with --device cuda",
                got="--device cpu, which times a forward pass alone",
                do="leave --only out, or use --device cuda",
            )
        raise typer.Exit(bench_accelerate(json_file=json, quick=quick))
    raise typer.Exit(bench_whole_models(json_file=json, quick=quick, only=only))


@bench.command()
def attention(
    json: Json = None,
    quick: QuickAttention = False,
    plot: PlotFile = None,
    device: Device = None,
    only: OnlyPart = None,
    resume: Resume = False,
    from_file: FromRecord = None,
) -> None:
    """Time softmax and linear attention against the length N.

    Times softmax, linear attention with and without RoPE, and that of fla if it is installed. On a GPU also by the
    clock, with decays and biases (weights), and next to functions of fla with a decay (peers). Prints medians over
    interleaved rounds, peak memory, and the power of N with which the time grows. A path with a wrong result gets no
    time. Exits with 1 if ropewalk has a wrong result.

    \b
    Examples:
      ropewalk bench attention --quick --device cpu --plot attention.png
      ropewalk bench attention --from figures.json
    """
    from ropewalk.tools.bench.attention import bench_attention

    options = {"json_file": json, "quick": quick, "plot": plot, "device": device, "from_file": from_file}
    raise typer.Exit(bench_attention(**options, only=only, resume=resume))
