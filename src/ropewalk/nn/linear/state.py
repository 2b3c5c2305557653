"""LinearState: the state of linear attention after past tokens. Its size does not depend on their number."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_int, shown
from ropewalk.kernels.constructors import tensor
from ropewalk.kernels.types import Sums
from ropewalk.nn.position_checks import can_read_values, check_finite, check_ids, check_index, described
from ropewalk.nn.saved_tensors import check_tensor, checked_tensors
from ropewalk.signatures import checks_names
from ropewalk.spec.rope import RopeSpec

__all__ = ["LinearState", "NearKeys", "check_length", "checked_start", "checked_state", "join_states"]


# Bytes of JSON in a saved state.
LONGEST_TEXT = 65_536


class NearKeys(NamedTuple):
    """The last keys and values, to which the next tokens are so near that each distance has its own bias.

    Args:
        keys: Keys before the feature map, or features of a map that is a function [batch, kv_heads, near, width].
        values: Values [batch, kv_heads, near, v_dim].
        positions: Positions of the keys, int64 [batch, near].

    >>> NearKeys(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5), torch.arange(3)[None]).positions.shape
    torch.Size([1, 3])
    """

    keys: Tensor
    values: Tensor
    positions: Tensor


# eq=False: comparing tensors does not return one bool.
@checks_names
@dataclass(frozen=True, repr=False, eq=False)
class LinearState:
    """Sums over all past keys, and the position of the next token.

    `linear_attention` returns it with return_state=True, and accepts it as `state`. Keys are rotated before they are
    added to the sums, so the sums are not rotated again.

    Attributes:
        above: Sum of (R_n phi(k_n)) v_n^T, for the numerator: [batch, kv_heads, width, v_dim], float32, or float64 for
            float64 inputs.
        below: Sum of phi(k_n), for the denominator: [batch, kv_heads, width], in the same dtype.
        position: Position of the next token: an int, or a tensor [batch] with one position per sequence.
        spec: The rotation of the keys, or None.
        feature_map: Name of the feature map, or a tuple of names for q and k; None if unknown.
        learned: Whether the frequencies are parameters.
        length: The length that determined the frequencies, if the rule depends on it; None if unknown.
        encoding: `state_identity` of the encoding that changed keys and values by `encode_heads`, or None.
        weighting: "decay", or the class of the encoding whose bias weights the keys; None if all weights are 1. Sums
            with one decay per query head are [batch, heads, ...].
        near: With a bias that is constant beyond a window of distances, the last keys and values. They are not in the
            sums.

    >>> LinearState(torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4), 7).position
    7
    """

    above: Tensor
    below: Tensor
    position: int | Tensor = 0
    spec: RopeSpec | None = None
    feature_map: str | tuple[str, str] | None = None
    learned: bool = False
    length: int | Tensor | None = None
    encoding: str | None = None
    weighting: str | None = None
    near: NearKeys | None = None

    def __getstate__(self) -> dict[str, object]:
        # Without the `Step` of the next token, which belongs to this process.
        return {name: value for name, value in self.__dict__.items() if name != "_step"}

    def reorder(self, index: Tensor) -> "LinearState":
        """Select rows of the batch, for beam search or to drop finished sequences.

        Args:
            index: int32 or int64 [rows], on the device of the state.

        Returns:
            A state with the selected rows.

        Raises:
            RopewalkError: If the shape, dtype or device does not match, or if an index is out of range.

        >>> LinearState(torch.ones(2, 1, 1, 1), torch.tensor([[[1.0]], [[2.0]]])).reorder(torch.tensor([1])).below
        tensor([[[2.]]])
        """
        sequences = len(self.above)
        check_index(index, sequences, self.above.device, asked="LinearState.reorder(index)")
        position, length = (
            x[index] if isinstance(x, Tensor) and x.dim() and len(x) == sequences else x
            for x in (self.position, self.length)
        )
        near = None if self.near is None else NearKeys(*(x[index] for x in self.near))
        above, below = self.above[index], self.below[index]
        return self._with_step(replace(self, above=above, below=below, position=position, length=length, near=near))

    def _with_step(self, other: "LinearState") -> "LinearState":
        """Return another state, for whose next token the same checks hold."""
        if "_step" in self.__dict__:
            other.__dict__["_step"] = self.__dict__["_step"]
        return other

    def start(self, rows: int) -> int | Tensor:
        """Return the position of the next token.

        Args:
            rows: Number of sequences.

        Returns:
            An int, or a tensor [rows]: int64, or floating-point if positions are.

        >>> LinearState(torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1), torch.tensor(7)).start(2)
        tensor([7, 7])
        """
        if isinstance(self.position, int):
            return self.position
        position = self.position if self.position.is_floating_point() else self.position.to(torch.int64)
        return position.expand(rows)

    def to(self, device: torch.device | str) -> "LinearState":
        """Move the state to a device.

        Args:
            device: The new device.

        Returns:
            A state on the new device.

        >>> LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)).to("cpu").above.device
        device(type='cpu')
        """
        position, length = (x.to(device) if isinstance(x, Tensor) else x for x in (self.position, self.length))
        above, below = self.above.to(device), self.below.to(device)
        near = None if self.near is None else NearKeys(*(x.to(device) for x in self.near))
        return replace(self, above=above, below=below, position=position, length=length, near=near)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors, which `torch.save` and safetensors write.

        `torch.load` reads them with weights_only=True.

        Returns:
            Copies of "above", "below" and "position", of "length" if it is known, of "near_keys", "near_values" and
            "near_positions" if there are any, and "about": the spec, the feature map, the encoding and the weighting as
            JSON text in bytes.

        >>> saved = LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), 7).state_dict()
        >>> LinearState.from_state_dict(saved).position
        7
        """
        about: dict[str, object] = {
            "spec": None if self.spec is None else self.spec.to_json(),
            "feature_map": self.feature_map,
            "learned": self.learned,
        }
        if self.encoding is not None:
            about["encoding"] = self.encoding
        if self.weighting is not None:
            about["weighting"] = self.weighting
        state = {"above": self.above, "below": self.below}
        if self.near is not None:
            state |= {f"near_{name}": x for name, x in self.near._asdict().items()}
        for name, x in (("position", self.position), ("length", self.length)):
            if x is not None:
                state[name] = x if isinstance(x, Tensor) else tensor(x, dtype=torch.int64, device="cpu")
        state["about"] = tensor(list(json.dumps(about).encode()), dtype=torch.uint8, device="cpu")
        return {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in state.items()}

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor]) -> "LinearState":
        """Return the state that `state_dict` wrote. It belongs to no layer.

        Args:
            state: What `state_dict` returned.

        Raises:
            RopewalkError: If a tensor is missing, if there is another one, or if a shape, dtype or value is invalid.

        >>> saved = LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), 7, feature_map="elu").state_dict()
        >>> LinearState.from_state_dict(saved).feature_map
        'elu'
        """
        return _loaded(state)

    def __repr__(self) -> str:
        """Return sizes, dtype, device and position, without the values of the sums."""
        sequences, heads, width, v_dim = self.above.shape
        position = self.position if isinstance(self.position, int) else f"of shape {list(self.position.shape)}"
        return (
            f"LinearState({sequences} sequences, {heads} heads, {width} features, {v_dim} values, "
            f"{self.above.dtype} on {self.above.device}, position {position}"
            + ("" if self.near is None else f", {self.near.keys.shape[2]} near keys")
            + ")"
        )

    def detach(self) -> "LinearState":
        """Detach the sums from the autograd graph, to train on a long sequence in parts.

        Returns:
            A state with the same values that requires no gradient.

        >>> LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)).detach().above.requires_grad
        False
        """
        near = None if self.near is None else NearKeys(*(x.detach() for x in self.near))
        return self._with_step(replace(self, above=self.above.detach(), below=self.below.detach(), near=near))


