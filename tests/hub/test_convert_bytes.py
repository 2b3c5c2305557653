"""Bits, not values: NaN and infinite weights are converted and proven, and there and back every byte is the same."""

import json
import string
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hub.checkpoints import CONFIG, Q, weights
from ropewalk.hub import convert_checkpoint, verify_conversion
from ropewalk.hub.convert.json_text import parse, with_member, without_member

K = Q.replace("q_proj", "k_proj")
V = Q.replace("q_proj", "v_proj")
DTYPES = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
# The first is a signalling NaN, whose payload a cast would change; then quiet ones of either sign.
PATTERNS = {
    torch.float64: [
        0x7FF0_0000_0000_0001,
        0x7FF8_0000_0000_1234,
        -1,
        0x7FF0_0000_0000_0000,
        -(2**63),
        0x7FEF_FFFF_FFFF_FFFF,
    ],
    torch.float32: [0x7F80_0001, 0x7FC0_1234, -1, 0x7F80_0000, -(2**31), 0x7F7F_FFFF],
    torch.float16: [0x7C01, 0x7E12, -1, 0x7C00, -(2**15), 0x7BFF],
    torch.bfloat16: [0x7F81, 0x7FC2, -1, 0x7F80, -(2**15), 0x7F7F],
}
OTHERS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


def tensors(dtype):
    return {name: torch.from_numpy(value).to(dtype) for name, value in weights().items()}


def made(folder, content, text=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG) if text is None else text, newline="")
    save_file(content, folder / "model.safetensors")
    return folder


def with_bits(tensor, bits):
    """The tensor with these bit patterns at its beginning, in its first row and in its last."""
    changed = tensor.clone()
    whole = changed.view(DTYPES[tensor.dtype])
    whole[0, : len(bits)] = whole[-1, : len(bits)] = torch.tensor(bits, dtype=whole.dtype)
    return changed


def proven(model, out, to):
    """The proof of a conversion that is verified when it is made."""
    proof = convert_checkpoint(model, out, to=to, verify=True).proof
    assert proof is not None
    return proof


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", [(Q,), (K,), (Q, K, V)], ids=["q", "k", "qkv"])
def test_weights_that_are_not_finite_are_proven_and_kept_bit_by_bit(tmp_path, dtype, names):
    content = tensors(dtype)
    content |= {name: with_bits(content[name], PATTERNS[dtype]) for name in names}
    model = made(tmp_path / "model", content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        there = proven(model, tmp_path / "there", to="interleaved")
        back = proven(tmp_path / "there", tmp_path / "back", to="half")
    for proof in (there, back, verify_conversion(model, tmp_path / "there")):
        assert proof.holds
        assert proof.worst.difference < 1e-13
        json.dumps(proof.as_json(), allow_nan=False)
    assert files_of(tmp_path / "back") == files_of(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e308, 1e-308, -0.0, 0.0])
