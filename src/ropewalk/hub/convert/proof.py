"""Proves that a conversion changed only the pairing: compares attention scores, and the bytes of every tensor."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ropewalk.hub.convert.checkpoint import Checkpoint, Stored, read_rows, tensor_blocks
from ropewalk.hub.convert.model_folder import ModelFolder
from ropewalk.hub.convert.permutation import Part, Plan, permuted_blocks
from ropewalk.spec.rope import Pairing

__all__ = ["TOLERANCE", "LayerScores", "Proof", "prove"]

# The largest difference of scores, relative to |q| |k|. It only allows for float64 sums in another order.
TOLERANCE = 1e-12
_TOKENS = 4


@dataclass(frozen=True)
class LayerScores:
    """The comparison of the scores of one layer.

    Attributes:
        layer: The name of the attention module.
        difference: The largest difference between the two checkpoints, relative to |q| |k|.
    """

    layer: str
    difference: float

    @property
    def equal(self) -> bool:
        """Whether the difference is within the tolerance. False for NaN."""
        return self.difference <= TOLERANCE


@dataclass(frozen=True)
class Proof:
    """The comparison of a converted checkpoint with its source.

    Attributes:
        layers: The scores of each layer that rotates.
        tensors: The number of tensors of the source.
        differing: The names of the tensors whose bytes are wrong, and of missing and additional tensors.

    >>> Proof((LayerScores("layers.0", 1e-16),), tensors=3, differing=()).holds
    True
    """

    layers: tuple[LayerScores, ...]
    tensors: int
    differing: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether all scores and all bytes are correct."""
        return not self.differing and all(layer.equal for layer in self.layers)

    @property
    def worst(self) -> LayerScores:
        """The layer with the largest difference. NaN counts as the largest."""
        return max(self.layers, key=lambda layer: (layer.difference != layer.difference, layer.difference))

    def as_json(self) -> dict[str, object]:
        """Return the proof as JSON-serializable data.

        >>> Proof((LayerScores("layers.0", 0.0),), 3, ()).as_json()["holds"]
        True
        """
        return {
            "holds": self.holds,
            "tolerance": TOLERANCE,
            "layers": [{"layer": layer.layer, "difference": layer.difference} for layer in self.layers],
            "tensors": self.tensors,
            "differing": list(self.differing),
        }


