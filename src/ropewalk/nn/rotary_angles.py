"""RotaryAngles: the half of a rotary module that turns "where does each token stand" into cos and sin."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, as_int, require_flag, shown
from ropewalk.kernels.angles import float32_powers, radix_table
from ropewalk.nn.positions import packed_positions, range_positions
from ropewalk.nn.range_cache import RangeCache
from ropewalk.nn.rotary_arguments import (
    check_angles,
    check_ends,
    check_finite,
    check_ids,
    check_positions,
    check_within,
)
from ropewalk.ops import cos_sin, is_plain
from ropewalk.spec.rope import RopeSpec

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
        exact = spec.angles == "exact"
        frequencies = spec.inv_freq() if exact else spec.inv_freq(powers=float32_powers)
        # How many heads there must be, where heads have frequencies of their own.
        self._heads = len(frequencies) if frequencies.ndim == 2 else None
        home = torch.get_default_device()
        # Under a meta default the frequencies are real all the same: nobody would fill them in later.
        home = torch.device("cpu") if home.type in ("meta", "mps") else home
        # Outside inference mode even there: what is made in it could not serve a later backward.
        with torch.inference_mode(False):
            self._spec_inv_freq = torch.tensor(frequencies, device=home)
            self._amplitude = torch.tensor(spec.amplitude(), dtype=torch.float64, device=home)
            self.log_scale = nn.Parameter(torch.zeros(frequencies.shape)) if learned else None
        self._table = self._make_table()
        self._ranges = RangeCache()

    def _make_table(self) -> Tensor | None:
        if self.spec.angles != "exact" or self.log_scale is not None:
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

        >>> RotaryAngles(RopeSpec(4, sign=-1), seq_dim=-2, context_length=None, learned=True).inv_freq.tolist()
        [-1.0, -0.01]
        """
        if self.log_scale is None:
            return self._spec_inv_freq
        log_scale = self.log_scale
        # float64 on the CPU for a device that has none.
        log_scale = log_scale.cpu() if log_scale.device.type == "mps" else log_scale
        return self._spec_inv_freq.to(log_scale.device) * torch.exp(log_scale.to(torch.float64))

    def batched(self, x: Tensor) -> bool:
        """Whether the first dimension of x is a batch, and not the sequence, or heads with frequencies of their own."""
        return x.dim() > (3 if self._heads is not None else -self.seq_dim)

    def at(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Angles:
        """cos and sin at `positions`, times the amplitude: compute them once a forward pass, share them as `angles=`.

        [seq, pairs] or [batch, seq, pairs]; [1 or batch, heads, seq, pairs] where heads have their own frequencies.

        >>> rope = RotaryAngles(RopeSpec(4), seq_dim=-2, context_length=None, learned=False)
        >>> cos, sin = rope.at(torch.tensor([0, 2]))
        >>> [round(c, 4) for c in cos[1].tolist()]  # cos 2, cos 0.02
        [-0.4161, 0.9998]
        """
        check_ids(positions, name="positions", shape="[seq] or [batch, seq]")
        if dtype not in (torch.float32, torch.float64):
            raise RopewalkError(
                asked=f"rope.at(positions, dtype={dtype})",
                expected="float32, or float64 for float64 input",
                got=f"{dtype}",
                do="leave dtype out; the rotation rounds once, at its end",
            )
        self._check_values(positions, "positions")
        return self._angles_at(positions, dtype)

    def _angles_at(self, positions: Tensor, dtype: torch.dtype, amplitude: Tensor | None = None) -> Angles:
        """`at` without its checks, and with another amplitude than the spec's if one is given."""
        scale = self._amplitude if amplitude is None else amplitude
        home = positions.device
        if home.type == "mps":
            # There is no float64: angles are formed on the CPU and moved.
            cos, sin = cos_sin(positions.cpu(), self.inv_freq, self._table, scale, dtype)
            return cos.to(home), sin.to(home)
        table = self._table if home.type == "cpu" else None
        return cos_sin(positions, self.inv_freq.to(home), table, scale.to(home), dtype)

    def _angles_for(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        angles: Angles | None = None,
        name: str = "positions",
    ) -> tuple[Tensor, Tensor, int]:
        """cos, sin and the row of the first token, from the one argument that says where x stands; else from 0 on."""
        seq = x.shape[self.seq_dim]
        if angles is not None:
            return *check_angles(angles, x, self._spec_inv_freq.shape[-1], self.seq_dim), 0
        if positions is not None:
            check_positions(positions, x, self.seq_dim, self.batched(x), name)
        elif cu_seqlens is not None:
            check_ids(cu_seqlens, name="cu_seqlens", shape="[sequences + 1]", dims=(1,), whole=True)
            if cu_seqlens.device.type == "cpu" and is_plain(cu_seqlens):
                check_ends(cu_seqlens, seq)
            positions = packed_positions(cu_seqlens.to(x.device), seq)
        else:
            start = 0 if offset is None else checked_offset(offset, x, self.batched(x), "offset")
            if not isinstance(start, Tensor):
                return self._range(start, seq, x)
            positions = range_positions(seq, start, x.device)
        self._check_values(positions, name)
        return *self._angles_at(positions, working_dtype(x)), 0

    def _range(self, start: int, seq: int, x: Tensor) -> tuple[Tensor, Tensor, int]:
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.log_scale is None and not capturing and is_plain(x):
            return self._kept_range(start, seq, x)
        if seq:
            check_within(start + seq - 1, self.context_length)
        return *self._angles_at(range_positions(seq, start, x.device), working_dtype(x)), 0

    def _kept_range(self, start: int, seq: int, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """cos, sin and the first row of a range, from the cache, for a plain x."""
        if self.context_length is not None and seq:
            check_within(start + seq - 1, self.context_length)
        device, dtype = key = x.device, working_dtype(x)

        def make(first: int, last: int) -> Angles:
            return self._angles_at(range_positions(last - first, first, device), dtype)

        return self._ranges.find(key, start, start + seq, make)

    def _check_values(self, positions: Tensor, name: str) -> None:
        # Looking at the values would make a device wait, and a compiler stop: eager on the CPU alone.
        if positions.device.type != "cpu" or not is_plain(positions):
            return
        check_finite(positions, name)
        if self.context_length is not None and positions.numel():
            check_within(int(positions.max()), self.context_length)

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
