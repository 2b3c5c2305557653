"""`ropewalk`: the commands and their options. What a command does is imported when it is called."""

import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ropewalk.tools.bench.cli import bench
from ropewalk.tools.options import NewFamilyPairing, json_option, length_option
from ropewalk.tools.plot.cli import plot

__all__ = ["app", "main"]

app: typer.Typer = typer.Typer(
    name="ropewalk",
    help="""Position in transformers: look at a model's RoPE, change it, draw it, time it.

Results go to standard output, everything else to standard error. Exits with 0 if all is fine, 1 if a
check failed, 2 for bad usage or input.
""",
    no_args_is_help=True,
    # Plain text that is wrapped to the width there is: the same on paper, in a log and without colour.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# What the options before the command have said.
_shown = {"traceback": False}


def _show_version(wanted: bool) -> None:
    if wanted:
        from ropewalk import __version__

        typer.echo(f"ropewalk {__version__}")
        raise typer.Exit


# Options of the command line itself.
Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

# Options of inspect.
Configs = Annotated[
    list[str], typer.Argument(metavar="CONFIG", help="A config.json, or the folder of a model. Several: compared.")
]
PlotFile = Annotated[str | None, typer.Option("--plot", metavar="FILE.png", help="Draw the wavelength of every pair.")]
PairsJson = Annotated[str | None, json_option("every pair as JSON")]

# Options of extend.
Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A config.json, or the folder of a model.")]
ToLength = Annotated[
    int,
    typer.Option(
        "--to",
        metavar="LENGTH",
        parser=length_option,
        help="How many positions the model is to read: 131072, or 128k.",
    ),
]
Rule = Annotated[
    str | None,
    typer.Option(
        "--rule",
        metavar="RULE",
        help="One rule, pair by pair: pi, ntk, dynamic, yarn, yarn-paper, llama3, base-bound or base-law.",
    ),
]
WriteConfig = Annotated[
    str | None,
    typer.Option("--write", metavar="OUT.json", help="Write the config of the rule; - for standard output."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT.json if it is there.")]
Stack = Annotated[
    str | None,
    typer.Option("--for", metavar="vllm|llama.cpp", help="Show the flags of this stack, and no config keys."),
]
Trained = Annotated[
    int | None,
    typer.Option(
        "--trained",
        metavar="N",
        parser=length_option,
        help="Positions in training, where the config does not say it.",
    ),
]
EverythingJson = Annotated[str | None, json_option("everything as JSON")]

# Options of convert.
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A folder with config.json and safetensors.")]
OutFolder = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not be there yet.")]
ToPairing = Annotated[str, typer.Option("--to", metavar="interleaved|half", help="The pairing that OUT is to have.")]
FromPairing = Annotated[
    str | None,
    typer.Option("--from", metavar="interleaved|half", help="The pairing of MODEL_DIR, where its family is new."),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Prove OUT before it gets its name: attention scores, and every byte.")
]
ConversionJson = Annotated[str | None, json_option("what was done as JSON")]

# Options of verify.
LedgerJson = Annotated[str | None, json_option("the ledger as JSON")]
PicturesFolder = Annotated[
    Path | None, typer.Option("--plots", metavar="DIR", help="Write pictures (PNG) into this folder.")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="TEXT", help="Measure the statements whose id has TEXT in it. May be repeated."),
]


@app.callback()
def _options(
    version: Version = False,
    debug: Debug = False,
) -> None:
    _shown["traceback"] = debug


@app.command()
def inspect(
    configs: Configs,
    plot: PlotFile = None,
    json: PairsJson = None,
    pairing: NewFamilyPairing = None,
) -> None:
    """Show what a config says of a model's RoPE.

    Rule, pairing, frequencies, lengths, pitfalls. Needs no weights. Several configs stand side by side, and rows that
    differ are marked.

    \b
    Examples:
      ropewalk inspect config.json
      ropewalk inspect models/llama models/qwen
      ropewalk inspect config.json --plot wavelengths.png --json pairs.json
    """
    from ropewalk.tools.inspect.command import inspect as run

    raise typer.Exit(run(configs, json_file=json, plot=plot, pairing=pairing))


@app.command()
def extend(
    config: Config,
    to: ToLength,
    rule: Rule = None,
    write: WriteConfig = None,
    force: Force = False,
    stack: Stack = None,
    trained: Trained = None,
    pairing: NewFamilyPairing = None,
    json: EverythingJson = None,
) -> None:
    """Compare the rules that extend a context; write a config.

    What each rule does to the frequencies, how far theory says that it carries, what papers measured of it, and the
    keys to paste. Needs no weights.

    \b
    Examples:
      ropewalk extend config.json --to 131072
      ropewalk extend config.json --to 131072 --rule yarn --write long.json
      ropewalk extend config.json --to 131072 --rule yarn --for vllm
    """
    from ropewalk.tools.extend.command import extend as run

    code = run(
        config,
        to,
        rule=rule,
        write=write,
        force=force,
        stack=stack,
        trained=trained,
        pairing=pairing,
        json_file=json,
    )
    raise typer.Exit(code)


@app.command()
def convert(
    model: ModelFolder,
    out: OutFolder,
    to: ToPairing,
    from_pairing: FromPairing = None,
    verify: Verify = False,
    json: ConversionJson = None,
) -> None:
    """Permute q and k of a checkpoint from one pairing to the other.

    Streams safetensors, whatever their size. OUT is there whole or not at all, and MODEL_DIR is never written. Needs
    neither torch nor transformers. Exits with 1 if --verify finds a fault.

    \b
    Examples:
      ropewalk convert models/llama models/pairs --to interleaved --verify
      ropewalk convert models/mine models/mine-half --from interleaved --to half
    """
    from ropewalk.tools.convert import convert as run

    raise typer.Exit(run(model, out, to, from_pairing=from_pairing, verify=verify, json_file=json))


@app.command()
def verify(
    json: LedgerJson = None,
    plots: PicturesFolder = None,
    only: Only = None,
) -> None:
    """Measure what notes and papers say of position encodings.

    Every statement in the ledger is computed anew and shown with its figure. Exits with 1 if a measurement contradicts
    a recorded verdict.

    \b
    Examples:
      ropewalk verify --only decay
      ropewalk verify --json ledger.json --plots pictures
    """
    from ropewalk.tools.verify import verify as run

    raise typer.Exit(run(json_file=json, plots=plots, only=only or ()))


app.add_typer(plot, name="plot")
app.add_typer(bench, name="bench", invoke_without_command=True)


def main() -> None:
    """Runs the command line: 0 fine, 1 a check failed, 2 bad usage or input, 70 a bug, 130 Ctrl-C, 141 a closed pipe.

    A user's mistake is printed as what it says, without a traceback, which --debug shows.
    """
    from ropewalk.errors import RopewalkError

    _show_plainly()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SystemExit as stop:
        # typer and rich turn these two into exits of their own.
        causes = [type(cause) for cause in _causes(stop)]
        code = 130 if KeyboardInterrupt in causes else 141 if BrokenPipeError in causes else stop.code
        raise SystemExit(code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # Whoever read the output has seen enough. What is still in the buffer goes nowhere, without a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except RopewalkError as error:
        _tell(error, f"{error}")
        raise SystemExit(2) from None
    except OSError as error:
        _tell(error, f"ropewalk: {error}")
        raise SystemExit(2) from None
    except Exception as error:
        # Nothing above was a user's mistake, so it is ours: told as that, with an exit code of its own.
        bug = "This is a bug in ropewalk. Put --debug before the command to see where it is, and report it with that."
        _tell(error, f"ropewalk: {type(error).__name__}: {error}\n{bug}")
        raise SystemExit(70) from None


def _show_plainly() -> None:
    """A letter that a terminal does not have becomes a question mark, and a warning is one line that says it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    warnings.formatwarning = lambda message, category, *where, **more: f"warning: {message}\n"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _tell(error: Exception, text: str) -> None:
    if _shown["traceback"]:
        traceback.print_exception(error)
    typer.echo(text, err=True)
