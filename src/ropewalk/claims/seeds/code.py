"""The code of two notes, run as printed, and what the notes state about it."""

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.notes_code import functions_of_note_003, module_of_note_002
from ropewalk.claims.samples import EXACT, cos_error, largest, normal, theta
from ropewalk.claims.sources import NOTE_002, NOTE_003
from ropewalk.errors import RopewalkError
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.reference import apply_rope, build_rotary_frequencies, rotate

__all__ = ["chapter"]

chapter: Chapter = Chapter("Code: tables, shapes and precision")


def _rotated_by_003(x: Tensor, rows: int | None = None) -> Tensor:
    """x [batch, heads, seq, dim] rotated by the code of note 003, with tables of `rows` rows."""
    build, apply = functions_of_note_003()
    return apply(x, *build(x.shape[-1], x.shape[-2] if rows is None else rows))


def _passed_to_einsum(dim: int, rows: int) -> tuple[Tensor, ...]:
    """The tensors that the code of note 003 passes to torch.einsum while it makes tables."""
    build, passed = functions_of_note_003()[0], []

    class Observed:
        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

        def einsum(self, equation: str, *operands: Tensor) -> Tensor:
            passed.extend(operands)
            return torch.einsum(equation, *operands)

    # The same code, with another object under the name torch.
    code = FunctionType(build.__code__, {**build.__globals__, "torch": Observed()}, "observed", build.__defaults__)
    code(dim, rows)
    return tuple(passed)


def _raises(kind: type[Exception], work: Callable[[], object]) -> bool:
    """Whether `work` raises an error of this kind, or one that it caused: einx raises its own from that of torch."""
    try:
        work()
    except Exception as error:
        if isinstance(error, kind) or isinstance(error.__cause__, kind):
            return True
        raise
    return False


@chapter.claim(
    "code.module",
    "The module rotates pairs of x by the angles of pos_ids.",
    NOTE_002.at(382, "# 2D rotation matrix applied to pairs in x"),
    method="the module as printed, context 512, dim 64, at all 512 positions: against rw.RotaryEmbedding, and both "
    "against the rotation in float64, relative to the largest x",
    expected="equal up to its float32 angles: 1e-5, where ours is 1e-7",
)
def _() -> Finding:
    x, ids = normal(512, 64), torch.arange(512)
    truth = rotate(x, ids, theta(64))
    theirs = module_of_note_002(512, 64)(x.float(), ids).double()
    single = x.float()[None, None]
    ours = RotaryEmbedding(64)(single, single)[0][0, 0].double()
    scale = largest(x)
    error, between, own = (largest(a - b) / scale for a, b in ((theirs, truth), (theirs, ours), (ours, truth)))
    return Finding(
        f"{between:.1e} from ours; error {error:.1e}, ours {own:.1e}",
        stated=error < 1e-4 and own < 2e-7 and between > 5e-6,
    )


@chapter.claim(
    "code.tables",
    "cos and sin are tables [1, 1, seq, d/2] of the angles m·base^(−2i/d).",
    NOTE_003.at(106, r"cos, sin: \[1, 1, S, D/2\] 형태의 회전 주파수 텐서."),
    method="build_rotary_frequencies(64, 100), as printed and ours: shape, and error against float64",
    expected="[1, 1, 100, 32]; 5e-6 as printed, from float32 angles; ours within 2^-24",
)
def _() -> Finding:
    angles = torch.outer(torch.arange(100).double(), theta(64))

    def error(cos: Tensor, sin: Tensor) -> float:
        return max(largest(cos[0, 0] - angles.cos()), largest(sin[0, 0] - angles.sin()))

    printed, ours = functions_of_note_003()[0](64, 100), build_rotary_frequencies(64, 100)
    shapes = {tuple(table.shape) for table in (*printed, *ours)}
    return Finding(
        f"{', '.join(str(list(shape)) for shape in shapes)}; error {error(*printed):.1e}, ours {error(*ours):.1e}",
        stated=shapes == {(1, 1, 100, 32)} and error(*printed) < 1e-5 and error(*ours) <= 2**-24,
    )


@chapter.claim(
    "code.apply",
    "x'_{2i} = x_{2i} cos − x_{2i+1} sin, x'_{2i+1} = x_{2i} sin + x_{2i+1} cos is the matrix R(m, θ) times x.",
    NOTE_003.at(102, "이 함수는 입력 임베딩에 RoPE를 적용하여 위치 정보를 반영한 새로운 임베딩을 생성합니다."),
    method="apply_rope, as printed and ours, against the rotation from positions, float64 x [2, 3, 50, 64]",
    expected="equal, up to the rounding of the float32 tables",
)
def _() -> Finding:
    x = normal(2, 3, 50, 64)
    truth = rotate(x, torch.arange(50), theta(64))
    printed = largest(_rotated_by_003(x) - truth)
    ours = largest(apply_rope(x, *build_rotary_frequencies(64, 50)) - truth)
    return Finding(f"error {printed:.1e}, ours {ours:.1e}", stated=printed < 1e-4 and ours < 1e-6)


