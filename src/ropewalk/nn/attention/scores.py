"""Softmax attention with any mask and bias, by `scaled_dot_product_attention` (SDPA) or FlexAttention.

SDPA accepts mask and bias as one tensor with a number per query and key. FlexAttention accepts both as functions and
stores no such tensor. It is used on CUDA devices.
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

__all__ = ["ScoreBias", "Visibility", "attend", "documents_of"]

# Up to this many queries a mask is small, and FlexAttention is slower, because it builds a block mask first.
FEW_QUERIES = 16
# The kernels of FlexAttention use Triton, and support neither narrower heads nor float64.
FLEX_DEVICES = ("cuda",) if importlib.util.find_spec("triton") is not None else ()
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROWEST = 16


class Visibility(NamedTuple):
    """Which keys are visible to a query: all keys that no field hides.

    Attributes:
        causal: Hide the keys after a query. The index of query i among the keys is i + starts.
        starts: Index of the first query among the keys: [batch], or [] for all sequences. None is 0.
        key_mask: bool [batch, keys]. Hide keys where it is False.
        documents: Number of the document of each token [tokens]. Hide keys of other documents, and keys with a number
            below 0.

    >>> Visibility(causal=True, documents=torch.tensor([0, 0, 1])).mask(1, 3, 3, torch.device("cpu")).int().tolist()
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
    def hides_nothing(self) -> bool:
        return self.only_causal and not self.causal

    @property
    def can_hide_all(self) -> bool:
        """Whether a query can have no visible key."""
        return self.key_mask is not None or self.documents is not None

    def visible(self, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether key j is visible to query i of sequence b. The indices broadcast."""
        is_visible = j >= 0
        if self.causal:
            start = self.starts[b] if self.starts is not None and self.starts.dim() else self.starts
            is_visible = is_visible & (j <= (i if start is None else i + start))
        if self.key_mask is not None:
            is_visible = is_visible & self.key_mask[b, j]
        if self.documents is not None:
            is_visible = is_visible & (self.documents[i] == self.documents[j]) & (self.documents[j] >= 0)
        return is_visible

    def rows(self, batch: int) -> int:
        """Return `batch` if visibility differs between sequences, else 1."""
        return batch if self.key_mask is not None or (self.starts is not None and self.starts.dim()) else 1

    def mask(self, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return `visible` for all indices: [batch or 1, queries or 1, keys]."""
        b, i, j = (arange(size, device=device) for size in (self.rows(batch), queries, keys))
        return self.visible(b[:, None, None], i[None, :, None], j[None, None, :])


class ScoreBias(NamedTuple):
    """An encoding that adds a bias to the scores, and the positions it is computed at.

    Attributes:
        encoding: The encoding.
        q_positions: Positions of queries [q] or [batch, q].
        k_positions: Positions of keys [k] or [batch, k].

    >>> ScoreBias(Encoding(), torch.arange(2), torch.arange(3)).k_positions.tolist()
    [0, 1, 2]
    """

    encoding: Encoding
    q_positions: Tensor
    k_positions: Tensor


def documents_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return the index of the packed sequence that each token belongs to; -1 for padding after the last sequence.

    Args:
        cu_seqlens: Cumulated lengths [sequences + 1].
        total: Number of tokens.

    Returns:
        int64 [total].

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
    visibility: Visibility,
    *,
    scale: float,
    dropout: float = 0.0,
    score_bias: ScoreBias | None = None,
    flex: bool | None = None,
) -> Tensor:
    """Return softmax(q k^T scale + bias) v over the visible keys of each query; 0 if there are none.

    Args:
        q: Queries [batch, heads, queries, dim].
        k: Keys [batch, kv_heads, keys, dim]. heads is a multiple of kv_heads.
        v: Values [batch, kv_heads, keys, v_dim].
        visibility: Which keys are visible to each query.
        scale: Factor on the scores.
        dropout: Probability of dropping an attention weight.
        score_bias: The bias and its positions; None for no bias.
        flex: Force FlexAttention (True) or SDPA (False). None chooses.

    Returns:
        Tensor [batch, heads, queries, v_dim].

    Raises:
        RopewalkError: If the bias does not broadcast to the scores.

    >>> q = k = torch.zeros(1, 1, 2, 4)  # equal scores: the mean of the values that a query may see
    >>> hidden = torch.tensor([[False, True]])
    >>> v = torch.tensor([[[[1.0], [3.0]]]])
    >>> attend(q, k, v, Visibility(causal=True, key_mask=hidden), scale=1.0).flatten().tolist()
    [0.0, 3.0]
    """
    unmasked = visibility.hides_nothing or (visibility.causal and visibility.only_causal and q.shape[2] == k.shape[2])
    if flex is None:
        flex = _supports_flex(q, k) and dropout == 0 and not (score_bias is None and unmasked)
    if flex:
        score_mod = None if score_bias is None else score_bias.encoding.score_mod_once(*score_bias[1:])
        if score_bias is None or score_mod is not None:
            return _by_flex(q, k, v, visibility, score_mod, score_bias, scale)
    bias = None if score_bias is None else score_bias.encoding.bias(score_bias.q_positions, score_bias.k_positions)
    if bias is None and unmasked:
        return _sdpa(q, k, v, None, visibility.causal, scale, dropout)
    sizes = q.shape[0], q.shape[2], k.shape[2]
    mask = None if visibility.hides_nothing else visibility.mask(*sizes, q.device).unsqueeze(1)
    no_keys = None
    if mask is not None and visibility.can_hide_all:
        # Softmax over no keys is NaN, and so are its gradients: such queries see all keys, and the result is dropped.
        no_keys = ~mask.any(-1, keepdim=True)
        mask = mask | no_keys
    if bias is not None:
        bias = _fitting(bias, q, k)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    y = _sdpa(q, k, v, mask, False, scale, dropout)
    return y if no_keys is None else y.masked_fill(no_keys, 0)


