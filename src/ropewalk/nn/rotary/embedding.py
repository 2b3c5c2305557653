"""RotaryEmbedding: the module that models use."""

from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_count, require_flag, shown
from ropewalk.kernels.types import Layout
from ropewalk.nn.rotary.angle_source import Angles
from ropewalk.nn.rotary.checks import check_angles, check_in_place, check_inputs, checked_role, require_one
from ropewalk.nn.rotary.moves import RotaryMoves
from ropewalk.nn.rotary.range_cache import stream_of
from ropewalk.ops import require_backend, rotate, rotate_, rotate_directly
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import RopeSpec

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding(RotaryMoves):
    """Rotary position encoding: turns each pair i of features at position m by the angle m * theta_i.

    RoFormer, 2104.09864, eq. 15 and 34. Pairs are interleaved, (0,1), (2,3), .., unless told otherwise; most
    checkpoints on model hubs are pairing="half". Angles are formed in float64, the rotation in float32, and the result
    is rounded once. Nothing that forward does is seen by a later forward, and `.to(bfloat16)`, autocast, meta
    initialisation and `to_empty` cannot touch the frequencies.

    q and k are [..., seq, head_dim] for seq_dim=-2, as `scaled_dot_product_attention` takes them, or
    [..., seq, heads, head_dim] for seq_dim=-3, as flash-attention does. Positions are [seq], or [batch, seq] with the
    batch as the first dimension of q; whole or not, negative allowed, on the device of q. For a spec with A axes they
    are [A, seq] or [A, batch, seq], and must be given.

    `context_length` refuses positions past it where the host knows them: ranges, and ids on the CPU in eager mode. Ids
    on a GPU are not looked at, which would make the host wait for it; to find a mistake, check_ids=True looks at them,
    there as on the CPU, in eager mode.

    `learned=True` makes the frequencies theta_i * exp(log_scale_i) with one parameter, log_scale, that starts at 0: a
    model that is cast to bfloat16 rounds the change and not the frequencies.

    >>> rope = RotaryEmbedding(2, base=10_000)
    >>> q = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # two tokens
    >>> [[round(x, 4) for x in token] for token in rope(q).tolist()]  # the second turned by 1: cos 1, sin 1
    [[1.0, 0.0], [0.5403, 0.8415]]
    """

    def __init__(
        self,
        head_dim: int | RopeSpec,
        *,
        base: float | None = None,
        pairing: str | None = None,
        seq_dim: int = -2,
        context_length: int | None = None,
        learned: bool = False,
        backend: str | None = None,
        check_ids: bool = False,
    ) -> None:
        if seq_dim not in (-2, -3):
            raise RopewalkError(
                asked="RotaryEmbedding(seq_dim=...)",
                expected="-2 for [..., seq, head_dim], or -3 for [..., seq, heads, head_dim]",
                got=repr(seq_dim),
                do="say where the sequence stands, counted from the end",
            )
        if context_length is not None:
            context_length = require_count(
                context_length, asked="RotaryEmbedding(context_length=...)", do="pass how many positions there may be"
            )
        spec = _spec(head_dim, base, pairing)
        super().__init__(spec, seq_dim=seq_dim, context_length=context_length, learned=learned)
        self.backend = require_backend(backend)
        self.check_ids = require_flag(check_ids, asked="RotaryEmbedding(check_ids=...)")
        still = spec.head_dim - 2 * self._spec_inv_freq.shape[-1]
        start = 0 if spec.rotary_slice == "leading" else still
        self.layout = Layout(spec.pairing == "interleaved", start, seq_dim, self.backend)
        # Whether a call for a plain range may go straight to the kernel, with what the cache holds.
        self._plain_ranges = spec.same_for_both and not spec.varies and spec.axes is None

    def forward(
        self,
        q: Tensor,
        k: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        k_positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        angles: Angles | None = None,
        length: int | Tensor | None = None,
        role: str | None = None,
    ) -> Any:
        """Rotates q, or q and k. Positions are 0 .. seq-1 unless one of these says otherwise:

        `positions` of q, and of k unless `k_positions` says otherwise; `offset`, an int, or one a sequence [batch], at
        which they start; `cu_seqlens`, the ends of sequences that are laid end to end, each of which starts at 0;
        `angles`, cos and sin that `at` computed before. One of them; k_positions goes beside positions, or alone.

        `length`, an int or one a sequence [batch], is how long the sequence is, for DynamicNTK and LongRope; it is
        needed wherever tokens do not start at 0. `role`, "q" or "k", says what a single tensor holds, for xPos and
        query temperatures, which treat the two differently.

        >>> rope = RotaryEmbedding(4)
        >>> q, k = torch.ones(1, 8, 3, 4), torch.ones(1, 2, 3, 4)
        >>> q, k = rope(q, k, offset=100)
        >>> torch.equal(k, rope(torch.ones(1, 2, 3, 4), positions=torch.arange(100, 103)))
        True
        """
        if (
            positions is k_positions is cu_seqlens is angles is length is role is None
            and self._plain_ranges
            and not torch.compiler.is_compiling()
            and _is_start(offset)
        ):
            # Decoding, where the host's time decides: what is in order goes straight to the kernel. A compiler must not
            # see the cache: it would hold on to what is in it.
            block, start, stop = self._ranges.recent, offset or 0, self.context_length
            if block is not None and stream_of(block.key[0]) == block.key[2]:
                stop = block.stop if stop is None else min(stop, block.stop)
                where = start - block.start, stop - start
                turned = rotate_directly(q, k, block.cos, block.sin, self.layout, *where, self.spec.head_dim)
                if turned is not None:
                    return turned[0] if k is None else turned
        turned = []
        for x, other, place, tempered in self._parts(
            q, k, positions, k_positions, offset, cu_seqlens, angles, length, role
        ):
            cos, sin, row = place
            done = rotate(x, other, cos, sin, self.layout, row=row)
            turned += [done[0] if tempered is None else self._scale_still(done[0], tempered)] if other is None else done
        return turned[0] if k is None else tuple(turned)

    def _parts(
        self,
        q: Tensor,
        k: Tensor | None,
        positions: Tensor | None,
        k_positions: Tensor | None,
        offset: int | Tensor | None,
        cu_seqlens: Tensor | None,
        angles: Angles | None,
        length: int | Tensor | None,
        role: str | None,
    ) -> list[tuple[Tensor, Tensor | None, tuple[Tensor, Tensor, int], Tensor | None]]:
        """What is to be rotated: one or two tensors, their cos, sin and first row, and a factor that comes after."""
        where = {"positions": positions, "offset": offset, "cu_seqlens": cu_seqlens, "angles": angles}
        if k is not None and role is not None:
            raise RopewalkError(
                asked="rope(q, k, role=...)",
                expected="a role for a single tensor; the second of two holds keys",
                got=f"role={role!r} and two tensors",
                do="leave role out",
            )
        if self.spec.same_for_both and k_positions is None:
            if role is not None:
                checked_role(role, self.spec)
            return [(q, k, self._place(q, k, positions, offset, cu_seqlens, angles, length), None)]
        check_inputs(q, k, self.spec.head_dim, self.seq_dim, self._heads)
        require_one(where, k_positions, k)
        if k is None:
            role = checked_role(role, self.spec)
            place = self._angles_for(q, **where, length=length, role=role)
            return [(q, None, place, self._temper(q, where) if role == "q" else None)]
        if self.spec.same_for_both:
            q_role = k_role = None
        elif angles is not None:
            raise RopewalkError(
                asked="rope(q, k, angles=...) with a spec that treats queries and keys differently",
                expected="angles of their own for q and for k",
                got="one pair of cos and sin",
                do='rotate them in two calls: rope(q, angles=rope.at(p, role="q"), role="q"), and so for k',
            )
        else:
            q_role, k_role = "q", "k"
        if k_positions is None:
            self._check_lengths(q, k)
        there = where if k_positions is None else {"positions": k_positions, "name": "k_positions"}
        here = self._angles_for(q, **where, length=length, role=q_role)
        other = self._angles_for(k, **there, length=length, role=k_role)
        return [(q, None, here, self._temper(q, where) if q_role else None), (k, None, other, None)]

    def _temper(self, q: Tensor, where: dict[str, Any]) -> Tensor | None:
        """The factor on whole queries, where it reaches features that do not turn."""
        return self._temperature_at(q, **where) if self._tempers_apart else None

    def _place(
        self,
        q: Tensor,
        k: Tensor | None = None,
        positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        angles: Angles | None = None,
        length: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor, int]:
        """cos, sin and the row of them that is the first token's, for q and for k at the same positions.

        They may be the cache's own, which nobody else may have. What does not fit together is refused here.
        """
        check_inputs(q, k, self.spec.head_dim, self.seq_dim, self._heads)
        if positions is None and cu_seqlens is None and angles is None and self._plain_ranges and _is_start(offset):
            cos, sin, row = self._range(offset or 0, q.shape[self.seq_dim], q, None, None)
        else:
            given = {"positions": positions, "offset": offset, "cu_seqlens": cu_seqlens, "angles": angles}
            require_one(given, None, k)
            cos, sin, row = self._angles_for(q, **given, length=length)
        if k is None:
            return cos, sin, row
        self._check_lengths(q, k)
        if cos.dim() > 2 and cos.shape[-2] == q.shape[self.seq_dim]:
            # They were found for q; keys of another batch or other heads would broadcast in silence.
            check_angles((cos, sin), k, cos.shape[-1], self.seq_dim)
        return cos, sin, row

    def _check_lengths(self, q: Tensor, k: Tensor) -> None:
        if q.shape[self.seq_dim] != k.shape[self.seq_dim]:
            raise RopewalkError(
                asked="rope(q, k)",
                expected="as many keys as queries, or k_positions",
                got=f"{q.shape[self.seq_dim]} queries and {k.shape[self.seq_dim]} keys",
                do="for [..., seq, heads, head_dim] make it with seq_dim=-3; else give k_positions",
            )

    def rotate_(
        self,
        q: Tensor,
        k: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        k_positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        angles: Angles | None = None,
        length: int | Tensor | None = None,
        role: str | None = None,
    ) -> Any:
        """`forward` in place: q, and k if given, are overwritten and returned. What is refused leaves both as they are.

        >>> rope, q = RotaryEmbedding(2), torch.ones(3, 2)
        >>> rope.rotate_(q) is q
        True
        """
        check_inputs(q, k, self.spec.head_dim, self.seq_dim, self._heads)
        check_in_place(q, k)
        parts = self._parts(q, k, positions, k_positions, offset, cu_seqlens, angles, length, role)
        for x, other, (cos, sin, row), tempered in parts:
            if not rotate_(x, other, cos, sin, self.layout, row=row):
                turned = rotate(x, other, cos, sin, self.layout, row=row)
                for target, source in zip((x, other), turned, strict=False):
                    cast(Tensor, target).copy_(source)
            if tempered is not None:
                x.copy_(self._scale_still(x, tempered))
        return q if k is None else (q, k)

    def extra_repr(self) -> str:
        """The spec in a line: the pairing and the base, which most often are wrong, come first."""
        spec = self.spec
        parts = [f"{spec.head_dim}", f"{spec.frequencies}", f"pairing={spec.pairing!r}"]
        if spec.rotary_dim != spec.head_dim:
            parts.append(f"rotary_dim={spec.rotary_dim} ({spec.rotary_slice})")
        usual = {"axes": None, "sign": 1, "xpos": None, "query_temperature": None, "angles": "exact"}
        parts += [f"{name}={getattr(spec, name)!r}" for name in usual if getattr(spec, name) != usual[name]]
        parts.append(f"seq_dim={self.seq_dim}")
        own = {name: getattr(self, name) for name in ("context_length", "backend")}
        parts += [f"{name}={value!r}" for name, value in own.items() if value is not None]
        flags = {"learned": self.log_scale is not None, "check_ids": self.check_ids}
        return ", ".join([*parts, *(f"{name}=True" for name, set_ in flags.items() if set_)])


