"""Finds the attention modules of a diffusers model whose processors are known, and replaces the processors.

A processor is known by its class and by the source of what it runs. A subclass, another version of diffusers with other
code, and a table that another module computes, are left alone.
"""

import hashlib
import importlib
import inspect
import re
from typing import Any, NamedTuple

from torch import nn

from ropewalk.hub.accelerate.part import Part
from ropewalk.hub.adapters.diffusion import processors
from ropewalk.hub.adapters.diffusion.fused import PairAngles, is_plain_rms_norm
from ropewalk.hub.adapters.diffusion.real_tables import Restore, use_real_tables

__all__ = ["KNOWN", "Replacement", "digest", "has_processors", "planned_processors"]

_HOME = "diffusers.models.transformers.transformer_"


class Known(NamedTuple):
    """A processor of diffusers.

    Attributes:
        fused: The processor that replaces it.
        tables: The classes that compute the tables of its models.
        functions: Functions of its module that it calls.
        digests: What `digest` returns for the versions that were compared.
        across_heads: Whether its norm is over all heads.

    >>> KNOWN["flux.FluxAttnProcessor"].tables
    ('FluxPosEmbed',)
    """

    fused: type[processors.Fused]
    tables: tuple[str, ...]
    functions: tuple[str, ...]
    digests: tuple[str, ...]
    across_heads: bool = False


_QKV = ("_get_projections", "_get_qkv_projections")

# By the module and name of the class. Digests: of diffusers 0.42.
KNOWN: dict[str, Known] = {
    "flux.FluxAttnProcessor": Known(
        processors.Flux, ("FluxPosEmbed",), (*_QKV, "apply_rotary_emb"), ("21f6fd0e5cd3c0a7",)
    ),
    "flux2.Flux2AttnProcessor": Known(
        processors.Flux2, ("Flux2PosEmbed",), (*_QKV, "apply_rotary_emb"), ("1d218e0a7630fec2",)
    ),
    "flux2.Flux2ParallelSelfAttnProcessor": Known(
        processors.Flux2Parallel, ("Flux2PosEmbed",), ("apply_rotary_emb",), ("bc0c552903cb87f5",)
    ),
    "qwenimage.QwenDoubleStreamAttnProcessor2_0": Known(
        processors.QwenImage,
        ("QwenEmbedRope", "QwenEmbedLayer3DRope"),
        ("apply_rotary_emb_qwen",),
        ("5de39a0aec6df7c3",),
    ),
    "z_image.ZSingleStreamAttnProcessor": Known(processors.ZImage, ("RopeEmbedder",), (), ("1193179cf6639605",)),
    "wan.WanAttnProcessor": Known(
        processors.Wan, ("WanRotaryPosEmbed",), ("_get_qkv_projections",), ("47a9ae1d9740e059",), across_heads=True
    ),
    "ltx.LTXVideoAttnProcessor": Known(
        processors.LTX, ("LTXVideoRotaryPosEmbed",), ("apply_rotary_emb",), ("9dc1538044e25974",), across_heads=True
    ),
}


class Replacement(NamedTuple):
    """An attention module and the processor that it gets.

    >>> Replacement(nn.Linear(2, 2), processors.Fused("plain", PairAngles())).processor.plain
    'plain'
    """

    module: nn.Module
    processor: processors.Fused


def has_processors(model: nn.Module) -> bool:
    """Whether a model has attention processors, as those of diffusers do.

    >>> has_processors(nn.Linear(2, 2))
    False
    """
    return any(_processor(module) is not None for module in model.modules())


def digest(kind: type) -> str:
    """Return a digest of the source of a processor and of the functions of its module that it calls.

    >>> digest(Known)
    ''
    """
    known = KNOWN.get(_name(kind))
    if known is None:
        return ""
    module = importlib.import_module(kind.__module__)
    call: Any = kind.__dict__.get("__call__")
    functions = [call, *(getattr(module, name, None) for name in known.functions)]
    try:
        sources = [inspect.getsource(function) for function in functions]
    except (OSError, TypeError):
        return ""
    # Without comments and spaces.
    code = [re.sub(r"\s", "", re.sub(r"#[^\n]*", "", source)) for source in sources]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def planned_processors(model: nn.Module) -> tuple[list[tuple[Replacement, Part]], list[Part], list[Restore]]:
    """Plan the replacement of the attention processors of a model.

    Args:
        model: The model.

    Returns:
        Replacements with what they do; the modules that are left, with the reasons; and functions that make the tables
        of the model real, to call when the processors are replaced. Each returns the function that undoes it.

    >>> planned_processors(nn.Linear(2, 2))
    ([], [], [])
    """
    plans: list[tuple[Replacement, Part]] = []
    left: list[Part] = []
    tables = PairAngles()
    for name, module in model.named_modules():
        processor = _processor(module)
        if processor is None:
            continue
        kind = type(processor)
        known = KNOWN.get(_name(kind))
        reason = _why_not(model, kind, known)
        if known is not None and known.across_heads and name.endswith("attn2"):
            reason = "cross attention, which is not rotated"
        if known is None or reason is not None:
            left.append(Part(name, type(module).__name__, f"{kind.__name__}: {reason}"))
            continue
        scope = " over all heads" if known.across_heads else ""
        norms = [getattr(module, norm, None) for norm in ("norm_q", "norm_k")]
        fusible = all(isinstance(norm, nn.Module) and is_plain_rms_norm(norm) for norm in norms)
        summary = f"fused{scope}" if fusible else "not fused, its norms are no plain RMSNorms"
        part = Part(name, type(module).__name__, f"{kind.__name__}, interleaved pairs", summary)
        dispatch: Any = importlib.import_module("diffusers.models.attention_dispatch").dispatch_attention_fn
        plans.append((Replacement(module, known.fused(processor, tables, dispatch)), part))
    unknown = any(part.rotation.startswith(("Qwen", "ZSingle")) for part in left)
    return plans, left, [] if unknown or not plans else use_real_tables(model)


def _processor(module: nn.Module) -> Any:
    processor = getattr(module, "processor", None)
    is_processor = processor is not None and callable(processor) and "Processor" in type(processor).__name__
    return processor if is_processor or isinstance(processor, processors.Fused) else None


def _name(kind: type) -> str:
    home = kind.__module__
    return f"{home.removeprefix(_HOME)}.{kind.__name__}" if home.startswith(_HOME) else ""


def _why_not(model: nn.Module, kind: type, known: Known | None) -> str | None:
    if known is None:
        return "no processor that ropewalk knows"
    if digest(kind) not in known.digests:
        return "its code differs from that of the versions of diffusers that ropewalk knows"
    home = kind.__module__
    makers = [*model.modules(), getattr(model, "rope_embedder", None)]
    if not any(type(maker).__module__ == home and type(maker).__name__ in known.tables for maker in makers):
        return f"{' or '.join(known.tables)}, which computes its tables, is not in the model"
    return None
