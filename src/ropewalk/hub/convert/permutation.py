"""Which rows of which tensors change places when a checkpoint goes from one pairing to the other."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropewalk.hub.configs.read import Keys, config_error
from ropewalk.hub.convert.checkpoint import Checkpoint, Stored
from ropewalk.hub.convert.layer_specs import specs_by_number
from ropewalk.hub.convert.projections import LAYOUTS, SEPARATE, Counts, Heads, Layout
from ropewalk.hub.convert.refusals import (
    FLOATS,
    TOWER,
    contradiction,
    quantised,
    refuse_quantised,
    refuse_strangers,
    strange,
    unconvertible,
)
from ropewalk.hub.families.table import FAMILIES, Family
from ropewalk.spec.rope import RopeSpec

__all__ = ["Part", "Plan", "plan_of", "row_order"]

# A name and a spec for each kind of layer, as `read_model` has them.
Layers = tuple[tuple[str, RopeSpec | None], ...]


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
    turning: int
    spec: RopeSpec

    def starts(self) -> list[int]:
        """The rows at which runs of features that turn begin."""
        return sorted(start + self.turning for start in (*self.heads.queries, *self.heads.keys))


@dataclass(frozen=True)
class Plan:
    """What a conversion touches: the parts by name, and the layers that do not rotate."""

    parts: dict[str, Part]
    still: tuple[str, ...]


def row_order(rotary_dim: int, to: str) -> np.ndarray:
    """Which row comes where: new row j is old row order[j]. Pair i is (2i, 2i+1) in one pairing, (i, i + d/2) in the
    other.

    >>> row_order(6, "interleaved").tolist(), row_order(6, "half").tolist()
    ([0, 3, 1, 4, 2, 5], [0, 2, 4, 1, 3, 5])
    """
    halves = np.arange(rotary_dim).reshape(2, -1)
    return (halves.T if to == "interleaved" else halves.reshape(-1, 2).T).ravel()


def plan_of(checkpoint: Checkpoint, data: dict[str, Any], part: dict[str, Any], family: Family, layers: Layers) -> Plan:
    """The plan for a checkpoint with the config `data`, whose language model has the config `part`."""
    refuse_quantised(checkpoint, data, part)
    model_type = part.get("model_type")
    layout = _layout(model_type)
    counted = Keys(part)
    modules = dict(_modules(checkpoint, layout))
    count = next((counted.whole(key) for key in ("num_hidden_layers", "n_layer", "n_layers") if counted.has(key)), None)
    if count is None:
        raise config_error("num_hidden_layers", "a whole number", "nothing", "set it as the model was trained")
    # Layers that predict further tokens are numbered on from the others, or stand in a module of their own.
    more = counted.whole("num_nextn_predict_layers", 0, at_least=0)
    specs = specs_by_number(part, family, dict(layers), count)
    specs += [next((spec for spec in reversed(specs) if spec is not None), None)] * more
    parts: dict[str, Part] = {}
    still: list[str] = []
    seen: set[int] = set()
    for module, (number, leaves) in modules.items():
        apart = module.startswith("mtp.")
        if not apart and number >= len(specs):
            raise contradiction(module, f"{count} layers (num_hidden_layers)", f"layer {number}")
        if apart and len({spec is None for spec in specs[:count]}) > 1:
            wanted = "layers that all rotate beside those that predict further tokens, of which no key says it"
            raise unconvertible(model_type, wanted, f"some that do not, and {module}")
        spec = specs[-1] if apart else specs[number]
        seen |= set() if apart else {number}
        if spec is None:
            still.append(module)
            continue
        parts |= {p.name: p for p in _parts(checkpoint, layout, module, leaves, spec, counted, family)}
    missing = [number for number in range(count) if number not in seen]
    if missing and not layout.gaps:
        raise contradiction("the model", f"attention in {count} layers", f"none in layer {missing[0]}")
    if not parts:
        raise unconvertible(model_type, "layers that rotate", "none: no layer of this model turns queries and keys")
    refuse_strangers(checkpoint, modules)
    return Plan(parts, tuple(still))


def _layout(model_type: object) -> Layout:
    # A composite model whose config is flat is its language model.
    names = (str(model_type), f"{model_type}_text")
    known = next((LAYOUTS[name] for name in names if name in LAYOUTS), None)
    if known is not None:
        return known
    if any(name in FAMILIES for name in names):
        raise unconvertible(model_type, f"a family whose tensors are known: {', '.join(sorted(LAYOUTS))}", "another")
    # Nothing is known of it: the names of most models are tried, and every other name is refused.
    return SEPARATE


def _modules(checkpoint: Checkpoint, layout: Layout) -> Iterator[tuple[str, tuple[int, list[str]]]]:
    """The attention modules of the language model, with the layer's number and the names behind it."""
    pattern = re.compile(rf"((?:\w+\.)*?){layout.attention}\.(.+)")
    found: dict[str, tuple[int, list[str]]] = {}
    prefixes: dict[str, str] = {}
    for name in checkpoint.tensors:
        match = pattern.fullmatch(name)
        if match is None or TOWER.search(match[1]):
            continue
        if match[1] != "mtp.":
            prefixes.setdefault(match[1], name)
        module = name[: match.start(3) - 1]
        found.setdefault(module, (int(match[2]), []))[1].append(match[3])
    if not found:
        raise unconvertible("this model", f"tensors named like {layout.attention!r}", "none")
    if len(prefixes) > 1:
        raise unconvertible("this model", "one language model", f"several: {', '.join(prefixes.values())}")
    yield from found.items()


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
            heads = layout.projections[stem](counts)
            roles |= {r for r, starts in (("q", heads.queries), ("k", heads.keys)) if starts}
            _require_projection(name, tensor, heads, kind, config, family, stem)
            width = heads.rows if layout.values is None and stem == "kv_a_proj_with_mqa" else counts.head_dim
            what = kind
        elif role is not None:
            heads, width, what = _norm_heads(name, tensor, role, counts), counts.head_dim, f"norm.{kind}"
        elif layout.stays(leaf):
            continue
        else:
            raise strange(name)
        if tensor.dtype not in FLOATS:
            raise quantised(f"{name!r} has dtype {tensor.dtype}")
        turning = width - spec.turning if spec.rotary_slice == "trailing" else 0
        yield Part(name, module, what, heads, width, turning, spec)
    if roles != {"q", "k"}:
        raise contradiction(module, "queries and keys", f"{' and '.join(sorted(leaves))}")
    if layout.values is not None and f"{layout.values}.weight" not in leaves:
        raise unconvertible(module, "values of their own", "none: the keys are the values too, and cannot be permuted")


