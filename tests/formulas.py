"""Formulas of the papers and of published model code, written again for tests: expected values come from here.

Nothing in this module calls the package. It reads the fields of a spec or of a rule, and computes everything else, so
that a mistake in code of the package cannot change both sides of a comparison.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def plain_frequencies(dim: int, base: float = 10_000.0) -> np.ndarray:
    """base^(-2i/dim) for i = 0 .. dim/2-1 (RoFormer, 2104.09864, section 3.2.2)."""
    return 1.0 / base ** (np.arange(0, dim, 2) / dim)


def frequencies(rule: Any, dim: int, length: int | None = None) -> np.ndarray:
    """The frequencies of a rule for `dim` features: [pairs], or [heads, pairs]."""
    match type(rule).__name__:
        case "Plain":
            return plain_frequencies(dim, rule.base)
        case "AcrossHeads":
            return plain_frequencies(rule.num_heads * dim, rule.base).reshape(rule.num_heads, -1)
        case "PositionInterpolation":
            return plain_frequencies(dim, rule.base) / rule.factor
        case "NTK":
            return plain_frequencies(dim, rule.base * rule.factor ** (dim / (dim - 2)))
        case "DynamicNTK":
            if length is None or length <= rule.trained_length:
                return plain_frequencies(dim, rule.base)
            grown = rule.factor * length / rule.trained_length - (rule.factor - 1)
            return plain_frequencies(dim, rule.base * grown ** (dim / (dim - 2)))
        case "Llama3":
            return _by_parts(rule, dim, rule.low_freq_factor, rule.high_freq_factor)
        case "Yarn":
            return _yarn(rule, dim) if rule.ramp == "index" else _by_parts(rule, dim, rule.beta_slow, rule.beta_fast)
        case "LongRope":
            is_long = length is not None and length > rule.trained_length
            return plain_frequencies(dim, rule.base) / np.array(rule.long_factor if is_long else rule.short_factor)
        case "Proportional":
            rotated_pairs = int(rule.fraction * dim / 2)
            is_rotated = np.arange(dim // 2) < rotated_pairs
            return np.where(is_rotated, plain_frequencies(dim, rule.base) / rule.factor, 0.0)
    raise NotImplementedError(f"no formula for {rule}")


def _by_parts(rule: Any, dim: int, low: float, high: float) -> np.ndarray:
    """NTK-by-parts (YaRN, 2309.00071, eq. 17 to 19): a ramp in the number of rotations within the trained length."""
    theta = plain_frequencies(dim, rule.base)
    rotations = rule.trained_length * theta / (2 * math.pi)
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    return (1 - kept) * theta / rule.factor + kept * theta


def _yarn(rule: Any, dim: int) -> np.ndarray:
    """The ramp of YaRN's published code, in the index of the pair."""

    def index_with(rotations: float) -> float:
        return dim * math.log(rule.trained_length / (2 * math.pi * rotations)) / (2 * math.log(rule.base))

    low, high = index_with(rule.beta_fast), index_with(rule.beta_slow)
    if rule.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    interpolated = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    theta = plain_frequencies(dim, rule.base)
    return interpolated * theta / rule.factor + (1 - interpolated) * theta


def amplitude(rule: Any, length: int | None = None) -> float:
    """The factor on cos and sin: of YaRN the paper's, 0.1 ln(factor) + 1, or that of DeepSeek's model code."""
    match type(rule).__name__:
        case "Yarn":
            if rule.attention_factor is not None:
                return rule.attention_factor
            if rule.policy == "deepseek":
                weights = 1.0 if rule.mscale is None else rule.mscale, rule.mscale_all_dim or 0.0
                return (0.1 * weights[0] * math.log(rule.factor) + 1) / (0.1 * weights[1] * math.log(rule.factor) + 1)
            return 0.1 * math.log(rule.factor) + 1
        case "LongRope":
            if rule.short_amplitude is not None:
                is_long = length is not None and length > rule.trained_length
                return rule.long_amplitude if is_long else rule.short_amplitude
            return math.sqrt(1 + math.log(rule.factor) / math.log(rule.trained_length)) if rule.factor else 1.0
    return 1.0


def temperature(rule: Any, positions: Tensor) -> Tensor:
    """The factor on queries: Llama 4's steps, or log n (kexue.fm 8823)."""
    if type(rule).__name__ == "StepTemperature":
        return 1 + rule.scale * torch.log(torch.floor((positions.double() + rule.first) / rule.step).clamp(min=0) + 1)
    return (torch.log(positions.double() + 1) / math.log(rule.trained_length)).clamp(min=1)


