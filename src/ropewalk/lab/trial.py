"""trial: one forward of an encoding of your own, before anything is trained."""

import os
import traceback
from pathlib import Path

import torch

from ropewalk.errors import RopewalkError
from ropewalk.lab.run import Run, make_task
from ropewalk.lab.training import Settings, make_model

__all__ = ["require_forward"]

_TOKENS = 8


def require_forward(run: Run, settings: Settings) -> None:
    """Compute a few tokens with the model of a run: an error of its encoding is reported now.

    Args:
        run: A run, whose encoding is module:Class.
        settings: How it is computed.

    Raises:
        RopewalkError: If the encoding raises an exception; it names the class, the exception, and file and line.
    """
    device = settings.device
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device)
    positions = run.offset + torch.arange(_TOKENS, device=device) if run.offset else None
    task = make_task(run)
    try:
        model = make_model(run, task).to(device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            model(tokens, positions)
    except RopewalkError:
        raise
    except Exception as error:
        # The class is the user's: what it raises can be anything, and nothing of it is hidden.
        raise RopewalkError(
            asked=f"encoding {run.encoding}",
            expected=f"a class that encodes {_TOKENS} tokens with {run.attention} attention",
            got=f"{type(error).__name__}: {error} ({_place(error)})",
            do="mend it there, and run the experiment again",
        ) from error


def _place(error: Exception) -> str:
    """File and line of an exception, in code of the user where it was there."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    libraries = [f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)]
    own = [frame for frame in frames if not frame.filename.startswith((*libraries, "<"))]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"
