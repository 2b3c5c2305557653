"""accelerate on a CUDA device: logits, gradients, generation, one graph, and a model that changes its device."""

import warnings

import pytest
import torch
import transformers

from hub.accelerated import FAMILIES, exact, outcome, rms, tiny, tokens
from ropewalk.hub.accelerate.acceleration import accelerate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# As on the CPU: both round the same numbers, each in its own order.
TIMES = 2.0


@pytest.fixture(autouse=True)
def as_models_run():
    transformers.logging.set_verbosity_error()
    # Deterministic algorithms, which other tests have, would want another cuBLAS.
    torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        # transformers' own, of names of typing that are to go; Inductor's, of float32 products.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        yield
    torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_the_models_own(family, dtype):
    model, ids = tiny(family).to("cuda", dtype), tokens().cuda()
    own, truth = outcome(model, ids), exact(model, ids)
    with accelerate(model) as handle:
        assert len(handle.patched) == 2
        ours = outcome(model, ids)
    for mine, theirs, right in zip(ours, own, truth, strict=True):
        assert rms(mine - right) <= TIMES * rms(theirs - right)
        # Some families rotate in float32, and round to the same bfloat16 numbers.
        assert dtype != torch.float32 or rms(mine - theirs) > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "glm4"])
def test_generate_gives_the_same_tokens(family):
    model, ids = tiny(family).cuda(), tokens(2, 6).cuda()
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    own = model.generate(ids, **how)
    with accelerate(model):
        assert torch.equal(model.generate(ids, **how), own)


def test_a_model_that_was_accelerated_on_the_cpu_moves():
    model, ids = tiny("qwen3"), tokens()
    own = outcome(model, ids)
    with accelerate(model):
        moved = [x.cpu() for x in outcome(model.cuda(), ids.cuda())]
        back = outcome(model.cpu(), ids)
    for found in (moved, back):
        for mine, theirs in zip(found, own, strict=True):
            assert rms(mine - theirs) < 1e-4 * rms(theirs)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_graph(family):
    model, ids = tiny(family).cuda(), tokens().cuda()
    own = outcome(model, ids)
    with accelerate(model):
        compiled = outcome(torch.compile(model, fullgraph=True), ids)
    for mine, theirs in zip(compiled, own, strict=True):
        assert rms(mine - theirs) < 1e-4 * rms(theirs)
