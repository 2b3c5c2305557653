"""The kernel layer for `rotary_pos_emb`: the generated files, what it replaces, and the kernels package."""

import ast
import functools
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from kernels.triton_device import DEVICE  # noqa: F401, rounds bfloat16 in the interpreter
from ropewalk import RopewalkError, accelerate
from ropewalk.hub import kernel_layer_for, write_kernel_layer
from ropewalk.hub.accelerate.source import function_behind
from ropewalk.hub.adapters.kernel_layer import layers as source
from ropewalk.hub.adapters.kernel_layer.definitions import Definitions
from ropewalk.hub.adapters.kernel_layer.folder import LAYERS

MODELS = Path(transformers.__file__).parent / "models"


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> types.ModuleType:
    """The layers of the generated folder, imported from there."""
    folder = write_kernel_layer(tmp_path_factory.mktemp("layer")) / "build" / "torch-cuda"
    spec = importlib.util.spec_from_file_location("generated_layer", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generated_layer"] = module
    spec.loader.exec_module(module)
    return module.layers


def _functions() -> Iterator[tuple[str, dict[str, ast.FunctionDef], str]]:
    """Every function that transformers lets a kernel named rotary_pos_emb replace, with the functions of its file."""
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if '"rotary_pos_emb")' in text:
            functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
            for name, node in functions.items():
                if any("'rotary_pos_emb'" in ast.unparse(decorator) for decorator in node.decorator_list):
                    yield path.parent.name, functions, name


def _formula(functions: dict[str, ast.FunctionDef], name: str) -> str:
    """The code of a function and of those that it calls, without decorators and docstrings."""
    inside = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
    parts = []
    for used in sorted({name} | (inside & functions.keys())):
        node = functions[used]
        body = [part for part in node.body if not isinstance(part, ast.Expr)]
        arguments = ", ".join(argument.arg for argument in node.args.args)
        parts.append(f"def {used}({arguments}):\n" + "\n".join(f"    {ast.unparse(part)}" for part in body))
    return "\n".join(parts)


@pytest.mark.slow
def test_every_function_of_transformers_is_that_of_its_layer():
    seen: dict[tuple[str, str | None], list[str]] = {}
    for family, functions, name in _functions():
        seen.setdefault((_formula(functions, name), kernel_layer_for(family)), []).append(family)
    assert sum(map(len, seen.values())) >= 118
    generator = torch.Generator().manual_seed(0)
    for (code, layer), families in seen.items():
        names: dict[str, Any] = {"torch": torch}
        exec(code, names)
        theta = torch.randn(2, 5, 4, generator=generator)
        # Both features of a pair have one angle in every family but hunyuan_vl.
        other = theta if layer else torch.randn(2, 5, 4, generator=generator)
        single = layer in ("RotaryOfPairs", "RotaryInterleaved")
        wide = theta if single else torch.cat((theta, other), dim=-1)
        for unsqueeze_dim, shape in ((1, (2, 3, 5, 8)), (2, (2, 5, 3, 8))):
            q, k = (torch.randn(shape, generator=generator) for _ in range(2))
            arguments = q, k, wide.cos(), wide.sin(), unsqueeze_dim
            wanted = names["apply_rotary_pos_emb"](*arguments)
            assert [known for known in LAYERS if _agrees(known, arguments, wanted)] == ([layer] if layer else []), (
                families
            )


def _agrees(layer: str, arguments: tuple[Any, ...], wanted: tuple[Tensor, ...]) -> bool:
    try:
        found = getattr(source, layer)()(*arguments)
    except ValueError:
        return False
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Tensor:
    """transformers' formula on the leading features, in float64."""
    cos, sin = (table.double().unsqueeze(unsqueeze_dim) for table in (cos, sin))
    part, rest = x.double().split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    one, two = part.chunk(2, dim=-1)
    return torch.cat((part * cos + torch.cat((-two, one), dim=-1) * sin, rest), dim=-1)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    tables=st.sampled_from([torch.float32, torch.bfloat16]),
    unsqueeze_dim=st.sampled_from([1, 2, -3, -2]),
    heads=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 6), st.integers(0, 5)),
    shared=st.booleans(),
    alone=st.booleans(),
    needs=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    seed=st.integers(0, 2**20),
)
def test_values_and_gradients(generated, dtype, tables, unsqueeze_dim, heads, sizes, shared, alone, needs, seed):
    batch, seq, pairs, rest = sizes
    generator = torch.Generator().manual_seed(seed)
    theta = 10 * torch.randn(1 if shared else batch, seq, pairs, generator=generator)
    cos, sin = (torch.cat((table, table), dim=-1).to(tables) for table in (theta.cos(), theta.sin()))
    axis = 1 if unsqueeze_dim in (1, -3) else 2
    xs = []
    for count, grad in zip(heads, needs, strict=True):
        shape = [batch, seq, 2 * pairs + rest]
        x = torch.randn(*shape[:axis], count, *shape[axis:], generator=generator).to(dtype)
        # Heads and tokens in the other order, as after a transpose.
        xs.append(x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(grad))
    q, k = xs[0], None if alone else xs[1]
    results = generated.Rotary()(q, k, cos, sin, unsqueeze_dim)
    from_source = source.Rotary()(q, k, cos, sin, unsqueeze_dim)
    assert (results[1] is None) == alone
    unit = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    for x, y, again in zip(xs, results, from_source, strict=True):
        if y is None:
            continue
        wanted = _rotated(x, cos, sin, unsqueeze_dim)
        assert y.dtype == dtype
        assert torch.equal(y, again)
        bound = unit * (wanted.abs() + (0 if dtype != torch.float32 else x.abs().max()))
        assert ((y - wanted).abs() <= bound + 1e-6).all()
        assert y.requires_grad == x.requires_grad
        if x.requires_grad:
            cotangent = torch.randn(y.shape, generator=generator).to(dtype)
            (gradient,) = torch.autograd.grad(y, x, cotangent, retain_graph=True)
            (exact,) = torch.autograd.grad(wanted, x, cotangent.double())
            assert ((gradient - exact.to(dtype)).abs() <= 2 * unit * (exact.abs() + cotangent.abs().max())).all()


