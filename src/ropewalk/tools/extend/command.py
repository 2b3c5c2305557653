"""`ropewalk extend`: every rule that extends a model's context, side by side; one of them as a config."""

import os
from pathlib import Path

from rich.console import Console

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.hub.extend.extension import check_request, extension_of
from ropewalk.hub.extend.rules import RULE_NAMES, RuleName
from ropewalk.hub.extend.stacks import STACKS, Stack
from ropewalk.tools.command_config import CommandLine, read_named_config
from ropewalk.tools.extend.sheet import one_rule, side_by_side
from ropewalk.tools.output import require_writable_file, trimmed, write_json

__all__ = ["extend"]


def extend(
    config: str,
    to: int,
    *,
    rule: str | None = None,
    write: str | None = None,
    force: bool = False,
    stack: str | None = None,
    trained: int | None = None,
    pairing: str | None = None,
    json_file: str | None = None,
) -> int:
    """Shows what each rule, or the one named, makes of a model at `to` positions, and writes its config; 0.

    Bad names and places are refused before anything is read. The config is written whole or not at all.
    """
    asked = f"ropewalk extend {config} --to {to}"
    chosen, other = _check(asked, to, rule, write, force, stack, trained, json_file)
    console = Console(stderr="-" in (json_file, write), highlight=False, markup=False)
    with Console(stderr=True, highlight=False, markup=False).status("trying bases"):
        extended = extension_of(read_named_config(config, pairing, asked), to, rule=chosen, trained=trained)
    if write is not None and chosen is not None:
        write_json(extended.config(chosen), write)
    if json_file is not None:
        write_json(extended.as_json(), json_file)
    with trimmed(console):
        if chosen is None:
            side_by_side(console, extended, other)
        else:
            one_rule(console, extended, other)
    if write not in (None, "-"):
        console.print(f"\nconfig: {write}", soft_wrap=True)
    return 0


def _check(
    asked: str,
    to: int,
    rule: str | None,
    write: str | None,
    force: bool,
    stack: str | None,
    trained: int | None,
    json_file: str | None,
) -> tuple[RuleName | None, Stack | None]:
    """The rule and the stack that were named, if all options make sense and all places can be written."""
    chosen = check_request(CommandLine(asked), to, rule, trained)
    if stack is not None:
        require_choice(stack, STACKS, asked=f"{asked} --for {stack}")
    other: Stack | None = next((name for name in STACKS if name == stack), None)
    if json_file is not None:
        require_writable_file(json_file, asked=f"{asked} --json {json_file}")
    if write is None:
        if force:
            raise RopewalkError(
                asked=f"{asked} --force", expected="--write beside it", got="no --write", do="add --write OUT.json"
            )
        return chosen, other
    asked = f"{asked} --write {write}"
    if rule is None:
        raise RopewalkError(
            asked=asked,
            expected="the one rule that the config is to have",
            got="no --rule",
            do=f"add --rule and one of {', '.join(RULE_NAMES)}",
        )
    require_writable_file(write, asked=asked)
    if json_file is not None and (write == json_file or _same_file(write, json_file)):
        raise RopewalkError(
            asked=f"{asked} --json {json_file}", expected="two places", got="one for both", do="name another file"
        )
    if write != "-" and os.path.lexists(write) and not force:
        raise RopewalkError(
            asked=asked, expected="a file that is not there yet", got="one that is", do="name another, or add --force"
        )
    return chosen, other


def _same_file(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()
