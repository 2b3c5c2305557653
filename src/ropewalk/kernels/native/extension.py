"""Loads the C extension, and states the reason if it is missing or stale."""

import hashlib
import importlib
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ropewalk.kernels.constructors import empty_like
from ropewalk.kernels.torch_internals import TORCH_STATE, openmp_team

__all__ = ["MISSING", "MOST_DIMS", "NATIVE", "instructions"]

# MOST_OTHERS in rotation.h.
MOST_DIMS = 16

_SOURCES = Path(__file__).parent


def _source_hash() -> str | None:
    """Return the hash that setup.py computes, or None if the sources are not installed with the package."""
    sources = sorted(_SOURCES.glob("*.[ch]"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest() if sources else None


def _load() -> tuple[ModuleType | None, str | None]:
    """Return the extension, or the reason why it is not available."""
    rebuild = "install ropewalk again with gcc or clang available (in a clone: python setup.py build_ext --inplace)"
    try:
        native = importlib.import_module("ropewalk.kernels._native")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):
            return None, f"the C kernel was not built: {rebuild}"
        return None, f"the C kernel does not load ({error}): {rebuild}"
    sources = _source_hash()
    if sources is not None and sources != native.source_hash:
        return None, f"the C kernel was built from other sources than those in {_SOURCES.name}/: {rebuild}"
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None, f"torch {torch.__version__} does not export DLPack's exchange API: use torch 2.11 or later"
    try:
        native.use_torch(Tensor, torch.nn.Parameter, exchange, openmp_team(), (empty_like, *TORCH_STATE))
    except (ImportError, ValueError) as error:
        return None, f"torch {torch.__version__} exports its tensors in a way that is not supported ({error})"
    return native, None


# The extension, and the reason why it is missing. One of them is None.
NATIVE: ModuleType | None
MISSING: str | None
NATIVE, MISSING = _load()


def instructions() -> str | None:
    """Return the instruction set that is used: "neon", "avx2", "sse2" or "portable"; None without the C kernel.

    >>> instructions() in ("neon", "avx2", "sse2", "portable", None)
    True
    """
    return None if NATIVE is None else NATIVE.instructions
