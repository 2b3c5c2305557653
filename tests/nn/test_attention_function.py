"""rw.attention and windows against softmax over NumPy's float64 scores: values, log-sum-exp, gradients, merging."""

import itertools

import numpy as np
import pytest
import torch

import ropewalk as rw
from meant import meant
from ropewalk.nn.attention.cache import KVCache
from slow import slow
from strategies import vector

TIGHT = {"rtol": 0.0, "atol": 1e-12}
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def encoding_for(kind: str, causal: bool):
    if kind == "none":
        return None
    options = {
        "t5": {"num_buckets": 8, "max_distance": 16, "causal": causal},
        "xpos": {"spec": rw.RopeSpec(WIDTH, xpos=rw.XPos(512))},
    }.get(kind, {})
    made = rw.encoding(kind, dim=HEADS * WIDTH, num_heads=HEADS, **options).double()
    if kind == "t5":
        torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(7))
    return made


def direct(q, k, v, made, q_ids, k_ids, visible, scale):
    """Softmax attention one query at a time, in NumPy. `visible(b, m, n)` by the index of tokens."""
    if made is not None:
        q, k = made.rotate(q, k, q_ids, k_positions=k_ids)
    bias = None if made is None else made.bias(q_ids, k_ids)
    q, k, v = (x.detach().numpy() for x in (q, k, v))
    batch, heads, queries, _ = q.shape
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, h, m in itertools.product(range(batch), range(heads), range(queries)):
        seen = [n for n in range(k.shape[2]) if visible(b, m, n)]
        if not seen:
            continue
        group = h * k.shape[1] // heads
        scores = k[b, group, seen] @ q[b, h, m] * scale
        if bias is not None:
            row = bias.detach().expand(batch, heads, queries, k.shape[2])[b, h, m]
            scores = scores + row.numpy()[seen]
        top = scores.max()
        weights = np.exp(scores - top)
        lse[b, h, m] = top + np.log(weights.sum())
        out[b, h, m] = weights @ v[b, group, seen] / weights.sum()
    return torch.from_numpy(out), torch.from_numpy(lse)


def heads(queries, keys, batch=2, v_width=5):
    shapes = (batch, HEADS, queries, WIDTH), (batch, KV_HEADS, keys, WIDTH), (batch, KV_HEADS, keys, v_width)
    return [vector(i, *shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("kind", ["none", "rope", slow("alibi"), "t5", slow("xpos")])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), slow(3, 7), slow(1, 7)])
def test_values_and_log_sum_exp(kind, causal, window, queries, keys):
    made = encoding_for(kind, causal)
    q, k, v = heads(queries, keys)
    start = keys - queries if causal or window else 0
    masks = None, torch.tensor([[True] * keys, [False] * 3 + [True] * (keys - 3)])
    ids = None, torch.arange(keys) * 2 + 5
    for mask, k_ids, scale in itertools.product(masks, ids, (None, 0.7)):

        def visible(b, m, n, mask=mask):
            ahead = m + start - n
            shown = mask is None or bool(mask[b, n])
            shown = shown and (ahead >= 0 or not causal)
            return shown and (window is None or abs(ahead) < window)

        options = {"key_mask": mask, "k_positions": k_ids, "scale": scale, "window": window, "causal": causal}
        if made is not None and start + queries != keys:
            with pytest.raises(rw.RopewalkError, match="nothing relates the queries to the keys"):
                rw.attention(q, k, v, encoding=made, **options)
            options["q_positions"] = (torch.arange(keys) if k_ids is None else k_ids)[:queries]
        y, lse = rw.attention(q, k, v, encoding=made, return_lse=True, **options)
        k_at = torch.arange(keys) if k_ids is None else k_ids
        own = None if made is None else made.scale
        factor = scale if scale is not None else WIDTH**-0.5 if own is None else own
        expected, sums = direct(q, k, v, made, k_at[start : start + queries], k_at, visible, factor)
        torch.testing.assert_close(y, expected, **TIGHT)
        torch.testing.assert_close(lse, sums, **TIGHT)
        torch.testing.assert_close(rw.attention(q, k, v, encoding=made, **options), expected, **TIGHT)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("mask", [None, [[True] * 5, [False] * 3 + [True] * 2]])
