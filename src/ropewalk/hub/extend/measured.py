"""Published results of the rules that extend a context, with the model, the length and the source."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ropewalk.hub.extend.rules import RuleName

__all__ = ["MEASURED", "Contender", "Measured", "largest_factor", "measured", "standing"]

# "none" is the model without a rule, "new base" a base that is not the one of `base-bound` or `base-law`.
Contender: TypeAlias = RuleName | Literal["none", "new base"]


@dataclass(frozen=True)
class Measured:
    """A published comparison: one model and one test, with the results of one or more rules.

    Attributes:
        tuned: Whether the model was fine-tuned with each rule.
        model: The model, its training and the test.
        metric: What the numbers are, such as "perplexity". "" if the publication has no numbers.
        factors: Per number, the tested length divided by the trained length.
        results: Per rule, its numbers as printed in the publication, separated by commas. "none" is the model without
            a rule.
        source: The publication.
        higher_is_better: Whether a larger number is better.
        families: The model types that the result is about. Empty if it is evidence for models in general.
        trained: The trained length of the family, if the publication states it. The result is about models that were
            trained at this length.
        remark: What else the publication reports.

    >>> results = {"pi": "10.65, 20.49", "dynamic": "10.21, 23.29"}
    >>> table = Measured(False, "Llama 2 7B", "perplexity", (2, 4), results, "2402.13753, table 1")
    >>> table.text("pi"), table.values("pi"), table.margin("dynamic", "pi")
    ('perplexity 10.65, 20.49', (10.65, 20.49), 0)
    """

    tuned: bool
    model: str
    metric: str
    factors: tuple[float, ...]
    results: dict[Contender, str]
    source: str
    higher_is_better: bool = False
    families: tuple[str, ...] = ()
    trained: int | None = None
    remark: str = ""

    def text(self, rule: Contender) -> str:
        """Return the result of `rule` as text."""
        numbers = [f"{self.metric} {self.results[rule]}"] if self.results[rule] else []
        without = self.results.get("none", "")
        numbers += [f"without a rule {without}"] if without else []
        return "; ".join([*numbers, *([self.remark] if self.remark else [])])

    def values(self, rule: Contender) -> tuple[float, ...]:
        """Return the numbers of `rule`."""
        text = self.results[rule]
        return tuple(map(float, text.split(", "))) if text else ()

    def margin(self, rule: Contender, other: Contender) -> int:
        """Return in how many tests beyond the trained length `rule` is better, minus in how many it is worse."""
        better = -1 if not self.higher_is_better else 1
        # A publication may have fewer numbers for the model without a rule.
        pairs = zip(self.factors, self.values(rule), self.values(other), strict=False)
        differences = [better * (mine - theirs) for factor, mine, theirs in pairs if factor > 1]
        return sum(difference > 0 for difference in differences) - sum(difference < 0 for difference in differences)

    def beats(self, rule: Contender, other: Contender) -> bool:
        """Return whether this publication tested both rules, and `rule` was better in more tests."""
        return other in self.results and self.margin(rule, other) > 0


_PI = "Chen et al., 2306.15595"
_YARN = "Peng et al., 2309.00071"
_ABF = "Xiong et al., 2309.16039, table 5"
_SU = "Su, kexue.fm 9708"

MEASURED = (
    Measured(
        False,
        "LLaMA 7B, trained at 2048; PG-19 at 8192 and 16384",
        "perplexity",
        (4, 8),
        {"pi": "16.10, 112.13"},
        f"{_PI}, table 3",
    ),
    Measured(
        False,
        "Llama 2 7B, trained at 4096; PG-19 at 8192 and 16384",
        "perplexity",
        (2, 4),
        {"pi": "10.65, 20.49", "dynamic": "10.21, 23.29", "yarn": "32.64, 87.89"},
        "Ding et al., 2402.13753, table 1",
    ),
    Measured(
        False,
        "Llama 2 13B, trained at 4096; at 4096, 8192 and 16384",
        "loss",
        (1, 2, 4),
        {"ntk": "1.6081, 1.5417, 1.5163", "none": "1.4967, 8.8615"},
        _SU,
    ),
    Measured(
        False,
        "100 M parameters, trained at 512; repeated and other text at 4096",
        "next-token accuracy in %",
        (8, 8),
        {"pi": "15.04, 13.54", "ntk": "51.28, 39.27", "none": "24.17, 23.16"},
        _SU,
        higher_is_better=True,
        remark="49.41 at 512",
    ),
    Measured(
        False,
        "Qwen3, trained at 32768; up to 131072",
        "",
        (4,),
        {"yarn": ""},
        "QwenLM/Qwen3, docs/source/inference/transformers.md, section Enabling Long Context",
        families=("qwen3", "qwen3_moe"),
        trained=32_768,
        remark="validated and recommended by its makers; no figure",
    ),
    Measured(
        False,
        "Qwen2.5, trained at 32768; up to 131072",
        "",
        (4,),
        {"yarn": ""},
        "model cards of Qwen2.5-Instruct, section Processing Long Texts",
        families=("qwen2", "qwen2_moe"),
        trained=32_768,
        remark="recommended by its makers; no figure",
    ),
    Measured(
        True,
        "LLaMA 7B, trained at 2048, tuned 200 steps; PG-19 at 8192 and 16384",
        "perplexity",
        (4, 8),
        {"pi": "7.12, 7.05"},
        f"{_PI}, table 3",
    ),
    Measured(
        True,
        "LLaMA 7B, trained at 2048, tuned 200 steps at 8192; passkey",
        "",
        (4,),
        {"pi": ""},
        f"{_PI}, table 4",
        remark="found up to 8192 tokens back",
    ),
    Measured(
        True,
        "Llama 2 7B, factor 2, tuned at 8192; Proof-pile at 8192 and 10240",
        "perplexity",
        (2, 2.5),
        {"pi": "3.34, 8.07", "ntk": "3.59, 6.24", "yarn": "3.35, 6.04"},
        f"{_YARN}, table 1",
    ),
    Measured(
        True,
        "Llama 2 7B, factor 32; Proof-pile at 131072, and passkey",
        "perplexity",
        (32,),
        {"yarn": "2.37"},
        f"{_YARN}, section 4.3",
        remark="99.4 % found",
    ),
    Measured(
        True,
        "Llama 3.1, 8192 to 131072 in six stages of training",
        "",
        (16,),
        {"llama3": ""},
        "Llama 3, 2407.21783, section 3.4.2",
        remark="the released models; no figure for the rule alone",
    ),
    Measured(
        True,
        "Llama 2 7B, 80 B tokens at 32768; Books, CommonCrawl, Wikipedia",
        "perplexity",
        (8, 8, 8),
        {
            "pi": "6.341, 6.786, 3.775",
            "new base": "6.323, 6.780, 3.771",
            "none": "6.548, 6.816, 3.802",
        },
        _ABF,
        remark="the new base was 500000",
    ),
    Measured(
        True,
        "LLaMA 2 with base 1000000, tuned at 16384; at 131072",
        "perplexity",
        (32,),
        {"base-law": "7.07"},
        "Liu et al., 2310.05209, README of the authors' code",
        remark="76.82 at 262144, beyond the limit of the law, 129027",
    ),
    Measured(
        True,
        "head_dim 128, base 10000 to 5000000, which keeps the score sum non-negative; Long-eval at 15k and 30k",
        "accuracy",
        (3.75, 7.5),
        {"base-bound": "0.33, 0.27"},
        "Men et al., 2405.14591, table 4",
        higher_is_better=True,
        remark="with frequencies whose sum is negative 97 times up to 15k: 0.40, 0.00",
    ),
)


def measured(rule: str, *, tuned: bool) -> list[Measured]:
    """The published results of `rule`, either with fine-tuning or without.

    >>> [figure.text("dynamic") for figure in measured("dynamic", tuned=False)]
    ['perplexity 10.21, 23.29']
    """
    return [figure for figure in MEASURED if rule in figure.results and figure.tuned is tuned]


def standing(rule: RuleName, *, tuned: bool) -> dict[Contender, int]:
    """Compare `rule` with every rule that a publication tested beside it.

    Args:
        rule: The rule.
        tuned: Whether the models were fine-tuned with the rules.

    Returns:
        Per other rule, and for "none": 1 if `rule` was better in more tests, -1 if it was worse in more, otherwise 0.

    >>> standing("ntk", tuned=False)
    {'none': 1, 'pi': 1}
    """
    margins: dict[Contender, int] = {}
    for figure in measured(rule, tuned=tuned):
        for other in figure.results:
            if other != rule:
                margins[other] = margins.get(other, 0) + figure.margin(rule, other)
    return {other: (margin > 0) - (margin < 0) for other, margin in margins.items()}


def largest_factor(figures: list[Measured]) -> float:
    """The largest factor at which one of these results was obtained. 1 without results.

    >>> largest_factor(measured("yarn", tuned=True))
    32
    """
    return max((max(figure.factors) for figure in figures), default=1)
