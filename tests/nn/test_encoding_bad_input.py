"""Encodings: what is refused, and how; the ends of tables; the state of the recurrent one from call to call."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nn.test_encoding import DIM, HEADS, IDS, LENGTH, NAMES, X, made
from ropewalk import RopeSpec, RopewalkError, RotaryEmbedding, XPos
from ropewalk.nn.encodings.by_name import encoding
from ropewalk.nn.encodings.rotary import AcrossHeadsEncoding, RotaryEncoding, XPosEncoding
from ropewalk.spec import DynamicNTK, Plain
from strategies import seeds, vector

EMBEDDING = ["learned", "sinusoidal", "recurrent", "multiplicative", "concatenated"]
TABLES = {"learned": {}, "multiplicative": {}, "concatenated": {"length": LENGTH}}


class Cache:
    encoding_state: Any = None


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("ids", [[0, 1, 2, 3, LENGTH], [0, -1, 2, 3, 4], [2**40, 1, 2, 3, 4]])
def test_a_table_ends(name, ids):
    found, ids = made(name, **TABLES[name]), torch.tensor(ids)
    assert found.length == LENGTH
    with pytest.raises(RopewalkError, match=r"from 0 to 63, the rows of the table\ngot: +positions from -?\d") as error:
        found.embed(X, ids)
    assert error.value.asked == f"{type(found).__name__}.embed(positions)"
    # What the host does not look at, the device refuses: negative ids are not counted from the end.
    torch._dynamo.reset()
    compiled = torch.compile(found.embed, fullgraph=True, backend="eager")
    for positions in (ids, torch.stack((ids, ids))):
        with pytest.raises(IndexError):
            compiled(X, positions)
        with pytest.raises(IndexError):
            torch.func.vmap(found.embed)(X[None], positions[None])


@pytest.mark.parametrize("name", TABLES)
def test_a_range_past_the_table(name):
    found = made(name, **TABLES[name])
    assert found.embed(torch.zeros(1, LENGTH, DIM).double()).shape == (1, LENGTH, DIM)
    with pytest.raises(RopewalkError, match="positions from 0 to 64"):
        found.embed(torch.zeros(1, LENGTH + 1, DIM).double())


@pytest.mark.slow
def test_negative_ids_do_not_wrap_in_compiled_code():
    torch._dynamo.reset()
    found = made("learned")
    compiled = torch.compile(found.embed, fullgraph=True)
    assert torch.allclose(compiled(X, IDS), found.embed(X, IDS))
    with pytest.raises(RuntimeError, match="index out of bounds"):
        compiled(X, IDS - 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the exporter warns of its own parts
def test_negative_ids_do_not_wrap_in_onnxruntime(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")

    class Embedded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoding = made("learned").float()

        def forward(self, x, positions):
            return self.encoding.embed(x, positions)

    model, path = Embedded().eval(), tmp_path / "learned.onnx"
    program = torch.onnx.export(model, (X.float(), IDS), dynamo=True, verbose=False)
    assert program is not None
    program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(ids):
        return session.run(None, {names[0]: X.float().numpy(), names[1]: ids.numpy()})[0]

    assert torch.allclose(torch.as_tensor(run(IDS)), model(X.float(), IDS), atol=1e-6)
    for bad in (IDS - 2, IDS + LENGTH):
        with pytest.raises(Exception, match="out of data bounds"):
            run(bad)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("name", EMBEDDING)
def test_ids_of_any_whole_type(name, dtype):
    found = made(name, **TABLES.get(name, {}))
    assert torch.equal(found.embed(X, IDS.to(dtype)), found.embed(X, IDS))


BAD_POSITIONS = {
    "a list": ([0, 1, 2, 3, 4], "wrap them"),
    "bool": (torch.ones(5, dtype=torch.bool), "torch.bool"),
    "half precision": (torch.arange(5).half(), "bfloat16 and float16 do not represent"),
    "complex": (torch.arange(5).to(torch.complex64), "complex64"),
    "too few": (torch.arange(4), "positions [5] or [2, 5]"),
    "another batch": (torch.zeros(3, 5).long(), "positions [5] or [2, 5]"),
    "three dimensions": (torch.zeros(1, 2, 5).long(), "[seq] or [batch, seq]"),
    "another device": (torch.arange(5, device="meta"), "positions on cpu, the device of x"),
    "NaN": (torch.full((5,), float("nan")), "whole numbers|finite positions"),
}


@pytest.mark.parametrize("case", BAD_POSITIONS)
@pytest.mark.parametrize("name", EMBEDDING)
def test_bad_positions(name, case):
    found, (positions, said) = made(name, **TABLES.get(name, {})), BAD_POSITIONS[case]
    with pytest.raises(RopewalkError) as error:
        found.embed(X, positions)
    assert error.value.asked == f"{type(found).__name__}.embed(positions)"
    assert any(part in str(error.value) for part in said.split("|"))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_no_rows_between_whole_positions(name):
    with pytest.raises(RopewalkError, match="of whole numbers\n"):
        made(name, **TABLES[name]).embed(X, torch.arange(5) + 0.5)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(2, 5, DIM + 1), f"[batch, seq, {DIM}]"),
        (torch.zeros(DIM), f"shape [{DIM}]"),
        (torch.zeros(2, 5, DIM).long(), "torch.int64"),
        (torch.zeros(2, 5, DIM).to(torch.complex64), "complex64"),
        ([[1.0] * DIM], "list"),
    ],
)
@pytest.mark.parametrize("name", EMBEDDING)
def test_bad_tokens(name, x, said):
    with pytest.raises(RopewalkError) as error:
        made(name).embed(x)
    assert said in str(error.value)
    assert error.value.asked.endswith(".embed(x)")


@pytest.mark.parametrize("name", [name for name in EMBEDDING if name != "sinusoidal"])
def test_tokens_on_another_device_than_the_parameters(name):
    with pytest.raises(RopewalkError, match="tokens on meta, the device of its parameters"):
        made(name).to("meta").embed(X)


def test_an_error_in_a_compiled_call_is_ours():
    torch._dynamo.reset()
    compiled = torch.compile(made("sinusoidal").embed, backend="eager")
    with pytest.raises(RopewalkError, match=r"positions \[5\] or \[2, 5\]"):
        compiled(X, torch.arange(4))


@given(seeds, st.lists(st.integers(0, 3), max_size=6), st.booleans())
def test_a_prefill_and_steps_are_the_whole(seed, parts, with_ids):
    found, seq = made("recurrent", seed), sum(parts)
    x, ids = vector(seed, 2, seq, DIM), torch.arange(seq) * 3 if with_ids else None
    cache, start, pieces = Cache(), 0, [vector(0, 2, 0, DIM)]
    for part in parts:
        piece = slice(start, start + part)
        pieces.append(found.embed(x[:, piece], None if ids is None else ids[piece], cache=cache))
        start += part
    whole, last = found.embed(x, ids), Cache()
    assert torch.allclose(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-12)
    found.embed(x, ids, cache=last)
    assert (cache.encoding_state is None) == (last.encoding_state is None) == (seq == 0)
    if seq:
        assert cache.encoding_state.shape == (2, DIM)
        assert torch.equal(last.encoding_state, whole[:, -1])


def test_the_state_is_that_of_the_last_position():
    found, cache = made("recurrent"), Cache()
    y = found.embed(X, IDS, cache=cache)
    assert torch.equal(cache.encoding_state, torch.stack((y[0, 4], y[1, 3])))
    # Tokens at one position are read as they stand.
    assert torch.equal(found.embed(X, torch.zeros(5)), found.embed(X))


def test_the_state_is_not_rounded_with_the_tokens():
    found, x = made("recurrent").bfloat16(), X.bfloat16()
    cache, whole = Cache(), found.embed(x)
    steps = [found.embed(x[:, i : i + 1], cache=cache) for i in range(5)]
    assert torch.allclose(torch.cat(steps, dim=1).float(), whole.float(), rtol=2**-8, atol=0)
    assert cache.encoding_state.dtype == torch.float32


def test_gradients_go_through_the_state():
    found, cache, x = made("recurrent"), Cache(), X.clone().requires_grad_()
    found.embed(x[:, :2], cache=cache)
    (gradient,) = torch.autograd.grad(found.embed(x[:, 2:], cache=cache).sum(), x)
    (whole,) = torch.autograd.grad(found.embed(x)[:, 2:].sum(), x)
    assert torch.allclose(gradient, whole, rtol=0, atol=1e-12)


def test_a_state_of_other_sequences_is_refused():
    found, cache = made("recurrent"), Cache()
    found.embed(X, cache=cache)
    kept = cache.encoding_state
    with pytest.raises(RopewalkError, match=r"encoding_state \[3, 8\] on cpu"):
        found.embed(vector(0, 3, 5, DIM), cache=cache)
    with pytest.raises(RopewalkError, match="positions"):
        found.embed(X, torch.arange(4), cache=cache)
    assert cache.encoding_state is kept
    cache.encoding_state = "state"
    with pytest.raises(RopewalkError, match="'state'"):
        found.embed(X, cache=cache)
    assert found.embed(X, cache=object.__new__(Cache)).shape == X.shape


def test_a_compiled_step_carries_the_state():
    torch._dynamo.reset()
    found, cache = made("recurrent"), Cache()
    step = torch.compile(lambda x, cache: found.embed(x, cache=cache), fullgraph=True, backend="eager")
    with torch.no_grad():
        steps = [step(X[:, i : i + 1], cache) for i in range(5)]
    assert torch.allclose(torch.cat(steps, dim=1), found.embed(X), rtol=0, atol=1e-12)


def test_the_cache_is_nothing_to_the_others():
    for name in NAMES:
        cache = Cache()
        found = made(name)
        assert torch.equal(found.embed(X, IDS, cache=cache), found.embed(X, IDS))
        assert (cache.encoding_state is None) == (name != "recurrent")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("rotary", {}, "'none' or 'learned' or 'sinusoidal'"),
        ("Rope", {}, "did you mean 'rope'?"),
        (None, {}, "'xpos'"),
        ("none", {"length": 4}, "options of 'none': it has none"),
        ("alibi", {"slopes": 4}, "options of 'alibi': it has none"),
        ("t5", {"bidirectional": True}, "options of 't5': causal, num_buckets, max_distance"),
        ("rope", {"theta": 1e4}, "options of 'rope': spec, head_dim, base, pairing, at_length, context_length"),
        ("learned", {"dim": 8, "base": 2.0}, "options of 'learned': length"),
        ("learned", {}, "expected: length=, which is required"),
        ("learned", {"length": 0}, r"LearnedEncoding(length=...)"),
        ("multiplicative", {"length": 2.5}, "MultiplicativeEncoding(length=...)"),
        ("concatenated", {"length": 4}, "expected: width="),
        ("concatenated", {"width": 3}, "an even integer of at least 2"),
        ("concatenated", {"width": 4, "length": 4, "base": 2.0}, "a length for a learned table, or a base"),
        ("sinusoidal", {"dim": 7}, "an even width"),
        ("sinusoidal", {"base": -1.0}, "base"),
        ("recurrent", {"dim": 2.5}, "encoding('recurrent', dim=...)"),
        ("rope", {"dim": 9}, "9 / 2"),
        ("rope", {"head_dim": 3}, "an even head_dim"),
        ("rope", {"head_dim": "4"}, "encoding('rope', head_dim=...)"),
        ("rope", {"spec": RopeSpec(8)}, "heads of 4 features\ngot:      a RopeSpec for 8"),
        ("rope", {"spec": {"head_dim": 4}}, "a RopeSpec for heads of 4 features"),
        ("rope", {"spec": RopeSpec(4), "base": 2.0}, "a spec alone"),
        ("rope", {"spec": RopeSpec(4, DynamicNTK(1e4, 2.0, 16))}, "the length that determines its frequencies"),
        ("rope", {"spec": RopeSpec(4, DynamicNTK(1e4, 2.0, 16)), "at_length": 0}, "at_length"),
        ("rope", {"at_length": 64}, "expected: no at_length"),
        ("rope-across-heads", {"spec": RopeSpec(4)}, "options of 'rope-across-heads': head_dim, base, pairing"),
        ("xpos", {}, "pass RopeSpec(head_dim, xpos=XPos(length))"),
        ("xpos", {"spec": RopeSpec(4)}, "a spec with xpos=XPos(length)"),
    ],
)
def test_what_the_factory_refuses(name, options, said, as_a_user):
    with pytest.raises(RopewalkError) as error:
        encoding(name, **{"dim": DIM, "num_heads": HEADS} | options)
    assert said in str(error.value)


def test_what_rotary_encodings_refuse():
    with pytest.raises(RopewalkError, match="seq_dim=-2"):
        RotaryEncoding(RotaryEmbedding(4, seq_dim=-3))
    with pytest.raises(RopewalkError, match="a RotaryEmbedding"):
        RotaryEncoding(RopeSpec(4))
    with pytest.raises(RopewalkError, match="AcrossHeads frequencies"):
        AcrossHeadsEncoding(RotaryEmbedding(RopeSpec(4, Plain())))
    with pytest.raises(RopewalkError, match="spec with xpos"):
        XPosEncoding(RotaryEmbedding(4))
    grouped = torch.zeros(2, 1, 5, 4)
    with pytest.raises(RopewalkError, match="cannot be shared by grouped keys"):
        made("rope-across-heads").rotate(torch.zeros(2, HEADS, 5, 4), grouped)
    with pytest.raises(RopewalkError, match="positions below 64"):
        made("xpos", spec=RopeSpec(4, xpos=XPos(LENGTH))).rotate(grouped, grouped, torch.arange(5) + 60)
