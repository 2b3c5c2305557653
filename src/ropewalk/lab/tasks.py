"""Tasks: where the tokens of a run come from. Each batch is a function of seed, step and the indices of its samples."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.lab.draws import Draws, draws, order

__all__ = ["IGNORED", "PUZZLES", "Batch", "Puzzle", "Task"]

# The target of tokens that are not scored, which cross_entropy ignores.
IGNORED = -100
# A seed that no run has: samples of evaluations are never trained on.
_EVALUATION_SEED = 2**63 + 1


class Batch(NamedTuple):
    """Tokens and the tokens that follow them.

    Attributes:
        inputs: [..., samples, tokens], int64.
        targets: The same shape; IGNORED where nothing is scored.
    """

    inputs: Tensor
    targets: Tensor


class Task(ABC):
    """Base class of tasks.

    Attributes:
        name: Name of the task.
        vocabulary: Number of tokens.
        length_is: What `length` counts.
        solved: Whether exact answers exist, so that accuracy is measured, not only the loss.
        digest: A hash of the data, or None if there are none.
    """

    name: ClassVar[str]
    vocabulary: int
    length_is: ClassVar[str] = "tokens"
    solved: ClassVar[bool] = False
    digest: str | None = None

    @abstractmethod
    def batches(self, seed: int, steps: Sequence[int], samples: Sequence[int], length: int) -> Batch:
        """Return samples to train on.

        Args:
            seed: Seed of the run.
            steps: Steps.
            samples: Indices of samples in the global batch.
            length: Largest length.

        Returns:
            Tensors [steps, samples, tokens].
        """

    @abstractmethod
    def evaluation(self, count: int, length: int, scored: int | None = None) -> Batch:
        """Return samples that no run is trained on. All runs get the same.

        Args:
            count: Number of samples.
            length: Length of each sample.
            scored: Score only this number of tokens at the end of a sample, the same tokens for every length; None for
                all. Puzzles score their answers.

        Returns:
            Tensors [count, tokens].
        """

    def tokens(self, length: int) -> int:
        """Number of tokens of a sample of this length."""
        return length

    def require(self, samples: int, length: int, lengths: Sequence[int] = ()) -> None:  # noqa: B027 - puzzles are drawn
        """Raise if there are not enough data.

        Args:
            samples: Samples per step.
            length: Trained length.
            lengths: Lengths to evaluate.

        Raises:
            RopewalkError: If a text is too small.
        """


class Puzzle(Task):
    """A task whose samples are drawn: a question, and an answer that follows from it.

    Answers are scored, questions are not. Token 0 is padding, 1 begins a sample, 2 separates question and answer, 3
    ends the answer. Symbols follow.
    """

    PAD, BEGIN, SEPARATOR, END, FIRST = 0, 1, 2, 3, 4
    solved = True
    length_is = "symbols"
    symbols: ClassVar[int] = 26

    def __init__(self) -> None:
        self.vocabulary: int = self.FIRST + self.symbols

    @abstractmethod
    def sample(
        self, numbers: Draws, lengths: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens [n, tokens + 1] and which of them are scored.

        Args:
            numbers: Random numbers [n, numbers(length)].
            lengths: Length of each sample [n], at most `length`.
            length: Largest length, which determines the number of tokens.
        """

    def numbers(self, length: int) -> int:
        """How many random numbers a sample needs."""
        return length

    def batches(self, seed: int, steps: Sequence[int], samples: Sequence[int], length: int) -> Batch:
        numbers = draws(seed, steps, samples, 1 + self.numbers(length))
        lengths = self.trained_lengths(numbers[..., 0].reshape(-1), length)
        batch = self._batch(numbers[..., 1:].reshape(lengths.size, -1), lengths, length)
        shape = (len(steps), len(samples), -1)
        return Batch(batch.inputs.view(shape), batch.targets.view(shape))

    def trained_lengths(self, numbers: Draws, length: int) -> NDArray[np.int64]:
        """Lengths to train on: uniform from 1 (Kazemnejad et al., 2305.19466)."""
        return (1 + numbers % np.uint64(length)).astype(np.int64)

    def evaluation(self, count: int, length: int, scored: int | None = None) -> Batch:
        numbers = draws(_EVALUATION_SEED, [length], range(count), self.numbers(length))[0]
        return self._batch(numbers, np.full(count, length), length)

    def _batch(self, numbers: Draws, lengths: NDArray[np.int64], length: int) -> Batch:
        tokens, scored = self.sample(numbers, lengths, length)
        targets = np.where(scored, tokens, IGNORED)
        return Batch(torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets[:, 1:].copy()))


