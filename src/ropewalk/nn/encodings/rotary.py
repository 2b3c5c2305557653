"""RotaryEncoding: a RotaryEmbedding as an encoding, and checks that an encoding matches the heads of a layer."""

from typing import TypedDict, Unpack

from torch import Tensor

from ropewalk.errors import RopewalkError, require_count, shown
from ropewalk.nn.encodings.base import Encoding, encodes_heads, head_dim_of_model
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.spec.frequencies import AcrossHeads
from ropewalk.spec.rope import Pairing, RopeSpec

__all__ = [
    "AcrossHeadsEncoding",
    "RopeOptions",
    "RotaryEncoding",
    "XPosEncoding",
    "across_heads_for_model",
    "as_encoding",
    "check_encoding",
    "check_head_dim",
    "rope_axes",
    "rope_for_linear",
    "rope_for_model",
    "rope_in",
    "xpos_for_model",
]


class RotaryEncoding(Encoding):
    """Rotate queries and keys by angles proportional to their positions (RoFormer, 2104.09864, eq. 34).

    Relative: scores depend on the distance between query and key, up to rounding. A query_temperature in the spec makes
    the encoding absolute, because it multiplies queries by a function of their position. There is no limit on positions
    unless the module has a context_length. Linear attention supports it, because each token is rotated separately. The
    softmax_scale of a spec, as in DeepSeek's YaRN, multiplies the usual 1/sqrt(head_dim): `scale` is the product.

    Rules that depend on the length (DynamicNTK, LongRope) use the fixed length `at_length`, because rotated keys in a
    cache do not change. For a spec with A axes positions are [A, seq] or [A, batch, seq].

    Args:
        rope: The rotation, with seq_dim=-2.
        at_length: Length for rules that depend on it: required for them, and not allowed for others.

    Raises:
        RopewalkError: If `rope` is not a RotaryEmbedding with seq_dim=-2, or if `at_length` does not match its rule.

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
                do="create one: RotaryEmbedding(head_dim, pairing=...)",
            )
        if rope.spec.varies != (at_length is not None):
            rule = type(rope.spec.frequencies).__name__
            raise RopewalkError(
                asked=f"{asked}(rope, at_length=...) with {rule}",
                expected="the length that determines its frequencies" if rope.spec.varies else "no at_length",
                got=f"at_length={at_length!r}",
                do="pass the longest length that will be used" if rope.spec.varies else "omit at_length",
            )
        if at_length is not None:
            at_length = require_count(at_length, asked=f"{asked}(at_length=...)", do="pass the number of positions")
        self.rope: RotaryEmbedding = rope
        self.at_length: int | None = at_length

    @property
    def relative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether attention is unchanged when all positions shift by a constant: False with a query temperature."""
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
        return self.rope(q, k, positions=positions, k_positions=k_positions, length=self.at_length)

    def extra_repr(self) -> str:
        return "" if self.at_length is None else f"at_length={self.at_length}"


class AcrossHeadsEncoding(RotaryEncoding):
    """One rotation over the whole width of the model, before the heads are split: each head has different frequencies.

    theta_i = base^(-2i/d) with d = num_heads * head_dim. Head 0 has the highest frequencies. In the usual rotation all
    heads have the same. Keys must have as many heads as queries: a key head that several query heads share would need
    several frequencies, and raises an error.

    Args:
        rope: A rotation whose spec has `AcrossHeads` frequencies.

    Raises:
        RopewalkError: If the spec has other frequencies.

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
    """RoPE with queries that grow and keys that shrink with position, so that scores decay (2212.10554, eq. 17).

    The product of the factors of query m and key n is zeta_i^((m - n) / scale_base), so the encoding is relative.
    Positions are limited to the length of `XPos`. All other fields of the spec apply too.

    Args:
        rope: A rotation whose spec has `xpos`.
        at_length: As in `RotaryEncoding`.

    Raises:
        RopewalkError: If the spec has no `xpos`, or if `at_length` does not match its rule.

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


class RopeOptions(TypedDict, total=False):
    """Options of `RotaryEmbedding` that `ropewalk.encoding` passes on for every rotary encoding.

    >>> options: RopeOptions = {"context_length": 8}
    >>> rope_for_model(8, 2, **options).length
    8
    """

    context_length: int | None
    learned: bool
    backend: str | None
    check_ids: bool


