# type: ignore
"""What a type checker must see. Nothing here is called: tests/types/test_checker.py gives the file to pyright.

A line that ends in "# error: <rule>" must be an error of that rule, and no other line may be an error. The first line
keeps the check of this repository from reporting them; the test leaves it out.
"""

from typing import Literal, assert_type

import numpy as np
import torch
from torch import Tensor

import ropewalk as rw
from ropewalk import reference, spec
from ropewalk.kernels.angles.arithmetic import TorchArithmetic


def rotary(q: Tensor, k: Tensor, rope: rw.RotaryEmbedding) -> None:
    assert_type(rope(q), Tensor)
    assert_type(rope(q, k), tuple[Tensor, Tensor])
    assert_type(rope(q, offset=3), Tensor)
    assert_type(rope(q, k, positions=torch.arange(5)), tuple[Tensor, Tensor])
    assert_type(rope.rotate_(q), Tensor)
    assert_type(rope.rotate_(q, k), tuple[Tensor, Tensor])
    assert_type(rope.unrotate(q), Tensor)
    assert_type(rope.at(torch.arange(5)), tuple[Tensor, Tensor])
    assert_type(rw.qk_norm_rope(q, k, rope, q_weight=q[0]), tuple[Tensor, Tensor])
    rope()  # error: reportCallIssue
    rope(q, position_ids=torch.arange(5))  # error: reportCallIssue
    rope([1.0])  # error: reportArgumentType
    rw.qk_norm_rope(q, k, q, k, rope)  # error: reportCallIssue


def rotary_embedding() -> None:
    assert_type(rw.RotaryEmbedding(64), rw.RotaryEmbedding)
    rw.RotaryEmbedding(head_dim=64, base=500_000, pairing="half")
    rw.RotaryEmbedding(rw.RopeSpec(64))
    rw.RotaryEmbedding(64, pairing="neox")  # error: reportArgumentType
    rw.RotaryEmbedding(dim=64)  # error: reportCallIssue
    rw.RotaryEmbedding(64, theta=500_000)  # error: reportCallIssue
    rw.RotaryEmbedding(64, seq_dim=1)  # error: reportArgumentType


def seeds(x: Tensor) -> None:
    cos, sin = rw.build_rotary_frequencies(64, 128)
    assert_type(rw.apply_rope(x, cos, sin), Tensor)
    rw.apply_rope(x, cos, sin, pairing="interleave")  # error: reportArgumentType


def specs() -> None:
    value = rw.RopeSpec(64, rw.Yarn(1e6, factor=4, policy="deepseek"), pairing="half", sign=-1)
    assert_type(value.pairing, Literal["interleaved", "half"])
    assert_type(value.inv_freq(), np.ndarray)
    assert_type(value.amplitude(), float)
    assert_type(value.frequencies, rw.Frequencies)
    rw.RopeSpec(64, pairing="neox")  # error: reportArgumentType
    rw.RopeSpec(64, rotary_slice="first")  # error: reportArgumentType
    rw.RopeSpec(64, sign=2)  # error: reportArgumentType
    rw.RopeSpec(64, angles="float64")  # error: reportArgumentType
    rw.RopeSpec(64, 10_000)  # error: reportArgumentType
    rw.Yarn(policy="hf")  # error: reportArgumentType
    rw.Yarn(ramp="linear")  # error: reportArgumentType
    value.to_config("vllm")  # error: reportArgumentType
    value.head_dim = 32  # error: reportAttributeAccessIssue


def rules(length: Tensor) -> None:
    on_cpu = TorchArithmetic(torch.float32, torch.device("cpu"))
    assert_type(rw.Plain().evaluate(64), np.ndarray)
    assert_type(rw.DynamicNTK().evaluate(64, 4096), np.ndarray)
    assert_type(rw.DynamicNTK().evaluate(64, length, on_cpu), Tensor)
    assert_type(rw.RopeSpec(64).evaluate(None, on_cpu), Tensor)
    assert_type(rw.Yarn().amplitude(), float)
    assert_type(rw.LogTemperature(512).evaluate(length, on_cpu), Tensor)
    assert_type(rw.XPos(512).log_scale(64, length, on_cpu), Tensor)
    assert_type(rw.Explicit([1.0, 0.5]).inv_freq, tuple[float, ...] | tuple[tuple[float, ...], ...])
    assert_type(rw.Axes.chunked([16, 24, 24]).weights, tuple[tuple[float, ...], ...])
    assert_type(rw.Plain.from_parameters({"rope_theta": 1e4}), rw.Plain)
    rw.Explicit(np.ones(4))
    rw.Explicit(torch.ones(4))
    rw.Explicit("1.0")  # error: reportArgumentType