class Copy(Puzzle):
    """Repeat the symbols of the question (2305.19466, "copy")."""

    name = "copy"

    def answer(self, symbols: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The answer [n, length] to the symbols [n, length]; what follows `lengths` is ignored."""
        return symbols

    def tokens(self, length: int) -> int:
        return 2 * length + 2

    def sample(
        self, numbers: Draws, lengths: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows, column = np.arange(len(lengths))[:, None], np.arange(length)[None]
        symbols = (self.FIRST + numbers % np.uint64(self.symbols)).astype(np.int64)
        tokens = np.full((len(lengths), self.tokens(length) + 1), self.PAD, dtype=np.int64)
        scored = np.zeros(tokens.shape, dtype=bool)
        tokens[:, 0] = self.BEGIN
        inside = column < lengths[:, None]
        # One column more than the longest sample needs, for what is masked out.
        wide = np.pad(tokens, ((0, 0), (0, 1)))
        wide_scored = np.pad(scored, ((0, 0), (0, 1)))
        last = wide.shape[1] - 1
        wide[rows, np.where(inside, 1 + column, last)] = symbols
        wide[rows, 1 + lengths[:, None]] = self.SEPARATOR
        places = np.where(inside, 2 + lengths[:, None] + column, last)
        wide[rows, places] = self.answer(symbols, lengths)
        wide[rows, 2 + 2 * lengths[:, None]] = self.END
        wide_scored[rows, places] = True
        wide_scored[rows, 2 + 2 * lengths[:, None]] = True
        return wide[:, :-1], wide_scored[:, :-1]


class Reverse(Copy):
    """Repeat the symbols of the question in reverse (2305.19466, "reverse")."""

    name = "reverse"

    def answer(self, symbols: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        column = np.arange(symbols.shape[1])[None]
        return np.take_along_axis(symbols, np.maximum(lengths[:, None] - 1 - column, 0), axis=1)


class Addition(Puzzle):
    """The sum of digits modulo 10 (2305.19466, "summation"). The answer is one symbol."""

    name = "addition"
    symbols = 10

    def tokens(self, length: int) -> int:
        return length + 2

    def sample(
        self, numbers: Draws, lengths: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows, column = np.arange(len(lengths))[:, None], np.arange(length)[None]
        digits = (numbers % np.uint64(10)).astype(np.int64)
        inside = column < lengths[:, None]
        tokens = np.full((len(lengths), length + 3), self.PAD, dtype=np.int64)
        tokens[:, 0] = self.BEGIN
        tokens[:, 1 : length + 1] = np.where(inside, self.FIRST + digits, self.PAD)
        tokens[rows, 1 + lengths[:, None]] = self.SEPARATOR
        tokens[rows, 2 + lengths[:, None]] = self.FIRST + (digits * inside).sum(1, keepdims=True) % 10
        scored = np.zeros(tokens.shape, dtype=bool)
        scored[rows, 2 + lengths[:, None]] = True
        return tokens, scored


class Induction(Puzzle):
    """A random sequence, twice: from the second time on, every symbol is known (Olsson et al., 2209.11895)."""

    name = "induction"

    def tokens(self, length: int) -> int:
        return 2 * length

    def trained_lengths(self, numbers: Draws, length: int) -> NDArray[np.int64]:
        return np.full(numbers.shape, length)

    def sample(
        self, numbers: Draws, lengths: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        symbols = (self.FIRST + numbers % np.uint64(self.symbols)).astype(np.int64)
        begin = np.full((len(lengths), 1), self.BEGIN)
        tokens = np.concatenate((begin, symbols, symbols), axis=1)
        scored = np.zeros(tokens.shape, dtype=bool)
        # The first symbols of the repetition cannot be told from those of another place.
        scored[:, length + 3 :] = True
        return tokens, scored


class Recall(Puzzle):
    """Pairs of a key and a value, and then every key again in another order: which value was with it?

    A key is the same symbol both times, and the distance between a pair and its question is up to twice the length
    (associative recall; with several questions, Arora et al., 2312.04927). `length` counts pairs.
    """

    name = "recall"
    length_is = "pairs"
    # Keys are the first half, values the second.
    symbols = 512

    def tokens(self, length: int) -> int:
        return 4 * length

    def numbers(self, length: int) -> int:
        return self.symbols // 2 + 2 * length

    def trained_lengths(self, numbers: Draws, length: int) -> NDArray[np.int64]:
        return np.full(numbers.shape, length)

    def sample(
        self, numbers: Draws, lengths: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        half = self.symbols // 2
        keys = order(numbers[:, :half])[:, :length]
        values = (half + numbers[:, half : half + length] % np.uint64(half)).astype(np.int64)
        asked = order(numbers[:, half + length :])
        first = np.stack((keys, values), axis=2)
        again = np.take_along_axis(first, asked[:, :, None], axis=1)
        pairs = np.concatenate((first, again), axis=1).reshape(len(lengths), -1)
        tokens = np.concatenate((np.full((len(lengths), 1), self.BEGIN), self.FIRST + pairs), axis=1)
        scored = np.zeros(tokens.shape, dtype=bool)
        scored[:, 2 * length + 2 :: 2] = True
        return tokens, scored

    def distances(self, count: int, length: int) -> NDArray[np.int64]:
        """Distance between each scored value of an evaluation and the same value before [count, length]."""
        numbers = draws(_EVALUATION_SEED, [length], range(count), self.numbers(length))[0]
        asked = order(numbers[:, self.symbols // 2 + length :])
        return 2 * (length + np.arange(length)[None] - asked)


class Needle(Puzzle):
    """One marked symbol among others, and the question which it was: a passkey (2305.16300)."""

    name = "needle"
    solved = True

    def numbers(self, length: int) -> int:
        return length + 1

    def tokens(self, length: int) -> int:
        return length + 3

    def trained_lengths(self, numbers: Draws, length: int) -> NDArray[np.int64]:
        return np.full(numbers.shape, length)

    def sample(
        self, numbers: Draws, lengths: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows = np.arange(len(lengths))
        symbols = (self.FIRST + numbers[:, :length] % np.uint64(self.symbols)).astype(np.int64)
        place = (numbers[:, length] % np.uint64(length)).astype(np.int64)
        marked = np.insert(symbols, 0, 0, axis=1)
        # The mark is before the needle, and the symbols before it move one place to the left.
        column = np.arange(length + 1)[None]
        shifted = np.take_along_axis(
            symbols, np.where(column < place[:, None], column, np.maximum(column - 1, 0)), axis=1
        )
        marked = np.where(column == place[:, None], self.SEPARATOR, shifted)
        begin, ask = np.full((len(lengths), 1), self.BEGIN), np.full((len(lengths), 1), self.SEPARATOR)
        tokens = np.concatenate((begin, marked, ask, symbols[rows, place][:, None]), axis=1)
        scored = np.zeros(tokens.shape, dtype=bool)
        scored[:, -1] = True
        return tokens, scored


PUZZLES: dict[str, type[Puzzle]] = {x.name: x for x in (Copy, Reverse, Addition, Induction, Recall, Needle)}
