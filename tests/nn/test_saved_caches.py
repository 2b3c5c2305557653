"""Caches and states in files: read without pickle, they continue bit for bit. Bad files are refused."""

import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file

import ropewalk as rw
from strategies import vector

DIM, HEADS, WIDTH = 16, 4, 4
READS = """
import sys
import torch
from safetensors.torch import load_file
import ropewalk as rw

folder, kind, form = sys.argv[1:]
saved = torch.load(f"{folder}/model.pt", weights_only=True)
options = {"encoding": rw.RotaryEmbedding(4), "num_kv_heads": 2}
if kind == "linear":
    layer = rw.LinearAttention(16, 4, **options)
else:
    layer = rw.Attention(16, 4, window=3 if kind == "rolling" else None, **options)
layer.load_state_dict(saved["layer"])
read = load_file if form == "safetensors" else lambda path: torch.load(path, weights_only=True)
state = read(f"{folder}/state.{form}")
with torch.no_grad():
    if kind == "linear":
        y, _ = layer.step(saved["x"], rw.LinearState.from_state_dict(state))
    else:
        cache = layer.make_cache(2, 16)
        cache.load_state_dict(state)
        y = layer(saved["x"], cache=cache)
torch.save(y, f"{folder}/y.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pt", "safetensors"])
@pytest.mark.parametrize("kind", ["full", "rolling", "linear"])
def test_the_next_token_in_a_fresh_process(tmp_path, kind, form):
    torch.manual_seed(0)
    options = {"encoding": rw.RotaryEmbedding(WIDTH), "num_kv_heads": 2}
    x = torch.randn(2, 8, DIM)
    with torch.no_grad():
        if kind == "linear":
            layer = rw.LinearAttention(DIM, HEADS, **options)
            _, state = layer.step(x[:, :7])
            saved, (y, _) = state.state_dict(), layer.step(x[:, 7:], state)
        else:
            layer = rw.Attention(DIM, HEADS, window=3 if kind == "rolling" else None, **options)
            cache = layer.make_cache(2, 16)
            layer(x[:, :7], cache=cache, counts=torch.tensor([7, 5]))
            saved = cache.state_dict()
            y = layer(x[:, 7:], cache=cache)
    torch.save({"layer": layer.state_dict(), "x": x[:, 7:]}, tmp_path / "model.pt")
    (save_file if form == "safetensors" else torch.save)(saved, tmp_path / f"state.{form}")
    code = textwrap.dedent(READS)
    subprocess.run([sys.executable, "-c", code, str(tmp_path), kind, form], check=True)
    assert torch.equal(torch.load(tmp_path / "y.pt", weights_only=True), y)


def filled(kind="full", dtype=torch.float64):
    """A ragged cache of two sequences with a hidden token."""
    window = {"full": None, "rolling": 4}[kind]
    layer = rw.Attention(
        DIM, HEADS, num_kv_heads=2, encoding=rw.encoding("alibi", dim=DIM, num_heads=HEADS), window=window
    )
    layer, x = layer.to(dtype), vector(0, 2, 6, DIM).to(dtype)
    cache = layer.make_cache(2, 16)
    mask = torch.tensor([[True] * 6, [True, False, True, True, True, True]])
    with torch.no_grad():
        layer(x, torch.arange(6) * 2, cache, counts=torch.tensor([6, 3]), key_mask=mask)
    return layer, cache, x


@pytest.mark.parametrize("kind", ["full", "rolling"])
@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_a_loaded_cache_continues(kind, form, tmp_path):
    layer, cache, x = filled(kind)
    saved = cache.state_dict()
    assert saved["keys"].shape[2] == (6 if kind == "full" else 4)
    path = tmp_path / f"cache.{form}"
    if form == "pt":
        torch.save(saved, path)
        read = torch.load(path, weights_only=True)
    else:
        save_file(saved, path)
        read = load_file(path)
    # The slots after the last token are not part of the state, and the loaded cache may have more of them.
    loaded = layer.make_cache(2, 16 if kind == "rolling" else 9)
    with torch.no_grad():
        loaded.append(torch.ones_like(cache.keys[:, :, :1]), torch.ones_like(cache.values[:, :, :1]))
        loaded.load_state_dict(read)
        for step in range(3):
            tokens = x[:, step : step + 1]
            assert torch.equal(layer(tokens, cache=loaded), layer(tokens, cache=cache))
    for name in ("keys", "values", "positions", "hidden", "lengths"):
        slots = loaded.max_length
        theirs = getattr(cache, name)
        theirs = theirs if name == "lengths" else theirs[:, :, :slots] if theirs.dim() == 4 else theirs[:, :slots]
        assert torch.equal(getattr(loaded, name), theirs)
    assert (loaded.filled_at_most, loaded.even) == (cache.filled_at_most, cache.even)


def test_a_state_is_a_copy():
    _, cache, _ = filled()
    saved = cache.state_dict()
    before = {name: x.clone() for name, x in saved.items()}
    cache.reset()
    assert all(torch.equal(saved[name], x) for name, x in before.items())
    assert all(x.is_contiguous() for x in saved.values())


def test_the_state_of_a_recurrent_encoding_is_saved():
    encoding = rw.encoding("recurrent", dim=DIM, num_heads=HEADS)
    cache, x = rw.KVCache(2, 2, 8, WIDTH), vector(0, 2, 5, DIM).float()
    with torch.no_grad():
        encoding.embed(x[:, :4], cache=cache)
        loaded = rw.KVCache(2, 2, 8, WIDTH)
        loaded.load_state_dict(cache.state_dict())
        assert torch.equal(encoding.embed(x[:, 4:], cache=loaded), encoding.embed(x[:, 4:], cache=cache))


def test_what_lies_past_the_lengths_is_not_loaded():
    layer, cache, x = filled()
    saved = cache.state_dict()
    saved["keys"][1, :, 3:], saved["values"][1, :, 3:], saved["hidden"][1, 3:] = torch.nan, torch.inf, True
    loaded = layer.make_cache(2, 16)
    loaded.load_state_dict(saved)
    with torch.no_grad():
        assert torch.equal(layer(x[:, :1], cache=loaded), layer(x[:, :1], cache=cache))


HOSTILE = {
    "no dict": lambda s: [1, 2],
    "a module": lambda s: torch.nn.Linear(2, 2),
    "nothing": lambda s: {},
    "no keys": lambda s: {name: x for name, x in s.items() if name != "keys"},
    "another name": lambda s: s | {"__class__": torch.zeros(1)},
    "a number for a name": lambda s: s | {7: torch.zeros(1)},
    "a list": lambda s: s | {"keys": s["keys"].tolist()},
    "another dtype": lambda s: s | {"keys": s["keys"].float()},
    "another batch": lambda s: {name: x[:1] for name, x in s.items()},
    "other heads": lambda s: s | {"keys": s["keys"][:, :1]},
    "another width": lambda s: s | {"values": s["values"][..., :3]},
    "other slots": lambda s: s | {"values": s["values"][:, :, :3]},
    "positions of other slots": lambda s: s | {"positions": s["positions"][:, :3]},
    "positions as floats": lambda s: s | {"positions": s["positions"].double()},
    "hidden as numbers": lambda s: s | {"hidden": s["hidden"].long()},
    "lengths below 0": lambda s: s | {"lengths": torch.tensor([-1, 3])},
    "lengths beyond the slots": lambda s: s | {"lengths": torch.tensor([6, 7])},
    "immense lengths": lambda s: s | {"lengths": torch.tensor([2**63 - 1, 3])},
    "lengths of one row": lambda s: s | {"lengths": torch.tensor(3)},
    "sparse keys": lambda s: s | {"keys": s["keys"].to_sparse()},
    "keys on meta": lambda s: s | {"keys": s["keys"].to("meta")},
    "an encoding state of another batch": lambda s: s | {"encoding_state": torch.zeros(3, 4)},
    "expanded keys": lambda s: s | {"keys": s["keys"].new_zeros(1).expand(s["keys"].shape)},
    "an expanded encoding state": lambda s: s | {"encoding_state": torch.zeros(2, 1).expand(2, 10**9)},
    "an encoding state of integers": lambda s: s | {"encoding_state": torch.zeros(2, 4).long()},
    "more slots than fit": lambda s: {
        name: x.repeat_interleave(4, 2 if x.dim() == 4 else 1) if x.dim() > 1 else x for name, x in s.items()
    },
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("as_a_user")
def test_hostile_states_are_refused_and_change_nothing(name):
    _, cache, _ = filled()
    before = {key: x.clone() for key, x in cache._buffers().items()}
    with pytest.raises(rw.RopewalkError, match=r"KVCache.load_state_dict\(state\)(.|\n)*do this:"):
        cache.load_state_dict(HOSTILE[name](cache.state_dict()))
    assert all(torch.equal(x, before[key]) for key, x in cache._buffers().items())


def test_immense_lengths_of_a_rolling_cache():
    _, rolling, _ = filled("rolling")
    with pytest.raises(rw.RopewalkError, match="no cache has such lengths"):
        rolling.load_state_dict(rolling.state_dict() | {"lengths": torch.tensor([2**62 + 1, 3])})


def test_a_cache_on_meta_loads():
    layer, cache, _ = filled()
    meta = layer.make_cache(2, 16, device="meta")
    meta.load_state_dict(cache.state_dict())
    assert meta.filled_at_most == 6


def test_windows_of_other_sizes():
    layer, rolling, _ = filled("rolling")
    _, full, _ = filled()
    other = rw.RollingKVCache(2, 2, 5, WIDTH, dtype=torch.float64)
    for cache, saved in ((full, rolling), (other, rolling), (rolling, full)):
        with pytest.raises(rw.RopewalkError, match="slots, and lengths"):
            cache.load_state_dict(saved.state_dict())
    # Few tokens are in the same slots everywhere.
    few = layer.make_cache(2)
    few.append(torch.ones(2, 2, 3, WIDTH, dtype=torch.float64), torch.ones(2, 2, 3, WIDTH, dtype=torch.float64))
    for cache in (full, other, rolling):
        cache.load_state_dict(few.state_dict())
        assert torch.equal(cache.keys[:, :, :3], few.keys[:, :, :3])
        assert cache.lengths.tolist() == [3, 3]


def linear_state(**options):
    layer = rw.LinearAttention(DIM, HEADS, num_kv_heads=2, **options)
    _, state = layer.step(torch.randn(2, 5, DIM))
    return layer, state


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"encoding": rw.RotaryEmbedding(WIDTH)},
        {
            "encoding": rw.RotaryEmbedding(
                rw.RopeSpec(WIDTH, rw.Yarn(1e4, 4.0, 64, attention_factor=1.0), pairing="half")
            )
        },
        {"feature_map": "favor", "num_features": 6},
        {"feature_map": ("elu", "relu")},
    ],
)
@torch.no_grad()
def test_a_loaded_state_continues(options, tmp_path):
    layer, state = linear_state(**options)
    save_file(state.state_dict(), tmp_path / "state.safetensors")
    torch.save(state.state_dict(), tmp_path / "state.pt")
    x = torch.randn(2, 3, DIM)
    expected, after = layer.step(x, state)
    files = load_file(tmp_path / "state.safetensors"), torch.load(tmp_path / "state.pt", weights_only=True)
    for saved in files:
        loaded = rw.LinearState.from_state_dict(saved)
        assert (loaded.position, loaded.spec, loaded.feature_map) == (state.position, state.spec, state.feature_map)
        y, following = layer.step(x, loaded)
        assert torch.equal(y, expected)
        assert torch.equal(following.above, after.above)


def test_positions_per_sequence_are_saved():
    state = rw.LinearState(torch.ones(2, 1, 1, 1), torch.ones(2, 1, 1), torch.tensor([3, 9]), length=torch.tensor(64))
    loaded = rw.LinearState.from_state_dict(state.state_dict())
    assert torch.as_tensor(loaded.position).tolist() == [3, 9]
    assert loaded.length == 64


HOSTILE_STATES = {
    "no dict": lambda s: 7,
    "no sums": lambda s: {"position": s["position"]},
    "another name": lambda s: s | {"spec": torch.zeros(1)},
    "other sums below": lambda s: s | {"below": s["below"][:1]},
    "sums of integers": lambda s: s | {"above": s["above"].long()},
    "sums in half precision": lambda s: s | {"above": s["above"].half(), "below": s["below"].half()},
    "flat sums": lambda s: s | {"above": s["above"].flatten()},
    "a scalar": lambda s: s | {"above": torch.tensor(1.0)},
    "a position per head": lambda s: s | {"position": torch.zeros(3, dtype=torch.int64)},
    "a position in half precision": lambda s: s | {"position": torch.zeros(2, dtype=torch.float16)},
    "text that is no JSON": lambda s: s | {"about": torch.tensor([255, 254], dtype=torch.uint8)},
    "JSON that is no object": lambda s: s | {"about": torch.tensor(list(b"[1, 2]"), dtype=torch.uint8)},
    "an object without a spec": lambda s: s | {"about": torch.tensor(list(b'{"learned": 1}'), dtype=torch.uint8)},
    "deep JSON": lambda s: s | {"about": torch.tensor(list(b"[" * 100_000), dtype=torch.uint8)},
    "another key": lambda s: (
        s | {"about": torch.tensor(list(b'{"spec":null,"feature_map":"elu","learned":false,"x":1}'), dtype=torch.uint8)}
    ),
    "expanded sums": lambda s: s | {"above": torch.zeros(1).expand(2, 2, 10**5, 10**5)},
    "long text": lambda s: s | {"about": torch.zeros(10**6, dtype=torch.uint8)},
    "a position that is no number": lambda s: s | {"position": torch.tensor(torch.nan)},
    "text as numbers": lambda s: s | {"about": s["about"].long()},
    "a spec that is none": lambda s: (
        s | {"about": torch.tensor(list(b'{"spec":"{}","feature_map":"elu","learned":false}'), dtype=torch.uint8)}
    ),
}


@pytest.mark.parametrize("name", HOSTILE_STATES)
@pytest.mark.usefixtures("as_a_user")
def test_hostile_linear_states_are_refused(name):
    _, state = linear_state()
    with pytest.raises(rw.RopewalkError, match="do this:"):
        rw.LinearState.from_state_dict(HOSTILE_STATES[name](state.state_dict()))


@torch.no_grad()
def test_make_state():
    x = torch.randn(2, 5, DIM)
    for options in (
        {},
        {"encoding": rw.RotaryEmbedding(WIDTH)},
        {"feature_map": "favor", "num_features": 6},
        {"feature_map": ("elu", "relu")},
    ):
        layer = rw.LinearAttention(DIM, HEADS, num_kv_heads=2, **options)
        (y, after), (z, same) = layer.step(x), layer.step(x, layer.make_state(2))
        assert torch.equal(y, z)
        assert torch.equal(after.above, same.above)
        assert after.position == same.position
    assert rw.LinearAttention(DIM, HEADS).double().make_state(1).above.dtype == torch.float64
    for call, message in (
        (lambda: rw.LinearAttention(DIM, HEADS).make_state(0), "an integer of at least 1"),
        (lambda: rw.LinearAttention(DIM, HEADS, causal=False).make_state(1), "causal"),
        (lambda: rw.LinearAttention(DIM, HEADS, feature_map=torch.exp).make_state(1), "num_features"),
    ):
        with pytest.raises(rw.RopewalkError, match=message):
            call()
