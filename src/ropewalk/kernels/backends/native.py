"""The backend "native": the C extension, for plain CPU tensors."""

from torch import Tensor

from ropewalk.kernels.angles import native as angles
from ropewalk.kernels.backend import Backend, Operation
from ropewalk.kernels.native.extension import MISSING
from ropewalk.kernels.qk_norm import native as qk_norm
from ropewalk.kernels.rotate import native as rotate
from ropewalk.kernels.torch_internals import is_one
from ropewalk.kernels.types import Layout

__all__ = ["NATIVE"]


def _worthwhile(q: Tensor, k: Tensor | None, layout: Layout, compiling: bool) -> bool:
    """For one token the call of a library op takes longer than the rotation, and Inductor's code is faster."""
    return not compiling or not is_one(q.shape[layout.seq_dim])


NATIVE = Backend(
    name="native",
    operations={
        "cos_sin": Operation(run=angles.cos_sin, supports=angles.supports),
        "rotate": Operation(
            run=rotate.rotate,
            supports=rotate.supports,
            worthwhile=_worthwhile,
            run_if_ready=rotate.rotate_if_ready,
            in_place=True,
        ),
        "norm_rotate": Operation(
            run=qk_norm.norm_rotate,
            supports=rotate.supports,
            worthwhile=_worthwhile,
            backward=qk_norm.norm_rotate_backward,
        ),
    },
    why_missing=lambda: MISSING,
    devices=("cpu",) if MISSING is None else (),
)
