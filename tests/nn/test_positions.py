"""Position ids: ranges, packed sequences, grids, and text with images."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.nn.positions import (
    centred_positions,
    grid_positions,
    mrope_positions,
    packed_positions,
    positions_of_lengths,
    text_positions,
)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_lengths_and_their_ends_say_the_same(lengths, padding):
    total = sum(lengths) + padding
    ends = torch.tensor([0, *lengths]).cumsum(0)
    found = positions_of_lengths(torch.tensor(lengths), total)
    assert torch.equal(found, packed_positions(ends, total))
    assert found.tolist() == [i for length in [*lengths, padding] for i in range(length)]


def test_text_stands_alike_on_all_axes():
    assert text_positions(3, 2).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert text_positions(2, 3, torch.tensor([5, 9])).tolist() == [[[5, 6], [9, 10]]] * 3


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_a_grid_has_every_cell_once_and_blocks_in_a_row(height, width, merge, frames):
    cells = grid_positions(frames, height * merge, width * merge, merge=merge)
    assert sorted(map(tuple, cells.T.tolist())) == [
        (t, h, w) for t in range(frames) for h in range(height * merge) for w in range(width * merge)
    ]
    blocks = cells[1:].reshape(2, -1, merge * merge) // merge
    assert (blocks == blocks[:, :, :1]).all()


def test_centres_of_patches():
    found = centred_positions(2, 4)
    assert found.shape == (2, 8)
    assert found[0].tolist() == [-math.pi] * 4 + [math.pi] * 4
    torch.testing.assert_close(found[1, :4], 2 * math.pi * torch.tensor([-0.75, -0.25, 0.25, 0.75]).double())


def test_text_and_images_as_in_the_paper_of_qwen2_vl():
    # Two tokens, a video of 2 x 2 x 3 cells, two tokens: the count goes on max(h, w) after the video.
    positions, delta = mrope_positions([2, (2, 2, 3), 2])
    assert positions[0].tolist() == [0, 1, *[2] * 6, *[3] * 6, 5, 6]
    assert positions[1].tolist() == [0, 1, *[2, 2, 2, 3, 3, 3] * 2, 5, 6]
    assert positions[2].tolist() == [0, 1, *[2, 3, 4] * 4, 5, 6]
    assert delta == 7 - 16
    stepped, _ = mrope_positions([(3, 1, 1, 2.5)])
    assert stepped[0].tolist() == [0, 2, 5]
    assert mrope_positions([])[0].shape == (3, 0)


@given(st.lists(st.one_of(st.integers(0, 5), st.tuples(*[st.integers(1, 4)] * 3)), min_size=1, max_size=6))
def test_the_delta_leads_on_from_the_largest_position(runs):
    positions, delta = mrope_positions(runs)
    seq = positions.shape[1]
    assert seq == sum(run if isinstance(run, int) else math.prod(run) for run in runs)
    if seq:
        assert seq + delta == int(positions.max()) + 1
        assert torch.equal(text_positions(1, 3, seq + delta), positions.max().add(1).expand(3, 1))


@pytest.mark.parametrize(
    "runs", [[-1], [1.5], ["3"], [(1, 2)], [(0, 1, 1)], [(1, 1, 1, -1)], [(1, 1, 1.5)], [None], [(1, 1, 1, math.nan)]]
)
def test_runs_that_are_none_are_refused(runs):
    with pytest.raises(RopewalkError, match="a number of text tokens, or"):
        mrope_positions(runs)


def test_sizes_are_checked():
    for call in (lambda: grid_positions(3), lambda: grid_positions(3, 4, merge=2)):
        with pytest.raises(RopewalkError, match="two sizes or more"):
            call()
    for call in (lambda: grid_positions(0, 1), lambda: text_positions(1, 0), lambda: grid_positions(1, 1, merge=0)):
        with pytest.raises(RopewalkError, match="at least 1"):
            call()
