"""The table of docs/linear.md: every encoding in softmax and linear attention is exact, or refused with the reason."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import ropewalk as rw
from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from ropewalk.nn.encodings.by_name import ENCODINGS
from ropewalk.nn.encodings.rotary import RotaryEncoding
from ropewalk.reference import elu_plus_one, rotate, rotate_by_spec, softmax_attention
from strategies import vector

PAGE = Path(__file__).parent.parent.parent / "docs" / "linear.md"
DIM, HEADS, LENGTH = 32, 4, 150
WIDTH = DIM // HEADS
IDS = torch.arange(LENGTH)


def by_name(name: str, causal: bool, **options: Any) -> rw.Encoding:
    options |= {"causal": causal} if name == "t5" else {}
    build = cast("Callable[..., rw.Encoding]", rw.encoding)
    return build(name, dim=DIM, num_heads=HEADS, **options)


class NearBias(rw.Encoding):
    """A number per distance up to 4, and one for all farther keys."""

    name = "near"

    def distance_bias(self) -> rw.DistanceBias:
        return rw.DistanceBias(numbers=vector(1, HEADS, 11))

    def bias(self, q_positions: Tensor | None, k_positions: Tensor | None) -> Tensor:
        assert q_positions is not None
        assert k_positions is not None
        return vector(1, HEADS, 11)[:, (k_positions - q_positions[:, None]).clamp(-5, 5) + 5]


class LogBias(rw.Encoding):
    name = "log"

    def bias(self, q_positions: Tensor | None, k_positions: Tensor | None) -> Tensor:
        assert q_positions is not None
        assert k_positions is not None
        return -torch.log1p((q_positions[:, None] - k_positions).abs().double()).expand(HEADS, -1, -1)


class RotatedWithBias(RotaryEncoding):
    """RoPE, and the bias of another encoding."""

    def __init__(self, added: AlibiBias | T5Bias) -> None:
        super().__init__(rw.RotaryEmbedding(WIDTH))
        self.added = added

    def bias(self, q_positions: Tensor | None, k_positions: Tensor | None) -> Tensor:
        return self.added.bias(q_positions, k_positions)

    def distance_bias(self) -> rw.DistanceBias:
        return self.added.distance_bias()


def rope(spec: rw.RopeSpec) -> Callable[[bool], rw.Encoding]:
    return lambda causal: by_name("rope", causal, spec=spec)


TABLE_OPTIONS: dict[str, dict[str, Any]] = {
    "learned": {"length": LENGTH},
    "multiplicative": {"length": LENGTH},
    "concatenated": {"width": 8},
    "xpos": {"spec": rw.RopeSpec(WIDTH, xpos=rw.XPos(LENGTH))},
}
# The rows that are not "`name`" or "`name`, `option=value`".
OTHERS: dict[str, Callable[[bool], rw.Encoding]] = {
    "`rope` with an amplitude": rope(rw.RopeSpec(WIDTH, rw.Yarn(1e4, 4, 64))),
    "`rope` with a query temperature": rope(rw.RopeSpec(WIDTH, query_temperature=rw.LogTemperature(64))),
    "`rope` and `alibi`": lambda causal: RotatedWithBias(AlibiBias(HEADS)),
    "`rope` and `t5`": lambda causal: RotatedWithBias(T5Bias(HEADS, causal=causal)),
    "another bias with `distance_bias`": lambda causal: NearBias(),
    "another bias without it": lambda causal: LogBias(),
}


def table() -> dict[str, tuple[str, str]]:
    """The cells of the two kinds of attention, by the label of the row."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index("| encoding | `Attention` | `LinearAttention` | in linear attention |") + 2
    rows: dict[str, tuple[str, str]] = {}
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        label, softmax, linear, _ = (cell.strip() for cell in line.strip("|").split("|"))
        rows[label] = softmax, linear
    return rows


ROWS = table()


def built(label: str, causal: bool) -> rw.Encoding:
    """The encoding of a row in float64, with random parameters."""
    if label in OTHERS:
        module = OTHERS[label](causal)
    else:
        name, *options = re.findall(r"`([^`]+)`", label)
        pairs = (option.split("=") for option in options)
        named = {key: text.strip('"') if text.startswith('"') else int(text) for key, text in pairs}
        module = by_name(name, causal, **TABLE_OPTIONS.get(name, {}) | named)
    module.double().requires_grad_(False)
    for number, parameter in enumerate(module.parameters()):
        parameter.copy_(vector(20 + number, *parameter.shape))
    return module


def rotated(encoding: rw.Encoding, x: Tensor, role: Any) -> Tensor:
    """Queries or keys rotated by the reference."""
    module = getattr(encoding, "rope", None)
    if module is None:
        return x
    if module.heads is not None:  # frequencies per head
        return rotate(x, IDS, torch.as_tensor(module.spec.inv_freq()))
    return rotate_by_spec(x, module.spec, IDS, role=role)


def expected(layer: rw.Attention | rw.LinearAttention, encoding: rw.Encoding, tokens: Tensor) -> Tensor:
    """The output of the layer by a double sum over all pairs of tokens."""
    q, k, v = encoding.encode_heads(*layer.heads_of(tokens), IDS)
    bias = encoding.bias(IDS, IDS)
    if isinstance(layer, rw.Attention):
        q, k = rotated(encoding, q, "q"), rotated(encoding, k, "k")
        return layer.joined(softmax_attention(q, k, v, causal=layer.causal, bias=bias, scale=encoding.scale))
    q, k = elu_plus_one(q), elu_plus_one(k)
    weights = torch.ones(LENGTH, LENGTH).double() if bias is None else torch.exp(bias)
    weights = weights.tril() if layer.causal else weights
    above = (rotated(encoding, q, "q") @ rotated(encoding, k, "k").mT * weights) @ v
    return layer.joined(above / (q @ k.mT * weights).sum(-1, keepdim=True))


def test_the_table_has_every_encoding_and_nothing_else():
    names = {match[1] for label in ROWS if (match := re.fullmatch(r"`([\w-]+)`", label))}
    assert names == set(ENCODINGS)
    assert set(OTHERS) < set(ROWS)
    assert all(cell == "exact" or cell.startswith("refused: ") for cells in ROWS.values() for cell in cells)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both directions"])
@pytest.mark.parametrize("kind", [rw.Attention, rw.LinearAttention], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("label", ROWS)
def test_the_table_states_what_the_layers_do(label, kind, causal):
    encoding, cell = built(label, causal), ROWS[label][kind is rw.LinearAttention]
    torch.manual_seed(0)
    if cell != "exact":
        (reason,) = re.findall(r'^refused: "(.+)"$', cell)
        with pytest.raises(rw.RopewalkError, match=re.escape(reason)):
            kind(DIM, HEADS, encoding=encoding, causal=causal)
        return
    layer = kind(DIM, HEADS, encoding=encoding, causal=causal, dtype=torch.float64)
    tokens = encoding.embed(vector(2, 1, LENGTH, DIM), IDS)
    with torch.no_grad():
        assert torch.allclose(layer(tokens, IDS), expected(layer, encoding, tokens), rtol=0, atol=1e-10)
