"""Calls of linear attention that repeat an earlier one have its checks, and results of their own numbers."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ropewalk as rw
from kernels.triton_device import DEVICE
from nn.linear_cases import drawn
from ropewalk.kernels import backend as registry
from ropewalk.kernels.backends.triton import TRITON
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.kernels.linear.triton_again import Again
from ropewalk.kernels.linear.triton_call import Call
from ropewalk.nn.linear import function, repeated
from slow import slow


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Triton's kernels are chosen on every device, and calls that were repeated are counted."""
    operations = {"linear_attention": TRITON.operations["linear_attention"]}
    undo = registry.register(replace(TRITON, name="everywhere", operations=operations, devices=(DEVICE.type,)))
    monkeypatch.setattr(linear_segments, "segment_length", lambda *sizes: 64)
    monkeypatch.setattr(repeated, "_CALLS", type(repeated._CALLS)())
    seen, real = [], function.call_again

    def call_again(*arguments):
        out = real(*arguments)
        if out is not None:
            seen.append("repeated")
        return out

    monkeypatch.setattr(function, "call_again", call_again)
    yield seen
    undo()


@pytest.fixture
def passes(monkeypatch):
    """The passes that kernels compute without looking anything up, by name."""
    seen = []

    def count(name):
        real = getattr(Again, name)

        def counted(self, *arguments):
            result = real(self, *arguments)
            if result is not None:
                seen.append(name)
            return result

        monkeypatch.setattr(Again, name, counted)

    count("forward")
    count("backward")
    return seen


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


def gradients(leaves, rope, cotangent=None):
    out = rw.linear_attention(*leaves, rope=rope)
    return torch.autograd.grad(out, leaves, random(out) if cotangent is None else cotangent)


def random(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(x)


# float32 is computed by the kernels that store features, which have no `again`.
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)])
def test_gradients_of_a_repeated_call(calls, passes, dtype):
    rope, (q, k, v) = rw.RotaryEmbedding(16).to(DEVICE), inputs(dtype=dtype)
    with torch.inference_mode():
        rw.linear_attention(q, k, v, rope=rope)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    passes.clear()
    results = [gradients(leaves, rope) for _ in range(3)]
    assert len(calls) == 2
    assert passes == (["forward", "backward"] * 3 if dtype == torch.bfloat16 else [])
    for first, *others in zip(*results, strict=True):
        assert all(torch.equal(first, other) for other in others)


def moved(x):
    """The same numbers with other strides, as hooks of saved tensors may return them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x


def misplaced(x):
    """The same numbers at an address that is not a multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x).copy_(x)


@pytest.mark.slow
def test_cotangents_with_other_strides(calls, passes):
    rope = rw.RotaryEmbedding(16).to(DEVICE)
    leaves = [x.requires_grad_() for x in inputs()]
    full = random(leaves[0])
    wide = torch.cat([full, full], dim=-1)[..., :16]
    one = full[..., :1, :1].expand_as(full)
    for cotangent in (full, moved(full), wide, misplaced(full), one, full):
        plain = cotangent.clone(memory_format=torch.contiguous_format)
        expected = gradients(leaves, rw.RotaryEmbedding(16).to(DEVICE), plain)
        results = gradients(leaves, rope, cotangent)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert len(calls) == 5
    # All but the expanded one.
    assert passes.count("backward") == 11


@pytest.mark.parametrize("unpack", [moved, misplaced])
def test_saved_tensors_that_hooks_have_moved(calls, passes, unpack):
    rope = rw.RotaryEmbedding(16).to(DEVICE)
    leaves = [x.requires_grad_() for x in inputs()]
    truth = gradients(leaves, rope)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            results = gradients(leaves, rope)
        assert all(torch.equal(a, b) for a, b in zip(results, truth, strict=True))
    assert len(calls) == 2
    assert passes.count("backward") == 1


