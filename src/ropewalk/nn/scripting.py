"""The error that torch.jit.script raises for a model that contains a module of ropewalk."""

from typing import NoReturn

from torch import nn

from ropewalk.errors import RopewalkError

__all__ = ["refuse_scripting"]


def refuse_scripting(module: nn.Module) -> NoReturn:
    """Raise an error. Classes assign this function to `__prepare_scriptable__`, which torch.jit.script calls first.

    Args:
        module: The module that is being scripted.

    Raises:
        RopewalkError: Always.

    >>> try:
    ...     refuse_scripting(nn.Identity())
    ... except RopewalkError as error:
    ...     print(str(error).splitlines()[0])
    asked:    torch.jit.script of a model with a module of type Identity
    """
    raise RopewalkError(
        asked=f"torch.jit.script of a model with a module of type {type(module).__name__}",
        expected="torch.compile, torch.export.export or torch.jit.trace",
        got="torch.jit.script, which is deprecated and does not support keyword-only arguments with defaults",
        do="for speed use torch.compile(model); to save a program use torch.export.export(model, args); "
        "to keep TorchScript use torch.jit.trace(model, args)",
    )
