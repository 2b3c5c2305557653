"""Compares what `load_spec` says of a family with what transformers computes, and writes docs/conformance.md."""

import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from hub.applied import NOTES
from hub.configs import load_spec
from hub.observed import Seen, UnbuildableError, families, observe
from ropewalk import RopeSpec, RopewalkError, RotaryEmbedding
from ropewalk.hub import HeadTemperature, RopeConfigWarning, load_learned

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
AGREES, REORDERS, DIFFERS, UNBUILDABLE = "agrees", "agrees, features reordered", "differs", "not built"
# Families that a spec cannot say, and why; whatever else differs is a fault of ours.
CANNOT = {
    "gemma4_vision": "each axis has its own block of the head, in halves. Two RopeSpecs, with rotary_dim and"
    " rotary_slice, compute the rotation (tested)",
    "hunyuan_vl_text": "transformers gives the two features of a pair different axes, which is no rotation; the model's"
    " own code does not. Text, with one position on all axes, agrees (tested)",
}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    model_type: str
    layer: str
    verdict: str
    note: str
    seen: str = ""


def rows_of(model_type: str) -> list[Row]:
    """Every kind of layer of a family."""
    try:
        observations = observe(model_type)
    except UnbuildableError as reason:
        return [Row(model_type, "", UNBUILDABLE, str(reason))]
    return [_row(seen) for seen in observations]


def _row(seen: Seen) -> Row:
    layer = seen.layer_type or ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RopeConfigWarning)
            spec, temperature = _spec_of(seen), None
            if seen.learned:
                learned = load_learned(seen.config, seen.learned)
                spec, temperature = spec and learned.spec, learned.temperatures[seen.layer_idx]
    except RopewalkError as error:
        return Row(seen.model_type, layer, DIFFERS, CANNOT.get(seen.model_type, " ".join(str(error).split())))
    if not seen.rotates:
        same = spec is None and (temperature is None or _scaled_alike(seen, temperature))
        return Row(seen.model_type, layer, AGREES if same else DIFFERS, "no rotation" if same else f"{spec}", seen.how)
    if spec is None:
        return Row(seen.model_type, layer, DIFFERS, "load_spec finds no rotation")
    fault = _fault(seen, spec, temperature)
    extra = f"; {NOTES[seen.model_type]}" if seen.model_type in NOTES else ""
    extra += "; frequencies, and a temperature per head, by `load_learned`" if temperature else ""
    if fault is None:
        return Row(seen.model_type, layer, AGREES, _said(spec) + extra, seen.how)
    if spec.pairing == "interleaved" and _fault(seen, spec, temperature, reorder=True) is None:
        return Row(seen.model_type, layer, REORDERS, _said(spec) + "; reordered" + extra, seen.how)
    return Row(seen.model_type, layer, DIFFERS, CANNOT.get(seen.model_type, fault))


def _spec_of(seen: Seen) -> RopeSpec | None:
    """The spec of the layer that was seen."""
    # Two classes are parts of a model and have no model_type; what they are must be said.
    loaded: Any = load_spec(seen.config, pairing=None if seen.config.model_type else "half")
    if not isinstance(loaded, dict):
        return loaded
    if seen.layer_type in loaded:
        return loaded[seen.layer_type]
    if "compress" in loaded:
        return loaded["compress"]
    if "no_rope" in loaded and not seen.rotates:
        return loaded["no_rope"]
    bases = getattr(seen.config, "layer_rope_theta", None)
    return loaded["rope"] if bases is None else loaded[f"rope_theta={bases[seen.layer_idx]:g}"]


def _factors(seen: Seen, temperature: HeadTemperature) -> Tensor:
    """What a temperature adds to the queries between position 0, where they were seen before, and their positions."""
    first, then = temperature.evaluate([0]), temperature.evaluate(seen.positions)
    return torch.from_numpy(then / first)[:, :, None].float()


def _scaled_alike(seen: Seen, temperature: HeadTemperature) -> bool:
    gap = (seen.q_before * _factors(seen, temperature) - seen.q_after).abs().max() / seen.q_after.abs().max()
    return bool(gap <= 2e-5)


