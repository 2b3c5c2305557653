"""LinearState: the state of linear attention after past tokens. Its size does not depend on their number."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_int, shown
from ropewalk.kernels.constructors import tensor
from ropewalk.kernels.types import Sums
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.rotary import rope_in
from ropewalk.nn.linear.near_keys import NearKeys, add_far
from ropewalk.nn.linear.saved_state import load_fields, save_fields
from ropewalk.nn.position_checks import can_read_values, check_ids, check_index
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.signatures import checks_names
from ropewalk.spec.rope import RopeSpec

__all__ = ["LinearState", "check_length", "checked_start", "checked_state", "counts_tokens", "join_states"]

_SAME_LAYER = "pass to each layer the state that the same layer returned, or start with None"


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
        first: Position of the first token: an int, or a tensor [] or [batch]; None if unknown.
        log_decay: With a decay, the sum of its logarithms over all tokens [batch, heads], by which an earlier state
            decays in `merge`; None if unknown.
        slopes: With a bias that is linear in the distance, its slopes [heads].

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
    first: int | Tensor | None = None
    log_decay: Tensor | None = None
    slopes: Tensor | None = None

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

        def select(x: Tensor) -> Tensor:
            return x[index] if x.dim() and len(x) == sequences else x

        return self._with_step(self._changed(select, keep=("slopes",)))

    def _changed(self, change: Callable[[Tensor], Tensor], keep: Collection[str] = ()) -> "LinearState":
        """Return the state with all its tensors changed by a function, except those named in `keep`."""
        names = "above", "below", "position", "length", "first", "log_decay", "slopes"
        fields = {name: getattr(self, name) for name in names if name not in keep}
        changed: dict[str, Any] = {name: change(x) for name, x in fields.items() if isinstance(x, Tensor)}
        if self.near is not None:
            changed["near"] = NearKeys(*(change(x) for x in self.near))
        return replace(self, **changed)

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

    def merge(self, later: "LinearState", *, rope: RotaryEmbedding | Encoding | None = None) -> "LinearState":
        """Return the state after the tokens of this state and those of `later`, which follow them.

        The sums are S_a e^D + S_b, where D is the logarithm of the decay of all tokens of b. It is the state that a
        call with the tokens of `later` returns if this state is passed to it. Merging is associative, but with a decay
        it is not commutative. Both states can be computed at the same time, on two devices for example.

        Args:
            later: State of the following tokens, from `linear_state` or from a call with return_state=True. Their
                positions are passed to that call if there is a rotation or a bias.
            rope: The rotation, required if its frequencies are learned and the bias has a window. Keys that leave the
                window are rotated here.

        Returns:
            A state on the same device.

        Raises:
            RopewalkError: If the states do not match, or if the positions of `later` do not follow.

        >>> half = torch.tensor([[[0.5]]])
        >>> a = LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), 3, weighting="decay", log_decay=half[0].log())
        >>> b = LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), 2, weighting="decay", log_decay=half[0].log())
        >>> merged = a.merge(b)  # 1/2 + 1
        >>> merged.below.item(), merged.position, merged.log_decay.exp().item()
        (1.5, 5, 0.25)
        """
        asked = "LinearState.merge(later)"
        if not isinstance(later, LinearState):
            do = "pass the state of the following tokens: ropewalk.linear_state(k, v, ...)"
            raise RopewalkError(asked=asked, expected="a LinearState", got=shown(later), do=do)
        rows, do = len(self.above), "merge states that one layer computed, for the same sequences, dtype and device"
        checked_start(later, rows, asked=asked, do=do)
        maps = later.feature_map if self.feature_map is None else self.feature_map
        checked_state(
            later,
            (rows, self.above.shape[1], self.above.shape[2], self.above.shape[3]),
            self.above,
            spec=self.spec,
            learned=self.learned,
            feature_map=(maps, maps) if isinstance(maps, str) else maps,
            encoding=self.encoding,
            weighting=self.weighting,
            near=None if self.near is None else self.near.keys.shape[2],
            asked=asked,
            do=do,
        )
        check_length(self, self.spec, later.length, asked)
        position = _merged_position(self, later, asked)
        decay, total = _decay_between(self, later, asked), None
        above, below = self.above, self.below
        if decay is not None:
            factor = decay.exp().to(above.dtype)
            above, below = above * factor[..., None, None], below * factor[..., None]
        if self.log_decay is not None and later.log_decay is not None:
            total = self.log_decay + later.log_decay
        sums, near = Sums(above + later.above, below + later.below), None
        length = self.length if later.length is None else later.length
        if self.near is not None and later.near is not None:
            rotation = _rotation_of(self, rope, asked)
            sums, near = add_far(self.near, later.near, sums, maps, rotation, length)
        merged = replace(
            self, above=sums.above, below=sums.below, position=position, length=length, near=near, log_decay=total
        )
        return later._with_step(merged)

    def to(self, device: torch.device | str) -> "LinearState":
        """Move the state to a device.

        Args:
            device: The new device.

        Returns:
            A state on the new device.

        >>> LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)).to("cpu").above.device
        device(type='cpu')
        """
        return self._changed(lambda x: x.to(device))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors, which `torch.save` and safetensors write.

        `torch.load` reads them with weights_only=True.

        Returns:
            Copies of "above", "below" and "position", of "length", "first", "log_decay" and "slopes" if they are
            known, of "near_keys", "near_values" and "near_positions" if there are any, and "about": the spec, the
            feature map, the encoding and the weighting as JSON text in bytes.

        >>> saved = LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), 7).state_dict()
        >>> LinearState.from_state_dict(saved).position
        7
        """
        return save_fields(self.__dict__)

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
        return LinearState(**load_fields(state))

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
        return self._with_step(self._changed(lambda x: x.detach()))


