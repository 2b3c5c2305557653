"""Ids and offsets at the edges of their dtypes; packed sequences that go on; tables of other libraries."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import ropewalk as rw
from meant import meant
from ropewalk import RopewalkError, RotaryEmbedding
from ropewalk.nn.positions import packed_positions, positions_of_lengths

UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
X = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(5)
FAR = (1 << 62) - 1


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("options", [{}, {"context_length": 9}, {"check_ids": True}])
@meant("cu_seqlens")
def test_unsigned_ids_are_the_numbers_they_are(dtype, options):
    rope, ids = RotaryEmbedding(8, **options), IDS.to(dtype)
    assert torch.equal(rope(X, positions=ids), rope(X, positions=IDS))
    assert torch.equal(rope(X, X, k_positions=ids)[1], rope(X))
    assert torch.equal(rope(X, offset=IDS[1:3].to(dtype)), rope(X, offset=IDS[1:3]))
    assert torch.equal(rope(X[:1], cu_seqlens=IDS[::2].to(dtype)), rope(X[:1], cu_seqlens=IDS[::2]))
    assert torch.equal(rope.at(ids)[1], rope.at(IDS)[1])
    assert torch.equal(rope.shift(rope(X), IDS[2].to(dtype)), rope.shift(rope(X), 2))


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_the_context_length_holds_for_unsigned_ids(dtype):
    rope = RotaryEmbedding(8, context_length=4)
    for call in (lambda: rope(X, positions=IDS.to(dtype)), lambda: rope.at(IDS.to(dtype))):
        with pytest.raises(RopewalkError, match="position 4"):
            call()


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
def test_uint64_past_int64_is_refused(number):
    rope, ids = RotaryEmbedding(8), torch.tensor([0, 1, 2, 3, number], dtype=torch.uint64)
    calls = {
        "positions": lambda: rope(X, positions=ids),
        "k_positions": lambda: rope(X, X, k_positions=ids),
        "at": lambda: rope.at(ids),
        "offset": lambda: rope(X, offset=ids[3:]),
        "shift": lambda: rope.shift(X, ids[4]),
        "alibi": lambda: rw.encoding("alibi", dim=32, num_heads=4).bias(ids, IDS),
        "sinusoidal": lambda: rw.encoding("sinusoidal", dim=8, num_heads=2).embed(X[0], ids),
    }
    for name, call in calls.items():
        with pytest.raises(RopewalkError) as error:
            call()
        assert "2^63" in str(error.value) or "63 bits" in str(error.value), name


def test_uint64_that_nobody_may_look_at_is_refused():
    rope, ids = RotaryEmbedding(8), IDS.to(torch.uint64)
    with pytest.raises(RopewalkError, match="pass int64"):
        rope(X.to("meta"), positions=ids.to("meta"))
    with pytest.raises(RopewalkError, match="uint64"):
        rope(X.to("meta"), offset=ids[:2].to("meta"))


def test_offsets_from_one_end_to_the_other():
    rope = RotaryEmbedding(8)
    exact = rope(X.double(), positions=IDS + 7)
    for offset in (FAR, -FAR, FAR, 0, -FAR, FAR - 4, 7):
        rotated = rope(X, offset=offset)
        assert torch.equal(rotated, rope(X, positions=IDS + offset))
    assert torch.allclose(rotated.double(), exact, atol=1e-6)
    for far in (FAR + 1, -FAR - 1, 1 << 63, -(1 << 63), torch.tensor(FAR + 1), torch.tensor([0, -(1 << 63)])):
        with pytest.raises(RopewalkError, match="less than 63 bits"):
            rope(X, offset=far)
        with pytest.raises(RopewalkError, match="less than 63 bits"):
            rope.shift(X, far)


@pytest.mark.parametrize("seq_dim", [-2, -3])
@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("ends", [[0, 5, 16], [0, 0, 16], [0, 3, 3, 14], [0, 16, 16], [0, 0, 0]])
@meant("cu_seqlens")
def test_packed_sequences_that_go_on(ends, dims, seq_dim):
    rope = RotaryEmbedding(8, seq_dim=seq_dim, pairing="half")
    x = torch.randn(2, 16, 8) if seq_dim == -2 else torch.randn(16, 2, 8)
    x = x if dims == 3 else x[None]
    offsets = torch.arange(len(ends) - 1) * 1000 + 3
    spans = [*itertools.pairwise(ends), (ends[-1], 16)]
    # What is past the last end is padding, and counts from 0.
    parts = [x.narrow(seq_dim, start, stop - start) for start, stop in spans]
    apart = [rope(part, offset=n) for part, n in zip(parts, [*offsets.tolist(), 0], strict=True)]
    expected = torch.cat(apart, seq_dim)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    assert torch.equal(rope(x, cu_seqlens=cu_seqlens, offset=offsets), expected)
    assert torch.equal(rope(x, x, cu_seqlens=cu_seqlens, offset=offsets.int())[1], expected)
    assert torch.equal(rope.rotate_(x.clone(), cu_seqlens=cu_seqlens, offset=offsets), expected)
    assert torch.allclose(rope.unrotate(expected, cu_seqlens=cu_seqlens, offset=offsets), x, atol=1e-6)
    normed = rw.qk_norm_rope(x, x, rope, cu_seqlens=cu_seqlens, offset=offsets)[0]
    assert torch.allclose(
        normed, rw.qk_norm_rope(x, x, rope, positions=packed_positions(cu_seqlens, 16, offsets))[0], atol=1e-6
    )
    whole = rope(x, cu_seqlens=cu_seqlens, offset=7)
    assert torch.equal(whole, rope(x, cu_seqlens=cu_seqlens, offset=torch.full_like(offsets, 7)))
    assert torch.equal(whole, rope(x, cu_seqlens=cu_seqlens, offset=torch.tensor(7)))


def test_packed_offsets_without_an_eager_look_and_compiled():
    rope, x = RotaryEmbedding(8), torch.randn(1, 2, 16, 8)
    ends, offsets = torch.tensor([0, 5, 16]), torch.tensor([9, 100])
    compiled = torch.compile(lambda x, ends, n: rope(x, cu_seqlens=ends, offset=n), fullgraph=True, backend="eager")
    expected = rope(x, cu_seqlens=ends, offset=offsets)
    assert torch.allclose(compiled(x, ends, offsets), expected, atol=1e-6)
    assert rope(x.to("meta"), cu_seqlens=ends.to("meta"), offset=offsets.to("meta")).shape == x.shape


def test_packed_offsets_that_do_not_fit():
    rope, ends = RotaryEmbedding(8, context_length=20), torch.tensor([0, 5, 16])
    x = torch.ones(1, 2, 16, 8)
    for offset in (torch.tensor([1, 2, 3]), torch.tensor([0.5, 1]), 1.5, torch.tensor([[1, 2]])):
        with pytest.raises(RopewalkError, match=r"whole numbers \[2\], one per sequence"):
            rope(x, cu_seqlens=ends, offset=offset)
    with pytest.raises(RopewalkError, match="position 20"):
        rope(x, cu_seqlens=ends, offset=torch.tensor([0, 10]))
    with pytest.raises(RopewalkError, match="cu_seqlens with offset"):
        rope(x, cu_seqlens=ends, offset=1, positions=torch.arange(16))
    with pytest.raises(RopewalkError, match="cu_seqlens with offset"):
        rope(x, x, cu_seqlens=ends, offset=1, k_positions=torch.arange(16))


def test_positions_of_packed_sequences_with_offsets():
    expected = [7, 8, 9, 20, 21, 0]
    assert packed_positions(torch.tensor([0, 3, 5]), 6, torch.tensor([7, 20])).tolist() == expected
    assert positions_of_lengths(torch.tensor([3, 2]), 6, torch.tensor([7, 20])).tolist() == expected
    assert packed_positions(torch.tensor([0, 3, 5]), 6, 2).tolist() == [2, 3, 4, 2, 3, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 4), (1, 5, 4), (2, 5, 4), (1, 4, 5, 4), (2, 4, 5, 4), (1, 1, 5, 4)])
def test_tables_in_half_precision_rotate_in_float32(dtype, x_dtype, shape):
    rope, x = RotaryEmbedding(8), X.to(x_dtype)
    cos, sin = (table.expand(shape).to(dtype) for table in rope.at(IDS))
    expected = rope(x, angles=(cos.float(), sin.float()))
    assert torch.equal(rope(x, angles=(cos, sin)), expected)
    assert torch.equal(rope(x, x, angles=(cos, sin))[1], expected)
    assert torch.equal(rope.rotate_(x.clone(), angles=(cos, sin)), expected)
    assert torch.equal(
        rw.qk_norm_rope(x, x, rope, angles=(cos, sin))[0],
        rw.qk_norm_rope(x, x, rope, angles=(cos.float(), sin.float()))[0],
    )


def test_gradients_of_half_precision_tables():
    rope = RotaryEmbedding(8)
    cos, sin = (table.bfloat16().requires_grad_() for table in rope.at(IDS))
    rope(X, angles=(cos, sin)).square().sum().backward()
    assert cos.grad is not None
    assert cos.grad.dtype == torch.bfloat16
    assert sin.grad is not None
    assert sin.grad.shape == (5, 4)


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((9, 4), r"pass cos\[:seq\] with seq = 5; and the same for sin"),
        ((1, 9, 4), r"pass cos\[..., :seq, :\]"),
        ((5, 8), r"pass cos\[..., :4\], or cos\[..., ::2\] if"),
        ((9, 8), r"cos\[:seq\] with seq = 5, then cos\[..., :4\]"),
        ((2, 5, 1, 4), r"pass cos.squeeze\(-2\)"),
        ((5, 1, 4), r"pass cos.squeeze\(-2\)"),
        ((1, 3, 5, 4), "in two calls"),
        ((4, 5, 4), r"cos\[None\] for tables per head, \[1 or batch, heads, seq, d/2\]"),
        ((3, 5, 4), r"call rope.at\(positions\)"),
        ((4, 4), r"call rope.at\(positions\)"),
    ],
)
def test_tables_that_do_not_fit_get_advice(shape, advice):
    table = torch.ones(shape)
    with pytest.raises(RopewalkError, match=advice):
        RotaryEmbedding(8)(X, angles=(table, table))


def test_tables_of_wrong_dtypes():
    rope = RotaryEmbedding(8)
    cos, sin = rope.at(IDS)
    for x, tables in (
        (X.double(), (cos, sin)),
        (X.double(), (cos.bfloat16(), sin.bfloat16())),
        (X, (cos.double(), sin.double())),
        (X, (cos.bfloat16(), sin)),
        (X, (cos.to(torch.float8_e5m2), sin.to(torch.float8_e5m2))),
        (X, (cos.long(), sin.long())),
    ):
        with pytest.raises(RopewalkError, match="float32, bfloat16 or float16"):
            rope(x, angles=tables)
    with pytest.raises(RopewalkError, match=r"pass a tuple: angles=\(cos, sin\)"):
        rope(X, angles=[cos, sin])


def test_tables_with_the_sequence_before_the_heads_get_advice():
    table = torch.ones(1, 5, 2, 4)
    with pytest.raises(RopewalkError, match=r"pass cos.transpose\(1, 2\)"):
        RotaryEmbedding(8, seq_dim=-3)(torch.ones(2, 5, 2, 8), angles=(table, table))
    with pytest.raises(RopewalkError, match=r"angles=\(freqs.real, freqs.imag\)"):
        RotaryEmbedding(8)(X, angles=torch.ones(5, 4, dtype=torch.complex64))
    with pytest.raises(RopewalkError, match=r"cast both: cos.to\(torch.float32\)"):
        RotaryEmbedding(8)(X, angles=(torch.ones(5, 4).double(), torch.ones(5, 4).double()))


@pytest.mark.parametrize("offset", [100, torch.tensor(100), torch.tensor([100]), "one per sequence"])
@pytest.mark.filterwarnings("ignore")
def test_traces_and_exports_have_any_number_of_sequences(offset):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope = RotaryEmbedding(8)

        def forward(self, x, ends, n):
            return self.rope(x, cu_seqlens=ends, offset=n if isinstance(offset, str) else offset)

    x, model = torch.randn(1, 2, 30, 8), Model()
    few = torch.tensor([0, 4, 10]), torch.tensor([3, 50])
    many = torch.tensor([0, 4, 10, 25]), torch.tensor([3, 50, 700])
    traced = torch.jit.trace(model, (x, *few), check_trace=False)
    assert torch.allclose(traced(x, *many), model(x, *many), atol=1e-6)
    number = torch.export.Dim("number", min=2, max=64)
    shapes = (None, {0: number + 1}, {0: number} if isinstance(offset, str) else None)
    exported = torch.export.export(
        model, (x, many[0], many[1] if isinstance(offset, str) else few[1]), dynamic_shapes=shapes
    )
    given = (few[0], few[1])
    assert torch.allclose(exported.module()(x, *given), model(x, *given), atol=1e-6)


@pytest.mark.parametrize("first", [[0, 1, 2, 3], [5, 6, 7, 0, 1], [5, 6, 0, -3]])
def test_offset_0_has_no_graph_of_its_own(first):
    counter, rope = CompileCounter(), RotaryEmbedding(8)
    torch._dynamo.reset()
    rotate = torch.compile(lambda x, n: rope(x, offset=n), backend=counter, fullgraph=True)
    for offset in first:
        assert torch.allclose(rotate(X, offset), rope(X, offset=offset), atol=1e-6)
    assert counter.frame_count == 2
