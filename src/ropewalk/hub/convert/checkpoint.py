"""A folder with safetensors files, read strictly: which tensor is stored where, and its bytes, a block at a time."""

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError, as_int, shown
from ropewalk.hub.configs.keys import MOST_BYTES
from ropewalk.spec.value import without_repeats

__all__ = [
    "INDEX",
    "SINGLE",
    "Checkpoint",
    "Shard",
    "Stored",
    "blocks_of",
    "is_weights",
    "read_checkpoint",
    "read_rows",
    "read_shard",
    "tensor_blocks",
]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# How files with weights end, in whatever format.
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".gguf",
)
_WEIGHTS += (".h5", ".msgpack", ".onnx", ".onnx_data", ".tflite", ".npz")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# safetensors itself reads no longer header.
_LONGEST_HEADER = 100_000_000
# Bytes that are held at once when a tensor is copied or compared.
BLOCK = 4 << 20
# How many bits an element of each dtype has.
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32}
_BITS |= {"F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its dtype, its shape, and the bytes that it fills."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """A safetensors file: how many bytes its header has, and its tensors in the order of their bytes."""

    path: Path
    header: int
    tensors: dict[str, Stored]


@dataclass(frozen=True)
class Checkpoint:
    """A model in safetensors files: its folder, its files in order, every tensor by name, whether it has an index."""

    folder: Path
    shards: tuple[Shard, ...]
    tensors: dict[str, Stored]
    index: bool


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or lists files that do.

    >>> is_weights("pytorch_model.bin"), is_weights("tokenizer.json")
    (True, False)
    """
    return name.lower().endswith(_WEIGHTS)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint of a folder: the files that its index names, or its one file. What is not whole is an error."""
    if not folder.is_dir():
        got = "no such folder" if not folder.exists() else "a file"
        raise _refused(folder, "a model folder", got, "pass the folder that holds config.json")
    names = sorted(path.name for path in folder.iterdir())
    if any(name.startswith("adapter_") for name in names):
        do = "merge it first: peft's merge_and_unload(), then save_pretrained()"
        raise _refused(folder, "the weights of a whole model", "an adapter (LoRA), whose q and k lie in factors", do)
    mapped = _read_index(folder / INDEX) if INDEX in names else None
    if mapped is None and SINGLE not in names:
        raise _no_safetensors(folder, names)
    shards = tuple(read_shard(folder / name) for name in (dict.fromkeys(mapped.values()) if mapped else [SINGLE]))
    tensors: dict[str, Stored] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if name in tensors:
                got = f"{name!r} in {tensors[name].path.name} and in {shard.path.name}"
                raise _refused(folder, "each tensor in one file", got, "download the model again")
            tensors[name] = tensor
    for name, file in (mapped or {}).items():
        if name not in tensors or tensors[name].path.name != file:
            got = f"{name!r} is not in {file}, where {INDEX} has it"
            raise _refused(folder, "the tensors that the index lists", got, "download the model again")
    return Checkpoint(folder, shards, tensors, index=mapped is not None)


def read_shard(path: Path) -> Shard:
    """A safetensors file by its header: 8 bytes with its length, then JSON, then the tensors without gap or overlap."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _refused(path, "a file", "something else", "download the model again")
            length = int.from_bytes(file.read(8), "little")
            if status.st_size < 8 or not 2 <= length <= min(_LONGEST_HEADER, status.st_size - 8):
                raise _corrupt(path, f"{status.st_size} bytes that are said to begin with a header of {length}")
            text = file.read(length)
    except OSError as error:
        raise _refused(path, "a readable file", str(error.strerror or error), "download the model again") from None
    try:
        entries: Any = json.loads(text.decode("utf-8"), object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"a header that is no JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _corrupt(path, "a header that is no object")
    tensors = [
        (name, _stored(path, name, entry, 8 + length))
        for name, entry in cast("dict[str, Any]", entries).items()
        if name != "__metadata__"
    ]
    tensors.sort(key=lambda item: (item[1].start, item[1].nbytes))
    end = 8 + length
    for name, tensor in tensors:
        if tensor.start != end:
            raise _corrupt(path, f"a gap or an overlap before {name!r}")
        end += tensor.nbytes
    if end != status.st_size:
        raise _corrupt(path, f"{status.st_size} bytes, where its header speaks of {end}")
    return Shard(path, 8 + length, dict(tensors))


def _stored(path: Path, name: str, entry: Any, offset: int) -> Stored:
    """A tensor of a header, its bytes held to its dtype and shape."""
    if not isinstance(entry, dict) or entry.get("dtype") not in _BITS:
        raise _corrupt(path, f"the entry of {name!r}: {shown(entry)}")
    sides, ends = _whole_numbers(entry.get("shape")), _whole_numbers(entry.get("data_offsets"))
    if sides is None or ends is None or len(ends) != 2:
        raise _corrupt(path, f"the entry of {name!r}: {shown(entry)}")
    if 8 * (ends[1] - ends[0]) != _BITS[entry["dtype"]] * math.prod(sides):
        raise _corrupt(path, f"{name!r} of shape {sides} and dtype {entry['dtype']} in the bytes {ends}")
    return Stored(path, entry["dtype"], tuple(sides), offset + ends[0], ends[1] - ends[0])


def _whole_numbers(values: object) -> list[int] | None:
    """`values` as a list of numbers of at least 0; None if they are something else."""
    numbers = [as_int(value) for value in values] if isinstance(values, list) else [None]
    whole = [number for number in numbers if number is not None and number >= 0]
    return whole if len(whole) == len(numbers) else None


def _read_index(path: Path) -> dict[str, str]:
    """Which file holds which tensor. A name that leads out of the folder is refused, and never opened."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise _refused(path, f"at most {MOST_BYTES >> 20} MiB", "more", "download the model again")
        data: Any = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_repeats)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, RopewalkError):
            raise
        raise _refused(path, "an index in JSON", f"{error}", "download the model again") from None
    mapped = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(mapped, dict) or not mapped:
        raise _refused(path, '"weight_map": an object that is not empty', shown(mapped), "download the model again")
    for name, file in mapped.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & {"/", "\\", "\0", ":"}
        if not plain:
            expected = "plain names of .safetensors files in the same folder"
            raise _refused(path, expected, f"{shown(file)} for {name!r}", "do not trust this index; download anew")
        if not (path.parent / file).is_file():
            raise _refused(path, "files that are there", f"{file!r} for {name!r}, which is not", "download it")
    return cast("dict[str, str]", mapped)


