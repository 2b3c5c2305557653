"""Absolute encodings: a token is changed by where it stands, before any attention, as a function of (x, positions).

x is [..., seq, dim], positions [seq] or [batch, seq]. `project` puts any of them before or after a projection. All
of them work in float64 and round once to the dtype of x.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice, require_even
from ropewalk.reference.arguments import checked_positions, require_finite, require_float, require_tensor
from ropewalk.reference.pairs import join_pairs
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
    """x_m + p_m, with p_m row m of a trained table. A position past the table has no row, and is an error.

    >>> learned(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[3.0, 4.0]]
    """
    return (x.double() + _rows(x, positions, table, "learned")).to(x.dtype)


def multiplicative(x: X, positions: Ids, table: Float[Tensor, "rows dim"]) -> X:
    """x_m * p_m, feature by feature, with p_m row m of a trained table that starts at 1.

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
    """[x_m ; p_m], x and position side by side; `projection`, if given, takes that back to dim features.

    >>> concatenated(torch.tensor([[5.0, 6.0]]), torch.tensor([0]), torch.tensor([[7.0]])).tolist()
    [[5.0, 6.0, 7.0]]
    """
    rows = _rows(x, positions, table, "concatenated", any_width=True)
    joined = torch.cat((x.double(), rows.expand(*x.shape[:-1], -1)), dim=-1)
    if projection is None:
        return joined.to(x.dtype)
    columns = "its columns are the features of x and then those of the table"
    return _projected(joined, projection, asked="concatenated(projection=...)", rows="dim", do=columns).to(x.dtype)


def sinusoidal_table(positions: Shaped[Tensor, "*ids"], dim: int, base: float = 10_000.0) -> Float[Tensor, "*ids dim"]:
    """p_{m,2i} = sin(m base^(-2i/d)), p_{m,2i+1} = cos(m base^(-2i/d)), in float64 (Vaswani et al., 1706.03762, 3.5).

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
    """x_m + p_m, with p_m of `sinusoidal_table`. Defined at every position.

    >>> sinusoidal(torch.zeros(1, 2), torch.tensor([0])).tolist()
    [[0.0, 1.0]]
    """
    require_float(x, asked="sinusoidal(x)", at_least_dims=2)
    lined_up = checked_positions(positions, tuple(x.shape), asked="sinusoidal")
    return (x.double() + sinusoidal_table(lined_up, x.shape[-1], base)).to(x.dtype)


def recurrent(
    x: X,
    positions: Shaped[Tensor, "*ids"],
    input_weight: Float[Tensor, "dim dim"],
    state_weight: Float[Tensor, "dim dim"],
    bias: Float[Tensor, "dim"],
) -> X:
    """h_m = tanh(A x_m + B h_{m-1} + b) with h before the first token 0: an Elman network that reads in order.

    Only the order of `positions` matters, not their size: tokens are read from the lowest position to the highest,
    one after the other, and each h_m is given back where its token stood. The network stands before the transformer,
    so unlike the other encodings it has no placement after a projection.

    >>> one = torch.ones(1, 1)
    >>> h = recurrent(torch.tensor([[1.0], [0.0]]), torch.tensor([0, 1]), one, one, torch.zeros(1))
    >>> [round(value, 4) for value in h.flatten().tolist()]  # tanh(1), tanh(tanh(1))
    [0.7616, 0.642]
    """
    require_float(x, asked="recurrent(x)", at_least_dims=2)
    lined_up = checked_positions(positions, tuple(x.shape), asked="recurrent")
    dim = x.shape[-1]
    if input_weight.shape != (dim, dim) or state_weight.shape != (dim, dim) or bias.shape != (dim,):
        raise RopewalkError(
            asked="recurrent(x, positions, input_weight, state_weight, bias)",
            expected=f"two matrices [{dim}, {dim}] and a bias [{dim}], for x of {dim} features",
            got=f"{list(input_weight.shape)}, {list(state_weight.shape)}, {list(bias.shape)}",
            do="the network keeps the width of x",
        )
    a, b, c = input_weight.double(), state_weight.double(), bias.double()
    order = lined_up.argsort(dim=-1, stable=True).expand(x.shape[:-1]).unsqueeze(-1).expand(x.shape)
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
) -> Float[Tensor, "*any seq out"]:
    """A projection with an encoding before it, W encode(x), or after it, encode(W x).

    For an added p these are W(x+p), which Vaswani et al. have, and Wx+p, which papers often write. They differ by
    W p - p.

    >>> shift = lambda x, positions: x + positions[:, None]
    >>> double = 2 * torch.eye(1)
    >>> x, m = torch.tensor([[1.0]]), torch.tensor([3])
    >>> [project(x, m, double, shift, placement).item() for placement in ("input", "projection")]
    [8.0, 5.0]
    """
    require_choice(placement, ("input", "projection"), asked="project(placement=...)")
    errors = {"asked": "project(weight=...)", "rows": "out", "do": "its columns are the features that it takes"}
    if placement == "input":
        return _projected(encode(x.double(), positions), weight, **errors).to(x.dtype)
    return encode(_projected(x.double(), weight, **errors), positions).to(x.dtype)


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
    """The rows of `table` at `positions` in float64, lined up with x."""
    require_float(x, asked=f"{name}(x)", at_least_dims=2)
    require_tensor(positions, asked=f"{name}(positions)")
    require_tensor(table, asked=f"{name}(table)")
    width = x.shape[-1]
    if positions.is_floating_point() or table.dim() != 2 or (table.shape[1] != width and not any_width):
        raise RopewalkError(
            asked=f"{name}(x, positions, table)",
            expected=f"whole positions and a table [rows, {'width' if any_width else width}]",
            got=f"positions {positions.dtype}, table {list(table.shape)}",
            do="a table has a row for whole positions only; it is as wide as what it meets",
        )
    lined_up = checked_positions(positions, tuple(x.shape), asked=name).long()
    if lined_up.numel() and not 0 <= int(lined_up.min()) <= int(lined_up.max()) < len(table):
        raise RopewalkError(
            asked=f"{name}(x, positions, table)",
            expected=f"positions from 0 to {len(table) - 1}, the rows of the table",
            got=f"positions from {int(lined_up.min())} to {int(lined_up.max())}",
            do="a trained table is not defined past its length: train a longer one, or use an encoding by formula",
        )
    return table[lined_up].double()
