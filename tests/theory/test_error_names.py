"""An error of a theory function names the function that was called, not one that it calls."""

import inspect
import math
from typing import Any

import numpy as np
import pytest

from ropewalk import RopewalkError, theory

VALID: dict[str, Any] = {
    "trained_length": 4096,
    "tuned_length": 8192,
    "length": 64,
    "limit": 64,
    "rotary_dim": 128,
    "critical_dim": 92,
    "base": 1e4,
    "new_base": 1e4,
    "bases": [1e4],
    "inv_freq": [1.0],
    "plain": [1.0],
    "distance": 3.0,
    "products": np.ones(1, dtype=complex),
}
# What is expected of these names them: the function alone is in the first line.
ARRAYS = ("inv_freq", "plain", "distance", "products")
FUNCTIONS = (
    *(theory.abel_bound, theory.abel_transform, theory.decay_curve, theory.partial_sums, theory.score_sum),
    *(theory.bands, theory.classify, theory.periods, theory.rotations),
    *(theory.admissible_bases, theory.first_negative_distance, theory.lowest_admissible_base),
    *(theory.context_after_tuning, theory.critical_base, theory.critical_dimension),
    *(theory.extrapolation_limit, theory.small_base_thresholds),
)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("function", "argument"),
    [(function, argument) for function in FUNCTIONS for argument in inspect.signature(function).parameters],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_an_error_names_the_function_that_was_called_and_its_argument(function, argument):
    arguments = {name: VALID[name] for name in inspect.signature(function).parameters}
    function(**arguments)
    for bad in (-math.inf, math.nan, "x"):
        with pytest.raises(RopewalkError) as raised:
            function(**arguments | {argument: [bad, math.nan] if np.ndim(VALID[argument]) else bad})
        assert raised.value.asked == function.__name__ + ("" if argument in ARRAYS else f"({argument})")


@pytest.mark.parametrize("function", [theory.bands, theory.classify])
def test_frequencies_that_do_not_match_name_the_function_too(function):
    with pytest.raises(RopewalkError) as raised:
        function([1.0, 0.1], [1.0])
    assert raised.value.asked == f"{function.__name__}(inv_freq, plain)"
