"""Coverage: complete and disjoint, one with dispatch, and with settings that do cover what runs eagerly."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.json_io import from_plain, to_json_data
from ostinato.plan.graphs.capture_sizes import CaptureSizes, LadderSettings, make_capture_sizes
from ostinato.plan.graphs.coverage import Coverage, DecodeRange, MixedRange, coverage, dispatch, uncovered

MODES = ("none", "piecewise", "full_decode_only", "full_and_piecewise")
LADDERS = CaptureSizes((1, 2, 4, 8), (1, 2, 3))
SMALL = {"max_num_seqs": 3, "max_num_batched_tokens": 10}


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of `make_capture_sizes` under which each decode step fits into a batch."""
    max_num_seqs, k = draw(st.integers(1, 60)), draw(st.integers(0, 4))
    request: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "num_speculative_tokens": k,
        "max_num_batched_tokens": max_num_seqs * (1 + k) + draw(st.integers(1, 200)),
        "performance_mode": draw(st.sampled_from(["balanced", "interactivity"])),
    }
    sizes = st.lists(st.integers(1, 400), min_size=1, max_size=6)
    if draw(st.booleans()):
        request["capture_sizes"] = draw(sizes)
        request["performance_mode"] = "balanced"  # the other one adds sizes, and is refused beside given ones
        if draw(st.booleans()):
            request["max_capture_size"] = max(request["capture_sizes"])
    elif draw(st.booleans()):
        request["max_capture_size"] = draw(st.integers(1, 400))
    if draw(st.booleans()):
        request["capture_rows"] = draw(st.lists(st.integers(1, 80), min_size=1, max_size=4))
    return request


def limits(request: dict[str, Any]) -> dict[str, int]:
    names = ("max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens")
    return {name: request[name] for name in names if name in request}


def expected(ladder: tuple[int, ...], count: int) -> int | None:
    return min((size for size in ladder if size >= count), default=None)


def test_uniform_decode_takes_a_full_graph_and_mixed_batches_a_piecewise_one() -> None:
    assert to_json_data(coverage(LADDERS, "full_and_piecewise", **SMALL, num_speculative_tokens=1)) == {
        "decode": [
            {"tokens_per_row": 1, "from": 1, "to": 1, "mode": "full", "size": 1},
            {"tokens_per_row": 1, "from": 2, "to": 2, "mode": "full", "size": 2},
            {"tokens_per_row": 1, "from": 3, "to": 3, "mode": "full", "size": 3},
            {"tokens_per_row": 2, "from": 1, "to": 1, "mode": "full", "size": 1},
            {"tokens_per_row": 2, "from": 2, "to": 2, "mode": "full", "size": 2},
            {"tokens_per_row": 2, "from": 3, "to": 3, "mode": "full", "size": 3},
        ],
        "mixed": [
            {"from": 1, "to": 1, "mode": "piecewise", "size": 1},
            {"from": 2, "to": 2, "mode": "piecewise", "size": 2},
            {"from": 3, "to": 4, "mode": "piecewise", "size": 4},
            {"from": 5, "to": 8, "mode": "piecewise", "size": 8},
            {"from": 9, "to": 10, "mode": "eager", "size": None},
        ],
    }


def test_decode_in_piecewise_graphs_is_padded_in_tokens() -> None:
    found = coverage(LADDERS, "piecewise", max_num_seqs=5, max_num_batched_tokens=20, num_speculative_tokens=1)
    assert [entry for entry in found.decode if entry.tokens_per_row == 2] == [
        DecodeRange(2, 1, 1, "piecewise", 2),
        DecodeRange(2, 2, 2, "piecewise", 4),
        DecodeRange(2, 3, 4, "piecewise", 8),
        DecodeRange(2, 5, 5, "eager", None),
    ]


def test_rows_above_the_full_graphs_take_piecewise_ones() -> None:
    ladders = CaptureSizes((4, 16), (2,))
    found = coverage(ladders, "full_and_piecewise", max_num_seqs=20, max_num_batched_tokens=40)
    assert found.decode == (
        DecodeRange(1, 1, 2, "full", 2),
        DecodeRange(1, 3, 4, "piecewise", 4),
        DecodeRange(1, 5, 16, "piecewise", 16),
        DecodeRange(1, 17, 20, "eager", None),
    )