def rope_for_model(
    dim: int,
    num_heads: int,
    *,
    spec: RopeSpec | None = None,
    head_dim: int | None = None,
    base: float | None = None,
    pairing: Pairing | None = None,
    at_length: int | None = None,
    **options: Unpack[RopeOptions],
) -> RotaryEncoding:
    """Create `encoding("rope")` for a model of width `dim`, from a spec, or from a base and a pairing.

    Args:
        dim: Width of the model.
        num_heads: Number of query heads.
        spec: The rotation; None for a plain one.
        head_dim: Width of a head; None for dim / num_heads.
        base: Base of the frequencies, without a spec.
        pairing: Pairing of the features, without a spec.
        at_length: As in `RotaryEncoding`.
        **options: Options of `RotaryEmbedding`.

    Returns:
        The encoding.

    Raises:
        RopewalkError: If the sizes or the options are invalid.

    >>> rope_for_model(8, 2, pairing="half").rope.spec.head_dim
    4
    """
    width = head_dim_of_model("rope", dim, num_heads, head_dim)
    # RotaryEmbedding rejects a base or a pairing together with a spec.
    head = width if spec is None else _fitting("rope", spec, width)
    return RotaryEncoding(RotaryEmbedding(head, base=base, pairing=pairing, **options), at_length=at_length)


def across_heads_for_model(
    dim: int,
    num_heads: int,
    *,
    head_dim: int | None = None,
    base: float = 10_000.0,
    pairing: Pairing = "interleaved",
    **options: Unpack[RopeOptions],
) -> AcrossHeadsEncoding:
    """Create `encoding("rope-across-heads")` for a model of width `dim`. Arguments are those of `rope_for_model`.

    >>> across_heads_for_model(4, 2).rope.inv_freq.tolist()
    [[1.0], [0.01]]
    """
    width = head_dim_of_model("rope-across-heads", dim, num_heads, head_dim)
    spec = RopeSpec(width, AcrossHeads(base, num_heads), pairing=pairing)
    return AcrossHeadsEncoding(RotaryEmbedding(spec, **options))


def xpos_for_model(
    dim: int,
    num_heads: int,
    *,
    spec: RopeSpec,
    head_dim: int | None = None,
    at_length: int | None = None,
    **options: Unpack[RopeOptions],
) -> XPosEncoding:
    """Create `encoding("xpos")` for a model of width `dim`. Arguments are those of `rope_for_model`.

    >>> from ropewalk.spec import XPos
    >>> xpos_for_model(8, 2, spec=RopeSpec(4, xpos=XPos(64))).length
    64
    """
    fitting = _fitting("xpos", spec, head_dim_of_model("xpos", dim, num_heads, head_dim))
    return XPosEncoding(RotaryEmbedding(fitting, **options), at_length=at_length)


def _fitting(name: str, spec: RopeSpec, head_dim: int) -> RopeSpec:
    if isinstance(spec, RopeSpec) and spec.head_dim == head_dim:
        return spec
    raise RopewalkError(
        asked=f"encoding({name!r}, spec=...)",
        expected=f"a RopeSpec for heads of {head_dim} features",
        got=f"a RopeSpec for {spec.head_dim}" if isinstance(spec, RopeSpec) else shown(spec),
        do="create the spec with that head_dim, or pass head_dim= if it is not dim / num_heads",
    )


def as_encoding(encoding: Encoding | RotaryEmbedding | None) -> Encoding | None:
    """Return the encoding of a layer. A RotaryEmbedding is wrapped in a RotaryEncoding.

    >>> as_encoding(RotaryEmbedding(4)).name
    'rope'
    """
    return RotaryEncoding(encoding) if isinstance(encoding, RotaryEmbedding) else encoding


def rope_in(encoding: object) -> RotaryEmbedding | None:
    """Return `encoding` if it is a RotaryEmbedding, else its attribute `rope`; None if it has none.

    >>> rope_in(Encoding()) is None
    True
    """
    rope = getattr(encoding, "rope", encoding)
    return rope if isinstance(rope, RotaryEmbedding) else None


def rope_axes(encoding: object) -> int:
    """Return the number of positions per token: more than one if the rope of an encoding has axes.

    >>> rope_axes(RotaryEmbedding(4)), rope_axes(None)
    (1, 1)
    """
    rope = rope_in(encoding)
    return 1 if rope is None or rope.spec.axes is None else rope.spec.axes.count


