"""Findings as JSON, and back: what `ropewalk lab run --json` writes and the package ships."""

import dataclasses
import datetime
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ropewalk.errors import RopewalkError
from ropewalk.lab.conduct import Findings, result_of, with_seed
from ropewalk.lab.experiment import Arm, Outcome, Verdict
from ropewalk.lab.experiments import EXPERIMENTS
from ropewalk.lab.run import Run
from ropewalk.lab.training import RunResult, Settings

__all__ = ["as_json", "from_json", "read_findings"]


def as_json(findings: Findings, settings: Settings, *, hardware: str, command: str) -> dict[str, Any]:
    """All figures of an experiment, and what they were measured with.

    Args:
        findings: The findings.
        settings: How runs were computed.
        hardware: The device, in words.
        command: The command that repeats it.

    Returns:
        Values of JSON.
    """
    experiment = findings.experiment
    arms = [
        {
            "label": arm.label,
            "run": arm.run.as_json(),
            "keys": [with_seed(arm.run, seed).key for seed in findings.seeds],
            "results": [dataclasses.asdict(results[arm.label]) for results in findings.results],
        }
        for arm in findings.arms
    ]
    statements = [
        {"text": statement.text, "source": statement.source, **outcome._asdict()}
        for statement, outcome in zip(experiment.statements, findings.outcomes, strict=True)
    ]
    record = {
        "experiment": experiment.name,
        "size": findings.size,
        "seeds": findings.seeds,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware,
        "dtype": settings.dtype,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "command": command,
        "statements": statements,
        "arms": arms,
    }
    return json.loads(json.dumps(record))


def from_json(record: Mapping[str, Any]) -> Findings:
    """The findings of a record."""
    results: list[dict[str, RunResult]] = [{} for _ in record["seeds"]]
    arms: list[Arm] = []
    for entry in record["arms"]:
        arms.append(Arm(entry["label"], _run(entry["run"])))
        for mapping, fields in zip(results, entry["results"], strict=True):
            mapping[entry["label"]] = result_of(fields)
    outcomes = tuple(
        Outcome(Verdict(x["verdict"]), x["reason"], tuple(x["lower"]), tuple(x["higher"])) for x in record["statements"]
    )
    experiment = EXPERIMENTS[record["experiment"]]
    judged = [x["text"] for x in record["statements"]]
    statements = tuple(x for x in experiment.statements if x.text in judged)
    experiment = dataclasses.replace(experiment, statements=statements)
    return Findings(experiment, record["size"], tuple(arms), tuple(record["seeds"]), tuple(results), outcomes)


def read_findings(path: Path, *, asked: str) -> Findings:
    """The findings of a record in a file.

    Args:
        path: The file.
        asked: The request, for the error message.

    Raises:
        RopewalkError: If there is no such file, or if it is no record.
    """
    got = "no such file"
    if path.is_file():
        try:
            return from_json(json.loads(path.read_text(encoding="utf-8")))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            got = f"another file: {type(error).__name__}: {error}".splitlines()[0]
    do = "pass the file that `ropewalk lab run --json FILE` wrote"
    raise RopewalkError(asked=asked, expected="a file from --json", got=got, do=do)


def _run(fields: Mapping[str, Any]) -> Run:
    parent = None if fields["parent"] is None else _run(fields["parent"])
    return Run(**{**fields, "lengths": tuple(fields["lengths"]), "parent": parent})
