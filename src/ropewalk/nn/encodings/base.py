"""Encoding: the three hooks by which position enters a model, and what an encoding says of itself."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, shown
from ropewalk.nn.rotary.checks import check_finite, check_ids, check_positions
from ropewalk.ops import is_plain

__all__ = ["Encoding", "ScoreMod", "check_as", "check_token_positions", "check_tokens", "fixed", "may_look"]

# score_mod of FlexAttention: (score, batch, head, query index, key index) -> score.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_TOKENS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Encoding(nn.Module):
    """Where a token stands, brought into a model by one or more of three hooks; what is not overridden does nothing.

    `embed` changes the tokens [batch, seq, dim], once, at the bottom of a model. `rotate` changes queries and keys
    [batch, heads, seq, head_dim] in every layer. `bias` is added to the scores [heads, q, k] or [batch, heads, q, k].
    Positions are [seq] or [batch, seq]; None stands for 0 .. seq-1.

    >>> Encoding().bias(None, None) is None
    True
    """

    # The name under which `encoding` makes it.
    name: ClassVar[str] = "none"
    # Whether attention stays as it is when all positions shift by a constant.
    relative: ClassVar[bool] = True
    # Whether linear attention can use it: whether it acts on each token alone.
    linear: ClassVar[bool] = True
    # Attributes made by `fixed`, which follow the device and nothing else that is done to a module.
    held: ClassVar[tuple[str, ...]] = ()
    # What FlexAttention is to be given as kernel_options beside `score_mod`.
    flex_options: ClassVar[dict[str, Any] | None] = None

    @property
    def length(self) -> int | None:
        """How many positions it is defined for, from 0 on; None where there is no end."""
        return None

    @property
    def scale(self) -> float | None:
        """What scores are multiplied by; None for 1/sqrt(head_dim), which is usual."""
        return None

    def embed(self, x: Tensor, positions: Tensor | None = None, *, cache: Any = None) -> Tensor:
        """The tokens with their positions in them. A `cache` keeps what the next tokens need of these."""
        return x

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, *, k_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions in them; keys stand where queries do unless told."""
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Encoding":
        super()._apply(fn, recurse)
        for name in self.held:
            tensor = getattr(self, name)
            # fn may cast, move or empty; where it moves to is all that concerns these.
            device = fn(torch.empty(0, device=tensor.device)).device
            # There is no float64 on MPS: what is float64 is used on the CPU then.
            if device.type != "meta" and not (device.type == "mps" and tensor.dtype == torch.float64):
                setattr(self, name, tensor.to(device))
        return self


def fixed(values: Any) -> Tensor:
    """Numbers for an attribute that `Encoding.held` names: real under a meta default device, fit for a later backward.

    >>> with torch.device("meta"):
    ...     fixed([1, 2]).tolist()
    [1, 2]
    """
    home = torch.get_default_device()
    home = torch.device("cpu") if home.type in ("meta", "mps") else home
    with torch.inference_mode(False):
        return torch.as_tensor(values, device=home)


def may_look(ids: Tensor) -> bool:
    """Whether the values of ids may be looked at without making a device wait or a compiler stop.

    >>> may_look(torch.arange(2)), may_look(torch.arange(2, device="meta"))
    (True, False)
    """
    return is_plain(ids) and ids.device.type == "cpu"


def check_as(asked: str, check: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """A check of rotary_arguments, whose error then says what was asked here.

    >>> try:
    ...     check_as("here", check_ids, torch.tensor([True]), name="positions")
    ... except RopewalkError as error:
    ...     print(error.asked, "|", error.got)
    here | torch.bool [1]
    """
    try:
        check(*arguments, **options)
    except RopewalkError as error:
        raise RopewalkError(asked=asked, expected=error.expected, got=error.got, do=error.do) from None


def check_tokens(x: Any, dim: int, *, asked: str, parameter: Tensor | None = None) -> None:
    """Refuses what is no tensor of tokens [.., seq, dim], or lies elsewhere than the encoding's parameter.

    >>> check_tokens(torch.zeros(2, 5, 8), 8, asked="a doctest")
    """
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


def check_token_positions(positions: Any, x: Tensor, *, asked: str, whole: bool = False) -> None:
    """Refuses positions that are not one number for each token of x, on its device; `whole` refuses fractions.

    >>> check_token_positions(torch.arange(5), torch.zeros(2, 5, 8), asked="a doctest")
    """
    asked = f"{asked}(positions)"
    check_as(asked, check_ids, positions, name="positions", whole=whole)
    check_as(asked, check_positions, positions, x, -2, x.dim() > 2, "positions")
    if may_look(positions):
        check_as(asked, check_finite, positions, "positions")
