"""Checked claims: measurements agree with every verdict, every note is covered, and wrong code is detected."""

import importlib

import pytest
import torch

from ropewalk.claims import CHAPTERS, Chapter, Claim, Finding, Verdict, run
from ropewalk.claims.sources import NOTES
from slow import slow_except

CLAIMS = [claim for chapter in CHAPTERS for claim in chapter.claims]
# These take seconds.
LONG = ("men.islands", "men.theorem")


@pytest.mark.parametrize(
    "claim", slow_except([claim for claim in CLAIMS if claim.id not in LONG], CLAIMS), ids=lambda claim: claim.id
)
def test_the_measurement_agrees_with_the_verdict(claim):
    (entry,) = run([claim])
    assert not entry.contradicted, entry.as_dict()


def test_ids_are_unique_and_no_field_is_empty():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert all((claim.id, claim.statement, claim.source, claim.method, claim.expected)), claim.id
        assert len(claim.statement) <= 120, claim.id


def test_every_note_is_covered_and_every_verdict_occurs():
    for note in NOTES:
        assert sum(note in claim.source for claim in CLAIMS) >= 5, note
    assert {claim.verdict for claim in CLAIMS} == set(Verdict)


def by_id(*names: str) -> list[Claim]:
    selected = [claim for claim in CLAIMS if claim.id in names]
    assert len(selected) == len(names)
    return selected


def contradicted(*names: str) -> set[str]:
    return {entry.claim.id for entry in run(by_id(*names)) if entry.contradicted}


def test_a_rotation_in_the_wrong_direction_is_detected(monkeypatch):
    module = importlib.import_module("ropewalk.reference.rotate")
    original = module._by_element
    monkeypatch.setattr(module, "_by_element", lambda x, angles, pairing: original(x, -angles, pairing))
    ids = ("rotation.formula-2d", "rotation.three-forms", "derivation.solution", "decay.polar", "derivation.exponent")
    assert contradicted(*ids) == set(ids)


def test_a_missing_rotation_is_detected(monkeypatch):
    module = importlib.import_module("ropewalk.reference.rotate")
    monkeypatch.setattr(module, "_by_element", lambda x, angles, pairing: x + 0 * angles.sum())
    ids = ("order.rope-tells", "rotation.before-w", "rotation.needs-m", "code.apply", "linear.denominator")
    assert contradicted(*ids) == set(ids)


def test_a_feature_map_that_reaches_zero_is_detected(monkeypatch):
    linear = importlib.import_module("ropewalk.claims.seeds.linear")
    monkeypatch.setattr(linear, "elu_plus_one", torch.relu)
    assert contradicted("linear.elu") == {"linear.elu"}


def test_wrong_frequencies_are_detected(monkeypatch):
    frequencies = importlib.import_module("ropewalk.spec.frequencies")
    monkeypatch.setattr(
        frequencies.Plain, "evaluate", lambda self, dim, *_: 1 / frequencies.FLOAT64.powers(self.base * 1.001, dim)
    )
    ids = ("rotation.theta", "absolute.sinusoid", "men.larger-base")
    assert contradicted(*ids) == set(ids)


@pytest.mark.parametrize(
    ("verdict", "stated", "amended", "supported"),
    [
        (Verdict.HOLDS, True, False, True),
        (Verdict.HOLDS, False, True, False),
        (Verdict.CONDITIONAL, False, True, True),
        (Verdict.CONDITIONAL, True, True, False),
        (Verdict.CONDITIONAL, False, False, False),
        (Verdict.FAILS, False, True, True),
        (Verdict.FAILS, True, False, False),
        (Verdict.FAILS, False, False, False),
    ],
)
def test_supports(verdict, stated, amended, supported):
    assert Finding("", stated=stated, amended=amended).supports(verdict) == supported


def test_a_verdict_other_than_holds_needs_an_amendment():
    with pytest.raises(ValueError, match="needs an amendment"):
        Claim("id", "statement", "source", "method", "expected", Verdict.FAILS, "", lambda: Finding("", False))


def test_chapters_keep_their_order_and_verdicts():
    chapter = Chapter("title")
    measure = chapter.claim("a", "s", "w", method="m", expected="e", only_if="c")(lambda: Finding("", False, True))
    chapter.claim("b", "s", "w", method="m", expected="e")(measure)
    assert [(claim.id, claim.verdict) for claim in chapter.claims] == [("a", Verdict.CONDITIONAL), ("b", Verdict.HOLDS)]
