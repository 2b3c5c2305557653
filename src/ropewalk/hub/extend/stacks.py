"""Command line flags with which vLLM and llama.cpp apply an extension, and what they do not support."""

import json
import shlex
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from ropewalk.hub.extend.config_forms import FIXED, Form
from ropewalk.hub.extend.rules import Extension, Start
from ropewalk.spec.by_parts import Llama3, Yarn
from ropewalk.spec.stretched import LongRope, PositionInterpolation

__all__ = ["STACKS", "Flags", "Stack", "flags_for"]

Stack: TypeAlias = Literal["vllm", "llama.cpp"]
STACKS: tuple[Stack, ...] = get_args(Stack)


@dataclass(frozen=True)
class Flags:
    """The flags for one rule.

    Attributes:
        flags: The command line flags. None if the engine does not support the rule.
        notes: Why it does not, or what the user should know.
    """

    flags: str | None
    notes: tuple[str, ...]


def flags_for(
    stack: Stack,
    start: Start,
    extension: Extension,
    length: int,
    *,
    form: Form | None,
    place: tuple[str, ...] = (),
    model_type: str = "",
) -> Flags:
    """The flags with which an inference engine applies an extension.

    Args:
        stack: The engine.
        start: The starting point of the extension.
        extension: The extension.
        length: The number of positions to extend to.
        form: The config keys of the extension for transformers 5, if there are any.
        place: The keys that lead from the root of the config to the language model.
        model_type: The model_type of the config.

    Returns:
        The flags, with notes.

    >>> from ropewalk.hub.extend.rules import extensions
    >>> from ropewalk.spec.rope import RopeSpec
    >>> start = Start("", RopeSpec(128, pairing="half"), 10_000.0, 4096, 4096)
    >>> (yarn,) = extensions(start, 16384, "yarn")
    >>> flags_for("llama.cpp", start, yarn, 16384, form=None).flags
    '--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 4096 -c 16384'
    """
    if extension.spec is None:
        return Flags(None, (extension.why_not or "",))
    if model_type in FIXED:
        return Flags(None, (f"the code of {model_type} {FIXED[model_type]}; no flag of {stack} is known to work",))
    if stack == "vllm":
        return _vllm(start, extension, length, form, place, model_type)
    return _llama_cpp(start, extension, length)


def _vllm(
    start: Start, extension: Extension, length: int, form: Form | None, place: tuple[str, ...], model_type: str
) -> Flags:
    rule = extension.spec and extension.spec.frequencies
    if extension.rule == "dynamic":
        return Flags(None, ("vLLM computes a dynamic base once, for one length: use ntk, which has the same base",))
    current = start.rule
    if isinstance(current, Yarn) and current.policy == "deepseek" and not isinstance(rule, Yarn):
        return Flags(None, ("vLLM uses DeepSeek's YaRN for every rule in latent attention: use yarn",))
    if form is None or form.name != "transformers 5":
        return Flags(None, ("vLLM has no config keys for it",))
    parameters: dict[str, Any] = form.set["rope_parameters"]
    inner: dict[str, Any] = dict(parameters.get(start.layer, parameters))
    notes = ["for vLLM after November 2025; older versions require the keys of transformers 4 in --hf-overrides"]
    if isinstance(rule, Yarn):
        # vLLM reads neither attention_factor nor the mscale pair, and multiplies its own amplitude by attn_factor.
        default = Yarn(rule.base, rule.factor, rule.trained_length).amplitude()
        if rule.policy != "deepseek" and rule.amplitude() != default:
            inner["attn_factor"] = rule.amplitude() / default
            notes.append("attn_factor is a key of vLLM; with it, the amplitude equals the one above")
    if start.spec.axes is not None and isinstance(rule, Yarn):
        notes.append("with several axes, vLLM computes YaRN's ramp from four times the trained length")
    overrides: dict[str, Any] = {
        "rope_parameters": {**parameters, start.layer: inner} if start.layer in parameters else inner
    }
    # vLLM's limit is max_position_embeddings, times the factor for PI. For YaRN it is computed from the trained length.
    gemma = "gemma3" in model_type
    if isinstance(rule, PositionInterpolation) and not gemma:
        overrides["max_position_embeddings"] = start.trained
        notes.append("max_position_embeddings is the trained length, because vLLM multiplies it by the factor of PI")
    elif gemma or not isinstance(rule, Yarn):
        overrides["max_position_embeddings"] = length
    for key in reversed(place):
        overrides = {key: overrides}
    most = min(length, int(rule.factor * start.trained)) if isinstance(rule, Yarn | PositionInterpolation) else length
    return Flags(f"--hf-overrides {shlex.quote(json.dumps(overrides))} --max-model-len {most}", tuple(notes))


def _llama_cpp(start: Start, extension: Extension, length: int) -> Flags:
    current, rule = start.rule, extension.spec and extension.spec.frequencies
    convert = "write a config with --write, and convert the model again with convert_hf_to_gguf.py"
    if isinstance(current, Llama3 | LongRope):
        stored = f"the GGUF contains the factors of {type(current).__name__} as a tensor, and flags do not remove it"
        return Flags(None, (f"{stored}: {convert}",))
    if isinstance(rule, Llama3):
        return Flags(None, (f"no flag: its factors are a tensor in the GGUF; {convert}",))
    notes = ["-c is the total over all parallel slots; the flags apply to layers without a window"]
    if isinstance(rule, PositionInterpolation):
        return Flags(f"--rope-scaling linear --rope-scale {rule.factor:.9g} -c {length}", tuple(notes))
    if isinstance(rule, Yarn):
        if rule.ramp != "index":
            return Flags(None, ("llama.cpp only has the ramp over the pair index: use yarn",))
        flags = f"--rope-scaling yarn --rope-scale {rule.factor:.9g} --yarn-orig-ctx {rule.trained_length}"
        for name, value, default in (("fast", rule.beta_fast, 32), ("slow", rule.beta_slow, 1)):
            flags += "" if value == default else f" --yarn-beta-{name} {value:g}"
        if not rule.truncate:
            notes.append("llama.cpp rounds the ends of the ramp to integer pair indices; this model's are not rounded")
        if rule.amplitude() != Yarn(rule.base, rule.factor, rule.trained_length).amplitude():
            notes.append("llama.cpp computes the amplitude from the factor or reads it from the GGUF; compare it")
        return Flags(f"{flags} -c {length}", tuple(notes))
    if extension.base is not None and not (extension.spec and extension.spec.varies):
        return Flags(f"--rope-scaling none --rope-freq-base {extension.base:.9g} -c {length}", tuple(notes))
    return Flags(None, ("llama.cpp has no dynamic base: use ntk, which has the same base for one length",))
