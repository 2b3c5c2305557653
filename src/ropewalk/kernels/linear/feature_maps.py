"""The feature maps of linear attention in torch: those that `FeatureMap` names."""

import torch
from torch import Tensor

from ropewalk.kernels.types import FeatureMapName

__all__ = ["map_features", "row_shift"]


def map_features(x: Tensor, name: FeatureMapName, shift: Tensor | None = None) -> Tensor:
    """The features of x, in its dtype; `shift` is taken off before an exponential.

    elu is x + 1 above 0 and exp(x) below (Katharopoulos et al., 2006.16236, eq. 7), written so that it does not reach
    0 where exp does not.

    >>> x, names = torch.tensor([-1.0, 2.0]), ("elu", "relu", "squared_relu", "identity", "exp")
    >>> [[round(v, 4) for v in map_features(x, name).tolist()] for name in names]
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


def row_shift(q: Tensor, name: FeatureMapName) -> Tensor | None:
    """What may be taken off the queries before their exponential: the largest feature of each.

    A factor on all features of a query stands above and below the line and cancels, so that queries of any size stay
    finite. Keys have no such freedom: exp of a key must be finite itself.

    >>> row_shift(torch.tensor([[1.0, 3.0]]), "exp").tolist()
    [[3.0]]
    """
    return q.detach().amax(dim=-1, keepdim=True) if name == "exp" and q.shape[-1] else None
