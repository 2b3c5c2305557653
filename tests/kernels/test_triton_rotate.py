"""The rotation's Triton kernel: in Triton's interpreter on the CPU, and the same tests on a GPU where there is one."""

import pytest
import torch

from formulas import rotate_by_tables
from kernels.triton_device import DEVICE, on_device
from nn.module import by_module, with_heads_last
from ropewalk import RopeSpec, RotaryEmbedding, ops
from ropewalk.errors import RopewalkError
from ropewalk.kernels import triton_launch as launch_triton
from ropewalk.kernels.backends import triton as triton_backend
from ropewalk.kernels.backends.triton import TRITON
from ropewalk.kernels.native.extension import NATIVE
from ropewalk.kernels.rotate import triton as rotate_triton
from ropewalk.kernels.rotate.triton_shortcut import RotationShortcut
from ropewalk.kernels.types import Layout, RopeNumbers
from ropewalk.reference import check_rotation
from slow import slow
from strategies import theta

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def _fresh():
    launch_triton.LAUNCHES.clear()


def tables(*shape, dtype=torch.float32):
    angles = torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 6
    return tuple(f(angles).to(dtype).to(DEVICE) for f in (torch.cos, torch.sin))


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(DEVICE)


def plain_tables(seq, dim, dtype=torch.float32, first=0):
    """cos and sin of the plain frequencies at positions `first` .. `first` + seq - 1."""
    angles = torch.outer(torch.arange(first, first + seq).double(), theta(dim))
    return tuple(table.to(dtype).to(DEVICE) for table in (angles.cos(), angles.sin()))


def close(rotated, x, cos, sin, layout, row=0, conjugate=False):
    expected = rotate_by_tables(x.double(), cos.double(), sin.double(), layout, row, conjugate)
    limit = 1e-6 if x.dtype == torch.float32 else 1e-12 if x.dtype == torch.float64 else 2e-2
    torch.testing.assert_close(rotated.double(), expected, rtol=limit, atol=limit)


def in_part(case):
    """Without the longest cases, and without those that differ from another in their amplitude alone."""
    return "1000 tokens" not in case.name and "amplitude 1.0," not in case.name


# float16 and float64 differ in how they are loaded and rounded, not in where.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_within_budget_in_every_case(dtype):
    where = (lambda case: True) if dtype in (torch.float32, torch.bfloat16) else in_part
    assert check_rotation(on_device(by_module), [dtype], seed=1, where=where) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_beside_each_other_within_budget(dtype):
    # Without heads there is nothing to put beside each other.
    def where(case):
        return case.x.dim() > 3 and in_part(case)

    with_heads = check_rotation(on_device(with_heads_last), [dtype], seed=2, where=where)
    assert with_heads <= 1


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seq_dim", [-2, -3])
@pytest.mark.parametrize("start", [0, 4])
def test_q_and_k_in_one_launch(monkeypatch, seq_dim, interleaved, start, wide):
    monkeypatch.setattr(rotate_triton, "is_wide", lambda *reaches: wide)
    layout, (cos, sin) = Layout(interleaved, start, seq_dim), tables(3, 9, 6)
    q, k = random(3, 8, 7, 16), random(3, 2, 7, 16, seed=1)
    if seq_dim == -3:
        q, k = q.transpose(1, 2), k.transpose(1, 2).contiguous()
    rotated = rotate_triton.rotate(q, k, cos, sin, layout, 1)
    assert len(launch_triton.LAUNCHES) == 1
    for x, y in zip((q, k), rotated, strict=True):
        close(y, x, cos, sin, layout, 1)
        assert y.stride() == x.stride()
        # Features that are not rotated are copied bit for bit.
        still = [i for i in range(16) if not start <= i < start + 12]
        assert torch.equal(y[..., still], x[..., still])


