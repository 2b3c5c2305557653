"""The feature maps of `FeatureMap` in torch."""

import torch
from torch import Tensor
from torch.nn.functional import threshold

from ropewalk.kernels.types import FeatureMapName

__all__ = ["map_features", "row_shift"]


def map_features(x: Tensor, name: FeatureMapName, shift: Tensor | None = None) -> Tensor:
    """Return the features of x, in its dtype.

    "elu" is x + 1 above 0 and exp(x) below (Katharopoulos et al., 2006.16236, eq. 7), computed so that it is 0 only if
    exp(x) is 0.

    Args:
        x: Queries or keys.
        name: Name of the feature map.
        shift: Subtracted from x before an exponential.

    >>> x, names = torch.tensor([-1.0, 2.0]), ("elu", "relu", "squared_relu", "identity", "exp")
    >>> [[round(v, 4) for v in map_features(x, name).tolist()] for name in names]
    [[0.3679, 3.0], [0.0, 2.0], [0.0, 4.0], [-1.0, 2.0], [0.3679, 7.3891]]
    """
    match name:
        case "elu":
            # Up to `least` the features are exp(x), which rounds to 1 + x there, and above it x + exp(0): each number
            # has the gradient of one of the two, 0 too. max(x, 0) and min(x, 0) have none at 0 in some versions of
            # torch, x - max(x, 0) is NaN at infinity, and a device may flush a limit that is subnormal.
            numbers = torch.finfo(x.dtype)
            least, following = numbers.tiny, numbers.tiny * (1 + numbers.eps)
            return threshold(x, least, 0.0) + torch.exp(-threshold(-x, -following, 0.0))
        case "relu":
            return torch.relu(x)
        case "squared_relu":
            return torch.relu(x).square()
        case "exp":
            return torch.exp(x if shift is None else x - shift)
        case _:
            return x


def row_shift(q: Tensor, name: FeatureMapName) -> Tensor | None:
    """Return the shift of queries before their exponential: the largest feature of each query, or None.

    A common factor of all features of a query cancels between numerator and denominator, so the shift keeps queries of
    any size finite. Keys cannot be shifted: exp of a key must be finite.

    >>> row_shift(torch.tensor([[1.0, 3.0]]), "exp").tolist()
    [[3.0]]
    """
    return q.detach().amax(dim=-1, keepdim=True) if name == "exp" and q.shape[-1] else None
