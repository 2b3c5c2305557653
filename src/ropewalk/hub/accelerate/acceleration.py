"""accelerate: replaces the rotation of a loaded model by ropewalk's fused rotation, and undoes it.

Each module that rotates gets a new class: a subclass of its own class, created for this model only. In the methods of
the subclass, the name of the model's rotation function refers to the fused one. Other models of the same class, the
modeling file and models that are loaded later are not affected. Models of diffusers rotate in attention processors,
which are replaced.
"""

import threading
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from ropewalk.errors import RopewalkError, shown
from ropewalk.hub.accelerate.part import Part
from ropewalk.hub.accelerate.plan import PLAIN, bound_methods, plain_state, planned
from ropewalk.hub.adapters.diffusion.plan import Replacement, has_processors, planned_processors
from ropewalk.hub.adapters.diffusion.processors import Fused
from ropewalk.signatures import checks_names

__all__ = ["Acceleration", "accelerate"]

# Without the lock, two threads could each accelerate one model, and one of the two handles could never undo it.
_LOCK = threading.Lock()


@dataclass(eq=False, repr=False)
class Acceleration:
    """The handle that `accelerate` returns.

    As a context manager, it undoes the acceleration at the end of the block. Its repr summarizes what was changed.

    Attributes:
        model: The class name of the model.
        patched: The modules with the fused rotation.
        left: The modules that were not changed, with the reasons.

    >>> Acceleration("Nothing", (), (), []).active
    False
    """

    model: str
    patched: tuple[Part, ...]
    left: tuple[Part, ...]
    _modules: list[tuple[nn.Module, type]] = field(default_factory=list)
    _processors: list[Replacement] = field(default_factory=list)
    _restore: list[Callable[[], None]] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """Whether the model still has the fused rotation."""
        return bool(self._modules or self._processors)

    def undo(self) -> None:
        """Restore the class or the attention processor of every module. A second call does nothing.

        Raises:
            RopewalkError: If the class or the processor of a module was changed after `accelerate`, for example by
                sharding the model.
        """
        other = [part for part in self._processors if _processor(part.module) is not part.processor]
        if other:
            raise RopewalkError(
                asked="handle.undo()",
                expected="modules that still have the processor set by accelerate",
                got=f"another processor in {len(other)} of {len(self._processors)} modules, the first"
                f" {type(_processor(other[0].module)).__name__}",
                do="set the processors of the model yourself: model.set_attn_processor(...)",
            )
        changed = [module for module, subclass in self._modules if type(module) is not subclass]
        if changed:
            raise RopewalkError(
                asked="handle.undo()",
                expected="modules that still have the class set by accelerate",
                got=f"another class in {len(changed)} of {len(self._modules)} modules, the first"
                f" {type(changed[0]).__name__}",
                do="undo the later changes of the model first; a sharded model keeps the fused rotation",
            )
        for module, subclass in self._modules:
            state = plain_state(module)
            module.__class__ = getattr(subclass, PLAIN)
            module.__dict__.update(state)
        self._modules.clear()
        for module, processor in self._processors:
            _set_processor(module, processor.plain)
        self._processors.clear()
        while self._restore:
            self._restore.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "" if self.active else ", undone"
        lines = [f"Acceleration of {self.model}: {len(self.patched)} modules with ropewalk's rotation{state}"]
        for parts, title in ((self.patched, ""), (self.left, "not changed: ")):
            lines += [f"  {title}{count} x {text}" for text, count in Counter(map(str, parts)).items()]
        return "\n".join(lines)


