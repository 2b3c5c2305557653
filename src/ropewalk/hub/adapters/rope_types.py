"""Rope types in transformers for the rules that it lacks: a config contains the whole rule, and models compute it."""

import contextlib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.caller import Caller
from ropewalk.hub.configs.keys import Keys
from ropewalk.hub.configs.rope_types import whole_rule
from ropewalk.spec.frequencies import STATED, STATED_DYNAMIC, Frequencies

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["register_rope_types"]


def register_rope_types() -> tuple[str, ...]:
    """Add the rope types "ropewalk" and "ropewalk_dynamic" to transformers, for this process.

    A config with one of them contains a whole rule, as `RopeSpec.to_config("ropewalk")` and
    `hub.extend_model(...).config(rule)` write it. Models of transformers then compute its frequencies, from float64 and
    rounded once to float32. "ropewalk_dynamic" is for rules that depend on the length: transformers computes them again
    when a sequence becomes longer than all earlier ones, as it does for "dynamic".

    Without this call, such a config raises the `KeyError: 'ropewalk'` of transformers when the model is made. A second
    call changes nothing. The types of transformers are not changed.

    Returns:
        The names of the rope types.

    Raises:
        RopewalkError: If transformers is not installed, or older than version 5.

    >>> register_rope_types()
    ('ropewalk', 'ropewalk_dynamic')
    >>> from transformers import LlamaConfig
    >>> import ropewalk as rw
    >>> rule = rw.NTKByParts(10_000, factor=4, trained_length=64)
    >>> keys = rw.RopeSpec(8, rule, pairing="half").to_config("ropewalk")
    >>> config = LlamaConfig(hidden_size=32, num_attention_heads=4, **keys)
    >>> rw.load_spec(config).frequencies == rule
    True
    """
    try:
        module: Any = importlib.import_module("transformers.modeling_rope_utils")
        mixin = module.RotaryEmbeddingConfigMixin
    except (ImportError, AttributeError) as error:
        raise RopewalkError(
            asked="register_rope_types()",
            expected="transformers 5, whose configs have rope_parameters",
            got=f"{error}",
            do="pip install 'transformers>=5'",
        ) from None
    for name in (STATED, STATED_DYNAMIC):
        module.ROPE_INIT_FUNCTIONS[name] = rope_parameters_of
        # transformers calls the function with this name when a config is made.
        setattr(mixin, f"_validate_{name}_rope_parameters", _validate)
    return STATED, STATED_DYNAMIC


def rope_parameters_of(
    config: Any,
    device: "torch.device | str | None" = None,
    seq_len: "int | Tensor | None" = None,
    layer_type: str | None = None,
    **_: object,
) -> "tuple[Tensor, float]":
    """Return the frequencies and the amplitude of a config, as transformers' `ROPE_INIT_FUNCTIONS` do.

    Args:
        config: Config of transformers.
        device: Device of the frequencies.
        seq_len: Length of the longest sequence, for rules that depend on it.
        layer_type: Layer type whose rope parameters are read, if the config has parameters per layer type.

    Returns:
        Frequencies [pairs] in float32, and the factor on cos and sin.

    >>> from types import SimpleNamespace
    >>> keys = {"rope_type": "ropewalk", "rule": {"rule": "Explicit", "inv_freq": [1.0, 0.5]}}
    >>> rope_parameters_of(SimpleNamespace(head_dim=4, rope_parameters=keys))
    (tensor([1.0000, 0.5000]), 1.0)
    """
    if layer_type is not None:
        # Families whose layer types have different head dimensions. Others raise.
        with contextlib.suppress(ValueError, AttributeError):
            config = config.per_layer_config[layer_type]
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    rule = _rule_in(parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    length = None if seq_len is None or not rule.varies else float(seq_len)
    # Imported here: the other functions of the hub need no torch.
    import torch

    from ropewalk.kernels.constructors import tensor

    frequencies = tensor(rule.evaluate(rotary_dim, length).tolist(), dtype=torch.float64, device="cpu")
    return frequencies.to(device=device, dtype=torch.float32), float(rule.amplitude(length))


def _rule_in(parameters: Mapping[str, Any]) -> Frequencies:
    return whole_rule(Keys(dict(parameters), caller=Caller("a config with a rope type of ropewalk")))


def _validate(config: Any, rope_parameters: Mapping[str, Any], ignore_keys: object = None) -> None:
    """Raise `RopewalkError` for a config whose rule is invalid: the validation that transformers runs."""
    _rule_in(rope_parameters)
