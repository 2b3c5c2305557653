"""Builds the C kernel, which is optional: without a compiler torch operations compute the same.

With ROPEWALK_PURE=1 no compiler is asked, and the wheel fits every machine: see docs/releasing.md.
"""

import hashlib
import os
from pathlib import Path

from setuptools import Extension, setup

SOURCES = sorted(Path("src/ropewalk/kernels/native").glob("*.[ch]"))


def source_hash() -> str:
    """What kernels/native/extension.py compares, so that a stale build is noticed."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()


NATIVE = Extension(
    "ropewalk.kernels._native",
    ["src/ropewalk/kernels/native/module.c"],
    depends=[str(source) for source in SOURCES],
    define_macros=[("SOURCE_HASH", f'"{source_hash()}"')],
    # No fused multiply-add, which a compiler puts into one loop and not into another: see vectors.h.
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off"],
    libraries=["m"],
    optional=True,
)

setup(ext_modules=[] if os.environ.get("ROPEWALK_PURE") == "1" else [NATIVE])
