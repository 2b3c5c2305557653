"""A cache that is cut over ranks: the outputs, tokens and errors of a KVCache on one rank, in float64."""

import copy
import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import ropewalk as rw
from nn.test_attention import DIM, HEADS, WIDTH, encoding_for, layer
from parallel.ranks import failures_on_ranks
from parallel.test_disagreement import refused
from ropewalk.parallel import ShardedKVCache, cache
from slow import slow
from strategies import vector

pytestmark = pytest.mark.xdist_group("ranks")

KINDS = ("none", "rope", "xpos", "alibi", "t5")
BATCH, KV_HEADS, SLOTS = 3, 2, 30
# Prompts and steps: a token on one rank alone, parts that begin on every rank, and parts of less than a token per rank.
PARTS = (1, 1, 1, 2, 7, 1, 1, 3, 4, 1)
FOLDER = "ROPEWALK_TEST_FOLDER"


def caches(mesh, heads=KV_HEADS, slots=SLOTS, batch=BATCH, dtype=torch.float64, **options) -> tuple[Any, Any]:
    """A cache that is cut over ranks, and one that is not."""
    sizes = batch, heads, slots, WIDTH
    return ShardedKVCache(mesh, *sizes, dtype=dtype, **options), rw.KVCache(*sizes, dtype=dtype)


def same(x, y):
    """Raise unless x is near y, and the same on all ranks. All ranks take part in the exchange before one raises."""
    others = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(others, x.contiguous())
    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    assert all(torch.equal(x, other) for other in others)


