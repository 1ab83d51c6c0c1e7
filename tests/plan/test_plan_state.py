"""The mode of the state cache, for every combination of what it depends on, and the spacing of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError
from ostinato.plan.memory.cache_modes import choose_state_block_size, resolve_state_cache_mode
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from tests.support.plan_cases import GIB, MAMBA2, attention_layer, cpu, gpu, hybrid, mamba2_layer, mlp_layer, model

NOT_ALL = replace(MAMBA2, scan_writes_states=False)
SITUATIONS = [
    dict(zip(("prefix_caching", "chunked_prefill", "supports_all"), values, strict=True))
    for values in product((True, False), repeat=3)
]


def legal(mode: str, *, prefix_caching: bool, chunked_prefill: bool, supports_all: bool) -> bool:
    if mode == "align":
        return prefix_caching and chunked_prefill
    return mode != "all" or (prefix_caching and supports_all)


def refusal(requested: str, **situation: bool) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        resolve_state_cache_mode(requested, **situation)
    return error.value


def remedies(error: ConfigError) -> dict[str, object]:
    assert len({remedy.setting for remedy in error.remedies}) == len(error.remedies)
    return {remedy.setting: remedy.value for remedy in error.remedies}


@pytest.mark.parametrize(
    ("prefix_caching", "chunked_prefill", "supports_all", "effective"),
    [
        (True, True, True, "all"),
        (True, False, True, "all"),
        (True, True, False, "align"),
        (True, False, False, "none"),
        (False, True, True, "none"),
        (False, True, False, "none"),
        (False, False, True, "none"),
        (False, False, False, "none"),
    ],
)
@pytest.mark.parametrize("requested", ["auto", None])
@pytest.mark.parametrize("k", [0, 3])
def test_auto_keeps_the_most_that_is_possible(
    requested, k, prefix_caching, chunked_prefill, supports_all, effective
) -> None:
    decision = resolve_state_cache_mode(
        requested,
        prefix_caching=prefix_caching,
        chunked_prefill=chunked_prefill,
        supports_all=supports_all,
        num_speculative_tokens=k,
    )
    assert (decision.topic, decision.requested, decision.effective) == ("state_cache_mode", "auto", effective)
    assert ("speculative" in decision.reason) == (k > 0)
    if not prefix_caching:
        assert "enable_prefix_caching" in decision.reason
    elif effective == "none":
        assert "enable_chunked_prefill" in decision.reason


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_given_mode_is_kept_or_refused(mode: str, situation: dict[str, bool]) -> None:
    if legal(mode, **situation):
        decision = resolve_state_cache_mode(mode, **situation)
        assert (decision.requested, decision.effective, bool(decision.reason)) == (mode, mode, True)
    else:
        assert f"state_cache_mode {mode}" in refusal(mode, **situation).message


def test_chunked_prefill_is_no_remedy_for_a_model_whose_prompts_cannot_be_cut() -> None:
    situation = {"prefix_caching": True, "chunked_prefill": False, "supports_all": False}
    assert remedies(refusal("align", **situation)) == {"enable_chunked_prefill": True, "state_cache_mode": "none"}
    error = refusal("align", **situation, whole_prompts=True)
    assert remedies(error) == {"state_cache_mode": "none"}
    assert "set enable_chunked_prefill" not in error.message


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_remedy_of_a_refused_mode_works_alone_and_none_that_would_is_missing(mode, situation) -> None:
    if legal(mode, **situation):
        return
    found = remedies(refusal(mode, **situation))
    names = {"prefix_caching": "enable_prefix_caching", "chunked_prefill": "enable_chunked_prefill"}
    for name, setting in names.items():
        helps = not situation[name] and legal(mode, **(situation | {name: True}))
        assert found.get(setting) is (True if helps else None)
    assert legal(str(found["state_cache_mode"]), **situation)


def test_align_without_chunked_prefill_names_both_settings_and_the_two_ways_out() -> None:
    error = refusal("align", prefix_caching=True, chunked_prefill=False, supports_all=True)
    assert "state_cache_mode" in error.message
    assert "enable_chunked_prefill" in error.message
    assert remedies(error) == {"enable_chunked_prefill": True, "state_cache_mode": "all"}
    assert all(str(remedy) in error.message for remedy in error.remedies)
    error = refusal("align", prefix_caching=True, chunked_prefill=False, supports_all=False)
    assert remedies(error) == {"enable_chunked_prefill": True, "state_cache_mode": "none"}


def test_all_where_a_layer_cannot_write_states_falls_back_to_align_or_none() -> None:
    error = refusal("all", prefix_caching=True, chunked_prefill=True, supports_all=False)
    assert remedies(error) == {"state_cache_mode": "align"}
    error = refusal("all", prefix_caching=True, chunked_prefill=False, supports_all=False)
    assert remedies(error) == {"state_cache_mode": "none"}


def test_several_reasons_are_all_told() -> None:
    error = refusal("align", prefix_caching=False, chunked_prefill=False, supports_all=True)
    assert "enable_prefix_caching" in error.message
    assert "enable_chunked_prefill" in error.message
    assert remedies(error) == {"state_cache_mode": "none"}


@pytest.mark.parametrize("unknown", ["some", "ALL", ""])
def test_an_unknown_mode_lists_the_four(unknown: str) -> None:
    error = refusal(unknown, prefix_caching=True, chunked_prefill=True, supports_all=True)
    assert "auto, none, align, all" in error.message
    assert remedies(error) == {"state_cache_mode": "auto"}


def planned(spec: ModelSpec | None = None, **settings: object) -> Plan:
    return make_plan(EngineConfig(**settings), spec or hybrid(), cpu(64 * GIB))


def decided(plan: Plan, topic: str) -> tuple[object, object] | None:
    found = [decision for decision in plan.decisions if decision.topic == topic]
    assert len(found) <= 1
    return (found[0].requested, found[0].effective) if found else None


def test_the_plan_takes_the_mode_from_model_and_settings_and_tells_what_auto_came_to() -> None:
    plan = planned()
    assert plan.settings.state_cache_mode == plan.settings.state_cache_mode == "all"
    assert decided(plan, "state_cache_mode") == ("auto", "all")
    assert decided(planned(model(mamba2_layer(), mamba2_layer(NOT_ALL))), "state_cache_mode") == ("auto", "align")
    given = planned(state_cache_mode="align")
    assert given.settings.state_cache_mode == "align"
    assert decided(given, "state_cache_mode") is None


@pytest.mark.parametrize("asked", ["auto", "align", "all"])
def test_a_model_without_state_layers_has_mode_none_whatever_was_asked(asked: str) -> None:
    plan = planned(
        model(attention_layer()), state_cache_mode=asked, enable_chunked_prefill=False, enable_prefix_caching=False
    )
    assert plan.settings.state_cache_mode == "none"
    assert decided(plan, "state_cache_mode") == (asked, "none")


def test_a_refused_mode_is_refused_by_the_plan_with_remedies_that_fit() -> None:
    config = EngineConfig(state_cache_mode="align", enable_chunked_prefill=False)
    with pytest.raises(ConfigError) as error:
        make_plan(config, hybrid(), gpu(80 * GIB))
    assert remedies(error.value) == {"enable_chunked_prefill": True, "state_cache_mode": "all"}
    for remedy in error.value.remedies:
        make_plan(config.with_settings(**{remedy.setting: remedy.value}), hybrid(), gpu(80 * GIB))


def test_the_name_of_vllm_reaches_the_plan() -> None:
    assert planned(mamba_cache_mode="align", mamba_block_size=512).settings.state_cache_mode == "align"


@pytest.mark.parametrize(
    ("chunk_sizes", "block_size", "spacing"),
    [
        ((128,), 16, 256),
        ((256,), 16, 256),
        ((512,), 16, 512),
        ((96,), 16, 288),
        ((100,), 16, 400),
        ((128, 96), 16, 384),
        ((64,), 256, 256),
        ((), 16, 256),
        ((), 128, 256),
        ((0,), 16, 256),
    ],
)
def test_checkpoints_are_256_tokens_apart_or_more_at_multiples_of_chunks_and_blocks(
    chunk_sizes, block_size, spacing
) -> None:
    layers = [mamba2_layer(replace(MAMBA2, chunk_size=size)) for size in chunk_sizes]
    spec = model(attention_layer(), mlp_layer(), *layers)
    assert choose_state_block_size(EngineConfig(block_size=block_size), spec) == spacing


def test_a_given_spacing_is_kept_if_it_is_a_multiple_of_the_block_size() -> None:
    assert planned(state_block_size=48).settings.state_block_size == 48
    assert planned(state_block_size=64, block_size=64).settings.state_block_size == 64


@pytest.mark.parametrize(
    ("given", "block_size", "named", "nearest"),
    [(50, 16, ("48", "64"), 48), (60, 16, ("48", "64"), 64), (40, 64, ("64",), 64), (100, 64, ("64", "128"), 128)],
)
def test_another_spacing_is_refused_with_the_nearest_multiples(given, block_size, named, nearest) -> None:
    config = EngineConfig(state_block_size=given, block_size=block_size)
    with pytest.raises(ConfigError) as error:
        make_plan(config, hybrid(), cpu(64 * GIB))
    assert remedies(error.value) == {"state_block_size": nearest}
    assert all(number in error.value.message.split("nearest")[1] for number in named)
    assert planned(state_block_size=nearest, block_size=block_size)


@pytest.mark.parametrize(
    ("spec", "settings", "idle"),
    [
        (hybrid(), {"enable_prefix_caching": False, "eviction_policy": "lru"}, "eviction_policy"),
        (hybrid(), {"enable_prefix_caching": False, "expected_prefix_tokens": 9}, "expected_prefix_tokens"),
        (hybrid(), {"state_cache_mode": "none", "state_block_size": 16}, "state_block_size"),
        (hybrid(), {"state_cache_mode": "none"}, "enable_prefix_caching"),
        (hybrid(), {"state_block_size": 8192}, "state_block_size"),
        (model(attention_layer()), {"checkpoint_policy": "boundaries"}, "checkpoint_policy"),
    ],
)
def test_a_setting_without_effect_is_told(spec, settings, idle) -> None:
    plan = planned(spec, **settings)
    value = settings.get(idle, True)
    assert decided(plan, idle) == (value, value)
    [reason] = [decision.reason for decision in plan.decisions if decision.topic == idle]
    assert reason.startswith("without effect")


@pytest.mark.parametrize(
    "settings",
    [{}, {"eviction_policy": "lru", "checkpoint_policy": "boundaries", "state_block_size": 16}],
)
def test_settings_with_effect_are_not_called_idle(settings) -> None:
    assert not any("without effect" in decision.reason for decision in planned(**settings).decisions)


def test_a_prefix_longer_than_any_request_is_refused_with_both_remedies() -> None:
    with pytest.raises(ConfigError) as error:
        planned(expected_prefix_tokens=3000, max_model_len=2000)
    assert remedies(error.value) == {"expected_prefix_tokens": 2000, "max_model_len": 3000}
    with pytest.raises(ConfigError) as error:
        planned(expected_prefix_tokens=5000)
    assert remedies(error.value) == {"expected_prefix_tokens": 4096}


def test_a_prefix_longer_than_any_request_that_fits_is_a_matter_of_memory() -> None:
    config = EngineConfig(expected_prefix_tokens=4096, cache_memory="2MiB")
    spec = model(attention_layer(), mlp_layer())
    with pytest.raises(CapacityError, match="expected_prefix_tokens 4096") as error:
        make_plan(config, spec, cpu(64 * GIB))
    found = remedies(error.value)
    assert set(found) == {"expected_prefix_tokens", "cache_memory"}
    assert f"lower expected_prefix_tokens to at most {found['expected_prefix_tokens']}" in error.value.message
    for setting, value in found.items():
        make_plan(config.with_settings(**{setting: value}), spec, cpu(64 * GIB))
