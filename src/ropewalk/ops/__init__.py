"""Operations: which path serves which call, torch.library, autograd. Kernels are below, modules above."""

from ropewalk.kernels.torch_internals import is_plain as is_plain
from ropewalk.ops.angles import cos_sin as cos_sin
from ropewalk.ops.qk_norm import qk_norm_rotate as qk_norm_rotate
from ropewalk.ops.registry import OPS as OPS
from ropewalk.ops.registry import backend_reasons as backend_reasons
from ropewalk.ops.registry import require_backend as require_backend
from ropewalk.ops.rotation import rotate as rotate
from ropewalk.ops.rotation import rotate_ as rotate_
from ropewalk.ops.rotation import rotate_directly as rotate_directly
from ropewalk.ops.rotation import rotate_plain as rotate_plain
