"""encoding: any encoding by its name."""

import inspect
from collections.abc import Callable
from typing import Any

from ropewalk.errors import RopewalkError, require_choice, require_count, shown
from ropewalk.nn.encodings.absolute import (
    ConcatenatedEncoding,
    LearnedEncoding,
    MultiplicativeEncoding,
    SinusoidalEncoding,
)
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from ropewalk.nn.encodings.recurrent import RecurrentEncoding
from ropewalk.nn.encodings.rotary import AcrossHeadsEncoding, RotaryEncoding, XPosEncoding
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.spec.frequencies import AcrossHeads
from ropewalk.spec.rope import RopeSpec

__all__ = ["ENCODINGS", "Encoding", "encoding"]


def encoding(name: str, *, dim: int, num_heads: int, **options: Any) -> Encoding:
    """The encoding called `name`, for a model of width `dim` with `num_heads` query heads. docs/encodings.md has them.

    none; learned (length); sinusoidal (base); recurrent; multiplicative (length); concatenated (width, and length or
    base); t5 (causal, num_buckets, max_distance); alibi; rope (base and pairing, or spec), rope-across-heads (base,
    pairing) and xpos (spec), each with head_dim where it is not dim / num_heads, and with the options of
    `RotaryEmbedding`. An option that a kind does not have is an error that names those it has.

    >>> encoding("alibi", dim=512, num_heads=8)
    AlibiBias(8)
    >>> encoding("rope", dim=512, num_heads=8, base=500_000, pairing="half").rope.inv_freq.shape
    torch.Size([32])
    """
    make, given = ENCODINGS[require_choice(name, ENCODINGS, asked="encoding(name)")]
    sizes = {"dim": dim, "num_heads": num_heads}
    for size, do in (("dim", "pass the width of the model"), ("num_heads", "pass the number of query heads")):
        sizes[size] = require_count(sizes[size], asked=f"encoding({name!r}, {size}=...)", do=do)
    parameters = inspect.signature(make).parameters.values()
    known = {option.name: option for option in parameters if option.kind is inspect.Parameter.KEYWORD_ONLY}
    _check_options(name, options, known)
    return make(*(sizes[size] for size in given), **options)


def _check_options(name: str, options: dict[str, Any], known: dict[str, inspect.Parameter]) -> None:
    for option, value in options.items():
        if option not in known:
            raise RopewalkError(
                asked=f"encoding({name!r}, {option}=...)",
                expected=f"options of {name!r}: {', '.join(known) if known else 'it has none'}",
                got=f"{option}={shown(value)}",
                do="leave it out, or check how it is spelt",
            )
    for option, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise RopewalkError(
                asked=f"encoding({name!r}, ...)",
                expected=f"{option}=, without which it cannot be made",
                got=", ".join(options) if options else "no options",
                do=NEEDED[option],
            )


def _rope(
    dim: int,
    num_heads: int,
    *,
    spec: RopeSpec | None = None,
    head_dim: int | None = None,
    base: float | None = None,
    pairing: str | None = None,
    at_length: int | None = None,
    context_length: int | None = None,
    learned: bool = False,
    backend: str | None = None,
    check_ids: bool = False,
) -> RotaryEncoding:
    width = _head_dim("rope", dim, num_heads, head_dim)
    module = {"context_length": context_length, "learned": learned, "backend": backend, "check_ids": check_ids}
    # A spec with a base beside it is refused by the module.
    rope = RotaryEmbedding(
        width if spec is None else _fitting("rope", spec, width), base=base, pairing=pairing, **module
    )
    return RotaryEncoding(rope, at_length=at_length)


def _across_heads(
    dim: int,
    num_heads: int,
    *,
    head_dim: int | None = None,
    base: float = 10_000.0,
    pairing: str = "interleaved",
    context_length: int | None = None,
    learned: bool = False,
    backend: str | None = None,
    check_ids: bool = False,
) -> RotaryEncoding:
    width = _head_dim("rope-across-heads", dim, num_heads, head_dim)
    spec = RopeSpec(width, AcrossHeads(base, num_heads), pairing=pairing)
    module = {"context_length": context_length, "learned": learned, "backend": backend, "check_ids": check_ids}
    return AcrossHeadsEncoding(RotaryEmbedding(spec, **module))


def _xpos(
    dim: int,
    num_heads: int,
    *,
    spec: RopeSpec,
    head_dim: int | None = None,
    at_length: int | None = None,
    context_length: int | None = None,
    learned: bool = False,
    backend: str | None = None,
    check_ids: bool = False,
) -> RotaryEncoding:
    fitting = _fitting("xpos", spec, _head_dim("xpos", dim, num_heads, head_dim))
    module = {"context_length": context_length, "learned": learned, "backend": backend, "check_ids": check_ids}
    return XPosEncoding(RotaryEmbedding(fitting, **module), at_length=at_length)


def _head_dim(name: str, dim: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is not None:
        return require_count(head_dim, asked=f"encoding({name!r}, head_dim=...)", do="pass the width of one head")
    if dim % num_heads:
        raise RopewalkError(
            asked=f"encoding({name!r}, dim={dim}, num_heads={num_heads})",
            expected="a dim that divides into the heads, or head_dim=",
            got=f"{dim} / {num_heads}",
            do="pass the width of one head as head_dim=",
        )
    return dim // num_heads


def _fitting(name: str, spec: Any, head_dim: int) -> RopeSpec:
    if isinstance(spec, RopeSpec) and spec.head_dim == head_dim:
        return spec
    raise RopewalkError(
        asked=f"encoding({name!r}, spec=...)",
        expected=f"a RopeSpec for heads of {head_dim} features",
        got=f"one for {spec.head_dim}" if isinstance(spec, RopeSpec) else shown(spec),
        do="make it with that head_dim, or say head_dim= where heads are not dim / num_heads wide",
    )


# How each is made, and which of the sizes of a model it is given.
ENCODINGS: dict[str, tuple[Callable[..., Encoding], tuple[str, ...]]] = {
    "none": (Encoding, ()),
    "learned": (LearnedEncoding, ("dim",)),
    "sinusoidal": (SinusoidalEncoding, ("dim",)),
    "recurrent": (RecurrentEncoding, ("dim",)),
    "multiplicative": (MultiplicativeEncoding, ("dim",)),
    "concatenated": (ConcatenatedEncoding, ("dim",)),
    "t5": (T5Bias, ("num_heads",)),
    "alibi": (AlibiBias, ("num_heads",)),
    "rope": (_rope, ("dim", "num_heads")),
    "rope-across-heads": (_across_heads, ("dim", "num_heads")),
    "xpos": (_xpos, ("dim", "num_heads")),
}

# What to do where an option that has no usual value is left out.
NEEDED = {
    "length": "pass how many positions the table is to have",
    "width": "pass how many features a position is to have",
    "spec": "pass RopeSpec(head_dim, xpos=XPos(length))",
}
