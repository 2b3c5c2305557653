"""What Python functions are given that is no config: the advice that commands give too, in the words of Python."""

import json

import pytest

from ropewalk import RopewalkError, hub, load_spec


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "read", [load_spec, hub.read_model, hub.inspect_model, lambda path: hub.extend_model(path, 8192)]
)
def test_what_is_no_config_is_told_apart(read, folder):
    for name in ("gguf", "adapter"):
        (folder / name).mkdir()
    (folder / "gguf" / "model.gguf").write_bytes(b"GGUF\x03\x00")
    (folder / "blob").write_bytes(b"GGUF\x03\x00")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    for path, got, do in (
        ("org/Model-7b", "the name of a model on a hub", "hf download org/Model-7b config.json --local-dir Model-7b"),
        ("gguf", "the GGUF file model.gguf", "pass the config.json of the model that the GGUF was made from"),
        ("blob", "a GGUF file", "pass the config.json of the model that the GGUF was made from"),
        (
            "adapter",
            "an adapter, which has the rotation of its base model: org/base",
            "pass the config.json of the base",
        ),
        ("model.safetensors", "weights", "pass the config.json next to the weights"),
    ):
        for given in (path, folder / path) if path != "org/Model-7b" else (path,):
            with pytest.raises(RopewalkError) as error:
                read(given)
            assert got in error.value.got
            assert do in error.value.do
            assert path in error.value.asked


def test_a_folder_with_a_config_is_read_whatever_else_it_has(folder):
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "config.json").write_text('{"model_type": "llama", "head_dim": 8}')
    assert load_spec(folder).head_dim == 8  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"base_model_name_or_path": 7}', '{"base_model_name_or_path": "\\u0007"}']
)
def test_an_adapter_that_does_not_name_its_base(folder, text):
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(RopewalkError) as error:
        load_spec("adapter_config.json")
    assert error.value.got == "an adapter, which has the rotation of its base model"
