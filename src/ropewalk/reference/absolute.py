"""Absolute encodings: functions of (x, positions) that change tokens before attention.

x is [..., seq, dim], positions are [seq] or [batch, seq]. `project` applies an encoding before or after a projection.
All functions compute in float64 and round once to the dtype of x.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice, require_even
from ropewalk.reference.arguments import checked_positions, require_finite, require_float, require_tensor
from ropewalk.reference.pairs import join_pairs
from ropewalk.shapes import Float, Int, Shaped
from ropewalk.spec.frequencies import Plain

__all__ = [
    "concatenated",
    "learned",
    "multiplicative",
    "project",
    "recurrent",
    "sinusoidal",
    "sinusoidal_table",
]

X = Float[Tensor, "*any seq dim"]
Ids = Int[Tensor, "*ids seq"]
Encode = Callable[[Tensor, Tensor], Tensor]


def learned(x: X, positions: Ids, table: Float[Tensor, "rows dim"]) -> X:
    """Learned encoding x_m + p_m, where p_m is row m of a trained table.

    Args:
        x: Tokens [..., seq, dim].
        positions: Integer positions [seq] or [batch, seq], from 0 to rows - 1.
        table: Trained table [rows, dim].

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        RopewalkError: If shapes or dtypes do not match, or if a position has no row in the table.

    >>> learned(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[3.0, 4.0]]
    """
    return (x.double() + _rows(x, positions, table, "learned")).to(x.dtype)


def multiplicative(x: X, positions: Ids, table: Float[Tensor, "rows dim"]) -> X:
    """Multiplicative encoding x_m * p_m, element by element, where p_m is row m of a trained table.

    The table is initialised to 1.

    Args:
        x: Tokens [..., seq, dim].
        positions: Integer positions [seq] or [batch, seq], from 0 to rows - 1.
        table: Trained table [rows, dim].

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        RopewalkError: If shapes or dtypes do not match, or if a position has no row in the table.

    >>> multiplicative(torch.tensor([[5.0, 6.0]]), torch.tensor([0]), torch.tensor([[2.0, 1.0]])).tolist()
    [[10.0, 6.0]]
    """
    return (x.double() * _rows(x, positions, table, "multiplicative")).to(x.dtype)


def concatenated(
    x: X,
    positions: Ids,
    table: Float[Tensor, "rows width"],
    projection: Float[Tensor, "dim dim_plus_width"] | None = None,
) -> Float[Tensor, "*any seq out"]:
    """Concatenated encoding [x_m ; p_m], where p_m is row m of a trained table.

    Args:
        x: Tokens [..., seq, dim].
        positions: Integer positions [seq] or [batch, seq], from 0 to rows - 1.
        table: Trained table [rows, width].
        projection: Matrix [dim, dim + width] that maps the result back to dim features, or None.

    Returns:
        Tensor [..., seq, dim + width], or [..., seq, dim] with a projection, in the dtype of x.

    Raises:
        RopewalkError: If shapes or dtypes do not match, or if a position has no row in the table.

    >>> concatenated(torch.tensor([[5.0, 6.0]]), torch.tensor([0]), torch.tensor([[7.0]])).tolist()
    [[5.0, 6.0, 7.0]]
    """
    rows = _rows(x, positions, table, "concatenated", any_width=True)
    joined = torch.cat((x.double(), rows.expand(*x.shape[:-1], -1)), dim=-1)
    if projection is None:
        return joined.to(x.dtype)
    columns = "pass a matrix whose columns are the features of x, then those of the table"
    return _projected(joined, projection, asked="concatenated(projection=...)", rows="dim", do=columns).to(x.dtype)


def sinusoidal_table(positions: Shaped[Tensor, "*ids"], dim: int, base: float = 10_000.0) -> Float[Tensor, "*ids dim"]:
    """p_{m,2i} = sin(m base^(-2i/d)), p_{m,2i+1} = cos(m base^(-2i/d)) (Vaswani et al., 1706.03762, section 3.5).

    Args:
        positions: Positions m, of any shape.
        dim: Number of features d, even.
        base: Base of the frequencies.

    Returns:
        float64 table [*positions.shape, dim].

    Raises:
        RopewalkError: If `dim` is odd or a position is not finite.

    >>> sinusoidal_table(torch.tensor([0, 1]), dim=2).round(decimals=4).tolist()
    [[0.0, 1.0], [0.8415, 0.5403]]
    """
    dim = require_even(dim, asked="sinusoidal_table(dim)", do="pass an even width; sines and cosines alternate")
    require_finite(positions, asked="sinusoidal_table(positions)")
    angles = positions.to(torch.float64).unsqueeze(-1) * torch.as_tensor(
        Plain(base).evaluate(dim), device=positions.device
    )
    return join_pairs(torch.sin(angles), torch.cos(angles), "interleaved")


def sinusoidal(x: X, positions: Shaped[Tensor, "*ids"], base: float = 10_000.0) -> X:
    """Sinusoidal encoding x_m + p_m, where p_m is a row of `sinusoidal_table`. Defined at every position.

    Args:
        x: Tokens [..., seq, dim], with an even dim.
        positions: Positions [seq] or [batch, seq].
        base: Base of the frequencies.

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        RopewalkError: If shapes or dtypes do not match, or if a position is not finite.

    >>> sinusoidal(torch.zeros(1, 2), torch.tensor([0])).tolist()
    [[0.0, 1.0]]
    """
    require_float(x, asked="sinusoidal(x)", at_least_dims=2)
    aligned = checked_positions(positions, tuple(x.shape), asked="sinusoidal")
    return (x.double() + sinusoidal_table(aligned, x.shape[-1], base)).to(x.dtype)


def recurrent(
    x: X,
    positions: Shaped[Tensor, "*ids"],
    input_weight: Float[Tensor, "dim dim"],
    state_weight: Float[Tensor, "dim dim"],
    bias: Float[Tensor, "dim"],
) -> X:
    """Elman network h_m = tanh(A x_m + B h_{m-1} + b), with an initial state of 0.

    The network processes tokens from the lowest position to the highest. Only the order of `positions` matters, not
    their values. Each h_m is returned at the index of its token. The network runs before the transformer, so unlike
    the other encodings it cannot be applied after a projection.

    Args:
        x: Tokens [..., seq, dim].
        positions: Positions [seq] or [batch, seq].
        input_weight: A [dim, dim].
        state_weight: B [dim, dim].
        bias: b [dim].

    Returns:
        The states h, in the shape and dtype of x.

    Raises:
        RopewalkError: If shapes or dtypes do not match, or if a position is not finite.

    >>> one = torch.ones(1, 1)
    >>> h = recurrent(torch.tensor([[1.0], [0.0]]), torch.tensor([0, 1]), one, one, torch.zeros(1))
    >>> [round(value, 4) for value in h.flatten().tolist()]  # tanh(1), tanh(tanh(1))
    [0.7616, 0.642]
    """
    require_float(x, asked="recurrent(x)", at_least_dims=2)
    aligned = checked_positions(positions, tuple(x.shape), asked="recurrent")
    dim = x.shape[-1]
    if input_weight.shape != (dim, dim) or state_weight.shape != (dim, dim) or bias.shape != (dim,):
        raise RopewalkError(
            asked="recurrent(x, positions, input_weight, state_weight, bias)",
            expected=f"two matrices [{dim}, {dim}] and a bias [{dim}], for x of {dim} features",
            got=f"{list(input_weight.shape)}, {list(state_weight.shape)}, {list(bias.shape)}",
            do="pass weights with as many rows and columns as x has features",
        )
    a, b, c = input_weight.double(), state_weight.double(), bias.double()
    order = aligned.argsort(dim=-1, stable=True).expand(x.shape[:-1]).unsqueeze(-1).expand(x.shape)
    in_order = x.double().gather(-2, order)
    state = in_order.new_zeros((*x.shape[:-2], dim))
    states: list[Tensor] = []
    for token in in_order.unbind(dim=-2):
        state = torch.tanh(token @ a.T + state @ b.T + c)
        states.append(state)
    if not states:
        return x
    return torch.zeros_like(in_order).scatter(-2, order, torch.stack(states, dim=-2)).to(x.dtype)


def project(
    x: X,
    positions: Shaped[Tensor, "*ids"],
    weight: Float[Tensor, "out dim"],
    encode: Encode,
    placement: str = "input",
    role: str = "q",
) -> Float[Tensor, "*any seq out"]:
    """Projection to queries, keys or values, with an encoding before it, W encode(x), or after it, encode(W x).

    For an additive encoding p these are W(x+p), as in Vaswani et al., and Wx+p, as in many later papers. They differ
    by W p - p. With the placement "scores" p is in the scores alone, (q_m + p_m) . (k_n + p_n), and values are Wx. If
    several heads share p, `weight` is that of one head.

    Args:
        x: Tokens [..., seq, dim].
        positions: Positions [seq] or [batch, seq].
        weight: W [out, dim].
        encode: A function of (x, positions).
        placement: "input" encodes before the projection, "projection" after it, "scores" after it except for values.
        role: What W projects to: "q", "k" or "v".

    Returns:
        Tensor [..., seq, out] in the dtype of x.

    Raises:
        RopewalkError: If `placement` or `role` is unknown or `weight` does not fit x.

    >>> shift = lambda x, positions: x + positions[:, None]
    >>> double = 2 * torch.eye(1)
    >>> x, m = torch.tensor([[1.0]]), torch.tensor([3])
    >>> [project(x, m, double, shift, placement).item() for placement in ("input", "projection", "scores")]
    [8.0, 5.0, 5.0]
    >>> [project(x, m, double, shift, placement, "v").item() for placement in ("input", "projection", "scores")]
    [8.0, 5.0, 2.0]
    """
    require_choice(placement, ("input", "projection", "scores"), asked="project(placement=...)")
    require_choice(role, ("q", "k", "v"), asked="project(role=...)")
    errors = {"asked": "project(weight=...)", "rows": "out", "do": "pass a matrix with one column per input feature"}
    if placement == "input":
        return _projected(encode(x.double(), positions), weight, **errors).to(x.dtype)
    projected = _projected(x.double(), weight, **errors)
    in_scores = role in ("q", "k")
    return (encode(projected, positions) if placement == "projection" or in_scores else projected).to(x.dtype)


def _projected(x: Tensor, weight: Tensor, *, asked: str, rows: str, do: str) -> Tensor:
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise RopewalkError(
            asked=asked,
            expected=f"a matrix [{rows}, {x.shape[-1]}], for {x.shape[-1]} features",
            got=f"{list(weight.shape)}",
            do=do,
        )
    return x @ weight.double().T


def _rows(x: Tensor, positions: Tensor, table: Tensor, name: str, *, any_width: bool = False) -> Tensor:
    """Rows of `table` at `positions` in float64, shaped to broadcast against x."""
    require_float(x, asked=f"{name}(x)", at_least_dims=2)
    require_tensor(positions, asked=f"{name}(positions)")
    require_tensor(table, asked=f"{name}(table)")
    width = x.shape[-1]
    if positions.is_floating_point() or table.dim() != 2 or (table.shape[1] != width and not any_width):
        raise RopewalkError(
            asked=f"{name}(x, positions, table)",
            expected=f"integer positions and a table [rows, {'width' if any_width else width}]",
            got=f"positions {positions.dtype}, table {list(table.shape)}",
            do="pass integer positions, and a table of this shape",
        )
    indices = checked_positions(positions, tuple(x.shape), asked=name).long()
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < len(table):
        raise RopewalkError(
            asked=f"{name}(x, positions, table)",
            expected=f"positions from 0 to {len(table) - 1}, the rows of the table",
            got=f"positions from {int(indices.min())} to {int(indices.max())}",
            do="train a longer table, or use an encoding that is defined at every position, such as sinusoidal",
        )
    return table[indices].double()
