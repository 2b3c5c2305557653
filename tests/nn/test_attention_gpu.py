"""Attention on a CUDA device: FlexAttention against the mask, memory, packed sequences, padding, decoding."""

from collections.abc import Iterator

import pytest
import torch

from meant import meant
from ropewalk import RotaryEmbedding
from ropewalk import attention as attention_function
from ropewalk.nn.attention import scores
from ropewalk.nn.attention.cache import KVCache
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.attention.scores import ScoreBias, attend
from ropewalk.nn.attention.visibility import Visibility, documents_of
from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from strategies import vector

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of Inductor, for products in float32, which are to be float32 here.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    # Of torch 2.11 within its own compiler: while it traces FlexAttention, and for a part without kernels.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

KINDS = ["none", "rope", "alibi", "t5"]
DIM, HEADS, WIDTH = 256, 4, 64


@pytest.fixture(autouse=True)
def as_models_run() -> Iterator[None]:
    """Deterministic algorithms, which other tests have, would want another cuBLAS; each test has graphs of its own."""
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    scores._compiled_flex.cache_clear()
    yield
    torch.use_deterministic_algorithms(True)


def encoding_for(kind, heads=HEADS):
    if kind == "t5":
        t5 = T5Bias(heads, causal=True)
        torch.nn.init.normal_(t5.weight, generator=torch.Generator().manual_seed(7))
        return t5
    return {"none": None, "rope": RotaryEmbedding(WIDTH), "alibi": AlibiBias(heads)}[kind]


def layer(kind, **options):
    torch.manual_seed(3)
    return Attention(DIM, HEADS, num_kv_heads=2, encoding=encoding_for(kind), **options).cuda().eval()


def visibilities(queries, keys):
    hidden = (torch.rand(2, keys, generator=torch.Generator().manual_seed(1)) > 0.5).cuda()
    hidden[-1] = False
    starts = torch.tensor([keys - queries, 2], device="cuda")
    if queries != keys:
        return Visibility(), Visibility(True, starts), Visibility(True, starts[0]), Visibility(True, starts, hidden)
    documents = documents_of(torch.tensor([0, 5, 130, 190], device="cuda"), keys)
    return Visibility(True), Visibility(False, None, None, documents), Visibility(True, None, hidden, documents)


# Few of them: each is compiled forward and backward.
@pytest.mark.parametrize(("kind", "queries", "keys"), [("none", 200, 200), ("alibi", 40, 300), ("t5", 200, 200)])
def test_flex_attention_and_the_mask_agree(kind, queries, keys):
    made = encoding_for(kind)
    made = made if made is None else made.cuda()
    learned = [] if made is None else list(made.parameters())
    sizes = (4, queries), (2, keys), (2, keys)
    given = [vector(n, 2, *size, WIDTH).float().cuda() for n, size in enumerate(sizes)]
    places = torch.arange(keys - queries, keys, device="cuda"), torch.arange(keys, device="cuda").expand(2, -1)
    score_bias = None if made is None else ScoreBias(made, *places)
    for visibility in visibilities(queries, keys):
        found = []
        for flex in (True, False):
            leaves = [x.clone().requires_grad_() for x in given]
            y = attend(*leaves, visibility, scale=0.1, score_bias=score_bias, flex=flex)
            cotangent = vector(3, *y.shape).float().cuda()
            found.append([y, *torch.autograd.grad(y, [*leaves, *learned], cotangent)])
        for a, b in zip(*found, strict=True):
            assert torch.isfinite(a).all()
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.detach().abs().max()) + 1e-6), visibility
        if visibility.key_mask is not None:
            assert not found[0][0][1].any()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.bfloat16) for kind in KINDS),
        *((kind, torch.float64) for kind in KINDS),
        ("t5", torch.float32),
        ("alibi", torch.float16),
    ],
)
@meant("cu_seqlens")
def test_whole_layers_are_what_they_are_on_the_cpu(kind, dtype):
    attention = layer(kind).to(dtype)
    exact = layer(kind).to(dtype).cpu().double()
    x, mask = vector(0, 2, 150, DIM).to(dtype), torch.arange(150) < torch.tensor([[150], [70]])
    ends = torch.tensor([0, 33, 140])
    near = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 0.03)
    calls = [({}, x), ({"key_mask": mask}, x), ({"cu_seqlens": ends}, x[:1]), ({"positions": torch.arange(150) * 3}, x)]
    with torch.no_grad():
        for given, tokens in calls:
            y = attention(tokens.cuda(), **{name: value.cuda() for name, value in given.items()})
            truth = exact(tokens.double(), **given)
            assert y.dtype == dtype
            assert (y.cpu().double() - truth).abs().max() < near, given


