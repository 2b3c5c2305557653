"""Finds the language model in a config, and its family.

In a composite model, such as one with a vision tower, the language model is a part of the config. Its family is known
to ropewalk, known to have no RoPE, or unknown. A checkpoint converted by ropewalk contains a record of the pairing of
its weights.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ropewalk.errors import RopewalkError, as_int, require_choice, shown
from ropewalk.hub.configs.keys import Caller, Keys
from ropewalk.hub.configs.params import from_params, is_params
from ropewalk.hub.families.family import BASE_KEYS, Family
from ropewalk.hub.families.table import DRAWN_BY, FAMILIES, WITHOUT_ROPE
from ropewalk.spec.rope import PAIRINGS, Pairing

__all__ = [
    "KEY",
    "LanguageModel",
    "Record",
    "has_known_family",
    "known_family",
    "language_model",
    "read_record",
    "require_rope",
]

# Keys under which composite models store the config of their language model.
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "text_encoder")
# Keys of vision towers. Language models do not have them.
_OF_TOWERS = ("patch_size", "spatial_merge_size")
# Keys that mean RoPE even if the model_type is that of a family without RoPE.
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_dim", "rotary_pct", "rotary_emb_base")
# The key of the record that `ropewalk convert` writes at the top level of a config.json.
KEY = "ropewalk"


@dataclass(frozen=True)
class Record:
    """A conversion of a checkpoint from one pairing to the other.

    Attributes:
        pairing: The pairing of the weights now.
        converted_from: The pairing of the weights before the conversion.
        model_code: The pairing that the code of the model uses.

    >>> Record("interleaved", "half", "half").as_dict()
    {'pairing': 'interleaved', 'converted_from': 'half', 'model_code': 'half'}
    """

    pairing: Pairing
    converted_from: Pairing
    model_code: Pairing

    def as_dict(self) -> dict[str, str]:
        """Return the record as stored in a config."""
        return {"pairing": self.pairing, "converted_from": self.converted_from, "model_code": self.model_code}


@dataclass(frozen=True)
class LanguageModel:
    """The language model of a config.

    Attributes:
        data: Its part of the config.
        place: The keys that lead to this part; () if it is the whole config.
        family: The family of the model code.
        known: Whether the family is in FAMILIES.
        record: The record of a conversion. None if the checkpoint was not converted.
    """

    data: dict[str, Any]
    place: tuple[str, ...]
    family: Family
    known: bool
    record: Record | None = None


def language_model(keys: Keys, pairing: str | None) -> LanguageModel:
    """Find the language model of a config.

    Args:
        keys: The whole config.
        pairing: The pairing passed by the caller. Required for an unknown family. For a known one it must agree.

    Returns:
        The language model.

    Raises:
        RopewalkError: If the family is unknown and `pairing` is None, or if `pairing` contradicts the config.

    >>> part = language_model(Keys({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}), None)
    >>> part.place, part.data["model_type"], part.family.pairing
    (('text_config',), 'gemma3_text', 'half')
    """
    caller = keys.caller
    if pairing is not None:
        require_choice(pairing, PAIRINGS, asked=caller.asked_with("pairing", pairing))
    record = read_record(keys)
    if record is not None and pairing not in (None, record.pairing):
        expected = f"{caller.option('pairing', record.pairing)}, the pairing that the weights were converted to"
        raise keys.error(f"{KEY}.pairing", expected, caller.option("pairing", pairing), caller.leave_out("pairing"))
    part = _locate(keys)
    family, known = _family(keys, part, pairing if record is None else record.model_code)
    return LanguageModel(part.data, part.place, family, known, record)


def has_known_family(keys: Keys) -> bool:
    """Return whether the family of a config is known, so that no pairing is needed.

    >>> has_known_family(Keys({"model_type": "llama"})), has_known_family(Keys({"model_type": "brandnew"}))
    (True, False)
    """
    part = _locate(keys)
    return known_family(part.model_type, tower=part.tower) is not None


@dataclass(frozen=True)
class _Part:
    """The config of a language model, or of a vision tower if there is no language model."""

    data: dict[str, Any]
    place: tuple[str, ...]
    model_type: str | None
    tower: bool = False


def _locate(keys: Keys) -> _Part:
    name = keys.text("model_type")
    if name is None and is_params(keys):
        data, family = from_params(keys)
        return _Part(data, (), family)
    part = next((part for part in _PARTS if isinstance(keys.data.get(part), dict)), None)
    rotates = any(keys.has(key) for key in ("rope_parameters", "rope_scaling", "rope_theta"))
    if part is not None and not (rotates and keys.has("hidden_size")):
        inner = keys.data[part]
        if inner.get("model_type") is None and name is not None:
            inner = {**inner, "model_type": f"{name}_text"}
        located = _locate(keys.of(inner, ""))
        return replace(located, place=(part, *located.place))
    tower = any(key in keys.data for key in _OF_TOWERS) and not keys.has("vocab_size")
    return _Part({key: value for key, value in keys.data.items() if key != KEY}, (), name, tower)


def known_family(model_type: str | None, *, tower: bool = False) -> Family | None:
    """Return the family of a model_type, or None if it is unknown. `tower` means that the config is a vision tower's.

    >>> known_family("llama") == Family(), known_family("brandnew")
    (True, None)
    """
    # In transformers 4 some composite models had a flat config. It describes the language model.
    known = FAMILIES.get(model_type or "") or FAMILIES.get(f"{model_type}_text")
    if not tower:
        return known
    # Older configs of vision towers have the model_type of the whole model.
    return FAMILIES.get(f"{model_type}_vision") or (known if known and callable(known.axes) else None)


def _family(keys: Keys, part: _Part, pairing: str | None) -> tuple[Family, bool]:
    """Return the family, and whether it is known."""
    model_type, tower, caller = part.model_type, part.tower, keys.caller
    known = _family_of_the_lab(keys) if model_type == "ropewalk_lab" else known_family(model_type, tower=tower)
    if known is None and tower and model_type is None:
        # Not even with a pairing: towers differ in which key is the width of their heads.
        raise RopewalkError(
            asked=caller.asked("a vision config without model_type"),
            expected="the model_type of the model that the vision tower belongs to",
            got=f"no model_type, and {' and '.join(key for key in _OF_TOWERS if key in part.data)}",
            do='add the model_type of the whole config: {"model_type": "qwen2_vl", ...}',
        )
    if known is None and _has_axes(model_type, part.data):
        raise RopewalkError(
            asked=caller.asked(f"a config with model_type {model_type!r}"),
            expected="axes whose pairs are known",
            got="positions on several axes, in an order that no RopeSpec has or that ropewalk does not know",
            do="look at the code of the model; if each axis has its own block of the head, use one RopeSpec per axis,"
            " with rotary_dim and rotary_slice",
        )
    if known is None and pairing is None:
        near = difflib.get_close_matches(model_type or "", FAMILIES, n=1)
        raise RopewalkError(
            asked=caller.asked(f"a {'vision ' if tower else ''}config with model_type {model_type!r}"),
            expected=f"a model_type that ropewalk knows, or {caller.option('pairing')}",
            got="an unknown model_type and no pairing; configs do not specify which features form a pair",
            do=(f"did you mean {near[0]!r}? Otherwise " if near else "") + caller.find_pairing,
        )
    if known is None:
        _require_one_width(keys, part.data)
        keys.warn(
            "unknown-family",
            f"model_type {model_type!r} is unknown. Unless its config specifies otherwise, all features of a head are"
            " rotated, the base is 10000, and all layers have the same rotation",
        )
        checked: Pairing = "half" if pairing == "half" else "interleaved"
        assumed = Family(checked, axes="chunked", reads_share=True, reads_alpha=True, base_keys=BASE_KEYS, windows=None)
        return assumed, False
    if pairing is not None and known.interleave_key is None and pairing != known.pairing:
        raise RopewalkError(
            asked=f"{caller.asked_with('pairing', pairing)}: a config with model_type {model_type!r}",
            expected=f"{known.pairing!r}, the pairing of this family",
            got=repr(pairing),
            do=caller.leave_out("pairing") + caller.converted_weights,
        )
    return known, True


def _family_of_the_lab(keys: Keys) -> Family:
    """Return the family of a model that `ropewalk lab` trained, whose config has the options of its run."""
    run = keys.part("ropewalk_lab")
    name, *options = str(run.get("encoding")).split() or [""]
    chosen: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        chosen[key] = value
    pairing = chosen.get("pairing", "interleaved")
    plain = name == "rope" and chosen.keys() <= {"base", "pairing"} and pairing in ("half", "interleaved")
    if not plain or run.get("attention") != "softmax" or run.get("qk_norm") is not False:
        norms = ", with QK-norm" if run.get("qk_norm") else ""
        raise RopewalkError(
            asked=keys.caller.asked("a model that ropewalk lab trained"),
            expected="softmax attention without QK-norm, and the encoding 'rope' without options but base and pairing",
            got=f"{run.get('attention')} attention{norms}, and the encoding {run.get('encoding')!r}",
            do="build its encoding with rw.encoding, or train such a model",
        )
    return Family("half" if pairing == "half" else "interleaved")


def _has_axes(model_type: str | None, data: Mapping[str, Any]) -> bool:
    """Whether an unknown family rotates by several positions, of which its config does not specify the order."""
    parameters = data.get("rope_parameters")
    axial = isinstance(parameters, dict) and parameters.get("rope_type") == "axial"
    # Its two axes have a block of the head each, in halves: a RopeSpec has one block.
    return axial or model_type == "gemma4_vision"


def _require_one_width(keys: Keys, data: Mapping[str, Any]) -> None:
    """Raise if an unknown family has several widths, of which only its code shows which one the heads share."""
    family = Family()
    widths = {key: number for key in family.width if (number := as_int(data.get(key))) is not None}
    first = next(iter(widths.values()), None)
    other = next((key for key, number in widths.items() if number != first), None)
    if other is not None and not any(data.get(key) is not None for key in family.head_dim):
        raise keys.error(
            other,
            "one width, or head_dim, in a config with an unknown model_type",
            ", ".join(f"{key} = {number}" for key, number in widths.items()),
            "set head_dim to the width of one head",
        )


def read_record(keys: Keys) -> Record | None:
    """Return the record of a conversion, or None if the weights were not converted.

    Raises:
        RopewalkError: If the record is invalid.

    >>> read_record(Keys({"model_type": "llama"})) is None
    True
    """
    record = keys.data.get(KEY)
    if record is None:
        return None
    names = ("pairing", "converted_from", "model_code")
    if not isinstance(record, dict) or any(record.get(name) not in PAIRINGS for name in names):
        expected = f"an object with {', '.join(names)}, each {' or '.join(map(repr, PAIRINGS))}"
        raise keys.error(KEY, expected, shown(record), "copy it from the config that ropewalk convert wrote")
    return Record(*(record[name] for name in names))


def require_rope(data: Mapping[str, Any], caller: Caller) -> None:
    """Raise if the family of a config is known to have no RoPE. The error names the encoding that it has instead.

    >>> require_rope({"model_type": "llama"}, Caller("load_spec"))
    """
    name = data.get("model_type")
    if not isinstance(name, str) or name not in WITHOUT_ROPE or _has_rope_keys(data):
        return
    encoding = WITHOUT_ROPE[name]
    raise RopewalkError(
        asked=caller.asked(f"the RoPE of a config with model_type {name!r}"),
        expected="a model that rotates queries and keys (RoPE)",
        got=f"{name}, which has {encoding} and no RoPE",
        do=DRAWN_BY.get(encoding, "use a model with RoPE"),
    )


def _has_rope_keys(data: Mapping[str, Any]) -> bool:
    attention = data.get("attn_config")
    flag = isinstance(attention, dict) and bool(attention.get("rope"))
    kinds = (data.get("position_embedding_type"), data.get("position_embeddings_type"))
    return flag or any(kind in ("rope", "rotary") for kind in kinds) or any(data.get(key) for key in _ROPE_KEYS)
