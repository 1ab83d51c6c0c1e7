"""Graphs of the drafter: like those of the model, for one token per row."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.graphs.coverage import coverage
from ostinato.plan.graphs.ladders import CaptureSizes


def draft_capture(
    capture: CapturePlan, method: Literal["mtp", "draft"], max_num_seqs: int, max_num_batched_tokens: int
) -> CapturePlan:
    """Return the graphs of a prediction head or of a draft model.

    A head runs on decode rows alone, a draft model on all tokens. `capture` is the model's own plan. A head has full
    graphs where the model has, and no others.
    """
    is_head = method == "mtp"
    ladders = CaptureSizes((), capture.rows) if is_head else capture.ladders()
    most_tokens = max_num_seqs if is_head else max_num_batched_tokens
    return replace(
        capture,
        tokens=ladders.tokens,
        rows=ladders.rows,
        tokens_per_row=(1,),
        splits=() if is_head else capture.splits,
        coverage=coverage(ladders, capture.graph_mode, max_num_seqs=max_num_seqs, max_num_batched_tokens=most_tokens),
        uncovered=(),
        time=None,
    )