def test_activation_checkpointing_saves_the_same_tensors_in_the_first_call_and_later(calls):
    rope = rw.RotaryEmbedding(16).to(DEVICE)
    leaves = [x.requires_grad_() for x in inputs()]
    truth = gradients(leaves, rw.RotaryEmbedding(16).to(DEVICE))
    for forgets in (False, False, True):
        out = checkpoint(lambda *x: rw.linear_attention(*x, rope=rope), *leaves, use_reentrant=False)
        if forgets:
            repeated._CALLS.clear()
        results = torch.autograd.grad(out, leaves, random(out))
        assert all(torch.equal(a, b) for a, b in zip(results, truth, strict=True))
    # The forward passes. A recomputation stops as soon as it has saved all tensors.
    assert len(calls) == 2


def test_transforms_of_the_backward(calls):
    rope = rw.RotaryEmbedding(16).to(DEVICE)
    leaves = [x.requires_grad_() for x in inputs()]
    gradients(leaves, rope)
    out = rw.linear_attention(*leaves, rope=rope)
    cotangent, tangent = random(out), random(out) * 2
    assert len(calls) == 1

    def of_v(x):
        return torch.autograd.grad(out, leaves[2], x, retain_graph=True)[0]

    with forward_ad.dual_level():
        dual = of_v(forward_ad.make_dual(cotangent, tangent))
        # The gradient is linear in the cotangent.
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, of_v(tangent), atol=0.05, rtol=0.05)
    both = torch.func.vmap(of_v)(torch.stack([cotangent, tangent]))
    torch.testing.assert_close(both, torch.stack([of_v(cotangent), of_v(tangent)]), atol=0.05, rtol=0.05)
    with FlopCounterMode(display=False) as flops:
        of_v(cotangent)
    assert flops.get_total_flops() > 0


def test_an_interrupted_first_call_leaves_nothing_behind(calls, monkeypatch):
    values = Call._values

    def interrupted(self, arrays, variant):
        monkeypatch.setattr(Call, "_values", values)
        raise KeyboardInterrupt

    monkeypatch.setattr(Call, "_values", interrupted)
    q, k, v = (x[:, :, 1:].contiguous() for x in inputs(21))
    with pytest.raises(KeyboardInterrupt):
        rw.linear_attention(q, k, v, feature_map="relu")
    out = rw.linear_attention(q, k, v, feature_map="relu")
    expected = rw.linear_attention(*(x.float() for x in (q, k, v)), feature_map="relu")
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)


def test_gradients_of_one_tensor_and_of_gradients(calls):
    rope = rw.RotaryEmbedding(16).to(DEVICE)
    q, k, v = inputs()
    q.requires_grad_()
    first, second = [torch.autograd.grad(rw.linear_attention(q, k, v, rope=rope).sum(), q)[0] for _ in range(2)]
    assert torch.equal(first, second)

    def twice(make):
        out = rw.linear_attention(q, k, v, rope=make())
        (of_q,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(of_q.square().sum(), q)[0]

    assert len(calls) == 1
    expected = twice(lambda: rw.RotaryEmbedding(16).to(DEVICE))
    torch.testing.assert_close(twice(lambda: rope), expected)
    assert len(calls) == 2


def test_tensors_that_were_changed_are_an_error(calls):
    rope = rw.RotaryEmbedding(16).to(DEVICE)
    leaves = [x.requires_grad_() for x in inputs()]
    rw.linear_attention(*leaves, rope=rope)
    out = rw.linear_attention(*leaves, rope=rope)
    with torch.no_grad():
        leaves[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert len(calls) == 1


def test_no_tensor_of_a_call_is_kept(calls):
    rope = rw.RotaryEmbedding(16).to(DEVICE)
    for _ in range(2):
        leaves = [x.requires_grad_() for x in inputs()]
        kept = [weakref.ref(x) for x in (*leaves, *gradients(leaves, rope))]
        del leaves
        gc.collect()
        assert not any(x() is not None for x in kept)
    assert len(calls) == 1


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
    undo = registry.register(replace(registry.registered("everywhere"), name="later"))
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
