"""Softmax attention with any mask and bias, by `scaled_dot_product_attention` (SDPA) or FlexAttention.

SDPA accepts mask and bias as one tensor with a number per query and key. FlexAttention accepts both as functions and
stores no such tensor. It is used on CUDA devices.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from ropewalk.errors import RopewalkError
from ropewalk.kernels.constructors import full, new_empty, new_full, new_zeros
from ropewalk.kernels.precision import has_autocast, working_dtype
from ropewalk.kernels.torch_internals import is_transformed
from ropewalk.nn.attention.visibility import FLEX_BLOCK, Visibility, documents_of, window_blocks
from ropewalk.nn.encodings.base import Encoding, ScoreMod
from ropewalk.nn.position_checks import can_read_values

__all__ = ["ScoreBias", "attend", "attend_packed", "attend_with_lse", "part_weight"]

# Up to this many queries a mask is small, and FlexAttention is slower, because it builds a block mask first.
FEW_QUERIES = 16
# The kernels of FlexAttention use Triton, and support neither narrower heads nor float64.
FLEX_DEVICES = ("cuda",) if importlib.util.find_spec("triton") is not None else ()
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROWEST = 16
# Fewest queries per chunk of a window: smaller matrix products are slower.
SMALLEST_CHUNK = 256


class ScoreBias(NamedTuple):
    """An encoding that adds a bias to the scores, and the positions it is computed at.

    Attributes:
        encoding: The encoding.
        q_positions: Positions of queries [q] or [batch, q].
        k_positions: Positions of keys [k] or [batch, k].

    >>> ScoreBias(Encoding(), torch.arange(2), torch.arange(3)).k_positions.tolist()
    [0, 1, 2]
    """

    encoding: Encoding
    q_positions: Tensor
    k_positions: Tensor

    def part(self, queries: slice, keys: slice) -> "ScoreBias":
        """Return the bias of some queries and keys."""
        return self._replace(q_positions=self.q_positions[..., queries], k_positions=self.k_positions[..., keys])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    dropout: float = 0.0,
    score_bias: ScoreBias | None = None,
    flex: bool | None = None,
) -> Tensor:
    """Return softmax(q k^T scale + bias) v over the visible keys of each query; 0 if there are none.

    Args:
        q: Queries [batch, heads, queries, dim].
        k: Keys [batch, kv_heads, keys, dim]. heads is a multiple of kv_heads.
        v: Values [batch, kv_heads, keys, v_dim].
        visibility: Which keys are visible to each query.
        scale: Factor on the scores.
        dropout: Probability of dropping an attention weight.
        score_bias: The bias and its positions; None for no bias.
        flex: Force FlexAttention (True) or SDPA (False). None chooses.

    Returns:
        Tensor [batch, heads, queries, v_dim].

    Raises:
        RopewalkError: If the bias does not broadcast to the scores.

    >>> q = k = torch.zeros(1, 1, 2, 4)  # equal scores: the mean of the values that a query may see
    >>> hidden = torch.tensor([[False, True]])
    >>> v = torch.tensor([[[[1.0], [3.0]]]])
    >>> attend(q, k, v, Visibility(causal=True, key_mask=hidden), scale=1.0).flatten().tolist()
    [0.0, 3.0]
    """
    y, _ = _attend(q, k, v, visibility, score_bias, scale, dropout, flex, lse_dtype=None)
    return y


def attend_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    score_bias: ScoreBias | None = None,
    flex: bool | None = None,
    lse_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `attend`, and the logarithm of the sum of exp(scores) over the visible keys of each query.

    Outputs over disjoint sets of keys are merged by these logarithms: y = sum_i exp(lse_i - lse) y_i with
    lse = log sum_i exp(lse_i), with the weights of `part_weight`. Without FlexAttention, all scores are materialized.

    Args:
        q: As for `attend`.
        k: As for `attend`.
        v: As for `attend`.
        visibility: Which keys are visible to each query.
        scale: Factor on the scores.
        score_bias: The bias and its positions; None for no bias.
        flex: Force FlexAttention (True) or plain torch (False). None chooses.
        lse_dtype: Dtype of the logarithms without FlexAttention; None for that of the scores. In float32 a logarithm of
            10 is rounded by 5e-7, and so are the weights of the parts that are merged.

    Returns:
        Tensor [batch, heads, queries, v_dim], and float32 or float64 [batch, heads, queries]. A query without a visible
        key has 0 and -inf, and no gradient.

    Raises:
        RopewalkError: If the bias does not broadcast to the scores.

    >>> q = k = torch.zeros(1, 1, 2, 4)  # scores of 0: the logarithm of the number of visible keys
    >>> attend_with_lse(q, k, k, Visibility(causal=True), scale=1.0)[1].exp().flatten().tolist()
    [1.0, 2.0]
    """
    y, lse = _attend(q, k, v, visibility, score_bias, scale, 0.0, flex, lse_dtype or working_dtype(q))
    return y, cast(Tensor, lse)


