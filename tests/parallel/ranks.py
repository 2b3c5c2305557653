"""Functions that run on several ranks: one process per rank, gloo, many cases per start."""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import start_processes

__all__ = ["Case", "failures_on_ranks", "on_ranks"]

Case = Callable[[DeviceMesh], None]

# Imported once per worker of pytest, in a process from which ranks are forked: to import them takes seconds.
PRELOADED = [
    "ropewalk.nn.attention.layer",
    "ropewalk.nn.linear.layer",
    "ropewalk.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.debug",
    "torch._dynamo.testing",
    "hypothesis",
    "pytest",
    "jaxtyping",
    "beartype",
]

# A rank that waits for one that has ended gets an error after this time at the latest.
TIMEOUT = timedelta(seconds=60)


def failures_on_ranks(world: int, module: str, function: str, folder: Path) -> dict[str, list[str]]:
    """Run the cases that a function of a module returns by name, and return the failures of each.

    Args:
        world: Number of ranks.
        module: Name of the module.
        function: Name of a function (world) -> dict of cases.
        folder: An empty folder.

    Returns:
        The tracebacks of the ranks on which a case failed, by the name of the case.
    """
    results = on_ranks(world, module, function, folder)
    assert all(result.keys() == results[0].keys() for result in results)
    return {name: [result[name] for result in results if result[name]] for name in results[0]}


def on_ranks(world: int, module: str, function: str, folder: Path) -> list[Any]:
    """Run cases on ranks that are processes, and return what each rank has stored."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    # Ranks have the environment of the first start, unless they receive that of this one.
    arguments = (world, module, function, str(folder), dict(os.environ))
    start_processes(_rank, arguments, world, start_method="forkserver")
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(world)]


def _rank(rank: int, world: int, module: str, function: str, folder: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    faulthandler.enable()
    place = Path(folder, "store").as_uri()
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world, timeout=TIMEOUT)
    mesh, results = init_device_mesh("cpu", (world,)), {}
    for name, case in getattr(importlib.import_module(module), function)(world).items():
        try:
            case(mesh)
            results[name] = ""
        # What `pytest.fail` raises is no Exception.
        except (Exception, pytest.fail.Exception):
            results[name] = f"rank {rank}: {traceback.format_exc()}"
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