@chapter.claim(
    "code.subscript",
    "The second feature of a pair is x_{xi+1}.",
    NOTE_003.at(124, r"\begin{bmatrix} x'_{2i} \\ x'_{xi+1} \end{bmatrix}"),
    method="the note's own code, which uses 2i and 2i+1, against the block matrix, float64 tables",
    expected="equal: the pair of x_{2i} is x_{2i+1}; 'xi+1' is not an index",
    misprint="x_{2i+1}, as in the sentence above the formula",
)
def _() -> Finding:
    x, ids = normal(1, 1, 5, 8), torch.arange(5)
    angles = torch.outer(ids.double(), theta(8))
    error = largest(functions_of_note_003()[1](x, angles.cos(), angles.sin()) - rotate(x, ids, theta(8)))
    return Finding(f"error {error:.1e} with 2i+1", stated=error > EXACT, amended=error < EXACT)


@chapter.claim(
    "code.interleave-comment",
    "The tables have shape [seq, dim_head], first cosines, then sines.",
    NOTE_003.at(44, "# interleave to shape [seq, dim_head] as [cos(x0), cos(x1), ..., sin(x0), sin(x1), ...]"),
    method="the shapes of the tables that the code below the comment returns for dim_head = 64 and 10 positions",
    expected="two tables [1, 1, 10, 32]",
    fails="two tables [seq, d/2], not one [seq, d]",
)
def _() -> Finding:
    cos, sin = functions_of_note_003()[0](64, 10)
    return Finding(
        f"{list(cos.shape)} and {list(sin.shape)}",
        stated=cos.shape[-2:] == (10, 64),
        amended=cos.shape == sin.shape == (1, 1, 10, 32),
    )


@chapter.claim(
    "code.positions-comment",
    "The positions have shape [seq_len, 1].",
    NOTE_003.at(40, "# positions : [seq_len, 1]"),
    method="the shapes of what build_rotary_frequencies, as printed, passes to torch.einsum for 10 positions",
    expected="[10] and [32]",
    fails="[seq_len], not [seq_len, 1]",
)
def _() -> Finding:
    seq, frequencies = (tuple(x.shape) for x in _passed_to_einsum(64, 10))
    return Finding(
        f"{list(seq)} and {list(frequencies)}", stated=seq == (10, 1), amended=seq == (10,) and frequencies == (32,)
    )


@chapter.claim(
    "code.halves-comment",
    "x is split into its two halves.",
    NOTE_003.at(57, "cos/sin: [1,1,S, D/2] (we will split x to half halves)"),
    method="apply_rope as printed, with float64 tables, against rotations with both pairings",
    expected="equal to pairs (2i, 2i+1), not to pairs (i, i+d/2)",
    misprint="two tensors of half the size: even and odd features",
)
def _() -> Finding:
    x, ids = normal(1, 1, 5, 8), torch.arange(5)
    angles = torch.outer(ids.double(), theta(8))
    y = functions_of_note_003()[1](x, angles.cos(), angles.sin())
    half, neighbours = (largest(y - rotate(x, ids, theta(8), pairing=p)) for p in ("half", "interleaved"))
    return Finding(
        f"error {half:.3g} against halves, {neighbours:.1e} against neighbours",
        stated=half < EXACT,
        amended=neighbours < EXACT,
    )


@chapter.claim(
    "code.dtype",
    "Applying the rotation returns x, rotated.",
    NOTE_002.at(391, "return result"),
    NOTE_003.at(58, "Returns rotated x."),
    method="dtype of the result for bfloat16, float32 and float64 x: both codes as printed; for bfloat16 also ours",
    expected="float32, float32 and float64 as printed; bfloat16 with ours",
    only_if="x is float32 or float64; for bfloat16 the result is float32, with twice the memory",
)
def _() -> Finding:
    x, ids = normal(1, 1, 4, 8).bfloat16(), torch.arange(4)
    module = module_of_note_002(4, 8)
    printed = {_rotated_by_003(x).dtype, module(x[0, 0], ids).dtype}
    same = all(_rotated_by_003(y).dtype == module(y[0, 0], ids).dtype == y.dtype for y in (x.float(), x.double()))
    ours = apply_rope(x, *build_rotary_frequencies(8, 4)).dtype
    return Finding(
        f"{', '.join(map(str, printed))} as printed, {ours} with ours",
        stated=printed == {x.dtype},
        amended=printed == {torch.float32} and same and ours == x.dtype,
    )


