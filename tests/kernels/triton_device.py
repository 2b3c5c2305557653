"""Where the Triton kernels run in tests: on a GPU, or in Triton's interpreter on the CPU."""

from typing import Any

import torch
from triton.runtime import interpreter

from ropewalk.kernels import gpu

DEVICE = torch.device("cpu" if gpu.interpreted() else "cuda")


def _cast_and_round(builder: Any, source: Any, target: Any) -> Any:
    if source.dtype.scalar.is_fp32() and target.scalar.is_bf16():
        bits = torch.from_numpy(source.data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
        return interpreter.TensorHandle(bits, target.scalar)
    return _cast(builder, source, target)


# The interpreter cuts a float32 to a bfloat16 where hardware rounds to the nearest; everything else it rounds.
_cast = interpreter.InterpreterBuilder.cast_impl
interpreter.InterpreterBuilder.cast_impl = _cast_and_round
