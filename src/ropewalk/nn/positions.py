"""Position ids as tensors, made on the device and without asking it anything."""

import torch
from torch import Tensor

__all__ = ["packed_positions", "range_positions"]


def range_positions(length: int, offset: int | Tensor, device: torch.device) -> Tensor:
    """offset .. offset + length - 1: [length] for one offset, [batch, length] for an offset a sequence [batch].

    >>> range_positions(3, torch.tensor([0, 7]), torch.device("cpu")).tolist()
    [[0, 1, 2], [7, 8, 9]]
    """
    if isinstance(offset, Tensor) and offset.dim() == 1:
        return torch.arange(length, device=device) + offset.to(device).unsqueeze(-1)
    return torch.arange(length, device=device) + (offset.to(device) if isinstance(offset, Tensor) else offset)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Positions of `total` tokens of sequences laid end to end, each counted from 0.

    `cu_seqlens` are the ends of the sequences, from 0 on, as flash-attention takes them. Tokens past the last end are
    padding; they go on counting from it.

    >>> packed_positions(torch.tensor([0, 3, 5]), 6).tolist()
    [0, 1, 2, 0, 1, 0]
    """
    tokens = torch.arange(total, device=cu_seqlens.device)
    starts = torch.searchsorted(cu_seqlens.to(tokens.dtype), tokens, right=True) - 1
    return tokens - cu_seqlens[starts].to(tokens.dtype)
