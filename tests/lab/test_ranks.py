"""Two ranks train what one trains, however they share it."""

import pytest

from parallel.ranks import failures_on_ranks

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]


def test_two_ranks_equal_one(tmp_path):
    failures = failures_on_ranks(2, "lab.rank_cases", "shared_runs", tmp_path)
    assert len(failures) == 11
    assert not any(failures.values()), "\n".join(x for texts in failures.values() for x in texts)
