"""What torch.jit.script is told by the modules of ropewalk, wherever they are in a model."""

from typing import NoReturn

from torch import nn

from ropewalk.errors import RopewalkError

__all__ = ["refuse_scripting"]


def refuse_scripting(module: nn.Module) -> NoReturn:
    """Raise; to be the `__prepare_scriptable__` of a class, which torch.jit.script calls before it reads any source.

    >>> try:
    ...     refuse_scripting(nn.Identity())
    ... except RopewalkError as error:
    ...     print(str(error).splitlines()[0])
    asked:    torch.jit.script of a model with a module of type Identity
    """
    raise RopewalkError(
        asked=f"torch.jit.script of a model with a module of type {type(module).__name__}",
        expected="torch.compile, torch.export.export or torch.jit.trace",
        got="torch.jit.script, which supports no keyword-only arguments with defaults, and which torch deprecates",
        do="to run faster, torch.compile(model); to store a program, torch.export.export(model, args); "
        "to stay with TorchScript, torch.jit.trace(model, args)",
    )
