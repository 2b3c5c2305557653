"""Softmax attention over a sequence that is cut over ranks, with every encoding."""

import itertools
from typing import Literal, NamedTuple, Never, get_args

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice, require_flag
from ropewalk.kernels.constructors import arange, tensor
from ropewalk.nn.attention.function import check_heads, checked_encoding, checked_scale, checked_window, encode
from ropewalk.nn.attention.scores import ScoreBias, attend, attend_packed
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.some_heads import SomeHeads
from ropewalk.nn.local_heads import call_locally, check_arguments_of_heads, check_shards_of_heads
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops.dtensors import is_dtensor
from ropewalk.parallel.arguments import (
    check_mesh_of_heads,
    check_positions,
    check_shards,
    check_tokens,
    describe_encoding,
    describe_tensors,
)
from ropewalk.parallel.collectives import attach, gather, no_outputs, swap
from ropewalk.parallel.ring import ring_attention
from ropewalk.parallel.shards import Shards
from ropewalk.signatures import checks_names, refuse_arguments

__all__ = ["Method", "attention"]

Method = Literal["gather", "ulysses", "ring"]

_ASKED = "parallel.attention"


@checks_names
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *unnamed: Never,
    shards: Shards,
    encoding: Encoding | RotaryEmbedding | None = None,
    method: Method = "gather",
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    **unknown: Never,
) -> Tensor:
    """`ropewalk.attention` over all tokens of all ranks.

    The encoding is applied here, at the positions of the tokens in their sequences. Causality and windows depend on the
    index of tokens in their sequence. A bias is computed for the positions of the queries and keys of each block.

    Gradients of parameters (T5's numbers, learned frequencies) are the share of this rank: their sum over ranks is the
    gradient on one rank.

    Args:
        q: Queries of this rank [batch, heads, tokens, head_dim]. Tensors can be DTensors that another mesh cuts along
            batch or heads. Tokens are always those of this rank.
        k: Keys of this rank [batch, kv_heads, tokens, head_dim].
        v: Values of this rank [batch, kv_heads, tokens, v_dim].
        shards: Which tokens each rank has.
        encoding: As in `ropewalk.attention`.
        method: "gather": one all-gather of keys and values, and one reduce-scatter of their gradients; every rank then
            has the keys of all. "ulysses": each rank computes all tokens of some heads, between two exchanges; heads
            and kv_heads are multiples of the number of ranks. "ring": keys and values travel from rank to rank, in both
            passes, so that memory does not grow with the number of ranks.
        causal: Hide the keys after a query.
        window: As in `ropewalk.attention`.
        scale: As in `ropewalk.attention`.

    Returns:
        Tensor [batch, heads, tokens, v_dim].

    Raises:
        RopewalkError: On every rank, if an argument of some rank is invalid, or differs between ranks.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> shards = Shards(init_device_mesh("cpu", (1,)), 3)
    >>> x, v = torch.zeros(1, 1, 3, 2), torch.tensor([[[[1.0], [3.0], [5.0]]]])
    >>> attention(x, x, v, shards=shards).flatten().tolist()  # equal scores: the mean of the visible values
    [1.0, 2.0, 3.0]
    >>> dist.destroy_process_group()
    """
    check_shards(shards, asked=_ASKED)
    if unnamed or unknown:
        # On all ranks, as errors of other arguments.
        shards.agree(lambda: refuse_arguments(_ASKED, attention, unnamed, unknown), lambda: "", asked=_ASKED)
    if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
        encodings = {"encoding": encoding}

        def check_dtensors() -> None:
            check_heads(q, k, v, asked=_ASKED)
            cut = check_shards_of_heads(q, k, v, asked=_ASKED)
            check_mesh_of_heads(cut, shards, asked=_ASKED)
            check_arguments_of_heads(cut, encodings, {}, asked=_ASKED)

        # Before anything else, so that an error of one rank is one of all.
        shards.agree(check_dtensors, lambda: "DTensors", asked=_ASKED)
        options = {"method": method, "causal": causal, "window": window, "scale": scale}
        return call_locally(attention, q, k, v, asked=_ASKED, encodings=encodings, tensors={}, shards=shards, **options)
    added, factor = None, 1.0

    def check() -> None:
        nonlocal added, factor
        check_heads(q, k, v, asked=_ASKED)
        require_choice(method, get_args(Method), asked=f"{_ASKED}(method=...)")
        require_flag(causal, asked=f"{_ASKED}(causal=...)")
        checked_window(window, asked=f"{_ASKED}(window=...)")
        check_tokens(q, k, shards, encoding, asked=_ASKED)
        check_positions(shards, encoding, asked=_ASKED)
        added = checked_encoding(encoding, q, k, causal, asked=_ASKED)
        factor = checked_scale(scale, added, q.shape[-1], asked=_ASKED)
        if method == "ulysses" and (q.shape[1] % shards.ranks or k.shape[1] % shards.ranks):
            raise RopewalkError(
                asked=f'{_ASKED}(method="ulysses")',
                expected=f"heads and kv_heads that are multiples of the {shards.ranks} ranks",
                got=f"{q.shape[1]} heads and {k.shape[1]} kv_heads",
                do='pass method="gather" or "ring"',
            )

    def describe() -> str:
        options = f"method {method}", f"causal {causal}", f"window {window}", f"scale {scale}"
        return "; ".join(["softmax attention", *describe_tensors(q, k, v), describe_encoding(encoding), *options])

    shards.agree(check, describe, asked=_ASKED)
    bias = None
    if added is not None:
        ids = shards.positions.to(q.device)
        q, k, v = encode(added, q, k, v, ids, ids)
        bias = added if type(added).bias is not Encoding.bias else None
    if method == "ring":
        return ring_attention(q, k, v, shards, bias, causal=causal, window=window, scale=factor)
    run = _by_gather if method == "gather" else _by_heads
    return run(q, k, v, shards, _Rule(bias, causal, window, factor))


