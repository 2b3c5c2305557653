"""Model folders that mean harm, drawn at random; hostile_run.py converts them.

Links to private files, FIFOs, sockets and devices, files with holes, headers and configs with counts that no memory
holds, texts that are nested without end.
"""

import contextlib
import json
import os
import random
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hub.checkpoints import CONFIG, Q, llama
from hub.special_files import SPECIAL

SECRET = "a-private-word-7f3a"
INDEX, SINGLE, SHARD = "model.safetensors.index.json", "model.safetensors", "model-00001-of-00002.safetensors"
# What a file can be replaced by, in the words of a model folder; the others are made by SPECIAL.
NAMES = ("config.json", INDEX, SINGLE, SHARD, "tokenizer.json", "vocab.txt", ".hidden", "sub/deep/file.txt", "x.bin")


class Case:
    """A folder with a model in it, a private file beside the model, and a generator of random numbers."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.model, self.out, self.outside = folder / "model", folder / "out", folder / "outside"
        self.outside.mkdir()
        # It is a config, an index and a tokenizer at once, should anything read it as one.
        secret = {"private": SECRET, **CONFIG, "weight_map": {SECRET: SINGLE}}
        (self.outside / "key").write_text(json.dumps(secret))
        (self.outside / "key").chmod(0o600)
        llama(self.model, shards=draw.choice((0, 2)))
        (self.model / "tokenizer.json").write_text("{}")
        (self.model / "sub" / "deep").mkdir(parents=True)
        (self.model / "sub" / "deep" / "file.txt").write_text("text")
        shutil.copy(next(self.model.glob("*.safetensors")), self.outside / SINGLE)

    def cached(self) -> None:
        """The model as a hub's cache has it."""
        repository = self.folder / "models--company--model"
        snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for number, path in enumerate(sorted(self.model.rglob("*"))):
            place = snapshot / path.relative_to(self.model)
            if path.is_dir():
                place.mkdir()
            else:
                path.rename(blobs / str(number))
                place.symlink_to(os.path.relpath(blobs / str(number), place.parent))
        self.model = snapshot

    def replace(self, name: str) -> Path:
        """The path of a name under which nothing is any more."""
        path = self.model / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        return path

    def write(self, name: str, data: bytes) -> None:
        self.replace(name).write_bytes(data)

    def config(self) -> dict[str, Any]:
        return dict(CONFIG)

    def weights(self) -> tuple[str, dict[str, Any], bytes]:
        """A file of weights that is there: its name, its header, and the tensors."""
        name = SINGLE if (self.model / SINGLE).exists() else SHARD
        path, data = self.model / name, b""
        with contextlib.suppress(OSError):
            # It may be a FIFO by now, or have a hole of a terabyte.
            if path.is_file() and path.stat().st_size < 1 << 20:
                data = path.read_bytes()
        if len(data) <= 8:
            return name, {}, b""
        (length,) = struct.unpack("<Q", data[:8])
        try:
            entries = json.loads(data[8 : 8 + length])
        except (ValueError, RecursionError):
            return name, {}, b""
        whole = isinstance(entries, dict) and all(
            isinstance(entry, dict) and [type(end) for end in entry.get("data_offsets", [])] == [int, int]
            for entry in entries.values()
        )
        return (name, entries, data[8 + length :]) if whole else (name, {}, b"")


def header(case: Case, text: bytes, data: bytes = b"", length: int | None = None) -> None:
    name, *_ = case.weights()
    case.write(name, struct.pack("<Q", len(text) if length is None else length) + text + data)


def nested(draw: random.Random) -> str:
    depth = draw.choice((31, 33, 900, 5_000, 200_000, 1_000_000))
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    return opening * depth + draw.choice(("", "1" + closing * depth))


