"""What a config may say that one stack or another misreads, as warnings with a name."""

import sys
import warnings

__all__ = ["PITFALLS", "RopeConfigWarning", "warn"]

# Every name that a warning may have, and what it is about. docs/config.md lists them; a test holds the two together.
PITFALLS = {
    "amplitude-differs": "stacks disagree on the amplitude that these YaRN keys mean",
    "dynamic-batch": "transformers grows a dynamic base with the longest sequence of the batch, and keeps it",
    "factor-differs": "factor is not max_position_embeddings / original_max_position_embeddings",
    "head-dim-null": "head_dim is null, which some rope types of transformers cannot read",
    "int-for-float": "a stack refuses or ignores a whole number here",
    "key-ignored": "transformers ignores a key without a word, or with one in its log",
    "legacy-type": "an old name of a rope type, which transformers rewrites",
    "nested-truncate": "transformers ignores truncate inside a layer type",
    "no-ramp": "the two bounds on turns are equal: a step, of which transformers warns",
    "original-is-extended": "transformers may have filled in the extended length for the original one",
    "partial-truncated": "head_dim * partial_rotary_factor is no whole number, and transformers cuts it off",
    "temperature-without-rotation": "layers without rotation multiply their queries by a temperature",
    "unknown-family": "nothing is known of the family: what its config does not say is guessed",
    "vllm-mrope-yarn": "vLLM computes YaRN's ramp from four times the length where there are several axes",
    "zero-is-unset": "transformers takes 0 for a key that is not there",
}


class RopeConfigWarning(UserWarning):
    """A config that stacks read differently. `name` says which pitfall it is; PITFALLS explains each.

    >>> RopeConfigWarning("dynamic-batch", "the base grows").name
    'dynamic-batch'
    """

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        super().__init__(f"[{name}] {text}")

    def __reduce__(self) -> tuple[object, ...]:
        return RopeConfigWarning, (self.name, self.text)


def warn(name: str, text: str) -> None:
    """Warns by a name of PITFALLS. The line that is shown is the caller's of `load_spec`."""
    if name not in PITFALLS:
        raise KeyError(name)
    warnings.warn(RopeConfigWarning(name, text), stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """How many frames to go back to leave this package."""
    depth, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("ropewalk.hub"):
        depth, frame = depth + 1, frame.f_back
    return depth
