"""Which rope computed a tensor of cos, so that another rope can refuse it. Angles stay a plain tuple of tensors."""

import dataclasses
import functools
import weakref
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.torch_internals import is_eager
from ropewalk.spec.rope import RopeSpec

__all__ = ["MAKERS", "check_maker", "note_maker", "shared_spec"]


# A tensor of cos and the spec of the rope that computed it. If its frequencies are learned: their owner and their
# parameter.
_Maker = tuple[weakref.ref[Tensor], RopeSpec, tuple[weakref.ref[Any], weakref.ref[Tensor]] | None]
# By id, because tensors are compared by their values. An entry whose tensor was released is replaced when its id is
# used again, or removed when there are too many: a callback would cost more than all the rest. An attribute of the
# tensor would be saved with it, and torch.load(weights_only=True) would refuse it.
MAKERS: dict[int, _Maker] = {}
_MOST = 256


def shared_spec(spec: RopeSpec) -> RopeSpec:
    """Return one object for all equal specs, so that ropes of different layers are compared without their fields.

    >>> shared_spec(RopeSpec(4)) is shared_spec(RopeSpec(4))
    True
    """
    return spec if torch.compiler.is_compiling() else _first_equal(spec)


@functools.lru_cache(maxsize=256)
def _first_equal(spec: RopeSpec) -> RopeSpec:
    return spec


def note_maker(cos: Tensor, spec: RopeSpec, owner: object, log_scale: Tensor | None) -> None:
    """Remember, without keeping `cos` alive, which rope computed it. In a graph, and for subclasses, nothing happens.

    Args:
        cos: The tensor that was computed.
        spec: The spec of the rope.
        owner: The owner of learned frequencies.
        log_scale: The parameter of learned frequencies, or None.

    >>> cos = torch.ones(3, 2)
    >>> note_maker(cos, RopeSpec(4), None, None)
    >>> check_maker(cos, RopeSpec(4), None, None, "rope")
    """
    if torch.compiler.is_compiling() or type(cos) is not Tensor:
        return
    learned = None if log_scale is None else (weakref.ref(owner), weakref.ref(log_scale))
    MAKERS[id(cos)] = weakref.ref(cos), spec, learned
    if len(MAKERS) > _MOST:
        _forget_released()


def _forget_released() -> None:
    alive = {key: maker for key, maker in list(MAKERS.items()) if maker[0]() is not None}
    MAKERS.clear()
    # Tensors that are forgotten are accepted by every rope.
    MAKERS.update(alive if len(alive) <= _MOST // 2 else {})


def check_maker(cos: Tensor, spec: RopeSpec, owner: object, log_scale: Tensor | None, call: str) -> None:
    """Raise if another rope computed `cos`: one that computes other cos and sin at the same positions.

    Tensors that no rope is known to have computed are accepted, and so is everything in a graph.

    Args:
        cos: The first of the angles.
        spec: The spec of the rope that is to rotate by them.
        owner: The owner of its frequencies.
        log_scale: The parameter of its learned frequencies, or None.
        call: The function, as errors name it.

    Raises:
        RopewalkError: If another rope computed them.

    >>> cos = torch.ones(3, 2)
    >>> note_maker(cos, RopeSpec(4, sign=-1), None, None)
    >>> try:
    ...     check_maker(cos, RopeSpec(4), None, None, "rope")
    ... except RopewalkError as error:
    ...     print(error.got)
    cos and sin of another rope, with sign=-1
    """
    if torch.compiler.is_compiling():
        return
    maker = MAKERS.get(id(cos))
    if maker is None:
        return
    made, maker_spec, learned = maker
    if learned is None and log_scale is None and maker_spec is spec:
        return
    # The id can belong to another tensor by now.
    if made() is not cos:
        return
    if learned is None and log_scale is None:
        same = _same_angles(maker_spec, spec)
    elif learned is not None and log_scale is not None:
        # The parameter of a module can be replaced, for example by its sharded form.
        same = learned[0]() is owner or (learned[1]() is log_scale and _same_angles(maker_spec, spec))
    else:
        same = False
    if not same and is_eager():
        _raise_maker(maker_spec, spec, learned is not None, log_scale is not None, call)


@functools.lru_cache(maxsize=256)
def _same_angles(one: RopeSpec, other: RopeSpec) -> bool:
    """Whether both have the same cos and sin at the same positions, up to the rounding of angles="float32"."""
    one, other = _angles_alone(one), _angles_alone(other)
    if one == other:
        return True
    if one.varies or other.varies:
        return False
    rest = [
        (spec.rotated_dim, spec.xpos, spec.query_temperature, spec.axes and spec.axes.weights, spec.amplitude())
        for spec in (one, other)
    ]
    return rest[0] == rest[1] and np.array_equal(one.inv_freq(), other.inv_freq())


def _angles_alone(spec: RopeSpec) -> RopeSpec:
    """The spec with fixed values for fields that decide how features are rotated by cos and sin, not what they are."""
    dim = spec.rotated_dim
    return dataclasses.replace(
        spec, head_dim=dim, rotary_dim=dim, pairing="half", rotary_slice="leading", angles="exact"
    )


def _raise_maker(maker: RopeSpec, spec: RopeSpec, maker_learns: bool, learns: bool, call: str) -> NoReturn:
    maker, spec = _angles_alone(maker), _angles_alone(spec)
    names = [field.name for field in dataclasses.fields(spec)]
    names = [name for name in names if getattr(maker, name) != getattr(spec, name)]
    got, expected = ([f"{name}={getattr(one, name)!r}" for name in names] for one in (maker, spec))
    if maker_learns or learns:
        got = [_LEARNED[maker_learns], *got]
        expected = [_LEARNED[learns], *expected]
    raise RopewalkError(
        asked=f"{call}(..., angles=...)",
        expected=f"cos and sin of this rope, with {', '.join(expected)}",
        got=f"cos and sin of another rope, with {', '.join(got)}",
        do="compute them with the rope that rotates: angles = rope.at(positions); if they are meant, pass copies: "
        "(cos.clone(), sin.clone())",
    )


_LEARNED = {False: "fixed frequencies", True: "learned frequencies"}
