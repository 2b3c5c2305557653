"""AngleSource: computes cos and sin of a spec at any positions. Each RotaryEmbedding owns one."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.angles.arithmetic import Constants, TorchArithmetic
from ropewalk.kernels.backend import Registry, current
from ropewalk.kernels.constructors import full, home, ones_like, placed
from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.torch_internals import current_stream, fake_mode, is_plain
from ropewalk.kernels.types import Layout, RopeNumbers, Shortcut, Tables
from ropewalk.nn.positions import range_positions
from ropewalk.nn.rotary.angle_makers import MAKERS, check_maker, shared_spec
from ropewalk.nn.rotary.call import (
    Angles,
    Limits,
    Placement,
    Role,
    check_same_length,
    check_tensors,
    checked_length,
    checked_role,
    is_start,
    warn_of_layout,
)
from ropewalk.nn.rotary.range_cache import Block, RangeCache, shared_ranges
from ropewalk.nn.rotary.spec_numbers import amplitude_at, dtype_of, numbers_of, table_of
from ropewalk.nn.rotary.tables import check_angles
from ropewalk.ops import cos_sin, norm_shortcut_of, shortcut_of
from ropewalk.spec.rope import RopeSpec

__all__ = ["AngleSource", "Part", "angle_device"]

_NO_LIMITS = Limits(None, None, False)
_NO_SHORTCUT = {"shortcut": None, "norm_shortcut": None, "registry": None, "_shortcut_device": None}


class Part(NamedTuple):
    """One or two tensors that are rotated by the same cos and sin.

    Attributes:
        q: The first tensor.
        k: The second tensor, or None.
        tables: cos and sin.
        temperature: Query temperature for the features of q that are not rotated, or None.

    >>> Part(torch.ones(1, 2), None, Tables(torch.ones(1, 1), torch.ones(1, 1)), None).k is None
    True
    """

    q: Tensor
    k: Tensor | None
    tables: Tables
    temperature: Tensor | None


class AngleSource:
    """The frequencies of a spec as tensors, and cos and sin at any positions.

    The frequencies are plain attributes: they follow the device of the module (`to`), and ignore casts and
    `to_empty`. The radix table is used and stored on the CPU. The parameter of learned frequencies belongs to the
    module, and is passed as the argument `log_scale`.

    Args:
        spec: The rotation.
        limits: Limits on positions.
        seq_dim: Dimension of the sequence in the tensors to rotate.
        learned: Whether frequencies are scaled by a `log_scale`.
        backend: A forced backend, or None.

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
        # One object for all equal specs, by which angles of another rope are found.
        self.identity: RopeSpec = shared_spec(spec)
        self.limits: Limits = limits
        self.seq_dim: int = seq_dim
        self.backend: str | None = backend
        # Whether queries and keys have the same cos and sin at the same positions.
        self.same_for_both: bool = spec.same_for_both
        # Whether a call for a plain range can use cached tables and go directly to the kernel.
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
        # Required number of heads if frequencies are per head.
        self.heads: int | None = numbers.inv_freq.shape[0] if numbers.inv_freq.dim() == 2 else None
        # torch.compile computes the angles without the table. A module created in a compiled function gets its table at
        # its first eager call.
        self._table: Tensor | None = table_of(spec) if self._has_table and not torch.compiler.is_compiling() else None
        self.ranges: RangeCache = shared_ranges(self.identity, backend, self.inv_freq.numel())
        start = 0 if spec.rotary_slice == "leading" else spec.head_dim - 2 * self.pairs
        self.layout: Layout = Layout(spec.pairing == "interleaved", start, seq_dim)
        # The common calls on the device of the last call, chosen from `registry`. Another registry may choose another
        # backend. Rules that depend on more than positions, and checks of ids on a GPU, need the general path.
        self.shortcut: Shortcut | None = None
        self.norm_shortcut: Shortcut | None = None
        self.registry: Registry | None = None
        self._shortcut_device: torch.device | None = None
        self._has_shortcut: bool = self.plain_ranges and self.heads is None and not (learned or limits.check_ids)
        # Whether a call for a range was checked for the memory layout of the other seq_dim.
        self._layout_checked: bool = False

    @property
    def pairs(self) -> int:
        """Number of pairs that are rotated."""
        return self.inv_freq.shape[-1]

    def __getstate__(self) -> dict[str, Any]:
        # The table is large. All of these can be computed from the spec.
        return self.__dict__ | {"_table": None, "identity": None, "ranges": None} | _NO_SHORTCUT

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.identity = shared_spec(self.spec)
        self.ranges = shared_ranges(self.identity, self.backend, self.inv_freq.numel())
        self._table = table_of(self.spec) if self._has_table else None

    def __deepcopy__(self, _: dict[int, object]) -> "AngleSource":
        # The tensors are never written, so a copy shares them. Only the shortcut is replaced by calls.
        copied = object.__new__(AngleSource)
        copied.__dict__.update(self.__dict__ | _NO_SHORTCUT)
        return copied

    def to(self, device: torch.device) -> None:
        """Move the frequencies to a device. They stay where they are if the device has no float64.

        >>> AngleSource(RopeSpec(4)).to(torch.device("meta"))
        """
        # Fake tensors can be on a device that does not exist. The real numbers stay, and each call moves them.
        if device.type not in ("meta", "mps") and fake_mode() is None:
            self.inv_freq, self.amplitude = self.inv_freq.to(device), self.amplitude.to(device)
            self.axes = None if self.axes is None else self.axes.to(device)
            self._constants = tuple(tuple((key, x.to(device)) for key, x in constants) for constants in self._constants)
            self.__dict__.update(_NO_SHORTCUT)

    def frequencies(self, log_scale: Tensor | None) -> Tensor:
        """Return the frequencies, times exp(log_scale) if they are learned.

        >>> AngleSource(RopeSpec(4, sign=-1)).frequencies(torch.zeros(2)).tolist()
        [-1.0, -0.01]
        """
        return _scaled(self.inv_freq, log_scale)

    def rule_at(
        self, length: int | Tensor | None, device: torch.device, log_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return frequencies and amplitude for sequences of `length`.

        Args:
            length: An int, a tensor [batch] with one length per sequence, or None if the spec does not depend on it.
            device: Device of the result.
            log_scale: Parameter of learned frequencies, or None.

        Returns:
            Frequencies [pairs] or [heads, pairs], and amplitude []. With one length per sequence: [batch, 1, pairs],
            and [] or [batch, 1, 1].

        Raises:
            RopewalkError: If there is one length per sequence and frequencies are per head.

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
        # A tensor even if length is an int, so that one compiled graph supports every length.
        n = length.to(device) if isinstance(length, Tensor) else full((), length, device=device)
        n = n.to(dtype).unsqueeze(-1) if n.dim() else n.to(dtype)
        if n.dim() and self.heads is not None:
            raise RopewalkError(
                asked="rope(..., length=[batch]) with different frequencies for each head",
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
            # [batch, pairs] and [batch, 1] become [batch, 1, pairs] and [batch, 1, 1], to broadcast over the sequence.
            theta = theta.unsqueeze(-2)
            amplitude = amplitude.unsqueeze(-1) if amplitude.dim() else amplitude
        return theta, amplitude

    def amplitude_of(self, amplitude: Tensor, positions: Tensor, role: Role | None) -> Tensor:
        """Return the factor on cos and sin of queries ("q") or keys ("k") at `positions`, which includes `amplitude`.

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
        """Return the query temperature at `positions` in float64, on the CPU if the device has no float64.

        >>> from ropewalk.spec.temperature import StepTemperature
        >>> AngleSource(RopeSpec(4, query_temperature=StepTemperature(0.1, 8))).temperature_at(torch.tensor([0])).item()
        1.0
        """
        rule, ids = self.spec.query_temperature, angle_device(positions)
        if rule is None:
            return ones_like(ids, dtype=torch.float64)
        arithmetic = TorchArithmetic(torch.float64, ids.device, self._constants[2])
        return rule.evaluate(ids.to(torch.float64), arithmetic)

    def at(
        self,
        positions: Tensor,
        dtype: torch.dtype,
        length: int | Tensor | None = None,
        role: Role | None = None,
        log_scale: Tensor | None = None,
    ) -> Angles:
        """Return cos and sin at `positions`, times the amplitude, on the device of `positions`. Nothing is checked.

        >>> AngleSource(RopeSpec(4)).at(torch.tensor([0]), torch.float64)[0].tolist()
        [[1.0, 1.0]]
        """
        ids = angle_device(positions)
        table = self._table if ids.device.type == "cpu" else None
        if table is None and self._has_table and is_plain(ids) and ids.device.type == "cpu":
            table = self._table = table_of(self.spec)
        theta, amplitude = self.rule_at(length, ids.device, log_scale)
        amplitude = self.amplitude_of(amplitude, ids, role)
        axes = self.axes_at(ids.device)
        cos, sin = cos_sin(ids, theta, table, amplitude, dtype, axes, backend=self.backend)
        return (cos, sin) if ids.device == positions.device else (cos.to(positions.device), sin.to(positions.device))

    def axes_at(self, device: torch.device) -> Tensor | None:
        """Return the weights of the axes on a device; None if tokens have one position.

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
        """Return cos and sin for x at start .. start+seq-1, from the cache if x is plain and nothing is learned.

        Do not write to them: they can belong to the cache.

        >>> AngleSource(RopeSpec(4)).range_at(3, 2, torch.ones(2, 4)).row
        3
        """
        # is_current_stream_capturing cannot be traced, and a compiled graph does not use the cache.
        compiling = torch.compiler.is_compiling()
        capturing = not compiling and x.is_cuda and torch.cuda.is_current_stream_capturing()
        # A length that grows with every token would never hit the cache.
        cached = log_scale is None and length is None and not capturing
        device, dtype = x.device, working_dtype(x)
        if not cached or not is_plain(x):
            return Tables(*self.at(range_positions(seq, start, device), dtype, length, role, log_scale))

        def make(first: int, last: int) -> Angles:
            return self.at(range_positions(last - first, first, device), dtype, None, role)

        stop = start + seq
        block = self.ranges.find((device, dtype, current_stream(device), role), start, stop, make)
        if block is None:
            return Tables(*make(start, stop))
        self._remember(block)
        return Tables(block.cos, block.sin, start - block.start)

    def _remember(self, block: Block) -> None:
        """Let the next calls of a range use these cos and sin at once."""
        self._prepare_shortcut(block.key[0])
        for shortcut in (self.shortcut, self.norm_shortcut):
            if shortcut is not None and self._shortcut_device == block.key[0]:
                shortcut.remember(block.start, block.stop, block.cos, block.sin)

    def _prepare_shortcut(self, device: torch.device) -> None:
        """Create the shortcut for plain calls on a device, unless there is one."""
        if not self._has_shortcut or (self.registry is current() and self._shortcut_device == device):
            return
        if self.inv_freq.device != device:
            # The module was not moved to the device of its inputs.
            return
        numbers = RopeNumbers(
            self.spec.head_dim,
            self.layout,
            self.inv_freq,
            self._table if device.type == "cpu" else None,
            self.amplitude,
            MAKERS,
            self.identity,
            self.limits.context_length,
        )
        registry = current()
        self.shortcut = shortcut_of(numbers, device, self.backend)
        self.norm_shortcut = norm_shortcut_of(numbers, device, self.backend)
        self.registry, self._shortcut_device = registry, device

    def parts(self, q: Tensor, k: Tensor | None, placement: Placement, log_scale: Tensor | None = None) -> list[Part]:
        """Split a call into parts: q and k with the same cos and sin, or one part per tensor.

        >>> source, x = AngleSource(RopeSpec(4)), torch.ones(3, 4)
        >>> len(source.parts(x, x, Placement())), len(source.parts(x, x, Placement(k_positions=torch.arange(3))))
        (1, 2)
        """
        if k is not None and placement.role is not None:
            raise RopewalkError(
                asked=f"{placement.call}(q, k, role=...)",
                expected="a role for a single tensor only; of two tensors the second contains keys",
                got=f"role={placement.role!r} and two tensors",
                do="leave role out",
            )
        if self.spec.same_for_both and placement.k_positions is None:
            if placement.role is not None:
                checked_role(placement.role, self.spec, placement.call)
            return [Part(q, k, self.shared_tables(q, k, placement, log_scale), None)]
        self.check_tensors(q, k, placement.call)
        placement.check(k)
        if k is None:
            placement = placement._replace(role=checked_role(placement.role, self.spec, placement.call))
            return [Part(q, None, self.tables_of(q, placement, log_scale), self.temperature_of(q, placement))]
        if placement.angles is not None and not self.spec.same_for_both:
            raise RopewalkError(
                asked=f"{placement.call}(q, k, angles=...) with a spec that treats queries and keys differently",
                expected="separate angles for q and for k",
                got="one pair of cos and sin",
                do='rotate them in two calls: rope(q, angles=rope.at(p, role="q"), role="q"), and the same for k',
            )
        if placement.k_positions is None:
            check_same_length(q, k, self.seq_dim, placement.call)
        of_q = placement._replace(role=None if self.spec.same_for_both else "q")
        of_k = placement.of_keys()
        of_k = of_k._replace(role=None) if self.spec.same_for_both else of_k
        q_tables, k_tables = self.tables_of(q, of_q, log_scale), self.tables_of(k, of_k, log_scale)
        return [Part(q, None, q_tables, self.temperature_of(q, of_q)), Part(k, None, k_tables, None)]

    def shared_tables(
        self, q: Tensor, k: Tensor | None, placement: Placement, log_scale: Tensor | None = None
    ) -> Tables:
        """Return cos and sin for q and k at the same positions. Do not write to them: they can belong to the cache.

        >>> AngleSource(RopeSpec(4)).shared_tables(torch.ones(3, 4), torch.ones(3, 4), Placement(offset=9)).row
        9
        """
        check_tensors(q, k, self.spec.head_dim, self.seq_dim, self.heads, placement.call)
        seq = q.shape[self.seq_dim]
        plain = placement.positions is None and placement.cu_seqlens is None and placement.angles is None
        if plain and self.plain_ranges and is_start(placement.offset):
            if k is not None and not torch.compiler.is_compiling() and not self._layout_checked:
                self._layout_checked = True
                warn_of_layout(q, k, self.seq_dim, placement.call)
            # Not `or`: torch.compile would guard on 0, and compile a separate graph for it.
            start = 0 if placement.offset is None else placement.offset
            self.limits.check_range(start, seq, placement.call)
            tables = self.range_at(start, seq, q, log_scale=log_scale)
        else:
            placement.check(k)
            tables = self.tables_of(q, placement, log_scale)
        if k is None:
            return tables
        check_same_length(q, k, self.seq_dim, placement.call)
        if tables.cos.dim() > 2 and tables.cos.shape[-2] == seq:
            # The tables were computed for q. Keys of another batch or other heads would broadcast silently.
            check_angles(tables[:2], k, tables.cos.shape[-1], self.seq_dim, placement.call)
        return tables

    def tables_of(self, x: Tensor, placement: Placement, log_scale: Tensor | None = None) -> Tables:
        """Return cos and sin for one tensor, from the argument that specifies its positions; by default from 0 on.

        >>> AngleSource(RopeSpec(4)).tables_of(torch.ones(3, 4), Placement(positions=torch.arange(3))).cos.shape
        torch.Size([3, 2])
        """
        if placement.angles is not None:
            angles = check_angles(placement.angles, x, self.pairs, self.seq_dim, placement.call)
            check_maker(placement.angles[0], self.identity, self, log_scale, placement.call)
            if is_plain(x):
                self._prepare_shortcut(x.device)
            return Tables(*angles)
        seq = x.shape[self.seq_dim]
        fresh, call = seq if placement.is_fresh() else None, placement.call
        length = checked_length(placement.length, self.spec, self.rows(x), fresh, call=call)
        ids = self.positions_or_start(x, placement)
        if isinstance(ids, Tensor):
            if is_plain(x):
                self._prepare_shortcut(x.device)
            return Tables(*self.at(ids, working_dtype(x), length, placement.role, log_scale))
        self.limits.check_range(ids, seq, call)
        return self.range_at(ids, seq, x, length, placement.role, log_scale)

    def positions_or_start(self, x: Tensor, placement: Placement) -> int | Tensor:
        """Check `placement`, and return the positions of x, or the start of a range as an int.

        >>> AngleSource(RopeSpec(4)).positions_or_start(torch.ones(3, 4), Placement())
        0
        """
        return placement.positions_or_start(x, self.seq_dim, self.batched(x), self.spec.axes, self.limits)

    def temperature_of(self, q: Tensor, placement: Placement) -> Tensor | None:
        """Return the query temperature for the features of q that are not rotated, shaped to broadcast; None for none.

        >>> AngleSource(RopeSpec(4)).temperature_of(torch.ones(3, 4), Placement(role="q")) is None
        True
        """
        if placement.role != "q" or self.spec.query_temperature is None or self.spec.rotated_dim == self.spec.head_dim:
            return None
        if placement.angles is not None:
            raise RopewalkError(
                asked=f"{placement.call}(q, angles=...) with a query_temperature over features that are not rotated",
                expected="positions: the temperature of such features is not in cos and sin",
                got="angles",
                do="pass positions= or offset=",
            )
        ids = self.positions_or_start(q, placement)
        ids = ids if isinstance(ids, Tensor) else range_positions(q.shape[self.seq_dim], ids, q.device)
        factor = self.temperature_at(ids).to(q.device).to(working_dtype(q))
        # [seq] or [batch, seq] is followed by the features and, for seq_dim=-3, by the heads.
        factor = factor.view(*factor.shape, *[1] * (-1 - self.seq_dim))
        if ids.dim() == 1:
            return factor
        return factor.view(factor.shape[0], *[1] * (q.dim() - factor.dim()), *factor.shape[1:])

    def batched(self, x: Tensor) -> bool:
        """Whether the first dimension of x is the batch, and not the sequence or heads with frequencies per head.

        >>> AngleSource(RopeSpec(4)).batched(torch.ones(2, 3, 4))
        True
        """
        return x.dim() > (3 if self.heads is not None else -self.seq_dim)

    def rows(self, x: Tensor) -> int | None:
        """Return the number of sequences of x, or None if it has no batch.

        >>> AngleSource(RopeSpec(4)).rows(torch.ones(2, 3, 4))
        2
        """
        return x.shape[0] if self.batched(x) else None

    def check_tensors(self, q: Tensor, k: Tensor | None, call: str = "rope") -> None:
        """Raise unless q and k can be rotated.

        >>> AngleSource(RopeSpec(4)).check_tensors(torch.ones(3, 4), None)
        """
        check_tensors(q, k, self.spec.head_dim, self.seq_dim, self.heads, call)


def angle_device(positions: Tensor) -> Tensor:
    """Return `positions` on the device that computes the angles: the CPU for MPS, which has no float64.

    >>> angle_device(torch.arange(2)).device
    device(type='cpu')
    """
    return positions.cpu() if positions.device.type == "mps" else positions


def _scaled(theta: Tensor, log_scale: Tensor | None) -> Tensor:
    """Return frequencies times exp(log_scale), in the dtype of the frequencies."""
    if log_scale is None:
        return theta
    log_scale = angle_device(log_scale)
    # Frequencies in float32, as in transformers, stay float32.
    return theta.to(log_scale.device) * torch.exp(log_scale.to(torch.float64)).to(theta.dtype)
