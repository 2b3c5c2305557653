"""Plans and computes the permutation of rows that converts a checkpoint from one pairing to the other.

Quantized weights, unknown tensors and shapes that contradict the config raise an error. A row is a fixed number of
bytes, so every dtype is permuted in the same way and nothing is rounded.
"""

import functools
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError, shown
from ropewalk.hub.configs.keys import Keys
from ropewalk.hub.configs.layers import specs_by_number
from ropewalk.hub.configs.parse import Config
from ropewalk.hub.convert.checkpoint import Checkpoint, Stored, blocks_of
from ropewalk.hub.convert.projections import LAYOUTS, SEPARATE, Counts, Heads, Layout
from ropewalk.hub.families.family import Family
from ropewalk.hub.families.table import FAMILIES
from ropewalk.spec.rope import Pairing, RopeSpec

__all__ = ["Part", "Plan", "permuted_blocks", "plan_of", "row_order"]

# Modules of vision and audio towers, whose attention is not the language model's; and layer types without rotation.
_TOWER = re.compile(r"(^|_)(vision|visual|image|img|vit|vqmodel|audio|speech|mm|multi_modal)")
_NOT_ROTATED = re.compile(r"\.(linear_attn|cross_attn|mamba|mixer)\.")
# Names that look like a projection of queries or keys, in any module.
_LIKE_ATTENTION = re.compile(
    r"(^|[._])(q|k|qk|qkv|query|key|query_key_value|Wqkv|wq|wk|wqkv|q_b|kv_a|kv_a_proj_with_mqa)(_proj)?(\.linear)?\.weight$"
)
_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|absmax|quant_map|nested_absmax|weight_scale\w*|weight_packed"
    r"|weight_shape|weight_zero_point|input_scale|k_scale|v_scale|\w+_blocks|\w+_scales)$|\.quant_state"
)
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Part:
    """A tensor of queries, keys or both.

    Attributes:
        name: The name of the tensor.
        layer: The name of its attention module.
        kind: "weight" or "bias" of a projection, or "norm.weight" or "norm.bias".
        heads: The rows of each head.
        width: The number of rows per head.
        rotated_start: The first rotated row of a head.
        spec: The spec of the layer.
    """

    name: str
    layer: str
    kind: str
    heads: Heads
    width: int
    rotated_start: int
    spec: RopeSpec

    def starts(self) -> list[int]:
        """Return the first rotated row of each head."""
        return sorted(start + self.rotated_start for start in (*self.heads.queries, *self.heads.keys))


@dataclass(frozen=True)
class Plan:
    """The tensors to permute by name (`parts`), and the layers that do not rotate (`still`)."""

    parts: dict[str, Part]
    still: tuple[str, ...]


def row_order(rotary_dim: int, to: Pairing) -> NDArray[np.int64]:
    """Return the permutation of the rows of a head: new row j is old row order[j].

    Pair i is (2i, 2i + 1) if interleaved and (i, i + d/2) if half.

    Args:
        rotary_dim: The number of rotated features, d.
        to: The pairing to convert to, from the other one.

    Returns:
        The order [rotary_dim].

    >>> row_order(6, "interleaved").tolist(), row_order(6, "half").tolist()
    ([0, 3, 1, 4, 2, 5], [0, 2, 4, 1, 3, 5])
    """
    halves = np.arange(rotary_dim).reshape(2, -1)
    return (halves.T if to == "interleaved" else halves.reshape(-1, 2).T).ravel()


def permuted_blocks(file: BinaryIO, tensor: Stored, part: Part, to: Pairing) -> Iterator[bytes]:
    """Yield the bytes of a tensor with its rotated rows permuted to the pairing `to`, at most one head at a time."""
    order, row, at = row_order(part.spec.rotated_dim, to), tensor.nbytes // part.heads.rows, 0
    file.seek(tensor.start)
    for start in part.starts():
        yield from blocks_of(file, tensor.path, (start - at) * row)
        run = b"".join(blocks_of(file, tensor.path, len(order) * row))
        yield np.frombuffer(run, np.uint8).reshape(len(order), row)[order].tobytes()
        at = start + len(order)
    yield from blocks_of(file, tensor.path, (part.heads.rows - at) * row)


