"""QK-norm and rotation in one pass, where a model's code normalises q and k and rotates them right after.

That it does is read from the source of the method, which is compiled anew with the two norms taken out and the call of
the rotation changed. What the norms compute is found by calling them.
"""

import ast
import copy
import types
from typing import Any, NamedTuple

import torch
from torch import nn

from ropewalk.hub.accelerate.source import Sources
from ropewalk.hub.accelerate.straight_code import why_norm_not_straight
from ropewalk.kernels.constructors import randn, tensor
from ropewalk.kernels.qk_norm.torch import factor
from ropewalk.kernels.torch_internals import own_tensors
from ropewalk.kernels.types import Norm

__all__ = ["FusedMethod", "NormKind", "fused_method", "norm_kind"]

# Under this name the new code finds the fused call.
FUSED = "ropewalk_norm_rotate"


class FusedMethod(NamedTuple):
    """New code of a method, and the names of the attributes that hold its norms.

    >>> FusedMethod((lambda: None).__code__, "q_norm", "k_norm").q_norm
    'q_norm'
    """

    code: types.CodeType
    q_norm: str
    k_norm: str


class NormKind(NamedTuple):
    """What a norm computes: the name of the attribute with its epsilon, and the rest as the kernels take it.

    >>> NormKind("eps", Norm(1e-6, plus_one=True)).norm.plus_one
    True
    """

    eps: str
    norm: Norm


def norm_kind(module: nn.Module, sources: Sources | None = None) -> NormKind | str:
    """Which RMSNorm over one head the module computes; a reason in words where it is none that ropewalk fuses.

    With `sources`, its code is read before it is called: what it computes must not depend on the call.

    >>> norm_kind(nn.RMSNorm(8, eps=1e-5))
    NormKind(eps='eps', norm=Norm(eps=1e-05, plus_one=False, rounding=0))
    >>> norm_kind(nn.LayerNorm(8))
    'LayerNorm is no RMSNorm'
    """
    name = type(module).__name__
    weight = getattr(module, "weight", None)
    # One that a property computes, as a parametrisation has it, is more than a weight.
    kept = "weight" in own_tensors(module) or "weight" in vars(module)
    if not kept or not isinstance(weight, torch.Tensor) or weight.dim() != 1 or weight.is_meta:
        return f"{name} has no weight for each feature of a head"
    eps = next((key for key in ("eps", "variance_epsilon") if isinstance(getattr(module, key, None), float)), None)
    if eps is None:
        return f"{name} names no epsilon"
    reason = None if sources is None else why_norm_not_straight(module, sources, eps)
    if reason is not None:
        return reason
    with torch.inference_mode(False), torch.no_grad():
        drawing = {"dtype": torch.float32, "device": "cpu", "generator": torch.Generator("cpu").manual_seed(0)}
        probe = copy.deepcopy(module).cpu().float()
        probe.weight = drawn = nn.Parameter(randn(weight.shape, **drawing))
        # Small rows beside others: there the epsilon is what counts.
        size = getattr(module, eps)
        rows = tensor([1.0, 30.0, size**0.5, 0.1, 1.0], dtype=torch.float32, device="cpu")
        x = randn(2, 3, 5, len(weight), **drawing) * rows[:, None]
        kinds = [make(size, plus_one) for plus_one in (False, True) for make in (Norm.as_transformers, Norm)]
        try:
            low = copy.deepcopy(probe).bfloat16()
            wide, narrow = probe(x), low(x.bfloat16())
        except Exception as error:
            # A stranger's module may refuse these inputs in any way: then it is not fused, and the report says why.
            return f"{name} cannot be looked at ({type(error).__name__})"
        same = [kind for kind in kinds if torch.allclose(wide, _normed(x, drawn, kind), rtol=1e-5, atol=1e-6)]
        if not same or narrow.dtype != torch.bfloat16:
            return f"{name} is no RMSNorm"
        # Where the model rounds to its dtype in between, and the kernels can, they do as well.
        exact = [kind for kind in same if torch.equal(narrow, _normed(x.bfloat16(), drawn.bfloat16(), kind))]
    return NormKind(eps, exact[0] if exact else same[-1])


