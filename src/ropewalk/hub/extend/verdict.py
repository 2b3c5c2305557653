"""The verdict on an extension: which rule to use with the model as it is, which with fine-tuning, and why."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.hub.configs.model import Model
from ropewalk.hub.extend.config_forms import Form
from ropewalk.hub.extend.measured import Contender, Measured, largest_factor, measured, standing
from ropewalk.hub.extend.offers import Offer
from ropewalk.hub.extend.rules import RuleName, Start
from ropewalk.hub.extend.stacks import Flags, Stack
from ropewalk.theory.bands import classify, plain_inv_freq

__all__ = ["Recommendation", "Verdict", "verdict_of"]

# Frequencies are computed in float64, so a change by exactly the permitted factor may exceed it in the last places.
_ROUNDING = 1 + 1e-9
# What is worse about a rule that loses a tie, in the order of `_Use._order`.
_TIES = (
    "with a larger change of frequencies",
    "with a score sum that becomes negative",
    "with fewer engines that load it",
)


@dataclass(frozen=True)
class Recommendation:
    """What to do with a model for one use.

    Attributes:
        rule: The rule. None if no rule is needed, or if none can be recommended.
        proven: Whether published results cover this use at this factor, or no rule is needed.
        why: The reasons, in one sentence.
        form: The config keys to set, in the form of the model's own config. None if transformers cannot load the rule.
        flags: The command line flags of other inference engines.
        do: What to do instead of setting config keys, if there are none.
        place: The keys that lead from the root of the config to the language model, to which `form` belongs.

    >>> Recommendation("pi", True, "it was measured", Form("transformers 4", {"rope_theta": 1e6}, ()), {}).rule
    'pi'
    """

    rule: RuleName | None
    proven: bool
    why: str
    form: Form | None
    flags: dict[Stack, Flags]
    do: str = ""
    place: tuple[str, ...] = ()

    @property
    def choice(self) -> str:
        """The rule, or that there is none, and whether it is unproven."""
        if self.rule is None:
            return "no rule is needed" if self.proven else "no rule"
        return self.rule if self.proven else f"{self.rule} (unproven)"

    def setting(self, stack: Stack | None = None) -> str | None:
        """Return the config keys to set, or the flags of `stack`, in one line. None if there are none.

        >>> Recommendation("ntk", True, "", Form("transformers 4", {"rope_theta": 2e4}, ()), {}).setting()
        '"rope_theta": 20000.0'
        """
        if stack is not None and stack in self.flags:
            return self.flags[stack].flags
        if self.form is None:
            return None
        inside = f"in {'.'.join(self.place)}: " if self.place else ""
        removed = f"; remove {', '.join(self.form.drop)}" if self.form.drop else ""
        return f"{inside}{json.dumps(self.form.set)[1:-1]}{removed}"

    def use(self, stack: Stack | None = None) -> str:
        """Return `setting(stack)`, or what to do without one."""
        setting = self.setting(stack)
        if setting is None and stack is not None and stack in self.flags:
            return f"{stack} does not support it: {'; '.join(self.flags[stack].notes)}"
        return setting or self.do

    def as_json(self) -> dict[str, object]:
        """Return the recommendation as JSON-serializable data."""
        return {
            "rule": self.rule,
            "proven": self.proven,
            "why": self.why,
            "config": None if self.form is None else {"set": self.form.set, "drop": list(self.form.drop)},
            "flags": {stack: asdict(flags) for stack, flags in self.flags.items()},
            "do": self.do,
        }


@dataclass(frozen=True)
class Verdict:
    """Which rule to use.

    Attributes:
        as_it_is: For the model without fine-tuning.
        tuned: For a model that is fine-tuned with the rule at the new length.

    >>> from ropewalk.hub.extend.extension import extend_model
    >>> config = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096}
    >>> verdict = extend_model(config, 16384).verdict
    >>> verdict.as_it_is.rule, verdict.tuned.rule
    ('ntk', 'yarn')
    """

    as_it_is: Recommendation
    tuned: Recommendation

    @property
    def by_use(self) -> dict[str, Recommendation]:
        """The two recommendations by the use of the model in words, or one if they are the same."""
        if self.as_it_is == self.tuned:
            return {"with and without fine-tuning": self.tuned}
        return {"without fine-tuning": self.as_it_is, "with fine-tuning": self.tuned}

    def as_json(self) -> dict[str, object]:
        """Return the verdict as JSON-serializable data."""
        return {"as_it_is": self.as_it_is.as_json(), "tuned": self.tuned.as_json()}


def verdict_of(model: Model, start: Start, length: int, offers: Sequence[Offer], window: int | None) -> Verdict:
    """Choose a rule for the model as it is, and a rule for a model that is fine-tuned with it.

    The choice follows from the effects of each rule on the frequencies of this model (`effects.py`) and from published
    results (`measured.py`). No rule is preferred by its name:

    1. *Window.* If every layer attends to a window that is not longer than the trained length, no distance exceeds the
       window, so no angle is new. No rule is needed. (Each score depends on the distance alone: 2104.09864, eq. 16.)
    2. *Already in the config.* If the rule of the config adapts to any length, as dynamic NTK does, nothing has to be
       changed for the model as it is.
    3. *Loadable.* A candidate applies to the model, and transformers, vLLM or llama.cpp can load it.
    4. *Known frequencies.* Weights work with the frequencies that they were trained with. At least, the slowest pair
       has to be slowed by the ratio of the new length to the present one, to stay within its angles. A candidate
       changes no frequency by more than this ratio, in either direction. This applies to a model as it is. The ratio
       excludes the new bases of `base-bound` and `base-law`, which their authors propose for training (2405.14591,
       2310.05209). A model whose config already has a rule (YaRN, Llama 3, PI, LongRoPE) keeps it with a larger
       factor. Another rule would replace the frequencies that the weights are used with, so it is not recommended for
       the model as it is. If the makers propose a rule without tuning, as those of Qwen do, the weights were trained
       without it, and the rule in the config is not counted.
    5. *Published results* of the same kind, with fine-tuning or without. A rule without any result is not a candidate,
       and neither is a rule that is worse than no rule. Results on the family of the model decide, if there are any.
       Otherwise the best rule has the largest number of rules that it is better than, minus the number of rules that
       it is worse than. A rule is better than another if it is better in more tests of the publications that tested
       both. A model that keeps its rule is not compared: `MEASURED` has no comparison for such models.
    6. *Ties.* The smallest largest change of a frequency, then a score sum that is not negative up to the length
       (2405.14591), then the number of engines that can load the rule.

    The recommendation is *proven* if the published results reach the length divided by the trained length. Otherwise
    it is the best guess, and the reason states where the results end.

    Args:
        model: The model.
        start: The starting point of the extension.
        length: The number of positions to extend to.
        offers: Every rule for this model and length.
        window: The window, if every layer has one.

    Returns:
        The verdict.
    """
    if window is not None and window <= start.trained:
        return _only_windows(model, window, length)
    as_it_is, tuned = (_Use(model, start, length, tuned).recommendation(offers) for tuned in (False, True))
    return Verdict(as_it_is, tuned)


def _only_windows(model: Model, window: int, length: int) -> Verdict:
    why = (
        f"every layer attends to the last {window:,} positions only, so no distance exceeds {window:,} and no angle is"
        " new; layers pass on what is farther away"
    )
    language = model.config.language
    longest = next((key for key in language.family.longest if key in language.data), language.family.longest[0])
    form = Form("transformers 5" if language.data.get("rope_parameters") else "transformers 4", {longest: length}, ())
    alike = Recommendation(None, True, why, form, {}, place=language.place)
    return Verdict(alike, alike)


@dataclass(frozen=True)
class _Use:
    """A model, a length, and whether the model will be fine-tuned."""

    model: Model
    start: Start
    length: int
    tuned: bool

    @property
    def part(self) -> dict[str, Any]:
        return self.model.config.language.data

    @property
    def has_rule(self) -> bool:
        """Whether the weights are used with the scaled frequencies of the config.

        Dynamic NTK does not scale any frequency within its reach. Weights do not know a rule that the makers of the
        model propose without tuning.
        """
        start = self.start
        if not start.scaled:
            return False
        kinds = classify(start.spec.inv_freq(start.reach), plain_inv_freq(start.spec))
        proposals = measured(type(start.rule).option or "", tuned=False)
        return not set(kinds) <= {"unchanged", "still"} and not any(map(self._on_family, proposals))

    @property
    def ratio(self) -> float:
        """The new length divided by the trained length, or by the reach of the rule of the config."""
        return self.length / (self.start.reach if self.has_rule else self.start.trained)

    @property
    def factor(self) -> float:
        """The new length divided by the trained length, as in publications."""
        return self.length / self.start.trained

    @property
    def words(self) -> str:
        return "after tuning" if self.tuned else "without tuning"

    def recommendation(self, offers: Sequence[Offer]) -> Recommendation:
        """Steps 2 to 6 of `verdict_of`."""
        has_rule = self.has_rule
        for offer in offers:
            if not self.tuned and not has_rule and offer.extension.spec == self.start.spec:
                why = "the config already has this rule, which adapts to the length of each sequence"
                return Recommendation(offer.extension.rule, True, why, None, offer.flags, "nothing has to be changed")
        loadable = [offer for offer in offers if offer.effect is not None and offer.engines]
        known = [offer for offer in loadable if offer.effect and offer.effect.changed <= self.ratio * _ROUNDING]
        if has_rule:
            kept = [offer for offer in known if self._is_own(offer)]
            if kept:
                return self._with_own_rule(min(kept, key=self._order))
            if not self.tuned:
                return self._without_own_rule()
        rules = [
            offer
            for offer in (loadable if self.tuned else known)
            if self._published(offer) and self._standing(offer)["none"] >= 0
        ]
        if not rules:
            why = f"no engine loads a rule for this model that has published results {self.words}"
            return Recommendation(None, False, why, None, {}, f"stay within {self.start.reach:,} positions")
        of_family = [offer for offer in rules if any(figure.families for figure in self._published(offer))]
        rules = of_family or rules
        best = min(rules, key=lambda offer: (-self._score(offer), *self._order(offer)))
        level = [offer for offer in rules if offer is not best and self._score(offer) == self._score(best)]
        return self._with_published(best, level, replaces=has_rule)

    def _is_own(self, offer: Offer) -> bool:
        spec = offer.extension.spec
        return spec is not None and type(spec.frequencies) is type(self.start.rule)

    def _published(self, offer: Offer) -> list[Measured]:
        """The published results of a rule: those on the family of the model, or else those on models in general."""
        figures = measured(offer.extension.rule, tuned=self.tuned)
        of_family = [figure for figure in figures if self._on_family(figure)]
        return of_family or [figure for figure in figures if not figure.families]

    def _on_family(self, figure: Measured) -> bool:
        trained = figure.trained in (None, self.start.trained)
        return self.part.get("model_type") in figure.families and trained

    def _standing(self, offer: Offer) -> dict[Contender, int]:
        return {"none": 0, **standing(offer.extension.rule, tuned=self.tuned)}

    def _score(self, offer: Offer) -> int:
        return sum(sign for other, sign in self._standing(offer).items() if other != "none")

    def _order(self, offer: Offer) -> tuple[float, bool, int]:
        effect = offer.effect
        if effect is None:
            return math.inf, True, 0
        # Changes that differ only by rounding are equal.
        return round(effect.changed, 6), effect.negative is not None, -offer.engines

    def _made(self, offer: Offer, *, proven: bool, reasons: list[str]) -> Recommendation:
        form = offer.form_like(self.part)
        do = "" if form else f"{offer.no_keys}"
        place = self.model.config.language.place
        return Recommendation(offer.extension.rule, proven, "; ".join(reasons), form, offer.flags, do, place)

    def _with_own_rule(self, offer: Offer) -> Recommendation:
        reasons = [
            f"the config already has {self.start.rule.label}; this changes no frequency by more than"
            f" {self.ratio:.3g} ×, the ratio of the lengths"
        ]
        if self.tuned:
            proven = self._is_proven(self._published(offer), reasons)
        else:
            proven = False
            reasons.append("no published result on extending such a model without tuning: measure retrieval first")
        return self._made(offer, proven=proven, reasons=[*reasons, *self._new_angles(offer)])

    def _without_own_rule(self) -> Recommendation:
        why = (
            f"the config already has {self.start.rule.label}, which no engine loads with another factor for this model;"
            " any other rule replaces the frequencies that the weights are used with"
        )
        return Recommendation(None, False, why, None, {}, f"stay within {self.start.reach:,} positions")

    def _with_published(self, offer: Offer, level: list[Offer], *, replaces: bool) -> Recommendation:
        figures = self._published(offer)
        reasons = [self._evidence(offer, figures), *self._ties(offer, level)]
        proven = self._is_proven(figures, reasons)
        reasons += self._new_angles(offer)
        if replaces:
            reasons.append(f"it replaces {self.start.rule.label}, so the tuning has to be long")
        return self._made(offer, proven=proven, reasons=reasons)

    def _is_proven(self, figures: list[Measured], reasons: list[str]) -> bool:
        """Whether published results reach the factor. If not, a reason is added that states where they end."""
        reach = largest_factor(figures)
        if self.factor <= reach * _ROUNDING:
            return True
        end = f"published results {self.words} end at {reach:g} ×" if figures else f"no published result {self.words}"
        reasons.append(f"{end}, and this is {self.factor:.3g} × the trained length: measure retrieval first")
        return False

    def _new_angles(self, offer: Offer) -> list[str]:
        effect = offer.effect
        if self.tuned or effect is None or effect.seen is None or effect.seen * _ROUNDING >= self.length:
            return []
        return [f"beyond {effect.seen:,.0f} positions, some angles did not occur in training"]

    def _ties(self, best: Offer, level: list[Offer]) -> list[str]:
        """Why `best` is preferred to rules that published results place on the same level."""
        names: dict[str, list[str]] = {}
        for offer in level:
            for mine, theirs, reason in zip(self._order(best), self._order(offer), _TIES, strict=True):
                if mine != theirs:
                    names.setdefault(reason, []).append(offer.extension.rule)
                    break
        return [f"on the same level, but {reason}: {' and '.join(rules)}" for reason, rules in names.items()]

    def _evidence(self, offer: Offer, figures: list[Measured]) -> str:
        """What publications report on a rule, with the sources."""
        if figures[0].families:
            return f"{figures[0].model}: {figures[0].remark} [{figures[0].source}]"
        worse: list[Contender] = [other for other, sign in self._standing(offer).items() if sign > 0]
        if not worse:
            sources = "; ".join(dict.fromkeys(figure.source for figure in figures))
            return f"{self.words}, no rule that engines load for this model has better published results [{sources}]"
        rule = offer.extension.rule
        sources = [figure.source for figure in figures for other in worse if figure.beats(rule, other)]
        beaten = " and ".join("no rule" if other == "none" else other for other in worse)
        return f"{self.words}, better than {beaten} in published tests [{'; '.join(dict.fromkeys(sources))}]"
