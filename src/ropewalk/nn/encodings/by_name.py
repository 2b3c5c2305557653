"""encoding: create an encoding by its name.

To add an encoding, write its class in a separate file, and add its name, its overload and its table entry here.
"""

import inspect
from collections.abc import Callable
from typing import Literal, NoReturn, Unpack, get_args, overload

from ropewalk.errors import RopewalkError, require_choice, require_count, shown
from ropewalk.nn.encodings.absolute import (
    ConcatenatedEncoding,
    LearnedEncoding,
    MultiplicativeEncoding,
    PlacementName,
    SinusoidalEncoding,
    learned_for_model,
    sinusoidal_for_model,
)
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from ropewalk.nn.encodings.recurrent import RecurrentEncoding
from ropewalk.nn.encodings.rotary import (
    AcrossHeadsEncoding,
    RopeOptions,
    RotaryEncoding,
    XPosEncoding,
    across_heads_for_model,
    rope_for_model,
    xpos_for_model,
)
from ropewalk.signatures import advice_on_argument, checks_names
from ropewalk.spec.rope import Pairing, RopeSpec

__all__ = ["ENCODINGS", "Encoding", "EncodingName", "encoding", "options_of"]

EncodingName = Literal[
    "none",
    "learned",
    "sinusoidal",
    "recurrent",
    "multiplicative",
    "concatenated",
    "t5",
    "alibi",
    "rope",
    "rope-across-heads",
    "xpos",
]

# The function that creates each encoding. Parameters dim and num_heads receive the sizes of the model. Keyword-only
# parameters are the options of the encoding.
ENCODINGS: dict[EncodingName, Callable[..., Encoding]] = {
    "none": Encoding,
    "learned": learned_for_model,
    "sinusoidal": sinusoidal_for_model,
    "recurrent": RecurrentEncoding,
    "multiplicative": MultiplicativeEncoding,
    "concatenated": ConcatenatedEncoding,
    "t5": T5Bias,
    "alibi": AlibiBias,
    "rope": rope_for_model,
    "rope-across-heads": across_heads_for_model,
    "xpos": xpos_for_model,
}

# The fix if an option without a default is missing.
_NEEDED = {
    "length": "pass the number of positions of the table",
    "width": "pass the number of features of a position",
    "spec": "pass RopeSpec(head_dim, xpos=XPos(length))",
}


