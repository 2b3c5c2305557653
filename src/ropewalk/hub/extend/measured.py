"""Published measurements of the rules that extend a context, with the model, the length and the source."""

from dataclasses import dataclass

from ropewalk.hub.extend.rules import RuleName

__all__ = ["MEASURED", "Measured", "measured"]


@dataclass(frozen=True)
class Measured:
    """A published measurement.

    Attributes:
        rules: The rules that it is about.
        tuned: Whether the model was fine-tuned with the rule.
        model: The model, its training and the test.
        found: The result.
        source: The publication.

    >>> Measured(("pi",), False, "LLaMA-7B, 2048 to 8192", "perplexity 16.10", "2306.15595, table 3").tuned
    False
    """

    rules: tuple[RuleName, ...]
    tuned: bool
    model: str
    found: str
    source: str


_PI = "Chen et al., 2306.15595"
_YARN = "Peng et al., 2309.00071"
_LONGROPE = "Ding et al., 2402.13753, table 1"
_ABF = "Xiong et al., 2309.16039, table 5"
_SU = "Su, kexue.fm 9708"
_LLAMA_2 = "Llama 2 7B, trained at 4096"
_PROOF_PILE = "Llama 2 7B, factor 2, tuned at 8192; Proof-pile at 8192 and 10240"

MEASURED = (
    Measured(
        ("pi",),
        False,
        "LLaMA 7B, trained at 2048; PG-19 at 8192 and 16384",
        "perplexity 16.10, 112.13",
        f"{_PI}, table 3",
    ),
    Measured(("pi",), False, f"{_LLAMA_2}; PG-19 at 8192 and 16384", "perplexity 10.65, 20.49", _LONGROPE),
    Measured(("dynamic",), False, f"{_LLAMA_2}; PG-19 at 8192 and 16384", "perplexity 10.21, 23.29", _LONGROPE),
    Measured(("yarn",), False, f"{_LLAMA_2}; PG-19 at 8192 and 16384", "perplexity 32.64, 87.89", _LONGROPE),
    Measured(
        ("ntk",),
        False,
        "Llama 2 13B, trained at 4096; loss at 4096, 8192 and 16384",
        "1.6081, 1.5417, 1.5163; without a rule 1.4967 at 4096 and 8.8615 at 8192",
        _SU,
    ),
    Measured(
        ("pi",),
        True,
        "LLaMA 7B, trained at 2048, tuned 200 steps; PG-19 at 8192 and 16384",
        "perplexity 7.12, 7.05",
        f"{_PI}, table 3",
    ),
    Measured(
        ("pi",), True, "LLaMA 7B, tuned 200 steps at 8192; passkey", "found up to 8192 tokens back", f"{_PI}, table 4"
    ),
    Measured(("pi",), True, _PROOF_PILE, "perplexity 3.34, 8.07", f"{_YARN}, table 1"),
    Measured(("ntk",), True, _PROOF_PILE, "perplexity 3.59, 6.24", f"{_YARN}, table 1"),
    Measured(("yarn",), True, _PROOF_PILE, "perplexity 3.35, 6.04", f"{_YARN}, table 1"),
    Measured(
        ("yarn",),
        True,
        "Llama 2 7B, factor 32; Proof-pile at 131072, and passkey",
        "perplexity 2.37; 99.4 % found",
        f"{_YARN}, section 4.3",
    ),
    Measured(
        ("llama3",),
        True,
        "Llama 3.1, 8192 to 131072 in six stages of training",
        "the released models; no figure for the rule alone",
        "Llama 3, 2407.21783, section 3.4.2",
    ),
    Measured(
        ("pi",),
        True,
        "Llama 2 7B, 80 B tokens at 32768; Books, CommonCrawl, Wikipedia",
        "perplexity 6.341, 6.786, 3.775",
        _ABF,
    ),
    Measured(
        ("base-bound", "base-law"),
        True,
        "Llama 2 7B with base 500000, 80 B tokens at 32768; Books, CommonCrawl, Wikipedia",
        "perplexity 6.323, 6.780, 3.771; with the old base 6.548, 6.816, 3.802",
        _ABF,
    ),
    Measured(
        ("base-law",),
        True,
        "LLaMA 2 with base 1000000, tuned at 16384; at 131072 and 262144",
        "perplexity 7.07, 76.82; the law's limit is 129027",
        "Liu et al., 2310.05209, README of the authors' code",
    ),
    Measured(
        ("base-bound",),
        True,
        "head_dim 128, base 10000 to 5000000, which keeps the score sum non-negative; Long-eval at 15k and 30k",
        "accuracy 0.33, 0.27; with frequencies whose sum is negative 97 times up to 15k: 0.40, 0.00",
        "Men et al., 2405.14591, table 4",
    ),
)


def measured(rule: str, *, tuned: bool) -> list[Measured]:
    """The published measurements of `rule`, either with fine-tuning or without.

    >>> [figure.found for figure in measured("dynamic", tuned=False)]
    ['perplexity 10.21, 23.29']
    """
    return [figure for figure in MEASURED if rule in figure.rules and figure.tuned is tuned]
