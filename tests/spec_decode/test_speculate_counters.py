"""The counts of drafts are those that a hand would count."""

from __future__ import annotations

from ostinato.observe.counts import SpeculationCounts
from ostinato.scheduler.batch import Batch, BatchRow, RowResult, StepResult
from ostinato.spec_decode.controller import count_drafts

K = 3


def step(num_drafts: int, *decode: tuple[int, int], prefill: int = 0, errors: int = 0) -> tuple[Batch, StepResult]:
    """A step of decode rows (drafts proposed, drafts accepted), failed ones, and prefill rows that sample."""
    results = [RowResult("", tuple(range(1 + accepted)), num_drafts=proposed) for proposed, accepted in decode]
    results += [RowResult("", num_drafts=num_drafts, error=ValueError("not finite"))] * errors
    num_decode_rows = len(results)
    results += [RowResult("", (7,))] * prefill
    rows = tuple(BatchRow("", (1,), 1, (), samples=True) for _ in results)
    return Batch(rows, num_decode_rows, num_drafts), StepResult(tuple(results))


def test_acceptance_equals_a_count_by_hand() -> None:
    counters = SpeculationCounts(K, (0, K))
    count_drafts(counters, *step(K, (3, 3), (3, 0), (3, 2)))
    count_drafts(counters, *step(K, (2, 2), (0, 0), (3, 1), prefill=2))
    count_drafts(counters, *step(0, (0, 0), (0, 0)))
    count_drafts(counters, *step(K, (0, 0), (0, 0), (0, 0)))
    count_drafts(counters, *step(K, (0, 0)))
    count_drafts(counters, *step(K, (1, 0), (3, 3), errors=1))
    # Rows with drafts (proposed, accepted): (3,3) (3,0) (3,2) (2,2) (3,1) (1,0) (3,3): 7 rows, 18 drafts, 11 accepted.
    assert counters.to_json() == {
        "num_speculative_tokens": 3,
        "steps": {"0": 3, "3": 3},
        "steps_without_draft": 2,
        "rows_with_drafts": 7,
        "rows_without_draft": 1 + 3 + 1,
        "tokens": (4 + 1 + 3) + (3 + 1 + 2) + 2 + 3 + 1 + (1 + 4),
        "drafts_proposed": 18,
        "drafts_accepted": 11,
        "acceptance": round(11 / 18, 4),
        "tokens_per_row_with_drafts": round((7 + 11) / 7, 4),
        "positions": [
            {"proposed": 7, "reached": 7, "accepted": 5, "acceptance": round(5 / 7, 4)},
            {"proposed": 6, "reached": 5, "accepted": 4, "acceptance": round(4 / 5, 4)},
            {"proposed": 5, "reached": 3, "accepted": 2, "acceptance": round(2 / 3, 4)},
        ],
    }


def test_a_draft_behind_a_refused_one_is_proposed_but_not_reached() -> None:
    counters = SpeculationCounts(K, (0, K))
    count_drafts(counters, *step(K, (3, 0)))
    assert (counters.proposed, counters.reached, counters.accepted) == ([1, 1, 1], [1, 0, 0], [0, 0, 0])


def test_without_a_step_there_is_no_rate() -> None:
    described = SpeculationCounts(1, (0, 1)).to_json()
    assert described["acceptance"] is None
    assert described["tokens_per_row_with_drafts"] is None
    assert described["positions"] == [{"proposed": 0, "reached": 0, "accepted": 0, "acceptance": None}]


def test_prefill_rows_and_rows_that_end_with_an_error_count_nowhere() -> None:
    counters = SpeculationCounts(K, (0, K))
    count_drafts(counters, *step(K, prefill=3))
    count_drafts(counters, *step(K, errors=2))
    assert counters.to_json() == SpeculationCounts(K, (0, K)).to_json()