@overload
def encoding(name: Literal["none"], *, dim: int, num_heads: int) -> Encoding: ...
@overload
def encoding(
    name: Literal["learned"],
    *,
    dim: int,
    num_heads: int,
    length: int,
    head_dim: int | None = None,
    placement: PlacementName = "input",
) -> LearnedEncoding: ...
@overload
def encoding(
    name: Literal["sinusoidal"],
    *,
    dim: int,
    num_heads: int,
    base: float = 10_000.0,
    head_dim: int | None = None,
    placement: PlacementName = "input",
) -> SinusoidalEncoding: ...
@overload
def encoding(name: Literal["recurrent"], *, dim: int, num_heads: int) -> RecurrentEncoding: ...
@overload
def encoding(name: Literal["multiplicative"], *, dim: int, num_heads: int, length: int) -> MultiplicativeEncoding: ...
@overload
def encoding(
    name: Literal["concatenated"],
    *,
    dim: int,
    num_heads: int,
    width: int,
    length: int | None = None,
    base: float | None = None,
) -> ConcatenatedEncoding: ...
@overload
def encoding(
    name: Literal["t5"],
    *,
    dim: int,
    num_heads: int,
    causal: bool = False,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> T5Bias: ...
@overload
def encoding(name: Literal["alibi"], *, dim: int, num_heads: int) -> AlibiBias: ...
@overload
def encoding(
    name: Literal["rope"],
    *,
    dim: int,
    num_heads: int,
    spec: RopeSpec | None = None,
    head_dim: int | None = None,
    base: float | None = None,
    pairing: Pairing | None = None,
    at_length: int | None = None,
    **options: Unpack[RopeOptions],
) -> RotaryEncoding: ...
@overload
def encoding(
    name: Literal["rope-across-heads"],
    *,
    dim: int,
    num_heads: int,
    head_dim: int | None = None,
    base: float = 10_000.0,
    pairing: Pairing = "interleaved",
    **options: Unpack[RopeOptions],
) -> AcrossHeadsEncoding: ...
@overload
def encoding(
    name: Literal["xpos"],
    *,
    dim: int,
    num_heads: int,
    spec: RopeSpec,
    head_dim: int | None = None,
    at_length: int | None = None,
    **options: Unpack[RopeOptions],
) -> XPosEncoding: ...
@checks_names
def encoding(name: EncodingName, *, dim: int, num_heads: int, **options: object) -> Encoding:
    """Create the encoding `name` for a model of width `dim` with `num_heads` query heads. See docs/encodings.md.

    Args:
        name: Name of the encoding, here with its options in parentheses: none; learned (length, placement); sinusoidal
            (base, placement); recurrent; multiplicative (length); concatenated (width, and length or base); t5 (causal,
            num_buckets, max_distance); alibi; rope (base and pairing, or spec); rope-across-heads (base, pairing); xpos
            (spec).
        dim: Width of the model.
        num_heads: Number of query heads.
        **options: Options of the encoding. `placement` is what the vectors of learned and sinusoidal are added to:
            "input", "projection" or "scores", as in `LearnedEncoding`. Encodings that change heads also accept
            `head_dim` if it is not dim / num_heads. Rotary encodings also accept `at_length` (except
            rope-across-heads), and `context_length`, `learned`, `backend` and `check_ids` of `RotaryEmbedding`.

    Returns:
        An instance of the subclass of `Encoding` with this name.

    Raises:
        RopewalkError: If the name or an option does not exist, if a required option is missing, or if a value is
            invalid. The message lists the names that exist.

    >>> encoding("alibi", dim=512, num_heads=8)
    AlibiBias(8)
    >>> encoding("learned", dim=512, num_heads=8, length=1024, placement="scores")
    LearnedEncoding(64, length=1024, placement='scores')
    >>> encoding("rope", dim=512, num_heads=8, base=500_000, pairing="half").rope.inv_freq.shape
    torch.Size([32])
    """
    require_choice(name, ENCODINGS, asked="encoding(name)")
    create = ENCODINGS[name]
    sizes = {
        "dim": require_count(dim, asked=f"encoding({name!r}, dim=...)", do="pass the width of the model"),
        "num_heads": require_count(
            num_heads, asked=f"encoding({name!r}, num_heads=...)", do="pass the number of query heads"
        ),
    }
    _check_options(name, options)
    parameters = inspect.signature(create).parameters
    return create(**{size: number for size, number in sizes.items() if size in parameters}, **options)


def options_of(name: EncodingName) -> dict[str, bool]:
    """Return the options of an encoding in the order of its signature, and whether each is required.

    >>> options_of("concatenated")
    {'width': True, 'length': False, 'base': False}
    """
    options: dict[str, bool] = {}
    for parameter in inspect.signature(ENCODINGS[name]).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            options[parameter.name] = parameter.default is inspect.Parameter.empty
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            # Either **options: Unpack[RopeOptions], or **kwargs of nn.Module, which has no annotation.
            for unpacked in get_args(parameter.annotation):
                options |= dict.fromkeys(unpacked.__annotations__, False)
    return options


def _check_options(name: EncodingName, options: dict[str, object]) -> None:
    known = options_of(name)
    for option, value in options.items():
        if option not in known and option == "placement":
            _raise_placement(name, value)
        if option not in known:
            raise RopewalkError(
                asked=f"encoding({name!r}, {option}=...)",
                expected=f"options of {name!r}: {', '.join(known) if known else 'it has none'}",
                got=f"{option}={shown(value)}",
                do=advice_on_argument(option, value, known),
            )
    for option, required in known.items():
        if required and option not in options:
            raise RopewalkError(
                asked=f"encoding({name!r}, ...)",
                expected=f"{option}=, which is required",
                got=", ".join(options) if options else "no options",
                do=_NEEDED.get(option, f"pass {option}="),
            )


# Where each hook adds position, for an encoding that has no choice.
_PLACES = {
    "embed": "it changes the tokens before the first layer",
    "rotate": "it rotates queries and keys after the projections",
    "bias": "it adds a bias to the scores",
}


def _raise_placement(name: EncodingName, placement: object) -> NoReturn:
    """Raise the error for a placement of an encoding that has one place only."""
    create = ENCODINGS[name]
    kind = create if isinstance(create, type) else inspect.signature(create).return_annotation
    places = [place for hook, place in _PLACES.items() if getattr(kind, hook) is not getattr(Encoding, hook)]
    raise RopewalkError(
        asked=f"encoding({name!r}, placement=...)",
        expected=f"no placement: {' and '.join(places) or 'it adds no position'}",
        got=f"placement={shown(placement)}",
        do="omit it, or use an encoding with a placement: "
        + ", ".join(repr(other) for other in ENCODINGS if "placement" in options_of(other))
        + f" can have {', '.join(map(repr, get_args(PlacementName)))}",
    )
