"""The interface between an attention layer and a cache: `Cache`, which a cache implements, and what it returns."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from ropewalk.errors import RopewalkError, shown
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.position_checks import described

__all__ = ["Cache", "CacheOfRanks", "CachedTokens", "Merge", "check_cached_tokens"]

Merge = Callable[[Tensor, Tensor], Tensor]


class CachedTokens(NamedTuple):
    """The keys and values that the queries of a call can see: those of earlier tokens and their own.

    Attributes:
        keys: [batch, num_kv_heads, slots, head_dim].
        values: [batch, num_kv_heads, slots, v_dim].
        positions: Position of the token in each slot [batch, slots], for encodings that add a bias.
        visibility: Which slots are visible to each query.
        merge: Called with the outputs over these keys [batch, heads, queries, v_dim], and the log-sum-exp of their
            scores [batch, heads, queries]. Returns the outputs over all keys, if other ranks have some. None if these
            are all keys.

    >>> import torch
    >>> tokens = CachedTokens(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.arange(2)[None], Visibility())
    >>> tokens.keys.shape
    torch.Size([1, 1, 2, 4])
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    visibility: Visibility
    merge: Merge | None = None


@runtime_checkable
class Cache(Protocol):
    """What `Attention` needs of a cache. `KVCache` and `RollingKVCache` implement it, and so can a cache of your own.

    Attributes:
        lengths: Number of tokens per sequence [batch], int64, on the device of the layer. By default the positions of
            new tokens start there.

    >>> from ropewalk.nn.attention.cache import KVCache
    >>> isinstance(KVCache(1, 1, 4, 2), Cache), isinstance({}, Cache)
    (True, False)
    """

    lengths: Tensor

    def update(
        self,
        k: Tensor,
        v: Tensor,
        *,
        counts: Tensor | None = None,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        window: int | None = None,
    ) -> CachedTokens:
        """Store keys and values of new tokens, and return all that their queries can see.

        Args:
            k: Keys [batch, num_kv_heads, seq, head_dim], rotated.
            v: Values [batch, num_kv_heads, seq, v_dim].
            counts: Number of tokens per sequence [batch]; the rest of `seq` is padding. None for no padding.
            positions: Whole positions [seq] or [batch, seq]; None continues from `lengths`.
            key_mask: bool [batch, seq]. False hides a new token from all queries, now and later.
            window: Number of tokens that a query sees, itself included; None for all.

        Returns:
            Keys, values and positions in slots, and which slots are visible to each query.
        """
        ...


class CacheOfRanks:
    """A cache that several ranks have together: a call with it is one call of all ranks.

    >>> from ropewalk.nn.attention.cache import KVCache
    >>> isinstance(KVCache(1, 1, 4, 2), CacheOfRanks)
    False
    """

    def agree(self, check: Callable[[], None], layer: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
        """Check a call of a layer, on all ranks before any of them computes something.

        Args:
            check: Raises if the arguments of this rank are invalid.
            layer: The layer.
            tensors: The arguments of the call by name.
        """
        raise NotImplementedError


def check_cached_tokens(tokens: CachedTokens, k: Tensor, v: Tensor) -> None:
    """Raise unless the result of `Cache.update` has keys, values and positions in the same slots.

    Args:
        tokens: The result of a cache that is not ropewalk's.
        k: The new keys, for batch, heads, width, dtype and device.
        v: The new values.

    Raises:
        RopewalkError: If the type, a shape, a dtype or a device does not match.

    >>> import torch
    >>> k = torch.zeros(1, 1, 2, 4)
    >>> check_cached_tokens(CachedTokens(k, k, torch.arange(2)[None], Visibility()), k, k)
    """
    asked, do = "the result of cache.update(k, v, ...)", "see rw.Cache, which states what update returns"
    if not isinstance(tokens, CachedTokens) or not isinstance(tokens.visibility, Visibility):
        expected = "rw.CachedTokens(keys, values, positions, rw.Visibility(...))"
        raise RopewalkError(asked=asked, expected=expected, got=shown(type(tokens).__name__), do=do)
    slots = tokens.keys.shape[2] if isinstance(tokens.keys, Tensor) and tokens.keys.dim() == 4 else None
    for name, x, new in (("keys", tokens.keys, k), ("values", tokens.values, v)):
        expected = (*new.shape[:2], slots, new.shape[3])
        fits = isinstance(x, Tensor) and slots is not None and x.shape == expected
        if not fits or x.dtype != new.dtype or x.device != new.device:
            sizes = ", ".join("slots" if n is None else str(n) for n in expected)
            wanted = f"{name} [{sizes}] of {new.dtype} on {new.device}"
            raise RopewalkError(asked=asked, expected=wanted, got=described(x), do=do)
    positions = tokens.positions
    if not isinstance(positions, Tensor) or positions.shape not in ((slots,), (len(k), slots)):
        wanted = f"positions [{len(k)}, {slots}], one per slot"
        raise RopewalkError(asked=asked, expected=wanted, got=described(positions), do=do)
