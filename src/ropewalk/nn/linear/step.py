"""One token after a state, without the checks that the call before has made.

The checks of a call and the choice of a backend take longer than one token. A call that returns a state therefore
attaches a `Step` to it. The next call uses it if its arguments are the same objects, and passes it on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.backend import Registry, current, linear_step_on
from ropewalk.kernels.torch_internals import current_stream, is_capturing
from ropewalk.kernels.types import FeatureMap, Layout, Weighting
from ropewalk.nn.linear.state import LinearState
from ropewalk.nn.rotary.call import Placement
from ropewalk.nn.rotary.embedding import RotaryEmbedding

__all__ = ["Step", "attach_step", "depends_on_position_alone", "find_step"]


class Step:
    """What one more token needs to know of the calls before it.

    Args:
        arguments: The arguments of the calls: rope, bias, decay, feature_map, normalize, scale.
        rotation: The rotation, or None.
        maps: Feature maps of queries and keys.
        decay: Logarithm of the decay per head of the sums, or None. With a decay per token it is an argument.
        scale: Factor on results that are not divided.
        run: `Backend.linear_step`.
        device: Device of the state.

    >>> arguments, cpu = (None, None, None, "elu", True, None), torch.device("cpu")
    >>> step = Step(arguments, None, ("elu", "elu"), None, 1.0, lambda *_: None, cpu)
    >>> step(*[torch.ones(1, 1, 1, 1)] * 3, LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1))) is None
    True
    """

    def __init__(
        self,
        arguments: tuple[Any, ...],
        rotation: RotaryEmbedding | None,
        maps: tuple[str, str],
        decay: Tensor | None,
        scale: float,
        run: Callable[..., Any],
        device: torch.device,
    ) -> None:
        self.arguments: tuple[Any, ...] = arguments
        self.run: Callable[..., Any] = run
        self.registry: Registry = current()
        self._rotation: RotaryEmbedding | None = rotation
        self._layout: Layout = Layout(True, 0, -2) if rotation is None else rotation.layout
        self._decay: Tensor | None = decay
        self._maps: tuple[int, int] = FeatureMap[maps[0]].value, FeatureMap[maps[1]].value
        self._scale: float = scale
        self._device: torch.device | None = device if device.type == "cuda" else None
        # The stream that computed cos and sin.
        self._stream: int = 0
        # cos and sin of positions start .. stop-1.
        self._start: int = 0
        self._stop: int = 0
        self._cos: Tensor | None = None
        self._sin: Tensor | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState, decay: Tensor | None = None
    ) -> tuple[Tensor, LinearState] | None:
        """Return the output and the next state; None if the call is unusual in any way."""
        position = state.position
        if type(position) is not int or self.registry is not current():
            return None
        if self._device is not None:
            stream = current_stream(self._device)
            # Tensors that a CUDA graph reads must outlive it, but cached cos and sin may be freed.
            if is_capturing(stream):
                return None
            if stream != self._stream:
                self._stream, self._stop = stream, self._start
        if self._rotation is not None and not self._start <= position < self._stop and not self._find(position, q):
            return None
        result = self.run(
            q,
            k,
            v,
            state.above,
            state.below,
            self._cos,
            self._sin,
            position - self._start,
            self._decay if decay is None else decay,
            self._layout,
            self._maps,
            self.arguments[4],
            self._scale,
        )
        if result is None:
            return None
        # The constructor of a frozen dataclass takes longer than the token.
        fields = state.__dict__.copy()
        out, fields["above"], fields["below"] = result
        fields["position"] = position + 1
        # Adding it up takes as long as a part of the token, and few states are merged.
        fields["log_decay"] = None
        following = object.__new__(LinearState)
        object.__setattr__(following, "__dict__", fields)
        return out, following

    def _find(self, position: int, q: Tensor) -> bool:
        """Find cos and sin of a position, and return whether the rope supports it."""
        rotation = self._rotation
        if rotation is None or not isinstance(q, Tensor) or q.dim() != 4 or position < 0:
            return False
        context = rotation.context_length
        if context is not None and position >= context:
            return False
        cos, sin, row = rotation.shared_tables(q, None, Placement(offset=position))
        if cos.dim() != 2:
            return False
        self._cos, self._sin, self._start = cos, sin, position - row
        stop = self._start + cos.shape[0]
        self._stop = stop if context is None else min(stop, context)
        return True


def attach_step(
    state: LinearState,
    arguments: tuple[Any, ...],
    rotation: RotaryEmbedding | None,
    maps: tuple[str, str],
    weighting: Weighting,
    device: torch.device,
) -> None:
    """Let the next token use a `Step`, if the calls have nothing unusual and the backend has one.

    Args:
        state: The state that is returned.
        arguments: As in `Step`.
        rotation: The rotation, or None.
        maps: Names of the feature maps. A function has a name too, but no step supports it.
        weighting: The weighting of the call.
        device: Device of the state.

    >>> state = LinearState(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1))
    >>> arguments = (None, None, None, "favor", True, None)
    >>> attach_step(state, arguments, None, ("favor", "favor"), Weighting(), state.above.device)
    >>> find_step(state, arguments) is None
    True
    """
    if torch.compiler.is_compiling() or state.near is not None or state.encoding is not None:
        return
    if rotation is not None and not depends_on_position_alone(rotation):
        return
    feature_map = arguments[3]
    named = all(isinstance(x, str) for x in (feature_map if isinstance(feature_map, tuple) else (feature_map,)))
    if not named or any(name not in FeatureMap.__members__ for name in maps):
        return
    run = linear_step_on(device.type)
    bias = arguments[1]
    # Slopes that are learned may change between two tokens, and need gradients.
    if run is None or (isinstance(bias, torch.nn.Module) and any(True for _ in bias.parameters())):
        return
    decay = weighting.decay
    per_head = decay is not None and decay.shape[0] == decay.shape[2] == 1
    step_decay = decay[0, :, 0].detach() if decay is not None and per_head else None
    state.__dict__["_step"] = Step(arguments, rotation, maps, step_decay, weighting.scale, run, device)


def depends_on_position_alone(rotation: RotaryEmbedding) -> bool:
    """Whether cos and sin of a position are the same for all heads, lengths and calls, and for queries and keys.

    >>> depends_on_position_alone(RotaryEmbedding(4)), depends_on_position_alone(RotaryEmbedding(4, learned=True))
    (True, False)
    """
    spec = rotation.spec
    plain = spec.same_for_both and not spec.varies and spec.axes is None
    return plain and rotation.heads is None and rotation.log_scale is None and not rotation.check_ids


def find_step(state: object, arguments: tuple[Any, ...]) -> Step | None:
    """Return the `Step` of a state if the arguments of the call are those of the calls before.

    Args:
        state: The argument `state` of the call.
        arguments: As in `Step`.

    >>> find_step(None, ()) is None
    True
    """
    step: Step | None = getattr(state, "_step", None)
    if step is None:
        return None
    rope, bias, decay, feature_map, normalize, scale = step.arguments
    same = arguments[0] is rope and arguments[1] is bias and arguments[2] is decay and arguments[4] is normalize
    return step if same and arguments[3] == feature_map and arguments[5] == scale else None
