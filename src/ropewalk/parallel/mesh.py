"""The mesh over which tokens are cut: its checks, and the device of this rank."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ropewalk.errors import RopewalkError, shown

__all__ = ["checked_mesh", "device_of"]


def checked_mesh(mesh: object, *, asked: str) -> DeviceMesh:
    """Return a mesh. Raise unless it has one dimension, and a process group that connects its devices.

    Args:
        mesh: A DeviceMesh.
        asked: The call, for the error.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> checked_mesh(init_device_mesh("cpu", (1,)), asked="a doctest").size()
    1
    >>> dist.destroy_process_group()
    """
    if not isinstance(mesh, DeviceMesh):
        raise RopewalkError(
            asked=asked,
            expected="a DeviceMesh",
            got=shown(mesh),
            do='create one: torch.distributed.device_mesh.init_device_mesh("cuda", (ranks,))',
        )
    if mesh.ndim != 1:
        raise RopewalkError(
            asked=asked,
            expected="a mesh with one dimension, over which the tokens are cut",
            got=f"{mesh.ndim} dimensions" + (f", {', '.join(mesh.mesh_dim_names)}" if mesh.mesh_dim_names else ""),
            do='pass one of them by its name: mesh["cp"]; names are mesh_dim_names of init_device_mesh',
        )
    device, config = mesh.device_type, dist.get_backend_config(mesh.get_group())
    backend = dict(item.split(":") for item in config.split(",")).get(device)
    # With gloo, an all-gather of tensors on a GPU ends the process.
    if backend is None or (device != "cpu" and backend == "gloo"):
        raise RopewalkError(
            asked=asked,
            expected=f"a process group that connects devices of type {device}",
            got=f"one with the backends {config}",
            do='init_process_group("cpu:gloo,cuda:nccl") connects both; with gloo alone, pass a mesh of CPUs: what is '
            "exchanged is then copied",
        )
    return mesh


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank: the current one of the type of the mesh.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> device_of(init_device_mesh("cpu", (1,)))
    device(type='cpu')
    >>> dist.destroy_process_group()
    """
    device = torch.device(mesh.device_type)
    if device.type == "cpu":
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())
