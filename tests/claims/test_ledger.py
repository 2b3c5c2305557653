"""The ledger: every verdict stands, every note is covered, and a wrong library or a wrong verdict is noticed."""

import importlib

import pytest
import torch

from ropewalk.claims import CHAPTERS, Chapter, Claim, Finding, Verdict, run
from ropewalk.claims.sources import NOTES

CLAIMS = [claim for chapter in CHAPTERS for claim in chapter.claims]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_the_verdict_stands(claim):
    (entry,) = run([claim])
    assert not entry.contradicted, entry.as_dict()


def test_ids_are_unique_and_every_field_says_something():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert all((claim.id, claim.statement, claim.source, claim.method, claim.expected)), claim.id
        assert len(claim.statement) <= 120, claim.id


def test_every_note_is_read_and_every_verdict_occurs():
    for note in NOTES:
        assert sum(note in claim.source for claim in CLAIMS) >= 5, note
    assert {claim.verdict for claim in CLAIMS} == set(Verdict)


def by_id(*names: str) -> list[Claim]:
    found = [claim for claim in CLAIMS if claim.id in names]
    assert len(found) == len(names)
    return found


def contradicted(*names: str) -> set[str]:
    return {entry.claim.id for entry in run(by_id(*names)) if entry.contradicted}


def test_a_library_that_turns_the_wrong_way_is_noticed(monkeypatch):
    module = importlib.import_module("ropewalk.reference.rotate")
    right = module._by_element
    monkeypatch.setattr(module, "_by_element", lambda x, angles, pairing: right(x, -angles, pairing))
    ids = ("rotation.formula-2d", "rotation.three-forms", "derivation.solution", "decay.polar", "derivation.exponent")
    assert contradicted(*ids) == set(ids)


def test_a_library_that_does_not_turn_is_noticed(monkeypatch):
    module = importlib.import_module("ropewalk.reference.rotate")
    monkeypatch.setattr(module, "_by_element", lambda x, angles, pairing: x + 0 * angles.sum())
    ids = ("order.rope-tells", "rotation.before-w", "rotation.needs-m", "code.apply", "linear.denominator")
    assert contradicted(*ids) == set(ids)


def test_a_feature_map_that_reaches_zero_is_noticed(monkeypatch):
    linear = importlib.import_module("ropewalk.claims.seeds.linear")
    monkeypatch.setattr(linear, "elu_plus_one", torch.relu)
    assert contradicted("linear.elu") == {"linear.elu"}


def test_wrong_frequencies_are_noticed(monkeypatch):
    frequencies = importlib.import_module("ropewalk.spec.frequencies")
    monkeypatch.setattr(
        frequencies.Plain, "evaluate", lambda self, dim, *_: 1 / frequencies.FLOAT64.powers(self.base * 1.001, dim)
    )
    ids = ("rotation.theta", "absolute.sinusoid", "men.larger-base")
    assert contradicted(*ids) == set(ids)


@pytest.mark.parametrize(
    ("verdict", "stated", "amended", "stands"),
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
def test_what_contradicts_what(verdict, stated, amended, stands):
    assert Finding("", stated=stated, amended=amended).supports(verdict) == stands


def test_a_verdict_other_than_holds_says_what_holds():
    with pytest.raises(ValueError, match="says what holds instead"):
        Claim("id", "statement", "source", "method", "expected", Verdict.FAILS, "", lambda: Finding("", False))


def test_chapters_keep_their_order_and_verdicts():
    chapter = Chapter("title")
    measure = chapter.claim("a", "s", "w", method="m", expected="e", only_if="c")(lambda: Finding("", False, True))
    chapter.claim("b", "s", "w", method="m", expected="e")(measure)
    assert [(claim.id, claim.verdict) for claim in chapter.claims] == [("a", Verdict.CONDITIONAL), ("b", Verdict.HOLDS)]
