"""All rules that extend the context of a model, computed for one length: the content of `ropewalk extend`."""

from dataclasses import dataclass

from ropewalk.errors import RopewalkError, require_count
from ropewalk.hub.configs.keys import Caller, ConfigSource
from ropewalk.hub.configs.layers import layer_kinds
from ropewalk.hub.configs.limits import LAYERS
from ropewalk.hub.configs.model import Model, model_for
from ropewalk.hub.extend.config_forms import FIXED, extended_config
from ropewalk.hub.extend.effects import cache_bytes, cache_is_bound, trained_rotations
from ropewalk.hub.extend.offers import Offer, offer_of
from ropewalk.hub.extend.rules import RuleName, Start, extensions, require_rule, start_of
from ropewalk.hub.extend.verdict import Verdict, verdict_of
from ropewalk.spec.rope import Pairing

__all__ = ["LONGEST", "ModelExtension", "check_request", "extend_model", "extension_of"]

# Beyond this, float32 cannot represent every position.
LONGEST = 1 << 24


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
        verdict: Which rule to use. None if only one rule was computed.

    >>> extended = extend_model({"model_type": "llama", "head_dim": 64, "max_position_embeddings": 2048}, 4096)
    >>> [offer.extension.rule for offer in extended.offers if offer.extension.applies][:3], extended.verdict.tuned.rule
    (['pi', 'ntk', 'dynamic'], 'yarn')
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
    verdict: Verdict | None

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
        form = offer.form_like(self.model.config.language.data) or offer.forms[0]
        return extended_config(self.model.config, form)

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
            "verdict": None if self.verdict is None else self.verdict.as_json(),
            "rules": [offer.as_json() for offer in self.offers],
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
        The verdict: which rule to use, and why. For each rule its spec, its effect on the frequencies, its config keys,
        and the flags of vLLM and llama.cpp. The method `config(rule)` returns the complete new config.

    Raises:
        RopewalkError: If `load_spec` would raise, if the model already supports `to` positions, or if `rule` does not
            apply.

    >>> config = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096}
    >>> (offer,) = extend_model(config, 16384, rule="yarn").offers
    >>> offer.extension.spec.frequencies.factor, offer.flags["llama.cpp"].flags
    (4.0, '--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 4096 -c 16384')
    >>> verdict = extend_model(config, 16384).verdict
    >>> verdict.as_it_is.rule, round(verdict.as_it_is.form.set["rope_theta"], 1), verdict.tuned.rule
    ('ntk', 40889.9, 'yarn')
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
    offers = tuple(offer_of(model, start, extension, length) for extension in extensions(start, length, rule, caller))
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
        verdict=verdict_of(model, start, length, offers, _window_of_every_layer(model)) if rule is None else None,
    )


def _window_of_every_layer(model: Model) -> int | None:
    """The window, if every layer has one, otherwise None."""
    part, family = model.config.language.data, model.config.language.family
    # Without the number of layers in the config, any number shows whether the family has layers of other types.
    kinds = model.kinds or layer_kinds({LAYERS[0]: 64, **part}, family) or ()
    return model.window if set(kinds) == {"sliding_attention"} else None
