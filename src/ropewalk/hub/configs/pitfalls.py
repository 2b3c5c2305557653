"""What a config may say that one stack or another misreads: warnings with a name, and what to do about each."""

import sys
import warnings
from collections.abc import Iterable

__all__ = ["ADVICE", "PITFALLS", "RopeConfigWarning", "emit"]

# Every name that a warning may have, what it is about, and what to do about it. docs/config.md lists the names; a test
# compares the two.
_PITFALLS = {
    "amplitude-differs": (
        "stacks disagree on the amplitude that these YaRN keys mean",
        "compare the amplitude above with that of the stack you serve with; load_spec(policy=...)",
    ),
    "dynamic-batch": (
        "transformers grows a dynamic base with the longest sequence of the batch, and keeps it",
        "give each sequence its own length: rope(q, k, length=...)",
    ),
    "factor-differs": (
        "factor is not max_position_embeddings / original_max_position_embeddings",
        "set the factor that the model was tuned with; nothing, if it is the one in the config",
    ),
    "factor-not-stated": (
        "Meta's params.json says that the frequencies are scaled, and not by how much",
        "compare with the config.json of the model; Llama 3.2 1B and 3B have a factor of 32 there",
    ),
    "head-dim-null": (
        "head_dim is null, which some rope types of transformers cannot read",
        "write the number, or remove the key",
    ),
    "int-for-float": (
        "a stack refuses or ignores a whole number here",
        "write the number with a point, such as 4.0",
    ),
    "key-ignored": (
        "transformers ignores a key without a word, or with one in its log",
        "remove the key, or say the same by one that is read",
    ),
    "legacy-type": (
        "an old name of a rope type, which transformers rewrites",
        'write "longrope"',
    ),
    "nested-truncate": (
        "transformers ignores truncate inside a layer type",
        "expect other frequencies from transformers than from stacks that read the key",
    ),
    "no-ramp": (
        "the two bounds on turns are equal: a step, of which transformers warns",
        "nothing, if the model was trained so, as Llama 4 Scout was",
    ),
    "original-is-extended": (
        "transformers may have filled in the extended length for the original one",
        "set original_max_position_embeddings to the length before the extension",
    ),
    "partial-truncated": (
        "head_dim * partial_rotary_factor is no whole number, and transformers cuts it off",
        "nothing, if the model was trained with transformers",
    ),
    "temperature-without-rotation": (
        "layers without rotation multiply their queries by a temperature",
        "multiply the queries of those layers yourself",
    ),
    "unknown-family": (
        "nothing is known of the family: what its config does not say is guessed",
        "hold what is shown here against the model's own code",
    ),
    "vllm-mrope-yarn": (
        "vLLM computes YaRN's ramp from four times the length where there are several axes",
        "expect other frequencies from vLLM than from transformers",
    ),
    "zero-is-unset": (
        "transformers takes 0 for a key that is not there",
        "remove the key, or write the number that is meant",
    ),
}
PITFALLS = {name: subject for name, (subject, _) in _PITFALLS.items()}
ADVICE = {name: advice for name, (_, advice) in _PITFALLS.items()}


class RopeConfigWarning(UserWarning):
    """A config that stacks read differently. `name` says which pitfall it is; PITFALLS explains each.

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
    """Warns of each pitfall, given as name and text. The line that is shown is that of the caller of this package."""
    for name, text in pitfalls:
        warnings.warn(RopeConfigWarning(name, text), stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """How many frames to go back to leave this package."""
    depth, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("ropewalk.hub"):
        depth, frame = depth + 1, frame.f_back
    return depth
