"""A sample of the hostile model folders; `python -m hub.hostile_run 2000` runs them all, with 2 seconds for each."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.hub.convert.permutation import _QUANTIZED, _in_tower
from waiting import HANG

TESTS = Path(__file__).parents[1]


def hostile_run(*arguments: object) -> subprocess.CompletedProcess[str]:
    # Time is not what the suite measures: the limit is there to end a conversion that waits forever.
    command = [sys.executable, "-m", "hub.hostile_run", *map(str, arguments), "--limit", str(HANG)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_few_hostile_folders():
    result = hostile_run(15)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("15 folders: {")


@pytest.mark.slow
def test_more_hostile_folders():
    result = hostile_run(60, "--first", 100_000)
    assert result.returncode == 0, result.stdout + result.stderr


WORDS = st.sampled_from(["vision", "mm", "img", "audio", "model", "q", "a", "vit"])
JOINS = st.sampled_from([".", "_", "-", "", "..", " "])


@given(st.lists(st.tuples(WORDS, JOINS), max_size=8), WORDS)
@settings(max_examples=300)
def test_towers_are_those_of_the_pattern(steps, last):
    """The pattern says what is meant, and takes a time that grows as the square of the name."""
    name = "".join(word + join for word, join in steps) + last
    pattern = r"(^|[._])(vision|visual|image|img|vit|vqmodel|audio|speech|mm|multi_modal)\w*\."
    assert _in_tower(name) == (re.search(pattern, name) is not None)


@pytest.mark.parametrize(
    "name", ["a.weight.quant_state.bitsandbytes__nf4", "a.quant_state", "a.weight_scale_inv", "a.qweight"]
)
def test_names_of_quantised_weights(name):
    assert _QUANTIZED.search(name)


@pytest.mark.parametrize("name", ["a.weight", "quant_state", "a.scale"])
def test_names_of_other_weights(name):
    assert not _QUANTIZED.search(name)
