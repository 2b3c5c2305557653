"""RotaryEncoding: a RotaryEmbedding behind the `rotate` hook."""

from typing import Any

from torch import Tensor

from ropewalk.errors import RopewalkError, require_count, shown
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.spec.frequencies import AcrossHeads

__all__ = ["AcrossHeadsEncoding", "RotaryEncoding", "XPosEncoding"]


class RotaryEncoding(Encoding):
    """Turns queries and keys by angles that grow with their positions (RoFormer, 2104.09864, eq. 34), by `rope`.

    Relative: the angle between a query and a key depends on their distance, up to rounding. A query_temperature in the
    spec multiplies queries by where they stand, and makes it absolute. Defined past any length unless the module has a
    context_length. For linear attention too, since each token is turned by itself. A spec with a softmax_scale, as
    DeepSeek's YaRN has it, multiplies the usual 1/sqrt(head_dim): `scale` has the product.

    Rules that depend on the length (DynamicNTK, LongRope) are given it once, as `at_length`: keys in a cache stay as
    they were rotated, so the length must not move under them. With a spec of A axes positions are [A, seq] or
    [A, batch, seq].

    >>> import torch
    >>> rope = RotaryEncoding(RotaryEmbedding(2))
    >>> q = torch.tensor([[[[1.0, 0.0]]]])  # one token
    >>> q, k = rope.rotate(q, q, torch.tensor([1]), k_positions=torch.tensor([0]))
    >>> [round(x, 4) for x in q.flatten().tolist()], k.flatten().tolist()  # cos 1, sin 1
    ([0.5403, 0.8415], [1.0, 0.0])
    """

    name = "rope"

    def __init__(self, rope: RotaryEmbedding, *, at_length: int | None = None) -> None:
        super().__init__()
        asked = type(self).__name__
        if not isinstance(rope, RotaryEmbedding) or rope.seq_dim != -2:
            raise RopewalkError(
                asked=f"{asked}(rope)",
                expected="a RotaryEmbedding with seq_dim=-2, for [batch, heads, seq, head_dim]",
                got=shown(rope),
                do="make one: RotaryEmbedding(head_dim, pairing=...)",
            )
        if rope.spec.varies != (at_length is not None):
            rule = type(rope.spec.frequencies).__name__
            raise RopewalkError(
                asked=f"{asked}(rope, at_length=...) with {rule}",
                expected="the length that its frequencies are for" if rope.spec.varies else "no length: it needs none",
                got=f"at_length={at_length!r}",
                do="pass the longest length that is to come" if rope.spec.varies else "leave at_length out",
            )
        if at_length is not None:
            at_length = require_count(
                at_length, asked=f"{asked}(at_length=...)", do="pass how many positions there are"
            )
        self.rope, self.at_length = rope, at_length

    @property
    def relative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether attention stays as it is when all positions shift: not with a query temperature."""
        return self.rope.spec.query_temperature is None

    @property
    def length(self) -> int | None:
        xpos = self.rope.spec.xpos
        ends = [end for end in (self.rope.context_length, None if xpos is None else xpos.length) if end is not None]
        return min(ends, default=None)

    @property
    def scale(self) -> float | None:
        spec = self.rope.spec
        return None if spec.softmax_scale == 1.0 else spec.softmax_scale * spec.head_dim**-0.5

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, *, k_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        turned: Any = self.rope(q, k, positions=positions, k_positions=k_positions, length=self.at_length)
        return turned

    def extra_repr(self) -> str:
        return "" if self.at_length is None else f"at_length={self.at_length}"


class AcrossHeadsEncoding(RotaryEncoding):
    """One rotation over the width of the model, made before the heads are split: each head has its own frequencies.

    theta_i = base^(-2i/d) over d = num_heads * head_dim, of which head 0 has the fastest; the usual rotation gives
    every head the same. Keys must have as many heads as queries: grouped ones have no frequencies that fit all their
    queries, and are refused.

    >>> from ropewalk.spec import RopeSpec
    >>> encoding = AcrossHeadsEncoding(RotaryEmbedding(RopeSpec(2, AcrossHeads(10_000, num_heads=2))))
    >>> encoding.rope.inv_freq.tolist()  # d = 4
    [[1.0], [0.01]]
    """

    name = "rope-across-heads"

    def __init__(self, rope: RotaryEmbedding) -> None:
        super().__init__(rope)
        if not isinstance(rope.spec.frequencies, AcrossHeads):
            raise RopewalkError(
                asked="AcrossHeadsEncoding(rope)",
                expected="a RotaryEmbedding of a spec with AcrossHeads frequencies",
                got=shown(rope.spec.frequencies),
                do="RotaryEmbedding(RopeSpec(head_dim, AcrossHeads(base, num_heads)))",
            )


class XPosEncoding(RotaryEncoding):
    """RoPE whose queries grow and keys shrink with position, so that scores fall with distance (2212.10554, eq. 17).

    The factors of a query and a key multiply to zeta_i^((m - n) / scale_base): relative, as the rotation is. Defined
    for the length of `XPos`. Whatever else the spec says holds too.

    >>> from ropewalk.spec import RopeSpec, XPos
    >>> XPosEncoding(RotaryEmbedding(RopeSpec(64, xpos=XPos(1024)))).length
    1024
    """

    name = "xpos"

    def __init__(self, rope: RotaryEmbedding, *, at_length: int | None = None) -> None:
        super().__init__(rope, at_length=at_length)
        if rope.spec.xpos is None:
            raise RopewalkError(
                asked="XPosEncoding(rope)",
                expected="a RotaryEmbedding of a spec with xpos=XPos(length)",
                got=shown(rope.spec),
                do="RotaryEmbedding(RopeSpec(head_dim, xpos=XPos(length)))",
            )
