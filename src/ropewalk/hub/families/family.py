"""A family of models: the properties of its rotation that configs do not contain."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ropewalk.spec.axes import Axes
from ropewalk.spec.by_parts import Policy
from ropewalk.spec.rope import Pairing, RotarySlice, Sign

__all__ = ["BASE_KEYS", "Family", "LayerPattern", "Sharing", "Windows"]

# How layer types share the rope parameters of a config. Each name is a function of configs/layers.py.
Sharing: TypeAlias = Literal[
    "alike",
    "none",
    "gemma",
    "modernbert",
    "olmo",
    "sliding",
    "listed",
    "bases",
    "required bases",
    "optional",
    "opt-in",
]
# All keys under which some model stores its base.
BASE_KEYS = ("rope_theta", "rotary_emb_base", "rotary_base", "rotary_embedding_base", "rope_base")


@dataclass(frozen=True)
class LayerPattern:
    """A repeating pattern of layers in which one layer per group attends to the whole context.

    Attributes:
        every: The number of layers per group.
        sees_everything: Which layer of a group attends to the whole context.
        other: The layer type of the other layers.
        key: The config key that overrides `every`, if there is one.

    >>> LayerPattern(6, key="sliding_window_pattern").sees_everything
    'last'
    """

    every: int
    sees_everything: Literal["last", "first"] = "last"
    other: Literal["sliding_attention", "linear_attention"] = "sliding_attention"
    key: str | None = None


# Which layers have an attention window. `Family.windows` explains the names.
Windows: TypeAlias = Literal["none", "all", "all by default", "from a layer on"] | LayerPattern


@dataclass(frozen=True)
class Family:
    """The properties of a rotation that follow from model_type. The defaults are those of Llama.

    >>> Family().pairing, Family().base
    ('half', 10000.0)
    """

    pairing: Pairing = "half"
    rotary_slice: RotarySlice = "leading"
    sign: Sign = 1
    # The default base, and the default per layer type where those differ.
    base: float = 10_000.0
    bases: dict[str, float] = field(default_factory=dict[str, float])
    # The default share of a head that is rotated; or a function of head_dim that overrides the config.
    share: float = 1.0
    rotary_dim: Callable[[int], int] | None = None
    # Multi-head latent attention: qk_nope_head_dim features without rotation, then qk_rope_head_dim rotated ones.
    latent: bool = False
    # The config key of a flag for interleaved pairs. `pairing` is the default without it.
    interleave_key: str | None = None
    policy: Policy = "transformers"
    # How sections become axes, or a function from rotary_dim to the axes of a vision tower; the default sections.
    axes: Literal["chunked", "interleaved", "ernie"] | Callable[[int], Axes] | None = None
    sections: tuple[int, ...] | None = None
    # "everywhere" is llama_4_scaling_beta; "without rotation" is Llama 4's, in layers that do not rotate.
    temperature: Literal["everywhere", "without rotation"] | None = None
    # Whether transformers computes the angles in float64, and rounds only cos and sin to float32.
    exact_angles: bool = False
    # How layer types share the rope parameters.
    layers: Sharing = "alike"
    # Which layers have an attention window if a file has no layer_types; None if only layer_types specifies it.
    # "none": no layer; unknown if the config has a window. "all": every layer, if the config has a window. "all by
    # default": the same, and the class has a default window that files may omit. "from a layer on": the layers from
    # max_window_layers on.
    windows: Windows | None = "none"
    # Names of nested rope parameters that are not in layer_types.
    labels: tuple[str, ...] = ()
    # Keys of the head_dim; and per layer type with its own head_dim, its key and default.
    head_dim: tuple[str, ...] = ("head_dim", "attention_head_dim", "kv_channels")
    head_dims: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    # The default head_dim of the class in transformers, if it does not depend on the width.
    usual_head_dim: int | None = None
    width: tuple[str, ...] = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
    heads: tuple[str, ...] = ("num_attention_heads", "n_head", "n_heads", "num_heads")
    # The default number of rotated features, if it does not depend on head_dim.
    usual_rotary_dim: int | None = None
    # Whether the class in transformers defaults to something other than plain RoPE.
    needs_parameters: bool = False
    # Whether the default rope type reads partial_rotary_factor.
    reads_share: bool = False
    # Whether the dynamic rope type reads alpha. It is static then, as in HunYuan.
    reads_alpha: bool = False
    # Keys of the base outside of the rope parameters.
    base_keys: tuple[str, ...] = ("rope_theta",)
    # Keys for the number of rotated features that other families read and this one ignores.
    unread: tuple[str, ...] = ()
    longest: tuple[str, ...] = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
