"""`ropewalk demo`: what the RoPE of a config is, the module made from it, and the proof that it is correct and fast."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.model import Model
from ropewalk.hub.extend.extension import LONGEST, ModelExtension, extension_of
from ropewalk.hub.extend.rules import start_of
from ropewalk.hub.inspection import Inspection, inspection_of
from ropewalk.tools.command_config import locate_config, read_named_config
from ropewalk.tools.demo import sheet
from ropewalk.tools.demo.steps import Steps
from ropewalk.tools.output import require_writable_file, require_writable_folder, write_json, write_whole

if TYPE_CHECKING:
    from ropewalk.tools.demo.agreement import Agreement
    from ropewalk.tools.demo.oracle import Oracle

__all__ = ["demo"]

POSITIONS = (1_000, 10_000, 100_000, 1_000_000)
# Extended to this multiple of the context.
LONGER = 4
# The number of positions in the picture.
POINTS = 61
# The names of the pictures.
PICTURES = ("agreement", "wavelengths")


def demo(config: str, *, plots: Path, json_file: str | None = None, pairing: str | None = None) -> int:
    """Print what the RoPE of a config is, its module, its agreement, its speed, its extension, and false statements.

    Args:
        config: The path of a config.json or of a model folder, or the name of a bundled config.
        plots: Write pictures, and a copy of a bundled config, to this folder. A copy that was edited is read instead of
            the bundled config.
        json_file: Write everything to this file as JSON; "-" for standard output.
        pairing: The pairing, if the model family is unknown.

    Returns:
        The exit code: 0, or 1 if the module does not agree or a measurement contradicts a recorded verdict.

    Raises:
        RopewalkError: If the config cannot be read, no layer rotates, or an output cannot be written. All of these are
            checked before anything is measured.
    """
    asked = f"ropewalk demo {config}"
    if json_file is not None:
        require_writable_file(json_file, asked=f"{asked} --json {json_file}")
    # If JSON is written to standard output, everything else goes to standard error.
    output = Console(stderr=json_file == "-", highlight=False, markup=False)
    with Steps(Console(stderr=True, highlight=False, markup=False), total=3) as steps:
        path = locate_config(config, asked)
        # A copy of a bundled config is short to type, and may be edited: then it is the user's, and is not overwritten.
        copy, bundled = (None, None) if path == config else (plots / Path(path).name, Path(path))
        edited = copy is not None and bundled is not None and _differs(copy, bundled)
        model = read_named_config(str(copy) if edited else path, pairing, asked)
        inspection = inspection_of(model)
        pictures = [str(plots / f"{name}.png") for name in PICTURES]
        _require_outputs(plots, [*pictures, *([] if copy is None else [str(copy)])], asked)
        if copy is not None and bundled is not None:
            path = str(copy)
            if not copy.exists():
                write_whole(bundled.read_bytes(), path)
        origin = f"{path}, which differs from the bundled one; to restore that, delete it" if edited else ""
        layer, spec = sheet.main_layer(inspection)
        code = sheet.code_for(path, layer.name, pairing)
        steps.show(output, sheet.rope(inspection, origin), sheet.module(code))

        steps.begin("loading PyTorch")
        import torch

        from ropewalk.tools.demo import agreement, speed, statements

        oracle, not_shown = _oracle(path, layer.name, pairing)
        rows = agreement.compare(spec, oracle, POSITIONS)
        steps.show(output, sheet.agreement(rows, not_shown))

        steps.begin("timing the rotation, five seconds")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        times = speed.measure(spec, device)
        machine = f"{torch.get_num_threads()} CPU threads" if device == "cpu" else torch.cuda.get_device_name()
        dtype = str(speed.dtype_on(device)).removeprefix("torch.")
        setting = f"{speed.Q_HEADS} and {speed.K_HEADS} heads of {spec.head_dim}, {dtype}, {machine}"
        steps.show(output, sheet.speed(times, setting))

        steps.begin("extending the context, measuring statements, drawing pictures")
        extended = _extended(model)
        steps.show(output, sheet.extension(*_verdict(extended)))

        entries = statements.false_statements()
        steps.show(output, sheet.statements([(entry, statements.source_of(entry)) for entry in entries]))

        missing = _draw(inspection, agreement.compare(spec, oracle, _spaced()), pictures)
        to = extended.length if isinstance(extended, ModelExtension) else None
        steps.show(output, sheet.next_commands(path, to, missing or ", ".join(pictures)))
    agrees = all(row.agrees for row in rows) and not any(entry.contradicted for entry in entries)
    if json_file is not None:
        record = {
            "config": path,
            "inspection": inspection.as_json(),
            "code": code,
            "agreement": [asdict(row) | {"agrees": row.agrees} for row in rows],
            "not_compared_with_transformers": not_shown or None,
            "device": machine,
            "dtype": dtype,
            "speed": [asdict(row) | {"ratio": row.ratio} for row in times],
            "extension": extended.as_json() if isinstance(extended, ModelExtension) else None,
            "statements": [entry.as_dict() for entry in entries],
            "pictures": [] if missing else pictures,
            "agrees": agrees,
        }
        write_json(record, json_file)
    return 0 if agrees else 1


def _differs(copy: Path, bundled: Path) -> bool:
    """Whether a file exists and is not the bundled config. One that cannot be read differs: reading it reports why."""
    try:
        return copy.is_file() and copy.read_bytes() != bundled.read_bytes()
    except OSError:
        return True


def _require_outputs(plots: Path, files: Sequence[str], asked: str) -> None:
    """Check that the folder and every file in it can be written."""
    require_writable_folder(plots, asked=f"{asked} --plots {plots}")
    for file in files:
        require_writable_file(file, asked=f"{asked} --plots {plots}")


def _oracle(path: str, layer: str, pairing: str | None) -> "tuple[Oracle | None, str]":
    """The rotation that the raw config describes, or None and the reason why no formula is written for it."""
    from ropewalk.tools.demo.oracle import NotCoveredError, oracle_for, read_keys

    try:
        return oracle_for(read_keys(path), layer, pairing), ""
    except NotCoveredError as reason:
        return None, str(reason)


def _extended(model: Model) -> ModelExtension | RopewalkError:
    """The extension to four times the context, or the reason why the config allows none."""
    try:
        reach = start_of(model).reach
    except RopewalkError as error:
        return error
    return extension_of(model, min(LONGEST, LONGER * reach))


def _verdict(extended: ModelExtension | RopewalkError) -> tuple[str, list[str]]:
    """The title and the paragraphs of the section on the extension."""
    if isinstance(extended, RopewalkError):
        return f"{LONGER} times the context: not with this config", [f"{extended.got}; do this: {extended.do}"]
    reach, to = extended.start.reach, extended.length
    title = f"{to / reach:.3g} times the context: {reach:,} → {to:,} positions"
    verdict = extended.verdict
    if verdict is None:
        return title, []
    first, second = verdict.as_it_is, verdict.tuned
    # Reasons are not repeated.
    others = [reason for reason in second.why.split("; ") if reason not in first.why.split("; ")]
    tuned_why = "; ".join(others) or "for the same reason"
    return title, [
        f"without fine-tuning: {first.choice}; {first.why}",
        f"with fine-tuning: {second.choice}; {tuned_why}",
    ]


def _spaced() -> list[int]:
    """Positions from 1 to the last of POSITIONS, evenly spaced on a logarithmic axis."""
    last = POSITIONS[-1]
    return sorted({round(last ** (i / (POINTS - 1))) for i in range(POINTS)})


def _draw(inspection: Inspection, rows: "Sequence[Agreement]", targets: Sequence[str]) -> str:
    """Draw the pictures. Return "", or a text that names the extra if matplotlib is missing."""
    try:
        from ropewalk.tools.demo.plot import draw_agreement
        from ropewalk.tools.inspect.plot import draw
    except RopewalkError as error:
        return f"none, {error.got}: {error.do}"
    draw_agreement(rows, inspection.model.lengths, inspection.model.name, targets[0])
    draw([inspection], targets[1])
    return ""
