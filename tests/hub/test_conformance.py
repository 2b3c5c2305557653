"""Every family of the installed transformers against `load_spec`, and the page that says so."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from hub.applied import home
from hub.configs import load_spec
from hub.conformance import CANNOT, DIFFERS, PAGE, UNBUILDABLE, Row, page, rows_of
from hub.observed import UnbuildableError, families, observe, quiet
from hub.tiny_models import config_classes
from ropewalk import Plain, RopeSpec, RopewalkError, RotaryEmbedding
from ropewalk.hub import RopeConfigWarning
from ropewalk.hub.families.table import FAMILIES

# On one worker: the tests share what they observe of the models.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("conformance")]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for model_type in sorted(families()) for row in rows_of(model_type)]


def test_at_least_95_percent_of_the_families_agree_and_the_page_says_which(rows):
    built = {row.model_type for row in rows if row.verdict != UNBUILDABLE}
    differing = {row.model_type for row in rows if row.verdict == DIFFERS}
    every = {row.model_type for row in rows}
    assert len(built) >= 200
    assert differing == set(CANNOT)
    # Even if what could not be built is counted against us.
    assert len(built - differing) >= 0.95 * len(every)
    assert PAGE.read_text(encoding="utf-8") == page(rows), "run `python -m hub.conformance` in tests/"


def test_the_families_that_differ_can_be_rotated_in_another_way():
    """Gemma 4's towers by one spec per axis, and HunYuan-VL where all axes have one position: in text."""
    seen = observe("gemma4_vision")[0]
    with pytest.raises(RopewalkError, match="one RopeSpec per axis"):
        load_spec(seen.config, pairing="half")
    head_dim, base = seen.q_before.shape[-1], seen.config.rope_parameters["rope_theta"]
    q = seen.q_before
    for rotary_slice, positions in zip(("leading", "trailing"), seen.positions, strict=True):
        sizes: Any = {"rotary_dim": head_dim // 2, "rotary_slice": rotary_slice, "pairing": "half"}
        q = RotaryEmbedding(RopeSpec(head_dim, Plain(base), **sizes))(q, positions=positions)
    torch.testing.assert_close(q, seen.q_after, rtol=0, atol=2e-5)

    config = observe("hunyuan_vl_text")[0].config
    spec, ids, x = load_spec(config), torch.tensor([0, 1, 5, 40, 101]), torch.randn(1, 2, 5, 128)
    cos, sin = home(config, "HunYuanVLRotaryEmbedding")(config)(x, position_ids=ids.expand(4, 1, 5))
    expected, _ = home(config, "apply_rotary_pos_emb")(x, x, cos, sin)
    assert isinstance(spec, RopeSpec)
    torch.testing.assert_close(RotaryEmbedding(spec)(x, positions=ids.expand(4, 5)), expected, rtol=0, atol=2e-5)


def test_every_familys_config_goes_through_load_spec_and_to_config():
    gone = 0
    for model_type in sorted(families()):
        try:
            config = observe(model_type)[0].config
        except UnbuildableError:
            continue
        if model_type in CANNOT:
            continue
        data = config.to_dict()
        pairing = None if data.get("model_type") else "half"
        loaded = _load(data, pairing)
        for name, spec in loaded.items() if isinstance(loaded, dict) else [("", loaded)]:
            if spec is None:
                continue
            written = spec.to_config("transformers")
            clean = {key: value for key, value in data.items() if key not in ("rope_theta", "rope_scaling")}
            clean |= {"partial_rotary_factor": None, "rotary_dim": None, "attn_config": None}
            if data.get("layer_rope_theta"):
                # A model of which every layer is the one that was written.
                clean["layer_rope_theta"] = [written["rope_parameters"]["rope_theta"]]
            old = data.get("rope_parameters") or {}
            share = old.get(name, old).get("partial_rotary_factor") if old else None
            if spec.rotary_slice == "trailing" and share is not None:
                # Which features are rotated is fixed for the family, and its key stays.
                written["rope_parameters"]["partial_rotary_factor"] = share
            if name and name in old:
                written["rope_parameters"] = {name: written["rope_parameters"]}
            again = _load(clean | written, pairing)
            again = (
                again
                if not isinstance(again, dict)
                else again.get(name, again.get("rope", again.get("full_attention")))
            )
            assert isinstance(again, RopeSpec), model_type
            np.testing.assert_allclose(again.inv_freq(), spec.inv_freq(), rtol=1e-13, err_msg=model_type)
            assert again.to_json() == spec.to_json() or "NTK" in spec.to_json(), model_type
            gone += 1
    assert gone >= 200


def test_a_key_that_a_file_leaves_out_is_never_misread():
    """Files hold what differs from the defaults of a class: without a key the answer is the same, or an error."""
    tried = 0
    with quiet():
        for model_type, config_class in config_classes().items():
            if model_type not in FAMILIES:
                continue
            try:
                data = config_class().to_dict()
                whole = _load(data, None)
            except (RopewalkError, ValueError):
                continue
            for key in data.keys() - {"model_type"}:
                try:
                    part = _load({name: value for name, value in data.items() if name != key}, None)
                except RopewalkError:
                    continue
                assert part == whole, (model_type, key)
                tried += 1
    assert tried > 5000


def _load(data: dict[str, Any], pairing: str | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RopeConfigWarning)
        return load_spec(data, pairing=pairing)
