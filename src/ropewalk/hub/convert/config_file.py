"""The config.json of a converted model: reads the text of the source, and edits it for the output."""

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
# Key in the record for the original flag of the family if it was not a bool. The inverse conversion restores it.
_FLAG_BEFORE, _ABSENT = "flag_before", "absent"


def read_config_file(model: ModelFolder, caller: Caller) -> tuple[str, dict[str, Any]]:
    """Return the text of a config.json, decoded as Latin-1 (one character per byte), and its contents."""
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
        raise ValueError(f"expected a JSON object, got {type(data).__name__}")
    return data


def converted_config(text: str, config: Config, pairing: Pairing, to: Pairing) -> tuple[str, Pairing]:
    """Return the config text of a converted model, and the pairing that the code of the model uses for it.

    The record of the conversion is added, or removed if the weights have their original pairing again. If the code of
    the family reads its pairing from a flag, the flag is set. All other text is unchanged.

    Args:
        text: The text of config.json, decoded as Latin-1.
        config: The parsed config.
        pairing: The pairing of the source's weights.
        to: The pairing of the converted weights.

    >>> from ropewalk.hub.configs.parse import parse_config
    >>> text = '{"model_type": "llama", "head_dim": 8}'
    >>> new, _ = converted_config(text, parse_config(parse(text.encode()), Caller("")), "half", "interleaved")
    >>> new.partition(', "ropewalk"')[0]
    '{"model_type": "llama", "head_dim": 8'
    >>> converted_config(new, parse_config(parse(new.encode()), Caller("")), "interleaved", "half")[0] == text
    True
    """
    record, family, place = config.language.record, config.language.family, config.language.place
    inverse = record is not None and record.converted_from == to
    key, before = family.interleave_key, (config.data.get(KEY) or {}).get(_FLAG_BEFORE, True)
    flag_before: dict[str, object] = {}
    if key is None:
        model_code: Pairing = pairing if record is None else record.model_code
    else:
        # The code of the family uses the pairing of the flag.
        model_code = to
        if inverse and before in (None, _ABSENT) and to == family.pairing:
            text = without_member(text, place, key) if before else with_member(text, place, key, None)
        else:
            flag = config.language.data.get(key, _ABSENT)
            flag_before = {} if isinstance(flag, bool) else {_FLAG_BEFORE: flag}
            text = with_member(text, place, key, to == "interleaved")
    if inverse:
        return without_member(text, (), KEY), model_code
    return with_member(text, (), KEY, Record(to, pairing, model_code).as_dict() | flag_before), model_code
