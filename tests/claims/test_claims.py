"""Checked claims: measurements agree with every verdict, every note is covered, and wrong code is detected."""

import importlib
from dataclasses import replace

import pytest
import torch

from ropewalk.claims import CHAPTERS, Chapter, Claim, Finding, NotAvailable, Record, Source, Verdict, run
from ropewalk.claims.records import records
from ropewalk.claims.samples import theta
from ropewalk.claims.sources import NOTES
from ropewalk.nn.encodings.base import DistanceBias
from ropewalk.reference import rotate
from slow import slow, slow_except

CLAIMS = [claim for chapter in CHAPTERS for claim in chapter.claims]
# These take a second or more.
SECONDS = {
    *("absolute.shift-matrix", "rotation.sparse", "decay.score", "decay.bound", "decay.made-for-distance"),
    *("heads.unseen-angles", "linear.cost", "linear.memory", "linear.relative"),
    "linear.bias-quadratic",
}


@pytest.mark.parametrize(
    "claim",
    slow_except([claim for claim in CLAIMS if not claim.long and claim.id not in SECONDS], CLAIMS),
    ids=lambda claim: claim.id,
)
def test_the_measurement_agrees_with_the_verdict(claim):
    (entry,) = run([claim])
    assert entry.available
    assert not entry.contradicted, entry.as_dict()


def test_ids_are_unique_and_no_field_is_empty():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert all((claim.id, claim.statement, claim.places, claim.method, claim.expected)), claim.id
        assert len(claim.statement) <= 120, claim.id
        # One line of the screen at 80 columns.
        assert claim.verdict is not Verdict.FAILS or len(claim.amendment) <= 42, claim.id


def test_every_note_is_covered_and_every_verdict_occurs():
    for note in NOTES:
        assert sum(claim.is_from(note) for claim in CLAIMS) >= 5, note
    assert {claim.verdict for claim in CLAIMS} == set(Verdict)


def test_every_long_claim_has_a_record_of_its_method():
    long = {claim.id: claim for claim in CLAIMS if claim.long}
    assert set(records()) == set(long)
    for id, record in records().items():
        assert record.method == long[id].method, id
        assert record.date
        assert record.hardware
    entries = list(run(long.values(), anew=False))
    assert [entry.record for entry in entries] == [records()[id] for id in long]
    assert not any(entry.contradicted for entry in entries)


def test_a_record_that_contradicts_its_verdict_is_detected(monkeypatch):
    (claim,) = by_id("men.islands")
    record = replace(records()["men.islands"], amended=False)
    monkeypatch.setattr("ropewalk.claims.claim.records", lambda: {"men.islands": record})
    (entry,) = run([claim], anew=False)
    assert entry.contradicted
    assert isinstance(entry.record, Record)


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
        (Verdict.MISPRINT, False, True, True),
        (Verdict.MISPRINT, True, True, False),
        (Verdict.MISPRINT, False, False, False),
        (Verdict.UNMEASURABLE, None, True, True),
        (Verdict.UNMEASURABLE, None, False, False),
        (Verdict.UNMEASURABLE, True, True, False),
        (Verdict.UNMEASURABLE, False, True, False),
        *((verdict, None, True, False) for verdict in Verdict if verdict is not Verdict.UNMEASURABLE),
    ],
)
def test_supports(verdict, stated, amended, supported):
    assert Finding("", stated=stated, amended=amended).supports(verdict) == supported


def test_a_verdict_other_than_holds_needs_an_amendment():
    with pytest.raises(ValueError, match="needs an amendment"):
        Claim("id", "statement", (), "method", "expected", Verdict.FAILS, "", lambda: Finding("", False))


def test_chapters_keep_their_order_and_verdicts():
    chapter, source = Chapter("title"), Source("k", "a source")
    options = ({"only_if": "c"}, {}, {"fails": "c"}, {"misprint": "c"}, {"needs": "c"})
    for number, option in enumerate(options):
        chapter.claim(f"id.{number}", "s", source, method="m", expected="e", **option)(lambda: Finding("", False, True))
    expected = Verdict.CONDITIONAL, Verdict.HOLDS, Verdict.FAILS, Verdict.MISPRINT, Verdict.UNMEASURABLE
    assert [(claim.id, claim.verdict) for claim in chapter.claims] == [(f"id.{n}", v) for n, v in enumerate(expected)]
    with pytest.raises(ValueError, match="too many values"):
        chapter.claim("two", "s", source, method="m", expected="e", only_if="a", fails="b")


def test_a_claim_that_is_not_available_is_neither_right_nor_wrong():
    def missing() -> Finding:
        raise NotAvailable("nothing is installed")

    (entry,) = run([Claim("a.b", "s", (), "m", "e", Verdict.HOLDS, "", missing)])
    assert (entry.available, entry.contradicted, entry.finding.measured) == (
        False,
        False,
        "not measured: nothing is installed",
    )


def test_a_comment_that_the_code_makes_true_is_noticed(monkeypatch):
    notes_code = importlib.import_module("ropewalk.claims.notes_code")
    code = notes_code.code_of("003").replace(
        'torch.einsum("s,d -> sd", seq, theta)', 'torch.einsum("sx,d -> sd", seq[:, None], theta)'
    )
    monkeypatch.setattr(notes_code, "code_of", lambda note: code)
    notes_code.functions_of_note_003.cache_clear()
    try:
        assert contradicted("code.positions-comment", "code.tables") == {"code.positions-comment"}
    finally:
        notes_code.functions_of_note_003.cache_clear()


