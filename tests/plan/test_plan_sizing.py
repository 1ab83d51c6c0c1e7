"""Sizes chosen from traffic: for which ladders, and what both ladders are said to make of it."""

from __future__ import annotations

from collections import Counter

import pytest

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.plan import make_plan
from ostinato.plan.traffic import LadderOutcome, Sizing, Traffic, size_for_traffic
from tests.support.plan_cases import GIB, cpu, hybrid

TRAFFIC = Traffic(
    decode={1: Counter({3: 10, 20: 1, 50: 4}), 3: Counter({3: 5})}, mixed=Counter({9: 2, 100: 7, 3000: 1})
)


def captured(**settings: object) -> CapturePlan:
    return make_plan(EngineConfig(**settings), hybrid(), cpu(64 * GIB)).capture


def sized(capture: CapturePlan, num_sizes: int | None = 2, traffic: Traffic = TRAFFIC) -> Sizing:
    return size_for_traffic(traffic, capture, max_num_seqs=32, max_num_batched_tokens=1024, num_sizes=num_sizes)


def test_each_ladder_is_chosen_from_its_own_steps_and_stays_within_the_limits() -> None:
    sizing = sized(captured())
    assert sizing.tokens is not None
    assert sizing.rows is not None
    assert sizing.tokens.chosen == LadderOutcome((9, 100), replayed=9, eager=1, padding=0)
    assert sizing.rows.chosen == LadderOutcome((3, 20), replayed=16, eager=4, padding=0)
    assert sizing.flags == ["--capture-sizes 9,100", "--capture-rows 3,20"]


def test_a_row_of_padding_counts_as_many_tokens_as_a_row_has() -> None:
    sizing = sized(captured())
    assert sizing.rows is not None
    # 3 rows take the graph of 4: 10 times one token, 5 times three; 20 rows take that of 24.
    assert sizing.rows.planned.padding == 10 + 5 * 3 + 4
    assert sizing.rows.planned.mean_padding == (10 + 5 * 3 + 4) / 16


def test_without_full_graphs_decode_steps_are_steps_of_tokens() -> None:
    sizing = sized(captured(graph_mode="piecewise"), num_sizes=1)
    assert sizing.rows is None
    assert sizing.tokens is not None
    assert sizing.tokens.chosen.sizes == (100,)
    assert sizing.tokens.chosen.replayed == 10 + 1 + 4 + 5 + 2 + 7
    assert sizing.flags == ["--capture-sizes 100"]


def test_without_piecewise_graphs_only_rows_are_chosen() -> None:
    sizing = sized(captured(graph_mode="full_decode_only"))
    assert sizing.tokens is None
    assert sizing.flags == ["--capture-rows 3,20"]


def test_a_ladder_without_traffic_stays_as_it_is_and_is_named_all_the_same() -> None:
    sizing = sized(captured(capture_rows=[1, 8]), traffic=Traffic(mixed=Counter({9: 2})))
    assert sizing.flags == ["--capture-sizes 9", "--capture-rows 1,8"]


def test_by_default_there_are_as_many_sizes_as_planned() -> None:
    mixed = Counter(range(1, 60))
    sizing = sized(captured(), num_sizes=None, traffic=Traffic(mixed=mixed))
    assert sizing.tokens is not None
    assert len(sizing.tokens.chosen.sizes) == len(captured().tokens) == 11
    assert sizing.tokens.chosen.padding < sizing.tokens.planned.padding


def test_without_graphs_there_is_nothing_to_choose() -> None:
    with pytest.raises(ConfigError) as error:
        sized(captured(graph_mode="none"))
    assert [(remedy.setting, remedy.value) for remedy in error.value.remedies] == [("graph_mode", "full_and_piecewise")]


def test_at_least_one_size_is_chosen() -> None:
    with pytest.raises(ConfigError, match="num_sizes = 0"):
        sized(captured(), num_sizes=0)
