"""Checkpoints by torch.distributed.checkpoint: complete or absent, whenever a process is killed."""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ropewalk.errors import RopewalkError
from ropewalk.lab.ranks import on_rank_0

__all__ = ["last_checkpoint", "read_checkpoint", "require_same", "write_checkpoint"]

_UNFINISHED = "unfinished"


def last_checkpoint(folder: Path) -> int:
    """The step of the last complete checkpoint in a folder; 0 if there is none."""
    return max(_checkpoints(folder), default=0)


def write_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]
) -> None:
    """Write weights and optimizer states of all ranks to `folder`/step-N, and remove older checkpoints.

    They are written to a temporary folder, which is then renamed. A process that is killed, or a disk that is full,
    leaves the last complete checkpoint.

    Args:
        folder: The folder of a run.
        step: The number of steps that the model is trained.
        model: The model.
        optimizer: Its optimizer.
        config: What a run that continues has to have in common with this one. It can be written as JSON.

    Raises:
        RopewalkError: On every rank, if files cannot be written.
    """
    temporary = folder / _UNFINISHED

    def clear() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

    def publish() -> None:
        older = _checkpoints(folder).values()
        temporary.rename(folder / f"step-{step}")
        for path in older:
            shutil.rmtree(path, ignore_errors=True)

    try:
        on_rank_0(clear)
        with _one_process_is_meant():
            save(_states(model, optimizer), checkpoint_id=temporary)
        on_rank_0(publish)
    except (OSError, CheckpointException) as error:
        # The next attempt needs the room, and so does everybody else.
        shutil.rmtree(temporary, ignore_errors=True)
        last = last_checkpoint(folder)
        raise RopewalkError(
            asked=f"a checkpoint of step {step} in {folder}",
            expected="a disk with room for it",
            got=_reason(error),
            do=f"free some space, and resume: step {last} is complete" if last else "choose another folder",
        ) from None


def read_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]
) -> None:
    """Continue from `folder`/step-N. Its metadata are a pickle: read only checkpoints of your own.

    Args:
        folder: The folder of a run.
        step: The step.
        model: The model, which is changed in place.
        optimizer: Its optimizer, likewise.
        config: As it was written.

    Raises:
        RopewalkError: On every rank, if the checkpoint has another config, or cannot be read.
    """
    path = folder / f"step-{step}"
    asked, states = f"to resume from {path}", _states(model, optimizer)
    try:
        stored = on_rank_0(lambda: json.loads((path / "config.json").read_text(encoding="utf-8")))
        with _one_process_is_meant():
            load(states, checkpoint_id=path)
    except (OSError, ValueError, CheckpointException) as error:
        raise RopewalkError(
            asked=asked,
            expected="a complete checkpoint",
            got=_reason(error),
            do=f"delete {path}, and start the run again",
        ) from None
    require_same(stored, json.loads(json.dumps(config)), asked=asked)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


# Names in a config that are no options of a command, and what it means if they differ.
_CHANGED = {
    "digest": "the text has changed",
    "source of encoding": "the file of the encoding has changed",
    "torch": "torch is another version",
}


def require_same(stored: dict[str, Any], config: dict[str, Any], *, asked: str) -> None:
    """Raise an error if what is stored was computed with another config.

    Args:
        stored: The config that is stored.
        config: The config of this run.
        asked: What was asked for.

    Raises:
        RopewalkError: With the entries that differ.

    >>> require_same({"steps": 3}, {"steps": 3}, asked="to resume")
    """
    names = [name for name in {**stored, **config} if stored.get(name) != config.get(name)]
    if not names:
        return
    expected, got = (", ".join(f"{name} {x.get(name)}" for name in names) for x in (stored, config))
    reasons = [_CHANGED[name] for name in names if name in _CHANGED]
    do = "choose another folder" if len(reasons) == len(names) else "use the same options, or choose another folder"
    do += f": since then {' and '.join(reasons)}" if reasons else ""
    raise RopewalkError(asked=asked, expected=expected, got=got, do=do)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Without a process group torch warns that it assumes one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _checkpoints(folder: Path) -> dict[int, Path]:
    found = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.glob("step-*"))
    return {int(match[1]): path for match, path in found if match}


def _reason(error: BaseException) -> str:
    """The first failure of some rank: CheckpointException has one per rank, with its traceback."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if failures else error
    return f"{type(first).__name__}: {first}".splitlines()[0]
