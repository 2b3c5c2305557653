"""The arguments of RotaryEmbedding that specify the rotation: a head_dim with base and pairing, or a RopeSpec."""

from os import PathLike

from ropewalk.errors import RopewalkError, shown
from ropewalk.kernels.types import Layout
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import Pairing, RopeSpec

__all__ = ["check_same_features", "shown_fields", "spec_of_arguments"]


def spec_of_arguments(head_dim: object, base: float | None, pairing: Pairing | None) -> RopeSpec:
    """Return the spec that the arguments describe.

    Args:
        head_dim: Number of features per head, or a RopeSpec.
        base: Base of the frequencies; None for the default. Not allowed with a RopeSpec.
        pairing: Pairing of the features; None for the default. Not allowed with a RopeSpec.

    Returns:
        The spec.

    Raises:
        RopewalkError: If an argument is invalid, or if a base or a pairing is passed with a RopeSpec.

    >>> spec_of_arguments(4, None, "half").pairing
    'half'
    """
    if head_dim is None or isinstance(head_dim, dict):
        layers = isinstance(head_dim, dict) and all(
            value is None or isinstance(value, RopeSpec) for value in head_dim.values()
        )
        by_layer = f"one spec per layer type: {', '.join(map(str, head_dim))}" if head_dim and layers else None
        raise RopewalkError(
            asked="RotaryEmbedding(...)",
            expected="a head_dim, or one RopeSpec",
            got=by_layer or shown(head_dim),
            do="create one module per spec that is not None: RotaryEmbedding(specs[layer_type])"
            if layers
            else "read a config with load_spec first; None is a layer without rotation, which needs no module",
        )
    if isinstance(head_dim, str | PathLike):
        raise RopewalkError(
            asked="RotaryEmbedding(...)",
            expected="a head_dim, or one RopeSpec",
            got=shown(head_dim),
            do="read a config first: RotaryEmbedding(load_spec(path))",
        )
    if not isinstance(head_dim, RopeSpec):
        frequencies = Plain() if base is None else Plain(base)
        pairs: Pairing = "interleaved" if pairing is None else pairing
        return RopeSpec(head_dim, frequencies, pairing=pairs)  # pyright: ignore[reportArgumentType]  # RopeSpec checks it
    if base is not None or pairing is not None:
        raise RopewalkError(
            asked="RotaryEmbedding(spec, ...)",
            expected="a spec alone: it contains the base and the pairing",
            got=f"a spec with base={base}, pairing={pairing!r}",
            do="set them in the spec: RopeSpec(128, Plain(base), pairing=...)",
        )
    return head_dim


def shown_fields(spec: RopeSpec) -> list[str]:
    """Return the fields of a spec that a reader must know: pairing and base, and what is not the default.

    >>> shown_fields(RopeSpec(8, rotary_dim=4, sign=-1))
    ['8', 'Plain(base=10000.0)', "pairing='interleaved'", 'rotary_dim=4 (leading)', 'sign=-1']
    """
    parts = [f"{spec.head_dim}", f"{spec.frequencies}", f"pairing={spec.pairing!r}"]
    if spec.rotary_dim != spec.head_dim:
        parts.append(f"rotary_dim={spec.rotary_dim} ({spec.rotary_slice})")
    usual = {"axes": None, "sign": 1, "xpos": None, "query_temperature": None, "angles": "exact"}
    return parts + [f"{name}={getattr(spec, name)!r}" for name in usual if getattr(spec, name) != usual[name]]


def check_same_features(
    own: tuple[RopeSpec, Layout, int | None, str], other: tuple[RopeSpec, Layout, int | None, str]
) -> None:
    """Raise unless two modules rotate the same features in the same pairs.

    Args:
        own: Spec, layout, number of heads with own frequencies, and text of one module.
        other: The same of the other one.

    >>> spec = RopeSpec(4)
    >>> check_same_features(*[(spec, Layout(False, 0, -2), None, "rope")] * 2)
    """

    def features(spec: RopeSpec, layout: Layout, heads: int | None, _: str) -> tuple[object, ...]:
        axes = None if spec.axes is None else spec.axes.weights
        return layout, heads, spec.head_dim, spec.rotated_dim, axes

    if features(*own) != features(*other):
        raise RopewalkError(
            asked="rope.retune(x, to=other)",
            expected="the same head_dim, rotary_dim, rotary_slice, pairing, axes and seq_dim in both",
            got=f"{own[3]} and {other[3]}",
            do="unrotate with one and rotate with the other: other(rope.unrotate(k, positions=p), positions=p)",
        )
