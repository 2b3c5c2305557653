"""What convert refuses, each by name, before anything is written, and without a trace of it afterwards."""

import errno
import fcntl
import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hub.checkpoints import CONFIG, Q, llama, weights
from ropewalk import RopewalkError
from ropewalk.hub import UnprovenError, convert_checkpoint, verify_conversion
from ropewalk.hub.convert import folders
from ropewalk.hub.convert.checkpoint import read_shard, tensor_blocks
from ropewalk.hub.convert.model_folder import ModelFolder

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path):
    return llama(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    return llama(tmp_path / "model", shards=3)


def refused(model, message, out=None, **options):
    """The conversion is refused with the message, and leaves no file that was not there."""
    place = Path(model).parent if out is None else Path(out).parent
    # Processes come and go in /proc.
    before = sorted(place.iterdir()) if place.is_dir() and place != Path("/proc") else None
    target = place / "out" if out is None else out
    with pytest.raises(RopewalkError, match=message):
        convert_checkpoint(model, target, **{"to": "interleaved"} | options)
    assert before is None or sorted(place.iterdir()) == before


def changed(model, **changes):
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_a_model_where_the_unfinished_output_would_stand_is_not_removed(tmp_path):
    for place in (tmp_path / "out.ropewalk-partial", tmp_path / "out.ropewalk-partial" / "inner"):
        model = llama(place)
        before = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
        refused(model, "a model that is not inside 'out.ropewalk-partial'", tmp_path / "out")
        assert {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()} == before


def test_further_layers_beside_layers_of_which_some_do_not_rotate(tmp_path):
    further = {
        name.replace("model.layers.0", "mtp.layers.0"): x
        for name, x in weights(layers=1).items()
        if "self_attn" in name
    }
    config = CONFIG | {"model_type": "smollm3", "no_rope_layers": [1, 0]}
    refused(llama(tmp_path / "model", config=config, **further), "only layers that rotate, since no key")


def test_not_a_model(tmp_path, model):
    refused(tmp_path / "nothing", "no such folder")
    refused(model / "config.json", "a model folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "model.safetensors")
    (model / "config.json").unlink()
    refused(model, "config.json")
    (model / "config.json").write_text("{")
    refused(model, "not JSON")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "a pickle, which can run arbitrary code"),
        ("consolidated.00.pth", "a pickle"),
        ("model.gguf", "GGUF"),
        ("tf_model.h5", "neither"),
    ],
)
def test_weights_in_other_formats(model, name, message):
    (model / "model.safetensors").rename(model / name)
    refused(model, message)


def test_adapters_and_quantised_weights(model):
    (model / "adapter_config.json").write_text("{}")
    refused(model, "an adapter")
    (model / "adapter_config.json").unlink()
    refused(changed(model, quantization_config={"quant_method": "gptq"}), r"quantized weights: .*\('gptq'\)")
    changed(model)
    for name, dtype in ((f"{Q}_scale_inv", np.float32), (Q.replace("weight", "qweight"), np.int32)):
        save_file(weights() | {name: np.ones((2, 2), dtype)}, model / "model.safetensors")
        refused(model, "quantized weights")
    save_file(weights() | {Q: np.ones((32, 32), np.int8)}, model / "model.safetensors")
    refused(model, "quantized weights: .* has dtype I8")
    save_file(weights() | {Q.replace("weight", "lora_A.weight"): np.ones((2, 2))}, model / "model.safetensors")
    refused(model, "an adapter")


def test_pairings_that_are_asked_for(model):
    refused(model, "did you mean 'interleaved'", to="interleave")
    refused(model, "weights that are already 'half'", to="half")
    refused(model, "'half', the pairing of its family", from_pairing="interleaved")
    refused(model, "'interleaved' or 'half'", from_pairing="neox")
    refused(changed(model, model_type="mine"), "add from_pairing='half' if its code")
    refused(changed(model, model_type=None), "add from_pairing='half' if its code")
    refused(changed(model, ropewalk={"pairing": "interleaved"}), "ropewalk")
    record = {"pairing": "interleaved", "converted_from": "half", "model_code": "half"}
    refused(changed(model, ropewalk=record), "already 'interleaved'")
    refused(model, "'interleaved', as recorded in config.json", to="half", from_pairing="half")


