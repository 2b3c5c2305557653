"""What the probe says of functions: rotations, what only looks like one, and how calls are served."""

import functools
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ropewalk.hub.accelerate.fused_rotation import fused_rotation
from ropewalk.hub.accelerate.norm_fusion import fused_method, norm_kind
from ropewalk.hub.accelerate.rotation_probe import Rotation, rotation_of
from ropewalk.hub.accelerate.table_probe import table_widths


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin


@functools.cache
def made(rotate: Any, part: bool = False, back: bool = False, wide: bool = True, keep: bool = False) -> Any:
    """A function in the form of transformers', of which the probe knows nothing."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), (-sin if back else sin).unsqueeze(unsqueeze_dim)
        if not wide:
            cos, sin = ((torch.cat((x, x), -1) if rotate is half else x.repeat_interleave(2, -1)) for x in (cos, sin))
        width = cos.shape[-1] if part else q.shape[-1]
        rotated = [torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1) for x in (q, k)]
        return tuple(y.to(x.dtype) for y, x in zip(rotated, (q, k), strict=True)) if keep else tuple(rotated)

    return function


@settings(max_examples=40)
@given(st.sampled_from([half, neighbours]), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_every_form_is_told_from_every_other(rotate, part, back, wide, keep):
    found = rotation_of(made(rotate, part, back, wide, keep))
    assert isinstance(found, Rotation)
    assert found.pairing == ("half" if rotate is half else "interleaved")
    assert found.table == ("single" if not wide else "halves" if rotate is half else "neighbours")
    assert (found.conjugate, found.keeps_dtype) == (back, keep)
    assert found.part == ("leading" if part else None)
    assert found.seq_dims == ((1, -2), (2, -3))
    assert found.reads_all == wide


# Examples of the same form probe it once.
probed = functools.cache(rotation_of)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([half, neighbours]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**31),
)
def test_what_takes_its_place_computes_the_same(rotate, part, back, wide, way, dtype, seed):
    own = made(rotate, part, back, wide)
    found: Any = probed(own)
    torch.manual_seed(seed)
    q, k = (torch.randn(2, 7, heads, 12 if part else 8).to(dtype) for heads in (3, 1))
    q, k = (x if way == 2 else x.transpose(1, 2) for x in (q, k))
    single = torch.rand(1, 7, 4) * 6
    table = (
        single if not wide else torch.cat((single, single), -1) if rotate is half else single.repeat_interleave(2, -1)
    )
    cos, sin = table.cos().to(dtype), table.sin().to(dtype)
    ours = fused_rotation(own, found, frozenset({8}) if wide else None)(q, k, cos, sin, unsqueeze_dim=way)
    for mine, theirs in zip(ours, own(q.double(), k.double(), cos.double(), sin.double(), way), strict=True):
        assert mine.dtype == dtype
        # Two products of numbers below 5 and 1, and one rounding.
        torch.testing.assert_close(mine.double(), theirs, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_a_wider_table_makes_a_wider_result_where_the_model_does_so():
    q, cos = torch.randn(1, 2, 5, 8).bfloat16(), torch.rand(1, 5, 8)
    cos = torch.cat((cos[..., :4], cos[..., :4]), -1)
    for keep, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        own = made(half, keep=keep)
        ours = fused_rotation(own, rotation_of(own), frozenset({8}))(q, q, cos, cos)  # pyright: ignore[reportArgumentType]
        assert [x.dtype for x in ours] == [x.dtype for x in own(q, q, cos, cos)] == [dtype] * 2


def test_calls_that_were_not_probed_go_to_the_models_own_function():
    own, calls = made(half, part=True), []

    def counted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        calls.append(unsqueeze_dim)
        return own(q, k, cos, sin, unsqueeze_dim)

    found: Any = rotation_of(counted)
    fast = fused_rotation(counted, found, frozenset({8}))
    q, table = torch.randn(1, 2, 5, 8), torch.rand(1, 5, 8)
    calls.clear()
    fast(q, q, table, table)
    fast(q=q, k=q, cos=table, sin=table)
    fast(q.transpose(1, 2), q.transpose(1, 2), table, table, 2)
    assert calls == []
    # A narrower table is a slice, in which pairs are others; one row for all tokens; tables of one sequence for two.
    fast(q, q, table[..., :4], table[..., :4])
    fast(q, q, table[:, :1], table[:, :1])
    fast(q, q, table[0], table[0], 0)
    assert calls == [1, 1, 0]


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, cos, sin: (q, k),
        lambda q, k, cos, sin: (half(q, cos[:, None], sin[:, None]), k),
        lambda q, k, cos, sin: (half(q, cos[:, None], sin[:, None]), half(k, cos[:, None], -sin[:, None])),
        lambda q, k, cos, sin: (half(q, cos[:, None], 1.01 * sin[:, None]), half(k, cos[:, None], sin[:, None])),
        lambda q, k, cos, sin: (half(q, sin[:, None], cos[:, None]), half(k, sin[:, None], cos[:, None])),
        lambda q, k, cos, sin: None,
        lambda x, cos, sin: half(x.flip(-1), cos[:, None], sin[:, None]),
    ],
    ids=["nothing", "keys left", "keys back", "scaled", "swapped", "no result", "reversed"],
)
def test_what_is_no_rotation_gets_a_reason(function):
    assert rotation_of(function) == "it computes no rotation of pairs that ropewalk supports"


def test_a_function_that_needs_more_gets_a_reason():
    found = rotation_of(lambda q, k, cos, sin, position_ids: None)
    assert found == "it requires position_ids in addition to q, k, cos and sin"


class Tables(nn.Module):
    """Makes cos and sin; one axis of three for the second half of each table, if `mixed`."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed
        self.inv_freq = nn.Buffer(torch.tensor([1.0, 0.1]))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = position_ids if position_ids.dim() == 3 else position_ids[None]
        first, second = rows[0], rows[-1] if self.mixed else rows[0]
        angles = torch.cat((first[..., None] * self.inv_freq, second[..., None] * self.inv_freq), dim=-1)
        return angles.cos(), angles.sin()


