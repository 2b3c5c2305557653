"""What an extension does to the frequencies of a model, how far theory says that it carries, and what it costs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ropewalk.errors import as_int
from ropewalk.hub.configs.layers import layer_count, layer_kinds, window_of
from ropewalk.hub.extend.rules import Start
from ropewalk.hub.families.family import Family
from ropewalk.spec.frequencies import Plain, Proportional
from ropewalk.spec.rope import RopeSpec
from ropewalk.theory.bands import KINDS, Kind, classify, turns
from ropewalk.theory.context import critical_dimension, extrapolation_limit, first_negative_distance

__all__ = ["Effect", "cache_bytes", "cache_is_bound", "effect_of", "trained_turns"]

_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_heads", "n_head", "n_heads")
# Layers that keep a state of one size, however long the sequence is.
_STATE = ("linear_attention", "conv")


@dataclasses.dataclass(frozen=True)
class Effect:
    """What became of the pairs, against the plain frequencies of training, at the length that was asked for.

    `inv_freq` are the frequencies of the spec, `plain` those of training, without a sign. `counts` are the pairs of
    each kind and `divided` is what the slowest frequency is divided by. `slowest` is how often the slowest pair turns
    within the length. `negative` is the first distance with a negative score sum, None if there is none up to the
    length, by the features that turn. `seen` is the length up to which no pair that never finished a turn in training
    passes the angles it saw there, None if all finished one. `limit` is the scaling law's, for rules that change the
    base alone.
    """

    inv_freq: tuple[float, ...]
    plain: tuple[float, ...]
    counts: dict[Kind, int]
    divided: float
    slowest: float
    amplitude: float
    softmax_scale: float
    negative: int | None
    seen: float | None
    limit: float | None


def effect_of(start: Start, spec: RopeSpec, length: int, base: float | None = None) -> Effect:
    """The effect of the spec that an extension gives; `base` is its new base, where it changes that alone.

    >>> from ropewalk.hub.extend.rules import extensions
    >>> start = Start("", RopeSpec(128), 10_000.0, 4096, 4096)
    >>> pi = effect_of(start, extensions(start, 16384)[0].spec, 16384)
    >>> pi.counts["interpolated"], pi.divided, pi.seen
    (64, 4.0, 16384.0)
    """
    plain = _plain(start)
    now = np.abs(spec.inv_freq(length))
    moving = now > 0
    # What never turned is still, and has no ratio.
    kinds = classify(now, np.where(plain > 0, plain, 1.0))
    unfinished = moving & (turns(plain, start.trained) < 1)
    seen = start.trained * (plain[unfinished] / now[unfinished]).min() if unfinished.any() else None
    limit = None
    if base is not None and start.trained >= 7:
        limit = extrapolation_limit(base, start.dim, critical_dimension(start.dim, start.base, start.trained))
    return Effect(
        inv_freq=tuple(spec.inv_freq(length).tolist()),
        plain=tuple(plain.tolist()),
        counts={kind: kinds.count(kind) for kind in KINDS},
        divided=float((plain[moving] / now[moving]).max()),
        slowest=float(turns(now[moving], length).min()),
        amplitude=spec.amplitude(length),
        softmax_scale=spec.softmax_scale,
        negative=first_negative_distance(now, length + 1),
        seen=None if seen is None else float(seen),
        limit=limit,
    )


def trained_turns(start: Start) -> float:
    """How often the slowest pair turned in training.

    >>> round(trained_turns(Start("", RopeSpec(128), 10_000.0, 4096, 4096)), 4)
    0.0753
    """
    plain = _plain(start)
    return float(turns(plain[plain > 0], start.trained).min())


def _plain(start: Start) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    current = start.rule
    # Pairs that stand still by p-RoPE did so in training.
    rule = dataclasses.replace(current, factor=1.0) if isinstance(current, Proportional) else Plain(start.base)
    return np.abs(dataclasses.replace(start.spec, frequencies=rule).inv_freq())


def cache_bytes(part: Mapping[str, Any], family: Family, head_dim: int, length: int, itemsize: int = 2) -> int | None:
    """Bytes that keys and values take for one sequence of `length` tokens, at `itemsize` bytes per number.

    Layers with a window keep no more than it, and linear attention keeps no keys. Latent attention keeps
    kv_lora_rank + qk_rope_head_dim numbers per token and layer. Where it is not known which layers are which, all count
    as if they saw everything: `cache_is_bound` tells. None where the config does not say enough.

    >>> config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    >>> cache_bytes(config, Family(), 128, 8192) == 2 * 32 * 8 * 128 * 8192 * 2  # keys and values
    True
    """
    layers, heads = layer_count(part), next((n for key in _HEADS if (n := as_int(part.get(key)))), None)
    if part.get("multi_query") and not part.get("new_decoder_architecture"):
        heads = 1  # as Falcon's first models have it, whatever else is said
    rank, rotating = (as_int(part.get(key)) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    # The keys of an indexer come on top, and no key says how they are kept.
    if layers is None or as_int(part.get("index_head_dim")) is not None:
        return None
    kinds, types = layer_kinds(part, family), part.get("layer_types")
    if rank is not None and rotating is not None:
        keeping = layers if kinds is None else sum(kind not in _STATE for kind in kinds)
        return keeping * (rank + rotating) * length * itemsize
    if heads is None or (types is not None and kinds is None):
        return None
    kinds = kinds or ["full_attention"] * layers
    if any(kind not in ("full_attention", "sliding_attention", *_STATE) for kind in kinds):
        return None
    window = window_of(part)
    short = length if window is None else min(length, window)
    tokens = sum(short if kind == "sliding_attention" else length for kind in kinds if kind not in _STATE)
    return 2 * heads * head_dim * tokens * itemsize


def cache_is_bound(part: Mapping[str, Any], family: Family) -> bool:
    """Whether `cache_bytes` is only the most that it can be: some layers may have a window that is not known.

    >>> cache_is_bound({"num_hidden_layers": 32}, Family())
    False
    >>> cache_is_bound({"num_hidden_layers": 32}, Family(windows=None))
    True
    """
    kinds = layer_kinds(part, family)
    return kinds is None or ("sliding_attention" in kinds and window_of(part) is None)