@checks_names
def accelerate(model: nn.Module) -> Acceleration:
    """Replace the rotation of a loaded model by the fused rotation, and fuse its QK-norm where possible.

    The methods of all modules that call a function of cos and sin, or of one table of both as in RoFormer, are
    examined. The source of the function is analyzed: its result must not depend on sizes, dtypes, values, modes or
    earlier calls. Then the function is called with random numbers. It is replaced if it computes a rotation of half or
    interleaved pairs, of all features or of the first or last ones. cos and sin are still computed by the model. The
    module that computes them is analyzed and called as well, to check that both features of a pair have the same angle.
    An RMSNorm per head directly before the rotation is fused into the same pass.

    In a transformer of diffusers (Flux, Flux 2, Qwen-Image, Wan, LTX, Z-Image), the attention processors are replaced
    by processors with the norm and the rotation in one pass, in real arithmetic; a norm over all heads is fused as
    well. Processors that are not known, or whose code differs from that of the known versions, are left alone.

    Queries and keys are rotated in float32 and rounded once, so results agree with those of the model up to the
    rounding of its own arithmetic.

    No parameters or buffers change: the state_dict is the same, and a copy, a pickle or a torch.save of the model
    contains the plain model.

    Args:
        model: The model, or a part of one that contains its rotary embedding.

    Returns:
        The handle. `handle.undo()` restores the model, as does the end of a `with` block.

    Raises:
        RopewalkError: If `model` is not a module, is already accelerated, or has no rotation that can be replaced. The
            error lists the reason per module.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 50}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    >>> with accelerate(model) as handle:
    ...     print(handle)
    Acceleration of LlamaForCausalLM: 2 modules with ropewalk's rotation
      2 x LlamaAttention: apply_rotary_pos_emb, half pairs
    >>> handle.active
    False
    """
    with _LOCK:
        return _accelerate(model)


def _accelerate(model: nn.Module) -> Acceleration:
    asked = "accelerate(model)"
    if not isinstance(model, nn.Module):
        do = "pass the model; a pipeline stores it as .model"
        raise RopewalkError(asked=asked, expected="a model (torch.nn.Module)", got=shown(model), do=do)
    name = type(model).__name__
    if any(hasattr(type(module), PLAIN) or isinstance(_processor(module), Fused) for module in model.modules()):
        raise RopewalkError(
            asked=asked,
            expected="a model that is not accelerated",
            got=f"{name}, which already has the fused rotation",
            do="use the first handle, or call its undo() first",
        )
    if has_processors(model):
        return _with_processors(model, name)
    plans, left = planned(model)
    if not plans:
        raise RopewalkError(
            asked=asked,
            expected="modules that rotate q and k by cos and sin in a way that ropewalk supports",
            got=f"{name}: " + ("; ".join(dict.fromkeys(map(str, left))) or "no module calls a function of cos and sin"),
            do="use the model without accelerate, or call ropewalk.RotaryEmbedding in its code",
        )
    handle = Acceleration(name, tuple(part for *_, part in plans), tuple(left), [])
    try:
        for module, subclass, _ in plans:
            plain = [getattr(type(module), name) for name in vars(subclass) if hasattr(type(module), name)]
            for attribute, method in bound_methods(module, plain).items():
                module.__dict__[attribute] = types.MethodType(getattr(subclass, method), module)
            module.__class__ = subclass
            handle._modules.append((module, subclass))
    except BaseException:
        # For example an interrupt: no model is left half changed, without a handle to undo it.
        handle.undo()
        raise
    return handle


def _with_processors(model: nn.Module, name: str) -> Acceleration:
    """Replace the attention processors of a model of diffusers."""
    plans, left, restores = planned_processors(model)
    if not plans:
        raise RopewalkError(
            asked="accelerate(model)",
            expected="a model of diffusers with attention processors that ropewalk knows",
            got=f"{name}: " + "; ".join(dict.fromkeys(map(str, left))),
            do="use the model without accelerate; ropewalk's documentation lists the models",
        )
    handle = Acceleration(name, tuple(part for _, part in plans), tuple(left), [])
    try:
        for replacement, _ in plans:
            _set_processor(*replacement)
            handle._processors.append(replacement)
        for restore in restores:
            handle._restore.append(restore())
    except BaseException:
        handle.undo()
        raise
    return handle


def _processor(module: nn.Module) -> object:
    return getattr(module, "processor", None)


def _set_processor(module: Any, processor: object) -> None:
    # Not `set_processor`: it exists in some classes only, and logs.
    module.processor = processor
