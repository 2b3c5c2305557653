"""What models in the WILD do: their configs, read into specs; and the fused rotation, put into them."""

from typing import TYPE_CHECKING

from ropewalk.hub.configs.load import load_spec as load_spec
from ropewalk.hub.configs.pitfalls import RopeConfigWarning as RopeConfigWarning

if TYPE_CHECKING:
    from ropewalk.hub.accelerate.patch import accelerate as accelerate

__all__ = ["RopeConfigWarning", "accelerate", "load_spec"]


def __getattr__(name: str) -> object:
    # It needs torch, which configs do not.
    if name != "accelerate":
        raise AttributeError(f"module 'ropewalk.hub' has no attribute {name!r}")
    from ropewalk.hub.accelerate.patch import accelerate

    return accelerate