def check_encoding(
    encoding: Encoding | RotaryEmbedding, head_dim: int, num_heads: int, num_kv_heads: int, *, layer: str
) -> None:
    """Raise unless `encoding` is an encoding that matches the heads of a layer.

    Args:
        encoding: The encoding to check.
        head_dim: Width of a head.
        num_heads: Number of query heads.
        num_kv_heads: Number of key heads.
        layer: Name of the layer, for the error.

    Raises:
        RopewalkError: If it is not an encoding, or if its sizes do not match.

    >>> check_encoding(RotaryEmbedding(4), 4, 2, 2, layer="a doctest")
    """
    rope = rope_in(encoding)
    if not isinstance(encoding, Encoding | RotaryEmbedding):
        raise RopewalkError(
            asked=f"{layer}(encoding=...)",
            expected="an Encoding, a RotaryEmbedding, or None for no position",
            got=shown(encoding),
            do='create one: ropewalk.encoding("rope", dim=dim, num_heads=num_heads)',
        )
    if rope is not None and (rope.spec.head_dim != head_dim or rope.seq_dim != -2):
        raise RopewalkError(
            asked=f"{layer}(encoding=...) with head_dim={head_dim}",
            expected=f"a rope with head_dim={head_dim} and seq_dim=-2",
            got=f"{rope}",
            do="create it for the heads of this layer",
        )
    check_head_dim(encoding, head_dim, layer=layer)
    rope_heads = None if rope is None else rope.heads
    per_head = rope_heads is not None
    encoding_heads = rope_heads if per_head else getattr(encoding, "num_heads", num_heads)
    if encoding_heads != num_heads or (per_head and num_kv_heads != num_heads):
        raise RopewalkError(
            asked=f"{layer}(num_heads={num_heads}, num_kv_heads={num_kv_heads}, encoding=...)",
            expected=f"an encoding for {num_heads} heads" + (", and the same number of key heads" if per_head else ""),
            got=f"{type(encoding).__name__} for {encoding_heads} heads"
            + (", with different frequencies per head" if per_head else ""),
            do=f"create it with num_heads={num_heads}" + (", and omit num_kv_heads" if per_head else ""),
        )


def check_head_dim(encoding: object, head_dim: int, *, layer: str) -> None:
    """Raise if an encoding changes queries, keys or values of another width: of its attribute `head_dim`.

    Args:
        encoding: The encoding of the layer.
        head_dim: Width of a head of the layer.
        layer: Name of the layer, for the error.

    Raises:
        RopewalkError: If the widths differ.

    >>> check_head_dim(Encoding(), 4, layer="a doctest")
    """
    width = getattr(encoding, "head_dim", None) if encodes_heads(encoding) else None
    if width in (None, head_dim):
        return
    raise RopewalkError(
        asked=f"{layer}(encoding=...) with head_dim={head_dim}",
        expected=f"an encoding for heads of {head_dim} features",
        got=f"{encoding}",
        do=f"create it for the heads of this layer: head_dim={head_dim}",
    )


def rope_for_linear(encoding: Encoding | RotaryEmbedding | None, asked: str) -> RotaryEmbedding | None:
    """Return the rotation of an encoding for linear attention; None if it has none.

    Args:
        encoding: An encoding, a rotation, or None.
        asked: The first line of the error.

    Returns:
        The RotaryEmbedding, or None.

    Raises:
        RopewalkError: If linear attention does not support the encoding.

    >>> rope_for_linear(None, "a doctest") is None
    True
    """
    if encoding is None or isinstance(encoding, RotaryEmbedding):
        rope = encoding
    elif isinstance(encoding, Encoding):
        kind, rope = type(encoding), getattr(encoding, "rope", None)
        if rope is None and kind.rotate is not Encoding.rotate:
            raise RopewalkError(
                asked=asked,
                expected="an encoding that rotates features by a RotaryEmbedding, its `rope`",
                got=f"{kind.__name__}, which overrides rotate and has no `rope`",
                do="add an attribute `rope` to it, or rotate the features in a feature map",
            )
    else:
        raise RopewalkError(
            asked=asked,
            expected="a RotaryEmbedding, an Encoding, or None",
            got=shown(encoding),
            do='create one: RotaryEmbedding(head_dim), or encoding("rope", dim=..., num_heads=...)',
        )
    if rope is not None and rope.seq_dim != -2:
        raise RopewalkError(
            asked=asked,
            expected="a RotaryEmbedding with seq_dim=-2, for [batch, heads, seq, dim]",
            got=f"seq_dim={rope.seq_dim}",
            do="create it with seq_dim=-2; features are rotated in that layout",
        )
    if rope is not None:
        _check_factors(rope, asked)
    return rope


def _check_factors(rope: RotaryEmbedding, asked: str) -> None:
    """Raise if cos and sin have a factor: it scales the scores of softmax, but would scale the output here."""
    if rope.keeps_norms:
        return
    raise RopewalkError(
        asked=asked,
        expected="a rotation without a factor: an amplitude of 1 and no query_temperature",
        got=f"{rope.spec}",
        do="a factor in the numerator only would scale the outputs: create the spec without it, with "
        "attention_factor=1.0 for Yarn and LongRope",
    )
