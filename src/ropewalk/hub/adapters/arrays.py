"""A spec for the array libraries MLX and JAX: arguments of `mx.fast.rope`, and cos and sin as JAX arrays."""

import dataclasses
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.errors import RopewalkError, shown
from ropewalk.signatures import checks_names
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import RopeSpec

__all__ = ["MlxRope", "to_jax", "to_mlx"]


@dataclasses.dataclass(frozen=True, eq=False)
class MlxRope:
    """A rotation by `mx.fast.rope`: its arguments, and what they cannot express. `to_mlx` returns it.

    A call rotates an mx.array [batch, ..., seq, head_dim]. MLX is imported by the first call.

    Attributes:
        arguments: Arguments of `mx.fast.rope`, without the array and the offset. `freqs` is None or a NumPy array of
            1/theta_i: MLX divides positions by it.
        amplitude: Factor on the rotated features, which `mx.fast.rope` does not have. 1.0 for most rules.
        start: First rotated feature: 0, or head_dim - rotary_dim for a trailing slice.
        head_dim: Features per head.

    >>> to_mlx(RopeSpec(8, rotary_dim=4)).amplitude
    1.0
    """

    arguments: dict[str, Any]
    amplitude: float
    start: int
    head_dim: int

    def __call__(self, x: Any, offset: Any = 0) -> Any:
        """Rotate x, whose first token is at position `offset`: an int, or an mx.array [batch].

        Args:
            x: mx.array [batch, ..., seq, head_dim].
            offset: Position of the first token.

        Returns:
            The rotated array, in the dtype of x.

        Raises:
            RopewalkError: If the last dimension of x is not head_dim.
        """
        mx: Any = importlib.import_module("mlx.core")
        if x.shape[-1] != self.head_dim:
            raise RopewalkError(
                asked="to_mlx(spec)(x)",
                expected=f"an array [batch, ..., seq, {self.head_dim}]",
                got=f"shape {list(x.shape)}",
                do="pass the array after the heads were split, or the spec of its head_dim",
            )
        freqs = self.arguments["freqs"]
        arguments = self.arguments | {"freqs": None if freqs is None else mx.array(freqs)}
        before, part = x[..., : self.start], x[..., self.start :]
        rotated = mx.fast.rope(part, **arguments, offset=offset)
        if self.amplitude != 1:
            # cos and sin times the amplitude: the features that are not rotated keep their size.
            stop = self.arguments["dims"]
            wide = rotated[..., :stop].astype(mx.float32) * self.amplitude
            rotated = mx.concatenate([wide.astype(x.dtype), rotated[..., stop:]], axis=-1)
        return mx.concatenate([before, rotated], axis=-1) if self.start else rotated


@checks_names
def to_mlx(spec: RopeSpec, *, length: int | None = None) -> MlxRope:
    """Return a spec as arguments of `mx.fast.rope`.

    `mx.fast.rope` rotates by (m * scale) / freqs_i, or by m * scale * base^(-2i/dims), in float32, at positions that
    count up from an offset. `traditional` is "interleaved". Rules other than Plain are passed as `freqs`, with scale 1.

    Args:
        spec: The rotation.
        length: Length of the sequence, for DynamicNTK and LongRope.

    Returns:
        The rotation as a function of x and offset, with `arguments` and `amplitude`.

    Raises:
        RopewalkError: If `mx.fast.rope` cannot compute it: axes, frequencies per head, xPos, query temperatures.

    >>> to_mlx(RopeSpec(4, pairing="half")).arguments
    {'dims': 4, 'traditional': False, 'base': 10000.0, 'scale': 1.0, 'freqs': None}
    >>> to_mlx(RopeSpec(4, sign=-1)).arguments["freqs"].tolist()
    [-1.0, -100.0]
    """
    asked = "to_mlx(spec)"
    _check(spec, asked)
    theta = spec.inv_freq(length)
    if spec.axes is not None or theta.ndim == 2:
        got = f"{spec.axes.count} axes" if spec.axes is not None else f"frequencies of {len(theta)} heads"
        do = "compute cos and sin with RotaryEmbedding.at and rotate by the formula"
        raise RopewalkError(
            asked=asked, expected="one position per token, and frequencies for all heads", got=got, do=do
        )
    plain = isinstance(spec.frequencies, Plain) and spec.sign == 1
    with np.errstate(divide="ignore"):
        # A pair that is not rotated has the frequency 0 and an infinite period.
        freqs = None if plain else (1 / theta).astype(np.float32)
    arguments = {
        "dims": spec.rotated_dim,
        "traditional": spec.pairing == "interleaved",
        "base": float(spec.frequencies.base) if isinstance(spec.frequencies, Plain) and plain else None,
        "scale": 1.0,
        "freqs": freqs,
    }
    start = spec.head_dim - spec.rotated_dim if spec.rotary_slice == "trailing" else 0
    return MlxRope(arguments, spec.amplitude(length), start, spec.head_dim)


