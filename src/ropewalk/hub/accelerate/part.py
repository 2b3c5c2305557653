"""What `accelerate` did with a module of a model."""

from dataclasses import dataclass

__all__ = ["Part"]


@dataclass(frozen=True)
class Part:
    """A module of a model, and what `accelerate` did with it.

    Attributes:
        name: Its name in the model.
        kind: Its class name.
        rotation: Its rotation, or the reason why it was not changed.
        norm: What was done with its QK-norm. None if it has none.

    >>> print(Part("model.layers.0.self_attn", "Qwen3Attention", "half pairs", "fused"))
    Qwen3Attention: half pairs; QK-norm: fused
    """

    name: str
    kind: str
    rotation: str
    norm: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.rotation}" + ("" if self.norm is None else f"; QK-norm: {self.norm}")
