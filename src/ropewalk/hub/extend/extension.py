"""All rules that extend the context of a model, computed for one length: the content of `ropewalk extend`."""

from dataclasses import asdict, dataclass

from ropewalk.errors import RopewalkError, require_count
from ropewalk.hub.configs.keys import Caller, ConfigSource
from ropewalk.hub.configs.model import Model, model_for
from ropewalk.hub.extend.config_forms import FIXED, Form, extended_config, forms_of
from ropewalk.hub.extend.effects import Effect, cache_bytes, cache_is_bound, effect_of, trained_rotations
from ropewalk.hub.extend.measured import measured
from ropewalk.hub.extend.rules import Extension, RuleName, Start, extensions, require_rule, start_of
from ropewalk.hub.extend.stacks import STACKS, Flags, Stack, flags_for
from ropewalk.spec.rope import Pairing

__all__ = ["LONGEST", "ModelExtension", "Offer", "check_request", "extend_model", "extension_of"]

# Beyond this, float32 cannot represent every position.
LONGEST = 1 << 24


@dataclass(frozen=True)
class Offer:
    """One rule for one model.

    Attributes:
        extension: The rule and its spec.
        effect: The effect on the frequencies. None if the rule does not apply.
        forms: The config keys of the rule, per version of transformers.
        no_keys: Why transformers cannot load the rule. None if it can.
        flags: The command line flags of other inference engines.
    """

    extension: Extension
    effect: Effect | None
    forms: tuple[Form, ...]
    no_keys: str | None
    flags: dict[Stack, Flags]


@dataclass(frozen=True)
class ModelExtension:
    """All rules for one model and one length.

    Attributes:
        model: The model.
        start: The starting point: the layers to extend, their base and trained length.
        length: The number of positions to extend to.
        rotations: The number of full rotations of the slowest pair within the trained length.
        window: The sliding window of layers of the extended type, if there is one.
        windowed: The number of layers with the window and the number of all layers. None if unknown.
        cache: The bytes of the keys and values of one sequence in bfloat16. None if unknown.
        cache_is_bound: Whether `cache` is an upper bound.
        offers: The rules, in display order.

    >>> extended = extend_model({"model_type": "llama", "head_dim": 64, "max_position_embeddings": 2048}, 4096)
    >>> [offer.extension.rule for offer in extended.offers if offer.extension.applies][:3]
    ['pi', 'ntk', 'dynamic']
    """

    model: Model
    start: Start
    length: int
    rotations: float
    window: int | None
    windowed: tuple[int, int] | None
    cache: int | None
    cache_is_bound: bool
    offers: tuple[Offer, ...]

    def config(self, rule: RuleName) -> dict[str, object]:
        """Return the complete config of the extended model, with keys of the same transformers version as the original.

        Args:
            rule: The rule.

        Returns:
            The config as a dict.

        Raises:
            RopewalkError: If transformers cannot load the rule for this model.

        >>> config = {"model_type": "llama", "head_dim": 64, "max_position_embeddings": 2048, "vocab_size": 9}
        >>> extend_model(config, 4096, rule="pi").config("pi")["rope_scaling"]
        {'rope_type': 'linear', 'factor': 2.0}
        """
        caller = self.model.config.caller
        offer = next((offer for offer in self.offers if offer.extension.rule == require_rule(rule, caller)), None)
        if offer is None or offer.no_keys is not None:
            raise RopewalkError(
                asked=caller.asked(f"a config with the rule {rule}"),
                expected="a rule that transformers loads for this model",
                got=f"{rule}: {'this rule was not computed' if offer is None else offer.no_keys}",
                do="use a model whose code reads its config"
                if self.model.config.language.data.get("model_type") in FIXED
                else f"{caller.leave_out('rule')} to see the keys of every rule that transformers can load",
            )
        old = [form for form in offer.forms if form.name == "transformers 4"]
        has_old_keys = not self.model.config.language.data.get("rope_parameters")
        return extended_config(self.model.config, old[0] if old and has_old_keys else offer.forms[0])

    def as_json(self) -> dict[str, object]:
        """Return the extension as JSON-serializable data."""
        start = self.start
        return {
            "model": self.model.name,
            "model_type": self.model.model_type,
            "length": self.length,
            "trained_length": start.trained,
            "configured_length": start.configured,
            "factor": self.length / start.trained,
            "base": start.base,
            "already_scaled": start.rule.to_dict() if start.scaled else None,
            "layer": start.layer,
            "layers_left": dict(start.left),
            "trained_length_of_config": self.model.lengths.trained,
            "sliding_window": self.window,
            "layers_with_window": None if self.windowed is None else self.windowed[0],
            "rotations_of_slowest_pair_in_training": self.rotations,
            "kv_cache_bytes": self.cache,
            "kv_cache_is_at_most": self.cache_is_bound,
            "warnings": [{"name": name, "text": text} for name, text in self.model.warnings],
            "rules": [_offer_json(offer) for offer in self.offers],
        }