def _counts(config: Keys, family: Family, spec: RopeSpec, module: str, checkpoint: Checkpoint) -> Counts:
    queries = next((config.whole(key) for key in family.heads if config.has(key)), None)
    if queries is None:
        raise config_error(family.heads[0], "a whole number", "nothing", "set it as the model was trained")
    inner = Keys(config.part("attn_config"), "attn_config")
    names = ((config, "num_key_value_heads"), (config, "num_kv_heads"), (inner, "kv_n_heads"))
    keys = next((where.whole(key) for where, key in names if where.has(key)), None)
    alone = checkpoint.tensors.get(f"{module}.k_proj.weight")
    if keys is None and alone is not None and alone.shape and alone.shape[0] % spec.head_dim == 0:
        # Files leave out what is the default of a class in transformers; the tensor has it.
        keys = alone.shape[0] // spec.head_dim
    keys = queries if keys is None else keys
    if keys < 1 or queries % keys:
        raise config_error("num_key_value_heads", f"a divisor of {queries} query heads", f"{keys}", "set it")
    return Counts(
        queries,
        keys,
        spec.head_dim,
        latent=config.whole("kv_lora_rank", 0, at_least=0) + spec.turning if family.latent else 0,
        multi_query=config.flag("multi_query", True),
        grouped=config.flag("new_decoder_architecture", False),
    )


def _require_projection(
    name: str, tensor: Stored, heads: Heads, kind: str, config: Keys, family: Family, stem: str
) -> None:
    """The shape that the config gives a projection: a row a feature, a column a feature of the model."""
    wanted: list[int | None] = [heads.rows]
    if kind == "weight":
        names = ("q_lora_rank",) if stem == "q_b_proj" else family.width
        given = next((config.whole(key) for key in names if config.has(key)), None)
        # A file may leave the width out; then any number of columns will do.
        wanted.append(given if given is not None or len(tensor.shape) != 2 else tensor.shape[1])
    if list(tensor.shape) != wanted:
        raise contradiction(name, f"the shape {wanted}, by the config", f"{list(tensor.shape)}")


def _norm_heads(name: str, tensor: Stored, role: str, counts: Counts) -> Heads:
    """A norm with a weight for each feature of a head, or for each feature of every head."""
    heads = counts.queries if role == "q" else counts.keys
    whole = heads * counts.head_dim
    if tensor.shape == (counts.head_dim,):
        starts: tuple[int, ...] = (0,)
    elif tensor.shape in ((whole,), (heads, counts.head_dim)):
        starts = tuple(range(0, whole, counts.head_dim))
    else:
        raise contradiction(name, f"the shape [{counts.head_dim}] or [{whole}], by the config", f"{list(tensor.shape)}")
    rows = starts[-1] + counts.head_dim
    return Heads(rows, starts) if role == "q" else Heads(rows, (), starts)