def join_states(states: list[LinearState]) -> LinearState:
    """Return one state with the rows of several, which agree in everything else.

    >>> one = LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), 7)
    >>> join_states([one, one]).position.tolist()
    [7, 7]
    """
    first, device = states[0], states[0].above.device
    sums = [torch.cat([getattr(state, name) for state in states]) for name in ("above", "below")]
    position = torch.cat(
        [
            state.position.reshape(1) if isinstance(state.position, Tensor) else tensor([state.position], device=device)
            for state in states
        ]
    )
    nears = [state.near for state in states if state.near is not None]
    near = NearKeys(*(torch.cat(parts) for parts in zip(*nears, strict=True))) if nears else None
    return replace(first, above=sums[0], below=sums[1], position=position, near=near)


_SAME_LAYER = "pass to each layer the state that the same layer returned, or start with None"


def checked_start(state: LinearState | None, rows: int, *, asked: str) -> int | Tensor:
    """Return the position of the next token of a state; 0 if it is None.

    Args:
        state: The state, or None.
        rows: Number of sequences.
        asked: The function, for errors.

    Returns:
        As `LinearState.start`.

    Raises:
        RopewalkError: If it is not a state, or if its position is invalid.

    >>> checked_start(LinearState(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1), 7), 1, asked="a doctest")
    7
    """
    if state is None:
        return 0
    do = _SAME_LAYER
    if not isinstance(state, LinearState):
        if isinstance(state, tuple):
            do = "a call with return_state=True returns the output and the state: pass the second"
        got = type(state).__name__ if isinstance(state, tuple | Tensor) else shown(state)
        raise RopewalkError(asked=f"{asked}(state=...)", expected="a LinearState, or None", got=got, do=do)
    position = state.position
    has_position = as_int(position) is not None or (
        isinstance(position, Tensor) and tuple(position.shape) in ((), (rows,))
    )
    if not (isinstance(state.above, Tensor) and isinstance(state.below, Tensor) and has_position):
        raise RopewalkError(
            asked=f"{asked}(state=...)",
            expected=f"two tensors of sums, and a position that is an int or a tensor [{rows}]",
            got=f"{type(state.above).__name__}, {type(state.below).__name__}, and "
            + (f"a position of shape {list(position.shape)}" if isinstance(position, Tensor) else shown(position)),
            do=do,
        )
    if isinstance(position, Tensor):
        check_ids(position, asked=f"{asked}(state=...) with a position", shape=f"[] or [{rows}]", dims=(0, 1))
    return state.start(rows)


