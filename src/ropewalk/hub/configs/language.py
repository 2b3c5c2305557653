"""Which part of a config says how text is rotated: that of the language model, in a composite model."""

from dataclasses import replace
from typing import Any

from ropewalk.errors import require_choice
from ropewalk.hub.configs.read import Keys, config_error
from ropewalk.hub.configs.record import KEY, Record, read_record
from ropewalk.hub.families.table import Family, family_of
from ropewalk.spec.rope import PAIRINGS

__all__ = ["language_model"]

# Where composite models keep the config of their language model.
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "text_encoder")


def language_model(data: dict[str, Any], pairing: str | None) -> tuple[dict[str, Any], Family]:
    """The part of the config that says how text is rotated, and its family.

    >>> part, family = language_model({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, None)
    >>> part["model_type"], family.pairing
    ('gemma3_text', 'half')
    """
    if pairing is not None:
        require_choice(pairing, PAIRINGS, asked="load_spec(pairing=...)")
    record = read_record(data)
    if record is not None:
        return _converted(data, record, pairing)
    keys = Keys(data)
    name = keys.text("model_type")
    if name is None and keys.has("n_heads") and keys.has("dim"):
        return _from_params(data), family_of("mistral params.json", pairing)
    part = next((part for part in _PARTS if isinstance(data.get(part), dict)), None)
    own = any(keys.has(key) for key in ("rope_parameters", "rope_scaling", "rope_theta"))
    if part is not None and not (own and keys.has("hidden_size")):
        inner = data[part]
        if inner.get("model_type") is None and name is not None:
            inner = {**inner, "model_type": f"{name}_text"}
        return language_model(inner, pairing)
    tower = any(key in data for key in ("patch_size", "spatial_merge_size")) and not keys.has("vocab_size")
    return data, family_of(name, pairing, tower=tower)


def _converted(data: dict[str, Any], record: Record, pairing: str | None) -> tuple[dict[str, Any], Family]:
    """The language model of a checkpoint that ropewalk converted: its family, with the pairing of the weights."""
    if pairing not in (None, record.pairing):
        expected = f"pairing={record.pairing!r}, to which the weights were converted"
        raise config_error(f"{KEY}.pairing", expected, f"pairing={pairing!r}", "leave pairing out")
    part, family = language_model({key: value for key, value in data.items() if key != KEY}, record.model_code)
    if family.pairing_of(Keys(part)) == record.pairing:
        return part, family
    return part, replace(family, pairing=record.pairing, interleave_key=None)


def _from_params(data: dict[str, Any]) -> dict[str, Any]:
    """Mistral's params.json, with its yarn under the names of transformers."""
    keys = Keys(data)
    for key, what in (("use_scaled_rope", "Meta's"), ("qk_rope_head_dim", "latent attention's")):
        if keys.raw(key):
            raise config_error(
                key, "Mistral's params.json of a model with plain heads", f"{what} {key}", "load its config.json"
            )
    keys.number("rope_theta")
    yarn, growing = Keys(keys.part("yarn"), "yarn"), Keys(keys.part("llama_4_scaling"), "llama_4_scaling")
    if not keys.has("yarn"):
        if keys.has("llama_4_scaling"):
            raise config_error("llama_4_scaling", "yarn beside it", "no yarn", "add the yarn of the model")
        return data
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
            raise config_error(growing.name("original_max_position_embeddings"), "that of yarn", f"{length}", "set one")
        parameters["llama_4_scaling_beta"] = growing.number("beta", at_least=0)
    return {**data, "rope_parameters": parameters}
