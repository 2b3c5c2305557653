"""Which layer stored its tokens in a cache or a state. Another layer that uses the same one raises an error.

Both are referenced weakly. A copy, or a cache that was loaded, belongs to no layer.
"""

import weakref

import torch
from torch import nn

from ropewalk.errors import RopewalkError

__all__ = ["check_owner", "release", "set_owner"]

_OWNERS: "weakref.WeakKeyDictionary[object, weakref.ref[nn.Module]]" = weakref.WeakKeyDictionary()


def check_owner(storage: object, layer: nn.Module, argument: str) -> None:
    """Raise if another layer stored tokens in a cache or a state.

    Args:
        storage: The cache or the state.
        layer: The layer that is about to use it.
        argument: Name of the argument, "cache" or "state".

    Raises:
        RopewalkError: If it belongs to another layer that still exists.

    >>> check_owner(nn.Identity(), nn.Identity(), "cache")
    """
    if torch.compiler.is_compiling():
        return
    reference = _OWNERS.get(storage)
    owner = None if reference is None else reference()
    if owner is None or owner is layer:
        return
    sizes = "batch, max_length" if argument == "cache" else "batch"
    raise RopewalkError(
        asked=f"{type(layer).__name__}(x, {argument}=...)",
        expected=f"a {argument} of this layer alone: it contains the keys and values of one layer",
        got=f"a {argument} with the tokens of another layer",
        do=f"create one {argument} per layer: [layer.make_{argument}({sizes}) for layer in layers]; for a copy of the "
        f"layer, pass copy.copy({argument})",
    )


def set_owner(storage: object, layer: nn.Module) -> None:
    """Record that `layer` stored its tokens in a cache or a state.

    >>> cache, layer = nn.Identity(), nn.Identity()
    >>> set_owner(cache, layer)
    >>> check_owner(cache, layer, "cache")
    """
    if torch.compiler.is_compiling():
        return
    reference = _OWNERS.get(storage)
    if reference is None or reference() is not layer:
        _OWNERS[storage] = weakref.ref(layer)


def release(storage: object) -> None:
    """Forget the layer of a cache or a state, which then belongs to no layer.

    >>> release(nn.Identity())
    """
    _OWNERS.pop(storage, None)
