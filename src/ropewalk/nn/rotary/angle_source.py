"""AngleSource: cos and sin of a spec, at any positions and for any call. RotaryEmbedding owns one."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.angles.arithmetic import Constants, TorchArithmetic
from ropewalk.kernels.constructors import full, home, ones_like, placed
from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.torch_internals import current_stream, fake_mode, is_plain
from ropewalk.kernels.types import Tables
from ropewalk.nn.positions import range_positions
from ropewalk.nn.rotary.call import (
    Angles,
    Limits,
    Role,
    Where,
    check_angles,
    check_same_length,
    check_tensors,
    checked_length,
    checked_role,
    is_start,
)
from ropewalk.nn.rotary.range_cache import RangeCache
from ropewalk.nn.rotary.spec_numbers import amplitude_at, dtype_of, numbers_of, table_of
from ropewalk.ops import cos_sin
from ropewalk.spec.rope import RopeSpec

__all__ = ["AngleSource", "Part", "angle_device"]

_NO_LIMITS = Limits(None, None, False)


class Part(NamedTuple):
    """What is rotated together: one or two tensors, their cos and sin, and a factor for features that are not rotated.

    >>> Part(torch.ones(1, 2), None, Tables(torch.ones(1, 1), torch.ones(1, 1)), None).k is None
    True
    """

    q: Tensor
    k: Tensor | None
    tables: Tables
    temperature: Tensor | None


class AngleSource:
    """The frequencies of a spec as tensors, and cos and sin at any positions.

    The frequencies are plain attributes that follow the device (`to`) and nothing else that is done to a module. The
    radix table stays on the CPU, where it is read. A parameter by which frequencies are learned belongs to the module,
    and comes as an argument: `log_scale`.

    >>> cos, sin = AngleSource(RopeSpec(4)).at(torch.tensor([0, 2]), torch.float32)
    >>> [round(c, 4) for c in cos[1].tolist()]  # cos 2, cos 0.02
    [-0.4161, 0.9998]
    """

    def __init__(
        self,
        spec: RopeSpec,
        limits: Limits = _NO_LIMITS,
        *,
        seq_dim: int = -2,
        learned: bool = False,
        backend: str | None = None,
    ) -> None:
        self.spec: RopeSpec = spec
        self.limits: Limits = limits
        self.seq_dim: int = seq_dim
        self.backend: str | None = backend
        # Whether queries and keys have the same cos and sin at the same positions.
        self.same_for_both: bool = spec.same_for_both
        # Whether a call for a plain range may go straight to the kernel, with what the cache holds.
        self.plain_ranges: bool = spec.same_for_both and not spec.varies and spec.axes is None
        # Whether positions on the CPU are looked up in a radix table.
        exact = spec.angles == "exact" and not spec.varies and spec.axes is None
        self._has_table: bool = exact and not learned
        numbers = numbers_of(spec, home())
        self.inv_freq: Tensor = numbers.inv_freq
        self.amplitude: Tensor = numbers.amplitude
        self.axes: Tensor | None = numbers.axes
        # Whether cos and sin have no factor at any length, apart from that of xPos.
        self.keeps_norms: bool = spec.query_temperature is None and all(
            amplitude_at(spec, length) == 1 for length in ((None, 1 << 30) if spec.varies else (None,))
        )
        self._constants: tuple[Constants, ...] = numbers.constants
        # How many heads there must be, where heads have frequencies of their own.
        self.heads: int | None = numbers.inv_freq.shape[0] if numbers.inv_freq.dim() == 2 else None
        # A compiler forms the angles; what it makes a module of gets a table when the module is called without it.
        self._table: Tensor | None = table_of(spec) if self._has_table and not torch.compiler.is_compiling() else None
        self.ranges: RangeCache = RangeCache(backend)

    @property
    def pairs(self) -> int:
        """How many pairs of features are rotated."""
        return self.inv_freq.shape[-1]

    def __getstate__(self) -> dict[str, Any]:
        # The table is large and follows from the spec.
        return self.__dict__ | {"_table": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._table = table_of(self.spec) if self._has_table else None

    def __deepcopy__(self, _: dict[int, object]) -> "AngleSource":
        # Nobody writes to what it holds: a copy may hold the same, apart from what each call may replace.
        copied = object.__new__(AngleSource)
        copied.__dict__.update(self.__dict__ | {"ranges": RangeCache(self.backend)})
        return copied

    def to(self, device: torch.device) -> None:
        """Moves the frequencies to a device; to one without float64 they are not moved.

        >>> AngleSource(RopeSpec(4)).to(torch.device("meta"))
        """
        # Fake tensors may be on a device that does not exist. The numbers are real, and are moved by each call.
        if device.type not in ("meta", "mps") and fake_mode() is None:
            self.inv_freq, self.amplitude = self.inv_freq.to(device), self.amplitude.to(device)
            self.axes = None if self.axes is None else self.axes.to(device)
            self._constants = tuple(tuple((key, x.to(device)) for key, x in made) for made in self._constants)

    def frequencies(self, log_scale: Tensor | None) -> Tensor:
        """The frequencies, scaled by exp(log_scale) where they are learned.

        >>> AngleSource(RopeSpec(4, sign=-1)).frequencies(torch.zeros(2)).tolist()
        [-1.0, -0.01]
        """
        return _scaled(self.inv_freq, log_scale)

    def rule_at(
        self, length: int | Tensor | None, device: torch.device, log_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Frequencies and amplitude for sequences of `length`: one, or one per sequence [batch].

        >>> theta, amplitude = AngleSource(RopeSpec(4)).rule_at(None, torch.device("cpu"), None)
        >>> theta.tolist(), amplitude.item()
        ([1.0, 0.01], 1.0)
        """
        if length is None or not self.spec.varies:
            theta = placed(self.inv_freq, device)
            theta = theta if log_scale is None else _scaled(theta, log_scale).to(device)
            return theta, placed(self.amplitude, device)
        dtype = dtype_of(self.spec)
        arithmetic = TorchArithmetic(dtype, device, self._constants[0])
        # As a tensor even if it is an int, so that one compiled graph has every length.
        n = length.to(device) if isinstance(length, Tensor) else full((), length, device=device)
        n = n.to(dtype).unsqueeze(-1) if n.dim() else n.to(dtype)
        if n.dim() and self.heads is not None:
            raise RopewalkError(
                asked="rope(..., length=[batch]) with frequencies of their own for each head",
                expected="one length for all sequences",
                got=f"{list(n.shape)[:1]} lengths",
                do="pass an int, or rotate the sequences one by one",
            )
        theta = self.spec.evaluate(n, arithmetic)
        amplitude = self.spec.frequencies.amplitude(n, arithmetic)
        if not isinstance(amplitude, Tensor):
            amplitude = full((), amplitude, dtype=torch.float64, device=device)
        amplitude = amplitude.to(torch.float64)
        theta = _scaled(theta, log_scale)
        if n.dim():
            # [batch, pairs] and [batch, 1] become [batch, 1, pairs] and [batch, 1, 1]: the sequence is between them.
            theta = theta.unsqueeze(-2)
            amplitude = amplitude.unsqueeze(-1) if amplitude.dim() else amplitude
        return theta, amplitude

    def amplitude_of(self, amplitude: Tensor, positions: Tensor, role: Role | None) -> Tensor:
        """What cos and sin of queries ("q") or keys ("k") at `positions` are multiplied by.

        >>> AngleSource(RopeSpec(4)).amplitude_of(torch.tensor(2.0), torch.arange(3), "q").item()
        2.0
        """
        xpos = self.spec.xpos
        if role is None or self.spec.same_for_both:
            return amplitude
        if xpos is not None:
            arithmetic = TorchArithmetic(torch.float64, positions.device, self._constants[1])
            log_scale = xpos.log_scale(self.spec.rotated_dim, positions.to(torch.float64).unsqueeze(-1), arithmetic)
            amplitude = amplitude * torch.exp(log_scale if role == "q" else -log_scale)
        if self.spec.query_temperature is not None and role == "q":
            amplitude = amplitude * self.temperature_at(positions).unsqueeze(-1)
        if self.heads is not None:
            # [batch, seq, pairs] against [batch, heads, seq, pairs].
            amplitude = amplitude.unsqueeze(-3) if amplitude.dim() == 3 else amplitude
        return amplitude

    def temperature_at(self, positions: Tensor) -> Tensor:
        """The query temperature at positions, in float64; on the CPU for a device that has none.

        >>> from ropewalk.spec.temperature import StepTemperature
        >>> AngleSource(RopeSpec(4, query_temperature=StepTemperature(0.1, 8))).temperature_at(torch.tensor([0])).item()
        1.0
        """
        rule, here = self.spec.query_temperature, angle_device(positions)
        if rule is None:
            return ones_like(here, dtype=torch.float64)
        arithmetic = TorchArithmetic(torch.float64, here.device, self._constants[2])
        return rule.evaluate(here.to(torch.float64), arithmetic)

    def at(
        self,
        positions: Tensor,
        dtype: torch.dtype,
        length: int | Tensor | None = None,
        role: Role | None = None,
        log_scale: Tensor | None = None,
    ) -> Angles:
        """cos and sin at positions, times the amplitude, on the device of the positions. Nothing is checked.

        >>> AngleSource(RopeSpec(4)).at(torch.tensor([0]), torch.float64)[0].tolist()
        [[1.0, 1.0]]
        """
        here = angle_device(positions)
        table = self._table if here.device.type == "cpu" else None
        if table is None and self._has_table and is_plain(here) and here.device.type == "cpu":
            table = self._table = table_of(self.spec)
        theta, amplitude = self.rule_at(length, here.device, log_scale)
        amplitude = self.amplitude_of(amplitude, here, role)
        axes = self.axes_at(here.device)
        cos, sin = cos_sin(here, theta, table, amplitude, dtype, axes, backend=self.backend)
        return (cos, sin) if here.device == positions.device else (cos.to(positions.device), sin.to(positions.device))

    def axes_at(self, device: torch.device) -> Tensor | None:
        """The weights of the axes on a device; None where tokens have one position.

        >>> AngleSource(RopeSpec(4)).axes_at(torch.device("cpu")) is None
        True
        """
        return None if self.axes is None else placed(self.axes, device)

    def range_at(
        self,
        start: int,
        seq: int,
        x: Tensor,
        length: int | Tensor | None = None,
        role: Role | None = None,
        log_scale: Tensor | None = None,
    ) -> Tables:
        """cos and sin at start .. start+seq-1 for x, from the cache where x is plain and nothing is learned.

        They may be the cache's own, which nobody else may have.

        >>> AngleSource(RopeSpec(4)).range_at(3, 2, torch.ones(2, 4)).row
        3
        """
        # A compiler cannot ask that, and keeps nothing anyway.
        compiling = torch.compiler.is_compiling()
        capturing = not compiling and x.is_cuda and torch.cuda.is_current_stream_capturing()
        # A length that grows with every token would find nothing that was kept.
        cached = log_scale is None and length is None and not capturing
        device, dtype = x.device, working_dtype(x)
        if not cached or not is_plain(x):
            return Tables(*self.at(range_positions(seq, start, device), dtype, length, role, log_scale))

        def make(first: int, last: int) -> Angles:
            return self.at(range_positions(last - first, first, device), dtype, None, role)

        return Tables(*self.ranges.find((device, dtype, current_stream(device), role), start, start + seq, make))

    def parts(self, q: Tensor, k: Tensor | None, where: Where, log_scale: Tensor | None = None) -> list[Part]:
        """What a call rotates: q and k together, or each with cos and sin of its own.

        >>> source, x = AngleSource(RopeSpec(4)), torch.ones(3, 4)
        >>> len(source.parts(x, x, Where())), len(source.parts(x, x, Where(k_positions=torch.arange(3))))
        (1, 2)
        """
        if k is not None and where.role is not None:
            raise RopewalkError(
                asked="rope(q, k, role=...)",
                expected="a role for a single tensor; the second of two holds keys",
                got=f"role={where.role!r} and two tensors",
                do="leave role out",
            )
        if self.spec.same_for_both and where.k_positions is None:
            if where.role is not None:
                checked_role(where.role, self.spec)
            return [Part(q, k, self.shared_tables(q, k, where, log_scale), None)]
        self.check_tensors(q, k)
        where.check(k)
        if k is None:
            where = where._replace(role=checked_role(where.role, self.spec))
            return [Part(q, None, self.tables_of(q, where, log_scale), self.temperature_of(q, where))]
        if where.angles is not None and not self.spec.same_for_both:
            raise RopewalkError(
                asked="rope(q, k, angles=...) with a spec that treats queries and keys differently",
                expected="angles of their own for q and for k",
                got="one pair of cos and sin",
                do='rotate them in two calls: rope(q, angles=rope.at(p, role="q"), role="q"), and so for k',
            )
        if where.k_positions is None:
            check_same_length(q, k, self.seq_dim)
        of_q = where._replace(role=None if self.spec.same_for_both else "q")
        of_k = where.of_keys()
        of_k = of_k._replace(role=None) if self.spec.same_for_both else of_k
        q_tables, k_tables = self.tables_of(q, of_q, log_scale), self.tables_of(k, of_k, log_scale)
        return [Part(q, None, q_tables, self.temperature_of(q, of_q)), Part(k, None, k_tables, None)]

    def shared_tables(self, q: Tensor, k: Tensor | None, where: Where, log_scale: Tensor | None = None) -> Tables:
        """cos and sin for q and for k at the same positions. They may be the cache's own, which nobody else may have.

        >>> AngleSource(RopeSpec(4)).shared_tables(torch.ones(3, 4), torch.ones(3, 4), Where(offset=9)).row
        9
        """
        check_tensors(q, k, self.spec.head_dim, self.seq_dim, self.heads)
        seq = q.shape[self.seq_dim]
        plain = where.positions is None and where.cu_seqlens is None and where.angles is None
        if plain and self.plain_ranges and is_start(where.offset):
            # Not `or`, which would give a compiler a guard on 0, and 0 a graph of its own.
            start = 0 if where.offset is None else where.offset
            self.limits.check_range(start, seq)
            tables = self.range_at(start, seq, q, log_scale=log_scale)
        else:
            where.check(k)
            tables = self.tables_of(q, where, log_scale)
        if k is None:
            return tables
        check_same_length(q, k, self.seq_dim)
        if tables.cos.dim() > 2 and tables.cos.shape[-2] == seq:
            # They were computed for q; keys of another batch or other heads would broadcast in silence.
            check_angles(tables[:2], k, tables.cos.shape[-1], self.seq_dim)
        return tables

    def tables_of(self, x: Tensor, where: Where, log_scale: Tensor | None = None) -> Tables:
        """cos and sin for one tensor, from the one argument that says where its tokens are; else from 0 on.

        >>> AngleSource(RopeSpec(4)).tables_of(torch.ones(3, 4), Where(positions=torch.arange(3))).cos.shape
        torch.Size([3, 2])
        """
        if where.angles is not None:
            return Tables(*check_angles(where.angles, x, self.pairs, self.seq_dim))
        seq = x.shape[self.seq_dim]
        length = checked_length(where.length, self.spec, self.rows(x), seq if where.is_fresh else None)
        places = self.places_of(x, where)
        if isinstance(places, Tensor):
            return Tables(*self.at(places, working_dtype(x), length, where.role, log_scale))
        self.limits.check_range(places, seq)
        return self.range_at(places, seq, x, length, where.role, log_scale)

    def places_of(self, x: Tensor, where: Where) -> int | Tensor:
        """Where the tokens of x are, checked: ids, or an int where they are a range that starts there.

        >>> AngleSource(RopeSpec(4)).places_of(torch.ones(3, 4), Where())
        0
        """
        return where.places(x, self.seq_dim, self.batched(x), self.spec.axes, self.limits)

    def temperature_of(self, q: Tensor, where: Where) -> Tensor | None:
        """The query temperature per token, shaped to multiply the features of q that are not rotated; None for none.

        >>> AngleSource(RopeSpec(4)).temperature_of(torch.ones(3, 4), Where(role="q")) is None
        True
        """
        if where.role != "q" or self.spec.query_temperature is None or self.spec.rotated_dim == self.spec.head_dim:
            return None
        if where.angles is not None:
            raise RopewalkError(
                asked="rope(q, angles=...) with a query_temperature over features that are not rotated",
                expected="positions: the temperature of such features is not in cos and sin",
                got="angles",
                do="pass positions= or offset=",
            )
        places = self.places_of(q, where)
        positions = places if isinstance(places, Tensor) else range_positions(q.shape[self.seq_dim], places, q.device)
        factor = self.temperature_at(positions).to(q.device).to(working_dtype(q))
        # [seq] or [batch, seq], before the features and, for seq_dim=-3, the heads.
        factor = factor.view(*factor.shape, *[1] * (-1 - self.seq_dim))
        if positions.dim() == 1:
            return factor
        return factor.view(factor.shape[0], *[1] * (q.dim() - factor.dim()), *factor.shape[1:])

    def batched(self, x: Tensor) -> bool:
        """Whether the first dimension of x is a batch, and not the sequence, or heads with frequencies of their own.

        >>> AngleSource(RopeSpec(4)).batched(torch.ones(2, 3, 4))
        True
        """
        return x.dim() > (3 if self.heads is not None else -self.seq_dim)

    def rows(self, x: Tensor) -> int | None:
        """How many sequences x has, or None where it has no batch.

        >>> AngleSource(RopeSpec(4)).rows(torch.ones(2, 3, 4))
        2
        """
        return x.shape[0] if self.batched(x) else None

    def check_tensors(self, q: Tensor, k: Tensor | None) -> None:
        """Raise unless q and k can be rotated.

        >>> AngleSource(RopeSpec(4)).check_tensors(torch.ones(3, 4), None)
        """
        check_tensors(q, k, self.spec.head_dim, self.seq_dim, self.heads)


def angle_device(positions: Tensor) -> Tensor:
    """Positions where angles are formed: there is no float64 on MPS, whose angles are formed on the CPU and moved.

    >>> angle_device(torch.arange(2)).device
    device(type='cpu')
    """
    return positions.cpu() if positions.device.type == "mps" else positions


def _scaled(theta: Tensor, log_scale: Tensor | None) -> Tensor:
    """Frequencies times exp(log_scale); in the dtype of the frequencies."""
    if log_scale is None:
        return theta
    log_scale = angle_device(log_scale)
    # float32 frequencies, as transformers has them, stay float32.
    return theta.to(log_scale.device) * torch.exp(log_scale.to(torch.float64)).to(theta.dtype)
