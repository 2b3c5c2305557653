"""Checks of the tensors of linear attention: queries, keys, values, and the ends of packed sequences."""

from torch import Tensor

from ropewalk.errors import RopewalkError, require_flag, shown
from ropewalk.kernels.precision import FLOATS
from ropewalk.nn.memory_layout import check_strided
from ropewalk.nn.position_checks import check_packed

__all__ = ["check_packed_tensors", "check_tensors"]


def check_tensors(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Raise unless q, k and v match each other.

    >>> import torch
    >>> check_tensors(*[torch.zeros(1, 2, 3, 4)] * 3, causal=True)
    """
    asked = "linear_attention"
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_strided(x, asked=f"{asked}({name})")
        if not (isinstance(x, Tensor) and x.dtype in FLOATS):
            raise RopewalkError(
                asked=f"{asked}({name})",
                expected="a tensor of float32, float64, bfloat16 or float16",
                got=f"{x.dtype}" if isinstance(x, Tensor) else shown(x),
                do=f"cast {name}, [batch, heads, seq, dim]" if isinstance(x, Tensor) else f"pass {name} as a tensor",
            )
    require_flag(causal, asked=f"{asked}(causal=...)")
    if not q.dim() == k.dim() == v.dim() == 4:
        raise RopewalkError(
            asked=f"{asked}(q, k, v)",
            expected="four dimensions: q [batch, heads, q_seq, dim], k and v [batch, kv_heads, k_seq, dim]",
            got=f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            do="transpose to [batch, heads, seq, dim] and check the number of heads",
        )
    _name_mismatch(q, k, v, causal, asked)
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise RopewalkError(
            asked=f"{asked}(q, k, v)",
            expected="one dtype, on one device",
            got=", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v)),
            do="cast or move them; sums are float32 for every dtype except float64",
        )


def _name_mismatch(q: Tensor, k: Tensor, v: Tensor, causal: bool, asked: str) -> None:
    """Raise an error that names the first dimension that does not match."""
    heads = "the layout is [batch, heads, seq, dim]; for [batch, seq, heads, dim] call transpose(1, 2)"
    mismatches = [
        (len({len(q), len(k), len(v)}) > 1, "one batch", [len(q), len(k), len(v)], "pass all with the same batch"),
        (q.shape[3] != k.shape[3], "the same width of q and k", [q.shape[3], k.shape[3]], "project to the same width"),
        (k.shape[2] != v.shape[2], "one value per key", [k.shape[2], v.shape[2]], "pass k and v of one length"),
        (k.shape[1] != v.shape[1], "the same number of heads of k and v", [k.shape[1], v.shape[1]], heads),
        (k.shape[1] == 0 or q.shape[1] % max(k.shape[1], 1) > 0, "a number of heads of q that is a "
         "multiple of kv_heads, the heads of k", [q.shape[1], k.shape[1]], heads),
        (causal and q.shape[2] > k.shape[2], "no more queries than keys if causal", [q.shape[2], k.shape[2]],
         "causal queries are the last tokens of the keys; for attention to other keys pass causal=False"),
    ]  # fmt: skip
    for wrong, expected, sizes, do in mismatches:
        if wrong:
            shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
            raise RopewalkError(
                asked=f"{asked}(q, k, v)", expected=expected, got=f"{' and '.join(map(str, sizes))}: {shapes}", do=do
            )


def check_packed_tensors(cu_seqlens: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise unless `cu_seqlens` are cumulated lengths of the sequences in q and k.

    >>> import torch
    >>> check_packed_tensors(torch.tensor([0, 3]), torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    """
    asked = "linear_attention(cu_seqlens=...)"
    check_packed(cu_seqlens, q.shape[0], k.shape[2], q.device, asked=asked, at_least=2)
    if q.shape[2] not in (0, k.shape[2]):
        raise RopewalkError(
            asked=asked,
            expected="as many queries as keys, or none",
            got=f"{q.shape[2]} queries and {k.shape[2]} keys",
            do="pass the queries of all packed tokens",
        )
