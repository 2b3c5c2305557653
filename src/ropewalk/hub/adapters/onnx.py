"""Export to ONNX with the node RotaryEmbedding of opset 23, which runtimes have a kernel for."""

from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["onnx_rotary_nodes"]


@contextmanager
def onnx_rotary_nodes() -> Generator[None]:
    """Let `torch.onnx.export` record rotations as the node RotaryEmbedding of opset 23, within a `with` block.

    Without it, the rotation is exported as its formula: multiplications, additions and concatenations. The node is one
    operation, for which runtimes have a kernel; it needs opset_version=23 or later. Both compute the same function in
    float32 (float64 for float64), and positions remain an input of the graph. Half and interleaved pairs, partial
    rotations (a trailing slice with Slice and Concat around the node), cos and sin per sequence, and both orders of
    dimensions are supported. Frequencies per head, and modules with a forced backend, are exported as the formula.

    Every rotation by ropewalk that is exported in the process during the block is concerned, in all threads. Eager and
    compiled calls are not.

    Returns:
        A context manager.

    >>> import torch
    >>> from ropewalk import RotaryEmbedding
    >>> with onnx_rotary_nodes():
    ...     program = torch.export.export(RotaryEmbedding(4), (torch.ones(1, 2, 3, 4),))
    >>> [str(node.target) for node in program.graph.nodes if "Rotary" in str(node.target)]
    ['onnx.RotaryEmbedding.opset23']
    """
    from ropewalk.kernels.backend import register
    from ropewalk.kernels.backends.onnx import ONNX

    undo = register(ONNX)
    try:
        yield
    finally:
        undo()
