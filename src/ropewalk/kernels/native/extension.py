"""The C kernel: one pass over memory on the CPU. Here it is loaded, and a missing or stale build gets its reason."""

import ctypes
import hashlib
import importlib
import os
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from ropewalk.kernels.types import Layout

__all__ = [
    "DTYPES",
    "MASKS",
    "MISSING",
    "MOST_DIMS",
    "cos_sin",
    "instructions",
    "norm_rotate",
    "rotate",
    "rotate_if_ready",
]

DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))

# MOST_OTHERS in native/rotation.h.
MOST_DIMS = 16

# A plain type does not make plain memory: the batched tensors of `is_grads_batched`, zero and functional tensors have
# none, and in that of the imaginary part of a conjugate every sign is the opposite.
MASKS = (
    is_legacy_batchedtensor,
    Tensor.is_neg,
    torch._is_zerotensor,  # pyright: ignore[reportPrivateImportUsage]
    torch._is_functional_tensor,  # pyright: ignore[reportPrivateImportUsage]
)

_SOURCES = Path(__file__).parent


def _source_hash() -> str | None:
    """What setup.py computes, or None where the sources were not installed beside the package."""
    sources = sorted(_SOURCES.glob("*.[ch]"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest() if sources else None


def _openmp_team() -> int:
    """The address at which torch's own OpenMP runs a team of threads; 0 where it has none.

    It is looked up behind torch's library, so that it is the copy that torch loaded, under whatever name.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if os.name != "posix" or not path.exists():
        return 0
    entry = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
    return ctypes.cast(entry, ctypes.c_void_p).value or 0 if entry is not None else 0


def _load() -> tuple[ModuleType | None, str | None]:
    """The extension, or the reason why it cannot serve."""
    rebuild = "install ropewalk again with gcc or clang at hand (in a clone: python setup.py build_ext --inplace)"
    try:
        native = importlib.import_module("ropewalk.kernels._native")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):
            return None, f"the C kernel was not built: {rebuild}"
        return None, f"the C kernel does not load ({error}): {rebuild}"
    sources = _source_hash()
    if sources is not None and sources != native.source_hash:
        return None, f"the C kernel was built from other sources than {_SOURCES.name}/ has now: {rebuild}"
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None, f"torch {torch.__version__} does not export DLPack's exchange API: use torch 2.11 or later"
    try:
        # The C code sees by itself that a tensor has no memory.
        native.use_torch(Tensor, torch.nn.Parameter, exchange, _openmp_team(), MASKS[:2], torch.empty_like)
    except (ImportError, ValueError) as error:
        return None, f"torch {torch.__version__} exports its tensors in a way that is not known here ({error})"
    return native, None


_native, MISSING = _load()


def instructions() -> str | None:
    """The instruction set whose loops run here: "neon", "avx2", "sse2" or "portable"; None without the C kernel.

    >>> instructions() in ("neon", "avx2", "sse2", "portable", None)
    True
    """
    return None if _native is None else _native.instructions


def rotate_if_ready(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, row: int, rows: int, head_dim: int, act: bool
) -> tuple[Tensor, ...] | bool | None:
    """`rotate`, if q and k are plain CPU tensors, alike, with head_dim features and at most `rows` tokens; else None.

    Whatever a caller would check first is checked here, in C, which is what decoding waits for. act=False only asks:
    True where it would rotate.

    >>> rotate_if_ready(torch.ones(3, 4), None, torch.ones(3, 2), torch.ones(3, 2), Layout(True, 0, -2), 0, 3, 5, True)
    """
    if _native is None:
        return None
    return _native.direct(
        q,
        k,
        cos,
        sin,
        row,
        rows,
        head_dim,
        layout.start,
        layout.seq_dim,
        layout.interleaved,
        torch.get_num_threads() if act else 0,
    )


def rotate(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    row: int = 0,
    conjugate: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """q, and k if there is one, rotated: plain CPU tensors, into memory like theirs, or in place.

    cos and sin are as `cos_sin` gives them, and row `row` of them is the first token's.

    >>> from ropewalk.kernels.rotate.torch import rotate as fallback
    >>> turn = rotate if MISSING is None else fallback
    >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    >>> turn(x, None, torch.zeros(1, 2), torch.ones(1, 2), Layout(False, 0, -2))[0].tolist()  # a quarter turn
    [[-3.0, -4.0, 1.0, 2.0]]
    """
    out = (q, k) if in_place else (None, None)
    return _turn(q, k, *out, cos, sin, layout, row, conjugate)


def _turn(
    q: Tensor,
    k: Tensor | None,
    yq: Tensor | None,
    yk: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    row: int,
    conjugate: bool,
    *norm: object,
) -> tuple[Tensor, ...]:
    how = row, layout.start, layout.seq_dim, layout.interleaved, conjugate, torch.get_num_threads()
    return _native.rotate(q, k, yq, yk, cos, sin, *how, *norm)  # pyright: ignore[reportOptionalMemberAccess]


def norm_rotate(
    q: Tensor,
    k: Tensor | None,
    q_factor: Tensor,
    k_factor: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    eps: float,
    rounding: int,
    row: int = 0,
) -> tuple[Tensor, ...]:
    """RMSNorm and rotation in one pass. The factors are what the scaled features are multiplied with, [dim].

    `rounding` is as in `Norm.rounding()`.

    >>> x, one, quarter = torch.tensor([[3.0, 4.0]]), torch.ones(2), (torch.zeros(1, 1), torch.ones(1, 1))
    >>> y = [[-1.1314, 0.8485]]
    >>> if MISSING is None:
    ...     y = norm_rotate(x, None, one, None, *quarter, Layout(True, 0, -2), 1e-9, 0)[0].tolist()
    >>> [round(v, 4) for v in y[0]]
    [-1.1314, 0.8485]
    """
    k_factor = None if k_factor is None else k_factor.contiguous()
    norm = q_factor.contiguous(), k_factor, eps, rounding
    return _turn(q, k, None, None, cos, sin, layout, row, False, *norm)


def cos_sin(positions: Tensor, inv_freq: Tensor, table: Tensor, amplitude: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.angles.cos_sin` at whole positions, in float32, from the radix table.

    >>> from ropewalk.kernels.angles.torch import radix_table
    >>> theta, one = torch.ones(1, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    >>> cos = 0.5403 if MISSING else cos_sin(torch.tensor([1]), theta, radix_table(theta), one)[0].item()
    >>> round(cos, 4)
    0.5403
    """
    if positions.dtype not in (torch.int64, torch.int32):
        positions = positions.to(torch.int64)
    if inv_freq.dim() == 2:
        batch = positions.shape[0] if positions.dim() == 2 else 1
        shape = (batch, inv_freq.shape[0], positions.shape[-1], inv_freq.shape[1])
    else:
        shape = (*positions.shape, inv_freq.shape[0])
    cos, sin = (torch.empty(shape, dtype=torch.float32, device="cpu") for _ in range(2))
    threads = torch.get_num_threads()
    _native.cos_sin(  # pyright: ignore[reportOptionalMemberAccess]
        positions, inv_freq, table, amplitude, cos, sin, threads
    )
    return cos, sin
