"""Which rows of which tensors change places when a checkpoint goes from one pairing to the other.

Weights that are quantised or unknown are refused, and shapes that the config contradicts. Rows are equal runs of bytes,
so that any dtype can be permuted without being understood, and nothing is rounded.
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

# Modules that see or hear, whose attention is not the language model's; and kinds of layers that do not rotate.
_TOWER = re.compile(r"(^|_)(vision|visual|image|img|vit|vqmodel|audio|speech|mm|multi_modal)")
_NOT_ROTATED = re.compile(r"\.(linear_attn|cross_attn|mamba|mixer)\.")
# What looks like a projection of queries or keys, wherever it stands.
_LIKE_ATTENTION = re.compile(
    r"(^|[._])(q|k|qk|qkv|query|key|query_key_value|Wqkv|wq|wk|wqkv|q_b|kv_a|kv_a_proj_with_mqa)(_proj)?(\.linear)?\.weight$"
)
_QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|absmax|quant_map|nested_absmax|weight_scale\w*|weight_packed"
    r"|weight_shape|weight_zero_point|input_scale|k_scale|v_scale|\w+_blocks|\w+_scales)$|\.quant_state"
)
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Part:
    """A tensor with queries or keys in it: the heads that its rows belong to, and the layer's spec.

    `what` is "weight" or "bias" of a projection, or "norm.weight" or "norm.bias". `width` is how many rows a head has,
    `turning` the row of a head at which the features that turn begin.
    """

    name: str
    layer: str
    what: str
    heads: Heads
    width: int
    rotated_dim: int
    spec: RopeSpec

    def starts(self) -> list[int]:
        """The rows at which runs of features that turn begin."""
        return sorted(start + self.rotated_dim for start in (*self.heads.queries, *self.heads.keys))


@dataclass(frozen=True)
class Plan:
    """What a conversion touches: the parts by name, and the layers that do not rotate."""

    parts: dict[str, Part]
    still: tuple[str, ...]


def row_order(rotary_dim: int, to: Pairing) -> NDArray[np.int64]:
    """Which row comes where: new row j is old row order[j]. Pair i is (2i, 2i+1) in one pairing, (i, i + d/2) in the
    other.

    >>> row_order(6, "interleaved").tolist(), row_order(6, "half").tolist()
    ([0, 3, 1, 4, 2, 5], [0, 2, 4, 1, 3, 5])
    """
    halves = np.arange(rotary_dim).reshape(2, -1)
    return (halves.T if to == "interleaved" else halves.reshape(-1, 2).T).ravel()


def permuted_blocks(file: BinaryIO, tensor: Stored, part: Part, to: Pairing) -> Iterator[bytes]:
    """The bytes of a tensor with the rows that turn in the order of the pairing `to`; no more than a head at once."""
    order, row, at = row_order(part.spec.rotated_dim, to), tensor.nbytes // part.heads.rows, 0
    file.seek(tensor.start)
    for start in part.starts():
        yield from blocks_of(file, tensor.path, (start - at) * row)
        run = b"".join(blocks_of(file, tensor.path, len(order) * row))
        yield np.frombuffer(run, np.uint8).reshape(len(order), row)[order].tobytes()
        at = start + len(order)
    yield from blocks_of(file, tensor.path, (part.heads.rows - at) * row)


def plan_of(checkpoint: Checkpoint, config: Config) -> Plan:
    """What is permuted in a checkpoint with this config."""
    part, family = config.language.data, config.language.family
    _refuse_quantised(checkpoint, config.data, part)
    model_type = part.get("model_type")
    layout = _layout(model_type)
    counted = config.keys()
    modules = dict(_modules(checkpoint, layout))
    count = next((counted.whole(key) for key in ("num_hidden_layers", "n_layer", "n_layers") if counted.has(key)), None)
    if count is None:
        raise counted.error("num_hidden_layers", "a whole number", "nothing", "set it as the model was trained")
    # Layers that predict further tokens are numbered on from the others, or stand in a module of their own.
    more = counted.whole("num_nextn_predict_layers", 0, at_least=0)
    specs = specs_by_number(counted, family, config.layers, count)
    specs += [next((spec for spec in reversed(specs) if spec is not None), None)] * more
    parts: dict[str, Part] = {}
    still: list[str] = []
    seen: set[int] = set()
    for module, (number, leaves) in modules.items():
        apart = module.startswith("mtp.")
        if not apart and number >= len(specs):
            raise _contradiction(module, f"{count} layers (num_hidden_layers)", f"layer {number}")
        if apart and len({spec is None for spec in specs[:count]}) > 1:
            wanted = "layers that all rotate beside those that predict further tokens, of which no key says it"
            raise _unconvertible(model_type, wanted, f"some that do not, and {module}")
        spec = specs[-1] if apart else specs[number]
        seen |= set() if apart else {number}
        if spec is None:
            still.append(module)
            continue
        parts |= {p.name: p for p in _parts(checkpoint, layout, module, leaves, spec, counted, family)}
    missing = [number for number in range(count) if number not in seen]
    if missing and not layout.gaps:
        raise _contradiction("the model", f"attention in {count} layers", f"none in layer {missing[0]}")
    if not parts:
        raise _unconvertible(model_type, "layers that rotate", "none: no layer of this model turns queries and keys")
    _refuse_strangers(checkpoint, modules)
    return Plan(parts, tuple(still))


def _in_tower(name: str) -> bool:
    """Whether a module before the last dot of a name is one that sees or hears."""
    # One search per step, each from the last character that no name has: the time grows as the name does.
    for step in name.split(".")[:-1]:
        word = re.split(r"\W", step)[-1]
        if _TOWER.search(word if word == step else f"-{word}"):
            return True
    return False


def _layout(model_type: object) -> Layout:
    # A composite model whose config is flat is its language model.
    names = (str(model_type), f"{model_type}_text")
    known = next((LAYOUTS[name] for name in names if name in LAYOUTS), None)
    if known is not None:
        return known
    if any(name in FAMILIES for name in names):
        raise _unconvertible(model_type, f"a family whose tensors are known: {', '.join(sorted(LAYOUTS))}", "another")
    # Nothing is known of it: the names of most models are tried, and every other name is refused.
    return SEPARATE


def _modules(checkpoint: Checkpoint, layout: Layout) -> Iterator[tuple[str, tuple[int, list[str]]]]:
    """The attention modules of the language model, with the layer's number and the names behind it."""
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
        raise _unconvertible("this model", f"tensors named like {layout.attention!r}", "none")
    if len(prefixes) > 1:
        raise _unconvertible("this model", "one language model", f"several: {shown(list(prefixes.values()))}")
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
    """The parts of one attention module, each held to the shape that the config gives it."""
    counts = _counts(config, family, spec, module, checkpoint)
    roles: set[str] = set()
    for leaf in leaves:
        name = f"{module}.{leaf}"
        tensor = checkpoint.tensors[name]
        stem, _, kind = leaf.rpartition(".")
        role = layout.norm(leaf)
        if stem in layout.projections and kind in ("weight", "bias"):
            heads = _heads(layout.projections[stem], counts)
            roles |= {r for r, starts in (("q", heads.queries), ("k", heads.keys)) if starts}
            _require_projection(name, tensor, heads, kind, config, family, stem)
            width = heads.rows if layout.values is None and stem == "kv_a_proj_with_mqa" else counts.head_dim
            what = kind
        elif role is not None:
            heads, width, what = _norm_heads(name, tensor, role, counts), counts.head_dim, f"norm.{kind}"
        elif layout.stays(leaf):
            continue
        else:
            raise _strange(name)
        if tensor.dtype not in _FLOATS:
            raise _quantised(f"{name!r} has dtype {tensor.dtype}")
        rotated_dim = width - spec.rotated_dim if spec.rotary_slice == "trailing" else 0
        yield Part(name, module, what, heads, width, rotated_dim, spec)
    if roles != {"q", "k"}:
        raise _contradiction(module, "queries and keys", shown(sorted(leaves)))
    if layout.values is not None and f"{layout.values}.weight" not in leaves:
        raise _unconvertible(module, "values of their own", "none: the keys are the values too, and cannot be permuted")


