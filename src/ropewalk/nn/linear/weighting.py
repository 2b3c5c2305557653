"""The factors on the terms of linear attention: from a decay, or from the bias of an encoding."""

from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_flag, shown
from ropewalk.kernels.constructors import arange, new_zeros, placed
from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.types import NO_WEIGHTING, Weighting
from ropewalk.nn.encodings.base import DistanceBias, Encoding
from ropewalk.nn.position_checks import as_signed, can_read_values

__all__ = [
    "WIDEST",
    "Tokens",
    "bias_for_linear",
    "checked_decay",
    "resolve_scale",
    "resolve_weighting",
    "slopes_on",
    "total_decay",
]

# The largest window of a bias that is constant beyond it. Scores are computed within the window.
WIDEST = 1024


class Tokens(NamedTuple):
    """The keys of a call: sizes, positions, and which are hidden.

    Args:
        batch: Number of rows.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        queries: Number of queries.
        keys: Number of keys.
        device: Device of the keys.
        causal: Whether keys after a query are hidden.
        start: Position of the first key if the positions continue: an int, or a tensor with one number per sequence.
        positions: Positions of the keys [keys] or [batch, keys], or None if they continue from `start`.
        key_mask: bool [batch, keys], or None.
        cu_seqlens: Ends of packed sequences, or None.
        has_state: Whether there is a state.

    >>> Tokens(1, 4, 2, 3, 3, torch.device("cpu"), True).start
    0
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    device: torch.device
    causal: bool
    start: int | Tensor = 0
    positions: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    has_state: bool = False


def resolve_scale(normalize: bool, scale: float | None, asked: str) -> float:
    """Return the factor on results that are not divided.

    Args:
        normalize: Whether results are divided by their denominators.
        scale: The factor, or None.
        asked: The function, for errors.

    Raises:
        RopewalkError: If `normalize` is not a bool, if `scale` is not a finite number, or if both are set.

    >>> resolve_scale(False, None, "a doctest"), resolve_scale(False, 0.5, "a doctest")
    (1.0, 0.5)
    """
    require_flag(normalize, asked=f"{asked}(normalize=...)")
    if scale is None:
        return 1.0
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool) and abs(scale) < float("inf")
    if not is_number or normalize:
        raise RopewalkError(
            asked=f"{asked}(scale={shown(scale)}, normalize={normalize})",
            expected="a finite number, and normalize=False: a factor cancels in a quotient",
            got=f"{shown(scale)} and normalize={normalize}",
            do="omit scale, or pass normalize=False for attention without a denominator",
        )
    return float(scale)


def bias_for_linear(encoding: object, asked: str) -> DistanceBias | None:
    """Return the bias of an encoding as a function of the distance; None if it has no bias.

    Args:
        encoding: An encoding, or None.
        asked: The first line of the error.

    Raises:
        RopewalkError: If it is no encoding, or if linear attention cannot compute its bias in O(N).

    >>> bias_for_linear(None, "a doctest") is None
    True
    """
    if encoding is None:
        return None
    if not isinstance(encoding, Encoding):
        raise RopewalkError(
            asked=asked,
            expected="an Encoding with a bias, such as AlibiBias or T5Bias, or None",
            got=shown(encoding),
            do='create one: ropewalk.encoding("alibi", dim=..., num_heads=...); a rotation is passed as rope=',
        )
    if type(encoding).bias is Encoding.bias and type(encoding).distance_bias is Encoding.distance_bias:
        return None
    bias = encoding.distance_bias()
    name = type(encoding).__name__
    if bias is None or not encoding.linear:
        raise RopewalkError(
            asked=f"{asked} with {name}",
            expected="a bias that is linear in the distance, or constant beyond a window of distances: only then can "
            "queries share sums over keys",
            got=f"{name}, whose distance_bias() returns None",
            do="override distance_bias to return slopes or numbers if the bias has one of the forms; otherwise use "
            "softmax Attention",
        )
    if not isinstance(bias, DistanceBias) or not _has_one_form(bias):
        raise RopewalkError(
            asked=f"{asked} with {name}",
            expected="DistanceBias with slopes [heads], or with numbers [heads, 2 * window + 1], floating-point",
            got=shown([list(x.shape) if isinstance(x, Tensor) else x for x in bias])
            if isinstance(bias, DistanceBias)
            else type(bias).__name__,
            do="return one of the two from distance_bias",
        )
    slopes = bias.slopes
    if slopes is not None and can_read_values(slopes) and not bool(((slopes >= 0) & slopes.isfinite()).all()):
        raise RopewalkError(
            asked=f"{asked} with {name}",
            expected="finite slopes of at least 0: the weights of farther keys do not grow",
            got=shown(slopes.tolist()),
            do="return slopes s for a bias of -s |m - n|, or use softmax Attention",
        )
    if bias.numbers is not None and bias.numbers.shape[1] // 2 > WIDEST:
        raise RopewalkError(
            asked=f"{asked} with {name}",
            expected=f"a bias that is constant from a distance of at most {WIDEST} on",
            got=f"{bias.numbers.shape[1] // 2}",
            do="create it with a smaller max_distance: scores are computed for all keys within the window",
        )
    return bias


def _has_one_form(bias: DistanceBias) -> bool:
    """Whether one field is set, to a tensor of the right number of dimensions."""
    slopes, numbers = bias
    table = numbers if slopes is None else slopes
    if not isinstance(table, Tensor) or table.dtype not in FLOATS or (slopes is not None and numbers is not None):
        return False
    return table.dim() == 1 if numbers is None else table.dim() == 2 and table.shape[1] % 2 == 1


def resolve_weighting(
    decay: Tensor | None, bias: DistanceBias | None, tokens: Tokens, *, normalize: bool, scale: float, asked: str
) -> Weighting:
    """Return the factors on the terms of both sums.

    Args:
        decay: Logarithm of the decay per token, as in `linear_attention`.
        bias: A bias by distance, or None.
        tokens: The keys of the call.
        normalize: Whether results are divided by their denominators.
        scale: Factor on results that are not divided.
        asked: The function, for errors.

    Raises:
        RopewalkError: If both are set, if a shape, dtype, device or value is invalid, or if positions decrease.

    >>> tokens = Tokens(1, 4, 2, 3, 3, torch.device("cpu"), True)
    >>> resolve_weighting(torch.tensor([-0.5, 0.0]), None, tokens, normalize=True, scale=1.0, asked="").decay.shape
    torch.Size([1, 2, 1])
    """
    if decay is None and bias is None:
        return NO_WEIGHTING if normalize else Weighting(normalize=False, scale=scale)
    if decay is not None and bias is not None:
        raise RopewalkError(
            asked=f"{asked}(decay=..., bias=...)",
            expected="one of them",
            got="both",
            do="subtract the slopes of ALiBi from the decay, or omit one",
        )
    if not tokens.causal and tokens.queries != tokens.keys:
        raise RopewalkError(
            asked=f"{asked}({'bias' if decay is None else 'decay'}=..., causal=False)",
            expected="as many queries as keys: distances are those of the same tokens",
            got=f"{tokens.queries} queries and {tokens.keys} keys",
            do="pass q, k and v of the same tokens, or omit the bias for attention to other tokens",
        )
    if decay is not None:
        factors = checked_decay(decay, tokens, asked)
        return Weighting(_until_last_visible(factors, tokens), normalize=normalize, scale=scale)
    slopes, numbers = bias or DistanceBias()
    table = numbers if slopes is None else slopes
    if table is None or len(table) != tokens.heads:
        raise RopewalkError(
            asked=f"{asked}(bias=...)",
            expected=f"a bias for {tokens.heads} heads, those of q",
            got=f"{0 if table is None else len(table)} heads",
            do=f"create the encoding with num_heads={tokens.heads}",
        )
    if slopes is not None:
        decay = _decay_of_slopes(slopes, tokens, asked)
        return Weighting(_until_last_visible(decay, tokens), normalize=normalize, scale=scale)
    # Cast before it moves, for devices without float64. An exponential of fewer digits would be a rounding too many.
    band = placed(table.to(torch.float32 if tokens.device.type == "mps" else torch.float64), tokens.device)
    if normalize:
        # A factor of all terms cancels, and no exponential is then larger than 1.
        visible = band[:, : band.shape[1] // 2 + 1] if tokens.causal else band
        band = band - visible.detach().amax(dim=-1, keepdim=True)
    _check_growth(tokens, asked)
    ids = tokens.positions
    ids = None if ids is None else torch.atleast_2d(as_signed(ids))
    return Weighting(band=band, positions=ids, normalize=normalize, scale=scale)


def checked_decay(decay: Tensor, tokens: Tokens, asked: str) -> Tensor:
    """Return `decay` as [batch or 1, kv_heads or heads, keys or 1].

    Args:
        decay: The argument `decay`.
        tokens: The tokens of the call.
        asked: The call, for errors.

    Raises:
        RopewalkError: If its shape, dtype or device does not match, or if a number is positive or NaN.

    >>> tokens = Tokens(1, 4, 2, 3, 3, torch.device("cpu"), True, 0, None, None, None, False)
    >>> checked_decay(-torch.ones(2), tokens, "a doctest").shape
    torch.Size([1, 2, 1])
    """
    asked = f"{asked}(decay=...)"
    counts, factor = dict.fromkeys((tokens.kv_heads, tokens.heads)), "the logarithm of the decay of the sums per token"
    shapes = [[heads] for heads in counts]
    if tokens.causal:
        shapes += [[tokens.batch, heads, tokens.keys] for heads in counts]
    if not isinstance(decay, Tensor) or decay.dtype not in FLOATS or list(decay.shape) not in shapes:
        raise RopewalkError(
            asked=asked,
            expected=f"{factor}, a floating-point tensor of shape {' or '.join(map(str, shapes))}"
            + ("" if tokens.causal else ", because attention is not causal"),
            got=f"{decay.dtype} {list(decay.shape)}" if isinstance(decay, Tensor) else shown(decay),
            do="pass one number per key head or query head, or one per sequence, head and token",
        )
    if decay.device != tokens.device:
        raise RopewalkError(
            asked=asked,
            expected=f"a tensor on {tokens.device}",
            got=f"one on {decay.device}",
            do=f"move it once: decay.to({str(tokens.device)!r})",
        )
    if can_read_values(decay) and not bool((decay <= 0).all()):
        raise RopewalkError(
            asked=asked,
            expected="logarithms of factors: numbers of at most 0",
            got="NaN" if bool(decay.isnan().any()) else f"{decay.max().item():g}",
            do="pass log(factor): log(0.9) for sums that keep 0.9 per token; 0 for no decay",
        )
    return decay[None, :, None] if decay.dim() == 1 else decay


def _decay_of_slopes(slopes: Tensor, tokens: Tokens, asked: str) -> Tensor:
    """Return -slope (p_t - p_{t-1}) as a decay: [1, heads, 1] if positions are consecutive."""
    slopes = slopes_on(slopes, tokens.device)[None, :, None]
    if tokens.positions is None:
        return -slopes
    ids = torch.atleast_2d(as_signed(tokens.positions))
    before = _position_before(tokens)
    steps = _steps(_visible_positions(ids, before, tokens), before, tokens)
    if can_read_values(steps) and bool((steps < 0).any()):
        raise RopewalkError(
            asked=f"{asked}(positions=..., bias=...)",
            expected="positions that do not decrease within a sequence: the bias is a decay of the sums",
            got=f"a step of {steps.min().item():g}",
            do="sort the tokens, pack sequences with cu_seqlens, or use softmax Attention",
        )
    return -slopes * steps[:, None].to(slopes.dtype)


def slopes_on(slopes: Tensor, device: torch.device) -> Tensor:
    """Return slopes on a device, in float64 if it supports that.

    >>> slopes_on(torch.tensor([0.5]), torch.device("cpu")).dtype
    torch.float64
    """
    # Cast before they move, for devices without float64.
    return slopes.to(torch.float32 if device.type == "mps" else torch.float64).to(device)


def total_decay(decay: Tensor, keys: int, rows: int, cu_seqlens: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the logarithm of the decay of all keys together.

    Args:
        decay: Logarithm of the decay per token [batch or 1, heads, keys or 1].
        keys: Number of keys.
        rows: Number of sequences.
        cu_seqlens: Ends of packed sequences, or None.
        dtype: Dtype of the result.

    Returns:
        Tensor [rows, heads].

    >>> total_decay(torch.tensor([[[-0.5]]]), 3, 1, None, torch.float32).item()
    -1.5
    >>> total_decay(torch.tensor([[[-1.0, -2.0, -4.0]]]), 3, 2, torch.tensor([0, 2, 3]), torch.float32).tolist()
    [[-3.0], [-4.0]]
    """
    decay = decay.to(dtype)
    heads, per_token = decay.shape[1], decay.shape[2] == keys
    if cu_seqlens is None:
        if per_token or not keys:
            return decay[..., :keys].sum(-1).expand(rows, heads)
        return (decay[..., 0] * keys).expand(rows, heads)
    if not per_token:
        lengths = cu_seqlens.diff()[:, None]
        # The product of 0 and -inf is NaN.
        return torch.where(lengths > 0, decay[0, :, 0] * lengths.clamp_min(1), 0.0).to(dtype)
    # Tokens after the last sequence are a row that is dropped.
    owner = torch.searchsorted(cu_seqlens, arange(keys, device=decay.device), right=True) - 1
    return new_zeros(decay, rows + 1, heads).index_add(0, owner, decay[0].t())[:rows]


