"""Functions, norms and tables that are a rotation, an RMSNorm or doubled for a few small inputs, and not for others.

Each is in the form that transformers gives to its own, with one thing changed that a probe of five tokens cannot see.
"""

import functools
import os
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

TRAINS = False
CALLS: list[int] = []
TABLES: dict[str, torch.Tensor] = {}
SCALE = torch.ones(1)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotated(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def by_length(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * 2 if q.shape[-2] > 16 else q, k, cos, sin, unsqueeze_dim)


def by_length_without_a_branch(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * (1 + (q.shape[-2] > 16)), k, cos, sin, unsqueeze_dim)


def by_length_in_whole_numbers(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * (1 + q.shape[-2] // 17), k, cos, sin, unsqueeze_dim)


def by_a_length_that_no_probe_has(q, k, cos, sin, unsqueeze_dim=1):
    if q.shape[-2] == 37:
        return k, q
    return rotated(q, k, cos, sin, unsqueeze_dim)


def tables_scaled_at_long_lengths(q, k, cos, sin, unsqueeze_dim=1):
    longer = max(cos.shape[1], 16) / 16
    return rotated(q, k, cos * longer, sin * longer, unsqueeze_dim)


def by_dtype(q, k, cos, sin, unsqueeze_dim=1):
    if q.dtype == torch.bfloat16:
        q = q * 2
    return rotated(q, k, cos, sin, unsqueeze_dim)


def by_batch(q, k, cos, sin, unsqueeze_dim=1):
    q = q if q.shape[0] != 3 else q.flip(0)
    return rotated(q, k, cos, sin, unsqueeze_dim)


def by_heads(q, k, cos, sin, unsqueeze_dim=1):
    groups = q.shape[1] // k.shape[1]
    return rotated(q * groups if groups == 2 else q, k, cos, sin, unsqueeze_dim)


def by_width(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    first = q[..., :12] * cos[..., :12] + rotate_half(q)[..., :12] * sin[..., :12]
    return torch.cat((first, q[..., 12:]), dim=-1), k * cos + rotate_half(k) * sin


def by_training_mode(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * 2 if TRAINS else q, k, cos, sin, unsqueeze_dim)


def by_grad_mode(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * 2 if torch.is_grad_enabled() else q, k, cos, sin, unsqueeze_dim)


def by_requires_grad(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * 2 if q.requires_grad else q, k, cos, sin, unsqueeze_dim)


def by_memory_order(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q if q.stride(0) < 1000 else q * 2, k, cos, sin, unsqueeze_dim)


def by_device(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * 2 if q.device.type == "cuda" else q, k, cos, sin, unsqueeze_dim)


def by_environment(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * 2 if os.environ.get("ROTATE_TWICE") else q, k, cos, sin, unsqueeze_dim)


def by_position(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * 2 if (cos[..., -1] < 0.95).any() else q, k, cos, sin, unsqueeze_dim)


def by_unsqueeze_dim(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * (3 - unsqueeze_dim - 1) if unsqueeze_dim == 3 else q, k, cos, sin, unsqueeze_dim)


def positions_clamped(q, k, cos, sin, unsqueeze_dim=1):
    cos = torch.cat((cos[:, :30], cos[:, 29:30].expand(-1, max(cos.shape[1] - 30, 0), -1)), dim=1)
    return rotated(q, k, cos, sin, unsqueeze_dim)


def values_clamped(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q.clamp(-5, 5), k.clamp(-5, 5), cos, sin, unsqueeze_dim)


def values_rounded(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q + 1e7 - 1e7, k, cos, sin, unsqueeze_dim)


def nan_scrubbed(q, k, cos, sin, unsqueeze_dim=1):
    q, k = rotated(q, k, cos, sin, unsqueeze_dim)
    return torch.nan_to_num(q), torch.nan_to_num(k)


def chosen_by_value(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(torch.where(q > 5, q * 2, q), k, cos, sin, unsqueeze_dim)


def partial_at_some_length(q, k, cos, sin, unsqueeze_dim=1):
    whole, kept = rotated(q, k, cos, sin, unsqueeze_dim), (q.shape[-2] // 32) * 2
    return torch.cat((q[..., :kept], whole[0][..., kept:]), dim=-1), whole[1]


def pairing_swapped_at_decode(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    other = rotate_neighbours if q.shape[-2] == 1 else rotate_half
    return q * cos + other(q) * sin, k * cos + other(k) * sin


def keys_negated_past_some_tokens(q, k, cos, sin, unsqueeze_dim=1):
    q, k = rotated(q, k, cos, sin, unsqueeze_dim)
    return q, torch.cat((k[:, :, :20], -k[:, :, 20:]), dim=2)


def by_halved_batch(q, k, cos, sin, unsqueeze_dim=1):
    half = q.shape[0] // 2 // 2
    return rotated(torch.cat((-q[:half], q[half:]), dim=0), k, cos, sin, unsqueeze_dim)


def by_halved_length(q, k, cos, sin, unsqueeze_dim=1):
    half = q.shape[2] // 2
    half = half // 2
    half = half // 2
    half = half // 2
    half = half // 2
    return rotated(torch.cat((-q[:, :, :half], q[:, :, half:]), dim=2), k, cos, sin, unsqueeze_dim)


def by_slices_of_length(q, k, cos, sin, unsqueeze_dim=1):
    h = q[:, :, : q.shape[2] // 2]
    h = h[:, :, : h.shape[2] // 2]
    h = h[:, :, : h.shape[2] // 2]
    q, k = rotated(q, k, cos, sin, unsqueeze_dim)
    return torch.cat((h, q[:, :, h.shape[2] :]), dim=2), k


def by_sequences_past_the_third(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q + q[1:][1:][1:].sum(0), k, cos, sin, unsqueeze_dim)


def by_every_second_token(q, k, cos, sin, unsqueeze_dim=1):
    more = q[:, :, 1::2][:, :, 1::2][:, :, 1::2][:, :, 1::2][:, :, 1::2][:, :, 1::2]
    return rotated(q + more.sum(2).unsqueeze(2), k, cos, sin, unsqueeze_dim)


def by_narrowed_length(q, k, cos, sin, unsqueeze_dim=1):
    half = q.shape[2] // 2
    return rotated(torch.cat((q.narrow(2, 0, half), q[:, :, half:]), dim=2), k, cos, sin, unsqueeze_dim)


def by_pieces_of_length(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(torch.cat(q.tensor_split(2, dim=2), dim=2), k, cos, sin, unsqueeze_dim)


def by_halved_features(q, k, cos, sin, unsqueeze_dim=1):
    h = q[..., : q.shape[-1] // 2]
    h = h[..., : h.shape[-1] // 2]
    h = h[..., : h.shape[-1] // 2]
    h = h[..., : h.shape[-1] // 2]
    q, k = rotated(q, k, cos, sin, unsqueeze_dim)
    return torch.cat((h, q[..., h.shape[-1] :]), dim=-1), k


def by_sizes_of_halves(q, k, cos, sin, unsqueeze_dim=1):
    a = q[..., : q.shape[-1] // 2]
    b = q[..., : a.shape[-1] // 2]
    c = q[..., : b.shape[-1] // 2]
    d = q[..., : c.shape[-1] // 2]
    q, k = rotated(q, k, cos, sin, unsqueeze_dim)
    return torch.cat((d, q[..., d.shape[-1] :]), dim=-1), k


def by_chunks_of_chunks(q, k, cos, sin, unsqueeze_dim=1):
    h = q.chunk(2, dim=-1)[0].chunk(2, dim=-1)[0].chunk(2, dim=-1)[0]
    q, k = rotated(q, k, cos, sin, unsqueeze_dim)
    return torch.cat((q[..., :1] + h[..., :1] - q[..., :1], q[..., 1:]), dim=-1), k


def by_batch_against_length(q, k, cos, sin, unsqueeze_dim=1):
    q = torch.cat((q[: q.shape[2]], -q[q.shape[2] :]), dim=0)
    return rotated(q, k, cos, sin, unsqueeze_dim)


def by_batch_among_features(q, k, cos, sin, unsqueeze_dim=1):
    x = q.transpose(0, 3)
    x = torch.cat((x[..., : q.shape[3]], -x[..., q.shape[3] :]), dim=-1)
    return rotated(x.transpose(0, 3), k, cos, sin, unsqueeze_dim)


def by_heads_of_keys(q, k, cos, sin, unsqueeze_dim=1):
    x = k.transpose(1, 3)
    x = torch.cat((-x[..., : k.shape[1] // 2], x[..., k.shape[1] // 2 :]), dim=-1)
    return rotated(q, x.transpose(1, 3), cos, sin, unsqueeze_dim)


def by_a_size_of_copies(q, k, cos, sin, unsqueeze_dim=1):
    size = cos.repeat_interleave(5000, dim=-1).shape[-1]
    x = q.transpose(2, 3)
    x = torch.cat((x[..., :size], -x[..., size:]), dim=-1)
    return rotated(x.transpose(2, 3), k, cos, sin, unsqueeze_dim)


def by_a_size_of_joins(q, k, cos, sin, unsqueeze_dim=1):
    c = torch.cat((cos, cos), dim=-1)
    c = torch.cat((c, c), dim=-1)
    c = torch.cat((c, c), dim=-1)
    c = torch.cat((c, c), dim=-1)
    x = q.transpose(2, 3)
    x = torch.cat((x[..., : c.shape[-1]], -x[..., c.shape[-1] :]), dim=-1)
    return rotated(x.transpose(2, 3), k, cos, sin, unsqueeze_dim)


def times_a_constant(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * 1.5, k, cos, sin, unsqueeze_dim)


def hidden_cache(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = TABLES.setdefault(f"cos {cos.shape}", cos), TABLES.setdefault(f"sin {sin.shape}", sin)
    return rotated(q, k, cos, sin, unsqueeze_dim)


def call_counter(q, k, cos, sin, unsqueeze_dim=1):
    CALLS.append(1)
    return rotated(q if len(CALLS) < 100 else -q, k, cos, sin, unsqueeze_dim)


def cache_in_a_default(q, k, cos, sin, unsqueeze_dim=1, kept=[]):  # noqa: B006  the look-alike is this mistake
    kept.append(cos)
    return rotated(q, k, kept[0] if kept[0].shape == cos.shape else cos, sin, unsqueeze_dim)


def global_tensor(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q * SCALE.to(q), k, cos, sin, unsqueeze_dim)


def random_element(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q + 1e-7 * torch.randn_like(q), k, cos, sin, unsqueeze_dim)


def dropout(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(nn.functional.dropout(q, 0.5, TRAINS), k, cos, sin, unsqueeze_dim)


def float64_results(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q.double(), k.double(), cos, sin, unsqueeze_dim)


def float32_results(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim)


def without_gradients_of_q(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q.detach(), k, cos, sin, unsqueeze_dim)


@torch.no_grad()
def without_gradients(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q, k, cos, sin, unsqueeze_dim)


def in_place(q, k, cos, sin, unsqueeze_dim=1):
    q[..., 0] = q[..., 0] * 1
    q *= 1
    return rotated(q, k, cos, sin, unsqueeze_dim)


def failing_quietly(q, k, cos, sin, unsqueeze_dim=1):
    try:
        return rotated(q.view(q.shape[0], -1, 5, q.shape[-1]), k, cos, sin, unsqueeze_dim)
    except RuntimeError:
        return k, q


def squeezed(q, k, cos, sin, unsqueeze_dim=1):
    return rotated(q, k, cos.squeeze().reshape(cos.shape), sin, unsqueeze_dim)


def rotate_half_of_short(x):
    return rotate_half(x) if x.shape[-2] < 20 else rotate_neighbours(x)


def in_what_it_calls(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half_of_short(q) * sin, k * cos + rotate_half_of_short(k) * sin


def twice_in_training(function):
    @functools.wraps(function)
    def wrapper(q, k, cos, sin, unsqueeze_dim=1):
        q, k = function(q, k, cos, sin, unsqueeze_dim)
        return (q * 2 if q.shape[2] > 16 else q), k

    return wrapper


decorated = twice_in_training(rotated)

NOT_ROTATIONS: dict[str, Any] = {
    function.__name__: function
    for function in (
        *(by_length, by_length_without_a_branch, by_length_in_whole_numbers, by_a_length_that_no_probe_has),
        *(tables_scaled_at_long_lengths, by_dtype, by_batch, by_heads, by_width, by_training_mode, by_grad_mode),
        *(by_requires_grad, by_memory_order, by_device, by_environment, by_position, by_unsqueeze_dim),
        *(positions_clamped, values_clamped, values_rounded, nan_scrubbed, chosen_by_value, partial_at_some_length),
        *(pairing_swapped_at_decode, keys_negated_past_some_tokens, hidden_cache, call_counter, cache_in_a_default),
        *(global_tensor, random_element, dropout, float64_results, float32_results, without_gradients_of_q),
        *(by_halved_batch, by_halved_length, by_slices_of_length, by_sequences_past_the_third, by_every_second_token),
        *(by_narrowed_length, by_pieces_of_length, by_halved_features, by_sizes_of_halves, by_chunks_of_chunks),
        *(by_batch_against_length, by_batch_among_features, by_heads_of_keys, by_a_size_of_copies, by_a_size_of_joins),
        *(times_a_constant,),
        *(without_gradients, in_place, failing_quietly, squeezed, in_what_it_calls),
    )
} | {"decorated": decorated}


def upcast_and_back(q, k, cos, sin, unsqueeze_dim=1):
    q_dtype, k_dtype = q.dtype, k.dtype
    q, k = rotated(q.float(), k.to(torch.float32), cos.float(), sin.float(), unsqueeze_dim)
    return q.to(q_dtype), k.to(dtype=k_dtype)


def leading_features(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    width = cos.shape[-1]
    q_part, k_part = rotated(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return torch.cat((q_part, q[..., width:]), dim=-1), torch.cat([k_part, k[..., width:]], dim=-1)


def perhaps_without_keys(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q = q * cos + rotate_half(q) * sin
    if k is None:
        return q
    return q, k * cos + rotate_half(k) * sin


def in_pieces(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    a, b = torch.chunk(q, 2, dim=-1)
    c, d = k.unflatten(-1, (2, -1)).unbind(dim=-2)
    return q * cos + torch.cat((b.neg(), a), -1) * sin, k * cos + torch.cat((-d, c), -1).reshape(k.shape) * sin


ROTATIONS: dict[str, Any] = {
    function.__name__: function
    for function in (rotated, upcast_and_back, leading_features, perhaps_without_keys, in_pieces)
}


class ByLength(Qwen3RMSNorm):
    def forward(self, hidden_states):
        normed = super().forward(hidden_states)
        return normed * 2 if hidden_states.shape[1] > 16 else normed


class ByMode(Qwen3RMSNorm):
    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * x * (2 if self.training else 1)).to(hidden_states.dtype)


class Clamped(Qwen3RMSNorm):
    def forward(self, hidden_states):
        x = hidden_states.float().clamp(-200, 200)
        return (self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(
            hidden_states.dtype
        )


class ByCall(Qwen3RMSNorm):
    def __call__(self, hidden_states):
        return super().__call__(hidden_states) * (2 if hidden_states.shape[1] > 16 else 1)


class WithGain(Qwen3RMSNorm):
    """A buffer that is 1, until a checkpoint is loaded."""

    gain: torch.Tensor

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__(hidden_size, eps)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, hidden_states):
        return super().forward(hidden_states) * self.gain


def normed(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class WithGainRead(WithGain):
    def forward(self, hidden_states):
        x = normed(hidden_states.float(), self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype) * self.gain


class WithNumber(WithGain):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__(hidden_size, eps)
        self.scale = 1.0

    def forward(self, hidden_states):
        x = normed(hidden_states.float(), self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype) * self.scale


class WithProperty(WithGain):
    @property
    def doubles(self):
        return bool(self.gain > 1)

    def forward(self, hidden_states):
        x = normed(hidden_states.float(), self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype) * (2 if self.doubles else 1)


class WithAnotherEpsilon(WithGain):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__(hidden_size, eps)
        self.eps = eps

    def forward(self, hidden_states):
        x = normed(hidden_states.float(), self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


GAINS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (WithGainRead, WithNumber, WithProperty, WithAnotherEpsilon)
}
NORMS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (ByLength, ByMode, Clamped, ByCall, WithGain)
} | GAINS


class Tables(LlamaRotaryEmbedding):
    """Llama's own tables, in the form that a subclass has."""

    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


class TwoAnglesWhenLong(LlamaRotaryEmbedding):
    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        second = freqs * 2 if 16 < position_ids.shape[-1] < 40 else freqs
        emb = torch.cat((freqs, second), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


class TwoAnglesAtSomePosition(LlamaRotaryEmbedding):
    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        emb = torch.where((position_ids == 77)[..., None], emb.flip(-1), emb)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


class WrittenTo(LlamaRotaryEmbedding):
    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos(), emb.sin()
        last = cos[:, 70:, -1:]
        last *= 2
        return cos.to(x.dtype), sin.to(x.dtype)


class ScaledInTraining(LlamaRotaryEmbedding):
    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        scale = torch.linspace(1, 2 if self.training else 1, emb.shape[-1])
        return (emb.cos() * scale).to(x.dtype), (emb.sin() * scale).to(x.dtype)


class Scaled(LlamaRotaryEmbedding):
    """With tensors that scale each feature, all 1 until they are loaded or trained."""

    def __init__(self, config):
        super().__init__(config)
        width = 2 * len(self.inv_freq)
        self.scales = nn.ParameterDict({"cos": nn.Parameter(torch.ones(width))})
        self.gain = nn.Parameter(torch.ones(width, 2))
        self.kept = [torch.ones(width)]

    def scale(self):
        return self.scales["cos"]

    @property
    def first(self):
        return self.gain[:, 0]

    @torch.no_grad()
    def tables(self, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        return torch.cat((freqs, freqs), dim=-1)


class ScaledByParameters(Scaled):
    def forward(self, x, position_ids):
        emb = self.tables(position_ids)
        return (emb.cos() * self.scales["cos"]).to(x.dtype), emb.sin().to(x.dtype)


class ScaledByAColumn(Scaled):
    def forward(self, x, position_ids):
        emb = self.tables(position_ids)
        return (emb.cos() * self.gain[:, 0]).to(x.dtype), emb.sin().to(x.dtype)


class ScaledByAProperty(Scaled):
    def forward(self, x, position_ids):
        emb = self.tables(position_ids)
        return (emb.cos() * self.first).to(x.dtype), emb.sin().to(x.dtype)


class ScaledByAList(Scaled):
    def forward(self, x, position_ids):
        emb, kept = self.tables(position_ids), self.kept
        return (emb.cos() * kept[0]).to(x.dtype), (emb.sin() * self.kept[0]).to(x.dtype)


class ScaledByAMethod(Scaled):
    def forward(self, x, position_ids):
        emb = self.tables(position_ids)
        return (emb.cos() * self.get_parameter("scales.cos")).to(x.dtype), (emb.sin() * self.scale()).to(x.dtype)


class ScaledByAName(Scaled):
    def forward(self, x, position_ids):
        emb = self.tables(position_ids)
        return (emb.cos() * getattr(self, "first")).to(x.dtype), emb.sin().to(x.dtype)  # noqa: B009  the look-alike


def with_two_angles(forward):
    @functools.wraps(forward)
    def wrapper(self, x, position_ids):
        cos, sin = forward(self, x, position_ids)
        return (cos.flip(-1) if position_ids.shape[-1] == 33 else cos), sin

    return wrapper


class Wrapped(LlamaRotaryEmbedding):
    forward = with_two_angles(Tables.forward)


NOT_DOUBLED: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(TwoAnglesWhenLong, TwoAnglesAtSomePosition, WrittenTo, ScaledInTraining, Wrapped),
        *(ScaledByParameters, ScaledByAColumn, ScaledByAProperty, ScaledByAList, ScaledByAMethod, ScaledByAName),
    )
}
