"""Queries and keys of transformers' models before and after their rotation, recorded at the attention call."""

import contextlib
import functools
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hub.applied import BY_HAND, REASONS, TABLES, angles, head_dim_of, home, patch_table, rotated
from hub.tiny_models import (
    CHANGES,
    COMPOSITE,
    LEARNED,
    ROTARY_CLASS,
    UnbuildableError,
    built,
    config_classes,
    inputs_of,
    model_classes,
    shrunk,
)

__all__ = ["Seen", "UnbuildableError", "families", "observe"]

NEAR = (0, 1, 2, 3, 5, 8, 13, 40, 101, 7, 64, 29, 90, 4, 11, 77, 6, 55, 18, 33, 9, 120, 47, 10)
# Their tables of angles are as long as the sequence.
BOUNDED = {"clvp_encoder", "roformer"}
TWO_AXES = re.compile("vision|sam|edgetam|pixtral|mlcd")
# Its forward accepts position ids, and ignores them.
DEAF = {"csm_depth_decoder_model"}
# Its recurrence starts anew wherever the position is 0.
RESET_AT_ZERO = {"recurrent_gemma"}
APPLY = re.compile("^(vision_)?apply_(rotary|multidimensional)")
PROBE = "ropewalk_probe"


@dataclass
class Seen:
    """Queries and keys before and after the rotation, in one kind of layer of one family."""

    model_type: str
    config: PreTrainedConfig
    layer_type: str | None
    inv_freq: Tensor | None
    amplitude: float
    positions: Tensor
    q_before: Tensor
    q_after: Tensor
    k_before: Tensor
    k_after: Tensor
    before_has_amplitude: bool
    rotates: bool
    how: str
    layer_idx: int = 0
    learned: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Call:
    """One call of an attention kernel."""

    layer_idx: int | None
    query: Tensor
    key: Tensor
    kernel: bool = False


class Recorder:
    """Queries and keys of every attention call, and the positions that rotary modules were given."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.given: list[Tensor] = []
        self.forced: Tensor | None = None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        """Record q and k. Returns zeros, so that later layers do not depend on positions."""
        # Keys of compressed blocks come after those of the tokens.
        tokens = key[..., : query.shape[-2], :]
        self.calls.append(
            Call(getattr(module, "layer_idx", None), query.detach().clone(), tokens.detach().clone(), True)
        )
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def before_rotary(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Keep the position ids that a rotary module is given, or put others in their place."""
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        ids = bound.arguments.get("position_ids")
        if not isinstance(ids, Tensor):
            return None
        self.given.append(ids.detach().clone())
        if self.forced is not None:
            bound.arguments["position_ids"] = laid_out(self.forced, ids)
        return bound.args, bound.kwargs


