"""The checks that every registered backend must pass: each operation and its gradients against float64.

Backends are known by name only, so the checks also apply to backends that a test registers.
"""

import torch

from kernels.present import automatic, candidate, home
from nn.linear_cases import drawn, exact, formula
from nn.module import by_module
from ropewalk import RopeSpec, RotaryEmbedding, ops, qk_norm_rope, reference
from ropewalk.kernels.angles.torch import radix_table
from ropewalk.kernels.backend import OPERATIONS, registered
from ropewalk.kernels.types import Layout, Norm, Side
from ropewalk.nn.rotary.call import Placement
from ropewalk.reference.budget import BudgetError
from ropewalk.spec.rope import PAIRINGS, Pairing
from strategies import theta, vector

# The cases of `rotation_cases` that catch a wrong rotation, and are quick in Triton's interpreter.
KINDS = (
    "dim 2,",
    "dim 60",
    "dim 96",
    "24 of 64, conjugate True",
    "per head, conjugate False",
    "every other",
    "odd offset",
    "five",
    "no token",
    "65 tokens",
    "as many heads",
    "transposed",
)


def few(case) -> bool:
    return any(kind in f"{case.name}," for kind in KINDS) and "1.277" not in case.name


def check_cos_sin(name: str) -> None:
    """cos and sin within 2^-24 of the truth, at whole, far, negative and fractional positions; also per head."""
    device, one = home(name), torch.ones((), dtype=torch.float64)
    sets = [torch.arange(9), torch.tensor([[0, 5, 1 << 20], [-7, 3, (1 << 24) - 1]]), torch.tensor([0.25, -3.5])]
    for ids in sets:
        for inv_freq in (theta(16), torch.stack((theta(16), theta(16, 100.0)))):
            table = None if ids.is_floating_point() else radix_table(inv_freq)
            call = [x if x is None else x.to(device) for x in (ids, inv_freq, table, one)]
            cos, sin = ops.cos_sin(*call, torch.float32, backend=name)
            spread = ids.double().unsqueeze(-1)
            if inv_freq.dim() == 2:
                spread = spread.unsqueeze(-3) if spread.dim() == 3 else spread[None, None]
            angles = spread * (inv_freq if inv_freq.dim() == 1 else inv_freq.unsqueeze(-2))
            for table, truth in ((cos, angles.cos()), (sin, angles.sin())):
                if table.shape != truth.shape or float((table.cpu().double() - truth).abs().max()) > 2.0**-24:
                    raise BudgetError(f"cos_sin of {name} at {ids.tolist()}")


def check_rotate(name: str) -> None:
    """The rotation from positions on, forward and backward; of a range, without gradients; the gradients of tables."""
    operation = registered(name).operations["rotate"]
    for pairing in PAIRINGS:
        rope, x = RotaryEmbedding(16, pairing=pairing, backend=name).to(home(name)), vector(0, 2, 3, 5, 16).float()
        truth = reference.rotate(x.double(), torch.arange(7, 12), theta(16), pairing=pairing)
        moved = x.to(home(name))
        rotated = list(rope(moved, moved, offset=7))
        if operation.shortcut is not None and automatic(name):
            # The first call has created the shortcut. It computes all of these.
            ids = torch.arange(7, 12, device=home(name))
            calls = ({"offset": 7}, {"positions": ids}, {"angles": rope.at(ids)})
            for options in calls:
                shortcut = rope._source.shortcut
                results = None if shortcut is None else shortcut(moved, moved, **options)
                if results is None:
                    raise BudgetError(f"the shortcut of {name} does not support {list(options)}")
                rotated += results
        for y in rotated:
            reference.assert_within_budget(y.cpu(), truth, rotary_dim=16, pairing=pairing, farthest=12.0)
        if operation.table_gradient is not None:
            _check_table_gradient(name, pairing)
    reference.check_rotation(candidate(by_module, name), [torch.float32], where=few)
    reference.check_rotation(candidate(by_module, name), [torch.bfloat16], where=lambda case: "dim 60" in case.name)


def _check_table_gradient(name: str, pairing: Pairing) -> None:
    x, cotangent = vector(0, 2, 3, 5, 16).float(), vector(1, 2, 3, 5, 16).float()
    tables = [vector(seed, 5, 8).float() for seed in (2, 3)]
    leaves = [table.to(home(name)).requires_grad_() for table in tables]
    layout = Layout(pairing == "interleaved", 0, -2)
    (y,) = ops.rotate(x.to(home(name)), None, *leaves, layout, backend=name)
    mine = torch.autograd.grad(y, leaves, cotangent.to(home(name)))
    wide = [table.double().requires_grad_() for table in tables]
    rotated = reference.apply_rope(x.double(), *(table[None, None] for table in wide), pairing=pairing)
    true = torch.autograd.grad(rotated, wide, cotangent.double())
    for value, truth in zip(mine, true, strict=True):
        # Sums over two products for each of 6 heads, of numbers near 1, in float32.
        if float((value.cpu().double() - truth).abs().max()) > 2.0**-18 * float(truth.abs().max()):
            raise BudgetError(f"gradients of cos and sin of {name}, {pairing}")


