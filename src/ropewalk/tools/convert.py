"""`ropewalk convert`: a checkpoint from one pairing to the other, with a bar, a word on what it is for, and JSON."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ropewalk.hub.convert.conversion import Conversion, UnprovenError, convert_checkpoint
from ropewalk.hub.convert.proof import TOLERANCE, Proof
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
            done = convert_checkpoint(model, out, to=to, from_pairing=from_pairing, verify=verify, progress=tell)
        except UnprovenError as error:
            progress.stop()
            _show_failure(console, error.proof)
            if json_file is not None:
                write_json({"out": None, "proof": _proof(error.proof)}, json_file)
            return 1
    _show(console, done)
    if json_file is not None:
        write_json(_as_dict(done), json_file)
    return 0


def _show(console: Console, done: Conversion) -> None:
    def line(text: str) -> None:
        console.print(text, markup=False)

    for note in done.notes:
        line(f"note: {note}")
    kept = done.tensors - len(done.permuted)
    line(f"{done.model_type or 'model'}: {done.converted_from} to {done.to}, {done.nbytes / 1e6:,.1f} MB in {done.out}")
    line(f"{len(done.permuted)} tensors of q and k permuted, {kept} others the same byte for byte.")
    if done.still:
        line(f"Layers without rotation, left as they are: {_some(done.still)}.")
    if done.left_out:
        line(f"Not copied: {_some(done.left_out)}.")
    if done.proof is not None:
        worst = done.proof.worst.difference
        line(
            f"Proven: attention scores of {len(done.proof.layers)} layers differ by at most {worst:.1e} of |q||k|,"
            f" and all {done.proof.tensors} tensors have the bytes that they must have."
        )
    if done.model_code == done.to:
        line(f"transformers rotates this folder as {done.to}, and runs it as it is.")
    else:
        line(
            f"transformers' own code for this family still rotates {done.model_code}: give this folder to stacks that"
            f" rotate {done.to}, or to ropewalk, whose load_spec reads the record in config.json."
        )


def _show_failure(console: Console, proof: Proof) -> None:
    wrong = [layer for layer in proof.layers if not layer.equal]
    console.print("The proof failed, and nothing was kept: the disk, or this program, is at fault.", style="bold red")
    if wrong:
        text = f"scores differ by up to {proof.worst.difference:.1e} of |q||k|, where {TOLERANCE:.0e} is rounding: "
        console.print(text + _some([layer.layer for layer in wrong]), markup=False)
    if proof.differing:
        console.print(f"wrong bytes in {_some(proof.differing)}", markup=False)


def _some(names: "tuple[str, ...] | list[str]") -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _as_dict(done: Conversion) -> dict[str, object]:
    return {
        "model": str(done.model),
        "out": str(done.out),
        "model_type": done.model_type,
        "from": done.converted_from,
        "to": done.to,
        "model_code": done.model_code,
        "bytes": done.nbytes,
        "tensors": done.tensors,
        "permuted": list(done.permuted),
        "without_rotation": list(done.still),
        "left_out": list(done.left_out),
        "notes": list(done.notes),
        "proof": None if done.proof is None else _proof(done.proof),
    }


def _proof(proof: Proof) -> dict[str, object]:
    return {
        "holds": proof.holds,
        "tolerance": TOLERANCE,
        "layers": [{"layer": layer.layer, "difference": layer.difference} for layer in proof.layers],
        "tensors": proof.tensors,
        "differing": list(proof.differing),
    }
