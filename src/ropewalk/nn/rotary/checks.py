"""What callers of RotaryEmbedding may give, checked before any work is done."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_int, require_choice, shown
from ropewalk.ops import is_plain
from ropewalk.spec.rope import RopeSpec

# What can count: bfloat16 has no 257, float16 no 2049.
_COUNTING = {torch.float32, torch.float64, torch.uint8, torch.int8}
_COUNTING |= {torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}


_TURNING = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


def check_inputs(q: Tensor, k: Tensor | None, head_dim: int, seq_dim: int, heads: int | None) -> None:
    """Refuses q and k that this rotation cannot turn. In one look where they are fine: decoding waits for this."""
    if not _fits(q, head_dim, seq_dim, heads):
        _refuse("q", q, head_dim, seq_dim, heads)
    if k is None:
        return
    if not (isinstance(k, Tensor) and k.is_floating_point()):
        raise RopewalkError(
            asked="rope(q, k)",
            expected="keys, a floating-point tensor, as the second argument",
            got=f"{k.dtype} of shape {list(k.shape)}" if isinstance(k, Tensor) else shown(k),
            do="pass position ids by name, rope(q, positions=ids), and a start as rope(q, offset=n)"
            if isinstance(k, Tensor | int)
            else "pass a torch.Tensor of float32, float64, bfloat16 or float16",
        )
    if not _fits(k, head_dim, seq_dim, heads):
        _refuse("k", k, head_dim, seq_dim, heads)
    if q.dtype != k.dtype or q.device != k.device:
        raise RopewalkError(
            asked="rope(q, k)",
            expected="q and k of one dtype, on one device",
            got=f"{q.dtype} on {q.device}, {k.dtype} on {k.device}",
            do="cast or move one of them, or rotate them in two calls",
        )


def _fits(x: Tensor, head_dim: int, seq_dim: int, heads: int | None) -> bool:
    if not isinstance(x, Tensor):
        return False
    shape = x.shape
    fits = x.dtype in _TURNING and len(shape) >= -seq_dim and shape[-1] == head_dim
    if heads is None or not fits:
        return fits
    return len(shape) in (3, 4) and shape[-3 if seq_dim == -2 else -2] == heads


def _refuse(name: str, x: Tensor, head_dim: int, seq_dim: int, heads: int | None) -> NoReturn:
    if _fits(x, head_dim, seq_dim, None):
        raise RopewalkError(
            asked=f"rope({name}) with frequencies of its own for each of {heads} heads",
            expected=f"{heads} heads in a tensor of 3 or 4 dimensions, keys like queries",
            got=f"shape {list(x.shape)} with seq_dim={seq_dim}",
            do="per-head frequencies cannot serve grouped keys: repeat the key heads first",
        )
    shape = "[..., seq, head_dim]" if seq_dim == -2 else "[..., seq, heads, head_dim]"
    raise RopewalkError(
        asked=f"rope({name}) with head_dim={head_dim}, seq_dim={seq_dim}",
        expected=f"a floating-point tensor {shape} whose last dimension is {head_dim}",
        got=f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else shown(x),
        do="split the heads first, or make the module with the head_dim and the seq_dim of the tensor"
        if isinstance(x, Tensor) and x.dtype in _TURNING
        else "pass a torch.Tensor of float32, float64, bfloat16 or float16",
    )


def require_one(given: dict[str, Any], k_positions: Tensor | None, k: Tensor | None) -> None:
    """Refuses two answers to the question where q stands, and keys' positions without keys."""
    named = [name for name, value in given.items() if value is not None]
    if len(named) <= 1 and (k_positions is None or (k is not None and named in ([], ["positions"]))):
        return
    named += [] if k_positions is None else ["k_positions"]
    raise RopewalkError(
        asked="rope(q, ...)" if k is None else "rope(q, k, ...)",
        expected="one of positions, offset, cu_seqlens and angles; k_positions with k, beside positions or alone",
        got=", ".join(named),
        do="add an offset to the positions yourself; give at() the positions of its angles",
    )


def check_ids(
    ids: Any,
    *,
    name: str,
    shape: str | None = None,
    dims: tuple[int, ...] = (1, 2),
    whole: bool = False,
    axes: int = 1,
) -> None:
    """Refuses what is no tensor of numbers that can count: complex, bool, half precision, or the wrong rank.

    Messages are put together only for an error: to print a length, a compiler would have to fix it.
    """
    if axes > 1:
        dims, shape = (2, 3), f"[{axes}, seq] or [{axes}, batch, seq]"
    counts = isinstance(ids, Tensor) and ids.dtype in _COUNTING
    if counts and ids.dim() in dims and not (whole and ids.is_floating_point()) and (axes == 1 or len(ids) == axes):
        return
    raise RopewalkError(
        asked=f"rope(...) with {name}",
        expected=f"a tensor {shape or '[seq] or [batch, seq]'} of whole numbers"
        + ("" if whole else ", float32 or float64"),
        got=f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else shown(ids),
        do="wrap them: torch.tensor(...)"
        if not isinstance(ids, Tensor)
        else "give them that shape; ropewalk.nn.positions makes them for several axes"
        if counts
        else "pass int64; half-precision floats cannot count past 256 or 2048",
    )