def extend_model(
    config: ConfigSource,
    to: int,
    *,
    rule: RuleName | None = None,
    trained: int | None = None,
    pairing: Pairing | None = None,
) -> ModelExtension:
    """Apply the rules that extend the context of a model: the content of `ropewalk extend`.

    Args:
        config: A path, a dict or a config object, as for `load_spec`.
        to: The number of positions to extend to.
        rule: The only rule to apply. Default: all rules.
        trained: The trained length, if the config lacks it or is wrong.
        pairing: The pairing, if the model family is unknown.

    Returns:
        For each rule its spec, its effect on the frequencies, its config keys, and the flags of vLLM and llama.cpp.
        The method `config(rule)` returns the complete new config.

    Raises:
        RopewalkError: If `load_spec` would raise, if the model already supports `to` positions, or if `rule` does not
            apply.

    >>> config = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096}
    >>> (offer,) = extend_model(config, 16384, rule="yarn").offers
    >>> offer.extension.spec.frequencies.factor, offer.flags["llama.cpp"].flags
    (4.0, '--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 4096 -c 16384')
    """
    caller = Caller("extend_model")
    checked_rule = check_request(caller, to, rule, trained)
    return extension_of(model_for(caller, config, pairing), to, rule=checked_rule, trained=trained)


def check_request(caller: Caller, to: int, rule: str | None, trained: int | None) -> RuleName | None:
    """Check the arguments before a config is read. Return `rule`. Raise `RopewalkError` if one is invalid."""
    checked_rule = None if rule is None else require_rule(rule, caller)
    asked = caller.asked(f"an extension to {to} positions")
    require_count(to, asked=asked, do="specify the number of positions to extend to", at_least=2)
    if trained is not None:
        asked_trained = caller.asked_with("trained", trained)
        require_count(trained, asked=asked_trained, do="specify the trained length", at_least=2)
    if to > LONGEST:
        raise RopewalkError(
            asked=asked, expected=f"at most {LONGEST} positions", got=f"{to}", do="specify a smaller length"
        )
    return checked_rule


def extension_of(
    model: Model, length: int, *, rule: RuleName | None = None, trained: int | None = None
) -> ModelExtension:
    """Apply every rule, or only `rule`, to a model. Raise `RopewalkError` if `rule` does not apply."""
    caller, language = model.config.caller, model.config.language
    start = start_of(model, trained)
    offers = tuple(_offer(model, start, extension, length) for extension in extensions(start, length, rule, caller))
    if rule is not None and not offers[0].extension.applies:
        raise RopewalkError(
            asked=caller.asked_with("rule", rule),
            expected="a rule that applies to this model",
            got=f"{rule}: {offers[0].extension.why_not}",
            do=f"{caller.leave_out('rule')} to see the rules that do",
        )
    # If layers with a window are a separate type, they are not extended.
    window = None if start.left else model.window
    windowed = None if model.kinds is None else (model.kinds.count("sliding_attention"), len(model.kinds))
    limits = window is not None and window < length and (windowed is None or windowed[0] > 0)
    return ModelExtension(
        model=model,
        start=start,
        length=length,
        rotations=trained_rotations(start),
        window=window if limits else None,
        windowed=windowed if limits else None,
        cache=cache_bytes(language.data, language.family, start.spec.head_dim, length),
        cache_is_bound=cache_is_bound(language.data, language.family),
        offers=offers,
    )


def _offer(model: Model, start: Start, extension: Extension, length: int) -> Offer:
    forms: tuple[Form, ...] = ()
    no_keys, effect = extension.why_not, None
    if extension.spec is not None:
        effect = effect_of(start, extension.spec, length, extension.base)
        try:
            forms = tuple(forms_of(model.config, start, extension.spec, length))
        except RopewalkError as error:
            no_keys = f"transformers cannot load it; it requires {error.expected}"
    newest = next((form for form in forms if form.name == "transformers 5"), None)
    place, model_type = model.config.language.place, f"{model.model_type}"
    flags: dict[Stack, Flags] = {
        stack: flags_for(stack, start, extension, length, form=newest, place=place, model_type=model_type)
        for stack in STACKS
    }
    return Offer(extension, effect, forms, no_keys, flags)


def _offer_json(offer: Offer) -> dict[str, object]:
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
        "measured": [asdict(figure) for tuned in (False, True) for figure in measured(extension.rule, tuned=tuned)],
        "config": {form.name: {"set": form.set, "drop": list(form.drop)} for form in offer.forms},
        "no_config": offer.no_keys,
        "flags": {stack: asdict(flags) for stack, flags in offer.flags.items()},
    }
