"""The C kernel against the truth, over random shapes, strides, slices and dtypes: 100,000 calls in `make test-all`."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropewalk.kernels.rotate import native as rotate_native
from ropewalk.kernels.types import Layout

DTYPES = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
CALLS = 100


def scattered(random: np.random.Generator, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Random numbers in memory of random order, with gaps, at a random offset."""
    order = random.permutation(len(shape)) if random.random() < 0.5 else np.arange(len(shape))
    steps = [int(random.choice((1, 1, 1, 2, 3))) for _ in shape]
    margin = [int(random.integers(0, 3)) if random.random() < 0.3 else 0 for _ in shape]
    memory = [size * step + 2 * gap for size, step, gap in zip(shape, steps, margin, strict=True)]
    numbers = torch.from_numpy(random.standard_normal([memory[i] for i in order])).to(dtype)
    view = numbers.permute(*np.argsort(order).tolist())
    for dim, (size, step, gap) in enumerate(zip(shape, steps, margin, strict=True)):
        view = view.narrow(dim, gap, size * step)[(slice(None),) * dim + (slice(None, None, step),)]
    return view


def truth(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, start: int, interleaved: bool) -> tuple[np.ndarray, ...]:
    """The rotation in float64, and the norm of each feature's pair; cos and sin broadcast against x."""
    pairs = cos.shape[-1]
    a = slice(start, start + 2 * pairs, 2) if interleaved else slice(start, start + pairs)
    b = slice(start + 1, start + 2 * pairs, 2) if interleaved else slice(start + pairs, start + 2 * pairs)
    y, size = x.copy(), np.zeros_like(x)
    y[..., a], y[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., b] * cos + x[..., a] * sin
    size[..., a] = size[..., b] = np.hypot(x[..., a], x[..., b]) * np.hypot(cos, sin)
    return y, size


def one_call(random: np.random.Generator, dtype: torch.dtype) -> None:
    seq_dim = int(random.choice((-2, -3)))
    seq, heads, pairs = int(random.integers(1, 6)), int(random.integers(1, 4)), int(random.integers(1, 20))
    batch = [int(random.integers(1, 3)) for _ in range(random.integers(0, 3))]
    head_dim = 2 * pairs + int(random.integers(0, 6)) * int(random.random() < 0.5)
    start = int(random.integers(0, head_dim - 2 * pairs + 1))
    with_heads = seq_dim == -3 or random.random() < 0.8
    middle = [] if not with_heads else [heads]
    shape = batch + ([*middle, seq] if seq_dim == -2 else [seq, heads]) + [head_dim]
    row = int(random.integers(0, 4))
    kind = random.choice(["shared", "batch", "heads"])
    table = [row + seq + int(random.integers(0, 3)), pairs]
    per_head = kind == "heads" and len(batch) <= 1 and with_heads
    if per_head:
        table = [shape[0] if batch and random.random() < 0.5 else 1, heads, *table]
    elif kind == "batch" and len(shape) > -seq_dim:
        table = [shape[0] if random.random() < 0.7 else 1, *table]
    working = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = (scattered(random, table, working) for _ in range(2))
    interleaved, conjugate = bool(random.random() < 0.5), bool(random.random() < 0.5)
    layout = Layout(interleaved, start, seq_dim)
    tensors = [scattered(random, shape, dtype)]
    if random.random() < 0.5:
        other = shape.copy()
        # The first dimension is the batch, where cos and sin have one.
        if batch and with_heads and not per_head:
            other[-3 if seq_dim == -2 else -2] = int(random.integers(1, 4))
        tensors.append(scattered(random, other, dtype))
    wide = [t.double().numpy().copy() for t in tensors]
    lined = []
    for t in (cos, sin):
        t = t.double().numpy()[..., row : row + seq, :]
        if t.ndim == 4:
            t = t if seq_dim == -2 else t.swapaxes(1, 2)
            t = t if len(shape) == 4 else t[0]
        else:
            front, t = t.shape[:-2], t if seq_dim == -2 else t[..., None, :]
            inner = 2 if seq_dim == -2 else 3
            t = t.reshape(*front, *[1] * ((len(shape) - inner - len(front)) if front else 0), *t.shape[len(front) :])
        lined.append(t)
    q, k = tensors[0], tensors[1] if len(tensors) > 1 else None
    in_place = bool(random.random() < 0.3)
    result = rotate_native.rotate(q, k, cos, sin, layout, row, conjugate, in_place)
    for y, x, source in zip(result, wide, tensors, strict=True):
        expected, size = truth(x, lined[0], -lined[1] if conjugate else lined[1], start, interleaved)
        share = 2.0**-40 if dtype == torch.float64 else 2.0**-18
        allowed = DTYPES[dtype] * np.abs(expected) * (size > 0) + share * size + 2.0**-25 * (dtype == torch.float16)
        wrong = np.abs(y.double().numpy() - expected) > allowed
        assert not wrong.any(), (shape, table, layout, row, conjugate, dtype, source.stride())
        assert in_place or np.array_equal(source.double().numpy(), x), "the input was changed"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**63))
def test_random_calls(dtype, seed):
    random = np.random.default_rng(seed)
    for _ in range(CALLS):
        one_call(random, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**63))
def test_a_hundred_thousand_calls(dtype, seed):
    # 4 dtypes x 250 seeds x 100 calls.
    random = np.random.default_rng(seed)
    for _ in range(CALLS):
        one_call(random, dtype)