@pytest.mark.parametrize("kind", ["alibi", "t5"])
@pytest.mark.parametrize("work", ["forward", "forward and backward"])
def test_no_bias_is_written_out(kind, work):
    seq, heads = 16_384, 8
    made = encoding_for(kind, heads).cuda()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, seq, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    places = torch.arange(seq, device="cuda")
    leaves = [*(x.requires_grad_(work != "forward") for x in (q, k, v)), *made.parameters()]

    def call():
        y = attend(q, k, v, Visibility(True), scale=0.1, score_bias=ScoreBias(made, places, places))
        if work != "forward":
            torch.autograd.grad(y, leaves, v.detach())

    call()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    # A single [seq, seq] of one byte per element would be 256 MiB; q, k, v and their gradients are 16 MiB each.
    assert torch.cuda.max_memory_allocated() - before < 200 * 2**20


def test_packed_and_padded_sequences_write_out_no_mask():
    attention = layer("rope").to(torch.bfloat16)
    seq = 16_384
    x = torch.randn(1, seq, DIM, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, 5000, 5001, 16_000], device="cuda")
    mask = torch.rand(1, seq, device="cuda") > 0.1
    for given in ({"cu_seqlens": ends}, {"key_mask": mask}):
        with torch.no_grad():
            attention(x, **given)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            attention(x, **given)
            torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 200 * 2**20, given


@pytest.mark.parametrize("kind", KINDS)
def test_decoding(kind):
    attention, x = layer(kind), vector(0, 2, 60, DIM).float().cuda()
    with torch.inference_mode():
        whole = attention(x)
        for ragged in (False, True):
            cache = KVCache(2, 2, 64, WIDTH, device="cuda")
            counts = torch.tensor([30, 21], device="cuda") if ragged else None
            y = attention(x[:, :30], cache=cache, counts=counts)
            assert torch.allclose(y[1, :21], whole[1, :21], atol=1e-4)
            if ragged:
                steps = [torch.stack([x[0, 30 + n], x[1, 21 + n]])[:, None] for n in range(20)]
                expected = [torch.stack([whole[0, 30 + n], whole[1, 21 + n]])[:, None] for n in range(20)]
            else:
                # A chunk that FlexAttention serves, and tokens.
                steps = [x[:, 30:50], *x[:, 50:].split(1, dim=1)]
                expected = [whole[:, 30:50], *whole[:, 50:].split(1, dim=1)]
            for step, truth in zip(steps, expected, strict=True):
                assert torch.allclose(attention(step, cache=cache), truth, atol=1e-4)
            cache.evict_prefix(10, attention.encoding)
            assert cache.lengths.tolist() == ([40, 31] if ragged else [50, 50])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_device(kind):
    attention, x = layer(kind), torch.randn(2, 40, DIM, device="cuda")
    cache = KVCache(2, 2, 400, WIDTH, device="cuda")
    counts, index = torch.tensor([40, 7], device="cuda"), torch.tensor([1, 0], device="cuda")
    ends, mask = torch.tensor([0, 11, 40], device="cuda"), torch.rand(2, 40, device="cuda") > 0.5

    def call():
        attention(x)
        attention(x, key_mask=mask)
        attention(x[:1], cu_seqlens=ends)
        attention(x, cache=cache, counts=counts)
        attention(x[:, :1], cache=cache)
        attention(x[:, :20], cache=cache)
        cache.evict_prefix(3, attention.encoding)
        cache.reorder(index)
        cache.reset()

    with torch.inference_mode():
        for _ in range(3):
            call()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("kind", "mode"), [("rope", "default"), ("t5", "default"), ("rope", "reduce-overhead")])
def test_compiled(kind, mode):
    attention, x = layer(kind), vector(0, 2, 60, DIM).float().cuda()
    mask = (torch.arange(60) < torch.tensor([[60], [20]])).cuda()
    compiled = torch.compile(attention, fullgraph=True, mode=mode)
    learned = [value for name, value in attention.named_parameters() if name.startswith("encoding")]
    for given in ({}, {"key_mask": mask}):
        leaves = [x.clone().requires_grad_(), *learned]
        y, z = compiled(leaves[0], **given), attention(leaves[0], **given)
        assert torch.allclose(y, z, atol=1e-4)
        for a, b in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (y, z)), strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3)
    with torch.inference_mode():
        whole, cache = attention(x), KVCache(2, 2, 64, WIDTH, device="cuda")
        for step in x.split([30, 1, 1, 1, 27], dim=1):
            start = cache.filled_at_most
            y = compiled(step, cache=cache).clone()
            assert torch.allclose(y, whole[:, start : start + step.shape[1]], atol=1e-4)


