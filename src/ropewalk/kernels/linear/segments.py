"""Segments: runs of consecutive tokens, for each of which linear attention on a GPU stores sums."""

from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, new_zeros

__all__ = ["OPERANDS", "Plan", "count_segments", "segment_length", "stored_length"]

# Dtype in which operands of matrix products are stored: float16 has too little range for sums.
OPERANDS = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32, torch.float32: torch.float32}


def segment_length(width: int, v_dim: int, rows: int) -> int:
    """Return the number of tokens per segment. Long segments have fewer sums, but fewer programs.

    Args:
        width: Features per head.
        v_dim: Values per head.
        rows: Tokens of all sequences and heads.

    >>> segment_length(64, 64, 16 * 4096), segment_length(64, 64, 16 * 65536)
    (256, 1024)
    """
    return (1024 if width * v_dim <= 1 << 14 else 512) if rows >= 1 << 19 else 256


def stored_length(width: int, v_dim: int) -> int:
    """Return the number of tokens per segment of the kernels that store rotated features.

    Short segments have fewer scores within a segment, but more sums.

    >>> stored_length(128, 128), stored_length(256, 256)
    (256, 512)
    """
    return 256 if width * v_dim <= 1 << 14 else 512


def count_segments(length: int, sequences: int | None, segment: int) -> int:
    """Return the largest number of segments in `length` tokens: of one sequence, or of `sequences` packed ones.

    >>> count_segments(600, None, 512), count_segments(600, 3, 512)
    (2, 4)
    """
    # Only the device knows the lengths of packed sequences, so this is an upper bound.
    return (length + segment - 1) // segment if sequences is None else length // segment + sequences


class Plan(NamedTuple):
    """Tokens split into segments.

    Args:
        segment: Tokens per segment.
        number: Number of segments.
        begins: For packed sequences, the first token and the end of each segment, then the sequence of each segment,
            then the first token and the end of each segment's sequence.
        starts: For packed sequences, the first segment of each sequence.
        sequences: Number of sequences.

    >>> Plan.of(torch.ones(1, 1, 300, 4), torch.tensor([0, 100, 300]), 128).begins.tolist()
    [0, 100, 100, 228, 228, 300, 356, 356, 0, 1, 1, 1, 0, 100, 100, 300, 100, 300, 100, 300]
    """

    segment: int
    number: int
    begins: Tensor | None
    starts: Tensor | None
    sequences: int

    @staticmethod
    def of(x: Tensor, cu_seqlens: Tensor | None, segment: int) -> "Plan":
        """Return the plan for x [batch, heads, seq, width]."""
        batch, _, length, _ = x.shape
        if cu_seqlens is None:
            return Plan(segment, count_segments(length, None, segment), None, None, batch)
        # Only the device knows the ends. Clamping keeps kernels from reading past the last token.
        ends = cu_seqlens.to(torch.int64).clamp(0, length)
        sequences = len(ends) - 1
        count = count_segments(length, sequences, segment)
        pieces = (ends.diff() + segment - 1) // segment
        starts = torch.cat([new_zeros(pieces, 1), pieces.cumsum(0)])
        each = arange(count, device=ends.device)
        owner = (torch.searchsorted(starts, each, right=True) - 1).clamp_max(sequences - 1)
        begin = ends[owner] + (each - starts[owner]) * segment
        # Unused segments are empty: they end where they begin.
        end = torch.maximum(torch.minimum(begin + segment, ends[owner + 1]), begin)
        pairs = [torch.stack(ends, dim=1).flatten() for ends in ((begin, end), (ends[owner], ends[owner + 1]))]
        return Plan(segment, count, torch.cat([pairs[0], owner, pairs[1]]), starts, sequences)
