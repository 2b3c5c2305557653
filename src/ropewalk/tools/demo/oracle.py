"""The rotation that the raw keys of a config describe, written a second time, from the descriptions of the models.

The module is compared with it. A mistake in the specs, in the reader of configs or in the kernels must not be repeated
here, so nothing of ropewalk is imported. Frequencies follow the operations of transformers in the dtype that is passed:
float32 gives transformers' numbers, and float64 gives the exact rotation, whose angles are rounded once.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["NotCoveredError", "Oracle", "oracle_for", "read_keys"]

Keys = Mapping[str, Any]
# From the sequence length and the dtype to the frequencies [pairs] and the factor on cos and sin.
Rule = Callable[[int, torch.dtype], tuple[Tensor, float]]


class NotCoveredError(Exception):
    """The formulas of this file do not cover a config. The message is the reason."""


@dataclass(frozen=True)
class Oracle:
    """A rotation by explicit feature indices.

    Attributes:
        head_dim: The number of features of a head.
        first: The feature that is the first member of each pair.
        second: The feature that is the second member of each pair.
        rule: From the sequence length and the dtype to the frequencies and the factor on cos and sin.

    >>> oracle = oracle_for({"model_type": "llama", "head_dim": 4})
    >>> oracle.first, oracle.second
    ((0, 1), (2, 3))
    """

    head_dim: int
    first: tuple[int, ...]
    second: tuple[int, ...]
    rule: Rule

    def tables(self, positions: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [seq, pairs] in `dtype`, times the factor of the rule.

        >>> cos, _ = oracle_for({"model_type": "llama", "head_dim": 4}).tables(torch.tensor([2]), 3, torch.float64)
        >>> [round(x, 4) for x in cos[0].tolist()]  # cos 2, cos 0.02
        [-0.4161, 0.9998]
        """
        frequencies, amplitude = self.rule(length, dtype)
        angles = positions.to(dtype)[:, None] * frequencies
        return angles.cos() * amplitude, angles.sin() * amplitude

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [..., seq, head_dim]. The features of no pair are copied.

        >>> oracle = oracle_for({"model_type": "llama", "head_dim": 2})
        >>> oracle.rotate(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]])).tolist()
        [[-4.0, 3.0]]
        """
        first, second, y = list(self.first), list(self.second), x.clone()
        a, b = x[..., first], x[..., second]
        y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
        return y


@dataclass(frozen=True)
class _Family:
    """What transformers supplies if a key is missing. A head_dim of None is hidden size / heads."""

    interleaved: bool = False
    base: float = 10_000.0
    part: float = 1.0
    head_dim: int | None = None


_PLAIN, _PAIRED = _Family(), _Family(interleaved=True)
_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen2_moe", "phi3", "olmo", "olmo2", "granite", "starcoder2"), _PLAIN
    ),
    **dict.fromkeys(("gptj", "deepseek_v2", "deepseek_v3"), _PAIRED),
    **dict.fromkeys(("glm", "glm4"), _Family(interleaved=True, part=0.5, head_dim=128)),
    **dict.fromkeys(("gemma", "gemma2"), _Family(head_dim=256)),
    **dict.fromkeys(("mixtral", "qwen2_vl", "qwen2_vl_text"), _Family(base=1e6)),
    "qwen3": _Family(head_dim=128),
    "gemma3_text": _Family(base=1e6, head_dim=256),
    "gpt_oss": _Family(base=150_000.0, head_dim=64),
    "olmo3": _Family(base=500_000.0),
    "smollm3": _Family(base=2e6),
    "cohere": _Family(interleaved=True, base=500_000.0),
    "phi": _Family(part=0.5),
    "nemotron": _Family(part=0.5, head_dim=128),
    "gpt_neox": _Family(part=0.25),
    "stablelm": _Family(part=0.25),
}
# Multi-head latent attention: the rotated features follow the others.
_LATENT = ("deepseek_v2", "deepseek_v3")
# The scaling is for layers without a window.
_WINDOWED = ("gemma3_text", "olmo3")

# Keys that these formulas read. Another key whose name has "rope" or "rotary" in it may change the rotation.
_READ = {
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"),
    *("rotary_dim", "qk_rope_head_dim", "rope_local_base_freq", "rope_interleave"),
    *("no_rope_layers", "no_rope_layer_interval"),
}
_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_LENGTH = "original_max_position_embeddings"
_RULE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "mrope": {"mrope_section"},
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _LENGTH},
    "longrope": {"factor", "short_factor", "long_factor", "attention_factor", _LENGTH},
    "yarn": {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", _LENGTH},
}


def read_keys(path: str) -> Keys:
    """The keys of a config: a file, or config.json in a folder.

    Raises:
        NotCoveredError: If there is no such file, or if it has no JSON object.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        keys = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        raise NotCoveredError(f"{file.name} cannot be read as JSON") from None
    if not isinstance(keys, dict):
        raise NotCoveredError(f"{file.name} is no JSON object")
    return keys