def test_families_whose_tensors_are_not_known(model):
    refused(changed(model, model_type="deepseek_v4", layer_types=None), "convert a checkpoint|rope_parameters")
    refused(changed(model, model_type="roformer"), "a model_type whose tensor names ropewalk knows: .*llama")
    save_file(weights() | {"model.layers.0.self_attn.indexer.wk.weight": np.ones((2, 2))}, model / "model.safetensors")
    refused(changed(model), "'model.layers.0.self_attn.indexer.wk.weight'")
    save_file(weights() | {"model.layers.0.cross.q_proj.weight": np.ones((2, 2))}, model / "model.safetensors")
    refused(model, "'model.layers.0.cross.q_proj.weight'")
    save_file(weights() | {"talker.layers.0.self_attn.q_proj.weight": np.ones((2, 2))}, model / "model.safetensors")
    refused(model, "one language model")
    tensors = weights()
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    refused(model, "keys that are also the values")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 8, "head_dim": 8}, r"the shape \[64, 32\], according to the config"),
        ({"num_key_value_heads": 4}, r"k_proj.*\n.*the shape \[32, 32\], according to the config\n.*\[16, 32\]"),
        ({"hidden_size": 64, "head_dim": 8}, r"the shape \[16, 64\], according to the config"),
        ({"num_key_value_heads": 3}, "a divisor of 4, the number of query heads"),
        ({"num_hidden_layers": 1}, "1 layers .*\n.*layer 1"),
        ({"num_hidden_layers": 3}, "no attention in layer 2"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": None, "head_dim": 8}, "num_attention_heads"),
    ],
)
def test_shapes_that_contradict_the_config(model, changes, message):
    refused(changed(model, **changes), message)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (Q, (32, 32, 1)),
        (Q.replace("weight", "bias"), (31,)),
        (Q.replace("q_proj", "q_norm"), (7,)),
        (Q.replace("q_proj", "q_norm"), ()),
    ],
)
def test_shapes_of_biases_and_norms(model, name, shape):
    save_file(weights() | {name: np.ones(shape, np.float32)}, model / "model.safetensors")
    refused(model, "according to the config")


def test_layers_of_which_the_config_does_not_say_whether_they_rotate(model):
    changes = {"model_type": "cohere2", "sliding_window": 8}
    refused(changed(model, **changes), "one layer type per layer", to="half")
    refused(changed(model, **changes, sliding_window_pattern="LG"), "an integer of at least 1", to="half")
    refused(changed(model, **changes, layer_types=["full_attention"]), "one entry for each of 2", to="half")
    refused(changed(model, **changes, layer_types=["full_attention"] * 2), "layers that rotate", to="half")


@pytest.mark.parametrize("keep", [0, 7, 8, 50, 1000, -1])
def test_a_file_that_is_cut_off(model, keep):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(model, "truncated or corrupt")


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"[]", b""),
        (b"\xff\xfe", b""),
        (b'{"a":1}', b""),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', b"1234"),
        ({"a": ENTRY | {"dtype": "F3"}}, b"1234"),
        ({"a": ENTRY | {"shape": [2]}}, b"1234"),
        ({"a": ENTRY | {"shape": [-1]}}, b"1234"),
        ({"a": ENTRY | {"shape": "1"}}, b"1234"),
        ({"a": ENTRY | {"data_offsets": [4, 0]}}, b"1234"),
        ({"a": ENTRY | {"data_offsets": [0, 4, 8]}}, b"1234"),
        ({"a": ENTRY | {"data_offsets": [4, 8]}}, b"12345678"),
        ({"a": ENTRY, "b": ENTRY}, b"12345678"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [2, 6]}}, b"12345678"),
        ({"a": ENTRY}, b"12345678"),
        ({"a": ENTRY | {"shape": [2**40, 2**40, 0], "data_offsets": [0, 4]}}, b"1234"),
    ],
)
def test_a_header_that_cannot_be(model, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    refused(model, "truncated or corrupt")


@given(at=st.integers(0, 1200), value=st.integers(0, 255))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_byte_of_a_header_may_be_wrong(tmp_path, at, value):
    """A header with one byte changed is read as another header that holds together, or refused."""
    path = tmp_path / "a.safetensors"
    save_file(weights(), path)
    data = bytearray(path.read_bytes())
    data[at] = value
    path.write_bytes(data)
    try:
        shard = read_shard(ModelFolder(path.parent), path.name)
    except RopewalkError:
        return
    assert sum(tensor.nbytes for tensor in shard.tensors.values()) + shard.header == len(data)


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/passwd.safetensors", "sub/a.safetensors", "..\\a.safetensors", "a.bin", 3, ""],
)
def test_an_index_that_leads_out_of_the_folder(tmp_path, sharded, file):
    shutil.copy(sharded / "model-00001-of-00003.safetensors", tmp_path / "model.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.embed_tokens.weight"] = file
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, "names of .safetensors files in the same folder")


