"""Text: the sources of Python's standard library, or a folder of files, one token per byte."""

import hashlib
import importlib
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.lab.draws import draws
from ropewalk.lab.tasks import IGNORED, Batch, Task

__all__ = ["ShuffledText", "Text", "read_folder", "read_iterator", "read_standard_library"]

# Folders of the standard library that are no sources of it, or that distributions leave out.
_OTHER = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload", "config"}
# One file in ten is for evaluations.
_HELD_OUT = 10


class Text(Task):
    """Bytes of text. Every tenth file is held out for evaluations.

    Args:
        files: The content of each file, in a fixed order.

    A text of fewer than ten files is one text, whose last tenth is held out.
    """

    name = "text"
    length_is = "bytes"
    vocabulary = 256

    def __init__(self, files: Sequence[bytes]) -> None:
        if len(files) < _HELD_OUT:
            whole = b"\n".join(files)
            files = [whole[i * len(whole) // _HELD_OUT : (i + 1) * len(whole) // _HELD_OUT] for i in range(_HELD_OUT)]
        held_out = [content for i, content in enumerate(files) if i % _HELD_OUT == _HELD_OUT - 1]
        trained = [content for i, content in enumerate(files) if i % _HELD_OUT != _HELD_OUT - 1]
        self.trained: Tensor = _bytes(b"\n".join(trained))
        self.held_out: Tensor = _bytes(b"\n".join(held_out))
        self.digest: str | None = hashlib.sha256(b"\n".join(files)).hexdigest()[:16]

    def batches(self, seed: int, steps: Sequence[int], samples: Sequence[int], length: int) -> Batch:
        self.require(len(samples), length)
        room = len(self.trained) - length
        starts = (draws(seed, steps, samples, 1) % np.uint64(room)).astype(np.int64)
        tokens = self.trained[torch.from_numpy(starts) + torch.arange(length + 1)].long()
        return Batch(tokens[..., :-1], tokens[..., 1:])

    def evaluation(self, count: int, length: int, scored: int | None = None) -> Batch:
        # The first half is context alone. Samples may overlap.
        self.require(1, length)
        # Samples of every length end at the same tokens, so that only the context before them differs.
        ends = torch.linspace(len(self.held_out) // 2, len(self.held_out), count).long()
        tokens = self.held_out[ends[:, None] - length - 1 + torch.arange(length + 1)].long()
        targets = tokens[:, 1:].clone()
        if scored is not None:
            targets[:, : length - scored] = IGNORED
        return Batch(tokens[:, :-1], targets)

    def require(self, samples: int, length: int, lengths: Sequence[int] = ()) -> None:
        # A byte of its own per token of a batch, and the one that follows.
        trained = samples * (length + 1) + 1
        held_out = 2 * (max(length, *lengths, 0) + 1)
        if len(self.trained) < trained or len(self.held_out) < held_out:
            # Of one text nine tenths, rounded down, and a line feed after each of them but the last.
            least = max(-(-10 * (trained - _HELD_OUT + 2) // 9), 10 * (held_out - 1) + 1)
            raise RopewalkError(
                asked=f"text for a batch of {samples} and contexts of up to {max(length, *lengths, 0):,} bytes",
                expected=f"at least {trained:,} bytes to train on and {held_out:,} held out",
                got=f"{len(self.trained):,} to train on and {len(self.held_out):,} held out",
                do=f"pass more text: {least:,} bytes are enough in one file, of which the last tenth is held out",
            )


class ShuffledText(Text):
    """The same bytes in random order: without order there is nothing that a position can tell."""

    name = "shuffled-text"

    def __init__(self, files: Sequence[bytes]) -> None:
        super().__init__(files)
        for part in (self.trained, self.held_out):
            generator = torch.Generator().manual_seed(0)
            part.copy_(part[torch.randperm(len(part), generator=generator)])


@lru_cache(maxsize=1)
def read_standard_library() -> tuple[bytes, ...]:
    """Sources of Python's standard library without tests, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return tuple((root / path).read_bytes() for path in paths if not _OTHER & set(path.split("/")[:-1]))


@lru_cache(maxsize=4)
def read_folder(folder: Path) -> tuple[bytes, ...]:
    """Files of a folder and its folders, in the order of their paths, without hidden ones.

    Args:
        folder: The folder.

    Raises:
        RopewalkError: If there is no such folder, or no file in it.
    """
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    if not paths:
        raise RopewalkError(
            asked=f"text of {folder}",
            expected="a folder of text files",
            got="no file in it" if folder.is_dir() else "a file" if folder.exists() else "no such folder",
            do="pass a folder with files, or omit --text for the sources of Python's standard library",
        )
    return tuple(path.read_bytes() for path in sorted(paths))


@lru_cache(maxsize=4)
def read_iterator(name: str) -> tuple[bytes, ...]:
    """Texts of an iterator of the user.

    Args:
        name: module:function. It is called without arguments, and returns an iterable of str or bytes.

    Raises:
        RopewalkError: If it cannot be imported, or if it returns something else.
    """
    module, _, attribute = name.partition(":")
    try:
        texts = getattr(importlib.import_module(module), attribute)()
        return tuple(x.encode() if isinstance(x, str) else bytes(memoryview(x)) for x in texts)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise RopewalkError(
            asked=f"text of {name}",
            expected="module:function that Python can import, and that returns an iterable of str or bytes",
            got=f"{type(error).__name__}: {error}",
            do="run in the folder of the module, and return for example a list of texts",
        ) from None


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
