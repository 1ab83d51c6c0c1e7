"""The plan's window blocks: how many of them layers with a window need, and how memory is split between them and
blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import EngineConfig
from ostinato.errors import CapacityError
from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.sliding_window import SlidingWindowSpec
from ostinato.plan.memory.split import (
    BlockDemand,
    cache_need,
    kv_block_bytes,
    prefixes_in,
    sliding_window_spec,
    split_tables,
)
from ostinato.plan.plan import Plan, make_plan
from ostinato.units import format_bytes
from tests.plan.test_plan_memory import BUDGET
from tests.support.plan_cases import ATTENTION, GIB, attention_layer, cpu, hybrid, model

LOCAL = attention_layer(replace(ATTENTION, window=512))
GEMMA = model(*[LOCAL] * 5, attention_layer())
"""As Gemma 3: five layers of six have a window."""


def planned(spec: Any = GEMMA, **settings: Any) -> Plan:
    spec = replace(spec, max_position_embeddings=65536)
    return make_plan(EngineConfig(**{"dtype": "bfloat16", **settings}), spec, cpu(8 * GIB))


def rules_of(plan: Plan) -> SlidingWindowSpec:
    rules = sliding_window_spec(plan.memory, plan.settings.block_size, plan.settings.max_num_batched_tokens)
    assert rules is not None
    return rules


def said(plan: Plan) -> list[str]:
    return [decision.reason for decision in plan.decisions if decision.topic == "sliding windows"]


@pytest.mark.parametrize(("max_model_len", "has_window_blocks"), [(4096, True), (513, True), (512, False)])
def test_layers_with_a_window_have_window_blocks_where_a_request_may_be_longer(
    max_model_len: int, has_window_blocks: bool
) -> None:
    plan = planned(max_model_len=max_model_len)
    memory, whole = plan.memory, kv_block_bytes(GEMMA, 16, "bfloat16")
    assert (memory.num_window_blocks > 0, memory.sliding_window) == (has_window_blocks, 512 if has_window_blocks else 0)
    assert memory.kv_block + memory.window_block == whole
    assert memory.window_block == (5 * whole // 6 if has_window_blocks else 0)
    assert bool(said(plan)) == has_window_blocks


def test_a_window_that_no_request_outgrows_changes_nothing_of_a_plan() -> None:
    local, plain = (planned(model(layer, layer), max_model_len=512) for layer in (LOCAL, attention_layer()))
    assert local.memory == plain.memory


def test_layers_that_all_have_a_window_have_window_blocks_alone() -> None:
    memory = planned(model(LOCAL, LOCAL), max_model_len=4096).memory
    assert (memory.num_blocks, memory.kv_block) == (0, 0)
    assert memory.cache == memory.num_window_blocks * memory.window_block


def test_of_layers_with_several_windows_the_longest_decides() -> None:
    spec = model(LOCAL, attention_layer(replace(ATTENTION, window=64)), attention_layer())
    plan = planned(spec, max_model_len=4096)
    assert plan.memory.sliding_window == 512
    assert plan.memory.window_block == 2 * plan.memory.kv_block
    assert "2 of 3 attention layers read the last 64 or 512 tokens alone" in said(plan)[0]


def test_the_plan_says_what_the_longest_request_takes_and_how_many_fit() -> None:
    plan = planned(max_model_len=8192, cache_memory="512MiB")
    memory, rules = plan.memory, rules_of(plan)
    blocks = 8192 // 16
    own, whole = (
        blocks * memory.kv_block + rules.blocks_per_request * memory.window_block,
        blocks * (memory.kv_block + memory.window_block),
    )
    count = min(
        (memory.num_blocks - 1) // blocks,
        (memory.num_window_blocks - 1 - rules.shared_blocks) // rules.blocks_per_request,
    )
    assert own < whole / 4
    assert (
        f"takes {format_bytes(own)} instead of {format_bytes(whole)}, and {count} of that length fit" in said(plan)[0]
    )
    without = planned(model(*[attention_layer()] * 6), max_model_len=8192, cache_memory="512MiB").memory
    assert 2 * count > 3 * ((without.num_blocks - 1) // blocks) > 0


@pytest.mark.parametrize("spec", [GEMMA, model(LOCAL, LOCAL), model(*hybrid().layers, LOCAL, attention_layer())])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [600, 4096, 32768])
def test_a_request_of_max_model_len_is_served_by_what_is_planned(spec: Any, caching: bool, length: int) -> None:
    plan = planned(spec, max_model_len=length, enable_prefix_caching=caching, max_num_seqs=4, cache_memory="600MiB")
    memory = plan.memory
    cache = CacheManager(
        memory.num_blocks,
        memory.num_slots,
        16,
        num_window_blocks=memory.num_window_blocks,
        window_block_rules=rules_of(plan),
    )
    assert cache.max_request_tokens() >= length
    assert cache.admit("a", length)
    assert memory.cache == (
        memory.num_blocks * memory.kv_block
        + memory.num_window_blocks * memory.window_block
        + memory.num_slots * memory.state_slot
    )
    assert memory.cache <= 600 * 2**20


def test_a_longer_request_needs_no_more_window_blocks() -> None:
    rules = SlidingWindowSpec(512, 16, 2048)
    assert rules.blocks_needed(16384 // 16) == rules.blocks_needed(8192 // 16) == 32 + 2 + 127


def test_a_cache_that_is_too_small_for_the_window_is_refused_with_what_would_do() -> None:
    with pytest.raises(CapacityError, match=r"window blocks of .* for its window of 512 and a step of") as refused:
        planned(max_model_len=4096, cache_memory="1MiB", max_num_batched_tokens=512, max_num_seqs=2)
    remedies = {each.setting: each.value for each in refused.value.remedies}
    settings = {"max_model_len": 4096, "max_num_batched_tokens": 512, "max_num_seqs": 2}
    planned(**settings, cache_memory=remedies["cache_memory"])


@pytest.mark.parametrize("setting", [{"cache_offload": "1GiB"}, {"cache_dir": "somewhere"}])
def test_files_behind_the_cache_hold_window_blocks_where_there_are_some(setting: dict[str, str]) -> None:
    with_window_blocks = planned(max_model_len=4096, **setting)
    assert with_window_blocks.cache_files is not None
    assert with_window_blocks.cache_files.window_block_bytes == with_window_blocks.memory.window_block > 0
    without = planned(max_model_len=512, **setting)  # no request outgrows the window
    assert without.cache_files is not None
    assert without.cache_files.window_block_bytes == 0


tables = st.builds(
    BlockDemand,
    block=st.sampled_from([0, 1, 10, 100]),
    window_block=st.sampled_from([1, 10, 100]),
    rules=st.builds(SlidingWindowSpec, st.integers(1, 300), st.just(16), st.integers(1, 500)),
    rows=st.integers(1, 20),
    longest=st.integers(1, 500),
    expected=st.integers(1, 64),
)


@given(tables=tables, more=st.integers(0, 200_000), holds_prefixes=st.booleans())
def test_a_split_holds_the_longest_request_fills_the_room_and_has_no_window_blocks_to_spare(
    tables: BlockDemand, more: int, holds_prefixes: bool
) -> None:
    tables = replace(tables, expected=min(tables.expected, tables.longest))
    least = tables.longest * tables.block + tables.rules.blocks_needed(tables.longest) * tables.window_block
    room = least + more
    blocks, window_blocks = split_tables(tables, room, holds_prefixes)
    assert blocks >= (tables.longest if tables.block else 0)
    assert window_blocks >= tables.rules.blocks_needed(tables.longest)
    assert (
        room - (tables.block or tables.window_block)
        < blocks * tables.block + window_blocks * tables.window_block
        <= room
    )
    if tables.block and not holds_prefixes:
        assert window_blocks <= tables.rules.blocks_needed(tables.longest, tables.rows)


@given(tables=tables, more=st.integers(0, 200_000))
def test_more_room_never_holds_fewer_prefixes_by_more_than_what_is_rounded(tables: BlockDemand, more: int) -> None:
    tables = replace(tables, expected=min(tables.expected, tables.longest))
    least = tables.longest * tables.block + tables.rules.blocks_needed(tables.longest) * tables.window_block
    found = [prefixes_in(tables, *split_tables(tables, least + part, True)) for part in (more, 4 * more)]
    # One window block more may cost as many blocks as several prefixes have.
    rounded = 1 + (tables.window_block // (tables.expected * tables.block) if tables.block else 0)
    assert found[1] >= found[0] - rounded


def test_the_least_cache_counts_window_blocks_for_one_request_and_one_step() -> None:
    budget = replace(BUDGET, window_block=7, window_block_window=33)
    rules = SlidingWindowSpec(33, budget.block_size, 100)
    blocks = -(-1000 // budget.block_size)
    alone = cache_need(BUDGET, 3, 1000)
    assert cache_need(budget, 3, 1000, 100) == alone + 7 * (1 + rules.blocks_needed(blocks))