@pytest.mark.parametrize("kind", ["rope", "t5"])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_and_the_log_sum_exp(kind, causal):
    q, k, v = (vector(n, 2, heads, 300, WIDTH).float().cuda() for n, heads in enumerate((HEADS, 2, 2)))
    made = encoding_for(kind).cuda() if kind == "rope" else T5Bias(HEADS, causal=causal).cuda()
    mask = (torch.rand(2, 300, generator=torch.Generator().manual_seed(1)) > 0.5).cuda()
    mask[0, :40] = False
    for window, key_mask in ((None, None), (17, None), (150, mask)):
        options = {"window": window, "causal": causal, "return_lse": True, "encoding": made}
        found = []
        for dtype in (torch.float32, torch.float64):
            made.to(dtype)
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            y, lse = attention_function(*leaves, key_mask=key_mask, **options)
            seen = lse.isfinite()
            results = torch.autograd.grad((y.square().sum(), lse.masked_fill(~seen, 0.0).square().sum()), leaves)
            found.append([y, lse.masked_fill(~seen, 0.0), *results, seen.to(dtype)])
        for ours, exact in zip(*found, strict=True):
            assert torch.isfinite(ours).all()
            error = (ours.double() - exact).abs().max()
            assert error < 2e-4 * float(exact.detach().abs().max()) + 1e-6


@pytest.mark.parametrize(("heads", "seq"), [(2, 90), (8, 20), (8, 127)])
def test_fewer_than_128_padded_queries_of_grouped_heads(heads, seq):
    """FlexAttention's kernel for few queries does not fit the queries of all heads that share a key head."""
    q, k, v = (vector(n, 2, number, seq, WIDTH).float().cuda() for n, number in enumerate((heads, 1, 1)))
    mask = (torch.arange(seq) < torch.tensor([[seq], [seq // 2]])).cuda()
    y = attention_function(q, k, v, key_mask=mask)
    assert torch.allclose(y, attention_function(q.double(), k.double(), v.double(), key_mask=mask).float(), atol=1e-4)


# Few of them: each chunk is compiled.
@pytest.mark.parametrize("kind", ["rope", "t5"])
def test_decoding_in_a_window(kind):
    attention, x = layer(kind, window=16), vector(0, 2, 90, DIM).float().cuda()
    with torch.inference_mode():
        whole, cache = attention(x), attention.make_cache(2)
        assert cache.keys.is_cuda
        y = [attention(part, cache=cache) for part in x.split([68, 1, 1, 20], dim=1)]
        assert torch.allclose(torch.cat(y, dim=1), whole, atol=1e-4)
        ragged, counts = attention.make_cache(2), torch.tensor([50, 33], device="cuda")
        attention(x[:, :50], cache=ragged, counts=counts)
        for n in range(5):
            step = torch.stack([x[0, 50 + n], x[1, 33 + n]])[:, None]
            expected = torch.stack([whole[0, 50 + n], whole[1, 33 + n]])[:, None]
            assert torch.allclose(attention(step, cache=ragged), expected, atol=1e-4)
        saved, loaded = ragged.state_dict(), attention.make_cache(2)
        loaded.load_state_dict({name: x.cpu() for name, x in saved.items()})
        assert torch.equal(attention(x[:, :1], cache=loaded), attention(x[:, :1], cache=ragged))


def test_a_window_writes_out_no_mask():
    attention = layer("rope", window=512).to(torch.bfloat16)
    x = torch.randn(1, 65_536, DIM, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        attention(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attention(x)
        torch.cuda.synchronize()
    # A mask of one byte per query and key would be 4 GiB. q, k, v and the output are 32 MiB or less each.
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device_in_a_window():
    attention, x = layer("rope", window=16), torch.randn(2, 40, DIM, device="cuda")
    cache, counts = attention.make_cache(2), torch.tensor([40, 7], device="cuda")
    mask, ids = torch.rand(2, 40, device="cuda") > 0.5, torch.arange(40, device="cuda")

    def call():
        attention(x, ids)
        attention(x, key_mask=mask)
        attention(x, cache=cache, counts=counts)
        attention(x[:, :1], ids[:1], cache)
        attention(x, cache=cache, key_mask=mask)
        attention(x[:, :1], cache=cache)
        cache.reset()

    with torch.inference_mode():
        for _ in range(3):
            call()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
