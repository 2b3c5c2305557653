"""The two lengths of a model: the one that it was trained at, and the one that its config allows."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ropewalk.hub.configs.read import Keys
from ropewalk.hub.families.table import Family
from ropewalk.spec.rope import RopeSpec
from ropewalk.theory.bands import classify, plain_inv_freq

__all__ = ["Lengths", "lengths_of"]

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Lengths:
    """How many positions a model was trained on before its context was extended, and how many its config allows.

    None is what the config does not say.

    >>> Lengths(trained=8192, configured=131_072).trained
    8192
    """

    trained: int | None
    configured: int | None


def lengths_of(part: dict[str, Any], family: Family, specs: Iterable[RopeSpec | None]) -> Lengths:
    """The lengths of a language model whose config is `part` and whose kinds of layers rotate by `specs`.

    The trained length is that of the rule, else original_max_position_embeddings; where no frequency is scaled it is
    the configured one. Rules that know of no length, such as PI, leave it unsaid: configs differ in whether
    max_position_embeddings is then the length before or after.

    >>> lengths_of({"max_position_embeddings": 4096}, Family(), [RopeSpec(128)])
    Lengths(trained=4096, configured=4096)
    """
    whole, turning = Keys(part), [spec for spec in specs if spec is not None]
    nested = [Keys(whole.part(key), key) for key in ("rope_parameters", "rope_scaling")]
    keys = [*((whole, key) for key in family.longest), *((inner, "max_position_embeddings") for inner in nested)]
    configured = next((where.whole(key) for where, key in keys if where.has(key)), None)
    rules = (getattr(spec.frequencies, "trained_length", None) for spec in turning)
    trained = max((length for length in rules if length is not None), default=None)
    if trained is None:
        trained = next((where.whole(_ORIGINAL) for where in (whole, *nested) if where.has(_ORIGINAL)), None)
    if trained is None and turning and not any(_is_scaled(spec) for spec in turning):
        trained = configured
    return Lengths(trained, configured)


def _is_scaled(spec: RopeSpec) -> bool:
    return not set(classify(spec.inv_freq(), plain_inv_freq(spec))) <= {"unchanged", "still"}