def check_norm_rotate(name: str) -> None:
    """RMSNorm and rotation, forward and backward, against the formula in float64."""
    operation = registered(name).operations["norm_rotate"]
    for pairing in PAIRINGS:
        for dtype, plus_one in ((torch.float32, False), (torch.bfloat16, True)):
            spec = RopeSpec(24, rotary_dim=16, pairing=pairing, rotary_slice="trailing")
            rope = RotaryEmbedding(spec, backend=name).to(home(name))
            inputs = [vector(i, 2, heads, 5, 24).to(dtype) for i, heads in enumerate((3, 2))]
            inputs += [vector(i, 24).to(dtype) for i in (2, 3)]
            cotangents = [vector(9, *x.shape).to(dtype) for x in inputs[:2]]
            leaves = [x.to(home(name)).requires_grad_() for x in inputs]
            wide = [x.double().requires_grad_() for x in inputs]
            options = {"eps": 1e-5, "plus_one": plus_one}
            results = qk_norm_rope(*leaves[:2], rope, q_weight=leaves[2], k_weight=leaves[3], **options, offset=7)
            ids, inv_freq = torch.arange(7, 12), theta(16)
            placed = {"pairing": pairing, "rotary_slice": "trailing"}
            truths = [
                reference.qk_norm_rotate(x, w, ids, inv_freq, **options, **placed)
                for x, w in zip(wide[:2], wide[2:], strict=True)
            ]
            mine = [*results, *torch.autograd.grad(results, leaves, [g.to(home(name)) for g in cotangents])]
            true = [*truths, *torch.autograd.grad(truths, wide, [g.double() for g in cotangents])]
            # By itself too: `ops` traces the formula where a backend says that its function is the formula.
            with torch.no_grad():
                tables = rope.at(ids.to(home(name)), dtype=torch.float32)
                mine += operation.run(leaves[:2], leaves[2:], *tables, rope.layout, Norm(1e-5, plus_one), 0)
                true += truths
                if operation.shortcut is not None and automatic(name):
                    # The first call has created the shortcut.
                    shortcut = rope.norm_shortcut
                    again = None if shortcut is None else shortcut(*leaves, Norm(1e-5, plus_one), offset=7)
                    if again is None:
                        raise BudgetError(f"the shortcut of {name} does not support an offset")
                    mine += again
                    true += truths
            # Sums over 24 features, or over 30 rows for the weights, of numbers near 1, in float32, rounded once.
            allowed = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-18
            for value, truth in zip(mine, true, strict=True):
                share = (value.detach().cpu().double() - truth.detach()).abs().max() / truth.detach().abs().max()
                if value.dtype != dtype or not float(share) <= allowed:
                    raise BudgetError(f"norm_rotate of {name}, {pairing}, {dtype}: {float(share)}")


def check_linear_attention(name: str) -> None:
    """Linear attention with RoPE, forward and backward, at most twice as far from the sum as the plain formula."""
    run = registered(name).operations["linear_attention"].run
    # Two batches, then two heads that share one: in Triton's interpreter the time grows with their product.
    for pairing, batch, heads in zip(PAIRINGS, (2, 1), (1, 2), strict=True):
        rope = RotaryEmbedding(16, pairing=pairing)
        inputs = drawn(batch, heads, 1, 37, 16, 16, torch.float32, seed=1)
        cotangent = vector(5, batch, heads, 37, 16).float()

        def with_gradients(function, tensors, cotangent=cotangent):
            leaves = [x.detach().requires_grad_() for x in tensors]
            out = function(*leaves)
            return [out, *torch.autograd.grad(out, leaves, cotangent.to(out))]

        def call_of(q, k, v, rope=rope, pairing=pairing):
            on_device = rope.to(q.device)
            sides = [Side(x, "elu", None, on_device.shared_tables(x, None, Placement())) for x in (q, k)]
            return *sides, v, None, Layout(pairing == "interleaved", 0, -2)

        def check(results, plain, true, pairing=pairing):
            for value, other, truth in zip(results, plain, true, strict=True):
                errors = [float((x.detach().cpu().double() - truth.detach()).abs().max()) for x in (value, other)]
                if not errors[0] <= 2 * errors[1] + 1e-6:
                    raise BudgetError(
                        f"linear_attention of {name}, {pairing}: {errors[0]}, where the formula has {errors[1]}"
                    )

        plain = with_gradients(lambda *x, rope=rope: formula(*x, rope), inputs)
        true = with_gradients(lambda *x, rope=rope: exact(*x, rope), [x.double() for x in inputs])
        moved = [x.to(home(name)) for x in inputs]
        # By itself too: `ops` traces the formula where a backend says that its function is the formula.
        check([run(*call_of(*moved), causal=True)[0]], plain[:1], true[:1])

        def by_ops(q, k, v, call_of=call_of):
            return ops.linear_attention(*call_of(q, k, v), causal=True, backend=name)[0]

        check(with_gradients(by_ops, moved), plain, true)


CHECKS = {
    "cos_sin": check_cos_sin,
    "rotate": check_rotate,
    "norm_rotate": check_norm_rotate,
    "linear_attention": check_linear_attention,
}
assert tuple(CHECKS) == OPERATIONS


def check_backend(name: str) -> list[str]:
    """Check every operation of a backend against its reference. Returns their names; raises BudgetError."""
    names = [operation for operation in OPERATIONS if operation in registered(name).operations]
    for operation in names:
        CHECKS[operation](name)
    return names