@torch.no_grad()
def decoding_case(kind, options, mesh):
    heads = options.get("num_kv_heads", KV_HEADS)
    attention, x = layer(kind, **options), vector(0, BATCH, sum(PARTS), DIM)
    cut, whole = caches(mesh, heads)
    assert cut.keys.shape == (BATCH, heads, -(-SLOTS // mesh.size()), WIDTH)
    for part in x.split(PARTS, dim=1):
        same(attention(part, cache=cut), attention(part, cache=whole))
    # Token n is on rank n % ranks, in slot n // ranks.
    mine = whole.keys[:, :, cut.rank :: cut.ranks]
    assert torch.equal(cut.keys[:, :, : mine.shape[2]], mine)
    assert cut.keys[:, :, mine.shape[2] :].count_nonzero() == 0
    assert torch.equal(cut.lengths, whole.lengths)
    assert torch.equal(cut.positions, whole.positions)
    # From the beginning, in one call.
    cut.reset()
    same(attention(x, cache=cut), attention(x))


@torch.no_grad()
def lengths_case(kind, window, mesh):
    """Sequences of different lengths, with padding at the end."""
    attention, (cut, whole) = layer(kind, window=window), caches(mesh)
    steps = [(1, None)] * 5
    for seed, (seq, counts) in enumerate([(7, (7, 3, 0)), *steps, (4, (1, 4, 2)), (5, None), (3, (0, 0, 3)), *steps]):
        x, numbers = vector(seed, BATCH, seq, DIM), None if counts is None else torch.tensor(counts)
        y, z = (attention(x, cache=each, counts=numbers) for each in (cut, whole))
        real = torch.arange(seq) < torch.tensor([seq] * BATCH if counts is None else counts)[:, None]
        same(y * real[..., None], z * real[..., None])
        assert torch.equal(cut.lengths, whole.lengths)
    assert (cut.filled_at_most, cut.even) == (whole.filled_at_most, whole.even)
    index = torch.tensor([2, 0, 0, 1])
    cut.reorder(index)
    whole.reorder(index)
    x = vector(99, 4, 2, DIM)
    same(attention(x, cache=cut), attention(x, cache=whole))


@torch.no_grad()
def hidden_case(kind, mesh):
    """Hidden tokens, also a sequence of which nothing is visible, and masks per slot."""
    attention, (cut, whole) = layer(kind), caches(mesh)
    mask = torch.ones(BATCH, 6, dtype=torch.bool)
    mask[0, :4] = mask[1, 1] = False
    slots = torch.rand(BATCH, SLOTS, generator=torch.Generator().manual_seed(0)) < 0.7
    for seed, (seq, given) in enumerate(
        [(6, mask), (1, None), (2, mask[:, 3:5]), (1, slots), (5, slots), (1, mask[:, :1]), (1, slots & False)]
    ):
        x = vector(seed, BATCH, seq, DIM)
        same(attention(x, cache=cut, key_mask=given), attention(x, cache=whole, key_mask=given))
    assert torch.equal(cut.hidden, whole.hidden)


@torch.no_grad()
def positions_case(kind, mesh):
    """Positions that are passed, and continue; tokens that are dropped; copies."""
    attention, (cut, whole) = layer(kind), caches(mesh)
    x = vector(0, BATCH, 12, DIM)
    for each in (cut, whole):
        attention(x[:, :5], torch.tensor([3, 4, 8, 9, 20]), each)
        attention(x[:, 5:9], cache=each)
        each.truncate(6)
    copied = copy.copy(cut)
    same(attention(x[:, 9:11], cache=cut), attention(x[:, 9:11], cache=whole))
    same(attention(x[:, 11:], cache=cut), attention(x[:, 11:], cache=whole))
    assert torch.equal(cut.positions, whole.positions)
    assert copied.lengths.tolist() == [6] * BATCH
    # What was dropped is not there any more: a token that would be read in its place is 0.
    assert copied.keys[:, :, len(range(copied.rank, 6, copied.ranks)) :].count_nonzero() == 0
    copied.reset()
    same(attention(x, cache=copied), attention(x))


class Decoder(nn.Module):
    """Two layers, a vocabulary of 17 tokens, and any encoding."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        absolute = kind == "sinusoidal"
        self.absolute = rw.encoding("sinusoidal", dim=DIM, num_heads=HEADS) if absolute else None
        made = [None if absolute else encoding_for(kind) for _ in range(2)]
        self.tokens, self.out = nn.Embedding(17, DIM), nn.Linear(DIM, 17)
        options = {"num_kv_heads": KV_HEADS}
        self.attention = nn.ModuleList(rw.Attention(DIM, HEADS, encoding=each, **options) for each in made)
        self.mixing = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.double().eval()

    def forward(self, ids, stored):
        x = self.tokens(ids)
        if self.absolute is not None:
            x = self.absolute.embed(x, stored[0].lengths[:, None] + torch.arange(ids.shape[1]))
        for attention, mixing, each in zip(self.attention, self.mixing, stored, strict=True):
            x = x + attention(x, cache=each)
            x = x + torch.tanh(mixing(x))
        return self.out(x)

    @torch.no_grad()
    def greedy(self, ids, stored, steps):
        """The tokens, and the logits by which they were chosen."""
        logits = [self(ids, stored)[:, -1:]]
        for _ in range(steps - 1):
            logits.append(self(logits[-1].argmax(-1), stored))
        every = torch.cat(logits, dim=1)
        return every.argmax(-1), every


def greedy_case(kind, mesh):
    model, prompt = Decoder(kind), torch.arange(14).view(2, 7)
    pairs = [caches(mesh, slots=210, batch=2, check_calls=False) for _ in range(2)]
    tokens, logits = model.greedy(prompt, [pair[0] for pair in pairs], 200)
    expected, every = model.greedy(prompt, [pair[1] for pair in pairs], 200)
    same(logits, every)
    assert torch.equal(tokens, expected)
    assert tokens.unique().numel() > 2


@torch.no_grad()
def linear_case(mesh):
    """The state of linear attention is small: every rank has it, and nothing is exchanged."""
    attention, x = rw.LinearAttention(DIM, HEADS, encoding=rw.RotaryEmbedding(WIDTH)).double(), vector(0, 2, 9, DIM)
    for weight in attention.parameters():
        dist.broadcast(weight, 0)
    state, parts = None, []
    for token in x.split([4, 1, 1, 1, 1, 1], dim=1):
        with CommDebugMode() as counted:
            y, state = attention(token, state=state, return_state=True)
        assert counted.get_total_counts() == 0
        parts.append(y)
    same(torch.cat(parts, dim=1), attention(x))


@torch.no_grad()
def one_exchange_case(mesh):
    attention, (cut, _) = layer("rope"), caches(mesh, check_calls=False)
    for seq in (7, 1):
        with CommDebugMode() as counted:
            attention(vector(0, BATCH, seq, DIM), cache=cut)
        names = {str(name).rsplit(".", 1)[-1]: n for name, n in counted.get_comm_counts().items() if n}
        assert names == {"all_gather_into_tensor": 1}


@torch.no_grad()
def rounding_case(mesh):
    """In bfloat16, at most twice the error of a cache on one rank."""
    attention, x = layer("rope"), vector(0, BATCH, 24, DIM).bfloat16()
    rounded, (cut, whole) = copy.deepcopy(attention).bfloat16(), caches(mesh, dtype=torch.bfloat16)
    for part in x.split((20, 1, 1, 2), dim=1):
        start = whole.filled_at_most
        y, z = rounded(part, cache=cut), rounded(part, cache=whole)
        truth = rounded.double()(x.double())[:, start : start + part.shape[1]]
        rounded.bfloat16()
        assert y.dtype == torch.bfloat16
        errors = [(each.double() - truth).abs().max() for each in (y, z)]
        assert errors[0] <= 2 * errors[1]


def compiled_case(kind, backend, mesh):
    torch.compiler.reset()
    attention, x = layer(kind), vector(0, BATCH, 20, DIM)
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(attention, fullgraph=True, backend=graphs)
    cut, whole = caches(mesh)
    with torch.inference_mode():
        for part in x.split([5] + [1] * 15, dim=1):
            same(compiled(part, cache=cut), attention(part, cache=whole))
        # The prompt, the first step, and at most one more when the number of tokens is seen to change.
        assert graphs.frame_count <= 3
        counts = torch.tensor([4, 0, 3])
        for each, run in ((cut, compiled), (whole, attention)):
            each.reset()
            run(x[:, :4], cache=each, counts=counts)
        for step in x[:, 4:].split(1, dim=1):
            same(compiled(step, cache=cut), attention(step, cache=whole))


@torch.no_grad()
def saved_case(mesh):
    """Saved and loaded by torch.distributed.checkpoint, with hidden tokens, different lengths and positions."""
    attention, x, folder = layer("alibi"), vector(0, BATCH, 9, DIM), Path(os.environ[FOLDER], "same")
    cut, whole = caches(mesh)
    mask = torch.ones(BATCH, 5, dtype=torch.bool)
    mask[1, 2] = False
    ids, counts = torch.tensor([0, 1, 5, 6, 7]), torch.tensor([5, 3, 4])
    for each in (cut, whole):
        attention(x[:, :5], ids, each, key_mask=mask, counts=counts)
    save({"cache": cut}, checkpoint_id=folder)
    loaded, _ = caches(mesh)
    load({"cache": loaded}, checkpoint_id=folder)
    assert (loaded.filled_at_most, loaded.even) == (5, False)
    for step in x[:, 5:].split(1, dim=1):
        y = attention(step, cache=whole)
        same(attention(step, cache=loaded), y)
        same(attention(step, cache=cut), y)
    # By hand, into a cache that has other tokens and no mask.
    again, _ = caches(mesh)
    attention(x, cache=again)
    again.load_state_dict(cut.state_dict())
    same(attention(x[:, :1], cache=again), attention(x[:, :1], cache=whole))


def bad_states_case(mesh):
    """Every rank raises if the state of one rank does not fit, and nothing is written."""
    rank, (cut, _) = mesh.get_local_rank(), caches(mesh)
    with torch.no_grad():
        layer("rope")(vector(0, BATCH, 9, DIM), cache=cut)
    state, before = cut.state_dict(), cut.keys.clone()
    wrong = {name: x for name, x in state.items() if name != "positions"}
    refused(lambda: cut.load_state_dict(wrong if rank else state), "positions" if rank else "valid arguments on all")
    refused(lambda: cut.load_state_dict(state | {"ranks": torch.tensor(7)}), "saved on 2 ranks", "saved on 7")
    refused(lambda: cut.load_state_dict(state | {"keys": cut.keys}), "keys as a DTensor that is cut over 2 ranks")
    refused(lambda: cut.load_state_dict(state | {"lengths": torch.tensor([9, 31, 9])}), "lengths from 0 to 30")
    refused(lambda: cut.load_state_dict(state | {"lengths": torch.full((BATCH,), 8 + rank)}), "lengths [8, 8, 8]")
    refused(lambda: cut.load_state_dict(7), "state_dict() returned")
    refused(lambda: cut.load_state_dict(state | {"more": before}), "a dict with keys, values")
    other, _ = caches(mesh, slots=SLOTS + 8)
    refused(lambda: other.load_state_dict(state), "keys [3, 2, 19, 6]", "sizes and dtype of the saved one")
    refused(lambda: caches(mesh, dtype=torch.float32)[0].load_state_dict(state), "torch.float32")
    assert torch.equal(cut.keys, before)
    assert cut.filled_at_most == 9
    cut.encoding_state = torch.zeros(BATCH, 4)
    refused(cut.state_dict, "no encoding_state")


@torch.no_grad()
def saved_by_groups_case(mesh):
    """Each group of ranks has a cache of other tokens: a checkpoint of all keeps those of each."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tokens", "others"))
    other, attention = both["others"].get_local_rank(), layer("alibi")
    (cut, whole), (loaded, _) = caches(both["tokens"]), caches(both["tokens"])
    for each in (cut, whole):
        attention(vector(other, BATCH, 5 + other, DIM), cache=each)
    folder = Path(os.environ[FOLDER], "groups")
    save({"cache": cut}, checkpoint_id=folder)
    load({"cache": loaded}, checkpoint_id=folder)
    assert loaded.lengths.tolist() == [5 + other] * BATCH
    step = vector(7, BATCH, 1, DIM)
    torch.testing.assert_close(attention(step, cache=loaded), attention(step, cache=whole), rtol=0, atol=1e-12)
    # That of another group has other names.
    for state in ({"keys of the group of rank 7": cut.keys}, {"keys": cut.keys}):
        refused(lambda state=state: loaded.load_state_dict(state), f"of the group of rank {other}", "that saved it")


