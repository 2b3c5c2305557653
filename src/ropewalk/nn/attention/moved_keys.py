"""Keys in a cache, rotated again for other positions, by whatever rotated them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, shown
from ropewalk.kernels.precision import working_dtype
from ropewalk.nn.encodings.base import Encoding, encodes_heads
from ropewalk.nn.encodings.rotary import rope_in
from ropewalk.nn.rotary.angle_source import angle_device
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.spec.rope import RopeSpec

__all__ = ["KeyRotation", "moved_keys"]

# What rotated the keys in a cache; None if nothing did.
KeyRotation = RotaryEmbedding | Encoding | RopeSpec | None

_ASKED = "KVCache.evict_prefix(count, rope)"


@torch.no_grad()
def moved_keys(keys: Tensor, positions: Tensor, by: int, rotation: KeyRotation) -> Tensor:
    """Return a copy of rotated keys with all positions changed by `by`.

    Exact angles add up, and the keys are rotated by R_by. Float32 angles, as `load_spec` returns them, do not: the keys
    are rotated by R_{m+by} R_m^{-1}, in one step that rounds once.

    Args:
        keys: [batch, heads, slots, head_dim].
        positions: Position of the key in each slot [batch, slots]. Only float32 angles depend on them.
        by: Distance.
        rotation: What rotated the keys: a rope, its spec, or an encoding; None if keys contain no position.

    Returns:
        Tensor of the shape and dtype of `keys`.

    Raises:
        RopewalkError: If `rotation` does not match the keys, or if keys that it rotated cannot be moved.

    >>> rope, k = RotaryEmbedding(RopeSpec(4, angles="float32")), torch.ones(1, 1, 3, 4)
    >>> moved = moved_keys(rope(k, offset=9), torch.arange(9, 12)[None], -9, rope)
    >>> torch.allclose(moved, rope(k))
    True
    """
    rope, length = _rope_of_keys(rotation, keys.shape[-1])
    if rope is None:
        return keys.clone()
    if rope.seq_dim == -3:
        keys = keys.transpose(1, 2)
    if rope.spec.angles == "exact":
        moved = rope.shift(keys, by=by, length=length)
    else:
        role = None if rope.spec.same_for_both else "k"
        dtype = working_dtype(keys)
        tables = (rope.at(at, dtype=dtype, length=length, role=role) for at in (positions, positions + by))
        (cos, sin), (new_cos, new_sin) = ([angle_device(table).double() for table in pair] for pair in tables)
        # The inverse of a scaled rotation is its transpose, divided by the square of its scale. Rounded once.
        square = cos * cos + sin * sin
        by_cos, by_sin = (new_cos * cos + new_sin * sin) / square, (new_sin * cos - new_cos * sin) / square
        angles = by_cos.to(dtype).to(keys.device), by_sin.to(dtype).to(keys.device)
        moved = rope(keys, angles=angles, role=role)
    return moved.transpose(1, 2) if rope.seq_dim == -3 else moved


def _rope_of_keys(rotation: object, head_dim: int) -> tuple[RotaryEmbedding | None, int | None]:
    """Return the rope that rotated the keys, or None if keys contain no position; and the length it was used with."""
    rope = RotaryEmbedding(rotation) if isinstance(rotation, RopeSpec) else rope_in(rotation)
    # What encode_heads added to keys cannot be moved.
    added = encodes_heads(rotation)
    if rope is not None and not added:
        length = getattr(rotation, "at_length", None)
        _check_rope(rope, length, head_dim)
        return rope, length
    no_rotation = isinstance(rotation, Encoding) and rotation.relative and type(rotation).rotate is Encoding.rotate
    if rotation is None or (no_rotation and not added):
        return None, None
    got = f"{rotation}" if isinstance(rotation, nn.Module) else shown(rotation)
    do = "pass the encoding of the layer; if it is absolute, call reset() and read the last tokens again"
    if isinstance(rotation, Mapping):
        kinds = [repr(kind) for kind in rotation]
        got = f"a dict with {', '.join(kinds)}"
        do = f"pass the spec of this layer: specs[{kinds[0]}]" if kinds else "pass the spec of this layer"
    raise RopewalkError(
        asked=_ASKED,
        expected=f"a rope or a spec with head_dim={head_dim}, an encoding that has such a rope or only adds a bias, or "
        "None if keys contain no position",
        got=got,
        do=do,
    )


def _check_rope(rope: RotaryEmbedding, length: int | None, head_dim: int) -> None:
    """Raise unless keys of width `head_dim` that the rope rotated can be moved."""
    spec = rope.spec
    if spec.axes is not None:
        raise RopewalkError(
            asked=_ASKED,
            expected="a rope with one axis, on which positions change by the number of dropped tokens",
            got=f"{rope}",
            do="pass None, which does not rotate the keys, and continue with the positions that would have followed "
            "without the call: scores depend on differences of positions alone",
        )
    if spec.head_dim != head_dim:
        raise RopewalkError(
            asked=_ASKED,
            expected=f"a rope or a spec with head_dim={head_dim}, the width of the keys in the cache",
            got=f"head_dim={spec.head_dim}: {rope}",
            do="pass what rotated these keys; if they are a part of a head, a spec of that part alone",
        )
    if spec.varies and length is None:
        raise RopewalkError(
            asked=f"{_ASKED} with {type(spec.frequencies).__name__}, whose frequencies depend on the length",
            expected="an encoding with at_length, the length that the keys were rotated with",
            got=f"{rope}, which has no length",
            do='pass the encoding of the layer, or encoding("rope", dim=dim, num_heads=num_heads, spec=spec, '
            "at_length=length)",
        )