def oracle_for(keys: Keys, layer: str = "", pairing: str | None = None) -> Oracle:
    """The rotation that the keys of a config describe.

    Args:
        keys: The keys of the config.
        layer: The layer type, "full_attention" for example. "" if all layers have the same rotation.
        pairing: "half" or "interleaved" if the user specified it, because the weights may have been permuted.

    Returns:
        The rotation.

    Raises:
        NotCoveredError: If the formulas of this file do not cover the family, the rule or a key.

    >>> oracle_for({"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4}).second
    (2, 3)
    >>> oracle_for({"model_type": "brand-new"})
    Traceback (most recent call last):
    ropewalk.tools.demo.oracle.NotCoveredError: no formula is written for the family 'brand-new'
    """
    keys = keys["text_config"] if isinstance(keys.get("text_config"), dict) else keys
    name = keys.get("model_type")
    if not isinstance(name, str) or name not in _FAMILIES:
        raise NotCoveredError(
            f"no formula is written for the family {name!r}" if name else "the config has no model_type"
        )
    if unread := sorted(key for key in keys if ("rope" in key or "rotary" in key) and key not in _READ):
        raise NotCoveredError(f"no formula is written for the key {unread[0]}")
    family, scaling = _FAMILIES[name], _scaling(keys, layer)
    head_dim, start, rotated = _features(keys, scaling, name, family)
    base = _first(scaling, "rope_theta") or _first(keys, "rope_theta", "rotary_emb_base") or family.base
    nested = isinstance((keys.get("rope_parameters") or {}).get(layer), dict)
    if name in _WINDOWED and "sliding" in layer and not nested:
        scaling, base = {}, _first(keys, "rope_local_base_freq") or (10_000.0 if name == "gemma3_text" else base)
    half, interleaved = rotated // 2, family.interleaved and keys.get("rope_interleave", True)
    if pairing not in (None, "interleaved" if interleaved else "half"):
        raise NotCoveredError(f"transformers does not use the pairing {pairing!r} for the family {name!r}")
    first = range(start, start + rotated, 2) if interleaved else range(start, start + half)
    return Oracle(
        head_dim,
        first=tuple(first),
        second=tuple(feature + (1 if interleaved else half) for feature in first),
        rule=_rule(keys, scaling, base, rotated),
    )


def _first(keys: Keys, *names: str) -> float | None:
    """The number of the first of these keys that is set, or None."""
    for name in names:
        value = keys.get(name)
        if value is not None:
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise NotCoveredError(f"{name} is no number")
            return value
    return None


def _number(keys: Keys, *names: str) -> float:
    value = _first(keys, *names)
    if value is None:
        raise NotCoveredError(f"the config has no {names[0]}")
    return value


def _scaling(keys: Keys, layer: str) -> Keys:
    """The keys of the rule. Configs have them under two names, and some have one entry per layer type."""
    old, new = keys.get("rope_scaling") or {}, keys.get("rope_parameters") or {}
    if old and new and old != new:
        raise NotCoveredError("the config has rope_scaling and rope_parameters")
    scaling = old or new
    if any(isinstance(value, dict) for value in scaling.values()):
        scaling = scaling.get(layer)
    if not isinstance(scaling, dict):
        raise NotCoveredError(f"the config has no rule for the layers {layer!r}")
    return scaling


