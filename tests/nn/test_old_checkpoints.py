"""Checkpoints with the buffers of other RoPE code load into modules of ropewalk, and nothing else is dropped."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import ropewalk as rw

pytestmark = pytest.mark.usefixtures("as_a_user")

OLD = [
    "inv_freq",
    "original_inv_freq",
    "full_attention_inv_freq",
    "sliding_attention_original_inv_freq",
    "cos_cached",
    "sin_cached",
    "cos_cache",
    "sin_cache",
    "cos_sin_cache",
    "freqs_cis",
]
# Names that contain one of those above, and may be a tensor that was trained.
OTHER = [
    "inv_freq_scale",
    "freqs",
    "cos_cached_scale",
    "myinv_freq",
    "weight",
    "inv_freq.weight",
    "cos_cached.0",
    "log_scale",
]


class Decoder(nn.Module):
    """A model of a user, with a rotation that its layers share and an attention layer."""

    def __init__(self, layer=rw.Attention, encoding=None):
        super().__init__()
        self.rotary_emb = rw.RotaryEmbedding(8)
        self.self_attn = layer(16, 2, encoding=rw.RotaryEmbedding(8) if encoding is None else encoding)


def saved(model, *extra):
    return {
        **{name: torch.randn_like(x) for name, x in model.state_dict().items()},
        **dict.fromkeys(extra, torch.ones(4)),
    }


def check_loads(model, *extra, prefix=""):
    """Load a checkpoint with extra keys, and see that the others arrived and that the caller's dict is unchanged."""
    state = saved(model, *(prefix + name for name in extra))
    names = list(state)
    for options in ({}, {"strict": False}, {"assign": True}):
        result = model.load_state_dict(state, **options)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert list(state) == names
        for name, x in model.state_dict().items():
            assert torch.equal(x, state[name])


@pytest.mark.parametrize("name", OLD)
def test_a_rotation_drops_old_buffers(name):
    check_loads(rw.RotaryEmbedding(8), name)
    check_loads(rw.RotaryEmbedding(8, learned=True), name)
    check_loads(Decoder(), name, prefix="rotary_emb.")


@pytest.mark.parametrize("layer", [rw.Attention, rw.LinearAttention])
@pytest.mark.parametrize("name", OLD)
def test_a_layer_drops_old_buffers_of_modules_that_it_does_not_have(layer, name):
    check_loads(layer(16, 2), name, f"rotary_emb.{name}", f"inner_attention.rope.{name}")
    below = ("", "rotary_emb.", "encoding.", "encoding.rope.", "encoding.rotary_emb.")
    check_loads(Decoder(layer), *(f"self_attn.{path}{name}" for path in below))


@pytest.mark.parametrize("encoding", ["none", "sinusoidal", "alibi", "rope", "t5"])
def test_every_encoding_drops_old_buffers(encoding):
    check_loads(rw.encoding(encoding, dim=16, num_heads=2), "inv_freq", "rotary_emb.cos_cached")


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("path", ["rotary_emb.", "self_attn.", "self_attn.rotary_emb.", "self_attn.encoding.rope."])
def test_other_keys_are_still_unexpected(path, name):
    model = Decoder()
    state = saved(model, path + name, f"{path}inv_freq")
    assert model.load_state_dict(state, strict=False).unexpected_keys == [path + name]
    with pytest.raises(RuntimeError, match="Unexpected key") as error:
        model.load_state_dict(state)
    assert f'"{path + name}"' in str(error.value)
    assert f'"{path}inv_freq"' not in str(error.value)


def test_keys_of_projections_and_of_the_users_own_modules_are_still_unexpected():
    model = Decoder()
    unexpected = ["inv_freq", "mlp.inv_freq", "self_attn.q_proj.inv_freq", "self_attn.q_proj.inv_freq_scale"]
    dropped = "rotary_emb.inv_freq", "self_attn.rotary_emb.inv_freq"
    found = model.load_state_dict(saved(model, *unexpected, *dropped), strict=False).unexpected_keys
    assert sorted(found) == sorted(unexpected)
    missing = saved(model, "rotary_emb.inv_freq")
    del missing["self_attn.q_proj.weight"]
    assert model.load_state_dict(missing, strict=False).missing_keys == ["self_attn.q_proj.weight"]


