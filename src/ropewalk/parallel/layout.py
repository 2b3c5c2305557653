"""Which tokens each rank has, as runs of consecutive tokens: from the length, the layout and the packed sequences."""

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from ropewalk.errors import RopewalkError, as_int, require_choice, shown

__all__ = ["LayoutName", "Run", "runs_of_ranks"]

LayoutName = Literal["contiguous", "zigzag"]


class Run(NamedTuple):
    """Consecutive tokens of one sequence on one rank.

    Args:
        sequence: Number of the packed sequence; 0 without packing.
        start: Index of the first token in its sequence.
        stop: Index after the last token in its sequence.
        offset: Index of the first token among those of its rank.

    >>> Run(0, 4, 8, 0).length
    4
    """

    sequence: int
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def runs_of_ranks(
    ranks: int, length: int | Sequence[int], layout: LayoutName, cu_seqlens: Sequence[int] | None, *, asked: str
) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of each rank, in the order of their tokens on the rank.

    Args:
        ranks: Number of ranks.
        length: Number of tokens of all ranks, or one number per rank.
        layout: "contiguous": one part per rank, in order. "zigzag": each sequence is cut into twice as many chunks as
            there are ranks, and rank r has chunks r and 2 ranks - 1 - r, so that causal attention is the same work on
            all ranks.
        cu_seqlens: Ends of packed sequences, from 0 to the number of tokens, or None.
        asked: The call, for errors.

    Raises:
        RopewalkError: If the lengths do not match, or if zigzag cannot cut them.

    >>> [[(run.start, run.stop) for run in runs] for runs in runs_of_ranks(2, 8, "zigzag", None, asked="")]
    [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]
    >>> [run.length for runs in runs_of_ranks(2, 5, "contiguous", None, asked="") for run in runs]
    [3, 2]
    """
    require_choice(layout, get_args(LayoutName), asked=f"{asked}(layout=...)")
    counts = _counts(ranks, length, layout, asked)
    total = sum(counts)
    ends = [0, total] if cu_seqlens is None else _checked_ends(cu_seqlens, total, asked)
    sequences = list(enumerate(itertools.pairwise(ends)))
    if layout == "zigzag":
        return tuple(
            _zigzag(rank, ranks, sequences, packed=cu_seqlens is not None, asked=asked) for rank in range(ranks)
        )
    borders = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
    return tuple(
        tuple(
            Run(number, max(begin, first) - begin, min(end, last) - begin, max(begin, first) - first)
            for number, (begin, end) in sequences
            if max(begin, first) < min(end, last)
        )
        for first, last in borders
    )


def _counts(ranks: int, length: int | Sequence[int], layout: str, asked: str) -> list[int]:
    """Return the number of tokens of each rank."""
    whole = as_int(length)
    if whole is not None:
        if whole < 1:
            raise RopewalkError(
                asked=f"{asked}(length={whole})",
                expected="at least 1 token",
                got=f"{whole}",
                do="pass the number of tokens of all ranks together",
            )
        return [whole // ranks + (rank < whole % ranks) for rank in range(ranks)]
    numbers = [as_int(x) for x in length] if isinstance(length, Sequence) and not isinstance(length, str) else []
    counts = [x for x in numbers if x is not None and x >= 0]
    if len(counts) != len(numbers) or len(counts) != ranks or not sum(counts):
        raise RopewalkError(
            asked=f"{asked}(length=...)",
            expected=f"the number of tokens of all ranks, or a list of {ranks} numbers, one per rank",
            got=shown(length),
            do="pass an int to cut the tokens evenly",
        )
    if layout == "zigzag" and len(set(counts)) > 1:
        raise RopewalkError(
            asked=f'{asked}(length=..., layout="zigzag")',
            expected="the same number of tokens on all ranks",
            got=shown(counts),
            do='pass layout="contiguous" for parts of different lengths',
        )
    return counts


def _checked_ends(cu_seqlens: Sequence[int], total: int, asked: str) -> list[int]:
    ends = list(cu_seqlens)
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != total or any(b < a for a, b in itertools.pairwise(ends)):
        raise RopewalkError(
            asked=f"{asked}(cu_seqlens=...)",
            expected=f"cumulated lengths of the packed sequences of all ranks, from 0 to {total}",
            got=shown(ends),
            do="cumulate the lengths of all sequences; make padding a sequence of its own",
        )
    return ends


def _zigzag(
    rank: int, ranks: int, sequences: list[tuple[int, tuple[int, int]]], *, packed: bool, asked: str
) -> tuple[Run, ...]:
    runs: list[Run] = []
    offset = 0
    for number, (begin, end) in sequences:
        chunk, rest = divmod(end - begin, 2 * ranks)
        if rest:
            raise RopewalkError(
                asked=f'{asked}(layout="zigzag")',
                expected=f"a multiple of {2 * ranks} tokens" + (" in every packed sequence" if packed else ""),
                got=f"{end - begin}" + (f" in sequence {number}" if packed else ""),
                do='pad to a multiple of twice the number of ranks, or pass layout="contiguous"',
            )
        for piece in (rank, 2 * ranks - 1 - rank) if chunk else ():
            runs.append(Run(number, piece * chunk, (piece + 1) * chunk, offset))
            offset += chunk
    return tuple(runs)