def _fault(seen: Seen, spec: RopeSpec, temperature: HeadTemperature | None, *, reorder: bool = False) -> str | None:
    """What is different, in a line; None if nothing is."""
    rope = RotaryEmbedding(spec)
    amplitude = spec.amplitude()
    if abs(amplitude - seen.amplitude) > 1e-6:
        return f"amplitude {amplitude} where transformers has {seen.amplitude}"
    own = rope.inv_freq
    if seen.inv_freq is not None and seen.inv_freq.shape == own.shape and spec.axes is None:
        gap = ((own.abs() - seen.inv_freq).abs() / seen.inv_freq.abs().clamp(min=1e-30)).max().item()
        if gap > 2**-22:
            return f"frequencies differ by {gap:.2g}"
    for name, role, before, after in (
        ("queries", "q", seen.q_before, seen.q_after),
        ("keys", "k", seen.k_before, seen.k_after),
    ):
        if before.shape[-1] != spec.head_dim:
            return f"{name} have {before.shape[-1]} features, the spec has {spec.head_dim}"
        if seen.before_has_amplitude:
            before = _without(before, spec, amplitude)
        rotated = rope(before, positions=seen.positions.to(before.device), role=role, length=1)
        if reorder:
            rotated = _in_halves(rotated, spec)
        if temperature is not None and role == "q":
            rotated = rotated * _factors(seen, temperature)
        gap = ((rotated - after).abs().max() / after.abs().max()).item()
        # NaN is no agreement.
        if not gap <= 2e-5:
            return f"{name} differ by {gap:.2g}"
    return None


def _without(x: Tensor, spec: RopeSpec, amplitude: float) -> Tensor:
    start = 0 if spec.rotary_slice == "leading" else spec.head_dim - spec.rotated_dim
    scale = torch.ones(spec.head_dim)
    scale[start : start + spec.rotated_dim] = amplitude
    return x / scale


def _in_halves(x: Tensor, spec: RopeSpec) -> Tensor:
    """The rotated features, first ones of all pairs before second ones: what transformers' DeepSeek gives back."""
    start = 0 if spec.rotary_slice == "leading" else spec.head_dim - spec.rotated_dim
    rotated = x[..., start : start + spec.rotated_dim]
    halves = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)
    return torch.cat((x[..., :start], halves, x[..., start + spec.rotated_dim :]), dim=-1)


def _said(spec: RopeSpec) -> str:
    parts = [type(spec.frequencies).__name__, spec.pairing]
    if spec.rotated_dim < spec.head_dim:
        parts.append(f"{spec.rotated_dim} of {spec.head_dim} {spec.rotary_slice}")
    parts += [f"{spec.axes.count} axes"] if spec.axes is not None else []
    parts += ["sign −1"] if spec.sign < 0 else []
    parts += ["query temperature"] if spec.query_temperature is not None else []
    return ", ".join(parts)


def page(rows: list[Row]) -> str:
    """The page of docs/, from every line."""
    built = {row.model_type for row in rows if row.verdict != UNBUILDABLE}
    differing = {row.model_type for row in rows if row.verdict == DIFFERS}
    reordered = {row.model_type for row in rows if row.verdict == REORDERS}
    every, agreeing = {row.model_type for row in rows}, built - differing
    by_hand = {row.model_type for row in rows if row.seen == "function"}
    text = f"""transformers {transformers.__version__} has {len(every)} families with a rotary embedding of their own;
a family is a config class. {len(built)} could be built offline, and {len(agreeing)} of these agree with `load_spec`:
{100 * len(agreeing) / len(built):.1f} %, or {100 * len(agreeing) / len(every):.1f} % of all. A small model of each
family is run on one input with and without its rotation. Queries and keys are captured at the attention kernel, and
`RotaryEmbedding(load_spec(config))` must map the unrotated ones to the rotated ones. This checks pairing, slice,
sign, axes, amplitude, temperature, and layers without rotation. Configs are the defaults of their classes, with other
sizes and a few changed options. {len(by_hand)} families are not run as a whole: the test calls their rotary module
and their apply function directly, and the table contains "function". {len(reordered)} families read interleaved pairs
and write them in halves: scores are the same, but their key caches are not interchangeable. mistral_large4_text stores
a part of its rotation in the checkpoint: `load_learned` reads it from the random weights of the small model, and the
test multiplies queries by its `HeadTemperature`, which no module of ropewalk applies. `python -m
hub.conformance` in tests/ writes this page, and `make test-all` checks it."""
    lines = [
        "# Conformance with transformers",
        "",
        *textwrap.wrap(" ".join(text.split()), 120),
        "",
        "## Families that differ",
        "",
        "| family | why |",
        "|---|---|",
        *[f"| {row.model_type} | {row.note} |" for row in rows if row.verdict == DIFFERS],
        "",
        "## Families that could not be built",
        "",
        "| family | why |",
        "|---|---|",
        *[f"| {row.model_type} | {row.note} |" for row in rows if row.verdict == UNBUILDABLE],
        "",
        "## Families that agree",
        "",
        "| family | layers | rotation | seen |",
        "|---|---|---|---|",
        *[
            f"| {row.model_type} | {row.layer or 'all'} | {row.note} | {row.seen} |"
            for row in rows
            if row.verdict in (AGREES, REORDERS)
        ],
        "",
    ]
    return "\n".join(lines)


def all_rows() -> list[Row]:
    """Every family, in the order of their names."""
    return [row for model_type in sorted(families()) for row in rows_of(model_type)]


if __name__ == "__main__":
    found = all_rows()
    PAGE.write_text(page(found), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}: {len(found)} lines\n")
