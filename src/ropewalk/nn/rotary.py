"""RotaryEmbedding: the module that models use."""

from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_count
from ropewalk.kernels.layout import Layout
from ropewalk.nn.positions import range_positions
from ropewalk.nn.rotary_angles import Angles, RotaryAngles, checked_offset, working_dtype
from ropewalk.nn.rotary_arguments import check_angles, check_in_place, check_inputs
from ropewalk.ops import require_backend, rotate, rotate_, rotate_directly
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import RopeSpec

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding(RotaryAngles):
    """Rotary position encoding: turns each pair i of features at position m by the angle m * theta_i.

    RoFormer, 2104.09864, eq. 15 and 34. Pairs are interleaved, (0,1), (2,3), .., unless told otherwise; most
    checkpoints on model hubs are pairing="half". Angles are formed in float64, the rotation in float32, and the result
    is rounded once. Nothing that forward does is seen by a later forward, and `.to(bfloat16)`, autocast, meta
    initialisation and `to_empty` cannot touch the frequencies.

    q and k are [..., seq, head_dim] for seq_dim=-2, as `scaled_dot_product_attention` takes them, or
    [..., seq, heads, head_dim] for seq_dim=-3, as flash-attention does. Positions are [seq], or [batch, seq] with the
    batch as the first dimension of q; whole or not, negative allowed, on the device of q.

    `context_length` refuses positions past it where the host knows them: ranges, and ids on the CPU in eager mode.

    `learned=True` makes the frequencies theta_i * exp(log_scale_i) with one parameter, log_scale, that starts at 0: a
    model that is cast to bfloat16 rounds the change and not the frequencies.

    >>> rope = RotaryEmbedding(2, base=10_000)
    >>> q = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # two tokens
    >>> [[round(x, 4) for x in token] for token in rope(q).tolist()]  # the second turned by 1: cos 1, sin 1
    [[1.0, 0.0], [0.5403, 0.8415]]
    """

    def __init__(
        self,
        dim: int | RopeSpec,
        *,
        base: float | None = None,
        pairing: str | None = None,
        seq_dim: int = -2,
        context_length: int | None = None,
        learned: bool = False,
        backend: str | None = None,
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
        spec = _spec(dim, base, pairing)
        super().__init__(spec, seq_dim=seq_dim, context_length=context_length, learned=learned)
        self.backend = require_backend(backend)
        still = spec.head_dim - 2 * self._spec_inv_freq.shape[-1]
        start = 0 if spec.rotary_slice == "leading" else still
        self.layout = Layout(spec.pairing == "interleaved", start, seq_dim, self.backend)

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
    ) -> Any:
        """Rotates q, or q and k. Positions are 0 .. seq-1 unless one of these says otherwise:

        `positions` of q, and of k unless `k_positions` says otherwise; `offset`, an int, or one a sequence [batch], at
        which they start; `cu_seqlens`, the ends of sequences that are laid end to end, each of which starts at 0;
        `angles`, cos and sin that `at` computed before. One of them; k_positions goes beside positions, or alone.

        >>> rope = RotaryEmbedding(4)
        >>> q, k = torch.ones(1, 8, 3, 4), torch.ones(1, 2, 3, 4)
        >>> q, k = rope(q, k, offset=100)
        >>> torch.equal(k, rope(torch.ones(1, 2, 3, 4), positions=torch.arange(100, 103)))
        True
        """
        if (
            positions is k_positions is cu_seqlens is angles is None
            and not torch.compiler.is_compiling()
            and _is_start(offset)
        ):
            # Decoding, where the host's time decides: what is in order goes straight to the kernel. A compiler must not
            # see the cache: it would hold on to what is in it.
            block, start, stop = self._ranges.recent, offset or 0, self.context_length
            if block is not None:
                stop = block.stop if stop is None else min(stop, block.stop)
                where = start - block.start, stop - start
                turned = rotate_directly(q, k, block.cos, block.sin, self.layout, *where, self.spec.head_dim)
                if turned is not None:
                    return turned[0] if k is None else turned
        if k_positions is not None:
            here, there = self._two_places(q, k, positions, k_positions, offset, cu_seqlens, angles)
            both = ((q, here), (cast(Tensor, k), there))
            return tuple(rotate(x, None, cos, sin, self.layout, row=row)[0] for x, (cos, sin, row) in both)
        cos, sin, row = self._place(q, k, positions, offset, cu_seqlens, angles)
        turned = rotate(q, k, cos, sin, self.layout, row=row)
        return turned[0] if k is None else turned

    def _place(
        self,
        q: Tensor,
        k: Tensor | None = None,
        positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        angles: Angles | None = None,
    ) -> tuple[Tensor, Tensor, int]:
        """cos, sin and the row of them that is the first token's, for q and for k at the same positions.

        They may be the cache's own, which nobody else may have. What does not fit together is refused here.
        """
        check_inputs(q, k, self.spec.head_dim, self.seq_dim, self._heads)
        if positions is None and cu_seqlens is None and angles is None and _is_start(offset):
            cos, sin, row = self._range(offset or 0, q.shape[self.seq_dim], q)
        else:
            given = {"positions": positions, "offset": offset, "cu_seqlens": cu_seqlens, "angles": angles}
            _require_one(given, None, k)
            cos, sin, row = self._angles_for(q, **given)
        if k is None:
            return cos, sin, row
        if q.shape[self.seq_dim] != k.shape[self.seq_dim]:
            raise RopewalkError(
                asked="rope(q, k)",
                expected="as many keys as queries, or k_positions",
                got=f"{q.shape[self.seq_dim]} queries and {k.shape[self.seq_dim]} keys",
                do="for [..., seq, heads, head_dim] make it with seq_dim=-3; else give k_positions",
            )
        if cos.dim() > 2 and cos.shape[-2] == q.shape[self.seq_dim]:
            # They were found for q; keys of another batch or other heads would broadcast in silence.
            check_angles((cos, sin), k, cos.shape[-1], self.seq_dim)
        return cos, sin, row

    def _two_places(
        self, q: Tensor, k: Tensor | None, positions: Tensor | None, k_positions: Tensor, *others: Any
    ) -> tuple[tuple[Tensor, Tensor, int], tuple[Tensor, Tensor, int]]:
        check_inputs(q, k, self.spec.head_dim, self.seq_dim, self._heads)
        offset, cu_seqlens, angles = others
        given = {"positions": positions, "offset": offset, "cu_seqlens": cu_seqlens, "angles": angles}
        _require_one(given, k_positions, k)
        here = self._angles_for(q, **given)
        return here, self._angles_for(cast(Tensor, k), positions=k_positions, name="k_positions")

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
    ) -> Any:
        """`forward` in place: q, and k if given, are overwritten and returned. What is refused leaves both as they are.

        >>> rope, q = RotaryEmbedding(2), torch.ones(3, 2)
        >>> rope.rotate_(q) is q
        True
        """
        check_inputs(q, k, self.spec.head_dim, self.seq_dim, self._heads)
        check_in_place(q, k)
        if k_positions is not None:
            here, there = self._two_places(q, k, positions, k_positions, offset, cu_seqlens, angles)
            parts = [(q, None, *here), (cast(Tensor, k), None, *there)]
        else:
            parts = [(q, k, *self._place(q, k, positions, offset, cu_seqlens, angles))]
        for x, other, cos, sin, row in parts:
            if not rotate_(x, other, cos, sin, self.layout, row=row):
                turned = rotate(x, other, cos, sin, self.layout, row=row)
                for target, source in zip((x, other), turned, strict=False):
                    cast(Tensor, target).copy_(source)
        return q if k is None else (q, k)

    def unrotate(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        offset: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        angles: Angles | None = None,
    ) -> Tensor:
        """The inverse of `forward` on one tensor, given the same positions; divides by the amplitude.

        >>> rope, x = RotaryEmbedding(4), torch.ones(3, 4)
        >>> torch.allclose(rope.unrotate(rope(x)), x)
        True
        """
        check_inputs(x, None, self.spec.head_dim, self.seq_dim, self._heads)
        given = {"positions": positions, "offset": offset, "cu_seqlens": cu_seqlens, "angles": angles}
        _require_one(given, None, None)
        cos, sin, row = self._angles_for(x, **given)
        # The transpose of a scaled rotation, divided by the square of its scale, is its inverse.
        square = self._amplitude.to(cos) ** 2
        cos, sin = cos / square, sin / square
        return rotate(x, None, cos, sin, self.layout, row=row, conjugate=True)[0]

    def shift(self, x: Tensor, by: int | Tensor) -> Tensor:
        """Moves what is rotated already by `by` positions, an int or one a sequence [batch]: R_by R_m = R_{m+by}.

        Refused for angles="float32", whose rotations do not compose.

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
        # Every token moves by the same: a range of one position, as long as the sequence.
        positions = range_positions(1, by, x.device)
        positions = positions.expand(*positions.shape[:-1], x.shape[self.seq_dim])
        cos, sin = self._angles_at(positions, working_dtype(x), amplitude=torch.ones_like(self._amplitude))
        return rotate(x, None, cos, sin, self.layout)[0]

    def extra_repr(self) -> str:
        """The spec in a line: the pairing and the base, which most often are wrong, come first."""
        spec = self.spec
        parts = [f"{spec.head_dim}", f"{spec.frequencies}", f"pairing={spec.pairing!r}"]
        if spec.rotary_dim != spec.head_dim:
            parts.append(f"rotary_dim={spec.rotary_dim} ({spec.rotary_slice})")
        usual = {"sign": 1, "angles": "exact"}
        parts += [f"{name}={getattr(spec, name)!r}" for name in usual if getattr(spec, name) != usual[name]]
        parts.append(f"seq_dim={self.seq_dim}")
        own = {name: getattr(self, name) for name in ("context_length", "backend")}
        parts += [f"{name}={value!r}" for name, value in own.items() if value is not None]
        return ", ".join([*parts, *(["learned=True"] if self.log_scale is not None else [])])


def _spec(dim: int | RopeSpec, base: float | None, pairing: str | None) -> RopeSpec:
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


def _require_one(given: dict[str, Any], k_positions: Tensor | None, k: Tensor | None) -> None:
    """Refuses two answers to the question where q stands, and keys' positions without keys."""
    named = [name for name, value in given.items() if value is not None]
    if len(named) <= 1 and (k_positions is None or (k is not None and named in ([], ["positions"]))):
        return
    named += [] if k_positions is None else ["k_positions"]
    raise RopewalkError(
        asked="rope(q, ...)" if k is None else "rope(q, k, ...)",
        expected="one of positions, offset, cu_seqlens and angles; k_positions with k, beside positions or alone",
        got=", ".join(named),
        do="add an offset to the positions yourself; give at() the positions of its angles",
    )