def test_tables_are_asked_for_several_axes():
    assert table_widths(Tables(mixed=False), "halves") == frozenset({4})
    # With one axis both halves are the same: only an image would show that they are not.
    assert table_widths(Tables(mixed=True), "halves") == "Tables has different angles for the two features of a pair"
    assert "different angles" in table_widths(Tables(mixed=False), "neighbours")


@pytest.mark.parametrize(("ulps", "same"), [(1, True), (2, True), (40, False)])
def test_the_same_angle_may_be_rounded_twice(ulps, same):
    """torch may compute the end of a row by another function than the rest, as for StableLM on ARM."""

    class Rounded(Tables):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = super().forward(x, position_ids)
            for _ in range(ulps):
                cos[..., 2:] = torch.nextafter(cos[..., 2:], torch.tensor(2.0))
            return cos, sin

    assert (table_widths(Rounded(mixed=False), "halves") == frozenset({4})) is same


class Scaled(nn.Module):
    """An RMSNorm, or something near it."""

    def __init__(self, power: float = 2.0, bias: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6
        self.power, self.bias = power, bias

    def forward(self, x: Tensor) -> Tensor:
        size = x.float().abs().pow(self.power).mean(-1, keepdim=True)
        return (self.weight.float() * x.float() * (size + self.eps).rsqrt() + self.bias).to(x.dtype)


def test_norms_are_known_by_what_they_compute():
    found: Any = norm_kind(Scaled())
    assert (found.eps, found.norm.plus_one, found.norm.rounding) == ("eps", False, 0)
    assert norm_kind(Scaled(power=2.1)) == "Scaled is not an RMSNorm"
    assert norm_kind(Scaled(bias=0.01)) == "Scaled is not an RMSNorm"
    wrong = Scaled()
    wrong.eps = 1e-2
    wrong.forward = types.MethodType(lambda self, x: Scaled.forward(Scaled(), x), wrong)
    assert norm_kind(wrong) == "Scaled is not an RMSNorm"
    assert norm_kind(nn.Identity()) == "Identity has no weight per feature of a head"


class Attention(nn.Module):
    """Methods in which norm and rotation follow each other, and such in which they only seem to."""

    def straight(self, q, k, cos, sin):
        q = self.q_norm(q.view(1)).transpose(1, 2)
        k = self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k

    def touched(self, q, k, cos, sin):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q = q * 2
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k

    def read(self, q, k, cos, sin):
        q = self.q_norm(q)
        k = self.k_norm(k)
        self.last = q
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k

    def in_a_branch(self, q, k, cos, sin):
        q = self.q_norm(q)
        k = self.k_norm(k)
        if self.training:
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k

    def one_alone(self, q, k, cos, sin):
        q = self.q_norm(q)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k

    def other_dimensions(self, q, k, cos, sin):
        q = self.q_norm(q).transpose(1, 3)
        k = self.k_norm(k).transpose(1, 3)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k

    def after(self, q, k, cos, sin):
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        q = self.q_norm(q)
        k = self.k_norm(k)
        return q, k


apply_rotary_pos_emb: Any = None


def test_norms_are_taken_out_only_where_they_come_right_before():
    found: Any = fused_method(Attention.straight, "apply_rotary_pos_emb")
    assert (found.q_norm, found.k_norm) == ("q_norm", "k_norm")
    assert "ropewalk_norm_rotate" in found.code.co_names
    assert "apply_rotary_pos_emb" not in found.code.co_names
    for method in ("touched", "read", "in_a_branch", "one_alone", "other_dimensions", "after"):
        reason = fused_method(getattr(Attention, method), "apply_rotary_pos_emb")
        assert reason == "its norms are not the last operation on q and k before the rotation", method


def test_code_without_its_source_is_left_alone():
    space: dict[str, Any] = {}
    exec("def forward(self, q, k, cos, sin):\n    q = self.q_norm(q)\n    return q\n", space)
    reason = "its source is not available, or differs from the running code"
    assert fused_method(space["forward"], "apply_rotary_pos_emb") == reason
