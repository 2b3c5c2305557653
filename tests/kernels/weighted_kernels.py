"""The Triton kernels for linear attention with a decay or a bias, next to sums over all pairs of tokens in float64."""

import sys

import pytest
import torch

import ropewalk as rw
from kernels.triton_device import DEVICE
from nn.linear_cases import drawn, error, with_gradients
from nn.weighted_cases import DECAYS, expected, rule_of
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.kernels.linear import triton_call, triton_prepare
from ropewalk.kernels.linear.tiles import Block
from ropewalk.kernels.triton_launch import LAUNCHES
from ropewalk.ops.linear_attention import linear_attention

__all__ = [
    "FAR",
    "LIMIT",
    "NEAR",
    "assert_close",
    "check",
    "check_states",
    "inputs_of",
    "kernels_only",
    "ours",
    "short_segments",
    "two_steps_per_chunk",
]

# Relative error of float32 results. Matrix products have the precision of float32.
LIMIT = 2e-5
NEAR, FAR = (4, 20), (8, 80)  # T5's num_buckets and max_distance: a window within a segment, and beyond one


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Short segments on a CPU."""
    # Few tokens then make several segments, and the last one is not full.
    if DEVICE.type == "cpu":
        monkeypatch.setattr(linear_segments, "segment_length", lambda *_: 64)
        # Launches of other tests have other segments.
        monkeypatch.setattr(triton_prepare, "LAUNCHES", type(LAUNCHES)())


@pytest.fixture
def two_steps_per_chunk(monkeypatch):
    """Chunks of 32 tokens that are visited in steps of 16, if chunks are computed apart. bfloat16 has such tiles."""

    def tile_of(*arguments, apart):
        tile = real(*arguments, apart=apart)
        blocks = {name: block._replace(step=16) for name, block in tile._asdict().items() if isinstance(block, Block)}
        return tile._replace(chunk=32, **blocks) if apart else tile

    real = triton_call.tile_of
    monkeypatch.setattr(triton_call, "tile_of", tile_of)
    # On a GPU too, launches of other tests have other tiles.
    monkeypatch.setattr(triton_prepare, "LAUNCHES", type(LAUNCHES)())


@pytest.fixture
def kernels_only(monkeypatch):
    """Makes the formula an error, in the forward and in the backward, except for the gradient of a decay."""
    module = sys.modules[linear_attention.__module__]
    real = module.linear_attention_formula

    def formula(*arguments):
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and arguments[-1].decay is not None and arguments[-1].decay.requires_grad:
            return real(*arguments)
        raise AssertionError("the formula was called")

    monkeypatch.setattr(module, "linear_attention_formula", formula)


def ours(q, k, v, rule, rope=None, *, causal=True, tensor=None, backend="triton", **options):
    weights = rule.options(q.shape[1], causal=causal, tensor=tensor)
    rope = rope and rope.to(q.device)
    return rw.linear_attention(q, k, v, rope=rope, causal=causal, backend=backend, **weights, **options)


def inputs_of(kind, heads, kv_heads, seq, *, batch=1, buckets=NEAR, dim=8, v_dim=5):
    """float32 inputs, with the decay or T5's numbers as the last one, and the rule."""
    rule = rule_of(kind, batch, heads, kv_heads, seq, torch.float32, buckets=buckets)
    tensors = [*drawn(batch, heads, kv_heads, seq, dim, v_dim, torch.float32)]
    return tensors + ([] if rule.tensor is None else [rule.tensor]), rule


def assert_close(results, truth):
    for name, a, b in zip(("o", "dq", "dk", "dv", "dw"), results, truth, strict=False):
        assert a.shape == b.shape
        assert error(a, b) < LIMIT, (name, error(a, b))


def check(kind, heads, kv_heads, seq, *, batch=1, buckets=NEAR, sizes=(8, 5), rotated=True, fixed=False, **options):
    """Compare outputs and all gradients with sums over all pairs of tokens in float64. `sizes` is width and v_dim."""
    inputs, rule = inputs_of(kind, heads, kv_heads, seq, batch=batch, buckets=buckets, dim=sizes[0], v_dim=sizes[1])
    rope = rw.RotaryEmbedding(sizes[0]) if rotated else None
    cotangent = torch.randn(batch, heads, seq, sizes[1], generator=torch.Generator().manual_seed(3))
    # A tensor that is not an input needs no gradient.
    given = [inputs.pop()] if fixed else []

    def by_kernels(q, k, v, *tensor):
        moved = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        weights = [*tensor, *(x.to(DEVICE) for x in given), None]
        return ours(q, k, v, rule, rope, tensor=weights[0], **moved)

    def by_sums(q, k, v, *tensor):
        weights = [*tensor, *(x.double() for x in given), None]
        return expected(q, k, v, rule._replace(tensor=weights[0]), rope and rope.to("cpu"), **options)

    results = with_gradients(by_kernels, [x.to(DEVICE) for x in inputs], cotangent)
    assert_close(results, with_gradients(by_sums, [x.double() for x in inputs], cotangent))
    return results


def in_two_parts(q, k, v, rule, tensor, rope, backend, first, normalize, sums):
    """Outputs of two calls, the second of which continues the first, and the state at the end."""
    state, results = sums, []
    for part in (slice(0, first), slice(first, None)):
        g = tensor[..., part] if tensor is not None and tensor.dim() == 3 else tensor
        one = [x[:, :, part] for x in (q, k, v)]
        options = {"state": state, "return_state": True, "normalize": normalize, "backend": backend}
        out, state = ours(*one, rule, rope, tensor=g, **options)
        results.append(out)
    assert state is not None
    return torch.cat([x.flatten() for x in (*results, state.above, state.below)])


def check_states(kind, normalize):
    """Compare two calls, of which one continues the other, and all gradients with the formula in float64."""
    batch = 1 if kind == "per key head" else 2
    inputs, rule = inputs_of(kind, 2, 1, 100, batch=batch)
    heads = 2 if "query" in kind or kind == "alibi" else 1
    inputs = [*inputs, torch.rand(batch, heads, 8, 5), torch.rand(batch, heads, 8)]
    cotangent = torch.randn(batch * (2 * 100 * 5 + heads * 8 * 6), generator=torch.Generator().manual_seed(3))

    def run(backend):
        def f(q, k, v, *rest):
            *tensor, above, below = rest
            rope = rw.RotaryEmbedding(8)
            weighting = "decay" if kind in DECAYS else "AlibiBias"
            state = rw.LinearState(above, below, 7, rope.spec, "elu", weighting=weighting)
            arguments = rule, tensor[0] if tensor else None, rope, backend, 66, normalize, state
            return in_two_parts(q, k, v, *arguments)

        return f

    results = with_gradients(run("triton"), [x.to(DEVICE) for x in inputs], cotangent)
    truth = with_gradients(run("torch"), [x.double() for x in inputs], cotangent)
    for a, b in zip(results, truth, strict=True):
        assert error(a, b) < LIMIT
