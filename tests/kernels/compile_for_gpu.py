"""Compile the kernels of calls for a GPU on a machine without one: `python -m kernels.compile_for_gpu` in tests/.

The tensors of the calls are on the CPU. A launch translates its kernel to Triton's IR as for such tensors on a GPU, and
computes nothing. Some kernels are compiled to machine code. Prints the names of the kernels.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

# Must be set before Triton is imported.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
import triton.language as tl

# Triton has no public function that stops after its IR, and no types for these modules.
from triton._C.libtriton import ir  # pyright: ignore[reportMissingModuleSource, reportMissingImports, reportAttributeAccessIssue]
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError, make_backend
from triton.runtime.jit import JITFunction

import ropewalk as rw
from ropewalk.kernels.backends import triton as backend
from ropewalk.kernels.linear.triton_step import linear_step
from ropewalk.kernels.types import Layout

TARGET = GPUTarget("cuda", 90, 32)
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
KINDS |= {torch.int64: "i64", torch.int32: "i32", torch.bool: "i1"}

compiled: set[str] = set()
# Not empty while kernels are compiled to machine code.
WHOLLY: list[bool] = []
# Some others do not, as those of linear attention.
IN_REGISTERS = ("norm_rotate_kernel", "norm_rotate_backward_kernel")


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In place of a launch. Specializes arguments as Triton does: numbers 1, and multiples of 16."""
    given = dict(zip(self.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(self.params):
        x = given[parameter.name]
        is_one = type(x) is int and x == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or is_one or x is None:
            signature[parameter.name], constants[(i,)] = "constexpr", x
            continue
        address = x.data_ptr() if isinstance(x, torch.Tensor) else x
        if isinstance(x, torch.Tensor):
            signature[parameter.name] = f"*{KINDS[x.dtype]}"
        else:
            signature[parameter.name] = "fp32" if isinstance(x, float) else "i32" if abs(x) < 1 << 31 else "i64"
        if type(address) is int and address % 16 == 0 and not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    compiler = make_backend(TARGET)
    names = ("num_warps", "num_stages", "maxnreg")
    options = compiler.parse_options({name: kwargs[name] for name in names if name in kwargs})
    context = ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    functions = compiler.get_codegen_implementation(options)  # pyright: ignore[reportAttributeAccessIssue]
    modules = compiler.get_module_map()
    source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes)
    source.make_ir(TARGET, options, functions, modules, context)
    if WHOLLY:
        # With its assembly and its shared memory. It takes seconds.
        machine = triton.compile(source, target=TARGET, options={x: kwargs[x] for x in names if x in kwargs})
        if self.__name__ in IN_REGISTERS:
            require_registers(machine, self.__name__)
    compiled.add(f"{self.__module__}.{self.__name__}")


def require_registers(kernel: Any, name: str) -> None:
    """Raise an AssertionError if threads keep values in memory because they have too few registers."""
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    if int(stack):
        raise AssertionError(f"{name} keeps {stack} bytes per thread in memory: {usage.splitlines()[-1]}")


@triton.jit
def loop_that_changes_a_type(x, count: tl.constexpr):
    _, total = tl.load(x), 0.0
    for i in range(0, count):
        _ = tl.load(x + tl.arange(0, 16) + i)
        # In Triton's language both are tensors, which type checkers do not know.
        total += tl.sum(_, axis=0)  # pyright: ignore[reportOperatorIssue]
    tl.store(x, total)


def leaves(heads: int, kv_heads: int, width: int, v_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = (heads, width), (kv_heads, width), (kv_heads, v_dim)
    return [torch.randn(1, n, 100, dim).to(dtype).requires_grad_() for n, dim in shapes]


def linear_options(heads: int) -> Iterator[dict[str, Any]]:
    alibi = rw.encoding("alibi", dim=8 * heads, num_heads=heads)
    yield {}
    yield {"cu_seqlens": torch.tensor([0, 40, 100])}
    yield {"causal": False}
    yield {"decay": -torch.ones(heads)}
    yield {"bias": alibi}
    yield {"bias": alibi, "causal": False}
    for causal in (True, False):
        yield {"bias": rw.encoding("t5", dim=8 * heads, num_heads=heads, causal=causal), "causal": causal}


def run_linear_attention() -> None:
    bf16 = torch.bfloat16
    for sizes in ((2, 1, 64, 64, bf16), (2, 2, 24, 5, bf16), (1, 1, 128, 128, bf16)):
        rope, inputs = rw.RotaryEmbedding(sizes[2]), leaves(*sizes)
        for options in linear_options(sizes[0]):
            out = rw.linear_attention(*inputs, rope=rope, backend="triton", **options)
            torch.autograd.grad(out, [*inputs, *_numbers(options)], torch.ones_like(out))
    rope, inputs = rw.RotaryEmbedding(16), leaves(2, 1, 16, 16, torch.float32)
    out = rw.linear_attention(*inputs, rope=rope, backend="triton", decay=-torch.ones(2))
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    # With so many heads, one kernel computes the sums of all segments of a head.
    for options in ({}, {"decay": -torch.ones(256)}):
        inputs = leaves(256, 256, 128, 128, bf16)
        out = rw.linear_attention(*inputs, backend="triton", **options)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    # Heads of more than 64 features store rotated features, also with one decay per query head.
    for options in ({}, {"cu_seqlens": torch.tensor([0, 40, 100])}, {"normalize": False}):
        inputs = leaves(2, 1, 96, 80, bf16)
        out = rw.linear_attention(
            *inputs, rope=rw.RotaryEmbedding(96), backend="triton", decay=-torch.ones(2), **options
        )
        torch.autograd.grad(out, inputs, torch.ones_like(out))


def run_wholly() -> None:
    """With and without operands that are kept in registers."""
    WHOLLY.append(True)
    for sizes in ((2, 1, 64, 64, torch.bfloat16), (1, 1, 16, 8, torch.bfloat16)):
        rope, inputs = rw.RotaryEmbedding(sizes[2]), leaves(*sizes)
        out = rw.linear_attention(*inputs, rope=rope, backend="triton")
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    # Heads of a language model, and norms over all heads of Wan: one row of 5120 features.
    for heads, width in ((4, 128), (1, 5120)):
        q, k = (torch.randn(1, heads, 40, width, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        weight = torch.ones(width, dtype=torch.bfloat16).requires_grad_()
        rope = rw.RotaryEmbedding(width, backend="triton")
        results = rw.qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight, eps=1e-6)
        torch.autograd.grad([*results], [q, k, weight], [torch.ones_like(x) for x in results])
    WHOLLY.clear()


def _numbers(options: dict[str, Any]) -> list[torch.Tensor]:
    return [x for module in options.values() if isinstance(module, torch.nn.Module) for x in module.parameters()]


def run_rotations() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        q, k, _ = leaves(4, 2, 64, 64, dtype)
        weight = torch.ones(64, dtype=dtype).requires_grad_()
        for pairing in ("half", "interleaved"):
            for learned in (False, True):
                rope = rw.RotaryEmbedding(64, pairing=pairing, learned=learned, backend="triton")
                results = rope(q, k)
                torch.autograd.grad([*results], [q, k, *rope.parameters()], [torch.ones_like(x) for x in results])
            rope = rw.RotaryEmbedding(64, pairing=pairing, backend="triton")
            results = rw.qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight, eps=1e-6)
            torch.autograd.grad([*results], [q, k, weight], [torch.ones_like(x) for x in results])


def run_step() -> None:
    rope, one = rw.RotaryEmbedding(64), torch.ones(2, 4, 1, 64, dtype=torch.bfloat16)
    above, below, (cos, sin) = torch.ones(2, 4, 64, 64), torch.ones(2, 4, 64), rope.at(torch.arange(3))
    for decay in (None, -torch.ones(4)):
        layout = Layout(True, 0, -2)
        assert linear_step(one, one, one, above, below, cos, sin, 1, decay, layout, (0, 0), True, 1.0) is not None


def main() -> None:
    JITFunction.run = compile_only  # pyright: ignore[reportAttributeAccessIssue]
    try:
        loop_that_changes_a_type[(1,)](torch.zeros(64), count=4)
    except CompilationError:
        compiled.clear()
    else:
        raise AssertionError("a kernel that no GPU can run was compiled")
    # As with Triton's interpreter, tensors of a CPU are supported.
    backend.INTERPRETED = True
    run_wholly()
    run_rotations()
    run_linear_attention()
    run_step()
    sys.stdout.write(json.dumps(sorted(compiled)))


if __name__ == "__main__":
    main()
