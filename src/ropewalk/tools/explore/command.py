"""`ropewalk explore`: writes the page and opens it. Needs neither torch nor a network."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ropewalk.errors import RopewalkError
from ropewalk.tools.explore.page import page_data, page_html
from ropewalk.tools.explore.presets import Preset, read_config
from ropewalk.tools.output import require_writable_file, write_json, write_whole

__all__ = ["explore"]

_SUFFIXES = (".html", ".htm")


def explore(
    configs: Sequence[str],
    out: str,
    *,
    open_page: bool = True,
    json_file: str | None = None,
    pairing: str | None = None,
) -> int:
    """Write the page to a file and open it.

    Args:
        configs: Paths of configs or model folders, or names of bundled configs. The first one is shown first.
        out: The HTML file to write.
        open_page: Whether to open the file in a browser.
        json_file: Write what the page contains to this file as JSON; "-" for standard output.
        pairing: The pairing, if the model family is unknown.

    Returns:
        The exit code 0.

    Raises:
        RopewalkError: If an output cannot be written, which is checked first, or if a config cannot be read.
    """
    command = f"ropewalk explore {' '.join(configs)}".rstrip()
    if Path(out).suffix.lower() not in _SUFFIXES:
        raise RopewalkError(
            asked=f"{command} --out {out}",
            expected="a file name that ends in .html",
            got=repr(out),
            do="add .html: other files are not overwritten",
        )
    require_writable_file(out, asked=f"{command} --out {out}")
    if json_file is not None:
        require_writable_file(json_file, asked=f"{command} --json {json_file}")
        if json_file != "-" and Path(json_file).resolve() == Path(out).resolve():
            raise RopewalkError(
                asked=f"{command} --out {out} --json {json_file}",
                expected="two different files",
                got=f"{out!r} twice",
                do="choose another name for the JSON: it would replace the page",
            )
    presets: list[Preset] = []
    biases: list[dict[str, Any]] = []
    for config in dict.fromkeys(configs):
        of_config, bias = read_config(config, pairing)
        presets += of_config
        biases += [] if bias is None else [bias]
    data = page_data(presets, biases)
    write_whole(page_html(data).encode("utf-8"), out)
    if json_file is not None:
        write_json(data, json_file)
    # If JSON is written to standard output, everything else goes to standard error.
    Console(stderr=json_file == "-", highlight=False, markup=False).print(f"page: {out}", soft_wrap=True)
    address = Path(out).resolve().as_uri()
    if open_page and not webbrowser.open(address):
        notes = Console(stderr=True, highlight=False, markup=False)
        notes.print(f"note: no browser was found; open {address} in one", soft_wrap=True)
    return 0
