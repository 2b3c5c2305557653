"""Scores, their softmax and the mean of the values, for any mask and bias, by whichever of torch's attentions serves.

`scaled_dot_product_attention` takes a mask, and a bias as a part of it, as a tensor with a number for every query and
key. FlexAttention takes both as functions and keeps no such tensor; it is used on CUDA devices.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ropewalk.errors import RopewalkError
from ropewalk.kernels.constructors import arange
from ropewalk.kernels.torch_internals import is_transformed
from ropewalk.nn.encodings.base import Encoding, ScoreMod

__all__ = ["Biased", "Sight", "attend", "documents_of"]

# Up to this many queries a mask is small, and FlexAttention, which builds blocks of a mask first, would be slower.
FEW_QUERIES = 16
# Its kernels are in Triton, and take no narrower heads, and no float64.
FLEX_DEVICES = ("cuda",) if importlib.util.find_spec("triton") is not None else ()
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROWEST = 16


class Sight(NamedTuple):
    """Which keys a query may see: all of them, less what each field hides.

    `causal` hides the keys after a query, which stands at its index plus `starts`, [batch] or one number for all.
    `key_mask` [batch, keys] hides keys where it is False. `documents` [tokens] hides keys of another number than the
    query's, and those of a number below 0.

    >>> Sight(causal=True, documents=torch.tensor([0, 0, 1])).mask(1, 3, 3, torch.device("cpu")).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]
    """

    causal: bool = False
    starts: Tensor | None = None
    key_mask: Tensor | None = None
    documents: Tensor | None = None

    @property
    def only_causal(self) -> bool:
        return self.starts is None and self.key_mask is None and self.documents is None

    @property
    def everything(self) -> bool:
        return self.only_causal and not self.causal

    @property
    def may_be_blind(self) -> bool:
        """Whether a query may see no key at all."""
        return self.key_mask is not None or self.documents is not None

    def sees(self, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether query i of sequence b may see key j: for one of each, or for indices that broadcast."""
        seen = j >= 0
        if self.causal:
            start = self.starts[b] if self.starts is not None and self.starts.dim() else self.starts
            seen = seen & (j <= (i if start is None else i + start))
        if self.key_mask is not None:
            seen = seen & self.key_mask[b, j]
        if self.documents is not None:
            seen = seen & (self.documents[i] == self.documents[j]) & (self.documents[j] >= 0)
        return seen

    def rows(self, batch: int) -> int:
        """The batch if sequences differ in what they see, else 1."""
        return batch if self.key_mask is not None or (self.starts is not None and self.starts.dim()) else 1

    def mask(self, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
        """`sees` for all at once, [batch or 1, queries or 1, keys]."""
        b, i, j = (arange(size, device=device) for size in (self.rows(batch), queries, keys))
        return self.sees(b[:, None, None], i[None, :, None], j[None, None, :])


class Biased(NamedTuple):
    """An encoding that adds a bias to scores, and where queries and keys stand: [seq] or [batch, seq].

    >>> Biased(Encoding(), torch.arange(2), torch.arange(3)).k_positions.tolist()
    [0, 1, 2]
    """

    encoding: Encoding
    q_positions: Tensor
    k_positions: Tensor


def documents_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """The number of the sequence that each of `total` tokens belongs to; -1 for padding after the last.

    >>> documents_of(torch.tensor([0, 2, 2, 3]), 5).tolist()
    [0, 0, 2, -1, -1]
    """
    tokens = arange(total, device=cu_seqlens.device)
    ends = cu_seqlens.to(tokens.dtype)
    return torch.where(tokens < ends[-1], torch.searchsorted(ends, tokens, right=True) - 1, -1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    *,
    scale: float,
    dropout: float = 0.0,
    biased: Biased | None = None,
    flex: bool | None = None,
) -> Tensor:
    """softmax(q k^T scale + bias) v over the keys that each query may see; 0 where it sees none.

    q is [batch, heads, queries, dim], k and v have a divisor of the heads. `flex` forces FlexAttention, or SDPA; None
    takes what serves.

    >>> q = k = torch.zeros(1, 1, 2, 4)  # equal scores: the mean of the values that a query may see
    >>> hidden = torch.tensor([[False, True]])
    >>> v = torch.tensor([[[[1.0], [3.0]]]])
    >>> attend(q, k, v, Sight(causal=True, key_mask=hidden), scale=1.0).flatten().tolist()
    [0.0, 3.0]
    """
    unmasked = sight.everything or (sight.causal and sight.only_causal and q.shape[2] == k.shape[2])
    if flex is None:
        flex = _flex_serves(q, k) and dropout == 0 and not (biased is None and unmasked)
    if flex:
        score_mod = None if biased is None else biased.encoding.score_mod_once(*biased[1:])
        if biased is None or score_mod is not None:
            return _by_flex(q, k, v, sight, score_mod, biased, scale)
    bias = None if biased is None else biased.encoding.bias(biased.q_positions, biased.k_positions)
    if bias is None and unmasked:
        return _sdpa(q, k, v, None, sight.causal, scale, dropout)
    mask = None if sight.everything else sight.mask(q.shape[0], q.shape[2], k.shape[2], q.device).unsqueeze(1)
    blind = None
    if mask is not None and sight.may_be_blind:
        # The softmax of nothing is NaN, and so are its gradients: such queries see all, and their result is dropped.
        blind = ~mask.any(-1, keepdim=True)
        mask = mask | blind
    if bias is not None:
        bias = _fitting(bias, q, k)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    y = _sdpa(q, k, v, mask, False, scale, dropout)
    return y if blind is None else y.masked_fill(blind, 0)


def _fitting(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias in four dimensions and in a dtype that SDPA takes beside q."""
    scores = (*q.shape[:3], k.shape[2])
    if bias.dim() not in (3, 4) or any(n not in (1, m) for n, m in zip(bias.shape[::-1], scores[::-1], strict=False)):
        raise RopewalkError(
            asked="attention with the bias of an encoding",
            expected=f"a bias that broadcasts to [batch, heads, queries, keys] = {list(scores)}",
            got=f"{list(bias.shape)}",
            do="make the encoding with the num_heads of the layer",
        )
    # On the CPU scores are worked in float32, and a bias in float32 may join them; elsewhere dtypes must be the same.
    finer = q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    bias = bias.to(torch.float32 if finer else q.dtype)
    return bias if bias.dim() == 4 else bias.unsqueeze(0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    kv_heads, grouped = k.shape[1], False
    together = heads // kv_heads
    if together > 1 and queries == 1:
        # The query heads of a key head are so many queries to it: nothing is repeated, whatever the kernel.
        q = q.reshape(batch, kv_heads, together, q.shape[-1])
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], kv_heads, together, mask.shape[-1])
    elif together > 1:
        grouped = _groups_serve(q, mask)
        if not grouped:
            k, v = (x.repeat_interleave(together, dim=1) for x in (k, v))
    y = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return y.reshape(batch, heads, queries, v.shape[-1])


def _groups_serve(q: Tensor, mask: Tensor | None) -> bool:
    """Whether SDPA has a fused kernel for grouped heads; without one it would write out the scores."""
    if q.device.type == "cpu":
        return True
    return q.device.type == "cuda" and mask is None and q.dtype in (torch.bfloat16, torch.float16)


def _flex_serves(q: Tensor, k: Tensor) -> bool:
    served = q.device.type in FLEX_DEVICES and q.dtype in FLEX_DTYPES and q.shape[-1] >= NARROWEST
    if not served or q.shape[2] <= FEW_QUERIES or q.shape[0] == 0 or k.shape[2] == 0:
        return False
    return torch.compiler.is_compiling() or not is_transformed()


def _by_flex(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, score_mod: ScoreMod | None, biased: Biased | None, scale: float
) -> Tensor:
    make_blocks, flex_attention = _flex_functions(q.is_cuda and not torch.compiler.is_compiling())
    blocks = None
    if not sight.everything:
        rows = sight.rows(q.shape[0])

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return sight.sees(b, i, j)

        shape = (None if rows == 1 else rows), None, q.shape[2], k.shape[2]
        blocks = make_blocks(seen, *shape, device=q.device)
    return flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=None if biased is None else biased.encoding.flex_options,
    )


def _flex_functions(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """create_block_mask and flex_attention, compiled unless a compiler is at work already, or in a test on the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return _compiled_flex() if compiled else (create_block_mask, flex_attention)


@functools.cache
def _compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    # Uncompiled they write out what they are for not to write out: the mask, and the scores.
    create_block_mask, flex_attention = _flex_functions(compiled=False)
    return torch.compile(create_block_mask), torch.compile(flex_attention)
