"""Random calls of a backend's rotation, compared with float64: shapes, strides, rows, slices, dtypes, outputs."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ropewalk.kernels.backend import Operation
from ropewalk.kernels.types import Layout
from ropewalk.reference.budget import BudgetError

DTYPES = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}


def scattered(random: np.random.Generator, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Random numbers in a tensor with random strides and a random storage offset."""
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


def unmoved(x: Tensor) -> Tensor:
    return x


def one_call(
    random: np.random.Generator,
    dtype: torch.dtype,
    operation: Operation,
    move: Callable[[Tensor], Tensor] = unmoved,
) -> bool:
    """Call `operation.run`, a rotation, on tensors that `move` copied from the CPU. Raises BudgetError if it is wrong.

    Returns False, without a call, if the operation does not support the arguments.
    """
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
    tensors, tables = [move(x) for x in tensors], [move(x) for x in (cos, sin)]
    q, k = tensors[0], tensors[1] if len(tensors) > 1 else None
    if operation.supports is not None and operation.supports(q, k, layout) is not None:
        return False
    options, targets = {}, None
    kind = random.choice(["new", "new", "in place", "strides"])
    if kind == "in place" and operation.in_place:
        options, targets = {"in_place": True}, tensors
    elif kind == "strides" and operation.strides:
        options = {"strides": tuple(scattered(random, list(x.shape), dtype).stride() for x in tensors)}
    result = operation.run(q, k, *tables, layout, row, conjugate, **options)
    at = f"{shape}, tables {table}, {layout}, row {row}, conjugate {conjugate}, {dtype}, {kind}"
    if targets is not None and any(y.data_ptr() != x.data_ptr() for y, x in zip(result, targets, strict=True)):
        raise BudgetError(f"{at}: the result is not where it was asked for")
    if "strides" in options and any(y.stride() != s for y, s in zip(result, options["strides"], strict=True)):
        raise BudgetError(f"{at}: the result has other strides")
    for y, x, source in zip(result, wide, tensors, strict=True):
        expected, size = truth(x, lined[0], -lined[1] if conjugate else lined[1], start, interleaved)
        share = 2.0**-40 if dtype == torch.float64 else 2.0**-18
        allowed = DTYPES[dtype] * np.abs(expected) * (size > 0) + share * size + 2.0**-25 * (dtype == torch.float16)
        if y.dtype != dtype or not (np.abs(y.cpu().double().numpy() - expected) <= allowed).all():
            raise BudgetError(f"{at}: wrong numbers, {source.stride()}")
        if targets is not tensors and not np.array_equal(source.cpu().double().numpy(), x):
            raise BudgetError(f"{at}: the input was changed")
    return True
