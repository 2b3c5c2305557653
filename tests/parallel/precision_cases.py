"""Errors of attention over ranks in float32 and bfloat16, next to those of the plain formula and of one rank."""

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ropewalk as rw
from formulas import rotate_by_spec, rotate_pairs, spec_frequencies
from nn.linear_cases import FORMULAS, drawn
from nn.weighted_cases import alibi_bias, decay_products, t5, t5_bias
from parallel.cases import BUCKETS, DIM, HEADS, LENGTH, SHARDINGS, V_DIM
from ropewalk import parallel

__all__ = ["DTYPES", "Errors", "Kind", "measure"]

DTYPES = (torch.float32, torch.bfloat16)
NAMES = ("output", "gradient of q", "gradient of k", "gradient of v", "gradient of the parameter")


class Kind(NamedTuple):
    """A method ("linear", or one of softmax attention), an encoding or a decay, and a dtype."""

    method: str
    name: str
    dtype: torch.dtype


class Errors(NamedTuple):
    """Of one tensor: the Euclidean norm of its error, and the largest error.

    Args:
        tensor: Name of the tensor.
        numbers: How many numbers it has.
        norm: [3]: over ranks, of the formula in the same dtype, and of the library on one rank.
        largest: [3].
    """

    tensor: str
    numbers: int
    norm: Tensor
    largest: Tensor


def of_parameter(name: str, batch: int) -> Tensor | None:
    """Numbers that bfloat16 has too, so that no error is one of both sides: of T5, of frequencies, or decays."""
    shapes = {
        "t5": (BUCKETS[0], HEADS),
        "learned": (DIM // 2,),
        "per head": (HEADS,),
        "per token": (batch, HEADS, LENGTH),
    }
    if name not in shapes:
        return None
    numbers = torch.rand(shapes[name], generator=torch.Generator().manual_seed(2))
    return {"t5": 2 * numbers - 1, "learned": 0.5 * numbers - 0.25}.get(name, -0.2 * numbers).bfloat16().float()


def encoding_of(name: str) -> Any:
    """The encoding of this library, or None for a decay."""
    if name == "xpos":
        return rw.RotaryEmbedding(rw.RopeSpec(DIM, xpos=rw.XPos(2 * LENGTH)))
    if name in ("rope", "learned"):
        return rw.RotaryEmbedding(DIM, learned=name == "learned")
    if name == "alibi":
        return rw.encoding(name, dim=HEADS * DIM, num_heads=HEADS)
    return t5(HEADS, BUCKETS, causal=True) if name == "t5" else None


def formula(q, k, v, parameter: Any = None, *, name, window, ids, sequences, linear):
    """Attention as sums over all pairs of tokens of all ranks. Every step has the dtype of q, except angles."""
    if linear:
        q, k = (FORMULAS["elu"](x) for x in (q, k))
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    plain_q, plain_k = q, k
    if name in ("rope", "xpos"):
        q, k = (rotate_by_spec(x, encoding_of(name).spec, ids, role=role) for x, role in ((q, "q"), (k, "k")))
    elif name == "learned":
        # Exact angles. Their gradients have the dtype of q, as all others.
        angles = ids.to(q.dtype)[:, None] * (spec_frequencies(rw.RopeSpec(DIM)).to(q.dtype) * parameter.exp())
        exact = ids.double()[:, None] * (spec_frequencies(rw.RopeSpec(DIM)) * parameter.double().exp())
        angles = exact.detach() + (angles - angles.detach()).double()
        q, k = (rotate_pairs(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype), interleaved=True) for x in (q, k))
    bias = None
    if name == "alibi":
        bias = alibi_bias(HEADS, ids[None], ids[None], q.dtype)
    elif name == "t5":
        bias = t5_bias(parameter, ids[None], ids[None], BUCKETS, causal=True)
    ahead = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = (sequences[:, None] != sequences) | (ahead < 0) | (ahead >= (window or LENGTH))
    scores = q @ k.transpose(-1, -2)
    if not linear:
        scores = scores * (1.0 if name == "t5" else DIM**-0.5)
        scores = scores if bias is None else scores + bias
        return torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ v
    factor = torch.ones((), dtype=q.dtype) if bias is None else bias.exp()
    if name.startswith("per "):
        factor = decay_products(parameter, HEADS, LENGTH, causal=True)
    weights = [(x * factor).masked_fill(hidden, 0.0) for x in (scores, plain_q @ plain_k.transpose(-1, -2))]
    return (weights[0] @ v) / weights[1].sum(-1, keepdim=True)


