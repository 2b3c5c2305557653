"""The module with every kind of spec: lengths, axes, xPos, temperatures, and keys taken from one spec to another."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import formulas
from ropewalk import RopeSpec, RopewalkError, RotaryEmbedding
from ropewalk.reference import assert_within_budget, rotate_by_spec
from ropewalk.spec import (
    NTK,
    AcrossHeads,
    Axes,
    DynamicNTK,
    Frequencies,
    Llama3,
    LogTemperature,
    LongRope,
    Plain,
    PositionInterpolation,
    Proportional,
    StepTemperature,
    XPos,
    Yarn,
)
from ropewalk.spec.arithmetic import FLOAT64
from strategies import vector

DIM = 16
LONG = LongRope(1e4, [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)], 64, 32, None)
RULES = [
    Plain(500.0),
    PositionInterpolation(1e4, 4),
    NTK(1e4, 4),
    DynamicNTK(1e4, 2, 64),
    Llama3(1e4, 8, 64),
    Yarn(1e4, 8, 64),
    Yarn(1e4, 8, 64, ramp="ratio"),
    LONG,
    Proportional(1e4, 0.5),
]
AXES = [Axes.chunked([2, 3, 3]), Axes.interleaved([4, 2, 2]), Axes.rarest_first([3, 3, 2]), Axes.ernie([3, 3, 2])]
AXES += [Axes.repeated(2, DIM), Axes.alternating(4, DIM), Axes([[1.0] * 8, [0.5] * 8], range(8), DIM)]


@st.composite
def cases(draw):
    """A spec of any kind, the length and the positions of five tokens."""
    axes = draw(st.one_of(st.none(), st.sampled_from(AXES)))
    count = 1 if axes is None else axes.count
    wider = draw(st.sampled_from([0, 6]))
    fields: dict[str, Any] = {
        "rotary_dim": DIM,
        "pairing": draw(st.sampled_from(["half", "interleaved"])),
        "rotary_slice": draw(st.sampled_from(["leading", "trailing"])),
        "sign": draw(st.sampled_from([1, -1])),
        "axes": axes,
    }
    if axes is None:
        fields["xpos"] = draw(st.sampled_from([None, XPos(1 << 15, 1024)]))
        fields["query_temperature"] = draw(st.sampled_from([None, StepTemperature(0.1, 64), LogTemperature(32)]))
    # LongRope has eight divisors, so it serves axes that share one sequence of frequencies.
    rule = draw(st.sampled_from([r for r in RULES if r is not LONG or axes is None or axes.dim == DIM]))
    ids = draw(st.lists(st.integers(0, 9999), min_size=5 * count, max_size=5 * count))
    positions = torch.tensor(ids).view(count, 5)
    return lambda: (RopeSpec(DIM + wider, rule, **fields), positions[0] if axes is None else positions)


@given(
    cases(), st.integers(1, 4096), st.integers(0, 99), st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
)
def test_any_spec_is_the_reference(case, length, seed, dtype):
    spec, positions = case()
    rope = RotaryEmbedding(spec)
    x = vector(seed, 2, 3, 5, spec.head_dim).to(dtype)
    for role in ("q", "k"):
        rotated = rope(x, positions=positions, length=length, role=role)
        expected = formulas.rotate_by_spec(x.double(), spec, positions, length=length, role=role)
        by_reference = rotate_by_spec(x.double(), spec, positions, length=length, role=role)
        torch.testing.assert_close(by_reference, expected, rtol=1e-10, atol=1e-10)
        tempered = role == "q" and spec.query_temperature is not None
        farthest = 4.0 * float(positions.abs().max())
        options = {"rotary_dim": DIM, "pairing": spec.pairing, "rotary_slice": spec.rotary_slice}
        assert_within_budget(rotated, expected, **options, farthest=farthest, copied=not tempered)


def test_one_length_per_sequence_equals_one_call_per_sequence():
    x, ids = vector(0, 3, 2, 5, DIM).float(), torch.arange(5) + 100
    lengths = torch.tensor([10, 64, 4000])
    for rule in (DynamicNTK(1e4, 2, 64), LONG, dataclasses.replace(LONG, short_amplitude=1.5, long_amplitude=2.0)):
        rope = RotaryEmbedding(RopeSpec(DIM, rule))
        together = rope(x, positions=ids, length=lengths)
        for row, length in enumerate(lengths.tolist()):
            alone = rope(x[row : row + 1], positions=ids, length=length)
            assert torch.equal(together[row : row + 1], alone)
        cos, _ = rope.at(ids, length=lengths)
        assert cos.shape == (3, 5, DIM // 2)
        assert torch.equal(rope(x, angles=rope.at(ids, length=lengths)), together)


def test_a_whole_sequence_needs_no_length_and_anything_else_does():
    rope, x = RotaryEmbedding(RopeSpec(DIM, DynamicNTK(1e4, 2, 4))), vector(0, 2, 9, DIM).float()
    assert torch.equal(rope(x), rope(x, length=9))
    assert not torch.equal(rope(x), rope(x, length=4))
    assert torch.equal(rope(x, length=4), RotaryEmbedding(DIM)(x))
    for where in ({"offset": 3}, {"positions": torch.arange(9)}, {"cu_seqlens": torch.tensor([0, 4, 9])}):
        with pytest.raises(RopewalkError, match="unless tokens are one sequence from position 0"):
            rope(x, **where)
        rope(x, **where, length=9)
    for call in (lambda: rope.at(torch.arange(3)), lambda: rope.shift(x, 1), lambda: rope.unrotate(x, offset=1)):
        with pytest.raises(RopewalkError, match="depend on the length"):
            call()


def test_nothing_that_forward_does_is_seen_by_a_later_one():
    rope, x = RotaryEmbedding(RopeSpec(DIM, DynamicNTK(1e4, 2, 8))), vector(0, 1, 40, DIM).float()
    short = rope(x[:, :8])
    rope(x)
    rope(x, length=100_000)
    assert torch.equal(rope(x[:, :8]), short)
    # Prefill in one go and token by token, for a length that is known beforehand.
    whole = rope(x, length=40)
    steps = [rope(x[:, i : i + 1], offset=i, length=40) for i in range(40)]
    assert torch.equal(torch.cat(steps, 1), whole)


def test_xpos_decodes_as_it_prefills():
    rope = RotaryEmbedding(RopeSpec(DIM, xpos=XPos(64)))
    q, k = vector(0, 1, 30, DIM).float(), vector(1, 1, 30, DIM).float()
    whole = rope(q, k)
    steps = [rope(q[:, i : i + 1], k[:, i : i + 1], offset=i) for i in range(30)]
    for got, wanted in zip(zip(*steps, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(got, 1), wanted)
    # A score depends on the distance alone, and falls with it.
    shifted = rope(q, k, offset=20)
    near, far = (a @ b.transpose(-1, -2) for a, b in (whole, shifted))
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)
    with pytest.raises(RopewalkError, match="positions below 64"):
        rope(q, k, offset=40)


def test_roles_are_asked_for_where_they_matter():
    x, ids = vector(0, 1, 5, DIM).float(), torch.arange(5)
    plain, rope = RotaryEmbedding(DIM), RotaryEmbedding(RopeSpec(DIM, xpos=XPos(64)))
    assert torch.equal(plain(x, role="q"), plain(x, role="k"))
    assert not torch.equal(rope(x, role="q"), rope(x, role="k"))
    for call in (lambda: rope(x), lambda: rope.at(ids), lambda: rope.unrotate(x)):
        with pytest.raises(RopewalkError, match='role="q" for queries'):
            call()
    with pytest.raises(RopewalkError, match="'q' or 'k'"):
        plain(x, role="query")
    with pytest.raises(RopewalkError, match="leave role out"):
        rope(x, x, role="q")
    with pytest.raises(RopewalkError, match="separate angles"):
        rope(x, x, angles=rope.at(ids, role="q"))
    q, k = rope(x, x)
    assert torch.equal(rope(x, angles=rope.at(ids, role="q"), role="q"), q)
    assert torch.equal(rope(x, angles=rope.at(ids, role="k"), role="k"), k)


@given(cases(), st.integers(0, 99))
def test_what_was_rotated_can_be_rotated_back(case, seed):
    spec, positions = case()
    rope, x = RotaryEmbedding(spec), vector(seed, 2, 5, spec.head_dim)
    for role in ("q", "k"):
        given_ = {"positions": positions, "length": 700, "role": role}
        torch.testing.assert_close(rope.unrotate(rope(x, **given_), **given_), x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("angles", ["exact", "float32"])
@given(st.sampled_from(RULES), st.sampled_from(RULES), st.integers(0, 99), st.integers(1, 5000), st.integers(1, 5000))
def test_retuned_keys_are_keys_rotated_afresh(dtype, angles, old, new, seed, length, to_length):
    ids = torch.randint(0, 20_000, (2, 6), generator=torch.Generator().manual_seed(seed))
    before, after = (RotaryEmbedding(RopeSpec(DIM, rule, pairing="half", angles=angles)) for rule in (old, new))
    k = vector(seed, 2, 3, 6, DIM)
    kept = before(k.to(dtype), positions=ids, length=length)
    moved = before.retune(kept, to=after, positions=ids, length=length, to_length=to_length)
    # Keys in the cache are rounded. They represent these keys, rotated back.
    represented = before.unrotate(kept.double(), positions=ids, length=length)
    afresh = after(represented, positions=ids, length=to_length)
    if dtype == torch.bfloat16:
        scale = afresh.abs().clamp(min=2.0**-6)
        assert ((moved.double() - afresh).abs() <= 2 * 2.0**-8 * scale).all()
    else:
        tolerance = 1e-6 if dtype == torch.float32 else 1e-9
        # float32 angles are what a float32 model has; float64 input then is as exact as they are.
        torch.testing.assert_close(
            moved.double(), afresh, rtol=tolerance, atol=4 * max(tolerance, 1e-6 if angles == "float32" else 0)
        )


def test_keys_follow_a_model_past_its_trained_length():
    rope, k = RotaryEmbedding(RopeSpec(DIM, LONG)), vector(0, 1, 2, 60, DIM)
    cached = rope(k, length=60)
    assert not torch.allclose(cached, rope(k, length=65))
    moved = rope.retune(cached, to=rope, offset=0, length=60, to_length=65)
    torch.testing.assert_close(moved, rope(k, length=65), rtol=1e-12, atol=1e-12)
    both = rope.retune(cached.expand(2, 2, 60, DIM), to=rope, offset=0, length=60, to_length=torch.tensor([60, 65]))
    torch.testing.assert_close(both, torch.cat((cached, moved)), rtol=1e-12, atol=1e-12)


def test_retune_with_axes_xpos_and_per_head_frequencies():
    k = vector(0, 1, 2, 5, DIM)
    ids = torch.randint(0, 99, (3, 5), generator=torch.Generator().manual_seed(0))
    pairs = [
        (RopeSpec(DIM, axes=AXES[0]), RopeSpec(DIM, Yarn(1e4, 4, 64), axes=AXES[0]), ids),
        (RopeSpec(DIM, xpos=XPos(256)), RopeSpec(DIM, PositionInterpolation(1e4, 2), xpos=XPos(512, 1024)), ids[0]),
        (RopeSpec(DIM, AcrossHeads(1e4, 2)), RopeSpec(DIM, AcrossHeads(500.0, 2)), ids[0]),
    ]
    for old, new, positions in pairs:
        before, after = RotaryEmbedding(old), RotaryEmbedding(new)
        moved = before.retune(before(k, positions=positions, role="k"), to=after, positions=positions)
        torch.testing.assert_close(moved, after(k, positions=positions, role="k"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "other",
    [
        RopeSpec(DIM, pairing="half"),
        RopeSpec(DIM, rotary_dim=8),
        RopeSpec(DIM + 2, rotary_dim=DIM),
        RopeSpec(DIM, axes=AXES[0]),
        RopeSpec(DIM, AcrossHeads(1e4, 2)),
    ],
)
def test_retune_refuses_what_rotates_other_features(other):
    rope, x = RotaryEmbedding(DIM), vector(0, 2, 5, DIM)
    with pytest.raises(RopewalkError, match="the same head_dim, rotary_dim"):
        rope.retune(x, to=RotaryEmbedding(other), positions=torch.arange(5))
    with pytest.raises(RopewalkError, match="a RotaryEmbedding"):
        rope.retune(x, to=other, positions=torch.arange(5))


@given(st.integers(-500, 500), st.sampled_from([None, *AXES]), st.sampled_from([None, XPos(4096)]))
def test_shifted_keys_are_keys_at_other_positions(by, axes, xpos):
    rope = RotaryEmbedding(RopeSpec(DIM, NTK(1e4, 2), axes=axes, xpos=None if axes else xpos))
    ids = torch.arange(500, 505) if axes is None else torch.arange(500, 500 + 5 * axes.count).view(axes.count, 5)
    k = vector(0, 2, 5, DIM)
    moved = rope.shift(rope(k, positions=ids, role="k"), by)
    torch.testing.assert_close(moved, rope(k, positions=ids + by, role="k"), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("as_a_user")
def test_positions_of_axes_are_checked():
    rope, x = RotaryEmbedding(RopeSpec(DIM, axes=AXES[0])), vector(0, 2, 3, 5, DIM)
    for wrong in (torch.zeros(5), torch.zeros(2, 5), torch.zeros(3, 4), torch.zeros(3, 3, 5), torch.zeros(3, 2, 5, 1)):
        with pytest.raises(RopewalkError, match=r"\[3, seq\] or \[3, batch, seq\]|positions \[3, 5\] or \[3, 2, 5\]"):
            rope(x, positions=wrong)
    for missing in ({}, {"offset": 1}, {"cu_seqlens": torch.tensor([0, 5])}):
        with pytest.raises(RopewalkError, match="over 3 position axes"):
            rope(x, **missing)
    batch = torch.randint(0, 50, (3, 2, 5))
    rows = [rope(x[b], positions=batch[:, b]) for b in range(2)]
    assert torch.equal(rope(x, positions=batch), torch.stack(rows))


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    "length", [0, -1, 1.5, True, "9", torch.tensor(1.0), torch.tensor([1, 2, 3]), torch.ones(1, 1)]
)
def test_a_length_that_is_none_is_refused(length):
    rope, x = RotaryEmbedding(RopeSpec(DIM, LONG)), vector(0, 2, 3, 5, DIM)
    with pytest.raises(RopewalkError, match="expected: an int of at least 1, or whole numbers"):
        rope(x, length=length)


@pytest.mark.parametrize(
    "spec", [RopeSpec(DIM, rotary_dim=8, query_temperature=LogTemperature(4)), RopeSpec(DIM, xpos=XPos(64))]
)
def test_in_place_is_the_same(spec):
    rope, q, k = RotaryEmbedding(spec), vector(0, 2, 9, DIM).float(), vector(1, 2, 9, DIM).float()
    wanted = rope(q, k, offset=20)
    assert not torch.allclose(
        wanted[0], RotaryEmbedding(dataclasses.replace(spec, query_temperature=None, xpos=None))(q, offset=20)
    )
    found = rope.rotate_(q, k, offset=20)
    assert found[0] is q
    for mine, other in zip(found, wanted, strict=True):
        assert torch.equal(mine, other)


def test_a_temperature_that_cos_and_sin_do_not_hold_wants_positions():
    rope = RotaryEmbedding(RopeSpec(DIM, rotary_dim=8, query_temperature=LogTemperature(4)))
    x, ids = vector(0, 2, 5, DIM).float(), torch.arange(100, 105)
    angles = rope.at(ids, role="q")
    for call in (rope, rope.unrotate):
        with pytest.raises(RopewalkError, match="the temperature of such features is not in cos and sin"):
            call(x, angles=angles, role="q")
    keys = rope(x, angles=rope.at(ids, role="k"), role="k")
    assert torch.equal(keys, rope(x, positions=ids, role="k"))


def test_xpos_refuses_positions_that_leave_its_bounds():
    rope, x = RotaryEmbedding(RopeSpec(DIM, xpos=XPos(64))), vector(0, 1, 5, DIM).float()
    rope(x, offset=-64, role="k")
    for where in ({"offset": -65}, {"positions": torch.arange(5) - 100}):
        with pytest.raises(RopewalkError, match="positions from -64 on"):
            rope(x, **where, role="k")


def test_frequencies_per_head_take_one_length():
    @dataclasses.dataclass(frozen=True)
    class Rows(Frequencies):
        varies = True

        def evaluate(self, rotary_dim, length=None, arithmetic=FLOAT64):
            rows = arithmetic.array([[1.0] * (rotary_dim // 2), [0.5] * (rotary_dim // 2)])
            return rows if length is None else rows / length

    try:
        rope, x = RotaryEmbedding(RopeSpec(DIM, Rows())), vector(0, 3, 2, 5, DIM)
        assert rope(x, length=9).shape == x.shape
        with pytest.raises(RopewalkError, match="one length for all sequences"):
            rope(x, length=torch.tensor([9, 8, 7]))
    finally:
        Frequencies.known.pop("Rows")


def test_numbers_of_a_rule_are_found_by_what_they_are():
    @dataclasses.dataclass(frozen=True)
    class Choosing(Frequencies):
        """Asks for other numbers when the sequence is long, which a probe at length 1 does not see."""

        varies = True

        def evaluate(self, rotary_dim, length=None, arithmetic=FLOAT64):
            slow = length is not None and bool(length > 16)
            return arithmetic.array([0.1 if slow else 1.0] * (rotary_dim // 2))

    try:
        spec = RopeSpec(4, Choosing())
        cos, _ = RotaryEmbedding(spec).at(torch.tensor([1]), length=99)
        np.testing.assert_allclose(cos[0], np.cos([0.1, 0.1]), rtol=1e-6)
    finally:
        Frequencies.known.pop("Choosing")


@pytest.mark.usefixtures("as_a_user")  # torch 2.15 does not trace the checks of types
def test_a_new_rule_needs_one_class_and_nothing_else():
    @dataclasses.dataclass(frozen=True)
    class Breathing(Frequencies):
        """Made up: slower by the square root of the length, and louder by its logarithm."""

        varies = True
        base: float = 100.0

        def evaluate(self, rotary_dim, length=None, arithmetic=FLOAT64):
            theta = 1.0 / arithmetic.powers(self.base, rotary_dim)
            return theta if length is None else theta / length**0.5

        def amplitude(self, length=None, arithmetic=FLOAT64):
            return 1.0 if length is None else 1 + arithmetic.log(length)

    try:
        spec = RopeSpec(DIM, Breathing(50.0), rotary_dim=8, pairing="half", axes=Axes.chunked([2, 2]))
        assert RopeSpec.from_json(spec.to_json()) == spec
        rope, x, ids = RotaryEmbedding(spec), vector(0, 2, 3, 5, DIM).float(), torch.randint(0, 90, (2, 5))
        rotated = rope(x, positions=ids, length=torch.tensor([9, 30]))
        for row, length in enumerate((9, 30)):
            expected = rotate_by_spec(x[row].double(), spec, ids, length=length)
            assert_within_budget(rotated[row], expected, rotary_dim=8, pairing="half")
        compiled = torch.compile(rope, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, positions=ids, length=torch.tensor([9, 30])), rotated)
    finally:
        Frequencies.known.pop("Breathing")


def test_float32_angles_of_a_length_are_those_of_its_frequencies():
    spec = RopeSpec(DIM, DynamicNTK(1e4, 2, 64), angles="float32")
    cos, _ = RotaryEmbedding(spec).at(torch.arange(200), length=200)
    expected = np.cos(
        np.arange(200, dtype=np.float32)[:, None] * formulas.frequencies(spec.frequencies, DIM, 200).astype(np.float32)
    )
    np.testing.assert_allclose(cos.numpy(), expected, atol=200 * 2**-21)
