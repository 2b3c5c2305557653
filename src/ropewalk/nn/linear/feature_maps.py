"""Feature maps of linear attention: named maps, random features for softmax, and any function."""

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, as_int, require_choice, require_count, shown
from ropewalk.kernels.constructors import placed, randn, real_tensors
from ropewalk.kernels.torch_internals import fake_mode
from ropewalk.kernels.types import FeatureMapName
from ropewalk.nn.scripting import refuse_scripting
from ropewalk.signatures import checks_names

__all__ = ["FavorFeatures", "FeatureMap", "map_name", "resolve_maps"]

# The name of a map that kernels implement, or any function of q or k.
FeatureMap = FeatureMapName | Callable[[Tensor], Tensor]
FEATURE_MAPS: tuple[FeatureMapName, ...] = get_args(FeatureMapName)


class FavorFeatures(nn.Module):
    """Positive random features whose dot products approximate the exponential of softmax (FAVOR+).

    phi(x) = exp(w_i . y - |y|^2 / 2) / sqrt(m) with y = x / d^(1/4). The m rows w_i are Gaussian, and orthogonal in
    blocks of d. The expected value of phi(q) . phi(k) is exp(q . k / sqrt(d)) (Choromanski et al., 2009.14794, lemma 1
    and section 3). The exponent is at most |w_i|^2 / 2, so features are finite in float32 for any x, up to about
    d = 128. Differs from the paper: nothing is subtracted from the exponent of keys, because the same number would be
    needed for all keys.

    The buffer `projection` [num_features, head_dim] contains the rows. It depends on `seed` only, and is saved with the
    model.

    Args:
        head_dim: Width d of q and k.
        num_features: Number m of features.
        seed: Seed of the random rows.
        device: Device of the rows. They are drawn on the CPU, so a seed gives the same features on every device.

    Raises:
        RopewalkError: If a size is not an integer of at least 1, or if the seed is not an int.

    >>> phi = FavorFeatures(4, num_features=4096, seed=0)
    >>> q, k = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    >>> estimate, exact = (phi(q) @ phi(k).T).item(), torch.exp(torch.tensor(0.25)).item()
    >>> abs(estimate - exact) < 0.1 * exact
    True
    """

    projection: Tensor

    @checks_names
    def __init__(
        self, head_dim: int, num_features: int, *, seed: int = 0, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.head_dim: int = require_count(head_dim, asked="FavorFeatures(head_dim)", do="pass the width of q and k")
        self.num_features: int = require_count(
            num_features, asked="FavorFeatures(num_features)", do="pass the number of random features"
        )
        if as_int(seed) is None:
            raise RopewalkError(
                asked="FavorFeatures(seed=...)", expected="an int", got=shown(seed), do="pass an int; the default is 0"
            )
        self.seed: int = seed
        self.register_buffer("projection", self._drawn(device))

    def _drawn(self, device: torch.device | str | None) -> Tensor:
        """Return the rows w_i in float32, drawn on the CPU: a seed gives the same rows on every device."""
        # Fake tensors can be on a device that does not exist.
        device = device if fake_mode() is None else None
        with real_tensors():
            return self._rows().to(device=device, dtype=torch.float32)

    def _rows(self) -> Tensor:
        random, dim = torch.Generator(device="cpu").manual_seed(self.seed), self.head_dim
        blocks: list[Tensor] = []
        for start in range(0, self.num_features, dim):
            rows, others = (randn(dim, dim, generator=random, dtype=torch.float64, device="cpu") for _ in range(2))
            orthogonal, upper = torch.linalg.qr(rows)
            # These signs make the distribution uniform over rotations.
            orthogonal = orthogonal * upper.diagonal().sign()
            blocks.append((orthogonal.T * others.norm(dim=1)[:, None])[: self.num_features - start])
        return torch.cat(blocks)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FavorFeatures":
        # fn can cast, move or empty tensors. The rows only follow its device, and are drawn again if they were on meta.
        before = self.projection
        super()._apply(fn, recurse)
        device = self.projection.device
        if device.type != "meta":
            self.projection = self._drawn(device) if before.is_meta else before.to(device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of x.

        Args:
            x: Queries or keys [..., head_dim].

        Returns:
            Features [..., num_features]: float64 for float64 input, else float32.

        Raises:
            RopewalkError: If the last dimension of x is not head_dim.
        """
        if x.shape[-1] != self.head_dim:
            raise RopewalkError(
                asked="FavorFeatures(...)(x)",
                expected=f"{self.head_dim} features",
                got=f"{x.shape[-1]}",
                do="create it with the head_dim of q and k",
            )
        working = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
            y = x.to(working) * self.head_dim**-0.25
            exponent = y @ placed(self.projection, x.device).to(working).T - y.square().sum(dim=-1, keepdim=True) / 2
            return torch.exp(exponent) * self.num_features**-0.5

    __prepare_scriptable__ = refuse_scripting

    def extra_repr(self) -> str:
        """Return the sizes and the seed."""
        return f"{self.head_dim}, num_features={self.num_features}, seed={self.seed}"


def resolve_maps(feature_map: FeatureMap | tuple[FeatureMap, FeatureMap], asked: str) -> tuple[FeatureMap, FeatureMap]:
    """Return the maps of queries and of keys.

    Args:
        feature_map: A name, a function, or a tuple of two.
        asked: The function or layer, for errors.

    Returns:
        The map of queries and the map of keys.

    Raises:
        RopewalkError: If a map is neither a known name nor a function.

    >>> resolve_maps("elu", "a doctest")
    ('elu', 'elu')
    """
    pair = feature_map if isinstance(feature_map, tuple) and len(feature_map) == 2 else (feature_map, feature_map)
    return _checked(pair[0], asked), _checked(pair[1], asked)


def _checked(feature_map: FeatureMap | tuple[FeatureMap, FeatureMap], asked: str) -> FeatureMap:
    if callable(feature_map):
        return feature_map
    if not isinstance(feature_map, str):
        raise RopewalkError(
            asked=f"{asked}(feature_map=...)",
            expected=f"one of {', '.join(FEATURE_MAPS)}, a function of a tensor, or a tuple for queries and keys",
            got=shown(feature_map),
            do="for random features that approximate softmax pass FavorFeatures(head_dim, num_features)",
        )
    if feature_map == "favor":
        raise RopewalkError(
            asked=f"{asked}(feature_map='favor')",
            expected="random features that are created once and reused",
            got="a name",
            do="pass FavorFeatures(head_dim, num_features), the same object in every call; LinearAttention creates one",
        )
    require_choice(feature_map, (*FEATURE_MAPS, "favor"), asked=f"{asked}(feature_map=...)")
    return feature_map


def map_name(feature_map: FeatureMap) -> str:
    """Return the name of a map, which a state stores. Two functions with the same name are not distinguished.

    >>> map_name("elu"), map_name(torch.exp)
    ('elu', 'exp()')
    """
    if not callable(feature_map):
        return feature_map
    return f"{getattr(feature_map, '__name__', type(feature_map).__name__)}()"