@pytest.mark.parametrize("what", ["weight", "bias", "norm"])
def test_a_whole_tensor_of_one_value(tmp_path, value, what):
    content = tensors(torch.float64)
    name = {"weight": Q, "bias": Q.replace("weight", "bias"), "norm": Q.replace("q_proj", "q_norm")}[what]
    shape = {"weight": content[Q].shape, "bias": (32,), "norm": (8,)}[what]
    model = made(tmp_path / "model", content | {name: torch.full(shape, value, dtype=torch.float64)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert proven(model, tmp_path / "out", to="interleaved").holds


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("place", "name"), [(1, Q), (1, V), (4, Q), (4, V)], ids=["NaN in q", "NaN in v", "-0 in q", "-0 in v"]
)
def test_another_payload_or_another_zero_is_seen(tmp_path, dtype, place, name):
    content = tensors(dtype)
    content[name] = with_bits(content[name], PATTERNS[dtype])
    model = made(tmp_path / "model", content)
    convert_checkpoint(model, tmp_path / "out", to="interleaved")
    path = tmp_path / "out" / "model.safetensors"
    data, wanted = path.read_bytes(), content[name][0, place].reshape(1).view(DTYPES[dtype]).numpy().tobytes()
    # A quiet NaN with another payload, or +0 for -0.
    other = bytes([wanted[0] ^ 1, *wanted[1:]]) if place == 1 else bytes(len(wanted))
    at = data.index(content[name][0, : len(PATTERNS[dtype])].view(DTYPES[dtype]).numpy().tobytes()) + place * len(
        wanted
    )
    path.write_bytes(data[:at] + other + data[at + len(wanted) :])
    proof = verify_conversion(model, tmp_path / "out")
    assert proof.differing == (name,)


def test_non_finite_rows_that_were_not_permuted_are_seen(tmp_path):
    """Scores alone show it: what differs among the rows is where NaN is, and its payload."""
    content = tensors(torch.float32)
    bits = torch.arange(32 * 32, dtype=torch.int32).reshape(32, 32) + 0x7FC0_0000
    content[Q] = bits.view(torch.float32)
    model = made(tmp_path / "model", content)
    convert_checkpoint(model, tmp_path / "out", to="interleaved")
    (tmp_path / "out" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    proof = verify_conversion(model, tmp_path / "out")
    assert not any(layer.equal for layer in proof.layers)
    assert proof.worst.difference > 1e-4


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_tensors_of_any_other_dtype_are_copied_and_proven(tmp_path, dtype):
    bits = torch.arange(256, dtype=torch.int64)
    other = bits.to(torch.uint8).view(dtype) if dtype.itemsize == 1 and dtype != torch.bool else bits.to(dtype)
    model = made(tmp_path / "model", tensors(torch.float32) | {"model.table": other})
    assert proven(model, tmp_path / "there", to="interleaved").holds
    assert proven(tmp_path / "there", tmp_path / "back", to="half").holds
    assert files_of(tmp_path / "back") == files_of(model)


def test_a_converted_folder_of_other_shapes_and_dtypes_fails_the_proof(tmp_path):
    model = made(tmp_path / "model", tensors(torch.float32))
    convert_checkpoint(model, tmp_path / "out", to="interleaved")
    for other in (torch.zeros(3, 5), torch.zeros(0), torch.zeros(32, 32, dtype=torch.int8), torch.zeros(32, 32).half()):
        save_file(tensors(torch.float32) | {Q: other}, tmp_path / "out" / "model.safetensors")
        proof = verify_conversion(model, tmp_path / "out")
        assert not proof.holds
        assert Q in proof.differing


# Spellings that a reader and a writer of JSON would change.
TEXTS = {
    "transformers": json.dumps(CONFIG | {"rms_norm_eps": 1e-05}, indent=2, sort_keys=True) + "\n",
    "no new line at the end": json.dumps(CONFIG, indent=2),
    "four spaces": json.dumps(CONFIG, indent=4),
    "tabs": json.dumps(CONFIG, indent="\t") + "\n\n",
    "one line": json.dumps(CONFIG),
    "compact": json.dumps(CONFIG, separators=(",", ":")),
    "carriage returns": json.dumps(CONFIG, indent=2).replace("\n", "\r\n") + "\r\n",
    "numbers": json.dumps(CONFIG)[:-1]
    + ', "a": 1e-05, "b": 1E-5, "c": 0.00001, "d": 1.0, "e": 10000.00, "f": -0, "g": 1e400}',
    "odd numbers": json.dumps(CONFIG)[:-1] + ', "a": NaN, "b": -Infinity, "c": 123456789012345678901234567890}',
    "letters": json.dumps(CONFIG)[:-1] + ', "ключ": "値 😀", "escaped": "\\u00e9\\/\\ud83d\\ude00"}',
    "spaces": "  \n" + json.dumps(CONFIG, indent=3, separators=(" ,", " : ")).replace("}", "   }") + " \t",
    "nested": json.dumps(CONFIG | {"x": {"ropewalk": {"rope_interleave": 1}}, "y": [], "z": {}}, indent=2),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_there_and_back_the_config_is_the_same_text(tmp_path, text):
    model = made(tmp_path / "model", tensors(torch.float16), text)
    (model / "tokenizer.json").write_bytes(b'{"a" : 1.00}\r\n')
    convert_checkpoint(model, tmp_path / "there", to="interleaved")
    there = (tmp_path / "there" / "config.json").read_bytes()
    # It begins and ends as it did, and says the same but for the record.
    said = json.loads(there)
    assert said.pop("ropewalk") == {"pairing": "interleaved", "converted_from": "half", "model_code": "half"}
    assert repr(said) == repr(json.loads(text))
    common = len(text.rstrip()) - 1
    assert there.decode()[: len(text[:common].rstrip())] == text[:common].rstrip()
    convert_checkpoint(tmp_path / "there", tmp_path / "back", to="half")
    assert files_of(tmp_path / "back") == files_of(model)


def latent(flag):
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "q_lora_rank": 4,
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
    } | flag
    here = "model.layers.0.self_attn"
    shapes = {"q_a_proj": (4, 8), "q_b_proj": (8, 4), "kv_a_proj_with_mqa": (8, 8)}
    return config, {f"{here}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("composite", [False, True], ids=["flat", "composite"])
@pytest.mark.parametrize(
    "flag", [{}, {"rope_interleave": None}, {"rope_interleave": True}, {"rope_interleave": False}], ids=str
)
def test_the_flag_of_a_family_is_again_as_it_was(tmp_path, flag, composite):
    config, content = latent(flag)
    whole = {"model_type": "kimi_vl", "text_config": config, "vision_config": {}} if composite else config
    model = made(tmp_path / "model", content, json.dumps(whole, indent=2))
    own = "half" if flag.get("rope_interleave", True) is False else "interleaved"
    to = "half" if own == "interleaved" else "interleaved"
    convert_checkpoint(model, tmp_path / "there", to=to, verify=True)
    there = json.loads((tmp_path / "there" / "config.json").read_text())
    assert (there["text_config"] if composite else there)["rope_interleave"] is (to == "interleaved")
    back = convert_checkpoint(tmp_path / "there", tmp_path / "back", to=own, verify=True)
    assert back.model_code == own
    assert files_of(tmp_path / "back") == files_of(model)


def test_a_record_that_lies_about_the_flag_does_not_change_the_pairing(tmp_path):
    config, content = latent({"rope_interleave": True})
    record = {"pairing": "interleaved", "converted_from": "half", "model_code": "interleaved", "flag_before": "absent"}
    model = made(tmp_path / "model", content, json.dumps(config | {"ropewalk": record}))
    convert_checkpoint(model, tmp_path / "out", to="half", verify=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_interleave"] is False


def test_a_null_where_the_record_is_written(tmp_path):
    model = made(tmp_path / "model", tensors(torch.float32), json.dumps(CONFIG | {"ropewalk": None}))
    convert_checkpoint(model, tmp_path / "out", to="interleaved")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["ropewalk"]["pairing"] == "interleaved"


KEYS = st.text(alphabet=string.ascii_letters + 'é"\\{}[]:, \n😀', max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
STYLES = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, 0, 1, 2, "\t"]),
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" , ", " :\n")]),
        "ensure_ascii": st.booleans(),
    }
)