def checked_state(
    state: LinearState | None,
    sizes: tuple[int, int, int, int],
    v: Tensor,
    *,
    spec: RopeSpec | None,
    learned: bool,
    feature_map: tuple[str, str],
    encoding: str | None,
    weighting: str | None,
    near: int | None,
    asked: str,
) -> Sums | None:
    """Return the sums of a state if it matches the call; None if `state` is None.

    Args:
        state: The state, or None. `checked_start` accepted it.
        sizes: Required sizes: rows, key heads, features, and width of values.
        v: Values of the call, for dtype and device.
        spec: The rotation of the call, or None.
        learned: Whether the frequencies of the call are parameters.
        feature_map: Names of the maps of q and k.
        encoding: `state_identity` of the encoding of the call, or None.
        weighting: "decay", or the class of the encoding whose bias weights the keys, or None.
        near: Number of keys that are not in the sums, or None.
        asked: The function, for errors.

    Returns:
        The sums, or None.

    Raises:
        RopewalkError: If the state does not match.

    >>> options = {"spec": None, "learned": False, "feature_map": ("elu", "elu"), "encoding": None}
    >>> options |= {"weighting": None, "near": None}
    >>> checked_state(None, (1, 1, 4, 3), torch.ones(1, 1, 2, 3), **options, asked="a doctest") is None
    True
    """
    if state is None:
        return None
    working = torch.float64 if v.dtype == torch.float64 else torch.float32
    do, shapes = _SAME_LAYER, (sizes, sizes[:3])
    if state.weighting != weighting:
        expected, got = (
            f"a state {'without decay or bias' if kind is None else f'with {kind}'}"
            for kind in (weighting, state.weighting)
        )
        raise RopewalkError(
            asked=f"{asked}(state=...)",
            expected=expected,
            got=got,
            do="sums in a state are already weighted: pass the same kind of decay or bias, or start with None",
        )
    if (tuple(state.above.shape), tuple(state.below.shape)) != shapes:
        raise RopewalkError(
            asked=f"{asked}(state=...)",
            expected=f"sums {list(shapes[0])} and {list(shapes[1])}: sequences, heads, features, values",
            got=f"{list(state.above.shape)} and {list(state.below.shape)}",
            do=do,
        )
    if {state.above.dtype, state.below.dtype} != {working} or {state.above.device, state.below.device} != {v.device}:
        raise RopewalkError(
            asked=f"{asked}(state=...)",
            expected=f"sums of {working} on {v.device}, for values of {v.dtype}",
            got=", ".join(f"{x.dtype} on {x.device}" for x in (state.above, state.below)),
            do=do,
        )
    if (state.spec, state.learned) != (spec, learned):
        expected, got = (
            f"a state of {rotation or 'no rotation'}" + (" with learned frequencies" if learns else "")
            for rotation, learns in ((spec, learned), (state.spec, state.learned))
        )
        raise RopewalkError(
            asked=f"{asked}(state=...)",
            expected=expected,
            got=got,
            do="keys in a state are already rotated, and cannot be rotated again: start with None",
        )
    if state.encoding != encoding:
        expected, got = (
            f"a state of {'no encoding of the heads' if name is None else name}" for name in (encoding, state.encoding)
        )
        raise RopewalkError(
            asked=f"{asked}(state=...)",
            expected=expected,
            got=got,
            do="keys and values in a state already contain their positions: pass the same encoding, or start with None",
        )
    state_maps = (state.feature_map,) * 2 if isinstance(state.feature_map, str) else state.feature_map
    if state_maps is not None and state_maps != feature_map:
        raise RopewalkError(
            asked=f"{asked}(state=..., feature_map={shown(feature_map)})",
            expected="the feature map that the state was computed with",
            got=shown(state_maps),
            do=do,
        )
    _check_near(state, near, sizes, asked)
    return Sums(state.above, state.below)


