"""A conversion that is killed at any moment, and one of a model that is larger than the memory it may use."""

import hashlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ropewalk.hub import convert_checkpoint, verify_conversion
from ropewalk.hub.convert.folders import SUFFIX

pytestmark = pytest.mark.slow
KILLS = 16
# It kills itself after a number of calls of functions, which does not depend on how busy the machine is; else it prints
# how many calls there were, and how much memory it took, in kB. The high-water mark of getrusage is that of the
# process which started it, where that was larger; this one is its own.
WORK = """
import os, re, signal, sys
from pathlib import Path
from ropewalk.hub import convert_checkpoint
last, calls = int(sys.argv[3]), 0
def count(frame, event, argument):
    global calls
    calls += 1
    if calls == last:
        os.kill(os.getpid(), signal.SIGKILL)
if last:
    sys.setprofile(count)
convert_checkpoint(sys.argv[1], sys.argv[2], to="interleaved", verify=True)
sys.setprofile(None)
print(calls, re.search("VmHWM: *([0-9]+) kB", Path("/proc/self/status").read_text().replace("\\t", " "))[1])
assert "torch" not in sys.modules
"""
NEVER = 1 << 60


def converted(model: Path, out: Path, last: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WORK, model, out, str(last)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def made(folder: Path, *, hidden: int, heads: int, keys: int, layers: int, wide: int, words: int) -> tuple[Path, int]:
    """A Llama of random float16 weights, a shard a layer, and the bytes of its largest tensor."""
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": keys}
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    (folder / "tokenizer.json").write_text("{}")
    numbers = np.random.default_rng(0)
    mapped, largest = {}, 0
    width = hidden // heads * keys
    for layer in range(-1, layers):
        shapes = {"model.embed_tokens.weight": (words, hidden)}
        if layer >= 0:
            here = f"model.layers.{layer}"
            rows = {"q_proj": hidden, "k_proj": width, "v_proj": width, "o_proj": hidden}
            shapes = {f"{here}.self_attn.{name}.weight": (count, hidden) for name, count in rows.items()}
            shapes |= {f"{here}.mlp.{name}_proj.weight": (wide, hidden) for name in ("up", "gate")}
            shapes |= {f"{here}.mlp.down_proj.weight": (hidden, wide)}
        file = f"model-{layer + 2:05d}-of-{layers + 1:05d}.safetensors"
        save_file(
            {name: numbers.standard_normal(s, np.float32).astype(np.float16) for name, s in shapes.items()},
            folder / file,
        )
        mapped |= dict.fromkeys(shapes, file)
        largest = max(largest, *(2 * rows * columns for rows, columns in shapes.values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    return folder, largest


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_kills_lose_nothing_and_leave_no_half_output(tmp_path):
    model, _ = made(tmp_path / "model", hidden=512, heads=8, keys=4, layers=8, wide=1024, words=1000)
    before = digests(model)
    whole = tmp_path / "whole"
    convert_checkpoint(model, whole, to="interleaved")
    right = digests(whole)
    out, partial = tmp_path / "out", tmp_path / f"out{SUFFIX}"
    draw, outcomes = random.Random(0), {"nothing": 0, "partial": 0, "whole": 0}
    calls = int(converted(model, out, NEVER).stdout.split()[0])
    shutil.rmtree(out)
    for _ in range(KILLS):
        # What a killed run left behind is removed first, by a few more calls.
        last = draw.randint(1, calls) if draw.random() < 0.85 else NEVER
        assert (converted(model, out, last).returncode == 0) == (last == NEVER)
        assert digests(model) == before
        assert {path.name for path in tmp_path.iterdir()} <= {"model", "whole", "out", partial.name}
        if out.exists():
            assert digests(out) == right
            assert not partial.exists()
            outcomes["whole"] += 1
            shutil.rmtree(out)
        else:
            outcomes["partial" if partial.exists() else "nothing"] += 1
    # Kills fell before the first file and after the last; else nothing was tried.
    assert outcomes["partial"] > KILLS // 4, outcomes
    assert outcomes["whole"] > 1, outcomes
    convert_checkpoint(model, out, to="interleaved")
    assert digests(out) == right
    assert not partial.exists()
    assert verify_conversion(model, out).holds


def test_memory_stays_below_three_tensors_whatever_the_size(tmp_path):
    model, largest = made(tmp_path / "model", hidden=4096, heads=32, keys=8, layers=4, wide=11_008, words=12_800)
    size = sum(path.stat().st_size for path in model.iterdir())
    assert size > 1.4e9
    peak = 1024 * int(converted(model, tmp_path / "out", 0).stdout.split()[1])
    assert peak < 3 * largest + 200e6, (peak, largest, size)
    assert peak < size / 2
