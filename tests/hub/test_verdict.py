"""The verdict on an extension: the rule for each kind of model, the reasons, and that it follows from the evidence."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hub.configs import load_spec
from ropewalk import RopewalkError
from ropewalk.hub import ModelExtension, extend_model, read_model
from ropewalk.hub.extend import measured, rules
from ropewalk.hub.extend.measured import MEASURED, Measured, largest_factor, standing
from ropewalk.hub.extend.rules import RULE_NAMES, start_of
from ropewalk.hub.extend.verdict import verdict_of
from ropewalk.spec import Llama3, PositionInterpolation, Yarn
from slow import slow_except

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
LLAMA_2 = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096, "num_hidden_layers": 32}
# Four times its trained length takes milliseconds.
SMALL = {"model_type": "llama", "head_dim": 32, "max_position_embeddings": 512}


@pytest.fixture(autouse=True)
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the base of base-bound takes a second. A base of about the same size has the same verdict."""
    monkeypatch.setattr(rules, "lowest_admissible_base", lambda tried, *_: tried[min(900, len(tried) - 1)])


def extended(name: str, length: int, **options: Any) -> ModelExtension:
    return extend_model(CONFIGS / f"{name}.json", length, **options)


def verdict_on(config: Any, length: int) -> Any:
    return extend_model(config, length).verdict


# A config, the length, the trained length if the config lacks it, and the two rules with whether they are proven.
CASES = [
    ("llama-2-7b", 16_384, None, ("ntk", True), ("yarn", True)),
    ("llama-2-7b", 131_072, None, ("ntk", False), ("yarn", True)),
    ("llama-2-7b", 1_048_576, None, ("ntk", False), ("yarn", False)),
    ("llama-3.1-8b", 262_144, None, ("llama3", False), ("llama3", False)),
    ("llama-3.2-1b", 262_144, None, ("llama3", False), ("llama3", False)),
    ("mistral-7b-v0.3", 131_072, None, ("ntk", True), ("yarn", True)),
    ("mixtral-8x7b", 65_536, None, ("ntk", True), ("yarn", True)),
    ("qwen2.5-7b-instruct", 131_072, None, ("yarn", True), ("yarn", True)),
    ("qwen2.5-7b-instruct", 262_144, None, ("yarn", False), ("yarn", True)),
    ("qwen2.5-7b-instruct-yarn", 262_144, None, ("yarn", False), ("yarn", True)),
    ("qwen3-8b", 131_072, None, ("yarn", True), ("yarn", True)),
    # The makers validated 131,072 positions.
    ("qwen3-8b", 163_840, None, ("yarn", False), ("yarn", True)),
    ("gemma-2-9b", 32_768, None, ("ntk", True), ("yarn", True)),
    ("gemma-3-4b", 262_144, 32_768, ("pi", False), ("pi", True)),
    ("vicuna-7b-v1.5-16k", 32_768, 4096, ("pi", False), ("pi", True)),
    ("deepseek-v3", 327_680, None, ("yarn", False), ("yarn", False)),
    ("gpt-oss-20b", 262_144, None, ("yarn", False), ("yarn", False)),
    ("olmo-3-7b", 131_072, None, ("yarn", False), ("yarn", True)),
    ("internlm2-chat-7b", 65_536, None, ("dynamic", True), ("yarn", True)),
    ("phi-3-mini-128k", 262_144, None, (None, False), ("base-law", False)),
    ("gpt-j-6b", 8192, None, (None, False), (None, False)),
    ("mistral-7b-v0.1", 65_536, None, (None, True), (None, True)),
]


@pytest.mark.parametrize(("name", "length", "trained", "as_it_is", "tuned"), CASES, ids=lambda value: str(value))
def test_the_verdict_on_published_configs(name, length, trained, as_it_is, tuned):
    check(name, length, trained, as_it_is, tuned)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3], CASES[-3]], ids=lambda case: case[0])
def test_the_verdict_with_the_whole_search(case, monkeypatch):
    monkeypatch.undo()
    check(*case)


