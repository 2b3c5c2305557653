"""Wrong rotations: the parity check that fast paths must pass has to reject each of them.

If a mutant passes, the check is too weak.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ropewalk.reference import check_rotation, rotate
from ropewalk.reference.budget import BudgetError
from slow import slow_except

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
Mutant = Callable[..., Tensor]
MUTANTS: dict[str, Mutant] = {}


def mutant(function: Mutant) -> Mutant:
    MUTANTS[function.__name__] = function
    return function


def from_tables(x, positions, inv_freq, *, pairing, conjugate, amplitude, rotary_slice, angles_in, tables_in, work_in):
    """A correct fast path, except for the dtypes of its angles, its tables and its arithmetic."""
    ids = positions.view(positions.shape[0], *[1] * (x.dim() - 3), -1) if positions.dim() == 2 else positions
    inv_freq = inv_freq.unsqueeze(-2) if inv_freq.dim() == 2 else inv_freq
    angles = ids.to(angles_in).unsqueeze(-1) * inv_freq.to(angles_in)
    angles = -angles if conjugate else angles
    cos, sin = ((amplitude * f(angles)).to(tables_in).to(work_in) for f in (torch.cos, torch.sin))
    dim = 2 * angles.shape[-1]
    cut = 0 if rotary_slice == "leading" else x.shape[-1] - dim
    rotated, y = x[..., cut : cut + dim].to(work_in), x.clone()
    if pairing == "interleaved":
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        y[..., cut : cut + dim] = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
    else:
        a, b = rotated.chunk(2, dim=-1)
        y[..., cut : cut + dim] = torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)
    return y


def honest(x, positions, inv_freq, **options):
    """float64 angles, float32 tables and arithmetic, one rounding; float64 throughout for float64 input."""
    working = torch.float64 if x.dtype == torch.float64 else torch.float32
    return from_tables(x, positions, inv_freq, **options, angles_in=torch.float64, tables_in=working, work_in=working)


@mutant
def rotates_the_other_way(x, positions, inv_freq, **options):
    return honest(x, positions, -inv_freq, **options)


@mutant
def swaps_the_members_of_each_pair(x, positions, inv_freq, **options):
    if 2 * inv_freq.shape[-1] < x.shape[-1]:
        return honest(x, positions, inv_freq, **options)
    swap = [i ^ 1 for i in range(x.shape[-1])]
    if options["pairing"] == "half":
        swap = [(i + x.shape[-1] // 2) % x.shape[-1] for i in range(x.shape[-1])]
    return honest(x[..., swap], positions, inv_freq, **options)[..., swap]


@mutant
def takes_the_other_pairing(x, positions, inv_freq, **options):
    other = {"interleaved": "half", "half": "interleaved"}[options["pairing"]]
    return honest(x, positions, inv_freq, **options | {"pairing": other})


@mutant
def counts_positions_from_one(x, positions, inv_freq, **options):
    return honest(x, positions + 1, inv_freq, **options)


@mutant
def has_the_base_off_by_a_thousandth(x, positions, inv_freq, **options):
    share = torch.arange(inv_freq.shape[-1], dtype=torch.float64) / inv_freq.shape[-1]
    return honest(x, positions, inv_freq * 1.001**-share, **options)


@mutant
def divides_the_exponent_by_twice_the_width(x, positions, inv_freq, **options):
    return honest(x, positions, inv_freq**0.5, **options)


@mutant
def counts_frequencies_from_one(x, positions, inv_freq, **options):
    return honest(x, positions, inv_freq * 10_000.0 ** (-1 / inv_freq.shape[-1]), **options)


@mutant
def rounds_the_tables_to_bfloat16(x, positions, inv_freq, **options):
    return from_tables(
        x, positions, inv_freq, **options, angles_in=torch.float64, tables_in=torch.bfloat16, work_in=torch.float32
    )


@mutant
def rounds_the_tables_to_float16(x, positions, inv_freq, **options):
    return from_tables(
        x, positions, inv_freq, **options, angles_in=torch.float64, tables_in=torch.float16, work_in=torch.float32
    )


@mutant
def forms_far_angles_in_float32(x, positions, inv_freq, **options):
    far = bool(positions.numel()) and positions.abs().max() >= 131_072
    working = torch.float64 if x.dtype == torch.float64 else torch.float32
    angles = torch.float32 if far else torch.float64
    return from_tables(x, positions, inv_freq, **options, angles_in=angles, tables_in=working, work_in=working)


@mutant
def rounds_after_every_product(x, positions, inv_freq, **options):
    return from_tables(
        x, positions, inv_freq, **options, angles_in=torch.float64, tables_in=torch.float64, work_in=torch.bfloat16
    )


@mutant
def works_in_float32_for_float64_input(x, positions, inv_freq, **options):
    return from_tables(
        x, positions, inv_freq, **options, angles_in=torch.float64, tables_in=torch.float32, work_in=torch.float32
    )


@mutant
def ignores_conjugate(x, positions, inv_freq, **options):
    return honest(x, positions, inv_freq, **options | {"conjugate": False})


@mutant
def ignores_amplitude(x, positions, inv_freq, **options):
    return honest(x, positions, inv_freq, **options | {"amplitude": 1.0})


@mutant
def ignores_the_slice(x, positions, inv_freq, **options):
    return honest(x, positions, inv_freq, **options | {"rotary_slice": "leading"})


@mutant
def drops_the_features_that_are_not_rotated(x, positions, inv_freq, **options):
    y = honest(x, positions, inv_freq, **options)
    dim = 2 * inv_freq.shape[-1]
    rest = slice(dim, None) if options["rotary_slice"] == "leading" else slice(0, x.shape[-1] - dim)
    mask = torch.ones(x.shape[-1], dtype=x.dtype)
    mask[rest] = 0
    return y * mask


@mutant
def skips_the_last_row(x, positions, inv_freq, **options):
    y = honest(x, positions, inv_freq, **options)
    return torch.cat((y[..., :-1, :], x[..., -1:, :]), dim=-2)


@mutant
def takes_the_first_row_of_ids_for_all_batches(x, positions, inv_freq, **options):
    return honest(x, positions[0] if positions.dim() == 2 else positions, inv_freq, **options)


@mutant
def lines_ids_up_with_the_heads(x, positions, inv_freq, **options):
    if positions.dim() == 2 and x.dim() == 4 and positions.shape[0] == x.shape[1]:
        return honest(x.transpose(0, 1), positions, inv_freq, **options).transpose(0, 1)
    return honest(x, positions, inv_freq, **options)


@mutant
def takes_the_frequencies_of_the_first_head(x, positions, inv_freq, **options):
    return honest(x, positions, inv_freq[0] if inv_freq.dim() == 2 else inv_freq, **options)


@mutant
def clamps_positions_to_its_table(x, positions, inv_freq, **options):
    return honest(x, positions.clamp(max=4095), inv_freq, **options)


@mutant
def wraps_negative_positions(x, positions, inv_freq, **options):
    return honest(x, positions % 8192, inv_freq, **options)


@mutant
def truncates_positions_to_whole_numbers(x, positions, inv_freq, **options):
    return honest(x, positions.long(), inv_freq, **options)


@mutant
def returns_float32(x, positions, inv_freq, **options):
    return honest(x, positions, inv_freq, **options).float()


@mutant
def writes_into_its_input(x, positions, inv_freq, **options):
    y = honest(x, positions, inv_freq, **options)
    x.detach().copy_(y.detach())
    return y


@mutant
def leaves_a_nan_where_no_one_looks(x, positions, inv_freq, **options):
    y = honest(x, positions, inv_freq, **options)
    return torch.where(torch.arange(y.shape[-1]) == y.shape[-1] - 1, torch.nan, y) if y.shape[-2] == 1000 else y


class _ForwardOnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rotation):
        ctx.rotation = rotation
        return rotation(x)

    @staticmethod
    def backward(ctx, *cotangents):
        return ctx.rotation(cotangents[0]), None


@mutant
def forgets_the_conjugate_in_its_backward(x, positions, inv_freq, **options):
    def rotation(value: Tensor) -> Tensor:
        return honest(value, positions, inv_freq, **options)

    return _ForwardOnBackward.apply(x, rotation)  # pyright: ignore[reportReturnType]


class _ForgetsAmplitude(_ForwardOnBackward):
    @staticmethod
    def backward(ctx, *cotangents):
        return ctx.rotation(cotangents[0], backward=True), None


@mutant
def forgets_the_amplitude_in_its_backward(x, positions, inv_freq, **options):
    def rotation(value: Tensor, backward: bool = False) -> Tensor:
        rotated_back = {"conjugate": not options["conjugate"], "amplitude": 1.0}
        return honest(value, positions, inv_freq, **options | (rotated_back if backward else {}))

    return _ForgetsAmplitude.apply(x, rotation)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name):
    with pytest.raises(BudgetError):
        check_rotation(MUTANTS[name], DTYPES)


@pytest.mark.parametrize("seed", slow_except([0], range(3)))
def test_the_honest_path_is_not(seed):
    # It differs from the mutants only in that it is correct: the check must not reject everything.
    assert check_rotation(honest, DTYPES, seed) <= 1


@pytest.mark.slow
def test_the_reference_passes_its_own_check():
    assert check_rotation(rotate) <= 1


def test_there_are_enough():
    assert len(MUTANTS) >= 12
