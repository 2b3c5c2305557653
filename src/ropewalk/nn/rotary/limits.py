"""Limits: up to which positions a rotation is defined, checked where the host knows them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.torch_internals import is_plain
from ropewalk.nn.position_checks import check_finite
from ropewalk.spec.xpos import XPos

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """The context length of a module and the xPos of its spec; `check_ids` looks at ids on a GPU too.

    >>> Limits(8, None, False).check_range(0, 8)
    """

    context_length: int | None
    xpos: XPos | None
    check_ids: bool

    def check_range(self, start: int, seq: int) -> None:
        """Raise if one of start .. start+seq-1 is past a limit.

        >>> try:
        ...     Limits(8, None, False).check_range(7, 2)
        ... except RopewalkError as error:
        ...     error.got
        'position 8'
        """
        if seq:
            self._check_last(start + seq - 1)
            self._check_first(start)

    def check_values(self, positions: Tensor, asked: str) -> None:
        """Raise if positions are not finite or past a limit, as far as the host may look at them.

        >>> Limits(None, None, False).check_values(torch.arange(3), "a doctest")
        """
        if not self.may_look(positions):
            return
        check_finite(positions, asked=asked)
        if positions.numel() and (self.context_length is not None or self.xpos is not None):
            self._check_last(int(positions.max()))
            self._check_first(int(positions.min()))

    def may_look(self, ids: Tensor) -> bool:
        """Whether the values of ids may be looked at: that makes a device wait, and a compiler stop.

        >>> Limits(None, None, False).may_look(torch.arange(2))
        True
        """
        if not is_plain(ids) or not (ids.device.type == "cpu" or self.check_ids):
            return False
        return not (ids.is_cuda and torch.cuda.is_current_stream_capturing())

    def _check_last(self, last: int) -> None:
        for limit in (self.context_length, None if self.xpos is None else self.xpos.length):
            if limit is not None and last >= limit:
                raise RopewalkError(
                    asked=f"rope(...) with context_length={limit}",
                    expected=f"positions below {limit}",
                    got=f"position {last}",
                    do="shorten the input, or raise context_length if the model is meant to go there",
                )

    def _check_first(self, first: int) -> None:
        if self.xpos is not None and first < -self.xpos.length:
            raise RopewalkError(
                asked=f"rope(...) with {self.xpos}",
                expected=f"positions from {-self.xpos.length} on",
                got=f"position {first}",
                do="shift the positions: scores depend on distances alone",
            )
