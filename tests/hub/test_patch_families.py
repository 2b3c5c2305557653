"""accelerate on every family of transformers that can be built offline: what it takes computes what it did."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from hub.accelerated import rms
from hub.observed import quiet
from hub.tiny_models import CHANGES, COMPOSITE, built, config_classes, inputs_of, model_classes, shrunk
from ropewalk import RopewalkError
from ropewalk.hub.accelerate.acceleration import accelerate

PAGE = Path(__file__).parents[2] / "docs" / "accelerate.md"
# A layer that takes the highest of its scores may take another one, and a tiny model shows it.
APART = 1e-4


@pytest.mark.slow
def test_every_family_that_is_taken_computes_what_it_did():
    taken, refused, far = [], {}, {}
    with quiet(), torch.no_grad():
        for family, config_class in config_classes().items():
            if family in COMPOSITE:
                continue
            torch.manual_seed(0)
            try:
                model = built(model_classes(config_class)[0], shrunk(config_class, CHANGES.get(family, {})))
                given = inputs_of(model, 24)
                required = [p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty]
                own = model(**given)[0] if len(required) <= len(given) + 1 else None
            except Exception:
                # Families that need other inputs, or have no model of their own: nothing to compare with. One that
                # drops out here by our fault is missed in the count at the end.
                continue
            if not isinstance(own, torch.Tensor):
                continue
            try:
                handle = accelerate(model)
            except RopewalkError as error:
                refused[family] = str(error)
                continue
            ours = model(**given)[0]
            handle.undo()
            taken.append(family)
            apart = rms((ours - own).double()) / rms(own.double())
            if not apart < APART or not torch.equal(model(**given)[0], own):
                far[family] = apart
    assert far == {}
    assert all("in a way that ropewalk supports" in reason for reason in refused.values())
    listed = PAGE.read_text(encoding="utf-8").partition("\n## Families\n")[2].partition("\n## ")[0]
    assert sorted(taken) == re.findall("`([^`]+)`", listed)
