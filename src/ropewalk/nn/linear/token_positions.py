"""The positions of the tokens of a call of linear attention: passed by the caller, or continued from a state."""

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.constructors import arange, new_full
from ropewalk.nn.linear.state import LinearState
from ropewalk.nn.position_checks import as_signed, can_read_values, check_finite, check_ids, check_positions
from ropewalk.nn.positions import packed_positions
from ropewalk.nn.rotary.call import Placement

__all__ = ["all_positions", "first_position", "next_position", "placement_of", "positions_of_keys"]


def positions_of_keys(
    positions: Tensor | None, k_positions: Tensor | None, q: Tensor, k: Tensor, axes: int, causal: bool
) -> Tensor | None:
    """Return the positions of the keys for a bias; None if they are consecutive.

    Args:
        positions: The argument `positions` of the call.
        k_positions: The argument `k_positions`.
        q: Queries.
        k: Keys.
        axes: Number of axes of the rotation.
        causal: Whether attention is causal.

    Raises:
        RopewalkError: If tokens have several positions, or if the queries are not at the positions of the last keys.

    >>> x = torch.ones(1, 1, 3, 2)
    >>> positions_of_keys(torch.tensor([0, 1, 5]), None, x, x, 1, causal=True).tolist()
    [0, 1, 5]
    """
    asked, ids = "linear_attention(positions=..., bias=...)", positions if k_positions is None else k_positions
    if ids is None:
        return None
    if axes > 1:
        raise RopewalkError(
            asked=asked,
            expected="one position per token",
            got=f"a rope with {axes} axes",
            do="use softmax Attention, or omit the bias or the rope",
        )
    check_ids(ids, asked=asked)
    check_positions(ids, k, asked=asked)
    if can_read_values(ids):
        check_finite(ids, asked=asked)
    if positions is not None and k_positions is not None and can_read_values(ids) and can_read_values(positions):
        last = ids[..., ids.shape[-1] - q.shape[2] :]
        if positions.shape[-1] != q.shape[2] or not bool((as_signed(positions) == as_signed(last)).all()):
            raise RopewalkError(
                asked="linear_attention(positions=..., k_positions=..., bias=...)",
                expected="queries at the positions of the last keys",
                got="other positions",
                do="omit positions: those of the queries are the last of k_positions",
            )
    return ids


def all_positions(key_ids: Tensor | None, start: int | Tensor, k: Tensor) -> Tensor:
    """Return the positions of all keys, int64 [batch or 1, keys].

    Args:
        key_ids: Result of `positions_of_keys`.
        start: Position of the first key if they are consecutive.
        k: Keys.

    >>> all_positions(None, 4, torch.ones(1, 1, 3, 2)).tolist()
    [[4, 5, 6]]
    """
    if key_ids is not None:
        return torch.atleast_2d(as_signed(key_ids).to(torch.int64))
    ids = arange(k.shape[2], device=k.device)[None]
    return ids + (start.reshape(-1, 1).to(torch.int64) if isinstance(start, Tensor) else start)


