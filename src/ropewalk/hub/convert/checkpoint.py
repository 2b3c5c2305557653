"""A folder with safetensors files, read strictly: which tensor is stored where, and its bytes, a block at a time."""

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
# safetensors itself reads headers of 100 MB, which parsed would fill a gigabyte; those of models have up to 2 MB.
_LONGEST_HEADER = 16 << 20
# Tensors in a model, characters in a name, sides of a tensor: several times what the largest models have.
_MOST_TENSORS, _LONGEST_NAME, _MOST_SIDES = 1 << 18, 1024, 64
# Sides and offsets are below this, so that products of them are computed at once.
_TOO_LARGE = 1 << 63
# Bytes that are held at once when a tensor is copied or compared.
BLOCK = 4 << 20
# How many bits an element of each dtype has.
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32}
_BITS |= {"F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its dtype, its shape, and the bytes that it fills."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """A safetensors file: its bytes, how many of them its header has, its tensors in the order of their bytes."""

    name: str
    nbytes: int
    header: int
    tensors: dict[str, Stored]


@dataclass(frozen=True)
class Checkpoint:
    """A model in safetensors files: its folder, its files in order, every tensor by name, whether it has an index."""

    model: ModelFolder
    shards: tuple[Shard, ...]
    tensors: dict[str, Stored]
    index: bool


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or lists files that do.

    >>> is_weights("pytorch_model.bin"), is_weights("tokenizer.json")
    (True, False)
    """
    return name.lower().endswith(_WEIGHTS)


def read_checkpoint(model: ModelFolder) -> Checkpoint:
    """The checkpoint of a folder: the files that its index names, or its one file. What is not whole is an error."""
    folder, names = model.path, model.names()
    if any(name.startswith("adapter_") for name in names):
        do = "merge it first: peft's merge_and_unload(), then save_pretrained()"
        raise _refused(folder, "the weights of a whole model", "an adapter (LoRA), whose q and k lie in factors", do)
    mapped = _read_index(model, names) if INDEX in names else None
    if mapped is None and SINGLE not in names:
        raise _no_safetensors(folder, names)
    shards: list[Shard] = []
    tensors: dict[str, Stored] = {}
    for file in dict.fromkeys(mapped.values()) if mapped else [SINGLE]:
        shard = read_shard(model, file)
        shards.append(shard)
        for name, tensor in shard.tensors.items():
            if name in tensors:
                got = f"{name!r} in {tensors[name].path.name!r} and in {file!r}"
                raise _refused(folder, "each tensor in one file", got, "download the model again")
            tensors[name] = tensor
        if len(tensors) > _MOST_TENSORS:
            raise _refused(folder, f"at most {_MOST_TENSORS} tensors", "more", "open an issue if this is a model")
    for name, file in (mapped or {}).items():
        if name not in tensors or tensors[name].path.name != file:
            got = f"{name!r} is not in {file!r}, where {INDEX} has it"
            raise _refused(folder, "the tensors that the index lists", got, "download the model again")
    return Checkpoint(model, tuple(shards), tensors, index=mapped is not None)


def read_shard(model: ModelFolder, name: str) -> Shard:
    """A safetensors file by its header: 8 bytes with its length, then JSON, then the tensors without gap or overlap."""
    path = model.path / name
    with model.open(name) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= size - 8:
                raise _corrupt(path, f"{size} bytes that are said to begin with a header of {length}")
            if length > _LONGEST_HEADER:
                got = f"{length >> 20} MiB"
                raise _refused(path, f"a header of at most {_LONGEST_HEADER >> 20} MiB", got, "use several files")
            text = file.read(length)
        except OSError as error:
            raise _refused(path, "a readable file", str(error.strerror or error), "download the model again") from None
    try:
        entries: Any = parse(text)
    except ValueError as error:
        raise _corrupt(path, f"a header that is no JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _corrupt(path, "a header that is no object")
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
        raise _corrupt(path, f"{size} bytes, where its header speaks of {end}")
    return Shard(name, size, 8 + length, dict(tensors))


def _stored(path: Path, name: str, entry: Any, offset: int) -> Stored:
    """A tensor of a header, its bytes held to its dtype and shape."""
    if len(name) > _LONGEST_NAME:
        raise _corrupt(path, f"a name of {len(name)} characters: {shown(name)}")
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in _BITS:
        raise _corrupt(path, f"the entry of {name!r}: {shown(entry)}")
    sides, ends = _whole_numbers(entry.get("shape")), _whole_numbers(entry.get("data_offsets"))
    if sides is None or ends is None or len(ends) != 2 or len(sides) > _MOST_SIDES:
        raise _corrupt(path, f"the entry of {name!r}: {shown(entry)}")
    if 8 * (ends[1] - ends[0]) != _BITS[entry["dtype"]] * math.prod(sides):
        raise _corrupt(path, f"{name!r} of shape {shown(sides)} and dtype {entry['dtype']} in the bytes {shown(ends)}")
    return Stored(path, entry["dtype"], tuple(sides), offset + ends[0], ends[1] - ends[0])


def _whole_numbers(values: object) -> list[int] | None:
    """`values` as a list of numbers from 0 to 2^63 - 1; None if they are something else."""
    if not isinstance(values, list):
        return None
    # JSON has plain ints alone, and a bool is not one of them.
    whole = [value for value in values if type(value) is int and 0 <= value < _TOO_LARGE]
    return whole if len(whole) == len(values) else None


def _read_index(model: ModelFolder, names: list[str]) -> dict[str, str]:
    """Which file holds which tensor. A name that leads out of the folder is refused, and never opened."""
    path = model.path / INDEX
    try:
        data: Any = parse(model.read(INDEX, most=MOST_BYTES))
    except ValueError as error:
        if isinstance(error, RopewalkError):
            raise
        raise _refused(path, "an index in JSON", f"{error}", "download the model again") from None
    mapped = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(mapped, dict) or not mapped:
        raise _refused(path, '"weight_map": an object that is not empty', shown(mapped), "download the model again")
    present = set(names)
    for name, file in mapped.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & {"/", "\\", "\0", ":"}
        if not plain:
            expected = "plain names of .safetensors files in the same folder"
            raise _refused(path, expected, f"{shown(file)} for {shown(name)}", "do not trust this index; download anew")
        if file not in present:
            raise _refused(
                path, "files that are there", f"{shown(file)} for {shown(name)}, which is not", "download it"
            )
    return cast("dict[str, str]", mapped)


def tensor_blocks(file: BinaryIO, tensor: Stored) -> Iterator[bytes]:
    """The bytes of a tensor as they are."""
    file.seek(tensor.start)
    yield from blocks_of(file, tensor.path, tensor.nbytes)


def read_rows(file: BinaryIO, tensor: Stored, start: int, count: int, rows: int) -> NDArray[np.float64]:
    """`count` of the `rows` of a tensor from row `start` on, as float64 [count, columns]."""
    row = tensor.nbytes // rows
    file.seek(tensor.start + start * row)
    data = b"".join(blocks_of(file, tensor.path, count * row))
    if tensor.dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype])
    with np.errstate(invalid="ignore"):
        # A signalling NaN is an invalid operand; what it becomes is a NaN all the same.
        return values.reshape(count, -1).astype(np.float64)


def blocks_of(file: BinaryIO, path: Path, left: int) -> Iterator[bytes]:
    """The next `left` bytes of a file, from where it is; `path` is what an error calls it."""
    while left:
        block = file.read(min(BLOCK, left))
        if not block:
            raise _corrupt(path, f"an end {left} bytes early: it was cut off while it was read")
        left -= len(block)
        yield block


def _no_safetensors(folder: Path, names: list[str]) -> RopewalkError:
    """Why a folder without the two names is refused: what it has instead."""
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        got = f"{pickles[0]!r}: a pickle, which runs whatever code is written in it when it is loaded"
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