def test_gradients_also_through_the_log_sum_exp(window, mask):
    q, k, v = (x.requires_grad_() for x in heads(5, 5))
    rope = rw.RotaryEmbedding(WIDTH)
    mask = None if mask is None else torch.tensor(mask)

    def call(q, k, v):
        y, lse = rw.attention(q, k, v, encoding=rope, window=window, key_mask=mask, return_lse=True)
        return y, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(call, (q, k, v), fast_mode=True)
    y, lse = call(q, k, v)
    for gradient in torch.autograd.grad((y.sum(), lse.sum()), (q, k, v)):
        assert torch.isfinite(gradient).all()


def test_two_halves_merge_to_the_whole():
    q, k, v = heads(6, 12)
    rope, q_ids, k_ids = rw.RotaryEmbedding(WIDTH), torch.arange(6, 12), torch.arange(12)
    whole, total = rw.attention(
        q, k, v, encoding=rope, q_positions=q_ids, k_positions=k_ids, causal=False, return_lse=True
    )
    parts = [
        rw.attention(
            q, k[:, :, part], v[:, :, part], encoding=rope, q_positions=q_ids, k_positions=k_ids[part], causal=False,
            return_lse=True,
        )
        for part in (slice(0, 6), slice(6, 12))
    ]  # fmt: skip
    lse = torch.logsumexp(torch.stack([part[1] for part in parts]), dim=0)
    merged = sum((part[1] - lse).exp()[..., None] * part[0] for part in parts)
    torch.testing.assert_close(merged, whole, **TIGHT)
    torch.testing.assert_close(lse, total, **TIGHT)


@meant("cu_seqlens")
def test_packed_sequences_are_separate_ones():
    q, k, v = (x[:1] for x in heads(9, 9))
    ends, rope = torch.tensor([0, 4, 4, 7]), rw.RotaryEmbedding(WIDTH)
    for causal, window in itertools.product((True, False), (None, 2)):
        options = {"causal": causal, "window": window, "encoding": rope, "return_lse": True}
        y, lse = rw.attention(q, k, v, cu_seqlens=ends, **options)
        for start, end in ((0, 4), (4, 7)):
            part = slice(start, end)
            alone, sums = rw.attention(q[:, :, part], k[:, :, part], v[:, :, part], **options)
            torch.testing.assert_close(y[:, :, part], alone, **TIGHT)
            torch.testing.assert_close(lse[:, :, part], sums, **TIGHT)
        assert not y[:, :, 7:].any()
        assert torch.equal(lse[:, :, 7:], torch.full_like(lse[:, :, 7:], -torch.inf))


@pytest.mark.parametrize("kind", ["none", "rope", "alibi", slow("t5"), slow("xpos")])
@pytest.mark.parametrize("window", [1, 3, 20])
def test_a_layer_with_a_window_decodes_as_it_prefills(kind, window):
    layer = rw.Attention(HEADS * WIDTH, HEADS, num_kv_heads=KV_HEADS, encoding=encoding_for(kind, True), window=window)
    layer, x = layer.double(), vector(0, 2, 9, HEADS * WIDTH)
    with torch.inference_mode():
        whole = layer(x)
        for sizes in ([1] * 9, [4, 1, 1, 3], [9]):
            cache = KVCache(2, KV_HEADS, 16, WIDTH, dtype=torch.float64)
            steps = torch.cat([layer(part, cache=cache) for part in x.split(sizes, dim=1)], dim=1)
            torch.testing.assert_close(steps, whole, **TIGHT)
        # Ragged: the second sequence has two tokens fewer.
        cache = KVCache(2, KV_HEADS, 16, WIDTH, dtype=torch.float64)
        first = layer(x[:, :7], cache=cache, counts=torch.tensor([7, 5]))
        torch.testing.assert_close(first[0], whole[0, :7], **TIGHT)
        torch.testing.assert_close(first[1, :5], whole[1, :5], **TIGHT)
        following = torch.stack([x[0, 7], x[1, 5]])[:, None]
        second = layer(following, cache=cache)
        torch.testing.assert_close(second[:, 0], torch.stack([whole[0, 7], whole[1, 5]]), **TIGHT)