def test_modes_without_a_kind_of_graph_run_eagerly_what_it_would_serve() -> None:
    none = coverage(LADDERS, "none", **SMALL)
    assert none == Coverage((DecodeRange(1, 1, 3, "eager", None),), (MixedRange(1, 10, "eager", None),))
    decode_only = coverage(LADDERS, "full_decode_only", **SMALL)
    assert decode_only.mixed == none.mixed
    assert [entry.mode for entry in decode_only.decode] == ["full"] * 3


def test_padding_is_that_of_the_smallest_batch_in_tokens() -> None:
    assert MixedRange(5, 8, "piecewise", 8).most_padding == 3
    assert MixedRange(9, 10, "eager", None).most_padding == 0
    assert DecodeRange(3, 2, 4, "full", 4).most_padding == 6
    assert DecodeRange(3, 2, 4, "piecewise", 16).most_padding == 10


def test_coverage_survives_json() -> None:
    found = coverage(LADDERS, "full_and_piecewise", **SMALL, num_speculative_tokens=2)
    assert from_plain(Coverage, json.loads(json.dumps(to_json_data(found)))) == found


@settings(max_examples=200, deadline=None)
@given(requests(), st.sampled_from(MODES))
def test_coverage_is_complete_and_disjoint_and_dispatch_agrees_for_every_batch(request, mode) -> None:
    ladders, k = make_capture_sizes(LadderSettings(**request)), request["num_speculative_tokens"]
    found = coverage(ladders, mode, **limits(request))
    full, piecewise = mode in ("full_decode_only", "full_and_piecewise"), mode in ("piecewise", "full_and_piecewise")

    served = [(entry, count) for entry in found.mixed for count in range(entry.from_, entry.to + 1)]
    assert [count for _, count in served] == list(range(1, request["max_num_batched_tokens"] + 1))
    for entry, tokens in served:
        assert (entry.mode, entry.size) == dispatch(ladders, mode, min(tokens, 7), None, tokens)
        size = expected(ladders.tokens, tokens) if piecewise else None
        assert (entry.mode, entry.size) == (("piecewise", size) if size else ("eager", None))

    shapes = [(entry, count) for entry in found.decode for count in range(entry.from_, entry.to + 1)]
    assert [(entry.tokens_per_row, rows) for entry, rows in shapes] == [
        (tokens_per_row, rows)
        for tokens_per_row in sorted({1, 1 + k})
        for rows in range(1, request["max_num_seqs"] + 1)
    ]
    for entry, rows in shapes:
        tokens = rows * entry.tokens_per_row
        assert (entry.mode, entry.size) == dispatch(ladders, mode, rows, entry.tokens_per_row, tokens)
        in_rows = expected(ladders.rows, rows) if full else None
        in_tokens = expected(ladders.tokens, tokens) if piecewise else None
        if in_rows is not None:
            assert (entry.mode, entry.size) == ("full", in_rows)
        elif in_tokens is not None:
            assert (entry.mode, entry.size) == ("piecewise", in_tokens)
        else:
            assert (entry.mode, entry.size) == ("eager", None)


@settings(max_examples=200, deadline=None)
@given(requests(), st.sampled_from(MODES))
def test_no_two_neighbouring_ranges_could_be_one(request, mode) -> None:
    found = coverage(make_capture_sizes(LadderSettings(**request)), mode, **limits(request))
    for ranges in (found.mixed, found.decode):
        for before, after in pairwise(ranges):
            same_graph = (before.mode, before.size) == (after.mode, after.size)
            assert not same_graph or before.tokens_per_row != after.tokens_per_row


