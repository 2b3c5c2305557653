"""The proof that a conversion changed nothing but the pairing: attention scores, and the bytes of every tensor."""

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

# How far scores may be apart, as a share of |q| |k|: sums of float64 in another order, and nothing else.
TOLERANCE = 1e-12
_TOKENS = 4


@dataclass(frozen=True)
class LayerScores:
    """The scores of one layer: the largest difference between the two checkpoints, as a share of |q| |k|."""

    layer: str
    difference: float

    @property
    def equal(self) -> bool:
        """Whether they are the same score, but for the order in which it is summed. NaN is not."""
        return self.difference <= TOLERANCE


@dataclass(frozen=True)
class Proof:
    """The scores of each layer that rotates, and the tensors whose bytes are not as they should be.

    >>> Proof((LayerScores("layers.0", 1e-16),), tensors=3, differing=()).holds
    True
    """

    layers: tuple[LayerScores, ...]
    tensors: int
    differing: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether every layer has its scores and every tensor its bytes."""
        return not self.differing and all(layer.equal for layer in self.layers)

    @property
    def worst(self) -> LayerScores:
        """The layer whose scores are furthest apart; NaN is further than all."""
        return max(self.layers, key=lambda layer: (layer.difference != layer.difference, layer.difference))

    def as_json(self) -> dict[str, object]:
        """The proof as JSON stores it.

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
    """Holds the converted checkpoint to its source, of which `pairings` are those of the two.

    Scores are computed in float64 from random inputs at random positions: the rows of q and k, their biases, an RMS
    norm with the layer's weights where it has some, the rotation of each pairing as it is defined. The bytes of tensors
    that do not turn are compared as they are, those of the others in the order that they must have.

    What scores show is where each weight is, whatever its value is. So a weight that is NaN or infinite counts as a
    finite number with the same sign and significand, and bytes decide whether it is the same NaN.
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
            wanted = files.blocks(tensor) if part is None else files.permuted(tensor, part, pairings[1])
            same = (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
            if not same or not _equal(wanted, files.blocks(other)):
                differing.append(name)
        layers = tuple(
            LayerScores(layer, _difference(source, converted, parts, pairings, files))
            for layer, parts in _by_layer(plan, source, converted)
        )
    return Proof(layers, len(source.tensors), tuple(differing))


class _Files(contextlib.ExitStack):
    """Files that are open as long as the proof runs."""

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
    """Numbers whose products are finite: NaN, infinity and what is beyond 2^300 with the exponent of 1 to 2.

    Sign and significand stay, so that two weights which differ in them still do.
    """
    beyond = ~(np.abs(values) < 2.0**300)
    bits = values.view(np.uint64) & np.uint64(0x800F_FFFF_FFFF_FFFF) | np.uint64(0x3FF0_0000_0000_0000)
    return np.where(beyond, bits.view(np.float64), values)


def _equal(left: Iterable[bytes], right: Iterable[bytes]) -> bool:
    """Whether two streams have the same bytes, whatever their blocks are."""
    right, rest = iter(right), b""
    for block in left:
        while len(rest) < len(block):
            more = next(right, b"")
            if not more:
                return False
            rest += more
        if rest[: len(block)] != block:
            return False
        rest = rest[len(block) :]
    return not rest and not next(right, b"")


def _by_layer(plan: Plan, source: Checkpoint, converted: Checkpoint) -> Iterator[tuple[str, list[Part]]]:
    """The parts of each layer, of those that the converted checkpoint has whole and in the same form."""

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
    """The largest difference of the scores of a layer, as a share of |q| |k|."""
    scores: list[np.ndarray] = []
    scale = np.ones(())
    for checkpoint, pairing in zip((source, converted), pairings, strict=True):
        # The same draw for both.
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
    """Rotated queries or keys [heads, tokens, features] of random inputs at random positions."""
    chosen = {
        part.what if not part.what.startswith("norm") else part.name: part
        for part in parts
        if (part.heads.queries if role == "q" else part.heads.keys)
    }
    weight = chosen["weight"]
    latent = any(part.width != weight.width for part in parts if part.what == "weight")
    starts = weight.heads.queries if role == "q" else weight.heads.keys
    x = random.standard_normal((checkpoint.tensors[weight.name].shape[1], _TOKENS))
    # Of latent attention the features that turn are the ones that queries and keys share.
    first, count = (weight.rotated_dim, weight.spec.rotated_dim) if latent else (0, weight.width)
    tensor, rows = checkpoint.tensors[weight.name], weight.heads.rows
    heads = np.stack([(files.rows(tensor, start + first, count, rows) @ x).T for start in starts])
    if "bias" in chosen:
        biases = files.rows(checkpoint.tensors[chosen["bias"].name], 0, rows, rows)[:, 0]
        heads += np.stack([biases[start + first : start + first + count] for start in starts])[:, None]
    heads = _normed(heads, [part for part in chosen.values() if part.what.startswith("norm")], checkpoint, files)
    return _rotated(heads, weight, 0 if latent else weight.rotated_dim, pairing, random)


def _normed(heads: np.ndarray, norms: list[Part], checkpoint: Checkpoint, files: _Files) -> np.ndarray:
    """The states behind a root-mean-square norm: over a head, or over all heads where the weights are one row."""
    if not norms:
        return heads
    values: dict[str, list[np.ndarray]] = {"norm.weight": [], "norm.bias": []}
    whole = False
    for part in norms:
        tensor = checkpoint.tensors[part.name]
        whole |= len(tensor.shape) == 1 and part.heads.rows > part.width
        values[part.what].append(files.rows(tensor, 0, part.heads.rows, part.heads.rows).reshape(-1, 1, part.width))
    axes = (0, 2) if whole else (2,)
    rms = np.sqrt(np.mean(heads**2, axis=axes, keepdims=True))
    heads = heads / np.where(rms == 0, 1.0, rms)
    for what, rows in values.items():
        if rows:
            row = np.concatenate(rows)
            # Some families multiply by 1 + weight, which may be 0 as made: what is multiplied must not vanish.
            heads = heads * (row if row.any() else 1 + row) if what == "norm.weight" else heads + row
    return heads


def _rotated(heads: np.ndarray, part: Part, first: int, pairing: str, random: np.random.Generator) -> np.ndarray:
    """The states with their features turned, by the definition of each pairing."""
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
    one, two = pairs[pairing]
    rotated[..., one] = heads[..., one] * cos - heads[..., two] * sin
    rotated[..., two] = heads[..., one] * sin + heads[..., two] * cos
    return rotated
