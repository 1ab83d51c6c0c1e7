"""Statistics of the load generator: pure functions of a run's outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

from ostinato.bench.figures import summary
from ostinato.bench.serve.sending import RequestOutcome, LoadRun
from ostinato.plan.layouts.deadline import Deadline


def serve_figures(run: LoadRun, deadline: Deadline | None) -> dict[str, Any]:
    """Return rates, latencies and errors of one run.

    Latencies count from the moment when a request was due, not from when it was sent, so that a slow server cannot hide
    behind a generator that waits for it. Rates count complete replies, over the time from the first arrival to the last
    end. There is a time between chunks for each gap, and a time per output token for each request.
    """
    complete = [each for each in run.outcomes if each.error is None]
    output_tokens = sum(map(count_tokens, complete))
    first = [seconds for each in complete if (seconds := first_token_seconds(each)) is not None]
    met = None if deadline is None else sum(meets_slo(deadline, each) for each in run.outcomes)
    return {
        "requests": len(run.outcomes),
        "complete": len(complete),
        "errors": dict(Counter(each.error for each in run.outcomes if each.error is not None)),
        "error_details": {each.error: each.detail for each in reversed(run.outcomes) if each.error is not None},
        "not_sent": run.not_sent,
        "empty": len(complete) - len(first),
        "seconds": run.seconds,
        "requests_per_second": len(complete) / run.seconds,
        "output_tokens_per_second": output_tokens / run.seconds,
        "total_tokens_per_second": (output_tokens + _sum(each.prompt_tokens for each in complete)) / run.seconds,
        "met_deadline": met,
        "goodput": None if met is None else met / run.seconds,
        "time_to_first_token": summary(first),
        "time_per_output_token": summary([t for each in complete if (t := seconds_per_token(each)) is not None]),
        "time_between_chunks": summary(
            [later - sooner for each in complete for sooner, later in pairwise(each.chunk_times)]
        ),
        "end_to_end": summary([each.end - each.due for each in complete]),
        "at_once": at_once(run.outcomes),
        "tokens": _token_figures(complete),
        "generator": {
            "send_lag": summary([each.sent - each.due for each in run.outcomes]),
            "loop_lag": summary(run.loop_lags),
            "cpu_seconds": run.cpu_seconds,
            "cpu_share": run.cpu_seconds / run.seconds,
        },
        "outcomes": [_outcome_figures(each) for each in run.outcomes],
    }


def meets_slo(deadline: Deadline, outcome: RequestOutcome) -> bool:
    """Return whether a request is complete, has text, and came in time.

    In time are its first piece of text, and on average the tokens after that.
    """
    first = first_token_seconds(outcome)
    return outcome.error is None and first is not None and deadline.is_met(first, seconds_per_token(outcome))


def first_token_seconds(outcome: RequestOutcome) -> float | None:
    """Return the seconds from when it was due to its first piece of text; None without text."""
    return outcome.chunk_times[0] - outcome.due if outcome.chunk_times else None


def seconds_per_token(outcome: RequestOutcome) -> float | None:
    """Return the mean time of the tokens after the first, from the first piece of text to the last.

    Return None with a single token.
    """
    tokens = count_tokens(outcome)
    if tokens < 2 or len(outcome.chunk_times) < 2:
        return None
    return (outcome.chunk_times[-1] - outcome.chunk_times[0]) / (tokens - 1)


def count_tokens(outcome: RequestOutcome) -> int:
    """Return the output tokens that the server counted, or else the number of pieces of text."""
    return len(outcome.chunk_times) if outcome.output_tokens is None else outcome.output_tokens


def at_once(outcomes: Sequence[RequestOutcome]) -> dict[str, float]:
    """Return the number of requests in progress: most at one moment, and the mean over the run."""
    ends = max(each.end for each in outcomes)
    changes = sorted(chain.from_iterable(((each.sent, 1), (each.end, -1)) for each in outcomes))
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return {"mean": sum(each.end - each.sent for each in outcomes) / ends, "most": most}


def _token_figures(complete: Sequence[RequestOutcome]) -> dict[str, Any]:
    """Return the tokens of all complete replies together. Replies that the server did not count are `uncounted`."""
    cached = [each.cached_tokens for each in complete if each.cached_tokens is not None]
    return {
        "prompt": _sum(each.prompt_tokens for each in complete),
        "cached": sum(cached) if cached else None,
        "output": sum(map(count_tokens, complete)),
        "chunks": sum(len(each.chunk_times) for each in complete),
        "uncounted": sum(each.output_tokens is None for each in complete),
    }


def _outcome_figures(outcome: RequestOutcome) -> dict[str, Any]:
    return {
        "conversation": outcome.conversation,
        "due": outcome.due,
        "time_to_first_token": first_token_seconds(outcome),
        "time_per_output_token": seconds_per_token(outcome),
        "end_to_end": outcome.end - outcome.due,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": count_tokens(outcome),
        "error": outcome.error,
    }


def _sum(counts: Any) -> int:
    return sum(count or 0 for count in counts)
