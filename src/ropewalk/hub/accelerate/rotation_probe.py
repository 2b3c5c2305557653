"""What a model's rotation function IS: found by calling it on random numbers, not by its name.

A function that takes cos and sin is called in float64 and held against every rotation that ropewalk knows: at one size
to find which it is, and at others, as one token and thousands, to see that it is the same there. One that is none of
them gets a reason.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ropewalk.hub.accelerate.source import Sources
from ropewalk.hub.accelerate.straight_code import why_not_straight
from ropewalk.reference.rotate import apply_rope
from ropewalk.spec.rope import PAIRINGS, Pairing

__all__ = ["Rotation", "Table", "is_candidate", "parameters_of", "rotation_of"]

Table = Literal["halves", "neighbours", "single"]


class Sizes(NamedTuple):
    """The sizes of one probe: 8 features of 12 turn, where only a part does."""

    batch: int
    heads: int
    seq: int
    whole: int
    part: int


# Batch, heads and length, all different: a table that lines up with another dimension does not fit.
SIZES = Sizes(batch=2, heads=3, seq=5, whole=8, part=12)
# A step of decoding, a batch with heads of another width, more tokens than most models are trained with, and more
# sequences and heads than tokens and features: each size is the largest in one of them.
OTHER_SIZES = (
    Sizes(1, 4, 1, 16, 20),
    Sizes(3, 2, 40, 20, 32),
    Sizes(1, 1, 4100, 4, 6),
    Sizes(70, 1, 2, 4, 6),
    Sizes(1, 70, 2, 4, 6),
)
# Some functions work in float32 whatever they are given: two products of numbers below 8, and a sum. Another rotation
# is off by about 1.
TOLERANCE = 1e-5
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TABLES: tuple[Table, ...] = ("halves", "neighbours", "single")


@dataclass(frozen=True)
class Rotation:
    """A rotation, as a model's function computes it.

    `table` says where the angles of pair i stand in cos and sin: "halves" at i and i + pairs, as cat((angles, angles))
    puts them, "neighbours" at 2i and 2i + 1, "single" at i of tables that are half as wide. `reads_all` is False where
    the second half is never read. `conjugate` turns the other way. `reorders` puts the first features of all pairs
    before the second ones. `part` is where features turn if not all do, None where all have to. `seq_dims` are the
    dimensions of the sequence that the function serves, by its argument unsqueeze_dim (None if it has none).
    `keeps_dtype` is False where cos in float32 makes a float32 result of queries in bfloat16.

    >>> def apply_rotary_pos_emb(q, k, cos, sin):
    ...     def turned(x):
    ...         a, b = x.chunk(2, dim=-1)
    ...         return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]
    ...     return turned(q), turned(k)
    >>> found = rotation_of(apply_rotary_pos_emb)
    >>> found.pairing, found.table, found.part, found.seq_dims
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

    def __str__(self) -> str:
        words = [f"{self.pairing} pairs" + (f" of the {self.part} features" if self.part else "")]
        words += ["the other way round"] if self.conjugate else []
        words += ["results sorted into halves"] if self.reorders else []
        return ", ".join(words)


def is_candidate(function: object) -> bool:
    """Whether this is a function of cos and sin, by the names of its arguments.

    >>> is_candidate(lambda q, k, cos, sin: None), is_candidate(lambda q, angles: None)
    (True, False)
    """
    return callable(function) and not inspect.isclass(function) and {"cos", "sin"} <= set(parameters_of(function))


