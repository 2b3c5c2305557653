"""Configs that mean harm, drawn at random: a model's config with types swapped, numbers out of range, text broken.

    PYTHONPATH=tests python -m hub.hostile_configs 100000

reads that many, through every function that reads a config. Each takes at most two seconds and the run at most 200 MB;
what comes out is a result or a RopewalkError. tests/hub/test_config_fuzz.py runs a sample.
"""

import argparse
import collections
import contextlib
import copy
import json
import math
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ropewalk import RopeSpec, RopewalkError, load_spec
from ropewalk.hub import extend_model, inspect_model, read_model
from ropewalk.hub.configs.limits import LIMITS
from ropewalk.hub.extend.rules import RULE_NAMES, RuleName
from ropewalk.hub.families.table import FAMILIES, WITHOUT_ROPE
from waiting import HANG

__all__ = ["MOST_MEMORY", "MOST_SECONDS", "Tally", "hostile", "run"]

MOST_SECONDS, MOST_MEMORY = 2.0, 200 << 20
BUNDLED = Path(__file__).parent.parent / "data" / "configs"
SEEDS: list[dict[str, Any]] = [
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 8192,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
    {
        "model_type": "deepseek_v3",
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "original_max_position_embeddings": 1024,
        },
    },
    {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    },
    {
        "model_type": "phi3",
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 1024,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    },
    {
        "model_type": "qwen2_vl",
        "text_config": {
            "model_type": "qwen2_vl_text",
            "hidden_size": 32,
            "num_attention_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
    },
    {"model_type": "smollm3", "head_dim": 16, "no_rope_layers": [1, 0], "rope_theta": 1e6},
    {"model_type": "granite_swa", "head_dim": 16, "layer_rope_theta": [1e4, 0]},
    {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4, "rotary_pct": 0.25},
    {"dim": 64, "n_heads": 4, "rope_theta": 1e6, "yarn": {"factor": 4, "original_max_position_embeddings": 64}},
    {"model_type": "gemma4_text", "head_dim": 16, "per_layer_config": {"1": {"head_dim": 32}}, "layer_types": ["a"]},
]
SEEDS += [json.loads(path.read_text(encoding="utf-8")) for path in sorted(BUNDLED.glob("*.json"))]
SEEDS += [
    {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": -1},
    {"dim": 2048, "n_heads": 32, "n_kv_heads": 8, "n_layers": 16, "rope_theta": 5e5, "use_scaled_rope": True},
    {"model_type": "llama", "head_dim": 64, "ropewalk": {"pairing": "half", "converted_from": "half"}},
    {"model_type": "bloom", "n_head": 8, "rope_theta": 1e4},
]
NUMBERS: list[Any] = [0, 1, -1, 2, 3, 0.5, -0.0, 1e-308, 5e-324, 1e308, -1e308, math.nan, math.inf, -math.inf, 1 << 70]
NUMBERS += [10**9, 10**30, -(10**30), 10**308, 10**400, 10**5000, 2**31, 2**53 + 1, 2**63, 1 << 14, (1 << 14) + 1, 1e9]
NUMBERS += [1 << 28, 4096, 4098, 1e30, 0.1, 1.0000000001, True, False]
TEXTS: list[Any] = ["", "4", "10**9", "yarn", "\u0000", "\ud800", "\u202e", "\x1b[31m", "\N{KNOT}" * 50, "x" * 1000]
TEXTS += ["x" * 100_000, "NaN", "null", "e\u0301", "%s%n", "../../etc/passwd", "llama\n"]
ODD: list[Any] = [None, [], [1.0], [None], [[1]], {}, {"a": 1}, {"rope_type": "yarn"}, {"": {}}, [0] * 5000, ["a"] * 64]
ODD += [
    {str(number): {} for number in range(100)},
    [math.nan] * 8,
    [10**30] * 4,
    [-1, 0, 1],
    b"bytes",
    1j,
    {1: 2},
    set(),
]
KEYS = [
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "partial_rotary_factor",
    "rotary_dim",
    "head_dim",
    "alpha",
    "ropewalk",
]
KEYS += ["mixed_b", "mrope_section", "attn_factor", "rope_scaling", "rope_parameters", "layer_types", "text_config"]
KEYS += [
    "max_position_embeddings",
    "attention_factor",
    "truncate",
    "no_rope_layers",
    "layer_rope_theta",
    "xdrope_section",
]
KEYS += [
    "mrope_interleaved",
    "per_layer_config",
    "use_sliding_window",
    "alibi",
    "attn_config",
    "yarn",
    "llama_4_scaling",
]
KEYS += ["beta_fast", "beta_slow", "mscale", "mscale_all_dim", "short_factor", "long_factor", "multi_query", "decoder"]
KEYS += [
    "patch_size",
    "vocab_size",
    "model_type",
    "rope_local_base_freq",
    "llama_4_scaling_beta",
    "attn_scale",
    *LIMITS,
]
KEYS += ["max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "sliding_window", "floor_scale"]
KEYS += ["original_max_position_embeddings", "kv_lora_rank", "index_head_dim", "max_window_layers"]
KEYS += ["sliding_window_pattern", "global_attn_every_n_layers", "full_attention_interval"]
TYPES = ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "ntk", "su", "mrope", "axial"]
TYPES += ["openpangu", "xdrope", "deepseek_yarn", "full_attention", "sliding_attention"]


def places(config: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a config that has a value, ten levels down at most."""
    inside = [path] if path else []
    if len(path) == 10:
        return inside
    entries = config.items() if isinstance(config, dict) else enumerate(config[:50]) if isinstance(config, list) else ()
    return inside + [place for key, value in entries for place in places(value, (*path, key))]


def _number(value: Any, rng: random.Random) -> Any:
    """Another number than this one, near or far."""
    changes: list[Callable[[Any], Any]] = [lambda x: -x, lambda x: x * 1000, lambda x: x / 3, int, float, str, bool]
    with contextlib.suppress(OverflowError, ValueError):
        return rng.choice(changes)(value)
    return value


def _nested(value: Any, rng: random.Random) -> Any:
    """A value in a list or an object, a few times or far too often."""
    for _ in range(rng.choice([1, 2, 31, 33, 100, 900])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _list(value: list[Any], rng: random.Random) -> list[Any]:
    """A list of another length, or with something else in it."""
    change = rng.randrange(5)
    if change == 0:
        return value[: rng.randrange(len(value) + 1)]
    if change == 1:
        return (value * rng.choice([2, 10, 1000]))[:50_000]
    if change == 2:
        return [*value, rng.choice([*NUMBERS, *TEXTS, *ODD])]
    if change == 3:
        return [rng.choice([*NUMBERS, *TEXTS]) for _ in value]
    return value[::-1]


def _value(value: Any, rng: random.Random) -> Any:
    kind = rng.randrange(10)
    if kind < 2 and isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value, rng)
    if kind < 3 and isinstance(value, list):
        return _list(value, rng)
    if kind == 3:
        return _nested(value, rng)
    return copy.deepcopy(rng.choice(NUMBERS if kind < 6 else TEXTS if kind < 7 else TYPES if kind < 8 else ODD))


def _mutated(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        where = places(config)
        if not where:
            break
        *path, key = rng.choice(where)
        holder: Any = config
        for step in path:
            holder = holder[step]
        change = rng.randrange(6)
        if change == 0 and isinstance(holder, dict):
            del holder[key]
        elif change <= 2 and isinstance(holder, dict):
            holder[rng.choice(KEYS)] = _value(holder[key], rng)
        elif change == 3 and isinstance(holder, dict):
            holder[rng.choice([f"{key}x", rng.choice(KEYS), rng.choice(TEXTS)])] = holder.pop(key)
        else:
            holder[key] = _value(holder[key], rng)
    return config


def _broken(text: str, rng: random.Random) -> bytes:
    """The text of a config with something wrong in its letters."""
    data, change = bytearray(text, "utf-8", "surrogatepass"), rng.randrange(7)
    if change == 0:
        del data[rng.randrange(len(data) + 1) :]
    elif change == 1 and data:
        data[rng.randrange(len(data))] = rng.randrange(256)
    elif change == 2:
        data[1:1] = b'"model_type": "llama", "model_type": "gptj", '
    elif change == 3:
        return b"[" * rng.choice([1, 40, 100_000]) + bytes(data)
    elif change == 4:
        return data.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]), "replace")
    elif change == 5:
        return bytes(data).replace(b"1", b"9" * rng.choice([20, 400, 5000]))
    return bytes(data)


def hostile(rng: random.Random, folder: Path) -> Any:
    """A config that means harm: a dict, or the path of a file in `folder`."""
    config = _mutated(rng.choice(SEEDS), rng)
    if rng.random() < 0.2:
        config["model_type"] = rng.choice([*FAMILIES, *WITHOUT_ROPE])
    if rng.random() < 0.02:
        # As a dict can be, and no file.
        config[rng.choice(KEYS)] = config
    if rng.random() < 0.2:
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            path = folder / rng.choice(["config.json", "params.json", "other.json"])
            path.write_bytes(_broken(json.dumps(config, ensure_ascii=rng.random() < 0.5), rng))
            return path
    return config


class Tally:
    """What came of the configs: results and errors by number, the slowest, the memory they took, and all `faults`."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.slowest: tuple[float, str] = (0.0, "")
        self.faults: list[str] = []
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @property
    def memory(self) -> int:
        """Bytes by which the peak has grown."""
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before) << 10


def _specs(config: Any, pairing: Any) -> list[RopeSpec]:
    spec = load_spec(config, pairing=pairing)
    return [one for one in (spec.values() if isinstance(spec, dict) else [spec]) if one is not None]


def _loaded(config: Any, pairing: Any) -> None:
    for spec in _specs(config, pairing):
        assert RopeSpec.from_json(spec.to_json()) == spec
        assert all(map(math.isfinite, spec.inv_freq().ravel().tolist()))


def _inspected(config: Any, pairing: Any) -> None:
    json.dumps(inspect_model(config, pairing=pairing).as_json()).encode()


def _extended(config: Any, pairing: Any) -> None:
    json.dumps(extend_model(config, 16384, trained=4096, pairing=pairing).as_json()).encode()


def _extended_by(rule: RuleName) -> Callable[[Any, Any], None]:
    def extended(config: Any, pairing: Any) -> None:
        json.dumps(extend_model(config, 262_144, rule=rule, pairing=pairing).as_json()).encode()

    return extended


def _read(config: Any, pairing: Any) -> None:
    repr(read_model(config, pairing=pairing))


# Each function, and of how many configs it reads one: inspecting and extending take a tenth of a second and more.
READERS: dict[str, tuple[Callable[[Any, Any], None], int]] = {
    "load_spec": (_loaded, 1),
    "read_model": (_read, 1),
    "inspect_model": (_inspected, 50),
    "extend_model": (_extended, 100),
    # All but base-bound, which tries bases for seconds at this length, whatever the config.
    **{f"extend_model {rule}": (_extended_by(rule), 100) for rule in RULE_NAMES if rule != "base-bound"},
}


@contextlib.contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    """Ends the process where something waits or computes for that long: nothing in it would."""
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def run(count: int, seed: int, *, sample: bool = False) -> Tally:
    """Reads `count` configs."""
    rng, tally = random.Random(seed), Tally()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(count):
            config, pairing = hostile(rng, Path(folder)), rng.choice([None, None, "half", "interleaved"])
            for name, (read, every) in READERS.items():
                if number % (every * (10 if sample and every > 1 else 1)):
                    continue
                _try(tally, name, read, config, pairing, f"seed {seed}, number {number}")
    return tally


def _try(tally: Tally, name: str, read: Callable[[Any, Any], None], config: Any, pairing: Any, which: str) -> None:
    started, outcome, said = time.thread_time(), "result", ""
    try:
        with _alarm(HANG):
            read(config, pairing)
    except RopewalkError as error:
        outcome, said = "RopewalkError", str(error)
    except BaseException as error:
        text = config.read_bytes()[:2000] if isinstance(config, Path) else f"{list(config.items())}"[:2000]
        place = traceback.extract_tb(error.__traceback__)[-1]
        tally.faults.append(f"{name}, {which}: {error!r} at {place.filename}:{place.lineno} from {text}")
        outcome = type(error).__name__
    seconds = time.thread_time() - started
    tally.counts[f"{name}: {outcome}"] += 1
    tally.slowest = max(tally.slowest, (seconds, f"{name}, {which}"))
    # What is said can be written, and read by people.
    if len(said) > 10_000 or any("\ud800" <= letter <= "\udfff" for letter in said):
        tally.faults.append(f"{name}, {which}: {said[:200]}")
    if seconds > MOST_SECONDS:
        tally.faults.append(f"{name}, {which}: {seconds:.2f} s")
    if tally.memory > MOST_MEMORY:
        tally.faults.append(f"{name}, {which}: {tally.memory >> 20} MB")


def main() -> int:
    """Reads as many configs as the command line says, and prints what came of them."""
    parser = argparse.ArgumentParser(description="Reads hostile configs through every function that reads a config.")
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started, tally = time.monotonic(), run(options.count, options.seed)
    lines = [f"{outcome:<32}{times:>8}" for outcome, times in sorted(tally.counts.items())]
    lines.append(f"slowest: {tally.slowest[0]:.2f} s of CPU time ({tally.slowest[1]})")
    lines += tally.faults
    lines.append(f"memory: {tally.memory >> 20} MB above {tally.before >> 10} MB")
    sys.stdout.write("\n".join([*lines, f"{time.monotonic() - started:.0f} s in all\n"]))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
