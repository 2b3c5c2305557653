"""Cases that run on two ranks: they train the same model as one process."""

import dataclasses
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lab.small_runs import CPU, TINY
from ropewalk.errors import RopewalkError
from ropewalk.lab.export import export, load_weights, whole_state
from ropewalk.lab.run import Run
from ropewalk.lab.training import Interrupted, train

__all__ = ["RUNS", "shared_runs", "weights"]

STEPS = 3
# How ranks share a run, and the run.
RUNS: dict[str, tuple[Any, Run]] = {
    "ddp": ("ddp", TINY),
    "fsdp": ("fsdp", TINY),
    # Parameters of an encoding, which all layers share.
    "fsdp, t5": ("fsdp", dataclasses.replace(TINY, encoding="t5")),
    # Ranks have different numbers of scored tokens.
    "ddp, puzzle": ("ddp", dataclasses.replace(TINY, task="copy")),
    "context": ("context", TINY),
    "context, sinusoidal": ("context", dataclasses.replace(TINY, encoding="sinusoidal")),
    "context, linear": ("context", dataclasses.replace(TINY, attention="linear", encoding="alibi")),
    "context, puzzle": ("context", dataclasses.replace(TINY, task="copy", encoding="t5")),
}


def weights(model: nn.Module) -> Tensor:
    """All weights of a model as one vector."""
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in model.parameters()]
    return torch.cat([x.detach().flatten() for x in whole])


def one_rank(run: Run) -> tuple[Tensor, list[tuple[float, float | None]]]:
    """Weights and losses of a run in one process."""
    model, result = train(dataclasses.replace(run, steps=STEPS), CPU)
    return weights(model), result.curves["loss by step"]


def shared_runs(world: int) -> dict[str, Callable[[DeviceMesh], None]]:
    """Name -> a case."""
    torch.set_default_dtype(torch.float64)

    def case(parallel: Any, run: Run) -> Callable[[DeviceMesh], None]:
        def compare(mesh: DeviceMesh) -> None:
            model, result = train(dataclasses.replace(run, steps=STEPS), dataclasses.replace(CPU, parallel=parallel))
            ours = weights(model)
            expected, losses = _alone(lambda: one_rank(run))
            assert (ours - expected).abs().max().item() < 1e-9
            for (_, a), (_, b) in zip(result.curves["loss by step"], losses, strict=True):
                assert a is not None
                assert b is not None
                assert abs(a - b) < 1e-9

        return compare

    return {name: case(*x) for name, x in RUNS.items()} | {
        "an odd batch": odd_batch,
        "resumed": resumed,
        "offset": offset,
    }


def _alone(function: Callable[[], Any]) -> Any:
    """Call a function as if there were no process group: the same code is then one process."""
    with mock.patch.object(dist, "is_initialized", return_value=False):
        return function()


def odd_batch(mesh: DeviceMesh) -> None:
    with pytest.raises(RopewalkError, match="a batch that the ranks divide"):
        train(dataclasses.replace(TINY, batch=3), CPU)


def offset(mesh: DeviceMesh) -> None:
    with pytest.raises(RopewalkError, match="ranks that share the batch"):
        train(dataclasses.replace(TINY, offset=10), dataclasses.replace(CPU, parallel="context"))


def resumed(mesh: DeviceMesh) -> None:
    """FSDP: a run that stops on the wish of one rank, and continues, has the weights of one that does not stop."""
    names: list[Any] = [tempfile.mkdtemp()] if mesh.get_rank() == 0 else [None]
    dist.broadcast_object_list(names)
    folder, settings = Path(names[0]), dataclasses.replace(CPU, parallel="fsdp")
    whole = weights(train(TINY, settings)[0])
    stop = threading.Event()
    if mesh.get_rank() == 1:
        stop.set()
    with pytest.raises(Interrupted, match="after step 1"):
        train(TINY, settings, folder, stop=stop)
    model = train(TINY, settings, folder)[0]
    assert torch.equal(whole, weights(model))
    # Every rank has a part of the weights, and rank 0 writes all.
    state = whole_state(model)
    if mesh.get_rank() == 0:
        export(model, TINY, folder / "model", state)
        assert torch.equal(whole, weights(load_weights(TINY, folder / "model")))
    other = dataclasses.replace(settings, parallel="ddp")
    with pytest.raises(RopewalkError, match="expected: parallel fsdp"):
        train(TINY, other, folder)