def test_compilers_learned_tables_and_higher_derivatives(generated):
    layer = generated.Rotary()
    q, k = (torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    cos, sin = (torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *inputs: layer(*inputs), (q, k, cos, sin))
    # In float32 through the kernel: the second derivative in q is 0, that of the cotangent is the rotation.
    x, table = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(1, 3, 8)
    y, _ = layer(x, None, table, table)
    g = torch.randn_like(y, requires_grad=True)
    (back,) = torch.autograd.grad(y, x, g, create_graph=True)
    (again,) = torch.autograd.grad(back, g, x.detach())
    torch.testing.assert_close(again, layer(x.detach(), None, table, table)[0])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    z, _ = compiled(x, None, table, table)
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(torch.autograd.grad(z, x, g), (back,))
    batched = torch.func.vmap(lambda t: layer(t, None, table, table)[0])(torch.stack((x, 2 * x)))
    torch.testing.assert_close(batched[1], 2 * y)


def test_the_folder_needs_neither_ropewalk_nor_numpy(tmp_path):
    folder = write_kernel_layer(tmp_path / "layer")
    assert write_kernel_layer(folder) == folder
    files = sorted(folder.rglob("*.py"))
    assert len(files) == 9
    for path in files:
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        packages = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        packages |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom) and not node.level}
        top = {name.split(".")[0] for name in packages}
        assert top <= {"torch", "triton", *sys.stdlib_module_names}, path
        assert ">>>" not in path.read_text()
    # The same three files in every variant.
    for name in ("__init__.py", "layers.py", "kernel.py"):
        assert len({path.read_text() for path in files if path.name == name}) == 1
    (folder / "mine.txt").write_text("")
    with pytest.raises(RopewalkError, match=r"mine\.txt"):
        write_kernel_layer(folder)


def test_mistakes_are_errors(generated):
    x, table = torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8)
    for q, cos, sin, unsqueeze_dim in (
        (x, table, table, 0),
        (x, torch.randn(1, 3, 10), torch.randn(1, 3, 10), 1),
        (x, table, table[..., :4], 1),
        (x[0], table, table, 1),
    ):
        with pytest.raises(ValueError, match="rotary_pos_emb"):
            generated.Rotary()(q, None, cos, sin, unsqueeze_dim)
    with pytest.raises(RopewalkError, match="no definition"):
        Definitions().add("ropewalk.kernels.types", "Layot")


@pytest.mark.gpu
def test_values_and_gradients_on_a_gpu(generated):
    generator = torch.Generator(device="cuda").manual_seed(0)
    make = functools.partial(torch.randn, device="cuda", generator=generator)
    for heads, layout in ((32, "half"), (8, "transposed")):
        q = make(2, heads, 1000, 128).bfloat16().requires_grad_()
        x = q.transpose(1, 2).contiguous().transpose(1, 2) if layout == "transposed" else q
        theta = make(2, 1000, 48)
        cos, sin = (torch.cat((table, table), dim=-1).bfloat16() for table in (theta.cos(), theta.sin()))
        y, _ = generated.Rotary()(x, None, cos, sin)
        wanted = _rotated(x, cos, sin, 1)
        assert ((y - wanted).abs() <= 2**-8 * wanted.abs() + 1e-6).all()
        g = torch.randn_like(y)
        (found,), (exact,) = torch.autograd.grad(y, q, g), torch.autograd.grad(wanted, q, g.double())
        assert ((found - exact).abs() <= 2**-7 * (exact.abs() + g.abs().max())).all()


def test_accelerate_sees_functions_that_the_kernels_package_made_modules(monkeypatch):
    # What the package makes of a function that it may replace, as of version 0.17.
    func = modeling_llama.apply_rotary_pos_emb

    class Func(torch.nn.Module):
        kernel_layer_name = "rotary_pos_emb"

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

    module: Any = Func()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", module)
    assert function_behind(module) is func
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32)).eval()
    ids = torch.randint(32, (1, 9))
    before = model(ids).logits
    with accelerate(model) as handle:
        assert [part.kind for part in handle.patched] == ["LlamaAttention"]
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-6)
    # The package writes the forward of a kernel into the module, or the forward of its class to undo that.
    module.forward = types.MethodType(Func.forward, module)
    assert function_behind(module) is func
    module.forward = types.MethodType(source.Rotary.forward, module)
    assert function_behind(module) is module
    with pytest.raises(RopewalkError, match="apply_rotary_pos_emb"):
        accelerate(model)
