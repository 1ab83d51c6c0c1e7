"""The prefix benchmark: how its workloads are run, its figures from plain numbers, and what it compares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato import ConfigError, EngineConfig
from ostinato.bench.prefix_cache import (
    COUNTERS,
    AskResult,
    CacheVariant,
    PrefixRound,
    check_open,
    choose_variants,
    configs_of,
    find_baseline,
    prefix_figures,
    run_round,
    second_turn_figures,
)
from ostinato.bench.prefix_workloads import Answer, PromptRequest
from ostinato.errors import CapacityError
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.plan.device.detect import find_device
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from tests.support.checkpoints import checkpoint

TINY = {"threads": 1, "dtype": "float32"}
BOTH = ("boundaries", "boundaries+branches")


# How they are run


@dataclass
class FakeEngine:
    """Gives each running request one token per step, each in `step_seconds`; finds what `found` says of prompts."""

    fails: bool = False
    now: float = 0.0
    most_running: int = 0
    salts: list[str | None] = field(default_factory=list)
    order: list[list[int]] = field(default_factory=list)
    running: dict[str, Any] = field(default_factory=dict)

    def add_request(self, prompt: list[int], params: Any, cache_salt: str | None = None, **marks: object) -> str:
        assert marks in ({}, {"marks": []}), "no turn of these has a mark"
        self.order.append(prompt)
        self.salts.append(cache_salt)
        name = f"request-{len(self.order)}"
        self.running[name] = SimpleNamespace(
            request_id=name,
            prompt_token_ids=prompt,
            error=RuntimeError("broken") if self.fails else None,
            times=SimpleNamespace(arrival=self.now, first_token=None),
            outputs=[SimpleNamespace(token_ids=[])],
            cache=SimpleNamespace(cached_tokens=1, misses={"never_seen": len(prompt) - 1}),
            max_tokens=params.max_tokens,
            finished=False,
        )
        self.most_running = max(self.most_running, len(self.running))
        return name

    def step(self) -> list[Any]:
        self.now += 1
        outputs = list(self.running.values())
        for output in outputs:
            output.times.first_token = output.times.first_token or self.now
            output.outputs[0].token_ids.append(900 + len(output.outputs[0].token_ids))
            output.finished = len(output.outputs[0].token_ids) == output.max_tokens
        self.running = {name: output for name, output in self.running.items() if not output.finished}
        return outputs

    def stats(self) -> dict[str, Any]:
        return {"prefix_cache": dict.fromkeys(COUNTERS, 10 * len(self.order))}


def test_no_more_run_at_once_than_asked_for_and_a_turn_waits_for_the_turn_before() -> None:
    asks = [
        PromptRequest(((1,),), 3),
        PromptRequest(((2,), Answer(0, 0, 3), (3,)), 1, after=0),
        PromptRequest(((4,),), 2),
        PromptRequest(((5,),), 1),
    ]
    engine = FakeEngine()
    one = run_round(engine, asks, 2, 0)  # type: ignore[arg-type]
    assert engine.most_running == 2
    assert engine.order == [[1], [4], [5], [2, 900, 901, 902, 3]]
    assert [each.prompt_tokens for each in one.served] == [1, 5, 1, 1]
    assert [each.first_token_seconds for each in one.served] == [1.0] * 4
    assert one.served[1].misses == {"never_seen": 4}
    assert one.counters == dict.fromkeys(COUNTERS, 40)


def test_cold_asks_have_a_salt_of_their_round() -> None:
    engine = FakeEngine()
    asks = [PromptRequest(((1,),), 1, role="setup"), PromptRequest(((1,),), 1, role="cold"), PromptRequest(((1,),), 1)]
    for number in (0, 1):
        run_round(engine, asks, 1, number)  # type: ignore[arg-type]
    assert [salt is None for salt in engine.salts] == [True, False, True] * 2
    assert engine.salts[1] != engine.salts[4]


def test_a_request_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        run_round(FakeEngine(fails=True), [PromptRequest(((1,),), 1)], 1, 0)  # type: ignore[arg-type]


# Figures


def served(seconds: float, cached: int = 0, role: str = "counted", **misses: int) -> AskResult:
    return AskResult(role, cached + sum(misses.values()), cached, misses, seconds)


def test_figures_add_up_tokens_and_compare_mean_times_round_by_round() -> None:
    ours = [
        PrefixRound((served(1, 6, no_checkpoint=4), served(3, 0, never_seen=10)), {"evicted_blocks": 2}),
        PrefixRound((served(2, 10, recomputed_tail=10),), {"evicted_blocks": 1}),
        PrefixRound((served(1, role="setup", never_seen=5), served(8, 20)), {"evicted_blocks": 0}),
    ]
    theirs = [PrefixRound((served(4), served(6)), {}), PrefixRound((served(8),), {}), PrefixRound((served(10),), {})]
    figures = prefix_figures(ours, theirs)
    assert figures["requests"] == 4
    assert (figures["prompt_tokens"], figures["cached_tokens"], figures["hit_rate"]) == (60, 36, 0.6)
    assert figures["misses"] == {"no_checkpoint": 4, "never_seen": 10, "recomputed_tail": 10}
    assert figures["time_to_first_token"] == {"mean": 3.5, "p50": 2.5, "p99": 8, "max": 8}
    assert figures["first_token_ratio"] == {"median": 0.4, "min": 0.25, "max": 0.8}
    assert figures["evicted_blocks"] == 3
    assert [each["cached_tokens"] for each in figures["rounds"]] == [6, 10, 20]
    assert prefix_figures(ours, None)["first_token_ratio"] is None
    assert second_turn_figures(ours, theirs) is None


def test_the_second_turn_is_as_many_times_sooner_as_cold_is_slower() -> None:
    ours = [
        PrefixRound((served(9, role="setup"), served(8, role="cold"), served(seconds)), {}) for seconds in (1, 2, 4)
    ]
    theirs = [PrefixRound((served(9, role="setup"), served(4, role="cold"), served(4)), {})] * 3
    figures = second_turn_figures(ours, theirs)
    assert figures is not None
    assert figures["speedup"] == {"median": 4, "min": 2, "max": 8}
    assert figures["cold_seconds"]["median"] == 8
    assert figures["warm_seconds"]["max"] == 4
    assert figures["cold_ratio"]["median"] == 2
    assert second_turn_figures(ours, None)["cold_ratio"] is None  # type: ignore[index]


# What is compared


@pytest.fixture(scope="module")
def hybrid() -> ModelSpec:
    return model_spec(read_config(checkpoint("nemotron_h")))


@pytest.fixture(scope="module")
def transformer() -> ModelSpec:
    return model_spec(read_config(checkpoint("llama")))


def test_policies_that_cannot_matter_are_run_once(hybrid: ModelSpec) -> None:
    variants = choose_variants(("none", "all", "all"), BOTH, ("marconi", "lru"), hybrid, True)
    assert variants == [
        CacheVariant("none"),
        CacheVariant("all", "boundaries", "marconi"),
        CacheVariant("all", "boundaries", "lru"),
        CacheVariant("all", "boundaries+branches", "marconi"),
        CacheVariant("all", "boundaries+branches", "lru"),
    ]
    assert [variant.name for variant in variants[1:4]] == ["all", "all, lru", "all+branches"]
    assert find_baseline(variants, hybrid) == CacheVariant("none")
    assert find_baseline(variants[1:], hybrid) is None


def test_a_model_without_states_has_one_mode_and_no_checkpoints(transformer: ModelSpec) -> None:
    variants = choose_variants(("none", "align", "all"), BOTH, ("marconi", "lru"), transformer, True)
    assert variants == [CacheVariant("none", None, "marconi"), CacheVariant("none", None, "lru")]
    assert find_baseline(variants, transformer) is None
    open_modes = choose_variants(None, BOTH, ("marconi",), transformer, True)
    assert open_modes == [CacheVariant("off"), CacheVariant("none", None, "marconi")]
    assert find_baseline(open_modes, transformer) == CacheVariant("off")


def test_open_modes_are_those_that_the_model_can_do(hybrid: ModelSpec) -> None:
    for chunked, modes in ((True, ["none", "align", "all"]), (False, ["none", "all"])):
        variants = choose_variants(None, ("boundaries",), ("lru",), hybrid, chunked)
        assert [variant.mode for variant in variants] == modes


def test_a_variant_plans_to_the_mode_and_policies_that_it_is_named_for(hybrid: ModelSpec) -> None:
    config = EngineConfig(model="tiny", max_model_len=64, max_num_seqs=2)
    for variant in choose_variants(("off", "none", "align", "all"), BOTH, ("marconi", "lru"), hybrid, True):
        settings = make_plan(variant.apply(config), hybrid, find_device("cpu")).settings
        assert settings.enable_prefix_caching == (variant.mode != "off")
        assert settings.state_cache_mode == ("none" if variant.mode == "off" else variant.mode)
        assert variant.checkpoint_policy in (None, settings.checkpoint_policy)
        assert variant.eviction_policy in (None, settings.eviction_policy)


@pytest.mark.parametrize(
    "given",
    [{"mamba_cache_mode": "all"}, {"enable_prefix_caching": True}, {"checkpoint_policy": "boundaries"}],
)
def test_a_setting_that_is_compared_cannot_be_given(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leave it out and give --"):
        check_open(EngineConfig(**given))


def test_configurations_share_an_open_cache_equally(hybrid: ModelSpec) -> None:
    variants = choose_variants(("none", "all"), BOTH, ("marconi",), hybrid, True)
    open_config = EngineConfig(model="tiny", max_model_len=64, max_num_seqs=2)
    device = find_device("cpu")
    alone = make_plan(variants[1].apply(open_config), hybrid, device).memory.cache
    shared = {each.cache_memory for each in configs_of(variants, open_config, hybrid, device).values()}
    assert shared == {alone // 3}
    given = open_config.with_settings(cache_memory=2**22)
    assert {each.cache_memory for each in configs_of(variants, given, hybrid, device).values()} == {2**22}
    [single] = configs_of(variants[:1], open_config, hybrid, device).values()
    assert single.cache_memory is None


def test_too_many_configurations_for_a_gpu_are_refused(hybrid: ModelSpec) -> None:
    variants = choose_variants(("none", "all"), BOTH, ("marconi",), hybrid, True)
    config = EngineConfig(model="tiny", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    device = find_device("l4-24gb")
    memory = make_plan(config, hybrid, device).memory
    one = memory.weights + memory.activations + memory.graphs
    for room, fits in ((2.9, False), (4.0, True)):
        small = replace(device, memory_bytes=int(room * one / 0.9))
        if fits:
            [size] = {each.cache_memory for each in configs_of(variants, config, hybrid, small).values()}
            assert size == pytest.approx(one / 3, rel=0.01)
        else:
            with pytest.raises(CapacityError, match="compare fewer"):
                configs_of(variants, config, hybrid, small)
