"""DTensors on 2 and 4 ranks: values and gradients are those of plain tensors, in float64; and what is refused."""

import pytest

from parallel import dtensor_cases
from parallel.ranks import failures_on_ranks
from slow import slow

# One worker runs all tests with several processes, so that they do not share the cores with each other.
pytestmark = pytest.mark.xdist_group("ranks")

CASES = [("calls", 2), slow("layers", 2), ("bad_cases", 2), slow("meshes_of_two_dimensions", 4), slow("bad_cases", 4)]


@pytest.mark.parametrize(("cases", "world"), CASES)
def test_dtensors_are_plain_tensors(cases, world, tmp_path):
    failures = failures_on_ranks(world, "parallel.dtensor_cases", cases, tmp_path)
    assert failures.keys() == getattr(dtensor_cases, cases)(world).keys()
    assert [name for name, failed in failures.items() if failed] == [], next(filter(None, failures.values()))[0]