def _fitting(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the bias with four dimensions and in a dtype that SDPA accepts with q."""
    scores = (*q.shape[:3], k.shape[2])
    if bias.dim() not in (3, 4) or any(n not in (1, m) for n, m in zip(bias.shape[::-1], scores[::-1], strict=False)):
        raise RopewalkError(
            asked="attention with the bias of an encoding",
            expected=f"a bias that broadcasts to [batch, heads, queries, keys] = {list(scores)}",
            got=f"{list(bias.shape)}",
            do="create the encoding with the num_heads of the layer",
        )
    # On the CPU scores are computed in float32, and SDPA accepts a float32 bias. Elsewhere the dtypes must be equal.
    keep_float32 = q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    bias = bias.to(torch.float32 if keep_float32 else q.dtype)
    return bias if bias.dim() == 4 else bias.unsqueeze(0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    kv_heads, grouped = k.shape[1], False
    group = heads // kv_heads
    if group > 1 and queries == 1:
        # The query heads that share a key head become queries of one head. No kernel then repeats the keys.
        q = q.reshape(batch, kv_heads, group, q.shape[-1])
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], kv_heads, group, mask.shape[-1])
    elif group > 1:
        grouped = _has_grouped_kernel(q, mask)
        if not grouped:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    y = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return y.reshape(batch, heads, queries, v.shape[-1])


def _has_grouped_kernel(q: Tensor, mask: Tensor | None) -> bool:
    """Whether SDPA has a fused kernel for grouped heads. Without one it would materialize the scores."""
    if q.device.type == "cpu":
        return True
    return q.device.type == "cuda" and mask is None and q.dtype in (torch.bfloat16, torch.float16)


def _supports_flex(q: Tensor, k: Tensor) -> bool:
    supported = q.device.type in FLEX_DEVICES and q.dtype in FLEX_DTYPES and q.shape[-1] >= NARROWEST
    if not supported or q.shape[2] <= FEW_QUERIES or q.shape[0] == 0 or k.shape[2] == 0:
        return False
    return torch.compiler.is_compiling() or not is_transformed()


def _by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    score_mod: ScoreMod | None,
    score_bias: ScoreBias | None,
    scale: float,
) -> Tensor:
    create_block_mask, flex_attention = _flex_functions(q.is_cuda and not torch.compiler.is_compiling())
    blocks = None
    if not visibility.hides_nothing:
        rows = visibility.rows(q.shape[0])

        def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return visibility.visible(b, i, j)

        shape = (None if rows == 1 else rows), None, q.shape[2], k.shape[2]
        blocks = create_block_mask(is_visible, *shape, device=q.device)
    return flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=None if score_bias is None else score_bias.encoding.flex_options,
    )


def _flex_functions(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return create_block_mask and flex_attention. Not compiled inside torch.compile, and in tests on the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return _compiled_flex() if compiled else (create_block_mask, flex_attention)


@functools.cache
def _compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    # Without compilation they would materialize the mask and the scores.
    create_block_mask, flex_attention = _flex_functions(compiled=False)
    return torch.compile(create_block_mask), torch.compile(flex_attention)