@pytest.mark.slow
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.dictionaries(KEYS, VALUES, max_size=3), STYLES, KEYS, VALUES)
@settings(max_examples=300)
def test_a_member_is_changed_and_nothing_else(outer, inner, style, key, value):
    whole = {**outer, "part": inner}
    text = json.dumps(whole, **style)
    assert without_member(text, [], "no such key") == text
    for place, part in (((), whole), (("part",), inner)):
        changed = with_member(text, place, key, value)
        expected = {**whole, "part": {**inner, key: value}} if place else {**whole, key: value}
        assert repr(parse(changed.encode())) == repr(expected)
        if key not in part:
            assert without_member(changed, place, key) == text
        if key.isascii():
            bytewise = with_member(text.encode().decode("latin-1"), place, key, value)
            assert bytewise.encode("latin-1") == changed.encode()
        gone = {name: entry for name, entry in part.items() if name != key}
        expected = {**whole, "part": gone} if place else gone
        assert repr(parse(without_member(text, place, key).encode())) == repr(expected)


def test_texts_that_are_not_parsed():
    for data, message in (
        (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" + b"[]," * 300_000 + b"[]]", "values; the limit is"),
        (b"\xff", "utf-8"),
        (b"1" * 5000, "digits"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b',"99999":1}', "the key '99999' occurs twice"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(data)


def test_values_are_finite_where_the_proof_needs_them():
    from ropewalk.hub.convert.proof import _finite

    values = np.array([[1.5, -0.0, np.nan, np.inf, -np.inf, 1e308, -1e300, 5e-324]])
    finite = _finite(values)
    assert np.array_equal(finite[0, [0, 1, 7]], values[0, [0, 1, 7]])
    assert np.signbit(finite[0, 1])
    assert np.all(np.abs(finite[0, 2:7]) >= 1)
    assert np.all(np.abs(finite[0, 2:7]) < 2)
    assert finite[0, 3] == 1
    assert finite[0, 4] == -1
