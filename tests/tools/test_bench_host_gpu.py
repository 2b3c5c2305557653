"""ropewalk bench host on a CUDA device: every call has a right result and a time, and the bare launch runs."""

import pytest
import torch

from ropewalk.tools.bench.bare import bare_launch
from ropewalk.tools.bench.floors import HOST, HOST_LINEAR, HOST_LINEAR_US
from ropewalk.tools.bench.host import measure, measure_linear
from ropewalk.tools.bench.host_linear import Sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_call_has_a_time():
    token = measure("cuda", rounds=1, calls=2)
    lines = {line.path: line for line in token}
    assert HOST["cuda"].keys() <= lines.keys()
    assert all(line.us is not None for line in lines.values())
    linear = measure_linear(Sequences("cuda", torch.bfloat16), 1, 2, torch.cuda.synchronize, token)
    lines = {line.path: line for line in linear}
    assert (HOST_LINEAR["cuda"] | HOST_LINEAR_US["cuda"]).keys() <= lines.keys()
    assert all(line.us is not None for line in lines.values())


def test_a_bare_launch_runs_again_and_again():
    q, k = (torch.randn(1, heads, 1, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8))
    launch = bare_launch(q, k)
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