@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_with_a_window_is_the_function(causal):
    rope = rw.RotaryEmbedding(WIDTH)
    layer = rw.Attention(HEADS * WIDTH, HEADS, num_kv_heads=KV_HEADS, encoding=rope, window=3, causal=causal).double()
    x, mask = vector(0, 2, 9, HEADS * WIDTH), torch.rand(2, 9) > 0.3
    q, k, v = layer.heads_of(x)
    for options in ({}, {"key_mask": mask}):
        y = layer.joined(rw.attention(q, k, v, encoding=rope, window=3, causal=causal, **options))
        torch.testing.assert_close(layer(x, **options), y, **TIGHT)
    ends = torch.tensor([0, 5, 9])
    y = rw.attention(q[:1], k[:1], v[:1], encoding=rope, window=3, causal=causal, cu_seqlens=ends)
    torch.testing.assert_close(layer(x[:1], cu_seqlens=ends), layer.joined(y), **TIGHT)
    assert "window=3" in repr(layer)


@pytest.mark.parametrize("window", [0, -1, 2.5, "3", True])
def test_windows_that_are_no_windows(window):
    q, k, v = heads(3, 3)
    for call in (lambda: rw.Attention(8, 2, window=window), lambda: rw.attention(q, k, v, window=window)):
        with pytest.raises(rw.RopewalkError, match=r"window=\.\.\.\)\nexpected: an integer of at least 1"):
            call()


def test_bad_arguments():
    q, k, v = heads(3, 3)
    for call, message in (
        (lambda: rw.attention(q[0], k, v), "heads .batch, heads, seq, head_dim"),
        (lambda: rw.attention(q, k[:, :, :2], v), "q .batch, heads, queries, dim"),
        (lambda: rw.attention(q, k.float(), v), "of one dtype and device"),
        (lambda: rw.attention(*heads(4, 3)), "at most as many queries as keys"),
        (lambda: rw.attention(q, k, v, key_mask=torch.ones(2, 4, dtype=torch.bool)), "bool .2, 3."),
        (lambda: rw.attention(q, k, v, cu_seqlens=torch.tensor([0, 3])), "a batch of 1"),
        (lambda: rw.attention(q, k, v, scale=0.0), "a finite number above 0"),
        (
            lambda: rw.attention(q, k, v, encoding=rw.encoding("sinusoidal", dim=32, num_heads=HEADS)),
            "which changes tokens before they are projected",
        ),
        (lambda: rw.attention(q, k, v, encoding=rw.RotaryEmbedding(6)), "a rope with head_dim=8"),
        (lambda: rw.attention(q, k, v, q_positions=torch.arange(4)), "attention.q_positions="),
    ):
        with pytest.raises(rw.RopewalkError, match=message):
            call()


def dense(q, k, v, made, q_ids, k_ids, visible, scale):
    """Attention in plain torch over all scores: output and log-sum-exp, 0 and -inf for a row that sees nothing."""
    if made is not None:
        q, k = made.rotate(q, k, q_ids, k_positions=k_ids)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = q @ k.mT * scale
    bias = None if made is None else made.bias(q_ids, k_ids)
    scores = scores if bias is None else scores + bias
    seen = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~(visible | ~seen), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    out = ((scores - lse).exp() @ v).masked_fill(~seen, 0)
    return out, lse.masked_fill(~seen, -torch.inf).squeeze(-1)


OPTIONS = {
    "q_positions": (None, torch.arange(6) + 9),
    "k_positions": (None, torch.tensor([3, 4, 6, 8, 9, 12])),
    "causal": (True, False),
    "window": (None, 2),
    "key_mask": (None, torch.tensor([[False, True, True, False, True, True]])),
    "cu_seqlens": (None, torch.tensor([0, 2, 6])),
    "scale": (None, 0.7),
    "return_lse": (False, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "rope", "alibi", "t5", "xpos"])