def tensor_blocks(file: BinaryIO, tensor: Stored) -> Iterator[bytes]:
    """The bytes of a tensor as they are."""
    file.seek(tensor.start)
    yield from blocks_of(file, tensor, tensor.nbytes)


def read_rows(file: BinaryIO, tensor: Stored, start: int, count: int, rows: int) -> NDArray[np.float64]:
    """`count` of the `rows` of a tensor from row `start` on, as float64 [count, columns]."""
    row = tensor.nbytes // rows
    file.seek(tensor.start + start * row)
    data = b"".join(blocks_of(file, tensor, count * row))
    if tensor.dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype])
    return values.reshape(count, -1).astype(np.float64)


def blocks_of(file: BinaryIO, tensor: Stored, left: int) -> Iterator[bytes]:
    """The next `left` bytes of a tensor, from where the file is."""
    while left:
        block = file.read(min(BLOCK, left))
        if not block:
            raise _corrupt(tensor.path, f"an end {left} bytes early: it was cut off while it was read")
        left -= len(block)
        yield block


def _no_safetensors(folder: Path, names: list[str]) -> RopewalkError:
    """Why a folder without the two names is refused: what it has instead."""
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        got = f"{pickles[0]}: a pickle, which runs whatever code is written in it when it is loaded"
        do = "save it as safetensors: from_pretrained(...).save_pretrained(...), where you trust its source"
    elif any(name.endswith(".gguf") for name in names):
        got, do = "GGUF, whose converter has permuted q and k in its own way", "start from the original checkpoint"
    else:
        got, do = "neither", "pass the folder of a model that transformers saved"
    return _refused(folder, f"{INDEX} or {SINGLE}", got, do)


def _corrupt(path: Path, got: str) -> RopewalkError:
    """The error of a file that is not what its header says."""
    return _refused(path, "a whole safetensors file", got, "download the file again: it is cut off or corrupt")


def _refused(path: Path, expected: str, got: str, do: str) -> RopewalkError:
    return RopewalkError(asked=f"read the weights in {str(path)!r}", expected=expected, got=got, do=do)
