"""RecurrentEncoding: a recurrent network over the tokens, before the first layer of the model."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ropewalk.errors import RopewalkError, require_count, shown
from ropewalk.kernels.constructors import new_zeros
from ropewalk.nn.encodings.base import Encoding, EncodingCache, check_token_positions, check_tokens

__all__ = ["RecurrentEncoding"]


class RecurrentEncoding(Encoding):
    """h_m = tanh(A x_m + B h_{m-1} + c), with h = 0 before the first token (Elman, Finding structure in time, 1990).

    Each token is replaced by the state of the network after it. Tokens are read from the lowest position to the
    highest. Only this order matters, so the encoding is relative and has no last position. Tokens are processed
    sequentially, and torch.compile unrolls the loop. A, B and c are initialised uniformly in +-1/sqrt(dim), as in
    `torch.nn.RNN`. Computed in float32, or in float64 if x or a parameter is float64, and rounded once.

    A `cache` stores h between calls in its attribute `encoding_state` [batch, dim]. A prefill followed by steps then
    returns the same as one call on the whole sequence. The calls must be in order, and gradients flow through the
    state. Padding is read like any token, so a state is correct only for sequences of the same length.

    Args:
        dim: Width of the model.

    Raises:
        RopewalkError: If `dim` is not an integer of at least 1.

    >>> network = RecurrentEncoding(1)
    >>> for parameter, value in zip(network.parameters(), (1.0, 1.0, 0.0)):
    ...     _ = torch.nn.init.constant_(parameter, value)
    >>> h = network.embed(torch.tensor([[[1.0], [0.0]]]))
    >>> [round(value, 4) for value in h.flatten().tolist()]  # tanh(1), tanh(tanh(1))
    [0.7616, 0.642]
    """

    name = "recurrent"
    only_embeds = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim: int = require_count(dim, asked="RecurrentEncoding(dim)", do="pass the number of features")
        self.input_weight: nn.Parameter = nn.Parameter(torch.empty(self.dim, self.dim))
        self.state_weight: nn.Parameter = nn.Parameter(torch.empty(self.dim, self.dim))
        self.input_bias: nn.Parameter = nn.Parameter(torch.empty(self.dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters, as required after `to_empty`."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.dim**-0.5), self.dim**-0.5)

    def embed(self, x: Tensor, positions: Tensor | None = None, *, cache: EncodingCache | None = None) -> Tensor:
        asked = "RecurrentEncoding.embed"
        check_tokens(x, self.dim, asked=asked, parameter=self.input_weight)
        self.note_embedded()
        if positions is not None:
            check_token_positions(positions, x, asked=f"{asked}(positions)")
        before = None if cache is None else getattr(cache, "encoding_state", None)
        self._check_state(before, x)
        if x.shape[-2] == 0:
            return x
        # At least float32: rounding errors accumulate from token to token.
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.input_weight.dtype), torch.float32)
        order = None if positions is None else _order(positions, x)
        tokens = x if order is None else _reordered(x, order)
        # The part that does not depend on the state is one product for all tokens.
        inputs = functional.linear(tokens.to(dtype), self.input_weight.to(dtype), self.input_bias.to(dtype))
        inputs = inputs.flatten(0, -3) if x.dim() > 2 else inputs.unsqueeze(0)
        recurrence = self.state_weight.to(dtype).t()
        if before is None:
            state = new_zeros(inputs, inputs.shape[0], self.dim)
        else:
            state = before.reshape(-1, self.dim).to(inputs.dtype)
        states: list[Tensor] = []
        for token in inputs.unbind(1):
            state = torch.tanh(torch.addmm(token, state, recurrence))
            states.append(state)
        outputs = torch.stack(states, dim=1).view(x.shape)
        if order is not None:
            outputs = _reordered(outputs, order.argsort(dim=-1))
        if cache is not None:
            state = state.view(*x.shape[:-2], self.dim)
            if not torch.compiler.is_compiling() and state.is_inference():
                # It could not be used outside of inference mode.
                with torch.inference_mode(False):
                    state = state.clone()
            cache.encoding_state = state
        return outputs.to(x.dtype)

    def _check_state(self, state: Tensor | None, x: Tensor) -> None:
        shape = (*x.shape[:-2], self.dim)
        if state is None or (isinstance(state, Tensor) and state.shape == shape and state.device == x.device):
            return
        raise RopewalkError(
            asked="RecurrentEncoding.embed(cache=...)",
            expected=f"an encoding_state {list(shape)} on {x.device}, one row per sequence; None at the first token",
            got=f"{list(state.shape)} on {state.device}" if isinstance(state, Tensor) else shown(state),
            do="continue the sequences that the cache was filled with, or pass a new cache",
        )

    def extra_repr(self) -> str:
        return f"{self.dim}"


def _order(positions: Tensor, x: Tensor) -> Tensor:
    """Return the indices that sort tokens by position. Equal positions keep their order."""
    # Some integer dtypes cannot be sorted.
    positions = positions if positions.is_floating_point() else positions.to(torch.int64)
    order = positions.argsort(dim=-1, stable=True)
    return order if order.dim() == 1 else order.view(order.shape[0], *[1] * (x.dim() - 3), order.shape[1])


def _reordered(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(-2, order.unsqueeze(-1).expand(x.shape))
