"""Packages that are installed without their requirements, in .venv/alone: timm and torchtitan.

Their requirements would bring a CUDA build of torchvision, and datasets. `make` installs them (Makefile).
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

ALONE = Path(sys.prefix) / "alone"


def torchtitan_rope() -> Any:
    """The module of torchtitan with its RoPE."""
    if not (ALONE / "torchtitan").is_dir():
        raise RuntimeError(f"torchtitan is not in {ALONE}: run make .venv/installed-dev")
    if str(ALONE) not in sys.path:
        sys.path.append(str(ALONE))
    return importlib.import_module("torchtitan.models.common.rope")


def timm_rope() -> Any:
    """The module of timm with its rotary embeddings, without the rest of timm, which needs torchvision."""
    if not (ALONE / "timm").is_dir():
        raise RuntimeError(f"timm is not in {ALONE}: run make .venv/installed-dev")
    name = "timm.layers.pos_embed_sincos"
    if name in sys.modules:
        return sys.modules[name]
    packages = {package: types.ModuleType(package) for package in ("timm", "timm.layers")}
    for package, module in packages.items():
        module.__path__ = [str(ALONE / package.replace(".", "/"))]
    # The only function of this module that rotary embeddings use registers a function for tracing by torch.fx.
    tracing: Any = types.ModuleType("timm.layers._fx")
    tracing.register_notrace_function = lambda function: function
    stubs = {**packages, "timm.layers._fx": tracing}
    sys.modules.update(stubs)
    try:
        return importlib.import_module(name)
    finally:
        for stub in stubs:
            del sys.modules[stub]
