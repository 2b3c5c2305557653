"""Checks of the arguments of attention across ranks, and what must not differ between ranks."""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, shown
from ropewalk.kernels.precision import has_autocast
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.rotary import rope_axes, rope_in
from ropewalk.nn.rotary.call import Limits
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops.dtensors import Cut
from ropewalk.parallel.shards import Shards

__all__ = [
    "check_mesh_of_heads",
    "check_positions",
    "check_shards",
    "check_tokens",
    "describe_autocast",
    "describe_encoding",
    "describe_parameters",
    "describe_tensors",
    "needs_gradients",
]


def check_shards(shards: object, *, asked: str) -> None:
    """Raise unless an argument is a Shards.

    >>> try:
    ...     check_shards(4, asked="a doctest")
    ... except RopewalkError as error:
    ...     error.expected
    'a Shards'
    """
    if not isinstance(shards, Shards):
        raise RopewalkError(
            asked=f"{asked}(shards=...)",
            expected="a Shards",
            got=shown(shards),
            do="create one on every rank: ropewalk.parallel.Shards(mesh, length)",
        )


def check_mesh_of_heads(cut: Cut | None, shards: Shards, *, asked: str) -> None:
    """Raise if the ranks that share the tokens have different heads or sequences: none would have the keys of its own.

    Args:
        cut: How a mesh cuts q, k and v; None if they are plain.
        shards: The shards.
        asked: The function, for errors.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> check_mesh_of_heads(Cut(mesh, ("heads",)), Shards(mesh, 3), asked="a doctest")  # one rank has all heads
    >>> dist.destroy_process_group()
    """
    if cut is None:
        return
    of_tokens = set(dist.get_process_group_ranks(shards.mesh.get_group()))
    for i, name in enumerate(cut.names):
        both = sorted(of_tokens.intersection(dist.get_process_group_ranks(cut.mesh.get_group(i))))
        if name is not None and len(both) > 1:
            raise RopewalkError(
                asked=f"{asked}(q, k, v) with DTensors",
                expected="ranks that share the tokens, all with the same heads and sequences of the batch",
                got=f"ranks {', '.join(map(str, both))} with different tokens and different parts of the {name}",
                do='use a mesh of two dimensions, init_device_mesh(device, sizes, mesh_dim_names=("cp", "tp")): '
                'Shards(mesh["cp"], length), and heads that mesh["tp"] cuts',
            )


def check_tokens(
    q: Tensor, k: Tensor, shards: Shards, encoding: Encoding | RotaryEmbedding | None, *, asked: str
) -> None:
    """Raise unless q and k have the tokens of this rank, and one position per token is enough for the encoding.

    Args:
        q: Queries [batch, heads, tokens, dim].
        k: Keys [batch, kv_heads, tokens, dim].
        shards: The shards.
        encoding: An encoding, a rotation, or None.
        asked: The function, for errors.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> check_tokens(*[torch.ones(1, 1, 3, 2)] * 2, Shards(mesh, 3), None, asked="a doctest")
    >>> dist.destroy_process_group()
    """
    tokens = shards.lengths[shards.rank]
    if q.shape[2] != tokens or k.shape[2] != tokens:
        do = "cut the tokens before the projections: x = shards.cut(x, dim=1)"
        if q.shape[1] == k.shape[1] == tokens:
            do = "put the heads before the tokens: q.transpose(1, 2)"
        elif q.shape[2] == k.shape[2] == shards.length:
            do += f"; if rank {shards.rank} has these, create Shards with the number of tokens of all ranks"
        raise RopewalkError(
            asked=f"{asked}(q, k, v)",
            expected=f"[batch, heads, tokens, dim] with the {tokens} tokens of rank {shards.rank}",
            got=f"queries {list(q.shape)} and keys {list(k.shape)}",
            do=do,
        )
    if torch.compiler.is_compiling() and 0 in shards.lengths:
        # Also for the ring, whose graphs a compiler chooses.
        raise RopewalkError(
            asked=f"{asked}(...) in a compiled function",
            expected="tokens on every rank: a compiler omits the exchanges of a rank that has no results",
            got=f"tokens of each rank {shards.lengths}",
            do="cut the sequence evenly, or call it outside the compiled function",
        )
    if shards.sequences is not None and len(q) != 1:
        raise RopewalkError(
            asked=f"{asked}(q, k, v)",
            expected="a batch of 1, because sequences are packed",
            got=f"a batch of {len(q)}",
            do="pack the sequences of a batch, or create Shards without cu_seqlens",
        )
    if rope_axes(encoding) > 1:
        raise RopewalkError(
            asked=f"{asked} with a rope over several axes",
            expected="one position per token",
            got=f"{rope_axes(encoding)} axes",
            do="rotate q and k before softmax attention, at the positions of these tokens, and omit encoding",
        )
    rotation = rope_in(encoding)
    fixed = rotation is None or not rotation.spec.varies or getattr(encoding, "at_length", None) is not None
    if rotation is not None and not fixed and shards.sequences is not None:
        rule = type(rotation.spec.frequencies).__name__
        raise RopewalkError(
            asked=f"{asked} with {rule}",
            expected="frequencies that do not depend on the length, because sequences are packed",
            got=f"{rule}, which would need the length of each sequence",
            do="use an encoding with at_length=, a rule with fixed frequencies, or Shards without cu_seqlens",
        )