def test_an_index_that_is_not_true(sharded):
    text = (sharded / INDEX).read_text()
    for changes, message in (
        ({"weight_map": {}}, "weight_map"),
        ({"weight_map": ["a"]}, "weight_map"),
        ({"weight_map": {"a": "model-00009-of-00003.safetensors"}}, "which does not exist"),
        ({"weight_map": {"a": "model-00001-of-00003.safetensors"}}, "no 'a' in 'model-00001"),
    ):
        (sharded / INDEX).write_text(json.dumps(json.loads(text) | changes))
        refused(sharded, message)
    (sharded / INDEX).write_text("[1")
    refused(sharded, "an index in JSON")
    (sharded / INDEX).write_text(text)
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded / "model-00002-of-00003.safetensors")
    refused(sharded, "each tensor in one file only")


def test_places_that_cannot_be_written(tmp_path, model):
    refused(model, "a path that exists", model)
    refused(model, "a folder outside of the model's", model / "out")
    refused(model, "a folder outside of the model's", model / ".." / "model" / "out")
    refused(model, "no folder", tmp_path / "no" / "out")
    refused(model, "a writable folder|free disk space", Path("/proc/out"))
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    refused(model, "a path that exists", tmp_path / "link")
    (tmp_path / "inside").symlink_to(model)
    refused(model, "a folder outside of the model's", tmp_path / "inside" / "out")


def test_a_full_disk_is_seen_before(monkeypatch, model):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    refused(model, "0.00 GB of free disk space")


@pytest.mark.parametrize("number", range(6))
def test_a_disk_that_fills_leaves_nothing(monkeypatch, tmp_path, sharded, number):
    """The n-th file cannot be written, or not be brought to the disk."""
    calls = 0
    original = os.fsync

    def full(handle):
        nonlocal calls
        calls += 1
        if calls > number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(handle)

    monkeypatch.setattr(os, "fsync", full)
    if number < 5:
        refused(sharded, "No space left on device")
    else:
        # Three shards, the index, the config, and then the folder itself.
        refused(sharded, "written completely")


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path, model):
    partial = tmp_path / f"out{folders.SUFFIX}"
    (partial / "sub").mkdir(parents=True)
    (partial / "sub" / "old").write_text("left over")
    handle = os.open(partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    refused(model, "another process that is writing")
    assert (partial / "sub" / "old").exists()
    os.close(handle)
    convert_checkpoint(model, tmp_path / "out", to="interleaved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_a_link_in_the_place_of_the_partial_folder_is_not_followed(tmp_path, model):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    (tmp_path / f"out{folders.SUFFIX}").symlink_to(tmp_path / "precious")
    refused(model, "a writable folder")
    assert (tmp_path / "precious" / "file").read_text() == "kept"


def test_an_output_that_came_meanwhile_is_not_replaced(monkeypatch, tmp_path, model):
    def progress(what, done, total):
        (tmp_path / "out").mkdir(exist_ok=True)

    with pytest.raises(RopewalkError, match="a path that was created during the conversion"):
        convert_checkpoint(model, tmp_path / "out", to="interleaved", progress=progress)
    assert list((tmp_path / "out").iterdir()) == []
    assert not (tmp_path / f"out{folders.SUFFIX}").exists()


def test_a_source_that_shrinks_while_it_is_read(model):
    path = model / "model.safetensors"
    shard = read_shard(ModelFolder(path.parent), path.name)
    os.truncate(path, shard.header + 10)
    first = next(iter(shard.tensors.values()))
    with path.open("rb") as file, pytest.raises(RopewalkError, match="truncated while it was read"):
        list(tensor_blocks(file, first))


def test_an_unproven_output_is_not_kept(monkeypatch, tmp_path, model):
    original = folders.write_file

    def flawed(path, blocks, mode):
        original(path, blocks, mode)
        if path.suffix == ".safetensors":
            data = bytearray(path.read_bytes())
            data[-3] ^= 1
            path.write_bytes(data)

    monkeypatch.setattr("ropewalk.hub.convert.conversion.write_file", flawed)
    with pytest.raises(UnprovenError, match=r"after the conversion: 1, such as model\.layers\.\d\.self_attn") as caught:
        convert_checkpoint(model, tmp_path / "out", to="interleaved", verify=True)
    assert not caught.value.proof.holds
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_proof_wants_a_record(tmp_path, model):
    other = shutil.copytree(model, tmp_path / "other")
    with pytest.raises(RopewalkError, match="the key 'ropewalk', in one of the two configs"):
        verify_conversion(model, other)
