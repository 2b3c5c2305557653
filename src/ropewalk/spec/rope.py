"""RopeSpec: a rotary position encoding as a value."""

import dataclasses
import json
import math
from typing import Literal, cast, final, get_args

import numpy as np

from ropewalk.errors import RopewalkError, as_int, require_choice, require_count, require_even, shown
from ropewalk.shapes import Float64
from ropewalk.signatures import checks_names
from ropewalk.spec.arithmetic import FLOAT64, Arithmetic, ArrayT
from ropewalk.spec.axes import Axes
from ropewalk.spec.fields import LONGEST
from ropewalk.spec.frequencies import ConfigValue, Frequencies, Plain, RopeConfig, stated_in_config
from ropewalk.spec.temperature import QueryTemperature
from ropewalk.spec.value import Parts, construct, from_dict, from_parts, to_dict, to_parts, without_repeats
from ropewalk.spec.xpos import XPos

__all__ = ["ANGLES", "PAIRINGS", "ROTARY_SLICES", "AnglePrecision", "Pairing", "RopeSpec", "RotarySlice", "Sign"]

# "interleaved" rotates features (0,1), (2,3), ...; "half" rotates (i, i + rotary_dim/2).
Pairing = Literal["interleaved", "half"]
PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)
# Which features of a head are rotated if rotary_dim < head_dim: the first or the last ones.
RotarySlice = Literal["leading", "trailing"]
ROTARY_SLICES: tuple[RotarySlice, ...] = get_args(RotarySlice)
# "exact" computes angles in float64. "float32" repeats the operations of transformers, for models trained with them.
AnglePrecision = Literal["exact", "float32"]
ANGLES: tuple[AnglePrecision, ...] = get_args(AnglePrecision)
# 1 rotates counter-clockwise, as in the papers; -1 rotates clockwise.
Sign = Literal[1, -1]

# No model has a head this large. A larger number is a mistake, and its frequencies might not fit in memory.
MOST_FEATURES = 1 << 20


