"""rotation_matrix: the laws of R_m, dense and sparse, and that RotaryEmbedding multiplies by it."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ropewalk as rw
from ropewalk import rotation_matrix
from strategies import bases, tolerance

NEAR, FAR = 1 << 13, 1 << 20
LAYOUTS = [(pairing, part) for pairing in ("interleaved", "half") for part in ("leading", "trailing")]


@st.composite
def fields(draw: Any) -> dict[str, Any]:
    """The fields of a spec. The test makes the spec of them: a type-checked call draws random numbers."""
    pairs, rest = draw(st.integers(1, 12)), draw(st.integers(0, 4))
    return {
        "head_dim": 2 * (pairs + rest),
        "base": draw(bases),
        "rotary_dim": 2 * pairs,
        "pairing": draw(st.sampled_from(["interleaved", "half"])),
        "rotary_slice": draw(st.sampled_from(["leading", "trailing"])),
        "sign": draw(st.sampled_from([1, -1])),
        "axes": draw(st.sampled_from([1, 2, 3])),
    }


def made(head_dim: int, base: float, axes: int, **more: Any) -> rw.RopeSpec:
    pairs = more["rotary_dim"] // 2
    sections = rw.Axes.chunked([pairs - axes + 1] + [1] * (axes - 1)) if 1 < axes <= pairs else None
    return rw.RopeSpec(head_dim, rw.Plain(base), axes=sections, **more)


def position_of(spec: rw.RopeSpec, *numbers: int) -> Any:
    """A position of the spec: the first number, or one number per axis."""
    return numbers[0] if spec.axes is None else [numbers[a % len(numbers)] for a in range(spec.axes.count)]


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def permutation(dim: int) -> torch.Tensor:
    """P with (P x)_2i = x_i and (P x)_(2i+1) = x_(i + dim/2): features in half order to interleaved order."""
    order = [feature for i in range(dim // 2) for feature in (i, i + dim // 2)]
    return torch.eye(dim, dtype=torch.float64)[order]


# The issue asks for 1e-12 up to 2^13 and 1e-10 up to 2^20. Rounded angles would reach 1.2e-10 at 2^20.
@pytest.mark.parametrize(("reach", "allowed"), [(NEAR, 1e-12), (FAR, 1e-10), (1 << 24, 1e-10)])
@pytest.mark.parametrize(("pairing", "part"), LAYOUTS)
def test_rotations_compose_at_the_largest_positions(pairing, part, reach, allowed):
    spec = rw.RopeSpec(136, rotary_dim=128, pairing=pairing, rotary_slice=part)
    drawn = torch.randint(-reach, reach, (2, 40), generator=torch.Generator().manual_seed(reach))
    m, n = torch.cat((drawn, torch.tensor([[reach, reach, reach - 1], [reach, -reach, 1 - reach]])), dim=1)
    first, second = rotation_matrix(spec, m), rotation_matrix(spec, n)
    assert off(first @ second, rotation_matrix(spec, m + n)) <= allowed
    assert off(first.mT @ second, rotation_matrix(spec, n - m)) <= allowed


@given(fields(), st.integers(-FAR, FAR), st.integers(-FAR, FAR), st.integers(-FAR, FAR))
def test_the_laws_hold_for_every_spec(drawn, m, n, other):
    spec = made(**drawn)
    a, b = position_of(spec, m, other), position_of(spec, n, m)
    total = position_of(spec, m + n, other + m)
    between = position_of(spec, n - m, m - other)
    first, second = rotation_matrix(spec, a), rotation_matrix(spec, b)
    identity = torch.eye(spec.head_dim, dtype=torch.float64)
    assert off(first @ second, rotation_matrix(spec, total)) <= 1e-12
    assert off(first.T @ second, rotation_matrix(spec, between)) <= 1e-12
    assert off(first.T @ first, identity) <= 1e-14
    assert torch.equal(rotation_matrix(spec, position_of(spec, 0)), identity)


@given(fields(), st.integers(-FAR, FAR), st.integers(-FAR, FAR))
def test_the_module_multiplies_by_it(drawn, m, n):
    spec = made(**drawn)
    at = position_of(spec, m, n)
    rope = rw.RotaryEmbedding(spec)
    # One token per row of the identity: row i of the result is R e_i, the column i of R.
    ids = torch.tensor(at)[..., None].expand(*torch.tensor(at).shape, spec.head_dim)
    columns = rope(torch.eye(spec.head_dim, dtype=torch.float64), positions=ids)
    assert off(rotation_matrix(spec, at), columns.T) <= tolerance(m, n)


@given(fields(), st.integers(-FAR, FAR), st.integers(-FAR, FAR))
def test_sparse_has_the_same_numbers_and_always_the_same_places(drawn, m, n):
    spec = made(**drawn)
    at = position_of(spec, m, n)
    dense, sparse = rotation_matrix(spec, at), rotation_matrix(spec, at, sparse=True)
    assert sparse.layout == torch.sparse_coo
    assert sparse.is_coalesced()
    assert torch.equal(sparse.to_dense(), dense)
    # Coalescing again, without the flag, neither sorts nor adds anything.
    again = torch.sparse_coo_tensor(sparse.indices(), sparse.values(), sparse.shape, check_invariants=True).coalesce()
    assert torch.equal(again.indices(), sparse.indices())
    zero = rotation_matrix(spec, position_of(spec, 0), sparse=True)
    assert torch.equal(zero.indices(), sparse.indices())
    assert sparse._nnz() == 2 * spec.rotated_dim + (spec.head_dim - spec.rotated_dim)
    x = torch.linspace(-1, 1, spec.head_dim * 3, dtype=torch.float64).view(spec.head_dim, 3)
    assert off(sparse @ x, dense @ x) <= 1e-14
    with torch.sparse.check_sparse_tensor_invariants(True), warnings.catch_warnings():
        # torch multiplies two sparse matrices in another format, about which it warns.
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        assert off((sparse @ sparse).to_dense(), dense @ dense) <= 1e-14


def test_against_the_formula():
    # RoFormer, eq. 15, number by number: d = 4, m = 3.
    c0, s0, c1, s1 = math.cos(3), math.sin(3), math.cos(0.03), math.sin(0.03)
    expected = torch.tensor([[c0, -s0, 0, 0], [s0, c0, 0, 0], [0, 0, c1, -s1], [0, 0, s1, c1]], dtype=torch.float64)
    assert off(rotation_matrix(rw.RopeSpec(4), 3), expected) < 1e-15
    half = torch.tensor([[c0, 0, -s0, 0], [0, c1, 0, -s1], [s0, 0, c0, 0], [0, s1, 0, c1]], dtype=torch.float64)
    assert off(rotation_matrix(rw.RopeSpec(4, pairing="half"), 3), half) < 1e-15
    kept = rotation_matrix(rw.RopeSpec(4, rotary_dim=2, rotary_slice="trailing", sign=-1), 3)
    assert off(kept[:2, :2], torch.eye(2, dtype=torch.float64)) == 0
    assert off(kept[2:, 2:], torch.tensor([[c0, s0], [-s0, c0]], dtype=torch.float64)) < 1e-15
    assert not kept[:2, 2:].any()
    assert not kept[2:, :2].any()


@given(st.integers(1, 16), bases, st.integers(-FAR, FAR))
def test_the_pairings_differ_by_a_permutation(pairs, base, m):
    half, interleaved = (
        rotation_matrix(rw.RopeSpec(2 * pairs, rw.Plain(base), pairing=pairing), m)
        for pairing in ("half", "interleaved")
    )
    move = permutation(2 * pairs)
    assert torch.equal(move @ half @ move.T, interleaved)


@given(fields(), st.lists(st.integers(-FAR, FAR), min_size=2, max_size=2), st.booleans())
def test_many_positions_at_once(drawn, numbers, sparse):
    spec = made(**drawn)
    ids = torch.tensor(numbers).view(2, 1)
    ids = ids if spec.axes is None else torch.stack([ids + a for a in range(spec.axes.count)])
    together = rotation_matrix(spec, ids, sparse=sparse)
    assert together.shape == (2, 1, spec.head_dim, spec.head_dim)
    for i, matrix in enumerate(together.to_dense()):
        assert torch.equal(matrix[0], rotation_matrix(spec, ids[..., i, 0]))


@pytest.mark.parametrize("sparse", [False, True])
def test_frequencies_per_head(sparse):
    spec = rw.RopeSpec(8, rw.AcrossHeads(1e4, 3), rotary_dim=6, pairing="half")
    matrices = rotation_matrix(spec, 1000, sparse=sparse)
    assert matrices.shape == (3, 8, 8)
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = rw.RotaryEmbedding(spec)(x[:, None], offset=1000)[:, 0]
    assert off((matrices.to_dense() @ x[..., None])[..., 0], expected) <= tolerance(1000)
    assert rotation_matrix(spec, torch.arange(5), sparse=sparse).shape == (5, 3, 8, 8)


# A spec, the number of positions in the sequence, and the roles that differ.
FACTORS: list[tuple[rw.RopeSpec, int | None, list[Any]]] = [
    (rw.RopeSpec(12, rw.Yarn(1e4, 8, 512), rotary_dim=8), None, [None]),
    (rw.RopeSpec(12, rw.DynamicNTK(1e4, 4, 64), rotary_dim=8), 300, [None]),
    (rw.RopeSpec(12, rw.LongRope(1e4, [1.0] * 4, [2.0] * 4, 64, 4), rotary_dim=8), 300, ["q"]),
    (rw.RopeSpec(12, rotary_dim=8, xpos=rw.XPos(1024), rotary_slice="trailing"), None, ["q", "k"]),
    (rw.RopeSpec(12, rotary_dim=8, query_temperature=rw.LogTemperature(32)), None, ["q", "k"]),
    (
        rw.RopeSpec(8, rw.AcrossHeads(1e4, 2), xpos=rw.XPos(1024), query_temperature=rw.StepTemperature(0.1, 64)),
        None,
        ["q"],
    ),
]


@pytest.mark.parametrize(("spec", "length", "roles"), FACTORS)
def test_factors_are_those_of_the_module(spec, length, roles):
    rope, ids = rw.RotaryEmbedding(spec), torch.tensor([0, 3, 250])
    x = torch.randn(2, 3, spec.head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for role in roles:
        matrices = rotation_matrix(spec, ids, length=length, role=role)
        tokens = x.transpose(0, 1) if rope.heads else x
        ours = (matrices @ tokens[..., None])[..., 0]
        ours = ours.transpose(0, 1) if rope.heads else ours
        expected = rope(x, positions=ids, length=length, role=role)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        results.append(ours)
    assert len(results) == 1 or off(*results) > 0.01


@pytest.mark.usefixtures("as_a_user")
def test_dtype_and_device():
    spec = rw.RopeSpec(8)
    exact = rotation_matrix(spec, 70_000)
    assert exact.dtype == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(rotation_matrix(spec, 70_000, dtype=dtype), exact.to(dtype))
        assert torch.equal(rotation_matrix(spec, 70_000, dtype=dtype, sparse=True).to_dense(), exact.to(dtype))
    for device in ("meta", torch.device("meta")):
        assert rotation_matrix(spec, 1, device=device).device.type == "meta"
        assert rotation_matrix(spec, 1, device=device, sparse=True).device.type == "meta"
    with torch.device("meta"):
        assert rotation_matrix(spec, 1).device.type == "meta"
        assert rotation_matrix(spec, 1, device="cpu").tolist() == rotation_matrix(spec, 1, device="cpu").tolist()
        assert torch.equal(rotation_matrix(spec, 70_000, device="cpu"), exact)
    for at in (70_000.0, np.int64(70_000), np.float64(70_000), torch.tensor(70_000), torch.tensor(7e4), [70_000]):
        assert torch.equal(rotation_matrix(spec, at).view(8, 8), exact)


def test_fractions_are_positions_too():
    spec = rw.RopeSpec(4)
    assert rotation_matrix(spec, 0.5)[0, 0] == math.cos(0.5)
    assert off(rotation_matrix(spec, 0.1) @ rotation_matrix(spec, 0.2), rotation_matrix(spec, 0.1 + 0.2)) < 1e-15


SPEC = rw.RopeSpec(4)
TWO = rw.RopeSpec(4, axes=rw.Axes.chunked([1, 1]))


@pytest.mark.parametrize(
    ("spec", "position", "options", "expected", "got"),
    [
        (128, 1, {}, "a RopeSpec", "128"),
        (rw.RotaryEmbedding(4), 1, {}, "a RopeSpec", "RotaryEmbedding"),
        (SPEC, float("nan"), {}, "finite", "nan"),
        (SPEC, float("inf"), {}, "finite", "inf"),
        (SPEC, True, {}, "a position", "True"),
        (SPEC, 1j, {}, "a position", "1j"),
        (SPEC, "3", {}, "a position", "'3'"),
        (SPEC, None, {}, "a position", "None"),
        (SPEC, [1, True], {}, "a position", "True"),
        (SPEC, [1, [2, 3]], {}, "a position", "[2, 3]"),
        (SPEC, torch.tensor(True), {}, "a position", "torch.bool"),
        (SPEC, torch.tensor(1j), {}, "a position", "torch.complex64"),
        (SPEC, torch.tensor(1.0).bfloat16(), {}, "a position", "torch.bfloat16"),
        (SPEC, torch.tensor([1.0, float("nan")]), {}, "finite", "nan"),
        (SPEC, torch.ones(2, device="meta"), {}, "a position", "meta"),
        (SPEC, torch.ones(2).to_sparse(), {}, "a position", "sparse"),
        (TWO, 3, {}, "one number for each of the 2 axes", "one number"),
        (TWO, [1, 2, 3], {}, "one number for each of the 2 axes", "[3]"),
        (TWO, torch.arange(3), {}, "one number for each of the 2 axes", "[3]"),
        (rw.RopeSpec(4, rw.Explicit([1e300, 1.0])), 1e10, {}, "finite angles", "1e+10"),
        (SPEC, 1, {"sparse": 1}, "True or False", "1"),
        (SPEC, 1, {"dtype": torch.int64}, "a floating-point dtype", "torch.int64"),
        (SPEC, 1, {"dtype": "float32"}, "a floating-point dtype", "'float32'"),
        (SPEC, 1, {"device": "cudaa"}, "a device", "'cudaa'"),
        (SPEC, 1, {"device": ""}, "a device", "''"),
        (SPEC, 1, {"device": "cpu:x"}, "a device", "'cpu:x'"),
        (SPEC, 1, {"device": "cuda:-1"}, "a device", "'cuda:-1'"),
        (SPEC, 1, {"device": "cuda:99"}, "a device that this machine has", "'cuda:99'"),
        (SPEC, 1, {"device": torch.device("cuda:99")}, "a device that this machine has", "cuda"),
        (SPEC, 1, {"device": "privateuseone"}, "a device that this machine has", "'privateuseone'"),
        (SPEC, 1, {"device": 3.5}, "a device", "3.5"),
        (SPEC, 1, {"device": 0}, "a device", "0"),
        (SPEC, 1, {"device": True}, "a device", "True"),
        (SPEC, 1, {"device": ["cpu"]}, "a device", "['cpu']"),
        (SPEC, 1, {"device": torch.float32}, "a device", "torch.float32"),
        (SPEC, 1, {"device": torch.ones(1)}, "a device", "Tensor"),
        (SPEC, 1, {"role": "v"}, "'q' or 'k'", "'v'"),
        (SPEC, 1, {"length": 0}, "an integer of at least 1", "0"),
        (rw.RopeSpec(4, xpos=rw.XPos(64)), 1, {}, 'role="q" for queries or role="k" for keys', "no role"),
        (rw.RopeSpec(4, query_temperature=rw.LogTemperature(4)), 1, {}, 'role="q" for queries', "no role"),
        (rw.RopeSpec(4, rw.DynamicNTK(1e4, 2, 64)), 1, {}, "length=, the number of positions", "no length"),
        (rw.RopeSpec(4, angles="float32"), 1, {}, 'angles="exact"', "angles='float32'"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_bad_input_has_four_parts(spec, position, options, expected, got):
    with pytest.raises(rw.RopewalkError) as error:
        rotation_matrix(spec, position, **options)
    assert "rotation_matrix(" in error.value.asked or "length" in error.value.asked
    assert expected in error.value.expected
    assert got in error.value.got
    assert error.value.do


@pytest.mark.usefixtures("as_a_user")
def test_an_argument_of_another_name_is_refused():
    with pytest.raises(rw.RopewalkError):
        rotation_matrix(SPEC, 1, layout="coo")  # pyright: ignore[reportCallIssue]
