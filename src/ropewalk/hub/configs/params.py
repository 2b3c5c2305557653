"""Translation of params.json, published by Mistral and Meta with their weights, to rope parameters of transformers.

Both use the same keys for sizes (dim, n_layers, n_heads), rotate interleaved pairs, and have no model_type. Mistral's
file contains the parameters of the scaling. Meta's file only has a flag for it; the numbers are in Meta's code.
"""

from typing import Any

from ropewalk.errors import as_int, shown
from ropewalk.hub.configs.keys import Keys

__all__ = ["META", "MISTRAL", "from_params", "is_params"]

# The names of the two families in FAMILIES.
META, MISTRAL = "meta params.json", "mistral params.json"
# Keys that only Meta's files have. The first is in all of them.
_OF_META = ("multiple_of", "ffn_dim_multiplier", "use_scaled_rope")
# Keys of Llama 4, whose layers differ and whose scaling is another one.
_OF_LLAMA_4 = ("nope_layer_interval", "moe_args", "rope_scaling_factor", "rope_high_freq_factor")
# These numbers are hard-coded in Meta's code (apply_scaling of the Llama 3 reference).
_FACTOR = 8.0
_SCALED: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": _FACTOR,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# (dim, n_layers) of Llama 3.1, 3.3 and of the language models of Llama 3.2 Vision. Their configs in transformers have
# the same factor. Those of the small Llama 3.2 models have 32.
_WITH_FACTOR_8 = {(4096, 32), (4096, 40), (8192, 80), (8192, 100), (16384, 126)}
# A vocabulary of at least this size belongs to Llama 3, whose base differs from that of Llama 1 and 2.
_LLAMA_3_VOCABULARY = 128_000
_SET_BASE = "set rope_theta as the model was trained; 10000 is the most common base"


def is_params(keys: Keys) -> bool:
    """Return whether a config without a model_type is a params.json.

    >>> is_params(Keys({"dim": 4096, "n_heads": 32})), is_params(Keys({"hidden_size": 4096}))
    (True, False)
    """
    return keys.has("n_heads") and keys.has("dim")


def from_params(keys: Keys) -> tuple[dict[str, Any], str]:
    """Translate a params.json to the keys of transformers.

    Args:
        keys: The contents of the params.json.

    Returns:
        The config with its scaling under `rope_parameters`, and the name of its family in `FAMILIES`.

    Raises:
        RopewalkError: If the file does not contain enough information, or describes a model that needs its config.json.


    >>> data, family = from_params(Keys({"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 256}))
    >>> data["rope_theta"], family
    (10000.0, 'meta params.json')
    """
    if keys.raw("qk_rope_head_dim"):
        expected, do = (
            "no such key: params.json is supported for models without latent attention",
            "load the config.json of the model",
        )
        raise keys.error("qk_rope_head_dim", expected, shown(keys.raw("qk_rope_head_dim")), do)
    dim, heads = keys.integer("dim"), keys.integer("n_heads")
    if not keys.has("head_dim") and dim % heads:
        expected, do = f"a divisor of dim = {dim}, or the key head_dim", "set dim and n_heads as the model was trained"
        raise keys.error("n_heads", expected, f"{heads}", do)
    # Checked here, where the error can name the key of the file. Later it is one of the rope parameters.
    if keys.has("rope_theta") and keys.number("rope_theta") <= 0:
        raise keys.error("rope_theta", "a number above 0", f"{keys.number('rope_theta'):g}", _SET_BASE)
    if any(keys.contains(key) for key in _OF_META):
        return _from_meta(keys), META
    return _from_mistral(keys), MISTRAL


def _from_meta(keys: Keys) -> dict[str, Any]:
    """Translate Meta's params.json of Llama 1 to 3.3. The base of Llama 1 and 2 is only in the code: 10000."""
    other = next((key for key in (*_OF_LLAMA_4, "yarn", "llama_4_scaling") if keys.has(key)), None)
    if other is not None:
        expected = (
            "no such key: Meta's params.json is supported for Llama 1 to 3, where all layers have the same rotation"
        )
        raise keys.error(other, expected, f"{other} and {_meta_key(keys)}", "load the config.json of the model")
    scaled = keys.flag("use_scaled_rope", False)
    if not keys.has("rope_theta") and (scaled or keys.number("vocab_size", -1.0) >= _LLAMA_3_VOCABULARY):
        expected = "the base; only the files of Llama 1 and 2, with small vocabularies, omit it"
        do = "set rope_theta as the model was trained; Llama 3 uses 500000"
        raise keys.error("rope_theta", expected, "no such key", do)
    data = {**keys.data, "rope_theta": keys.number("rope_theta", 10_000.0)}
    if not scaled:
        return data
    if (keys.integer("dim"), as_int(keys.raw("n_layers"))) not in _WITH_FACTOR_8:
        keys.warn(
            "factor-not-stated",
            f"use_scaled_rope does not specify the factor. {_FACTOR:g} is used, as in Meta's code. In the config.json"
            " of Llama 3.2 1B and 3B it is 32",
        )
    return data | {"rope_parameters": dict(_SCALED)}


def _meta_key(keys: Keys) -> str:
    return next(key for key in _OF_META if keys.contains(key))


def _from_mistral(keys: Keys) -> dict[str, Any]:
    """Translate Mistral's params.json."""
    if not keys.has("rope_theta"):
        expected = (
            f"the base; Mistral's files contain it, and only Meta's, recognized by {' or '.join(_OF_META)}, may omit it"
        )
        do = "set rope_theta as the model was trained; if this is a shortened file of Meta's, add its multiple_of"
        raise keys.error("rope_theta", expected, "no such key", do)
    yarn, temperature = keys.under("yarn"), keys.under("llama_4_scaling")
    if not keys.has("yarn"):
        if keys.has("llama_4_scaling"):
            expected = "the key yarn in the same file"
            raise keys.error("llama_4_scaling", expected, "no such key", "add the yarn parameters of the model")
        return keys.data
    factor = yarn.number("factor", at_least=1)
    parameters: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": yarn.integer("original_max_position_embeddings", at_least=2),
        "beta_fast": yarn.number("beta", 32.0),
        "beta_slow": yarn.number("alpha", 1.0),
    }
    if not yarn.flag("apply_scale", True):
        parameters["attention_factor"] = 1.0
    if keys.has("llama_4_scaling"):
        length = temperature.integer("original_max_position_embeddings", at_least=2)
        if length != parameters["original_max_position_embeddings"]:
            name = temperature.name("original_max_position_embeddings")
            expected = f"{parameters['original_max_position_embeddings']}, the value under yarn"
            raise keys.error(name, expected, f"{length}", "set both to the trained length of the model")
        parameters["llama_4_scaling_beta"] = temperature.number("beta", at_least=0)
    return {**keys.data, "rope_parameters": parameters}
