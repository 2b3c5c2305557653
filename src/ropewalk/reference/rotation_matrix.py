"""rotation_matrix: the matrix R_m by which a RopeSpec multiplies the queries and keys at position m."""

from collections.abc import Sequence
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_float, require_choice, require_flag, shown
from ropewalk.reference.arguments import COARSE
from ropewalk.reference.pairs import pair_indices
from ropewalk.shapes import Float64, Shaped
from ropewalk.signatures import checks_names
from ropewalk.spec.rope import RopeSpec

__all__ = ["rotation_matrix"]

Position = float | Sequence[float] | Shaped[Tensor, "*ids"]


@checks_names
def rotation_matrix(
    spec: RopeSpec,
    position: Position,
    *,
    length: int | None = None,
    role: Literal["q", "k"] | None = None,
    sparse: bool = False,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Shaped[Tensor, "*matrices dim dim"]:
    """Return the matrix R_m by which `RotaryEmbedding(spec)` multiplies a vector at position m: x' = R_m x.

    R_m has the block [[cos, -sin], [sin, cos]] of the angle m * theta_i for each pair, and 1 on the diagonal for each
    feature that is not rotated (RoFormer, 2104.09864, eq. 15). Interleaved pairs are neighbours, so the blocks are on
    the diagonal. Then R_m R_n = R_(m+n), R_m^T R_n = R_(n-m), and R_m is orthogonal.

    Factors of the spec are part of the matrix, and then these laws do not hold. The amplitude (YaRN, LongRope) and xPos
    multiply the rotated features. A query temperature multiplies all features of a query.

    The angle is not rounded: theta_i is split into two parts with which integers up to 2^24 have exact products, and
    R_m is the product of their rotations. The laws hold to 1e-14 at these positions. The matrix has no gradient.

    Args:
        spec: The rotation.
        position: A number, negative or fractional ones included, or a tensor or a list of numbers, which adds its
            dimensions to those of the result. For a spec with A axes, the first dimension is [A]: one number per axis.
        length: Number of positions in the sequence. Required for DynamicNTK and LongRope, ignored by other rules.
        role: "q" for queries, "k" for keys. Required for xPos and query temperatures, ignored by other specs.
        sparse: Return a coalesced sparse COO tensor. It stores 2 numbers per rotated feature and 1 per other feature,
            at the same indices for every position: a sine that is 0 is stored too.
        dtype: Dtype of the result. The matrix is computed in float64 and rounded once.
        device: Device of the result. Default: the device of `position` if it is a tensor, else torch's default device.

    Returns:
        The matrix [head_dim, head_dim], or [*position, head_dim, head_dim] for a tensor or a list of positions. If each
        head has its own frequencies: [*position, heads, head_dim, head_dim].

    Raises:
        RopewalkError: If `spec` is not a RopeSpec, has angles="float32", whose rotations do not compose, or needs
            `length` or `role`; if a position is not a finite number; or if another argument is invalid.

    >>> spec = RopeSpec(4)
    >>> [[round(number, 4) for number in row] for row in rotation_matrix(spec, 2).tolist()]  # angles 2 and 0.02
    [[-0.4161, -0.9093, 0.0, 0.0], [0.9093, -0.4161, 0.0, 0.0], [0.0, 0.0, 0.9998, -0.02], [0.0, 0.0, 0.02, 0.9998]]
    >>> torch.allclose(rotation_matrix(spec, 2).T @ rotation_matrix(spec, 5), rotation_matrix(spec, 3), atol=1e-14)
    True
    >>> rotation_matrix(spec, 2, sparse=True).values().shape
    torch.Size([8])
    """
    asked = "rotation_matrix(spec, position)"
    _check_spec(spec, length, role, asked)
    require_flag(sparse, asked="rotation_matrix(..., sparse=...)")
    _check_dtype(dtype)
    _check_device(device)
    ids = _checked_position(position, spec, asked)
    values = _values(spec, ids, length, role, asked).to(dtype)
    rows, columns = _places(spec)
    if device is None:
        device = position.device if isinstance(position, Tensor) else torch.get_default_device()
    if sparse:
        return _sparse(values, rows, columns, spec.head_dim).to(device)
    matrix = values.new_zeros(*values.shape[:-1], spec.head_dim, spec.head_dim)
    matrix[..., rows, columns] = values
    return matrix.to(device)


def _values(spec: RopeSpec, ids: Tensor, length: int | None, role: str | None, asked: str) -> Tensor:
    """Return the numbers at `_places` [*ids, *heads, numbers]."""
    theta = spec.inv_freq(length)
    # One row of frequencies per axis: [*heads, axes, pairs].
    frequencies = theta[..., None, :] if spec.axes is None else spec.axes.matrix(theta)
    z = _unit_numbers(ids.movedim(0, -1), torch.as_tensor(frequencies, device="cpu"), asked)
    # xPos and temperatures depend on one position [*ids], or [*ids, 1] for all heads.
    m = ids[0] if theta.ndim == 1 else ids[0][..., None]
    scale = torch.full_like(z.real, spec.amplitude(length))
    if spec.xpos is not None:
        pairs = torch.arange(spec.rotated_dim // 2, dtype=torch.float64, device="cpu")
        zeta = (2 * pairs / spec.rotated_dim + spec.xpos.gamma) / (1 + spec.xpos.gamma)
        power = (m[..., None] - spec.xpos.length / 2) / spec.xpos.scale_base
        scale = scale * zeta ** (power if role == "q" else -power)
    rest = z.real.new_ones(*z.shape[:-1], spec.head_dim - spec.rotated_dim)
    if spec.query_temperature is not None and role == "q":
        temperature = torch.as_tensor(spec.query_temperature.evaluate(m.numpy()), device="cpu")[..., None]
        scale, rest = scale * temperature, rest * temperature
    cos, sin = scale * z.real, scale * z.imag
    # 0.0 is added because -sin is -0.0 at position 0.
    return torch.cat((cos, -sin, sin, cos, rest), dim=-1) + 0.0


def _unit_numbers(ids: Tensor, frequencies: Float64[Tensor, "*heads axes pairs"], asked: str) -> Tensor:
    """Return exp(i * sum_a p_a F[a, i]), complex128 [*ids, *heads, pairs], for ids [*shape, axes]."""
    # float32 has 24 bits, so that both parts have products with integers up to 2^24 that float64 represents exactly.
    coarse = frequencies.float().double()
    parts = torch.cat((coarse, frequencies - coarse), dim=-2)
    p = torch.cat((ids, ids), dim=-1)[..., None]
    angles = (p if frequencies.dim() == 2 else p[..., None, :, :]) * parts
    if not torch.isfinite(angles).all():
        raise RopewalkError(
            asked=asked,
            expected="finite angles: position * theta_i",
            got=f"positions up to {float(ids.abs().max()):g}, frequencies up to {float(frequencies.abs().max()):g}",
            do="use frequencies and positions that a model could have",
        )
    return torch.polar(torch.ones_like(angles), angles).prod(dim=-2)


def _places(spec: RopeSpec) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of cos, -sin, sin and cos of all pairs, then of the features that are not rotated."""
    start = 0 if spec.rotary_slice == "leading" else spec.head_dim - spec.rotated_dim
    first, second = ([start + i for i in half] for half in pair_indices(spec.rotated_dim, spec.pairing))
    rotated = range(start, start + spec.rotated_dim)
    rest = [i for i in range(spec.head_dim) if i not in rotated]
    rows, columns = first + first + second + second + rest, first + second + first + second + rest
    return torch.tensor(rows, device="cpu"), torch.tensor(columns, device="cpu")


def _sparse(values: Tensor, rows: Tensor, columns: Tensor, dim: int) -> Tensor:
    """Return a coalesced sparse tensor [*leading, dim, dim] of the numbers [*leading, numbers] at (row, column)."""
    order = torch.argsort(rows * dim + columns)
    leading = values.shape[:-1]
    # One column per matrix: its index in the leading dimensions.
    matrices = torch.ones(leading, device="cpu").nonzero().T
    places = torch.stack((rows[order], columns[order]))
    indices = torch.cat((matrices.repeat_interleave(len(order), dim=1), places.repeat(1, matrices.shape[1])))
    size, stored = (*leading, dim, dim), values[..., order].flatten()
    return torch.sparse_coo_tensor(  # pyright: ignore[reportUnknownMemberType]  # its type has a list without items
        indices, stored, size, device="cpu", is_coalesced=True, check_invariants=True
    )


def _check_spec(spec: object, length: int | None, role: object, asked: str) -> None:
    if not isinstance(spec, RopeSpec):
        do = "create one: RopeSpec(head_dim), rope.spec of a module, or load_spec(config)"
        raise RopewalkError(asked=asked, expected="a RopeSpec", got=shown(spec), do=do)
    if spec.angles != "exact":
        raise RopewalkError(
            asked=asked,
            expected='angles="exact", whose rotations compose: R_m R_n = R_(m+n)',
            got=f"angles={spec.angles!r}",
            do='pass dataclasses.replace(spec, angles="exact"), or load_spec(config, angles="exact")',
        )
    if role is not None:
        require_choice(role, ("q", "k"), asked="rotation_matrix(..., role=...)")
    elif not spec.same_for_both:
        raise RopewalkError(
            asked=f"{asked} with a spec that treats queries and keys differently (xpos or query_temperature)",
            expected='role="q" for queries or role="k" for keys',
            got="no role",
            do='pass role="q" or role="k"; each has its own matrix',
        )
    if length is None and spec.varies:
        raise RopewalkError(
            asked=f"{asked} with {type(spec.frequencies).__name__}, whose frequencies depend on the length",
            expected="length=, the number of positions in the sequence",
            got="no length",
            do="pass length=; positions of one sequence are rotated with the same length",
        )
    if length is not None:
        spec.inv_freq(length)


def _check_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise RopewalkError(
            asked="rotation_matrix(..., dtype=...)",
            expected="a floating-point dtype",
            got=shown(dtype),
            do="pass torch.float64, torch.float32, torch.bfloat16 or torch.float16",
        )


def _check_device(device: object) -> None:
    if device is None or (isinstance(device, torch.device | str) and _has_device(device)):
        return
    raise RopewalkError(
        asked="rotation_matrix(..., device=...)",
        expected="a device that this machine has, or None",
        got=shown(device),
        do='pass "cpu", a name such as "cuda:0", or a torch.device',
    )


def _has_device(device: torch.device | str) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError):
        # For an unknown name, a device that torch was built without, and one whose module is missing.
        return False
    return True


def _checked_position(position: object, spec: RopeSpec, asked: str) -> Float64[Tensor, "axes *ids"]:
    """Return the positions in float64 on the CPU, with the axes first: one axis if the spec has none."""
    if isinstance(position, Tensor):
        unreadable = position.is_meta or position.layout != torch.strided
        if unreadable or position.dtype in (torch.bool, *COARSE) or position.is_complex():
            raise _not_a_position(asked, f"{position.dtype}, {position.layout}, on {position.device}")
        ids = position.detach().to("cpu", torch.float64)
        if not torch.isfinite(ids).all():
            raise _not_a_position(asked, "nan or inf in a tensor")
    else:
        listed = _listed(position)
        numbers = [(item, as_float(item)) for item in ([position] if listed is None else listed)]
        wrong = [item for item, number in numbers if number is None]
        if wrong:
            raise _not_a_position(asked, shown(wrong[0]) + ("" if listed is None else " in a list"))
        ids = torch.tensor([number for _, number in numbers], dtype=torch.float64, device="cpu")
        ids = ids[0] if listed is None else ids
    if spec.axes is None:
        return ids[None]
    if ids.dim() == 0 or len(ids) != spec.axes.count:
        raise RopewalkError(
            asked=f"{asked} with {spec.axes!r}",
            expected=f"one number for each of the {spec.axes.count} axes, or a tensor [{spec.axes.count}, ...]",
            got="one number" if ids.dim() == 0 else f"shape {list(ids.shape)}",
            do="pass the positions of the axes, such as [time, height, width]",
        )
    return ids


def _listed(position: object) -> list[object] | None:
    """Return the items of a list, a tuple or an array. None if it is none of them."""
    return list(cast("Sequence[object]", position)) if isinstance(position, list | tuple | np.ndarray) else None


def _not_a_position(asked: str, got: str) -> RopewalkError:
    return RopewalkError(
        asked=asked,
        expected="a position: a finite number, a list of numbers, or a tensor of integers, float32 or float64",
        got=got,
        do="pass a number such as 5, or torch.arange(n) for n matrices",
    )
