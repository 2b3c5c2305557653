"""Fuses QK-norm and rotation, if the code of a model normalizes q and k directly before the rotation.

This is determined from the source of the method. The method is compiled again, without the two norms and with another
call in place of the rotation. What the norms compute is determined by calling them.
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

# The name of the fused function in the new code.
FUSED = "ropewalk_norm_rotate"


class FusedMethod(NamedTuple):
    """The new code of a method, and the names of the attributes with its norms.

    >>> FusedMethod((lambda: None).__code__, "q_norm", "k_norm").q_norm
    'q_norm'
    """

    code: types.CodeType
    q_norm: str
    k_norm: str


class NormKind(NamedTuple):
    """What a norm computes: the name of its attribute with the epsilon, and its description for the kernels.

    >>> NormKind("eps", Norm(1e-6, plus_one=True)).norm.plus_one
    True
    """

    eps: str
    norm: Norm


def norm_kind(module: nn.Module, sources: Sources | None = None) -> NormKind | str:
    """Determine the RMSNorm per head that a module computes.

    Args:
        module: The norm.
        sources: If not None, the source of the module is analyzed before it is called: its result must not depend on
            the call.

    Returns:
        What the norm computes, or the reason why it cannot be fused.

    >>> norm_kind(nn.RMSNorm(8, eps=1e-5))
    NormKind(eps='eps', norm=Norm(eps=1e-05, plus_one=False, rounding=0))
    >>> norm_kind(nn.LayerNorm(8))
    'LayerNorm is not an RMSNorm'
    """
    name = type(module).__name__
    weight = getattr(module, "weight", None)
    # A weight that is computed by a property, as in a parametrization, is not supported.
    stored = "weight" in own_tensors(module) or "weight" in vars(module)
    if not stored or not isinstance(weight, torch.Tensor) or weight.dim() != 1 or weight.is_meta:
        return f"{name} has no weight per feature of a head"
    eps = next((key for key in ("eps", "variance_epsilon") if isinstance(getattr(module, key, None), float)), None)
    if eps is None:
        return f"{name} has no float attribute eps or variance_epsilon"
    reason = None if sources is None else why_norm_not_straight(module, sources, eps)
    if reason is not None:
        return reason
    with torch.inference_mode(False), torch.no_grad():
        options = {"dtype": torch.float32, "device": "cpu", "generator": torch.Generator("cpu").manual_seed(0)}
        probe = copy.deepcopy(module).cpu().float()
        probe.weight = random_weight = nn.Parameter(randn(weight.shape, **options))
        # Some rows are small, so that the epsilon matters.
        epsilon = getattr(module, eps)
        scales = tensor([1.0, 30.0, epsilon**0.5, 0.1, 1.0], dtype=torch.float32, device="cpu")
        x = randn(2, 3, 5, len(weight), **options) * scales[:, None]
        kinds = [make(epsilon, plus_one) for plus_one in (False, True) for make in (Norm.as_transformers, Norm)]
        try:
            low = copy.deepcopy(probe).bfloat16()
            wide, narrow = probe(x), low(x.bfloat16())
        except Exception as error:
            # An unknown module may raise any exception for these inputs. Then it is not fused.
            return f"{name} cannot be probed ({type(error).__name__})"
        close = [kind for kind in kinds if torch.allclose(wide, _normed(x, random_weight, kind), rtol=1e-5, atol=1e-6)]
        if not close or narrow.dtype != torch.bfloat16:
            return f"{name} is not an RMSNorm"
        # If the model rounds intermediate results to its dtype, use the same rounding if the kernels support it.
        exact = [kind for kind in close if torch.equal(narrow, _normed(x.bfloat16(), random_weight.bfloat16(), kind))]
    return NormKind(eps, exact[0] if exact else close[-1])


def _normed(x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.rounding & 1:
        scaled = scaled.to(x.dtype).float()
    return (scaled * factor(weight, x, norm)).to(x.dtype)


def fused_method(method: types.FunctionType, rotation_name: str, sources: Sources | None = None) -> FusedMethod | str:
    """Compile a method again with norms and rotation in one call.

    Both results of `self.NORM(..)`, possibly transposed, must be passed to the rotation in the same block of
    statements, and no statement in between may use them.

    Args:
        method: The method.
        rotation_name: The name of the rotation function in its code.
        sources: Parsed source files, to reuse them.

    Returns:
        The new code, or the reason why the norms cannot be fused.

    >>> def forward(self, q, k, cos, sin):
    ...     q = self.q_norm(q)
    ...     k = self.k_norm(k)
    ...     q, k = apply_rotary_pos_emb(q, k, cos, sin)
    ...     return q, k
    >>> fused_method(forward, "apply_rotary_pos_emb")[1:]
    ('q_norm', 'k_norm')
    """
    code = method.__code__
    sources = sources or Sources()
    definition = sources.definition(method)
    if definition is None:
        return "its source is not available, or differs from the running code"
    if code.co_freevars or code.co_varnames[:1] != ("self",):
        return "its method is not a plain function of self"
    if len(_all_sites(definition, rotation_name)) != 1:
        return "its norms are not the last operation on q and k before the rotation"
    changed = copy.deepcopy(definition)
    call, normed = _all_sites(changed, rotation_name)[0]
    names = [_remove_norm(statement, norm) for statement, norm in normed]
    norms = [ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load()) for name in names]
    call.func, call.args = ast.Name(FUSED, ast.Load()), [*norms, *call.args]
    return FusedMethod(sources.recompiled(method, changed.body), *names)


def _blocks(definition: ast.FunctionDef) -> list[list[ast.stmt]]:
    blocks = [getattr(node, field, None) for node in ast.walk(definition) for field in ("body", "orelse", "finalbody")]
    return [block for block in blocks if isinstance(block, list) and block and isinstance(block[0], ast.stmt)]


# The statement that assigns the result of a norm, and the call of the norm in it.
Normed = tuple[ast.Assign, ast.Call]


def _all_sites(definition: ast.FunctionDef, rotation_name: str) -> list[tuple[ast.Call, list[Normed]]]:
    return [site for block in _blocks(definition) for site in _sites(block, rotation_name)]


def _sites(block: list[ast.stmt], rotation_name: str) -> list[tuple[ast.Call, list[Normed]]]:
    """Return the calls of the rotation in a block of statements, each with the norms of its first two arguments."""
    sites: list[tuple[ast.Call, list[Normed]]] = []
    for index, statement in enumerate(block):
        call = getattr(statement, "value", None)
        if not (isinstance(statement, ast.Assign) and isinstance(call, ast.Call) and not call.keywords):
            continue
        if not (isinstance(call.func, ast.Name) and call.func.id == rotation_name and len(call.args) == 4):
            continue
        names = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
        norms = [normed for name in names[:2] for normed in _last_norm(block[:index], name)]
        if len(set(names)) == 4 and len(norms) == 2:
            sites.append((call, norms))
    return sites


def _last_norm(before: list[ast.stmt], name: str) -> list[Normed]:
    """Return the last statement that uses `name`, if it only assigns the result of a norm to it."""
    for statement in reversed(before):
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement)):
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                return []
            target, norm = statement.targets[0], _norm_call(statement.value)
            return [(statement, norm)] if isinstance(target, ast.Name) and target.id == name and norm else []
    return []


def _norm_call(value: ast.expr) -> ast.Call | None:
    """Return the call self.NORM(x) in self.NORM(x) or self.NORM(x).transpose(1, 2)."""
    if not isinstance(value, ast.Call) or value.keywords or not isinstance(value.func, ast.Attribute):
        return None
    inner = value.func.value
    if value.func.attr == "transpose":
        dims = [argument.value if isinstance(argument, ast.Constant) else None for argument in value.args]
        return _norm_call(inner) if dims == [1, 2] and _norm_call(inner) is inner else None
    of_self = isinstance(inner, ast.Name) and inner.id == "self"
    return value if of_self and len(value.args) == 1 and "norm" in value.func.attr else None


def _remove_norm(statement: ast.Assign, norm: ast.Call) -> str:
    """Remove the norm from the statement and return the name of its attribute."""
    called: Any = norm.func
    if statement.value is norm:
        statement.value = norm.args[0]
    else:
        transposed: Any = statement.value
        transposed.func.value = norm.args[0]
    return called.attr
