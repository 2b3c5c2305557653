"""Small models of transformers on disk, and their logits under the other pairing."""

import contextlib
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from hub.tiny_models import CHANGES, config_classes, inputs_of, model_classes, shrunk

APPLY = re.compile("apply_rotary")
# What rotation functions call the queries and keys that they are given.
STATES = re.compile("q|k|x|xq|xk|tensor|query|key|query_states|key_states|q_pe|k_pe")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and the advice of transformers."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(level)


def tiny(model_type: str, *, causal: bool = False, **changes: Any) -> Any:
    """A small model of a family in float64, every weight drawn anew, norms and biases among them."""
    config_class = config_classes()[model_type]
    with quiet():
        found = model_classes(config_class)
        chosen = next((c for c in found if causal and c.__name__.endswith("ForCausalLM")), found[0])
        config = shrunk(config_class, CHANGES.get(model_type, {}) | changes)
        config._attn_implementation = config._experts_implementation = "eager"
        torch.manual_seed(0)
        model = chosen(config).eval()
    for name, parameter in model.named_parameters():
        noise = 0.2 * torch.randn(parameter.shape)
        parameter.data = noise + (1.0 if parameter.ndim == 1 and "norm" in name else 0.0)
    return model.double()


def saved(model: Any, folder: Path, *, shard: str = "50GB") -> Path:
    """The model's folder, as transformers writes it, in bfloat16 shards."""
    with quiet():
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard)
    model.double()
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder by name."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def loaded(model: Any, folder: Path) -> Any:
    """A model of the same class with the weights of the folder, in float64."""
    with quiet():
        other = type(model).from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
    return other.eval()


def logits(model: Any) -> Tensor:
    """What the model says of a few tokens."""
    torch.manual_seed(1)
    given = inputs_of(model, 12)
    with quiet(), torch.no_grad():
        said = model(**given)
    return (said.logits if "logits" in said else said[0]).double()


@contextlib.contextmanager
def rotating_by_definition(model: Any, pairing: str) -> Iterator[None]:
    """The model with a rotation in another pairing, written from its definition over the model's own cos and sin."""
    module: Any = sys.modules[type(model).__module__]
    original = module.apply_rotary_pos_emb

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        width = cos.shape[-1]
        # Some tables hold each angle at 2i and 2i + 1, others at i and i + d/2, whatever the pairing is.
        neighbours = torch.equal(cos[..., 0::2], cos[..., 1::2])
        own = slice(0, width, 2) if neighbours else slice(0, width // 2)
        c, s = (table[..., own].unsqueeze(unsqueeze_dim) for table in (cos, sin))
        one, two = (
            (slice(0, width // 2), slice(width // 2, width))
            if pairing == "half"
            else (slice(0, width, 2), slice(1, width, 2))
        )
        rotated = []
        for x in (q, k):
            y = x.clone()
            y[..., one] = x[..., one] * c - x[..., two] * s
            y[..., two] = x[..., one] * s + x[..., two] * c
            rotated.append(y)
        return rotated[0], rotated[1]

    module.apply_rotary_pos_emb = apply
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = original


def reordered(x: Tensor, spec: Any, to: str) -> Tensor:
    """The last axis of x, a head or its rotated features, in the order of the pairing `to`."""
    width = spec.rotated_dim
    first = x.shape[-1] - width if spec.rotary_slice == "trailing" else 0
    part = x[..., first : first + width]
    if to == "interleaved":
        part = torch.stack(part.chunk(2, -1), -1).flatten(-2)
    else:
        part = part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat([x[..., :first], part, x[..., first + width :]], -1)


@contextlib.contextmanager
def rotating_between(model: Any, spec: Any, to: str) -> Iterator[None]:
    """The model with its own rotations, whichever they are, that take and give features in the order of `to`."""
    module: Any = sys.modules[type(model).__module__]
    back = "half" if to == "interleaved" else "interleaved"
    originals = {name: value for name, value in vars(module).items() if APPLY.match(name) and inspect.isfunction(value)}

    def between(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        for name, x in bound.arguments.items():
            if STATES.fullmatch(name):
                bound.arguments[name] = reordered(x, spec, back)
        result = original(*bound.args, **bound.kwargs)
        return (
            reordered(result, spec, to) if isinstance(result, Tensor) else tuple(reordered(x, spec, to) for x in result)
        )

    for name, original in originals.items():
        setattr(module, name, functools.partial(between, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