def check(name: str, length: int, trained: int | None, as_it_is: Any, tuned: Any) -> None:
    chosen = extended(name, length, trained=trained).verdict
    assert chosen is not None
    assert ((chosen.as_it_is.rule, chosen.as_it_is.proven), (chosen.tuned.rule, chosen.tuned.proven)) == (
        as_it_is,
        tuned,
    )
    for recommended in chosen.by_use.values():
        assert recommended.why
        assert recommended.use()
        assert recommended.choice.endswith("(unproven)") == (recommended.rule is not None and not recommended.proven)


def test_the_keys_of_the_verdict_load_as_the_rule():
    for name, length in (("llama-2-7b", 8192), ("qwen3-8b", 65_536), ("llama-3.1-8b", 262_144)):
        data = json.loads((CONFIGS / f"{name}.json").read_text())
        whole = extend_model(data, length)
        assert whole.verdict is not None
        for recommended in whole.verdict.by_use.values():
            assert recommended.rule is not None
            assert recommended.form is not None
            assert recommended.form.drop == ()
            assert load_spec(data | recommended.form.set) == load_spec(whole.config(recommended.rule))
            assert json.loads(f"{{{recommended.setting()}}}") == recommended.form.set


def test_a_model_that_was_trained_with_a_rule_keeps_it_with_a_larger_factor():
    for name, length, trained, rule in (
        ("llama-3.1-8b", 262_144, None, Llama3(5e5, 16, 8192)),
        ("gpt-oss-20b", 262_144, None, Yarn(150_000, 64, 4096, truncate=False)),
        # Gemma 3 has a factor of 8 for four times its trained length.
        ("gemma-3-4b", 262_144, 32_768, PositionInterpolation(1e6, 16)),
    ):
        whole = extended(name, length, trained=trained)
        assert whole.verdict is not None
        (offer,) = [offer for offer in whole.offers if offer.extension.rule == whole.verdict.tuned.rule]
        assert offer.extension.spec is not None
        assert offer.extension.spec.frequencies == rule
        assert offer.effect is not None
        assert offer.effect.changed == pytest.approx(2)
        # No other rule changes the frequencies less.
        others = [other.effect.changed for other in whole.offers if other.effect and other is not offer]
        assert min(others) > 1.999


def test_the_reasons_name_sources_and_limits():
    as_it_is = verdict_on(LLAMA_2, 131_072).as_it_is.why
    assert "better than no rule and pi in published tests [Su, kexue.fm 9708]" in as_it_is
    assert "on the same level, but with fewer engines that load it: dynamic" in as_it_is
    assert "end at 8 ×, and this is 32 × the trained length: measure retrieval first" in as_it_is
    assert "beyond 51,447 positions, some angles did not occur in training" in as_it_is
    assert (
        "better than ntk in published tests [Peng et al., 2309.00071, table 1]" in verdict_on(LLAMA_2, 8192).tuned.why
    )
    qwen = extended("qwen3-8b", 131_072).verdict
    assert qwen is not None
    assert "validated and recommended by its makers" in qwen.as_it_is.why
    # As in the documentation of Qwen3: the config has room for 8192 tokens of output.
    assert qwen.as_it_is.form is not None
    keys = qwen.as_it_is.form.set["rope_scaling"]
    assert (keys["factor"], keys["original_max_position_embeddings"]) == (4.0, 32_768)
    phi = extended("phi-3-mini-128k", 262_144).verdict
    assert phi is not None
    assert "LongRoPE" in phi.as_it_is.why
    assert phi.as_it_is.use() == "stay within 131,072 positions"
    assert "it replaces LongRoPE" in phi.tuned.why


def test_a_model_with_a_rule_that_cannot_be_extended_gets_no_other_rule_at_any_length():
    for times in (2, 6, 16):
        chosen = extended("phi-3-mini-128k", times * 131_072).verdict
        assert chosen is not None
        assert (chosen.as_it_is.rule, chosen.as_it_is.proven) == (None, False)
        assert "LongRoPE, which no engine loads with another factor" in chosen.as_it_is.why