class Harmonic(rw.Frequencies):
    """A rule as a user writes one."""

    def evaluate(
        self,
        rotary_dim: int,
        length: spec.ArrayT | float | None = None,
        arithmetic: spec.Arithmetic[spec.ArrayT] = spec.FLOAT64,
    ) -> spec.ArrayT:
        theta = 1.0 / arithmetic.array(range(1, rotary_dim // 2 + 1))
        return theta if length is None else theta / arithmetic.clip(spec.as_array(length, arithmetic), low=1.0)


def hub() -> None:
    loaded = rw.load_spec("config.json")
    assert_type(loaded, rw.RopeSpec | dict[str, rw.RopeSpec | None] | None)
    _ = loaded.head_dim  # error: reportAttributeAccessIssue
    rw.load_spec("config.json", pairing="neox")  # error: reportArgumentType
    rw.load_spec("config.json", policy="hf")  # error: reportArgumentType


def attention(x: Tensor) -> None:
    layer = rw.Attention(512, 8, encoding=rw.encoding("rope", dim=512, num_heads=8))
    assert_type(layer(x), Tensor)
    rw.encoding("rotary", dim=512, num_heads=8)  # error: reportArgumentType
    learned = rw.encoding("learned", dim=512, num_heads=8, length=64, placement="scores")
    assert_type(learned.encode_heads(x, x, x), tuple[Tensor, Tensor, Tensor])
    rw.encoding("sinusoidal", dim=512, num_heads=8, placement="projection", head_dim=32)
    rw.encoding("sinusoidal", dim=512, num_heads=8, placement="values")  # error: reportArgumentType
    rw.encoding("rope", dim=512, num_heads=8, placement="scores")  # error: reportArgumentType
    rw.encoding("t5", dim=512, num_heads=8, placement="input")  # error: reportArgumentType


def linear(q: Tensor, k: Tensor, v: Tensor, state: rw.LinearState) -> None:
    assert_type(rw.linear_attention(q, k, v), Tensor)
    assert_type(rw.linear_attention(q, k, v, state=state, return_state=True), tuple[Tensor, rw.LinearState])
    layer = rw.LinearAttention(512, 8)
    assert_type(layer(q), Tensor)
    assert_type(layer(q, return_state=True), tuple[Tensor, rw.LinearState])
    alibi, decay = rw.encoding("alibi", dim=512, num_heads=8), torch.zeros(8)
    assert_type(rw.linear_attention(q, k, v, decay=decay, normalize=False, scale=0.5), Tensor)
    assert_type(rw.linear_attention(q, k, v, bias=alibi, return_state=True), tuple[Tensor, rw.LinearState])
    assert_type(alibi.distance_bias(), rw.DistanceBias)
    assert_type(rw.DistanceBias(slopes=decay).numbers, Tensor | None)
    assert_type(rw.Encoding().distance_bias(), rw.DistanceBias | None)
    rw.LinearAttention(512, 8, encoding=alibi)
    rw.linear_attention(q, k, v, feature_map="gelu")  # error: reportArgumentType
    rw.linear_attention(q, k, v, bias="alibi")  # error: reportArgumentType
    rw.linear_attention(q, k, v, decay=0.9)  # error: reportArgumentType


def ids(lengths: Tensor) -> None:
    assert_type(rw.positions.grid_positions(4, 6), Tensor)
    assert_type(rw.positions.positions_of_lengths(lengths, 12), Tensor)
    rw.positions.grid_positions("4")  # error: reportArgumentType


def oracle(x: Tensor, positions: Tensor) -> None:
    assert_type(reference.rotate(x, positions, rw.RopeSpec(64).inv_freq()), Tensor)
    reference.rotate(x, positions, rw.RopeSpec(64).inv_freq(), pairing="neox")  # error: reportArgumentType


def error() -> None:
    try:
        rw.RopeSpec(7)
    except rw.RopewalkError as raised:
        assert_type(raised.do, str)
