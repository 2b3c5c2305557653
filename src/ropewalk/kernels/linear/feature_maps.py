"""Feature maps of linear attention that kernels know by name."""

import torch
from torch import Tensor

__all__ = ["FEATURE_MAPS", "map_features", "row_shift"]

# elu(x) + 1, max(x, 0), max(x, 0)^2, x, exp(x): numbered as the kernels number them.
FEATURE_MAPS = {"elu": 0, "relu": 1, "squared_relu": 2, "identity": 3, "exp": 4}


def map_features(x: Tensor, name: str, shift: Tensor | None = None) -> Tensor:
    """The features of x, in its dtype; `shift` is taken off before an exponential.

    elu is x + 1 above 0 and exp(x) below (Katharopoulos et al., 2006.16236, eq. 7), written so that it does not reach
    0 where exp does not.

    >>> x = torch.tensor([-1.0, 2.0])
    >>> [[round(v, 4) for v in map_features(x, name).tolist()] for name in FEATURE_MAPS]
    [[0.3679, 3.0], [0.0, 2.0], [0.0, 4.0], [-1.0, 2.0], [0.3679, 7.3891]]
    """
    match name:
        case "elu":
            # Above 0 the exponential is of 0, which is 1: it can neither overflow nor pass on a gradient.
            return torch.relu(x) + torch.exp(x.clamp_max(0))
        case "relu":
            return torch.relu(x)
        case "squared_relu":
            return torch.relu(x).square()
        case "exp":
            return torch.exp(x if shift is None else x - shift)
        case _:
            return x


def row_shift(q: Tensor, name: str) -> Tensor | None:
    """What may be taken off the queries before their exponential: the largest feature of each.

    A factor on all features of a query stands above and below the line and cancels, so that queries of any size stay
    finite. Keys have no such freedom: exp of a key must be finite itself.

    >>> row_shift(torch.tensor([[1.0, 3.0]]), "exp").tolist()
    [[3.0]]
    """
    return q.detach().amax(dim=-1, keepdim=True) if name == "exp" else None
