"""Names of other libraries, and of ropewalk 0.1: every public callable answers with the name that it has for the same.

Signatures, pickles, doctests and compiled graphs are those of the functions without the check.
"""

import copy
import doctest
import importlib
import inspect
import pickle
from typing import Any

import pytest
import torch

import ropewalk as rw
from ropewalk.names import ARGUMENTS, MOVED, VALUES
from ropewalk.signatures import ArgumentError, advice_on_argument, checks_names

pytestmark = pytest.mark.usefixtures("as_a_user")

# Base classes and a protocol without arguments, warnings, a module, and tuples that are returned.
WITHOUT_ARGUMENTS = {"Encoding", "Frequencies", "QueryTemperature", "RopeConfigWarning", "RopewalkWarning", "positions"}
WITHOUT_ARGUMENTS |= {"Cache", "CachedTokens", "DistanceBias", "Visibility"}
ROPE = rw.RotaryEmbedding(8)
X = torch.ones(1, 2, 5, 8)
METHODS = {f"rope.{name}": getattr(ROPE, name) for name in ("at", "unrotate", "shift", "retune", "rotate_", "forward")}
LAYERS = {"rope": ROPE, "attention": rw.Attention(8, 2), "linear": rw.LinearAttention(8, 2)}
LAYERS |= {"step": LAYERS["linear"].step, "append": rw.KVCache(1, 1, 4, 2).append}


def public() -> dict[str, Any]:
    names = {name: getattr(rw, name) for name in rw.__all__ if name not in WITHOUT_ARGUMENTS}
    return names | METHODS | LAYERS | {"hub.read_model": rw.hub.read_model}


def parameters(call: Any) -> set[str]:
    return set(inspect.signature(call.forward if isinstance(call, torch.nn.Module) else call).parameters)


@pytest.mark.parametrize("name", [name for name in public() if name != "RopewalkError"])
def test_every_public_callable_answers_to_every_foreign_name(name):
    call, own = public()[name], parameters(public()[name])
    # Python itself refuses a call of these methods without their first argument: they have no wrapper.
    first = {"linear_attention": (X, X, X), "linear_state": (X, X)}.get(
        name, (X,) if name in ("rope", "rope.forward", "rope.rotate_") else ()
    )
    for foreign in {*ARGUMENTS, "no_such_argument"} - own:
        if name == "encoding" and not {*ARGUMENTS.get(foreign, ARGUMENTS["cos"]).ours} & own:
            continue  # an option, which only the encoding can refuse: below
        with pytest.raises(ArgumentError) as error:
            call(*first, **{foreign: 1})
        assert error.value.asked.endswith(f"({foreign}=...)"), foreign
        assert error.value.got == f"{foreign}=1"
        assert error.value.do == advice_on_argument(foreign, 1, own)
        assert isinstance(error.value, TypeError)