def save_for_others(mesh):
    """Two caches: one whose slots are a multiple of 2 and 4 ranks, and one whose slots are not."""
    for slots in (32, SLOTS):
        cut, _ = caches(mesh, slots=slots)
        with torch.no_grad():
            layer("rope")(vector(0, BATCH, 9, DIM), cache=cut)
        save({"cache": cut}, checkpoint_id=Path(os.environ[FOLDER], str(slots)))


def load_from_others(mesh):
    cut, _ = caches(mesh, slots=32)
    place = Path(os.environ[FOLDER])
    refused(lambda: load({"cache": cut}, checkpoint_id=place / "32"), "saved on 4 ranks", "saved on 2")
    assert cut.keys.count_nonzero() == 0
    # torch itself compares sizes, and raises on every rank.
    cut, _ = caches(mesh)
    with pytest.raises(CheckpointException, match="Size"):
        load({"cache": cut}, checkpoint_id=place / str(SLOTS))


@torch.no_grad()
def disagreement_case(mesh):
    rank, attention, x = mesh.get_local_rank(), layer("rope"), vector(0, BATCH, 5, DIM)
    (cut, _), both = caches(mesh), "the same call on all ranks"
    sizes = BATCH, KV_HEADS, SLOTS + rank, WIDTH
    refused(lambda: ShardedKVCache(mesh, *sizes), both, "30", "31")
    refused(lambda: ShardedKVCache(mesh, 1, 1, 0 if rank else 4, 2), "max_length" if rank else "on all ranks")
    refused(lambda: ShardedKVCache(mesh, 1, 1, 4, 2, check_calls=7), "check_calls")
    refused(lambda: ShardedKVCache(mesh, 1, 1, 4, 2, check_calls=bool(rank)), "check_calls True", "check_calls False")
    # Tokens of another number, batch, width or dtype, and arguments that one rank alone has.
    refused(lambda: attention(x[:, rank:], cache=cut), both, "x [3, 5, 24]", "x [3, 4, 24]")
    refused(lambda: attention(x[rank:], cache=cut), "batch=2" if rank else "an error")
    refused(lambda: attention(x[..., rank:], cache=cut), "attention(x)" if rank else "rank 1: an error")
    refused(lambda: attention(x.float() if rank else x, cache=cut), "float32")
    refused(lambda: attention(x, torch.arange(5) if rank else None, cut), "positions [5]", "positions None")
    refused(lambda: attention(x, cache=cut, counts=torch.tensor([5, 5, 4 + rank])), "counts [5, 5, 4]")
    mask = torch.ones(BATCH, 5, dtype=torch.bool)
    refused(lambda: attention(x, cache=cut, key_mask=mask if rank else None), "key_mask None")
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(rank)):
        refused(lambda: attention(x, cache=cut), "autocast torch.bfloat16", "autocast none")
    # Layers with other options, and a cache in which one rank has more tokens.
    refused(lambda: layer("rope", window=3 + rank)(x, cache=cut), "window=3", "window=4")
    refused(lambda: layer("xpos" if rank else "rope")(x, cache=cut), "xpos")
    if rank:
        cut.append(*[torch.zeros(BATCH, KV_HEADS, 1, WIDTH, dtype=torch.float64)] * 2)
    refused(lambda: attention(x, cache=cut), "0 tokens in the cache", "1 tokens in the cache")
    index, wrong = torch.tensor([0, 2, 1 + rank]), torch.tensor([0, 2, 9 * rank])
    refused(lambda: cut.reorder(index), both, "index [0, 2, 1]", "index [0, 2, 2]")
    refused(lambda: cut.reorder(wrong), "reorder")
    cut.reset()
    with torch.set_grad_enabled(bool(rank)):
        refused(lambda: attention(x, cache=cut), "inference_mode")
    assert cut.lengths.tolist() == [0] * BATCH
    assert cut.keys.count_nonzero() == 0
    assert attention(x, cache=cut).shape == x.shape