def part_weight(part: Tensor, total: Tensor) -> Tensor:
    """Return exp(part - total), the weight of an output over a part of the keys among all keys.

    Args:
        part: Log-sum-exp of the scores of a part [...].
        total: Log-sum-exp of all scores.

    Returns:
        Tensor [..., 1]; 0 if the part has no visible key.

    >>> part_weight(torch.tensor([float("-inf"), 0.0]), torch.tensor([0.0, 0.0])).tolist()
    [[0.0], [1.0]]
    """
    return torch.where(part == float("-inf"), 0.0, torch.exp(part - total)).unsqueeze(-1)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    cu_seqlens: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    score_bias: ScoreBias | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attend` for packed sequences: each only sees itself. Tokens past the last one see no key.

    If the host can read `cu_seqlens`, each sequence is computed alone: this is less work than a mask, and NaN cannot
    reach other sequences.

    Args:
        q: Queries [1, heads, tokens, dim].
        k: Keys [1, kv_heads, tokens, dim].
        v: Values [1, kv_heads, tokens, v_dim].
        visibility: Which keys are visible within a sequence.
        cu_seqlens: Cumulated lengths [sequences + 1].
        scale: Factor on the scores.
        dropout: Probability of dropping an attention weight; 0 with `with_lse`.
        score_bias: The bias and its positions; None for no bias.
        with_lse: Also compute the log-sum-exp.

    Returns:
        Tensor [1, heads, tokens, v_dim], and the log-sum-exp [1, heads, tokens], empty without `with_lse`.

    Raises:
        RopewalkError: If the bias does not broadcast to the scores.

    >>> q, v = torch.zeros(1, 1, 3, 4), torch.tensor([[[[1.0], [3.0], [5.0]]]])
    >>> attend_packed(q, q, v, Visibility(causal=True), torch.tensor([0, 2, 3]), scale=1.0)[0].flatten().tolist()
    [1.0, 2.0, 5.0]
    """
    lse_dtype = working_dtype(q) if with_lse else None
    if not can_read_values(cu_seqlens):
        visibility = visibility._replace(documents=documents_of(cu_seqlens, q.shape[2]))
        y, lse = _attend(q, k, v, visibility, score_bias, scale, dropout, None, lse_dtype)
        return y, new_empty(y, 0) if lse is None else lse
    ends, outputs, sums = cu_seqlens.tolist(), [], []
    for start, end in itertools.pairwise(ends):
        part = slice(start, end)
        visible = visibility.of_keys(part)
        bias = None if score_bias is None else score_bias.part(part, part)
        y, lse = _attend(q[:, :, part], k[:, :, part], v[:, :, part], visible, bias, scale, dropout, None, lse_dtype)
        outputs.append(y)
        sums.append(lse)
    padding = q[:, :, ends[-1] :]
    outputs.append(new_zeros(v, (*padding.shape[:3], v.shape[3])))
    y = torch.cat(outputs, dim=2)
    if lse_dtype is None:
        return y, new_empty(y, 0)
    none_visible = new_full(padding, padding.shape[:3], float("-inf"), dtype=lse_dtype)
    return y, torch.cat([*sums, none_visible], dim=2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    score_bias: ScoreBias | None,
    scale: float,
    dropout: float,
    flex: bool | None,
    lse_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the log-sum-exp if it has a dtype."""
    with_lse = lse_dtype is not None
    unmasked = visibility.hides_nothing() or (
        visibility.causal and visibility.only_causal() and q.shape[2] == k.shape[2]
    )
    if flex is None:
        flex = _supports_flex(q, k) and dropout == 0 and (with_lse or not (score_bias is None and unmasked))
    if flex:
        score_mod = None if score_bias is None else score_bias.encoding.score_mod_once(*score_bias[1:])
        if score_bias is None or score_mod is not None:
            result = _by_flex(q, k, v, visibility, score_mod, score_bias, scale, with_lse)
            return result if with_lse else (result, None)
    window, start = visibility.window, visibility.starts or 0 if not isinstance(visibility.starts, Tensor) else None
    if window is not None and start is not None and _is_long(visibility, start, window, q.shape[2], k.shape[2]):
        return _in_chunks(q, k, v, visibility, score_bias, scale, dropout, start, window, lse_dtype)
    bias = None if score_bias is None else score_bias.encoding.bias(score_bias.q_positions, score_bias.k_positions)
    bias = None if bias is None else _fitting(bias, q, k)
    if lse_dtype is not None:
        return _with_lse(q, k, v, visibility, bias, scale, lse_dtype)
    if bias is None and unmasked:
        return _sdpa(q, k, v, None, visibility.causal, scale, dropout), None
    mask, no_keys = _mask(visibility, q, k)
    # NaN in a query whose result is dropped would reach the gradients of keys.
    q = q if no_keys is None else q.masked_fill(no_keys, 0)
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    y = _sdpa(q, k, v, mask, False, scale, dropout)
    return y if no_keys is None else y.masked_fill(no_keys, 0), None


def _with_lse(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, bias: Tensor | None, scale: float, lse_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """SDPA does not return the log-sum-exp: all scores are computed here, in float32 or float64."""
    working, device = working_dtype(q), q.device.type
    autocast = has_autocast(device) and torch.is_autocast_enabled(device)
    result_dtype = torch.get_autocast_dtype(device) if autocast and v.dtype != torch.float64 else v.dtype
    mask, no_keys = _mask(visibility, q, k)
    q = q if no_keys is None else q.masked_fill(no_keys, 0)
    keys, values = k.to(working), v.to(working)
    # The query heads that share a key head are queries of one head: no copy of the keys per query head.
    (batch, kv_heads), rows = k.shape[:2], q.shape[1] // k.shape[1] * q.shape[2]
    # Autocast would compute the products, and the logarithm with them, in a lower precision.
    with torch.autocast("cpu" if not autocast else device, enabled=False):
        grouped = q.to(working).reshape(batch, kv_heads, rows, q.shape[3])
        scores = (grouped @ keys.transpose(-2, -1)).reshape(*q.shape[:3], k.shape[2]) * scale
        scores = scores if bias is None else scores + bias.to(working)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        # Not exp(scores - lse): the rounding of the logarithm would be that of all weights.
        weights = torch.softmax(scores, dim=-1).reshape(batch, kv_heads, rows, k.shape[2])
        lse = _log_sum_exp(scores, lse_dtype)
        y = (weights @ values).reshape(*q.shape[:3], v.shape[3]).to(result_dtype)
    if no_keys is not None:
        y, lse = y.masked_fill(no_keys, 0), lse.masked_fill(no_keys, float("-inf"))
    return y, lse.squeeze(-1)


def _log_sum_exp(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logarithm [..., 1] of the sum of exp(scores) over the last dimension, rounded to a dtype once."""
    if scores.dtype == dtype or not scores.shape[-1]:
        return torch.logsumexp(scores, dim=-1, keepdim=True).to(dtype)
    # The result does not depend on what is subtracted, so that it has no gradient.
    most = scores.detach().amax(dim=-1, keepdim=True)
    most = most.masked_fill(most.isinf(), 0.0)
    return most.to(dtype) + (scores - most).exp().sum(dim=-1, keepdim=True).to(dtype).log()


def _is_long(visibility: Visibility, start: int, window: int, queries: int, keys: int) -> bool:
    """Whether a window is computed in chunks."""
    if torch.compiler.is_compiling() or visibility.documents is not None or visibility.key_indices is not None:
        return False
    return queries >= 2 * max(window, SMALLEST_CHUNK) and start + queries <= keys


def _in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    score_bias: ScoreBias | None,
    scale: float,
    dropout: float,
    start: int,
    window: int,
    lse_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute a part of the queries at a time, with the keys in their windows: no mask [queries, keys] is created."""
    size, results = max(window, SMALLEST_CHUNK), []
    for begin in range(0, q.shape[2], size):
        end = min(begin + size, q.shape[2])
        first = max(0, start + begin - window + 1)
        last = min(k.shape[2], start + end + (0 if visibility.causal else window - 1))
        rows, columns = slice(begin, end), slice(first, last)
        visible = visibility.of_keys(columns)._replace(starts=start + begin - first)
        bias = None if score_bias is None else score_bias.part(rows, columns)
        heads = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        results.append(_attend(*heads, visible, bias, scale, dropout, False, lse_dtype))
    y = torch.cat([result[0] for result in results], dim=2)
    return y, torch.cat([lse for _, lse in results if lse is not None], dim=2) if lse_dtype is not None else None


def _mask(visibility: Visibility, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask [batch or 1, 1, queries, keys], None if it hides nothing, and the queries without a visible key.

    Softmax over no keys is NaN, and so are its gradients: such queries see all keys here, and their result is dropped.
    """
    if visibility.hides_nothing():
        return None, None
    mask = visibility.mask(q.shape[0], q.shape[2], k.shape[2], q.device).unsqueeze(1)
    if not visibility.can_hide_all():
        return mask, None
    no_keys = ~mask.any(-1, keepdim=True)
    return mask | no_keys, no_keys


def _fitting(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the bias with four dimensions and in a dtype that SDPA accepts with q."""
    scores = (*q.shape[:3], k.shape[2])
    if bias.dim() not in (3, 4) or any(n not in (1, m) for n, m in zip(bias.shape[::-1], scores[::-1], strict=False)):
        raise RopewalkError(
            asked="attention with the bias of an encoding",
            expected=f"a bias that broadcasts to [batch, heads, queries, keys] = {list(scores)}",
            got=f"{list(bias.shape)}",
            do="create the encoding with the num_heads of the layer",
        )
    # On the CPU scores are computed in float32, and SDPA accepts a float32 bias. Elsewhere the dtypes must be equal.
    keep_float32 = q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    bias = bias.to(torch.float32 if keep_float32 else q.dtype)
    return bias if bias.dim() == 4 else bias.unsqueeze(0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    kv_heads, grouped = k.shape[1], False
    group = heads // kv_heads
    if group > 1 and queries == 1:
        # The query heads that share a key head become queries of one head. No kernel then repeats the keys.
        q = q.reshape(batch, kv_heads, group, q.shape[-1])
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], kv_heads, group, mask.shape[-1])
    elif group > 1:
        grouped = _has_grouped_kernel(q, mask)
        if not grouped:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    y = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return y.reshape(batch, heads, queries, v.shape[-1])


def _has_grouped_kernel(q: Tensor, mask: Tensor | None) -> bool:
    """Whether SDPA has a fused kernel for grouped heads. Without one it would materialize the scores."""
    if q.device.type == "cpu":
        return True
    return q.device.type == "cuda" and mask is None and q.dtype in (torch.bfloat16, torch.float16)


def _supports_flex(q: Tensor, k: Tensor) -> bool:
    supported = q.device.type in FLEX_DEVICES and q.dtype in FLEX_DTYPES and q.shape[-1] >= NARROWEST
    if not supported or q.shape[2] <= FEW_QUERIES or q.shape[0] == 0 or k.shape[2] == 0:
        return False
    return torch.compiler.is_compiling() or not is_transformed()


def _by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    score_mod: ScoreMod | None,
    score_bias: ScoreBias | None,
    scale: float,
    return_lse: bool = False,
) -> Any:
    create_block_mask, flex_attention = _flex_functions(q.is_cuda and not torch.compiler.is_compiling())
    blocks = None
    if isinstance(visibility.starts, int) and not torch.compiler.is_compiling():
        # A tensor: the functions are compiled again for every other int.
        visibility = visibility._replace(starts=full((), visibility.starts, dtype=torch.int64, device=q.device))
    if not visibility.hides_nothing():
        rows = visibility.rows(q.shape[0])

        def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return visibility.visible(b, i, j)

        in_order = visibility.starts is None and visibility.key_indices is None and q.shape[2] == k.shape[2]
        if visibility.window is not None and in_order:
            gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            blocks = window_blocks(visibility, q.shape[2], is_visible, q.device, gradients=gradients)
        else:
            shape = (None if rows == 1 else rows), None, q.shape[2], k.shape[2]
            blocks = create_block_mask(is_visible, *shape, device=q.device)
    return flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_lse=return_lse,
        kernel_options=_flex_options(q, k, score_bias),
    )


def _flex_options(q: Tensor, k: Tensor, score_bias: ScoreBias | None) -> dict[str, object] | None:
    options = None if score_bias is None else score_bias.encoding.flex_options
    # For fewer than 128 queries FlexAttention chooses a kernel for decoding, in which a block contains the queries of
    # all heads that share a key head. If they do not fit in a block, it has no kernel at all.
    if q.shape[2] < FLEX_BLOCK < q.shape[2] * (q.shape[1] // k.shape[1]):
        options = {"BACKEND": "TRITON"} | (options or {})
    return options


def _flex_functions(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return create_block_mask and flex_attention. Not compiled inside torch.compile, and in tests on the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return _compiled_flex() if compiled else (create_block_mask, flex_attention)


@functools.cache
def _compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    # Without compilation they would materialize the mask and the scores.
    create_block_mask, flex_attention = _flex_functions(compiled=False)
    return torch.compile(create_block_mask), torch.compile(flex_attention)
