"""What docs/parallel.md says about torch's context parallelism, measured again."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "context_parallel.py"


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_score_mod_gets_wrong_positions():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(result.stdout.splitlines()) == 8
