"""One rule for one model and one length: its spec, its effect, its config keys and the flags of other engines."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.model import Model
from ropewalk.hub.extend.config_forms import Form, forms_of
from ropewalk.hub.extend.effects import Effect, effect_of
from ropewalk.hub.extend.measured import measured
from ropewalk.hub.extend.rules import Extension, Start
from ropewalk.hub.extend.stacks import STACKS, Flags, Stack, flags_for

__all__ = ["Offer", "offer_of"]


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

    @property
    def engines(self) -> int:
        """The number of engines that can load the rule: transformers, vLLM and llama.cpp."""
        return any("with" not in form.name for form in self.forms) + sum(
            flags.flags is not None for flags in self.flags.values()
        )

    def form_like(self, part: Mapping[str, object]) -> Form | None:
        """Return the config keys for the version of transformers that wrote `part`, or None without any keys."""
        old = [form for form in self.forms if form.name == "transformers 4"]
        return old[0] if old and not part.get("rope_parameters") else next(iter(self.forms), None)

    def as_json(self) -> dict[str, object]:
        """Return the offer as JSON-serializable data."""
        extension = self.extension
        rule = extension.rule
        return {
            "rule": rule,
            "does": extension.does,
            "applies": extension.applies,
            "why_not": extension.why_not,
            "frequencies": None if extension.spec is None else extension.spec.frequencies.to_dict(),
            "new_base": extension.base,
            "notes": list(extension.notes),
            "effect": None if self.effect is None else asdict(self.effect),
            "measured": [
                {"tuned": tuned, "model": figure.model, "result": figure.text(rule), "source": figure.source}
                for tuned in (False, True)
                for figure in measured(rule, tuned=tuned)
            ],
            "config": {form.name: {"set": form.set, "drop": list(form.drop)} for form in self.forms},
            "no_config": self.no_keys,
            "flags": {stack: asdict(flags) for stack, flags in self.flags.items()},
        }


def offer_of(model: Model, start: Start, extension: Extension, length: int) -> Offer:
    """Return an extension with its effect, its config keys and the flags of other engines.

    >>> from ropewalk.hub.configs.model import read_model
    >>> from ropewalk.hub.extend.rules import extensions, start_of
    >>> model = read_model({"model_type": "llama", "head_dim": 64, "max_position_embeddings": 2048})
    >>> (yarn,) = extensions(start_of(model), 4096, "yarn")
    >>> offer_of(model, start_of(model), yarn, 4096).engines
    3
    """
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
