"""The feature maps of linear attention in Triton: values, derivatives, and inputs that are mapped to 0."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import torch
import triton
import triton.language as tl

from ropewalk.kernels.types import FeatureMap

__all__ = ["EXP", "KINDS", "NOTHING", "exponential", "mapped", "slope"]

ELU = tl.constexpr(FeatureMap.elu.value)
RELU = tl.constexpr(FeatureMap.relu.value)
SQUARED_RELU = tl.constexpr(FeatureMap.squared_relu.value)
IDENTITY = tl.constexpr(FeatureMap.identity.value)
EXP = tl.constexpr(FeatureMap.exp.value)

# The input that each map maps to 0. Padding lanes are filled with it, and so add nothing.
NOTHING = tl.constexpr(tuple(feature_map.zero for feature_map in FeatureMap))


# Dtype of operands of matrix products, and the precision of the products.
KINDS = {
    torch.bfloat16: (tl.bfloat16, "ieee"),
    torch.float16: (tl.float32, "tf32"),
    torch.float32: (tl.float32, "tf32x3"),
}


@triton.jit
def exponential(x):
    """Return exp(x) by exp2, which is one instruction and flushes subnormal results to 0. exp needs three more."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def mapped(x, shift, MAP: tl.constexpr):
    """Return the feature map of x, in float32. MAP is the number of a FeatureMap."""
    x = x.to(tl.float32)
    if MAP == ELU:
        # Not by minimum or maximum, which would replace NaN by a number. An overflow is not selected.
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
    """Return the derivative of the feature map."""
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