class Trained(rw.Encoding):
    """An encoding of a user whose parameters have the names of old buffers."""

    def __init__(self):
        super().__init__()
        self.inv_freq = nn.Parameter(torch.zeros(4))
        self.register_buffer("cos_cached", torch.zeros(4))


class Migrated(rw.Encoding):
    """An encoding of a user that reads an old buffer itself."""

    def __init__(self):
        super().__init__()
        self.log_freq = nn.Parameter(torch.zeros(4))
        self.register_load_state_dict_pre_hook(self._read_old)

    @staticmethod
    def _read_old(module, state_dict, prefix, *rest):
        if f"{prefix}inv_freq" in state_dict:
            state_dict[f"{prefix}log_freq"] = state_dict.pop(f"{prefix}inv_freq").log()


def test_tensors_of_the_module_are_loaded_whatever_their_names_are():
    check_loads(Decoder(encoding=Trained()), "self_attn.rotary_emb.inv_freq")
    migrated = Migrated()
    model = Decoder(encoding=migrated)
    state = saved(model, "self_attn.encoding.inv_freq")
    del state["self_attn.encoding.log_freq"]
    model.load_state_dict(state)
    assert torch.equal(migrated.log_freq, torch.zeros(4))
    learned = rw.RotaryEmbedding(8, learned=True)
    learned.load_state_dict({"log_scale": torch.ones(4), "inv_freq": torch.zeros(4)})
    assert learned.state_dict()["log_scale"].tolist() == [1.0] * 4


def test_a_hook_of_the_user_that_renames_keys_still_reaches_the_children():
    layer = rw.Attention(16, 2)

    def rename(module, state_dict, prefix, *rest):
        state_dict[f"{prefix}q_proj.weight"] = state_dict.pop(f"{prefix}wq.weight")

    layer.register_load_state_dict_pre_hook(rename)
    state = saved(layer, "rotary_emb.inv_freq")
    state["wq.weight"] = state.pop("q_proj.weight")
    layer.load_state_dict(state)
    assert torch.equal(layer.q_proj.weight, state["wq.weight"])


class Wrapped(nn.Module):
    """As FSDP's wrapper: a module around another, whose name is no part of the keys."""

    def __init__(self, module):
        super().__init__()
        self.wrapped = module
        self.register_load_state_dict_pre_hook(self._add_prefix)

    @staticmethod
    def _add_prefix(module, state_dict, prefix, *rest):
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}wrapped.{key.removeprefix(prefix)}"] = state_dict.pop(key)


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: model.to("meta").to_empty(device="cpu"),
    ],
    ids=["copy", "deepcopy", "pickle", "to_empty"],
)
def test_copies_drop_old_buffers(copied):
    check_loads(copied(Decoder()), "rotary_emb.inv_freq", "self_attn.rotary_emb.inv_freq")


def test_wrappers_drop_old_buffers():
    keys = "rotary_emb.inv_freq", "self_attn.rotary_emb.inv_freq"
    check_loads(torch.compile(Decoder(), backend="eager"), *keys, prefix="_orig_mod.")
    check_loads(nn.DataParallel(Decoder()), *keys, prefix="module.")
    model = Decoder()
    state = saved(model, *keys, "self_attn.k_proj.inv_freq_scale")
    q_proj = model.self_attn.q_proj
    for name in ("rotary_emb", "self_attn"):
        model.add_module(name, Wrapped(model.get_submodule(name)))
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    assert unexpected == ["self_attn.wrapped.k_proj.inv_freq_scale"]
    assert torch.equal(q_proj.weight, state["self_attn.q_proj.weight"])


def test_dropped_keys_are_logged_for_who_asks(caplog):
    model = Decoder()
    state = saved(model, "rotary_emb.inv_freq", "self_attn.rotary_emb.cos_cached")
    with caplog.at_level(logging.INFO, logger="ropewalk"):
        model.load_state_dict(state)
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, logger="ropewalk"):
        model.load_state_dict(state)
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG"]
    assert "rotary_emb.inv_freq" in caplog.messages[0]
    assert "RotaryEmbedding" in caplog.messages[0]
    assert "self_attn.rotary_emb.cos_cached" in caplog.messages[1]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="ropewalk"):
        model.load_state_dict(saved(model))
    assert not caplog.records
