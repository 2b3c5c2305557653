"""Visibility: which keys each query sees, by the index of tokens, and the same as blocks for FlexAttention."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, zeros_like

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

    def only_causal(self) -> bool:
        return all(field is None for field in self[1:])

    def hides_nothing(self) -> bool:
        return self.only_causal() and not self.causal

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


def window_blocks(
    visibility: Visibility, tokens: int, is_visible: Callable[..., Tensor], device: torch.device, *, gradients: bool
) -> Any:
    """Return the BlockMask of a window over `tokens` queries and keys, from the indices of blocks.

    create_block_mask evaluates the mask of every query and key instead. Blocks in which every key is visible to every
    query are not masked, unless another field can hide keys in them.

    Args:
        visibility: Has a window, and neither starts nor key_indices.
        tokens: Number of tokens.
        is_visible: The mask of FlexAttention for single queries and keys.
        device: Device of the mask.
        gradients: Whether to include what the backward pass needs.

    Returns:
        A BlockMask [1, 1, tokens, tokens].

    >>> visibility = Visibility(causal=True, window=128)
    >>> is_visible = lambda b, h, i, j: visibility.visible(b, i, j)
    >>> blocks = window_blocks(visibility, 512, is_visible, torch.device("cpu"), gradients=False)
    >>> blocks.kv_num_blocks.tolist()  # the block of a query, and the one before it
    [[[1, 2, 2, 2]]]
    """
    from torch.nn.attention.flex_attention import BlockMask

    behind = (visibility.window or tokens) - 1
    ahead = 0 if visibility.causal else behind
    can_be_whole = visibility.key_mask is None and visibility.documents is None
    # A key block is seen from the other side: by queries from `ahead` before it to `behind` after it.
    queries = _block_lists(tokens, behind, ahead, can_be_whole, device)
    keys = _block_lists(tokens, ahead, behind, can_be_whole, device) if gradients else (None,) * 4
    return BlockMask((tokens, tokens), *queries, *keys, BLOCK_SIZE=(FLEX_BLOCK, FLEX_BLOCK), mask_mod=is_visible)


def _block_lists(
    tokens: int, behind: int, ahead: int, can_be_whole: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List the blocks between `behind` tokens before and `ahead` tokens after each token.

    Returns:
        int32: number [1, 1, blocks] and indices [1, 1, blocks, blocks] of the blocks that are partly seen, and of those
        that are seen by every token of a block.
    """
    size = FLEX_BLOCK
    block = arange(-(-tokens // size), device=device, dtype=torch.int32)
    first = block * size
    last = (first + (size - 1)).clamp_max(tokens - 1)
    lowest = (first - behind).clamp_min(0) // size
    seen = (last + ahead).clamp_max(tokens - 1) // size + 1 - lowest
    # Blocks from begin to end are seen as a whole. They split the others into those before and after them.
    begin = ((last - behind).clamp_min(0) + (size - 1)) // size
    end = (first + (ahead + 1)).clamp_max(tokens) // size
    # Blocks with tokens that do not exist, the last row and column, are masked.
    whole = torch.where(first + size <= tokens, (end - begin).clamp_min(0), 0) if can_be_whole else zeros_like(begin)
    before = torch.where(whole > 0, begin - lowest, seen)[:, None]
    partly = lowest[:, None] + block + torch.where(block >= before, whole[:, None], 0)
    # Entries past the number of blocks are not used, but must exist.
    indices = [x.clamp_max(block.shape[0] - 1).to(torch.int32) for x in (partly, begin[:, None] + block)]
    numbers = [x.to(torch.int32) for x in (seen - whole, whole)]
    return numbers[0][None, None], indices[0][None, None], numbers[1][None, None], indices[1][None, None]
