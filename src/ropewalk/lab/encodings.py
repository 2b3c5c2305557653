"""Encodings as texts: a name or module:Class, and options."""

import ast
import hashlib
import importlib
import inspect
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.by_name import ENCODINGS, encoding
from ropewalk.nn.encodings.rotary import RotaryEncoding
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.spec.by_parts import NTKByParts, Yarn
from ropewalk.spec.frequencies import Frequencies, Plain
from ropewalk.spec.rope import RopeSpec
from ropewalk.spec.stretched import NTK, PositionInterpolation
from ropewalk.spec.xpos import XPos

__all__ = ["make_encoding", "parse_encoding", "source_of"]

_EXAMPLE = "rope, 'rope base=500', 'rope rule=yarn factor=4', or package.module:Class"


def parse_encoding(text: str) -> tuple[str, dict[str, Any]]:
    """Split the description of an encoding into a name and options.

    Args:
        text: A name, and options NAME=VALUE after spaces. Values are Python literals, or text.

    Returns:
        The name, and the options.

    Raises:
        RopewalkError: If the text has another form.

    >>> parse_encoding("rope base=500 pairing=half")
    ('rope', {'base': 500, 'pairing': 'half'})
    """
    name, *parts = text.split() or [""]
    options: dict[str, Any] = {}
    for part in parts:
        key, sign, value = part.partition("=")
        if not (sign and key.isidentifier() and value) or key in options:
            raise RopewalkError(
                asked=f"encoding {text!r}",
                expected="a name, and options NAME=VALUE after spaces, each once",
                got=repr(part),
                do=f"use for example {_EXAMPLE}",
            )
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return name, options


def make_encoding(text: str, *, dim: int, num_heads: int, length: int) -> Encoding:
    """Create the encoding of a model from its description.

    Names are those of `ropewalk.encoding`, with its options. Tables have `length` rows, T5's buckets are causal, and
    xpos has its length. Further options of "rope": `rule` (pi, ntk, by-parts or yarn) with `factor`, relative to
    `trained`, or to `length` without it; and `part`, the share of features that are rotated. A class of your own
    receives dim, num_heads and length if its constructor has parameters of these names.

    Args:
        text: The description, as `parse_encoding` splits it.
        dim: Width of the model.
        num_heads: Number of heads.
        length: Trained length.

    Returns:
        The encoding.

    Raises:
        RopewalkError: If the name is unknown, or if an option is invalid.

    >>> make_encoding("rope base=100", dim=8, num_heads=2, length=16).rope.inv_freq.tolist()
    [1.0, 0.1]
    """
    name, options = parse_encoding(text)
    sizes = {"dim": dim, "num_heads": num_heads}
    if ":" in name:
        return _own_encoding(name, options, sizes | {"length": length})
    if name == "rope" and {"rule", "factor", "trained", "part"} & options.keys():
        return _rope_by_rule(text, options, dim // num_heads, length)
    if name in ("learned", "multiplicative"):
        options = {"length": length, **options}
    elif name == "t5":
        options = {"causal": True, **options}
    elif name == "concatenated":
        options = {"width": dim, **options}
    elif name == "xpos":
        # The longest evaluation: its length is a limit, and its scale of decay is fixed.
        options = {"spec": RopeSpec(dim // num_heads, xpos=XPos(options.pop("length", 16 * length))), **options}
    if name not in ENCODINGS:
        raise RopewalkError(
            asked=f"encoding {text!r}",
            expected=f"one of {', '.join(ENCODINGS)}, or package.module:Class",
            got=repr(name),
            do=f"use for example {_EXAMPLE}",
        )
    return encoding(name, **sizes, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]


def source_of(text: str) -> str | None:
    """A hash of the source of an encoding of your own; None for one of the library.

    Args:
        text: The description, as `parse_encoding` splits it.

    Returns:
        The first 16 digits of a hash of the file of its class, and of the module that the description names if that is
        another file, as they were when this process first asked.

    Raises:
        RopewalkError: If it cannot be imported.

    >>> source_of("rope base=500") is None
    True
    """
    name, _ = parse_encoding(text)
    if ":" not in name or name.startswith("ropewalk."):
        return None
    made, module = _imported(name)
    return _hash_of((module, inspect.getmodule(made) or module))


# Files may change while models train that have imported them before.
@cache
def _hash_of(modules: tuple[ModuleType, ...]) -> str | None:
    files = sorted({Path(file) for module in modules if (file := getattr(module, "__file__", None))})
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16] if files else None


def _imported(name: str) -> tuple[Any, ModuleType]:
    """What module:Class names, and the module."""
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(module)
        return getattr(imported, attribute), imported
    except (ImportError, AttributeError, ValueError) as error:
        raise RopewalkError(
            asked=f"encoding {name}",
            expected="package.module:Class that Python can import",
            got=str(error),
            do="run in the folder of the module, or install its package; set PYTHONPATH for another folder",
        ) from None


def _own_encoding(name: str, options: dict[str, Any], sizes: dict[str, int]) -> Encoding:
    made, _ = _imported(name)
    accepted = inspect.signature(made).parameters if callable(made) else {}
    try:
        result = made(**{key: value for key, value in sizes.items() if key in accepted} | options)
    except TypeError as error:
        raise RopewalkError(
            asked=f"encoding {name}",
            expected="a class whose other parameters have defaults, or are passed as NAME=VALUE",
            got=str(error),
            do="pass what is missing, for example 'package.module:Class width=8'",
        ) from None
    if not isinstance(result, Encoding):
        raise RopewalkError(
            asked=f"encoding {name}",
            expected="a subclass of ropewalk.Encoding",
            got=type(result).__name__,
            do="derive the class from ropewalk.Encoding, and override one of its hooks",
        )
    return result


def _rope_by_rule(text: str, options: dict[str, Any], head_dim: int, length: int) -> RotaryEncoding:
    base = options.pop("base", 10_000.0)
    rule, factor = options.pop("rule", None), options.pop("factor", 1.0)
    trained, part = options.pop("trained", length), options.pop("part", 1.0)
    rules: dict[str | None, Frequencies] = {
        None: Plain(base),
        "pi": PositionInterpolation(base, factor=factor),
        "ntk": NTK(base, factor=factor),
        "by-parts": NTKByParts(base, factor=factor, trained_length=trained),
        "yarn": Yarn(base, factor=factor, trained_length=trained),
    }
    if rule not in rules:
        raise RopewalkError(
            asked=f"encoding {text!r}",
            expected="rule=pi, ntk, by-parts or yarn",
            got=f"rule={rule}",
            do="use one of these",
        )
    rotary_dim = None if part == 1.0 else 2 * round(head_dim * part / 2)
    pairing = options.pop("pairing", "interleaved")
    spec = RopeSpec(head_dim, rules[rule], rotary_dim=rotary_dim, pairing=pairing)
    return RotaryEncoding(RotaryEmbedding(spec, **options))
