"""Random calls of linear attention against the direct sums of `linear_oracle`: outputs, states, positions, gradients.

A case is a chain of calls, each behind the state of the one before: batches and packed sequences with empty ones
anywhere, masks, positions, rows that are reordered. The suite runs a sample; all of it by

    TRITON_INTERPRET=1 PYTHONPATH=tests python -m nn.linear_fuzz 100000 --seed 0 --processes 2
"""

import argparse
import contextlib
import dataclasses
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import torch

import ropewalk as rw
from nn import linear_oracle as oracle
from nn.linear_oracle import Quantity
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.kernels.linear import torch as linear_torch
from ropewalk.kernels.triton_launch import INTERPRETED

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NAMES = (oracle.ELU, oracle.RELU, oracle.SQUARED_RELU, oracle.IDENTITY, oracle.EXP)
IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
LENGTH = 40

if INTERPRETED:
    # Triton's interpreter, with products of bfloat16 that are right.
    importlib.import_module("kernels.triton_device")


def two_sided(x: torch.Tensor) -> torch.Tensor:
    """Features that are twice as wide as x."""
    return torch.cat([x.exp(), (-x).exp()], dim=-1)


# Functions of the caller: the name that a state has of each, and the oracle's.
FUNCTIONS = {two_sided: oracle.TWO_SIDED, torch.exp: oracle.EXP, torch.relu: oracle.RELU}


class DisagreementError(AssertionError):
    """The result of a case differs from the oracle."""


