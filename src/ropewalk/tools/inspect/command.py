"""`ropewalk inspect`: shows the RoPE of one config, or compares several. Needs neither torch nor weights."""

import importlib
from collections.abc import Sequence

from rich.console import Console

from ropewalk.hub.inspection import inspection_of
from ropewalk.tools.command_config import read_named_config
from ropewalk.tools.inspect.comparison import comparison
from ropewalk.tools.inspect.sheet import sheet, warnings_of
from ropewalk.tools.output import require_writable_file, trimmed, write_json

__all__ = ["inspect"]


def inspect(
    configs: Sequence[str], json_file: str | None = None, plot: str | None = None, pairing: str | None = None
) -> int:
    """Print one config in full, or several side by side.

    Args:
        configs: Paths of config.json files or model folders.
        json_file: Write every pair to this file as JSON; "-" for standard output.
        plot: Write a picture of the wavelengths to this file.
        pairing: The pairing, if the model family is unknown.

    Returns:
        The exit code 0.

    Raises:
        RopewalkError: If an output cannot be written, which is checked first, or if a config cannot be read.
    """
    command = f"ropewalk inspect {' '.join(configs)}"
    if json_file is not None:
        require_writable_file(json_file, asked=f"{command} --json {json_file}")
    if plot is not None:
        # Raises now if matplotlib is missing. Imported only here, because the import is slow.
        pictures = importlib.import_module("ropewalk.tools.pictures")
        pictures.require_picture(plot, asked=f"{command} --plot {plot}")
    inspections = [
        inspection_of(read_named_config(config, pairing, f"ropewalk inspect {config}")) for config in configs
    ]
    if json_file is not None:
        write_json([inspection.as_json() for inspection in inspections], json_file)
    if plot is not None:
        from ropewalk.tools.inspect.plot import draw

        draw(inspections, plot)
    # If JSON is written to standard output, everything else goes to standard error.
    console = Console(stderr=json_file == "-", highlight=False, markup=False)
    with trimmed(console):
        if len(inspections) == 1:
            console.print(sheet(inspections[0]))
        else:
            console.print(comparison(inspections, console.width))
            for model in (inspection.model for inspection in inspections):
                if model.warnings:
                    console.print(warnings_of(model, f"{model.name}: warnings"))
    if plot is not None:
        console.print(f"picture: {plot}", soft_wrap=True)
    return 0
