"""The `ropewalk` command line: commands and options. The code of a command is imported when the command is called."""

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
from ropewalk.tools.lab.cli import lab
from ropewalk.tools.options import NewFamilyPairing, json_option, length_option
from ropewalk.tools.plot.cli import plot

__all__ = ["app", "main"]

app: typer.Typer = typer.Typer(
    name="ropewalk",
    help="""Position in transformers: inspect, extend, convert, plot, time, train, explore.
Results are written to standard output, everything else to standard error. Exit codes: 0 for success, 1 for a failed
check, 2 for bad input.
""",
    no_args_is_help=True,
    # Plain text, wrapped to the width of the terminal: the same in a log and without colours.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# Values of the options that precede the command.
_settings = {"traceback": False}


def _show_version(requested: bool) -> None:
    if requested:
        from ropewalk import __version__

        typer.echo(f"ropewalk {__version__}")
        raise typer.Exit


# Options of the command line itself.
Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

# Options of demo.
DemoConfig = Annotated[
    str,
    typer.Argument(metavar="[CONFIG]", help="A config.json, a model folder, or the name of a bundled config."),
]
DemoFolder = Annotated[
    Path, typer.Option("--plots", metavar="DIR", help="Write pictures, and a bundled config, to this folder.")
]
DemoJson = Annotated[str | None, json_option("all figures as JSON")]

# Options of inspect.
Configs = Annotated[
    list[str], typer.Argument(metavar="CONFIG", help="A config.json or a model folder. Several configs are compared.")
]
PlotFile = Annotated[str | None, typer.Option("--plot", metavar="FILE.png", help="Plot the wavelength of every pair.")]
PairsJson = Annotated[str | None, json_option("every pair as JSON")]

# Options of extend.
Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A config.json or a model folder.")]
ToLength = Annotated[
    int,
    typer.Option(
        "--to",
        metavar="LENGTH",
        parser=length_option,
        help="The number of positions to extend to: 131072 or 128k.",
    ),
]
Rule = Annotated[
    str | None,
    typer.Option(
        "--rule",
        metavar="RULE",
        help="Show only this rule, pair by pair: pi, ntk, dynamic, yarn, yarn-paper, llama3, base-bound or base-law.",
    ),
]
AllRules = Annotated[bool, typer.Option("--all", help="Show every rule, with figures and published results.")]
WriteConfig = Annotated[
    str | None,
    typer.Option("--write", metavar="OUT.json", help="Write the config of the rule or verdict; - for standard output."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite OUT.json if it exists.")]
Stack = Annotated[
    str | None,
    typer.Option("--for", metavar="vllm|llama.cpp", help="Print the flags of this engine, not config keys."),
]
Trained = Annotated[
    int | None,
    typer.Option(
        "--trained",
        metavar="N",
        parser=length_option,
        help="The trained length, if the config does not contain it.",
    ),
]
EverythingJson = Annotated[str | None, json_option("everything as JSON")]

# Options of convert.
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A folder with config.json and safetensors.")]
OutFolder = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")]
ToPairing = Annotated[str, typer.Option("--to", metavar="interleaved|half", help="The pairing of OUT.")]
FromPairing = Annotated[
    str | None,
    typer.Option("--from", metavar="interleaved|half", help="The pairing of MODEL_DIR, if its family is unknown."),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Check attention scores and every byte before OUT gets its name.")
]
ConversionJson = Annotated[str | None, json_option("a report as JSON")]

# Options of verify.
ClaimsJson = Annotated[str | None, json_option("the checked claims as JSON")]
PicturesFolder = Annotated[
    Path | None, typer.Option("--plots", metavar="DIR", help="Write pictures (PNG) to this folder.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="ID",
        help="Only the claim ID, or claims whose id contains ID, measured anew. May be repeated.",
    ),
]
FromSources = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="SOURCE",
        help="Only claims of a note (002) or paper (2104.09864), in full. May be repeated.",
    ),
]
InFull = Annotated[bool, typer.Option("--long", help="Print every claim with quotation, method and expectation.")]

# Options of explore.
Explored = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG ...]", help="A config.json, a model folder, or the name of a bundled config."),
]
PageFile = Annotated[str, typer.Option("--out", metavar="FILE.html", help="The file to write.")]
NoOpen = Annotated[bool, typer.Option("--no-open", help="Do not open the file in a browser.")]
PageJson = Annotated[str | None, json_option("what the page contains as JSON")]


@app.callback()
def _options(
    version: Version = False,
    debug: Debug = False,
) -> None:
    _settings["traceback"] = debug


@app.command()
def demo(
    config: DemoConfig = "llama-3.1-8b",
    plots: DemoFolder = Path("build/demo"),
    json: DemoJson = None,
    pairing: NewFamilyPairing = None,
) -> None:
    """Make the RoPE of a config, and prove it correct and fast.

    Shows what the RoPE is, the code of the module, its agreement with transformers' formula and with float64, its speed
    on this machine, a longer context, and three false statements about RoPE. Takes less than a minute.

    \b
    Examples:
      ropewalk demo
      ropewalk demo config.json --plots pictures --json demo.json
    """
    from ropewalk.tools.demo.command import demo as run

    raise typer.Exit(run(config, plots=plots, json_file=json, pairing=pairing))


