"""rw.accelerate on transformers of diffusers: values and gradients, undo, and what is left alone."""

import copy
import importlib
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ropewalk as rw
from hub.diffusion_models import MODELS, build, cast, run
from ropewalk.hub.adapters.diffusion.plan import KNOWN, digest
from ropewalk.hub.adapters.diffusion.processors import Fused
from slow import slow_except

pytest.importorskip("diffusers")
# diffusers and what it imports warn of their own parts.
pytestmark = pytest.mark.filterwarnings("default")


# The gradient of the weight of a norm has 16 numbers, whose errors differ by chance: several models together.
SEEDS = 4


def squared_errors(results, truth):
    return [((a.double() - b).norm() / b.norm()).item() ** 2 for a, b in zip(results, truth, strict=True)]


def fused_modules(name):
    return {"flux": 2, "flux2": 2, "qwenimage": 2, "z_image": 3, "wan": 2, "ltx": 2}[name]


@pytest.mark.parametrize("name", slow_except(["wan"], MODELS))
def test_values_and_gradients_by_the_two_times_rule_and_undo(name, monkeypatch):
    norms: list[Any] = []
    fused: Any = importlib.import_module("ropewalk.hub.adapters.diffusion.fused")
    original = fused.norm_rotate
    monkeypatch.setattr(
        fused, "norm_rotate", lambda *given, **options: norms.append(given) or original(*given, **options)
    )
    errors: dict[Any, list[Any]] = {torch.float32: [], torch.bfloat16: []}
    for dtype, seed in itertools.product(errors, range(SEEDS)):
        made = build(name, seed)
        truth = run(made, torch.float64, copy.deepcopy(made.model).double())
        model = copy.deepcopy(made.model).to(dtype)
        before, classes, state = run(made, dtype, model), [type(m) for m in model.modules()], model.state_dict()
        norms.clear()
        with rw.accelerate(model) as handle:
            assert len(handle.patched) == fused_modules(name)
            results = run(made, dtype, model)
            assert [type(m) for m in model.modules()] == classes
            assert model.state_dict().keys() == state.keys()
        # Text and image are normalized apart.
        joint = {"flux": 1, "flux2": 1, "qwenimage": 2}.get(name, 0)
        assert len(norms) == fused_modules(name) + joint
        assert len(results) == len(before) >= 5
        errors[dtype].append((squared_errors(results, truth), squared_errors(before, truth)))
        assert all(torch.equal(a, b) for a, b in zip(run(made, dtype, model), before, strict=True))
    for pairs in errors.values():
        ours, plain = ([sum(each) for each in zip(*squares, strict=True)] for squares in zip(*pairs, strict=True))
        assert all(a <= 4 * b for a, b in zip(ours, plain, strict=True)), (ours, plain)


