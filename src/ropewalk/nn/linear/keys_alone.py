"""linear_state: the state of linear attention after keys and values, without queries."""

from typing import Never

from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.constructors import new_empty
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.linear.feature_maps import FeatureMap
from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.linear.state import LinearState
from ropewalk.nn.linear.weighting import bias_for_linear
from ropewalk.nn.position_checks import described
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.signatures import checks_names, refuse_arguments

__all__ = ["linear_state"]


@checks_names
def linear_state(
    k: Tensor,
    v: Tensor,
    *unnamed: Never,
    rope: RotaryEmbedding | Encoding | None = None,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_mask: Tensor | None = None,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    decay: Tensor | None = None,
    bias: Encoding | None = None,
    state: LinearState | None = None,
    length: int | Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> LinearState:
    """Return the state of causal linear attention after keys and values.

    It is the state that `linear_attention` returns for these keys and any queries. The states of two parts of a
    sequence are computed separately, and merged: `first.merge(second)`.

    Args:
        k: Keys [batch, kv_heads, keys, dim].
        v: Values [batch, kv_heads, keys, v_dim].
        rope: Rotates the features, as in `linear_attention`.
        positions: Positions of the keys [keys] or [batch, keys]. Defaults to 0 .. keys-1, or continues from the state.
            Required for a part of a sequence that does not start at its first token, if there is a rope or a bias.
        cu_seqlens: Cumulated lengths [sequences + 1] of sequences packed in a batch of 1. The state has one row per
            sequence.
        key_mask: bool [batch, keys]. False hides a key.
        feature_map: As in `linear_attention`. Only the map of the keys is applied.
        decay: As in `linear_attention`.
        bias: As in `linear_attention`.
        state: State after the previous tokens, or None.
        length: As in `linear_attention`.
        backend: Force a backend; None chooses one.

    Returns:
        A `LinearState`.

    Raises:
        RopewalkError: As `linear_attention`.

    >>> import torch
    >>> k, v = torch.zeros(1, 1, 3, 2), torch.tensor([[[[1.0], [3.0], [5.0]]]])
    >>> state = linear_state(k, v)  # features of 1: the sums of the values, and the number of keys
    >>> state.above.flatten().tolist(), state.below.flatten().tolist(), state.position
    ([9.0, 9.0], [3.0, 3.0], 3)
    >>> linear_state(k[:, :, :1], v[:, :, :1]).merge(linear_state(k[:, :, 1:], v[:, :, 1:])).above.flatten().tolist()
    [9.0, 9.0]
    """
    if unnamed or unknown:
        refuse_arguments("linear_state", linear_state, unnamed, unknown)
    if not isinstance(k, Tensor) or k.dim() != 4:
        raise RopewalkError(
            asked="linear_state(k)",
            expected="keys [batch, kv_heads, keys, dim]",
            got=described(k),
            do="split the heads, and put them before the sequence: x.unflatten(-1, (heads, -1)).transpose(1, 2)",
        )
    kv_heads = k.shape[1]
    # A decay or a bias can have one number per query head.
    heads = kv_heads
    if isinstance(decay, Tensor) and decay.dim() in (1, 3):
        heads = decay.shape[0 if decay.dim() == 1 else 1]
    distances = bias_for_linear(bias, "linear_state(bias=...)")
    if distances is not None:
        heads = max(len(table) for table in distances if table is not None)
    # Other numbers of heads do not match the keys, and are an error.
    heads = heads if kv_heads and heads % kv_heads == 0 else kv_heads
    none = new_empty(k, (k.shape[0], heads, 0, k.shape[-1]))
    _, after = linear_attention(
        none,
        k,
        v,
        rope=rope,
        k_positions=positions,
        cu_seqlens=cu_seqlens,
        key_mask=key_mask,
        feature_map=feature_map,
        decay=decay,
        bias=bias,
        state=state,
        return_state=True,
        length=length,
        backend=backend,
    )
    return after
