"""Sources of the claims: five notes and the papers, and places in them."""

from dataclasses import dataclass

__all__ = ["NOTES", "Place", "Source"]


@dataclass(frozen=True)
class Source:
    """A note or a paper.

    Attributes:
        key: What `ropewalk verify --source` accepts: the number of a note, or the arXiv number of a paper.
        title: The name that people read.

    >>> Source("002", "note 002 (zh), RoPE and linear attention").at(319, "S(2) = 1.4").label
    '002:319'
    """

    key: str
    title: str

    def at(self, line: int, quotation: str) -> "Place":
        """A place in this source.

        Args:
            line: Line of the source, counted from 1.
            quotation: The original words, in their language. Several lines are separated by newlines.
        """
        return Place(self, line, quotation)


@dataclass(frozen=True)
class Place:
    """A source, or a line of a source with the words that are quoted from it.

    Attributes:
        source: The note or paper.
        line: Line in the source, counted from 1; None for the source as a whole.
        quotation: The original words in their own language. Empty for papers.

    >>> ROFORMER.at(3, "...").source.title, Place(ROFORMER).label
    ('RoFormer, 2104.09864', '2104.09864')
    """

    source: Source
    line: int | None = None
    quotation: str = ""

    @property
    def label(self) -> str:
        """The shortest unambiguous name: "002:319", or the key of a source that is cited as a whole."""
        return self.source.key if self.line is None else f"{self.source.key}:{self.line}"


NOTE_000 = Source("000", "note 000 (ru), RoPE across heads")
NOTE_001 = Source("001", "note 001 (ru), from sinusoids to RoPE")
NOTE_002 = Source("002", "note 002 (zh), RoPE and linear attention")
NOTE_003 = Source("003", "note 003 (ko), RoPE with code")
NOTE_004 = Source("004", "note 004 (zh), the derivation of RoPE")

NOTES = (NOTE_000, NOTE_001, NOTE_002, NOTE_003, NOTE_004)

ROFORMER = Source("2104.09864", "RoFormer, 2104.09864")
PI = Source("2306.15595", "Position Interpolation, 2306.15595")
YARN = Source("2309.00071", "YaRN, 2309.00071")
MEN = Source("2405.14591", "Base of RoPE Bounds Context Length, 2405.14591")
LIU = Source("2310.05209", "Scaling Laws of RoPE-based Extrapolation, 2310.05209")
BARBERO = Source("2410.06205", "Round and Round We Go, 2410.06205")
NOPE = Source("2305.19466", "The Impact of Positional Encoding on Length Generalization, 2305.19466")
PRESS = Source("2108.12409", "Train Short, Test Long, 2108.12409")
XPOS = Source("2212.10554", "A Length-Extrapolatable Transformer, 2212.10554")
RETNET = Source("2307.08621", "Retentive Network, 2307.08621")
LINEAR = Source("2006.16236", "Transformers are RNNs, 2006.16236")
SINUSOIDS = Source("1706.03762", "Attention Is All You Need, 1706.03762")
KEXUE = Source("kexue-10122", "kexue.fm 10122")
PRACTICE = Source("practice", "common practice")
