"""plan: the plan of tensor parallelism for a model with our layers."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ropewalk.errors import RopewalkError, shown
from ropewalk.nn.attention.projections import ProjectedHeads
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.signatures import checks_names

__all__ = ["plan"]


class _Replicated(ParallelStyle):
    """Parameters are DTensors that are the same on all ranks, so that optimizers see DTensors alone."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


@checks_names
def plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the plan of tensor parallelism for the layers of a model, for torch's `parallelize_module`.

    Each rank computes some heads of every `Attention` and `LinearAttention`: q_proj, k_proj and v_proj are cut by
    columns, and o_proj by rows (Megatron-LM, 1909.08053, section 3). With a single key head, k_proj and v_proj are not
    cut, and all ranks compute it. Parameters of encodings are the same on all ranks. Other layers of the model are not
    in the plan: add their entries to it.

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
    for name, module in model.named_modules():
        prefix = name and f"{name}."
        if isinstance(module, ProjectedHeads):
            cut = ("q_proj", "k_proj", "v_proj") if module.num_kv_heads > 1 else ("q_proj",)
            styles |= {f"{prefix}{projection}": ColwiseParallel() for projection in cut}
            styles[f"{prefix}o_proj"] = RowwiseParallel()
        elif isinstance(module, Encoding | RotaryEmbedding) and any(True for _ in module.parameters(recurse=False)):
            styles[name] = _Replicated()
    if not any(isinstance(style, ColwiseParallel) for style in styles.values()):
        raise RopewalkError(
            asked="parallel.plan(model)",
            expected="a model with layers of ropewalk: Attention or LinearAttention",
            got=type(model).__name__,
            do="pass the model that has them; for other layers see torch.distributed.tensor.parallel",
        )
    return styles
