"""Encoding: the base class of all encodings, with the four hooks that add position to a model."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_count, shown, warn
from ropewalk.kernels.constructors import empty
from ropewalk.kernels.torch_internals import constant_to_compiler, fake_mode
from ropewalk.nn.memory_layout import check_strided
from ropewalk.nn.old_checkpoints import DropsOldBuffers
from ropewalk.nn.position_checks import can_read_values, check_finite, check_ids, check_positions
from ropewalk.nn.scripting import refuse_scripting

__all__ = [
    "DistanceBias",
    "Encoding",
    "EncodingCache",
    "ScoreMod",
    "check_heads",
    "check_token_positions",
    "check_tokens",
    "encodes_heads",
    "head_dim_of_model",
    "identity_in_state",
    "warn_if_not_embedded",
]

# score_mod of FlexAttention: (score, batch, head, query index, key index) -> score.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_TOKENS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class EncodingCache(Protocol):
    """A cache in which an encoding stores state between calls. `KVCache` implements it.

    Attributes:
        encoding_state: The state that the next tokens need; None before the first token.

    >>> from ropewalk.nn.attention.cache import KVCache
    >>> cache: EncodingCache = KVCache(1, 1, max_length=4, head_dim=2)
    >>> cache.encoding_state is None
    True
    """

    encoding_state: Tensor | None


class DistanceBias(NamedTuple):
    """A bias that depends on the distance alone, in a form that linear attention computes in O(N).

    The bias of key n for query m is numbers[h, clamp(n - m, -window, window) + window] - slopes[h] |m - n|, where m and
    n are positions. Exactly one of the fields is set.

    Attributes:
        slopes: Slopes of at least 0 [heads]: the exponential of the bias is a decay.
        numbers: Biases of n - m = -window .. window [heads, 2 * window + 1], which are constant beyond.

    >>> DistanceBias(slopes=torch.tensor([0.5])).numbers is None
    True
    """

    slopes: Tensor | None = None
    numbers: Tensor | None = None


class Encoding(DropsOldBuffers):
    """Base class of encodings, which add position to a model by one or more of four hooks.

    - `embed` changes the tokens [batch, seq, dim]. The model calls it once, before the first layer.
    - `encode_heads` changes queries, keys and values [batch, heads, seq, head_dim], each token alone. Every attention
      layer calls it after the projections; in linear attention that is before the feature map.
    - `rotate` changes queries and keys [batch, heads, seq, head_dim]. Every attention layer calls it after
      `encode_heads`. Linear attention rotates features instead, by the RotaryEmbedding `rope` of an encoding.
    - `bias` returns a bias [heads, q, k] or [batch, heads, q, k] that is added to the scores. Linear attention, which
      has no scores, uses `distance_bias` instead.

    A hook that is not overridden does nothing, so `Encoding()` is the encoding "none". Positions are [seq] or
    [batch, seq]. None is 0 .. seq-1.

    Attributes:
        name: Name of the encoding in `ropewalk.encoding`.
        relative: Whether attention is unchanged when all positions shift by a constant.
        linear: Whether linear attention supports it: whether it acts on each token alone, or has a `distance_bias`.
        held: Names of tensors created by `kernels.constructors.constant`. They follow the device of the module, and
            ignore casts and `to_empty`.
        flex_options: `kernel_options` for FlexAttention, used with `score_mod`; None for the defaults.
        only_embeds: Whether `embed` is the only hook that adds positions. It has to call `note_embedded` then: a layer
            warns if no encoding of the class has ever embedded.

    >>> Encoding().bias(None, None) is None
    True
    """

    name: ClassVar[str] = "none"
    relative: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    held: ClassVar[tuple[str, ...]] = ()
    flex_options: ClassVar[dict[str, object] | None] = None
    only_embeds: bool = False

    @property
    def length(self) -> int | None:
        """Number of positions that the encoding supports, from 0 on; None for no limit."""
        return None

    @property
    def state_identity(self) -> str:
        """Text that identifies the hook `encode_heads` in a `LinearState`: the name of the class.

        Override it if options change what the hook computes: a state of other options then raises an error.
        """
        return type(self).__name__

    @property
    def scale(self) -> float | None:
        """Factor on the scores; None for the usual 1/sqrt(head_dim)."""
        return None

    def embed(self, x: Tensor, positions: Tensor | None = None, *, cache: EncodingCache | None = None) -> Tensor:
        """Add position to the tokens.

        Args:
            x: Tokens [batch, seq, dim].
            positions: [seq] or [batch, seq]; None is 0 .. seq-1.
            cache: Stores the state of an encoding that needs one for the next tokens. Other encodings ignore it.

        Returns:
            Tensor of the shape and dtype of x.
        """
        return x

    def encode_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor | None = None,
        *,
        k_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add position to queries, keys and values, after the projections. Each token is changed alone.

        Args:
            q: Queries [batch, heads, seq, head_dim].
            k: Keys [batch, kv_heads, keys, head_dim].
            v: Values [batch, kv_heads, keys, v_dim].
            positions: Positions of q [seq] or [batch, seq]; None is 0 .. seq-1.
            k_positions: Positions of k and v [keys] or [batch, keys]; None is `positions`.

        Returns:
            q, k and v, of the same shapes and dtypes.
        """
        return q, k, v

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, *, k_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add position to queries and keys.

        Args:
            q: Queries [batch, heads, seq, head_dim].
            k: Keys [batch, kv_heads, keys, head_dim].
            positions: Positions of q [seq] or [batch, seq]; None is 0 .. seq-1.
            k_positions: Positions of k [keys] or [batch, keys]; None is `positions`.

        Returns:
            q and k, of the same shapes and dtypes.
        """
        return q, k

    def bias(self, q_positions: Tensor | None, k_positions: Tensor | None) -> Tensor | None:
        """Return the bias that is added to the scores.

        Args:
            q_positions: Positions of queries [q] or [batch, q].
            k_positions: Positions of keys [k] or [batch, k].

        Returns:
            Bias [heads, q, k] or [batch, heads, q, k] in float32 or in the dtype of the parameters; None for no bias.
        """
        return None

    def distance_bias(self) -> DistanceBias | None:
        """Return `bias` as a function of the distance, for linear attention, which does not store a tensor [q, k].

        Returns:
            Slopes, or one number per distance up to a window; None if the bias has neither form. Linear attention then
            raises an error.
        """
        return None

    def score_mod(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod | None:
        """Return `bias` as a function of one score, for FlexAttention, which does not store a tensor [q, k].

        Args:
            q_positions: Positions of queries [q] or [batch, q].
            k_positions: Positions of keys [k] or [batch, k].

        Returns:
            A `score_mod` (score, batch, head, query index, key index) -> score; None for no such function.
        """
        return None

    def score_mod_once(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod | None:
        """Return `score_mod` for one call. It may use tensors computed from parameters instead of the parameters.

        Args:
            q_positions: Positions of queries [q] or [batch, q].
            k_positions: Positions of keys [k] or [batch, k].

        Returns:
            As `score_mod`.
        """
        return self.score_mod(q_positions, k_positions)

    def note_embedded(self) -> None:
        """Record that an encoding of this class has embedded tokens."""
        _note(type(self).__name__)

    __prepare_scriptable__ = refuse_scripting

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Encoding":
        super()._apply(fn, recurse)
        for name in self.held:
            tensor = getattr(self, name)
            # fn can cast, move or empty tensors. These only follow its device.
            device = fn(empty(0, device=tensor.device)).device
            # float64 tensors stay on the CPU for MPS, which has no float64. Fake tensors can be on a device that does
            # not exist.
            if (
                device.type != "meta"
                and fake_mode() is None
                and not (device.type == "mps" and tensor.dtype == torch.float64)
            ):
                setattr(self, name, tensor.to(device))
        return self


# Names of the classes of which an encoding has embedded tokens.
_EMBEDDED: set[str] = set()


# Runs while a graph is traced, so that compiled calls count too.
@constant_to_compiler
def _note(name: str) -> bool:
    _EMBEDDED.add(name)
    return True


def warn_if_not_embedded(encoding: Encoding | None, layer: str) -> None:
    """Warn if an encoding that changes tokens before the first layer was never used, nor another of its class.

    It is recorded per class, because a layer can have a copy of the encoding that embeds.

    >>> warn_if_not_embedded(Encoding(), "a doctest")
    """
    if encoding is None or torch.compiler.is_compiling() or not encoding.only_embeds:
        return
    if type(encoding).__name__ in _EMBEDDED:
        return
    warn(
        asked=f"{layer}(x) with the encoding {encoding.name!r}",
        expected="x = encoding.embed(x) before the first layer: the layer does not call it",
        got="an encoding whose embed was never called: the layer adds no position",
        do="call encoding.embed(tokens) once per forward pass, on the same encoding, or pass encoding=None",
    )


def encodes_heads(encoding: object) -> bool:
    """Whether an encoding adds position to queries, keys or values by its hook `encode_heads`.

    >>> encodes_heads(Encoding()), encodes_heads(None)
    (False, False)
    """
    if not isinstance(encoding, Encoding) or encoding.only_embeds:
        return False
    return type(encoding).encode_heads is not Encoding.encode_heads


def identity_in_state(encoding: object) -> str | None:
    """Return what a `LinearState` records of the encoding of its keys and values; None if it leaves them as they are.

    >>> identity_in_state(Encoding()) is None
    True
    """
    return encoding.state_identity if isinstance(encoding, Encoding) and encodes_heads(encoding) else None


def head_dim_of_model(name: str, dim: int, num_heads: int, head_dim: int | None) -> int:
    """Return the width of a head, for `encoding(name, dim=..., num_heads=..., head_dim=...)`.

    >>> head_dim_of_model("rope", 512, 8, None)
    64
    """
    if head_dim is not None:
        return require_count(head_dim, asked=f"encoding({name!r}, head_dim=...)", do="pass the width of one head")
    if dim % num_heads:
        raise RopewalkError(
            asked=f"encoding({name!r}, dim={dim}, num_heads={num_heads})",
            expected="a dim that is a multiple of num_heads, or head_dim=",
            got=f"{dim} / {num_heads}",
            do="pass the width of one head as head_dim=",
        )
    return dim // num_heads


def check_tokens(x: Tensor, dim: int, *, asked: str, parameter: Tensor | None = None) -> None:
    """Raise unless `x` is a tensor of tokens [..., seq, dim] on the device of the encoding's `parameter`.

    >>> check_tokens(torch.zeros(2, 5, 8), 8, asked="a doctest")
    """
    do = "pass the tokens before the heads are split, or create the encoding with their dim"
    check_strided(x, asked=f"{asked}(x)")
    fits = isinstance(x, Tensor) and x.dim() >= 2 and x.shape[-1] == dim
    _check_features(x, fits, ("tokens [batch, seq", dim), parameter, asked=f"{asked}(x)", do=do)


def check_heads(x: Tensor, head_dim: int, *, asked: str, parameter: Tensor | None = None) -> None:
    """Raise unless `x` is a tensor of heads [batch, heads, seq, head_dim] on the device of the encoding's `parameter`.

    >>> check_heads(torch.zeros(2, 4, 5, 8), 8, asked="a doctest")
    """
    do = "pass the projections after the heads are split, or create the encoding for heads of this width"
    check_strided(x, asked=asked)
    fits = isinstance(x, Tensor) and x.dim() == 4 and x.shape[-1] == head_dim
    _check_features(x, fits, ("heads [batch, heads, seq", head_dim), parameter, asked=asked, do=do)


def _check_features(
    x: Tensor, fits: bool, expected: tuple[str, int], parameter: Tensor | None, *, asked: str, do: str
) -> None:
    """Raise unless `x` fits the `expected` dimensions and width, and has a supported dtype and the right device."""
    dims, width = expected
    if not (fits and x.dtype in _TOKENS):
        raise RopewalkError(
            asked=asked,
            expected=f"{dims}, {width}] in float32, float64, bfloat16 or float16",
            got=f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else shown(x),
            do=do,
        )
    if parameter is not None and parameter.device != x.device:
        name = dims.split(" ", 1)[0]
        raise RopewalkError(
            asked=asked,
            expected=f"{name} on {parameter.device}, the device of its parameters",
            got=f"{name} on {x.device}",
            do=f"move one of them: encoding.to({str(x.device)!r})",
        )


def check_token_positions(positions: Tensor, x: Tensor, *, asked: str, whole: bool = False) -> None:
    """Raise unless `positions` has one number per token of `x`, on its device. `whole` rejects floating-point dtypes.

    >>> check_token_positions(torch.arange(5), torch.zeros(2, 5, 8), asked="a doctest")
    """
    check_ids(positions, asked=asked, whole=whole)
    check_positions(positions, x, asked=asked, batched=x.dim() > 2)
    if can_read_values(positions):
        check_finite(positions, asked=asked)
