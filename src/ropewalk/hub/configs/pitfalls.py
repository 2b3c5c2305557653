"""Named warnings about config keys that transformers, vLLM and other stacks read differently, with advice for each."""

import sys
import warnings
from collections.abc import Iterable

from ropewalk.errors import RopewalkWarning

__all__ = ["ADVICE", "PITFALLS", "RopeConfigWarning", "emit"]

# Per warning name: its subject and the advice. docs/config.md lists the names, and a test compares the two lists.
_PITFALLS = {
    "amplitude-differs": (
        "transformers, vLLM and DeepSeek's code compute different amplitudes from these YaRN keys",
        "compare the amplitude above with that of the stack you deploy with; load_spec(policy=...) selects one",
    ),
    "dynamic-batch": (
        "transformers increases a dynamic base with the longest sequence of the batch, and keeps it for later keys",
        "pass one length per sequence: rope(q, k, length=...)",
    ),
    "factor-differs": (
        "factor of YaRN or LongRoPE differs from max_position_embeddings / original_max_position_embeddings, which"
        " older versions of transformers use instead",
        "set max_position_embeddings to factor times original_max_position_embeddings, or update transformers",
    ),
    "factor-not-stated": (
        "Meta's params.json specifies that the frequencies are scaled, but not the factor",
        "compare with the config.json of the model; the factor of Llama 3.2 1B and 3B is 32 there",
    ),
    "head-dim-null": (
        "head_dim is null, which some rope types of transformers do not support",
        "set head_dim to a number, or remove the key",
    ),
    "int-for-float": (
        "an integer where transformers or vLLM expects a float",
        "write the number with a decimal point, such as 4.0",
    ),
    "key-ignored": (
        "transformers ignores a key, silently or with a line in its log",
        "remove the key, or replace it by the key that is read",
    ),
    "legacy-type": (
        "an old name of a rope type; transformers replaces it for some families only",
        'use the new name, "longrope"',
    ),
    "nested-truncate": (
        "transformers ignores truncate in the parameters of a layer type",
        "expect other frequencies from transformers than from stacks that read the key",
    ),
    "no-ramp": (
        "low_freq_factor equals high_freq_factor: a step instead of a ramp, and transformers warns about it",
        "change nothing if the model was trained this way, as Llama 4 Scout was",
    ),
    "original-is-extended": (
        "original_max_position_embeddings may be the extended length, filled in by transformers",
        "set original_max_position_embeddings to the trained length, before the extension",
    ),
    "partial-truncated": (
        "head_dim * partial_rotary_factor is not an integer; transformers rounds it down",
        "change nothing if the model was trained with transformers",
    ),
    "temperature-without-rotation": (
        "layers without rotation scale their queries by a temperature, which no spec contains",
        "multiply the queries of these layers in the model code",
    ),
    "unknown-family": (
        "the family is unknown: defaults replace what its config does not specify",
        "compare the result with the code of the model",
    ),
    "vllm-mrope-yarn": (
        "vLLM computes YaRN's ramp from four times the original length if tokens have several positions",
        "expect other frequencies from vLLM than from transformers",
    ),
    "zero-is-unset": (
        "transformers treats 0 as if the key were missing",
        "remove the key, or set it to the intended number",
    ),
}
PITFALLS = {name: subject for name, (subject, _) in _PITFALLS.items()}
ADVICE = {name: advice for name, (_, advice) in _PITFALLS.items()}


class RopeConfigWarning(RopewalkWarning):
    """A config that different stacks read differently, or that is probably wrong.

    Attributes:
        name: The name of the pitfall, such as "dynamic-batch". docs/config.md lists all names.
        text: What was found in this config.

    >>> RopeConfigWarning("dynamic-batch", "the base grows").name
    'dynamic-batch'
    """

    def __init__(self, name: str, text: str) -> None:
        self.name: str = name
        self.text: str = text
        super().__init__(f"[{name}] {text}")

    def __reduce__(self) -> tuple[object, ...]:
        return RopeConfigWarning, (self.name, self.text)


def emit(pitfalls: Iterable[tuple[str, str]]) -> None:
    """Emit one warning per (name, text). Each is attributed to the line of user code that called `ropewalk.hub`."""
    for name, text in pitfalls:
        warnings.warn(RopeConfigWarning(name, text), stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """Return the stacklevel of the first frame outside of `ropewalk.hub`."""
    depth, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("ropewalk.hub"):
        depth, frame = depth + 1, frame.f_back
    return depth
