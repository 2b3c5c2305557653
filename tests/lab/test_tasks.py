"""Tasks: samples are functions of seed, step and index; answers are right; text is held out."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.small_runs import CPU
from ropewalk.errors import RopewalkError
from ropewalk.lab.draws import draws, order
from ropewalk.lab.run import Run, make_task
from ropewalk.lab.tasks import IGNORED, PUZZLES, Puzzle, Recall
from ropewalk.lab.text import ShuffledText, Text, read_folder, read_iterator, read_standard_library
from ropewalk.lab.training import train

FILES = [bytes([65 + i]) * (100 + i) for i in range(20)]


@given(st.integers(0, 2**62), st.integers(0, 50), st.integers(0, 50))
def test_a_draw_depends_on_seed_step_and_sample_alone(seed, step, sample):
    whole = draws(seed, range(step, step + 3), range(sample + 1), 5)
    assert np.array_equal(whole[0, sample], draws(seed, [step], [sample], 5)[0, 0])
    assert np.array_equal(whole[..., :3], draws(seed, range(step, step + 3), range(sample + 1), 3))
    assert not np.array_equal(whole, draws(seed + 1, range(step, step + 3), range(sample + 1), 5))


def test_draws_are_uniform_and_independent():
    numbers = draws(7, range(40), range(50), 16).astype(np.float64) / 2**64
    assert abs(numbers.mean() - 0.5) < 5 / np.sqrt(12 * numbers.size)
    counts = np.histogram(numbers, 16, (0, 1))[0]
    # Chi squared with 15 degrees of freedom: mean 15, standard deviation 5.5.
    assert ((counts - numbers.size / 16) ** 2 / (numbers.size / 16)).sum() < 50
    for other in (numbers[1:, :, :], numbers[:, 1:, :], numbers[:, :, 1:]):
        first = numbers[tuple(slice(0, n) for n in other.shape)]
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(other.size)
    orders = order(draws(7, range(40), range(50), 3)).reshape(-1, 3)
    assert len({tuple(row) for row in orders.tolist()}) == 6


@pytest.mark.parametrize("name", ["text", *PUZZLES])
def test_a_slice_of_a_batch_is_the_batch_of_the_slice(name):
    task = make_task(Run("rope", task=name))
    whole, part = task.batches(3, [5, 6, 7], range(8), 6), task.batches(3, [6], [2, 5], 6)
    for x, y in zip(whole, part, strict=True):
        assert x.shape == (3, 8, task.tokens(6))
        assert torch.equal(x[1:2, [2, 5]], y)
    assert not torch.equal(whole.inputs[0], whole.inputs[1])
    assert not torch.equal(whole.inputs, task.batches(4, [5, 6, 7], range(8), 6).inputs)
    assert whole.inputs.max() < task.vocabulary


def rows(task, length, count=50):
    """Tokens, with the one after the last input, and which are scored."""
    batch = task.evaluation(count, length)
    tokens = torch.cat(
        (batch.inputs[:, :1], torch.where(batch.targets == IGNORED, batch.inputs.roll(-1, 1), batch.targets)), 1
    )
    scored = torch.nn.functional.pad(batch.targets != IGNORED, (1, 0))
    return tokens.tolist(), scored.tolist()


def answer(tokens, scored):
    return [token for token, is_scored in zip(tokens, scored, strict=True) if is_scored]


@pytest.mark.parametrize(("name", "expected"), [("copy", list), ("reverse", lambda x: list(reversed(x)))])
def test_copy_and_reverse(name, expected):
    task = PUZZLES[name]()
    for tokens, scored in zip(*rows(task, 7), strict=True):
        assert tokens[0] == Puzzle.BEGIN
        assert tokens[8] == Puzzle.SEPARATOR
        assert answer(tokens, scored) == [*expected(tokens[1:8]), Puzzle.END]
    # Shorter samples of a batch: the answer follows its own separator, and the rest is padding.
    batch = task.batches(0, [0], range(40), 7)
    lengths = set()
    for inputs, targets in zip(batch.inputs[0].tolist(), batch.targets[0].tolist(), strict=True):
        length = inputs.index(Puzzle.SEPARATOR) - 1
        lengths.add(length)
        assert [x for x in targets if x != IGNORED] == [*expected(inputs[1 : 1 + length]), Puzzle.END]
        assert targets[1 + length] != IGNORED
        assert all(x == IGNORED for x in targets[: 1 + length])
        assert set(inputs[2 + 2 * length + 1 :]) <= {Puzzle.PAD}
    assert lengths == set(range(1, 8))


def test_addition():
    for tokens, scored in zip(*rows(PUZZLES["addition"](), 5), strict=True):
        digits = [token - Puzzle.FIRST for token in tokens[1:6]]
        assert answer(tokens, scored) == [Puzzle.FIRST + sum(digits) % 10]


def test_induction_repeats_itself():
    for tokens, scored in zip(*rows(PUZZLES["induction"](), 6), strict=True):
        assert tokens[1:7] == tokens[7:]
        assert scored.index(True) == 9  # after two symbols of the repetition


def test_recall_asks_every_key_once_and_knows_its_distance():
    task = Recall()
    distances = task.distances(50, 5).tolist()
    for tokens, scored, far in zip(*rows(task, 5), distances, strict=True):
        pairs = list(zip(tokens[1:11:2], tokens[2:11:2], strict=True))
        asked = list(zip(tokens[11::2], tokens[12::2], strict=True))
        assert sorted(asked) == sorted(pairs)
        assert len(dict(pairs)) == 5
        assert answer(tokens, scored) == [value for _, value in asked]
        for index, (pair, distance) in enumerate(zip(asked, far, strict=True)):
            assert tokens[12 + 2 * index - distance] == pair[1]
            assert tokens[11 + 2 * index - distance] == pair[0]


def test_needle_is_marked():
    places = set()
    for tokens, scored in zip(*rows(PUZZLES["needle"](), 6), strict=True):
        mark = tokens.index(Puzzle.SEPARATOR)
        places.add(mark)
        assert answer(tokens, scored) == [tokens[mark + 1]]
        assert tokens[-2] == Puzzle.SEPARATOR
    assert len(places) == 6


def test_text_is_held_out_by_file():
    task = Text(FILES)
    trained = {x for x in task.batches(0, range(50), range(8), 20).inputs.flatten().tolist() if x != 10}
    held_out = {x for x in task.evaluation(50, 20).inputs.flatten().tolist() if x != 10}
    assert held_out == {65 + 9, 65 + 19}
    assert not trained & held_out
    assert len(trained) == 18


def test_longer_contexts_score_the_same_tokens():
    task = Text([bytes(range(i, i + 60)) * 20 for i in range(20)])
    short, long = (task.evaluation(8, length, scored=16) for length in (32, 256))
    for batch, other in ((short, long), (long, short)):
        assert ((batch.targets != IGNORED).sum(1) == 16).all()
        assert torch.equal(batch.inputs[:, -32:], other.inputs[:, -32:])
    assert torch.equal(short.targets[:, -16:], long.targets[:, -16:])
    assert torch.equal(
        long.inputs[:, 1:], torch.where(long.targets == IGNORED, long.inputs.roll(-1, 1), long.targets)[:, :-1]
    )


def test_shuffled_text_has_the_same_bytes():
    task, shuffled = Text(FILES), ShuffledText(FILES)
    assert not torch.equal(task.trained, shuffled.trained)
    assert torch.equal(task.trained.sort().values, shuffled.trained.sort().values)


def test_the_standard_library_has_no_tests_and_millions_of_bytes():
    files = read_standard_library()
    assert 3e6 < sum(map(len, files)) < 5e7
    assert sum(b"unittest.TestCase)" in content for content in files) < 0.02 * len(files)


def test_text_that_is_too_small_and_folders_that_are_empty(tmp_path):
    text = Text([b"x" * 1000])  # 900 bytes and 8 line feeds to train on, 100 held out
    assert text.batches(0, [0], range(18), 49).inputs.shape == (1, 18, 49)
    with pytest.raises(RopewalkError, match=r"a batch of 19 .* 49 bytes\n.*least 951 .* and 100 held out\n.* 908 to"):
        text.batches(0, [0], range(19), 49)
    assert text.evaluation(3, 49).inputs.shape == (3, 49)
    with pytest.raises(RopewalkError, match=r"and 102 held out\n.* and 100 held out\n.*more text: 1,011 bytes"):
        text.evaluation(3, 50)
    with pytest.raises(RopewalkError, match="no file in it"):
        read_folder(tmp_path)
    with pytest.raises(RopewalkError, match="no such folder"):
        read_folder(tmp_path / "missing")
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert read_folder(tmp_path / ".") == (b"first", b"second")


@pytest.mark.parametrize(("batch", "length", "lengths"), [(2, 8, (8, 64)), (32, 8, (8,)), (3, 50, ()), (1, 1, (1,))])
def test_the_least_text_is_named_before_training_and_works(batch, length, lengths):
    run = Run("none", length=length, batch=batch, steps=1, lengths=lengths, evaluated=2)
    with pytest.raises(RopewalkError, match=r"pass more text: [0-9,]+ bytes") as error:
        train(run, CPU, task=Text([b"x"]))
    least = int(re.findall("text: ([0-9,]+)", str(error.value))[0].replace(",", ""))
    reported = []
    with pytest.raises(RopewalkError, match=f"text: {least:,} bytes"):
        train(run, CPU, task=Text([b"x" * (least - 1)]), report=lambda *x: reported.append(x))
    # Not after the training, where longer contexts are evaluated.
    assert reported == []
    train(run, CPU, task=Text([b"x" * least]))


def poems():
    """Texts of a user."""
    yield from ("roses " * 200, b"violets " * 200)


def no_poems():
    return 3


def test_text_of_an_iterator_of_the_user():
    assert read_iterator(f"{__name__}:poems") == (b"roses " * 200, b"violets " * 200)
    batch = make_task(Run("rope", text=f"{__name__}:poems")).batches(0, [0], [0], 16)
    assert batch.inputs.shape == (1, 1, 16)
    for name in ("poems_missing", "no_poems"):
        with pytest.raises(RopewalkError, match="an iterable of str or bytes"):
            read_iterator(f"{__name__}:{name}")
    with pytest.raises(RopewalkError, match="No module named"):
        read_iterator("no_such_module:f")