# Per verdict, a change of the library or of a note's code that makes its measurement come out otherwise.
def test_a_mutant_per_verdict_is_detected(monkeypatch):
    notes_code = importlib.import_module("ropewalk.claims.notes_code")
    decay = importlib.import_module("ropewalk.claims.seeds.decay")
    absolute = importlib.import_module("ropewalk.claims.seeds.absolute")
    rotation = importlib.import_module("ropewalk.reference.rotate")
    original = rotation._by_element

    with monkeypatch.context() as patch:  # holds: the module as printed is not the rotation
        patch.setattr(rotation, "_by_element", lambda x, angles, pairing: original(x, 1.001 * angles, pairing))
        assert contradicted("code.module") == {"code.module"}
    with monkeypatch.context() as patch:  # does not hold: the note's repr is right
        code = notes_code.code_of("002").replace("shape[1]", "shape[2]").replace("shape[0]", "shape[1]")
        notes_code._class_of_note_002.cache_clear()
        patch.setattr(notes_code, "code_of", lambda note: code)
        assert contradicted("code.extra-repr") == {"code.extra-repr"}
    notes_code._class_of_note_002.cache_clear()
    with monkeypatch.context() as patch:  # does not hold: the note's number is right
        patch.setattr(decay, "THREE", [1.0, 0.3, 0.0721])
        assert contradicted("decay.s20") == {"decay.s20"}
    with monkeypatch.context() as patch:  # under a condition: the condition does not help
        patch.setattr(rotation, "_by_element", lambda x, angles, pairing: original(x, angles + 0.1, pairing))
        assert contradicted("rotation.before-w", "derivation.initial") == {"derivation.initial"}
        patch.setattr(rotation, "_by_element", lambda x, angles, pairing: original(x, angles**2, pairing))
        assert contradicted("rotation.before-w") == {"rotation.before-w"}
        # misprint: what was meant does not hold either
        ids = ("derivation.exponent", "derivation.g-arguments", "rotation.q-and-v")
        assert contradicted(*ids) == set(ids)
    with monkeypatch.context() as patch:  # not measurable: what can be measured comes out otherwise
        patch.setattr(absolute, "periods", lambda inv_freq: torch.ones(len(inv_freq)).numpy())
        ids = ("absolute.sinusoid-reach", "absolute.rope-reach")
        assert contradicted(*ids) == set(ids)


def no_bias(heads: int) -> DistanceBias:
    return DistanceBias(slopes=torch.zeros(heads))


@pytest.mark.parametrize(
    ("id", "change"),
    [
        slow("linear.denominator-random", ("ropewalk.claims.seeds.linear_position.rotate", lambda x, *rest: x)),
        slow("decay.bound", ("ropewalk.claims.seeds.decay.OCTAVES", [1 << n for n in range(4, 14)])),
        ("decay.figure", ("ropewalk.claims.seeds.decay.theta", lambda dim, base=1e4: theta(dim, 9_000.0))),
        ("decay.farther-lower", ("ropewalk.claims.seeds.decay.THREE", [1.0, 0.3, 0.02])),
        ("decay.s50", ("ropewalk.claims.seeds.decay.THREE", [1.0, 0.3, 0.0499])),
        slow(
            "linear.bias-quadratic",
            ("ropewalk.claims.seeds.linear_position._by_fft", lambda t, q, k, v: q @ (k.T @ v)),
        ),
        (
            "code.positions-comment",
            ("ropewalk.claims.seeds.code._passed_to_einsum", lambda dim, rows: (torch.ones(rows, 1), torch.ones(dim))),
        ),
        slow("decay.score", ("ropewalk.claims.seeds.decay.BASES", (500_000.0, 10_000.0, 1_000_000.0))),
        ("linear.encodings", ("ropewalk.nn.encodings.bias.AlibiBias.distance_bias", lambda self: no_bias(1))),
        ("linear.bias-state", ("ropewalk.claims.seeds.linear_position._exact_rank", lambda weight, size: 5)),
        (
            "linear.retention",
            ("ropewalk.claims.seeds.linear_position.rotate", lambda x, ids, f: rotate(x, ids, f, pairing="half")),
        ),
        ("derivation.one-g", ("ropewalk.claims.seeds.derivation._f", lambda q, m: q * (1 + m / 100))),
        slow(
            "absolute.shift-matrix",
            ("ropewalk.claims.seeds.absolute._shift_matrix", lambda k, dim: torch.eye(dim).numpy()),
        ),
        slow("linear.memory", ("ropewalk.claims.seeds.linear._fused", lambda q, k, v: (q @ k.mT).softmax(-1) @ v)),
        slow("linear.t5-scale", ("ropewalk.nn.encodings.bias.T5Bias.scale", 0.5)),
        ("liu.small-base", ("ropewalk.claims.papers.context.critical_base", lambda *lengths: 20_000.0)),
    ],
)
def test_corrected_and_new_claims_measure_what_they_state(id, change, monkeypatch):
    assert contradicted(id) == set()
    monkeypatch.setattr(*change)
    assert contradicted(id) == {id}