def invalid_case(mesh):
    attention, x = layer("rope"), vector(0, BATCH, 5, DIM)
    cut, _ = caches(mesh, slots=7)
    # The same gradients on all ranks: every rank raises by itself, also without an exchange.
    refused(lambda: attention(x, cache=cut), "no gradients", "torch.inference_mode()")
    with torch.no_grad():
        attention(x, cache=cut)
        before = cut.keys.clone()
        refused(
            lambda: attention(x, cache=cut), "more tokens in a ShardedKVCache of max_length=7", "at most 2, because 5"
        )
        assert torch.equal(cut.keys, before)
        refused(lambda: cut.evict_prefix(2, None), "determines its rank")
        refused(lambda: cut.truncate(0), "truncate")
        refused(lambda: layer("rope", dropout=0.5).train()(x[:, :1], cache=cut), "no dropout")
        assert attention(x[:, :2], cache=cut).shape == (BATCH, 2, DIM)
    refused(lambda: ShardedKVCache("cpu", 1, 1, 4, 2), "a DeviceMesh", "ShardedKVCache(mesh, ...)")
    both = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "cp"))
    refused(lambda: ShardedKVCache(both, 1, 1, 4, 2), "one dimension", "dp, cp", 'mesh["cp"]')
    assert ShardedKVCache(both["cp"], 1, 1, 4, 2).ranks == mesh.size()
    refused(lambda: ShardedKVCache(mesh, 1, 1, 4, 2, dtype=torch.int64), "a floating-point dtype")
    assert repr(cut).endswith(f"filled_at_most=7, rank {cut.rank} of {cut.ranks}")
    assert cut.to(dtype=torch.float32).keys.dtype == torch.float32


