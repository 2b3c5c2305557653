"""What `ropewalk convert` refuses: weights that are quantised or unknown, and shapes that the config contradicts."""

import re
from collections.abc import Container
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.hub.convert.checkpoint import Checkpoint

__all__ = [
    "FLOATS",
    "TOWER",
    "contradiction",
    "quantised",
    "refuse_quantised",
    "refuse_strangers",
    "strange",
    "unconvertible",
]

# Modules that see or hear, whose attention is not the language model's; and kinds of layers that do not rotate.
TOWER = re.compile(r"(^|[._])(vision|visual|image|img|vit|vqmodel|audio|speech|mm|multi_modal)\w*\.")
_UNTURNED = re.compile(r"\.(linear_attn|cross_attn|mamba|mixer)\.")
# What looks like a projection of queries or keys, wherever it stands.
_LIKE_ATTENTION = re.compile(
    r"(^|[._])(q|k|qk|qkv|query|key|query_key_value|Wqkv|wq|wk|wqkv|q_b|kv_a|kv_a_proj_with_mqa)(_proj)?(\.linear)?\.weight$"
)
_QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|absmax|quant_map|quant_state\S*|nested_absmax|weight_scale\w*|weight_packed"
    r"|weight_shape|weight_zero_point|input_scale|k_scale|v_scale|\w+_blocks|\w+_scales)$"
)
FLOATS = ("F64", "F32", "F16", "BF16")


def refuse_quantised(checkpoint: Checkpoint, *configs: dict[str, Any]) -> None:
    for config in configs:
        if config.get("quantization_config"):
            method = config["quantization_config"]
            method = method.get("quant_method") if isinstance(method, dict) else method
            raise quantised(f"quantization_config in the config ({method})")
    for name in checkpoint.tensors:
        if "lora_" in name or ".adapter" in name:
            raise unconvertible("this model", "weights of a whole model", f"{name!r}: an adapter; merge it first")
        if _QUANTISED.search(name) and not TOWER.search(name):
            raise quantised(repr(name))


def refuse_strangers(checkpoint: Checkpoint, modules: Container[str]) -> None:
    """Tensors that look like queries or keys outside of the modules that are known."""
    for name in checkpoint.tensors:
        if not _LIKE_ATTENTION.search(name) or TOWER.search(name) or _UNTURNED.search(name):
            continue
        steps = name.split(".")
        if not any(".".join(steps[:end]) in modules for end in range(1, len(steps))):
            raise strange(name)


def strange(name: str) -> RopewalkError:
    return unconvertible("this model", "tensors of attention that are known", f"{name!r}")


def quantised(got: str) -> RopewalkError:
    return RopewalkError(
        asked="convert a checkpoint",
        expected="weights as F64, F32, F16 or BF16: scales of blocks of rows would have to move with the rows",
        got=f"quantised weights: {got}",
        do="convert the checkpoint that it was quantised from, then quantise that",
    )


def contradiction(what: str, expected: str, got: str) -> RopewalkError:
    return RopewalkError(
        asked=f"convert a checkpoint: {what}",
        expected=expected,
        got=got,
        do="check that config.json belongs to these weights",
    )


def unconvertible(what: object, expected: str, got: str) -> RopewalkError:
    return RopewalkError(
        asked=f"convert a checkpoint: {what}",
        expected=expected,
        got=got,
        do="open an issue with the name of the model; a guess here would give weights that are silently wrong",
    )
