"""Every function of every backend with a mistake in it: the parity suite that the backend passes must reject it."""

from dataclasses import replace

import pytest
import torch

from kernels.backend_parity import CHECKS
from kernels.present import PRESENT, automatic
from ropewalk.kernels.backend import Operation, register, registered
from ropewalk.reference.budget import BudgetError
from slow import slow

FUNCTIONS = ("run", "backward", "shortcut", "table_gradient")
ALL = [
    (name, operation, function)
    for name in PRESENT
    for operation in registered(name).operations
    for function in FUNCTIONS
    if getattr(registered(name).operations[operation], function) is not None
    and (function != "shortcut" or automatic(name))
]


def off_by_a_hundredth(result):
    """What a function returns, with its first tensor scaled; also what a shortcut returns."""
    if isinstance(result, torch.Tensor):
        return 1.01 * result
    if isinstance(result, tuple | list):
        changed = [off_by_a_hundredth(result[0]), *result[1:]]
        return tuple(changed) if isinstance(result, tuple) else changed
    return WrongShortcut(result) if callable(result) else result


class WrongShortcut:
    """A shortcut whose first tensor is scaled."""

    def __init__(self, right):
        self.right, self.remember = right, right.remember

    def __call__(self, *arguments, **options):
        return off_by_a_hundredth(self.right(*arguments, **options))


def tampered(operation: Operation, function: str) -> Operation:
    right = getattr(operation, function)
    return replace(operation, **{function: lambda *call, **options: off_by_a_hundredth(right(*call, **options))})


@pytest.mark.parametrize(
    ("name", "operation", "function"),
    [slow(*case) if case == ("triton", "linear_attention", "backward") else case for case in ALL],
)
def test_the_parity_suite_rejects_a_wrong_function(name, operation, function):
    backend = registered(name)
    wrong = tampered(backend.operations[operation], function)
    undo = register(replace(backend, operations={**backend.operations, operation: wrong}))
    try:
        with pytest.raises(BudgetError):
            CHECKS[operation](name)
    finally:
        undo()


def test_every_operation_of_every_backend_is_tampered_with():
    assert {(name, operation) for name, operation, function in ALL if function == "run"} == {
        (name, operation) for name in PRESENT for operation in registered(name).operations
    }
