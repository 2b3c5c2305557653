"""Calls of linear attention that repeat an earlier one have its checks, and results of their own numbers."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch

import ropewalk as rw
from kernels.triton_device import DEVICE
from nn.linear_cases import drawn
from ropewalk.kernels import backend as registry
from ropewalk.kernels.backends.triton import TRITON
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.nn.linear import repeated


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Triton's kernels are chosen on every device, and calls that were repeated are counted."""
    operations = {"linear_attention": TRITON.operations["linear_attention"]}
    undo = registry.register(replace(TRITON, name="everywhere", operations=operations, devices=(DEVICE.type,)))
    monkeypatch.setattr(linear_segments, "segment_length", lambda *sizes: 64)
    monkeypatch.setattr(repeated, "_CALLS", type(repeated._CALLS)())
    seen, real = [], repeated.run_chosen

    def run_chosen(choice, *arguments, **options):
        seen.append(choice.backend)
        return real(choice, *arguments, **options)

    monkeypatch.setattr(repeated, "run_chosen", run_chosen)
    yield seen
    undo()


def inputs(seq=20, seed=0, dtype=torch.bfloat16):
    return [x.to(DEVICE) for x in drawn(1, 2, 1, seq, 16, 16, dtype, seed=seed)]


def test_other_numbers_give_other_results(calls):
    rope = rw.RotaryEmbedding(16).to(DEVICE)
    for seed in range(3):
        q, k, v = inputs(seed=seed)
        out = rw.linear_attention(q, k, v, rope=rope)
        assert torch.equal(out, rw.linear_attention(q, k, v, rope=rw.RotaryEmbedding(16).to(DEVICE)))
    assert len(calls) == 2


def test_what_differs_is_not_repeated(calls):
    rope, (q, k, v) = rw.RotaryEmbedding(16).to(DEVICE), inputs()
    rw.linear_attention(q, k, v, rope=rope)
    others = [
        rw.linear_attention(*inputs(21), rope=rope),
        rw.linear_attention(q, k, v, rope=rope, feature_map="relu"),
        rw.linear_attention(q, k, v, rope=rope, normalize=False),
        rw.linear_attention(q, k, v, rope=rope, causal=False),
        rw.linear_attention(q, k, v, rope=copy.deepcopy(rope)),
        rw.linear_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, rope=rope),
        rw.linear_attention(q, k, v, rope=rope, positions=torch.arange(20, device=DEVICE) + 3),
        rw.linear_attention(q, k, v),
    ]
    assert all(x.isfinite().all() for x in others)
    assert calls == []


def test_gradients_of_a_repeated_call(calls):
    rope, (q, k, v) = rw.RotaryEmbedding(16).to(DEVICE), inputs()
    with torch.inference_mode():
        rw.linear_attention(q, k, v, rope=rope)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for _ in range(2):
        out = rw.linear_attention(*leaves, rope=rope)
        results.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    assert len(calls) == 1
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_wrong_arguments_are_errors_after_a_right_call(calls):
    q, k, v = inputs()
    for _ in range(2):
        rw.linear_attention(q, k, v)
    for options in ({"feature_map": ["elu"]}, {"normalize": [1]}, {"scale": [2.0]}, {"rope": 3}, {"feature_map": "x"}):
        with pytest.raises(rw.RopewalkError):
            rw.linear_attention(q, k, v, **options)
    assert len(calls) == 1


def test_a_new_backend_is_chosen_anew(calls):
    q, k, v = inputs()
    for _ in range(2):
        rw.linear_attention(q, k, v)
    undo = registry.register(replace(registry.registered(calls[0]), name="later"))
    rw.linear_attention(q, k, v)
    undo()
    assert len(calls) == 1


def test_calls_end_with_their_rope_and_are_few(calls):
    rope = rw.RotaryEmbedding(16).to(DEVICE)
    for seq in range(2, 2 + repeated.MOST + 3):
        rw.linear_attention(*inputs(seq), rope=rope)
    assert 0 < len(repeated._CALLS[rope]) <= repeated.MOST
    gone = weakref.ref(rope)
    del rope
    gc.collect()
    assert gone() is None
    assert len(repeated._CALLS) == 0