def plan_of(checkpoint: Checkpoint, config: Config) -> Plan:
    """Plan the permutation of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        config: Its parsed config.

    Returns:
        The tensors to permute, and the layers that do not rotate.

    Raises:
        RopewalkError: If the weights are quantized, if tensors are unknown, or if they contradict the config.
    """
    part, family = config.language.data, config.language.family
    _refuse_quantized(checkpoint, config.data, part)
    model_type = part.get("model_type")
    layout = _layout(model_type)
    keys = config.keys()
    modules = dict(_modules(checkpoint, layout))
    count = next((keys.integer(key) for key in ("num_hidden_layers", "n_layer", "n_layers") if keys.has(key)), None)
    if count is None:
        do = "set num_hidden_layers as the model was trained"
        raise keys.error("num_hidden_layers", "an integer", "no such key", do)
    # Layers for multi-token prediction have the numbers after the others, or are in a separate module, mtp.
    extra = keys.integer("num_nextn_predict_layers", 0, at_least=0)
    specs = specs_by_number(keys, family, config.layers, count)
    specs += [next((spec for spec in reversed(specs) if spec is not None), None)] * extra
    parts: dict[str, Part] = {}
    still: list[str] = []
    seen: set[int] = set()
    for module, (number, leaves) in modules.items():
        separate = module.startswith("mtp.")
        if not separate and number >= len(specs):
            raise _contradiction(module, f"{count} layers (num_hidden_layers)", f"layer {number}")
        if separate and len({spec is None for spec in specs[:count]}) > 1:
            expected = (
                "only layers that rotate, since no key specifies whether the layers for multi-token prediction do"
            )
            raise _unconvertible(model_type, expected, f"some layers that do not rotate, and {module}")
        spec = specs[-1] if separate else specs[number]
        seen |= set() if separate else {number}
        if spec is None:
            still.append(module)
            continue
        parts |= {p.name: p for p in _parts(checkpoint, layout, module, leaves, spec, keys, family)}
    missing = [number for number in range(count) if number not in seen]
    if missing and not layout.gaps:
        raise _contradiction("the model", f"attention in {count} layers", f"no attention in layer {missing[0]}")
    if not parts:
        raise _unconvertible(model_type, "layers that rotate queries and keys", "a model in which no layer does")
    _refuse_unknown(checkpoint, modules)
    return Plan(parts, tuple(still))


def _in_tower(name: str) -> bool:
    """Return whether a tensor belongs to a vision or audio tower, according to the modules in its name."""
    # One search per part of the name, in its last word only, so that the time is linear in the length of the name.
    for step in name.split(".")[:-1]:
        word = re.split(r"\W", step)[-1]
        if _TOWER.search(word if word == step else f"-{word}"):
            return True
    return False


def _layout(model_type: object) -> Layout:
    # A flat config of a composite model describes its language model.
    names = (str(model_type), f"{model_type}_text")
    known = next((LAYOUTS[name] for name in names if name in LAYOUTS), None)
    if known is not None:
        return known
    if any(name in FAMILIES for name in names):
        expected = f"a model_type whose tensor names ropewalk knows: {', '.join(sorted(LAYOUTS))}"
        raise _unconvertible(model_type, expected, f"model_type {shown(model_type)}")
    # For an unknown family the most common names are tried. All other names raise an error.
    return SEPARATE


