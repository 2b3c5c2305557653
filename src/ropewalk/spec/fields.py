"""Fields that several rules have, checked."""

from typing import Any

from ropewalk.errors import RopewalkError, as_float, require_count, require_positive, shown

# Longer than any sequence, and exact in float64.
LONGEST = 1 << 53

__all__ = ["check_base", "check_factor", "check_trained_length"]


def check_base(rule: Any, above: float = 0.0) -> None:
    """Makes `base` of a rule a float, if it is a finite number above `above`.

    >>> from types import SimpleNamespace
    >>> rule = SimpleNamespace(base=500)
    >>> check_base(rule)
    >>> rule.base
    500.0
    """
    asked = f"{type(rule).__name__}(base=...)"
    base = require_positive(rule.base, asked=asked, do="pass the base of the geometric sequence, for example 10_000")
    if base <= above:
        raise RopewalkError(
            asked=asked,
            expected=f"a finite number above {above:g}",
            got=shown(rule.base),
            do="the rule divides by the logarithm of the base; pass for example 10_000",
        )
    object.__setattr__(rule, "base", base)


def check_factor(rule: Any) -> None:
    """Makes `factor` of a rule a float, if it is a finite number of at least 1.

    >>> from types import SimpleNamespace
    >>> rule = SimpleNamespace(factor=4)
    >>> check_factor(rule)
    >>> rule.factor
    4.0
    """
    factor = as_float(rule.factor)
    if factor is None or not 1.0 <= factor <= 1e30:
        raise RopewalkError(
            asked=f"{type(rule).__name__}(factor=...)",
            expected="a finite number of at least 1, and below 1e30",
            got=shown(rule.factor),
            do="pass how many times longer the context is to be",
        )
    object.__setattr__(rule, "factor", factor)


def check_trained_length(rule: Any) -> None:
    """Makes `trained_length` of a rule an int of at least 2, whose logarithm can be divided by.

    >>> from types import SimpleNamespace
    >>> check_trained_length(SimpleNamespace(trained_length=4096))
    """
    length = require_count(
        rule.trained_length,
        asked=f"{type(rule).__name__}(trained_length=...)",
        do="pass the length that the model was trained on before it was extended",
        at_least=2,
    )
    if length > LONGEST:
        raise RopewalkError(
            asked=f"{type(rule).__name__}(trained_length=...)",
            expected="at most 2^53 positions",
            got=shown(length),
            do="pass the length that the model was trained on before it was extended",
        )
    object.__setattr__(rule, "trained_length", length)