def _owners(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return the packed sequence of each token, and the index of its first token, both [keys]."""
    number = arange(tokens.keys, device=tokens.device)
    if tokens.cu_seqlens is None:
        return number * 0, number * 0
    # Tokens after the last sequence are a sequence of their own.
    owner = torch.searchsorted(tokens.cu_seqlens, number, right=True) - 1
    return owner, tokens.cu_seqlens[owner]


def _position_before(tokens: Tokens) -> Tensor | int | None:
    """Return the last position in the state: an int, or a tensor that broadcasts to [batch, keys]; None if none."""
    start = tokens.start
    if not tokens.has_state or not isinstance(start, Tensor):
        return start - 1 if tokens.has_state else None
    if tokens.cu_seqlens is None or not start.dim():
        return start.reshape(-1, 1) - 1
    return start[_owners(tokens)[0].clamp_max(len(start) - 1)] - 1


def _visible_positions(ids: Tensor, before: Tensor | int | None, tokens: Tokens) -> Tensor:
    """Move the positions of hidden keys between those of the visible keys around them, so that they may be any.

    Args:
        ids: Positions [batch or 1, keys].
        before: Result of `_position_before`.
        tokens: The keys of the call.
    """
    mask = tokens.key_mask
    if mask is None or not tokens.keys:
        return ids
    if ids.is_floating_point():
        ids = ids.to(torch.float32 if tokens.device.type == "mps" else torch.float64)
    rows = ids.expand_as(mask)
    least = rows.amin(dim=-1, keepdim=True).expand_as(mask) if before is None else rows * 0 + before
    lowest = torch.minimum(rows, least).amin(dim=-1, keepdim=True)
    span = torch.maximum(rows, least).amax(dim=-1, keepdim=True) - lowest
    # One sequence after the other, so that all positions of one are smaller than those of the next.
    origin = _owners(tokens)[0] * (span + 1) - lowest
    rows, least = rows + origin, least + origin
    least = torch.maximum(least, torch.where(mask, rows, least).cummax(dim=-1).values)
    most = torch.where(mask, rows, origin + lowest + span).flip(-1).cummin(dim=-1).values.flip(-1)
    between = torch.minimum(torch.maximum(rows, least), most).cummax(dim=-1).values
    return torch.where(mask, rows, between) - origin


def _steps(ids: Tensor, before: Tensor | int | None, tokens: Tokens) -> Tensor:
    """Return p_t - p_{t-1} [batch or 1, keys]. At a first token it is the step from the state; 0 without a state."""
    owner, begin = _owners(tokens)
    steps = ids.diff(dim=-1, prepend=ids[..., :1])
    is_first = arange(tokens.keys, device=tokens.device) == begin
    steps = torch.where(is_first, 0 if before is None else ids - before, steps)
    # Tokens after the last sequence may have any positions.
    return steps if tokens.cu_seqlens is None else torch.where(owner < len(tokens.cu_seqlens) - 1, steps, 0)


def _check_growth(tokens: Tokens, asked: str) -> None:
    """Raise unless positions of visible keys grow by at least 1 per token, where the host can read them."""
    if tokens.positions is None or not can_read_values(tokens.positions):
        return
    ids = torch.atleast_2d(as_signed(tokens.positions))
    before = _position_before(tokens)
    # By how much positions are ahead of those of consecutive tokens.
    ahead = ids - (arange(tokens.keys, device=ids.device) - _owners(tokens)[1])
    before = None if before is None else before + 1
    steps = _steps(_visible_positions(ahead, before, tokens), before, tokens)
    if ids.is_floating_point() or (can_read_values(steps) and bool((steps < 0).any())):
        raise RopewalkError(
            asked=f"{asked}(positions=..., bias=...)",
            expected="whole positions that grow by at least 1 per token: farther keys than the window share one bias",
            got=f"{ids.dtype}" if ids.is_floating_point() else "positions that grow more slowly",
            do="omit positions, pass those of consecutive tokens, or use softmax Attention",
        )


def _until_last_visible(decay: Tensor, tokens: Tokens) -> Tensor:
    """Return the decay without that of hidden keys after the last visible one, so that the sums stay as they are."""
    if tokens.key_mask is None or not tokens.causal or not tokens.keys:
        return decay
    seen = tokens.key_mask.to(torch.int64)
    if tokens.cu_seqlens is None:
        ahead = seen.flip(-1).cumsum(-1).flip(-1)
    else:
        # Visible keys from each token to the end of its sequence.
        total = torch.cat([new_zeros(seen, 1, 1), seen.cumsum(-1)], dim=-1)
        owner = torch.searchsorted(tokens.cu_seqlens, arange(tokens.keys, device=seen.device), right=True)
        ends = tokens.cu_seqlens[owner.clamp_max(len(tokens.cu_seqlens) - 1)]
        ahead = total[:, ends] - total[:, :-1]
    return torch.where((ahead > 0)[:, None], decay, 0.0)