def _modules(checkpoint: Checkpoint, layout: Layout) -> Iterator[tuple[str, tuple[int, list[str]]]]:
    """Yield each attention module of the language model, with its layer number and the names of its tensors."""
    pattern = re.compile(rf"((?:\w+\.)*?){layout.attention}\.(.+)")
    modules: dict[str, tuple[int, list[str]]] = {}
    prefixes: dict[str, str] = {}
    for name in checkpoint.tensors:
        match = pattern.fullmatch(name)
        if match is None or _in_tower(match[1]):
            continue
        if match[1] != "mtp.":
            prefixes.setdefault(match[1], name)
        module = name[: match.start(3) - 1]
        modules.setdefault(module, (int(match[2]), []))[1].append(match[3])
    if not modules:
        raise _unconvertible("this model", f"tensors whose names match {layout.attention!r}", "no such tensor")
    if len(prefixes) > 1:
        raise _unconvertible("this model", "one language model", f"several, with {shown(list(prefixes.values()))}")
    yield from modules.items()


def _parts(
    checkpoint: Checkpoint,
    layout: Layout,
    module: str,
    leaves: list[str],
    spec: RopeSpec,
    config: Keys,
    family: Family,
) -> Iterator[Part]:
    """Yield the parts of one attention module. Raise if a shape contradicts the config."""
    counts = _counts(config, family, spec, module, checkpoint)
    roles: set[str] = set()
    for leaf in leaves:
        name = f"{module}.{leaf}"
        tensor = checkpoint.tensors[name]
        stem, _, suffix = leaf.rpartition(".")
        role = layout.norm(leaf)
        if stem in layout.projections and suffix in ("weight", "bias"):
            heads = _heads(layout.projections[stem], counts)
            roles |= {r for r, starts in (("q", heads.queries), ("k", heads.keys)) if starts}
            _require_projection(name, tensor, heads, suffix, config, family, stem)
            width = heads.rows if layout.values is None and stem == "kv_a_proj_with_mqa" else counts.head_dim
            kind = suffix
        elif role is not None:
            heads, width, kind = _norm_heads(name, tensor, role, counts), counts.head_dim, f"norm.{suffix}"
        elif layout.stays(leaf):
            continue
        else:
            raise _unknown(name)
        if tensor.dtype not in _FLOATS:
            raise _quantized(f"{name!r} has dtype {tensor.dtype}")
        rotated_start = width - spec.rotated_dim if spec.rotary_slice == "trailing" else 0
        yield Part(name, module, kind, heads, width, rotated_start, spec)
    if roles != {"q", "k"}:
        raise _contradiction(module, "tensors for queries and for keys", shown(sorted(leaves)))
    if layout.values is not None and f"{layout.values}.weight" not in leaves:
        got = "keys that are also the values, and so cannot be permuted"
        raise _unconvertible(module, "a separate projection for values", got)


def _counts(config: Keys, family: Family, spec: RopeSpec, module: str, checkpoint: Checkpoint) -> Counts:
    queries = next((config.integer(key) for key in family.heads if config.has(key)), None)
    if queries is None:
        do = f"set {family.heads[0]} as the model was trained"
        raise config.error(family.heads[0], "an integer", "no such key", do)
    attention = config.under("attn_config")
    names = ((config, "num_key_value_heads"), (config, "num_kv_heads"), (attention, "kv_n_heads"))
    keys = next((part.integer(key) for part, key in names if part.has(key)), None)
    k_proj = checkpoint.tensors.get(f"{module}.k_proj.weight")
    if keys is None and k_proj is not None and k_proj.shape and k_proj.shape[0] % spec.head_dim == 0:
        # Files may omit a default of the class in transformers. The shape of the tensor implies it.
        keys = k_proj.shape[0] // spec.head_dim
    keys = queries if keys is None else keys
    if keys < 1 or queries % keys:
        do = "set num_key_value_heads as the model was trained"
        expected = f"a divisor of {queries}, the number of query heads"
        raise config.error("num_key_value_heads", expected, f"{keys}", do)
    return Counts(
        queries,
        keys,
        spec.head_dim,
        latent=config.integer("kv_lora_rank", 0, at_least=0) + spec.rotated_dim if family.latent else 0,
        multi_query=config.flag("multi_query", True),
        grouped=config.flag("new_decoder_architecture", False),
    )


@functools.lru_cache(maxsize=64)
def _heads(rows: Callable[[Counts], Heads], counts: Counts) -> Heads:
    """Return the heads of a projection. Cached: they are the same in all layers."""
    return rows(counts)


