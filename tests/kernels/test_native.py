"""The C kernel beside the torch path: memory of every shape, odd numbers, and what must not reach it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk import RopeSpec, RotaryEmbedding
from ropewalk.errors import RopewalkError
from ropewalk.kernels.angles.torch import radix_table
from ropewalk.kernels.native import extension
from ropewalk.kernels.qk_norm import native as norm_native
from ropewalk.kernels.rotate import native as rotate_native
from ropewalk.kernels.types import Layout, Norm
from ropewalk.ops import backend_reasons
from ropewalk.reference import assert_within_budget, rotate
from strategies import theta, vector

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TABLES = [torch.outer(torch.arange(9, dtype=torch.float64), theta(16)).cos(), vector(7, 9, 8)]


def test_it_was_built():
    # `make test` asks for a C compiler: without this the tests below would hold the torch path twice.
    assert extension.MISSING is None
    assert backend_reasons()["native"] is None
    assert extension.instructions() in ("neon", "avx2", "sse2", "portable")


def rotated(x, dtype, pairing="interleaved", **options):
    layout = Layout(pairing == "interleaved", options.pop("start", 0), options.pop("seq_dim", -2))
    working = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = (table.to(working) for table in TABLES)
    return rotate_native.rotate(x, None, cos, sin, layout, **options)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_memory_of_every_shape_gives_the_same_bits(dtype, pairing):
    x = vector(0, 2, 3, 9, 16).to(dtype)
    expected = rotated(x.contiguous(), dtype, pairing)
    odd = torch.zeros(2 * 3 * 9 * 16 * x.element_size() + 1, dtype=torch.uint8)
    misaligned = torch.frombuffer(odd.numpy(), dtype=dtype, offset=1, count=x.numel()).view(x.shape)
    misaligned.copy_(x)
    assert misaligned.data_ptr() % 2 == 1
    for name, view in {
        "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
        "sequence last": x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2),
        "batch last": x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0),
        "every other feature": x.repeat_interleave(2, -1)[..., ::2],
        "packed": torch.stack((x, x + 1, x + 2), 2)[:, :, 0],
        "an odd offset": torch.cat((x[..., :3], x), -1)[..., 3:],
        "misaligned": misaligned,
    }.items():
        assert torch.equal(view, x), name
        assert torch.equal(rotated(view, dtype, pairing), expected), name
    one = x[:1].expand(4, 3, 9, 16)
    assert torch.equal(rotated(one, dtype, pairing), expected[:1].expand(4, 3, 9, 16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_in_place_gives_the_same_bits_and_touches_nothing_else(dtype, pairing):
    packed = vector(1, 2, 9, 5, 24).to(dtype)
    before, x = packed.clone(), packed[:, :, 1:4].transpose(1, 2)
    expected = rotated(x.contiguous(), dtype, pairing, start=3)
    rotated(x, dtype, pairing, start=3, in_place=True)
    assert torch.equal(x, expected)
    assert torch.equal(packed[:, :, 0], before[:, :, 0])
    assert torch.equal(packed[:, :, 4], before[:, :, 4])
    assert torch.equal(x[..., :3], before[:, :, 1:4].transpose(1, 2)[..., :3])


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_rounded_as_torch_rounds(dtype, pairing):
    # The product of each number with cos, rounded once; sin is 0, and so is the other member of the pair.
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    for cos in (1.0, 0.3, -0.99999, 2.0**-9, 1.2772588):
        a = numbers.view(-1, 1, 1)
        x = torch.cat((a, torch.zeros_like(a)), -1)
        table = torch.full((1, 1), cos)
        (y,) = rotate_native.rotate(x, None, table, torch.zeros(1, 1), Layout(pairing == "interleaved", 0, -2))
        expected = (numbers.float() * torch.tensor(cos)).to(dtype)
        got = y[:, 0, 0]
        assert torch.equal(got.isnan(), expected.isnan())
        there = ~got.isnan()
        assert torch.equal(got[there], expected[there])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [1, 8, 40])
def test_a_nan_stays_a_nan_whatever_its_bits(dtype, pairs):
    # 0x7fffffff is what a GPU makes; rounded to bfloat16 by a sum alone it would become -0.
    for bits in (0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001):
        nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        assert nan.isnan()
        x = torch.ones(1, 3, 2, 2 * pairs, dtype=dtype)
        working = torch.float64 if dtype == torch.float64 else torch.float32
        for place in (0, 1):
            tables = [torch.ones(2, pairs, dtype=working), torch.zeros(2, pairs, dtype=working)]
            tables[place][1, -1] = nan.to(working) if working == torch.float64 else nan
            (y,) = rotate_native.rotate(x, None, *tables, Layout(True, 0, -2))
            assert y[:, :, 1, -2:].isnan().all()
            assert not y[:, :, 0].isnan().any()
            assert not y[:, :, 1, :-2].isnan().any()
        weight = torch.ones(2 * pairs, dtype=working)
        weight[0] = nan.to(working) if working == torch.float64 else nan
        tables = [torch.ones(2, pairs, dtype=working), torch.zeros(2, pairs, dtype=working)]
        (y,) = norm_native.norm_rotate([x], [weight], *tables, Layout(True, 0, -2), Norm(1e-6))
        assert y[..., :2].isnan().all()
        assert not y[..., 2:].isnan().any()


def test_infinities_do_as_the_formula_does():
    x = torch.tensor([[[torch.inf, 1.0, -torch.inf, 2.0]]])
    cos, sin = torch.full((1, 2), 0.6), torch.full((1, 2), 0.8)
    (y,) = rotate_native.rotate(x, None, cos, sin, Layout(True, 0, -2))
    assert y.tolist() == [[[torch.inf, torch.inf, -torch.inf, -torch.inf]]]


def test_the_imaginary_part_of_a_conjugate():
    # Its memory has every sign the other way, and its type is plain.
    z = torch.complex(vector(0, 1, 2, 3, 8), vector(1, 1, 2, 3, 8)).conj()
    assert z.imag.is_neg()
    rope, expected = RotaryEmbedding(8), RotaryEmbedding(8)(z.imag.resolve_neg().clone())
    rope(torch.ones(1, 2, 3, 8, dtype=torch.float64))  # from here on plain tensors go straight to C
    for _ in range(2):
        assert torch.allclose(rope(z.imag), expected, atol=1e-15)


def zero_tensor(shape):
    return torch._efficientzerotensor(shape)  # pyright: ignore[reportPrivateImportUsage]


def functional_tensor(shape):
    return torch._to_functional_tensor(torch.zeros(shape))  # pyright: ignore[reportPrivateImportUsage]


@pytest.mark.parametrize("make", [zero_tensor, functional_tensor])
def test_tensors_of_a_plain_type_without_memory(make):
    rope = RotaryEmbedding(8)
    rope(torch.ones(1, 2, 3, 8))
    y = rope(make((1, 2, 3, 8)))
    if make is functional_tensor:
        y = torch._from_functional_tensor(y)  # pyright: ignore[reportPrivateImportUsage]
    assert torch.equal(y + 0.0, torch.zeros(1, 2, 3, 8))
    with pytest.raises(ValueError, match="a strided tensor on the CPU"):
        rotated(zero_tensor((1, 2, 9, 16)), torch.float32)


def test_in_place_is_seen_by_autograd():
    rope, w = RotaryEmbedding(8), torch.ones(1, 2, 3, 8, requires_grad=True)
    x = torch.ones(1, 2, 3, 8)
    product = w * x
    with torch.no_grad():
        rope.rotate_(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_dispatch_mode_sees_the_operations():
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    rope, x = RotaryEmbedding(8), torch.ones(1, 2, 3, 8)
    rope(x)
    with Log():
        rope(x)
    assert any("mul" in name for name in seen)


def test_what_is_not_plain_never_reaches_it(monkeypatch):
    def never(*args):
        raise AssertionError("the C kernel was called")

    monkeypatch.setattr(extension.NATIVE, "rotate", never)
    monkeypatch.setattr(extension.NATIVE, "shortcut", never)
    rope, x = RotaryEmbedding(8), vector(0, 2, 3, 5, 8).float()

    class Subclass(torch.Tensor):
        pass

    rope(x.as_subclass(Subclass))
    torch.func.vmap(rope)(x)
    torch.func.jvp(rope, (x,), (x,))
    rope(x.to("meta"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        rope(mode.from_tensor(x))
    with pytest.raises(AssertionError, match="was called"):
        rope(x)
    with pytest.raises(AssertionError, match="was called"):
        rope(x, positions=torch.arange(5))


def test_a_forced_backend_does_not_fall_back_in_silence():
    rope, x = RotaryEmbedding(8, backend="native"), vector(0, 2, 3, 5, 8).float()
    with pytest.raises(RopewalkError, match="leave backend out"):
        torch.func.vmap(rope)(x)
    with pytest.raises(RopewalkError, match="leave backend out"):
        rope(x.to("meta"))
    cos, sin = (table.requires_grad_() for table in rope.at(torch.arange(5)))
    with pytest.raises(RopewalkError, match="gradients of cos and sin"):
        rope(x, angles=(cos, sin))


def test_bad_arguments_are_refused_before_a_pointer_is_taken():
    native, x, table = extension.NATIVE, torch.ones(1, 2, 3, 8), torch.ones(3, 4)
    good = (x, None, torch.empty_like(x), None, table, table, 0, 0, -2, True, False, 1)
    native.rotate(*good)  # pyright: ignore[reportOptionalMemberAccess]
    for place, bad in {
        0: (x.tolist(), x.to("meta"), x.int(), x[..., :6], x.double(), x[:, :, :2], x.to_sparse(), x.bfloat16()),
        2: (torch.empty(1, 2, 3, 7), torch.empty(1, 2, 3, 8, dtype=torch.float64), torch.empty(6, 8)),
        4: (torch.ones(2, 4), torch.ones(3, 5), torch.ones(4), torch.ones(2, 3, 4), torch.ones(1, 5, 3, 4)),
        5: (torch.ones(3, 3), torch.ones(3, 4).double(), torch.ones(1, 3, 4)),
        6: (1, -1, 1 << 62, "0"),
        7: (1, -1, None),
        8: (-1, 0, -4, 5),
    }.items():
        for value in bad:
            with pytest.raises((TypeError, ValueError, OverflowError, BufferError)):
                native.rotate(*good[:place], value, *good[place + 1 :])  # pyright: ignore[reportOptionalMemberAccess]
    normed = (*good, torch.ones(8), None, 1e-6, 0)
    native.rotate(*normed)  # pyright: ignore[reportOptionalMemberAccess]
    for weight in (torch.ones(7), torch.ones(9), torch.ones(16)[::2], torch.ones(8).double(), torch.ones(1, 8), None):
        with pytest.raises((TypeError, ValueError)):
            native.rotate(*good, weight, None, 1e-6, 0)  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(TypeError):
        native.rotate(*good, torch.ones(8), None, "small", 0)  # pyright: ignore[reportOptionalMemberAccess]
    for few in ((), good[:5], (*good, 1)):
        with pytest.raises(ValueError, match="arguments"):
            native.rotate(*few)  # pyright: ignore[reportOptionalMemberAccess]


def test_bad_arguments_of_the_angles_are_refused_too():
    native, theta = extension.NATIVE, torch.ones(4, dtype=torch.float64)
    table, one, ids = radix_table(theta), torch.tensor(1.0, dtype=torch.float64), torch.arange(3)
    good = (ids, theta, table, one, torch.empty(3, 4), torch.empty(3, 4), 1)
    native.cos_sin(*good)  # pyright: ignore[reportOptionalMemberAccess]
    for place, bad in {
        0: (torch.arange(4), ids.float(), ids.to(torch.int16), torch.tensor(1), ids.view(1, 1, 3), ids.tolist()),
        1: (theta[:3], theta.float(), torch.ones(2, 4, dtype=torch.float64), torch.ones(8, dtype=torch.float64)[::2]),
        2: (table[:2], table[..., :3], table.real, table.to(torch.complex64), table[:, :255]),
        3: (one.float(), one.view(1)),
        4: (
            torch.empty(3, 3),
            torch.empty(2, 4),
            torch.empty(3, 8)[:, ::2],
            torch.empty(4, 3).T,
            torch.empty(3, 4).double(),
        ),
        5: (torch.empty(3, 3), torch.empty(3, 4).bfloat16(), torch.empty(4, 3).T),
    }.items():
        for value in bad:
            with pytest.raises((TypeError, ValueError)):
                native.cos_sin(*good[:place], value, *good[place + 1 :])  # pyright: ignore[reportOptionalMemberAccess]


def test_the_most_negative_position():
    cos, sin = RotaryEmbedding(8).at(torch.tensor([-(2**63)]))
    angle = -(2.0**63) * theta(8)
    assert torch.allclose(cos[0].double(), angle.cos(), atol=1e-7)
    assert torch.allclose(sin[0].double(), angle.sin(), atol=1e-7)


@pytest.mark.parametrize("table_step", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_any_strides(dtype, table_step):
    rope, x = RotaryEmbedding(16), vector(0, 2, 3, 9, 16).to(dtype)
    working = torch.float64 if dtype == torch.float64 else torch.float32
    angles = rope.at(torch.arange(9), dtype=working)
    strided = tuple(table.repeat_interleave(table_step, -1)[:, ::table_step] for table in angles)
    flipped = tuple(table.T.contiguous().T for table in angles)
    assert torch.equal(rope(x, angles=strided), rope(x))
    assert torch.equal(rope(x, angles=flipped), rope(x))


def test_angles_in_c_are_within_2_to_the_minus_24():
    for spec in (RopeSpec(64), RopeSpec(64, rotary_dim=2)):
        rope, inv_freq = RotaryEmbedding(spec, backend="native"), theta(spec.rotary_dim)
        for ids in (
            torch.arange(300),
            torch.randint(-(1 << 24), 1 << 24, (3, 50)),
            torch.randint(-(1 << 26), 1 << 26, (40,)).to(torch.int32),
            torch.arange(100).view(10, 10).T,
            torch.arange(20, dtype=torch.int16)[::3],
            torch.tensor([(1 << 62), -(1 << 62), (1 << 24) - 1, 1 << 24, -(1 << 24)]),
        ):
            angles = ids.double()[..., None] * inv_freq
            # The rounding of an angle past 2^24 is larger than the error of the tables.
            allowed = 2.0**-24 + 2.0**-52 * angles.abs() * (ids.abs() < 1 << 27)[..., None]
            for table, expected in zip(rope.at(ids), (angles.cos(), angles.sin()), strict=True):
                assert table.shape == expected.shape
                assert ((table - expected).abs() <= allowed).all()


def test_the_default_device_does_not_matter():
    x = vector(0, 1, 2, 5, 8).float()
    expected = RotaryEmbedding(8)(x, positions=torch.arange(5))
    with torch.device("meta"):
        rope = RotaryEmbedding(8)
        assert torch.equal(rope(x, positions=torch.arange(5, device="cpu")), expected)
        assert torch.equal(rope(x), expected)


def test_more_dimensions_than_anyone_has():
    x = vector(0, 1, 2, 1, 2, 1, 1, 2, 3, 8).float()
    truth = rotate(x.double(), torch.arange(3), theta(8))
    assert_within_budget(RotaryEmbedding(8, backend="native")(x), truth, rotary_dim=8)
    # Past what C takes, the torch path serves.
    for dims in (13, 20):
        y = RotaryEmbedding(8)(x.view(*[1] * dims, 8, 3, 8))
        assert_within_budget(y.view(x.shape), truth, rotary_dim=8)
    with pytest.raises(RopewalkError, match="leave backend out"):
        RotaryEmbedding(8, backend="native")(x.view(*[1] * 20, 8, 3, 8))
