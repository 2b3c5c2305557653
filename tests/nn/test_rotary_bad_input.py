"""What the module refuses, before any work, in the four parts of an error."""

import pytest
import torch

from ropewalk import RopeSpec, RopewalkError, RotaryEmbedding
from ropewalk.kernels.backends import triton as gpu
from ropewalk.spec import AcrossHeads, Plain

Q, K = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 5, 8)
IDS = torch.arange(5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RotaryEmbedding(7), "an even integer of at least 2\ngot:      7"),
        (lambda: RotaryEmbedding(8, base=0.0), "a finite number above 0"),
        (lambda: RotaryEmbedding(8, pairing="neox"), "'interleaved' or 'half'"),
        (lambda: RotaryEmbedding(8, seq_dim=1), "-2 for"),
        (lambda: RotaryEmbedding(8, context_length=0), "at least 1"),
        (lambda: RotaryEmbedding(8, backend="cuda"), "'native' or 'triton' or 'torch'"),
        (lambda: RotaryEmbedding(8, check_ids="yes"), "True or False"),
        (lambda: RotaryEmbedding(RopeSpec(8), base=10_000.0), "a spec alone"),
        (lambda: RotaryEmbedding(RopeSpec(8), pairing="half"), "a spec alone"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_making_one(call, message):
    with pytest.raises(RopewalkError, match=message):
        call()


def test_a_backend_that_is_not_there(monkeypatch):
    monkeypatch.setattr(gpu, "INSTALLED", False)
    with pytest.raises(RopewalkError, match=r"available on this machine\ngot:      Triton is not installed"):
        RotaryEmbedding(8, backend="triton")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": torch.ones(2, 4, 5, 6)}, r"last dimension is 8\ngot:      torch.float32 of shape \[2, 4, 5, 6\]"),
        ({"q": Q.int()}, "a floating-point tensor"),
        ({"q": torch.ones(8)}, "seq, head_dim"),
        ({"q": [1.0]}, r"got:      \[1.0\] \(list\)\ndo this:  pass a torch.Tensor"),
        ({"k": 5}, r"a start position as rope\(q, offset=n\)"),
        ({"k": torch.ones(2, 2, 5, 6)}, r"rope\(k\)"),
        ({"k": IDS}, r"do this:  pass position ids as rope\(q, positions=ids\)"),
        ({"k": K.double()}, "q and k of one dtype"),
        ({"k": K.bfloat16()}, "q and k of one dtype"),
        ({"k": K.numpy()}, "pass a torch.Tensor of float32"),
        ({"q": Q.to(torch.float8_e5m2)}, "pass a torch.Tensor of float32, float64, bfloat16 or float16"),
        ({"k": torch.ones(2, 2, 6, 8)}, "5 queries and 6 keys"),
        ({"positions": torch.arange(4)}, r"if q and k are \[batch, seq, heads, head_dim\], .* seq_dim=-3"),
        ({"k": torch.ones(2, 2, 3, 8)}, "5 queries and 3 keys\ndo this:  for .* seq_dim=-3"),
        ({"positions": torch.arange(4)}, r"positions \[5\] or \[2, 5\]\ngot:      \[4\]"),
        ({"positions": torch.zeros(3, 5).long()}, r"positions \[5\] or \[2, 5\]"),
        ({"positions": torch.zeros(4, 5).long()}, r"positions \[5\] or \[2, 5\]"),
        ({"positions": torch.zeros(2, 4, 5)}, r"a tensor \[seq\] or \[batch, seq\] of whole numbers"),
        ({"positions": torch.tensor(3)}, "a tensor"),
        ({"positions": IDS.bool()}, "torch.bool"),
        ({"positions": IDS.bfloat16()}, "every integer above 256"),
        ({"positions": IDS.to(torch.complex64)}, "torch.complex64"),
        ({"positions": [0, 1, 2, 3, 4]}, r"do this:  wrap them: torch.tensor"),
        ({"positions": torch.tensor([0.0, 1.0, 2.0, 3.0, float("nan")])}, "finite positions"),
        ({"positions": torch.zeros(5, device="meta")}, "on cpu, the device of x\ngot:      positions on meta"),
        ({"k_positions": torch.arange(3), "k": K}, r"rope\(k_positions=...\)"),
        ({"k_positions": IDS}, "k_positions with k"),
        ({"positions": IDS, "offset": 3}, "one of positions, offset, cu_seqlens and angles"),
        ({"offset": 3, "k": K, "k_positions": IDS}, "together with positions or alone"),
        ({"offset": 1.5}, r"an int of less than 63 bits, or whole numbers \[2\]"),
        ({"offset": torch.ones(2)}, r"an int of less than 63 bits, or whole numbers \[2\]"),
        ({"offset": torch.ones(3).long()}, r"got:      torch.int64 \[3\]"),
        ({"offset": True}, "an int"),
        ({"offset": 10**30}, "less than 63 bits"),
        ({"q": torch.ones(5, 8), "offset": IDS}, "expected: an int of less than 63 bits\ngot"),
        ({"positions": IDS.to(torch.float8_e4m3fn)}, "every integer above"),
        ({"k": torch.ones(1, 2, 5, 8), "positions": torch.zeros(2, 5).long()}, r"as rope.at\(positions\) returns them"),
        ({"k": torch.ones(1, 2, 5, 8), "offset": torch.tensor([1, 2])}, r"as rope.at\(positions\) returns them"),
        ({"k": K, "angles": (torch.ones(1, 4, 5, 4), torch.ones(1, 4, 5, 4))}, r"as rope.at\(positions\) returns them"),
        ({"k": torch.ones(2, 2, 5, 8, device="meta")}, "on one device"),
        ({"angles": (torch.ones(5, 4, device="meta"), torch.ones(5, 4, device="meta"))}, "on the device of the input"),
        ({"cu_seqlens": torch.zeros(2, 2).long()}, r"\[sequences \+ 1\]"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "whole numbers"),
        ({"cu_seqlens": torch.tensor([2, 3])}, "start at 0, never decrease, and end at 5 at most"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 5])}, "never decrease"),
        ({"cu_seqlens": torch.tensor([0, 5, 10])}, "end at 5 at most"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "start at 0"),
        ({"angles": (torch.ones(4, 4), torch.ones(4, 4))}, r"cos and sin \[5, 4\]"),
        ({"angles": (torch.ones(9, 4), torch.ones(9, 4))}, r"cos and sin \[5, 4\]"),
        ({"angles": (torch.ones(5, 8), torch.ones(5, 8))}, r"cos and sin \[5, 4\]"),
        ({"angles": (torch.ones(3, 5, 4), torch.ones(3, 5, 4))}, r"as rope.at\(positions\) returns them"),
        ({"angles": (torch.ones(1, 3, 5, 4), torch.ones(1, 3, 5, 4))}, r"as rope.at\(positions\) returns them"),
        ({"angles": (torch.ones(5, 4).int(), torch.ones(5, 4).int())}, "float32"),
        ({"angles": torch.ones(5, 4)}, r"as rope.at\(positions\) returns them"),
        ({"q": Q.double(), "angles": (torch.ones(5, 4), torch.ones(5, 4))}, "dtype=torch.float64"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_calling_it(arguments, message, warm):
    rope = RotaryEmbedding(8)
    if warm:
        # A second call goes straight to the kernel, which has checks of its own.
        rope(Q, K)
        rope(Q.double())
        rope(Q, K)
    before = Q.clone()
    with pytest.raises(RopewalkError, match=message):
        rope(**{"q": Q} | arguments)
    assert torch.equal(Q, before)


@pytest.mark.parametrize(
    "call",
    [
        lambda rope, q: rope(q, offset=6),
        lambda rope, q: rope(q, offset=10**9),
        lambda rope, q: rope(q, positions=IDS + 6),
        lambda rope, q: rope(q, offset=torch.tensor([0, 6])),
        lambda rope, q: rope.at(IDS + 6),
        lambda rope, q: rope(q, q, positions=IDS, k_positions=IDS + 6),
        lambda rope, q: rope(torch.ones(1, 1, 11, 8)),
        lambda rope, q: rope(torch.ones(1, 1, 11, 8), cu_seqlens=torch.tensor([0, 11])),
    ],
)
def test_a_position_past_the_context_length(call):
    rope = RotaryEmbedding(8, context_length=10)
    rope(Q, offset=5)
    with pytest.raises(RopewalkError, match="positions below 10"):
        call(rope, Q)


def test_the_context_length_counts_positions_and_not_tokens():
    rope = RotaryEmbedding(8, context_length=10)
    rope(torch.ones(1, 1, 30, 8), cu_seqlens=torch.tensor([0, 10, 20, 30]))
    rope(Q, positions=IDS - 100)


def test_frequencies_a_head_need_their_heads():
    rope = RotaryEmbedding(RopeSpec(8, AcrossHeads(num_heads=4)))
    rope(Q)
    with pytest.raises(RopewalkError, match="4 heads in a tensor of 3 or 4 dimensions"):
        rope(Q, K)
    with pytest.raises(RopewalkError, match="4 heads"):
        rope(torch.ones(5, 8))
    # A dimension that is the heads is no batch.
    with pytest.raises(RopewalkError, match=r"expected: positions \[5\]\n"):
        rope(torch.ones(4, 5, 8), positions=IDS.expand(4, 5))


def test_what_has_no_meaning():
    rope = RotaryEmbedding(RopeSpec(8, Plain(), angles="float32"))
    with pytest.raises(RopewalkError, match="whose rotations compose"):
        rope.shift(Q, 1)
    with pytest.raises(RopewalkError, match=r"by=... for a tensor"):
        RotaryEmbedding(8).shift(Q, 1.5)
    with pytest.raises(RopewalkError, match="float32, or float64 for float64 input"):
        rope.at(IDS, dtype=torch.bfloat16)
    with pytest.raises(RopewalkError, match=r"\[seq\] or \[batch, seq\]"):
        rope.at(torch.ones(1, 2, 3))