@checks_names
def to_jax(spec: RopeSpec, positions: npt.ArrayLike, *, length: int | None = None) -> tuple[Any, Any]:
    """Return cos and sin of a spec at `positions` as JAX arrays, times the amplitude.

    Angles are computed in float64 on the host, whatever jax_enable_x64 is, and cos and sin are rounded once to float32.
    `jnp.cos(positions * theta)` computes the angles in float32, with an error that grows with the position.

    Args:
        spec: The rotation.
        positions: [seq] or [batch, seq]; [A, seq] or [A, batch, seq] for a spec with A axes. Not traced by `jax.jit`.
        length: Length of the sequence, for DynamicNTK and LongRope.

    Returns:
        cos and sin, float32 [seq, pairs] or [batch, seq, pairs]; [heads, seq, pairs] or [batch, heads, seq, pairs] if
        frequencies are per head.

    Raises:
        RopewalkError: If positions do not match the spec, or if the spec has xPos or a query temperature.

    >>> cos, sin = to_jax(RopeSpec(4), [0, 2])
    >>> [round(float(c), 4) for c in cos[1]]  # cos 2, cos 0.02
    [-0.4161, 0.9998]
    """
    asked = "to_jax(spec, positions)"
    _check(spec, asked)
    ids = _host_array(positions)
    count = 0 if spec.axes is None else 1
    if ids is None or ids.ndim not in (1 + count, 2 + count) or (spec.axes and ids.shape[0] != spec.axes.count):
        axes = "" if spec.axes is None else f"{spec.axes.count}, "
        raise RopewalkError(
            asked=asked,
            expected=f"finite numbers of shape [{axes}seq] or [{axes}batch, seq]",
            got=shown(positions) if ids is None else f"shape {list(ids.shape)}",
            do="pass positions as a NumPy or JAX array outside of jax.jit, and cos and sin into the compiled function",
        )
    theta = spec.inv_freq(length)
    if spec.axes is not None:
        angles = np.einsum("a...,ap->...p", ids, spec.axes.matrix(theta))
    elif theta.ndim == 2:
        angles = ids[..., None, :, None] * theta[:, None, :]
    else:
        angles = ids[..., None] * theta
    amplitude = spec.amplitude(length)
    jnp: Any = importlib.import_module("jax.numpy")
    cos, sin = (jnp.asarray((function(angles) * amplitude).astype(np.float32)) for function in (np.cos, np.sin))
    return cos, sin


def _check(spec: RopeSpec, asked: str) -> None:
    if not isinstance(spec, RopeSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
        do = "create one: RopeSpec(head_dim, ...), or load_spec(config)"
        raise RopewalkError(asked=asked, expected="a RopeSpec", got=shown(spec), do=do)
    if not spec.same_for_both:
        raise RopewalkError(
            asked=asked,
            expected="a spec that treats queries and keys alike",
            got="xPos" if spec.xpos is not None else "a query temperature",
            do="leave it out of the spec, and multiply queries and keys by their factors yourself",
        )


def _host_array(positions: npt.ArrayLike) -> npt.NDArray[np.float64] | None:
    """Return positions in float64, or None if they are no finite numbers, or are traced by a compiler."""
    try:
        array = np.asarray(positions)
        numbers = array.astype(np.float64) if array.dtype.kind in "iuf" else None
    except (TypeError, ValueError):
        # The error of a traced JAX array is a TypeError.
        return None
    return numbers if numbers is not None and np.isfinite(numbers).all() else None