def _check_near(state: LinearState, near: int | None, sizes: tuple[int, int, int, int], asked: str) -> None:
    """Raise unless the state has `near` keys that are not in its sums; None for no such keys."""
    keys = state.near
    lengths = None if keys is None else {x.shape[2 - (x.dim() == 2)] for x in keys}
    if lengths != (None if near is None else {near}):
        raise RopewalkError(
            asked=f"{asked}(state=...)",
            expected="no near keys" if near is None else f"{near} near keys, one less than the window of the bias",
            got="none" if lengths is None else f"{sorted(lengths)}",
            do=_SAME_LAYER,
        )


def _loaded(state: Mapping[str, Tensor]) -> LinearState:
    asked, do = "LinearState.from_state_dict(state)", "save the state again with state.state_dict()"
    near_names = tuple(f"near_{name}" for name in NearKeys._fields)
    tensors = checked_tensors(state, ("above", "below", "position", "about"), ("length", *near_names), asked=asked)
    above, below, about = tensors["above"], tensors["below"], tensors["about"]
    if above.dtype not in (torch.float32, torch.float64) or above.dim() != 4:
        expected = "above [batch, kv_heads, width, v_dim] of float32 or float64"
        raise RopewalkError(asked=asked, expected=expected, got=described(above), do=do)
    check_tensor(below, "below", tuple(above.shape[:3]), above.dtype, asked=asked, do=do)
    check_tensor(about, "about", (min(about.numel(), LONGEST_TEXT),), torch.uint8, asked=asked, do=do)
    numbers: dict[str, int | Tensor] = {}
    for name in ("position", "length"):
        if name in tensors:
            x, shape = tensors[name], f"[] or [{len(above)}]"
            check_ids(x, asked=f"{asked} with a {name}", shape=shape, dims=(0, 1))
            if x.dim() and len(x) != len(above):
                raise RopewalkError(asked=asked, expected=f"a {name} {shape}", got=described(x), do=do)
            check_finite(x, asked=f"{asked} with a {name}")
            numbers[name] = int(x) if x.dim() == 0 and not x.is_floating_point() else x.detach().clone()
    about = _parsed(bytes(about.tolist()), asked, do)
    sums = above.detach().clone(), below.detach().clone()
    near = _loaded_near([tensors.get(name) for name in near_names], above, asked, do)
    return LinearState(*sums, numbers["position"], length=numbers.get("length"), near=near, **about)


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


def check_length(state: LinearState | None, spec: RopeSpec | None, length: int | Tensor | None, asked: str) -> None:
    """Raise if `length` implies other frequencies than the state's keys were rotated with.

    Lengths that the host cannot read without a synchronization are not checked.

    >>> check_length(None, None, None, "a doctest")
    """
    state_length = None if state is None else state.length
    if spec is None or not spec.varies or state_length is None or length is None or torch.compiler.is_compiling():
        return
    if not all(can_read_values(x) for x in (state_length, length) if isinstance(x, Tensor)):
        return
    old, new = (x.flatten().tolist() if isinstance(x, Tensor) else [x] for x in (state_length, length))
    rows = max(len(old), len(new))
    pairs = zip(*(x * rows if len(x) == 1 else x for x in (old, new)), strict=False)
    if all(a == b or np.array_equal(spec.inv_freq(a), spec.inv_freq(b)) for a, b in pairs):
        return
    raise RopewalkError(
        asked=f"{asked}(state=..., length={shown(length)})",
        expected="a length with the same frequencies as the keys in the state",
        got=f"a state of length {shown(state_length)}",
        do="pass the final length in every call, from the first on",
    )
