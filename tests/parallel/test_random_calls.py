"""Random calls on 3 ranks are those of one rank: values, states, and gradients of everything that needs one."""

import pytest

from parallel.random_calls import linear_calls, softmax_calls
from parallel.ranks import failures_on_ranks

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]


@pytest.mark.parametrize("calls", [linear_calls, softmax_calls])
def test_ranks_are_one_rank(calls, tmp_path):
    failures = failures_on_ranks(3, "parallel.random_calls", calls.__name__, tmp_path)
    assert failures.keys() == calls(3).keys()
    assert {number: texts[0] for number, texts in failures.items() if texts} == {}