class Case:
    """One chain of calls: the options that they share, and the expected state."""

    def __init__(self, seed: int, index: int, *, triton: float = 0.0) -> None:
        self.random = np.random.default_rng([seed, index])
        self.tally: Counter[str] = Counter()
        draw = self.random
        self.mode = self.pick("default", "torch", "chunks", "device")
        self.dtype = self.pick(*DTYPES, weights=(0.35, 0.3, 0.25, 0.1))
        if INTERPRETED and draw.random() < triton:
            self.mode, self.dtype = "triton", self.pick(torch.float32, torch.bfloat16, torch.float16)
        self.causal = draw.random() < 0.7
        self.kv_heads, group = int(draw.integers(1, 3)), int(draw.integers(1, 4))
        self.heads = self.kv_heads * group
        self.dim, self.v_dim = int(self.pick(2, 3, 4, 6, 8, 16)), int(self.pick(1, 2, 3, 8))
        self.style = self.pick("usual", "centred", "low", "whole")
        self._draw_maps()
        self._draw_rope()
        working = torch.float64 if self.dtype == torch.float64 else torch.float32
        finfo = torch.finfo(working)
        # The kernels for a GPU store operands of products as bfloat16, where values are.
        unit = torch.finfo(torch.bfloat16).eps / 2 if self._stores_bfloat16 else finfo.eps / 2
        self.rounding = oracle.Rounding(unit, finfo.tiny)
        self.rows = int(self.pick(0, 1, 2, 3, weights=(0.06, 0.34, 0.3, 0.3)))
        self.state: rw.LinearState | None = None
        self.sums = [Quantity.exact(np.zeros(shape)) for shape in self._sum_shapes()]
        self.position = [0.0] * self.rows
        self.has_fractions = self.has_keys = False

    @property
    def _stores_bfloat16(self) -> bool:
        return self.mode == "triton" and self.dtype == torch.bfloat16

    def pick(self, *options: Any, weights: tuple[float, ...] | None = None) -> Any:
        return options[int(self.random.choice(len(options), p=weights))]

    def _draw_maps(self) -> None:
        name = self.pick(*NAMES)
        maps: tuple[Any, Any] = (name, name)
        drawn = self.random.random()
        if drawn < 0.1:
            maps = (two_sided, two_sided)
        elif drawn < 0.2:
            maps = (self.pick(*NAMES, torch.exp, torch.relu), self.pick(*NAMES, torch.exp, torch.relu))
        self.feature_map = maps if maps[0] is not maps[1] or self.random.random() < 0.5 else maps[0]
        self.map_names = tuple(one if isinstance(one, str) else f"{one.__name__}()" for one in maps)
        # A function works in the dtype of x.
        coarse = torch.finfo(self.dtype).eps / torch.finfo(torch.float32).eps if self.dtype != torch.float64 else 1.0
        steps = [0.0 if isinstance(one, str) else 4 * coarse for one in maps]
        self.maps = oracle.Maps(*(one if isinstance(one, str) else FUNCTIONS[one] for one in maps), *steps)
        self.width = 2 * self.dim if maps[0] is two_sided else self.dim
        if self.dtype == torch.float16 and callable(maps[0]) | callable(maps[1]):
            self.style = "usual"  # the functions overflow there, which is the caller's concern

    def _draw_rope(self) -> None:
        self.rope, self.rotation, self.options = None, None, {}
        if self.random.random() < 0.2 or self.width % 2:
            return
        base = float(self.pick(1e4, 100.0, 5e5))
        rotary = 2 * int(self.random.integers(1, self.width // 2 + 1)) if self.random.random() < 0.3 else self.width
        trailing = rotary < self.width and self.random.random() < 0.5
        pairing, sign = self.pick("interleaved", "half"), self.pick(1, -1)
        dynamic = rotary > 2 and self.random.random() < 0.15
        frequencies = rw.DynamicNTK(base, 2.0, 16) if dynamic else rw.Plain(base)
        if dynamic:
            self.options = {"length": self.pick(LENGTH, torch.tensor(LENGTH))}
            base = base * (2.0 * LENGTH / 16 - 1.0) ** (rotary / (rotary - 2))
        slices: Any = "trailing" if trailing else "leading"
        spec = rw.RopeSpec(self.width, frequencies, rotary_dim=rotary, pairing=pairing, rotary_slice=slices, sign=sign)
        learned = not dynamic and self.mode != "triton" and self.random.random() < 0.1
        self.rope = rw.RotaryEmbedding(spec, learned=learned)
        self.rotation = oracle.rotation_of(self.width, base, pairing, rotary, trailing, sign)

    def _sum_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.rows, self.kv_heads, self.width, self.v_dim), (self.rows, self.kv_heads, self.width)

    def run(self) -> Counter[str]:
        """All calls of the case; raises the first disagreement."""
        # Sizes may be infinite: there is no bound then.
        with self._patched(), np.errstate(over="ignore", invalid="ignore"):
            for _ in range(int(self.random.integers(1, 5))):
                self._call()
                self.tally["calls"] += 1
                if self.random.random() < 0.25:
                    self._reorder()
        self.tally[self.mode] += 1
        return self.tally

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Enable code paths that few tokens on a CPU do not reach."""
        with contextlib.ExitStack() as stack:
            if self.mode == "chunks":
                stack.enter_context(mock.patch.object(linear_torch, "CHUNK", 3))
                stack.enter_context(mock.patch.object(linear_torch, "BLOCK", 2))
            if self.mode == "device":
                # As if only a device knew the ends.
                stack.enter_context(mock.patch.object(linear_torch, "is_plain", return_value=False))
            if self.mode == "triton":
                stack.enter_context(mock.patch.object(linear_segments, "segment_length", return_value=64))
            yield

    def _numbers(self, *shape: int) -> np.ndarray:
        """Random numbers as the dtype has them."""
        x = self.random.normal(size=shape)
        match self.style:
            case "usual":
                x = 0.5 * x + 0.75
            case "low":
                x = 4 * x - 8
            case "whole":
                x = np.rint(x)
        return torch.tensor(x).to(self.dtype).double().numpy()

    def _counts(self) -> list[int]:
        """How many tokens each packed sequence has: none, first or last or anywhere."""
        counts = [int(self.pick(0, 1, 2, 5, int(self.random.integers(0, 9)))) for _ in range(self.rows)]
        match self.pick("any", "any", "first", "last", "all", "ones"):
            case "first":
                counts[0] = 0
            case "last":
                counts[-1] = 0
            case "all":
                counts = [0] * self.rows
            case "ones":
                counts = [1] * self.rows
        return counts

    def _mask(self, owner: np.ndarray) -> np.ndarray | None:
        """Which keys may be seen, [batch, keys]."""
        if self.random.random() < 0.55:
            return None
        shape = owner.shape
        match self.pick("any", "none", "all", "rows", "prefix", "suffix"):
            case "any":
                return self.random.random(shape) < 0.6
            case "none":
                return np.zeros(shape, bool)
            case "all":
                return np.ones(shape, bool)
            case "rows":
                return (self.random.random(self.rows + 1) < 0.5)[owner]
            case "prefix":
                return np.arange(shape[1]) >= self.random.integers(0, shape[1] + 1, (shape[0], 1))
            case _:
                return np.arange(shape[1]) < self.random.integers(0, shape[1] + 1, (shape[0], 1))

    def _ids(self, batch: int, count: int) -> torch.Tensor:
        """Positions [count], [1, count] or [batch, count]: rising, falling, any; whole or not, negative too."""
        shape = self.pick((count,), (1, count), (batch, count))
        if self.random.random() < 0.25:
            ids = self.random.integers(-200, 200, shape) / 4
            return torch.tensor(ids, dtype=self.pick(torch.float32, torch.float64))
        dtype = self.pick(torch.int64, *IDS)
        low = 0 if torch.iinfo(dtype).min == 0 else -60
        match self.pick("range", "back", "any", "far"):
            case "range":
                ids = np.broadcast_to(np.arange(count) + int(self.random.integers(low, 60)), shape)
            case "back":
                ids = np.broadcast_to(np.arange(count)[::-1], shape)
            case "far" if torch.iinfo(dtype).max > 1 << 20:
                ids = self.random.integers(low, 1 << 17, shape)
            case _:
                ids = self.random.integers(low, 100, shape)
        return torch.tensor(np.array(ids, dtype=np.int64)).to(dtype)

    def _call(self) -> None:
        """One call, and its comparison."""
        packed = self.rows > 0 and self.random.random() < 0.55
        options: dict[str, Any] = dict(self.options)
        if packed:
            batch, counts = 1, self._counts()
            queries = keys = sum(counts) + int(self.pick(0, 0, 1, 3))
            ends = np.concatenate([[0], np.cumsum(counts)])
            options["cu_seqlens"] = torch.tensor(ends).to(self.pick(torch.int64, torch.int32, *IDS))
            owner = np.full((1, keys), -1)
            owner[0, : ends[-1]] = np.repeat(np.arange(self.rows), counts)
            offsets = np.arange(keys) - np.concatenate([ends, ends[-1:]])[owner[0]]
            offsets = offsets[None]
        else:
            batch, keys = self.rows, int(self.pick(0, 1, 1, 2, 3, *self.random.integers(0, 21, 4)))
            queries = keys
            if self.random.random() < 0.25:
                queries = int(self.random.integers(0, keys + 1 if self.causal else 21))
            owner = np.broadcast_to(np.arange(batch)[:, None], (batch, keys))
            offsets = np.broadcast_to(np.arange(keys), (batch, keys))
        q_owner = owner if packed else np.broadcast_to(np.arange(batch)[:, None], (batch, queries))
        if self.mode == "triton" and min(batch, queries, keys) == 0:
            return  # a forced backend refuses tensors without elements
        seen = self._mask(owner)
        if seen is not None:
            options["key_mask"] = torch.tensor(seen)
        seen = np.ones((batch, keys), bool) if seen is None else seen
        starts = np.array([*self.position, 0.0])[owner]
        k_positions = starts + offsets
        q_positions = k_positions[:, keys - queries :] if queries <= keys else np.zeros((batch, queries))
        given: np.ndarray | None = None
        if self.rope is not None and (queries > keys or self.random.random() < 0.4):
            ids = [self._ids(batch, count) for count in (queries, keys)]
            numbers = [np.broadcast_to(x.double().numpy(), (batch, x.shape[-1])) for x in ids]
            kind = self.pick(*(["both"] if queries != keys else ["both", "q"]), *(["k"] if queries <= keys else []))
            if kind in ("both", "q"):
                options["positions"], q_positions = ids[0], numbers[0]
            if kind in ("both", "k"):
                options["k_positions"], k_positions = ids[1], numbers[1]
                q_positions = k_positions[:, keys - queries :] if kind == "k" else q_positions
            else:
                k_positions = q_positions
            key_ids = ids[0] if kind == "q" else ids[1]
            given, self.has_fractions = k_positions, self.has_fractions or (keys > 0 and key_ids.is_floating_point())
        shapes = (batch, self.heads, queries, self.dim), (batch, self.kv_heads, keys, self.dim)
        arrays = [self._numbers(*shape) for shape in (*shapes, (*shapes[1][:3], self.v_dim))]
        inputs = oracle.Inputs(*arrays, q_owner, owner, seen, q_positions, k_positions, self.causal)
        right = oracle.answer(inputs, self.maps, self.rotation, *self.sums, self.rounding)
        tensors = [torch.tensor(x).to(self.dtype) for x in arrays]
        self._spoil(tensors, owner, seen, packed)
        self._run(tensors, options, right)
        self.sums = [right.above, right.below]
        self.has_keys = self.has_keys or keys > 0
        for row in range(self.rows):
            last = np.argwhere((owner == row) & seen)
            if len(last):
                self.position[row] = float((k_positions if given is None else given)[tuple(last[-1])]) + 1
        self._compare_state()

    def _spoil(self, tensors: list[torch.Tensor], owner: np.ndarray, seen: np.ndarray, packed: bool) -> None:
        """Overwrite hidden keys, and tokens that belong to no sequence, with values that must not be used."""
        if self.random.random() >= 0.3:
            return
        bad = float(self.pick(np.nan, np.inf, 1e4, -1e4))
        unseen, none = torch.tensor(~seen | (owner < 0)), torch.tensor(owner < 0)
        for x, where in zip(tensors, (none if packed else None, unseen, unseen), strict=True):
            if where is not None:
                x.masked_fill_(where[:, None, :, None], bad)

    def _run(self, tensors: list[torch.Tensor], options: dict[str, Any], right: oracle.Answer) -> None:
        """The call itself, and how far its output, its sums and their gradients are off."""
        state, backend = self.state, {"torch": "torch", "triton": "triton"}.get(self.mode)
        differentiate = self.random.random() < 0.2
        leaves = list(tensors)
        if differentiate:
            leaves = [x.requires_grad_() for x in tensors]
            if state is not None:
                sums = [x.detach().clone().requires_grad_() for x in (state.above, state.below)]
                state, leaves = dataclasses.replace(state, above=sums[0], below=sums[1]), [*leaves, *sums]
        out, after = rw.linear_attention(
            *tensors, rope=self.rope, feature_map=self.feature_map, causal=self.causal, state=state,
            return_state=True, backend=backend, **options,
        )  # fmt: skip
        self._compare("out", out, right.out, self.dtype)
        for name, ours, theirs in zip(("above", "below"), (after.above, after.below), right[1:3], strict=True):
            self._compare(name, ours, theirs, after.above.dtype)
        if differentiate:
            outputs = [out, after.above, after.below]
            cotangents = [torch.tensor(self.random.normal(size=x.shape)).to(x.dtype) for x in outputs]
            ours = torch.autograd.grad(outputs, leaves, cotangents, materialize_grads=True)
            theirs: Any = right.gradients
            # The kernels for a GPU read the output again as it was rounded.
            stored = torch.finfo(self.dtype).eps / 2 / self.rounding.unit if self.mode == "triton" else 0.0
            theirs = theirs(*(x.double().numpy() for x in cotangents), stored)
            for name, gradient in zip(theirs, ours, strict=False):
                self._compare(f"gradient of {name}", gradient, theirs[name], gradient.dtype)
            self.tally["gradients"] += 1
        self.state = dataclasses.replace(after, above=after.above.detach(), below=after.below.detach())

    def _compare(self, name: str, ours: torch.Tensor, right: Quantity, dtype: torch.dtype) -> None:
        """Raise where `ours` is further off than its arithmetic can be."""
        if tuple(ours.shape) != right.value.shape or ours.dtype != dtype:
            raise DisagreementError(f"{name}: {ours.dtype} {list(ours.shape)}, not {dtype} {list(right.value.shape)}")
        finfo, value = torch.finfo(dtype), ours.detach().double().numpy()
        bound = right.bound(self.rounding)
        bound = bound + 1.01 * finfo.eps / 2 * np.abs(right.value) + np.where(bound > 0, finfo.smallest_normal, 0)
        # Quotients whose denominator may be 0, and values outside the range of the dtype, are not compared.
        known = np.isfinite(bound) & (np.abs(right.value) + bound < float(torch.finfo(dtype).max))
        wrong = known & ~(np.abs(value - right.value) <= bound)
        self.tally["numbers"] += value.size
        self.tally["unknown"] += int((~known).sum())
        if wrong.any():
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise DisagreementError(
                f"{name}{list(where)}: {value[where]!r}, not {right.value[where]!r} within {bound[where]:.3g}; "
                f"{int(wrong.sum())} of {wrong.size}"
            )

    def _compare_state(self, *, told: bool = False) -> None:
        """Raise unless the fields of the state are those that follow from the calls so far.

        A call returns an int or int64 [rows]; only `reorder` keeps one number for all rows as the caller has `told` it.
        """
        assert self.state is not None
        position = self.state.position
        if isinstance(position, int) or (told and position.dim() == 0):
            listed, dtype = [float(position)] * self.rows, torch.int64
        else:
            listed, dtype = position.tolist(), position.dtype
        if listed != self.position:
            raise DisagreementError(f"position: {position}, not {self.position}")
        if not self.has_fractions and dtype != torch.int64:
            raise DisagreementError(f"position: {dtype} of whole numbers")
        spec, learned = (None, False) if self.rope is None else (self.rope.spec, self.rope.log_scale is not None)
        fields = self.state.spec, self.state.learned, self.state.feature_map
        if fields != (spec, learned, self.map_names):
            raise DisagreementError(f"fields of the state: {fields}, not {(spec, learned, self.map_names)}")
        length = LENGTH if self.options and self.has_keys else None
        if (None if self.state.length is None else int(self.state.length)) != length:
            raise DisagreementError(f"length: {self.state.length}, not {length}")

    def _reorder(self) -> None:
        """Other rows, as beam search picks them; a position that all rows share may be told in another way."""
        if self.state is None:
            return
        index = self.random.integers(0, self.rows, int(self.random.integers(0, 4))) if self.rows else np.zeros(0, int)
        self.state = self.state.reorder(torch.tensor(index).to(self.pick(torch.int64, torch.int32)))
        self.rows, self.position = len(index), [self.position[i] for i in index]
        self.sums = [x[index] for x in self.sums]
        self._compare_state(told=True)
        if len(set(self.position)) == 1 and self.position[0] == int(self.position[0]) and self.random.random() < 0.5:
            number, dtype = int(self.position[0]), self.pick(torch.int64, torch.int32)
            # Whole from here on, whatever it was.
            self.state = dataclasses.replace(self.state, position=self.pick(number, torch.tensor(number, dtype=dtype)))
            self.has_fractions = False


def check_many(seed: int, first: int, count: int, triton: float = 0.0) -> tuple[Counter[str], list[str]]:
    """Cases `first` .. `first + count - 1`: what was compared, and the disagreements."""
    tally: Counter[str] = Counter()
    failures: list[str] = []
    for index in range(first, first + count):
        case = Case(seed, index, triton=triton)
        try:
            tally += case.run()
        except Exception as error:  # whatever a call raises is a finding
            shown = f"{case.mode} {case.dtype} {case.map_names} causal={case.causal} {case.style} rows={case.rows}"
            failures.append(f"Case({seed}, {index}, triton={triton}) {shown}: {type(error).__name__}: {error}")
        tally["cases"] += 1
    return tally, failures


def _chunk(arguments: tuple[int, int, int, float]) -> tuple[Counter[str], list[str]]:
    torch.set_num_threads(1)
    return check_many(*arguments)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the requested number of cases, and print how many numbers were compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--triton", type=float, default=0.003, help="share of cases in Triton's interpreter")
    options = parser.parse_args()
    last, size = options.first + options.cases, 250
    work = [(options.seed, i, min(size, last - i), options.triton) for i in range(options.first, last, size)]
    tally: Counter[str] = Counter()
    failed = 0
    with ProcessPoolExecutor(options.processes) as pool:
        for chunks, (chunk_tally, failures) in enumerate(pool.map(_chunk, work), start=1):
            tally += chunk_tally
            failed += len(failures)
            for line in failures:
                _say(line)
            if chunks % 8 == 0:
                _say(f"{tally['cases']} cases, {failed} failures")
    counts = ", ".join(f"{name} {number}" for name, number in sorted(tally.items()))
    _say(f"{counts}; failures {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
