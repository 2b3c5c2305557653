"""The code in the notes against its description. It is written here from the description, not copied."""

import torch
from torch import Tensor

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.samples import EXACT, cos_error, largest, normal, theta
from ropewalk.claims.sources import CHINESE_1, KOREAN
from ropewalk.reference import apply_rope, build_rotary_frequencies, rotate

__all__ = ["chapter"]

chapter: Chapter = Chapter("Code: tables, shapes and precision")


def _float32_table(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin as both notes compute them: positions times frequencies, both in float32."""
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, dim, 2).float() / dim)
    angles = torch.outer(torch.arange(rows).float(), frequencies)
    return angles.cos(), angles.sin()


def _even_and_odd(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate even and odd features and interleave the results. The dtype is that of the product."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


@chapter.claim(
    "code.tables",
    "cos and sin are tables [1, 1, seq, d/2] of the angles m·base^(−2i/d).",
    KOREAN,
    method="build_rotary_frequencies(64, 100): shape, and error against float64",
    expected="[1, 1, 100, 32]; within 2^-24",
)
def _() -> Finding:
    cos, sin = build_rotary_frequencies(64, 100)
    angles = torch.outer(torch.arange(100).double(), theta(64))
    error = max(largest(cos[0, 0] - angles.cos()), largest(sin[0, 0] - angles.sin()))
    return Finding(f"{list(cos.shape)}; error {error:.1e}", stated=cos.shape == (1, 1, 100, 32) and error <= 2**-24)


@chapter.claim(
    "code.apply",
    "x'_{2i} = x_{2i} cos − x_{2i+1} sin, x'_{2i+1} = x_{2i} sin + x_{2i+1} cos is the matrix R(m, θ) times x.",
    KOREAN,
    method="apply_rope against the rotation from positions, float64 x [2, 3, 50, 64]",
    expected="equal, up to the rounding of the float32 tables",
)
def _() -> Finding:
    x = normal(2, 3, 50, 64)
    error = largest(apply_rope(x, *build_rotary_frequencies(64, 50)) - rotate(x, torch.arange(50), theta(64)))
    return Finding(f"largest error {error:.1e}", stated=error < 1e-6)


@chapter.claim(
    "code.subscript",
    "The second feature of a pair is x_{xi+1}.",
    KOREAN,
    method="the formula with 2i+1 instead, against the block matrix",
    expected="equal with 2i+1; 'xi+1' is not an index",
    fails="x_{2i+1}",
)
def _() -> Finding:
    x, m = normal(1, 8), 3
    cos, sin = torch.cos(m * theta(8)), torch.sin(m * theta(8))
    error = largest(_even_and_odd(x, cos, sin) - rotate(x, torch.tensor([m]), theta(8)))
    return Finding(f"error {error:.1e} with 2i+1", stated=error > EXACT, amended=error < EXACT)


@chapter.claim(
    "code.interleave-comment",
    "The tables have shape [seq, dim_head], first cosines, then sines.",
    KOREAN,
    method="the shapes that the described steps produce for dim_head = 64",
    expected="two tables [seq, 32]",
    fails="cos and sin are two tables [seq, dim_head/2]; nothing is interleaved",
)
def _() -> Finding:
    cos, sin = _float32_table(10, 64)
    return Finding(
        f"{list(cos.shape)} and {list(sin.shape)}",
        stated=cos.shape == (10, 64),
        amended=cos.shape == sin.shape == (10, 32),
    )


@chapter.claim(
    "code.positions-comment",
    "The positions have shape [seq_len, 1].",
    KOREAN,
    method="the shape of a range of positions, and of its outer product with the frequencies",
    expected="[seq_len]",
    fails="[seq_len]; its outer product with the frequencies is [seq_len, d/2]",
)
def _() -> Finding:
    ids, table = torch.arange(10), _float32_table(10, 64)[0]
    return Finding(
        f"{list(ids.shape)}, product {list(table.shape)}",
        stated=ids.shape == (10, 1),
        amended=ids.shape == (10,) and table.shape == (10, 32),
    )


@chapter.claim(
    "code.halves-comment",
    "x is split into its two halves.",
    KOREAN,
    method="rotated even and odd features, against rotations with both pairings",
    expected="equal to pairs (2i, 2i+1), not to pairs (i, i+d/2)",
    fails="x is split into even and odd features",
)
def _() -> Finding:
    x, ids = normal(5, 8), torch.arange(5)
    angles = torch.outer(ids.double(), theta(8))
    y = _even_and_odd(x, angles.cos(), angles.sin())
    half, neighbours = (largest(y - rotate(x, ids, theta(8), pairing=p)) for p in ("half", "interleaved"))
    return Finding(
        f"error {half:.3g} against halves, {neighbours:.1e} against neighbours",
        stated=half < EXACT,
        amended=neighbours < EXACT,
    )


@chapter.claim(
    "code.dtype",
    "Applying the rotation returns x, rotated.",
    f"{KOREAN}, {CHINESE_1}",
    method="dtype of the result for bfloat16 and float32 x with float32 tables, as described, and with apply_rope",
    expected="float32 for both as described; the dtype of x with apply_rope",
    only_if="x is float32; for bfloat16 the result is float32, with twice the memory",
)
def _() -> Finding:
    x = normal(1, 1, 4, 8).bfloat16()
    described = _even_and_odd(x, *_float32_table(4, 8)).dtype
    single = _even_and_odd(x.float(), *_float32_table(4, 8)).dtype
    ours = apply_rope(x, *build_rotary_frequencies(8, 4)).dtype
    return Finding(
        f"{described} as described, {ours} with apply_rope",
        stated=described == x.dtype,
        amended=single == torch.float32 and ours == x.dtype,
    )


@chapter.claim(
    "code.longer-table",
    "max_seq_len is the longest sequence that a table supports.",
    KOREAN,
    method="a table of 8 rows with a sequence of 5, as described, and with apply_rope",
    expected="an error as described; apply_rope uses the first 5 rows",
    only_if="the table is sliced to the sequence first; as described, every shorter sequence raises an error",
)
def _() -> Finding:
    x = normal(1, 1, 5, 8)
    try:
        _even_and_odd(x, *(table[None, None] for table in _float32_table(8, 8)))
        raised = False
    except RuntimeError:
        raised = True
    error = largest(apply_rope(x, *build_rotary_frequencies(8, 8)) - rotate(x, torch.arange(5), theta(8)))
    return Finding(
        f"as described: {'an error' if raised else 'no error'}; apply_rope: off by {error:.1e}",
        stated=not raised,
        amended=error < 1e-6,
    )


@chapter.claim(
    "code.ids",
    "pos_ids [..., seq] select the rows of the table for x [..., seq, d].",
    CHINESE_1,
    method="ids [B, S] and x [B, H, S, D], broadcast as described, with B = H = 3 and with B = 2; x without heads",
    expected="wrong without an error for B = H, an error for B ≠ H",
    only_if="x has exactly one dimension more than the ids; with heads, the batch of the ids is aligned with the heads",
)
def _() -> Finding:
    cos, sin = _float32_table(1000, 8)
    ids = torch.randint(0, 1000, (3, 4), generator=torch.Generator().manual_seed(0))
    x = normal(3, 3, 4, 8)
    y = _even_and_odd(x, cos[ids], sin[ids])
    truth = rotate(x, ids, theta(8))
    wrong = largest(y - truth)
    heads_as_batches = largest(y - rotate(x.transpose(0, 1), ids, theta(8)).transpose(0, 1))
    flat = largest(_even_and_odd(x[:, 0], cos[ids], sin[ids]) - truth[:, 0])
    try:
        _even_and_odd(x[:2], cos[ids[:2]], sin[ids[:2]])
        raised = False
    except RuntimeError:
        raised = True
    return Finding(
        f"off by {wrong:.3g} for B = H; error for B = 2: {raised}; without heads off by {flat:.1e}",
        stated=wrong < 1e-3,
        amended=flat < 1e-3 and heads_as_batches < 1e-3 and raised,
    )


@chapter.claim(
    "code.extra-repr",
    "The module prints its context_length and dim/2.",
    CHINESE_1,
    method="shape[0] and shape[1] of stacked cos and sin, for context 512 and dim 64",
    expected="it prints 2 and 512",
    fails="the stacked table is [2, context_length, dim/2]: shape[1] is the context, shape[2] is dim/2",
)
def _() -> Finding:
    shape = torch.stack(_float32_table(512, 64)).shape
    return Finding(
        f"context_length={shape[0]}, dim/2={shape[1]}",
        stated=(shape[0], shape[1]) == (512, 32),
        amended=(shape[1], shape[2]) == (512, 32),
    )


@chapter.claim(
    "code.buffer",
    "A table in a non-persistent buffer does not change.",
    CHINESE_1,
    method="largest error of cos in such a buffer after the module is moved, and after it is cast to bfloat16",
    expected="0 after a move, 2^-9 after a cast",
    only_if="the model is never cast; .to(bfloat16) rounds buffers, persistent or not",
)
def _() -> Finding:
    module = torch.nn.Module()
    table = _float32_table(512, 64)[0]
    module.register_buffer("table", table.clone(), persistent=False)
    moved = largest(module.to("cpu").get_buffer("table") - table) + len(module.state_dict())
    cast = largest(module.to(torch.bfloat16).get_buffer("table").float() - table)
    return Finding(
        f"error {moved:g} after a move, {cast:.1e} after a cast", stated=cast == 0, amended=moved == 0 and cast < 2**-8
    )


@chapter.claim(
    "code.negative-id",
    "An id outside 0 … context_length − 1 raises an error.",
    CHINESE_1,
    method="rows 512 and −1 of a table of 512 rows",
    expected="an error for 512; the last row, without an error, for −1",
    only_if="the id is too large; −1 returns the row of position 511",
)
def _() -> Finding:
    cos, _ = _float32_table(512, 64)

    def raises(row: int) -> bool:
        try:
            cos[torch.tensor([row])]
        except IndexError:
            return True
        return False

    above, below = raises(512), raises(-1)
    last_row = torch.equal(cos[torch.tensor([-1])], cos[511:])
    return Finding(f"error for 512: {above}, for −1: {below}", stated=above and below, amended=above and last_row)


@chapter.claim(
    "code.float32-angles",
    "The cosine of freqs = positions × frequencies is cos(mθ).",
    f"{KOREAN}, {CHINESE_1}",
    method="largest error of float32 tables, d = 128, in the last 4096 of 4096 and of 131072 positions",
    expected="2e-4 and 8e-3; 3e-8 with float64 angles",
    only_if="positions are small; with float32 angles the error is up to 8e-3 at 131071, with float64 angles 3e-8",
)
def _() -> Finding:
    near, far = (cos_error(rows - 4096, rows, torch.float32) for rows in (4096, 131_072))
    exact = torch.cos(torch.outer(torch.arange(4096).double(), theta(128)))
    ours = largest(build_rotary_frequencies(128, 4096)[0][0, 0].double() - exact)
    return Finding(
        f"{near:.1e} up to 4096, {far:.1e} up to 131072; float64 angles {ours:.1e}",
        stated=far < 1e-6,
        amended=near < 5e-4 and far > 1e-3 and ours <= 2**-24,
    )


@chapter.claim(
    "code.base-frequency",
    "base is the base frequency, usually 10000.",
    KOREAN,
    method="highest and lowest frequency for base 10000, d = 64, in radians per position",
    expected="1 and 1.3e-4: no frequency is 10000",
    fails="the frequencies are powers of the base; the highest frequency is 1 for every base",
)
def _() -> Finding:
    frequencies, other = theta(64), theta(64, 500_000.0)
    return Finding(
        f"{frequencies[0]:g} and {frequencies[-1]:.1e}",
        stated=bool((frequencies == 10_000).any()),
        amended=float(frequencies[0]) == float(other[0]) == 1.0 and float(frequencies[-1]) < 1.4e-4,
    )
