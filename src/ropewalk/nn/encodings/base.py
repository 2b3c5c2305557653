"""Encoding: the three hooks by which position enters a model, and what an encoding says of itself."""

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, shown
from ropewalk.kernels.constructors import empty
from ropewalk.kernels.torch_internals import fake_mode
from ropewalk.nn.memory_layout import check_strided
from ropewalk.nn.position_checks import check_finite, check_ids, check_positions, may_look
from ropewalk.nn.scripting import refuse_scripting

__all__ = ["Encoding", "EncodingCache", "ScoreMod", "check_token_positions", "check_tokens"]

# score_mod of FlexAttention: (score, batch, head, query index, key index) -> score.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_TOKENS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class EncodingCache(Protocol):
    """A cache in which an encoding stores what the next tokens need from the tokens so far; `KVCache` is one.

    >>> from ropewalk.nn.attention.cache import KVCache
    >>> cache: EncodingCache = KVCache(1, 1, max_length=4, head_dim=2)
    >>> cache.encoding_state is None
    True
    """

    encoding_state: Tensor | None


class Encoding(nn.Module):
    """Where a token stands, brought into a model by one or more of three hooks; what is not overridden does nothing.

    `embed` changes the tokens [batch, seq, dim], once, at the bottom of a model. `rotate` changes queries and keys
    [batch, heads, seq, head_dim] in every layer. `bias` is added to the scores [heads, q, k] or [batch, heads, q, k].
    Positions are [seq] or [batch, seq]; None is 0 .. seq-1.

    Attributes:
        name: The name by which `ropewalk.encoding` makes it.
        relative: Whether attention is unchanged when all positions shift by a constant.
        linear: Whether linear attention supports it: whether it acts on each token alone.
        held: Names of tensors made by `kernels.constructors.constant`. They follow the device and nothing else that is
            done to a module.
        flex_options: `kernel_options` for FlexAttention beside `score_mod`; None for the defaults.

    >>> Encoding().bias(None, None) is None
    True
    """

    name: ClassVar[str] = "none"
    relative: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    held: ClassVar[tuple[str, ...]] = ()
    flex_options: ClassVar[dict[str, object] | None] = None

    @property
    def length(self) -> int | None:
        """The number of positions it is defined for, from 0 on; None if there is no end."""
        return None

    @property
    def scale(self) -> float | None:
        """The factor that scores are multiplied by; None for the usual 1/sqrt(head_dim)."""
        return None

    def embed(self, x: Tensor, positions: Tensor | None = None, *, cache: EncodingCache | None = None) -> Tensor:
        """The tokens with their positions in them. A `cache` keeps what the next tokens need of these."""
        return x

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, *, k_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions in them; `k_positions` defaults to `positions`."""
        return q, k

    def bias(self, q_positions: Tensor | None, k_positions: Tensor | None) -> Tensor | None:
        """What is added to each score, in float32 or in the dtype of its parameters; None where nothing is."""
        return None

    def score_mod(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod | None:
        """`bias` as a function of one score at a time, for FlexAttention, which keeps no [q, k] in memory."""
        return None

    def score_mod_once(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod | None:
        """`score_mod` for one call: it may hold what was made of parameters in place of the parameters."""
        return self.score_mod(q_positions, k_positions)

    __prepare_scriptable__ = refuse_scripting

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Encoding":
        super()._apply(fn, recurse)
        for name in self.held:
            tensor = getattr(self, name)
            # fn may cast, move or empty; where it moves to is all that concerns these.
            device = fn(empty(0, device=tensor.device)).device
            # There is no float64 on MPS: what is float64 is used on the CPU then. Fake tensors may be on a device that
            # does not exist.
            if (
                device.type != "meta"
                and fake_mode() is None
                and not (device.type == "mps" and tensor.dtype == torch.float64)
            ):
                setattr(self, name, tensor.to(device))
        return self


def check_tokens(x: Tensor, dim: int, *, asked: str, parameter: Tensor | None = None) -> None:
    """Raise unless `x` is a tensor of tokens [.., seq, dim] on the device of the encoding's `parameter`.

    >>> check_tokens(torch.zeros(2, 5, 8), 8, asked="a doctest")
    """
    check_strided(x, asked=f"{asked}(x)")
    if not (isinstance(x, Tensor) and x.dtype in _TOKENS and x.dim() >= 2 and x.shape[-1] == dim):
        raise RopewalkError(
            asked=f"{asked}(x)",
            expected=f"tokens [batch, seq, {dim}] in float32, float64, bfloat16 or float16",
            got=f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else shown(x),
            do="give it the tokens before their heads are split, or make it with the dim that they have",
        )
    if parameter is not None and parameter.device != x.device:
        raise RopewalkError(
            asked=f"{asked}(x)",
            expected=f"tokens on {parameter.device}, where its parameters are",
            got=f"tokens on {x.device}",
            do="move one of them: encoding.to(x.device)",
        )


def check_token_positions(positions: Tensor, x: Tensor, *, asked: str, whole: bool = False) -> None:
    """Raise unless `positions` has one number per token of `x`, on its device; `whole` rejects floating-point ones.

    >>> check_token_positions(torch.arange(5), torch.zeros(2, 5, 8), asked="a doctest")
    """
    asked = f"{asked}(positions)"
    check_ids(positions, asked=asked, whole=whole)
    check_positions(positions, x, asked=asked, batched=x.dim() > 2)
    if may_look(positions):
        check_finite(positions, asked=asked)
