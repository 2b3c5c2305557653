"""What ranks that train together need: who they are, what rank 0 does for all, and sums."""

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ropewalk.errors import RopewalkError

__all__ = ["end_rank", "largest", "on_rank_0", "rank_and_ranks"]

ResultT = TypeVar("ResultT")


def rank_and_ranks() -> tuple[int, int]:
    """Index of this process and number of processes: 0 and 1 without a process group.

    >>> rank_and_ranks()
    (0, 1)
    """
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_rank_0(function: Callable[[], ResultT]) -> ResultT:
    """Return the result of a function that only rank 0 calls, on every rank.

    Args:
        function: Reads or writes files. Its result can be pickled.

    Returns:
        The result.

    Raises:
        RopewalkError: On every rank, if the function has raised it.
        OSError: On every rank, if the function has raised one.
    """
    if rank_and_ranks()[1] == 1:
        return function()
    results: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            results[0] = function()
        except (OSError, RopewalkError) as error:
            results[1] = error
    dist.broadcast_object_list(results)
    if results[1] is not None:
        raise results[1]
    return results[0]


def largest(value: float, device: torch.device) -> float:
    """The largest value of all ranks."""
    if rank_and_ranks()[1] == 1:
        return value
    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def end_rank(status: int) -> NoReturn:
    """End this process, without the steps in which Python frees its modules.

    torch.distributed.tensor keeps process groups, and their threads, until the process ends. If a thread of gloo
    releases the tensor of its last collective while Python ends, C++ aborts the process ("terminate called without an
    active exception"), and torchrun reports a failed rank after a run that was complete.

    Args:
        status: The exit status.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
