"""Run: what determines one trained model. Its key is the name of its folder."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError, require_choice, require_count
from ropewalk.lab.decoder import SIZES, AttentionName
from ropewalk.lab.tasks import PUZZLES, Task
from ropewalk.lab.text import ShuffledText, Text, read_folder, read_iterator, read_standard_library

__all__ = ["TASKS", "Run", "make_task"]

TASKS = ("text", "shuffled-text", *PUZZLES)


@dataclass(frozen=True)
class Run:
    """One model to train. Two runs with the same fields give the same weights on the CPU of one machine.

    Attributes:
        encoding: Description of the encoding, as `make_encoding` accepts it.
        size: A name of SIZES.
        length: Trained length, in the unit of the task.
        batch: Samples per step, of all ranks together.
        steps: Number of steps; 0 to evaluate the parent.
        rate: Largest learning rate.
        seed: Seed of parameters and samples.
        task: A name of TASKS.
        attention: "softmax" or "linear".
        qk_norm: Whether queries and keys are normalised.
        lengths: Lengths to evaluate after training; the same tokens are scored at each.
        evaluated: Number of held-out samples per length.
        offset: Positions of a sample begin at a random position below this one; 0 for 0.
        text: Folder of text files, or module:function that returns an iterable of texts; None for the sources of
            Python's standard library.
        parent: The run whose weights this one starts from, except those of its encoding.

    Raises:
        RopewalkError: If a field is invalid.

    >>> Run("rope", steps=5).key == Run("rope", steps=5).key != Run("rope", steps=6).key
    True
    """

    encoding: str
    size: str = "micro"
    length: int = 64
    batch: int = 16
    steps: int = 700
    rate: float = 2e-3
    seed: int = 0
    task: str = "text"
    attention: AttentionName = "softmax"
    qk_norm: bool = False
    lengths: tuple[int, ...] = ()
    evaluated: int = 64
    offset: int = 0
    text: str | None = None
    parent: "Run | None" = None

    def __post_init__(self) -> None:
        require_choice(self.task, TASKS, asked="a run with task")
        require_choice(self.size, tuple(SIZES), asked="a run with size")
        for name in ("length", "batch", "evaluated"):
            require_count(getattr(self, name), asked=f"a run with {name}", do="use at least 1")
        for length in self.lengths:
            require_count(length, asked="a run with lengths", do="use lengths of at least 1")
        for name in ("steps", "seed", "offset"):
            require_count(getattr(self, name), asked=f"a run with {name}", do="use at least 0", at_least=0)
        if not 0 < self.rate < 1:
            raise RopewalkError(
                asked="a run with rate", expected="a number between 0 and 1", got=f"{self.rate}", do="use 1e-3"
            )

    @property
    def key(self) -> str:
        """The first 16 digits of a hash of all fields."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """Encoding and seed, for progress bars."""
        return f"{self.encoding}, seed {self.seed}"

    def as_json(self) -> dict[str, Any]:
        """The fields as values of JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


@lru_cache(maxsize=4)
def _task(name: str, text: str | None) -> Task:
    if name in PUZZLES:
        return PUZZLES[name]()
    if text is None:
        files = read_standard_library()
    else:
        files = read_iterator(text) if ":" in text and not Path(text).is_dir() else read_folder(Path(text))
    return (ShuffledText if name == "shuffled-text" else Text)(files)


def make_task(run: Run) -> Task:
    """Create the task of a run. Texts are read once per process.

    >>> make_task(Run("rope", task="copy")).vocabulary
    30
    """
    return _task(run.task, run.text)
