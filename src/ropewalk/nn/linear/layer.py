"""LinearAttention: a layer of linear attention, with a step for decoding."""

from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_count, require_flag, shown, warn
from ropewalk.kernels.constructors import zeros
from ropewalk.kernels.types import FeatureMap as NamedMap
from ropewalk.nn.attention.projections import HeadSizes, ProjectedHeads
from ropewalk.nn.encodings.base import Encoding, encodes_heads, identity_in_state, warn_if_not_embedded
from ropewalk.nn.encodings.bias import check_causal
from ropewalk.nn.encodings.rotary import (
    as_encoding,
    check_encoding,
    check_head_dim,
    rope_axes,
    rope_for_linear,
    rope_in,
)
from ropewalk.nn.encodings.some_heads import SomeHeads, kind_of_bias
from ropewalk.nn.linear.feature_maps import FavorFeatures, FeatureMap, map_name, resolve_maps
from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.linear.near_keys import empty_near
from ropewalk.nn.linear.state import LinearState
from ropewalk.nn.linear.weighting import bias_for_linear, slopes_on
from ropewalk.nn.owners import check_owner, set_owner
from ropewalk.nn.position_checks import as_signed, can_read_values, check_positions, warn_if_positions_restart
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops.dtensors import with_full_parameters
from ropewalk.signatures import checks_names

__all__ = ["LinearAttention"]


class _Options(TypedDict, total=False):
    key_mask: Tensor | None
    cu_seqlens: Tensor | None


