"""The config.json of a model that is converted: its text, and the text of the output's, in which little differs."""

from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.keys import MOST_BYTES, Caller, read_config
from ropewalk.hub.configs.language import KEY, Record
from ropewalk.hub.configs.parse import Config
from ropewalk.hub.convert.json_text import parse, with_member, without_member
from ropewalk.hub.convert.model_folder import ModelFolder
from ropewalk.spec.rope import Pairing

__all__ = ["CONFIG", "converted_config", "read_config_file"]

CONFIG = "config.json"
# In the record: what a family's flag was before, where it was not true or false; the inverse conversion restores it.
_FLAG_BEFORE, _ABSENT = "flag_before", "absent"


def read_config_file(model: ModelFolder, caller: Caller) -> tuple[str, dict[str, Any]]:
    """The text of a model's config.json, a character per byte (Latin-1), and what it says."""
    data = model.read(CONFIG, most=MOST_BYTES)
    try:
        return data.decode("latin-1"), read_config(_object(parse(data)), caller)
    except ValueError as error:
        if isinstance(error, RopewalkError):
            raise
        raise RopewalkError(
            asked=caller.asked_for(str(model.path / CONFIG)),
            expected="a readable config.json",
            got=f"not JSON: {error}",
            do=caller.pass_path,
        ) from None


def _object(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"no object, but {type(data).__name__}")
    return data


def converted_config(text: str, config: Config, pairing: Pairing, to: Pairing) -> tuple[str, Pairing]:
    """The text of a config for weights that go from `pairing` to `to`, and the pairing in which its code rotates.

    The record of the conversion is added, or removed where the weights are again as they were; a family whose code is
    told by a flag how to pair has that set. All other text is the same.

    >>> from ropewalk.hub.configs.parse import parse_config
    >>> text = '{"model_type": "llama", "head_dim": 8}'
    >>> there, _ = converted_config(text, parse_config(parse(text.encode()), Caller("")), "half", "interleaved")
    >>> there.partition(', "ropewalk"')[0]
    '{"model_type": "llama", "head_dim": 8'
    >>> converted_config(there, parse_config(parse(there.encode()), Caller("")), "interleaved", "half")[0] == text
    True
    """
    record, family, place = config.language.record, config.language.family, config.language.place
    back = record is not None and record.converted_from == to
    key, before = family.interleave_key, (config.data.get(KEY) or {}).get(_FLAG_BEFORE, True)
    more: dict[str, object] = {}
    if key is None:
        model_code: Pairing = pairing if record is None else record.model_code
    else:
        # Its own code follows the weights.
        model_code = to
        if back and before in (None, _ABSENT) and to == family.pairing:
            text = without_member(text, place, key) if before else with_member(text, place, key, None)
        else:
            flag = config.language.data.get(key, _ABSENT)
            more = {} if isinstance(flag, bool) else {_FLAG_BEFORE: flag}
            text = with_member(text, place, key, to == "interleaved")
    if back:
        return without_member(text, (), KEY), model_code
    return with_member(text, (), KEY, Record(to, pairing, model_code).as_dict() | more), model_code
