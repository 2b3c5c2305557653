"""Checks of the saved state of a cache."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, shown
from ropewalk.nn.saved_tensors import check_tensor, checked_tensors

__all__ = ["checked_cache_state"]


def checked_cache_state(
    state: Mapping[str, Tensor], keys: Tensor, values: Tensor, *, rolling: bool, asked: str
) -> tuple[dict[str, Tensor], list[int]]:
    """Return the tensors of a saved cache and its lengths. Raise unless they fit a cache with these keys and values.

    Args:
        state: What `KVCache.state_dict` returned, or any content of a file.
        keys: Keys of the cache [batch, heads, slots, head_dim].
        values: Values of the cache [batch, heads, slots, v_dim].
        rolling: Whether the oldest tokens are overwritten when the slots are full.
        asked: The first line of the error.

    Returns:
        The tensors, and the lengths as integers.

    Raises:
        RopewalkError: If a tensor is missing, or if a name, shape, dtype or length does not fit.

    >>> keys = torch.zeros(1, 1, 4, 2)
    >>> saved = {"keys": keys, "values": keys, "lengths": torch.tensor([3]), "positions": torch.zeros(1, 4).long()}
    >>> checked_cache_state(saved, keys, keys, rolling=False, asked="a doctest")[1]
    [3]
    """
    tensors = checked_tensors(
        state, ("keys", "values", "lengths", "positions"), ("hidden", "encoding_state"), asked=asked
    )
    batch, heads, slots, _ = keys.shape
    do = "create the cache with the batch, heads, widths and dtype of the saved one; cache.to(dtype=...) casts it"
    for name, buffer in (("keys", keys), ("values", values)):
        check_tensor(tensors[name], name, (batch, heads, None, buffer.shape[3]), buffer.dtype, asked=asked, do=do)
    saved = tensors["keys"].shape[2]
    check_tensor(tensors["values"], "values", (batch, heads, saved, values.shape[3]), values.dtype, asked=asked, do=do)
    check_tensor(tensors["lengths"], "lengths", (batch,), torch.int64, asked=asked, do=do)
    check_tensor(tensors["positions"], "positions", (batch, saved), torch.int64, asked=asked, do=do)
    if "hidden" in tensors:
        check_tensor(tensors["hidden"], "hidden", (batch, saved), torch.bool, asked=asked, do=do)
    encoding_state = tensors.get("encoding_state")
    if encoding_state is not None and (not encoding_state.is_floating_point() or encoding_state.shape[:1] != (batch,)):
        expected, got = f"encoding_state [{batch}, ...], floating-point", shown(list(encoding_state.shape))
        raise RopewalkError(asked=asked, expected=expected, got=f"{encoding_state.dtype} {got}", do=do)
    lengths = tensors["lengths"].tolist()
    # A rolling cache with all slots filled has dropped tokens: the others are in the right slots of an equal one only.
    most = 2**62 if rolling and saved == slots else saved
    if saved > slots or min(lengths) < 0 or max(lengths) > most:
        raise RopewalkError(
            asked=asked,
            expected=f"at most {slots} slots, and lengths from 0 to the number of slots"
            + (f", or any lengths with {slots} slots" if rolling else ""),
            got=f"{saved} slots, and lengths {shown(lengths)}",
            do=_how_to_load(saved, slots, lengths, rolling),
        )
    return tensors, lengths


def _how_to_load(saved: int, slots: int, lengths: list[int], rolling: bool) -> str:
    if min(lengths) < 0 or max(lengths) > 2**62:
        return "save the cache again: no cache has such lengths"
    if max(lengths) > saved:
        return f"load it in a RollingKVCache of window={saved}, which the saved cache was"
    return "load it in a KVCache" if rolling else f"create a cache of max_length={saved} or more"
