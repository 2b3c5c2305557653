"""The tensors with queries and keys per family: their names, and the rows of each head."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["LAYOUTS", "SEPARATE", "Counts", "Heads", "Layout"]


@dataclass(frozen=True)
class Counts:
    """The sizes of a layer.

    Attributes:
        queries: The number of query heads.
        keys: The number of key heads.
        head_dim: The number of features per head.
        latent: The number of rows of the latent projection of MLA; 0 without MLA.
        multi_query: A flag of Falcon.
        grouped: A flag of Falcon (new_decoder_architecture).
    """

    queries: int
    keys: int
    head_dim: int
    latent: int = 0
    multi_query: bool = True
    grouped: bool = False


@dataclass(frozen=True)
class Heads:
    """The number of rows of a projection, and the first row of each query head and of each key head."""

    rows: int
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()


def _grouped(groups: int, order: str, head_dim: int) -> Heads:
    """Return `groups` repetitions of the heads in `order`, one letter per head: q, k, or another without rotation."""
    starts: dict[str, list[int]] = {"q": [], "k": []}
    for number, letter in enumerate(order * groups):
        starts.setdefault(letter, []).append(number * head_dim)
    return Heads(groups * len(order) * head_dim, tuple(starts["q"]), tuple(starts["k"]))


def _queries(n: Counts) -> Heads:
    return _grouped(1, "q" * n.queries, n.head_dim)


def _keys(n: Counts) -> Heads:
    return _grouped(1, "k" * n.keys, n.head_dim)


def _gated_queries(n: Counts) -> Heads:
    """Each query head is followed by a gate with the same number of rows: Qwen3-Next."""
    return _grouped(n.queries, "qg", n.head_dim)


def _latent_key(n: Counts) -> Heads:
    """The latent of keys and values, then one key shared by all heads: DeepSeek."""
    return Heads(n.latent, (), (0,))


def _by_head(n: Counts) -> Heads:
    """q, k and v of the first head, of the second, ...: GPT-NeoX."""
    return _grouped(n.queries, "qkv", n.head_dim)


def _by_role(n: Counts) -> Heads:
    """All of q, then all of k, then all of v: Phi-3."""
    return _grouped(1, "q" * n.queries + "k" * n.keys + "v" * n.keys, n.head_dim)


def _by_key(n: Counts) -> Heads:
    """Per key head: its query heads, the key head, its value head: InternLM2."""
    return _grouped(n.keys, "q" * (n.queries // n.keys) + "kv", n.head_dim)


def _falcon(n: Counts) -> Heads:
    """One of three layouts, selected by two flags of the config."""
    if n.grouped:
        return _by_key(n)
    return _grouped(1, "q" * n.queries + "kv", n.head_dim) if n.multi_query else _by_head(n)


def _codegen(n: Counts) -> Heads:
    """Four parts, one per device, each with the values before the keys."""
    quarter = n.queries // 4
    return _grouped(4, "q" * quarter + "v" * quarter + "k" * quarter, n.head_dim)


_NORMS = {
    rf"({role}_norm|{role}_layernorm|{long}_layernorm)(\.norms\.\d+)?\.(weight|bias)": letter
    for letter, role, long in (("q", "q", "query"), ("k", "k", "key"))
}
# Other tensors of attention modules, which do not depend on the pairing, including buffers of old checkpoints.
_STILL = r"(v_proj|o_proj|out_proj|dense|Wo|wo|kv_b_proj|q_a_proj|kv_a_layernorm|q_a_layernorm|g_proj|gate_proj)\..*"
_STILL += r"|(rotary_emb|attn_sub_norm|groupnorm)\..*|sinks|bias|dense_bias|masked_bias|causal_mask|lambda_[qk][12]"


@dataclass(frozen=True)
class Layout:
    """The names of the tensors of an attention layer.

    Attributes:
        projections: Per projection with queries, keys or both: a function that returns the rows of its heads.
        attention: A regular expression for the attention module after the prefix. Its group is the layer number.
        gaps: Whether the model also has layers without attention.
        values: The projection of values that must exist if keys have a separate projection. Without it, the keys are
            also the values and must not be permuted.
    """

    projections: dict[str, Callable[[Counts], Heads]]
    attention: str = r"layers\.(\d+)\.self_attn"
    gaps: bool = False
    values: str | None = "v_proj"

    def norm(self, leaf: str) -> str | None:
        """Return "q" or "k" for a norm of queries or keys, or None for other names in the attention module.

        >>> LAYOUTS["qwen3"].norm("q_norm.weight"), LAYOUTS["qwen3"].norm("o_proj.weight")
        ('q', None)
        """
        return next((role for pattern, role in _NORMS.items() if re.fullmatch(pattern, leaf)), None)

    def stays(self, leaf: str) -> bool:
        """Return whether a tensor of the attention module is known to be the same in both pairings.

        >>> LAYOUTS["llama"].stays("o_proj.weight"), LAYOUTS["llama"].stays("q_proj.weight")
        (True, False)
        """
        return re.fullmatch(_STILL, leaf) is not None


SEPARATE = Layout({"q_proj": _queries, "k_proj": _keys})
_HYBRID = replace(SEPARATE, gaps=True)
_GATED = replace(_HYBRID, projections={"q_proj": _gated_queries, "k_proj": _keys})
_LATENT = Layout({"q_proj": _queries, "q_b_proj": _queries, "kv_a_proj_with_mqa": _latent_key}, values=None)


def _fused(name: str, heads: Callable[[Counts], Heads], attention: str = Layout.attention) -> Layout:
    return Layout({name: heads}, attention, values=None)


_SEPARATE = """
afmoe apertus arcee aria_text cohere cohere2 cohere2_moe cwm diffllama dots1 ernie4_5 ernie4_5_moe exaone4
exaone_moe flex_olmo gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe glm4v_moe_text glm4v_text gpt_oss granite
granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hyperclovax internlm3 jais2 llama llama4_text
minimax_m2 ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe phi phimoe qwen2
qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe qwen3_omni_moe_text qwen3_vl_moe_text
qwen3_vl_text seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
"""
_WITH_GAPS = "bamba falcon_h1 granitemoehybrid lfm2 lfm2_moe mllama_text_model"
_WITH_LATENTS = "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 minicpm3 mistral4 youtu"
# By model_type of the language model. Other families raise an error: guessing could produce wrong weights.
LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(_SEPARATE.split(), SEPARATE),
    **dict.fromkeys(_WITH_GAPS.split(), _HYBRID),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _GATED),
    **dict.fromkeys(_WITH_LATENTS.split(), _LATENT),
    "gptj": replace(SEPARATE, attention=r"h\.(\d+)\.attn"),
    "phi3": _fused("qkv_proj", _by_role),
    "dbrx": _fused("Wqkv", _by_role, r"blocks\.(\d+)\.norm_attn_norm\.attn"),
    "gpt_neox": _fused("query_key_value", _by_head, r"layers\.(\d+)\.attention"),
    "gpt_neox_japanese": _fused("query_key_value", _by_head, r"layers\.(\d+)\.attention"),
    "persimmon": _fused("query_key_value", _by_head),
    "falcon": _fused("query_key_value", _falcon, r"h\.(\d+)\.self_attention"),
    "codegen": _fused("qkv_proj", _codegen, r"h\.(\d+)\.attn"),
    "internlm2": _fused("wqkv", _by_key, r"layers\.(\d+)\.attention"),
}