@pytest.mark.parametrize("name", ["qwenimage", "z_image"])
def test_no_complex_numbers(name):
    class Dtypes(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen: set[Any] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.seen |= {x.dtype for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
            return out

    made = build(name)

    def dtypes():
        with Dtypes() as mode, torch.no_grad():
            inputs = {key: cast(value, torch.float32) for key, value in made.inputs.items()}
            made.model(**inputs, **made.others)
        return mode.seen

    assert any(dtype.is_complex for dtype in dtypes())
    with rw.accelerate(made.model):
        # The tables are computed by the first call, on the CPU.
        first = dtypes()
        assert torch.float32 in first
        seen = dtypes()
        assert not any(dtype.is_complex for dtype in seen)
        assert torch.float64 not in seen
    assert any(dtype.is_complex for dtype in dtypes())


@pytest.mark.parametrize("name", ["flux", "qwenimage", "z_image"])
def test_a_copy_and_a_pickle_are_plain(name):
    made = build(name)
    expected = run(made, torch.float32)
    with rw.accelerate(made.model) as handle:
        for twin in (copy.deepcopy(made.model), pickle.loads(pickle.dumps(made.model))):
            assert not any(isinstance(getattr(m, "processor", None), Fused) for m in twin.modules())
            assert all(torch.equal(a, b) for a, b in zip(run(made, torch.float32, twin), expected, strict=True))
            assert len(rw.accelerate(twin).patched) == len(handle.patched)
        with pytest.raises(rw.RopewalkError, match="already has the fused rotation"):
            rw.accelerate(made.model)


def test_projections_that_were_fused_and_a_backend_that_was_set():
    made = build("wan")
    made.model.fuse_qkv_projections()
    expected = run(made, torch.float32)
    with rw.accelerate(made.model):
        made.model.set_attention_backend("native")
        for a, b in zip(run(made, torch.float32), expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
    backends = {
        getattr(m.processor, "_attention_backend", None) for m in made.model.modules() if hasattr(m, "processor")
    }
    assert len(backends) == 1
    assert backends != {None}, "the plain processors keep what was set"


def test_what_is_not_known_is_left_alone():
    made = build("flux")
    module: Any = importlib.import_module("diffusers.models.transformers.transformer_flux")

    class OwnProcessor(module.FluxAttnProcessor):
        pass

    first, second = (m for m in made.model.modules() if hasattr(m, "processor"))
    first.processor = OwnProcessor()
    handle = rw.accelerate(made.model)
    assert [part.rotation for part in handle.left] == ["OwnProcessor: no processor that ropewalk knows"]
    assert type(first.processor) is OwnProcessor
    second.processor = module.FluxAttnProcessor()
    with pytest.raises(rw.RopewalkError, match="another processor in 1 of 1 modules, the first FluxAttnProcessor"):
        handle.undo()


def test_other_code_and_other_tables_are_left_alone(monkeypatch):
    made = build("wan")
    module: Any = importlib.import_module("diffusers.models.transformers.transformer_wan")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_get_qkv_projections", build)
        with pytest.raises(rw.RopewalkError, match="its code differs from that of the versions of diffusers"):
            rw.accelerate(made.model)

    class OwnTables(module.WanRotaryPosEmbed):
        pass

    made.model.rope.__class__ = OwnTables
    with pytest.raises(rw.RopewalkError, match="WanRotaryPosEmbed, which computes its tables, is not in the model"):
        rw.accelerate(made.model)


def test_a_norm_with_a_hook_is_called():
    made = build("flux")
    calls = []
    expected = run(made, torch.float32)
    attention: Any = next(m for m in made.model.modules() if hasattr(m, "processor"))
    attention.norm_q.register_forward_hook(lambda *given: calls.append(given))
    with rw.accelerate(made.model):
        results = run(made, torch.float32)
    assert len(calls) == 1
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(results, expected, strict=True))


@pytest.mark.slow
def test_a_compiled_model_has_one_graph():
    made = build("flux")
    model: Any = made.model
    inputs = {key: cast(value, torch.float32) for key, value in made.inputs.items()}
    with rw.accelerate(made.model), torch.no_grad():
        expected = made.model(**inputs, **made.others, return_dict=False)[0]
        block = model.single_transformer_blocks[0]
        block.compile(fullgraph=True, backend="aot_eager")
        compiled = made.model(**inputs, **made.others, return_dict=False)[0]
    assert torch.allclose(compiled, expected, atol=1e-5)


def test_the_digests_are_those_of_the_installed_version():
    for name, known in KNOWN.items():
        home, kind = name.split(".")
        module = importlib.import_module(f"diffusers.models.transformers.transformer_{home}")
        assert digest(getattr(module, kind)) in known.digests, name


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_on_a_gpu(name):
    made = build(name)

    def moved(value):
        return value.cuda() if isinstance(value, torch.Tensor) else value

    there = made._replace(
        model=made.model.cuda(),
        inputs={k: [moved(x) for x in v] if isinstance(v, list) else moved(v) for k, v in made.inputs.items()},
        others={k: moved(v) for k, v in made.others.items()},
    )
    truth = run(there, torch.float64, copy.deepcopy(there.model).double())
    model = there.model.bfloat16()
    before = run(there, torch.bfloat16, model)
    with rw.accelerate(model):
        results = run(there, torch.bfloat16, model)
    for error, plain in zip(squared_errors(results, truth), squared_errors(before, truth), strict=True):
        assert error <= 4 * plain  # squares
