"""Visibility: which keys each query sees, by the index of tokens, and the same as blocks for FlexAttention."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange

__all__ = ["Visibility", "documents_of", "window_blocks"]

# Number of queries and of keys per block of a BlockMask: the default of FlexAttention.
FLEX_BLOCK = 128


class Visibility(NamedTuple):
    """Which keys are visible to a query: all keys that no field hides.

    Causality and windows depend on the index of tokens in their sequence, not on positions.

    Attributes:
        causal: Hide the keys after a query. The index of query i is i + starts.
        starts: Index of the first query: an int, or a tensor [] or [batch]. None is 0.
        key_mask: bool [batch, keys]. Hide keys where it is False.
        documents: Number of the document of each token [tokens]. Hide keys of other documents, and keys with a number
            below 0.
        window: Hide the keys that are `window` or more tokens before a query; if not causal, also after it. None for no
            window.
        key_indices: Index of each key [keys] or [batch, keys], if key j does not have the index j. Hide keys with an
            index below 0.

    >>> Visibility(causal=True, documents=torch.tensor([0, 0, 1])).mask(1, 3, 3, torch.device("cpu")).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]
    >>> Visibility(causal=True, window=2).mask(1, 3, 3, torch.device("cpu")).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]
    """

    causal: bool = False
    starts: int | Tensor | None = None
    key_mask: Tensor | None = None
    documents: Tensor | None = None
    window: int | None = None
    key_indices: Tensor | None = None

    @property
    def only_causal(self) -> bool:
        return all(field is None for field in self[1:])

    @property
    def hides_nothing(self) -> bool:
        return self.only_causal and not self.causal

    @property
    def can_hide_all(self) -> bool:
        """Whether a query can have no visible key."""
        return self.key_mask is not None or self.documents is not None or self.key_indices is not None

    def visible(self, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether key j is visible to query i of sequence b. The indices broadcast."""
        start = self.starts[b] if isinstance(self.starts, Tensor) and self.starts.dim() else self.starts
        query = i if start is None else i + start
        key = j
        if self.key_indices is not None:
            key = self.key_indices[b, j] if self.key_indices.dim() > 1 else self.key_indices[j]
        is_visible = key >= 0
        if self.causal:
            is_visible = is_visible & (key <= query)
        if self.window is not None:
            is_visible = is_visible & (query - key < self.window)
            if not self.causal:
                is_visible = is_visible & (key - query < self.window)
        if self.key_mask is not None:
            is_visible = is_visible & self.key_mask[b, j]
        if self.documents is not None:
            is_visible = is_visible & (self.documents[i] == self.documents[j]) & (self.documents[j] >= 0)
        return is_visible

    def of_keys(self, part: slice) -> "Visibility":
        """Return the visibility with the mask of some keys, for a call with these keys alone."""
        return self if self.key_mask is None else self._replace(key_mask=self.key_mask[:, part])

    def rows(self, batch: int) -> int:
        """Return `batch` if visibility differs between sequences, else 1."""
        by_row = isinstance(self.starts, Tensor) and self.starts.dim() > 0
        by_row = by_row or (self.key_indices is not None and self.key_indices.dim() > 1)
        return batch if self.key_mask is not None or by_row else 1

    def mask(self, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return `visible` for all indices: [batch or 1, queries or 1, keys]."""
        b, i, j = (arange(size, device=device) for size in (self.rows(batch), queries, keys))
        return self.visible(b[:, None, None], i[None, :, None], j[None, None, :])


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


def window_blocks(visibility: Visibility, tokens: int, is_visible: Callable[..., Tensor], device: torch.device) -> Any:
    """Return the BlockMask of a window over `tokens` queries and keys, from the indices of blocks.

    create_block_mask evaluates the mask of every query and key instead. Blocks in which every key is visible to every
    query are not masked, unless another field can hide keys in them.

    Args:
        visibility: Has a window, and neither starts nor key_indices.
        tokens: Number of tokens.
        is_visible: The mask of FlexAttention for single queries and keys.
        device: Device of the mask.

    Returns:
        A BlockMask [1, 1, tokens, tokens].
    """
    from torch.nn.attention.flex_attention import BlockMask

    window, size = visibility.window or tokens, FLEX_BLOCK
    block = arange(-(-tokens // size), device=device)
    first, last = block * size, (block * size + size - 1).clamp_max(tokens - 1)
    ahead = 0 if visibility.causal else window - 1
    # Per block of queries: the first and last block with a visible key, and those in which all keys are visible.
    lowest, highest = (first - window + 1).clamp_min(0) // size, (last + ahead).clamp_max(tokens - 1) // size
    whole_from = ((last - window + 1).clamp_min(0) + size - 1) // size
    whole_to = (first + ahead + 1).clamp_max(tokens) // size
    column = block[None]
    touched = (column >= lowest[:, None]) & (column <= highest[:, None])
    whole = touched & (column >= whole_from[:, None]) & (column < whole_to[:, None])
    if visibility.key_mask is not None or visibility.documents is not None:
        whole = whole & False
    counts_and_indices: list[Tensor] = []
    for chosen in (touched & ~whole, whole):
        order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
        counts_and_indices += [x.to(torch.int32)[None, None] for x in (chosen.sum(-1), order)]
    lengths = {"seq_lengths": (tokens, tokens)}
    return BlockMask.from_kv_blocks(*counts_and_indices, BLOCK_SIZE=size, mask_mod=is_visible, **lengths)
