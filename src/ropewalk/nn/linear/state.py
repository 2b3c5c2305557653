"""LinearState: what linear attention keeps of the tokens behind it, which does not grow with their number."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, shown
from ropewalk.kernels.linear.torch import Sums
from ropewalk.nn.attention.arguments import check_index
from ropewalk.nn.encodings.base import may_look
from ropewalk.spec.rope import RopeSpec

__all__ = ["LinearState", "check_length", "checked_state"]


# Without ==: what it would compare is tensors, which have no one answer.
@dataclass(frozen=True, repr=False, eq=False)
class LinearState:
    """Sums over all keys so far, and where the next token stands.

    `above`, [batch, kv_heads, width, v_dim], is the sum of (R_n k_n) v_n^T, and `below`, [batch, kv_heads, width], the
    sum of k_n, both float32, or float64 for float64 inputs. Keys were turned when they entered: nothing in a state
    turns again. `position` is an int, or one a sequence. `spec`, `feature_map`, a name or one for q and one for
    k, `learned`, whether frequencies are parameters, and `length`, where they vary with it, are those it was made with;
    feature_map and length may be None for unknown.

    >>> LinearState(torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4), 7).position
    7
    """

    above: Tensor
    below: Tensor
    position: int | Tensor = 0
    spec: RopeSpec | None = None
    feature_map: Any = None
    learned: bool = False
    length: int | Tensor | None = None

    def reorder(self, index: Tensor) -> "LinearState":
        """The rows `index` of the batch: for beam search, or sequences that end.

        >>> LinearState(torch.ones(2, 1, 1, 1), torch.tensor([[[1.0]], [[2.0]]])).reorder(torch.tensor([1])).below
        tensor([[[2.]]])
        """
        sequences = len(self.above)
        check_index(index, sequences, self.above.device, "LinearState.reorder(index)")

        def rows(x: Any) -> Any:
            return x[index] if isinstance(x, Tensor) and x.dim() and len(x) == sequences else x

        return replace(
            self,
            above=self.above[index],
            below=self.below[index],
            position=rows(self.position),
            length=rows(self.length),
        )

    def start(self, rows: int) -> int | Tensor:
        """Where the next token stands: an int, or 64-bit whole numbers [rows] unless positions are fractions.

        >>> LinearState(torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1), torch.tensor(7)).start(2)
        tensor([7, 7])
        """
        if isinstance(self.position, int):
            return self.position
        place = self.position if self.position.is_floating_point() else self.position.to(torch.int64)
        return place.expand(rows)

    def to(self, device: torch.device | str) -> "LinearState":
        """The same on another device.

        >>> LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)).to("cpu").above.device
        device(type='cpu')
        """

        def moved(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        return replace(
            self,
            above=self.above.to(device),
            below=self.below.to(device),
            position=moved(self.position),
            length=moved(self.length),
        )

    def __repr__(self) -> str:
        """Sizes and place: the sums themselves say nothing to a reader."""
        sequences, kv_heads, width, v_dim = self.above.shape
        place = self.position if isinstance(self.position, int) else f"of shape {list(self.position.shape)}"
        return (
            f"LinearState({sequences} sequences, {kv_heads} key heads, {width} features, {v_dim} values, "
            f"{self.above.dtype} on {self.above.device}, position {place})"
        )

    def detach(self) -> "LinearState":
        """The same without a graph: for training on one part of a long sequence after the other.

        >>> LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)).detach().above.requires_grad
        False
        """
        return replace(self, above=self.above.detach(), below=self.below.detach())


def checked_state(
    state: Any,
    rows: int,
    kv_heads: int,
    width: int,
    v: Tensor,
    *,
    spec: RopeSpec | None,
    learned: bool,
    feature_map: tuple[str, str],
    asked: str,
) -> Sums | None:
    """The sums of a state, if it belongs to this call; None for None.

    >>> made = {"spec": None, "learned": False, "feature_map": ("elu", "elu")}
    >>> checked_state(None, 1, 1, 4, torch.ones(1, 1, 2, 3), **made, asked="a doctest") is None
    True
    """
    if state is None:
        return None
    working = torch.float64 if v.dtype == torch.float64 else torch.float32
    do = "give each layer the state that it returned itself, or start with None"
    if not isinstance(state, LinearState):
        if isinstance(state, tuple):
            do = "a call with return_state=True gives the output and the state: pass the second"
        got = type(state).__name__ if isinstance(state, tuple | Tensor) else shown(state)
        raise RopewalkError(asked=f"{asked}(state=...)", expected="a LinearState, or None", got=got, do=do)
    shapes = (rows, kv_heads, width, v.shape[-1]), (rows, kv_heads, width)
    place = state.position
    placed = isinstance(place, int) or (isinstance(place, Tensor) and tuple(place.shape) in ((), (rows,)))
    if not (isinstance(state.above, Tensor) and isinstance(state.below, Tensor) and placed):
        raise RopewalkError(
            asked=f"{asked}(state=...)",
            expected=f"two tensors of sums, and a position that is an int or a tensor [{rows}]",
            got=f"{type(state.above).__name__}, {type(state.below).__name__}, and "
            + (f"a position of shape {list(place.shape)}" if isinstance(place, Tensor) else shown(place)),
            do=do,
        )
    if (tuple(state.above.shape), tuple(state.below.shape)) != shapes:
        raise RopewalkError(
            asked=f"{asked}(state=...)",
            expected=f"sums {list(shapes[0])} and {list(shapes[1])}: sequences, key heads, features, values",
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
        of = [
            f"a state of {one or 'no rotation'}" + (" with learned frequencies" if learns else "")
            for one, learns in ((spec, learned), (state.spec, state.learned))
        ]
        raise RopewalkError(
            asked=f"{asked}(state=...)",
            expected=of[0],
            got=of[1],
            do="keys in a state were turned when they entered, and cannot be turned again: start with None",
        )
    made_with = (state.feature_map,) * 2 if isinstance(state.feature_map, str) else state.feature_map
    if made_with is not None and made_with != feature_map:
        raise RopewalkError(
            asked=f"{asked}(state=..., feature_map={shown(feature_map)})",
            expected="the feature map that the state was made with",
            got=shown(made_with),
            do=do,
        )
    return Sums(state.above, state.below)


def check_length(state: LinearState | None, spec: RopeSpec | None, length: int | Tensor | None, asked: str) -> None:
    """Refuses a length, which the rope has taken, with other frequencies than the state's keys were turned by.

    What the host may not look at is let through.

    >>> check_length(None, None, None, "a doctest")
    """
    kept = None if state is None else state.length
    if spec is None or not spec.varies or kept is None or length is None or torch.compiler.is_compiling():
        return
    if not all(may_look(x) for x in (kept, length) if isinstance(x, Tensor)):
        return
    one, other = (x.flatten().tolist() if isinstance(x, Tensor) else [x] for x in (kept, length))
    rows = max(len(one), len(other))
    pairs = zip(*(x * rows if len(x) == 1 else x for x in (one, other)), strict=False)
    if all(a == b or np.array_equal(spec.inv_freq(a), spec.inv_freq(b)) for a, b in pairs):
        return
    raise RopewalkError(
        asked=f"{asked}(state=..., length={shown(length)})",
        expected="a length with the frequencies that keys in the state were turned by",
        got=f"a state of length {shown(kept)}",
        do="give the first call the length that is to come, and every call the same",
    )
