"""The notes: quotations are found at their lines, and the notes' code runs as printed with the reported numbers."""

import importlib
import warnings
from pathlib import Path

import pytest
import torch

import ropewalk as rw
from ropewalk.claims import CHAPTERS, NotAvailable, run
from ropewalk.claims.notes_code import (
    _class_of_note_002,
    code_of,
    functions_of_note_003,
    module_of_note_002,
    quotation,
)
from ropewalk.claims.sources import NOTES
from ropewalk.reference import rotate
from ropewalk.spec import Plain

CLAIMS = [claim for chapter in CHAPTERS for claim in chapter.claims]
QUOTED = [(claim.id, place) for claim in CLAIMS for place in claim.places if place.source in NOTES]
# The notes are not part of the repository. They are next to it where they are checked.
SEEDS = Path(__file__).parent.parent.parent.parent / "shared" / "seeds"
with_notes = pytest.mark.skipif(not SEEDS.exists(), reason="the notes are not next to the repository")


def lines_of(number: str) -> list[str]:
    (path,) = SEEDS.glob(f"{number}_*.txt")
    return path.read_text(encoding="utf-8").split("\n")


def test_every_claim_of_a_note_has_a_quotation_and_a_line():
    assert len(QUOTED) > 100
    for id, place in QUOTED:
        assert place.quotation.strip(), id
        assert place.line, id


@with_notes
def test_quotations_are_in_the_notes_at_their_lines():
    wrong = [
        (id, place.label)
        for id, place in QUOTED
        if place.line is None or place.quotation not in lines_of(place.source.key)[place.line - 1]
    ]
    assert not wrong


@with_notes
def test_quoted_code_is_the_code_of_the_notes():
    assert quotation("002").split("\n")[:-1] == lines_of("002")[349:394]
    assert quotation("003").split("\n")[:-1] == lines_of("003")[27:71]


def test_nothing_but_the_print_is_removed():
    def letters(text: str) -> str:
        return "".join(text.split())

    printed = [line for line in quotation("002").split("\n") if not line.startswith("```")]
    without_numbers = [line.lstrip("0123456789") if line[:1].isdigit() else line for line in printed]
    assert letters(code_of("002")) == letters("".join(without_numbers))
    assert code_of("003") == quotation("003")


def test_the_code_of_the_notes_gives_the_reported_numbers():
    x, ids = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)), torch.arange(512)
    truth = rotate(x.double(), ids, torch.as_tensor(Plain().evaluate(64)))
    module = module_of_note_002(512, 64)
    ours = rw.RotaryEmbedding(64)(x[None, None], x[None, None])[0][0, 0]
    difference = (module(x, ids) - ours).abs().max().item()
    # From its float32 angles: the error of ours is that of float32 alone.
    assert 1e-5 < difference < 1e-4
    assert (ours - truth).abs().max() < 1e-6
    assert module(x, ids).sub(truth).abs().max().item() == pytest.approx(difference, rel=0.05)
    # Row 511, with cosines and sines swapped, instead of an error.
    cos, sin = module.get_buffer("_freq_cis_cache")[:, 511]
    build, apply = functions_of_note_003()
    assert torch.equal(module(x[:1], torch.tensor([-1])), apply(x[None, None, :1], sin, cos)[0, 0])
    with pytest.raises(Exception, match="out of bounds"):
        module(x[:1], torch.tensor([512]))
    # The batch of ids [batch, seq] is taken for heads.
    heads = torch.randn(3, 3, 4, 64, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 3], [50, 51, 52, 53], [7, 3, 2, 9]])
    for head in range(3):
        assert torch.equal(module(heads, positions)[:, head], module(heads[:, head], positions[head].expand(3, 4)))
    assert repr(module) == "RotaryEmbedding(context_length=2, dim/2= 512)"
    # Note 003: the same rotation, from tables that are exactly as long as the sequence.
    rotated = apply(x[None, None], *build(64, 512))[0, 0]
    assert rotated.sub(truth).abs().max() < 1e-4
    with pytest.raises(RuntimeError, match="must match"):
        apply(x[None, None, :5], *build(64, 512))


def test_only_the_deprecated_name_of_the_note_is_silent():
    module = module_of_note_002(8, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(torch.zeros(1, 4), torch.tensor([0]))
    assert not caught


def test_without_einx_the_code_is_not_measured(monkeypatch):
    loaded = importlib.import_module

    def refuse(name, *rest):
        if name.split(".")[0] == "einx":
            raise ModuleNotFoundError("No module named 'einx'", name="einx")
        return loaded(name, *rest)

    monkeypatch.setattr(importlib, "import_module", refuse)
    _class_of_note_002.cache_clear()
    try:
        with pytest.raises(NotAvailable, match="einx is missing"):
            module_of_note_002(8, 4)
        (entry,) = run([claim for claim in CLAIMS if claim.id == "code.extra-repr"])
        assert (entry.available, entry.contradicted) == (False, False)
        assert entry.finding.measured.startswith("not measured: einx is missing")
    finally:
        _class_of_note_002.cache_clear()
