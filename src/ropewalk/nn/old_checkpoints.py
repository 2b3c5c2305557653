"""Checkpoints of code that saved cos, sin or frequencies as buffers: modules here have none, and drop them."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["DropsOldBuffers"]

_LOG = logging.getLogger(__name__)

# Names of buffers that models compute from their config. `freqs` is none of them: code that has it can train it.
_OLD_BUFFER = re.compile(r"(.+_)?inv_freq|(cos|sin)_cached?|cos_sin_cache|freqs_cis")


class DropsOldBuffers(nn.Module):
    """A module whose `load_state_dict` ignores the RoPE buffers of other code, and logs them at debug level.

    Only keys that would be unexpected are dropped: those of the module itself, and those of modules that it does not
    have, such as `rotary_emb.inv_freq` below an attention layer. A parameter, buffer or child of the module is loaded
    whatever its name is.

    >>> DropsOldBuffers().load_state_dict({"inv_freq": 0, "rotary_emb.cos_cached": 0})
    <All keys matched successfully>
    >>> DropsOldBuffers().load_state_dict({"inv_freq_scale": 0}, strict=False).unexpected_keys
    ['inv_freq_scale']
    """

    # An override, because hooks would be absent in modules that an earlier version pickled. It filters the result: a
    # key that is removed from `state_dict` before could be one that a hook of the user, or of a child, reads.
    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        earlier = len(unexpected_keys)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        dropped = [key for key in unexpected_keys[earlier:] if _OLD_BUFFER.fullmatch(key.rpartition(".")[2])]
        if not dropped:
            return
        unexpected_keys[earlier:] = [key for key in unexpected_keys[earlier:] if key not in dropped]
        _LOG.debug(
            "%s has no buffers for positions, and ignored these keys of the state dict: %s",
            type(self).__name__,
            ", ".join(dropped),
        )
