"""Calls of `linear_attention` that repeat an earlier one with other numbers, without its checks.

The checks of a call, its tables and the choice of a backend take longer on the host than a short sequence on a GPU.
What they decide depends only on shapes, strides, dtypes, devices and options. It is stored for the first such call, per
rope, and found again by the signature of the tensors.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ropewalk.kernels.backend import Registry, candidates, current
from ropewalk.kernels.signature import is_eager, signature
from ropewalk.kernels.torch_internals import current_stream, is_capturing
from ropewalk.kernels.types import FeatureMap, Layout, Side, Weighting
from ropewalk.nn.linear.step import depends_on_position_alone
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops.linear_attention import Repeated, chosen

__all__ = ["call_again", "remember_call"]

# Most calls that are stored per rope: each layer of a model has few shapes.
MOST = 16


class _Earlier(NamedTuple):
    """An earlier call, for other numbers, and the backends that there were."""

    call: Repeated
    registry: Registry


class _NoRope:
    """The key of calls without a rope."""


_NO_ROPE = _NoRope()
_CALLS: WeakKeyDictionary[object, dict[Any, _Earlier]] = WeakKeyDictionary()


def _key(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> tuple[Any, tuple[int, ...]]:
    """Return the key of a call, or None if it may not be stored, and the addresses of its tensors."""
    signed = signature(q, k, v)
    if signed is None:
        return None, ()
    stream = 0
    if q.is_cuda:
        stream = current_stream(q.device)
        # Tensors that a CUDA graph reads must outlive it, but stored cos and sin may be freed.
        if is_capturing(stream):
            return None, ()
    return (signed[0], stream, options), signed[1]


def call_again(rope: object, q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> Tensor | None:
    """Return the output of a causal call without state, if an equal one was stored; None otherwise.

    Args:
        rope: The argument `rope`.
        q: Queries.
        k: Keys.
        v: Values.
        options: The arguments feature_map, normalize and scale. Only names of feature maps are stored.

    >>> x = torch.ones(1, 1, 2, 4)
    >>> call_again(None, x, x, x, ("elu", True, None)) is None
    True
    """
    feature_map, normalize, scale = options
    plain = type(feature_map) is str and type(normalize) is bool and (scale is None or type(scale) is float)
    plain = plain and (rope is None or isinstance(rope, RotaryEmbedding))
    calls = _CALLS.get(_NO_ROPE if rope is None else rope) if plain else None
    if calls is None or not is_eager():
        return None
    key, addresses = _key(q, k, v, options)
    earlier = calls.get(key)
    if earlier is None or earlier.registry is not current():
        return None
    return earlier.call(q, k, v, addresses)


def remember_call(
    rope: object,
    rotation: RotaryEmbedding | None,
    sides: tuple[Side, Side],
    v: Tensor,
    options: tuple[Any, ...],
    layout: Layout,
    weighting: Weighting,
) -> None:
    """Store what a causal call without state has decided, if it depends on nothing but its signature.

    Args:
        rope: The argument `rope`.
        rotation: The rotation, or None.
        sides: Queries and keys, with their tables.
        v: Values.
        options: As in `call_again`.
        layout: Layout of the rotation.
        weighting: The weighting.

    >>> x, options = torch.ones(1, 1, 2, 4), ("elu", True, None)
    >>> remember_call(None, None, (Side(x, "elu"), Side(x, "elu")), x, options, Layout(True, 0, -2), Weighting())
    >>> call_again(None, x, x, x, options) is None  # a CPU without the interpreter has no kernel
    True
    """
    if not isinstance(options[0], str) or options[0] not in FeatureMap.__members__:
        return
    # Without kernels for the device, every call would search for one here again.
    if all(candidate.backend == "torch" for candidate in candidates("linear_attention", None, v.device.type)):
        return
    if rotation is not rope or (rotation is not None and not depends_on_position_alone(rotation)):
        return
    (q_cos, q_sin, q_row), (k_cos, k_sin, k_row) = (side.tables or (None, None, 0) for side in sides)
    if q_cos is not k_cos or q_sin is not k_sin or q_row != k_row:
        return
    if not is_eager() or torch.compiler.is_compiling():
        return
    key, _ = _key(sides[0].x, sides[1].x, v, options)
    choice = None if key is None else chosen(*sides, v, layout, weighting, causal=True)
    if choice is None or choice.path != "kernel":
        return
    calls = _CALLS.setdefault(_NO_ROPE if rope is None else rope, {})
    if len(calls) >= MOST:
        calls.clear()
    calls[key] = _Earlier(Repeated.of(choice, *sides, v, layout, weighting), current())
