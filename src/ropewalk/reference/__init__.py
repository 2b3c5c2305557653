"""Reference implementation of every encoding: plain torch, one equation per block, computed in float64."""

from ropewalk.reference.absolute import concatenated as concatenated
from ropewalk.reference.absolute import learned as learned
from ropewalk.reference.absolute import multiplicative as multiplicative
from ropewalk.reference.absolute import project as project
from ropewalk.reference.absolute import recurrent as recurrent
from ropewalk.reference.absolute import sinusoidal as sinusoidal
from ropewalk.reference.absolute import sinusoidal_table as sinusoidal_table
from ropewalk.reference.attention import Projections as Projections
from ropewalk.reference.attention import multi_head_attention as multi_head_attention
from ropewalk.reference.attention import softmax_attention as softmax_attention
from ropewalk.reference.bias import alibi_bias as alibi_bias
from ropewalk.reference.bias import alibi_slopes as alibi_slopes
from ropewalk.reference.bias import t5_bias as t5_bias
from ropewalk.reference.bias import t5_bucket as t5_bucket
from ropewalk.reference.budget import BudgetError as BudgetError
from ropewalk.reference.budget import assert_within_budget as assert_within_budget
from ropewalk.reference.budget import rotation_budget as rotation_budget
from ropewalk.reference.by_spec import rotate_by_spec as rotate_by_spec
from ropewalk.reference.linear_attention import elu_plus_one as elu_plus_one
from ropewalk.reference.linear_attention import (
    linear_attention_by_recurrence as linear_attention_by_recurrence,
)
from ropewalk.reference.linear_attention import linear_attention_by_sum as linear_attention_by_sum
from ropewalk.reference.parity import check_rotation as check_rotation
from ropewalk.reference.qk_norm import qk_norm_rotate as qk_norm_rotate
from ropewalk.reference.qk_norm import rms_norm as rms_norm
from ropewalk.reference.rotate import apply_rope as apply_rope
from ropewalk.reference.rotate import build_rotary_frequencies as build_rotary_frequencies
from ropewalk.reference.rotate import rotate as rotate
from ropewalk.reference.rotate import rotate_complex as rotate_complex
from ropewalk.reference.rotate import rotate_matrix as rotate_matrix

__all__ = [
    "BudgetError",
    "Projections",
    "alibi_bias",
    "alibi_slopes",
    "apply_rope",
    "assert_within_budget",
    "build_rotary_frequencies",
    "check_rotation",
    "concatenated",
    "elu_plus_one",
    "learned",
    "linear_attention_by_recurrence",
    "linear_attention_by_sum",
    "multi_head_attention",
    "multiplicative",
    "project",
    "qk_norm_rotate",
    "recurrent",
    "rms_norm",
    "rotate",
    "rotate_by_spec",
    "rotate_complex",
    "rotate_matrix",
    "rotation_budget",
    "sinusoidal",
    "sinusoidal_table",
    "softmax_attention",
    "t5_bias",
    "t5_bucket",
]