class _Rule(NamedTuple):
    """What the methods have in common."""

    bias: Encoding | None
    causal: bool
    window: int | None
    scale: float


def _by_gather(q: Tensor, k: Tensor, v: Tensor, shards: Shards, rule: _Rule) -> Tensor:
    """Attend to the keys of all ranks, one run of queries after the other."""
    both = torch.cat([k, v], dim=-1)
    gathered = gather(shards.padded(both, 2), shards.mesh)
    both = shards.ordered(gathered.movedim(0, 2).flatten(2, 3), 2)
    k, v = both[..., : k.shape[-1]], both[..., k.shape[-1] :]
    outputs: list[Tensor] = []
    bias, causal, window, scale = rule
    for run in shards.local:
        begin, end = shards.ends[run.sequence], shards.ends[run.sequence + 1]
        # The first key that the first query sees, and the end of those that the last one sees.
        first = 0 if window is None else max(0, run.start - window + 1)
        last = run.stop if causal else end - begin
        last = last if causal or window is None else min(last, run.stop + window - 1)
        part, keys = slice(run.offset, run.offset + run.length), slice(begin + first, begin + last)
        visibility = Visibility(causal, run.start - first or None, window=window)
        score_bias = None
        if bias is not None:
            ids = arange(first, last, device=q.device)
            score_bias = ScoreBias(bias, ids[run.start - first : run.stop - first], ids)
        outputs.append(
            attend(q[:, :, part], k[:, :, keys], v[:, :, keys], visibility, scale=scale, score_bias=score_bias)
        )
    if outputs:
        return torch.cat(outputs, dim=2)
    learned = [] if bias is None else [x for x in bias.parameters() if x.requires_grad]
    return attach(no_outputs(q, k, v, *learned), gathered)


def _by_heads(q: Tensor, k: Tensor, v: Tensor, shards: Shards, rule: _Rule) -> Tensor:
    """Exchange tokens for heads, compute all tokens of some heads, and exchange back."""
    mesh, tokens = shards.mesh, q.shape[2]
    both = swap(shards.padded(torch.cat([k, v], dim=-1), 2), mesh, split=1, join=2)
    heads = swap(shards.padded(q, 2), mesh, split=1, join=2)
    heads, both = (shards.ordered(x, 2) for x in (heads, both))
    keys, values = both[..., : k.shape[-1]], both[..., k.shape[-1] :]
    bias, causal, window, scale = rule
    visibility, score_bias = Visibility(causal, window=window), None
    ends = tensor(shards.ends, dtype=torch.int64, device="cpu")
    if bias is not None:
        mine = SomeHeads(bias, shards.rank * heads.shape[1], heads.shape[1])
        lengths = [end - begin for begin, end in itertools.pairwise(shards.ends)]
        ids = torch.cat([arange(length, device=q.device) for length in lengths])
        score_bias = ScoreBias(mine, ids, ids)
    if shards.sequences is None:
        out = attend(heads, keys, values, visibility, scale=scale, score_bias=score_bias)
    else:
        out, _ = attend_packed(heads, keys, values, visibility, ends, scale=scale, score_bias=score_bias)
    return swap(shards.spread(out, 2), mesh, split=2, join=1)[:, :, :tokens]
