"""Configs with something wrong in them: out comes a result or a RopewalkError, at once and in little memory.

hostile_configs.py draws and reads them; `python -m hub.hostile_configs 100000` reads more of the same.
"""

import pytest

from hub.hostile_configs import run
from slow import slow_except

HOW_MANY = 2000


@pytest.mark.parametrize("part", slow_except([0], range(4)))
def test_whatever_a_config_says_out_comes_a_result_or_an_error_of_ours(part):
    tally = run(HOW_MANY // 4, part, sample=True)
    assert tally.faults == []
    assert sum(tally.counts[f"load_spec: {outcome}"] for outcome in ("result", "RopewalkError")) == HOW_MANY // 4
    # The mutants are not all so broken that nothing else is tried, nor so whole.
    assert min(tally.counts[f"load_spec: {outcome}"] for outcome in ("result", "RopewalkError")) > HOW_MANY // 4 // 20
