"""Which spec each layer of a model has, by number, against the configs of transformers."""

import pytest
from transformers import Gemma3TextConfig, SmolLM3Config

from ropewalk import RopeSpec, RopewalkError
from ropewalk.hub.configs.keys import Keys
from ropewalk.hub.configs.layers import specs_by_number
from ropewalk.hub.families.family import Family
from ropewalk.hub.families.table import FAMILIES

ONE, TWO = RopeSpec(8), RopeSpec(16)


def test_layers_without_rotation_are_those_of_transformers():
    theirs = list(SmolLM3Config(num_hidden_layers=9, no_rope_layer_interval=4).no_rope_layers or [])
    part = Keys({"no_rope_layer_interval": 4})
    ours = specs_by_number(part, FAMILIES["smollm3"], {"rope": ONE, "no_rope": None}, 9)
    assert [int(spec is ONE) for spec in ours] == theirs
    assert theirs.count(0) == 2


def test_layers_with_a_window_are_those_of_transformers():
    theirs = list(Gemma3TextConfig(num_hidden_layers=13, sliding_window_pattern=6).layer_types or [])
    layers = {"full_attention": ONE, "sliding_attention": TWO}
    ours = specs_by_number(Keys({"sliding_window_pattern": 6}), Family(layers="sliding"), layers, 13)
    assert ["full_attention" if spec is ONE else "sliding_attention" for spec in ours] == theirs
    assert specs_by_number(Keys({"layer_types": theirs}), Family(), layers, 13) == ours


def test_what_is_not_said_is_asked_for():
    with pytest.raises(RopewalkError, match="one layer type per layer, since these differ"):
        specs_by_number(Keys({}), Family(), {"full_attention": ONE, "sliding_attention": TWO}, 4)
    with pytest.raises(RopewalkError, match="one entry for each of 4 layers"):
        specs_by_number(Keys({"layer_types": ["full_attention"]}), Family(), {"full_attention": ONE, "other": None}, 4)