def _counts(config: Keys, family: Family, spec: RopeSpec, module: str, checkpoint: Checkpoint) -> Counts:
    queries = next((config.whole(key) for key in family.heads if config.has(key)), None)
    if queries is None:
        raise config.error(family.heads[0], "a whole number", "nothing", "set it as the model was trained")
    inner = config.under("attn_config")
    names = ((config, "num_key_value_heads"), (config, "num_kv_heads"), (inner, "kv_n_heads"))
    keys = next((part.whole(key) for part, key in names if part.has(key)), None)
    alone = checkpoint.tensors.get(f"{module}.k_proj.weight")
    if keys is None and alone is not None and alone.shape and alone.shape[0] % spec.head_dim == 0:
        # Files leave out what is the default of a class in transformers; the tensor has it.
        keys = alone.shape[0] // spec.head_dim
    keys = queries if keys is None else keys
    if keys < 1 or queries % keys:
        raise config.error("num_key_value_heads", f"a divisor of {queries} query heads", f"{keys}", "set it")
    return Counts(
        queries,
        keys,
        spec.head_dim,
        latent=config.whole("kv_lora_rank", 0, at_least=0) + spec.rotated_dim if family.latent else 0,
        multi_query=config.flag("multi_query", True),
        grouped=config.flag("new_decoder_architecture", False),
    )


