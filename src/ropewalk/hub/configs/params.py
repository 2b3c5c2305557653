"""params.json, which Mistral and Meta publish beside their own weights: read as the rope parameters of transformers.

Both name the same sizes (dim, n_layers, n_heads), rotate interleaved pairs, and have no model_type. Mistral's states
its scaling; Meta's states that there is one, and the numbers are in Meta's code.
"""

from typing import Any

from ropewalk.errors import as_int
from ropewalk.hub.configs.keys import Keys

__all__ = ["META", "MISTRAL", "from_params", "is_params"]

# What the families are called in the table of families.
META, MISTRAL = "meta params.json", "mistral params.json"
# Keys of which Meta's files always have the first, and which Mistral's never have.
_OF_META = ("multiple_of", "ffn_dim_multiplier", "use_scaled_rope")
# Keys of models whose layers differ, or whose scaling is another: Llama 4.
_OF_LLAMA_4 = ("nope_layer_interval", "moe_args", "rope_scaling_factor", "rope_high_freq_factor")
# Meta's code (apply_scaling of the Llama 3 reference) has these numbers written in.
_FACTOR = 8.0
_SCALED: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": _FACTOR,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# dim and n_layers of Llama 3.1, 3.3 and of the language models of Llama 3.2 Vision, for which transformers has the same
# factor. For the small models of Llama 3.2 it has 32.
_WITH_FACTOR_8 = {(4096, 32), (4096, 40), (8192, 80), (8192, 100), (16384, 126)}
# From this vocabulary on it is a Llama 3, whose base is another than that of Llama 1 and 2.
_LLAMA_3_VOCABULARY = 128_000


def is_params(keys: Keys) -> bool:
    """Whether a config without a model_type is a params.json.

    >>> is_params(Keys({"dim": 4096, "n_heads": 32})), is_params(Keys({"hidden_size": 4096}))
    (True, False)
    """
    return keys.has("n_heads") and keys.has("dim")


def from_params(keys: Keys) -> tuple[dict[str, Any], str]:
    """A params.json with its scaling under the names of transformers, and the name of its family.

    >>> data, family = from_params(Keys({"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 256}))
    >>> data["rope_theta"], family
    (10000.0, 'meta params.json')
    """
    if keys.raw("qk_rope_head_dim"):
        expected, do = "params.json of a model with plain heads", "load its config.json"
        raise keys.error("qk_rope_head_dim", expected, "latent attention's qk_rope_head_dim", do)
    dim, heads = keys.whole("dim"), keys.whole("n_heads")
    if not keys.has("head_dim") and dim % heads:
        expected, do = f"heads that divide dim = {dim}, or head_dim", "set both as the model was trained"
        raise keys.error("n_heads", expected, f"{heads}", do)
    # Its name is that of the file here; whoever reads it later knows it as one of the rope parameters.
    if keys.has("rope_theta") and keys.number("rope_theta") <= 0:
        raise keys.error("rope_theta", "a number above 0", f"{keys.number('rope_theta'):g}", "10000 is usual")
    if any(keys.stands(key) for key in _OF_META):
        return _from_meta(keys), META
    return _from_mistral(keys), MISTRAL


def _from_meta(keys: Keys) -> dict[str, Any]:
    """Meta's params.json: Llama 1 to 3.3. The base of Llama 1 and 2 is in the code alone: 10000."""
    other = next((key for key in (*_OF_LLAMA_4, "yarn", "llama_4_scaling") if keys.has(key)), None)
    if other is not None:
        expected = "Meta's params.json of Llama 1 to 3, in which all layers rotate alike"
        raise keys.error(other, expected, f"{other} beside {_meta_key(keys)}", "load its config.json")
    scaled = keys.flag("use_scaled_rope", False)
    if not keys.has("rope_theta") and (scaled or keys.number("vocab_size", -1.0) >= _LLAMA_3_VOCABULARY):
        expected = "the base: only Llama 1 and 2, with small vocabularies, leave it out"
        raise keys.error("rope_theta", expected, "nothing", "set it as the model was trained; Llama 3 has 500000")
    data = {**keys.data, "rope_theta": keys.number("rope_theta", 10_000.0)}
    if not scaled:
        return data
    if (keys.whole("dim"), as_int(keys.raw("n_layers"))) not in _WITH_FACTOR_8:
        keys.warn(
            "factor-not-stated",
            f"use_scaled_rope states no factor: here {_FACTOR:g}, as in Meta's code; the config.json of Llama 3.2 1B"
            " and 3B has 32",
        )
    return data | {"rope_parameters": dict(_SCALED)}


def _meta_key(keys: Keys) -> str:
    return next(key for key in _OF_META if keys.stands(key))


def _from_mistral(keys: Keys) -> dict[str, Any]:
    """Mistral's params.json, with its yarn under the names of transformers."""
    if not keys.has("rope_theta"):
        expected = f"the base, which Mistral's files state; Meta's, known by {' or '.join(_OF_META)}, may leave it out"
        do = "set rope_theta as the model was trained; to a file of Meta's that was cut down, add its multiple_of"
        raise keys.error("rope_theta", expected, "nothing", do)
    yarn, growing = keys.under("yarn"), keys.under("llama_4_scaling")
    if not keys.has("yarn"):
        if keys.has("llama_4_scaling"):
            raise keys.error("llama_4_scaling", "yarn beside it", "no yarn", "add the yarn of the model")
        return keys.data
    factor = yarn.number("factor", at_least=1)
    parameters: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": yarn.whole("original_max_position_embeddings", at_least=2),
        "beta_fast": yarn.number("beta", 32.0),
        "beta_slow": yarn.number("alpha", 1.0),
    }
    if not yarn.flag("apply_scale", True):
        parameters["attention_factor"] = 1.0
    if keys.has("llama_4_scaling"):
        length = growing.whole("original_max_position_embeddings", at_least=2)
        if length != parameters["original_max_position_embeddings"]:
            raise keys.error(growing.name("original_max_position_embeddings"), "that of yarn", f"{length}", "set one")
        parameters["llama_4_scaling_beta"] = growing.number("beta", at_least=0)
    return {**keys.data, "rope_parameters": parameters}