def mean_of_ranks(part, total):
    return torch.full_like(part, 1 / len(part)).unsqueeze(-1)


def indices_of_the_rank(causal=False, starts=None, key_indices=None, **options):
    indices = None if key_indices is None else torch.arange(len(key_indices))
    return rw.Visibility(causal, starts, key_indices=indices, **options)


def first_tokens(self, x):
    return x[:, : self._key_slots()]


# What is replaced, by what, and the encoding with which it must be noticed.
MUTANTS = {
    "merged without log-sum-exp": ((cache, "part_weight", mean_of_ranks), "none"),
    "bias at the positions of slots": ((ShardedKVCache, "_of_rank", first_tokens), "alibi"),
    "bias of T5 at the positions of slots": ((ShardedKVCache, "_of_rank", first_tokens), "t5"),
    "causality by the slots of the rank": ((cache, "Visibility", indices_of_the_rank), "rope"),
    "outputs of one rank": ((ShardedKVCache, "_merged", lambda self, out, lse: out), "none"),
}


def mutant_case(name, mesh):
    (owner, attribute, wrong), kind = MUTANTS[name]
    noticed = torch.zeros(())
    with mock.patch.object(owner, attribute, wrong):
        attention, (cut, whole) = layer(kind), caches(mesh)
        with torch.no_grad():
            parts = vector(0, BATCH, 13, DIM).split((9, 1, 1, 2), dim=1)
            for y, z in [(attention(part, cache=cut), attention(part, cache=whole)) for part in parts]:
                noticed += not torch.allclose(y, z, rtol=0, atol=1e-6)
    dist.all_reduce(noticed)
    assert noticed > 0


