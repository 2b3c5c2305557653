"""Which part of a config says how text is rotated, and of which family it is.

That is the language model of a composite model. The family may be one that ropewalk knows, one that is known to have no
RoPE, or a new one; a checkpoint that ropewalk converted has a record of the pairing of its weights.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ropewalk.errors import RopewalkError, require_choice, shown
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
    "refuse_without_rope",
]

# Where composite models keep the config of their language model.
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "text_encoder")
# Keys by which a model that took the name of a family without RoPE says that it rotates after all.
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_dim", "rotary_pct", "rotary_emb_base")
# The key of the record that `ropewalk convert` writes, at the top of a config.json.
KEY = "ropewalk"


@dataclass(frozen=True)
class Record:
    """A conversion: the pairing of the weights, the one that they had, and the one that the model's code rotates in.

    >>> Record("interleaved", "half", "half").as_dict()
    {'pairing': 'interleaved', 'converted_from': 'half', 'model_code': 'half'}
    """

    pairing: Pairing
    converted_from: Pairing
    model_code: Pairing

    def as_dict(self) -> dict[str, str]:
        """The record as it is stored in a config."""
        return {"pairing": self.pairing, "converted_from": self.converted_from, "model_code": self.model_code}


@dataclass(frozen=True)
class LanguageModel:
    """The part of a config that says how text is rotated.

    `data` is that part and `place` the keys that lead to it: () if it is the whole config. `family` is that of the
    model's code, and `known` says whether it is one of FAMILIES. `record` is that of a conversion, if there was one.
    """

    data: dict[str, Any]
    place: tuple[str, ...]
    family: Family
    known: bool
    record: Record | None = None


def language_model(keys: Keys, pairing: str | None) -> LanguageModel:
    """The language model of a config. A family that is not known needs a pairing; one that is must agree with it.

    >>> part = language_model(Keys({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}), None)
    >>> part.place, part.data["model_type"], part.family.pairing
    (('text_config',), 'gemma3_text', 'half')
    """
    caller = keys.caller
    if pairing is not None:
        require_choice(pairing, PAIRINGS, asked=caller.asked_with("pairing", pairing))
    record = read_record(keys)
    if record is not None and pairing not in (None, record.pairing):
        expected = f"{caller.option('pairing', record.pairing)}, to which the weights were converted"
        raise keys.error(f"{KEY}.pairing", expected, caller.option("pairing", pairing), caller.leave_out("pairing"))
    part = _locate(keys)
    family, known = _family(keys, part, pairing if record is None else record.model_code)
    return LanguageModel(part.data, part.place, family, known, record)


def has_known_family(keys: Keys) -> bool:
    """Whether the language model of a config is of a family that ropewalk knows, so that no pairing need be passed.

    >>> has_known_family(Keys({"model_type": "llama"})), has_known_family(Keys({"model_type": "brandnew"}))
    (True, False)
    """
    part = _locate(keys)
    return known_family(part.model_type, tower=part.tower) is not None


@dataclass(frozen=True)
class _Part:
    """The config of a language model or, where there is none, of a tower that sees."""

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
    tower = any(key in keys.data for key in ("patch_size", "spatial_merge_size")) and not keys.has("vocab_size")
    return _Part({key: value for key, value in keys.data.items() if key != KEY}, (), name, tower)


def known_family(model_type: str | None, *, tower: bool = False) -> Family | None:
    """The family of a model_type, None where it is not known. `tower` says that the config is of a tower that sees.

    >>> known_family("llama") == Family(), known_family("brandnew")
    (True, None)
    """
    # A composite model whose config is flat, as it was in transformers 4, is its language model.
    known = FAMILIES.get(model_type or "") or FAMILIES.get(f"{model_type}_text")
    if not tower:
        return known
    # Towers used to carry the name of the model that they see for.
    return FAMILIES.get(f"{model_type}_vision") or (known if known and callable(known.axes) else None)


def _family(keys: Keys, part: _Part, pairing: str | None) -> tuple[Family, bool]:
    """The family, and whether it is known."""
    model_type, tower, caller = part.model_type, part.tower, keys.caller
    known = known_family(model_type, tower=tower)
    if known is None and pairing is None:
        near = difflib.get_close_matches(model_type or "", FAMILIES, n=1)
        raise RopewalkError(
            asked=caller.asked(f"a {'vision ' if tower else ''}config with model_type {model_type!r}"),
            expected=f"a family that ropewalk knows, or {caller.option('pairing')}",
            got="neither: no config says which features form a pair, or whether any do",
            do=(f"did you mean {near[0]!r}? Else " if near else "") + caller.find_pairing,
        )
    if known is None:
        keys.warn(
            "unknown-family",
            f"nothing is known of {model_type!r}: where its config does not say otherwise, whole heads turn, by a base"
            " of 10000, in layers that are alike",
        )
        chosen: Pairing = "half" if pairing == "half" else "interleaved"
        guessed = Family(chosen, axes="chunked", reads_share=True, reads_alpha=True, base_keys=BASE_KEYS, windows=None)
        return guessed, False
    if pairing is not None and known.interleave_key is None and pairing != known.pairing:
        raise RopewalkError(
            asked=f"{caller.asked_with('pairing', pairing)}: a config with model_type {model_type!r}",
            expected=f"{known.pairing!r}, which that family has",
            got=repr(pairing),
            do=caller.leave_out("pairing") + caller.converted_weights,
        )
    return known, True


def read_record(keys: Keys) -> Record | None:
    """The record of a config; None where its weights were not converted.

    >>> read_record(Keys({"model_type": "llama"})) is None
    True
    """
    record = keys.data.get(KEY)
    if record is None:
        return None
    names = ("pairing", "converted_from", "model_code")
    if not isinstance(record, dict) or any(record.get(name) not in PAIRINGS for name in names):
        expected = f"{', '.join(names)}, each {' or '.join(map(repr, PAIRINGS))}"
        raise keys.error(KEY, expected, shown(record), "copy it from the config that ropewalk convert wrote")
    return Record(*(record[name] for name in names))


def refuse_without_rope(data: Mapping[str, Any], caller: Caller) -> None:
    """Raises for a config of a family that is known to have no RoPE, and says what it has instead.

    >>> refuse_without_rope({"model_type": "llama"}, Caller("load_spec"))
    """
    name = data.get("model_type")
    if not isinstance(name, str) or name not in WITHOUT_ROPE or _asks_for_rope(data):
        return
    encoding = WITHOUT_ROPE[name]
    raise RopewalkError(
        asked=caller.asked(f"the rotation of a config with model_type {name!r}"),
        expected="a model that rotates queries and keys (RoPE)",
        got=f"{name}, which has {encoding} and no RoPE",
        do=DRAWN_BY.get(encoding, "nothing: there is no RoPE to look at"),
    )


def _asks_for_rope(data: Mapping[str, Any]) -> bool:
    inner = data.get("attn_config")
    asked = isinstance(inner, dict) and bool(inner.get("rope"))
    kinds = (data.get("position_embedding_type"), data.get("position_embeddings_type"))
    return asked or any(kind in ("rope", "rotary") for kind in kinds) or any(data.get(key) for key in _ROPE_KEYS)
