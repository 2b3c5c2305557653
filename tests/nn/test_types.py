"""What type checkers are told of layers, linear attention and encodings: pyright reads `assert_type` in make check."""

from typing import assert_type

import torch
from torch import Tensor

from ropewalk import Attention, LinearAttention, LinearState, encoding, linear_attention
from ropewalk.nn.encodings.bias import T5Bias
from ropewalk.nn.encodings.rotary import RotaryEncoding


def test_type_checkers_know_what_attention_returns():
    x = torch.zeros(1, 3, 8)
    assert isinstance(assert_type(Attention(8, num_heads=2)(x), Tensor), Tensor)
    layer = LinearAttention(8, num_heads=2)
    assert isinstance(assert_type(layer(x), Tensor), Tensor)
    y, state = assert_type(layer(x, return_state=True), tuple[Tensor, LinearState])
    assert isinstance(y, Tensor)
    assert isinstance(state, LinearState)
    assert_type(layer.step(x), tuple[Tensor, LinearState])
    for both in (False, True):
        assert_type(layer(x, return_state=both), Tensor | tuple[Tensor, LinearState])


def test_type_checkers_know_what_linear_attention_returns():
    q = torch.zeros(1, 2, 3, 4)
    assert isinstance(assert_type(linear_attention(q, q, q), Tensor), Tensor)
    out, state = assert_type(linear_attention(q, q, q, return_state=True), tuple[Tensor, LinearState])
    assert isinstance(out, Tensor)
    assert isinstance(state, LinearState)
    for both in (False, True):
        assert_type(linear_attention(q, q, q, return_state=both), Tensor | tuple[Tensor, LinearState])


def test_type_checkers_know_the_class_of_an_encoding():
    rope = assert_type(encoding("rope", dim=8, num_heads=2, pairing="half"), RotaryEncoding)
    assert rope.rope.spec.pairing == "half"
    assert assert_type(encoding("t5", dim=8, num_heads=2), T5Bias).num_buckets == 32
