"""RotaryEmbedding: the module that models use."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Never, Unpack, overload

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, require_count, require_flag, shown
from ropewalk.kernels.angles.torch import cos_sin_between
from ropewalk.kernels.backend import current
from ropewalk.kernels.constructors import empty, ones
from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.torch_internals import calls_forward, compiling_frames, skip_frames
from ropewalk.kernels.types import Layout, Shortcut, Tables
from ropewalk.nn.old_checkpoints import DropsOldBuffers
from ropewalk.nn.position_checks import as_signed
from ropewalk.nn.position_checks import check_ids as check_position_ids
from ropewalk.nn.positions import range_positions
from ropewalk.nn.rotary.angle_makers import note_maker
from ropewalk.nn.rotary.angle_source import AngleSource, Part, angle_device
from ropewalk.nn.rotary.call import (
    Angles,
    Limits,
    PairOptions,
    Placement,
    Role,
    SingleOptions,
    checked_length,
    checked_offset,
    checked_role,
)
from ropewalk.nn.rotary.in_place import check_in_place
from ropewalk.nn.rotary.local_call import LocalCall, local_call, rotate_locally
from ropewalk.nn.rotary.spec_argument import check_same_features, shown_fields, spec_of_arguments
from ropewalk.nn.scripting import refuse_scripting
from ropewalk.ops import cos_sin, require_backend, rotate, rotation_in_place
from ropewalk.ops.dtensors import is_dtensor
from ropewalk.signatures import checks_names, refuse_arguments
from ropewalk.spec.rope import Pairing, RopeSpec

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding(DropsOldBuffers):
    """Rotary position encoding: rotates pair i of a token at position m by the angle m * theta_i.

    RoFormer, 2104.09864, eq. 15 and 34. Pairs are interleaved by default: (0, 1), (2, 3), ... Most checkpoints on model
    hubs use pairing="half". Angles are computed in float64 and the rotation in float32, and the result is rounded once.
    Calls do not change the module. `.to(bfloat16)`, autocast, meta initialisation and `to_empty` do not change the
    frequencies.

    q and k are [..., seq, head_dim] for seq_dim=-2, as in `scaled_dot_product_attention`, or
    [..., seq, heads, head_dim] for seq_dim=-3, as in flash-attention. Positions are [seq], or [batch, seq] if the first
    dimension of q is the batch. They can be fractional or negative, and must be on the device of q. For a spec with A
    axes they are [A, seq] or [A, batch, seq], and are required.

    Args:
        head_dim: Number of features per head, or a RopeSpec.
        base: Base of the frequencies base^(-2i/head_dim). Defaults to 10000. Not allowed with a RopeSpec.
        pairing: "interleaved" (default), or "half": (i, i + head_dim/2). Not allowed with a RopeSpec.
        seq_dim: Dimension of the sequence: -2 or -3.
        context_length: Positions from `context_length` on raise an error if the host knows them: in ranges, and for ids
            on the CPU in eager mode. Ids on a GPU are not checked, because reading them would synchronize.
        learned: Learn the frequencies as theta_i * exp(log_scale_i). The parameter `log_scale` starts at 0. Casting the
            model to bfloat16 rounds `log_scale`, not the frequencies.
        backend: Force "native", "triton" or "torch". A call that it does not support raises. None chooses per call.
        check_ids: Also check ids on a GPU, in eager mode. This synchronizes, and is meant for debugging.

    Raises:
        RopewalkError: If an argument is invalid.

    >>> rope = RotaryEmbedding(2, base=10_000)
    >>> q = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # two tokens
    >>> [[round(x, 4) for x in token] for token in rope(q).tolist()]  # the second is rotated by 1: cos 1, sin 1
    [[1.0, 0.0], [0.5403, 0.8415]]
    """

    @checks_names
    def __init__(
        self,
        head_dim: int | RopeSpec,
        *,
        base: float | None = None,
        pairing: Pairing | None = None,
        seq_dim: Literal[-2, -3] = -2,
        context_length: int | None = None,
        learned: bool = False,
        backend: str | None = None,
        check_ids: bool = False,
    ) -> None:
        super().__init__()
        if seq_dim not in (-2, -3):
            raise RopewalkError(
                asked="RotaryEmbedding(seq_dim=...)",
                expected="-2 for [..., seq, head_dim], or -3 for [..., seq, heads, head_dim]",
                got=repr(seq_dim),
                do="pass the dimension of the sequence, counted from the end",
            )
        if context_length is not None:
            context_length = require_count(
                context_length, asked="RotaryEmbedding(context_length=...)", do="pass the number of positions"
            )
        require_flag(learned, asked="RotaryEmbedding(learned=...)")
        spec = spec_of_arguments(head_dim, base, pairing)
        self.spec: RopeSpec = spec
        self.seq_dim: Literal[-2, -3] = seq_dim
        backend = require_backend(backend)
        check_ids = require_flag(check_ids, asked="RotaryEmbedding(check_ids=...)")
        limits = Limits(context_length, spec.xpos, check_ids)
        self._source = AngleSource(spec, limits, seq_dim=seq_dim, learned=learned, backend=backend)
        with torch.inference_mode(False):
            shape = self._source.inv_freq.shape
            self.log_scale: nn.Parameter | None = nn.Parameter(torch.zeros(shape)) if learned else None

    @property
    def context_length(self) -> int | None:
        """Number of positions that are allowed, from 0 on; None for no limit.

        >>> RotaryEmbedding(4, context_length=8).context_length
        8
        """
        return self._source.limits.context_length

    @property
    def check_ids(self) -> bool:
        """Whether ids on a GPU are checked too.

        >>> RotaryEmbedding(4).check_ids
        False
        """
        return self._source.limits.check_ids

    @property
    def backend(self) -> str | None:
        """The forced backend; None if each call chooses one.

        >>> RotaryEmbedding(4).backend is None
        True
        """
        return self._source.backend

    @property
    def inv_freq(self) -> Tensor:
        """Frequencies sign * theta_i: float64 [pairs], or [heads, pairs] if the heads have different frequencies.

        For a rule that depends on the length, they are the frequencies of short sequences.

        >>> RotaryEmbedding(RopeSpec(4, sign=-1), learned=True).inv_freq.tolist()
        [-1.0, -0.01]
        """
        return self._source.frequencies(self.log_scale)

    @property
    def layout(self) -> Layout:
        """Pairing, first rotated feature and dimension of the sequence.

        >>> RotaryEmbedding(4).layout.start
        0
        """
        return self._source.layout

    @property
    def heads(self) -> int | None:
        """Required number of heads of q and k if frequencies are per head; else None.

        >>> RotaryEmbedding(4).heads is None
        True
        """
        return self._source.heads

    @property
    def keeps_norms(self) -> bool:
        """Whether cos and sin have no factor at any length: no amplitude and no query temperature. xPos is ignored.

        >>> from ropewalk import Yarn
        >>> RotaryEmbedding(4).keeps_norms, RotaryEmbedding(RopeSpec(4, Yarn(factor=4))).keeps_norms
        (True, False)
        """
        return self._source.keeps_norms

    @property
    def norm_shortcut(self) -> Shortcut | None:
        """The common calls of `qk_norm_rope` with this module, or None if the backend has none.

        >>> RotaryEmbedding(4).norm_shortcut is None
        True
        """
        return self._source.norm_shortcut if self._source.registry is current() else None

    @overload
    def forward(self, q: Tensor, k: None = None, **options: Unpack[SingleOptions]) -> Tensor: ...
    @overload
    def forward(self, q: Tensor, k: Tensor, **options: Unpack[PairOptions]) -> tuple[Tensor, Tensor]: ...
    @checks_names
    def forward(
        self,
        q: Tensor,
        k: Tensor | None = None,
        *unnamed: Never,
        positions: Tensor | None = None,
        k_positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        angles: Angles | None = None,
        length: int | Tensor | None = None,
        role: Role | None = None,
        **unknown: Never,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate q, or q and k. Positions default to 0 .. seq-1.

        At most one of `positions`, `offset`, `cu_seqlens` and `angles` is accepted, except `cu_seqlens` with `offset`.

        Args:
            q: Queries, or any single tensor: [..., seq, head_dim], or [..., seq, heads, head_dim] for seq_dim=-3.
            k: Keys, with as many tokens as q unless `k_positions` is passed. The number of heads can differ.
            positions: Positions of q [seq] or [batch, seq], and also of k unless `k_positions` is passed.
            k_positions: Positions of k [keys] or [batch, keys], with `positions` or alone.
            offset: Position of the first token: an int, or a tensor [batch] with one offset per sequence.
            cu_seqlens: Cumulated lengths [sequences + 1] of packed sequences. Each sequence starts at position 0, or at
                its `offset`, which is then an int or a tensor [sequences].
            angles: cos and sin from `at`, or tables of another library: [seq, pairs], [batch, seq, pairs] or
                [1 or batch, heads, seq, pairs]. bfloat16 and float16 tables are converted to float32; the precision
                that they lost stays lost.
            length: Length of the sequence, for DynamicNTK and LongRope: an int, or a tensor [batch] with one length per
                sequence. Required if tokens do not start at position 0. Other rules ignore it.
            role: "q" or "k": what a single tensor contains. Required for xPos and query temperatures, which treat
                queries and keys differently.

        Returns:
            q rotated, or the tuple of q and k rotated, in their dtype.

        Raises:
            RopewalkError: If a shape, dtype, device or position is invalid, or if arguments contradict each other.

        >>> rope = RotaryEmbedding(4)
        >>> q, k = torch.ones(1, 8, 3, 4), torch.ones(1, 2, 3, 4)
        >>> q, k = rope(q, k, offset=100)
        >>> torch.equal(k, rope(torch.ones(1, 2, 3, 4), positions=torch.arange(100, 103)))
        True
        """
        if unnamed or unknown:
            refuse_arguments("rope", RotaryEmbedding.forward, unnamed, unknown)
        placement = Placement(positions, k_positions, offset, cu_seqlens, angles, length, role)
        if is_dtensor(q) or is_dtensor(k):
            return rotate_locally(self, q, k, placement, self.local_call)
        owned = angles is None
        if k_positions is None and role is None and self._source.same_for_both:
            cos, sin, row = self._source.shared_tables(q, k, placement, self.log_scale)
            rotated = rotate(q, k, cos, sin, self.layout, row=row, owned=owned, backend=self._source.backend)
            return rotated[0] if k is None else rotated  # pyright: ignore[reportReturnType]
        results: list[Tensor] = []
        for part in self.parts(q, k, placement):
            cos, sin, row = part.tables
            rotated = rotate(part.q, part.k, cos, sin, self.layout, row=row, owned=owned, backend=self.backend)
            results += rotated if part.temperature is None else [self._scale_rest(rotated[0], part.temperature)]
        return results[0] if k is None else (results[0], results[1])

    if TYPE_CHECKING:  # nn.Module declares that a call returns Any.

        @overload
        def __call__(self, q: Tensor, k: None = None, **options: Unpack[SingleOptions]) -> Tensor: ...
        @overload
        def __call__(self, q: Tensor, k: Tensor, **options: Unpack[PairOptions]) -> tuple[Tensor, Tensor]: ...
        def __call__(self, *arguments: object, **options: object) -> Tensor | tuple[Tensor, Tensor]: ...

    else:

        def __call__(self, *arguments, **options):
            # Host time limits decoding: common calls are checked and run in one step, without the frames of nn.Module.
            # torch.compile must not trace it: the graph would keep cached tensors as constants.
            if not torch.compiler.is_compiling() and compiling_frames() is None:
                source, shortcut = self._source, self._source.shortcut
                if shortcut is not None and source.registry is current() and calls_forward(self, _FORWARD):
                    rotated = shortcut(*arguments, **options)
                    if rotated is not None:
                        return rotated
            return super().__call__(*arguments, **options)

    @overload
    def rotate_(self, q: Tensor, k: None = None, **options: Unpack[SingleOptions]) -> Tensor: ...
    @overload
    def rotate_(self, q: Tensor, k: Tensor, **options: Unpack[PairOptions]) -> tuple[Tensor, Tensor]: ...
    @checks_names
    def rotate_(
        self,
        q: Tensor,
        k: Tensor | None = None,
        *unnamed: Never,
        positions: Tensor | None = None,
        k_positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        angles: Angles | None = None,
        length: int | Tensor | None = None,
        role: Role | None = None,
        **unknown: Never,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`forward` in place: overwrite q, and k if it is passed. If an error is raised, nothing was written.

        Args:
            q: Queries, or any single tensor. It must be writable and must not overlap itself or k.
            k: Keys, under the same conditions.
            positions, k_positions, offset, cu_seqlens, angles, length, role: As in `forward`.

        Returns:
            q, or the tuple of q and k: the same tensors.

        Raises:
            RopewalkError: As in `forward`, and for overlapping memory, leaves of autograd and inference tensors.

        >>> rope, q = RotaryEmbedding(2), torch.ones(3, 2)
        >>> rope.rotate_(q) is q
        True
        """
        if unnamed or unknown:
            refuse_arguments("rope.rotate_", RotaryEmbedding.rotate_, unnamed, unknown)
        if k_positions is cu_seqlens is length is role is None and not torch.compiler.is_compiling():
            source, shortcut = self._source, self._source.shortcut
            if shortcut is not None and source.registry is current():
                rotated = shortcut.rotate_(q, k, positions=positions, offset=offset, angles=angles)
                if rotated is not None:
                    return rotated  # pyright: ignore[reportReturnType]
        placement = Placement(positions, k_positions, offset, cu_seqlens, angles, length, role, call="rope.rotate_")
        parts, layout, writes = self.parts(q, k, placement), self.layout, []
        check_in_place(q, k, any(part.tables.cos.requires_grad or part.tables.sin.requires_grad for part in parts))
        # All checks run here, before the first element is written.
        for part in parts:
            cos, sin, row = part.tables
            writes.append(rotation_in_place(part.q, part.k, cos, sin, layout, row=row, backend=self.backend))
        for part, write in zip(parts, writes, strict=True):
            write()
            if part.temperature is not None:
                part.q.copy_(self._scale_rest(part.q, part.temperature))
        return q if k is None else (q, k)

    @checks_names
    def at(
        self,
        positions: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        length: int | Tensor | None = None,
        role: Role | None = None,
    ) -> Angles:
        """Return cos and sin at `positions`, times the amplitude. Compute them once and pass them as `angles=`.

        Args:
            positions: [seq] or [batch, seq]; [A, seq] or [A, batch, seq] for a spec with A axes.
            dtype: float32, or float64 for float64 input.
            length, role: As in `forward`.

        Returns:
            cos and sin, each [seq, pairs] or [batch, seq, pairs]; [1 or batch, heads, seq, pairs] if frequencies are
            per head.

        Raises:
            RopewalkError: If the shape or dtype of `positions` is invalid, or if the spec requires a length or a role.

        >>> cos, sin = RotaryEmbedding(4).at(torch.tensor([0, 2]))
        >>> [round(c, 4) for c in cos[1].tolist()]  # cos 2, cos 0.02
        [-0.4161, 0.9998]
        """
        count = 1 if self.spec.axes is None else self.spec.axes.count
        check_position_ids(positions, asked="rope.at(positions)", axes=count)
        if dtype not in (torch.float32, torch.float64):
            raise RopewalkError(
                asked=f"rope.at(positions, dtype={dtype})",
                expected="float32, or float64 for float64 input",
                got=f"{dtype}",
                do="omit dtype; the rotation rounds once, at its end",
            )
        positions = as_signed(positions)
        self._source.limits.check_values(positions, "rope.at(positions)", "rope.at")
        role = checked_role(role, self.spec, "rope.at")
        if positions.dim() > (1 if count == 1 else 2):
            rows = positions.shape[-2]
        else:
            # Positions [seq] that all sequences share are accepted with one length per sequence.
            rows = length.numel() if isinstance(length, Tensor) else None
        length = checked_length(length, self.spec, rows, None, call="rope.at")
        angles = self._source.at(positions, dtype, length, role, self.log_scale)
        note_maker(angles[0], self._source.identity, self._source, self.log_scale)
        return angles

    @checks_names
    def unrotate(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        angles: Angles | None = None,
        length: int | Tensor | None = None,
        role: Role | None = None,
    ) -> Tensor:
        """Invert `forward` on one tensor: rotate back, and divide by the amplitude.

        Args:
            x: Rotated queries or keys, of the shape that `forward` returned.
            positions, offset, cu_seqlens, angles, length, role: The arguments that x was rotated with.

        Returns:
            The tensor before the rotation, up to rounding.

        Raises:
            RopewalkError: As in `forward`.

        >>> rope, x = RotaryEmbedding(4), torch.ones(3, 4)
        >>> torch.allclose(rope.unrotate(rope(x)), x)
        True
        """
        self._source.check_tensors(x, None, "rope.unrotate")
        role = checked_role(role, self.spec, "rope.unrotate")
        placement = Placement(positions, None, offset, cu_seqlens, angles, length, role, call="rope.unrotate")
        if is_dtensor(x):
            return self.local_call(x, None, placement)(self.unrotate, [self])
        placement.check(None)
        cos, sin, row = self._source.tables_of(x, placement, self.log_scale)
        # The transpose of a scaled rotation, divided by the square of its scale, is its inverse.
        fixed = not self.spec.varies and self.spec.same_for_both
        square = self._source.amplitude.to(cos) ** 2 if fixed else cos**2 + sin**2
        cos, sin = cos / square, sin / square
        rotated = rotate(x, None, cos, sin, self.layout, row=row, conjugate=True, backend=self.backend)[0]
        temperature = self._source.temperature_of(x, placement)
        return rotated if temperature is None else self._scale_rest(rotated, 1 / temperature)

    @checks_names
    def shift(self, x: Tensor, by: int | Tensor, *, length: int | Tensor | None = None) -> Tensor:
        """Move rotated keys by `by` positions: R_by R_m = R_{m+by}.

        Args:
            x: Rotated keys [..., seq, head_dim], or [..., seq, heads, head_dim] for seq_dim=-3.
            by: Distance: an int, or a tensor [batch] with one distance per sequence. It is added on every axis.
            length: The length that the keys were rotated with, if the rule depends on it.

        Returns:
            The keys rotated at position m + by instead of m.

        Raises:
            RopewalkError: If the spec has angles="float32", whose rotations do not compose, or if `by` does not match.

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
        self._source.check_tensors(x, None, "rope.shift")
        by = checked_offset(by, x, self._source.rows(x), "by")
        length = checked_length(length, self.spec, self._source.rows(x), None, call="rope.shift")
        # Every token of a sequence moves by the same distance.
        positions = range_positions(1, by, x.device)
        positions = positions.expand(*positions.shape[:-1], x.shape[self.seq_dim])
        if self.spec.axes is not None:
            positions = positions.expand(self.spec.axes.count, *positions.shape)
        positions, source = angle_device(positions), self._source
        theta, _ = source.rule_at(length, positions.device, self.log_scale)
        # The keys already contain the amplitude. Only the factor of xPos depends on the position.
        one = ones((), dtype=torch.float64, device=positions.device)
        scale = source.amplitude_of(one, positions, "k") / source.amplitude_of(one, positions * 0, "k")
        axes = source.axes_at(positions.device)
        cos, sin = cos_sin(positions, theta, None, scale, working_dtype(x), axes, backend=self.backend)
        return rotate(x, None, cos.to(x.device), sin.to(x.device), self.layout, backend=self.backend)[0]

    @checks_names
    def retune(
        self,
        x: Tensor,
        to: "RotaryEmbedding",
        *,
        positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        length: int | Tensor | None = None,
        to_length: int | Tensor | None = None,
    ) -> Tensor:
        """Convert keys that this module rotated to keys rotated by `to`, by one rotation by the difference.

        For a cache whose keys were rotated with another rule, or with another `length` of the same rule (`to` is then
        the module itself): a DynamicNTK sequence that grows, a LongRope sequence that passes its trained length.

        Args:
            x: Keys that this module rotated.
            to: The other module. It must rotate the same features in the same pairs.
            positions, offset, cu_seqlens, length: The arguments that x was rotated with.
            to_length: `length` for `to`.

        Returns:
            The keys as `to` would have rotated them, up to rounding.

        Raises:
            RopewalkError: If the two modules rotate different features or pairs, or if an argument does not match x.

        >>> from ropewalk import PositionInterpolation, RopeSpec
        >>> old, new = RotaryEmbedding(4), RotaryEmbedding(RopeSpec(4, PositionInterpolation(10_000, factor=2)))
        >>> x, p = torch.ones(3, 4), torch.arange(3)
        >>> torch.allclose(old.retune(old(x), to=new, positions=p), new(x), atol=1e-6)
        True
        """
        if not isinstance(to, RotaryEmbedding):
            raise RopewalkError(
                asked="rope.retune(x, to=...)",
                expected="a RotaryEmbedding",
                got=shown(to),
                do="create one: RotaryEmbedding(spec)",
            )
        check_same_features(*((m.spec, m.layout, m.heads, m.extra_repr()) for m in (self, to)))
        self._source.check_tensors(x, None, "rope.retune")
        placement = Placement(positions, None, offset, cu_seqlens, length=length, call="rope.retune")
        placement.check(None)
        ids, seq = self._source.positions_or_start(x, placement), x.shape[self.seq_dim]
        fresh = seq if placement.is_fresh() else None
        old_length = checked_length(length, self.spec, self._source.rows(x), fresh, call="rope.retune")
        new_length = checked_length(to_length, to.spec, self._source.rows(x), fresh, "to_length", "rope.retune")
        ids = angle_device(ids if isinstance(ids, Tensor) else range_positions(seq, ids, x.device))
        old, old_amplitude = self._source.rule_at(old_length, ids.device, self.log_scale)
        new, new_amplitude = to._source.rule_at(new_length, ids.device, to.log_scale)
        new_scale = to._source.amplitude_of(new_amplitude, ids, "k")
        scale = new_scale / self._source.amplitude_of(old_amplitude, ids, "k")
        axes = self._source.axes_at(ids.device)
        cos, sin = cos_sin_between(ids, old, new, scale, working_dtype(x), axes)
        return rotate(x, None, cos.to(x.device), sin.to(x.device), self.layout, backend=self.backend)[0]

    def batched(self, x: Tensor) -> bool:
        """Whether the first dimension of x is the batch, and not the sequence or heads with frequencies per head.

        >>> RotaryEmbedding(4).batched(torch.ones(2, 3, 4)), RotaryEmbedding(4).batched(torch.ones(3, 4))
        (True, False)
        """
        return self._source.batched(x)

    def parts(self, q: Tensor, k: Tensor | None, placement: Placement) -> list[Part]:
        """Split a call into parts: q and k with the same cos and sin, or one part per tensor.

        >>> rope, x = RotaryEmbedding(4), torch.ones(3, 4)
        >>> len(rope.parts(x, x, Placement())), len(rope.parts(x, x, Placement(k_positions=torch.arange(3))))
        (1, 2)
        """
        return self._source.parts(q, k, placement, self.log_scale)

    def shared_tables(self, q: Tensor, k: Tensor | None, placement: Placement) -> Tables:
        """Return cos and sin for q and k at the same positions. Do not write to them: they can belong to the cache.

        >>> rope, x = RotaryEmbedding(4), torch.ones(3, 4)
        >>> rope.shared_tables(x, x, Placement(angles=rope.at(torch.arange(3)))).cos.shape
        torch.Size([3, 2])
        """
        return self._source.shared_tables(q, k, placement, self.log_scale)

    def local_call(self, q: Tensor, k: Tensor | None, placement: Placement) -> LocalCall:
        """This rank's part of a call with DTensors. Not for plain tensors."""
        return local_call(self._source, q, k, placement)

    def _scale_rest(self, x: Tensor, factor: Tensor) -> Tensor:
        """Multiply the features of x that are not rotated by one factor per token, in float32, rounded once."""
        start, rotated = self.layout.start, self.spec.rotated_dim
        before, middle, after = x[..., :start], x[..., start : start + rotated], x[..., start + rotated :]
        before, after = ((part.to(factor.dtype) * factor).to(x.dtype) for part in (before, after))
        return torch.cat((before, middle, after), dim=-1)

    def reset_parameters(self) -> None:
        """Reset learned frequencies to those of the spec, as initialisation after `to_empty` does.

        >>> rope = RotaryEmbedding(4, learned=True)
        >>> rope.reset_parameters()
        >>> rope.inv_freq.tolist()
        [1.0, 0.01]
        """
        if self.log_scale is not None:
            nn.init.zeros_(self.log_scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        super()._apply(fn, recurse)
        # fn can cast, move or empty tensors. The frequencies only follow its device.
        self._source.to(fn(empty(0, device=self._source.inv_freq.device)).device)
        return self

    __prepare_scriptable__ = refuse_scripting

    def extra_repr(self) -> str:
        """The spec in one line. Pairing and base come first: they are the most frequent mistakes."""
        parts = [*shown_fields(self.spec), f"seq_dim={self.seq_dim}"]
        options = {"context_length": self.context_length, "backend": self.backend}
        parts += [f"{name}={value!r}" for name, value in options.items() if value is not None]
        flags = {"learned": self.log_scale is not None, "check_ids": self.check_ids}
        return ", ".join([*parts, *(f"{name}=True" for name, is_set in flags.items() if is_set)])


_FORWARD = RotaryEmbedding.forward
# torch.compile(rope) compiles `forward`, and runs hooks outside of it, as for any module.
skip_frames(RotaryEmbedding.__call__)