def value_cases(world):
    cases: dict[str, Any] = {kind: functools.partial(decoding_case, kind, {}) for kind in KINDS}
    for kind in ("rope", "alibi", "t5"):
        for window in (1, 3, 6):
            cases[f"{kind}, window {window}"] = functools.partial(decoding_case, kind, {"window": window})
        cases[f"{kind}, one key head"] = functools.partial(decoding_case, kind, {"num_kv_heads": 1})
        cases[f"{kind}, lengths"] = functools.partial(lengths_case, kind, None)
        cases[f"{kind}, lengths, window"] = functools.partial(lengths_case, kind, 4)
        cases[f"{kind}, hidden"] = functools.partial(hidden_case, kind)
        cases[f"{kind}, positions"] = functools.partial(positions_case, kind)
    cases["greedy"] = functools.partial(greedy_case, "rope")
    return cases | {"linear": linear_case, "one exchange": one_exchange_case, "rounding": rounding_case}


def greedy_cases(world):
    kinds = ("none", "alibi", "t5", "sinusoidal") if world == 2 else ("t5",)
    return {kind: functools.partial(greedy_case, kind) for kind in kinds}


def other_cases(world):
    cases: dict[str, Any] = {
        "saved": saved_case, "states": bad_states_case, "disagreement": disagreement_case, "invalid": invalid_case
    }  # fmt: skip
    cases |= {name: functools.partial(mutant_case, name) for name in MUTANTS}
    return cases | {"compiled": functools.partial(compiled_case, "rope", "eager")}


def compiled_cases(world):
    return {f"{kind}, {name}": functools.partial(compiled_case, kind, name)
            for kind, name in (("t5", "aot_eager"),)}  # fmt: skip


def cases_of_groups(world):
    return {"saved by groups": saved_by_groups_case}


def saving_cases(world):
    return {"save": save_for_others}


def loading_cases(world):
    return {"load": load_from_others}


def check_on_ranks(world, cases, folder):
    folder.mkdir()
    failures = failures_on_ranks(world, "parallel.test_cache", cases.__name__, folder)
    assert failures.keys() == cases(world).keys()
    assert [name for name, failed in failures.items() if failed] == [], next(filter(None, failures.values()))[0]


@pytest.mark.parametrize(
    ("world", "cases"), [(2, value_cases), slow(4, value_cases), slow(2, greedy_cases), slow(4, greedy_cases)]
)
def test_ranks_decode_as_one_rank(world, cases, tmp_path):
    check_on_ranks(world, cases, tmp_path / "ranks")


@pytest.mark.slow
@pytest.mark.parametrize("cases", [other_cases, compiled_cases])
def test_states_errors_and_mutants(cases, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    check_on_ranks(2, cases, tmp_path / "ranks")


def test_groups_of_ranks_save_their_own_keys(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    check_on_ranks(4, cases_of_groups, tmp_path / "ranks")


@pytest.mark.slow
def test_another_number_of_ranks_cannot_load(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    check_on_ranks(2, saving_cases, tmp_path / "two")
    check_on_ranks(4, loading_cases, tmp_path / "four")