def check_ends(cu_seqlens: Tensor, seq: int) -> None:
    """Refuses ends of sequences that are none: lengths that were not cumulated, or more tokens than there are."""
    ends = cu_seqlens.tolist()
    if ends[:1] != [0] or ends != sorted(ends) or ends[-1] > seq:
        raise RopewalkError(
            asked=f"rope(cu_seqlens=...) for {seq} tokens",
            expected=f"ends of sequences that start at 0, never fall, and reach at most {seq}",
            got=f"{ends if len(ends) <= 12 else [*ends[:11], '...']}",
            do="cumulate the lengths and put a 0 before them; lay all sequences of a batch end to end",
        )


def check_finite(positions: Tensor, name: str) -> None:
    """Refuses NaN and infinity."""
    if positions.is_floating_point() and not torch.isfinite(positions).all():
        raise RopewalkError(
            asked=f"rope({name}=...)", expected="finite positions", got="NaN or infinity", do="look at what made them"
        )


def check_positions(positions: Any, x: Tensor, seq_dim: int, batched: bool, name: str, axes: int = 1) -> None:
    """Refuses positions that are not one number for each token of x and axis, or lie on another device."""
    check_ids(positions, name=name, axes=axes)
    leading = positions.shape[:-1] if axes == 1 else positions.shape[1:-1]
    rows = len(leading) == 0 or (batched and leading[0] in (1, x.shape[0]))
    if positions.shape[-1] != x.shape[seq_dim] or not rows:
        seq, first = x.shape[seq_dim], "" if axes == 1 else f"{axes}, "
        raise RopewalkError(
            asked=f"rope({name}=...) for a tensor of shape {list(x.shape)}",
            expected=f"positions [{first}{seq}]" + (f" or [{first}{x.shape[0]}, {seq}]" if batched else ""),
            got=f"{list(positions.shape)}",
            do="give each token its position; the batch is the first dimension of x",
        )
    if positions.device != x.device:
        raise RopewalkError(
            asked=f"rope({name}=...)",
            expected=f"positions on {x.device}, where x is",
            got=f"positions on {positions.device}",
            do=f"make them there, or move them once: positions.to({str(x.device)!r})",
        )


def check_within(last: int, context_length: int | None) -> None:
    """Refuses a position past the context length, where the host knows it."""
    if context_length is not None and last >= context_length:
        raise RopewalkError(
            asked=f"rope(...) with context_length={context_length}",
            expected=f"positions below {context_length}",
            got=f"position {last}",
            do="shorten the input, or raise context_length if the model is meant to go there",
        )


def checked_length(length: Any, spec: RopeSpec, rows: int | None, fresh: int | None, name: str = "length") -> Any:
    """How long sequences are, if the spec asks for it: an int, or whole numbers [rows], one a sequence.

    `fresh` is the number of tokens where they are a whole sequence, from position 0 on; nobody has to say it then.
    """
    if length is None:
        if not spec.varies or fresh is not None:
            return fresh if spec.varies else None
        raise RopewalkError(
            asked=f"rope(...) with {type(spec.frequencies).__name__}, whose frequencies depend on the length",
            expected=f"{name}=, an int or one a sequence [batch], unless tokens are one sequence from position 0 on",
            got=f"no {name}",
            do="pass the length that the keys in the cache were rotated for; rope.retune moves them to another",
        )
    if isinstance(length, Tensor):
        whole = not length.is_floating_point() and not length.is_complex() and length.dtype != torch.bool
        if whole and (length.dim() == 0 or (length.dim() == 1 and rows is not None and len(length) in (1, rows))):
            return length if spec.varies else None
        got = f"{length.dtype} {list(length.shape)}"
    elif isinstance(length, torch.SymInt):
        return length if spec.varies else None
    else:
        number = as_int(length)
        if number is not None and 1 <= number < 1 << 62:
            return number if spec.varies else None
        got = shown(length)
    raise RopewalkError(
        asked=f"rope(..., {name}=...)",
        expected="an int of at least 1" + ("" if rows is None else f", or whole numbers [{rows}], one a sequence"),
        got=got,
        do="pass how many positions the sequence has",
    )


