"""Ranks that disagree raise an error on every rank, instead of waiting for each other or computing something wrong."""

import hashlib
from collections.abc import Callable
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ropewalk.errors import RopewalkError
from ropewalk.kernels.constructors import tensor, zeros
from ropewalk.kernels.torch_internals import timeout_of

__all__ = ["agree", "agree_on_call", "cpu_group"]


def cpu_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a process group of a mesh with one dimension that communicates tensors on the CPU.

    On other devices it is created, which all ranks of the mesh must do at the same time. It has the timeout of the
    group of the mesh.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> cpu_group(mesh) is mesh.get_group()
    True
    >>> dist.destroy_process_group()
    """
    group = mesh.get_group()
    if mesh.device_type == "cpu":
        return group
    if group not in _GROUPS:
        ranks = dist.get_process_group_ranks(group)
        timeout = timeout_of(group, mesh.device_type)
        new = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        _GROUPS[group] = cast(dist.ProcessGroup, new)
    return _GROUPS[group]


# Created once per group of a mesh: every group has threads and connections of its own.
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def agree(group: dist.ProcessGroup, describe: Callable[[], str], *, asked: str, do: str) -> None:
    """Raise on every rank unless all ranks describe the same call.

    A digest of 32 bytes is exchanged. The descriptions themselves are exchanged only if digests differ.

    Args:
        group: A group that communicates tensors on the CPU.
        describe: Returns the description of this rank. If it raises, all ranks raise.
        asked: The call, for the error.
        do: What to do if descriptions differ, for the error.

    Raises:
        RopewalkError: If a description differs, or if `describe` raised on another rank. What it raised on this rank is
            raised as it is.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> agree(mesh.get_group(), lambda: "one rank agrees with itself", asked="a doctest", do="")
    >>> dist.destroy_process_group()
    """
    error = None
    try:
        text = describe()
    except Exception as raised:
        # Whatever it is, it is raised below, after the exchange: the other ranks must not wait for this one.
        error, text = raised, f"{_FAILED}{type(raised).__name__}: {' '.join(str(raised).split())}"
    mine = tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device="cpu")
    digests = [zeros(32, dtype=torch.uint8, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, mine, group=group)
    if error is not None:
        if not all(torch.equal(x, mine) for x in digests):
            _texts(text, group)
        raise error
    if all(torch.equal(x, mine) for x in digests):
        return
    texts = _texts(text, group)
    failed = {rank: other for rank, other in enumerate(texts) if other.startswith(_FAILED)}
    if failed:
        raise RopewalkError(
            asked=asked,
            expected="valid arguments on all ranks",
            got="; ".join(f"rank {rank}: {other}" for rank, other in failed.items()),
            do=f"correct the call on rank {', '.join(map(str, failed))}; the arguments of this rank are valid",
        )
    raise RopewalkError(
        asked=asked,
        expected="the same call on all ranks",
        got="; ".join(f"rank {rank}: {other}" for rank, other in enumerate(_differing(texts))),
        do=do,
    )


def agree_on_call(
    group: dist.ProcessGroup | None, check: Callable[[], object], describe: Callable[[], str], *, asked: str, do: str
) -> None:
    """Check the arguments of a call on all ranks, and compare them. A compiled call only checks those of this rank.

    Args:
        group: As for `agree`; None to compare nothing.
        check: Raises if the arguments of this rank are invalid.
        describe: Describes what must not differ between ranks.
        asked: As for `agree`.
        do: As for `agree`.

    Raises:
        RopewalkError: On every rank, if a rank disagrees or has raised.

    >>> agree_on_call(None, lambda: print("checked"), lambda: "the call", asked="a doctest", do="")
    checked
    """
    if group is None or torch.compiler.is_compiling():
        check()
        return

    def both() -> str:
        check()
        return describe()

    agree(group, both, asked=asked, do=do)


# What the description of a rank begins with whose arguments are invalid.
_FAILED = "an error: "


def _texts(text: str, group: dist.ProcessGroup) -> list[str]:
    """Return the descriptions of all ranks."""
    texts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    return texts


def _differing(texts: list[str]) -> list[str]:
    """Return the parts of descriptions, separated by semicolons, that are not the same on all ranks."""
    parts = [text.split("; ") for text in texts]
    common = set(parts[0]).intersection(*parts[1:])
    return ["; ".join(part for part in each if part not in common) or "the same otherwise" for each in parts]
