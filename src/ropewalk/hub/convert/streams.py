"""The bytes of a tensor, a block at a time: as they are, or with the rows of each head in another order.

Rows are equal runs of bytes, so that any dtype can be permuted without being understood, and nothing is rounded.
"""

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from ropewalk.hub.convert.checkpoint import Stored, corrupt
from ropewalk.hub.convert.permutation import Part, row_order

__all__ = ["permuted_blocks", "read_rows", "tensor_blocks"]

# Bytes that are held at once when a tensor is copied or compared.
BLOCK = 4 << 20


def tensor_blocks(file: BinaryIO, tensor: Stored) -> Iterator[bytes]:
    """The bytes of a tensor as they are."""
    file.seek(tensor.start)
    yield from _blocks(file, tensor, tensor.nbytes)


def permuted_blocks(file: BinaryIO, tensor: Stored, part: Part, to: str) -> Iterator[bytes]:
    """The bytes of a tensor with the rows that turn in the order of the pairing `to`; no more than a head at once."""
    order, row, at = row_order(part.spec.turning, to), tensor.nbytes // part.heads.rows, 0
    file.seek(tensor.start)
    for start in part.starts():
        yield from _blocks(file, tensor, (start - at) * row)
        run = b"".join(_blocks(file, tensor, len(order) * row))
        yield np.frombuffer(run, np.uint8).reshape(len(order), row)[order].tobytes()
        at = start + len(order)
    yield from _blocks(file, tensor, (part.heads.rows - at) * row)


def read_rows(file: BinaryIO, tensor: Stored, start: int, count: int, rows: int) -> np.ndarray:
    """`count` of the `rows` of a tensor from row `start` on, as float64 [count, columns]."""
    row = tensor.nbytes // rows
    file.seek(tensor.start + start * row)
    data = b"".join(_blocks(file, tensor, count * row))
    if tensor.dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype])
    return values.reshape(count, -1).astype(np.float64)


def _blocks(file: BinaryIO, tensor: Stored, left: int) -> Iterator[bytes]:
    while left:
        block = file.read(min(BLOCK, left))
        if not block:
            raise corrupt(tensor.path, f"an end {left} bytes early: it was cut off while it was read")
        left -= len(block)
        yield block
