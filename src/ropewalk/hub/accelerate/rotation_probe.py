"""Determines what a model's rotation function computes, by calling it with random numbers.

A function of cos and sin is called in float64, and its results are compared with every rotation that ropewalk supports:
at one size to find the rotation, and at other sizes, such as one token and thousands, to check that it is the same. If
none matches, the reason is returned.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ropewalk.hub.accelerate.source import Sources
from ropewalk.hub.accelerate.straight_code import why_not_straight
from ropewalk.reference.rotate import apply_rope
from ropewalk.spec.rope import PAIRINGS, Pairing

__all__ = ["PACKED", "Rotation", "Table", "is_candidate", "parameters_of", "rotation_of"]

Table = Literal["halves", "neighbours", "single"]
# The argument of functions that receive one table with both sin and cos in its last dimension, as in RoFormer.
PACKED = "sinusoidal_pos"
Packing = Literal["sin, cos", "cos, sin"]
PACKINGS: tuple[Packing, ...] = ("sin, cos", "cos, sin")


class Sizes(NamedTuple):
    """The sizes of one probe. `whole` features are rotated, of a head with `whole` or `part` features."""

    batch: int
    heads: int
    seq: int
    whole: int
    part: int


# Batch, heads and length all differ, so a table that is aligned with the wrong dimension raises an error.
SIZES = Sizes(batch=2, heads=3, seq=5, whole=8, part=12)
# One decoding step; a batch with another head width; a long sequence; more sequences or heads than tokens and features.
# Each size is the largest in one of them.
OTHER_SIZES = (
    Sizes(1, 4, 1, 16, 20),
    Sizes(3, 2, 40, 20, 32),
    Sizes(1, 1, 4100, 4, 6),
    Sizes(70, 1, 2, 4, 6),
    Sizes(1, 70, 2, 4, 6),
)
# Some functions always compute in float32: two products of numbers below 8, and a sum. Another rotation differs by
# about 1.
TOLERANCE = 1e-5
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TABLES: tuple[Table, ...] = ("halves", "neighbours", "single")


@dataclass(frozen=True)
class Rotation:
    """A rotation, as a model's function computes it.

    Attributes:
        pairing: Which features form a pair.
        table: Where the angle of pair i is stored in cos and sin: "halves" at i and i + pairs, as in
            cat((angles, angles)); "neighbours" at 2i and 2i + 1; "single" at i, in tables of half the width.
        conjugate: Whether it rotates in the opposite direction.
        reorders: Whether the result has the first features of all pairs before the second ones.
        reads_all: False if the second half of the table is never read.
        part: Which features are rotated if a head is wider than the table. None if the widths must be equal.
        seq_dims: The supported sequence dimensions, per value of the argument unsqueeze_dim (None if it has none).
        both: Whether the function rotates q and k, or one tensor.
        keeps_dtype: False if cos in float32 promotes queries in bfloat16 to float32.
        packing: Which half of one table [batch, 1, seq, 2 * width] contains sin and which cos. None if they are two
            arguments.
        values: The name of an optional argument for a tensor that is rotated as q and k are. None if there is none.

    >>> def apply_rotary_pos_emb(q, k, cos, sin):
    ...     def rotated(x):
    ...         a, b = x.chunk(2, dim=-1)
    ...         return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]
    ...     return rotated(q), rotated(k)
    >>> rotation = rotation_of(apply_rotary_pos_emb)
    >>> rotation.pairing, rotation.table, rotation.part, rotation.seq_dims
    ('half', 'halves', None, ((None, -2),))
    """

    pairing: Pairing
    table: Table
    conjugate: bool
    reorders: bool
    reads_all: bool
    part: Literal["leading", "trailing"] | None
    seq_dims: tuple[tuple[int | None, int], ...]
    both: bool
    keeps_dtype: bool
    packing: Packing | None = None
    values: str | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the arguments for cos and sin."""
        return ("cos", "sin") if self.packing is None else (PACKED,)

    def __str__(self) -> str:
        words = [f"{self.pairing} pairs" + (f" of the {self.part} features" if self.part else "")]
        words += ["in the opposite direction"] if self.conjugate else []
        words += ["results reordered into halves"] if self.reorders else []
        return ", ".join(words)