def checked_role(role: Any, spec: RopeSpec) -> str | None:
    """Whether a tensor holds queries ("q") or keys ("k"); None where the spec treats them alike."""
    if role is not None:
        require_choice(role, ("q", "k"), asked="rope(..., role=...)")
    if spec.same_for_both:
        return None
    if role is None:
        raise RopewalkError(
            asked="rope(x) with a spec that treats queries and keys differently (xpos or query_temperature)",
            expected='role="q" for queries or role="k" for keys, or both tensors: rope(q, k)',
            got="one tensor without a role",
            do='say what it holds: rope(k, role="k")',
        )
    return role


def check_angles(angles: object, x: Tensor, pairs: int, seq_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin as `rope.at` gives them, if they belong to x."""
    seq = x.shape[seq_dim]
    if isinstance(angles, tuple) and len(angles) == 2 and all(isinstance(table, Tensor) for table in angles):
        cos, sin = angles
        wanted = torch.float64 if x.dtype == torch.float64 else torch.float32
        fits = cos.shape == sin.shape and cos.dtype == sin.dtype == wanted and cos.device == sin.device == x.device
        fits = fits and cos.dim() in (2, 3, 4) and tuple(cos.shape[-2:]) == (seq, pairs)
        if fits and cos.dim() == 3:
            fits = x.dim() > -seq_dim and cos.shape[0] in (1, x.shape[0])
        if fits and cos.dim() == 4:
            heads = x.shape[-3 if seq_dim == -2 else -2] if x.dim() >= 3 else 0
            fits = x.dim() in (3, 4) and cos.shape[1] in (1, heads)
            fits = fits and (cos.shape[0] == 1 or (x.dim() == 4 and cos.shape[0] == x.shape[0]))
        if fits:
            return cos, sin
        got = f"cos {cos.dtype} {list(cos.shape)} on {cos.device}, sin {sin.dtype} {list(sin.shape)} on {sin.device}"
    else:
        got = repr(type(angles))
    raise RopewalkError(
        asked=f"rope(..., angles=...) for {x.dtype} of shape {list(x.shape)} on {x.device}",
        expected=f"what rope.at(positions) gives: cos and sin [.., {seq}, {pairs}] in float32 (float64 for float64)",
        got=got,
        do="call rope.at(positions), with dtype=torch.float64 for float64, on the device of the input",
    )


def check_in_place(q: Tensor, k: Tensor | None) -> None:
    """Refuses memory that an in-place rotation would write twice or may not write, before it writes any."""
    if not is_plain(q, k):
        return
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        base = x if x._base is None else x._base
        held = torch.is_grad_enabled() and base.is_leaf and base.requires_grad
        if held or (x.is_inference() and not torch.is_inference_mode_enabled()):
            raise RopewalkError(
                asked=f"rope.rotate_({name})",
                expected="a tensor that may be written: no leaf of autograd, no view of one, no inference tensor",
                got="a leaf that requires a gradient, or a view of one" if held else "an inference tensor",
                do="use rope(...), which leaves it as it is",
            )
        if x.numel() and _overlaps_itself(x):
            raise RopewalkError(
                asked=f"rope.rotate_({name})",
                expected="memory of its own for every element",
                got=f"shape {list(x.shape)} with strides {list(x.stride())}",
                do="use rope(...), or clone an expanded tensor first",
            )
    if k is not None and q.numel() and k.numel() and _share_elements(q, k):
        raise RopewalkError(
            asked="rope.rotate_(q, k)",
            expected="q and k in memory of their own",
            got="elements that belong to both",
            do="rotate what they share once, or clone one of them",
        )


def _overlaps_itself(x: Tensor) -> bool:
    """Whether two indices of x may lead to one address. Sorted by stride, each dimension must step over the last."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _share_elements(q: Tensor, k: Tensor) -> bool:
    """Whether q and k have an element in common. Slices of packed projections do not, though their extents overlap."""
    # By address: two storages may be one piece of memory that came from outside.
    gap, off = divmod(k.data_ptr() - q.data_ptr(), q.element_size())
    q_reach, k_reach = (sum(step * (n - 1) for step, n in zip(x.stride(), x.shape, strict=True)) for x in (q, k))
    if gap > q_reach or -gap > k_reach + bool(off):
        return False
    if off or q.stride() != k.stride():
        return True
    # They meet where sum(i * stride) - sum(j * stride) = gap for some indices i of q and j of k.
    dims = sorted(zip(q.stride(), q.shape, k.shape, strict=True), reverse=True)
    return _steps_make(int(gap), dims)


def _steps_make(gap: int, dims: list[tuple[int, int, int]]) -> bool:
    if not dims:
        return gap == 0
    (stride, q_size, k_size), rest = dims[0], dims[1:]
    # Smaller strides together reach less than one larger step, so only the two nearest numbers of steps can do.
    return any(
        -(k_size - 1) <= steps <= q_size - 1 and _steps_make(gap - steps * stride, rest)
        for steps in {gap // stride, gap // stride + 1}
    )
