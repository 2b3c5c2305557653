"""Sparse, mkldnn and nested tensors: every entrance refuses them in its own words, before torch does in its."""

import pytest
import torch

import ropewalk as rw

ROPE = rw.RotaryEmbedding(8)
ONES = torch.ones(2, 3, 8)
KINDS = {
    "sparse": lambda: ONES.to_sparse(),
    "sparse rows": lambda: ONES[0].to_sparse_csr(),
    "mkldnn": lambda: ONES.to_mkldnn(),
    "jagged": lambda: torch.nested.nested_tensor([ONES[0], ONES[1, :2]], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([ONES[0], ONES[1, :2]]),
}


def encoded(name: str, x: torch.Tensor, **options: int) -> torch.Tensor:
    return rw.encoding(name, dim=8, num_heads=2, **options).embed(x)


CALLS = {
    "rope(q)": lambda x: ROPE(x),
    "rope(q, offset)": lambda x: ROPE(x, offset=3),
    "rope(q, k)": lambda x: ROPE(ONES, x),
    "positions": lambda x: ROPE(ONES, positions=x),
    "k_positions": lambda x: ROPE(ONES, ONES, k_positions=x),
    "cu_seqlens": lambda x: ROPE(ONES, cu_seqlens=x),
    "offset": lambda x: ROPE(ONES, offset=x),
    "angles": lambda x: ROPE(ONES, angles=(x, x)),
    "at": lambda x: ROPE.at(x),
    "rotate_": lambda x: ROPE.rotate_(x),
    "unrotate": lambda x: ROPE.unrotate(x),
    "shift": lambda x: ROPE.shift(x, 1),
    "retune": lambda x: ROPE.retune(x, ROPE),
    "qk_norm_rope": lambda x: rw.qk_norm_rope(x, x, ROPE, q_weight=torch.ones(8), k_weight=torch.ones(8)),
    "apply_rope": lambda x: rw.apply_rope(x, *rw.build_rotary_frequencies(8, 3)),
    "linear_attention": lambda x: rw.linear_attention(x, x, x),
    "Attention": lambda x: rw.Attention(8, 2)(x),
    "LinearAttention": lambda x: rw.LinearAttention(8, 2)(x),
    "learned": lambda x: encoded("learned", x, length=4),
    "sinusoidal": lambda x: encoded("sinusoidal", x),
    "recurrent": lambda x: encoded("recurrent", x),
    "encode_heads": lambda x: rw.encoding("sinusoidal", dim=8, num_heads=1, placement="scores").encode_heads(x, x, x),
    "multiplicative": lambda x: encoded("multiplicative", x, length=4),
    "concatenated": lambda x: encoded("concatenated", x, width=4),
    "alibi": lambda x: rw.encoding("alibi", dim=8, num_heads=2).bias(x, x),
    "t5": lambda x: rw.encoding("t5", dim=8, num_heads=2).bias(x, x),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_strides_is_refused(call, kind):
    ROPE(ONES)
    with pytest.raises(rw.RopewalkError, match="a strided tensor"):
        CALLS[call](KINDS[kind]())
