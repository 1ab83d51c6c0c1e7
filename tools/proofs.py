"""Runs the tests that prove the project's promises, and writes docs/proofs.md with their results.

python tools/proofs.py            # runs them, and writes results and page
python tools/proofs.py --page     # writes the page from the results of the last run
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ostinato.plan.device.linux import processor_of

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs/proofs.md", ROOT / "benchmarks/results/proofs.json"


class Proof(NamedTuple):
    """A promise, the report of a bug in another engine that it answers, and the test that proves it here."""

    promise: str
    peer: str
    test: str


PROOFS = {
    "Plan first": [
        Proof("Every reachable batch has a named graph, or a stated reason", "vllm #37865, #53407",
              "plan/test_plan_capture.py::test_coverage_is_complete_and_disjoint_and_agrees_with_dispatch"),
        Proof("A batch size off the stride has a graph of its own", "vllm #40734",
              "plan/test_plan_capture.py::test_a_batch_size_off_the_stride_has_a_graph_of_its_own_where_it_is_within_the_largest"),
        Proof("Slots never shorten the token ladder; an error names values that work", "vllm #38270, #49064",
              "plan/test_plan_capture.py::test_given_rows_that_do_not_fit_their_slots_are_refused_and_remedies_keep_the_token_ladder"),
        Proof("No encoder budget is smaller than its images", "vllm #38040",
              "plan/test_encoder_budgets.py::test_no_budget_is_smaller_than_the_items_however_they_are_given"),
        Proof("A step takes no more memory than planned", "vllm #57475, #44740",
              "plan/test_activation_memory.py::test_steps_of_every_architecture_take_no_more_than_is_planned"),
        Proof("Every architecture has full graphs on a GPU", "vllm #36165",
              "graphs/test_no_host_reads.py::test_every_architecture_has_full_graphs_on_a_gpu"),
        Proof("An encoder graph that loses does not run", "vllm #41714",
              "graphs/test_encoder_graphs.py::test_a_budget_at_which_the_graph_loses_runs_eagerly_and_says_so"),
    ],
    "Nothing is silent": [
        Proof("An eager step that the plan did not foresee is an error on request", "vllm #37865",
              "graphs/test_graphs.py::test_under_strict_a_step_without_its_planned_graph_is_an_error_that_names_its_shape"),
        Proof("Drafts that do not pay are left off", "vllm #35387, #49548",
              "spec_decode/test_speculate_controller.py::test_a_short_run_loses_less_than_three_percent"),
        Proof("Every request gets what it would get alone, and none waits for ever", "vllm #40707, #52520",
              "scheduler/test_scheduler_media_properties.py::test_crowded_programs_with_images_give_every_request_what_it_would_get_alone"),
        Proof("The router promises the hits that caches then give, on hybrids too", "dynamo #9376, llm-d-router #2362",
              "replicas/test_routing_traffic.py::test_the_router_promises_what_the_caches_then_give"),
    ],
    "Fast equals slow": [
        Proof("A prompt that is moved by some tokens hits its common beginning", "vllm #45238, #53749",
              "kv_cache/test_cache_hits.py::test_a_prompt_that_is_moved_by_a_few_tokens_behind_a_common_beginning_hits_what_is_common"),
        Proof("With drafts, blocks and checkpoints hold what plain steps leave", "vllm #53912, #54360, #43559",
              "spec_decode/test_speculation_state.py::test_blocks_and_checkpoints_hold_what_steps_without_drafts_leave_there"),
        Proof("An output that ends within accepted drafts leaves nothing wrong behind", "Rapid-MLX #2739",
              "verify/test_verify_matrix.py::test_stopped_outputs_end_where_all_that_was_computed_fills_blocks_and_another_turn_follows"),
        Proof("Padding reaches no result", "TensorRT-LLM #13151, vllm #56922",
              "graphs/test_encoder_graphs.py::test_padding_cannot_reach_a_real_row"),
        Proof("A failed step leaves nothing in the cache", "sglang #37111",
              "engine/test_engine_cache.py::test_a_failed_step_leaves_nothing_in_the_cache"),
        Proof("The rest of the batch changes no bit", "vllm #57267, #55627",
              "parity/test_deterministic.py::test_the_rest_of_the_batch_changes_no_bit"),
        Proof("Prefixes of hybrids survive a restart", "vllm #38230, llama.cpp #25913",
              "parity/test_parity_files.py::test_a_prompt_hits_after_a_restart_and_gives_the_same_tokens"),
        Proof("Requests that move between engines give the same", "LMCache #2863",
              "scheduler/test_scheduler_moves.py::test_programs_that_move_requests_give_each_what_it_would_get_alone"),
    ],
    "Records": [
        Proof("A recorded run is replayed batch for batch, token for token", "",
              "verify/test_replay.py::test_a_random_schedule_is_replayed_batch_for_batch"),
        Proof("A planted fault is found at its step", "rMLX #436",
              "verify/test_replay.py::test_a_planted_fault_is_found_at_its_step"),
        Proof("A full disk ends the record and no request", "",
              "verify/test_replay.py::test_a_full_disk_ends_the_record_and_no_request"),
        Proof("A wrong token in production is counted and logged with its record", "vllm #39273",
              "verify/test_online_checks.py::test_a_wrong_token_is_counted_and_logged_with_its_record"),
    ],
}  # fmt: skip
HEAD = """# Proofs

Each promise, reports of bugs in other engines that it answers, the test that proves it here, and its last result.
Whether a report is still open there was not looked up for this page. `make proofs` runs one case of each test, and
`make test-all` all cases. `tools/proofs.py` has the table and makes this page; a single proof runs with

<!-- check: no, minutes: the table's tests run in the suite -->
```console
$ .venv/bin/python -m pytest tests/FILE::TEST
```
"""


def tests() -> list[str]:
    """The ids of all tests, without their cases."""
    return [proof.test for proofs in PROOFS.values() for proof in proofs]


def page(results: dict[str, Any]) -> str:
    """The page, with the results of the last run."""
    lines = [HEAD]
    last = f"Last run: {results['date']}, {results['machine']}, {results['seconds']:.0f} s."
    lines.append(last if results["outcomes"] else "There was no run yet.")
    for title, proofs in PROOFS.items():
        lines += ["", f"## {title}", "", "| promise | reported as | test, in `tests/` | result |", "|---|---|---|---|"]
        for proof in proofs:
            outcome = results["outcomes"].get(proof.test, "not run")
            file, _, name = proof.test.partition("::")
            lines.append(f"| {proof.promise} | {proof.peer} | {file} {name} | {outcome} |")
    return "\n".join(lines) + "\n"


def load_results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def run() -> dict[str, Any]:
    """Run the tests, and return their outcomes."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        named = [f"tests/{test}" for test in tests()]
        options = ["--cases", "one", "-q", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        subprocess.run([sys.executable, "-m", "pytest", *options, *named], cwd=ROOT, check=False)
        outcomes: dict[str, str] = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            test = f"{case.get('file', '').removeprefix('tests/')}::{case.get('name', '').partition('[')[0]}"
            kinds = {child.tag for child in case}
            outcomes[test] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{processor_of()}, {os.cpu_count()} cores",
        "seconds": round(time.monotonic() - begin, 1),
        "outcomes": outcomes,
    }


if __name__ == "__main__":
    if "--page" not in sys.argv:
        RESULTS.write_text(json.dumps(run(), indent=1) + "\n", encoding="utf-8")
    results = load_results()
    PAGE.write_text(page(results), encoding="utf-8")
    sys.exit(set(results["outcomes"].values()) - {"passed", "skipped"} != set())