def spec_frequencies(spec: Any, length: int | None = None) -> Tensor:
    """The frequencies of all pairs of a spec with their sign: [pairs], or [heads, pairs]."""
    if spec.axes is None:
        theta = frequencies(spec.frequencies, spec.rotary_dim, length)
    else:
        theta = frequencies(spec.frequencies, spec.axes.dim, length)[list(spec.axes.index)]
    return torch.as_tensor(spec.sign * theta)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, start: int = 0) -> Tensor:
    """(a, b) -> (a cos - b sin, a sin + b cos) for the pairs from feature `start` on, in the dtype of x.

    cos and sin [..., pairs] broadcast against the pairs of x. Other features are copied.
    """
    width = 2 * cos.shape[-1]
    part = x[..., start : start + width]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    u, w = a * cos - b * sin, a * sin + b * cos
    rotated = torch.stack([u, w], dim=-1).flatten(-2) if interleaved else torch.cat([u, w], dim=-1)
    return torch.cat([x[..., :start], rotated, x[..., start + width :]], dim=-1)


def rotate_by_tables(x: Tensor, cos: Tensor, sin: Tensor, layout: Any, row: int = 0, conjugate: bool = False) -> Tensor:
    """`rotate_pairs` with tables [rows, pairs], [batch, rows, pairs] or [batch, heads, rows, pairs] of a kernel.

    Row `row` belongs to the first token. x is [..., heads, seq, dim], or [..., seq, heads, dim] if `layout.seq_dim` is
    -3.
    """
    x = x if layout.seq_dim == -2 else x.transpose(-2, -3)
    tables = [table[..., row : row + x.shape[-2], :] for table in (cos, -sin if conjugate else sin)]
    if cos.dim() == 3:
        tables = [table.unflatten(0, (-1, *[1] * (x.dim() - 3))) for table in tables]
    y = rotate_pairs(x, *tables, interleaved=layout.interleaved, start=layout.start)
    return y if layout.seq_dim == -2 else y.transpose(-2, -3)


def rotate_by_spec(x: Tensor, spec: Any, positions: Tensor, *, length: int | None = None, role: str = "k") -> Tensor:
    """The rotation of queries or keys x [batch, heads, seq, dim] that a spec describes.

    Angles, cos and sin are float64; the products have the dtype of x.

    Args:
        x: Queries or keys.
        spec: A RopeSpec.
        positions: [seq] or [batch, seq]; [axes, seq] for a spec with axes.
        length: For rules that depend on it.
        role: "q" or "k", for xPos and temperatures.
    """
    theta = spec_frequencies(spec, length).to(x.device)
    positions = positions.double().to(x.device)
    if spec.axes is None:
        coordinates = positions[..., None]
    else:
        weights = torch.tensor(spec.axes.weights, dtype=torch.float64, device=x.device)
        coordinates = positions.T @ weights
    if theta.dim() == 2:
        theta = theta[:, None]
    if theta.dim() == 3 or coordinates.dim() == 3:
        coordinates = coordinates.unsqueeze(-3)
    angles = coordinates * theta
    scale: Any = amplitude(spec.frequencies, length)
    if spec.xpos is not None:
        index = torch.arange(spec.rotary_dim // 2, dtype=torch.float64, device=x.device)
        zeta = (2 * index / spec.rotary_dim + spec.xpos.gamma) / (1 + spec.xpos.gamma)
        power = (positions[..., None] - spec.xpos.length / 2) / spec.xpos.scale_base
        scale = scale * zeta ** (power if role == "q" else -power)
    cos, sin = (scale * angles.cos()).to(x.dtype), (scale * angles.sin()).to(x.dtype)
    start = 0 if spec.rotary_slice == "leading" else spec.head_dim - spec.rotary_dim
    y = rotate_pairs(x, cos, sin, interleaved=spec.pairing == "interleaved", start=start)
    if spec.query_temperature is not None and role == "q":
        y = y * temperature(spec.query_temperature, positions)[..., None].to(x.dtype)
    return y


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, plus_one: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) (Zhang & Sennrich, 1910.07467, eq. 4)."""
    scaled = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    return scaled if weight is None else scaled * (weight.to(x.dtype) + (1.0 if plus_one else 0.0))


def favor_features(x: Tensor, projection: Tensor) -> Tensor:
    """exp(w_i . y - |y|^2 / 2) / sqrt(m) with y = x / d^(1/4), in float64 (Choromanski et al., 2009.14794, lemma 1)."""
    y = x.double() / x.shape[-1] ** 0.25
    exponents = torch.einsum("...d,md->...m", y, projection.double()) - 0.5 * (y * y).sum(dim=-1, keepdim=True)
    return torch.exp(exponents) / math.sqrt(len(projection))


def score_sums(theta: np.ndarray, count: int) -> np.ndarray:
    """sum_i cos(m theta_i) for m = 0 .. count-1."""
    return np.cos(np.arange(count)[:, None] * np.asarray(theta)[None, :]).sum(axis=-1)
