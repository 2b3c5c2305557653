"""Each test breaks a layer in one way. The claims that measure the layer must detect it."""

import importlib
import re
from dataclasses import replace

import pytest
import torch

from ropewalk.claims import CHAPTERS, run
from ropewalk.claims.layers import operations
from ropewalk.kernels.linear.chunks import Far
from ropewalk.kernels.types import Features
from ropewalk.nn.encodings.absolute import SinusoidalEncoding
from ropewalk.nn.encodings.base import DistanceBias
from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from ropewalk.nn.encodings.by_name import ENCODINGS
from ropewalk.nn.encodings.recurrent import RecurrentEncoding
from ropewalk.nn.encodings.rotary import RotaryEncoding
from ropewalk.nn.linear.feature_maps import FavorFeatures
from ropewalk.nn.linear.layer import LinearAttention
from ropewalk.nn.linear.near_keys import with_near
from slow import slow


def contradicted(*names: str) -> set[str]:
    chosen = [claim for chapter in CHAPTERS for claim in chapter.claims if claim.id in names]
    assert len(chosen) == len(names)
    entries = list(run(chosen))
    # A measurement that raises also counts as contradicted, and would hide that nothing was measured.
    assert not [entry.finding.measured for entry in entries if re.match(r"\w+Error: ", entry.finding.measured)]
    return {entry.claim.id for entry in entries if entry.contradicted}


def linear_ops(monkeypatch, change):
    """Replace linear attention by `change(attend, tokens, before, causal)`; tokens have queries, keys and values."""
    ops = importlib.import_module("ropewalk.kernels.linear.torch")
    original = ops._attend_sequence
    monkeypatch.setattr(
        ops,
        "_attend_sequence",
        lambda tokens, before, *, causal: change(original, tokens, before, causal),
    )


def with_features(monkeypatch, change):
    """Replace the features of linear attention by `change(features)`."""
    ops = importlib.import_module("ropewalk.kernels.linear.torch")
    original = ops._features
    monkeypatch.setattr(ops, "_features", lambda *arguments: change(original(*arguments)))


@pytest.mark.slow
def test_linear_attention_with_a_rotated_denominator_is_detected(monkeypatch):
    with_features(monkeypatch, lambda x: Features(x.rotated, x.rotated))
    ids = ("linear.rotation-factors", "linear.denominator", "linear.denominator-random", "linear.weights")
    assert contradicted(*ids) == set(ids)


def test_linear_attention_without_rotation_is_detected(monkeypatch):
    with_features(monkeypatch, lambda x: Features(x.plain, x.plain))
    ids = ("linear.rotation-factors", "linear.denominator", "linear.weights", "linear.relative")
    assert contradicted(*ids) == set(ids)


def test_linear_attention_that_forgets_its_state_is_detected(monkeypatch):
    linear_ops(monkeypatch, lambda attend, tokens, before, causal: attend(tokens, None, causal=causal))
    ids = ("linear.state", "linear.rotation-factors", "linear.layers")
    assert contradicted(*ids) == set(ids)


def test_linear_attention_without_a_causal_mask_is_detected(monkeypatch):
    linear_ops(monkeypatch, lambda attend, tokens, before, causal: attend(tokens, before, causal=False))
    ids = ("linear.state", "linear.lookup", "linear.weights", "order.indistinguishable")
    assert contradicted(*ids) == set(ids)


def test_linear_attention_off_by_a_thousandth_is_detected(monkeypatch):
    def off(attend, tokens, before, causal):
        out, after = attend(tokens, before, causal=causal)
        return 1.001 * out, after

    linear_ops(monkeypatch, off)
    ids = ("linear.association", "linear.elu", "linear.state", "linear.lookup", "linear.weights")
    assert contradicted(*ids) == set(ids)


@pytest.mark.parametrize(
    "ids",
    [("linear.cost", "linear.cost-in-d", "linear.relative"), slow(("linear.bias-quadratic",))],
    ids=["plain", "bias"],
)
def test_linear_attention_that_is_quadratic_is_detected(ids, monkeypatch):
    def with_all_scores(attend, tokens, before, causal):
        _ = tokens.q.x @ tokens.k.x.mT
        return attend(tokens, before, causal=causal)

    linear_ops(monkeypatch, with_all_scores)
    assert contradicted(*ids) == set(ids)


@pytest.mark.parametrize(
    "ids", [("linear.cost", "linear.relative"), slow(("linear.bias-quadratic",))], ids=["plain", "bias"]
)
def test_linear_attention_in_one_chunk_is_detected(ids, monkeypatch):
    monkeypatch.setattr(importlib.import_module("ropewalk.kernels.linear.torch"), "CHUNK", 1 << 20)
    assert contradicted(*ids) == set(ids)


