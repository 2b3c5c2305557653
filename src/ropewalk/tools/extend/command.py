"""`ropewalk extend`: every rule that extends a model's context, side by side; one of them as a config."""

import os
from pathlib import Path

from rich.console import Console

from ropewalk.errors import RopewalkError, require_choice, require_count
from ropewalk.hub.extend.config import FIXED, Form, extended_config
from ropewalk.hub.extend.rules import RULES
from ropewalk.hub.extend.stacks import STACKS
from ropewalk.tools.extend.facts import LONGEST, Facts, facts_of
from ropewalk.tools.extend.sheet import one_rule, side_by_side
from ropewalk.tools.output import require_writable_file, write_json
from ropewalk.tools.trimmed import trimmed

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
    _check(asked, to, rule, write, force, stack, trained, json_file)
    console = Console(stderr="-" in (json_file, write), highlight=False, markup=False)
    with Console(stderr=True, highlight=False, markup=False).status("trying bases"):
        facts = facts_of(config, to, rule=rule, trained=trained, pairing=pairing, asked=asked)
    if rule is not None:
        _require_applies(f"{asked} --rule {rule}", facts)
    if write is not None:
        write_json(extended_config(facts.data, _form(f"{asked} --write {write}", facts), pairing), write)
    if json_file is not None:
        write_json(facts.as_json(), json_file)
    with trimmed(console):
        if rule is None:
            side_by_side(console, facts, stack)
        else:
            one_rule(console, facts, stack)
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
) -> None:
    if rule is not None:
        require_choice(rule, RULES, asked=f"{asked} --rule {rule}")
    if stack is not None:
        require_choice(stack, STACKS, asked=f"{asked} --for {stack}")
    require_count(to, asked=asked, do="name how many positions the model is to read", at_least=2)
    if trained is not None:
        require_count(trained, asked=f"{asked} --trained {trained}", do="name the trained length", at_least=2)
    if to > LONGEST:
        raise RopewalkError(
            asked=asked, expected=f"at most {LONGEST} positions", got=f"{to}", do="name a length that a model can read"
        )
    if json_file is not None:
        require_writable_file(json_file, asked=f"{asked} --json {json_file}")
    if write is None:
        if force:
            raise RopewalkError(
                asked=f"{asked} --force", expected="--write beside it", got="no --write", do="add --write OUT.json"
            )
        return
    asked = f"{asked} --write {write}"
    if rule is None:
        raise RopewalkError(
            asked=asked,
            expected="the one rule that the config is to have",
            got="no --rule",
            do=f"add --rule and one of {', '.join(RULES)}",
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


def _same_file(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _require_applies(asked: str, facts: Facts) -> None:
    (offer,) = facts.offers
    if offer.effect is None:
        raise RopewalkError(
            asked=asked,
            expected="a rule that applies to this model",
            got=f"{offer.extension.rule}: {offer.extension.why_not}",
            do="leave --rule out to see the rules that do",
        )


def _form(asked: str, facts: Facts) -> Form:
    """The form that the config already has, if the rule can be said in it."""
    (offer,) = facts.offers
    if offer.no_keys is not None:
        raise RopewalkError(
            asked=asked,
            expected="a rule that transformers loads for this model",
            got=f"{offer.extension.rule}: {offer.no_keys}",
            do="use a model whose code reads its config"
            if facts.part.get("model_type") in FIXED
            else "leave --rule and --write out: what is shown has keys for every rule that can be loaded",
        )
    old = [form for form in offer.forms if form.name == "transformers 4"]
    return old[0] if old and facts.has_old_keys else offer.forms[0]
