"""What a checkpoint adds to a config: learned frequencies, and temperatures per head (Mistral Large 4)."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.keys import ConfigSource
from ropewalk.hub.configs.parse import load_spec
from ropewalk.spec.frequencies import Explicit
from ropewalk.spec.rope import RopeSpec

__all__ = ["HeadTemperature", "LearnedRope", "load_learned"]

_ALPHA = re.compile(r"(^|\.)rotary_emb\.alpha$")
_TEMPERATURE = re.compile(r"(^|\.)layers\.(\d+)\.self_attn\.softmax_scaling\.(scale|bias)$")


@dataclasses.dataclass(frozen=True)
class HeadTemperature:
    """Factor s_h ln(m + 1) + b_h on the queries of head h at position m, with learned s and b.

    It multiplies all features of a query, also those that are not rotated.

    Args:
        scale: s, one number per head.
        bias: b, one number per head.

    >>> HeadTemperature((0.0, 1.0), (1.0, 0.5)).evaluate([0]).tolist()
    [[1.0], [0.5]]
    """

    scale: tuple[float, ...]
    bias: tuple[float, ...]

    def evaluate(self, positions: ArrayLike) -> NDArray[np.float64]:
        """Return the factors [heads, positions] in float64."""
        log = np.log(np.asarray(positions, np.float64) + 1)
        return np.asarray(self.scale)[:, None] * log + np.asarray(self.bias)[:, None]


@dataclasses.dataclass(frozen=True)
class LearnedRope:
    """The rotation of a model whose checkpoint contains a part of it.

    Attributes:
        spec: The rotation of the layers that rotate, with the learned frequencies.
        temperatures: The temperature of each layer that has one, by its index.

    >>> LearnedRope(RopeSpec(2), {}).spec.head_dim
    2
    """

    spec: RopeSpec
    temperatures: dict[int, HeadTemperature]


def load_learned(config: ConfigSource, tensors: Mapping[str, object]) -> LearnedRope:
    """Return the rotation of a model from its config and the tensors of its checkpoint.

    LeRoPE multiplies the frequencies by learned factors: theta_i exp(alpha_i). transformers stores alpha as
    `rotary_emb.alpha`, and s and b of the temperatures per layer as `self_attn.softmax_scaling.scale` and `.bias`.

    Args:
        config: A path, a dict or a config object, as for `load_spec`.
        tensors: Tensors or arrays by name, such as a state_dict on the CPU. Others than those above are ignored.

    Returns:
        The rotation, and the temperatures.

    Raises:
        RopewalkError: If the tensors contain no alpha, several different ones, or one of another width.

    >>> config = {"model_type": "llama", "head_dim": 4, "rope_theta": 100.0}
    >>> load_learned(config, {"model.rotary_emb.alpha": np.log([1.0, 2.0])}).spec.inv_freq().tolist()
    [1.0, 0.2]
    """
    loaded = load_spec(config)
    specs = [spec for spec in (loaded.values() if isinstance(loaded, dict) else [loaded]) if spec is not None]
    alphas = [_row(tensor) for name, tensor in tensors.items() if _ALPHA.search(name)]
    pairs = specs[0].rotated_dim // 2 if len(specs) == 1 else 0
    fits = len(specs) == 1 and specs[0].amplitude() == 1 and not specs[0].varies
    if not fits or len(set(alphas)) != 1 or len(alphas[0]) != pairs:
        raise RopewalkError(
            asked="load_learned(config, tensors)",
            expected=f"one rotation of amplitude 1, and one tensor rotary_emb.alpha with {pairs or 'a few'} numbers",
            got=f"{len(specs)} rotations, and alpha of widths {[len(alpha) for alpha in alphas]}",
            do="pass the whole state_dict of a model with LeRoPE; for other models use load_spec",
        )
    theta = specs[0].inv_freq() * np.exp(np.asarray(alphas[0]))
    parts: dict[int, dict[str, tuple[float, ...]]] = {}
    for name, tensor in tensors.items():
        found = _TEMPERATURE.search(name)
        if found:
            parts.setdefault(int(found[2]), {})[found[3]] = _row(tensor)
    temperatures = {layer: HeadTemperature(part["scale"], part["bias"]) for layer, part in sorted(parts.items())}
    return LearnedRope(dataclasses.replace(specs[0], frequencies=Explicit(theta)), temperatures)


def _row(tensor: object) -> tuple[float, ...]:
    # tolist of a tensor works for bfloat16 too, which NumPy does not have.
    values = tensor.tolist() if hasattr(tensor, "tolist") else tensor  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(np.asarray(values, np.float64).reshape(-1).tolist())
