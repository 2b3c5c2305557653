"""LinearState: what linear attention keeps of the tokens behind it, which does not grow with their number."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_int, shown
from ropewalk.kernels.types import Sums
from ropewalk.nn.position_checks import check_ids, check_index, may_look
from ropewalk.spec.rope import RopeSpec

__all__ = ["LinearState", "check_length", "checked_state"]


# Without ==: what it would compare is tensors, which have no one answer.
@dataclass(frozen=True, repr=False, eq=False)
class LinearState:
    """Sums over all keys so far, and the position of the next token.

    Keys were rotated when they entered: nothing in a state is rotated again.

    Attributes:
        above: [batch, kv_heads, width, v_dim], the sum of (R_n k_n) v_n^T, float32, or float64 for float64 inputs.
        below: [batch, kv_heads, width], the sum of k_n, in the same dtype.
        position: That of the next token: an int, or a tensor with one per sequence.
        spec: The rotation that it was made with, or None.
        feature_map: The name of the feature map that it was made with, or one for q and one for k; None if unknown.
        learned: Whether the frequencies were parameters.
        length: The length that the frequencies were for, if they vary with it; None if unknown.

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

    def reorder(self, index: Tensor) -> "LinearState":
        """The rows `index` of the batch: for beam search, or sequences that end.

        >>> LinearState(torch.ones(2, 1, 1, 1), torch.tensor([[[1.0]], [[2.0]]])).reorder(torch.tensor([1])).below
        tensor([[[2.]]])
        """
        sequences = len(self.above)
        check_index(index, sequences, self.above.device, asked="LinearState.reorder(index)")
        position, length = (
            x[index] if isinstance(x, Tensor) and x.dim() and len(x) == sequences else x
            for x in (self.position, self.length)
        )
        return replace(self, above=self.above[index], below=self.below[index], position=position, length=length)

    def start(self, rows: int) -> int | Tensor:
        """The position of the next token: an int, or a tensor [rows], int64 unless positions are fractions.

        >>> LinearState(torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1), torch.tensor(7)).start(2)
        tensor([7, 7])
        """
        if isinstance(self.position, int):
            return self.position
        position = self.position if self.position.is_floating_point() else self.position.to(torch.int64)
        return position.expand(rows)

    def to(self, device: torch.device | str) -> "LinearState":
        """The same on another device.

        >>> LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)).to("cpu").above.device
        device(type='cpu')
        """
        position, length = (x.to(device) if isinstance(x, Tensor) else x for x in (self.position, self.length))
        above, below = self.above.to(device), self.below.to(device)
        return replace(self, above=above, below=below, position=position, length=length)

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
    state: LinearState | None,
    sizes: tuple[int, int, int, int],
    v: Tensor,
    *,
    spec: RopeSpec | None,
    learned: bool,
    feature_map: tuple[str, str],
    asked: str,
) -> Sums | None:
    """The sums of a state, if it belongs to this call; None for None. `sizes` are rows, key heads, features, values.

    >>> options = {"spec": None, "learned": False, "feature_map": ("elu", "elu"), "asked": "a doctest"}
    >>> checked_state(None, (1, 1, 4, 3), torch.ones(1, 1, 2, 3), **options) is None
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
    shapes, rows = (sizes, sizes[:3]), sizes[0]
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
        expected, got = (
            f"a state of {rotation or 'no rotation'}" + (" with learned frequencies" if learns else "")
            for rotation, learns in ((spec, learned), (state.spec, state.learned))
        )
        raise RopewalkError(
            asked=f"{asked}(state=...)",
            expected=expected,
            got=got,
            do="keys in a state were rotated when they entered, and cannot be rotated again: start with None",
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
    """Raise if `length` implies other frequencies than the state's keys were rotated with.

    Lengths that the host cannot read without a synchronization are not checked.

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
        expected="a length with the frequencies that keys in the state were rotated by",
        got=f"a state of length {shown(kept)}",
        do="give the first call the length that is to come, and every call the same",
    )
