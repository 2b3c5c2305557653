"""Base class of attention layers: sizes of heads, and the projections before and after the heads."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, require_count, require_flag
from ropewalk.nn.memory_layout import check_strided
from ropewalk.nn.old_checkpoints import DropsOldBuffers
from ropewalk.nn.position_checks import described
from ropewalk.nn.scripting import refuse_scripting
from ropewalk.ops.dtensors import (
    heads_of_projection,
    is_dtensor,
    join_heads,
    split_heads,
    with_own_parameters,
)

__all__ = ["HeadSizes", "ProjectedHeads"]


class HeadSizes(NamedTuple):
    """Sizes of an attention layer.

    Attributes:
        dim: Width of the model.
        num_heads: Number of query heads.
        num_kv_heads: Number of key heads.
        head_dim: Width of a head.

    >>> HeadSizes.checked(8, 4, None, None, layer="a doctest")
    HeadSizes(dim=8, num_heads=4, num_kv_heads=4, head_dim=2)
    """

    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def checked(
        cls, dim: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, *, layer: str
    ) -> "HeadSizes":
        """Check and complete the sizes of a layer.

        Args:
            dim: Width of the model.
            num_heads: Number of query heads.
            num_kv_heads: Number of key heads; None for `num_heads`.
            head_dim: Width of a head; None for dim / num_heads.
            layer: Name of the layer, for errors.

        Returns:
            The sizes.

        Raises:
            RopewalkError: If a size is not an integer of at least 1, or if the sizes do not divide.

        >>> HeadSizes.checked(8, 4, 2, None, layer="a doctest").num_kv_heads
        2
        """
        do = "pass a whole number above 0"
        dim = require_count(dim, asked=f"{layer}(dim=...)", do=do)
        heads = require_count(num_heads, asked=f"{layer}(num_heads=...)", do=do)
        kv_heads = heads if num_kv_heads is None else num_kv_heads
        kv_heads = require_count(kv_heads, asked=f"{layer}(num_kv_heads=...)", do=do)
        if heads % kv_heads:
            raise RopewalkError(
                asked=f"{layer}(num_heads={heads}, num_kv_heads={kv_heads})",
                expected="num_heads a multiple of num_kv_heads: all key heads have the same number of query heads",
                got=f"{heads} and {kv_heads}",
                do=f"use a num_kv_heads that divides {heads}",
            )
        if head_dim is None and dim % heads:
            raise RopewalkError(
                asked=f"{layer}(dim={dim}, num_heads={heads})",
                expected="a dim that is a multiple of num_heads, or a head_dim",
                got=f"{dim} and {heads}",
                do="pass head_dim=",
            )
        width = require_count(dim // heads if head_dim is None else head_dim, asked=f"{layer}(head_dim=...)", do=do)
        return cls(dim, heads, kv_heads, width)


class ProjectedHeads(DropsOldBuffers):
    """A layer with the projections q_proj, k_proj, v_proj and o_proj, named as in most checkpoints.

    Subclasses implement the attention between them.

    Args:
        sizes: Sizes of the layer.
        causal: Whether a query sees no later tokens.
        qkv_bias: Whether q_proj, k_proj and v_proj have a bias.
        out_bias: Whether o_proj has a bias.
        device: Device of the projections.
        dtype: Dtype of the projections.

    >>> layer = ProjectedHeads(HeadSizes(8, num_heads=4, num_kv_heads=2, head_dim=2))
    >>> q, k, v = layer.heads_of(torch.zeros(1, 5, 8))
    >>> q.shape, v.shape, layer.joined(q).shape
    (torch.Size([1, 4, 5, 2]), torch.Size([1, 2, 5, 2]), torch.Size([1, 5, 8]))
    """

    def __init__(
        self,
        sizes: HeadSizes,
        *,
        causal: bool = True,
        qkv_bias: bool = False,
        out_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layer = type(self).__name__
        self.dim: int = sizes.dim
        self.num_heads: int = sizes.num_heads
        self.num_kv_heads: int = sizes.num_kv_heads
        self.head_dim: int = sizes.head_dim
        self.causal: bool = require_flag(causal, asked=f"{layer}(causal=...)")
        require_flag(qkv_bias, asked=f"{layer}(qkv_bias=...)")
        require_flag(out_bias, asked=f"{layer}(out_bias=...)")
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj: nn.Linear = nn.Linear(self.dim, q_width, bias=qkv_bias, device=device, dtype=dtype)
        self.k_proj: nn.Linear = nn.Linear(self.dim, kv_width, bias=qkv_bias, device=device, dtype=dtype)
        self.v_proj: nn.Linear = nn.Linear(self.dim, kv_width, bias=qkv_bias, device=device, dtype=dtype)
        self.o_proj: nn.Linear = nn.Linear(q_width, self.dim, bias=out_bias, device=device, dtype=dtype)

    __prepare_scriptable__ = refuse_scripting

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens [batch, seq, dim] to q, k and v, each [batch, heads, seq, head_dim].

        >>> [heads.shape[1] for heads in ProjectedHeads(HeadSizes(4, 2, 2, 2)).heads_of(torch.zeros(1, 3, 4))]
        [2, 2, 2]
        """
        sizes = (self.q_proj, self.num_heads), (self.k_proj, self.num_kv_heads), (self.v_proj, self.num_kv_heads)
        projected = [project(x) for project, _ in sizes]
        # Projections that were replaced may have no weight.
        weights = [getattr(project, "weight", None) for project, _ in sizes]
        if any(is_dtensor(x) for x in (*projected, *weights)):
            cut = split_heads(projected, weights, [heads for _, heads in sizes], self.head_dim)
            if cut is not None:
                return cut[0], cut[1], cut[2]
        q, k, v = (
            y.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
            for y, (_, heads) in zip(projected, sizes, strict=True)
        )
        return q, k, v

    def _run_plainly(self, encoding: nn.Module | None, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function of plain heads. Parameters of the encoding may be DTensors of a mesh with one rank."""
        if encoding is None or not is_dtensor(getattr(self.q_proj, "weight", None)):
            return run(*arguments, **options)
        return with_own_parameters([encoding], run, *arguments, **options)

    @property
    def heads_here(self) -> tuple[int, int, int]:
        """First query head of this rank, and its numbers of query and key heads: all, without tensor parallelism.

        >>> ProjectedHeads(HeadSizes(8, num_heads=4, num_kv_heads=2, head_dim=2)).heads_here
        (0, 4, 2)
        """
        first, heads = heads_of_projection(self.q_proj, self.num_heads)
        return first, heads, heads_of_projection(self.k_proj, self.num_kv_heads, of_keys=True)[1]

    def joined(self, y: Tensor) -> Tensor:
        """Project the outputs of the heads [batch, heads, seq, head_dim] to tokens [batch, seq, dim].

        >>> ProjectedHeads(HeadSizes(4, 2, 2, 2)).joined(torch.zeros(1, 2, 3, 2)).shape
        torch.Size([1, 3, 4])
        """
        return self.o_proj(join_heads(y) if is_dtensor(y) else y.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        """Return the sizes, and whether the layer is causal."""
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{self.dim}, {heads}, causal={self.causal}"

    def _check_tokens(self, x: Tensor) -> None:
        """Raise unless `x` is a tensor of tokens [batch, seq, dim] that the projections accept."""
        check_strided(x, asked="attention(x)")
        if not (isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 and x.shape[-1] == self.dim):
            raise RopewalkError(
                asked="attention(x)",
                expected=f"floating-point tokens [batch, seq, {self.dim}]",
                got=described(x),
                do="pass tokens before the heads are split; for one sequence use a batch of 1",
            )
        # Projections that were replaced, sharded or offloaded check their input themselves.
        if type(self.q_proj) is not nn.Linear or self.q_proj.weight.is_meta:
            return
        weight = self.q_proj.weight
        projections = self.q_proj, self.k_proj, self.v_proj, self.o_proj
        if is_dtensor(x) and not all(is_dtensor(layer.weight) for layer in projections):
            raise RopewalkError(
                asked="attention(x) with a DTensor",
                expected="a layer whose projections are DTensors too",
                got="plain projections",
                do="distribute the layer: torch.distributed.tensor.distribute_module(layer, mesh); with "
                "PrepareModuleInput, pass use_local_output=True",
            )
        if x.device != weight.device or not (x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)):
            raise RopewalkError(
                asked="attention(x)",
                expected=f"tokens of {weight.dtype} on {weight.device}, as the projections",
                got=f"{x.dtype} on {x.device}",
                do="cast or move one of them: attention.to(x.device, x.dtype)",
            )
