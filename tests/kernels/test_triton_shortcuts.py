"""The shortcuts of the Triton kernels: one launch, results of the general path, and None for what is unusual."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.triton_device import DEVICE
from ropewalk import RopeSpec, RotaryEmbedding, Yarn, qk_norm_rope
from ropewalk.kernels import signature as signatures
from ropewalk.kernels.qk_norm import triton_shortcut as norm_shortcuts
from ropewalk.kernels.qk_norm.triton_shortcut import NormShortcut
from ropewalk.kernels.rotate import triton_shortcut as shortcuts
from ropewalk.kernels.rotate.triton_shortcut import RotationShortcut
from ropewalk.kernels.signature import python_signature, signature
from ropewalk.kernels.triton_launch import Launch
from ropewalk.kernels.triton_shortcut import MOST_PLANS
from ropewalk.kernels.types import Norm, RopeNumbers
from ropewalk.ops import norm_shortcut_of, shortcut_of
from strategies import vector


def numbers_of(rope: RotaryEmbedding, **options: Any) -> RopeNumbers:
    source = rope._source
    return RopeNumbers(
        rope.spec.head_dim, rope.layout, source.inv_freq, None, source.amplitude, {}, source.identity, **options
    )


def both(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    batch, seq, dim = shape
    return [vector(i, batch, heads, seq, dim).to(dtype).to(DEVICE) for i, heads in enumerate((3, 2))]


@pytest.fixture
def launches(monkeypatch):
    """The grids of all launches."""
    seen: list[int] = []
    real = Launch.__call__

    def call(self: Launch, *rest: Any, **options: Any) -> None:
        seen.append(self.programs)
        real(self, *rest, **options)

    monkeypatch.setattr(Launch, "__call__", call)
    real_by_address = Launch.by_address
    monkeypatch.setattr(
        Launch, "by_address", lambda self, *rest: real_by_address(self, *rest) and (seen.append(self.programs) or True)
    )
    return seen


def calls_of(rope: RotaryEmbedding, seq: int, batch: int) -> list[dict[str, Any]]:
    ids = torch.arange(seq, device=DEVICE) * 3 + 5
    per_batch = ids + torch.arange(batch, device=DEVICE)[:, None] * 100_000
    forms = [{"positions": ids}, {"positions": ids[None].to(torch.int32)}, {"positions": per_batch}]
    return [{"offset": 5}, {}, *forms, {"angles": rope.at(ids)}, {"angles": rope.at(per_batch)}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "pairing"),
    [("C", "half"), ("C", "interleaved"), ("Python", "half"), ("Python", "interleaved")],
)
def test_one_launch_computes_what_the_general_path_does(source, pairing, launches, monkeypatch):
    if source == "Python":
        for module in (shortcuts, norm_shortcuts):
            monkeypatch.setattr(module, "signature", python_signature)
    for spec in (RopeSpec(16, pairing=pairing), RopeSpec(24, Yarn(factor=4), rotary_dim=16, pairing=pairing)):
        rope = RotaryEmbedding(spec, backend="triton").to(DEVICE)
        shortcut = RotationShortcut(numbers_of(rope, from_positions=True))
        ids = torch.arange(64, device=DEVICE)
        shortcut.remember(0, 64, *rope.at(ids))
        for dtype in (torch.bfloat16, torch.float32):
            q, k = both(2, 3, spec.head_dim, dtype=dtype)
            for options in calls_of(rope, 3, 2):
                for tensors in ((q, k), (q,)):
                    shortcut(*tensors, **options)
                    launches.clear()
                    mine = shortcut(*tensors, **options)
                    assert len(launches) == 1
                    expected = rope.forward(*tensors, **options)
                    for y, truth in zip(
                        *((r if isinstance(r, tuple) else (r,)) for r in (mine, expected)), strict=True
                    ):
                        torch.testing.assert_close(y, truth, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
                        assert y.stride() == truth.stride()


def test_norms(launches):
    rope = RotaryEmbedding(RopeSpec(24, rotary_dim=16), backend="triton").to(DEVICE)
    shortcut = NormShortcut(numbers_of(rope))
    shortcut.remember(0, 64, *rope.at(torch.arange(64, device=DEVICE)))
    (q, k), weights = both(2, 3, 24), [vector(i, 24).bfloat16().to(DEVICE) for i in (5, 6)]
    angles = rope.at(torch.arange(7, 10, device=DEVICE))
    for pair in (weights, [None, weights[1]], [None, None]):
        for options in ({"offset": 7}, {"angles": angles}):
            launches.clear()
            mine = shortcut(q, k, *pair, Norm(1e-5), **options)
            assert len(launches) == 1
            expected = qk_norm_rope(q, k, rope, q_weight=pair[0], k_weight=pair[1], eps=1e-5, **options)
            assert mine is not None
            assert all(torch.equal(y, truth) for y, truth in zip(mine, expected, strict=True))
    plus_one = Norm(1e-5, plus_one=True)
    assert shortcut(q, k, None, weights[1], plus_one, offset=7) is None
    assert shortcut(q, k, weights[0][:20], weights[1], Norm(1e-5), offset=7) is None
    assert shortcut(q, None, None, None, Norm(1e-5), offset=7) is None
    assert shortcut(q, k, "weight", weights[1], Norm(1e-5), offset=7) is None


def test_angles_in_float32_are_not_computed_in_float64():
    rope = RotaryEmbedding(RopeSpec(16, angles="float32")).to(DEVICE)
    shortcut = shortcut_of(numbers_of(rope), torch.device("cuda"), None)
    assert shortcut is not None
    assert shortcut(*both(2, 3, 16), positions=torch.tensor([100_003, 5, 7], device=DEVICE)) is None


def test_calls_without_queries_have_the_errors_of_the_general_path():
    rope = RotaryEmbedding(16).to(DEVICE)
    shortcut, (q, k) = RotationShortcut(numbers_of(rope)), both(2, 3, 16)
    assert shortcut() is None
    assert shortcut(k=k) is None
    assert shortcut(q, q=q) is None
    assert shortcut(q, k, k=k) is None


def test_graphs_are_those_of_the_general_path():
    rope = RotaryEmbedding(16, backend="triton").to(DEVICE)
    leaves = [x.requires_grad_() for x in both(2, 3, 16, dtype=torch.float32)]
    weights = [vector(i, 16).float().to(DEVICE).requires_grad_() for i in (5, 6)]
    cotangents = [torch.randn_like(x) for x in leaves]
    tables = rope.at(torch.arange(64, device=DEVICE))
    angles = tuple(table[7:10].contiguous() for table in tables)
    # As `shortcut_of` does for a backend that is chosen on the device; on the CPU, Triton is not.
    rotation, norm = (make(numbers_of(rope), torch.device("cuda"), None) for make in (shortcut_of, norm_shortcut_of))
    assert rotation is not None
    assert norm is not None
    for shortcut in (rotation, norm):
        shortcut.remember(0, 64, *tables)
    for options in ({"offset": 7}, {"angles": angles}):
        mine, general = rotation(*leaves, **options), rope.forward(*leaves, **options)
        assert mine is not None
        grads = [torch.autograd.grad(results, leaves, cotangents) for results in (mine, general)]
        assert all(torch.equal(x, y) for x, y in zip((*mine, *grads[0]), (*general, *grads[1]), strict=True))
        mine = norm(*leaves, *weights, Norm(1e-5), **options)
        assert mine is not None
        general = qk_norm_rope(*leaves, rope, q_weight=weights[0], k_weight=weights[1], eps=1e-5, **options)
        grads = [torch.autograd.grad(results, [*leaves, *weights], cotangents) for results in (mine, general)]
        assert all(torch.equal(x, y) for x, y in zip((*mine, *grads[0]), (*general, *grads[1]), strict=True))
    assert rotation(leaves[0], leaves[1].detach(), offset=7) is None
    assert norm(leaves[0], leaves[1].detach(), weights[0], weights[1].detach(), Norm(1e-5), offset=7) is None
    assert rotation(*leaves, positions=torch.arange(3, device=DEVICE)) is None


def test_what_is_unusual_returns_none():
    rope = RotaryEmbedding(16, context_length=60).to(DEVICE)
    shortcut = RotationShortcut(numbers_of(rope, context_length=60, from_positions=True))
    cos, sin = rope.at(torch.arange(64, device=DEVICE) % 60)
    shortcut.remember(0, 64, cos, sin)
    q, k = both(2, 3, 16)
    assert shortcut(q, k, offset=57) is not None
    three, ids = (cos[:3].contiguous(), sin[:3].contiguous()), torch.arange(3, device=DEVICE)
    assert shortcut(q, k, angles=three) is not None
    unusual: list[dict[str, Any]] = [
        {"offset": 58},
        {"offset": -1},
        {"offset": True},
        {"offset": 1.0},
        {"offset": torch.tensor(3)},
        {"offset": 1, "positions": ids},
        {"angles": three, "positions": ids},
        {"angles": three, "offset": 0},
        {"angles": list(three)},
        {"angles": (three[0], "sin")},
        {"angles": (cos[:4], sin[:4])},
        {"angles": (cos[:3, :4].contiguous(), sin[:3, :4].contiguous())},
        {"angles": tuple(table.double() for table in three)},
        {"angles": tuple(table.expand(3, 3, 8).contiguous() for table in three)},
        {"angles": tuple(table.requires_grad_() for table in rope.at(ids))},
        {"positions": ids.float()},
        {"positions": ids[:2]},
        {"positions": ids.expand(3, 3)},
        {"positions": [0, 1, 2]},
        {"role": None},
        {"cu_seqlens": ids},
    ]
    for options in unusual:
        for _ in range(2):
            assert shortcut(q, k, **options) is None, options
    tensors: list[tuple[Any, ...]] = [
        (q, k, 5),
        (q[..., :8],),
        (q, k[:, :, :2]),
        (q, k.float()),
        (q.to(torch.int32),),
        (q[:, :, :0], k[:, :, :0]),
        (q.to("meta"),),
        ("q",),
        (torch.nn.Buffer(q).to_sparse(),),
    ]
    for arguments in tensors:
        assert shortcut(*arguments) is None, arguments
    assert shortcut.rotate_(q, k) is None
    assert torch.func.vmap(lambda x: x if shortcut(x) is None else None)(q) is not None
    without = RotationShortcut(numbers_of(rope))
    assert without(q, k, positions=ids) is None
    assert without(q, k) is None


def test_angles_of_another_rope_use_the_general_path():
    rope, other = (RotaryEmbedding(16, base=base).to(DEVICE) for base in (10_000.0, 5.0))
    q, k = both(2, 3, 16)
    from ropewalk.nn.rotary.angle_makers import MAKERS

    shortcut = RotationShortcut(numbers_of(rope)._replace(makers=MAKERS))
    ids = torch.arange(3, device=DEVICE)
    mine, foreign = rope.at(ids), other.at(ids)
    assert shortcut(q, k, angles=mine) is not None
    assert shortcut(q, k, angles=foreign) is None
    assert shortcut(q, k, angles=(foreign[0].clone(), foreign[1])) is not None


def test_a_range_that_another_thread_replaces_meanwhile(monkeypatch):
    rope = RotaryEmbedding(16, backend="triton").to(DEVICE)
    shortcut = RotationShortcut(numbers_of(rope))
    blocks = [(start, start + 64, *rope.at(torch.arange(start, start + 64, device=DEVICE))) for start in (0, 32)]
    q, k = both(2, 3, 16)
    shortcut.remember(*blocks[0])

    def replaced(*tensors: Any) -> Any:
        shortcut.remember(*blocks[1])
        return signature(*tensors)

    monkeypatch.setattr(shortcuts, "signature", replaced)
    mine, expected = shortcut(q, k, offset=40), rope.forward(q, k, offset=40)
    assert mine is not None
    assert all(torch.equal(y, truth) for y, truth in zip(mine, expected, strict=True))


def test_plans_have_a_limit():
    rope = RotaryEmbedding(4).to(DEVICE)
    shortcut = RotationShortcut(numbers_of(rope))
    shortcut.remember(0, 512, *rope.at(torch.arange(512, device=DEVICE)))
    for seq in range(1, MOST_PLANS + 20):
        shortcut.plan(seq, lambda: None)
    assert len(shortcut._plans) <= MOST_PLANS


def test_signatures_in_c_and_in_python_distinguish_the_same_tensors():
    x = torch.arange(24.0).view(2, 3, 4)
    tensors = [
        x,
        x.clone(),
        x.double(),
        x.transpose(0, 1),
        x[..., 1:],
        x[:1],
        x.clone().requires_grad_(),
        x.bfloat16(),
        None,
    ]
    tensors += [torch.nn.Parameter(x), torch.ones(0), torch.ones(()), torch.ones(2, 3, 4, dtype=torch.int32)]

    def key_of(of: Any, tensor: Any) -> Any:
        described = of(tensor)
        assert described is not None
        return described[0]

    for of in (signature, python_signature):
        described = of(x, None)
        assert described is not None
        assert described[1] == (x.data_ptr(), 0)
        for unusual in ("x", x.to("meta"), x.to_sparse(), torch.ones(2, dtype=torch.complex64).conj().imag):
            assert of(x, unusual) is None
    keys = [[key_of(of, tensor) for tensor in tensors] for of in (signature, python_signature)]
    same = [[[a == b for b in found] for a in found] for found in keys]
    assert same[0] == same[1]
    with torch.no_grad():
        assert key_of(signature, tensors[6]) == key_of(signature, x)
    assert signatures.is_eager()