@app.command()
def inspect(
    configs: Configs,
    plot: PlotFile = None,
    json: PairsJson = None,
    pairing: NewFamilyPairing = None,
) -> None:
    """Show the RoPE that a config describes.

    Prints the rule, the pairing, frequencies, lengths and pitfalls. Needs no weights. Several configs are printed side
    by side, and rows that differ are marked.

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
    show_all: AllRules = False,
    rule: Rule = None,
    write: WriteConfig = None,
    force: Force = False,
    stack: Stack = None,
    trained: Trained = None,
    pairing: NewFamilyPairing = None,
    json: EverythingJson = None,
) -> None:
    """Recommend a rule that extends the context; write the config.

    Prints which rule to use without fine-tuning, and which with it, with the reasons and the config keys to paste.
    --all adds the effect of every rule on the frequencies, its limits and published results. Needs no weights.

    \b
    Examples:
      ropewalk extend config.json --to 131072
      ropewalk extend config.json --to 131072 --all
      ropewalk extend config.json --to 131072 --rule yarn --write long.json
      ropewalk extend config.json --to 131072 --rule yarn --for vllm
    """
    from ropewalk.tools.extend.command import extend as run

    code = run(
        config,
        to,
        rule=rule,
        show_all=show_all,
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

    Streams safetensors files of any size. OUT is written completely or not at all. MODEL_DIR is never modified. Needs
    neither torch nor transformers. Exits with 1 if --verify finds an error.

    \b
    Examples:
      ropewalk convert models/llama models/pairs --to interleaved --verify
      ropewalk convert models/mine models/mine-half --from interleaved --to half
    """
    from ropewalk.tools.convert import convert as run

    raise typer.Exit(run(model, out, to, from_pairing=from_pairing, verify=verify, json_file=json))


@app.command()
def verify(
    json: ClaimsJson = None,
    plots: PicturesFolder = None,
    only: Only = None,
    source: FromSources = None,
    long: InFull = False,
) -> None:
    """Measure what notes and papers state about position encodings.

    Prints one screen: counts per source, and every statement that does not hold. Measurements that take long are cited
    from records, unless --only selects them. Exits with 1 if a measurement contradicts a recorded verdict.

    \b
    Examples:
      ropewalk verify --source 002
      ropewalk verify --only decay.s20
      ropewalk verify --json claims.json --plots pictures
    """
    from ropewalk.tools.verify import verify as run

    raise typer.Exit(run(json_file=json, plots=plots, only=only or (), sources=source or (), long=long))


app.add_typer(plot, name="plot")
app.add_typer(bench, name="bench", invoke_without_command=True)
app.add_typer(lab, name="lab")


@app.command()
def explore(
    configs: Explored = None,
    out: PageFile = "ropewalk-explore.html",
    no_open: NoOpen = False,
    json: PageJson = None,
    pairing: NewFamilyPairing = None,
) -> None:
    """Write a page that shows RoPE in a browser, and open it.

    The page is one HTML file with sliders, pictures and tables of every rule. It contains the bundled configs and the
    configs that are passed; the first one is shown. It computes everything itself: no server, no network. A folder with
    the weights of a T5 model adds its learned bias.

    \b
    Examples:
      ropewalk explore --no-open
      ropewalk explore llama-3.1-8b config.json --out rope.html --no-open
    """
    from ropewalk.tools.explore.command import explore as run

    raise typer.Exit(run(configs or (), out, open_page=not no_open, json_file=json, pairing=pairing))


def main() -> None:
    """Run the command line.

    Exit codes: 0 for success, 1 if a check failed, 2 for bad usage or input, 70 for a bug in ropewalk, 130 for Ctrl-C,
    141 if the reader of the output closed the pipe. Errors are printed without a traceback unless --debug is set.
    """
    from ropewalk.errors import RopewalkError

    _configure_output()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SystemExit as stop:
        # typer and rich convert these two exceptions to SystemExit.
        causes = [type(cause) for cause in _causes(stop)]
        code = 130 if KeyboardInterrupt in causes else 141 if BrokenPipeError in causes else stop.code
        raise SystemExit(code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader closed the pipe. Discard the rest of the buffer silently.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except RopewalkError as error:
        _print_error(error, f"{error}")
        raise SystemExit(2) from None
    except OSError as error:
        _print_error(error, f"ropewalk: {error}")
        raise SystemExit(2) from None
    except Exception as error:
        # Not a usage error, so it is a bug: reported as such, with a separate exit code.
        bug = (
            "This is a bug in ropewalk. Put --debug before the command to get a traceback, and report the bug with it."
        )
        _print_error(error, f"ropewalk: {type(error).__name__}: {error}\n{bug}")
        raise SystemExit(70) from None


def _configure_output() -> None:
    """Print characters that the terminal cannot encode as question marks, and warnings as one line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    warnings.formatwarning = lambda message, category, *location, **options: f"warning: {message}\n"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _print_error(error: Exception, text: str) -> None:
    if _settings["traceback"]:
        traceback.print_exception(error)
    typer.echo(text, err=True)
