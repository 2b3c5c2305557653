"""Reads safetensors checkpoints strictly: where each tensor is stored, and its bytes, one block at a time."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError, shown
from ropewalk.hub.configs.keys import MOST_BYTES
from ropewalk.hub.convert.json_text import parse
from ropewalk.hub.convert.model_folder import ModelFolder

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
# Suffixes of files with weights, in any format.
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
# The limit of the safetensors library is 100 MB, which would need a gigabyte when parsed. Real headers have up to 2 MB.
_LONGEST_HEADER = 16 << 20
# Limits on tensors per model, characters per name and dimensions per tensor: several times those of the largest models.
_MOST_TENSORS, _LONGEST_NAME, _MOST_DIMENSIONS = 1 << 18, 1024, 64
# The limit on sizes and offsets, so that their products are fast to compute.
_TOO_LARGE = 1 << 63
# Bytes per block when a tensor is copied or compared.
BLOCK = 4 << 20
# Bits per element of each dtype.
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32}
_BITS |= {"F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its dtype, its shape, the offset of its first byte, and its number of bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """A safetensors file: its name, its size, the size of its header, and its tensors in the order of their offsets."""

    name: str
    nbytes: int
    header: int
    tensors: dict[str, Stored]


@dataclass(frozen=True)
class Checkpoint:
    """A model in safetensors files: its folder, its files, all tensors by name, and whether it has an index file."""

    model: ModelFolder
    shards: tuple[Shard, ...]
    tensors: dict[str, Stored]
    index: bool


def is_weights(name: str) -> bool:
    """Return whether a file of this name contains weights, or is the index of such files.

    >>> is_weights("pytorch_model.bin"), is_weights("tokenizer.json")
    (True, False)
    """
    return name.lower().endswith(_WEIGHTS)


def read_checkpoint(model: ModelFolder) -> Checkpoint:
    """Read the checkpoint of a folder: the files in its index, or its single file.

    Args:
        model: The folder.

    Returns:
        The checkpoint. No weights are read.

    Raises:
        RopewalkError: If the checkpoint is incomplete, corrupt, an adapter, or not in safetensors.
    """
    folder, names = model.path, model.names()
    if any(name.startswith("adapter_") for name in names):
        do = "merge it first: peft's merge_and_unload(), then save_pretrained()"
        raise _error(folder, "the weights of a complete model", "an adapter (LoRA), which factorizes q and k", do)
    weight_map = _read_index(model, names) if INDEX in names else None
    if weight_map is None and SINGLE not in names:
        raise _no_safetensors(folder, names)
    shards: list[Shard] = []
    tensors: dict[str, Stored] = {}
    for file in dict.fromkeys(weight_map.values()) if weight_map else [SINGLE]:
        shard = read_shard(model, file)
        shards.append(shard)
        for name, tensor in shard.tensors.items():
            if name in tensors:
                got = f"{name!r} in {tensors[name].path.name!r} and in {file!r}"
                raise _error(folder, "each tensor in one file only", got, "download the model again")
            tensors[name] = tensor
        if len(tensors) > _MOST_TENSORS:
            do = "open an issue if this is a real model"
            raise _error(folder, f"at most {_MOST_TENSORS} tensors", "more tensors", do)
    for name, file in (weight_map or {}).items():
        if name not in tensors or tensors[name].path.name != file:
            got = f"no {name!r} in {file!r}, where {INDEX} lists it"
            raise _error(folder, "the tensors that the index lists", got, "download the model again")
    return Checkpoint(model, tuple(shards), tensors, index=weight_map is not None)


def read_shard(model: ModelFolder, name: str) -> Shard:
    """Read the header of a safetensors file.

    The file has 8 bytes with the length of the header, the header in JSON, and the tensors without gaps or overlaps.

    Args:
        model: The folder.
        name: The name of the file.

    Returns:
        The file and its tensors. No weights are read.

    Raises:
        RopewalkError: If the file is corrupt.
    """
    path = model.path / name
    with model.open(name) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= size - 8:
                raise _corrupt(path, f"a file of {size} bytes that declares a header of {length} bytes")
            if length > _LONGEST_HEADER:
                expected, got = f"a header of at most {_LONGEST_HEADER >> 20} MiB", f"{length >> 20} MiB"
                raise _error(path, expected, got, "save the model in several files")
            text = file.read(length)
        except OSError as error:
            raise _error(path, "a readable file", str(error.strerror or error), "download the model again") from None
    try:
        entries: Any = parse(text)
    except ValueError as error:
        raise _corrupt(path, f"a header that is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _corrupt(path, "a header that is not a JSON object")
    tensors = [
        (key, _stored(path, key, entry, 8 + length))
        for key, entry in cast("dict[str, Any]", entries).items()
        if key != "__metadata__"
    ]
    tensors.sort(key=lambda item: (item[1].start, item[1].nbytes))
    end = 8 + length
    for key, tensor in tensors:
        if tensor.start != end:
            raise _corrupt(path, f"a gap or an overlap before {key!r}")
        end += tensor.nbytes
    if end != size:
        raise _corrupt(path, f"a file of {size} bytes, but {end} according to its header")
    return Shard(name, size, 8 + length, dict(tensors))


def _stored(path: Path, name: str, entry: Any, offset: int) -> Stored:
    """Return a tensor from its entry in a header. Raise if its bytes contradict its dtype and shape."""
    if len(name) > _LONGEST_NAME:
        raise _corrupt(path, f"a name of {len(name)} characters: {shown(name)}")
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in _BITS:
        raise _corrupt(path, f"an invalid entry for {name!r}: {shown(entry)}")
    shape, offsets = _integers(entry.get("shape")), _integers(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > _MOST_DIMENSIONS:
        raise _corrupt(path, f"an invalid entry for {name!r}: {shown(entry)}")
    if 8 * (offsets[1] - offsets[0]) != _BITS[entry["dtype"]] * math.prod(shape):
        got = f"{name!r} with shape {shown(shape)} and dtype {entry['dtype']} at the offsets {shown(offsets)}"
        raise _corrupt(path, got)
    return Stored(path, entry["dtype"], tuple(shape), offset + offsets[0], offsets[1] - offsets[0])


def _integers(values: object) -> list[int] | None:
    """Return `values` if it is a list of integers from 0 to 2^63 - 1, or None otherwise."""
    if not isinstance(values, list):
        return None
    # Not isinstance: a bool is not accepted.
    integers = [value for value in values if type(value) is int and 0 <= value < _TOO_LARGE]
    return integers if len(integers) == len(values) else None


def _read_index(model: ModelFolder, names: list[str]) -> dict[str, str]:
    """Return the file of each tensor. Raise for a file name that is outside of the folder, without opening it."""
    path = model.path / INDEX
    try:
        data: Any = parse(model.read(INDEX, most=MOST_BYTES))
    except ValueError as error:
        if isinstance(error, RopewalkError):
            raise
        raise _error(path, "an index in JSON", f"{error}", "download the model again") from None
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        expected = 'the key "weight_map" with an object that is not empty'
        raise _error(path, expected, shown(weight_map), "download the model again")
    present = set(names)
    for name, file in weight_map.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & {"/", "\\", "\0", ":"}
        if not plain:
            expected = "names of .safetensors files in the same folder, without a path"
            do = "do not trust this index; download the model again"
            raise _error(path, expected, f"{shown(file)} for {shown(name)}", do)
        if file not in present:
            got = f"{shown(file)} for {shown(name)}, which does not exist"
            raise _error(path, "files that exist", got, "download the missing file")
    return cast("dict[str, str]", weight_map)


def tensor_blocks(file: BinaryIO, tensor: Stored) -> Iterator[bytes]:
    """Yield the bytes of a tensor."""
    file.seek(tensor.start)
    yield from blocks_of(file, tensor.path, tensor.nbytes)


def read_rows(file: BinaryIO, tensor: Stored, start: int, count: int, rows: int) -> NDArray[np.float64]:
    """Read consecutive rows of a tensor as float64.

    Args:
        file: The open file.
        tensor: The tensor, in F64, F32, F16 or BF16.
        start: The first row.
        count: The number of rows to read.
        rows: The number of rows of the tensor.

    Returns:
        The values [count, columns].
    """
    row = tensor.nbytes // rows
    file.seek(tensor.start + start * row)
    data = b"".join(blocks_of(file, tensor.path, count * row))
    if tensor.dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype])
    with np.errstate(invalid="ignore"):
        # Converting a signaling NaN is an invalid operation. The result is still a NaN.
        return values.reshape(count, -1).astype(np.float64)


def blocks_of(file: BinaryIO, path: Path, left: int) -> Iterator[bytes]:
    """Yield the next `left` bytes of a file. `path` is its name in errors."""
    while left:
        block = file.read(min(BLOCK, left))
        if not block:
            raise _corrupt(path, f"a file that ends {left} bytes early: it was truncated while it was read")
        left -= len(block)
        yield block


def _no_safetensors(folder: Path, names: list[str]) -> RopewalkError:
    """Return the error for a folder without safetensors, with advice for the format that it has."""
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        got = f"{pickles[0]!r}: a pickle, which can run arbitrary code when it is loaded"
        do = "if you trust its source, save it as safetensors: from_pretrained(...).save_pretrained(...)"
    elif any(name.endswith(".gguf") for name in names):
        got, do = "GGUF, whose converter has already permuted q and k", "start from the original checkpoint"
    else:
        got, do = "neither file", "pass the folder of a model saved by transformers"
    return _error(folder, f"{INDEX} or {SINGLE}", got, do)


def _corrupt(path: Path, got: str) -> RopewalkError:
    """Return the error for a file that contradicts its header."""
    return _error(path, "a complete safetensors file", got, "download the file again: it is truncated or corrupt")


def _error(path: Path, expected: str, got: str, do: str) -> RopewalkError:
    return RopewalkError(asked=f"read the weights in {str(path)!r}", expected=expected, got=got, do=do)
