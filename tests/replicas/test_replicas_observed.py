"""The counts of several engines as those of one."""

from __future__ import annotations

from typing import Any

from ostinato import LLM, SamplingParams
from ostinato.engine.process.engine_messages import StatsSnapshot
from ostinato.observe.counts import EngineHistograms, SpeculationCounts
from ostinato.observe.metrics import families, merge_metrics, render_metrics
from ostinato.replicas.stats_fanout import merge_index_snapshots, merge_observations, merge_stats


def test_counts_add_up_by_name_and_what_is_no_count_stays() -> None:
    one = {"running": 1, "finished": {"stop": 2}, "files": None, "name": "x", "list": [1, 2], "is": True}
    two = {
        "running": 4,
        "finished": {"stop": 1, "length": 5},
        "files": {"read": 3},
        "name": "x",
        "list": [3, 4],
        "is": True,
    }
    assert merge_stats([one, two]) == {
        "running": 5,
        "finished": {"stop": 3, "length": 5},
        "files": {"read": 3},
        "name": "x",
        "list": [4, 6],
        "is": True,
    }
    assert merge_stats([one]) == one
    assert merge_stats([None, None]) is None


def test_pictures_of_two_indices_stand_beside_each_other() -> None:
    branch = {"parent": None, "start": 0, "end": 32}
    one = {"texts": 1, "blocks": 2, "checkpoints": 1, "branches": [branch, {**branch, "parent": 0}]}
    assert merge_index_snapshots([one, one]) == {
        "texts": 2,
        "blocks": 4,
        "checkpoints": 2,
        "branches": [branch, {**branch, "parent": 0}, branch, {**branch, "parent": 2}],
    }


def speculation(rows: list[tuple[int, int]]) -> dict[str, Any]:
    counts = SpeculationCounts(2, (0, 2))
    counts.count(2, rows)
    return counts.to_json()


def test_rates_are_those_of_all_rows_together() -> None:
    first, second = [(2, 3), (2, 1)], [(2, 2)]
    together_counted = speculation(first + second)
    added = merge_stats([speculation(first), speculation(second)])
    added["steps"] = together_counted["steps"]  # one step there, two here
    added["tokens_per_row_with_drafts"] = together_counted["tokens_per_row_with_drafts"]
    assert added == together_counted


def test_the_counts_of_a_real_engine_twice_are_twice_its_counts_and_metrics_tell_both_apart() -> None:
    llm = LLM("demo", threads=1, speculative="ngram:2")
    llm.generate("Q: Ava has 17 apples and buys 25 more.", SamplingParams(max_tokens=20, temperature=0))
    seen = StatsSnapshot(llm.stats(), EngineHistograms())
    seen.meter.first_token.observe(0.2, times=3)
    both = merge_observations([seen, seen])
    assert both.stats["generated_tokens"] == 2 * seen.stats["generated_tokens"] > 0
    assert both.stats["graphs"]["steps"] == {name: 2 * count for name, count in seen.stats["graphs"]["steps"].items()}
    assert both.stats["speculation"]["acceptance"] == seen.stats["speculation"]["acceptance"]
    assert both.meter.first_token.to_json() == {
        **seen.meter.first_token.to_json(),
        "counts": [2 * count for count in seen.meter.first_token.counts],
        "sum": 2 * seen.meter.first_token.total,
    }
    memory = dict.fromkeys(("weights", "activations", "graphs", "cache"), 1)
    of_each = [families(seen.stats, seen.meter, memory, "ostinato:", {"engine": name}) for name in "ab"]
    text = render_metrics(merge_metrics(of_each)).decode()
    count = float(seen.stats["generated_tokens"])
    assert text.count("# TYPE ostinato:generation_tokens_total counter") == 1
    for name in "ab":
        assert f'ostinato:generation_tokens_total{{engine="{name}"}} {count}' in text