def placement_of(
    uses_positions: bool,
    q: Tensor,
    k: Tensor,
    positions: Tensor | None,
    k_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    start: int | Tensor,
    length: int | Tensor | None,
) -> Placement:
    """Return the positions of q and k as arguments of rope(q, k, ...).

    Args:
        uses_positions: Whether there is a rotation or another encoding of the heads.
        q: Queries.
        k: Keys.
        positions: The argument `positions` of the call.
        k_positions: The argument `k_positions`.
        cu_seqlens: Ends of packed sequences, or None.
        start: Position of the first key after a state; 0 without one.
        length: Length for rules that depend on it.

    Raises:
        RopewalkError: If positions are passed that nothing uses, or missing.

    >>> x = torch.ones(1, 1, 3, 2)
    >>> placement_of(True, x[:, :, :1], x, None, None, None, 4, None).positions.tolist()
    [6]
    """
    explicit = positions is not None or k_positions is not None
    queries, keys = q.shape[2], k.shape[2]
    if not uses_positions:
        if explicit:
            raise RopewalkError(
                asked="linear_attention(positions=...)",
                expected="positions only together with a rope or a bias",
                got="positions, and neither",
                do="pass rope=RotaryEmbedding(number of features), or omit positions",
            )
        return Placement()
    if explicit:
        if positions is None and k_positions is not None and k_positions.shape[-1:] == (keys,) and queries <= keys:
            # Queries are the last tokens of the keys.
            positions = k_positions[..., keys - queries :]
        return Placement(positions, k_positions, length=length)
    if cu_seqlens is not None:
        ids = packed_positions(cu_seqlens, keys, start)
        return Placement(ids, length=length) if queries == keys else Placement(ids[..., :0], ids, length=length)
    if queries == keys and not (isinstance(start, Tensor) and start.is_floating_point()):
        # None for 0: a rule that depends on the length then uses the number of tokens as the length.
        return Placement(offset=None if isinstance(start, int) and start == 0 else start, length=length)
    if queries > keys:
        raise RopewalkError(
            asked="linear_attention(q, k, v, rope=...)",
            expected="positions, because there are more queries than keys",
            got=f"{queries} queries, {keys} keys and no positions",
            do="pass positions= for the queries and k_positions= for the keys",
        )
    ids = arange(keys, device=q.device)
    if length is None and isinstance(start, int) and start == 0:
        # As above: the keys are a whole sequence.
        length = keys
    ids = ids + start.unsqueeze(-1) if isinstance(start, Tensor) else ids + start
    return Placement(ids[..., keys - queries :], ids, length=length)


def next_position(
    start: int | Tensor, key_ids: Tensor | None, cu_seqlens: Tensor | None, key_mask: Tensor | None, k: Tensor
) -> int | Tensor:
    """Return the position after the last visible key, or `start` if there is none.

    Args:
        start: Position of the first key if positions are consecutive.
        key_ids: Positions of the keys if the caller passed them, or None.
        cu_seqlens: Ends of packed sequences, or None.
        key_mask: bool [batch, keys], or None.
        k: Keys.

    >>> next_position(4, None, None, None, torch.ones(1, 1, 3, 2))
    7
    """
    keys = k.shape[2]
    if key_ids is not None and not key_ids.is_floating_point():
        key_ids = key_ids.to(torch.int64)  # the last position + 1 must not overflow
    if keys == 0 or (key_ids is None and key_mask is None):
        return start + keys if cu_seqlens is None else cu_seqlens.diff() + start
    tokens = arange(keys, device=k.device)
    if cu_seqlens is None:
        seen = tokens.expand(len(k), -1) if key_mask is None else torch.where(key_mask, tokens, -1)
        begins, last = 0, seen.amax(-1)
        ids = tokens + (start.unsqueeze(-1) if isinstance(start, Tensor) else start) if key_ids is None else key_ids
        ids = ids.expand(len(k), keys)
    else:
        seen = tokens if key_mask is None else torch.where(key_mask[0], tokens, -1)
        # Entry i is the last visible token before token i. Entry 0 is -1, because the first sequence can be empty.
        before = torch.cat([new_full(seen, (1,), -1), seen]).cummax(0).values
        begins, last = cu_seqlens[:-1], before[cu_seqlens[1:]]
        ids = packed_positions(cu_seqlens, keys, start) if key_ids is None else key_ids
        ids = ids.reshape(1, -1).expand(len(last), -1)
    after = ids.gather(-1, last.clamp_min(0).unsqueeze(-1)).squeeze(-1) + 1
    return torch.where(last >= begins, after, start)


def first_position(
    state: LinearState | None,
    start: int | Tensor,
    key_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    key_mask: Tensor | None,
    k: Tensor,
) -> int | Tensor | None:
    """Return the position of the first token of a state and these keys; None if it is unknown.

    Args:
        state: The state before the keys, or None.
        start: As in `next_position`.
        key_ids: As in `next_position`.
        cu_seqlens: As in `next_position`.
        key_mask: As in `next_position`. The position of a hidden key can be any number.
        k: Keys.

    >>> first_position(None, 0, torch.tensor([4, 5]), None, None, torch.ones(1, 1, 2, 2)).tolist()
    4
    """
    if state is not None:
        return state.first
    if key_mask is not None or not k.shape[2] or (key_ids is not None and cu_seqlens is not None):
        return None
    return start if key_ids is None else key_ids[..., 0]
