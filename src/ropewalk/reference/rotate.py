"""The rotation in three forms, and the functions `build_rotary_frequencies` and `apply_rope`.

The three forms compute the same function of positions, in float64, and round once to the dtype of x. Every fast path
is tested against them.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_float, require_choice, require_count, require_even, require_flag, shown
from ropewalk.reference.arguments import angles_for, require_float
from ropewalk.reference.pairs import join_pairs, join_slice, pair_indices, split_pairs, split_slice
from ropewalk.shapes import Float, Shaped
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import PAIRINGS, ROTARY_SLICES, Pairing, RotarySlice

__all__ = ["apply_rope", "build_rotary_frequencies", "rotate", "rotate_complex", "rotate_matrix"]

X = Float[Tensor, "*any seq dim"]
Positions = Shaped[Tensor, "*ids"]
InvFreq = Float[Tensor, "*heads pairs"] | Float[np.ndarray, "*heads pairs"]


def rotate(
    x: X,
    positions: Positions,
    inv_freq: InvFreq,
    *,
    pairing: Pairing = "interleaved",
    conjugate: bool = False,
    amplitude: float = 1.0,
    rotary_slice: RotarySlice = "leading",
) -> X:
    """Rotate pair i of the token at position m by the angle m * theta_i, element by element.

    (a, b) -> (a cos - b sin, a sin + b cos), times `amplitude` (RoFormer, 2104.09864, eq. 34).

    Args:
        x: Queries or keys [..., seq, dim].
        positions: Positions [seq], or [batch, seq] for x [batch, ..., seq, dim]. They can be negative or fractional.
        inv_freq: Frequencies [pairs], or [heads, pairs] for x [..., heads, seq, dim].
        pairing: "interleaved" pairs (0, 1), (2, 3), ...; "half" pairs (i, i + rotary_dim/2).
        conjugate: Rotate in the opposite direction. This is the transpose of the rotation, and so its backward.
        amplitude: Factor on the rotated features.
        rotary_slice: Which features are rotated if there are fewer than dim/2 pairs: "leading" or "trailing". The
            other features are copied exactly.

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        RopewalkError: If a shape, a dtype or an option is invalid, or if a number is not finite.

    >>> right_angle = torch.tensor([torch.pi / 2], dtype=torch.float64)
    >>> rotate(torch.tensor([[1.0, 0.0]]), torch.tensor([1]), right_angle).round(decimals=6).tolist()
    [[0.0, 1.0]]
    """
    return _rotate(_by_element, "rotate", x, positions, inv_freq, pairing, conjugate, amplitude, rotary_slice)


def rotate_complex(
    x: X,
    positions: Positions,
    inv_freq: InvFreq,
    *,
    pairing: Pairing = "interleaved",
    conjugate: bool = False,
    amplitude: float = 1.0,
    rotary_slice: RotarySlice = "leading",
) -> X:
    """`rotate` as a product of complex numbers: (a + ib) * amplitude * exp(i m theta) (RoFormer, eq. 12).

    Arguments, result and errors are those of `rotate`.

    >>> straight_angle = torch.tensor([torch.pi], dtype=torch.float64)
    >>> rotate_complex(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), straight_angle).round(decimals=6).tolist()
    [[-1.0, -2.0]]
    """
    return _rotate(_by_complex, "rotate_complex", x, positions, inv_freq, pairing, conjugate, amplitude, rotary_slice)


def rotate_matrix(
    x: X,
    positions: Positions,
    inv_freq: InvFreq,
    *,
    pairing: Pairing = "interleaved",
    conjugate: bool = False,
    amplitude: float = 1.0,
    rotary_slice: RotarySlice = "leading",
) -> X:
    """`rotate` as the product of x and the matrix R_m, which has 2x2 blocks on its diagonal (RoFormer, eq. 15).

    The matrix has dim^2 elements per position, nearly all 0. The other two forms avoid it. Arguments, result and
    errors are those of `rotate`.

    >>> full_angle = torch.tensor([2 * torch.pi], dtype=torch.float64)
    >>> rotate_matrix(torch.tensor([[3.0, 4.0]]), torch.tensor([5]), full_angle).round(decimals=6).tolist()
    [[3.0, 4.0]]
    """
    return _rotate(_by_matrix, "rotate_matrix", x, positions, inv_freq, pairing, conjugate, amplitude, rotary_slice)


def _by_element(x: Tensor, angles: Tensor, pairing: Pairing) -> Tensor:
    return _rotate_pairs(x, torch.cos(angles), torch.sin(angles), pairing)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    a, b = split_pairs(x, pairing)
    return join_pairs(a * cos - b * sin, a * sin + b * cos, pairing)


def _by_complex(x: Tensor, angles: Tensor, pairing: Pairing) -> Tensor:
    a, b = split_pairs(x, pairing)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return join_pairs(z.real, z.imag, pairing)


def _by_matrix(x: Tensor, angles: Tensor, pairing: Pairing) -> Tensor:
    first, second = pair_indices(x.shape[-1], pairing)
    matrix = x.new_zeros(*angles.shape[:-1], x.shape[-1], x.shape[-1])
    matrix[..., first, first] = torch.cos(angles)
    matrix[..., first, second] = -torch.sin(angles)
    matrix[..., second, first] = torch.sin(angles)
    matrix[..., second, second] = torch.cos(angles)
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def _rotate(
    form: Callable[[Tensor, Tensor, Pairing], Tensor],
    asked: str,
    x: Tensor,
    positions: Tensor,
    inv_freq: InvFreq,
    pairing: Pairing,
    conjugate: bool,
    amplitude: float,
    rotary_slice: RotarySlice,
) -> Tensor:
    require_choice(pairing, PAIRINGS, asked=f"{asked}(pairing=...)")
    require_choice(rotary_slice, ROTARY_SLICES, asked=f"{asked}(rotary_slice=...)")
    require_flag(conjugate, asked=f"{asked}(conjugate=...)")
    require_float(x, asked=f"{asked}(x)", at_least_dims=2)
    if as_float(amplitude) is None:
        raise RopewalkError(
            asked=f"{asked}(amplitude=...)",
            expected="a finite number",
            got=shown(amplitude),
            do="pass RopeSpec(...).amplitude(), or omit it",
        )
    angles = angles_for(x, positions, inv_freq, asked=asked)
    rotated, rest = split_slice(x, 2 * angles.shape[-1], rotary_slice)
    rotated = amplitude * form(rotated.double(), -angles if conjugate else angles, pairing)
    return join_slice(rotated.to(x.dtype), rest, rotary_slice)


def build_rotary_frequencies(
    dim_head: int, max_seq_len: int, base: float = 10_000.0, device: torch.device | str | None = None
) -> tuple[Float[Tensor, "1 1 seq pairs"], Float[Tensor, "1 1 seq pairs"]]:
    """Tables of cos and sin of m * base^(-2i/dim_head) for positions m = 0 .. max_seq_len-1.

    Angles are computed in float64, and cos and sin are rounded once. With float32 angles the error would be 8e-3 at
    position 131072.

    Args:
        dim_head: Number of rotated features, even.
        max_seq_len: Number of positions.
        base: Base of the frequencies.
        device: Device of the tables. Default: torch's default device.

    Returns:
        cos and sin, float32 [1, 1, max_seq_len, dim_head / 2].

    Raises:
        RopewalkError: If `dim_head`, `max_seq_len` or `base` is out of its range.

    >>> cos, sin = build_rotary_frequencies(dim_head=4, max_seq_len=3)
    >>> cos.shape, round(cos[0, 0, 2, 0].item(), 4)  # cos 2
    (torch.Size([1, 1, 3, 2]), -0.4161)
    """
    dim = require_even(dim_head, asked="build_rotary_frequencies(dim_head)", do="pass an even dim_head")
    length = require_count(
        max_seq_len, asked="build_rotary_frequencies(max_seq_len)", do="pass the number of positions", at_least=0
    )
    inv_freq = torch.as_tensor(Plain(base).evaluate(dim), device="cpu")
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), inv_freq)[None, None]
    device = torch.get_default_device() if device is None else device
    return torch.cos(angles).float().to(device), torch.sin(angles).float().to(device)


def apply_rope(
    x: Float[Tensor, "batch heads seq dim"],
    cos: Float[Tensor, "#batch #heads rows pairs"],
    sin: Float[Tensor, "#batch #heads rows pairs"],
    pairing: Pairing = "interleaved",
) -> Float[Tensor, "batch heads seq dim"]:
    """Rotate x by the first `seq` rows of cos and sin, in float64, and round once to the dtype of x.

    (a, b) -> (a cos - b sin, a sin + b cos) for each pair (RoFormer, 2104.09864, eq. 34).

    Args:
        x: Queries or keys [batch, heads, seq, dim].
        cos: Table [1 or batch, 1 or heads, rows, dim / 2] with rows >= seq. Rows from seq on are ignored.
        sin: Table of the same shape.
        pairing: "interleaved" or "half".

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        RopewalkError: If shapes, dtypes or devices do not match.

    >>> cos, sin = build_rotary_frequencies(dim_head=2, max_seq_len=8)
    >>> x = torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2)
    >>> apply_rope(x, cos, sin)[0, 0, 2].tolist() == [cos[0, 0, 2, 0].item(), sin[0, 0, 2, 0].item()]
    True
    """
    require_choice(pairing, PAIRINGS, asked="apply_rope(pairing=...)")
    require_float(x, asked="apply_rope(x)", at_least_dims=4)
    for name, table in (("cos", cos), ("sin", sin)):
        require_float(table, asked=f"apply_rope({name})", at_least_dims=4)
        if table.dtype not in (torch.float32, torch.float64) or table.device != x.device:
            raise RopewalkError(
                asked=f"apply_rope({name})",
                expected=f"float32 or float64 on {x.device}, the device of x",
                got=f"{table.dtype} on {table.device}",
                do="rebuild the tables; casting them with a model rounds cos and sin",
            )
    fits = x.dim() == cos.dim() == 4 and cos.shape == sin.shape
    fits = fits and all(cos.shape[i] in (1, x.shape[i]) for i in (0, 1))
    if not fits or cos.shape[2] < x.shape[2] or 2 * cos.shape[3] != x.shape[3]:
        raise RopewalkError(
            asked="apply_rope(x, cos, sin)",
            expected="x [batch, heads, seq, dim]; cos and sin both [1 or batch, 1 or heads, rows >= seq, dim/2]",
            got=f"x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}",
            do="compute cos and sin with build_rotary_frequencies(dim, seq)",
        )
    seq = x.shape[2]
    cos, sin = cos[..., :seq, :].double(), sin[..., :seq, :].double()
    return _rotate_pairs(x.double(), cos, sin, pairing).to(x.dtype)