class LinearAttention(ProjectedHeads):
    """A layer of linear attention: `linear_attention` between projections (RoFormer, 2104.09864, eq. 19).

    The projections are named as in `Attention`: q_proj, k_proj, v_proj and o_proj.

    Args:
        dim: Width of the model.
        num_heads: Number of query heads.
        num_kv_heads: Number of key heads, a divisor of `num_heads`; None for `num_heads`.
        head_dim: Width of a head; None for dim / num_heads.
        encoding: Changes q, k and v before the feature map, rotates the features, or weights keys by the exponential of
            its bias. The `embed` hook is not called here: the model calls it once, before the first layer. None adds no
            position.
        feature_map: As in `linear_attention`, or "favor" for `FavorFeatures`.
        num_features: Number of features for "favor"; None for head_dim.
        causal: Hide the tokens after a query.
        qkv_bias: Whether q_proj, k_proj and v_proj have a bias.
        out_bias: Whether o_proj has a bias.
        device: Device of the projections.
        dtype: Dtype of the projections.

    Raises:
        RopewalkError: If an argument is invalid, or if the encoding does not match the heads or the features.

    >>> layer = LinearAttention(8, num_heads=2, encoding=RotaryEmbedding(4))
    >>> x = torch.randn(1, 5, 8)
    >>> state, steps = None, []
    >>> for token in x.split(1, dim=1):
    ...     y, state = layer.step(token, state)
    ...     steps.append(y)
    >>> torch.allclose(torch.cat(steps, dim=1), layer(x), atol=1e-5)
    True
    """

    @checks_names
    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        encoding: Encoding | RotaryEmbedding | None = None,
        feature_map: FeatureMap | Literal["favor"] | tuple[FeatureMap, FeatureMap] = "elu",
        num_features: int | None = None,
        causal: bool = True,
        qkv_bias: bool = False,
        out_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layer = type(self).__name__
        sizes = HeadSizes.checked(dim, num_heads, num_kv_heads, head_dim, layer=layer)
        super().__init__(sizes, causal=causal, qkv_bias=qkv_bias, out_bias=out_bias, device=device, dtype=dtype)
        asked = "LinearAttention(encoding=...)"
        rope = rope_for_linear(encoding, asked)
        bias = bias_for_linear(None if isinstance(encoding, RotaryEmbedding) else encoding, asked)
        if feature_map == "favor":
            feature_map = FavorFeatures(
                self.head_dim, self.head_dim if num_features is None else num_features, device=device
            )
        elif num_features is not None:
            raise RopewalkError(
                asked="LinearAttention(num_features=...)",
                expected='num_features only with feature_map="favor"',
                got=f"feature_map={shown(feature_map)}",
                do="omit num_features: the other maps determine the number of features",
            )
        maps = resolve_maps(feature_map, "LinearAttention")
        width = getattr(maps[0], "num_features", None)
        if rope is not None and width not in (None, rope.spec.head_dim):
            raise RopewalkError(
                asked=f"LinearAttention(encoding=...) with {map_name(maps[0])}",
                expected=f"a rope of {width}, the width of the features",
                got=f"head_dim={rope.spec.head_dim}",
                do=f"the rotation is applied after the feature map: pass RotaryEmbedding({width})",
            )
        check_head_dim(encoding, self.head_dim, layer=layer)
        named_maps = all(isinstance(side, str) for side in maps)
        if encoding is not None and (bias is not None or (rope is not None and named_maps)):
            check_encoding(encoding, self.head_dim, self.num_heads, self.num_kv_heads, layer=layer)
            check_causal(encoding, causal, layer=layer)
        self.encoding: Encoding | None = as_encoding(encoding)
        # A map that is a module is registered, and saved with the layer: only once if q and k share it.
        self.q_map: FeatureMap = maps[0]
        if maps[1] is not maps[0]:
            self.k_map: FeatureMap = maps[1]

    @checks_names
    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        state: LinearState | None = None,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, LinearState]:
        """Apply the layer to tokens.

        Args:
            x: Tokens [batch, seq, dim].
            positions: [seq] or [batch, seq]; None continues from the state, starts at 0 in each packed sequence, or is
                0 .. seq-1.
            state: State after the previous tokens; None at the first token.
            key_mask: bool [batch, seq]. False hides a key.
            cu_seqlens: Cumulated lengths [sequences + 1] of sequences packed in a batch of 1.
            return_state: Also return the state after x.

        Returns:
            Tensor [batch, seq, dim], or a tuple of it and the state.

        Raises:
            RopewalkError: If a shape, dtype or device does not match, or if there is a state and causal=False.

        >>> LinearAttention(8, num_heads=2)(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
        """
        self._check_tokens(x)
        warn_if_not_embedded(self.encoding, "LinearAttention")
        if state is not None:
            self._require_causal()
            if isinstance(state, LinearState):
                check_owner(state, self, "state")
        q, k, v = self.heads_of(x)
        # Otherwise positions reach no hook of the encoding, and the state counts tokens.
        rotates = getattr(self.encoding, "rope", None) is not None or encodes_heads(self.encoding)
        uses_positions = rotates or self._has_bias
        if positions is not None and not uses_positions:
            check_positions(positions, x, asked="attention(positions=...)")
        result = self._run_plainly(
            self.encoding,
            linear_attention,
            q,
            k,
            v,
            rope=self.encoding if rotates else None,
            bias=self.encoding if self._has_bias else None,
            positions=positions if uses_positions else None,
            cu_seqlens=cu_seqlens,
            key_mask=key_mask,
            feature_map=self._maps,
            causal=self.causal,
            state=state,
            return_state=require_flag(return_state, asked="layer(return_state=...)"),
        )
        if positions is not None and rope_axes(self.encoding) == 1:
            self._warn_about(positions, state, key_mask, cu_seqlens)
        if not isinstance(result, tuple):
            return self.joined(result)
        set_owner(result[1], self)
        return self.joined(result[0]), result[1]

    # nn.Module declares that a call returns Any.
    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            x: Tensor,
            positions: Tensor | None = None,
            state: LinearState | None = None,
            *,
            return_state: Literal[False] = False,
            **options: Unpack[_Options],
        ) -> Tensor: ...
        @overload
        def __call__(
            self,
            x: Tensor,
            positions: Tensor | None = None,
            state: LinearState | None = None,
            *,
            return_state: Literal[True],
            **options: Unpack[_Options],
        ) -> tuple[Tensor, LinearState]: ...
        def __call__(self, *arguments: object, **options: object) -> Tensor | tuple[Tensor, LinearState]: ...

    def extra_repr(self) -> str:
        """Return the sizes, and the feature map if it is named."""
        maps = self._maps
        shown_maps = maps[0] if maps[0] == maps[1] else maps
        named = f", feature_map={shown_maps!r}" if all(isinstance(side, str) for side in maps) else ""
        return super().extra_repr() + named

    @checks_names
    def step(self, x: Tensor, state: LinearState | None = None) -> tuple[Tensor, LinearState]:
        """Process the next tokens. The cost per token does not depend on the position.

        Args:
            x: Tokens [batch, seq, dim].
            state: State after the previous tokens; None at the first token.

        Returns:
            Tensor [batch, seq, dim], and the new state.

        Raises:
            RopewalkError: As in `forward`, and if causal=False.

        >>> y, state = LinearAttention(8, num_heads=2).step(torch.zeros(1, 1, 8))
        >>> state.position
        1
        """
        self._require_causal()
        return self(x, state=state, return_state=True)

    @checks_names
    def make_state(self, batch: int, *, device: torch.device | str | None = None) -> LinearState:
        """Create the state before the first token, with which every step has the same arguments.

        Args:
            batch: Number of sequences.
            device: Device of the state; None for that of the layer.

        Returns:
            A state that continues as None does.

        Raises:
            RopewalkError: If `batch` is not an integer of at least 1, if the layer is not causal, or if the number of
                features is unknown.

        >>> layer = LinearAttention(8, num_heads=2)
        >>> y, state = layer.step(torch.zeros(1, 1, 8), layer.make_state(1))
        >>> state.position
        1
        """
        self._require_causal()
        rows = require_count(batch, asked="LinearAttention.make_state(batch)", do="pass the number of sequences")
        rope, k_map = rope_in(self.encoding), self._maps[1]
        width = getattr(k_map, "num_features", None) if callable(k_map) else self.head_dim
        width = rope.spec.head_dim if rope is not None else width
        if width is None:
            raise RopewalkError(
                asked="LinearAttention.make_state(batch)",
                expected="a feature map with the attribute num_features",
                got=f"{map_name(k_map)} without it",
                do="set num_features on the feature map, or start with state=None",
            )
        weight, (first, num_heads, num_kv_heads) = self.k_proj.weight, self.heads_here
        part = self.encoding
        if part is not None and num_heads < self.num_heads and self._has_bias:
            part = SomeHeads(part, first, num_heads)
        read = [] if self.encoding is None else [self.encoding]
        bias = with_full_parameters(read, bias_for_linear, part, "LinearAttention(encoding=...)")
        heads = num_kv_heads if bias is None or bias.slopes is None else num_heads
        working = torch.float64 if weight.dtype == torch.float64 else torch.float32
        device = weight.device if device is None else device
        above = zeros(rows, heads, width, self.head_dim, dtype=working, device=device)
        below = zeros(rows, heads, width, dtype=working, device=device)
        names = map_name(self._maps[0]), map_name(self._maps[1])
        spec, learned = (None, False) if rope is None else (rope.spec, rope.log_scale is not None)
        kind, near = None if bias is None else kind_of_bias(self.encoding), None
        if bias is not None and bias.numbers is not None:
            # Features of a map that is a function are in the working dtype, and 0 adds nothing.
            dtype, fill = (working, 0.0) if callable(k_map) else (weight.dtype, NamedMap[k_map].zero)
            k = zeros(rows, num_kv_heads, 0, width, dtype=dtype, device=device)
            v = zeros(rows, num_kv_heads, 0, self.head_dim, dtype=weight.dtype, device=device)
            near = empty_near(k, v, max(0, bias.numbers.shape[1] // 2 - 1), fill)
        encoding = identity_in_state(self.encoding)
        slopes = None if bias is None or bias.slopes is None else slopes_on(bias.slopes, above.device)
        return LinearState(
            above, below, 0, spec, names, learned, encoding=encoding, weighting=kind, near=near, first=0, slopes=slopes
        )

    @staticmethod
    def _warn_about(
        positions: Tensor, state: LinearState | None, key_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> None:
        """Warn if positions start again in a row, or are not beyond those in the state."""
        if cu_seqlens is not None:
            return
        warn_if_positions_restart(positions, key_mask, asked="attention(positions=...)")
        if state is None or not can_read_values(positions) or not positions.numel():
            return
        following, first = state.position, as_signed(positions[..., 0])
        readable = not isinstance(following, Tensor) or can_read_values(following)
        if readable and bool((first < following).any()):
            warn(
                asked="attention(positions=...) with a state",
                expected="positions from the next one of the state on",
                got="a first position that is smaller",
                do="omit positions, which continue from the state; or pass the positions of the new tokens alone",
            )

    @property
    def _has_bias(self) -> bool:
        encoding = self.encoding
        return encoding is not None and type(encoding).distance_bias is not Encoding.distance_bias

    @property
    def _maps(self) -> tuple[FeatureMap, FeatureMap]:
        return self.q_map, self.k_map if hasattr(self, "k_map") else self.q_map

    def _require_causal(self) -> None:
        if not self.causal:
            raise RopewalkError(
                asked="a LinearAttention that continues from a state",
                expected="causal attention: tokens in a state were read without the later tokens",
                got="causal=False",
                do="omit the state, and read the whole sequence",
            )