def parameters_of(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The arguments of a function by name; none where it does not say.

    >>> list(parameters_of(lambda q, cos: None))
    ['q', 'cos']
    """
    # Some packages make a module of a function; what it takes is what its forward takes.
    function = function.forward if isinstance(function, nn.Module) else function
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def rotation_of(function: Callable[..., object], sources: Sources | None = None) -> Rotation | str:
    """Which rotation the function computes; a reason in words where it is none that ropewalk knows.

    With `sources`, its code is read before it is called: what it computes must not depend on the call, and code that
    keeps something from one call to the next is not called at all.

    >>> rotation_of(lambda q, k, cos, sin: (q, k))
    'it computes no rotation of pairs that ropewalk knows'
    """
    names = parameters_of(function)
    tensors = [name for name in list(names)[:4] if name not in ("cos", "sin")]
    both = list(names)[1:2] not in (["cos"], ["sin"])
    asked = tensors[: 2 if both else 1]
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {n for n, p in names.items() if p.default is p.empty and p.kind not in free} - {*asked, "cos", "sin"}
    if needed:
        return f"it needs {', '.join(sorted(needed))} besides q, k, cos and sin"
    reason = None if sources is None else why_not_straight(function, asked, sources)
    if reason is not None:
        return reason
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        ways = (1, 2) if "unsqueeze_dim" in names else (None,)
        for table in TABLES:
            probes = [_Probe(function, tuple(asked), table, way, dim) for way in ways for dim in (-2, -3)]
            served = [(probe, kind) for probe in probes for kind in [probe.kind()] if kind is not None]
            kinds = {kind for _, kind in served}
            if len(kinds) == 1:
                return _rotation([probe for probe, _ in served], *kinds, both=both)
    return "it computes no rotation of pairs that ropewalk knows"


def _rotation(served: "list[_Probe]", kind: "Kind", *, both: bool) -> Rotation | str:
    """The rotation of this kind that the probes saw; a reason where it is another one for other sizes or dtypes."""
    first, (pairing, conjugate, reorders) = served[0], kind
    part, keeps_dtype = first.part(), first.keeps_dtype()
    if keeps_dtype is None:
        return "its results have the dtype neither of q nor of q and cos together"
    for probe in served:
        for sizes in OTHER_SIZES:
            other = probe.of_sizes(sizes)
            if not other.is_kind(kind) or other.part() != part:
                batch, heads, seq = sizes[:3]
                return f"it computes another rotation for a batch of {batch} with {heads} heads and {seq} tokens"
        if not probe.of_dtype(torch.float32).is_kind(kind):
            return "it computes another rotation in float32 than in float64"
    return Rotation(
        pairing=pairing,
        table=first.table,
        conjugate=conjugate,
        reorders=reorders,
        reads_all=first.reads_all(),
        part=part,
        seq_dims=tuple((probe.way, probe.seq_dim) for probe in served),
        both=both,
        keeps_dtype=keeps_dtype,
    )


def _widened(single: Tensor, table: Table) -> Tensor:
    if table == "halves":
        return torch.cat((single, single), dim=-1)
    return single.repeat_interleave(2, dim=-1) if table == "neighbours" else single


Kind = tuple[Pairing, bool, bool]


class _Probe:
    """Calls of one function with one kind of table, one memory order, and inputs of one size and dtype."""

    def __init__(
        self,
        function: Callable[..., Any],
        names: tuple[str, ...],
        table: Table,
        way: int | None,
        seq_dim: int,
        sizes: Sizes = SIZES,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.function, self.names, self.way, self.seq_dim = function, names, way, seq_dim
        self.sizes = sizes
        self.table: Table = table
        # A draw of its own: the numbers that a training run would draw next are not touched.
        drawn = {"dtype": torch.float64, "device": "cpu", "generator": torch.Generator().manual_seed(0)}
        batch, heads, seq, whole, part = sizes
        angles = torch.rand(batch, seq, whole // 2, **drawn) * 6
        # A table need not be of one length: an amplitude stands in it.
        self.cos, self.sin = (1.25 * angles.cos()).to(dtype), (1.25 * angles.sin()).to(dtype)
        # Keys have fewer heads than queries, where there is more than one.
        both = heads, max(heads // 2, 1)
        self.inputs = [torch.randn(batch, n, seq, whole, **drawn).to(dtype) for n in both]
        self.still = [torch.randn(batch, n, seq, part - whole, **drawn).to(dtype) for n in both]

    def of_sizes(self, sizes: Sizes) -> "_Probe":
        return _Probe(self.function, self.names, self.table, self.way, self.seq_dim, sizes)

    def of_dtype(self, dtype: torch.dtype) -> "_Probe":
        return _Probe(self.function, self.names, self.table, self.way, self.seq_dim, self.sizes, dtype)

    def _call(self, inputs: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor] | None:
        """Results with the sequence in dimension -2; None where the function does not take these, or gives others."""
        laid = [x if self.seq_dim == -2 else x.transpose(1, 2) for x in inputs]
        given = dict(zip(self.names, laid, strict=False)) | {"cos": cos, "sin": sin}
        given |= {} if self.way is None else {"unsqueeze_dim": self.way}
        try:
            result: Any = self.function(**given)
        except Exception:
            # Whatever a stranger's function says of tables that it was not made for: it does not serve them.
            return None
        results = list(result) if isinstance(result, tuple | list) else [result]
        if len(results) != len(self.names) or not all(isinstance(y, Tensor) for y in results):
            return None
        results = [y if self.seq_dim == -2 or y.dim() != 4 else y.transpose(1, 2) for y in results]
        fit = all(y.shape == x.shape for y, x in zip(results, inputs, strict=False))
        return results if fit else None

    def _tables(self) -> tuple[Tensor, Tensor]:
        return _widened(self.cos, self.table), _widened(self.sin, self.table)

    def kind(self) -> Kind | None:
        """Pairing, direction and order of the results, if all of these are those of a rotation."""
        results = self._call(self.inputs, *self._tables())
        if results is None:
            return None
        kinds: Iterator[Kind] = itertools.product(PAIRINGS, (False, True), (False, True))
        found = [kind for kind in kinds if not (kind[0] == "half" and kind[2]) and self._is(kind, results)]
        return found[0] if len(found) == 1 else None

    def is_kind(self, kind: Kind) -> bool:
        """Whether the results are those of this kind of rotation."""
        results = self._call(self.inputs, *self._tables())
        return results is not None and self._is(kind, results)

    def _is(self, kind: Kind, results: list[Tensor]) -> bool:
        pairing, conjugate, reorders = kind
        sin = -self.sin if conjugate else self.sin
        for x, y in zip(self.inputs, results, strict=False):
            wanted = apply_rope(x.double(), self.cos[:, None].double(), sin[:, None].double(), pairing)
            wanted = torch.cat((wanted[..., ::2], wanted[..., 1::2]), dim=-1) if reorders else wanted
            if not torch.allclose(y.double(), wanted, rtol=0, atol=TOLERANCE):
                return False
        return True

    def reads_all(self) -> bool:
        """Whether what stands past the first half of a wide table is used."""
        if self.table != "halves":
            return self.table != "single"
        cos, sin = self._tables()
        before = self._call(self.inputs, cos, sin)
        pairs = self.sizes.whole // 2
        cos, sin = (torch.cat((x[..., :pairs], x[..., pairs:] + 1), dim=-1) for x in (cos, sin))
        after = self._call(self.inputs, cos, sin)
        return before is None or after is None or not all(map(torch.equal, before, after))

    def part(self) -> Literal["leading", "trailing"] | None:
        """Where features turn when a head is wider than its table says."""
        rotated = self._call(self.inputs, *self._tables())
        for part in ("leading", "trailing"):
            order = (lambda x, y: (x, y)) if part == "leading" else (lambda x, y: (y, x))
            wide = [torch.cat(order(*both), dim=-1) for both in zip(self.inputs, self.still, strict=True)]
            results = self._call(wide, *self._tables())
            if results is None or rotated is None:
                continue
            wanted = [torch.cat(order(*both), dim=-1) for both in zip(rotated, self.still, strict=False)]
            if all(torch.allclose(y, x, rtol=0, atol=TOLERANCE) for y, x in zip(results, wanted, strict=True)):
                return part
        return None

    def keeps_dtype(self) -> bool | None:
        """Whether bfloat16 stays what it is beside tables in float32; None where dtypes go by another rule."""
        rules = {True, False}
        for dtype, wide in itertools.product(DTYPES, DTYPES):
            cos, sin = (table.to(wide) for table in self._tables())
            results = self._call([x.to(dtype) for x in self.inputs], cos, sin)
            found = None if results is None else {y.dtype for y in results}
            fits = {True: found == {dtype}, False: found == {torch.promote_types(dtype, wide)}}
            rules = {rule for rule in rules if fits[rule]}
        return next(iter(rules)) if len(rules) == 1 else None
