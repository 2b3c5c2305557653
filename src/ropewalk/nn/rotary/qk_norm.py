"""qk_norm_rope: RMSNorm of queries and keys and their rotation, in one call."""

import functools
import math

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_flag, require_positive, shown
from ropewalk.kernels.types import Norm
from ropewalk.nn.rotary.call import Angles, Placement
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops import norm_rotate
from ropewalk.ops.dtensors import is_dtensor
from ropewalk.signatures import checks_names

__all__ = ["qk_norm_rope"]


@checks_names
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    rope: RotaryEmbedding,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    round_norm: bool = False,
    positions: Tensor | None = None,
    offset: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    angles: Angles | None = None,
    length: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise q and k per head and rotate them, in one pass over memory: rope(norm(q), norm(k)).

    norm(x) = x / sqrt(mean(x^2) + eps) * weight, over the features of each head, as in Qwen 3, Gemma 3 and others.
    Everything is computed in float32 and rounded once. Differentiable in q, k and both weights. Squares are summed in
    float32, as torch does: features above 1e19 overflow, and their result is 0.

    Args:
        q: Queries, of a shape that `rope` accepts: [..., seq, head_dim], or [..., seq, heads, head_dim] for seq_dim=-3.
        k: Keys, with as many tokens as q. The number of heads can differ.
        rope: The rotation. A spec with xPos or a query temperature, which treats queries and keys differently, raises.
        q_weight: Weight of the norm of q [head_dim]; None for no weight.
        k_weight: Weight of the norm of k [head_dim]; None for no weight.
        eps: Epsilon of both norms.
        plus_one: Multiply by 1 + weight, as in Gemma. Both weights are then required.
        round_norm: Round the norm to the dtype of q before the rotation, as transformers does, to reproduce its logits.
        positions, offset, cu_seqlens, angles, length: As in `RotaryEmbedding.forward`.

    Returns:
        q and k, normalised and rotated, in their dtype.

    Raises:
        RopewalkError: If an argument is invalid, a weight does not match, or the spec treats queries and keys
            differently.

    >>> q = torch.tensor([[[3.0, 4.0], [3.0, 4.0]]])  # two tokens; sqrt(mean of squares) is 3.5355
    >>> rope = RotaryEmbedding(2)
    >>> q, k = qk_norm_rope(q, q, rope, q_weight=torch.ones(2), k_weight=torch.tensor([2.0, 2.0]))
    >>> [round(x, 4) for x in q[0, 0].tolist()], [round(x, 4) for x in k[0, 0].tolist()]
    ([0.8485, 1.1314], [1.6971, 2.2627])
    """
    if not isinstance(rope, RotaryEmbedding):
        raise RopewalkError(
            asked="qk_norm_rope(q, k, rope, ...)",
            expected="a RotaryEmbedding as the third argument",
            got=shown(rope),
            do="create one: rope = RotaryEmbedding(head_dim, pairing=...)",
        )
    compiling = torch.compiler.is_compiling()
    if not compiling and positions is cu_seqlens is length is None:
        # The common calls are checked and run in one step: decoding is limited by host time.
        shortcut = rope.norm_shortcut
        usual = type(eps) is float and 0 < eps < math.inf and type(plus_one) is type(round_norm) is bool
        if shortcut is not None and usual:
            norm = Norm.as_transformers(eps, plus_one) if round_norm else Norm(eps, plus_one)
            rotated = shortcut(q, k, q_weight, k_weight, norm, offset=offset, angles=angles)
            if rotated is not None:
                return rotated  # pyright: ignore[reportReturnType]
    if not compiling:
        # Under torch.compile eps can be a symbol, for which the check for a finite number cannot be traced.
        eps = require_positive(eps, asked="qk_norm_rope(eps=...)", do="pass the eps of the model, 1e-6 in most")
    require_flag(plus_one, asked="qk_norm_rope(plus_one=...)")
    require_flag(round_norm, asked="qk_norm_rope(round_norm=...)")
    if not isinstance(k, Tensor):
        raise RopewalkError(
            asked="qk_norm_rope(q, k, ...)",
            expected="keys as the second argument: a floating-point tensor",
            got=shown(k),
            do="for a single tensor call rope(norm(x))",
        )
    if not rope.spec.same_for_both:
        raise RopewalkError(
            asked="qk_norm_rope(..., rope)",
            expected="a spec that treats queries and keys alike",
            got=f"{rope}",
            do="normalise first and call rope(q, k)",
        )
    placement = Placement(positions, None, offset, cu_seqlens, angles, length, call="qk_norm_rope")
    if is_dtensor(q) or is_dtensor(k):
        part = rope.local_call(q, k, placement)
        # Anything else is refused by the call with local tensors.
        weights = {
            name: part.cut.local(x, ("weight",)) if isinstance(x, Tensor) and x.dim() == 1 else x
            for name, x in (("q_weight", q_weight), ("k_weight", k_weight))
        }
        run = functools.partial(qk_norm_rope, rope=rope, eps=eps, plus_one=plus_one, round_norm=round_norm)
        return part(run, [rope], **weights)
    cos, sin, row = rope.shared_tables(q, k, placement)
    for name, weight, x in (("q_weight", q_weight, q), ("k_weight", k_weight, k)):
        _check_weight(name, weight, x, plus_one)
    norm = Norm.as_transformers(eps, plus_one) if round_norm else Norm(eps, plus_one)
    tables = cos, sin, rope.layout, norm
    owned = angles is None
    return norm_rotate(q, k, q_weight, k_weight, *tables, row=row, owned=owned, backend=rope.backend)


def _check_weight(name: str, weight: Tensor | None, x: Tensor, plus_one: bool) -> None:
    if weight is None and not plus_one:
        return
    dim = x.shape[-1]
    fits = isinstance(weight, Tensor) and weight.is_floating_point() and weight.shape == (dim,)
    if fits and isinstance(weight, Tensor) and weight.device == x.device:
        return
    got = f"{weight.dtype} {list(weight.shape)} on {weight.device}" if isinstance(weight, Tensor) else shown(weight)
    if hasattr(weight, "weight"):
        do = f"pass the weight of the norm: {name}=norm.weight"
    elif isinstance(weight, Tensor) and weight.shape != (dim,):
        do = "the norm is per head; for a norm over all heads, as in OLMo 2, normalise first and call rope(q, k)"
    else:
        do = "pass a floating-point tensor, on the device of q"
    raise RopewalkError(
        asked=f"qk_norm_rope({name}=...)" + (" with plus_one" if plus_one else ""),
        expected=f"a floating-point tensor [{dim}] on {x.device}" + ("" if plus_one else ", or None"),
        got=got,
        do=do,
    )