def test_a_rule_that_makers_propose_without_tuning_is_not_known_to_the_weights():
    # The same model: without YaRN in its config, and with it.
    plain, scaled = (extended(f"qwen2.5-7b-instruct{end}", 262_144).verdict for end in ("", "-yarn"))
    assert plain is not None
    assert scaled is not None
    for one, other in ((plain.as_it_is, scaled.as_it_is), (plain.tuned, scaled.tuned)):
        assert (one.rule, one.proven, one.why) == (other.rule, other.proven, other.why)
    # Not the models of the family that were trained at another length.
    data = json.loads((CONFIGS / "qwen2.5-7b-instruct.json").read_text())
    assert verdict_on(data | {"max_position_embeddings": 65_536}, 131_072).as_it_is.rule == "ntk"


FACTORS = ("deepseek-v3", "qwen3-8b", "qwen2.5-7b-instruct-yarn", "llama-3.1-8b", "llama-2-7b", "olmo-3-7b")


@pytest.mark.parametrize("name", slow_except(["qwen3-8b"], FACTORS))
def test_a_larger_length_is_never_better_proven(name):
    reach = start_of(read_model(CONFIGS / f"{name}.json")).reach
    chosen = [extended(name, times * reach) for times in (2, 4, 16)]
    for use in ("as_it_is", "tuned"):
        proven = [getattr(whole.verdict, use).proven for whole in chosen]
        assert proven == sorted(proven, reverse=True)
        # No publication has more than 32 times the trained length.
        assert not any(
            flag for flag, whole in zip(proven, chosen, strict=True) if whole.length > 32 * whole.start.trained
        )


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "starcoder2-7b"])
def test_no_rule_is_needed_where_every_layer_has_a_window(name):
    chosen = extended(name, 65_536).verdict
    assert chosen is not None
    assert chosen.as_it_is == chosen.tuned
    assert chosen.as_it_is.choice == "no rule is needed"
    assert chosen.as_it_is.setting() == '"max_position_embeddings": 65536'
    # One layer without a window attends to the whole context.
    layers = ["sliding_attention"] * 31 + ["full_attention"]
    mixed = {"model_type": "mistral", "head_dim": 128, "num_hidden_layers": 32, "sliding_window": 4096}
    lengths = {"max_position_embeddings": 32_768, "layer_types": layers}
    assert verdict_on(mixed | lengths, 65_536).as_it_is.rule == "ntk"
    # A window that is longer than the training does reach new angles.
    wide = mixed | {"max_position_embeddings": 32_768, "sliding_window": 40_000}
    assert verdict_on(wide, 65_536).as_it_is.rule == "ntk"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA_2 | {"max_position_embeddings": 16_384}, "use the model without an extension"),
        (CONFIGS / "llama-3.1-8b.json", "more than the 131072 positions that the model supports"),
        ({"model_type": "gpt2", "n_positions": 1024}, "learned position embeddings and no RoPE"),
        ({"model_type": "bloom", "n_head": 16}, "ALiBi and no RoPE"),
        ({"model_type": "falcon", "head_dim": 64, "alibi": True}, "one type of layer that rotates"),
        (CONFIGS / "llama-4-scout.json", "its rotation does not need a change"),
    ],
)
def test_models_without_a_verdict_are_errors_that_say_what_to_do(config, message):
    with pytest.raises(RopewalkError, match=message):
        extend_model(config, 16_384)


def test_one_rule_has_no_verdict_and_json_has_it():
    assert extend_model(LLAMA_2, 16_384, rule="pi").verdict is None
    assert extend_model(LLAMA_2, 16_384, rule="pi").as_json()["verdict"] is None
    written: Any = json.loads(json.dumps(extend_model(LLAMA_2, 16_384).as_json()))["verdict"]
    assert written["as_it_is"]["rule"] == "ntk"
    assert written["as_it_is"]["config"]["set"]["rope_theta"] == pytest.approx(40_889.94, abs=0.01)
    assert written["tuned"]["flags"]["llama.cpp"]["flags"].startswith("--rope-scaling yarn")


