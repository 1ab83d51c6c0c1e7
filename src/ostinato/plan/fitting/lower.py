"""Search for limits that fit, adding up the costs of each candidate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ostinato.plan.fitting.costs import costs_of
from ostinato.plan.fitting.settle import ResolvedConfig
from ostinato.plan.graphs.ladders import LadderLimit
from ostinato.plan.limits import Limits, lower_limits, lowest_batched_tokens
from ostinato.plan.memory.cache_split import cache_need
from ostinato.plan.search import largest


def shrink_to_fit(settled: ResolvedConfig) -> tuple[Limits, LadderLimit]:
    """Return the limits and the reach of open ladders that fit, or the last ones tried if none do.

    Open ladders keep their default reach as long as one request fits with it, however few its tokens: graphs are what
    makes steps fast. They are never lowered to make room for the slots of given rows. If no request fits, ladders
    become as if the `max_num_seqs` tried had been given. If that is not enough, or it was given, they are lowered to
    graphs of one token, and then raised to the most that fits.
    """
    reach = settled.reach
    limits, is_fitting = _lower_limits(settled, reach)
    for smaller in (LadderLimit(), LadderLimit(most_tokens=1)):
        if is_fitting or _fits(settled, reach, limits, 1):
            break
        if settled.captured(limits, smaller) != settled.captured(limits, reach):
            reach = smaller
            limits, is_fitting = _lower_limits(settled, reach)
    return _with_larger_graphs(settled, limits) if is_fitting and reach.most_tokens is not None else (limits, reach)


def _lower_limits(settled: ResolvedConfig, reach: LadderLimit) -> tuple[Limits, bool]:
    fits = partial(_fits, settled, reach)
    return lower_limits(settled.config, settled.requested_limits, settled.slots_per_request, fits)


def _with_larger_graphs(settled: ResolvedConfig, limits: Limits) -> tuple[Limits, LadderLimit]:
    """Return limits that fit with graphs, and the reach of the largest graphs that fit.

    The largest graphs are searched with the smallest `max_num_batched_tokens`, if that is open. It is then raised again
    as far as the graphs allow.
    """
    rows, most_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    fewest = limits
    if not settled.config.is_given("max_num_batched_tokens"):
        floor = lowest_batched_tokens(rows, settled.slots_per_request, settled.budget.block_size)
        fewest = replace(limits, max_num_batched_tokens=min(floor, most_tokens))
    captured = largest(
        1,
        settled.captured(fewest, LadderLimit()).most_tokens,
        lambda tokens: _fits(settled, LadderLimit(most_tokens=tokens), fewest, rows),
    )
    reach = LadderLimit(most_tokens=captured or 1)
    tokens = largest(
        fewest.max_num_batched_tokens,
        most_tokens,
        lambda tokens: _fits(settled, reach, replace(limits, max_num_batched_tokens=tokens), rows),
    )
    return replace(limits, max_num_batched_tokens=tokens or most_tokens), reach


def _fits(settled: ResolvedConfig, reach: LadderLimit, limits: Limits, rows: int) -> bool:
    """Return whether the slots of `rows` rows and the blocks of one request fit."""
    need = cache_need(settled.budget, rows, limits.max_model_len, limits.max_num_batched_tokens)
    return need <= costs_of(settled, limits, reach).room(settled.budget)
