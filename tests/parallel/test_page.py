"""The code of docs/parallel.md on two ranks, started by torchrun."""

import pathlib
import subprocess
import sys

import pytest

from page_results import program

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "parallel.md"


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_the_page_on_two_ranks(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(program(PAGE) + "assert dist.get_world_size() == 2\n", encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