def test_all_combinations_of_options(kind):
    encodings = {causal: encoding_for(kind, causal) for causal in (True, False)}
    tensors = heads(6, 6, batch=1)
    cotangents = vector(7, 1, HEADS, 6, 5), vector(8, 1, HEADS, 6)
    for values in itertools.product(*OPTIONS.values()):
        options = dict(zip(OPTIONS, values, strict=True))
        made = encodings[options["causal"]]
        k_ids = options["k_positions"]
        if k_ids is None:
            k_ids = torch.tensor([0, 1, 0, 1, 2, 3]) if options["cu_seqlens"] is not None else torch.arange(6)
        q_ids = k_ids if options["q_positions"] is None else options["q_positions"]
        ahead = torch.arange(6)[:, None] - torch.arange(6)
        visible = ahead >= 0 if options["causal"] else torch.ones(6, 6, dtype=torch.bool)
        if options["window"] is not None:
            visible = visible & (ahead.abs() < options["window"])
        if options["cu_seqlens"] is not None:
            document = torch.tensor([0, 0, 1, 1, 1, 1])
            visible = visible & (document[:, None] == document)
        if options["key_mask"] is not None:
            visible = visible & options["key_mask"]
        default = None if made is None else made.scale
        scale = options["scale"] or default or WIDTH**-0.5
        results = []
        for form in ("ours", "dense"):
            leaves = [x.clone().requires_grad_() for x in tensors]
            if form == "ours":
                outputs = rw.attention(*leaves, encoding=made, **options)
                outputs = outputs if options["return_lse"] else (outputs,)
            else:
                outputs = dense(*leaves, made, q_ids, k_ids, visible, scale)[: 1 + options["return_lse"]]
            finite = [x.masked_fill(x.isinf(), 0.0) for x in outputs]
            learned = [] if made is None else list(made.parameters())
            gradients = torch.autograd.grad(finite, [*leaves, *learned], cotangents[: len(finite)])
            results.append([*outputs, *gradients])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, **TIGHT, msg=lambda text, o=options: f"{o}\n{text}")


def test_attention_to_the_tokens_of_another_sequence():
    (q, _, _), (_, k, v) = heads(9, 4), heads(2, 4)
    y, lse = rw.attention(q, k, v, causal=False, return_lse=True)
    expected, sums = direct(q, k, v, None, None, None, lambda b, m, n: True, WIDTH**-0.5)
    torch.testing.assert_close(y, expected, **TIGHT)
    torch.testing.assert_close(lse, sums, **TIGHT)
    with pytest.raises(rw.RopewalkError, match="causal=False for the tokens of another sequence"):
        rw.attention(q, k, v)


def test_a_rope_over_two_axes():
    rope = rw.RotaryEmbedding(rw.RopeSpec(WIDTH, axes=rw.Axes.chunked((2, 2))))
    q, k, v = (x[:1] for x in heads(6, 6))
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]])
    y = rw.attention(q, k, v, encoding=rope, k_positions=ids)
    rotated = rope(q, k, positions=ids)
    torch.testing.assert_close(y, rw.attention(*rotated, v), **TIGHT)
    with pytest.raises(rw.RopewalkError, match=r"k_positions \[2, keys\]"):
        rw.attention(q, k, v, encoding=rope)


def test_padding_may_hold_anything():
    q, k, v = heads(5, 5)
    mask = torch.tensor([[True] * 5, [False, True, True, False, True]])
    expected = rw.attention(q, k, v, key_mask=mask, return_lse=True)
    for x in (k, v):
        x[1, :, [0, 3]] = torch.nan
    for ours, theirs in zip(rw.attention(q, k, v, key_mask=mask, return_lse=True), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TIGHT)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_query_without_a_key_may_hold_anything(return_lse):
    q, k, v = heads(4, 4)
    q[1, :, 0] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.tensor([[True] * 4, [False, True, True, True]])
    y = rw.attention(*leaves, key_mask=mask, return_lse=return_lse)
    y = y[0] if return_lse else y
    assert not y[1, :, 0].any()
    for gradient in torch.autograd.grad(y.sum(), leaves):
        assert gradient.isfinite().all()
    assert not torch.autograd.grad(rw.attention(*leaves, key_mask=mask).sum(), q)[0][1, :, 0].any()


def test_the_log_sum_exp_under_autocast():
    q, k, v = (x.float() for x in heads(6, 6))
    expected = rw.attention(q.double(), k.double(), v.double(), return_lse=True)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, lse = rw.attention(q, k, v, return_lse=True)
        assert y.dtype == rw.attention(q, k, v).dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=1e-5)
