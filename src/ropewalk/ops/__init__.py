"""Operations: choice of the backend (`dispatch`), library ops for torch.compile, and autograd."""

from ropewalk.ops.angles import cos_sin as cos_sin
from ropewalk.ops.dispatch import backend_reasons as backend_reasons
from ropewalk.ops.dispatch import require_backend as require_backend
from ropewalk.ops.linear_attention import linear_attention as linear_attention
from ropewalk.ops.qk_norm import norm_rotate as norm_rotate
from ropewalk.ops.qk_norm import norm_shortcut_of as norm_shortcut_of
from ropewalk.ops.rotation import rotate as rotate
from ropewalk.ops.rotation import rotation_in_place as rotation_in_place
from ropewalk.ops.rotation import shortcut_of as shortcut_of