@functools.lru_cache(maxsize=64)
def _heads(rows: Callable[[Counts], Heads], counts: Counts) -> Heads:
    """The heads of a projection, which are the same in thousands of layers."""
    return rows(counts)


def _require_projection(
    name: str, tensor: Stored, heads: Heads, kind: str, config: Keys, family: Family, stem: str
) -> None:
    """The shape that the config gives a projection: one row per feature, one column per feature of the model."""
    wanted: list[int | None] = [heads.rows]
    if kind == "weight":
        names = ("q_lora_rank",) if stem == "q_b_proj" else family.width
        width = next((config.whole(key) for key in names if config.has(key)), None)
        # A file may leave the width out; then any number of columns will do.
        wanted.append(width if width is not None or len(tensor.shape) != 2 else tensor.shape[1])
    if list(tensor.shape) != wanted:
        raise _contradiction(name, f"the shape {wanted}, by the config", str(list(tensor.shape)))


@functools.lru_cache(maxsize=64)
def _starts(rows: int, width: int) -> tuple[int, ...]:
    """The rows at which heads of `width` rows begin."""
    return tuple(range(0, rows, width))


def _norm_heads(name: str, tensor: Stored, role: str, counts: Counts) -> Heads:
    """A norm with a weight for each feature of a head, or for each feature of every head."""
    heads = counts.queries if role == "q" else counts.keys
    whole = heads * counts.head_dim
    if tensor.shape == (counts.head_dim,):
        starts: tuple[int, ...] = (0,)
    elif tensor.shape in ((whole,), (heads, counts.head_dim)):
        starts = _starts(whole, counts.head_dim)
    else:
        raise _contradiction(
            name, f"the shape [{counts.head_dim}] or [{whole}], by the config", f"{list(tensor.shape)}"
        )
    rows = starts[-1] + counts.head_dim
    return Heads(rows, starts) if role == "q" else Heads(rows, (), starts)


def _refuse_quantised(checkpoint: Checkpoint, *configs: dict[str, Any]) -> None:
    for config in configs:
        if config.get("quantization_config"):
            method = config["quantization_config"]
            method = method.get("quant_method") if isinstance(method, dict) else method
            raise _quantised(f"quantization_config in the config ({shown(method)})")
    for name in checkpoint.tensors:
        if "lora_" in name or ".adapter" in name:
            raise _unconvertible("this model", "weights of a whole model", f"{name!r}: an adapter; merge it first")
        if _QUANTISED.search(name) and not _in_tower(name):
            raise _quantised(repr(name))


def _refuse_strangers(checkpoint: Checkpoint, modules: Container[str]) -> None:
    """Tensors that look like queries or keys outside of the modules that are known."""
    for name in checkpoint.tensors:
        # What matches is at the end and shorter than this; names may have a thousand characters.
        if not _LIKE_ATTENTION.search(name[-80:]) or _in_tower(name) or _NOT_ROTATED.search(name):
            continue
        steps = name.split(".")
        if not any(".".join(steps[:end]) in modules for end in range(1, len(steps))):
            raise _strange(name)


def _strange(name: str) -> RopewalkError:
    return _unconvertible("this model", "tensors of attention that are known", f"{name!r}")


def _quantised(got: str) -> RopewalkError:
    return RopewalkError(
        asked="convert a checkpoint",
        expected="weights as F64, F32, F16 or BF16: scales of blocks of rows would have to move with the rows",
        got=f"quantised weights: {got}",
        do="convert the checkpoint that it was quantised from, then quantise that",
    )


def _contradiction(what: str, expected: str, got: str) -> RopewalkError:
    return RopewalkError(
        asked=f"convert a checkpoint: {what}",
        expected=expected,
        got=got,
        do="check that config.json belongs to these weights",
    )


def _unconvertible(what: object, expected: str, got: str) -> RopewalkError:
    return RopewalkError(
        asked=f"convert a checkpoint: {what if isinstance(what, str) and what.isprintable() else shown(what)}",
        expected=expected,
        got=got,
        do="open an issue with the name of the model; a guess here would give weights that are silently wrong",
    )
