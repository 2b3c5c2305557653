"""Linear attention again, with the tables and options of an earlier call: what was decided for it is not looked up.

A short sequence takes longer on the host than on a GPU. Layers of a model repeat the same call with other numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.kernels.linear.triton_call import Call, Tensors
from ropewalk.kernels.linear.triton_prepare import is_aligned, is_readable, prepare, stores
from ropewalk.kernels.signature import signature
from ropewalk.kernels.torch_internals import current_device
from ropewalk.kernels.types import FeatureMapName, Layout, Side, Weighting

__all__ = ["Again", "again"]

# Most strides of cotangents and of saved tensors for which the backward is stored.
_MOST = 16


def again(q: Side, k: Side, v: Tensor, layout: Layout, weighting: Weighting, causal: bool) -> "Again | None":
    """Return the call for other numbers, or None if its tensors need a copy or it stores features.

    Arguments are those of `linear_attention`, without initial sums.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x = torch.zeros(1, 1, 2, 2, device=device)
    >>> call = again(Side(x, "elu"), Side(x, "elu"), x, Layout(False, 0, -2), Weighting(normalize=False), causal=True)
    >>> v = torch.tensor([[[[1.0, 0.0], [3.0, 4.0]]]], device=device)
    >>> call.forward(x, x, v, signature(x, x, v)[1])[0].tolist()  # two features of 1: twice the sum of visible values
    [[[[2.0, 0.0], [8.0, 8.0]]]]
    """
    if stores(q.x, v, weighting, causal) or weighting.decay is not None or weighting.band is not None:
        return None
    # As in a forward of autograd, so that both share what is decided.
    with torch.no_grad():
        x, call, at = prepare(q, k, v, None, layout, causal, None, weighting, None)
    return Again(q, k, layout, weighting, x, call, at) if call.direct else None


class Again:
    """A call of `linear_attention` for other numbers.

    Args:
        q: Queries of the first call.
        k: Keys of the first call.
        layout: Layout of the rotation.
        weighting: Factors on the terms, without tensors.
        x: Tensors of the first call.
        call: What was decided for its signature.
        at: Addresses of its tensors.

    >>> x = torch.zeros(1, 1, 2, 2)
    >>> tensors = Tensors(x, x, x, *[None] * 9, 0, 0)
    >>> call = Call(tensors, Layout(False, 0, -2), ("elu", "elu"), True, Weighting(), None, True)
    >>> Again(Side(x, "elu"), Side(x, "elu"), Layout(False, 0, -2), Weighting(), tensors, call, [0] * 12).device
    device(type='cpu')
    """

    device: torch.device

    def __init__(
        self, q: Side, k: Side, layout: Layout, weighting: Weighting, x: Tensors, call: Call, at: Sequence[int]
    ) -> None:
        self.device = call.device
        self._forward, self._backward = call, dict[object, Call | None]()
        self._maps: tuple[FeatureMapName, FeatureMapName] = q.map, k.map
        self._tables, self._options = (q.tables, k.tables), (layout, weighting)
        # What follows q, k and v, which are other tensors in each call. Tables are kept, and nobody writes to them.
        self._others, self._others_at = x[3:], tuple(at[3:])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the outputs, and what the backward needs.

        Args:
            q: Queries.
            k: Keys.
            v: Values. All have the signature of the first call.
            at: Their addresses.
        """
        if self.device.type == "cuda" and current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self.forward(q, k, v, at)
        x = Tensors(q, k, v, *self._others)
        out, _, saved = self._forward.forward(x, at + self._others_at, None, sums=False)
        return out, saved

    def backward(
        self, cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the gradients of q, k and v, or None if a tensor needs a copy or is not plain.

        Args:
            cotangent: Cotangent of the outputs.
            q: Queries.
            k: Keys.
            v: Values.
            out: Outputs.
            saved: The other result of `forward`.
        """
        if self.device.type == "cuda" and current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self.backward(cotangent, q, k, v, out, saved)
        # Hooks of saved tensors may return them with other strides.
        signed = signature(q, k, v, cotangent, out, saved)
        if signed is None:
            return None
        key, addresses = signed
        if key not in self._backward:
            if len(self._backward) >= _MOST:
                self._backward.clear()
            self._backward[key] = self._backward_call(cotangent, q, k, v, out, saved)
        call = self._backward.get(key)
        if call is None:
            return None
        x, at = Tensors(q, k, v, *self._others), addresses[:3] + self._others_at
        return call.backward(x, at, None, cotangent, out, saved, None, sums=False)[:3]

    def _backward_call(
        self, cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensor
    ) -> Call | None:
        """Return what is decided for a backward, or None if a tensor needs a copy."""
        if not (is_aligned(out) and is_aligned(saved) and is_readable(cotangent)):
            return None
        layout, weighting = self._options
        (q_map, k_map), (q_tables, k_tables) = self._maps, self._tables
        sides = Side(q, q_map, None, q_tables), Side(k, k_map, None, k_tables)
        call = prepare(*sides, v, None, layout, self._forward.causal, None, weighting, cotangent)[1]
        return call if call.direct else None