def _normed(x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.rounding & 1:
        scaled = scaled.to(x.dtype).float()
    return (scaled * factor(weight, x, norm)).to(x.dtype)


def fused_method(method: types.FunctionType, rotation_name: str, sources: Sources | None = None) -> FusedMethod | str:
    """The method with norms and rotation in one call; a reason where its code does not show that they belong together.

    Both results of `self.NORM(..)`, perhaps transposed, have to be given to the rotation, in the same run of
    statements, and nothing in between may touch them.

    >>> def forward(self, q, k, cos, sin):
    ...     q = self.q_norm(q)
    ...     k = self.k_norm(k)
    ...     q, k = apply_rotary_pos_emb(q, k, cos, sin)
    ...     return q, k
    >>> fused_method(forward, "apply_rotary_pos_emb")[1:]
    ('q_norm', 'k_norm')
    """
    own = method.__code__
    sources = sources or Sources()
    definition = sources.definition(method)
    if definition is None:
        return "its source is not there, or is not what runs"
    if own.co_freevars or own.co_varnames[:1] != ("self",):
        return "its method is more than a function of self"
    if len(_all_sites(definition, rotation_name)) != 1:
        return "its norms are not the last that happens to q and k before the rotation"
    changed = copy.deepcopy(definition)
    call, taken = _all_sites(changed, rotation_name)[0]
    names = [_take_norm(statement, norm) for statement, norm in taken]
    norms = [ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load()) for name in names]
    call.func, call.args = ast.Name(FUSED, ast.Load()), [*norms, *call.args]
    return FusedMethod(sources.recompiled(method, changed.body), *names)


def _blocks(definition: ast.FunctionDef) -> list[list[ast.stmt]]:
    blocks = [getattr(node, field, None) for node in ast.walk(definition) for field in ("body", "orelse", "finalbody")]
    return [block for block in blocks if isinstance(block, list) and block and isinstance(block[0], ast.stmt)]


# The statement that gives a name its norm, and the call of the norm in it.
Normed = tuple[ast.Assign, ast.Call]


def _all_sites(definition: ast.FunctionDef, rotation_name: str) -> list[tuple[ast.Call, list[Normed]]]:
    return [site for block in _blocks(definition) for site in _sites(block, rotation_name)]


def _sites(block: list[ast.stmt], rotation_name: str) -> list[tuple[ast.Call, list[Normed]]]:
    """Calls of the rotation in a run of statements, each with the norms of its first two arguments."""
    sites: list[tuple[ast.Call, list[Normed]]] = []
    for index, statement in enumerate(block):
        call = getattr(statement, "value", None)
        if not (isinstance(statement, ast.Assign) and isinstance(call, ast.Call) and not call.keywords):
            continue
        if not (isinstance(call.func, ast.Name) and call.func.id == rotation_name and len(call.args) == 4):
            continue
        names = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
        taken = [normed for name in names[:2] for normed in _last_norm(block[:index], name)]
        if len(set(names)) == 4 and len(taken) == 2:
            sites.append((call, taken))
    return sites


def _last_norm(before: list[ast.stmt], name: str) -> list[Normed]:
    """The last statement that has to do with `name`, if all it does is to give it a norm."""
    for statement in reversed(before):
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement)):
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                return []
            target, norm = statement.targets[0], _norm_call(statement.value)
            return [(statement, norm)] if isinstance(target, ast.Name) and target.id == name and norm else []
    return []


def _norm_call(value: ast.expr) -> ast.Call | None:
    """self.NORM(x) in self.NORM(x) or self.NORM(x).transpose(1, 2)."""
    if not isinstance(value, ast.Call) or value.keywords or not isinstance(value.func, ast.Attribute):
        return None
    inner = value.func.value
    if value.func.attr == "transpose":
        dims = [argument.value if isinstance(argument, ast.Constant) else None for argument in value.args]
        return _norm_call(inner) if dims == [1, 2] and _norm_call(inner) is inner else None
    mine = isinstance(inner, ast.Name) and inner.id == "self"
    return value if mine and len(value.args) == 1 and "norm" in value.func.attr else None


def _take_norm(statement: ast.Assign, norm: ast.Call) -> str:
    """Takes the norm out of the statement and says which attribute it was."""
    called: Any = norm.func
    if statement.value is norm:
        statement.value = norm.args[0]
    else:
        transposed: Any = statement.value
        transposed.func.value = norm.args[0]
    return called.attr
