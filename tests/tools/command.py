"""The command line in this process: starting Python and importing PyTorch takes longer than most commands."""

import io
import os
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

from ropewalk.tools.cli import main

__all__ = ["Outcome", "ropewalk"]


class Outcome(NamedTuple):
    """The results of a command, named as those of `subprocess.run`."""

    returncode: object
    stdout: str
    stderr: str


def ropewalk(*arguments: object, columns: int = 80, encoding: str = "utf-8") -> Outcome:
    """Run `ropewalk` with these arguments, writing to files of this encoding, in a terminal of this width."""
    # As Python opens them: what standard error cannot encode is escaped.
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors, write_through=True)
        for errors in ("strict", "backslashreplace")
    )
    code: object = 0
    with (
        mock.patch.dict(os.environ, {"COLUMNS": str(columns), "NO_COLOR": "1"}),
        mock.patch.object(sys, "argv", ["ropewalk", *map(str, arguments)]),
        mock.patch.object(warnings, "formatwarning", warnings.formatwarning),
        redirect_stdout(out),
        redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    texts = []
    for stream in (out, err):
        stream.flush()
        buffer = stream.buffer
        assert isinstance(buffer, io.BytesIO)
        texts.append(buffer.getvalue().decode(encoding))
    return Outcome(code, *texts)
