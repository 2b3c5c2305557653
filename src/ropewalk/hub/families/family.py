"""What a family of models is: what no config says of the way in which its attention rotates."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ropewalk.spec.axes import Axes
from ropewalk.spec.by_parts import Policy
from ropewalk.spec.rope import Pairing, RotarySlice, Sign

__all__ = ["BASE_KEYS", "Family", "LayerPattern", "Sharing", "Windows"]

# How kinds of layers share the rope parameters of a config.
Sharing: TypeAlias = Literal[
    "alike",
    "none",
    "gemma",
    "modernbert",
    "olmo",
    "sliding",
    "listed",
    "bases",
    "own bases",
    "optional",
    "asked",
]
# Every key that some model has for its base.
BASE_KEYS = ("rope_theta", "rotary_emb_base", "rotary_base", "rotary_embedding_base", "rope_base")


@dataclass(frozen=True)
class LayerPattern:
    """One layer of each `every` sees everything: the last or the first of them. The others are of the kind `other`.

    `key` is the key under which a config may store another number than `every`.

    >>> LayerPattern(6, key="sliding_window_pattern").sees_everything
    'last'
    """

    every: int
    sees_everything: Literal["last", "first"] = "last"
    other: Literal["sliding_attention", "linear_attention"] = "sliding_attention"
    key: str | None = None


# Which layers see a window of the context only; `Family.windows` says what each name means.
Windows: TypeAlias = Literal["none", "all", "all by default", "from a layer on"] | LayerPattern


@dataclass(frozen=True)
class Family:
    """What model_type says about a rotation; the defaults are Llama's.

    >>> Family().pairing, Family().base
    ('half', 10000.0)
    """

    pairing: Pairing = "half"
    rotary_slice: RotarySlice = "leading"
    sign: Sign = 1
    # The base where a config has none, and by layer type where those differ.
    base: float = 10_000.0
    bases: dict[str, float] = field(default_factory=dict[str, float])
    # The share of a head that turns where a config does not say it; or how many features turn, whatever it says.
    share: float = 1.0
    rotary_dim: Callable[[int], int] | None = None
    # Multi-head latent attention: qk_nope_head_dim features that stand still, then qk_rope_head_dim that turn.
    latent: bool = False
    # The key that says whether pairs are interleaved; `pairing` is what holds without it.
    interleave_key: str | None = None
    policy: Policy = "transformers"
    # How sections become axes, or which axes a tower has for a rotary_dim; the sections of a config that has none.
    axes: Literal["chunked", "interleaved", "ernie"] | Callable[[int], Axes] | None = None
    sections: tuple[int, ...] | None = None
    # "everywhere" is llama_4_scaling_beta; "without rotation" is Llama 4's, in layers that do not rotate.
    temperature: Literal["everywhere", "without rotation"] | None = None
    # How layers share the parameters: a function of configs/layers.py.
    layers: Sharing = "alike"
    # Which layers see a window of the context only, where a file has no layer_types; None where only that says it.
    # "none" is no layer, unless the config has a window: then it is not known. "all" is every layer, if the config has
    # a window, and "all by default" the same where the class has a window that files may leave out. "from a layer on"
    # is max_window_layers.
    windows: Windows | None = "none"
    # Names of nested parameters that are no layer types.
    labels: tuple[str, ...] = ()
    # Keys with the head_dim: the usual ones, and those of layer types that have their own, with their defaults.
    head_dim: tuple[str, ...] = ("head_dim", "attention_head_dim", "kv_channels")
    head_dims: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    # The head_dim that the class in transformers has where a config leaves it out, whatever the width is.
    usual_head_dim: int | None = None
    width: tuple[str, ...] = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
    heads: tuple[str, ...] = ("num_attention_heads", "n_head", "n_heads", "num_heads")
    # How many features turn where a config does not say it, whatever the width of a head.
    usual_rotary_dim: int | None = None
    # Whether the class in transformers has something else than a plain rope where a config has no rope parameters.
    needs_parameters: bool = False
    # Whether the default rope type reads partial_rotary_factor.
    reads_share: bool = False
    # Whether the dynamic rope type reads alpha, and is static then: HunYuan's.
    reads_alpha: bool = False
    # Keys that the base may stand under outside of the parameters.
    base_keys: tuple[str, ...] = ("rope_theta",)
    # Keys that other families have for the features that turn, and that this one does not read.
    unread: tuple[str, ...] = ()
    longest: tuple[str, ...] = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
