"""Tile sizes of the kernels of linear attention, by the width of features and values."""

from typing import NamedTuple

import torch

__all__ = ["Block", "Tile", "tile_of"]


class Block(NamedTuple):
    """Size of a program of one kernel.

    Args:
        lanes: Pairs of features.
        columns: Columns of values.
        warps: Warps per program.
        stages: Pipeline stages of the loads.
        registers: Limit of registers per thread, or None. With fewer, more programs share a multiprocessor.
        step: Most tokens that are processed at once, if chunks are computed apart.

    >>> Block(32, 64, 4).constants(128)
    {'CHUNK': 128, 'STEP': 64, 'LANES': 32, 'COLUMNS': 64}
    """

    lanes: int
    columns: int
    warps: int
    stages: int = 2
    registers: int | None = None
    step: int = 64

    def options(self) -> tuple[int, int, int | None]:
        """Return warps, stages and registers, the last arguments of a `Launch`."""
        return self.warps, self.stages, self.registers

    def constants(self, chunk: int) -> dict[str, int]:
        """Return the block as constants of a kernel, in their order, with the tokens per chunk."""
        return {"CHUNK": chunk, "STEP": min(chunk, self.step), "LANES": self.lanes, "COLUMNS": self.columns}


class Tile(NamedTuple):
    """Tile sizes of all kernels of a call.

    Args:
        chunk: Tokens per step, or, if chunks are computed apart, per program.
        sums: Block of `sum_segments`.
        values: Block of `read_values`, which has all lanes, and of `read_factors`, which has all columns too.
        features: Block of `read_queries`, which has all columns.
        keys: Block of the gradients of keys in `read_keys`, which has all columns.
        together: Whether, if chunks are computed apart, one program computes the gradients of keys and of values. They
            then share what is loaded, but need more registers.
        keeps: Whether operands are computed once and kept in registers. Only in tiles without padding: in others,
            Triton 3.6 then computes wrong gradients of the values of grouped heads.

    >>> tile_of(128, 128, torch.bfloat16, apart=False).features.columns
    128
    >>> tile_of(64, 64, torch.bfloat16, apart=False).keeps, tile_of(64, 48, torch.bfloat16, apart=False).keeps
    (True, False)
    """

    chunk: int
    sums: Block
    values: Block
    features: Block
    keys: Block
    together: bool = False
    keeps: bool = False


def tile_of(width: int, v_dim: int, dtype: torch.dtype, *, apart: bool) -> Tile:
    """Return the tile that was fastest on an H200.

    Matrix instructions of four or more warps process 64 rows at once if there are as many. Rows are those of a chunk,
    or the columns of sums.

    Args:
        width: Features per head.
        v_dim: Values per head.
        dtype: Dtype of the tensors.
        apart: Whether programs compute one chunk each, and visit others in steps.

    >>> tile_of(80, 64, torch.bfloat16, apart=False).values.lanes  # 40 pairs, up to a power of 2
    64
    """
    lanes, columns = (max(16, 1 << max(0, n - 1).bit_length()) for n in ((width + 1) // 2, v_dim))
    if dtype != torch.bfloat16 or lanes > 64 or columns > 128:
        features = Block(min(lanes, 32 if columns <= 64 else 16), columns, 4, 1)
        values = Block(lanes, min(columns, 64 if lanes <= 32 else 32), 4, 1)
        sums = Block(min(lanes, 32), min(columns, 64), 4, 1)
        return Tile(32, sums, values, features, features, together=lanes == columns == 16)
    wide, keeps = lanes > 32 and columns > 64, width == 2 * lanes and v_dim == columns
    sums = Block(lanes, columns, 4, 3 if lanes <= 32 else 2)
    if wide and not apart:
        block = Block(lanes, columns, 8)
        return Tile(64, sums, block, block, block, keeps=keeps)
    if wide:
        # Few rows per step leave memory for the loads of three steps.
        block = Block(lanes, columns, 8, 3, step=32)
        return Tile(128, sums._replace(warps=8), block, block, block, keeps=keeps)
    values, features = Block(lanes, min(columns, 64), 4), Block(min(lanes, 32), columns, 4)
    if not apart:
        return Tile(64, sums, values, features, features, keeps=keeps)
    # With 168 registers, three programs share a multiprocessor. Gradients of keys and values need more.
    values, features = (block._replace(stages=3, registers=168, step=32) for block in (values, features))
    keys, together = features._replace(registers=None), columns <= 64 and lanes <= 32
    return Tile(64, sums, values, features, keys, together, keeps)
