"""`ropewalk convert`: a checkpoint from one pairing to the other, with a bar, a word on what it is for, and JSON."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ropewalk.hub.convert.conversion import Conversion, UnprovenError, convert_for
from ropewalk.hub.convert.proof import TOLERANCE, Proof
from ropewalk.tools.command_config import CommandLine
from ropewalk.tools.output import require_writable_file, write_json

__all__ = ["convert"]

# How many names are shown of a list; the JSON has all.
_SHOWN = 6


def convert(
    model: Path,
    out: Path,
    to: str,
    from_pairing: str | None = None,
    verify: bool = False,
    json_file: str | None = None,
) -> int:
    """Converts the folder `model` into the folder `out`; 0 if it is there and, where asked, proven; 1 if the proof
    fails, and nothing is there."""
    console = Console(stderr=json_file == "-", highlight=False, markup=False)
    if json_file is not None:
        require_writable_file(json_file, asked=f"ropewalk convert --json {json_file}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    errors = Console(stderr=True, highlight=False, markup=False)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        tasks = {what: progress.add_task(what, total=None, visible=False) for what in ("writing", "verifying")}

        def tell(what: str, done: int, total: int) -> None:
            progress.update(tasks[what], completed=done, total=total, visible=True)

        try:
            options = {"to": to, "from_pairing": from_pairing, "verify": verify, "progress": tell}
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
    line(f"{len(conversion.permuted)} tensors of q and k permuted, {kept} others the same byte for byte.")
    if conversion.still:
        line(f"Layers without rotation, left as they are: {_some(conversion.still)}.")
    if conversion.left_out:
        line(f"Not copied: {_some(conversion.left_out)}.")
    if conversion.proof is not None:
        worst = conversion.proof.worst.difference
        line(
            f"Proven: attention scores of {len(conversion.proof.layers)} layers differ by at most {worst:.1e} of"
            f" |q||k|, and all {conversion.proof.tensors} tensors have the bytes that they must have."
        )
    if conversion.model_code == conversion.to:
        line(f"transformers rotates this folder as {conversion.to}, and runs it as it is.")
    else:
        line(
            f"transformers' own code for this family still rotates {conversion.model_code}: give this folder to stacks"
            f" that rotate {conversion.to}, or to ropewalk, whose load_spec reads the record in config.json."
        )


def _show_failure(console: Console, proof: Proof) -> None:
    wrong = [layer for layer in proof.layers if not layer.equal]
    console.print("The proof failed, and nothing was kept: the disk, or this program, is at fault.", style="bold red")
    if wrong:
        text = f"scores differ by up to {proof.worst.difference:.1e} of |q||k|, where {TOLERANCE:.0e} is rounding: "
        console.print(_printable(text + _some([layer.layer for layer in wrong])), markup=False)
    if proof.differing:
        console.print(_printable(f"wrong bytes in {_some(proof.differing)}"), markup=False)


def _printable(text: str) -> str:
    """A line of text whose control characters are escaped: names of files and tensors are a stranger's."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _some(names: "tuple[str, ...] | list[str]") -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
