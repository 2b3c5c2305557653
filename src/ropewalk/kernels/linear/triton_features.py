"""The feature maps of linear attention in Triton: their values, their derivatives, and what they map to 0."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# A kernel is Triton's language, in which a constexpr is whatever it was given.

import triton
import triton.language as tl

from ropewalk.kernels.types import FeatureMap

__all__ = ["EXP", "NOTHING", "exponential", "mapped", "slope"]

ELU = tl.constexpr(FeatureMap.elu.value)
RELU = tl.constexpr(FeatureMap.relu.value)
SQUARED_RELU = tl.constexpr(FeatureMap.squared_relu.value)
IDENTITY = tl.constexpr(FeatureMap.identity.value)
EXP = tl.constexpr(FeatureMap.exp.value)

# What each map makes 0 of: lanes without a feature are filled with it, and then add nothing.
NOTHING = tl.constexpr(tuple(feature_map.zero for feature_map in FeatureMap))


@triton.jit
def exponential(x):
    """exp(x), by the power of 2: one instruction where subnormal results are 0, which exp spends three more on."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def mapped(x, shift, MAP: tl.constexpr):
    """The feature map, in float32. MAP is the number of a FeatureMap."""
    x = x.to(tl.float32)
    if MAP == ELU:
        # By comparison: a minimum or maximum would make a number of NaN. What overflows is not taken.
        x = tl.where(x > 0, x + 1, exponential(x))
    elif MAP == RELU:
        x = tl.where(x <= 0, 0.0, x)
    elif MAP == SQUARED_RELU:
        x = tl.where(x <= 0, 0.0, x)
        x = x * x
    elif MAP == EXP:
        x = exponential(x - shift[:, None])
    return x


@triton.jit
def slope(x, shift, MAP: tl.constexpr):
    """The derivative of the feature map."""
    x = x.to(tl.float32)
    if MAP == ELU:
        x = tl.where(x > 0, 1.0, exponential(x))
    elif MAP == RELU:
        x = tl.where(x > 0, 1.0, 0.0)
    elif MAP == SQUARED_RELU:
        x = tl.where(x <= 0, 0.0, 2 * x)
    elif MAP == IDENTITY:
        x = tl.full(x.shape, 1.0, tl.float32)
    else:
        x = exponential(x - shift[:, None])
    return x