@chapter.claim(
    "code.longer-table",
    "max_seq_len is the longest sequence that a table supports.",
    NOTE_003.at(76, "최대 시퀀스 길이(`max_seq_len`)"),
    method="a table of 8 rows with sequences of 5 and 8 tokens, as printed, and with ours",
    expected="an error for 5 as printed, none for 8; ours uses the first 5 rows",
    only_if="the table is sliced to the sequence first; as printed, every shorter sequence raises an error",
)
def _() -> Finding:
    x = normal(1, 1, 8, 8)
    shorter, equal = (_raises(RuntimeError, lambda n=n: _rotated_by_003(x[:, :, :n], rows=8)) for n in (5, 8))
    truth = rotate(x[:, :, :5], torch.arange(5), theta(8))
    error = largest(apply_rope(x[:, :, :5], *build_rotary_frequencies(8, 8)) - truth)
    return Finding(
        f"as printed: {'an error' if shorter else 'no error'} for 5, {'an error' if equal else 'none'} for 8; ours: "
        f"off by {error:.1e}",
        stated=not shorter,
        amended=shorter and not equal and error < 1e-6,
    )


@chapter.claim(
    "code.ids",
    "pos_ids [..., seq] select the rows of the table for x [..., seq, d].",
    NOTE_002.at(372, 'def forward(self, x: Float[Tensor, "... seq d"], pos_ids: Int[Tensor, "... seq"]):'),
    method="the module as printed, x [B, H, S, D] with ids [B, S], B = H = 3 and B = 2; with ids [B, 1, S] and [S]; x "
    "[B, S, D] with ids [B, S]",
    expected="wrong without an error for B = H, an error for B ≠ H; right with [B, 1, S], with [S], and without heads",
    only_if="the ids broadcast against x before the last dimension: with heads they are [B, 1, S], not [B, S]",
)
def _() -> Finding:
    module = module_of_note_002(1000, 8)
    ids = torch.randint(0, 1000, (3, 4), generator=torch.Generator().manual_seed(0))
    x = normal(3, 3, 4, 8)
    y, truth = module(x, ids), rotate(x, ids, theta(8))
    wrong = largest(y - truth)
    heads_as_batches = largest(y - rotate(x.transpose(0, 1), ids, theta(8)).transpose(0, 1))
    flat = largest(module(x[:, 0], ids) - truth[:, 0])
    with_heads = largest(module(x, ids[:, None]) - truth)
    shared = largest(module(x, ids[0]) - rotate(x, ids[0], theta(8)))
    raised = _raises(RuntimeError, lambda: module(x[:2], ids[:2]))
    return Finding(
        f"off by {wrong:.3g} for B = H, {'an error' if raised else 'no error'} for B = 2; [B, 1, S] {with_heads:.1e}, "
        f"[S] {shared:.1e}, without heads {flat:.1e}",
        stated=wrong < 1e-3,
        amended=max(flat, with_heads, shared, heads_as_batches) < 1e-3 and raised,
    )


@chapter.claim(
    "code.extra-repr",
    "The module prints its context_length and dim/2.",
    NOTE_002.at(
        394, 'return f"context_length={self._freq_cis_cache.shape[0]}, dim/2= {self._freq_cis_cache.shape[1]}"'
    ),
    method="repr of the module as printed, context 512 and dim 64; the shape of its table",
    expected="context_length=2, dim/2= 512; the table is [2, 512, 32]",
    fails="it prints 2 and 512, not 512 and 32",
)
def _() -> Finding:
    module = module_of_note_002(512, 64)
    shown, shape = module.extra_repr(), tuple(module.get_buffer("_freq_cis_cache").shape)
    return Finding(
        f"{shown}; table {list(shape)}",
        stated=shown == "context_length=512, dim/2= 32",
        amended=shown == "context_length=2, dim/2= 512" and shape == (2, 512, 32),
    )


@chapter.claim(
    "code.buffer",
    "The table is kept in a non-persistent buffer, which follows the module.",
    NOTE_002.at(355, "RotaryEmbedding._init_cache(context_length, dim, theta), persistent=False"),
    method="largest change of the table of the module as printed after it is moved, and after it is cast to bfloat16; "
    "the change of the frequencies of rw.RotaryEmbedding after the same cast",
    expected="0 after a move, 2^-9 after a cast; 0 with ours",
    only_if="the model is never cast; .to(bfloat16) rounds buffers, persistent or not",
)
def _() -> Finding:
    module = module_of_note_002(512, 64)
    table = module.get_buffer("_freq_cis_cache").clone()
    moved = largest(module.to("cpu").get_buffer("_freq_cis_cache") - table) + len(module.state_dict())
    cast = largest(module.to(torch.bfloat16).get_buffer("_freq_cis_cache").float() - table)
    x = normal(1, 1, 512, 64).float()
    rope = RotaryEmbedding(64)
    before = rope(x, x)[0]
    ours = largest(rope.to(torch.bfloat16)(x, x)[0] - before)
    return Finding(
        f"change {moved:g} after a move, {cast:.1e} after a cast; ours {ours:g}",
        stated=cast == 0,
        amended=moved == ours == 0 and 0 < cast < 2**-8,
    )