def join_states(states: list[LinearState]) -> LinearState:
    """Return one state with the rows of several, which agree in everything else.

    >>> one = LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), 7)
    >>> join_states([one, one]).position.tolist()
    [7, 7]
    """
    device = states[0].above.device

    def joined(parts: list[Any]) -> Any:
        """Return tensors of all states, or of none."""
        if any(x is None for x in parts):
            return None
        return torch.cat([torch.atleast_1d(x if isinstance(x, Tensor) else tensor(x, device=device)) for x in parts])

    names = "above", "below", "position", "first", "log_decay"
    fields = {name: joined([getattr(state, name) for state in states]) for name in names}
    nears = [state.near for state in states if state.near is not None]
    near = NearKeys(*(torch.cat(parts) for parts in zip(*nears, strict=True))) if nears else None
    return replace(states[0], **fields, near=near)


def counts_tokens(state: LinearState) -> bool:
    """Whether `position` is the number of tokens, because positions do not matter or have several axes.

    >>> counts_tokens(LinearState(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)))
    True
    """
    if state.spec is not None:
        return state.spec.axes is not None
    return state.encoding is None and state.slopes is None and state.near is None


def _merged_position(earlier: LinearState, later: LinearState, asked: str) -> int | Tensor:
    """Return the position after both. Raise if the later tokens are known to overlap the earlier ones."""
    if counts_tokens(earlier):
        return earlier.position + later.position
    readable = all(not isinstance(x, Tensor) or can_read_values(x) for x in (later.first, earlier.position))
    overlaps = later.first is not None and readable and later.first < earlier.position
    if bool(overlaps.any()) if isinstance(overlaps, Tensor) else overlaps:
        raise RopewalkError(
            asked=asked,
            expected=f"tokens from position {_listed(earlier.position)} on, where this state ends",
            got=f"tokens from position {_listed(later.first)} on",
            do="pass their positions to the call that computes the later state: linear_state(k, v, positions=...); a "
            "state that was computed with state= already contains the tokens before it",
        )
    # A row of `later` without visible tokens ends where it starts.
    if isinstance(later.position, int) and isinstance(earlier.position, int):
        return max(later.position, earlier.position)
    return torch.maximum(*torch.broadcast_tensors(*_as_tensors(later.position, earlier.position)))


