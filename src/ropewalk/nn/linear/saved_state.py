"""A LinearState as a dict of tensors, for files."""

import json
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, shown
from ropewalk.kernels.constructors import tensor
from ropewalk.nn.linear.near_keys import NearKeys
from ropewalk.nn.position_checks import check_finite, check_ids, described
from ropewalk.nn.saved_tensors import check_tensor, checked_tensors
from ropewalk.spec.rope import RopeSpec

__all__ = ["load_fields", "save_fields"]

# Bytes of JSON in a saved state.
LONGEST_TEXT = 65_536

# Fields that are tensors, numbers, and text. Other fields of a state are `spec` and `near`.
_TENSORS, _NUMBERS, _TEXT = ("log_decay", "slopes"), ("position", "length", "first"), ("encoding", "weighting")


def save_fields(fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what `LinearState.state_dict` returns.

    Args:
        fields: The fields of a state by name.

    >>> sums = {"above": torch.ones(1, 1, 1, 1), "below": torch.ones(1, 1, 1)}
    >>> list(save_fields(sums | {"position": 7}))
    ['above', 'below', 'position', 'about']
    """
    spec, near = fields.get("spec"), fields.get("near")
    about: dict[str, object] = {
        "spec": None if spec is None else spec.to_json(),
        "feature_map": fields.get("feature_map"),
        "learned": fields.get("learned", False),
    }
    about |= {name: fields[name] for name in _TEXT if fields.get(name) is not None}
    state: dict[str, Tensor] = {"above": fields["above"], "below": fields["below"]}
    if near is not None:
        state |= {f"near_{name}": x for name, x in near._asdict().items()}
    for name in (*_NUMBERS, *_TENSORS):
        x = fields.get(name)
        if x is not None:
            state[name] = x if isinstance(x, Tensor) else tensor(x, dtype=torch.int64, device="cpu")
    state["about"] = tensor(list(json.dumps(about).encode()), dtype=torch.uint8, device="cpu")
    return {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in state.items()}


def load_fields(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of a state by name.

    Args:
        state: What `save_fields` returned.

    Raises:
        RopewalkError: If a tensor is missing, if there is another one, or if a shape, dtype or value is invalid.

    >>> sums = {"above": torch.ones(1, 1, 1, 1), "below": torch.ones(1, 1, 1)}
    >>> load_fields(save_fields(sums | {"position": 7}))["position"]
    7
    """
    asked, do = "LinearState.from_state_dict(state)", "save the state again with state.state_dict()"
    near_names = tuple(f"near_{name}" for name in NearKeys._fields)
    optional = *_NUMBERS[1:], *_TENSORS, *near_names
    tensors = checked_tensors(state, ("above", "below", "position", "about"), optional, asked=asked)
    above, below, about = tensors["above"], tensors["below"], tensors["about"]
    if above.dtype not in (torch.float32, torch.float64) or above.dim() != 4:
        expected = "above [batch, kv_heads, width, v_dim] of float32 or float64"
        raise RopewalkError(asked=asked, expected=expected, got=described(above), do=do)
    rows, heads, *_ = above.shape
    check_tensor(below, "below", tuple(above.shape[:3]), above.dtype, asked=asked, do=do)
    check_tensor(about, "about", (min(about.numel(), LONGEST_TEXT),), torch.uint8, asked=asked, do=do)
    fields: dict[str, Any] = {"above": above.detach().clone(), "below": below.detach().clone()}
    for name in _NUMBERS:
        if name in tensors:
            x, shape = tensors[name], f"[] or [{rows}]"
            check_ids(x, asked=f"{asked} with a {name}", shape=shape, dims=(0, 1))
            if x.dim() and len(x) != rows:
                raise RopewalkError(asked=asked, expected=f"a {name} {shape}", got=described(x), do=do)
            check_finite(x, asked=f"{asked} with a {name}")
            fields[name] = int(x) if x.dim() == 0 and not x.is_floating_point() else x.detach().clone()
    for name, shape in zip(_TENSORS, ((rows, heads), (heads,)), strict=True):
        if name in tensors:
            dtype = above.dtype if name == "log_decay" else tensors[name].dtype
            check_tensor(tensors[name], name, shape, dtype, asked=asked, do=do)
            fields[name] = tensors[name].detach().clone()
    fields["near"] = _loaded_near([tensors.get(name) for name in near_names], above, asked, do)
    return fields | _parsed(bytes(about.tolist()), asked, do)


def _loaded_near(tensors: list[Tensor | None], above: Tensor, asked: str, do: str) -> NearKeys | None:
    given = [x for x in tensors if x is not None]
    if not given:
        return None
    if len(given) < len(tensors):
        expected = "near_keys, near_values and near_positions, or none of them"
        raise RopewalkError(asked=asked, expected=expected, got=f"{len(given)} of them", do=do)
    keys, values, positions = given
    rows, _, width, v_dim = above.shape
    kv_heads, near = (keys.shape[1], keys.shape[2]) if keys.dim() == 4 else (0, 0)
    for name, x, shape, dtype in (
        ("near_keys", keys, (rows, kv_heads, near, width), keys.dtype if keys.is_floating_point() else above.dtype),
        ("near_values", values, (rows, kv_heads, near, v_dim), keys.dtype),
        ("near_positions", positions, (rows, near), torch.int64),
    ):
        check_tensor(x, name, shape, dtype, asked=asked, do=do)
    return NearKeys(*(x.detach().clone() for x in given))


class _About(TypedDict):
    spec: RopeSpec | None
    feature_map: str | tuple[str, str] | None
    learned: bool
    encoding: str | None
    weighting: str | None


def _parsed(text: bytes, asked: str, do: str) -> _About:
    """Return what `state_dict` wrote as text. Raise unless it did."""
    try:
        about = json.loads(text)
        spec, names, learned = (about.pop(name) for name in ("spec", "feature_map", "learned"))
        # Earlier versions did not write them, and read a state only without them.
        encoding, weighting = (about.pop(name, None) for name in ("encoding", "weighting"))
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        about, spec, names, learned, encoding, weighting = (None,) * 6
    pair = isinstance(names, list) and len(names) == 2 and all(isinstance(name, str) for name in names)
    texts = all(isinstance(x, str | None) for x in (spec, encoding, weighting))
    valid = about == {} and isinstance(learned, bool) and texts
    if not valid or not (pair or isinstance(names, str | None)):
        expected = "about as JSON text with spec, feature_map, learned and, if there are any, encoding and weighting"
        raise RopewalkError(asked=asked, expected=expected, got=shown(text), do=do)
    names = (names[0], names[1]) if isinstance(names, list) else names
    parsed = None if spec is None else RopeSpec.from_json(spec)
    return _About(spec=parsed, feature_map=names, learned=bool(learned), encoding=encoding, weighting=weighting)
