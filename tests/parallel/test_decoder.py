"""A decoder that trains with two kinds of parallelism at a time is one that trains in one process; compiled calls."""

import pytest

from parallel import decoder_cases
from parallel.ranks import failures_on_ranks

# One worker runs all tests with several processes, so that they do not share the cores with each other.
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]


@pytest.mark.parametrize(("cases", "world"), [("decoders", 4), ("compiled", 2)])
def test_ranks_are_one_process(cases, world, tmp_path):
    failures = failures_on_ranks(world, "parallel.decoder_cases", cases, tmp_path)
    assert failures.keys() == getattr(decoder_cases, cases)(world).keys()
    assert [name for name, failed in failures.items() if failed] == [], next(filter(None, failures.values()))[0]