@chapter.claim(
    "code.negative-id",
    "pos_ids select the rows of their positions.",
    NOTE_002.at(379, "cos, sin = einx.get_at('cos_sin [pos] half_dim, ... -> cos_sin ... half_dim',"),
    method="the module as printed with ids −1 and 512, context 512: its result against a rotation with the table's row "
    "511, and with the cosines and sines of that row swapped; the same ids in rw.RotaryEmbedding with context 512",
    expected="512 raises an error, in ours too; −1 rotates by row 511 with cos and sin swapped; ours by −θ",
    only_if="ids are 0 … context_length − 1; −1 is no error, and rotates by row 511 with cos and sin swapped",
)
def _() -> Finding:
    module, x = module_of_note_002(512, 64), normal(1, 64).float()
    above = _raises(IndexError, lambda: module(x, torch.tensor([512])))
    y = module(x, torch.tensor([-1]))
    cos, sin = module.get_buffer("_freq_cis_cache")[:, 511]
    apply = functions_of_note_003()[1]
    swapped, row_511 = (largest(apply(x[None, None], a, b)[0, 0] - y) for a, b in ((sin, cos), (cos, sin)))
    inside = largest(module(x, torch.tensor([511])) - apply(x[None, None], cos, sin)[0, 0])
    rope = RotaryEmbedding(64, context_length=512, check_ids=True)

    def ours(position: int) -> Tensor:
        return rope(x[None, None], x[None, None], positions=torch.tensor([position]))[0][0, 0]

    exact = largest(ours(-1) - rotate(x.double(), torch.tensor([-1]), theta(64)))
    rejected = _raises(RopewalkError, lambda: ours(512))
    return Finding(
        f"512: {'an error' if above and rejected else 'no error'}, in ours too; −1: off by {swapped:.1e} from row 511 "
        f"with cos and sin swapped, by {row_511:.2g} from row 511; ours off by {exact:.1e} from R_(−1)",
        stated=not (above and swapped < 1e-6),
        amended=above and swapped < 1e-6 < 0.1 < row_511 and inside < 1e-6 and rejected and exact < 1e-6,
    )


@chapter.claim(
    "code.float32-angles",
    "The cosine of freqs = positions × frequencies is cos(mθ).",
    NOTE_002.at(367, 'freqs = einsum(t, freqs, "t, f -> t f")'),
    NOTE_003.at(42, 'freqs = torch.einsum("s,d -> sd", seq, theta)'),
    method="largest error of the tables of both codes as printed, d = 128, 4096 positions; of float32 angles in the "
    "last 4096 of 131072 positions; of our tables",
    expected="2e-4 as printed, 8e-3 at 131071; 3e-8 with float64 angles",
    only_if="positions are small; with float32 angles the error is up to 8e-3 at 131071, with float64 angles 3e-8",
)
def _() -> Finding:
    exact = torch.cos(torch.outer(torch.arange(4096).double(), theta(128)))
    module, build = module_of_note_002(4096, 128), functions_of_note_003()[0]
    tables = (
        module.get_buffer("_freq_cis_cache")[0],
        build(128, 4096)[0][0, 0],
        build_rotary_frequencies(128, 4096)[0][0, 0],
    )
    module_error, function_error, ours = (largest(table.double() - exact) for table in tables)
    far = cos_error(131_072 - 4096, 131_072, torch.float32)
    return Finding(
        f"note 002 {module_error:.1e}, note 003 {function_error:.1e} up to 4096; {far:.1e} up to 131072; ours "
        f"{ours:.1e}",
        stated=max(module_error, function_error, far) < 1e-6,
        amended=min(module_error, function_error) > 1e-5
        and max(module_error, function_error) < 5e-4
        and far > 1e-3
        and ours <= 2**-24,
    )


@chapter.claim(
    "code.base-frequency",
    "base is the base frequency, usually 10000.",
    NOTE_003.at(85, "base : 기본 주파수 (보통 10000)"),
    method="highest and lowest frequency for base 10000, d = 64, in radians per position",
    expected="1 and 1.3e-4: no frequency is 10000",
    misprint="the base of the powers that the frequencies are; the highest frequency is 1 for every base",
)
def _() -> Finding:
    frequencies, other = theta(64), theta(64, 500_000.0)
    return Finding(
        f"{frequencies[0]:g} and {frequencies[-1]:.1e}",
        stated=bool((frequencies == 10_000).any()),
        amended=float(frequencies[0]) == float(other[0]) == 1.0 and float(frequencies[-1]) < 1.4e-4,
    )
