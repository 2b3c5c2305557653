"""Papers on trained models: faster convergence, longer texts, extension. Records of `ropewalk lab` are cited."""

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.sources import LIU, PI, PRESS, ROFORMER, YARN
from ropewalk.claims.trained import MICRO, SMALL, TINY, trained

__all__ = ["chapter"]

chapter: Chapter = Chapter("Papers: trained models")

TWO_SIZES = (
    "0.13 million parameters, 600 steps, and 1.1 million, 2000 steps; sources of Python's library; recorded runs of"
    " `ropewalk lab run {}`"
)
THREE_SIZES = TWO_SIZES.replace(", and 1.1 million, 2000 steps", "; 1.1 million, 2000 steps; 10.8 million, 4000 steps")


@chapter.claim(
    "training.convergence",
    "A model with RoPE learns in fewer steps than one with sinusoidal positions (fig. 3).",
    ROFORMER,
    method=f"{THREE_SIZES.format('convergence')}: validation loss, and the share of the steps to sinusoidal's last"
    " loss",
    expected="0.13 million: a lower loss, and a share below 0.85, by more than the range over the seeds (the figure:"
    " 0.45); 1.1 and 10.8 million: a higher loss; the share is above 0.85 with 1.1 million, and undecided with 10.8",
    only_if="the model has 0.13 million parameters; with 1.1 and 10.8 million, RoPE is ahead for the first 55 and"
    " 12.5 percent of the steps, and sinusoids end lower by 0.04 and 0.03 nats; no model of the paper's size was"
    " trained",
)
def _() -> Finding:
    statements = "rope ends with a lower loss than sinusoidal", "rope has sinusoidal's last loss after"
    smaller, larger = (trained("convergence", *statements, records=records) for records in (MICRO, TINY + SMALL))
    return Finding(
        f"{smaller.measured}; {larger.measured}",
        stated=bool(smaller.stated and larger.stated),
        amended=bool(smaller.stated) and larger.amended,
    )


@chapter.claim(
    "training.convergence-linear",
    "With linear attention too, a model with RoPE learns faster than one without positions (fig. 3, Performer).",
    ROFORMER,
    method=f"{TWO_SIZES.format('convergence-linear')}: validation loss with features elu + 1",
    expected="lower, by more than the range over the seeds",
)
def _() -> Finding:
    return trained("convergence-linear", "rope ends with a lower loss than none")


@chapter.claim(
    "training.alibi-reach",
    "ALiBi keeps its loss past the trained length, where RoPE loses it (tab. 2).",
    PRESS,
    method=f"{THREE_SIZES.format('extrapolation')}: the same held-out bytes after 1 and 4 times the trained length",
    expected="ALiBi rises by less than 0.05 nats, and is lower than RoPE",
)
def _() -> Finding:
    statements = "the loss of alibi rises by less", "alibi is lower than rope at 4 times"
    return trained("extrapolation", *statements, records=MICRO + TINY + SMALL)


@chapter.claim(
    "training.pi-tuned",
    "After little tuning at the longer length, Position Interpolation is better than no rule.",
    PI,
    method=f"{TWO_SIZES.format('extension')}: a factor of 4, a twentieth more steps at that length; loss there",
    expected="lower, by more than the range over the seeds, with 0.13 million; undecided with 1.1 million",
)
def _() -> Finding:
    return trained("extension", "tuned, pi is lower than plain")


@chapter.claim(
    "training.yarn",
    "YaRN is better than NTK, and NTK-by-parts than Position Interpolation; tuned, YaRN is better than the latter.",
    YARN,
    method=f"{TWO_SIZES.format('extension')}: a factor of 4, without tuning and after a twentieth more steps; loss"
    " there",
    expected="yarn below ntk below plain, by-parts below pi; tuned, yarn below pi; by-parts is undecided with seeds 3"
    " to 5, ntk below plain with 1.1 million",
)
def _() -> Finding:
    return trained(
        "extension",
        "without tuning, yarn is lower than ntk",
        "without tuning, ntk is lower than plain",
        "without tuning, by-parts is lower than pi",
        "tuned, yarn is lower than pi",
    )


@chapter.claim(
    "training.either-base",
    "After tuning at the trained length, a smaller base and a larger one both extrapolate better than 10000.",
    LIU,
    method=f"{TWO_SIZES.format('base-tuning')}: a tenth more steps with bases 50, 500 and 1000000; the rise of the"
    " loss of the same held-out bytes to 4 times the length, next to 10000",
    expected="lower for all three, by more than the range over the seeds",
)
def _() -> Finding:
    return trained(
        "base-tuning",
        "base 50 rises less than 10000",
        "base 500 rises less than 10000",
        "base 1000000 rises less than 10000",
    )