@pytest.mark.parametrize(
    ("call", "do"),
    [
        (lambda: rw.RotaryEmbedding(8, theta=5e5), "pass base=500000.0: theta is called base here"),
        (lambda: rw.RotaryEmbedding(8, rope_theta=5e5), "pass base=500000.0: rope_theta is called base here"),
        (lambda: rw.RotaryEmbedding(dim=8), "pass head_dim=8: dim is called head_dim here"),
        (lambda: rw.RotaryEmbedding("config.json"), "read a config first: RotaryEmbedding(load_spec(path))"),
        (lambda: rw.RopeSpec(8, base=5e5), "the base belongs to the frequencies: RopeSpec(head_dim, Plain(base))"),
        (
            lambda: rw.RotaryEmbedding(8, device="cpu"),
            "omit it: call .to(device) on a module; a rotation has the device and the dtype of q and k",
        ),
        (lambda: rw.encoding("rotary", dim=8, num_heads=2), 'pass "rope"'),
        (
            lambda: rw.RotaryEmbedding(8, interleaved=True),
            'pass pairing="interleaved": interleaved is called pairing here',
        ),
        (lambda: rw.RotaryEmbedding(8, interleaved=False), 'pass pairing="half": interleaved is called pairing here'),
        (
            lambda: rw.RotaryEmbedding(8, is_neox_style=True),
            'pass pairing="half": is_neox_style is called pairing here',
        ),
        (lambda: rw.RotaryEmbedding(8, max_seq_len=64), "pass context_length=64: max_seq_len is called"),
        (lambda: rw.RotaryEmbedding(8, max_position_embeddings=64), "pass context_length=64: max_position_embeddings"),
        (lambda: rw.RotaryEmbedding(8, max_position=64), "pass context_length=64: max_position is called"),
        (
            lambda: rw.RotaryEmbedding(8, rotary_dim=4),
            "RotaryEmbedding(RopeSpec(head_dim, Plain(base), rotary_dim=...))",
        ),
        (lambda: rw.RotaryEmbedding(8, hidden_size=64), "head_dim = width // num_heads"),
        (lambda: rw.RotaryEmbedding(8, num_heads=8), "omit it: the number of heads is read from the shapes"),
        (lambda: rw.RotaryEmbedding(8, positions=1), "rope(q, k, positions=...)"),
        (lambda: rw.RotaryEmbedding(8, pairng="half"), "did you mean pairing=?"),
        (lambda: rw.RotaryEmbedding(8, 5e5), "pass it by name: base=, pairing="),
        (lambda: ROPE(X, position_ids=torch.arange(5)), "pass positions=...: position_ids is called positions here"),
        (lambda: ROPE(X, X, seqlen_offset=3), "pass offset=3: seqlen_offset is called offset here"),
        (lambda: ROPE(X, X, X, X), "pass them by name: positions=, k_positions=, offset=, cu_seqlens=, angles="),
        (lambda: ROPE(X, X, cos=X, sin=X), "pass angles= instead: a tuple (cos, sin), each [seq, head_dim/2]"),
        (lambda: ROPE(X, X, inplace=True), "call rope.rotate_(q, k)"),
        (lambda: ROPE.rotate_(X, X, position_ids=X), "pass positions=..."),
        (lambda: rw.Attention(hidden_size=8, num_attention_heads=2), "pass dim=8: hidden_size is called dim here"),
        (lambda: rw.Attention(8, num_attention_heads=2), "pass num_heads=2: num_attention_heads is called"),
        (lambda: rw.Attention(8, n_heads=2), "pass num_heads=2: n_heads is called num_heads here"),
        (lambda: rw.Attention(8, 2, num_key_value_heads=1), "pass num_kv_heads=1"),
        (
            lambda: rw.Attention(8, 2)(X[0], attention_mask=X),
            "pass key_mask= instead: bool [batch, seq], True for a visible",
        ),
        (lambda: rw.Attention(8, 2)(X[0], position_ids=X), "pass positions=..."),
        (lambda: rw.encoding("rope", hidden_size=8, num_heads=2), "pass dim=8"),
        (lambda: rw.encoding("rope", dim=8, n_heads=2), "pass num_heads=2"),
        (lambda: rw.encoding("rope", dim=8, num_heads=2, theta=5e5), "pass base=500000.0: theta is called base here"),
        (
            lambda: rw.encoding("learned", dim=8, num_heads=2, max_len=64),
            "pass length=64: max_len is called length here",
        ),
        (lambda: rw.RopeSpec(dim=8), "pass head_dim=8"),
        (lambda: rw.RopeSpec(8, theta=5e5), "RopeSpec(head_dim, Plain(base))"),
        (lambda: rw.RopeSpec(8, partial_rotary_factor=0.5), "pass rotary_dim= instead: a number of features: share *"),
        (lambda: rw.Plain(rope_theta=5e5), "pass base=500000.0"),
        (lambda: rw.Yarn(scaling_factor=4.0), "pass factor=4.0"),
        (lambda: rw.Yarn(factor=4.0, original_max_position_embeddings=64), "pass trained_length=64"),
        (lambda: rw.build_rotary_frequencies(head_dim=8, max_seq_len=4), "pass dim_head=8"),
        (lambda: rw.build_rotary_frequencies(8, 4, theta=5e5), "pass base=500000.0"),
        (lambda: rw.KVCache(1, 2, 3, 4, batch_size=1), "pass batch=1"),
        (lambda: rw.qk_norm_rope(X, X, torch.ones(8), torch.ones(8), ROPE), "pass them by name: q_weight=, k_weight="),
        (lambda: rw.qk_norm_rope(X, X, ROPE, rms_norm_eps=1e-6), "pass eps=1e-06"),
        (lambda: rw.load_spec({}, model_type="llama"), "omit it, or check its name"),
        (
            lambda: rw.Attention(8, 2)(X[0], shards=None),
            "layer.heads_of(x), call rw.parallel.attention(",
        ),
        (lambda: rw.linear_attention(X, X, X, shards=None), "rw.parallel.linear_attention"),
    ],
)
def test_the_error_names_ours(call, do):
    with pytest.raises(rw.RopewalkError) as error:
        call()
    assert do in error.value.do
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["asked", "expected", "got", "do this"]