def _plain() -> Plain:
    # A function, not the class, is the factory: torch.compile cannot call a class that is stored in a dataclass.
    return Plain()


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary position encoding as a value: which features are rotated, in which pairs, at which frequencies.

    Pair i of a token at position m is rotated by the angle m * theta_i (RoFormer, 2104.09864, eq. 15),
    counter-clockwise: (x1, x2) -> (x1 cos - x2 sin, x1 sin + x2 cos).

    Interleaved pairs are the default because RoFormer uses them. Most checkpoints on model hubs use "half".

    A spec is frozen and hashable and contains no tensors. Specs with equal fields are equal. rotary_dim=None is stored
    as head_dim, so `dataclasses.replace` with a new head_dim needs a new rotary_dim too.

    Args:
        head_dim: Features per head. Even.
        frequencies: Frequency rule, which maps each pair to its theta_i.
        rotary_dim: Number of rotated features. Even, at most head_dim. Default: head_dim.
        pairing: "interleaved" rotates features (0, 1), (2, 3), ...; "half" rotates (i, i + rotary_dim / 2).
        rotary_slice: Whether the first ("leading") or the last ("trailing") rotary_dim features are rotated.
        axes: For tokens with more than one position: which position rotates which pair.
        sign: 1 rotates counter-clockwise, -1 clockwise.
        xpos: Position-dependent factors on queries and keys.
        query_temperature: Position-dependent factor on whole queries.
        angles: "exact" computes angles in float64. "float32" repeats the operations of transformers.

    Raises:
        RopewalkError: If a field is invalid, or if the frequencies do not fit rotary_dim or are not finite.

    >>> spec = RopeSpec(head_dim=8, frequencies=Plain(base=10_000), rotary_dim=4)
    >>> spec.inv_freq().tolist()
    [1.0, 0.01]
    >>> RopeSpec.from_json(spec.to_json()) == spec
    True
    """

    head_dim: int
    frequencies: Frequencies = dataclasses.field(default_factory=_plain)
    _: dataclasses.KW_ONLY
    # Number of rotated features. None means all of them, and is stored as head_dim.
    rotary_dim: int | None = None
    pairing: Pairing = "interleaved"
    rotary_slice: RotarySlice = "leading"
    # For tokens with more than one position: which position rotates which pair.
    axes: Axes | None = None
    sign: Sign = 1
    # Factors on queries and keys that depend on their positions.
    xpos: XPos | None = None
    query_temperature: QueryTemperature | None = None
    angles: AnglePrecision = "exact"

    def __post_init__(self) -> None:
        head_dim = require_even(
            self.head_dim,
            asked="RopeSpec(head_dim=...)",
            do="pass an even head_dim; features rotate in pairs",
        )
        if head_dim > MOST_FEATURES:
            raise RopewalkError(
                asked="RopeSpec(head_dim=...)",
                expected=f"at most {MOST_FEATURES} features in a head",
                got=f"{head_dim}",
                do="pass the width of one head, not of the model",
            )
        rotary_dim = head_dim if self.rotary_dim is None else self.rotary_dim
        rotary_dim = require_even(
            rotary_dim,
            asked="RopeSpec(rotary_dim=...)",
            do="pass an even rotary_dim; features rotate in pairs",
        )
        if rotary_dim > head_dim:
            raise RopewalkError(
                asked="RopeSpec(rotary_dim=...)",
                expected=f"at most head_dim = {head_dim}",
                got=f"rotary_dim = {rotary_dim}",
                do="lower rotary_dim, or leave it out to rotate the whole head",
            )
        object.__setattr__(self, "head_dim", head_dim)
        object.__setattr__(self, "rotary_dim", rotary_dim)
        if not isinstance(self.frequencies, Frequencies):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RopewalkError(
                asked="RopeSpec(frequencies=...)",
                expected=f"one of {', '.join(Frequencies.known)}",
                got=shown(self.frequencies),
                do="wrap a base as Plain(base), a list of frequencies as Explicit(list)",
            )
        if not dataclasses.is_dataclass(self.frequencies):
            raise RopewalkError(
                asked="RopeSpec(frequencies=...)",
                expected="a rule that is a frozen dataclass, so that it can be compared, hashed and written as JSON",
                got=shown(self.frequencies),
                do="put @dataclasses.dataclass(frozen=True) above the class",
            )
        require_choice(self.pairing, PAIRINGS, asked="RopeSpec(pairing=...)")
        require_choice(self.rotary_slice, ROTARY_SLICES, asked="RopeSpec(rotary_slice=...)")
        require_choice(self.angles, ANGLES, asked="RopeSpec(angles=...)")
        if as_int(self.sign) not in (1, -1):
            raise RopewalkError(
                asked="RopeSpec(sign=...)",
                expected="1 (counter-clockwise, as the papers have it) or -1",
                got=shown(self.sign),
                do="leave it out unless the checkpoint rotates the other way",
            )
        object.__setattr__(self, "sign", int(self.sign))
        for name, kind in (("axes", Axes), ("xpos", XPos), ("query_temperature", QueryTemperature)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise RopewalkError(
                    asked=f"RopeSpec({name}=...)",
                    expected=f"a value of {kind.__name__}, or None",
                    got=shown(value),
                    do=f"leave {name} out unless the model has it",
                )
        if self.axes is not None:
            self._check_axes(self.axes)
        _check_numbers(to_parts(self))

    def _check_axes(self, axes: Axes) -> None:
        if 2 * axes.pairs != self.rotary_dim:
            raise RopewalkError(
                asked="RopeSpec(axes=...)",
                expected=f"axes for {self.rotated_dim // 2} pairs: half of rotary_dim = {self.rotary_dim}",
                got=f"{axes.pairs} pairs",
                do=f"set rotary_dim={2 * axes.pairs}, or pass sections that sum to {self.rotated_dim // 2}",
            )
        for name in ("xpos", "query_temperature"):
            if getattr(self, name) is not None:
                raise RopewalkError(
                    asked=f"RopeSpec(axes=..., {name}=...)",
                    expected="one position per token: the factor depends on a single position",
                    got=f"{axes.count} axes",
                    do="leave one of them out",
                )

    @property
    def rotated_dim(self) -> int:
        """Number of rotated features: rotary_dim with the type int, because it is never None after construction.

        >>> RopeSpec(head_dim=8).rotated_dim
        8
        """
        return cast(int, self.rotary_dim)

    def inv_freq(self, length: int | None = None) -> Float64[np.ndarray, "*heads pairs"]:
        """Return sign * theta_i for each of the rotary_dim/2 pairs.

        Args:
            length: Number of positions in the sequence. Only rules whose frequencies depend on it, such as DynamicNTK
                and LongRope, use it. Default: a sequence that is not longer than trained_length.

        Returns:
            float64 frequencies [pairs], or [heads, pairs] if each head has its own.

        Raises:
            RopewalkError: If `length` is not a positive integer.

        >>> RopeSpec(head_dim=4, sign=-1).inv_freq().tolist()
        [-1.0, -0.01]
        """
        # Overflow gives infinity, which raises when the spec is constructed.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return np.asarray(self.evaluate(_length(length)), dtype=np.float64)

    def evaluate(self, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64) -> ArrayT:
        """Return `inv_freq` computed in any arithmetic.

        Args:
            length: Number of positions in the sequence: a number, or an array [batch, 1] of `arithmetic`.
            arithmetic: Array library and dtype to compute in. Default: NumPy float64.

        Returns:
            sign * theta_i [pairs]; [heads, pairs] if each head has its own; [batch, pairs] for an array of lengths.

        >>> RopeSpec(4, axes=Axes.repeated(2, 4)).evaluate().tolist()  # each axis has the frequencies of 2 features
        [1.0, 1.0]
        """
        if self.axes is None:
            return self.sign * self.frequencies.evaluate(self.rotated_dim, length, arithmetic)
        theta = self.frequencies.evaluate(self.axes.dim, length, arithmetic)
        return self.sign * theta[..., list(self.axes.index)]

    def amplitude(self, length: int | None = None) -> float:
        """Return the factor by which cos and sin are multiplied. It is 1.0 for a pure rotation.

        Args:
            length: Number of positions in the sequence. Only rules whose amplitude depends on it use it.

        Raises:
            RopewalkError: If `length` is not a positive integer.

        >>> RopeSpec(head_dim=4).amplitude()
        1.0
        """
        return float(self.frequencies.amplitude(_length(length)))

    @property
    def softmax_scale(self) -> float:
        """Factor by which the scale of the attention scores is multiplied. It is 1.0 for most rules.

        >>> RopeSpec(head_dim=4).softmax_scale
        1.0
        """
        return self.frequencies.softmax_scale

    @property
    def varies(self) -> bool:
        """Whether frequencies or amplitude depend on the sequence length, which a module must then receive.

        >>> RopeSpec(head_dim=4).varies
        False
        """
        return self.frequencies.varies

    @property
    def same_for_both(self) -> bool:
        """Whether queries and keys are multiplied by the same factors.

        >>> RopeSpec(head_dim=4, xpos=XPos(1024)).same_for_both
        False
        """
        return self.xpos is None and self.query_temperature is None

    def to_config(self, stack: Literal["transformers", "ropewalk"]) -> RopeConfig:
        """Return the keys of a config.json with which transformers computes this rotation in a model of its family.

        Pairing, slice, sign and the axes of vision towers are fixed by the model family and have no keys. The width of
        a trailing slice is not written either, because each family has its own keys for it.

        Args:
            stack: "transformers" for the rope types of transformers alone. "ropewalk" for the rope types that
                `ropewalk.hub.register_rope_types` adds, which support every rule with one row of frequencies.

        Returns:
            A dict with "rope_parameters", and with "max_position_embeddings" if the rule needs it.

        Raises:
            RopewalkError: If transformers has no key for a part of the spec.

        >>> RopeSpec(128, Plain(500_000), rotary_dim=64).to_config("transformers")
        {'rope_parameters': {'rope_type': 'default', 'rope_theta': 500000.0, 'partial_rotary_factor': 0.5}}
        >>> RopeSpec(4, Plain(100)).to_config("ropewalk")["rope_parameters"]
        {'rope_type': 'ropewalk', 'rope_theta': 100.0, 'rule': {'rule': 'Plain', 'base': 100.0}}
        """
        require_choice(stack, ("transformers", "ropewalk"), asked="RopeSpec.to_config(stack)")
        if self.xpos is not None:
            raise RopewalkError(
                asked=f'RopeSpec.to_config("{stack}")',
                expected="a rotation that transformers computes",
                got=shown(self.xpos),
                do="keep the spec as JSON: RopeSpec.to_json",
            )
        rule, dim = self.frequencies, self.rotated_dim if self.axes is None else self.axes.dim
        config = rule.to_config(dim) if stack == "transformers" else stated_in_config(rule, dim)
        keys = config["rope_parameters"]
        extra: dict[str, ConfigValue] = {} if self.axes is None else self.axes.to_config()
        extra |= {} if self.query_temperature is None else self.query_temperature.to_config()
        if self.rotated_dim < self.head_dim and self.rotary_slice == "leading":
            extra["partial_rotary_factor"] = _share(self.rotated_dim, self.head_dim)
        for key, value in extra.items():
            if keys.setdefault(key, value) != value:
                raise RopewalkError(
                    asked=f'RopeSpec.to_config("{stack}")',
                    expected=f"one value for the key {key!r}, which two parts of the spec share in transformers",
                    got=f"{keys[key]:g} and {value:g}",
                    do="keep the spec as JSON: RopeSpec.to_json",
                )
        return config

    def to_json(self) -> str:
        """Return the spec as JSON text, from which `from_json` makes an equal spec.

        >>> '"pairing": "half"' in RopeSpec(head_dim=4, pairing="half").to_json()
        True
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["frequencies"] = self.frequencies.to_dict()
        for name in ("axes", "xpos", "query_temperature"):
            if fields[name] is not None:
                fields[name] = to_dict(fields[name], "rule")
        return json.dumps(fields, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> "RopeSpec":
        """Return the spec that `to_json` wrote.

        Args:
            text: JSON text. Missing keys get their defaults.

        Raises:
            RopewalkError: If the text is not valid JSON, or if a key is unknown, occurs twice or has an invalid value
                such as NaN.

        >>> RopeSpec.from_json('{"head_dim": 4, "frequencies": {"rule": "Plain", "base": 10000}}').head_dim
        4
        """
        try:
            data: object = json.loads(text, object_pairs_hook=without_repeats)
        except (ValueError, TypeError, RecursionError) as error:
            raise _not_a_spec(text, str(error)) from None
        if not isinstance(data, dict) or "head_dim" not in data:
            raise _not_a_spec(text, 'no object with a "head_dim"')
        fields = dict(cast("dict[str, object]", data))
        names = [field.name for field in dataclasses.fields(RopeSpec)]
        for name in fields:
            require_choice(name, names, asked="the keys of a RopeSpec in JSON")
        if "frequencies" in fields:
            fields["frequencies"] = Frequencies.from_dict(fields["frequencies"])
        readers = {"axes": {"Axes": Axes}, "xpos": {"XPos": XPos}, "query_temperature": QueryTemperature.known}
        for name, known in readers.items():
            if fields.get(name) is not None:
                fields[name] = from_dict(fields[name], "rule", known, owner=f"the {name}")
        return construct(RopeSpec, fields, source="JSON")


def _check_numbers(parts: Parts) -> None:
    """Raise unless the frequencies of a spec fit it: at construction, not in the first forward pass."""
    spec = from_parts(parts, RopeSpec)
    rule = spec.frequencies
    for length in (None, 1 << 40) if spec.varies else (None,):
        theta = spec.inv_freq(length)
        if theta.ndim not in (1, 2) or 2 * theta.shape[-1] != spec.rotary_dim:
            raise RopewalkError(
                asked=f"the frequencies of {type(rule).__name__} for rotary_dim={spec.rotary_dim}",
                expected=f"[{spec.rotated_dim // 2}], one per pair, or one such row per head",
                got=f"shape {list(theta.shape)}",
                do="let evaluate(rotary_dim, ...) return rotary_dim / 2 numbers",
            )
        numbers = [*theta.ravel(), spec.amplitude(length), spec.softmax_scale]
        if not np.isfinite(numbers).all():
            raise RopewalkError(
                asked="RopeSpec(frequencies=...)",
                expected="finite frequencies, amplitude and softmax scale",
                got=shown(rule),
                do="use numbers that a model could have: factors and bases far below 1e300",
            )
    if not spec.varies and not np.array_equal(spec.inv_freq(), spec.inv_freq(1 << 40)):
        raise RopewalkError(
            asked=f"RopeSpec with {type(rule).__name__}",
            expected="`varies = True` in a rule whose frequencies depend on the length, so that modules pass it",
            got="varies = False, but frequencies that change with the length",
            do="add to the class: varies: ClassVar[bool] = True",
        )


# torch.compiler.assume_constant_result without importing torch, because torch.compile would trace NumPy. The function
# accepts the parts of the spec, because torch.compile cannot pass a spec that is not constructed yet.
_check_numbers.__dict__["_dynamo_marked_constant"] = True


def _share(rotated_dim: int, head_dim: int) -> float:
    """Return rotated_dim / head_dim, rounded up so that transformers' int(head_dim * share) is rotated_dim."""
    share = rotated_dim / head_dim
    while int(head_dim * share) < rotated_dim:
        share = math.nextafter(share, 1.0)
    return share


def _length(length: int | None) -> int | None:
    if length is None:
        return None
    number = require_count(length, asked="length=...", do="pass the number of positions, or leave it out")
    return min(number, LONGEST)


def _not_a_spec(text: object, reason: str) -> RopewalkError:
    return RopewalkError(
        asked="RopeSpec.from_json(text)",
        expected="the JSON text that RopeSpec.to_json wrote",
        got=f"{shown(text)}: {reason}",
        do="write one with RopeSpec(...).to_json()",
    )
