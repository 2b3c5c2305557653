"""accelerate: ropewalk's fused rotation in a model of transformers that is already loaded, and out of it again.

A module that rotates is given a subclass of its class, made for this model alone, in whose methods the name of the
model's rotation function stands for the fused one. Other models of the class, the modeling file and what is loaded
later have nothing to do with it.
"""

import threading
import types
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from torch import nn

from ropewalk.errors import RopewalkError, shown
from ropewalk.hub.accelerate.plan import PLAIN, Part, bound_methods, plain_state, planned

__all__ = ["Acceleration", "accelerate"]

# Two threads with one model would each make a handle, of which one could never undo.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(eq=False, repr=False)
class Acceleration:
    """What `accelerate` did to a model: `patched` and `left` say it module by module, `undo` takes it back.

    As a context manager it undoes at the end of the block. Printed, it says what was found.

    >>> Acceleration("Nothing", (), (), []).active
    False
    """

    model: str
    patched: tuple[Part, ...]
    left: tuple[Part, ...]
    _modules: list[tuple[nn.Module, type]] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """Whether the model still has the fused rotation."""
        return bool(self._modules)

    def undo(self) -> None:
        """Gives every module its own class back. What is undone stays so: a second call does nothing."""
        changed = [module for module, made in self._modules if type(module) is not made]
        if changed:
            raise RopewalkError(
                asked="handle.undo()",
                expected="modules of the classes that accelerate gave them",
                got=f"{len(changed)} with another class since, the first {type(changed[0]).__name__}",
                do="take back what came after accelerate first; a sharded model keeps the fused rotation",
            )
        for module, made in self._modules:
            state = plain_state(module)
            module.__class__ = getattr(made, PLAIN)
            module.__dict__.update(state)
        self._modules.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "" if self.active else ", undone"
        lines = [f"Acceleration of {self.model}: {len(self.patched)} modules with ropewalk's rotation{state}"]
        for parts, title in ((self.patched, ""), (self.left, "left alone: ")):
            lines += [f"  {title}{count} x {text}" for text, count in Counter(map(str, parts)).items()]
        return "\n".join(lines)


def accelerate(model: nn.Module) -> Acceleration:
    """Puts the fused rotation, and the fused QK-norm, into a loaded model; the handle's `undo` takes them out.

    Every method of the model's modules that calls a function of cos and sin is looked at. The code of the function is
    read: what it computes must not depend on sizes, dtypes, values, modes or earlier calls. It is then called on random
    numbers, and is replaced if it is a rotation: of half or interleaved pairs, of all features or of the first or last
    of them. cos and sin stay those that the model makes; the module that makes them is read and called as well, to see
    that both features of a pair have one angle. RMSNorm over a head that comes right before goes into the same pass.
    Queries and keys are turned in float32 and rounded once, so that results are those of the model up to the rounding
    of its own arithmetic.

    Nothing is stored in the model: its state_dict is the same, and a copy, a pickle or torch.save of it is the plain
    model. One that is accelerated already is refused, as is one in which there is nothing to replace.

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
    with _ONE_AT_A_TIME:
        return _accelerated(model)


def _accelerated(model: nn.Module) -> Acceleration:
    asked = "accelerate(model)"
    if not isinstance(model, nn.Module):
        do = "pass the model itself; a pipeline has it as .model"
        raise RopewalkError(asked=asked, expected="a model, a torch.nn.Module", got=shown(model), do=do)
    name = type(model).__name__
    if any(hasattr(type(module), PLAIN) for module in model.modules()):
        raise RopewalkError(
            asked=asked,
            expected="a model that is not accelerated",
            got=f"{name} with the fused rotation already in it",
            do="keep the first handle, or call its undo() before",
        )
    plans, left = planned(model)
    if not plans:
        raise RopewalkError(
            asked=asked,
            expected="modules that call a rotation of q and k by cos and sin that ropewalk knows",
            got=f"{name}: " + ("; ".join(dict.fromkeys(map(str, left))) or "no module calls a function of cos and sin"),
            do="leave it as it is, or rotate with ropewalk.RotaryEmbedding in its own code",
        )
    handle = Acceleration(name, tuple(part for *_, part in plans), tuple(left), [])
    try:
        for module, made, _ in plans:
            plain = [getattr(type(module), name) for name in vars(made) if hasattr(type(module), name)]
            for attribute, method in bound_methods(module, plain).items():
                module.__dict__[attribute] = types.MethodType(getattr(made, method), module)
            module.__class__ = made
            handle._modules.append((module, made))
    except BaseException:
        # An interrupt, at worst: no model is left half changed, without a handle to change it back.
        handle.undo()
        raise
    return handle