def test_a_state_that_grows_is_detected(monkeypatch):
    step = LinearAttention.step

    def growing(self, x, state=None):
        y, after = step(self, x, None if state is None else replace(state, above=state.above[:, :, :8]))
        return y, replace(after, above=torch.cat((after.above, *[after.above] * (x.shape[1] // 100)), dim=2))

    monkeypatch.setattr(LinearAttention, "step", growing)
    assert contradicted("linear.lookup") == {"linear.lookup"}


def test_features_that_cancel_are_detected(monkeypatch):
    ops = importlib.import_module("ropewalk.kernels.linear.torch")
    monkeypatch.setattr(ops, "map_features", lambda x, name, shift: torch.nn.functional.elu(x) + 1)
    assert contradicted("linear.elu") == {"linear.elu"}


def test_a_quotient_that_is_not_a_number_is_detected(monkeypatch):
    kernels = importlib.import_module("ropewalk.kernels.linear.torch")
    monkeypatch.setattr(kernels, "divide", lambda above, below, smallest: above / below)
    assert contradicted("linear.nonnegative") == {"linear.nonnegative"}


def test_random_features_that_do_not_estimate_softmax_are_detected(monkeypatch):
    monkeypatch.setattr(FavorFeatures, "forward", lambda self, x: torch.relu(x @ self.projection.to(x.dtype).T))
    assert contradicted("linear.kernel") == {"linear.kernel"}


def test_a_bias_that_is_the_same_everywhere_is_detected(monkeypatch):
    original = T5Bias.bias
    monkeypatch.setattr(T5Bias, "bias", lambda self, q, k: 0 * original(self, q, k))
    ids = ("linear.bias-factor", "linear.encodings", "linear.bias-alibi", "attention.reverse")
    assert contradicted(*ids) == set(ids)


@pytest.mark.parametrize("change", [lambda x: x[:, 1:-1], lambda x: x.flip(-1)], ids=["too small", "reversed"])
def test_a_wrong_window_is_detected(change, monkeypatch):
    original = T5Bias.distance_bias

    def changed(self):
        numbers = original(self).numbers
        assert numbers is not None
        return DistanceBias(numbers=change(numbers))

    monkeypatch.setattr(T5Bias, "distance_bias", changed)
    assert contradicted("linear.encodings") == {"linear.encodings"}


def test_sums_over_earlier_chunks_that_do_not_decay_are_detected(monkeypatch):
    chunks = importlib.import_module("ropewalk.kernels.linear.chunks")
    monkeypatch.setattr(chunks, "Far", lambda sums, factors: Far(sums, None))
    ids = ("linear.encodings", "linear.bias-alibi", "linear.retention")
    assert contradicted(*ids) == set(ids)


def test_a_state_that_does_not_decay_is_detected(monkeypatch):
    def kept(attend, tokens, before, causal):
        out, _ = attend(tokens, before, causal=causal)
        without = tokens.weighting._replace(decay=None)
        return out, attend(tokens._replace(weighting=without), before, causal=causal)[1]

    linear_ops(monkeypatch, kept)
    ids = ("linear.encodings", "linear.bias-alibi", "linear.retention", "linear.layers")
    assert contradicted(*ids) == set(ids)


def test_a_state_without_its_near_keys_is_detected(monkeypatch):
    function = importlib.import_module("ropewalk.nn.linear.function")
    monkeypatch.setattr(
        function, "with_near", lambda near, k, v, ids: with_near(near._replace(values=0 * near.values), k, v, ids)
    )
    ids = ("linear.encodings", "linear.layers")
    assert contradicted(*ids) == set(ids)


def test_a_bias_that_grows_with_the_position_is_detected(monkeypatch):
    original = AlibiBias.bias
    monkeypatch.setattr(AlibiBias, "bias", lambda self, q, k: original(self, q, k) * (1 + q.unsqueeze(-1) / 10))
    assert contradicted("attention.shift", "linear.bias-alibi") == {"attention.shift", "linear.bias-alibi"}


def test_a_bias_only_on_earlier_keys_is_detected(monkeypatch):
    original = AlibiBias.bias
    monkeypatch.setattr(AlibiBias, "bias", lambda self, q, k: original(self, q, k) * (k <= q.unsqueeze(-1)))
    assert contradicted("attention.reverse") == {"attention.reverse"}


def test_keys_that_are_not_rotated_are_detected(monkeypatch):
    original = RotaryEncoding.rotate
    monkeypatch.setattr(RotaryEncoding, "rotate", lambda self, q, k, ids: (original(self, q, k, ids)[0], k))
    ids = ("attention.shift", "order.rope-tells", "heads.own-frequencies")
    assert contradicted(*ids) == set(ids)


def test_a_missing_sinusoidal_embedding_is_detected(monkeypatch):
    monkeypatch.setattr(SinusoidalEncoding, "embed", lambda self, x, ids: x)
    ids = ("attention.shift", "attention.reverse", "linear.relative")
    assert contradicted(*ids) == set(ids)


def test_a_network_without_recurrence_is_detected(monkeypatch):
    monkeypatch.setattr(RecurrentEncoding, "embed", lambda self, x, ids: torch.tanh(x))
    assert contradicted("absolute.recurrent", "attention.reverse") == {"absolute.recurrent", "attention.reverse"}


def test_one_rotation_for_all_heads_is_detected(monkeypatch):
    monkeypatch.setitem(ENCODINGS, "rope-across-heads", ENCODINGS["rope"])
    assert contradicted("heads.own-frequencies") == {"heads.own-frequencies"}


def test_attention_without_a_causal_mask_is_detected(monkeypatch):
    attention = importlib.import_module("ropewalk.nn.attention.layer")
    original = attention.attend

    def unmasked(q, k, v, sight, **options):
        return original(q, k, v, sight._replace(causal=False), **options)

    monkeypatch.setattr(attention, "attend", unmasked)
    ids = ("order.indistinguishable", "attention.reverse", "heads.own-frequencies")
    assert contradicted(*ids) == set(ids)


def test_attention_without_its_softmax_is_detected(monkeypatch):
    scores = importlib.import_module("ropewalk.nn.attention.scores")
    monkeypatch.setattr(scores, "_sdpa", lambda q, k, v, mask, causal, scale, dropout: q @ k.mT * scale @ v)
    ids = ("linear.softmax-blocks", "linear.bias-factor", "order.rope-tells", "heads.own-frequencies")
    assert contradicted(*ids) == set(ids)


def test_softmax_is_counted_by_its_formula():
    q = torch.zeros(1, 2, 8, 4)
    count = operations(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert count == 2 * (2 * 8 * 8 * 4) * 2
