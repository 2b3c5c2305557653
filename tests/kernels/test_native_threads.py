"""The C kernel and threads: torch's own, those of Python, those that a fork leaves behind."""

import multiprocessing
import subprocess
import sys
import threading

import pytest
import torch
import torch.utils.deterministic as deterministic

from ropewalk import RotaryEmbedding
from strategies import vector
from waiting import HANG


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_share_the_work_and_change_nothing(dtype):
    rope, before = RotaryEmbedding(64, backend="native"), torch.get_num_threads()
    results = []
    try:
        for shape in ((1, 3, 1000, 64), (300, 2, 5, 64), (2, 500, 3, 64), (7, 3, 2, 31, 64)):
            x = vector(3, *shape).to(dtype)
            for threads in (1, 2, 3, 16):
                torch.set_num_threads(threads)
                results.append(rope(x))
                assert torch.equal(results[-1], results[0])
            results.clear()
    finally:
        torch.set_num_threads(before)


def test_many_python_threads_at_once():
    rope, x = RotaryEmbedding(64, backend="native"), vector(3, 1, 4, 1000, 64).float()
    expected, wrong = rope(x), []

    def work():
        for _ in range(20):
            if not torch.equal(rope(x), expected):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def _in_a_child(rope, x, expected, answer):
    # torch's own parallel loops hang here, so none may run: not the one that fills new memory, nor that which compares.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    y = rope(x)
    torch.set_num_threads(1)
    answer.put(bool(torch.equal(y, expected)))


def test_a_forked_child_rotates_large_tensors():
    # OpenMP's threads do not live on in a child: a kernel that waits for them hangs.
    rope, x = RotaryEmbedding(64, backend="native"), vector(3, 1, 4, 4000, 64).float()
    expected = rope(x)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_in_a_child, args=(rope, x, expected, answer))
    child.start()
    try:
        assert answer.get(timeout=HANG)
        child.join(HANG)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert torch.equal(rope(x), expected)


def test_the_work_is_shared_out():
    # In the place of OpenMP stands a function that writes down how many threads it was asked for.
    script = (
        "import ctypes, torch; from ropewalk.kernels.native.extension import NATIVE\n"
        "from ropewalk import RotaryEmbedding; from ropewalk.kernels.torch_internals import TORCH_STATE\n"
        "asked = []; work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)\n"
        "@ctypes.CFUNCTYPE(None, work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)\n"
        "def team(run, data, threads, flags): asked.append(threads); run(data)\n"
        "address = ctypes.cast(team, ctypes.c_void_p).value\n"
        "NATIVE.use_torch(torch.Tensor, torch.nn.Parameter, torch.Tensor.__dlpack_c_exchange_api__,"
        " address, (torch.empty_like, *TORCH_STATE))\n"
        "rope, x = RotaryEmbedding(64, backend='native'), torch.randn(1, 4, 4000, 64)\n"
        "torch.set_num_threads(3); y = rope(x); assert asked[-1] == 3, asked\n"
        "rope(x[:, :, :10]); rope(x[:, :1, :1]); assert len(asked) <= 2, asked\n"
        "rope(x[:, :1, :1100]); assert asked[-1] == 2, asked\n"
        "torch.set_num_threads(1); asked.clear(); assert torch.equal(rope(x), y); assert not asked\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=HANG)


@pytest.mark.slow
def test_without_openmp_threads_are_made_for_the_call():
    # In a process of its own, since the team is found once.
    script = (
        "import torch; from ropewalk.kernels.native.extension import NATIVE\n"
        "from ropewalk import RotaryEmbedding; from ropewalk.kernels.torch_internals import TORCH_STATE\n"
        "NATIVE.use_torch(torch.Tensor, torch.nn.Parameter, torch.Tensor.__dlpack_c_exchange_api__, 0,"
        " (torch.empty_like, *TORCH_STATE))\n"
        "rope, x = RotaryEmbedding(64, backend='native'), torch.randn(1, 4, 4000, 64)\n"
        "torch.set_num_threads(1); one = rope(x); torch.set_num_threads(5); assert torch.equal(rope(x), one)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=HANG)
