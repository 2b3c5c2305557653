"""The effect of an extension on the frequencies of a model, its limits according to theory, and its memory cost."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import as_int
from ropewalk.hub.configs.layers import layer_count, layer_kinds, window_of
from ropewalk.hub.configs.limits import CACHED_HEADS
from ropewalk.hub.extend.rules import Start
from ropewalk.hub.families.family import Family
from ropewalk.spec.frequencies import Plain, Proportional
from ropewalk.spec.rope import RopeSpec
from ropewalk.theory.bands import KINDS, Kind, classify, rotations
from ropewalk.theory.context import context_after_tuning, first_negative_distance

__all__ = ["Effect", "cache_bytes", "cache_is_bound", "effect_of", "trained_rotations"]

# Layers whose state has a constant size, independent of the sequence length.
_STATE = ("linear_attention", "conv")


@dataclasses.dataclass(frozen=True)
class Effect:
    """The pairs at the new length, compared with the plain frequencies of training.

    Attributes:
        inv_freq: The frequencies of the spec.
        plain: The frequencies of training, without sign.
        counts: The number of pairs of each kind.
        divided: What the slowest frequency is divided by, compared with the plain frequencies.
        changed: The largest factor between a frequency of the config and the new one, in either direction.
        slowest: The number of full rotations of the slowest pair within the length.
        amplitude: The factor on cos and sin.
        softmax_scale: The factor on the softmax scale.
        negative: The first distance at which the score sum of the rotated features is negative. None if there is none
            up to the length.
        seen: The length up to which every pair that completed no rotation in training stays within the angles seen
            there. None if all pairs completed a rotation.
        limit: The limit by the scaling law if the model is tuned at its trained length, for rules that change only the
            base. None if every pair completed a rotation in training, so that the law sets no limit.
    """

    inv_freq: tuple[float, ...]
    plain: tuple[float, ...]
    counts: dict[Kind, int]
    divided: float
    changed: float
    slowest: float
    amplitude: float
    softmax_scale: float
    negative: int | None
    seen: float | None
    limit: float | None


def effect_of(start: Start, spec: RopeSpec, length: int, base: float | None = None) -> Effect:
    """The effect of an extension.

    Args:
        start: The starting point of the extension.
        spec: The new rotation.
        length: The number of positions to extend to.
        base: The new base, if the extension changes only the base.

    Returns:
        The effect at `length`.

    >>> from ropewalk.hub.extend.rules import extensions
    >>> start = Start("", RopeSpec(128), 10_000.0, 4096, 4096)
    >>> pi = effect_of(start, extensions(start, 16384)[0].spec, 16384)
    >>> pi.counts["interpolated"], pi.divided, pi.seen
    (64, 4.0, 16384.0)
    """
    plain = _plain(start)
    new = np.abs(spec.inv_freq(length))
    rotated = new > 0
    # Pairs that are not rotated have no ratio of frequencies.
    kinds = classify(new, np.where(plain > 0, plain, 1.0))
    incomplete = rotated & (rotations(plain, start.trained) < 1)
    seen = start.trained * (plain[incomplete] / new[incomplete]).min() if incomplete.any() else None
    limit = None
    if base is not None and start.trained >= 7:
        limit = context_after_tuning(start.trained, start.trained, base, start.dim, start.base).limit
    return Effect(
        inv_freq=tuple(spec.inv_freq(length).tolist()),
        plain=tuple(plain.tolist()),
        counts={kind: kinds.count(kind) for kind in KINDS},
        divided=float((plain[rotated] / new[rotated]).max()),
        changed=_largest_change(np.abs(start.spec.inv_freq(start.reach)), new),
        slowest=float(rotations(new[rotated], length).min()),
        amplitude=spec.amplitude(length),
        softmax_scale=spec.softmax_scale,
        negative=first_negative_distance(new, length + 1),
        seen=None if seen is None else float(seen),
        limit=limit,
    )


def _largest_change(old: NDArray[np.float64], new: NDArray[np.float64]) -> float:
    """The largest ratio between an old and a new frequency, in either direction, of pairs that rotate."""
    rotated = (old > 0) & (new > 0)
    ratio = new[rotated] / old[rotated]
    return float(np.maximum(ratio, 1 / ratio).max(initial=1.0))


def trained_rotations(start: Start) -> float:
    """The number of full rotations of the slowest pair within the trained length.

    >>> round(trained_rotations(Start("", RopeSpec(128), 10_000.0, 4096, 4096)), 4)
    0.0753
    """
    plain = _plain(start)
    return float(rotations(plain[plain > 0], start.trained).min())


def _plain(start: Start) -> NDArray[np.float64]:
    current = start.rule
    # The pairs that p-RoPE does not rotate were not rotated in training either.
    rule = dataclasses.replace(current, factor=1.0) if isinstance(current, Proportional) else Plain(start.base)
    return np.abs(dataclasses.replace(start.spec, frequencies=rule).inv_freq())


def cache_bytes(part: Mapping[str, Any], family: Family, head_dim: int, length: int, itemsize: int = 2) -> int | None:
    """The size of the keys and values of one sequence, in bytes.

    Layers with a window store no more tokens than the window, and linear attention stores none. Latent attention stores
    kv_lora_rank + qk_rope_head_dim numbers per token and layer. If the layer types are unknown, every layer counts as
    full attention, and `cache_is_bound` returns True.

    Args:
        part: The config of the language model.
        family: Its model family.
        head_dim: The number of features per head.
        length: The number of tokens.
        itemsize: The number of bytes per element.

    Returns:
        The number of bytes. None if the config does not contain enough information.

    >>> config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    >>> cache_bytes(config, Family(), 128, 8192) == 2 * 32 * 8 * 128 * 8192 * 2  # keys and values
    True
    """
    layers, heads = layer_count(part), next((n for key in CACHED_HEADS if (n := as_int(part.get(key))) and n > 0), None)
    if part.get("multi_query") and not part.get("new_decoder_architecture"):
        heads = 1  # the first Falcon models, independent of the other keys
    rank, rotary_dim = (as_int(part.get(key)) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    # An indexer stores additional keys, whose dtype is not in the config.
    if layers is None or as_int(part.get("index_head_dim")) is not None:
        return None
    kinds, types = layer_kinds(part, family), part.get("layer_types")
    if rank is not None and rotary_dim is not None:
        caching_layers = layers if kinds is None else sum(kind not in _STATE for kind in kinds)
        return caching_layers * (rank + rotary_dim) * length * itemsize
    if heads is None or (types is not None and kinds is None):
        return None
    kinds = kinds or ["full_attention"] * layers
    if any(kind not in ("full_attention", "sliding_attention", *_STATE) for kind in kinds):
        return None
    window = window_of(part)
    windowed_length = length if window is None else min(length, window)
    tokens = sum(windowed_length if kind == "sliding_attention" else length for kind in kinds if kind not in _STATE)
    return 2 * heads * head_dim * tokens * itemsize


def cache_is_bound(part: Mapping[str, Any], family: Family) -> bool:
    """Whether `cache_bytes` is an upper bound, because some layers may have a window that the config does not define.

    >>> cache_is_bound({"num_hidden_layers": 32}, Family())
    False
    >>> cache_is_bound({"num_hidden_layers": 32}, Family(windows=None))
    True
    """
    kinds = layer_kinds(part, family)
    return kinds is None or ("sliding_attention" in kinds and window_of(part) is None)
