"""KVCache.evict_prefix with what a user has: the spec of a config, a rope of it, or the encoding of a layer."""

import copy
import warnings
from pathlib import Path

import pytest
import torch

import ropewalk as rw
from ropewalk.nn.encodings.rotary import RotaryEncoding

pytestmark = pytest.mark.usefixtures("as_a_user")

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
BUNDLED = Path(rw.__file__).parent / "data" / "configs"
DROPPED, TOKENS, LENGTH = 5, 12, 16


def specs_of(path, **options):
    """The specs of a config, by the kind of layer; layers without a RoPE have none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        specs = rw.load_spec(path, **options)
    specs = specs if isinstance(specs, dict) else {"all": specs}
    return {kind: spec for kind, spec in specs.items() if spec is not None}


def rotated(rope, k, positions):
    role = None if rope.spec.same_for_both else "k"
    return rope(k, positions=positions, length=LENGTH if rope.spec.varies else None, role=role)


def filled(rope, positions, dtype=torch.float32, heads=2):
    """A cache with keys that `rope` rotated at `positions`, and the keys before the rotation."""
    k = torch.randn(2, heads, TOKENS, rope.spec.head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache = rw.KVCache(2, heads, TOKENS + 3, rope.spec.head_dim, dtype=dtype)
    cache.append(rotated(rope, k, positions), k, positions=positions)
    return cache, k


def check_moved(rope, passed, start=0, dtype=torch.float32):
    """Evict, and compare with keys that were rotated afresh: at most twice the error of two rotations."""
    positions = torch.arange(start, start + TOKENS).expand(2, TOKENS)
    cache, k = filled(rope, positions, dtype)
    old, new = positions[:, DROPPED:], positions[:, DROPPED:] - DROPPED
    truth = rotated(rope, k[:, :, DROPPED:].double(), new)
    kept = cache.keys[:, :, DROPPED:TOKENS].clone()
    role = {} if rope.spec.same_for_both else {"role": "k"}
    length = {"length": LENGTH} if rope.spec.varies else {}
    twice = rotated(rope, rope.unrotate(kept, positions=old, **role, **length), new)
    cache.evict_prefix(DROPPED, passed)
    moved = cache.keys[:, :, : TOKENS - DROPPED]
    assert (moved - truth).abs().max() <= 2 * (twice - truth).abs().max()
    assert torch.equal(cache.values[:, :, : TOKENS - DROPPED], k[:, :, DROPPED:])
    assert torch.equal(cache.positions[:, : TOKENS - DROPPED], new)
    assert cache.lengths.tolist() == [TOKENS - DROPPED] * 2
    assert not cache.keys[:, :, TOKENS - DROPPED :].any()
    assert not moved.requires_grad


def test_the_configs_contain_those_that_are_bundled():
    assert {path.name for path in BUNDLED.iterdir()} <= {path.name for path in CONFIGS.iterdir()}


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.stem)
@pytest.mark.parametrize("angles", ["float32", "exact"])
def test_the_spec_of_a_config(path, angles):
    specs = specs_of(path, angles=angles)
    assert specs
    for spec in specs.values():
        assert spec.angles == angles
        rope = rw.RotaryEmbedding(spec)
        if spec.axes is not None:
            cache = rw.KVCache(1, 1, 8, spec.head_dim)
            cache.append(torch.ones(1, 1, 4, spec.head_dim), torch.ones(1, 1, 4, spec.head_dim))
            for passed in (spec, rope, RotaryEncoding(rope)):
                with pytest.raises(rw.RopewalkError, match=r"with one axis(.|\n)*pass None"):
                    cache.evict_prefix(1, passed)
        elif spec.varies:
            cache, _ = filled(rope, torch.arange(TOKENS))
            for passed in (spec, rope):
                with pytest.raises(rw.RopewalkError, match=r"at_length(.|\n)*spec=spec, at_length=length\)"):
                    cache.evict_prefix(DROPPED, passed)
            check_moved(rope, RotaryEncoding(rope, at_length=LENGTH))
        else:
            for passed in (spec, rope, RotaryEncoding(rope)):
                check_moved(rope, passed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 100_000])
def test_float32_angles_at_large_positions(start, dtype):
    # One rotation by the distance would be off by the rounding of the angles: 0.004 at these positions.
    spec = specs_of(CONFIGS / "llama-3.1-8b.json")["all"]
    check_moved(rw.RotaryEmbedding(spec), spec, start, dtype)


@pytest.mark.parametrize(
    "fields",
    [
        {"xpos": rw.XPos(64)},
        {"query_temperature": rw.StepTemperature(0.1, 4)},
        {"rotary_dim": 8},
        {"rotary_dim": 8, "rotary_slice": "trailing"},
        {"sign": -1},
        {"frequencies": rw.AcrossHeads(1e4, 2)},
        {"frequencies": rw.Yarn(1e4, 4.0)},
    ],
    ids=lambda fields: "-".join(map(str, fields)),
)
@pytest.mark.parametrize("angles", ["float32", "exact"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_every_part_of_a_spec(fields, angles, pairing):
    spec = rw.RopeSpec(**{"head_dim": 16, "pairing": pairing, "angles": angles} | fields)
    check_moved(rw.RotaryEmbedding(spec), spec)


@pytest.mark.parametrize("angles", ["float32", "exact"])
def test_a_rope_of_the_other_layout_moves_the_keys_of_a_cache_too(angles):
    spec = rw.RopeSpec(16, pairing="half", angles=angles)
    check_moved(rw.RotaryEmbedding(spec), rw.RotaryEmbedding(spec, seq_dim=-3))
    per_head = rw.RopeSpec(16, rw.AcrossHeads(1e4, 2), angles=angles)
    check_moved(rw.RotaryEmbedding(per_head), rw.RotaryEmbedding(per_head, seq_dim=-3))


@pytest.mark.parametrize("angles", ["float32", "exact"])
def test_learned_frequencies_and_limits(angles):
    rope = rw.RotaryEmbedding(rw.RopeSpec(16, angles=angles), learned=True, context_length=TOKENS, check_ids=True)
    with torch.no_grad():
        assert rope.log_scale is not None
        rope.log_scale.uniform_(-1, 1)
        cache, _ = filled(rope, torch.arange(TOKENS))
    cache.evict_prefix(DROPPED, rope)
    assert not cache.keys.requires_grad
    with torch.no_grad():
        check_moved(rope, rope)


def test_a_ragged_cache_of_a_loaded_spec():
    spec = rw.RopeSpec(16, angles="float32")
    rope, k = rw.RotaryEmbedding(spec), torch.randn(2, 1, 6, 16)
    cache = rw.KVCache(2, 1, 8, 16)
    cache.append(rope(k), k, torch.tensor([6, 3]))
    cache.evict_prefix(2, spec)
    assert cache.lengths.tolist() == [4, 1]
    torch.testing.assert_close(cache.keys[0, :, :4], rope(k[0, :, 2:]))
    torch.testing.assert_close(cache.keys[1, :, :1], rope(k[1, :, 2:3]))
    assert not cache.keys[1, :, 1:].any()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-neox-20b", "deepseek-v3", "phi-3-mini-128k"])
def test_a_layer_of_a_loaded_spec_continues_as_if_the_rest_had_been_first(name):
    spec = specs_of(CONFIGS / f"{name}.json")["all"]
    rope = rw.RotaryEmbedding(spec)
    encoding = RotaryEncoding(rope, at_length=LENGTH if spec.varies else None)
    attention = rw.Attention(32, 1, head_dim=spec.head_dim, encoding=encoding)
    x, cache = torch.randn(1, TOKENS + 1, 32), rw.KVCache(1, 1, TOKENS + 1, spec.head_dim)
    with torch.no_grad():
        attention(x[:, :TOKENS], cache=cache)
        cache.evict_prefix(DROPPED, encoding if spec.varies else spec)
        torch.testing.assert_close(attention(x[:, TOKENS:], cache=cache), attention(x[:, DROPPED:])[:, -1:])


def test_axes_continue_without_a_rotation():
    spec = specs_of(CONFIGS / "qwen2-vl-7b.json")
    spec = next(one for one in spec.values() if one.axes is not None)
    assert spec.axes is not None
    rope = rw.RotaryEmbedding(spec)
    attention = rw.Attention(32, 1, head_dim=spec.head_dim, encoding=rope)
    x, cache = torch.randn(1, TOKENS + 1, 32), rw.KVCache(1, 1, TOKENS + 1, spec.head_dim)
    positions = torch.randint(0, 50, (spec.axes.count, TOKENS + 1))
    with torch.no_grad():
        attention(x[:, :TOKENS], positions[:, :TOKENS], cache)
        cache.evict_prefix(DROPPED, None)
        step = attention(x[:, TOKENS:], positions[:, TOKENS:], cache)
        torch.testing.assert_close(step, attention(x[:, DROPPED:], positions[:, DROPPED:])[:, -1:])


@pytest.mark.parametrize(
    ("passed", "got", "do"),
    [
        (
            {"sliding_attention": rw.RopeSpec(16), "full": None},
            "'sliding_attention', 'full'",
            "specs['sliding_attention']",
        ),
        ({}, "a dict", "the spec of this layer"),
        (rw.RopeSpec(32), "head_dim=32", "what rotated these keys"),
        (rw.RotaryEmbedding(32), "head_dim=32", "what rotated these keys"),
        (rw.encoding("learned", dim=16, num_heads=1, length=9), "LearnedEncoding", "if it is absolute, call reset()"),
        (rw.Plain(), "Plain", "the encoding of the layer"),
        ("config.json", "config.json", "the encoding of the layer"),
    ],
    ids=["dict", "empty dict", "spec", "rope", "absolute", "frequencies", "path"],
)
def test_errors_name_what_to_pass(passed, got, do):
    cache = rw.KVCache(1, 1, 8, 16)
    cache.append(torch.ones(1, 1, 4, 16), torch.ones(1, 1, 4, 16))
    before = copy.deepcopy(cache)
    with pytest.raises(rw.RopewalkError) as error:
        cache.evict_prefix(1, passed)
    assert error.value.asked.startswith("KVCache.evict_prefix")
    assert got in error.value.got
    assert do in error.value.do
    assert torch.equal(cache.keys, before.keys)
    assert cache.filled_at_most == before.filled_at_most
