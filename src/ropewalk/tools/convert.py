"""`ropewalk convert`: converts a checkpoint from one pairing to the other, with a progress bar and a report."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ropewalk.hub.convert.conversion import Conversion, UnprovenError, convert_for
from ropewalk.hub.convert.proof import TOLERANCE, Proof
from ropewalk.tools.command_config import CommandLine
from ropewalk.tools.output import require_writable_file, write_json

__all__ = ["convert"]

# The maximum number of names printed per list. The JSON contains all.
_SHOWN = 6


def convert(
    model: Path,
    out: Path,
    to: str,
    from_pairing: str | None = None,
    verify: bool = False,
    json_file: str | None = None,
) -> int:
    """Convert the model folder `model` and write the result to the folder `out`.

    Args:
        model: A folder with config.json and safetensors files.
        out: The folder to write. It must not exist.
        to: The pairing of `out`.
        from_pairing: The pairing of `model`, if its family is unknown.
        verify: Prove the result before `out` gets its name.
        json_file: Write a report to this file as JSON; "-" for standard output.

    Returns:
        The exit code: 0 for success, 1 if the proof fails. `out` does not exist then.

    Raises:
        RopewalkError: If the report cannot be written, which is checked first, or if the model cannot be converted.
    """
    console = Console(stderr=json_file == "-", highlight=False, markup=False)
    if json_file is not None:
        require_writable_file(json_file, asked=f"ropewalk convert --json {json_file}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    errors = Console(stderr=True, highlight=False, markup=False)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        tasks = {phase: progress.add_task(phase, total=None, visible=False) for phase in ("writing", "verifying")}

        def update(phase: str, completed: int, total: int) -> None:
            progress.update(tasks[phase], completed=completed, total=total, visible=True)

        try:
            options = {"to": to, "from_pairing": from_pairing, "verify": verify, "progress": update}
            conversion = convert_for(CommandLine(f"ropewalk convert {model} {out}"), model, out, **options)
        except UnprovenError as error:
            progress.stop()
            _show_failure(console, error.proof)
            if json_file is not None:
                write_json({"out": None, "proof": error.proof.as_json()}, json_file)
            return 1
    _show(console, conversion)
    if json_file is not None:
        write_json(conversion.as_json(), json_file)
    return 0


def _show(console: Console, conversion: Conversion) -> None:
    def line(text: str) -> None:
        console.print(_printable(text), markup=False)

    for note in conversion.notes:
        line(f"note: {note}")
    kept = conversion.tensors - len(conversion.permuted)
    name, megabytes = conversion.model_type or "model", f"{conversion.nbytes / 1e6:,.1f}"
    line(f"{name}: {conversion.converted_from} to {conversion.to}, {megabytes} MB in {conversion.out}")
    line(f"{len(conversion.permuted)} tensors of q and k permuted, {kept} others copied byte for byte.")
    if conversion.still:
        line(f"Layers without rotation, not changed: {_some(conversion.still)}.")
    if conversion.left_out:
        line(f"Not copied: {_some(conversion.left_out)}.")
    if conversion.proof is not None:
        worst = conversion.proof.worst.difference
        line(
            f"Proven: attention scores of {len(conversion.proof.layers)} layers differ by at most {worst:.1e} of"
            f" |q||k|, and all {conversion.proof.tensors} tensors have the expected bytes."
        )
    if conversion.model_code == conversion.to:
        line(f"transformers uses {conversion.to} for this folder and can load it.")
    else:
        line(
            f"The code of transformers for this family still uses {conversion.model_code}. Load this folder with a"
            f" stack that uses {conversion.to}, or with ropewalk, whose load_spec reads the record in config.json."
        )


def _show_failure(console: Console, proof: Proof) -> None:
    wrong = [layer for layer in proof.layers if not layer.equal]
    console.print(
        "The proof failed, and the output was deleted. The cause is the disk or a bug in ropewalk.", style="bold red"
    )
    if wrong:
        text = (
            f"scores differ by up to {proof.worst.difference:.1e} of |q||k|; rounding causes at most {TOLERANCE:.0e}: "
        )
        console.print(_printable(text + _some([layer.layer for layer in wrong])), markup=False)
    if proof.differing:
        console.print(_printable(f"wrong bytes in {_some(proof.differing)}"), markup=False)


def _printable(text: str) -> str:
    """Escape control characters, which names of files and tensors from an untrusted source may contain."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _some(names: "tuple[str, ...] | list[str]") -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