def with_gradients(compute, leaves, cotangent):
    """The output, and the gradients of leaves, with 0 for what a rank without tokens does not use."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = compute(*leaves)
    found = torch.autograd.grad(out, leaves, cotangent.to(out.dtype), allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if y is None else y for x, y in zip(leaves, found, strict=True))]


def of_library(name: str, window: int | None, linear: bool, run):
    """A function of q, k, v and a parameter that calls one of the library's."""

    def compute(q, k, v, parameter=None):
        module = encoding_of(name)
        if module is not None and parameter is not None:
            attribute = "log_scale" if name == "learned" else "weight"
            # Not a new parameter: gradients are those of the tensor itself.
            delattr(module, attribute)
            setattr(module, attribute, parameter)
        if not linear:
            return run(q, k, v, encoding=module, window=window)
        if name.startswith("per "):
            return run(q, k, v, decay=parameter)
        return run(q, k, v, **{"bias" if name in ("alibi", "t5") else "rope": module})

    return compute


@functools.lru_cache(maxsize=2)
def whole(name: str, window: int | None, ends: tuple[int, ...] | None, dtype: torch.dtype, linear: bool, seed: int):
    """The tensors of all tokens, their cotangent, and the results of the three: they do not depend on the ranks."""
    batch, borders = (2, (0, LENGTH)) if ends is None else (1, ends)
    lengths = torch.tensor(borders).diff()
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    ids = torch.cat([torch.arange(int(length)) for length in lengths])
    leaves = list(drawn(batch, HEADS, 2 if linear else HEADS, LENGTH, DIM, V_DIM, dtype, seed=seed))
    parameter = of_parameter(name, batch)
    leaves += [] if parameter is None else [parameter]
    source = torch.Generator().manual_seed(1 + seed)
    cotangent = torch.randn(batch, HEADS, LENGTH, V_DIM, generator=source).to(dtype)
    plain = functools.partial(formula, name=name, window=window, ids=ids, sequences=sequences, linear=linear)
    run = functools.partial(rw.linear_attention if linear else rw.attention, cu_seqlens=ends and torch.tensor(ends))
    results = [with_gradients(plain, [x.to(y) for x in leaves], cotangent) for y in (torch.float64, dtype)]
    return leaves, cotangent, [*results, with_gradients(of_library(name, window, linear, run), leaves, cotangent)]


def measure(kind: Kind, layout: str, window: int | None, seed: int, mesh) -> list[Errors]:
    """Return the errors of the output and of all gradients, on all ranks together."""
    sharding, linear = SHARDINGS[layout], kind.method == "linear"
    shards, per_token = sharding.shards(mesh, check_calls=False), kind.name == "per token"
    leaves, cotangent, results = whole(kind.name, window, sharding.ends, kind.dtype, linear, seed)
    run = functools.partial(parallel.linear_attention if linear else parallel.attention, shards=shards)
    run = run if linear else functools.partial(run, method=kind.method)
    parts = [shards.cut(x, 2) if i < 3 or per_token else x for i, x in enumerate(leaves)]
    compute = of_library(kind.name, window, linear, run)
    ours = with_gradients(compute, parts, shards.cut(cotangent, 2))
    return errors_of(ours, results, shards, per_token)


def errors_of(ours, results, shards, per_token) -> list[Errors]:
    truth, in_dtype, alone = results
    rows = []
    for i, y in enumerate(ours):
        local = i < 4 or per_token
        if not local:
            # A rank has its share of the gradient of a parameter. Their sum is counted once.
            y = y.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(y)
        assert y.dtype == alone[i].dtype
        cut = (lambda x: shards.cut(x, 2)) if local else (lambda x: x if shards.rank == 0 else x[:0])
        errors = [(x.double() - cut(truth[i])) for x in (y if local else cut(y), cut(in_dtype[i]), cut(alone[i]))]
        rows += [[x.numel(), x.square().sum(), x.abs().max() if x.numel() else 0.0] for x in errors]
    mine = torch.tensor(rows, dtype=torch.float64)
    parts = [torch.empty_like(mine) for _ in range(shards.ranks)]
    dist.all_gather(parts, mine)
    numbers = torch.stack(parts).unflatten(1, (-1, 3))
    return [
        Errors(name, int(row[:, 0, 0].sum()), row[:, :, 1].sum(0).sqrt(), row[:, :, 2].max(0).values)
        for name, row in zip(NAMES, numbers.unbind(1), strict=False)
    ]