def check_positions(
    shards: Shards, encoding: Encoding | RotaryEmbedding | None, starts: Sequence[int] = (), *, asked: str
) -> None:
    """Raise if an encoding does not support a position of a token of some rank. Another rank would wait for it.

    Args:
        shards: The shards.
        encoding: An encoding, a rotation, or None.
        starts: Positions of the first tokens of the sequences: one for all, one per packed sequence, or one per row of
            a batch. By default 0.
        asked: The function, for errors.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> rope = RotaryEmbedding(2, context_length=8)
    >>> try:
    ...     check_positions(Shards(init_device_mesh("cpu", (1,)), 5), rope, [2, 4], asked="a doctest")
    ... except RopewalkError as error:
    ...     error.got
    'position 8'
    >>> dist.destroy_process_group()
    """
    rotation, most = rope_in(encoding), encoding.length if isinstance(encoding, Encoding) else None
    if most is None and (rotation is None or (rotation.context_length is None and rotation.spec.xpos is None)):
        return
    lengths = [end - begin for begin, end in itertools.pairwise(shards.ends)]
    starts = starts or [0]
    count = max(len(lengths), len(starts))
    pairs = zip(itertools.cycle(starts), itertools.cycle(lengths), strict=False)
    for start, length in itertools.islice(pairs, count):
        if rotation is not None:
            Limits(rotation.context_length, rotation.spec.xpos, False).check_range(start, length, asked)
        elif most is not None and start + length > most:
            raise RopewalkError(
                asked=f"{asked} with {getattr(encoding, 'name', 'an encoding')}",
                expected=f"positions from 0 to {most - 1}, the length of the encoding",
                got=f"position {start + length - 1}",
                do="shorten the sequence, or create the encoding with a larger length",
            )


def describe_tensors(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """Describe sizes, dtype, device, autocast, and which tensors need gradients: a backward pass has collectives too.

    >>> describe_tensors(*[torch.ones(1, 2, 3, 4)] * 3)[1]
    'torch.float32'
    """
    sizes = [(len(x), x.shape[1], x.shape[3]) for x in (q, k, v)]
    needs = f"gradients of q, k, v {needs_gradients(q, k, v)}"
    return [f"[batch, heads, dim] {sizes}", f"{v.dtype}", v.device.type, describe_autocast(v), needs]


def describe_autocast(x: Tensor) -> str:
    """Describe autocast on the device of a tensor: ranks would send numbers of another dtype.

    >>> describe_autocast(torch.ones(1))
    'autocast none'
    """
    device = x.device.type
    enabled = has_autocast(device) and torch.is_autocast_enabled(device)
    return f"autocast {torch.get_autocast_dtype(device) if enabled else 'none'}"


def describe_encoding(encoding: Encoding | RotaryEmbedding | None) -> str:
    """Describe an encoding: its class, rotation, sizes and devices of its parameters, and which need gradients.

    >>> describe_encoding(None)
    'encoding none'
    """
    if encoding is None:
        return "encoding none"
    rotation = rope_in(encoding)
    options = f"{encoding.extra_repr()}, at_length {getattr(encoding, 'at_length', None)}"
    parameters = describe_parameters(encoding)
    return f"encoding {type(encoding).__name__}({options}), rope {rotation and rotation.spec}, parameters {parameters}"


def describe_parameters(module: nn.Module) -> str:
    """Describe the parameters of a module: names, sizes, devices, and whether they need gradients.

    >>> describe_parameters(nn.Linear(2, 3, bias=False))
    "[('weight', (3, 2), 'cpu', [True])]"
    """
    parameters = module.named_parameters()
    return str([(name, tuple(x.shape), x.device.type, needs_gradients(x)) for name, x in parameters])


def needs_gradients(*tensors: Tensor | None) -> list[bool]:
    """Return which tensors need gradients.

    >>> needs_gradients(torch.ones(1), None, torch.ones(1, requires_grad=True))
    [False, False, True]
    """
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
