"""What `ropewalk extend` knows of a model and a length, before it is shown or written."""

from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.language import language_model
from ropewalk.hub.configs.model import Model
from ropewalk.hub.configs.read import read_config
from ropewalk.hub.extend.cache_size import cache_bytes, cache_is_bound
from ropewalk.hub.extend.config import Form, forms_of, path_of
from ropewalk.hub.extend.effect import Effect, effect_of, trained_turns
from ropewalk.hub.extend.measured import measured
from ropewalk.hub.extend.rules import Extension, Start, extensions, start_of
from ropewalk.hub.extend.stacks import STACKS, Flags, flags_for
from ropewalk.tools.command_config import read_named_config

__all__ = ["LONGEST", "Facts", "Offer", "facts_of"]

# Positions beyond it are told apart by no model's float32 ids.
LONGEST = 1 << 24


@dataclass(frozen=True)
class Offer:
    """A rule for this model: its spec and effect, the keys of a config that say it, the flags of other stacks.

    `effect` is None where the rule does not apply; `no_keys` says why transformers cannot load it.
    """

    extension: Extension
    effect: Effect | None
    forms: tuple[Form, ...]
    no_keys: str | None
    flags: dict[str, Flags]


@dataclass(frozen=True)
class Facts:
    """A model, a length, and the rules between them.

    `data` is its config and `part` that of its language model; `window` is one that layers of the extended kind have,
    `windowed` says how many of how many do, None where that is not known; `cache_is_bound` says that `cache` is only
    the most that it can be.
    """

    data: dict[str, Any]
    part: dict[str, Any]
    model: Model
    start: Start
    length: int
    turns: float
    window: int | None
    windowed: tuple[int, int] | None
    cache: int | None
    cache_is_bound: bool
    offers: tuple[Offer, ...]

    @property
    def has_old_keys(self) -> bool:
        """Whether the config is in the form of transformers 4, in which no rope_parameters stand."""
        return not self.part.get("rope_parameters")

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON holds it."""
        start = self.start
        return {
            "model": self.model.name,
            "model_type": self.model.model_type,
            "length": self.length,
            "trained_length": start.trained,
            "configured_length": start.configured,
            "factor": self.length / start.trained,
            "base": start.base,
            "already_scaled": start.spec.frequencies.to_dict() if start.scaled else None,
            "layer": start.layer,
            "layers_left": dict(start.left),
            "trained_length_of_config": self.model.lengths.trained,
            "sliding_window": self.window,
            "layers_with_window": None if self.windowed is None else self.windowed[0],
            "turns_of_slowest_pair_in_training": self.turns,
            "kv_cache_bytes": self.cache,
            "kv_cache_is_at_most": self.cache_is_bound,
            "warnings": [{"name": name, "text": text} for name, text in self.model.warnings],
            "rules": [_offer(offer) for offer in self.offers],
        }


def _offer(offer: Offer) -> dict[str, Any]:
    extension = offer.extension
    return {
        "rule": extension.rule,
        "does": extension.does,
        "applies": extension.applies,
        "why_not": extension.why_not,
        "frequencies": None if extension.spec is None else extension.spec.frequencies.to_dict(),
        "new_base": extension.base,
        "notes": list(extension.notes),
        "effect": None if offer.effect is None else asdict(offer.effect),
        "measured": [asdict(one) for tuned in (False, True) for one in measured(extension.rule, tuned=tuned)],
        "config": {form.name: {"set": form.set, "drop": list(form.drop)} for form in offer.forms},
        "no_config": offer.no_keys,
        "flags": {stack: asdict(flags) for stack, flags in offer.flags.items()},
    }


def facts_of(
    config: str,
    length: int,
    *,
    asked: str,
    rule: str | None = None,
    trained: int | None = None,
    pairing: str | None = None,
) -> Facts:
    """Reads a config and works out every rule, or the one named, for `length` positions. `asked` is the command."""
    model = read_named_config(config, pairing, asked)
    try:
        return _facts(read_config(config), model, length, rule, trained, pairing)
    except RopewalkError as error:
        where = f"{asked}: {error.asked}"
        raise RopewalkError(asked=where, expected=error.expected, got=error.got, do=error.do) from None


def _facts(
    data: dict[str, Any], model: Model, length: int, rule: str | None, trained: int | None, pairing: str | None
) -> Facts:
    part, _ = language_model(data, pairing)
    start = start_of(model, part, trained)
    path = path_of(data, part)
    offers: list[Offer] = []
    for extension in extensions(start, length, rule):
        forms, no_keys = _forms(data, start, extension, length, pairing)
        effect = None if extension.spec is None else effect_of(start, extension.spec, length, extension.base)
        new = next((form for form in forms if form.name == "transformers 5"), None)
        kind = f"{model.model_type}"
        flags = {
            stack: flags_for(stack, start, extension, length, form=new, path=path, model_type=kind) for stack in STACKS
        }
        offers.append(Offer(extension, effect, forms, no_keys, flags))
    # Where layers with a window are a kind of their own, they are left as they are.
    window = None if start.left else model.window
    windowed = None if model.kinds is None else (model.kinds.count("sliding_attention"), len(model.kinds))
    seen = window is not None and window < length and (windowed is None or windowed[0] > 0)
    return Facts(
        data=data,
        part=part,
        model=model,
        start=start,
        length=length,
        turns=trained_turns(start),
        window=window if seen else None,
        windowed=windowed if seen else None,
        cache=cache_bytes(part, start.spec.head_dim, length),
        cache_is_bound=cache_is_bound(part),
        offers=tuple(offers),
    )


def _forms(
    data: dict[str, Any], start: Start, extension: Extension, length: int, pairing: str | None
) -> tuple[tuple[Form, ...], str | None]:
    if extension.spec is None:
        return (), extension.why_not
    try:
        return tuple(forms_of(data, start, extension.spec, length, pairing)), None
    except RopewalkError as error:
        return (), f"transformers cannot load it; it wants {error.expected}"