@pytest.mark.parametrize("value", [value for value, ours in VALUES.items() if ours[0] in ("half", "interleaved")])
@pytest.mark.parametrize(
    "call",
    [
        lambda pairing: rw.RotaryEmbedding(8, pairing=pairing),
        lambda pairing: rw.RopeSpec(8, pairing=pairing),
        lambda pairing: rw.apply_rope(X, *rw.build_rotary_frequencies(8, 5), pairing),
        lambda pairing: rw.load_spec({"model_type": "mine", "head_dim": 8}, pairing=pairing),
        lambda pairing: rw.encoding("rope", dim=8, num_heads=1, pairing=pairing),
        lambda pairing: rw.reference.rotate(X, torch.arange(5), torch.ones(4), pairing=pairing),
    ],
)
def test_a_foreign_pairing_is_translated(call, value):
    with pytest.raises(rw.RopewalkError) as error:
        call(value)
    assert error.value.do == VALUES[value][1]
    assert "'interleaved' or 'half'" in error.value.expected


def test_the_pairing_of_llama_depends_on_who_published_the_weights():
    with pytest.raises(
        rw.RopewalkError, match='use "half" for weights in the format of transformers, or "interleaved"'
    ):
        rw.RotaryEmbedding(8, pairing="llama")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", MOVED)
def test_a_name_that_moved_has_its_new_name_in_the_error(name):
    new = MOVED[name]
    module, _, attribute = new.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)
    with pytest.raises(AttributeError, match=f"do this:  use {new}") as error:
        getattr(rw, name)
    assert isinstance(error.value, rw.RopewalkError)
    assert not hasattr(rw, name)
    with pytest.raises(ImportError, match=f"do this:  use {new}"):
        exec(f"from ropewalk import {name}")  # how a user writes it


def test_an_argument_of_another_function_over_ranks_is_told_where_it_belongs():
    ours = inspect.signature(rw.parallel.linear_attention).parameters
    assert advice_on_argument("window", 3, ours) == "omit it: it belongs to rw.parallel.attention"
    assert advice_on_argument("dropout", 0.1, ours) == "omit it: attention over ranks has no dropout"


def test_a_name_that_never_was_is_an_ordinary_error():
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'ropewalk'"):
        exec("from ropewalk import nothing")
    with pytest.raises(AttributeError, match=r"^module 'ropewalk' has no attribute 'nothing'$"):
        _ = rw.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_positions_are_imported_as_they_are_called():
    from ropewalk.positions import grid_positions

    assert rw.positions.grid_positions is grid_positions


