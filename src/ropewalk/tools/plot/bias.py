"""The position bias of a model: ALiBi's number of heads, or T5's buckets and the biases that it learned.

A T5 config defines which distances share a bucket. The numbers that are added to scores are weights: one per bucket and
head. They are only known if the folder of the config contains them.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.keys import Keys, read_config
from ropewalk.hub.convert.checkpoint import INDEX, SINGLE, Checkpoint, Stored, read_checkpoint, read_rows
from ropewalk.hub.convert.model_folder import ModelFolder
from ropewalk.tools.command_config import CommandLine

__all__ = ["Bias", "bias_of"]

_BUCKETS = "relative_attention_num_buckets"
# The end of the name of a tensor [buckets, heads]. The first layer of a stack has it, and the other layers use it too.
_LEARNED = "relative_attention_bias.weight"
_DTYPES = ("F64", "F32", "F16", "BF16")
# The largest number of heads that is read. No model has more.
_MOST_HEADS = 1024


@dataclass(frozen=True)
class Bias:
    """The bias of a model: either ALiBi or T5's.

    Attributes:
        num_heads: The number of ALiBi heads. None for T5's bias.
        num_buckets: The number of T5 buckets. None for ALiBi.
        max_distance: The distance from which on T5 uses the last bucket. None for ALiBi.
        learned: The learned numbers [buckets, heads] of "decoder" and "encoder", as far as the weights contain them.
    """

    num_heads: int | None = None
    num_buckets: int | None = None
    max_distance: int | None = None
    learned: dict[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])


def bias_of(config: str, asked: str) -> Bias:
    """Read the bias of a config, and the learned numbers if `config` is a folder with safetensors.

    Args:
        config: The path of a config or of a model folder.
        asked: The command, for error messages.

    Returns:
        The bias.

    Raises:
        RopewalkError: If the config has neither bias, or if it or the weights cannot be read.
    """
    asked = f"{asked} {config}"
    keys = Keys(read_config(config, CommandLine(asked)))
    name = keys.text("model_type")
    if keys.has(_BUCKETS):
        num_buckets = keys.integer(_BUCKETS)
        max_distance = keys.integer("relative_attention_max_distance", 128)
        return Bias(None, num_buckets, max_distance, _learned(Path(config), num_buckets, asked))
    inner = Keys(keys.part("attn_config"), "attn_config")
    if name == "bloom" or keys.flag("alibi", False) or inner.flag("alibi", False):
        if inner.number("alibi_bias_max", 8.0) != 8.0:
            raise RopewalkError(
                asked=asked,
                expected="the slopes of ALiBi's paper: alibi_bias_max 8",
                got=f"{inner.raw('alibi_bias_max')}",
                do="use a config with these slopes: no others are supported",
            )
        heads = next((key for key in ("n_head", "n_heads", "num_attention_heads") if keys.has(key)), "n_head")
        return Bias(keys.integer(heads))
    raise RopewalkError(
        asked=asked,
        expected="the config of a model with ALiBi (bloom, mpt, falcon with alibi) or T5's buckets",
        got=f"model_type {name!r} with neither",
        do="leave the config out and add --num-heads; `ropewalk plot decay` plots a RoPE",
    )


def _learned(path: Path, num_buckets: int, asked: str) -> dict[str, NDArray[np.float64]]:
    """The learned numbers of the decoder and the encoder, [buckets, heads]. Empty without safetensors."""
    if not path.is_dir():
        return {}
    model = ModelFolder(path)
    if not {INDEX, SINGLE} & set(model.names()):
        return {}
    checkpoint = read_checkpoint(model)
    learned: dict[str, NDArray[np.float64]] = {}
    for name, tensor in sorted(checkpoint.tensors.items()):
        if name.endswith(_LEARNED):
            stack = "decoder" if "decoder" in name.split(".") else "encoder"
            learned.setdefault(stack, _values(checkpoint, name, tensor, num_buckets, asked))
    return dict(sorted(learned.items()))


def _values(checkpoint: Checkpoint, name: str, tensor: Stored, num_buckets: int, asked: str) -> NDArray[np.float64]:
    fits = len(tensor.shape) == 2 and tensor.shape[0] == num_buckets and 1 <= tensor.shape[1] <= _MOST_HEADS
    if not fits or tensor.dtype not in _DTYPES:
        raise RopewalkError(
            asked=asked,
            expected=f"{name!r} with {num_buckets} rows, as in the config, and at most {_MOST_HEADS} columns, in"
            f" {', '.join(_DTYPES)}",
            got=f"shape {list(tensor.shape)} in {tensor.dtype}",
            do="use the weights of this config",
        )
    with checkpoint.model.open(tensor.path.name) as file:
        return read_rows(file, tensor, 0, num_buckets, num_buckets)