STRANGE = {
    "other batches": lambda: (random(2, 4, 5, 8), random(1, 2, 5, 8)),
    "other steps": lambda: (random(2, 4, 5, 8), random(2, 2, 5, 16)[..., ::2]),
    "leading dimensions that are not one": lambda: (random(2, 5, 3, 4, 8).permute(0, 2, 3, 1, 4), random(2, 3, 5, 8)),
    "misaligned": lambda: (random(2, 4, 5, 9)[..., 1:], random(2, 2, 5, 8)),
    "slices of one projection": lambda: random(2, 5, 6, 8).transpose(1, 2).split([4, 2], dim=1),
    "expanded": lambda: (random(1, 4, 5, 8).expand(3, 4, 5, 8), random(3, 1, 5, 8).expand(3, 2, 5, 8)),
    "an odd stride": lambda: (random(2, 4, 5, 11)[..., :8], random(2, 2, 5, 13)[..., 3:11]),
    "no heads": lambda: (random(5, 8), random(3, 5, 8)),
    "one head": lambda: (random(2, 1, 5, 8).transpose(1, 2).contiguous().transpose(1, 2), random(2, 1, 5, 8)),
    "one token": lambda: (random(6, 4, 1, 8), random(6, 2, 1, 8)),
    "no queries": lambda: (random(2, 0, 5, 8), random(2, 2, 5, 8)),
    "no keys": lambda: (random(2, 4, 5, 8), random(2, 0, 5, 8)),
    "heads that do not pair": lambda: (random(2, 5, 6, 8), random(2, 3, 6, 8)),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", STRANGE)
def test_tensors_that_lie_strangely(name, interleaved):
    q, k = STRANGE[name]()
    layout, (cos, sin) = Layout(interleaved, 0, -2), tables(q.shape[-2], 4)
    before = q.clone(), k.clone()
    for conjugate in (False, True):
        for x, y in zip((q, k), rotate_triton.rotate(q, k, cos, sin, layout, 0, conjugate), strict=True):
            close(y, x, cos, sin, layout, 0, conjugate)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of the interpreter
def test_infinities_that_are_not_rotated_are_copied():
    x, (cos, sin) = random(2, 3, 5, 16), tables(5, 4)
    x[..., 8:] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0] * 2)
    for interleaved in (False, True):
        (y,) = rotate_triton.rotate(x, None, cos, sin, Layout(interleaved, 0, -2))
        assert torch.equal(y[..., 8:].nan_to_num(7), x[..., 8:].nan_to_num(7))
        assert y[..., :8].isfinite().all()


def test_an_odd_number_of_features_that_are_not_rotated():
    x, (cos, sin) = random(2, 3, 5, 15), tables(5, 4)
    for interleaved in (False, True):
        (y,) = rotate_triton.rotate(x, None, cos, sin, Layout(interleaved, 0, -2))
        close(y, x, cos, sin, Layout(interleaved, 0, -2))
        assert torch.equal(y[..., 8:], x[..., 8:])