def test_old_json_is_told_the_new_name():
    with pytest.raises(rw.RopewalkError, match='write "PositionInterpolation"'):
        rw.RopeSpec.from_json('{"head_dim": 4, "frequencies": {"rule": "Linear", "factor": 2}}')
    with pytest.raises(rw.RopewalkError, match='pass "rope-across-heads"'):
        rw.encoding("rope-whole-model", dim=8, num_heads=2)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_signatures_are_those_of_the_functions():
    assert str(inspect.signature(ROPE.forward)).startswith(
        "(q: torch.Tensor, k: torch.Tensor | None = None, *, positions"
    )
    kinds = {
        p.kind
        for call in public().values()
        if call is not rw.encoding
        for p in inspect.signature(call).parameters.values()
        if not isinstance(call, torch.nn.Module)
    }
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    for name, call in {"apply_rope": rw.apply_rope, "qk_norm_rope": rw.qk_norm_rope, "load_spec": rw.load_spec}.items():
        home = importlib.import_module(call.__module__)
        assert getattr(home, name) is call
        assert call.__name__ == call.__qualname__ == name
        assert pickle.loads(pickle.dumps(call)) is call
        found = doctest.DocTestFinder().find(home)
        assert any(test.name.endswith(f".{name}") and test.examples for test in found), "its doctest is collected"


def test_modules_with_checked_names_are_copied_and_pickled():
    for module in (ROPE, LAYERS["attention"], LAYERS["linear"]):
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            with pytest.raises(ArgumentError):
                twin(X, position_ids=1)
    spec = rw.RopeSpec(8, rw.Yarn(1e4, 4, 64))
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.slow
def test_compiled_and_exported_calls_are_the_same():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    compiled = torch.compile(lambda q, k: ROPE(q, k, offset=3), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k), ROPE(q, k, offset=3), rtol=0, atol=1e-6)
    program = torch.export.export(ROPE, (q, k), {"positions": torch.arange(5)})
    torch.testing.assert_close(
        program.module()(q, k, positions=torch.arange(5)), ROPE(q, k, positions=torch.arange(5)), rtol=0, atol=1e-6
    )
    wrong = torch.compile(lambda q: ROPE(q, position_ids=torch.arange(5)), backend="eager")
    with pytest.raises(rw.RopewalkError, match="position_ids is called positions here"):
        wrong(q)


def test_a_function_with_options_of_its_own_refuses_foreign_names_of_its_parameters_only():
    @checks_names
    def made(*, dim: int, **options: int) -> dict[str, int]:
        return {"dim": dim} | options

    assert made(dim=1, other=2) == {"dim": 1, "other": 2}
    with pytest.raises(ArgumentError, match="pass dim=3"):
        made(d_model=3)


@pytest.mark.parametrize(
    "twin_of",
    [
        lambda error: pickle.loads(pickle.dumps(error)),
        copy.deepcopy,
        lambda error: type(error)(*error.args),  # as torch.compile from 2.15 on
    ],
    ids=["pickled", "copied", "created anew"],
)
def test_errors_survive_what_creates_them_anew(twin_of):
    for wrong, kind in (({"theta": 1.0}, ArgumentError), ({"base": -1.0}, rw.RopewalkError)):
        with pytest.raises(kind) as error:
            rw.RotaryEmbedding(8, **wrong)
        twin = twin_of(error.value)
        assert (type(twin), str(twin), twin.do) == (kind, str(error.value), error.value.do)


FULL = [
    ("half", lambda table: torch.cat((table, table), -1), ":4"),
    ("interleaved", lambda t: t.repeat_interleave(2, -1), "::2"),
]


@pytest.mark.parametrize(("pairing", "widened", "part"), FULL)
@pytest.mark.parametrize("dims", [2, 3, 4])
def test_tables_of_full_width_are_told_the_half_to_pass(pairing, widened, part, dims):
    rope = rw.RotaryEmbedding(8, pairing=pairing)
    cos, sin = (widened(table)[(None,) * (dims - 2)] for table in rope.at(torch.arange(1, 6)))
    with pytest.raises(rw.RopewalkError) as error:
        rope(X, angles=(cos, sin))
    assert (
        f"pass cos[..., {part}], because the table contains each number twice; and the same for sin" in error.value.do
    )
    with pytest.raises(rw.RopewalkError) as error:
        rw.apply_rope(X, cos, sin, pairing)
    assert f"pass cos[..., {part}], because" in error.value.do
    assert ("then cos[" in error.value.do) == (dims < 4)
    with pytest.raises(rw.RopewalkError, match=r"freqs\.real as cos"):
        rw.apply_rope(X, torch.ones(5, 4, dtype=torch.complex64), sin)