def number(draw: random.Random) -> Any:
    """A number that no count is, or something that is no number."""
    big = (10**9, 2**31, 2**53, 2**63, 10**30, 10**300, 10**4000, 1e308, float("inf"), float("nan"), 16384, 65536)
    return draw.choice((*big, -1, 0, 0.5, True, None, "4", [4], {"a": 4}, "\x1b[31m\n", [10**9] * 1000))


def link_outside(case: Case) -> None:
    target = case.draw.choice((case.outside / "key", case.outside, case.outside / SINGLE, case.outside / "nothing"))
    path = case.replace(case.draw.choice(NAMES))
    kind = case.draw.randrange(5)
    if kind == 0:
        path.symlink_to(target)
    elif kind == 1:
        path.symlink_to(os.path.relpath(target, path.parent.resolve()))
    elif kind == 2:
        step = path.with_name("step")
        step.unlink(missing_ok=True)
        step.symlink_to(target)
        path.symlink_to("step")
    elif kind == 3:
        # By a link to a folder in the middle of the path.
        middle = case.model / "middle"
        middle.unlink(missing_ok=True)
        middle.symlink_to(case.outside)
        path.symlink_to(case.model / "middle" / target.name)
    else:
        path.symlink_to(str(case.model) + "/sub/deep/../../../" + os.path.relpath(target, case.folder))


def link_somewhere(case: Case) -> None:
    places = (
        "/dev/zero",
        "/dev/full",
        "/dev/null",
        "/dev/stdin",
        "/proc/self/mem",
        "/proc/self/environ",
        "/",
        "..",
        ".",
    )
    case.replace(case.draw.choice(NAMES)).symlink_to(
        case.draw.choice((*places, "/proc/kmsg", "/etc/passwd", "x" * 200))
    )


def link_in_a_cache(case: Case) -> None:
    if case.model.name == "model":
        case.cached()
    other = case.folder / "models--other" / "blobs"
    other.mkdir(parents=True, exist_ok=True)
    (other / "0").write_text(SECRET)
    choice = case.draw.randrange(3)
    if choice == 0:
        case.replace(case.draw.choice(NAMES)).symlink_to(other / "0")
    elif choice == 1:
        blobs = case.model.parent.parent / "blobs"
        if not blobs.is_symlink():
            blobs.rename(case.outside / "blobs")
            blobs.symlink_to(case.outside / "blobs")
    else:
        blob = next(iter((case.model.parent.parent / "blobs").iterdir()))
        blob.unlink(missing_ok=True)
        blob.symlink_to(case.outside / "key")


def special(case: Case) -> None:
    path = case.replace(case.draw.choice(NAMES))
    shutil.rmtree(path.with_name(f".{path.name}.target"), ignore_errors=True)
    path.with_name(f".{path.name}.target").unlink(missing_ok=True)
    SPECIAL[case.draw.choice(sorted(SPECIAL))](path)


def device(case: Case) -> None:
    path = case.replace(case.draw.choice(NAMES))
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, case.draw.choice((3, 5, 7, 8))))
    except OSError:
        os.mkfifo(path)


def hole(case: Case) -> None:
    """A file with a hole of a terabyte, by itself or behind what a file of its kind begins with."""
    name = case.draw.choice(NAMES)
    path = case.model / name
    if not path.is_file() or case.draw.random() < 0.5:
        path = case.replace(name)
        path.touch()
    os.truncate(path, case.draw.choice((1 << 40, 1 << 43, (1 << 44) - (1 << 20))))


def holed_tensors(case: Case) -> None:
    """Weights that are whole by their header, and of which nothing is on the disk."""
    rows = case.draw.choice((1 << 20, 1 << 30))
    entries = {Q.replace("q_proj", f"{role}_proj"): {"dtype": "F32", "shape": [rows, 1024]} for role in "qkvo"}
    at = 0
    for entry in entries.values():
        entry["data_offsets"] = [at, at := at + rows * 4096]
    text = json.dumps(entries).encode()
    header(case, text)
    with contextlib.suppress(OSError):
        os.truncate(case.model / case.weights()[0], 8 + len(text) + at)