class Products(TorchFunctionMode):
    """For attention written out in the model: its first product of two states is the scores, which become zeros."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and args[0].ndim == 4 and args[1].ndim == 4:
            query, key = args[0], args[1].transpose(-1, -2)
            if query.shape[::2] == key.shape[::2] and key.shape[-1] == query.shape[-1] and query.shape[-2] == len(NEAR):
                self.recorder.calls.append(Call(None, query.clone(), key.clone()))
                heads = max(query.shape[1], key.shape[1])
                return query.new_zeros(query.shape[0], heads, query.shape[-2], key.shape[-2])
        if func is torch.baddbmm and args[1].shape[-2] == args[2].shape[-1] == len(NEAR):
            self.recorder.calls.append(Call(None, args[1][None].clone(), args[2].transpose(-1, -2)[None].clone()))
            return torch.zeros_like(args[0])
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key, value = (*args, *((kwargs or {})[name] for name in ("query", "key", "value")[len(args) :]))[:3]
            self.recorder.calls.append(Call(None, query.clone(), key.clone()))
            return query.new_zeros(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))


def laid_out(positions: Tensor, like: Tensor) -> Tensor:
    """Positions [A, S] or [S] in the shape in which a rotary module had its ids."""
    if positions.ndim == 1:
        return positions.expand_as(like)
    if like.shape[0] == positions.shape[0] and like.ndim == 3:
        return positions[:, None].expand_as(like)
    return positions.T.expand_as(like)


def spread(axes: int, numbers: tuple[int, ...]) -> Tensor:
    """Positions, different on every axis; the first few tokens move along one axis at a time."""
    ids = torch.tensor(numbers)
    if axes == 1:
        return ids
    rows = torch.stack([ids.roll(axis) for axis in range(axes)])
    rows[:, : axes + 1] = torch.cat([torch.zeros(axes, 1, dtype=ids.dtype), torch.eye(axes, dtype=ids.dtype)], 1)
    return rows


def axes_of(given: list[Tensor], tokens: int) -> int:
    """On how many axes the rotary module had its positions."""
    if not given:
        return 1
    shape = given[0].shape
    if len(shape) == 3 and shape[-1] == tokens:
        return shape[0]
    return shape[-1] if shape[-1] != tokens else 1


@contextlib.contextmanager
def probing(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Send every attention call of the model to the recorder."""
    AttentionInterface.register(PROBE, recorder.attend)
    AttentionMaskInterface.register(PROBE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    hooks = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = PROBE
        if (
            ROTARY_CLASS.search(type(module).__name__)
            and "position_ids" in inspect.signature(module.forward).parameters
        ):
            hooks.append(module.register_forward_pre_hook(recorder.before_rotary, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def unchanged(apply: Any) -> Any:
    """An apply function that leaves queries and keys as they are."""
    names = list(inspect.signature(apply).parameters)
    kept = [
        name
        for name in names[:3]
        if name in ("q", "k", "v", "xq", "xk", "query", "key", "x", "tensor", "query_layer", "key_layer")
    ]

    def leave(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        first = [given.get(name) for name in kept]
        return tuple(first) if len(first) > 1 else first[0]

    return leave


@contextlib.contextmanager
def unrotated(model: nn.Module) -> Iterator[None]:
    """Without the rotation: a family may reorder features while it rotates, which position 0 does not show."""
    classes = {type(module) for module in model.modules()}
    changed = []
    for module in classes | set(filter(None, map(inspect.getmodule, classes))):
        for name, item in list(vars(module).items()):
            if inspect.isfunction(item) and inspect.ismodule(module) and APPLY.search(name):
                changed.append((module, name, item))
                setattr(module, name, unchanged(item))
            elif isinstance(item, staticmethod) and APPLY.search(name):
                changed.append((module, name, item))
                setattr(module, name, staticmethod(unchanged(item.__func__)))
    try:
        yield
    finally:
        for module, name, item in changed:
            setattr(module, name, item)


def run(model: Any, inputs: dict[str, Any], positions: Tensor | None, axes: int) -> Recorder:
    """One forward pass, its attention calls on record."""
    recorder = Recorder()
    takes = "position_ids" in inspect.signature(model.forward).parameters and model.config.model_type not in DEAF
    if positions is not None:
        if takes:
            inputs = inputs | {"position_ids": positions[:, None] if axes > 1 else positions[None]}
        else:
            recorder.forced = positions
    with probing(model, recorder), torch.no_grad(), Products(recorder):
        model(**inputs)
    # Where there is an attention kernel, other products are not attention.
    recorder.calls = [call for call in recorder.calls if call.kernel] or recorder.calls
    return recorder


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that hold frequencies."""
    return [m for m in model.modules() if ROTARY_CLASS.search(type(m).__name__) and not hasattr(m, "q_proj")]


def frequencies(model: nn.Module, layer_type: str | None) -> tuple[Tensor | None, float]:
    """The model's own frequencies for a kind of layer, and the factor on its cosines and sines."""
    for module in rotary_modules(model):
        for prefix in (f"{layer_type}_", "main_" if layer_type == "sliding_attention" else "compress_", ""):
            found = getattr(module, f"{prefix}inv_freq", None)
            if isinstance(found, Tensor):
                alpha = getattr(module, "alpha", None)
                found = found * alpha.exp() if isinstance(alpha, Tensor) else found
                return found.detach().clone(), float(getattr(module, f"{prefix}attention_scaling", 1.0))
    return None, 1.0


def watch(model_type: str, model: nn.Module, config: PreTrainedConfig, numbers: tuple[int, ...]) -> list[Seen]:
    """Run the model at positions zero and at the given ones; one entry for each kind of layer."""
    inputs = inputs_of(model, len(numbers))
    axes = axes_of(run(model, inputs, None, 1).given, len(numbers))
    positions = spread(axes, numbers)
    still = run(model, inputs, torch.zeros_like(positions), axes)
    moved = run(model, inputs, positions, axes)
    with unrotated(model):
        plain = run(model, inputs, positions if model_type in RESET_AT_ZERO else torch.zeros_like(positions), axes)
    if not still.calls:
        raise UnbuildableError("no attention call was seen")
    kinds: dict[Any, Seen] = {}
    layer_types = getattr(config, "layer_types", None)
    learned = {name: tensor.clone() for name, tensor in model.state_dict().items() if LEARNED.search(name)}
    seen_plain = not all(torch.equal(one.key, two.key) for one, two in zip(plain.calls, moved.calls, strict=True))
    for order, (before, after) in enumerate(zip((plain if seen_plain else still).calls, moved.calls, strict=True)):
        index = order if before.layer_idx is None else before.layer_idx
        layer_type = layer_types[index] if layer_types and index < len(layer_types) else None
        rotates = not torch.equal(before.key, after.key)
        inv_freq, amplitude = frequencies(model, layer_type)
        kinds.setdefault(
            (layer_type, rotates, before.query.shape, before.key.shape),
            Seen(
                model_type,
                config,
                layer_type,
                inv_freq,
                amplitude,
                positions,
                before.query,
                after.query,
                before.key,
                after.key,
                not seen_plain,
                rotates,
                "model",
                index,
                learned,
            ),
        )
    return list(kinds.values())


def by_hand(model_type: str, config: PreTrainedConfig, numbers: tuple[int, ...]) -> list[Seen]:
    """The family's rotary module and apply function on random queries and keys."""
    rotary_name, apply_name = BY_HAND[model_type]
    rotary, apply = home(config, rotary_name)(config), home(config, apply_name)
    axes = len(getattr(rotary, "mrope_section", ())) or (2 if TWO_AXES.search(model_type) else 1)
    positions = spread(axes, numbers)
    entries = []
    kinds = set(getattr(config, "layer_types", None) or [None]) - {"linear_attention"}
    for layer_type in sorted(kinds, key=str):
        cos, sin = angles(rotary, positions, layer_type)
        width = head_dim_of(config) or cos.shape[-1]
        q, k = torch.randn(1, 2, len(numbers), width), torch.randn(1, 1, len(numbers), width)
        q_after, k_after = rotated(apply, q, k, cos, sin)
        holder = torch.nn.ModuleList([rotary])
        inv_freq, amplitude = frequencies(holder, layer_type)
        entries.append(
            Seen(
                model_type,
                config,
                layer_type,
                inv_freq,
                amplitude,
                positions,
                q,
                q_after,
                k,
                k_after,
                False,
                True,
                "function",
            )
        )
    return entries


def by_table(model_type: str, config: PreTrainedConfig) -> list[Seen]:
    """The same for a vision tower whose rotary module knows where its patches lie."""
    rotary, apply, positions = patch_table(model_type, config)
    width = config.hidden_size // getattr(config, "speech_encoder_attention_heads", config.num_attention_heads)
    q, k = (torch.randn(1, heads, positions.shape[-1], width) for heads in (2, 1))
    inv_freq, amplitude = frequencies(torch.nn.ModuleList([rotary]), None)
    return [
        Seen(
            model_type,
            config,
            None,
            inv_freq,
            amplitude,
            positions,
            q,
            apply(q),
            k,
            apply(k),
            False,
            True,
            "function",
        )
    ]


def families() -> list[str]:
    """Every model_type that has a rotary embedding of its own."""
    with quiet():
        return sorted(config_classes().keys() - COMPOSITE)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings and the logging of transformers."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def observe(model_type: str, numbers: tuple[int, ...] = NEAR) -> tuple[Seen, ...]:
    """Record queries and keys before and after the rotation of a family's own code."""
    return tuple(_observed(model_type, numbers))


def _observed(model_type: str, numbers: tuple[int, ...]) -> list[Seen]:
    with quiet(), torch.random.fork_rng(devices=[]):
        config_class = config_classes()[model_type]
        if model_type in BOUNDED:
            numbers = tuple(range(len(numbers)))
        if model_type in REASONS:
            raise UnbuildableError(REASONS[model_type])
        if model_type in TABLES:
            torch.manual_seed(0)
            return by_table(model_type, config_class(**TABLES[model_type]))
        if model_type in BY_HAND:
            torch.manual_seed(0)
            return by_hand(model_type, config_class(**CHANGES.get(model_type, {})), numbers)
        # Whatever goes wrong from here on is a fault of this harness, and no reason to leave a family out.
        torch.manual_seed(0)
        config = shrunk(config_class, CHANGES.get(model_type, {}))
        return watch(model_type, built(model_classes(config_class)[0], config), config, numbers)
