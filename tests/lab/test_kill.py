"""Runs that are killed at a random step continue with the same bits. benchmarks/record_kills.py repeats it 20 times."""

import pytest

from lab.kills import kill_and_resume, weights_of, whole_run

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_continues_bit_for_bit(ranks, tmp_path):
    killed_at = kill_and_resume(tmp_path / "killed", ranks, seed=ranks)
    assert killed_at > 0
    assert weights_of(tmp_path / "killed") == weights_of(whole_run(tmp_path / "whole", ranks))
