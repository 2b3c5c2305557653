"""RotaryMoves: keys that are rotated already, turned back, moved, or taken from one spec to another."""

from typing import Any

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, shown
from ropewalk.kernels.angles.torch import cos_sin_between
from ropewalk.kernels.types import Layout
from ropewalk.nn.positions import range_positions
from ropewalk.nn.rotary.angle_source import Angles, RotaryAngles, checked_offset, working_dtype
from ropewalk.nn.rotary.checks import check_inputs, checked_length, checked_role, require_one
from ropewalk.ops import cos_sin, rotate

__all__ = ["RotaryMoves"]


class RotaryMoves(RotaryAngles):
    """The inverse of a rotation, and what follows from R_m R_n = R_{m+n}.

    >>> [name for name in ("unrotate", "shift", "retune") if hasattr(RotaryMoves, name)]
    ['unrotate', 'shift', 'retune']
    """

    layout: Layout

    def unrotate(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        angles: Angles | None = None,
        length: int | Tensor | None = None,
        role: str | None = None,
    ) -> Tensor:
        """The inverse of `forward` on one tensor, given the same positions; divides by the amplitude.

        >>> from ropewalk import RotaryEmbedding
        >>> rope, x = RotaryEmbedding(4), torch.ones(3, 4)
        >>> torch.allclose(rope.unrotate(rope(x)), x)
        True
        """
        check_inputs(x, None, self.spec.head_dim, self.seq_dim, self._heads)
        given = {"positions": positions, "offset": offset, "cu_seqlens": cu_seqlens, "angles": angles}
        require_one(given, None, None)
        role = checked_role(role, self.spec)
        cos, sin, row = self._angles_for(x, **given, length=length, role=role)
        # The transpose of a scaled rotation, divided by the square of its scale, is its inverse.
        fixed = not self.spec.varies and self.spec.same_for_both
        square = self._amplitude.to(cos) ** 2 if fixed else cos**2 + sin**2
        cos, sin = cos / square, sin / square
        turned = rotate(x, None, cos, sin, self.layout, row=row, conjugate=True)[0]
        if role != "q" or not self._tempers_apart:
            return turned
        return self._scale_still(turned, 1 / self._temperature_at(x, **given))

    def _temperature_at(self, q: Tensor, angles: Angles | None = None, **where: Any) -> Tensor:
        """The query temperature where q stands, in the dtype that q is worked in, shaped to multiply it."""
        if angles is not None:
            raise RopewalkError(
                asked="rope(q, angles=...) with a query_temperature over features that do not turn",
                expected="positions: the temperature of such features is not in cos and sin",
                got="angles",
                do="pass positions= or offset=",
            )
        positions = self._positions_of(q, **where)
        if not isinstance(positions, Tensor):
            positions = range_positions(q.shape[self.seq_dim], positions, q.device)
        factor = self._tempered(positions).to(q.device).to(working_dtype(q))
        # [seq] or [batch, seq], before the features and, for seq_dim=-3, the heads.
        factor = factor.view(*factor.shape, *[1] * (-1 - self.seq_dim))
        if positions.dim() == 1:
            return factor
        return factor.view(factor.shape[0], *[1] * (q.dim() - factor.dim()), *factor.shape[1:])

    def _scale_still(self, x: Tensor, factor: Tensor) -> Tensor:
        """x with the features that do not turn multiplied by a factor a token, in float32, rounded once."""
        start, turning = self.layout.start, self.spec.turning
        parts = (x[..., :start], x[..., start : start + turning], x[..., start + turning :])
        before, turned, after = parts
        before, after = ((part.to(factor.dtype) * factor).to(x.dtype) for part in (before, after))
        return torch.cat((before, turned, after), dim=-1)

    def shift(self, x: Tensor, by: int | Tensor, *, length: int | Tensor | None = None) -> Tensor:
        """Moves keys that are rotated already by `by` positions, an int or one a sequence [batch]: R_by R_m = R_{m+by}.

        With more than one axis, all positions of a token move alike. Refused for angles="float32", whose rotations do
        not compose.

        >>> from ropewalk import RotaryEmbedding
        >>> rope, x = RotaryEmbedding(4), torch.ones(3, 4)
        >>> torch.allclose(rope.shift(rope(x), by=-2), rope(x, offset=-2))
        True
        """
        if self.spec.angles != "exact":
            raise RopewalkError(
                asked="rope.shift(x, by)",
                expected='angles="exact", whose rotations compose: R_by R_m = R_{m+by}',
                got=f"angles={self.spec.angles!r}",
                do="rotate the keys afresh: rope(rope.unrotate(k, positions=old), positions=new)",
            )
        check_inputs(x, None, self.spec.head_dim, self.seq_dim, self._heads)
        by = checked_offset(by, x, self.batched(x), "by")
        length = checked_length(length, self.spec, x.shape[0] if self.batched(x) else None, None)
        # Every token moves by the same: a range of one position, as long as the sequence.
        positions = range_positions(1, by, x.device)
        positions = positions.expand(*positions.shape[:-1], x.shape[self.seq_dim])
        if self.spec.axes is not None:
            positions = positions.expand(self.spec.axes.count, *positions.shape)
        here = positions.cpu() if x.device.type == "mps" else positions
        theta, _ = self._rule_at(length, here.device)
        # The amplitude is on the keys already; only what xPos changes from position to position comes anew.
        one = torch.ones((), dtype=torch.float64, device=here.device)
        scale = self._amplitude_of(one, here, "k") / self._amplitude_of(one, here * 0, "k")
        axes = None if self._axes is None else self._axes.to(here.device)
        cos, sin = cos_sin(here, theta, None, scale, working_dtype(x), axes)
        return rotate(x, None, cos.to(x.device), sin.to(x.device), self.layout)[0]

    def retune(
        self,
        x: Tensor,
        to: "RotaryMoves",
        *,
        positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        length: int | Tensor | None = None,
        to_length: int | Tensor | None = None,
    ) -> Tensor:
        """Keys that this module rotated at `positions`, as `to` would have rotated them: one turn by the difference.

        For a cache whose keys were rotated under another rule, or under another `length` of the same rule, when a
        DynamicNTK model grows or a LongRope one passes its trained length: `to` is then the module itself, with
        `to_length`. The two must turn the same features in the same pairs.

        >>> from ropewalk import PositionInterpolation, RopeSpec, RotaryEmbedding
        >>> old, new = RotaryEmbedding(4), RotaryEmbedding(RopeSpec(4, PositionInterpolation(10_000, factor=2)))
        >>> x, p = torch.ones(3, 4), torch.arange(3)
        >>> torch.allclose(old.retune(old(x), to=new, positions=p), new(x), atol=1e-6)
        True
        """
        self._check_retune(to)
        check_inputs(x, None, self.spec.head_dim, self.seq_dim, self._heads)
        given = {"positions": positions, "offset": offset, "cu_seqlens": cu_seqlens, "angles": None}
        require_one(given, None, None)
        where = self._positions_of(x, positions, offset, cu_seqlens)
        seq, rows = x.shape[self.seq_dim], x.shape[0] if self.batched(x) else None
        fresh = seq if positions is offset is cu_seqlens is None else None
        length = checked_length(length, self.spec, rows, fresh)
        to_length = checked_length(to_length, to.spec, rows, fresh, "to_length")
        if not isinstance(where, Tensor):
            where = range_positions(seq, where, x.device)
        here = where.cpu() if x.device.type == "mps" else where
        (old, old_amplitude), (new, new_amplitude) = (
            module._rule_at(n, here.device) for module, n in ((self, length), (to, to_length))
        )
        scale = to._amplitude_of(new_amplitude, here, "k") / self._amplitude_of(old_amplitude, here, "k")
        axes = None if self._axes is None else self._axes.to(here.device)
        cos, sin = cos_sin_between(here, old, new, scale, working_dtype(x), axes)
        return rotate(x, None, cos.to(x.device), sin.to(x.device), self.layout)[0]

    def _check_retune(self, to: Any) -> None:
        if not isinstance(to, RotaryMoves):
            raise RopewalkError(
                asked="rope.retune(x, to=...)",
                expected="a RotaryEmbedding",
                got=shown(to),
                do="make one: RotaryEmbedding(spec)",
            )
        mine, its = ((m.spec, m.layout.interleaved, m.layout.start, m.seq_dim, m._heads) for m in (self, to))
        same = mine[1:] == its[1:] and self.spec.head_dim == to.spec.head_dim and self.spec.turning == to.spec.turning
        if same and (self.spec.axes and self.spec.axes.weights) == (to.spec.axes and to.spec.axes.weights):
            return
        raise RopewalkError(
            asked="rope.retune(x, to=other)",
            expected="the same head_dim, rotary_dim, rotary_slice, pairing, axes and seq_dim in both",
            got=f"{self.extra_repr()} and {to.extra_repr()}",
            do="unrotate with one and rotate with the other: other(rope.unrotate(k, positions=p), positions=p)",
        )
