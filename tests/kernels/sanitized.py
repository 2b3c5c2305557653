"""A little of everything that the Triton kernels do, for a checker of memory: run as a script, on a GPU.

compute-sanitizer --tool memcheck --error-exitcode 9 python tests/kernels/sanitized.py
compute-sanitizer --tool racecheck --error-exitcode 9 python tests/kernels/sanitized.py
"""

import itertools

import torch

from ropewalk import RopeSpec, RotaryEmbedding, encoding, linear_attention, qk_norm_rope
from ropewalk.kernels.linear.stored import triton as linear_launch


def main() -> None:
    specs = [RopeSpec(80), RopeSpec(72, rotary_dim=24, pairing="half", rotary_slice="trailing")]
    for spec, memory in itertools.product(specs, ("transposed", "contiguous")):
        rope = RotaryEmbedding(spec).to("cuda")
        shapes = [(2, heads, 37, spec.head_dim) for heads in (5, 3)]
        q, k = (torch.randn(shape, device="cuda").to(torch.bfloat16) for shape in shapes)
        if memory == "transposed":
            q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        q, k = q.requires_grad_(), k.requires_grad_()
        weight = torch.ones(spec.head_dim, device="cuda", requires_grad=True)
        ids = torch.randint(-100, 1 << 20, (2, 37), device="cuda")
        cos, sin = (table.requires_grad_() for table in rope.at(ids))
        rotated = [
            *rope(q, k, positions=ids),
            *rope(q, k, angles=(cos, sin)),
            *qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight, positions=ids),
        ]
        torch.autograd.grad(rotated, [q, k, weight, cos, sin], rotated)
        longer = [torch.randn(1, heads, 600, spec.head_dim, device="cuda").to(torch.bfloat16) for heads in (4, 2, 2)]
        longer = [x.requires_grad_() for x in longer]
        ends = torch.tensor([0, 5, 300, 590], device="cuda")
        read = [linear_attention(*longer, rope=rope, cu_seqlens=ends)]
        # Sums by segments, and by programs that scan.
        for linear_launch._ENOUGH_SCANS in (1000, 1):
            read += [linear_attention(*longer, rope=rope, causal=causal) for causal in (True, False)]
        # The kernels with weights.
        decay = torch.full((4,), -0.1, device="cuda")
        read += [linear_attention(*longer, rope=rope, decay=decay, cu_seqlens=ends)]
        for causal, name in itertools.product((True, False), ("alibi", "t5")):
            bias = encoding(name, dim=4 * spec.head_dim, num_heads=4).to("cuda")
            read += [linear_attention(*longer, rope=rope, bias=bias, causal=causal)]
        torch.autograd.grad(read, longer, read)
        with torch.no_grad():
            rope.rotate_(q.clone(), k.clone(), offset=1)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
