"""What `ropewalk convert` writes into a config.json: in which pairing the weights are now."""

from dataclasses import dataclass
from typing import Any

from ropewalk.errors import shown
from ropewalk.hub.configs.read import config_error
from ropewalk.spec.rope import PAIRINGS

__all__ = ["KEY", "Record", "read_record"]

# The key of the record, at the top of a config.json.
KEY = "ropewalk"


@dataclass(frozen=True)
class Record:
    """A conversion: the pairing of the weights, the one that they had, and the one that the model's code rotates in.

    >>> Record("interleaved", "half", "half").as_dict()
    {'pairing': 'interleaved', 'converted_from': 'half', 'model_code': 'half'}
    """

    pairing: str
    converted_from: str
    model_code: str

    def as_dict(self) -> dict[str, str]:
        """The record as it stands in a config."""
        return {"pairing": self.pairing, "converted_from": self.converted_from, "model_code": self.model_code}


def read_record(data: dict[str, Any]) -> Record | None:
    """The record of a config; None where its weights were not converted.

    >>> read_record({"model_type": "llama"}) is None
    True
    """
    found = data.get(KEY)
    if found is None:
        return None
    names = ("pairing", "converted_from", "model_code")
    if not isinstance(found, dict) or any(found.get(name) not in PAIRINGS for name in names):
        expected = f"{', '.join(names)}, each {' or '.join(map(repr, PAIRINGS))}"
        raise config_error(KEY, expected, shown(found), "copy it from the config that ropewalk convert wrote")
    return Record(*(found[name] for name in names))
