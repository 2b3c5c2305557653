"""Values and gradients on 2 and 4 ranks are those of one rank, in float64."""

import pytest

from parallel.cases import linear_cases, softmax_cases
from parallel.ranks import failures_on_ranks
from slow import slow

# One worker runs all tests with several processes, so that they do not share the cores with each other.
pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("world", [2, slow(4)])
@pytest.mark.parametrize("cases", [linear_cases, softmax_cases], ids=["linear", "softmax"])
def test_ranks_are_one_rank(cases, world, tmp_path):
    failures = failures_on_ranks(world, "parallel.cases", cases.__name__, tmp_path)
    assert failures.keys() == cases(world).keys()
    assert [name for name, failed in failures.items() if failed] == [], next(filter(None, failures.values()))[0]