def _spec(dim: int | RopeSpec, base: float | None, pairing: str | None) -> RopeSpec:
    if dim is None or isinstance(dim, dict):
        layers = isinstance(dim, dict) and all(value is None or isinstance(value, RopeSpec) for value in dim.values())
        raise RopewalkError(
            asked="RotaryEmbedding(...)",
            expected="a head_dim, or one RopeSpec",
            got=f"one spec a layer type: {', '.join(map(str, dim))}" if dim and layers else shown(dim),
            do="make a module of each that is not None: RotaryEmbedding(specs[layer_type])"
            if layers
            else "read a config with load_spec first; None, for layers without rotation, needs no module",
        )
    if not isinstance(dim, RopeSpec):
        frequencies = Plain() if base is None else Plain(base)
        return RopeSpec(dim, frequencies, pairing="interleaved" if pairing is None else pairing)
    if base is not None or pairing is not None:
        raise RopewalkError(
            asked="RotaryEmbedding(spec, ...)",
            expected="a spec alone: it says the base and the pairing",
            got=f"a spec with base={base}, pairing={pairing!r}",
            do="put them into the spec: RopeSpec(128, Plain(base), pairing=...)",
        )
    return dim


def _is_start(offset: Any) -> TypeGuard[int | None]:
    """Whether this is no offset, or an int that a position can be: the common cases, without a look at the rest."""
    return offset is None or (type(offset) is int and -(1 << 62) < offset < 1 << 62)
