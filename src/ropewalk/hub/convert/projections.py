"""Where a family's layers keep queries and keys: the names of the tensors, and the rows that each head has in them."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["LAYOUTS", "SEPARATE", "Counts", "Heads", "Layout"]


@dataclass(frozen=True)
class Counts:
    """How many query heads, key heads and features in a head a layer has; the latent width of MLA; flags of Falcon."""

    queries: int
    keys: int
    head_dim: int
    latent: int = 0
    multi_query: bool = True
    grouped: bool = False


@dataclass(frozen=True)
class Heads:
    """The rows of a projection: how many there are, and at which the heads of the queries and of the keys begin."""

    rows: int
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()


def _grouped(groups: int, order: str, head_dim: int) -> Heads:
    """`groups` times the heads that `order` names, a letter each: q, k, and others that do not turn."""
    at: dict[str, list[int]] = {"q": [], "k": []}
    for number, letter in enumerate(order * groups):
        at.setdefault(letter, []).append(number * head_dim)
    return Heads(groups * len(order) * head_dim, tuple(at["q"]), tuple(at["k"]))


def _queries(n: Counts) -> Heads:
    return _grouped(1, "q" * n.queries, n.head_dim)


def _keys(n: Counts) -> Heads:
    return _grouped(1, "k" * n.keys, n.head_dim)


def _gated_queries(n: Counts) -> Heads:
    """Each query head is followed by as many rows of a gate: Qwen3-Next."""
    return _grouped(n.queries, "qg", n.head_dim)


def _latent_key(n: Counts) -> Heads:
    """The latent of keys and values, then one key that all heads share: DeepSeek."""
    return Heads(n.latent, (), (0,))


def _by_head(n: Counts) -> Heads:
    """q, k and v of the first head, of the second, ...: GPT-NeoX."""
    return _grouped(n.queries, "qkv", n.head_dim)


def _by_role(n: Counts) -> Heads:
    """All of q, then all of k, then all of v: Phi-3."""
    return _grouped(1, "q" * n.queries + "k" * n.keys + "v" * n.keys, n.head_dim)


def _by_key(n: Counts) -> Heads:
    """The query heads of the first key head, it, its value; those of the second, ...: InternLM2."""
    return _grouped(n.keys, "q" * (n.queries // n.keys) + "kv", n.head_dim)


def _falcon(n: Counts) -> Heads:
    """Three layouts, of which two flags of the config choose."""
    if n.grouped:
        return _by_key(n)
    return _grouped(1, "q" * n.queries + "kv", n.head_dim) if n.multi_query else _by_head(n)


def _codegen(n: Counts) -> Heads:
    """Four parts for four devices, each with the values before the keys."""
    quarter = n.queries // 4
    return _grouped(4, "q" * quarter + "v" * quarter + "k" * quarter, n.head_dim)


_NORMS = {
    rf"({role}_norm|{role}_layernorm|{long}_layernorm)(\.norms\.\d+)?\.(weight|bias)": letter
    for letter, role, long in (("q", "q", "query"), ("k", "k", "key"))
}
# What attention modules hold besides, and what no pairing touches: buffers of old checkpoints are among it.
_STILL = r"(v_proj|o_proj|out_proj|dense|Wo|wo|kv_b_proj|q_a_proj|kv_a_layernorm|q_a_layernorm|g_proj|gate_proj)\..*"
_STILL += r"|(rotary_emb|attn_sub_norm|groupnorm)\..*|sinks|bias|dense_bias|masked_bias|causal_mask|lambda_[qk][12]"


@dataclass(frozen=True)
class Layout:
    """Where the tensors of an attention layer are, by the ends of their names.

    `attention` is the path of the attention module behind the model's prefix, with the layer's number as its group;
    `projections` the names that hold queries, keys or both, with the rows of their heads. `gaps` is whether layers of
    other kinds, without attention, stand between. `values` is the projection that must be there beside separate keys:
    without one the keys are the values too, and must not be reordered.
    """

    projections: dict[str, Callable[[Counts], Heads]]
    attention: str = r"layers\.(\d+)\.self_attn"
    gaps: bool = False
    values: str | None = "v_proj"

    def norm(self, leaf: str) -> str | None:
        """ "q" or "k" for a norm of queries or keys, by the name behind the attention module.

        >>> LAYOUTS["qwen3"].norm("q_norm.weight"), LAYOUTS["qwen3"].norm("o_proj.weight")
        ('q', None)
        """
        return next((role for pattern, role in _NORMS.items() if re.fullmatch(pattern, leaf)), None)

    def stays(self, leaf: str) -> bool:
        """Whether a tensor of the attention module is known to be the same in both pairings.

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
# By model_type of the language model. What is not here is refused: a guess would give weights that are wrong.
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
