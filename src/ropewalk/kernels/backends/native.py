"""The backend "native": the C extension, for plain CPU tensors."""

from ropewalk.kernels.angles import native as angles
from ropewalk.kernels.backend import Backend, Operation
from ropewalk.kernels.linear.native import linear_step
from ropewalk.kernels.native.extension import MISSING
from ropewalk.kernels.native.extension import NATIVE as EXTENSION
from ropewalk.kernels.qk_norm import native as qk_norm
from ropewalk.kernels.rotate import native as rotate

__all__ = ["NATIVE"]


NATIVE = Backend(
    name="native",
    operations={
        "cos_sin": Operation(run=angles.cos_sin, supports=angles.supports),
        "rotate": Operation(
            run=rotate.rotate,
            supports=rotate.supports,
            shortcut=rotate.shortcut,
            in_place=True,
        ),
        "norm_rotate": Operation(
            run=qk_norm.norm_rotate,
            supports=rotate.supports,
            backward=qk_norm.norm_rotate_backward,
        ),
    },
    why_missing=lambda: MISSING,
    devices=("cpu",) if MISSING is None else (),
    # The function of the extension itself, because one more call of a function is noticeable.
    linear_step=linear_step if EXTENSION is None else EXTENSION.linear_step,
)
