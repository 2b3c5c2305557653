"""Random specs for the explorer: every rule that the page computes, with numbers up to the limits of its fields.

Rules with a ramp have factors up to 64.
"""

import random
from typing import Any

from ropewalk.spec import Frequencies, RopeSpec
from ropewalk.tools.explore.presets import PAGE_RULES

__all__ = ["random_spec", "random_specs"]


def random_specs(count: int, seed: int) -> list[RopeSpec]:
    """`count` specs, with each rule in rotation."""
    draw = random.Random(seed)
    return [random_spec(draw, PAGE_RULES[i % len(PAGE_RULES)]) for i in range(count)]


def random_spec(draw: random.Random, rule: str) -> RopeSpec:
    """A spec with this rule."""
    pairs = draw.choice((2, draw.randint(2, 64), draw.randint(2, 64), draw.randint(2, 64), draw.randint(64, 256)))
    fields = _fields(draw, rule, pairs)
    head_dim = 2 * pairs + 2 * draw.choice((0, 0, draw.randint(1, 16)))
    return RopeSpec(
        head_dim,
        Frequencies.known[rule](**fields),
        rotary_dim=2 * pairs,
        pairing=draw.choice(("half", "interleaved")),
        rotary_slice=draw.choice(("leading", "leading", "trailing")),
        sign=draw.choice((1, 1, -1)),
        angles=draw.choice(("exact", "float32")),
    )


def _fields(draw: random.Random, rule: str, pairs: int) -> dict[str, Any]:
    if rule == "Explicit":
        rows = [[draw.uniform(0, 2) for _ in range(pairs)] for _ in range(3)]
        return {"inv_freq": draw.choice((rows[0], rows))}
    fields: dict[str, Any] = {"base": 10 ** draw.choice((draw.uniform(1, 8), draw.uniform(0.005, 12)))}
    if rule not in ("Plain", "AcrossHeads"):
        factors = (1.0, draw.uniform(1, 64), float(2 ** draw.randint(0, 6)), 10 ** draw.uniform(0, 6))
        # Where a ramp begins, the factor multiplies the last bit of a logarithm.
        fields["factor"] = draw.choice(factors[:3] if rule in ("NTKByParts", "Llama3", "Yarn") else factors)
    if rule in ("DynamicNTK", "NTKByParts", "Llama3", "Yarn", "LongRope"):
        fields["trained_length"] = int(2 ** draw.uniform(6, 20))
    low, high = draw.uniform(0.5, 2), draw.uniform(16, 64)
    if rule == "NTKByParts":
        fields |= {"alpha": low, "beta": high}
    elif rule == "Llama3":
        fields |= {"low_freq_factor": low, "high_freq_factor": draw.choice((high, low))}
    elif rule == "Yarn":
        fields |= {"beta_slow": low, "beta_fast": high, "truncate": draw.random() < 0.7}
        fields |= {"ramp": draw.choice(("index", "index", "ratio"))}
        fields |= {"policy": draw.choice(("transformers", "deepseek", "vllm"))}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            fields[name] = draw.choice((None, None, draw.uniform(0.5, 2), 10 ** draw.uniform(-6, 2)))
    elif rule == "LongRope":
        fields |= {name: [draw.uniform(1, 64) for _ in range(pairs)] for name in ("short_factor", "long_factor")}
        fields["attention_factor"] = draw.choice((None, 1.25))
        if fields["attention_factor"] is None and draw.random() < 0.3:
            fields |= {"short_amplitude": 1.1, "long_amplitude": 1.3}
    elif rule == "Proportional":
        fields["fraction"] = draw.choice((0.0, 1.0, draw.random(), draw.random()))
    elif rule == "NTKMixed":
        fields["bend"] = draw.choice((0.01, 4.0, draw.uniform(0.3, 1.5)))
    elif rule == "AcrossHeads":
        fields["num_heads"] = draw.choice((1, 64, draw.randint(1, 8)))
    return fields