def _features(keys: Keys, scaling: Keys, name: str, family: _Family) -> tuple[int, int, int]:
    """The size of a head, the first rotated feature, and the number of rotated features."""
    if name in _LATENT:
        copied, rotated = (int(_number(keys, key)) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
        return copied + rotated, copied, rotated
    head_dim = _first(keys, "head_dim") or family.head_dim
    if head_dim is None:
        head_dim = _number(keys, "hidden_size", "n_embd") // _number(keys, "num_attention_heads", "n_head")
    if name == "gptj":
        return int(head_dim), 0, int(_first(keys, "rotary_dim") or 64)
    part = _first(scaling, "partial_rotary_factor") or _first(keys, "partial_rotary_factor", "rotary_pct")
    return int(head_dim), 0, int(head_dim * (part or family.part))


def _rule(keys: Keys, scaling: Keys, base: float, dim: int) -> Rule:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _RULE_KEYS:
        raise NotCoveredError(f"no formula is written for the rule {kind!r}")
    if unread := sorted(set(scaling) - _COMMON - _RULE_KEYS[kind]):
        raise NotCoveredError(f"no formula is written for the key {unread[0]} of the rule {kind!r}")
    # Text has the same position on every axis, so that mrope is plain RoPE.
    if kind in ("default", "mrope"):
        return lambda _, dtype: (1.0 / _powers(base, dim, dtype), 1.0)
    if kind == "linear":
        divisor = _number(scaling, "factor")
        return lambda _, dtype: (1.0 / _powers(base, dim, dtype) / divisor, 1.0)
    if kind == "dynamic":
        return _dynamic(_number(scaling, "factor"), int(_number(keys, "max_position_embeddings")), base, dim)
    longest = _first(keys, "max_position_embeddings")
    original = _first(keys, _LENGTH) or _first(scaling, _LENGTH) or longest
    if original is None:
        raise NotCoveredError(f"the config has no {_LENGTH}")
    if kind == "llama3":
        return _llama3(scaling, original, base, dim)
    factor = _first(scaling, "factor")
    if factor is None:
        factor = _number(keys, "max_position_embeddings") / original
    return (_yarn if kind == "yarn" else _longrope)(scaling, factor, original, base, dim)


def _powers(base: float, dim: int, dtype: torch.dtype) -> Tensor:
    """base^(2i/dim), one per pair: the inverse of a frequency."""
    return base ** (torch.arange(0, dim, 2).to(dtype) / dim)


def _dynamic(factor: float, trained: int, base: float, dim: int) -> Rule:
    def rule(length: int, dtype: torch.dtype) -> tuple[Tensor, float]:
        growth = factor * max(length, trained) / trained - (factor - 1)
        return 1.0 / _powers(base * growth ** (dim / (dim - 2)), dim, dtype), 1.0

    return rule


def _llama3(scaling: Keys, original: float, base: float, dim: int) -> Rule:
    factor, low, high = (_number(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))

    def rule(_: int, dtype: torch.dtype) -> tuple[Tensor, float]:
        plain = 1.0 / _powers(base, dim, dtype)
        wavelengths = 2 * math.pi / plain
        kept = (original / wavelengths - low) / (high - low)
        between = (1 - kept) * plain / factor + kept * plain
        by_length = torch.where(wavelengths > original / low, plain / factor, between)
        return torch.where(wavelengths < original / high, plain, by_length), 1.0

    return rule


def _yarn(scaling: Keys, factor: float, original: float, base: float, dim: int) -> Rule:
    fast, slow = _first(scaling, "beta_fast") or 32, _first(scaling, "beta_slow") or 1
    # The index of the pair that completes this number of periods in the original length.
    low, high = (dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(base)) for n in (fast, slow))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    stated = _first(scaling, "attention_factor")
    over, under = _first(scaling, "mscale"), _first(scaling, "mscale_all_dim")

    def logarithmic(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    default = logarithmic(over) / logarithmic(under) if over and under else logarithmic(1.0)

    def rule(_: int, dtype: torch.dtype) -> tuple[Tensor, float]:
        powers = _powers(base, dim, dtype)
        kept = 1 - ((torch.arange(dim // 2).to(dtype) - low) / (high - low)).clamp(0, 1)
        return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, default if stated is None else stated

    return rule


def _longrope(scaling: Keys, factor: float, original: float, base: float, dim: int) -> Rule:
    stated = _first(scaling, "attention_factor")
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    lists = [scaling.get("short_factor"), scaling.get("long_factor")]
    if not all(isinstance(values, list) and len(values) == dim // 2 for values in lists):
        raise NotCoveredError("short_factor and long_factor need one number per pair")

    def rule(length: int, dtype: torch.dtype) -> tuple[Tensor, float]:
        divisors = torch.tensor(lists[length > original], dtype=dtype)
        return 1.0 / (divisors * _powers(base, dim, dtype)), default if stated is None else stated

    return rule
