"""Decoder: a small language model of the library's own parts, with any encoding."""

import math
import zlib
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ropewalk.errors import require_choice
from ropewalk.lab.encodings import make_encoding
from ropewalk.nn.attention.function import attention
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.linear.layer import LinearAttention
from ropewalk.parallel.linear import linear_attention as linear_attention_over_ranks
from ropewalk.parallel.shards import Shards
from ropewalk.parallel.softmax import attention as attention_over_ranks

__all__ = ["SIZES", "AttentionName", "Decoder", "Size"]

AttentionName = Literal["softmax", "linear"]

# The root mean square of sinusoids: token and position then have the same weight in x + p.
EMBEDDING_STD = 0.5**0.5
MATRIX_STD = 0.02


def _seed_of(seed: int, name: str) -> int:
    """A seed per parameter, of 32 bits, which is all that the generator of the CPU uses."""
    return zlib.crc32(f"{seed} {name}".encode())


class Size(NamedTuple):
    """Sizes of a model. The hidden width of a block is 8/3 dim, rounded up to a multiple of 16.

    >>> Size(64, 2, 4).hidden
    176
    """

    dim: int
    layers: int
    heads: int

    @property
    def hidden(self) -> int:
        """Width between the projections of a SwiGLU."""
        return 16 * math.ceil(8 * self.dim / 3 / 16)


# With 256 tokens these have 0.13, 1.1 and 10.8 million parameters.
SIZES: dict[str, Size] = {"micro": Size(64, 2, 4), "tiny": Size(128, 5, 4), "small": Size(384, 6, 6)}


class Block(nn.Module):
    """Attention and SwiGLU (2002.05202), each after an RMSNorm (1910.07467)."""

    def __init__(self, size: Size, encoding: Encoding, kind: AttentionName, *, qk_norm: bool) -> None:
        super().__init__()
        layer = Attention if kind == "softmax" else LinearAttention
        self.attention: Attention | LinearAttention = layer(size.dim, size.heads, encoding=encoding)
        head_dim = size.dim // size.heads
        self.qk_norms: nn.ModuleList = nn.ModuleList(nn.RMSNorm(head_dim) for _ in range(2 * qk_norm))
        self.gate: nn.Linear = nn.Linear(size.dim, size.hidden, bias=False)
        self.up: nn.Linear = nn.Linear(size.dim, size.hidden, bias=False)
        self.down: nn.Linear = nn.Linear(size.hidden, size.dim, bias=False)
        self.norms: nn.ModuleList = nn.ModuleList(nn.RMSNorm(size.dim) for _ in range(2))

    def attend(self, x: Tensor, positions: Tensor | None, shards: Shards | None) -> Tensor:
        layer = self.attention
        if shards is None and not self.qk_norms:
            return layer(x, positions)
        # The hook of an encoding that only embeds was called before the first layer.
        encoding = None if layer.encoding is None or layer.encoding.only_embeds else layer.encoding
        q, k, v = layer.heads_of(x)
        if self.qk_norms:
            q, k = (norm(heads) for norm, heads in zip(self.qk_norms, (q, k), strict=True))
        if isinstance(layer, Attention):
            if shards is None:
                y = attention(q, k, v, encoding=encoding, q_positions=positions, k_positions=positions)
            else:
                y = attention_over_ranks(q, k, v, shards=shards, encoding=encoding)
        else:
            has_bias = encoding is not None and encoding.distance_bias() is not None
            rope, bias = (None, encoding) if has_bias else (encoding, None)
            if shards is None:
                y = linear_attention(q, k, v, positions=positions, rope=rope, bias=bias)
            else:
                y = linear_attention_over_ranks(q, k, v, shards=shards, rope=rope, bias=bias)
        return layer.joined(y)

    def forward(self, x: Tensor, positions: Tensor | None, shards: Shards | None) -> Tensor:
        x = x + self.attend(_for_products(self.norms[0](x)), positions, shards)
        y = _for_products(self.norms[1](x))
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _for_products(x: Tensor) -> Tensor:
    """Cast once what several matrix products read: autocast would cast it for each of them."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class Decoder(nn.Module):
    """Tokens to logits of the next token: embedding, blocks of attention and SwiGLU, RMSNorm, and an output matrix.

    One encoding is shared by all layers, as T5 shares its bias. Parameters are functions of the seed and their name, so
    that models with different encodings start from the same values where they have the same parameters.

    Args:
        size: A name of SIZES, or a Size.
        encoding: Description of an encoding, as `make_encoding` accepts it.
        vocabulary: Number of tokens.
        length: Trained length, which determines the size of learned tables.
        attention: "softmax" or "linear".
        qk_norm: Whether queries and keys are normalised per head, before they are rotated.
        seed: Seed of the parameters.

    Raises:
        RopewalkError: If a name is unknown, or if the encoding rejects its options.

    >>> model = Decoder("micro", "rope", vocabulary=5, length=8)
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 5])
    """

    def __init__(
        self,
        size: str | Size,
        encoding: str,
        *,
        vocabulary: int,
        length: int,
        attention: AttentionName = "softmax",
        qk_norm: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        kinds: tuple[AttentionName, ...] = ("softmax", "linear")
        require_choice(attention, kinds, asked="Decoder(attention=...)")
        if isinstance(size, str):
            require_choice(size, tuple(SIZES), asked="Decoder(size)")
            size = SIZES[size]
        self.size: Size = size
        self.embedding: nn.Embedding = nn.Embedding(vocabulary, size.dim)
        with torch.random.fork_rng(devices=[]):
            # Encodings draw their parameters themselves.
            torch.default_generator.manual_seed(_seed_of(seed, "encoding"))
            self.encoding: Encoding = make_encoding(encoding, dim=size.dim, num_heads=size.heads, length=length)
        self.blocks: nn.ModuleList = nn.ModuleList(
            Block(size, self.encoding, attention, qk_norm=qk_norm) for _ in range(size.layers)
        )
        self.norm: nn.RMSNorm = nn.RMSNorm(size.dim)
        self.head: nn.Linear = nn.Linear(size.dim, vocabulary, bias=False)
        self._initialize(seed)

    def _initialize(self, seed: int) -> None:
        depth = (2 * self.size.layers) ** -0.5
        of_encoding = {id(parameter) for parameter in self.encoding.parameters()}
        # A learned table starts at the scale of sinusoids and of tokens: its rows are added to the latter.
        at_scale = {"embedding.weight", *(("encoding.weight",) if self.encoding.name == "learned" else ())}
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2 or (id(parameter) in of_encoding and name not in at_scale):
                continue
            std = EMBEDDING_STD if name in at_scale else MATRIX_STD
            # What is added to the stream starts smaller in deeper models (GPT-2).
            std = std * depth if name.endswith(("o_proj.weight", "down.weight")) else std
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, shards: Shards | None = None) -> Tensor:
        """Return logits of the next token.

        Args:
            tokens: [batch, seq], int64; with `shards` the tokens of this rank.
            positions: [seq] or [batch, seq]; None is 0 .. seq-1. Not with `shards`, which have positions.
            shards: The ranks that share the sequences; None if there is one.

        Returns:
            Logits [batch, seq, vocabulary].
        """
        x = self.encoding.embed(self.embedding(tokens), positions if shards is None else shards.positions)
        for block in self.blocks:
            x = block(x, positions, shards)
        return self.head(self.norm(x))