def _as_tensors(a: int | Tensor, b: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return two positions as tensors on one device. At least one of them is a tensor."""
    device = a.device if isinstance(a, Tensor) else b.device if isinstance(b, Tensor) else None
    return tuple(x if isinstance(x, Tensor) else tensor(x, dtype=torch.int64, device=device) for x in (a, b))  # pyright: ignore[reportReturnType]


def _listed(position: int | Tensor | None) -> object:
    """Return a position as numbers, for errors."""
    return position.tolist() if isinstance(position, Tensor) else position


def _decay_between(earlier: LinearState, later: LinearState, asked: str) -> Tensor | None:
    """Return the logarithm of the decay of the earlier sums [batch or 1, heads]; None for no decay."""
    if later.slopes is not None:
        steps = _merged_position(earlier, later, asked) - earlier.position
        if isinstance(steps, int):
            return (-steps * later.slopes)[None]
        slopes = later.slopes.to(torch.promote_types(later.slopes.dtype, steps.dtype))
        return -steps.reshape(-1, 1).to(slopes.dtype) * slopes
    if later.weighting != "decay":
        return None
    if later.log_decay is None:
        raise RopewalkError(
            asked=asked,
            expected="a state that contains the decay of its tokens",
            got="one after single tokens, which do not add it up",
            do="compute the state of all its tokens: linear_state(k, v, decay=...)",
        )
    return later.log_decay


def _rotation_of(state: LinearState, rope: object, asked: str) -> RotaryEmbedding | None:
    """Return the rotation of the keys of a state."""
    rotation = rope_in(rope)
    same = rotation is not None and (rotation.spec, rotation.log_scale is not None) == (state.spec, state.learned)
    if rope is not None and not same:
        raise RopewalkError(
            asked=f"{asked[:-1]}, rope=...)",
            expected=f"the rotation of the state: {state.spec or 'none'}"
            + (" with learned frequencies" if state.learned else ""),
            got=shown(rope),
            do="pass the rope that computed the states",
        )
    if rope is None and state.learned:
        raise RopewalkError(
            asked=asked,
            expected="rope=: keys that leave the window of the bias are rotated by learned frequencies",
            got="no rope",
            do="pass the rope that computed the states: state.merge(later, rope=rope)",
        )
    if rotation is not None or state.spec is None:
        return rotation
    return RotaryEmbedding(state.spec).to(state.above.device)


def checked_start(state: LinearState | None, rows: int, *, asked: str, do: str = _SAME_LAYER) -> int | Tensor:
    """Return the position of the next token of a state; 0 if it is None.

    Args:
        state: The state, or None.
        rows: Number of sequences.
        asked: The first line of the error.
        do: Its last line, unless there is a better one.

    Returns:
        As `LinearState.start`.

    Raises:
        RopewalkError: If it is not a state, or if its position is invalid.

    >>> checked_start(LinearState(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1), 7), 1, asked="a doctest")
    7
    """
    if state is None:
        return 0
    if not isinstance(state, LinearState):
        if isinstance(state, tuple):
            do = "a call with return_state=True returns the output and the state: pass the second"
        got = type(state).__name__ if isinstance(state, tuple | Tensor) else shown(state)
        raise RopewalkError(asked=asked, expected="a LinearState, or None", got=got, do=do)
    position = state.position
    has_position = as_int(position) is not None or (
        isinstance(position, Tensor) and tuple(position.shape) in ((), (rows,))
    )
    if not (isinstance(state.above, Tensor) and isinstance(state.below, Tensor) and has_position):
        raise RopewalkError(
            asked=asked,
            expected=f"two tensors of sums, and a position that is an int or a tensor [{rows}]",
            got=f"{type(state.above).__name__}, {type(state.below).__name__}, and "
            + (f"a position of shape {list(position.shape)}" if isinstance(position, Tensor) else shown(position)),
            do=do,
        )
    if isinstance(position, Tensor):
        check_ids(position, asked=f"{asked} with a position", shape=f"[] or [{rows}]", dims=(0, 1))
    return state.start(rows)


def checked_state(
    state: LinearState | None,
    sizes: tuple[int, int, int, int],
    v: Tensor,
    *,
    spec: RopeSpec | None,
    learned: bool,
    feature_map: tuple[str, str] | None,
    encoding: str | None,
    weighting: str | None,
    near: int | None,
    asked: str,
    do: str = _SAME_LAYER,
) -> Sums | None:
    """Return the sums of a state if it matches the call; None if `state` is None.

    Args:
        state: The state, or None. `checked_start` accepted it.
        sizes: Required sizes: rows, key heads, features, and width of values.
        v: Values of the call, for dtype and device.
        spec: The rotation of the call, or None.
        learned: Whether the frequencies of the call are parameters.
        feature_map: Names of the maps of q and k; None if unknown.
        encoding: `state_identity` of the encoding of the call, or None.
        weighting: "decay", or the class of the encoding whose bias weights the keys, or None.
        near: Number of keys that are not in the sums, or None.
        asked: The first line of the error.
        do: Its last line, unless there is a better one.

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
    shapes = sizes, sizes[:3]
    if state.weighting != weighting:
        expected, got = (
            f"a state {'without decay or bias' if kind is None else f'with {kind}'}"
            for kind in (weighting, state.weighting)
        )
        raise RopewalkError(
            asked=asked,
            expected=expected,
            got=got,
            do="sums in a state are already weighted: pass the same kind of decay or bias, or start with None",
        )
    if (tuple(state.above.shape), tuple(state.below.shape)) != shapes:
        raise RopewalkError(
            asked=asked,
            expected=f"sums {list(shapes[0])} and {list(shapes[1])}: sequences, heads, features, values",
            got=f"{list(state.above.shape)} and {list(state.below.shape)}",
            do=do,
        )
    if {state.above.dtype, state.below.dtype} != {working} or {state.above.device, state.below.device} != {v.device}:
        raise RopewalkError(
            asked=asked,
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
            asked=asked,
            expected=expected,
            got=got,
            do="keys in a state are already rotated, and cannot be rotated again: start with None",
        )
    if state.encoding != encoding:
        expected, got = (
            f"a state of {'no encoding of the heads' if name is None else name}" for name in (encoding, state.encoding)
        )
        raise RopewalkError(
            asked=asked,
            expected=expected,
            got=got,
            do="keys and values in a state already contain their positions: pass the same encoding, or start with None",
        )
    state_maps = (state.feature_map,) * 2 if isinstance(state.feature_map, str) else state.feature_map
    if state_maps is not None and state_maps != feature_map:
        raise RopewalkError(
            asked=asked,
            expected=f"a state of the feature map {shown(feature_map)}",
            got=f"one of {shown(state_maps)}",
            do=do,
        )
    _check_near(state, near, asked, do)
    return Sums(state.above, state.below)


def _check_near(state: LinearState, near: int | None, asked: str, do: str) -> None:
    """Raise unless the state has `near` keys that are not in its sums; None for no such keys."""
    keys = state.near
    lengths = None if keys is None else {x.shape[2 - (x.dim() == 2)] for x in keys}
    if lengths != (None if near is None else {near}):
        raise RopewalkError(
            asked=asked,
            expected="no near keys" if near is None else f"{near} near keys, one less than the window of the bias",
            got="none" if lengths is None else f"{sorted(lengths)}",
            do=do,
        )


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
        asked=asked,
        expected="lengths with the same frequencies",
        got=f"length {shown(length)} after a state of length {shown(state_length)}",
        do="pass the final length in every call, from the first on",
    )
