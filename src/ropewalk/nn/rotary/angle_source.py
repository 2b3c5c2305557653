"""RotaryAngles: the half of a rotary module that turns "where does each token stand" into cos and sin."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, as_int, require_flag, shown
from ropewalk.kernels.angles.arithmetic import Constants, TorchArithmetic
from ropewalk.kernels.angles.torch import radix_table
from ropewalk.nn.positions import packed_positions, range_positions
from ropewalk.nn.rotary.checks import (
    check_angles,
    check_ends,
    check_finite,
    check_ids,
    check_positions,
    check_within,
    checked_length,
    checked_role,
)
from ropewalk.nn.rotary.range_cache import RangeCache, stream_of
from ropewalk.ops import cos_sin, is_plain
from ropewalk.spec.rope import RopeSpec
from ropewalk.spec.temperature import QueryTemperature

__all__ = ["Angles", "RotaryAngles", "checked_offset", "working_dtype"]

# cos and sin, each [seq, pairs], [batch, seq, pairs] or [batch, heads, seq, pairs].
Angles = tuple[Tensor, Tensor]


class RotaryAngles(nn.Module):
    """The frequencies of a spec as module state, and cos and sin at any positions.

    The frequencies are a plain attribute and no buffer: they follow the device, and nothing else that is done to a
    module touches them. The radix table stays on the CPU, where it is used.

    >>> RotaryAngles(RopeSpec(4), seq_dim=-2, context_length=None, learned=False).inv_freq.tolist()
    [1.0, 0.01]
    """

    def __init__(self, spec: RopeSpec, *, seq_dim: int, context_length: int | None, learned: bool) -> None:
        super().__init__()
        require_flag(learned, asked="RotaryEmbedding(learned=...)")
        self.spec, self.seq_dim, self.context_length = spec, seq_dim, context_length
        # Whether ids on a device are looked at too.
        self.check_ids = False
        # float32 frequencies are made by the operations of transformers, and on the CPU, where it makes them.
        by_torch = TorchArithmetic(torch.float32, torch.device("cpu"))
        frequencies = spec.inv_freq() if spec.angles == "exact" else spec.evaluate(None, by_torch)
        # How many heads there must be, where heads have frequencies of their own.
        self._heads = len(frequencies) if frequencies.ndim == 2 else None
        home = torch.get_default_device()
        # Under a meta default the frequencies are real all the same: nobody would fill them in later.
        home = torch.device("cpu") if home.type in ("meta", "mps") else home
        # Outside inference mode even there: what is made in it could not serve a later backward.
        with torch.inference_mode(False):
            self._spec_inv_freq = torch.as_tensor(frequencies, device=home)
            self._amplitude = torch.tensor(spec.amplitude(), dtype=torch.float64, device=home)
            self._axes = None
            if spec.axes is not None:
                self._axes = torch.tensor(spec.axes.weights, dtype=torch.float64, device=home)
            self.log_scale = nn.Parameter(torch.zeros(frequencies.shape)) if learned else None
            self._constants = self._make_constants(home)
        self._table = self._make_table()
        self._ranges = RangeCache()

    def _make_constants(self, home: torch.device) -> list[Constants]:
        """Numbers of the rule, and of xPos and temperature, as tensors: forward must not copy them to a device."""
        rule, *scales = (TorchArithmetic(dtype, home) for dtype in (self._working, torch.float64, torch.float64))
        zero = torch.zeros(1, dtype=torch.float64, device=home)
        if self.spec.varies:
            length = torch.ones((), dtype=self._working, device=home)
            self.spec.evaluate(length, rule)
            self.spec.frequencies.amplitude(length, rule)
        if self.spec.xpos is not None:
            self.spec.xpos.log_scale(self.spec.turning, zero, scales[0])
        if self.spec.query_temperature is not None:
            self.spec.query_temperature.evaluate(zero, scales[1])
        return [arithmetic.made for arithmetic in (rule, *scales)]

    @property
    def _working(self) -> torch.dtype:
        """The dtype in which frequencies are formed."""
        return torch.float64 if self.spec.angles == "exact" else torch.float32

    def _make_table(self) -> Tensor | None:
        served = self.spec.angles == "exact" and not self.spec.varies and self.spec.axes is None
        if not served or self.log_scale is not None:
            return None
        with torch.inference_mode(False):
            return radix_table(torch.tensor(self.spec.inv_freq(), device="cpu"))

    def __getstate__(self) -> dict[str, Any]:
        # The table is large and follows from the spec.
        return self.__dict__ | {"_table": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._table = self._make_table()

    @property
    def inv_freq(self) -> Tensor:
        """The frequencies, sign * theta_i: float64 [pairs], or [heads, pairs] where heads differ.

        Of a rule that varies with the length they are those of short sequences.

        >>> RotaryAngles(RopeSpec(4, sign=-1), seq_dim=-2, context_length=None, learned=True).inv_freq.tolist()
        [-1.0, -0.01]
        """
        return self._learned(self._spec_inv_freq)

    def _learned(self, theta: Tensor) -> Tensor:
        if self.log_scale is None:
            return theta
        log_scale = self.log_scale
        # float64 on the CPU for a device that has none.
        log_scale = log_scale.cpu() if log_scale.device.type == "mps" else log_scale
        # float32 frequencies, as transformers has them, stay float32.
        return theta.to(log_scale.device) * torch.exp(log_scale.to(torch.float64)).to(theta.dtype)

    def _rule_at(self, length: int | Tensor | None, home: torch.device) -> tuple[Tensor, Tensor]:
        """Frequencies and amplitude for sequences of `length`: one, or one a sequence [batch]."""
        if length is None or not self.spec.varies:
            return self.inv_freq.to(home), self._amplitude.to(home)
        dtype, arithmetic = self._working, TorchArithmetic(self._working, home, self._constants[0])
        # As a tensor even if it is an int, so that a compiled graph serves every length.
        n = length.to(home) if isinstance(length, Tensor) else torch.full((), length, device=home)
        n = n.to(dtype).unsqueeze(-1) if n.dim() else n.to(dtype)
        if n.dim() and self._heads is not None:
            raise RopewalkError(
                asked="rope(..., length=[batch]) with frequencies of their own for each head",
                expected="one length for all sequences",
                got=f"{list(n.shape)[:1]} lengths",
                do="pass an int, or rotate the sequences one by one",
            )
        theta = torch.as_tensor(self.spec.evaluate(n, arithmetic), device=home)
        amplitude = self.spec.frequencies.amplitude(n, arithmetic)
        if not isinstance(amplitude, Tensor):
            amplitude = torch.full((), amplitude, dtype=torch.float64, device=home)
        amplitude = amplitude.to(torch.float64)
        theta = self._learned(theta)
        if n.dim():
            # [batch, pairs] and [batch, 1] become [batch, 1, pairs] and [batch, 1, 1], to stand before the sequence.
            theta = theta.unsqueeze(-2)
            amplitude = amplitude.unsqueeze(-1) if amplitude.dim() else amplitude
        return theta, amplitude

    def _amplitude_of(self, amplitude: Tensor, positions: Tensor, role: str | None) -> Tensor:
        """What cos and sin of queries ("q") or keys ("k") at `positions` are multiplied by."""
        xpos, temperature = self.spec.xpos, self.spec.query_temperature
        if role is None or self.spec.same_for_both:
            return amplitude
        if xpos is not None:
            arithmetic = TorchArithmetic(torch.float64, positions.device, self._constants[1])
            log_scale = xpos.log_scale(self.spec.turning, positions.to(torch.float64).unsqueeze(-1), arithmetic)
            amplitude = amplitude * torch.exp(log_scale if role == "q" else -log_scale)
        if temperature is not None and role == "q":
            amplitude = amplitude * self._tempered(positions).unsqueeze(-1)
        if self._heads is not None:
            # [batch, seq, pairs] against [batch, heads, seq, pairs].
            amplitude = amplitude.unsqueeze(-3) if amplitude.dim() == 3 else amplitude
        return amplitude

    def _tempered(self, positions: Tensor) -> Tensor:
        """The query temperature at positions, in float64; on the CPU for a device that has none."""
        here = positions.cpu() if positions.device.type == "mps" else positions
        rule = cast(QueryTemperature, self.spec.query_temperature)
        arithmetic = TorchArithmetic(torch.float64, here.device, self._constants[2])
        return rule.evaluate(here.to(torch.float64), arithmetic)

    @property
    def _tempers_apart(self) -> bool:
        """Whether the temperature has features to scale that cos and sin do not reach."""
        return self.spec.query_temperature is not None and self.spec.turning < self.spec.head_dim

    def batched(self, x: Tensor) -> bool:
        """Whether the first dimension of x is a batch, and not the sequence, or heads with frequencies of their own."""
        return x.dim() > (3 if self._heads is not None else -self.seq_dim)

    def at(
        self,
        positions: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        length: int | Tensor | None = None,
        role: str | None = None,
    ) -> Angles:
        """cos and sin at `positions`, times the amplitude: compute them once a forward pass, share them as `angles=`.

        [seq, pairs] or [batch, seq, pairs]; [1 or batch, heads, seq, pairs] where heads have their own frequencies.
        `length` and `role` are for the specs that need them: see `forward`.

        >>> rope = RotaryAngles(RopeSpec(4), seq_dim=-2, context_length=None, learned=False)
        >>> cos, sin = rope.at(torch.tensor([0, 2]))
        >>> [round(c, 4) for c in cos[1].tolist()]  # cos 2, cos 0.02
        [-0.4161, 0.9998]
        """
        count = 1 if self.spec.axes is None else self.spec.axes.count
        check_ids(positions, name="positions", axes=count)
        if dtype not in (torch.float32, torch.float64):
            raise RopewalkError(
                asked=f"rope.at(positions, dtype={dtype})",
                expected="float32, or float64 for float64 input",
                got=f"{dtype}",
                do="leave dtype out; the rotation rounds once, at its end",
            )
        self._check_values(positions, "positions")
        role = checked_role(role, self.spec)
        if positions.dim() > (1 if count == 1 else 2):
            rows = positions.shape[-2]
        else:
            # Positions that all sequences share may be asked for at a length a sequence.
            rows = length.numel() if isinstance(length, Tensor) else None
        length = checked_length(length, self.spec, rows, None)
        return self._angles_at(positions, dtype, length, role)

    def _angles_at(
        self, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None = None, role: str | None = None
    ) -> Angles:
        """`at` without its checks."""
        home = positions.device
        # There is no float64 on MPS: angles are formed on the CPU and moved.
        here = positions.cpu() if home.type == "mps" else positions
        table = self._table if here.device.type == "cpu" else None
        theta, amplitude = self._rule_at(length, here.device)
        amplitude = self._amplitude_of(amplitude, here, role)
        axes = None if self._axes is None else self._axes.to(here.device)
        cos, sin = cos_sin(here, theta, table, amplitude, dtype, axes)
        return (cos, sin) if home.type != "mps" else (cos.to(home), sin.to(home))

    def _angles_for(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        angles: Angles | None = None,
        length: int | Tensor | None = None,
        role: str | None = None,
        name: str = "positions",
    ) -> tuple[Tensor, Tensor, int]:
        """cos, sin and the row of the first token, from the one argument that says where x stands; else from 0 on."""
        seq = x.shape[self.seq_dim]
        if angles is not None:
            return *check_angles(angles, x, self._spec_inv_freq.shape[-1], self.seq_dim), 0
        fresh = positions is None and offset is None and cu_seqlens is None
        length = checked_length(length, self.spec, x.shape[0] if self.batched(x) else None, seq if fresh else None)
        where = self._positions_of(x, positions, offset, cu_seqlens, name)
        if not isinstance(where, Tensor):
            return self._range(where, seq, x, length, role)
        return *self._angles_at(where, working_dtype(x), length, role), 0

    def _positions_of(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        name: str = "positions",
    ) -> int | Tensor:
        """Where the tokens of x stand, checked: an int where they are a range that starts there."""
        seq, axes = x.shape[self.seq_dim], self.spec.axes
        if positions is not None:
            check_positions(positions, x, self.seq_dim, self.batched(x), name, 1 if axes is None else axes.count)
        elif axes is not None:
            raise RopewalkError(
                asked=f"rope(...) over {axes.count} position axes",
                expected=f"positions [{axes.count}, seq] or [{axes.count}, batch, seq]",
                got="no positions",
                do="make them with ropewalk.nn.positions: text_positions, grid_positions, mrope_positions",
            )
        elif cu_seqlens is not None:
            check_ids(cu_seqlens, name="cu_seqlens", shape="[sequences + 1]", dims=(1,), whole=True)
            if self._may_look(cu_seqlens):
                check_ends(cu_seqlens, seq)
            positions = packed_positions(cu_seqlens.to(x.device), seq)
        else:
            start = 0 if offset is None else checked_offset(offset, x, self.batched(x), "offset")
            if not isinstance(start, Tensor):
                return start
            positions = range_positions(seq, start, x.device)
        self._check_values(positions, name)
        return positions

    def _range(
        self, start: int, seq: int, x: Tensor, length: int | Tensor | None, role: str | None
    ) -> tuple[Tensor, Tensor, int]:
        if seq:
            self._check_last(start + seq - 1)
            self._check_first(start)
        # A compiler cannot ask that, and keeps nothing anyway.
        compiling = torch.compiler.is_compiling()
        capturing = not compiling and x.is_cuda and torch.cuda.is_current_stream_capturing()
        # A length that grows with every token would find nothing that was kept.
        kept = self.log_scale is None and length is None and not capturing
        if not kept or not is_plain(x):
            return *self._angles_at(range_positions(seq, start, x.device), working_dtype(x), length, role), 0

        # From the cache, for a plain x.
        device, dtype = x.device, working_dtype(x)

        def make(first: int, last: int) -> Angles:
            return self._angles_at(range_positions(last - first, first, device), dtype, None, role)

        return self._ranges.find((device, dtype, stream_of(device), role), start, start + seq, make)

    def _check_last(self, last: int) -> None:
        """Refuses a last position past what the module or its spec is for, where the host knows it."""
        check_within(last, self.context_length)
        if self.spec.xpos is not None:
            check_within(last, self.spec.xpos.length)

    def _check_first(self, first: int) -> None:
        """Refuses a first position that xPos would give a factor beyond its bounds."""
        if self.spec.xpos is not None and first < -self.spec.xpos.length:
            raise RopewalkError(
                asked=f"rope(...) with {self.spec.xpos}",
                expected=f"positions from {-self.spec.xpos.length} on",
                got=f"position {first}",
                do="shift the positions: scores depend on distances alone",
            )

    def _may_look(self, ids: Tensor) -> bool:
        """Whether the values of ids may be looked at: that makes a device wait, and a compiler stop."""
        if not is_plain(ids) or not (ids.device.type == "cpu" or self.check_ids):
            return False
        return not (ids.is_cuda and torch.cuda.is_current_stream_capturing())

    def _check_values(self, positions: Tensor, name: str) -> None:
        if not self._may_look(positions):
            return
        check_finite(positions, name)
        if positions.numel() and (self.context_length is not None or self.spec.xpos is not None):
            self._check_last(int(positions.max()))
            self._check_first(int(positions.min()))

    def reset_parameters(self) -> None:
        """Puts learned frequencies back to those of the spec, as initialisation after `to_empty` wants it.

        >>> rope = RotaryAngles(RopeSpec(4), seq_dim=-2, context_length=None, learned=True)
        >>> rope.reset_parameters()
        >>> rope.inv_freq.tolist()
        [1.0, 0.01]
        """
        if self.log_scale is not None:
            nn.init.zeros_(self.log_scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryAngles":
        super()._apply(fn, recurse)
        # fn may cast, move or empty; where it moves to is all that concerns the frequencies.
        device = fn(torch.empty(0, device=self._spec_inv_freq.device)).device
        if device.type not in ("meta", "mps"):
            self._spec_inv_freq = self._spec_inv_freq.to(device)
            self._amplitude = self._amplitude.to(device)
            self._axes = None if self._axes is None else self._axes.to(device)
            self._constants = [[(key, x.to(device)) for key, x in made] for made in self._constants]
        return self


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which x is rotated.

    >>> working_dtype(torch.ones(1, dtype=torch.bfloat16))
    torch.float32
    """
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def checked_offset(offset: Any, x: Tensor, batched: bool, name: str) -> int | Tensor:
    """An int, or a tensor: of one whole number, or of one a sequence where x has a batch.

    >>> checked_offset(7, torch.ones(2, 3, 4), True, "offset")
    7
    """
    if isinstance(offset, Tensor):
        whole = not offset.is_floating_point() and not offset.is_complex() and offset.dtype != torch.bool
        rows = offset.dim() == 1 and batched and offset.shape[0] in (1, x.shape[0])
        if whole and (offset.dim() == 0 or rows):
            return offset.to(torch.int64)
        got = f"{offset.dtype} {list(offset.shape)}"
    elif isinstance(offset, torch.SymInt):
        return offset  # pyright: ignore[reportReturnType]  # an int to everything but the type checker
    else:
        number = as_int(offset)
        if number is not None and abs(number) < 1 << 62:
            return number
        got = shown(offset)
    raise RopewalkError(
        asked=f"{name}=... for a tensor of shape {list(x.shape)}",
        expected="an int of less than 63 bits"
        + (f", or whole numbers [{x.shape[0]}], one a sequence" if batched else ""),
        got=got,
        do="rotate with positions= for anything else",
    )
