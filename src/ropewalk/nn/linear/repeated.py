"""Calls of `linear_attention` that repeat an earlier one with other numbers, without its checks.

The checks of a call, its tables and the choice of a backend take longer on the host than a short sequence on a GPU.
What they decide depends only on the signature of the tensors (shapes, strides, dtypes, devices, alignment, and which
need gradients), the stream and the options. It is stored for the first such call, per rope. The first call is computed
as the later ones are: activation checkpointing requires that both save the same tensors.
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

__all__ = ["call_again", "call_first"]

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


def call_first(
    rope: object,
    rotation: RotaryEmbedding | None,
    sides: tuple[Side, Side],
    v: Tensor,
    options: tuple[Any, ...],
    layout: Layout,
    weighting: Weighting,
) -> Tensor | None:
    """Store what a causal call without state has decided, and return its output.

    Args:
        rope: The argument `rope`.
        rotation: The rotation, or None.
        sides: Queries and keys, with their tables.
        v: Values.
        options: As in `call_again`.
        layout: Layout of the rotation.
        weighting: The weighting.

    Returns:
        None if what was decided depends on more than the signature, or if no kernel supports the call.

    >>> x, options = torch.ones(1, 1, 2, 4), ("elu", True, None)
    >>> sides = Side(x, "elu"), Side(x, "elu")  # a CPU without the interpreter has no kernel
    >>> call_first(None, None, sides, x, options, Layout(True, 0, -2), Weighting()) is None
    True
    """
    if not isinstance(options[0], str) or options[0] not in FeatureMap.__members__:
        return None
    # Without kernels for the device, every call would search for one here again.
    if all(candidate.backend == "torch" for candidate in candidates("linear_attention", None, v.device.type)):
        return None
    if rotation is not rope or (rotation is not None and not depends_on_position_alone(rotation)):
        return None
    (q_cos, q_sin, q_row), (k_cos, k_sin, k_row) = (side.tables or (None, None, 0) for side in sides)
    if q_cos is not k_cos or q_sin is not k_sin or q_row != k_row:
        return None
    if not is_eager() or torch.compiler.is_compiling():
        return None
    q, k = sides[0].x, sides[1].x
    key, addresses = _key(q, k, v, options)
    choice = None if key is None else chosen(*sides, v, layout, weighting, causal=True)
    if choice is None or choice.path != "kernel":
        return None
    calls = _CALLS.setdefault(_NO_ROPE if rope is None else rope, {})
    if len(calls) >= MOST:
        calls.clear()
    call = Repeated.of(choice, *sides, v, layout, weighting)
    calls[key] = _Earlier(call, current())
    return call(q, k, v, addresses)
