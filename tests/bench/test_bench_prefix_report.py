"""The prefix benchmark on tiny models: what its report holds, and what is found where."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from ostinato.bench.prefix_cache import PrefixBench, prefix
from ostinato.bench.prefix_workloads import WORKLOADS, Sizes
from ostinato.cli.main import main
from tests.support.checkpoints import checkpoint

SIZES = Sizes(shared_len=40, new_len=8, output_len=6, sessions=3, turns=3, conversation_len=64)
BOTH = ("boundaries", "boundaries+branches")
TINY = {"threads": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Of all workloads on a hybrid, in every mode."""
    bench = PrefixBench(tuple(WORKLOADS), ("none", "align", "all"), BOTH, ("marconi",), SIZES, concurrency=2, rounds=2)
    settings = {**TINY, "model": str(checkpoint("nemotron_h")), "cache_memory": "16MiB"}
    return prefix(settings, bench, lambda text: None).data


def results_of(report: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    found = [each for each in report["results"] if all(each[name] == value for name, value in wanted.items())]
    assert found
    return found


def test_the_report_has_each_workload_in_each_configuration(report: dict[str, Any]) -> None:
    names = [each["configuration"] for each in report["configurations"]]
    assert names == ["none", "align", "align+branches", "all", "all+branches"]
    assert report["baseline"] == "none"
    assert [(r["workload"], r["configuration"]) for r in report["results"]] == list(product(WORKLOADS, names))
    assert (report["settings"]["shared_len"], report["settings"]["concurrency"]) == (40, 2)
    assert "state_cache_mode" not in report["settings"]
    json.dumps(report)


def test_all_configurations_are_asked_the_same(report: dict[str, Any]) -> None:
    for workload, requests in (("system", 9), ("chat", 9), ("thinking", 9), ("few-shot", 9), ("agents", 7)):
        results = results_of(report, workload=workload)
        assert {result["requests"] for result in results} == {2 * requests}
        assert len({result["prompt_tokens"] for result in results}) == 1


def test_cached_tokens_and_misses_add_up_to_the_prompts(report: dict[str, Any]) -> None:
    for result in report["results"]:
        assert result["cached_tokens"] + sum(result["misses"].values()) == result["prompt_tokens"]
        assert result["cached_tokens"] == sum(each["cached_tokens"] for each in result["rounds"])


def test_a_hybrid_finds_nothing_without_checkpoints(report: dict[str, Any]) -> None:
    for result in results_of(report, mode="none"):
        assert result["hit_rate"] == result["checkpoints_taken"] == 0
        assert result["first_token_ratio"] == {"median": 1, "min": 1, "max": 1}


@pytest.mark.parametrize("mode", ["align", "all"])
def test_prompts_that_share_a_beginning_find_it(report: dict[str, Any], mode: str) -> None:
    for workload in WORKLOADS:
        [result] = results_of(report, workload=workload, mode=mode, checkpoint_policy="boundaries+branches")
        assert 0 < result["hit_rate"] < 1
        assert result["checkpoints_taken"] > 0
        times = result["time_to_first_token"]
        assert 0 < times["p50"] <= times["p99"] <= times["max"]


@pytest.mark.parametrize("mode", ["align", "all"])
def test_the_second_turn_finds_the_conversation_and_its_cold_twin_does_not(report: dict[str, Any], mode: str) -> None:
    for result in results_of(report, workload="second-turn", mode=mode):
        # 64 tokens of conversation, the last of them sampled and not computed; 8 new ones.
        assert (result["requests"], result["prompt_tokens"], result["cached_tokens"]) == (2, 2 * 72, 2 * 48)
        turn = result["second_turn"]
        assert turn["speedup"]["median"] > 0
        assert turn["cold_ratio"]["median"] > 0
        assert all(len(each["cold_first_token_seconds"]) == 1 for each in result["rounds"])
    assert all(each["second_turn"] is None for each in results_of(report, workload="chat"))


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_rewritten_history_is_found_up_to_the_mark(report: dict[str, Any], mode: str) -> None:
    for result in results_of(report, workload="rewritten-history", mode=mode):
        marks = result["marks"]
        assert result["requests"] == 6
        # Up to the last block's end before the mark, and nothing of conversations that are shorter than 256 tokens.
        assert marks["marked_computed_tokens"] <= 6 * (8 + 15)
        assert marks["unmarked_computed_tokens"] == result["prompt_tokens"]
        assert marks["speedup"]["median"] > 0
    assert all(each["marks"] is None for each in results_of(report, workload="chat"))


def test_branches_find_what_boundaries_alone_do_not() -> None:
    # Prompts go on for more than a block after the point where others leave them.
    sizes = Sizes(shared_len=40, new_len=48, output_len=20, sessions=4, turns=3, conversation_len=64)
    workloads = ("system", "few-shot", "agents")
    bench = PrefixBench(workloads, ("all",), BOTH, ("marconi",), sizes, concurrency=1, rounds=1)
    settings = {**TINY, "model": str(checkpoint("nemotron_h")), "cache_memory": "16MiB"}
    report = prefix(settings, bench, lambda text: None).data
    assert report["baseline"] is None
    for workload in workloads:
        alone, branches = results_of(report, workload=workload)
        assert branches["cached_tokens"] > alone["cached_tokens"]
        assert alone["misses"]["no_checkpoint"] > branches["misses"]["no_checkpoint"]
        assert branches["first_token_ratio"] is None
    [system] = results_of(report, workload="system", configuration="all+branches")
    # The second question takes the checkpoint at the end of the common blocks; the third and later ones hit it.
    assert system["cached_tokens"] == 32 * (12 - 2)


def test_the_second_turn_of_a_transformer_finds_whole_blocks() -> None:
    bench = PrefixBench(("second-turn",), None, BOTH, ("marconi", "lru"), SIZES, concurrency=1, rounds=1)
    report = prefix({**TINY, "model": str(checkpoint("llama"))}, bench, lambda text: None).data
    assert report["baseline"] == "off"
    assert [each["cached_tokens"] for each in report["results"]] == [0, 48, 48]
    assert results_of(report, mode="off")[0]["misses"] == {"not_wanted": 72}


def test_the_command_prints_tables_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workloads", "chat,second-turn", "--modes", "none,all", "--shared-len", "20", "--new-len", "4"]
    flags += ["--output-len", "2", "--turns", "2", "--sessions", "1", "--conversation-len", "40", "--rounds", "1"]
    flags += ["--threads", "1", "--cache-memory", "16MiB"]
    printed = []
    for last in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            main(["bench", "prefix", str(checkpoint("nemotron_h")), *flags, *last])
        assert not end.value.code
        printed.append(capsys.readouterr().out)
    tables, report = printed
    for title in ("hit rate", "never", "evicted", "second turn", "all+branches"):
        assert title in tables
    assert {result["workload"] for result in json.loads(report)["results"]} == {"chat", "second-turn"}


@pytest.mark.parametrize(
    ("option", "value"),
    [("--workloads", "chats"), ("--modes", "auto"), ("--checkpoint-policies", ""), ("--eviction-policies", "fifo")],
)
def test_unknown_names_are_refused_with_the_known_ones(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "prefix", "demo", option, value])
    assert end.value.code == 2
    assert option in capsys.readouterr().err
