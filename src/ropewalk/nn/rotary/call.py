"""Checks of the arguments of a rotation: tensors, positions, offsets, lengths, roles, and tables of cos and sin."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn, TypedDict, TypeGuard

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_int, require_choice, shown, warn
from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.torch_internals import is_plain
from ropewalk.nn.memory_layout import check_strided, is_strided
from ropewalk.nn.position_checks import as_signed, can_read_values, check_ends, check_finite, check_ids, check_positions
from ropewalk.nn.positions import packed_positions, range_positions
from ropewalk.spec.axes import Axes
from ropewalk.spec.rope import RopeSpec
from ropewalk.spec.xpos import XPos

__all__ = [
    "Angles",
    "Limits",
    "PairOptions",
    "Placement",
    "Role",
    "SingleOptions",
    "check_same_length",
    "check_tensors",
    "checked_length",
    "checked_offset",
    "checked_role",
    "is_start",
    "warn_of_layout",
]

# cos and sin, each [seq, pairs], [batch, seq, pairs] or [batch, heads, seq, pairs].
Angles = tuple[Tensor, Tensor]

# Whether a tensor contains queries or keys, for specs that treat them differently.
Role = Literal["q", "k"]


class _Options(TypedDict, total=False):
    positions: Tensor | None
    offset: int | Tensor | None
    cu_seqlens: Tensor | None
    angles: Angles | None
    length: int | Tensor | None


class SingleOptions(_Options, total=False):
    """Keyword arguments of a call with one tensor, for type checkers.

    >>> "role" in SingleOptions.__annotations__
    True
    """

    role: Role | None


class PairOptions(_Options, total=False):
    """Keyword arguments of a call with queries and keys, for type checkers.

    >>> "k_positions" in PairOptions.__annotations__
    True
    """

    k_positions: Tensor | None


@dataclass(frozen=True)
class Limits:
    """Limits on positions.

    Attributes:
        context_length: Number of positions that are allowed, from 0 on; None for no limit.
        xpos: The xPos of the spec, which limits positions to its length; None if there is none.
        check_ids: Whether ids on a GPU are checked too.

    >>> Limits(8, None, False).check_range(0, 8)
    """

    context_length: int | None
    xpos: XPos | None
    check_ids: bool

    def check_range(self, start: int, seq: int, call: str = "rope") -> None:
        """Raise if one of the positions start .. start+seq-1 is past a limit.

        >>> try:
        ...     Limits(8, None, False).check_range(7, 2)
        ... except RopewalkError as error:
        ...     error.got
        'position 8'
        """
        if seq:
            self._check_last(start + seq - 1, call)
            self._check_first(start, call)

    def check_values(self, positions: Tensor, asked: str, call: str = "rope") -> None:
        """Raise if a position is not finite or past a limit. Values that the host must not read are not checked.

        >>> Limits(None, None, False).check_values(torch.arange(3), "a doctest")
        """
        if not self.can_read_values(positions):
            return
        check_finite(positions, asked=asked)
        if positions.numel() and (self.context_length is not None or self.xpos is not None):
            self._check_last(int(positions.max()), call)
            self._check_first(int(positions.min()), call)

    def can_read_values(self, ids: Tensor) -> bool:
        """Whether the values of ids may be read: not under torch.compile, and on a GPU only if `check_ids` is set.

        >>> Limits(None, None, False).can_read_values(torch.arange(2))
        True
        """
        if not is_plain(ids) or not (ids.device.type == "cpu" or self.check_ids):
            return False
        return not (ids.is_cuda and torch.cuda.is_current_stream_capturing())

    def _check_last(self, last: int, call: str) -> None:
        for limit in (self.context_length, None if self.xpos is None else self.xpos.length):
            if limit is not None and last >= limit:
                raise RopewalkError(
                    asked=f"{call}(...) with context_length={limit}",
                    expected=f"positions below {limit}",
                    got=f"position {last}",
                    do="shorten the input, or increase context_length if the model supports these positions",
                )

    def _check_first(self, first: int, call: str) -> None:
        if self.xpos is not None and first < -self.xpos.length:
            raise RopewalkError(
                asked=f"{call}(...) with {self.xpos}",
                expected=f"positions from {-self.xpos.length} on",
                got=f"position {first}",
                do="shift all positions by a constant: scores depend on distances only",
            )


class Placement(NamedTuple):
    """The arguments of a call that specify the positions of its tokens. The default is 0 .. seq-1.

    Built once from the arguments of a call and passed down. At most one of positions, offset, cu_seqlens and angles is
    set, except cu_seqlens with offset. `k_positions` is set with positions, or alone.

    Attributes:
        positions: [seq] or [batch, seq]; [axes, seq] or [axes, batch, seq] for a spec with axes.
        k_positions: The same for keys.
        offset: Position of the first token: an int, or a tensor [batch].
        cu_seqlens: Cumulated lengths of packed sequences [sequences + 1].
        angles: cos and sin, instead of positions.
        length: Length of the sequences, for rules that depend on it: an int, or a tensor [batch].
        role: "q" or "k" for a single tensor, for specs that treat queries and keys differently.
        name: The argument that `positions` came from, for errors.
        call: The function that received the arguments, for errors.

    >>> Placement(offset=7).is_fresh(), Placement(length=9).is_fresh()
    (False, True)
    """

    positions: Tensor | None = None
    k_positions: Tensor | None = None
    offset: int | Tensor | None = None
    cu_seqlens: Tensor | None = None
    angles: Angles | None = None
    length: int | Tensor | None = None
    role: Role | None = None
    name: str = "positions"
    call: str = "rope"

    def is_fresh(self) -> bool:
        """Whether positions are 0 .. seq-1 because no argument specifies them."""
        return self.positions is None and self.offset is None and self.cu_seqlens is None and self.angles is None

    def of_keys(self) -> "Placement":
        """The placement of the keys: `k_positions` if it is set, else that of the queries.

        >>> Placement(positions=torch.arange(2), k_positions=torch.arange(3)).of_keys().positions.tolist()
        [0, 1, 2]
        """
        if self.k_positions is None:
            return self._replace(role="k")
        return Placement(self.k_positions, length=self.length, role="k", name="k_positions", call=self.call)

    def check(self, k: Tensor | None) -> None:
        """Raise if the arguments contradict each other, or if `k_positions` is set without keys.

        Args:
            k: Keys, or None for a call with one tensor.

        Raises:
            RopewalkError: If two arguments specify the positions of q, or if `k_positions` is set without keys or with
                another argument than `positions`.

        >>> Placement(positions=torch.arange(2)).check(None)
        """
        count = (self.positions is not None) + (self.offset is not None)
        count += (self.cu_seqlens is not None) + (self.angles is not None)
        if count <= 1 and self.k_positions is None:
            return
        names = ("positions", "offset", "cu_seqlens", "angles")
        named = [name for name in names if getattr(self, name) is not None]
        if named == ["offset", "cu_seqlens"] and self.k_positions is None:
            return
        if len(named) <= 1 and (self.k_positions is None or (k is not None and named in ([], ["positions"]))):
            return
        named += [] if self.k_positions is None else ["k_positions"]
        raise RopewalkError(
            asked=f"{self.call}(q, ...)" if k is None else f"{self.call}(q, k, ...)",
            expected="one of positions, offset, cu_seqlens and angles, or cu_seqlens with offset; k_positions with k, "
            "together with positions or alone",
            got=", ".join(named),
            do="add the offset to the positions; for angles, pass the positions to rope.at()",
        )

    def positions_or_start(
        self, x: Tensor, seq_dim: int, batched: bool, axes: Axes | None, limits: Limits
    ) -> int | Tensor:
        """Check the arguments, and return the positions of x, or the start of a range as an int.

        Args:
            x: Tensor to rotate.
            seq_dim: Dimension of the sequence.
            batched: Whether the first dimension of x is the batch.
            axes: The axes of the spec, or None.
            limits: Limits on the positions.

        Returns:
            Positions [seq] or [batch, seq], with the axes first for a spec with axes; or an int n for n .. n+seq-1.

        Raises:
            RopewalkError: If the positions do not match x, or are past a limit.

        >>> Placement(offset=7).positions_or_start(torch.ones(3, 4), -2, False, None, Limits(None, None, False))
        7
        """
        seq = x.shape[seq_dim]
        if self.positions is not None:
            asked, count = f"{self.call}({self.name}=...)", 1 if axes is None else axes.count
            check_positions(self.positions, x, asked=asked, seq_dim=seq_dim, batched=batched, axes=count)
            positions = as_signed(self.positions)
        elif axes is not None:
            raise RopewalkError(
                asked=f"{self.call}(...) over {axes.count} position axes",
                expected=f"positions [{axes.count}, seq] or [{axes.count}, batch, seq]",
                got="no positions",
                do="create them with ropewalk.positions: text_positions, grid_positions, mrope_positions",
            )
        elif self.cu_seqlens is not None:
            ends, asked = self.cu_seqlens, f"{self.call}(cu_seqlens=...)"
            check_ids(ends, asked=asked, shape="[sequences + 1]", dims=(1,), whole=True)
            if limits.can_read_values(ends):
                check_ends(ends, seq, asked=asked)
            start = None if self.offset is None else checked_offset(self.offset, x, ends.shape[0] - 1, "offset")
            positions = packed_positions(ends.to(x.device), seq, start)
        else:
            rows = x.shape[0] if batched else None
            start = 0 if self.offset is None else checked_offset(self.offset, x, rows, "offset")
            if not isinstance(start, Tensor):
                return start
            positions, asked = range_positions(seq, start, x.device), f"{self.call}(offset=...)"
        limits.check_values(positions, asked, self.call)
        return positions


# Sums of two such offsets and a length fit int64.
_MOST_OFFSET = (1 << 62) - 1


def checked_offset(offset: object, x: Tensor, rows: int | None, name: str) -> int | Tensor:
    """Return a valid offset: an int, or int64 with one number or one per sequence.

    Args:
        offset: The argument to check.
        x: The tensor to rotate, for the error.
        rows: Number of sequences of x; None if x has no batch.
        name: Name of the argument, for the error.

    Returns:
        An int, or an int64 tensor [], [1] or [rows].

    Raises:
        RopewalkError: If the offset is not whole, too large, or of another shape.

    >>> checked_offset(7, torch.ones(2, 3, 4), 2, "offset")
    7
    """
    check_strided(offset, asked=f"{name}=...")
    if isinstance(offset, Tensor):
        whole = not offset.is_floating_point() and not offset.is_complex() and offset.dtype != torch.bool
        one_each = offset.dim() == 1 and rows is not None and offset.shape[0] in (1, rows)
        if whole and (offset.dim() == 0 or one_each):
            readable = can_read_values(offset)
            if readable and all(abs(number) <= _MOST_OFFSET for number in offset.flatten().tolist()):
                return offset.to(torch.int64)
            if not readable and offset.dtype != torch.uint64:
                return offset.to(torch.int64)
        got = f"{offset.dtype} {list(offset.shape)}"
        if whole and can_read_values(offset) and offset.numel() and (one_each or offset.dim() == 0):
            got += f" with {max(offset.flatten().tolist(), key=abs)}"
    elif isinstance(offset, torch.SymInt):
        return offset  # pyright: ignore[reportReturnType]  # behaves as an int
    else:
        number = as_int(offset)
        if number is not None and abs(number) <= _MOST_OFFSET:
            return number
        got = shown(offset)
    raise RopewalkError(
        asked=f"{name}=... for a tensor of shape {list(x.shape)}",
        expected="an int of less than 63 bits"
        + ("" if rows is None else f", or whole numbers [{rows}], one per sequence"),
        got=got,
        do="wrap them: torch.tensor(...)"
        if isinstance(offset, list | tuple)
        else "pass one number, or one per sequence"
        if name == "by"
        else "rotate with positions= for anything else",
    )


def checked_length(
    length: object, spec: RopeSpec, rows: int | None, fresh: int | None, name: str = "length", call: str = "rope"
) -> int | Tensor | None:
    """Return the length of the sequences if the spec depends on it, else None.

    Args:
        length: The argument to check: an int, or whole numbers [rows] with one length per sequence.
        spec: The spec of the rotation.
        rows: Number of sequences; None if there is no batch.
        fresh: Number of tokens if they are a whole sequence from position 0 on. It is the default length then.
        name: Name of the argument, for the error.
        call: The function, as errors name it.

    Returns:
        An int, a tensor [], [1] or [rows], or None if the spec does not depend on the length.

    Raises:
        RopewalkError: If the length is missing or invalid.

    >>> checked_length(None, RopeSpec(4), None, 3) is None
    True
    """
    if length is None:
        if not spec.varies or fresh is not None:
            return fresh if spec.varies else None
        raise RopewalkError(
            asked=f"{call}(...) with {type(spec.frequencies).__name__}, whose frequencies depend on the length",
            expected=f"{name}=, an int or one per sequence [batch], unless tokens are one sequence from position 0 on",
            got=f"no {name}",
            do="pass the length that the keys in the cache were rotated with; rope.retune changes it",
        )
    if isinstance(length, Tensor):
        whole = not length.is_floating_point() and not length.is_complex() and length.dtype != torch.bool
        if whole and (length.dim() == 0 or (length.dim() == 1 and rows is not None and len(length) in (1, rows))):
            return length if spec.varies else None
        got = f"{length.dtype} {list(length.shape)}"
    elif isinstance(length, torch.SymInt):
        return length if spec.varies else None  # pyright: ignore[reportReturnType]  # behaves as an int
    else:
        number = as_int(length)
        if number is not None and 1 <= number < 1 << 62:
            return number if spec.varies else None
        got = shown(length)
    raise RopewalkError(
        asked=f"{call}(..., {name}=...)",
        expected="an int of at least 1" + ("" if rows is None else f", or whole numbers [{rows}], one per sequence"),
        got=got,
        do="pass the number of positions of the sequence",
    )


def checked_role(role: object, spec: RopeSpec, call: str = "rope") -> Role | None:
    """Return the role of a tensor, "q" or "k"; None if the spec treats queries and keys alike.

    >>> checked_role("k", RopeSpec(4)) is None
    True
    """
    if role is not None:
        require_choice(role, ("q", "k"), asked=f"{call}(..., role=...)")
    if spec.same_for_both:
        return None
    if role is None:
        raise RopewalkError(
            asked=f"{call}(x) with a spec that treats queries and keys differently (xpos or query_temperature)",
            expected='role="q" for queries or role="k" for keys, or both tensors: rope(q, k)',
            got="one tensor without a role",
            do='pass its role: rope(k, role="k")',
        )
    return role  # pyright: ignore[reportReturnType]  # require_choice checked it


def is_start(offset: object) -> TypeGuard[int | None]:
    """Whether `offset` is None or an int in the accepted range: the common case, checked quickly.

    >>> is_start(None), is_start(7), is_start(torch.tensor(7))
    (True, True, False)
    """
    return offset is None or (type(offset) is int and -_MOST_OFFSET <= offset <= _MOST_OFFSET)


def check_tensors(
    q: Tensor, k: Tensor | None, head_dim: int, seq_dim: int, heads: int | None, call: str = "rope"
) -> None:
    """Raise unless q and k can be rotated. The check is kept short, because decoding is limited by host time.

    Args:
        q: Queries.
        k: Keys, or None.
        head_dim: Required last dimension.
        seq_dim: Dimension of the sequence.
        heads: Required number of heads; None for any.
        call: The function, as errors name it.

    Raises:
        RopewalkError: If a shape or dtype is invalid, or if q and k differ in dtype or device.

    >>> check_tensors(torch.ones(3, 4), None, 4, -2, None)
    """
    if not _fits(q, head_dim, seq_dim, heads):
        _raise_unfit("q", q, head_dim, seq_dim, heads, call)
    if k is None:
        return
    if not (isinstance(k, Tensor) and k.is_floating_point()):
        raise RopewalkError(
            asked=f"{call}(q, k)",
            expected="keys as the second argument: a floating-point tensor",
            got=f"{k.dtype} of shape {list(k.shape)}" if isinstance(k, Tensor) else shown(k),
            do="pass position ids as rope(q, positions=ids), and a start position as rope(q, offset=n)"
            if isinstance(k, Tensor | int)
            else "pass a torch.Tensor of float32, float64, bfloat16 or float16",
        )
    if not _fits(k, head_dim, seq_dim, heads):
        _raise_unfit("k", k, head_dim, seq_dim, heads, call)
    if q.dtype != k.dtype or q.device != k.device:
        raise RopewalkError(
            asked=f"{call}(q, k)",
            expected="q and k of one dtype, on one device",
            got=f"{q.dtype} on {q.device}, {k.dtype} on {k.device}",
            do="cast or move one of them, or rotate them in two calls",
        )


def check_same_length(q: Tensor, k: Tensor, seq_dim: int, call: str = "rope") -> None:
    """Raise unless there are as many keys as queries.

    >>> check_same_length(torch.ones(3, 4), torch.ones(3, 4), -2)
    """
    if q.shape[seq_dim] != k.shape[seq_dim]:
        raise RopewalkError(
            asked=f"{call}(q, k)",
            expected="as many keys as queries, or k_positions",
            got=f"{q.shape[seq_dim]} queries and {k.shape[seq_dim]} keys",
            do="for [..., seq, heads, head_dim] create the module with seq_dim=-3; else pass k_positions to rope(q, k)",
        )


# More heads than any model has.
_MOST_HEADS = 256


def warn_of_layout(q: Tensor, k: Tensor, seq_dim: int, call: str) -> None:
    """Warn if q and k look like [batch, seq, heads, head_dim] where [batch, heads, seq, head_dim] is expected, or back.

    Both have the same number of dimensions, so this is known only if one of them is larger than any number of heads.

    >>> warn_of_layout(torch.ones(1, 8, 300, 4), torch.ones(1, 8, 300, 4), -2, "rope")
    """
    if q.dim() != 4 or k.dim() != 4:
        return
    heads, seq = (q.shape[1], q.shape[2]) if seq_dim == -2 else (q.shape[2], q.shape[1])
    if heads <= _MOST_HEADS or seq > _MOST_HEADS or heads != k.shape[1 if seq_dim == -2 else 2]:
        return
    shapes = {-2: "[batch, heads, seq, head_dim]", -3: "[batch, seq, heads, head_dim]"}
    warn(
        asked=f"{call}(q, k) with seq_dim={seq_dim}",
        expected=f"q and k {shapes[seq_dim]}",
        got=f"shape {list(q.shape)}: {heads} heads of {seq} tokens",
        do=f"for {shapes[-5 - seq_dim]} create the module with seq_dim={-5 - seq_dim}, or transpose q and k",
    )


def _fits(x: Tensor, head_dim: int, seq_dim: int, heads: int | None) -> bool:
    if not isinstance(x, Tensor) or not is_strided(x):
        return False
    shape = x.shape
    fits = x.dtype in FLOATS and len(shape) >= -seq_dim and shape[-1] == head_dim
    if heads is None or not fits:
        return fits
    return len(shape) in (3, 4) and shape[-3 if seq_dim == -2 else -2] == heads


def _raise_unfit(name: str, x: Tensor, head_dim: int, seq_dim: int, heads: int | None, call: str) -> NoReturn:
    check_strided(x, asked=f"{call}({name})")
    if _fits(x, head_dim, seq_dim, None):
        raise RopewalkError(
            asked=f"{call}({name}) with different frequencies for each of {heads} heads",
            expected=f"{heads} heads in a tensor of 3 or 4 dimensions, for queries and keys",
            got=f"shape {list(x.shape)} with seq_dim={seq_dim}",
            do="frequencies per head cannot be shared by grouped keys: repeat the key heads first",
        )
    shape = "[..., seq, head_dim]" if seq_dim == -2 else "[..., seq, heads, head_dim]"
    raise RopewalkError(
        asked=f"{call}({name}) with head_dim={head_dim}, seq_dim={seq_dim}",
        expected=f"a floating-point tensor {shape} whose last dimension is {head_dim}",
        got=f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else shown(x),
        do="split the heads first, or create the module with the head_dim and the seq_dim of the tensor"
        if isinstance(x, Tensor) and x.dtype in FLOATS
        else "pass a torch.Tensor of float32, float64, bfloat16 or float16",
    )