def _require_projection(
    name: str, tensor: Stored, heads: Heads, suffix: str, config: Keys, family: Family, stem: str
) -> None:
    """Raise if the shape of a projection is not [features of all heads, width of the model], as in the config."""
    expected: list[int | None] = [heads.rows]
    if suffix == "weight":
        names = ("q_lora_rank",) if stem == "q_b_proj" else family.width
        width = next((config.integer(key) for key in names if config.has(key)), None)
        # A file may omit the width. Then any number of columns is accepted.
        expected.append(width if width is not None or len(tensor.shape) != 2 else tensor.shape[1])
    if list(tensor.shape) != expected:
        raise _contradiction(name, f"the shape {expected}, according to the config", str(list(tensor.shape)))


@functools.lru_cache(maxsize=64)
def _starts(rows: int, width: int) -> tuple[int, ...]:
    """Return the first row of each head of `width` rows."""
    return tuple(range(0, rows, width))


def _norm_heads(name: str, tensor: Stored, role: str, counts: Counts) -> Heads:
    """Return the heads of a norm, whose weights are per feature of a head, or per feature of all heads."""
    heads = counts.queries if role == "q" else counts.keys
    whole = heads * counts.head_dim
    if tensor.shape == (counts.head_dim,):
        starts: tuple[int, ...] = (0,)
    elif tensor.shape in ((whole,), (heads, counts.head_dim)):
        starts = _starts(whole, counts.head_dim)
    else:
        expected = f"the shape [{counts.head_dim}] or [{whole}], according to the config"
        raise _contradiction(name, expected, f"{list(tensor.shape)}")
    rows = starts[-1] + counts.head_dim
    return Heads(rows, starts) if role == "q" else Heads(rows, (), starts)


def _refuse_quantized(checkpoint: Checkpoint, *configs: dict[str, Any]) -> None:
    for config in configs:
        if config.get("quantization_config"):
            method = config["quantization_config"]
            method = method.get("quant_method") if isinstance(method, dict) else method
            raise _quantized(f"quantization_config in the config ({shown(method)})")
    for name in checkpoint.tensors:
        if "lora_" in name or ".adapter" in name:
            raise _unconvertible(
                "this model", "the weights of a complete model", f"{name!r}: an adapter; merge it first"
            )
        if _QUANTIZED.search(name) and not _in_tower(name):
            raise _quantized(repr(name))


def _refuse_unknown(checkpoint: Checkpoint, modules: Container[str]) -> None:
    """Raise if a tensor outside of the known modules looks like a projection of queries or keys."""
    for name in checkpoint.tensors:
        # A match is at the end and shorter than this. Names may have a thousand characters.
        if not _LIKE_ATTENTION.search(name[-80:]) or _in_tower(name) or _NOT_ROTATED.search(name):
            continue
        steps = name.split(".")
        if not any(".".join(steps[:end]) in modules for end in range(1, len(steps))):
            raise _unknown(name)


def _unknown(name: str) -> RopewalkError:
    return _unconvertible("this model", "only attention tensors that ropewalk knows", f"{name!r}")


def _quantized(got: str) -> RopewalkError:
    return RopewalkError(
        asked="convert a checkpoint",
        expected="weights in F64, F32, F16 or BF16; the scales of quantized blocks of rows cannot be permuted",
        got=f"quantized weights: {got}",
        do="convert the checkpoint before quantization, then quantize the result",
    )


def _contradiction(subject: str, expected: str, got: str) -> RopewalkError:
    return RopewalkError(
        asked=f"convert a checkpoint: {subject}",
        expected=expected,
        got=got,
        do="check that config.json belongs to these weights",
    )


def _unconvertible(subject: object, expected: str, got: str) -> RopewalkError:
    name = subject if isinstance(subject, str) and subject.isprintable() else shown(subject)
    return RopewalkError(
        asked=f"convert a checkpoint: {name}",
        expected=expected,
        got=got,
        do="open an issue with the name of the model; guessing could silently produce wrong weights",
    )