def test_tables_that_are_not_contiguous():
    x = random(2, 3, 5, 8)
    wide = [table.repeat_interleave(2, -1) for table in tables(2, 5, 4)]
    cos, sin = wide[0][..., ::2], wide[1][..., ::2]
    (y,) = rotate_triton.rotate(x, None, cos, sin, Layout(True, 0, -2))
    close(y, x, cos, sin, Layout(True, 0, -2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_rotates_and_touches_nothing_else(interleaved):
    spec = RopeSpec(16, rotary_dim=8, pairing="interleaved" if interleaved else "half", rotary_slice="trailing")
    rope = RotaryEmbedding(spec, backend="triton").to(DEVICE)
    whole = random(2, 5, 6, 16)
    q, k = whole.transpose(1, 2).split([4, 2], dim=1)
    wanted = rope(q, k)
    version = q._version
    assert rope.rotate_(q, k)[0] is q
    assert q._version > version
    assert torch.equal(q, wanted[0])
    assert torch.equal(k, wanted[1])


def test_gradients_lie_as_the_input_does():
    rope = RotaryEmbedding(8, backend="triton").to(DEVICE)
    x = random(2, 5, 4, 8).transpose(1, 2).requires_grad_()
    cotangent = random(2, 4, 5, 8, seed=3)
    (gradient,) = torch.autograd.grad(rope(x), x, cotangent)
    assert gradient.stride() == x.stride() != cotangent.stride()
    (expanded,) = torch.autograd.grad(rope(x).sum(), x)
    ones = rotate_by_tables(torch.ones_like(x), *plain_tables(5, 8), Layout(True, 0, -2), conjugate=True)
    torch.testing.assert_close(expanded, ones.detach(), rtol=1e-5, atol=1e-6)


def test_one_of_two_cotangents():
    rope = RotaryEmbedding(8, backend="triton").to(DEVICE)
    q, k = random(1, 2, 3, 8).requires_grad_(), random(1, 2, 3, 8).requires_grad_()
    rotated_q, rotated_k = rope(q, k)
    (rotated_k * 2).sum().backward()
    assert k.grad is not None
    cotangent = rotate_by_tables(torch.full_like(k, 2), *plain_tables(3, 8), Layout(True, 0, -2), conjugate=True)
    torch.testing.assert_close(k.grad, cotangent.detach(), rtol=1e-5, atol=1e-6)
    assert rotated_q.grad_fn is not None
    assert q.grad is None or not q.grad.any()


TABLES = {"shared": (5, 4), "per batch": (2, 5, 4), "one batch for all": (1, 5, 4), "per head": (1, 3, 5, 4)}


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", TABLES)
def test_gradients_of_cos_and_sin(shape, interleaved, conjugate):
    heads = (3, 3) if shape == "per head" else (4, 2)
    q, k = (random(2, n, 5, 12, dtype=torch.float64, seed=n).requires_grad_() for n in heads)
    cos, sin = (table.requires_grad_() for table in tables(*TABLES[shape], dtype=torch.float64))
    layout = Layout(interleaved, 2 if interleaved else 0, -2)
    weights = [torch.randn_like(x) for x in (q, k)]

    def total(rotated):
        return sum((y * y * w).sum() for y, w in zip(rotated, weights, strict=True))

    by_kernel = total(ops.rotate(q, k, cos, sin, layout, conjugate=conjugate, backend="triton"))
    by_formula = total(rotate_by_tables(x, cos, sin, layout, 0, conjugate) for x in (q, k))
    inputs = [q, k, cos, sin]
    gradients = [torch.autograd.grad(function, inputs) for function in (by_kernel, by_formula)]
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fast_mode", [True, slow(False)])
def test_gradients_of_tables_with_more_rows_than_tokens_and_second_derivatives(fast_mode):
    x = random(1, 2, 3, 8, dtype=torch.float64).requires_grad_()
    cos, sin = (table.requires_grad_() for table in tables(7, 4, dtype=torch.float64))
    layout = Layout(True, 0, -2)
    (y,) = ops.rotate(x, None, cos, sin, layout, row=2, backend="triton")
    (of_cos,) = torch.autograd.grad(y.square().sum(), cos, retain_graph=True)
    assert of_cos[:2].eq(0).all()
    assert of_cos[5:].eq(0).all()
    assert of_cos[2:5].ne(0).any()
    assert torch.autograd.gradgradcheck(
        lambda x, cos, sin: ops.rotate(x, None, cos, sin, layout, row=2, backend="triton")[0],
        (x, cos, sin),
        atol=1e-6,
        fast_mode=fast_mode,
    )


def test_learned_frequencies():
    x, cotangent = random(2, 3, 5, 8), random(2, 3, 5, 8, seed=4)
    rope = RotaryEmbedding(8, learned=True, backend="triton").to(DEVICE)
    (rope(x, offset=3) * cotangent).sum().backward()
    assert rope.log_scale is not None
    log_scale = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    angles = torch.outer(torch.arange(3, 8).double(), theta(8)) * log_scale.exp()
    rotated = rotate_by_tables(x.double().cpu(), angles.cos(), angles.sin(), Layout(True, 0, -2))
    (rotated * cotangent.double().cpu()).sum().backward()
    assert rope.log_scale.grad is not None
    torch.testing.assert_close(rope.log_scale.grad.double().cpu(), log_scale.grad, rtol=1e-5, atol=1e-5)


def test_it_refuses_what_it_cannot_serve():
    rope = RotaryEmbedding(8, backend="triton").to(DEVICE)
    with pytest.raises(RopewalkError, match="a call that it supports"):
        torch.func.vmap(rope)(random(2, 3, 4, 8))


def test_why_it_is_missing(monkeypatch):
    monkeypatch.setattr(triton_backend, "INSTALLED", False)
    assert "not installed" in (TRITON.why_missing() or "")
    monkeypatch.setattr(triton_backend, "INSTALLED", True)
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in (TRITON.why_missing() or "")


def test_launches_are_forgotten_before_there_are_too_many():
    for number in range(1030):
        launch_triton.LAUNCHES.keep(number, number)
    assert len(launch_triton.LAUNCHES) <= 1024
    assert launch_triton.LAUNCHES[1029] == 1029


def test_launches_are_kept_by_all_that_they_depend_on():
    # Nothing is cleared between calls that differ in one thing.
    x, (cos, sin) = random(2, 3, 5, 16), tables(5, 4)
    wide = random(2, 3, 5, 32)[..., ::2]
    for layout in (Layout(True, 0, -2), Layout(False, 0, -2), Layout(True, 8, -2)):
        for conjugate in (False, True):
            written = x.clone()
            rotate_triton.rotate(written, None, cos, sin, layout, 0, conjugate, in_place=True)
            (y,) = rotate_triton.rotate(x, None, cos, sin, layout, 0, conjugate)
            close(y, x, cos, sin, layout, 0, conjugate)
            assert torch.equal(written, y)
            (again,) = rotate_triton.rotate(x, None, cos, sin, layout, 0, conjugate)
            assert torch.equal(again, y)
            for strides in (torch.empty_like(wide).stride(), (240, 16, 48, 1), (480, 160, 32, 2)):
                for _ in range(2):
                    (strided,) = rotate_triton.rotate(x, None, cos, sin, layout, 0, conjugate, strides=(strides,))
                    assert torch.equal(strided, y)
                    assert strided.stride() == strides
            (twice,) = rotate_triton.rotate(wide, None, cos, sin, layout, 0, conjugate)
            close(twice, wide, cos, sin, layout, 0, conjugate)
            mixed = torch.stack((sin, sin), -1)[..., 0]
            (mixed_sin,) = rotate_triton.rotate(x, None, cos, mixed, layout, 0, conjugate)
            assert torch.equal(mixed_sin, y)
    double = [t.double() for t in (x, cos, sin)]
    close(
        rotate_triton.rotate(double[0], None, *double[1:], Layout(True, 0, -2))[0],
        double[0],
        *double[1:],
        Layout(True, 0, -2),
    )
    learned = [table.requires_grad_() for table in (cos, sin)]
    for conjugate in (False, True):
        (y,) = ops.rotate(x, None, *learned, Layout(True, 0, -2), conjugate=conjugate, backend="triton")
        expected = rotate_by_tables(x, *learned, Layout(True, 0, -2), conjugate=conjugate)
        gradients = [torch.autograd.grad((z * x).sum() + z.sum(), learned) for z in (y, expected)]
        for gradient, expected_gradient in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


def test_a_row_before_the_table_is_not_read(monkeypatch):
    # A new prompt after a far decode: the block that was used last starts behind it.
    rope = RotaryEmbedding(8, backend="triton").to(DEVICE)
    x = random(1, 2, 5, 8)
    rope(x[:, :, :1], offset=1000)
    ranges = rope._source.ranges
    block = ranges._blocks[0]
    assert block.start > 0
    source = rope._source
    shortcut = RotationShortcut(RopeNumbers(8, rope.layout, source.inv_freq, None, source.amplitude, {}, None))
    shortcut.remember(block.start, block.stop, block.cos, block.sin)
    assert shortcut(x) is None
    assert shortcut(x, offset=block.stop - 4) is None
    close(shortcut(x, offset=1000), x, *(table[1000:] for table in plain_tables(1005, 8)), Layout(True, 0, -2))
    close(rope(x), x, *plain_tables(5, 8), Layout(True, 0, -2))


def test_leading_dimensions_with_tables_per_batch():
    rope = RotaryEmbedding(8, seq_dim=-3, backend="triton").to(DEVICE)
    q, angles = random(2, 3, 5, 4, 8), [table.view(2, 5, 4).requires_grad_() for table in plain_tables(10, 8)]
    results = []
    for rotated in (rope(q, angles=tuple(angles)), rotate_by_tables(q, *angles, Layout(True, 0, -3))):
        results.append([rotated, *torch.autograd.grad((rotated * q).sum(), angles)])
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_first_derivatives_are_the_same_with_and_without_a_graph():
    x = random(1, 2, 3, 8, dtype=torch.float64).requires_grad_()
    cos, sin = (table.requires_grad_() for table in tables(3, 4, dtype=torch.float64))
    layout = Layout(True, 0, -2)

    def twice():
        # q and k are one tensor, and their rotations are rotated again with the same cos and sin.
        q, k = ops.rotate(x, x, cos, sin, layout, backend="triton")
        return ops.rotate(q, k * q, cos, sin, layout, backend="triton")

    given = [x, cos, sin]
    cotangents = [random(1, 2, 3, 8, dtype=torch.float64, seed=i) for i in (1, 2)]
    plain = torch.autograd.grad(twice(), given, cotangents)
    graphed = torch.autograd.grad(twice(), given, cotangents, create_graph=True)
    for mine, wanted in zip(graphed, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def test_batched_cotangents():
    rope = RotaryEmbedding(8, backend="triton").to(DEVICE)
    x = random(1, 2, 3, 8).requires_grad_()
    many = random(4, 1, 2, 3, 8, seed=2)
    (batched,) = torch.autograd.grad(rope(x), x, many, is_grads_batched=True)
    for one, own in zip(many, batched, strict=True):
        torch.testing.assert_close(own, torch.autograd.grad(rope(x), x, one)[0])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="asks what serves tensors of the CPU, in Triton's interpreter")
def test_the_backend_that_was_asked_for_serves_cached_ranges_too(monkeypatch):
    rope, x = RotaryEmbedding(8, backend="triton"), random(1, 2, 5, 8)
    first = rope(x)
    monkeypatch.setattr(NATIVE, "shortcut", lambda *arguments: pytest.fail("the C kernel was asked"))
    assert torch.equal(rope(x), first)
