"""`ropewalk extend`: which rule extends the context of a model, the effect of each, and the config for one of them."""

import os
from pathlib import Path

from rich.console import Console

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.hub.extend.extension import check_request, extension_of
from ropewalk.hub.extend.rules import RuleName
from ropewalk.hub.extend.stacks import STACKS, Stack
from ropewalk.hub.extend.verdict import Verdict
from ropewalk.tools.command_config import CommandLine, read_named_config
from ropewalk.tools.extend.sheet import all_rules, one_rule, verdict
from ropewalk.tools.output import require_writable_file, trimmed, write_json

__all__ = ["extend"]


def extend(
    config: str,
    to: int,
    *,
    rule: str | None = None,
    show_all: bool = False,
    write: str | None = None,
    force: bool = False,
    stack: str | None = None,
    trained: int | None = None,
    pairing: str | None = None,
    json_file: str | None = None,
) -> int:
    """Print which rule to use for a model at `to` positions, or the effect of `rule`, and write its config.

    Args:
        config: The path of a config.json or of a model folder.
        to: The number of positions to extend to.
        rule: Print the effect of this rule instead of the verdict.
        show_all: Also print the effect of every rule.
        write: Write the config for `rule`, or for the recommended rule for the model as it is, to this file,
            completely or not at all; "-" for standard output.
        force: Overwrite `write` if it exists.
        stack: Print the flags of this engine instead of config keys.
        trained: The trained length, if the config lacks it or is wrong.
        pairing: The pairing, if the model family is unknown.
        json_file: Write everything to this file as JSON; "-" for standard output.

    Returns:
        The exit code 0.

    Raises:
        RopewalkError: If an argument is invalid or an output cannot be written, which is checked before the config is
            read, or if the model cannot be extended.
    """
    asked = f"ropewalk extend {config} --to {to}"
    checked_rule, engine = _check(asked, to, rule, write, force, stack, trained, json_file)
    if checked_rule is not None and show_all:
        raise RopewalkError(
            asked=f"{asked} --rule {rule} --all",
            expected="one rule, or all of them",
            got="both",
            do="leave out --rule or --all",
        )
    console = Console(stderr="-" in (json_file, write), highlight=False, markup=False)
    with Console(stderr=True, highlight=False, markup=False).status("trying bases"):
        extended = extension_of(read_named_config(config, pairing, asked), to, rule=checked_rule, trained=trained)
    written = checked_rule
    if write is not None:
        written = checked_rule or _recommended(extended.verdict, f"{asked} --write {write}")
        write_json(extended.config(written), write)
    if json_file is not None:
        write_json(extended.as_json(), json_file)
    with trimmed(console):
        if checked_rule is not None:
            one_rule(console, extended, engine)
        else:
            verdict(console, extended, engine, all_follow=show_all)
        if show_all:
            all_rules(console, extended, engine)
    if write not in (None, "-"):
        use = "" if checked_rule is not None else ", without fine-tuning"
        console.print(f"\nconfig: {write} ({written}{use})", soft_wrap=True)
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
    """The rule and the engine, if all options are valid and all outputs can be written."""
    checked_rule = check_request(CommandLine(asked), to, rule, trained)
    if stack is not None:
        require_choice(stack, STACKS, asked=f"{asked} --for {stack}")
    engine: Stack | None = next((name for name in STACKS if name == stack), None)
    if json_file is not None:
        require_writable_file(json_file, asked=f"{asked} --json {json_file}")
    if write is None:
        if force:
            raise RopewalkError(
                asked=f"{asked} --force", expected="also --write", got="no --write", do="add --write OUT.json"
            )
        return checked_rule, engine
    asked = f"{asked} --write {write}"
    require_writable_file(write, asked=asked)
    if json_file is not None and (write == json_file or _same_file(write, json_file)):
        raise RopewalkError(
            asked=f"{asked} --json {json_file}",
            expected="two different outputs",
            got="the same output twice",
            do="specify another file",
        )
    if write != "-" and os.path.lexists(write) and not force:
        raise RopewalkError(
            asked=asked,
            expected="a file that does not exist",
            got="an existing file",
            do="specify another file, or add --force",
        )
    return checked_rule, engine


def _recommended(verdict: Verdict | None, asked: str) -> RuleName:
    """The rule for the model as it is."""
    if verdict is not None and verdict.as_it_is.rule is not None and verdict.as_it_is.form is not None:
        return verdict.as_it_is.rule
    tuned = None if verdict is None else verdict.tuned.rule
    raise RopewalkError(
        asked=asked,
        expected="a rule for the model without fine-tuning, or --rule",
        got="a verdict without such a rule, and no --rule",
        do="leave out --write to read the verdict"
        + (f", or add --rule {tuned} and fine-tune the model" if tuned else ""),
    )


def _same_file(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()
