"""plan: the plan of tensor parallelism for a model with our layers."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ropewalk.errors import RopewalkError, shown
from ropewalk.nn.attention.projections import ProjectedHeads
from ropewalk.nn.encodings.base import Encoding
from ropewalk.signatures import checks_names

__all__ = ["plan"]


class _Replicated(ParallelStyle):
    """Parameters are DTensors that are the same on all ranks, so that optimizers see DTensors alone."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class _Uncut(ParallelStyle):
    """A layer that all ranks compute, of plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicated(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            x, whole = inputs[0], [Replicate()] * mesh.ndim
            if not isinstance(x, DTensor):
                return DTensor.from_local(x, mesh, whole, run_check=False)
            return x.redistribute(mesh, whole)

        def plain(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, replicated, plain)


@checks_names
def plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the plan of tensor parallelism for the layers of a model, for torch's `parallelize_module`.

    Each rank computes some heads of every `Attention` and `LinearAttention`: q_proj, k_proj and v_proj are cut by
    columns, and o_proj by rows (Megatron-LM, 1909.08053, section 3). A single key head is computed by all ranks.
    Parameters of encodings that the layers use are the same on all ranks. Other layers of the model are not in the
    plan: add their entries to it.

    Args:
        model: The model, or a layer.

    Returns:
        Styles by the names of modules. Numbers of heads must be multiples of the number of ranks.

    Raises:
        RopewalkError: If the model has no such layer.

    >>> from ropewalk import Attention
    >>> model = nn.ModuleDict({"attention": Attention(8, num_heads=2)})
    >>> {name: type(style).__name__ for name, style in plan(model).items()}  # doctest: +NORMALIZE_WHITESPACE
    {'attention.q_proj': 'ColwiseParallel', 'attention.k_proj': 'ColwiseParallel',
     'attention.v_proj': 'ColwiseParallel', 'attention.o_proj': 'RowwiseParallel'}
    """
    if not isinstance(model, nn.Module):
        raise RopewalkError(
            asked="parallel.plan(model)", expected="a torch.nn.Module", got=shown(model), do="pass the model"
        )
    styles: dict[str, ParallelStyle] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ProjectedHeads)}
    # Not those that change tokens before the layers, as plain tensors.
    inside = {
        part
        for layer in layers.values()
        if isinstance(encoding := getattr(layer, "encoding", None), Encoding) and not encoding.only_embeds
        for part in encoding.modules()
    }
    for name, module in model.named_modules():
        prefix = name and f"{name}."
        if name in layers:
            others = ColwiseParallel if layers[name].num_kv_heads > 1 else _Uncut
            styles |= {f"{prefix}q_proj": ColwiseParallel(), f"{prefix}k_proj": others(), f"{prefix}v_proj": others()}
            styles[f"{prefix}o_proj"] = RowwiseParallel()
        elif module in inside and any(True for _ in module.parameters(recurse=False)):
            styles[name] = _Replicated()
    if not any(isinstance(style, ColwiseParallel) for style in styles.values()):
        raise RopewalkError(
            asked="parallel.plan(model)",
            expected="a model with layers of ropewalk: Attention or LinearAttention",
            got=type(model).__name__,
            do="pass the model that has them; for other layers see torch.distributed.tensor.parallel",
        )
    return styles