@settings(max_examples=300, deadline=None)
@given(requests(), st.sampled_from(MODES))
def test_every_eager_range_comes_with_settings_that_cover_it_and_their_memory(request, mode) -> None:
    ladders = make_capture_sizes(LadderSettings(**request))
    found = coverage(ladders, mode, **limits(request))
    entries = uncovered(
        ladders, mode, LadderSettings(**request), bytes_for=lambda graphs: sum(100 + graph.tokens for graph in graphs)
    )
    eager = [entry for entry in (*found.decode, *found.mixed) if entry.mode == "eager"]
    assert [entry.batches for entry in entries] == eager
    for entry in entries:
        changes = {change.setting: change.value for change in entry.changes}
        assert len(changes) == len(entry.changes) > 0
        new_mode = changes.pop("graph_mode", mode)
        changed = make_capture_sizes(LadderSettings(**(request | changes)))
        kind = type(entry.batches)
        after = coverage(changed, new_mode, **limits(request))
        ranges = after.mixed if kind is MixedRange else after.decode
        for again in ranges:
            if kind is DecodeRange and again.tokens_per_row != entry.batches.tokens_per_row:
                continue
            overlaps = again.from_ <= entry.batches.to and again.to >= entry.batches.from_
            assert not overlaps or again.mode != "eager"
        assert entry.sizes == tuple(sorted(entry.sizes))
        assert entry.sizes, "a range that was eager needs a graph that there was not"
        assert entry.memory == sum(100 + size for size in entry.sizes)


@pytest.mark.parametrize(
    ("mode", "request_", "batches", "changes", "sizes"),
    [
        (
            "full_and_piecewise",
            {"max_num_seqs": 1, "max_num_batched_tokens": 20},
            MixedRange(3, 20, "eager", None),
            {"max_capture_size": 20},
            (4, 8, 16, 20),
        ),
        (
            "full_and_piecewise",
            {"max_num_seqs": 4, "max_num_batched_tokens": 20, "capture_sizes": [4, 8]},
            MixedRange(9, 20, "eager", None),
            {"capture_sizes": [4, 8, 20]},
            (20,),
        ),
        (
            "full_and_piecewise",
            {"max_num_seqs": 4, "max_num_batched_tokens": 20, "capture_sizes": [4, 8], "max_capture_size": 8},
            MixedRange(9, 20, "eager", None),
            {"capture_sizes": [4, 8, 20], "max_capture_size": 20},
            (20,),
        ),
        (
            "full_decode_only",
            {"max_num_seqs": 4, "max_num_batched_tokens": 20, "capture_rows": [2]},
            DecodeRange(1, 3, 4, "eager", None),
            {"capture_rows": [2, 4]},
            (4,),
        ),
        (
            "full_decode_only",
            {"max_num_seqs": 1, "max_num_batched_tokens": 2},
            MixedRange(1, 2, "eager", None),
            {"graph_mode": "full_and_piecewise"},
            (1, 2),
        ),
        (
            "none",
            {"max_num_seqs": 1, "max_num_batched_tokens": 2, "num_speculative_tokens": 0},
            DecodeRange(1, 1, 1, "eager", None),
            {"graph_mode": "full_and_piecewise"},
            (1, 1, 2),
        ),
    ],
)
def test_what_covers_a_range_is_the_setting_that_bounds_it(mode, request_, batches, changes, sizes) -> None:
    entries = uncovered(make_capture_sizes(LadderSettings(**request_)), mode, LadderSettings(**request_), bytes_for=len)
    (entry,) = [entry for entry in entries if entry.batches == batches]
    assert {change.setting: change.value for change in entry.changes} == changes
    assert (entry.sizes, entry.memory) == (sizes, len(sizes))


def test_a_lowered_max_num_seqs_does_not_change_which_graphs_a_change_adds() -> None:
    """Tokens come from the max_num_seqs asked for (40), rows from the effective one (4)."""
    asked = make_capture_sizes(LadderSettings(max_num_seqs=40, max_num_batched_tokens=100))
    request = {"max_num_seqs": 4, "max_num_batched_tokens": 100, "capture_rows": [2]}
    ladders = CaptureSizes(asked.tokens, make_capture_sizes(LadderSettings(**request)).rows)
    (mixed, decode) = (
        uncovered(ladders, "full_and_piecewise", LadderSettings(**request), bytes_for=len),
        uncovered(ladders, "full_decode_only", LadderSettings(**request), bytes_for=len),
    )
    assert [(entry.batches.from_, entry.sizes) for entry in mixed] == [(81, (88, 96, 100))]
    assert [entry.sizes for entry in decode if isinstance(entry.batches, DecodeRange)] == [(4,)]