def bad_header_length(case: Case) -> None:
    _, entries, data = case.weights()
    text = json.dumps(entries).encode()
    lengths = (
        1 << 60,
        1 << 63,
        (1 << 64) - 1,
        0,
        1,
        len(text) + len(data),
        len(text) + len(data) + 1,
        len(text) - 1,
        1 << 27,
    )
    header(case, text, data, case.draw.choice(lengths))


def bad_header(case: Case) -> None:
    draw = case.draw
    _, entries, data = case.weights()
    chosen = draw.choice(sorted(entries)) if entries else "a"
    entry = dict(entries.get(chosen) or {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    start, end = (int(offset) for offset in entry.get("data_offsets", [0, 4]))
    changes: list[dict[str, Any]] = [
        {"data_offsets": [end, start]},
        {"data_offsets": [start + 4, end + 4]},
        {"data_offsets": [start - 4, end - 4]},
        {"data_offsets": [start, 1 << 60]},
        {"data_offsets": [1 << 62, 1 << 63]},
        {"data_offsets": [0, 10**4000]},
        {"data_offsets": [number(draw), number(draw)]},
        {"data_offsets": [0] * 100_000},
        {"shape": [2**40, 2**40, 0]},
        {"shape": [2**62] * 60},
        {"shape": [10**4000] * 1000},
        {"shape": [1] * 500_000},
        {"shape": [number(draw)]},
        {"shape": []},
        {"dtype": draw.choice(("F3", "", None, [], {}, 7, "\x1b[31m", "F4", "C64", "x" * 1_000_000))},
    ]
    entry |= draw.choice(changes)
    header(case, json.dumps({**entries, chosen: entry}).encode(), data)


def odd_header(case: Case) -> None:
    draw = case.draw
    _, entries, data = case.weights()
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    texts: list[Callable[[], str]] = [
        lambda: nested(draw),
        lambda: "[]",
        lambda: "{}",
        lambda: '"' + "x" * 5_000_000 + '"',
        lambda: "[" + "[]," * draw.choice((100_000, 2_000_000, 5_000_000)) + "[]]",
        lambda: "[" + "1," * draw.choice((400_000, 7_000_000)) + "1]",
        lambda: "{" + ",".join(f'"{i}":{empty}' for i in range(draw.choice((50_000, 100_000, 200_000)))) + "}",
        lambda: "{" + ",".join(f'"{i}":1' for i in range(400_000)) + ',"399999":1}',
        lambda: json.dumps(entries)[:-1] + f',"{"_mm" * draw.choice((300, 1_000_000))}":{empty}' + "}",
        lambda: json.dumps(entries)[:-1] + f',"{"a." * draw.choice((400, 1_000_000))}q.weight":{empty}' + "}",
        lambda: json.dumps(entries)[:-1] + f',"{".quant_state" * draw.choice((80, 500_000))} ":{empty}' + "}",
        lambda: (
            json.dumps(entries)[:-1]
            + "".join(f',"{"_mm" * 330}{i}":{empty}' for i in range(draw.choice((1000, 15_000))))
            + "}"
        ),
        lambda: (
            json.dumps(entries)[:-1]
            + f',"model.layers.{"9" * draw.choice((5, 900, 5000))}.self_attn.q_proj.weight":{empty}'
            + "}"
        ),
        lambda: json.dumps(entries)[:-1] + f',"a\\u001b[31m\\nb":{empty}' + "}",
        lambda: json.dumps(entries)[:-1] + ',"__metadata__":' + nested(draw) + "}",
        lambda: '{"😀":"' + "x" * draw.choice((1_000_000, 15_000_000)) + '"}',
        lambda: json.dumps(entries) + " " * 20_000_000,
        lambda: '{"a":' + "9" * draw.choice((4000, 4400, 10_000_000)) + "}",
    ]
    header(case, draw.choice(texts)().encode(), data)


def cut_off(case: Case) -> None:
    for name in (SINGLE, SHARD, INDEX, "config.json"):
        path = case.model / name
        if path.is_file() and path.stat().st_size < 1 << 20:
            data = path.read_bytes()
            case.write(name, data[: case.draw.randrange(len(data) + 1)])


def bad_count(case: Case) -> None:
    keys = [
        *CONFIG,
        "head_dim",
        "num_nextn_predict_layers",
        "sliding_window",
        "max_position_embeddings",
        "kv_lora_rank",
    ]
    keys += ["qk_rope_head_dim", "qk_nope_head_dim", "no_rope_layer_interval", "sliding_window_pattern", "attn_config"]
    kinds = [
        "llama",
        "qwen2",
        "gemma2",
        "gemma3_text",
        "cohere2",
        "llama4_text",
        "mistral",
        "deepseek_v3",
        "dbrx",
        "falcon",
    ]
    config = case.config() | {"model_type": case.draw.choice(kinds)}
    for key in case.draw.sample(keys, case.draw.randint(1, 3)):
        config[key] = number(case.draw)
    case.write("config.json", json.dumps(config).encode())


def odd_config(case: Case) -> None:
    draw, config = case.draw, case.config()
    texts: list[Callable[[], Any]] = [
        lambda: nested(draw),
        lambda: json.dumps(config)[:-1] + ',"x":' + nested(draw) + "}",
        lambda: "[" + "[]," * 4_000_000 + "[]]",
        lambda: "{" + ",".join(f'"{i}":1' for i in range(draw.choice((4000, 1_000_000)))) + "}",
        lambda: json.dumps(config)[:-1] + ',"x":"' + "y" * draw.choice((1_000_000, 15_000_000, 17_000_000)) + '😀"}',
        lambda: json.dumps(
            config | {"model_type": draw.choice(("\x1b[31m\n", "x" * 1_000_000, 7, [], {}, "", "mine"))}
        ),
        lambda: json.dumps(config | {"ropewalk": draw.choice(({}, [], 7, None, {"pairing": "half"}, "x" * 100_000))}),
        lambda: json.dumps(
            config | {"ropewalk": {"pairing": "interleaved", "converted_from": number(draw), "model_code": []}}
        ),
        lambda: json.dumps(
            config | {"quantization_config": draw.choice((1, [1], "\x1b[31m", {"quant_method": ["x"] * 99_999}))}
        ),
        lambda: json.dumps(
            config | {"layer_types": draw.choice((7, ["full_attention"] * 1_000_000, [[]], [None], "x"))}
        ),
        lambda: json.dumps(config | {"no_rope_layers": [0] * 500_000, "model_type": "smollm3"}),
        lambda: json.dumps(
            config | {"rope_scaling": draw.choice((7, [], {"rope_type": "yarn"}, {"factor": number(draw)}))}
        ),
        lambda: json.dumps({"text_config": {"text_config": config}, "model_type": "llava"}),
        lambda: json.dumps(config)[:-1] + ',"hidden_size":1}',
        lambda: json.dumps(config) + " " * 16_000_000,
        lambda: "\ufeff" + json.dumps(config),
        lambda: "",
        lambda: "null",
        lambda: '"' + "\\ud800" * 100_000 + '"',
        lambda: json.dumps(config)[:-1] + ',"x":' + "9" * draw.choice((4000, 5000)) + "}",
    ]
    case.write("config.json", draw.choice((draw.choice(texts)().encode(errors="replace"), b"\xff\xfe" * 1000)))


def bad_index(case: Case) -> None:
    draw = case.draw
    _, entries, _ = case.weights()
    names = [name for name in entries if name != "__metadata__"] or ["a"]
    file = draw.choice((SINGLE, SHARD))
    targets = (
        "../outside/model.safetensors",
        str(case.outside / SINGLE),
        "a\0.safetensors",
        "\n\x1b.safetensors",
        7,
        [],
        None,
    )
    texts: list[Callable[[], str]] = [
        lambda: json.dumps({"weight_map": {name: draw.choice(targets) for name in names}}),
        lambda: json.dumps({"weight_map": dict.fromkeys(names, "x" * 5000 + ".safetensors")}),
        lambda: json.dumps({"weight_map": {f"t{i}": file for i in range(draw.choice((1000, 200_000, 400_000)))}}),
        lambda: json.dumps({"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(100_000)}}),
        lambda: json.dumps({"weight_map": number(draw)}),
        lambda: json.dumps({"metadata": {"total_size": number(draw)}, "weight_map": dict.fromkeys(names, file)}),
        lambda: nested(draw),
        lambda: '{"weight_map":' + nested(draw) + "}",
        lambda: "[" + "1," * 6_000_000 + "1]",
        lambda: " " * 20_000_000,
    ]
    case.write(INDEX, draw.choice(texts)().encode())


def many_shards(case: Case) -> None:
    mapped = {}
    for number_ in range(case.draw.choice((20, 300))):
        text = json.dumps({f"t{number_}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
        (case.model / f"s{number_}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        mapped[f"t{number_}"] = f"s{number_}.safetensors"
    case.write(INDEX, json.dumps({"weight_map": mapped}).encode())


def deep_folders(case: Case) -> None:
    place = case.model
    for _ in range(case.draw.choice((5, 31, 40, 900))):
        place = place / "a"
        place.mkdir(exist_ok=True)
    (place / "file").write_text("text")


def odd_names(case: Case) -> None:
    draw = case.draw
    for _ in range(draw.choice((3, 40))):
        name = bytes(draw.choices([b for b in range(1, 256) if b != 47], k=draw.randint(1, 200)))
        if name not in (b".", b".."):
            (case.model / os.fsdecode(name)).write_text("text")
    for name in ("CONFIG.JSON", "Config.json", "model.SAFETENSORS", "-rf", "--", "~", "$HOME", "adapter", "out"):
        (case.model / name).write_text("text")


def odd_modes(case: Case) -> None:
    for path in (case.model, *case.model.rglob("*")):
        if path.exists() and not path.is_symlink() and case.draw.random() < 0.7:
            modes = (0o700, 0o500, 0o755) if path.is_dir() else (0o600, 0o400, 0o640, 0o666, 0o4755)
            path.chmod(case.draw.choice(modes))


def odd_output(case: Case) -> None:
    choice = case.draw.randrange(5)
    if choice == 0:
        case.out = case.model / "out"
    elif choice == 1:
        case.out.symlink_to(case.outside)
    elif choice == 2:
        (case.folder / "out.ropewalk-partial").symlink_to(case.outside)
    elif choice == 3:
        os.mkfifo(case.folder / "out.ropewalk-partial")
    else:
        (case.folder / "by").symlink_to(case.model)
        case.out = case.folder / "by" / "out"


CHANGES: tuple[Callable[[Case], None], ...] = (
    link_outside,
    link_outside,
    link_outside,
    link_somewhere,
    link_in_a_cache,
    special,
    device,
    hole,
    holed_tensors,
    bad_header_length,
    bad_header,
    bad_header,
    odd_header,
    odd_header,
    cut_off,
    bad_count,
    bad_count,
    odd_config,
    bad_index,
    many_shards,
    deep_folders,
    odd_names,
    odd_modes,
    odd_output,
)


def hostile(folder: Path, seed: int) -> tuple[Case, list[str]]:
    """A folder of a seed, and what was done to it."""
    draw = random.Random(seed)
    case = Case(folder, draw)
    if draw.random() < 0.25:
        case.cached()
    chosen = draw.sample(CHANGES, draw.choice((1, 1, 1, 2, 3)))
    for change in chosen:
        # One change can make another one impossible, such as a folder where a file was.
        with contextlib.suppress(OSError, StopIteration):
            change(case)
    return case, [change.__name__ for change in chosen]
