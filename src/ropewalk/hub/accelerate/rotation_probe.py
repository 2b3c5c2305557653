"""What a model's rotation function IS: found by calling it on random numbers, not by its name.

A function that takes cos and sin is called in float64 and held against every rotation that ropewalk knows. One that is
none of them gets a reason. The module that makes cos and sin is called too: a function may read a table as if both
features of a pair had one angle, and only the table can say that they do.
"""

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ropewalk.reference.rotate import apply_rope
from ropewalk.spec.rope import PAIRINGS, Pairing

__all__ = ["Rotation", "Table", "is_candidate", "parameters_of", "rotation_of", "table_widths"]

Table = Literal["halves", "neighbours", "single"]

# Batch, heads and length, all different: a table that lines up with another dimension does not fit. 8 features of 12
# turn, where only a part does.
BATCH, HEADS, SEQ, WHOLE, PART = 2, 3, 5, 8, 12
# Some functions work in float32 whatever they are given. Another rotation is off by about 1.
TOLERANCE = 1e-4
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


def rotation_of(function: Callable[..., object]) -> Rotation | str:
    """Which rotation the function computes; a reason in words where it is none that ropewalk knows.

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
    with torch.inference_mode(False), torch.no_grad():
        ways = (1, 2) if "unsqueeze_dim" in names else (None,)
        for table in TABLES:
            probes = [_Probe(function, tuple(asked), table, way, dim) for way in ways for dim in (-2, -3)]
            served = [(probe, kind) for probe in probes for kind in [probe.kind()] if kind is not None]
            kinds = {kind for _, kind in served}
            if len(kinds) == 1:
                first, (pairing, conjugate, reorders) = served[0]
                return Rotation(
                    pairing=pairing,
                    table=table,
                    conjugate=conjugate,
                    reorders=reorders,
                    reads_all=first.reads_all(),
                    part=first.part(),
                    seq_dims=tuple((probe.way, probe.seq_dim) for probe, _ in served),
                    both=both,
                    keeps_dtype=first.keeps_dtype(),
                )
    return "it computes no rotation of pairs that ropewalk knows"


def _widened(single: Tensor, table: Table) -> Tensor:
    if table == "halves":
        return torch.cat((single, single), dim=-1)
    return single.repeat_interleave(2, dim=-1) if table == "neighbours" else single


Kind = tuple[Pairing, bool, bool]


class _Probe:
    """Calls of one function with one kind of table and one memory order."""

    def __init__(
        self, function: Callable[..., Any], names: tuple[str, ...], table: Table, way: int | None, seq_dim: int
    ) -> None:
        self.function, self.names, self.way, self.seq_dim = function, names, way, seq_dim
        self.table: Table = table
        # A draw of its own: the numbers that a training run would draw next are not touched.
        drawn = {"dtype": torch.float64, "generator": torch.Generator().manual_seed(0)}
        self.angles = torch.rand(BATCH, SEQ, WHOLE // 2, **drawn) * 6
        # A table need not be of one length: an amplitude stands in it.
        self.cos, self.sin = 1.25 * self.angles.cos(), 1.25 * self.angles.sin()
        # Keys have fewer heads than queries.
        self.inputs = [torch.randn(BATCH, heads, SEQ, WHOLE, **drawn) for heads in (HEADS, 1)]
        self.still = [torch.randn(BATCH, heads, SEQ, PART - WHOLE, **drawn) for heads in (HEADS, 1)]

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

    def _is(self, kind: Kind, results: list[Tensor]) -> bool:
        pairing, conjugate, reorders = kind
        sin = -self.sin if conjugate else self.sin
        for x, y in zip(self.inputs, results, strict=False):
            wanted = apply_rope(x, self.cos[:, None], sin[:, None], pairing)
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
        cos, sin = (torch.cat((x[..., : WHOLE // 2], x[..., WHOLE // 2 :] + 1), dim=-1) for x in (cos, sin))
        after = self._call(self.inputs, cos, sin)
        return before is None or after is None or not all(map(torch.equal, before, after))

    def part(self) -> Literal["leading", "trailing"] | None:
        """Where features turn when a head is wider than its table says."""
        turned = self._call(self.inputs, *self._tables())
        for part in ("leading", "trailing"):
            order = (lambda x, y: (x, y)) if part == "leading" else (lambda x, y: (y, x))
            wide = [torch.cat(order(*both), dim=-1) for both in zip(self.inputs, self.still, strict=True)]
            results = self._call(wide, *self._tables())
            if results is None or turned is None:
                continue
            wanted = [torch.cat(order(*both), dim=-1) for both in zip(turned, self.still, strict=False)]
            if all(torch.allclose(y, x, rtol=0, atol=TOLERANCE) for y, x in zip(results, wanted, strict=True)):
                return part
        return None

    def keeps_dtype(self) -> bool:
        """Whether bfloat16 stays what it is beside tables in float32."""
        cos, sin = (table.float() for table in self._tables())
        results = self._call([x.bfloat16() for x in self.inputs], cos, sin)
        return results is not None and all(y.dtype == torch.bfloat16 for y in results)


def table_widths(module: nn.Module, table: Table) -> frozenset[int] | str:
    """How wide the cos and sin are that the module makes, if both features of each pair have one angle in them.

    It is asked for positions on one axis and on several, in a copy, so that nothing it remembers changes.

    >>> from transformers import LlamaConfig
    >>> from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    >>> small = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    >>> table_widths(small, "halves"), table_widths(small, "neighbours")
    (frozenset({16}), 'LlamaRotaryEmbedding gives the features of a pair different angles')
    """
    name, widths = type(module).__name__, set()
    for cos, sin in _made(module):
        for made in (cos, sin):
            pairs = made.shape[-1] // 2
            first, second = (
                (made[..., :pairs], made[..., pairs:]) if table == "halves" else (made[..., ::2], made[..., 1::2])
            )
            if first.shape != second.shape or not torch.equal(first, second):
                return f"{name} gives the features of a pair different angles"
        widths.add(cos.shape[-1])
    return frozenset(widths) if widths else f"the cos and sin of {name} could not be looked at"


def _made(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """The cos and sin, [1, seq, width], that the module makes of positions: one axis, then 2, 3 and 4 that differ."""
    names = parameters_of(module.forward)
    if len(names) < 2 or any(buffer.is_meta for buffer in module.buffers()):
        return
    config = getattr(module, "config", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or [])) if "layer_type" in names else []
    with torch.inference_mode(False), torch.no_grad():
        asked = copy.deepcopy(module).cpu()
        # Axes that differ everywhere but at the start, as an image among words has them.
        numbers = torch.tensor([[0, 1, 2, 5, 9], [0, 3, 1, 4, 8], [0, 2, 7, 6, 3], [0, 4, 3, 1, 6]])
        for positions in (numbers[:1], *(numbers[:axes, None] for axes in (2, 3, 4))):
            for kind in kinds or [None]:
                more = {} if kind is None else {"layer_type": kind}
                try:
                    result = asked(torch.zeros(1, numbers.shape[-1], 4), positions, **more)
                except Exception:
                    # It knows no such number of axes, or no such kind of layer.
                    continue
                tables = isinstance(result, tuple) and len(result) == 2 and all(isinstance(x, Tensor) for x in result)
                if tables and result[0].shape == result[1].shape and tuple(result[0].shape[:2]) == (1, len(numbers[0])):
                    yield result