def prove(
    source: Checkpoint,
    converted: Checkpoint,
    plan: Plan,
    pairings: tuple[Pairing, Pairing],
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Proof:
    """Compare a converted checkpoint with its source.

    Scores are computed in float64 from random inputs at random positions: the projections of q and k, their biases, an
    RMS norm if the layer has one, and the rotation by the definition of each pairing. The bytes of permuted tensors are
    compared after the permutation, those of all other tensors directly.

    The scores test where each weight is, and not its value. So a weight that is NaN or infinite is replaced by a finite
    number with the same sign and significand. The comparison of bytes tests whether it is the same NaN.

    Args:
        source: The checkpoint that was converted.
        converted: The result.
        plan: The plan of the conversion.
        pairings: The pairings of the two checkpoints.
        advance: Called with the number of bytes of each tensor.

    Returns:
        The proof.
    """
    differing = [name for name in source.tensors if name not in converted.tensors]
    differing += [name for name in converted.tensors if name not in source.tensors]
    with _Files(source, converted) as files:
        for name, tensor in source.tensors.items():
            advance(tensor.nbytes)
            other = converted.tensors.get(name)
            if other is None:
                continue
            part = plan.parts.get(name)
            expected = files.blocks(tensor) if part is None else files.permuted(tensor, part, pairings[1])
            same_form = (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
            if not same_form or not _equal(expected, files.blocks(other)):
                differing.append(name)
        layers = tuple(
            LayerScores(layer, _difference(source, converted, parts, pairings, files))
            for layer, parts in _by_layer(plan, source, converted)
        )
    return Proof(layers, len(source.tensors), tuple(differing))


class _Files(contextlib.ExitStack):
    """The open files of both checkpoints."""

    def __init__(self, *checkpoints: Checkpoint) -> None:
        super().__init__()
        self._models: dict[Path, ModelFolder] = {checkpoint.model.path: checkpoint.model for checkpoint in checkpoints}
        self._open: dict[Path, BinaryIO] = {}

    def file(self, path: Path) -> BinaryIO:
        if path not in self._open:
            self._open[path] = self.enter_context(self._models[path.parent].open(path.name))
        return self._open[path]

    def blocks(self, tensor: Stored) -> Iterator[bytes]:
        return tensor_blocks(self.file(tensor.path), tensor)

    def permuted(self, tensor: Stored, part: Part, to: Pairing) -> Iterator[bytes]:
        return permuted_blocks(self.file(tensor.path), tensor, part, to)

    def rows(self, tensor: Stored, start: int, count: int, rows: int) -> np.ndarray:
        return _finite(read_rows(self.file(tensor.path), tensor, start, count, rows))


def _finite(values: np.ndarray) -> np.ndarray:
    """Replace NaN, infinity and numbers beyond 2^300 by numbers from 1 to 2, so that products are finite.

    Sign and significand are kept, so that weights that differ in them still differ.
    """
    beyond = ~(np.abs(values) < 2.0**300)
    bits = values.view(np.uint64) & np.uint64(0x800F_FFFF_FFFF_FFFF) | np.uint64(0x3FF0_0000_0000_0000)
    return np.where(beyond, bits.view(np.float64), values)


def _equal(left: Iterable[bytes], right: Iterable[bytes]) -> bool:
    """Return whether two streams have the same bytes. Their blocks may differ in size."""
    right, rest = iter(right), b""
    for block in left:
        while len(rest) < len(block):
            chunk = next(right, b"")
            if not chunk:
                return False
            rest += chunk
        if rest[: len(block)] != block:
            return False
        rest = rest[len(block) :]
    return not rest and not next(right, b"")


def _by_layer(plan: Plan, source: Checkpoint, converted: Checkpoint) -> Iterator[tuple[str, list[Part]]]:
    """Yield the parts of each layer whose tensors all have the same dtype and shape in both checkpoints."""

    def form(checkpoint: Checkpoint, name: str) -> tuple[str, tuple[int, ...]] | None:
        tensor = checkpoint.tensors.get(name)
        return None if tensor is None else (tensor.dtype, tensor.shape)

    layers: dict[str, list[Part]] = {}
    for part in plan.parts.values():
        layers.setdefault(part.layer, []).append(part)
    for layer, parts in layers.items():
        if all(form(source, part.name) == form(converted, part.name) for part in parts):
            yield layer, parts


def _difference(
    source: Checkpoint, converted: Checkpoint, parts: list[Part], pairings: tuple[Pairing, Pairing], files: _Files
) -> float:
    """Return the largest difference of the scores of a layer, relative to |q| |k|."""
    scores: list[np.ndarray] = []
    scale = np.ones(())
    for checkpoint, pairing in zip((source, converted), pairings, strict=True):
        # The same random numbers for both checkpoints.
        random = np.random.default_rng(0)
        q = _states(checkpoint, parts, "q", pairing, random, files)
        k = _states(checkpoint, parts, "k", pairing, random, files)
        k = np.repeat(k, len(q) // len(k), axis=0)
        scores.append(q @ k.swapaxes(-1, -2))
        if checkpoint is source:
            norms = [np.linalg.norm(x, axis=-1) for x in (q, k)]
            scale = norms[0][:, :, None] * norms[1][:, None, :]
    gap = np.abs(scores[0] - scores[1])
    return float(np.max(np.where(gap == 0, 0.0, gap / np.where(scale == 0, 1.0, scale))))


def _states(
    checkpoint: Checkpoint, parts: list[Part], role: str, pairing: str, random: np.random.Generator, files: _Files
) -> np.ndarray:
    """Return rotated queries or keys [heads, tokens, features] of random inputs at random positions."""
    selected = {
        part.kind if not part.kind.startswith("norm") else part.name: part
        for part in parts
        if (part.heads.queries if role == "q" else part.heads.keys)
    }
    weight = selected["weight"]
    latent = any(part.width != weight.width for part in parts if part.kind == "weight")
    starts = weight.heads.queries if role == "q" else weight.heads.keys
    x = random.standard_normal((checkpoint.tensors[weight.name].shape[1], _TOKENS))
    # In latent attention, queries and keys share the rotated features only.
    first, count = (weight.rotated_start, weight.spec.rotated_dim) if latent else (0, weight.width)
    tensor, rows = checkpoint.tensors[weight.name], weight.heads.rows
    heads = np.stack([(files.rows(tensor, start + first, count, rows) @ x).T for start in starts])
    if "bias" in selected:
        biases = files.rows(checkpoint.tensors[selected["bias"].name], 0, rows, rows)[:, 0]
        heads += np.stack([biases[start + first : start + first + count] for start in starts])[:, None]
    heads = _normed(heads, [part for part in selected.values() if part.kind.startswith("norm")], checkpoint, files)
    return _rotated(heads, weight, 0 if latent else weight.rotated_start, pairing, random)


def _normed(heads: np.ndarray, norms: list[Part], checkpoint: Checkpoint, files: _Files) -> np.ndarray:
    """Apply a root-mean-square norm: per head, or over all heads if the weights are one row."""
    if not norms:
        return heads
    values: dict[str, list[np.ndarray]] = {"norm.weight": [], "norm.bias": []}
    whole = False
    for part in norms:
        tensor = checkpoint.tensors[part.name]
        whole |= len(tensor.shape) == 1 and part.heads.rows > part.width
        values[part.kind].append(files.rows(tensor, 0, part.heads.rows, part.heads.rows).reshape(-1, 1, part.width))
    axes = (0, 2) if whole else (2,)
    rms = np.sqrt(np.mean(heads**2, axis=axes, keepdims=True))
    heads = heads / np.where(rms == 0, 1.0, rms)
    for kind, rows in values.items():
        if rows:
            row = np.concatenate(rows)
            # Some families multiply by 1 + weight and initialize the weight to 0. The product must not be 0.
            heads = heads * (row if row.any() else 1 + row) if kind == "norm.weight" else heads + row
    return heads


def _rotated(heads: np.ndarray, part: Part, first: int, pairing: str, random: np.random.Generator) -> np.ndarray:
    """Rotate queries or keys by the definition of the pairing."""
    spec, end = part.spec, first + part.spec.rotated_dim
    inv_freq = np.atleast_2d(spec.inv_freq())[:, None]
    angles = random.integers(0, 1 << 20, _TOKENS)[:, None] * inv_freq
    cos, sin = np.cos(angles), np.sin(angles)
    rotated = heads.copy()
    half = first + spec.rotated_dim // 2
    pairs = {
        "interleaved": (slice(first, end, 2), slice(first + 1, end, 2)),
        "half": (slice(first, half), slice(half, end)),
    }
    x, y = pairs[pairing]
    rotated[..., x] = heads[..., x] * cos - heads[..., y] * sin
    rotated[..., y] = heads[..., x] * sin + heads[..., y] * cos
    return rotated