def is_candidate(function: object) -> bool:
    """Return whether this is a function of cos and sin, or of one table of both, by the names of its arguments.

    >>> is_candidate(lambda q, k, cos, sin: None), is_candidate(lambda q, angles: None)
    (True, False)
    """
    if not callable(function) or inspect.isclass(function):
        return False
    names = set(parameters_of(function))
    return {"cos", "sin"} <= names or PACKED in names


def parameters_of(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function by name. Empty if the signature is not available.

    >>> list(parameters_of(lambda q, cos: None))
    ['q', 'cos']
    """
    # Some packages replace a function by a module. Its signature is that of its forward.
    function = function.forward if isinstance(function, nn.Module) else function
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def rotation_of(function: Callable[..., object], sources: Sources | None = None) -> Rotation | str:
    """Determine which rotation a function computes.

    Args:
        function: A function of q, cos and sin, or of q, k, cos and sin. cos and sin may be one table.
        sources: If not None, the source of the function is analyzed before it is called: its result must not depend on
            the call. A function that keeps state between calls is never called.

    Returns:
        The rotation, or the reason why it is not supported.

    >>> rotation_of(lambda q, k, cos, sin: (q, k))
    'it computes no rotation of pairs that ropewalk supports'
    """
    names = parameters_of(function)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [n for n, p in names.items() if p.default is p.empty and p.kind not in variadic]
    tables = ("cos", "sin") if {"cos", "sin"} <= set(names) else (PACKED,)
    if tables == (PACKED,):
        inputs = [name for name in required if name != PACKED][:2]
    else:
        both = list(names)[1:2] not in (["cos"], ["sin"])
        inputs = [name for name in list(names)[:4] if name not in tables][: 2 if both else 1]
    others = set(required) - {*inputs, *tables}
    if others:
        return f"it requires {', '.join(sorted(others))} in addition to q, k, cos and sin"
    reason = None if sources is None else why_not_straight(function, [*inputs, *tables], sources)
    if reason is not None:
        return reason
    unsqueeze_dims = (1, 2) if "unsqueeze_dim" in names else (None,)
    forms: list[tuple[Packing | None, int | None, int]] = [(packing, None, -2) for packing in PACKINGS]
    if tables != (PACKED,):
        forms = [(None, axis, dim) for axis in unsqueeze_dims for dim in (-2, -3)]
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        for table in TABLES:
            probes = [_Probe(function, tuple(inputs), table, *form) for form in forms]
            matches = [(probe, kind) for probe in probes for kind in [probe.kind()] if kind is not None]
            kinds = {kind for _, kind in matches}
            if len(kinds) == 1:
                rotation = _rotation([probe for probe, _ in matches], *kinds, both=len(inputs) == 2)
                return _with_values(rotation, [probe for probe, _ in matches], sources)
    return "it computes no rotation of pairs that ropewalk supports"


def _with_values(rotation: Rotation | str, probes: "list[_Probe]", sources: Sources | None) -> Rotation | str:
    """Add the name of an optional argument for values, if values are rotated as q and k are."""
    function, inputs = probes[0].function, probes[0].names
    optional = [n for n, p in parameters_of(function).items() if p.default is None and (n == "v" or "value" in n)]
    if isinstance(rotation, str) or not rotation.both or len(optional) != 1:
        return rotation
    names = (*inputs, *optional)
    if sources is not None and why_not_straight(function, [*names, *rotation.tables], sources) is not None:
        return rotation
    of_three = [
        _Probe(function, names, probe.table, probe.packing, probe.unsqueeze_dim, probe.seq_dim) for probe in probes
    ]
    kind = rotation.pairing, rotation.conjugate, rotation.reorders
    same = _rotation(of_three, kind, both=True) if all(probe.is_kind(kind) for probe in of_three) else None
    return replace(rotation, values=optional[0]) if same == rotation else rotation


def _rotation(probes: "list[_Probe]", kind: "Kind", *, both: bool) -> Rotation | str:
    """Return the rotation of this kind, or a reason if it differs for other sizes or dtypes."""
    first, (pairing, conjugate, reorders) = probes[0], kind
    part, keeps_dtype = first.part(), first.keeps_dtype()
    if keeps_dtype is None:
        return "its results have neither the dtype of q nor the promoted dtype of q and cos"
    for probe in probes:
        for sizes in OTHER_SIZES:
            other = probe.of_sizes(sizes)
            if not other.is_kind(kind) or other.part() != part:
                batch, heads, seq = sizes[:3]
                return f"it computes a different rotation for a batch of {batch} with {heads} heads and {seq} tokens"
        if not probe.of_dtype(torch.float32).is_kind(kind):
            return "it computes different rotations in float32 and in float64"
    return Rotation(
        pairing=pairing,
        table=first.table,
        conjugate=conjugate,
        reorders=reorders,
        reads_all=first.reads_all(),
        part=part,
        seq_dims=tuple((probe.unsqueeze_dim, probe.seq_dim) for probe in probes),
        both=both,
        keeps_dtype=keeps_dtype,
        packing=first.packing,
    )


def _widened(single: Tensor, table: Table) -> Tensor:
    if table == "halves":
        return torch.cat((single, single), dim=-1)
    return single.repeat_interleave(2, dim=-1) if table == "neighbours" else single


Kind = tuple[Pairing, bool, bool]


class _Probe:
    """Calls of one function with one kind of table, one order of dimensions, and inputs of one size and dtype."""

    def __init__(
        self,
        function: Callable[..., Any],
        names: tuple[str, ...],
        table: Table,
        packing: Packing | None,
        unsqueeze_dim: int | None,
        seq_dim: int,
        sizes: Sizes = SIZES,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.function, self.names, self.unsqueeze_dim, self.seq_dim = function, names, unsqueeze_dim, seq_dim
        self.sizes = sizes
        self.table: Table = table
        self.packing: Packing | None = packing
        # A separate generator, so that the random state of a training run does not change.
        options = {"dtype": torch.float64, "device": "cpu", "generator": torch.Generator().manual_seed(0)}
        batch, heads, seq, whole, part = sizes
        angles = torch.rand(batch, seq, whole // 2, **options) * 6
        # cos and sin may contain an amplitude.
        self.cos, self.sin = (1.25 * angles.cos()).to(dtype), (1.25 * angles.sin()).to(dtype)
        # Keys and values have fewer heads than queries, if there is more than one.
        counts = [heads] + [max(heads // 2, 1)] * max(len(names) - 1, 1)
        self.inputs = [torch.randn(batch, n, seq, whole, **options).to(dtype) for n in counts]
        self.not_rotated = [torch.randn(batch, n, seq, part - whole, **options).to(dtype) for n in counts]

    def of_sizes(self, sizes: Sizes) -> "_Probe":
        return _Probe(self.function, self.names, self.table, *self._form(), sizes)

    def of_dtype(self, dtype: torch.dtype) -> "_Probe":
        return _Probe(self.function, self.names, self.table, *self._form(), self.sizes, dtype)

    def _form(self) -> tuple[Packing | None, int | None, int]:
        return self.packing, self.unsqueeze_dim, self.seq_dim

    def _call(self, inputs: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor] | None:
        """Return results with the sequence in dimension -2, or None if the call fails or returns other shapes."""
        arranged = [x if self.seq_dim == -2 else x.transpose(1, 2) for x in inputs]
        kwargs = dict(zip(self.names, arranged, strict=False)) | self._table_arguments(cos, sin)
        kwargs |= {} if self.unsqueeze_dim is None else {"unsqueeze_dim": self.unsqueeze_dim}
        try:
            result: Any = self.function(**kwargs)
        except Exception:
            # An unknown function may raise any exception for tables that it does not support.
            return None
        results = list(result) if isinstance(result, tuple | list) else [result]
        if len(results) != len(self.names) or not all(isinstance(y, Tensor) for y in results):
            return None
        results = [y if self.seq_dim == -2 or y.dim() != 4 else y.transpose(1, 2) for y in results]
        same_shapes = all(y.shape == x.shape for y, x in zip(results, inputs, strict=False))
        return results if same_shapes else None

    def _table_arguments(self, cos: Tensor, sin: Tensor) -> dict[str, Tensor]:
        if self.packing is None:
            return {"cos": cos, "sin": sin}
        return {PACKED: torch.cat((sin, cos) if self.packing == "sin, cos" else (cos, sin), dim=-1).unsqueeze(1)}

    def _tables(self) -> tuple[Tensor, Tensor]:
        return _widened(self.cos, self.table), _widened(self.sin, self.table)

    def kind(self) -> Kind | None:
        """Return pairing, direction and order of the results, or None if they are not those of exactly one rotation."""
        results = self._call(self.inputs, *self._tables())
        if results is None:
            return None
        kinds: Iterator[Kind] = itertools.product(PAIRINGS, (False, True), (False, True))
        matches = [kind for kind in kinds if not (kind[0] == "half" and kind[2]) and self._is(kind, results)]
        return matches[0] if len(matches) == 1 else None

    def is_kind(self, kind: Kind) -> bool:
        """Return whether the results are those of this kind of rotation."""
        results = self._call(self.inputs, *self._tables())
        return results is not None and self._is(kind, results)

    def _is(self, kind: Kind, results: list[Tensor]) -> bool:
        pairing, conjugate, reorders = kind
        sin = -self.sin if conjugate else self.sin
        for x, y in zip(self.inputs, results, strict=False):
            expected = apply_rope(x.double(), self.cos[:, None].double(), sin[:, None].double(), pairing)
            expected = torch.cat((expected[..., ::2], expected[..., 1::2]), dim=-1) if reorders else expected
            if not torch.allclose(y.double(), expected, rtol=0, atol=TOLERANCE):
                return False
        return True

    def reads_all(self) -> bool:
        """Return whether the second half of a wide table is used."""
        if self.table != "halves":
            return self.table != "single"
        cos, sin = self._tables()
        before = self._call(self.inputs, cos, sin)
        pairs = self.sizes.whole // 2
        cos, sin = (torch.cat((x[..., :pairs], x[..., pairs:] + 1), dim=-1) for x in (cos, sin))
        after = self._call(self.inputs, cos, sin)
        return before is None or after is None or not all(map(torch.equal, before, after))

    def part(self) -> Literal["leading", "trailing"] | None:
        """Return which features are rotated if a head is wider than the table."""
        rotated = self._call(self.inputs, *self._tables())
        for part in ("leading", "trailing"):
            order = (lambda x, y: (x, y)) if part == "leading" else (lambda x, y: (y, x))
            wide = [torch.cat(order(*both), dim=-1) for both in zip(self.inputs, self.not_rotated, strict=True)]
            results = self._call(wide, *self._tables())
            if results is None or rotated is None:
                continue
            expected = [torch.cat(order(*both), dim=-1) for both in zip(rotated, self.not_rotated, strict=False)]
            if all(torch.allclose(y, x, rtol=0, atol=TOLERANCE) for y, x in zip(results, expected, strict=True)):
                return part
        return None

    def keeps_dtype(self) -> bool | None:
        """Return whether results have the dtype of the inputs or the promoted one. None if neither holds."""
        rules = {True, False}
        for dtype, wide in itertools.product(DTYPES, DTYPES):
            cos, sin = (table.to(wide) for table in self._tables())
            results = self._call([x.to(dtype) for x in self.inputs], cos, sin)
            dtypes = None if results is None else {y.dtype for y in results}
            fits = {True: dtypes == {dtype}, False: dtypes == {torch.promote_types(dtype, wide)}}
            rules = {rule for rule in rules if fits[rule]}
        return next(iter(rules)) if len(rules) == 1 else None
