"""Tile sizes of the kernels of linear attention, by the width of features and values."""

from typing import NamedTuple

import torch

__all__ = ["Block", "Tile", "tile_of"]


class Block(NamedTuple):
    """Size of a program of one kernel.

    Args:
        lanes: Pairs of features.
        columns: Columns of values.
        rows: Rows that read sums. 0 for programs that compute sums.
        chunk: Tokens per step.
        warps: Warps per program.
        stages: Pipeline stages of the loads.
        registers: Limit of registers per thread, or None. With fewer, more programs share a multiprocessor.

    >>> Block(32, 64, 0, 64, 4).options()
    {'LANES': 32, 'COLUMNS': 64, 'CHUNK': 64, 'num_warps': 4, 'num_stages': 2}
    """

    lanes: int
    columns: int
    rows: int
    chunk: int
    warps: int
    stages: int = 2
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """Return the block as keyword arguments of a launch."""
        sizes = {"LANES": self.lanes, "COLUMNS": self.columns, "CHUNK": self.chunk}
        rows = {"ROWS": self.rows} if self.rows else {}
        limit = {"maxnreg": self.registers} if self.registers else {}
        return sizes | rows | limit | {"num_warps": self.warps, "num_stages": self.stages}


class Tile(NamedTuple):
    """Tile sizes of all kernels of a call.

    Args:
        lanes: Pairs of features, padded to a power of two.
        low: Rows per block of the kernels that rotate.
        rotation_warps: Warps of the kernels that rotate.
        sums: Block of `sum_segments`.
        scan: Block of `scan_segments`, or None if it is not used.
        values: Block of `read_values`, which has all lanes.
        features: Block of `read_features`, which has all columns.

    >>> tile_of(128, 128, torch.float32).scan is None
    True
    """

    lanes: int
    low: int
    rotation_warps: int
    sums: Block
    scan: Block | None
    values: Block
    features: Block


def tile_of(width: int, v_dim: int, dtype: torch.dtype, *, decays: bool = False) -> Tile:
    """Return the tile that was fastest on an H200. `decays` is whether there is a decay.

    Two warps use other matrix instructions than four or more, which process 64 rows at once if there are as many. Sums
    have 2 * lanes rows. Triton 3.6 computes wrong numbers if eight warps have 64 rows; no block uses that.

    >>> tile_of(80, 64, torch.bfloat16).lanes  # 40 pairs, up to a power of 2
    64
    """
    lanes, columns = (max(16, 1 << max(0, n - 1).bit_length()) for n in ((width + 1) // 2, v_dim))
    if dtype != torch.bfloat16 or lanes < 32 or columns < 64:
        few = 32 if lanes <= 32 else 16
        return Tile(
            lanes,
            32,
            4,
            Block(min(lanes, 32), min(columns, 64), 0, 32, 2),
            None,
            Block(lanes, min(columns, 64 if lanes <= 32 else 32), 32, 32, 2, 1),
            Block(min(lanes, few), columns, 32, 32, 2, 1),
        )
    # With 128 registers, two programs of eight warps share a multiprocessor. Without a decay, they need no more.
    limit = 128 if decays and lanes > 32 else None
    return Tile(
        lanes,
        32,
        4 if lanes > 32 else 2,
        Block(min(lanes, 64), min(columns, 128), 0, 64, 8 if lanes > 32 else 4, 3, limit),
        Block(32, 64, 0, 64, 4, 4),
        Block(lanes, min(columns, 128), 128, 32, 8, 3, limit)
        if lanes == 64
        else Block(lanes, min(columns, 128), 64, 32, 4, 2 + (lanes < 64)),
        Block(min(lanes, 64), columns, 64, 32, 4, 3 if columns <= 128 else 2),
    )
