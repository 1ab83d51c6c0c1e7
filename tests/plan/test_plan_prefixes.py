"""The split of the cache for prefixes: in plain numbers, for any numbers, and as the plan tells it."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError
from ostinato.plan.memory.split import MAX_CACHED_TOKENS, MemoryBudget, MemoryPlan, cache_need, fit_memory
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.render.tables import print_plan
from tests.support.plan_cases import GIB, MIB, attention_layer, cpu, gpu, hybrid, mamba2_layer, mlp_layer, model

BUDGET = MemoryBudget(
    available=10_000,
    weights=0,
    cache_size=None,
    cache_is_given=False,
    block_size=16,
    kv_block=10,
    state_slot=50,
    slots_per_request=1,
    holds_prefixes=True,
    expected_prefix_tokens=32,
)
"""2 requests at once: 150 bytes of slots. A prefix of 32 tokens: 2 blocks and a slot, 70 bytes."""


def split(budget: MemoryBudget = BUDGET, rows: int = 2, max_model_len: int = 64) -> MemoryPlan:
    memory = fit_memory(budget, 0, rows, max_model_len)
    assert memory is not None
    return memory


def decided(plan: Plan, topic: str) -> list[tuple[object, object, str]]:
    found = [decision for decision in plan.decisions if decision.topic == topic]
    return [(decision.requested, decision.effective, decision.reason) for decision in found]


def test_what_running_requests_leave_holds_prefixes_of_blocks_and_one_checkpoint() -> None:
    # 10,000 bytes without 150 for slots, 10 for the null block and 4 blocks for running requests: 9,800.
    memory = split()
    assert (memory.num_checkpoints, memory.prefix_tokens) == (140, 140 * 32)
    assert memory.num_slots == 3 + 140
    assert memory.num_blocks == 1 + 4 + 140 * 2
    assert memory.expected_prefix_tokens == 32
    assert memory.cache == 10_000


def test_a_remainder_that_holds_no_prefix_becomes_blocks() -> None:
    memory = split(replace(BUDGET, available=10_069))
    assert (memory.num_checkpoints, memory.num_blocks) == (140, 1 + 4 + 140 * 2 + 6)
    assert split(replace(BUDGET, available=10_070)).num_checkpoints == 141


def test_a_prefix_takes_whole_blocks() -> None:
    assert split(replace(BUDGET, expected_prefix_tokens=17)).num_checkpoints == 140
    assert split(replace(BUDGET, expected_prefix_tokens=16)).num_checkpoints == (10_000 - 160 - 40) // 60


def test_running_requests_have_blocks_for_a_prefix_each_but_at_least_for_one_full_length() -> None:
    # 2 rows of 2 blocks each are less than one request of 320 tokens: 20 blocks.
    assert split(max_model_len=320).num_checkpoints == (10_000 - 160 - 200) // 70


def test_running_requests_have_no_more_than_half_of_the_blocks() -> None:
    # Room for 84 blocks beside 100 rows; 100 rows of 2 blocks would take them all.
    memory = split(replace(BUDGET, available=101 * 50 + 10 + 840), rows=100)
    assert memory.num_checkpoints == (840 - 420) // 70


def test_an_open_length_is_1024_tokens_or_all_of_a_request() -> None:
    wide = replace(BUDGET, expected_prefix_tokens=None)
    assert split(wide, max_model_len=4096).expected_prefix_tokens == 1024
    assert split(wide, max_model_len=100).expected_prefix_tokens == 100


def test_without_state_layers_all_goes_to_blocks_and_without_attention_all_to_slots() -> None:
    memory = split(replace(BUDGET, state_slot=0))
    assert (memory.num_slots, memory.num_checkpoints, memory.num_blocks) == (0, 0, 1000)
    assert memory.prefix_tokens == (1000 - 1 - 4) // 2 * 32
    memory = split(replace(BUDGET, kv_block=0))
    assert (memory.num_blocks, memory.num_slots, memory.num_checkpoints) == (0, 200, 197)
    assert memory.prefix_tokens == 197 * 32


def test_without_hits_the_split_is_for_running_requests_alone() -> None:
    memory = split(replace(BUDGET, holds_prefixes=False))
    assert (memory.num_slots, memory.num_blocks) == (3, 2 * 4 + 1)
    assert (memory.num_checkpoints, memory.expected_prefix_tokens, memory.prefix_tokens) == (0, None, 0)


def test_tiny_models_do_not_get_ids_without_end() -> None:
    huge = replace(BUDGET, available=10**12)
    memory = split(huge)
    assert memory.prefix_tokens == MAX_CACHED_TOKENS
    assert memory.num_checkpoints == MAX_CACHED_TOKENS // 32
    assert memory.num_blocks == 1 + 2 * 4 + MAX_CACHED_TOKENS // 16
    assert split(replace(huge, expected_prefix_tokens=1)).num_slots <= MAX_CACHED_TOKENS // 16 + 3
    assert split(replace(huge, kv_block=0)).num_checkpoints == MAX_CACHED_TOKENS // 32
    assert split(replace(huge, expected_prefix_tokens=2**23), max_model_len=2**23).num_checkpoints == 1


BUDGETS = st.builds(
    MemoryBudget,
    available=st.integers(0, 10**6),
    weights=st.integers(0, 1000),
    cache_size=st.none() | st.integers(1, 10**6),
    cache_is_given=st.booleans(),
    block_size=st.sampled_from([16, 64]),
    kv_block=st.just(0) | st.integers(1, 500),
    state_slot=st.just(0) | st.integers(1, 5000),
    slots_per_request=st.integers(1, 4),
    holds_prefixes=st.booleans(),
    expected_prefix_tokens=st.none() | st.integers(1, 3000),
)


@settings(max_examples=500, deadline=None)
@given(BUDGETS, st.integers(1, 40), st.integers(2, 3000), st.integers(0, 1000))
def test_a_split_stays_in_its_room_and_takes_nothing_from_running_requests(
    budget: MemoryBudget, rows: int, max_model_len: int, activations: int
) -> None:
    memory = fit_memory(budget, activations, rows, max_model_len)
    alone = fit_memory(replace(budget, holds_prefixes=False), activations, rows, max_model_len)
    assert (memory is None) == (alone is None)
    if memory is None or alone is None:
        return
    assert memory.weights + memory.activations + memory.cache <= memory.available
    assert budget.cache_size is None or memory.cache <= budget.cache_size
    assert memory.num_slots == alone.num_slots + memory.num_checkpoints
    assert memory.cache >= cache_need(budget, rows, max_model_len)
    blocks = -(-(memory.expected_prefix_tokens or 0) // budget.block_size)
    prefixes = memory.prefix_tokens // (memory.expected_prefix_tokens or 1)
    if budget.kv_block:
        assert memory.num_blocks >= 1 + -(-max_model_len // budget.block_size) + prefixes * blocks
    if budget.holds_prefixes and prefixes:
        assert memory.num_checkpoints == (prefixes if budget.state_slot else 0)


@settings(max_examples=300, deadline=None)
@given(BUDGETS, st.integers(1, 40), st.integers(2, 3000), st.integers(1, 3000), st.integers(1, 3000))
def test_longer_prefixes_are_fewer(budget: MemoryBudget, rows: int, max_model_len: int, one: int, other: int) -> None:
    low, high = (min(tokens, max_model_len) for tokens in sorted((one, other)))
    short, long = (
        fit_memory(replace(budget, holds_prefixes=True, expected_prefix_tokens=tokens), 0, rows, max_model_len)
        for tokens in (low, high)
    )
    if short is not None and long is not None:
        assert short.num_checkpoints >= long.num_checkpoints
        assert short.prefix_tokens // low >= long.prefix_tokens // high


def test_the_plan_holds_more_shorter_prefixes_and_never_fewer_rows_for_them() -> None:
    plans = [
        make_plan(EngineConfig(**settings), hybrid(), gpu(2080 * MIB))
        for settings in ({"enable_prefix_caching": False}, {"expected_prefix_tokens": 256}, {}, {"max_num_seqs": 16})
    ]
    off, short, default, few_rows = plans
    assert off.settings.max_num_seqs == short.settings.max_num_seqs == default.settings.max_num_seqs
    assert off.memory.num_checkpoints == 0 < default.memory.num_checkpoints < short.memory.num_checkpoints
    assert few_rows.memory.num_checkpoints > default.memory.num_checkpoints
    assert default.memory.expected_prefix_tokens == 1024


def test_a_hybrid_in_mode_none_cannot_hit_and_is_split_as_without_caching() -> None:
    off = make_plan(EngineConfig(enable_prefix_caching=False), hybrid(), gpu(2 * GIB))
    none = make_plan(EngineConfig(state_cache_mode="none"), hybrid(), gpu(2 * GIB))
    assert none.memory == off.memory
    assert none.memory.prefix_tokens == 0


def test_the_assumed_length_is_told_where_it_divides_the_cache() -> None:
    plan = make_plan(EngineConfig(), hybrid(), gpu(2 * GIB))
    [(requested, effective, _)] = decided(plan, "expected_prefix_tokens")
    assert (requested, effective) == (None, 1024)
    given = make_plan(EngineConfig(expected_prefix_tokens=1024), hybrid(), gpu(2 * GIB))
    assert given.memory == plan.memory
    for silent in (given, make_plan(EngineConfig(), model(attention_layer()), gpu(2 * GIB))):
        assert not decided(silent, "expected_prefix_tokens")


def test_the_most_tokens_that_are_planned_for_are_a_decision() -> None:
    tiny = model(attention_layer(), mlp_layer())
    plan = make_plan(EngineConfig(), tiny, gpu(80 * GIB))
    [(possible, effective, reason)] = decided(plan, "prefix_tokens")
    assert effective == plan.memory.prefix_tokens == MAX_CACHED_TOKENS < possible
    assert str(MAX_CACHED_TOKENS) in reason
    assert not decided(plan, "num_blocks")
    assert not decided(make_plan(EngineConfig(), tiny, gpu(GIB // 2)), "prefix_tokens")


@pytest.mark.parametrize(
    ("spec", "settings", "device", "topic"),
    [
        (hybrid(), {"graph_mode": "none"}, gpu(520 * MIB), "num_checkpoints"),
        (hybrid(), {"cache_memory": "20MiB"}, cpu(64 * GIB), "num_checkpoints"),
        (model(mamba2_layer()), {"cache_memory": 5 * MIB, "max_num_seqs": 8}, cpu(64 * GIB), "num_checkpoints"),
        (model(attention_layer()), {"cache_memory": "2200KiB"}, cpu(64 * GIB), "prefix_tokens"),
        (hybrid(), {"cache_memory": "9MiB", "expected_prefix_tokens": 2000, "max_num_seqs": 1}, cpu(64 * GIB),
         "num_checkpoints"),
    ],
)  # fmt: skip
def test_a_cache_with_no_place_for_a_prefix_says_what_would_make_one(spec, settings, device, topic) -> None:
    config = EngineConfig(**settings)
    plan = make_plan(config, spec, device)
    assert plan.memory.prefix_tokens == plan.memory.num_checkpoints == 0
    [(_, effective, reason)] = decided(plan, topic)
    assert effective == 0
    ways = [way.split() for way in reason.split(" needs ")[1].split(", or ")]
    assert ways
    for setting, _, _, bound, number in ways:
        value: Any = float(number) if "." in number else int(number)
        step = 0.01 if isinstance(value, float) else 1
        assert make_plan(config.with_settings(**{setting: value}), spec, device).memory.prefix_tokens > 0
        short_of = value + step if bound == "most" else value - step
        try:
            nearest = make_plan(config.with_settings(**{setting: short_of}), spec, device)
        except CapacityError:
            continue
        assert nearest.memory.prefix_tokens == 0


def test_how_prefixes_are_kept_and_how_many_is_written_and_read_back() -> None:
    plan = make_plan(EngineConfig(eviction_policy="lru"), hybrid(), gpu(2 * GIB))
    data = json.loads(json.dumps(plan.to_json()))
    settings = data["settings"]
    assert {name: settings[name] for name in ("state_cache_mode", "state_block_size", "eviction_policy")} == {
        "state_cache_mode": "all", "state_block_size": 256, "eviction_policy": "lru",
    }  # fmt: skip
    for name in ("num_checkpoints", "expected_prefix_tokens", "prefix_tokens"):
        assert data["memory"][name] == getattr(plan.memory, name) > 0
    assert data["state_cache"]["prefill_flops"]["per_pair"] == 2 * 4 * 8 * 64
    assert Plan.from_json(data) == plan


@pytest.mark.parametrize(
    ("spec", "settings", "shown", "hidden"),
    [
        (hybrid(), {}, ["state_cache_mode all", "checkpoints {checkpoints}", "holds {prefixes} prefixes"], []),
        (hybrid(), {"enable_prefix_caching": False}, ["enable_prefix_caching off"], ["holds", "eviction_policy"]),
        (hybrid(), {"state_cache_mode": "none"}, ["state_cache_mode none"], ["holds", "checkpoint_policy"]),
        (model(attention_layer()), {}, ["holds {prefixes} prefixes"], ["state_cache_mode", "checkpoints"]),
    ],
)
def test_the_tables_show_what_applies(spec, settings, shown, hidden) -> None:
    plan = make_plan(EngineConfig(**settings), spec, gpu(2 * GIB))
    tables = StringIO()
    print_plan(plan, Console(width=200, file=tables))
    text = " ".join(tables.getvalue().split("decisions")[0].split())
    prefixes = plan.memory.prefix_tokens // (plan.memory.expected_prefix_tokens or 1)
    counts = {"checkpoints": f"{plan.memory.num_checkpoints:,}", "prefixes": f"{prefixes:,}"}
    for words in shown:
        assert words.format(**counts) in text
    assert not [words for words in hidden if words in text]
