"""cos and sin of integer positions by the C extension, from radix tables."""

import torch
from torch import Tensor

from ropewalk.kernels.angles.torch import reads_table
from ropewalk.kernels.constructors import empty
from ropewalk.kernels.native.extension import NATIVE

__all__ = ["cos_sin", "supports"]


def supports(
    positions: Tensor,
    inv_freq: Tensor,
    radix_table: Tensor | None,
    amplitude: Tensor,
    dtype: torch.dtype,
    axes: Tensor | None,
) -> str | None:
    """Return the reason why the C kernel does not support these angles, or None. It supports the radix table only.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> supports(torch.tensor([1]), one, None, one[0], torch.float32, None)
    'angles that are not read from the radix table'
    """
    if radix_table is not None and reads_table(positions, inv_freq, amplitude, dtype, axes):
        return None
    return "angles that are not read from the radix table"


def cos_sin(
    positions: Tensor,
    inv_freq: Tensor,
    radix_table: Tensor,
    amplitude: Tensor,
    dtype: torch.dtype = torch.float32,
    axes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `angles.torch.cos_sin` of integer positions, in float32, from the radix table.

    >>> from ropewalk.kernels.angles.torch import radix_table
    >>> theta, one = torch.ones(1, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    >>> cos = cos_sin(torch.tensor([1]), theta, radix_table(theta), one)[0].item() if NATIVE else 0.5403
    >>> round(cos, 4)
    0.5403
    """
    if positions.dtype not in (torch.int64, torch.int32):
        positions = positions.to(torch.int64)
    if inv_freq.dim() == 2:
        batch = positions.shape[0] if positions.dim() == 2 else 1
        shape = (batch, inv_freq.shape[0], positions.shape[-1], inv_freq.shape[1])
    else:
        shape = (*positions.shape, inv_freq.shape[0])
    cos, sin = (empty(shape, dtype=torch.float32, device="cpu") for _ in range(2))
    threads = torch.get_num_threads()
    NATIVE.cos_sin(  # pyright: ignore[reportOptionalMemberAccess]
        positions, inv_freq, radix_table, amplitude, cos, sin, threads
    )
    return cos, sin
