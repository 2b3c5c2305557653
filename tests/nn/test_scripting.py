"""torch.jit.script is refused with words that help; torch.jit.trace works, at other lengths too."""

import pytest
import torch
from torch import Tensor, nn

import ropewalk as rw
from ropewalk.errors import RopewalkError


class Model(nn.Module):
    """A model with something of ropewalk in it."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.projection = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.projection(x))


INNER = {
    "RotaryEmbedding": lambda: rw.RotaryEmbedding(16),
    "Attention": lambda: rw.Attention(16, 2),
    "LinearAttention": lambda: rw.LinearAttention(16, 2),
    "FavorFeatures": lambda: rw.FavorFeatures(16, 4),
    "Encoding": lambda: rw.encoding("none", dim=16, num_heads=2),
    "AlibiBias": lambda: rw.encoding("alibi", dim=16, num_heads=2),
    "T5Bias": lambda: rw.encoding("t5", dim=16, num_heads=2),
    "SinusoidalEncoding": lambda: rw.encoding("sinusoidal", dim=16, num_heads=2),
    "RotaryEncoding": lambda: rw.encoding("rope", dim=16, num_heads=2),
}


@pytest.mark.parametrize("around", [lambda inner: inner, Model, lambda inner: nn.Sequential(Model(inner))])
@pytest.mark.parametrize("name", INNER)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_model_cannot_be_scripted_and_hears_what_to_use(name, around):
    with pytest.raises(RopewalkError, match=rf"type {name}\n(.|\n)*torch.compile\(model\).*\n?.*torch.jit.trace"):
        torch.jit.script(around(INNER[name]()))


@pytest.mark.parametrize(
    "spec",
    [
        rw.RopeSpec(16),
        rw.RopeSpec(16, pairing="half", angles="float32"),
        rw.RopeSpec(16, rw.DynamicNTK(10_000, 2.0, 4)),
        rw.RopeSpec(16, xpos=rw.XPos(64)),
    ],
    ids=["plain", "float32", "dynamic", "xpos"],
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*")
def test_a_traced_rope_is_right_at_other_lengths(spec):
    rope, x, longer = rw.RotaryEmbedding(spec), torch.randn(2, 3, 5, 16), torch.randn(2, 3, 9, 16)
    traced = torch.jit.trace(rope, (x, x))
    for y in (x, longer):
        torch.testing.assert_close(traced(y, y), rope(y, y), rtol=0, atol=5e-7)