def test_the_flags_of_an_engine_replace_the_keys():
    chosen = verdict_on(LLAMA_2, 16_384)
    assert chosen.as_it_is.use("llama.cpp") == "--rope-scaling none --rope-freq-base 40889.9424 -c 16384"
    assert chosen.tuned.use("vllm").startswith("--hf-overrides")
    llama_3 = extended("llama-3.1-8b", 262_144).verdict
    assert llama_3 is not None
    assert llama_3.tuned.setting("llama.cpp") is None
    assert "llama.cpp does not support it" in llama_3.tuned.use("llama.cpp")


def changed(monkeypatch: pytest.MonkeyPatch, *figures: Measured) -> None:
    monkeypatch.setattr(measured, "MEASURED", figures)


def untuned(results: dict[Any, str], **fields: Any) -> Measured:
    return Measured(False, "1 model", "accuracy", (8.0,), results, "table 1", True, **fields)


def test_the_verdict_follows_from_the_published_results(monkeypatch):
    whole = extend_model(SMALL, 2048)

    def rule() -> Any:
        return verdict_of(whole.model, whole.start, whole.length, whole.offers, None).as_it_is.rule

    assert rule() == "ntk"
    for winner in ("pi", "ntk", "dynamic", "yarn", "llama3"):
        losers = {other: "0.1" for other in ("pi", "ntk", "dynamic", "yarn", "llama3") if other != winner}
        changed(monkeypatch, untuned({winner: "0.9", **losers}))
        assert rule() == winner
    # A rule that is worse than no rule is no candidate, even if it is better than every other rule.
    changed(monkeypatch, untuned({"pi": "0.5", "yarn": "0.4", "none": "0.6"}), untuned({"llama3": "0.1"}))
    assert rule() == "llama3"
    changed(monkeypatch, untuned({"pi": "0.5", "yarn": "0.4", "none": "0.6"}))
    assert rule() is None
    changed(monkeypatch)
    assert rule() is None
    # New bases change frequencies by more than the ratio of the lengths, so no result makes them fit the weights.
    changed(monkeypatch, untuned({"base-bound": "0.9", "base-law": "0.9", "pi": "0.1"}))
    assert rule() == "pi"


def test_results_on_the_family_of_the_model_decide(monkeypatch):
    general = untuned({"pi": "0.9", "yarn": "0.1"})
    own = dataclasses.replace(untuned({"yarn": ""}, families=("llama",)), factors=(2.0,))
    changed(monkeypatch, general, own)
    chosen = verdict_on(SMALL, 1024).as_it_is
    assert (chosen.rule, chosen.proven) == ("yarn", True)
    # They also decide how far it is proven.
    assert not verdict_on(SMALL, 2048).as_it_is.proven
    assert verdict_on(SMALL | {"model_type": "olmo2"}, 1024).as_it_is.rule == "pi"


def test_ties_are_decided_by_the_change_of_frequencies(monkeypatch):
    tied = Measured(True, "1 model", "accuracy", (8.0,), {"yarn": "1", "base-bound": "1", "base-law": "1"}, "table 1")
    changed(monkeypatch, tied)
    whole = extend_model(SMALL, 2048)
    assert whole.verdict is not None
    by_rule = {offer.extension.rule: offer.effect for offer in whole.offers}
    change = {rule: effect.changed for rule, effect in by_rule.items() if effect and rule in tied.results}
    assert whole.verdict.tuned.rule == min(change, key=lambda rule: change[rule]) == "yarn"


def test_standings_are_counted_in_tests_beyond_the_trained_length():
    # Su's table has the trained length too, where no rule is better than ntk.
    assert standing("ntk", tuned=False) == {"none": 1, "pi": 1}
    # One test each: 8192 and 16384.
    assert standing("dynamic", tuned=False) == {"pi": 0, "yarn": 1}
    assert standing("yarn", tuned=True) == {"pi": 0, "ntk": 1}
    for rule in RULE_NAMES:
        for tuned in (False, True):
            for other, sign in standing(rule, tuned=tuned).items():
                if other != "none":
                    assert standing(other, tuned=tuned)[rule] == -sign


def test_every_result_has_a_factor_per_number():
    for figure in MEASURED:
        assert max(figure.factors) > 1
        for rule in figure.results:
            assert len(figure.values(rule)) <= len(figure.factors)
            assert figure.text(rule) or rule == "none"
    assert largest_factor([]) == 1
