"""The backend "onnx": nodes of ONNX that torch.export records. `hub.onnx_rotary_nodes` registers it for one export."""

from ropewalk.kernels.backend import Backend, Operation
from ropewalk.kernels.rotate.onnx import norm_rotate, rotate

__all__ = ["ONNX"]

ONNX = Backend(
    name="onnx",
    operations={
        "rotate": Operation(run=rotate, opaque=False, exported=True),
        "norm_rotate": Operation(run=norm_rotate, opaque=False, exported=True),
    },
)
