"""The replacement of a model's rotation function: the fused rotation, with the cos and sin of the model.

Calls that differ from what was probed (other lengths, tables of another width, no keys) use the model's own function.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.hub.accelerate.rotation_probe import PACKED, Rotation, parameters_of
from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.torch_internals import current_stream, has_hooks, is_capturing, is_plain, version_of
from ropewalk.kernels.types import Layout, Norm
from ropewalk.ops import norm_rotate, rotate

__all__ = ["PairTables", "fused_norm_rotation", "fused_rotation"]


def fused_rotation(
    original: Callable[..., Any], rotation: Rotation, widths: frozenset[int] | None
) -> Callable[..., Any]:
    """Return a function with the signature of `original` that rotates in one pass over memory.

    Args:
        original: The rotation function of the model.
        rotation: What it computes.
        widths: The widths of tables in which both features of a pair have the same angle. None if it does not matter.

    Returns:
        The fused function. It calls `original` for arguments that it does not support.

    >>> from ropewalk.hub.accelerate.rotation_probe import rotation_of
    >>> def apply_rotary_pos_emb(x, cos, sin):
    ...     return torch.cat((x[..., :1] * cos - x[..., 1:] * sin, x[..., 1:] * cos + x[..., :1] * sin), dim=-1)
    >>> rotation = Rotation("half", "single", False, False, False, None, ((None, -2),), False, False)
    >>> x, quarter = torch.tensor([1.0, 0.0]).expand(1, 1, 1, 2), (torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    >>> fused_rotation(apply_rotary_pos_emb, rotation, None)(x, *quarter).tolist()
    [[[[0.0, 1.0]]]]
    """
    names = list(parameters_of(original))
    defaults = {name: value.default for name, value in parameters_of(original).items()}
    default_dim, seq_dims = defaults.get("unsqueeze_dim"), dict(rotation.seq_dims)
    first = [name for name in names if name not in rotation.tables][: 2 if rotation.both else 1]
    values = rotation.values
    known = {*first, *rotation.tables, "unsqueeze_dim", *([] if values is None else [values])}
    pairs = PairTables(rotation)

    def rotated(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        seq_dim = seq_dims.get(arguments.get("unsqueeze_dim", default_dim))
        tensors = [arguments.get(name) for name in first]
        if seq_dim is None or len(args) > len(names) or any(name not in known for name in arguments):
            return original(*args, **kwargs)
        if values is not None and arguments.get(values) is not None:
            tensors.append(arguments[values])
        prepared = _prepared(tensors, *_cos_sin(arguments, rotation), rotation, widths, seq_dim, pairs)
        if prepared is None:
            return original(*args, **kwargs)
        xs, cos, sin, layout = prepared
        other = xs[1] if rotation.both else None
        results = rotate(xs[0], other, cos, sin, layout, conjugate=rotation.conjugate)
        if len(xs) == 3:
            results = (*results, rotate(xs[2], None, cos, sin, layout, conjugate=rotation.conjugate)[0])
        if rotation.reorders:
            results = tuple(y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for y in results)
        return results if rotation.both else results[0]

    return rotated


def fused_norm_rotation(
    rotated: Callable[..., Any], rotation: Rotation, widths: frozenset[int] | None, norms: type, eps: str, norm: Norm
) -> Callable[..., Any]:
    """Return a function of both norms, q, k, cos and sin that normalizes and rotates q and k in one pass over memory.

    If a norm is of another class, has hooks, or has weights of another dtype, the function calls the norms and then
    `rotated`.

    Args:
        rotated: The result of `fused_rotation`.
        rotation: What it computes.
        widths: As in `fused_rotation`.
        norms: The class of the norms that were probed.
        eps: The name of their attribute with the epsilon.
        norm: What they compute.

    Returns:
        The fused function.

    >>> from ropewalk.hub.accelerate.rotation_probe import Rotation
    >>> rotation = Rotation("half", "single", False, False, False, None, ((None, -2),), True, False)
    >>> fused = fused_norm_rotation(lambda q, k, cos, sin: (q, k), rotation, None, torch.nn.RMSNorm, "eps", Norm(1e-9))
    >>> one, x = torch.nn.RMSNorm(2, eps=1e-9), torch.tensor([3.0, 4.0]).expand(1, 1, 1, 2)
    >>> q, k = fused(one, one, x, x, torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    >>> [round(value, 4) for value in q.flatten().tolist()]
    [-1.1314, 0.8485]
    """
    seq_dim = dict(rotation.seq_dims).get(1, dict(rotation.seq_dims).get(None))
    pairs = PairTables(rotation)

    def normed_and_rotated(q_norm: Any, k_norm: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        prepared = None if seq_dim is None else _prepared([q, k], cos, sin, rotation, widths, seq_dim, pairs)
        # If cos promotes q to a wider dtype, the norm has to round before the rotation.
        supported = (
            prepared is not None
            and prepared[0][0].dtype == q.dtype
            and _is_plain(q_norm, norms, q)
            and _is_plain(k_norm, norms, k)
        )
        if prepared is None or not supported or getattr(q_norm, eps) != getattr(k_norm, eps):
            return rotated(q_norm(q), k_norm(k), cos, sin)
        _, cos, sin, layout = prepared
        current_norm = norm._replace(eps=getattr(q_norm, eps))
        return norm_rotate(q, k, q_norm.weight, k_norm.weight, cos, sin, layout, current_norm)

    return normed_and_rotated


def _is_plain(module: Any, norms: type, x: Tensor) -> bool:
    """Return whether calling the module on x only runs the norm, with weights of the dtype and device of x."""
    weight: Any = getattr(module, "weight", None)
    return (
        type(module) is norms
        and "forward" not in module.__dict__
        and not has_hooks(module)
        and type(weight) in (Tensor, torch.nn.Parameter)
        and weight.dtype == x.dtype
        and weight.device == x.device
        and weight.shape == x.shape[-1:]
    )


class PairTables:
    """cos and sin as the kernels accept them: one number per pair, in the working dtype.

    The layers of a model receive the same cos and sin in a forward pass, so those of the last call are kept. Nothing is
    kept if autograd does not count writes to cos or sin (inference tensors), or if other code is to see the conversion:
    a compiler, autograd or a CUDA graph. Writes that torch does not count are not detected: through `.data`, through
    NumPy or another library that shares the memory, and by the replay of a CUDA graph. Models compute cos and sin anew
    in each forward pass.

    Args:
        rotation: What the model's function computes.

    >>> rotation = Rotation("half", "halves", False, False, False, None, ((None, -2),), True, False)
    >>> tables, cos, sin = PairTables(rotation), torch.ones(1, 3, 4).bfloat16(), torch.zeros(1, 3, 4).bfloat16()
    >>> first, again = tables(cos, sin, torch.float32), tables(cos, sin, torch.float32)
    >>> first[0].shape, first[0].dtype, again[0] is first[0]
    (torch.Size([1, 3, 2]), torch.float32, True)
    >>> _ = cos.mul_(2)
    >>> tables(cos, sin, torch.float32)[0][0, 0, 0].item()
    2.0
    """

    def __init__(self, rotation: Rotation) -> None:
        self._rotation = rotation
        self._last: tuple[Any, Any, tuple[Any, ...], tuple[Tensor, Tensor]] | None = None

    def __call__(self, cos: Tensor, sin: Tensor, working: torch.dtype) -> tuple[Tensor, Tensor]:
        """Convert cos and sin [batch, seq, width]."""
        key = _key_of(cos, sin, working)
        if key is None:
            return self._converted(cos, working), self._converted(sin, working)
        last = self._last
        if last is not None and last[0]() is cos and last[1]() is sin and last[2] == key:
            return last[3]
        tables = self._converted(cos, working).contiguous(), self._converted(sin, working).contiguous()
        self._last = weakref.ref(cos), weakref.ref(sin), key, tables
        return tables

    def _converted(self, table: Tensor, working: torch.dtype) -> Tensor:
        pairs = _pairs(table, self._rotation)
        return pairs if pairs.dtype == working else pairs.to(working)


def _key_of(cos: Tensor, sin: Tensor, working: torch.dtype) -> tuple[Any, ...] | None:
    """What a conversion depends on beside cos and sin; None if it must not be kept."""
    if torch.compiler.is_compiling() or not is_plain(cos, sin) or cos.is_inference() or sin.is_inference():
        return None
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return None
    stream = current_stream(cos.device)
    # Kept tensors of inference mode cannot be saved for a backward.
    if torch.is_inference_mode_enabled() or (cos.is_cuda and is_capturing(stream)):
        return None
    return version_of(cos), version_of(sin), working, stream


def _prepared(
    tensors: list[Any],
    cos: Any,
    sin: Any,
    rotation: Rotation,
    widths: frozenset[int] | None,
    seq_dim: int,
    pairs: PairTables,
) -> tuple[list[Tensor], Tensor, Tensor, Layout] | None:
    """Return the tensors, and cos and sin as the kernels accept them, or None if the shapes were not probed.

    This is on the critical path of decoding, so nothing is computed twice.
    """
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or not isinstance(tensors[0], Tensor):
        return None
    table, dtype = cos.shape, tensors[0].dtype
    if len(table) != 3 or sin.shape != table or dtype not in FLOATS:
        return None
    batch, rows, width = table
    if widths is not None and width not in widths:
        return None
    rotated_dim = 2 * width if rotation.table == "single" else width
    head_dim = tensors[0].shape[-1]
    if rotated_dim % 2 or (rotated_dim != head_dim and (rotation.part is None or rotated_dim > head_dim)):
        return None
    for x in tensors:
        if not isinstance(x, Tensor) or x.dtype != dtype:
            return None
        shape = x.shape
        if len(shape) != 4 or shape[seq_dim] != rows or shape[-1] != head_dim:
            return None
        if batch not in (1, shape[0]):
            return None
    if not rotation.keeps_dtype and cos.dtype != dtype:
        dtype = torch.promote_types(dtype, cos.dtype)
        tensors = [x.to(dtype) for x in tensors]
    working = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = pairs(cos, sin, working)
    start = head_dim - rotated_dim if rotation.part == "trailing" else 0
    return tensors, cos, sin, Layout(rotation.pairing == "interleaved", start, seq_dim)


def _cos_sin(arguments: dict[str, Any], rotation: Rotation) -> tuple[Any, Any]:
    """Return cos and sin [batch, seq, width], or None for both if their table has another shape."""
    if rotation.packing is None:
        return arguments.get("cos"), arguments.get("sin")
    table = arguments.get(PACKED)
    if not isinstance(table, Tensor) or table.dim() != 4 or table.shape[1] != 1 or table.shape[-1] % 2:
        return None, None
    one, two = table[:, 0].chunk(2, dim=-1)
    return (two, one) if rotation.packing == "sin, cos" else (one, two)


def _pairs(table: Tensor, rotation: Rotation) -> Tensor:
    """Return the table with one angle per pair."""
    if rotation.table == "single":
        return table
    return table[..., : table.shape[-1] // 2] if rotation.table == "halves" else table[..., ::2]
