"""The two ladders: which sizes they hold by default and as given, what is left out, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError, Remedy
from ostinato.plan.graphs.capture_sizes import CaptureSizes, LadderSettings, make_capture_sizes
from tests.support.patience import PATIENCE

FINE = (1, 2, 4, *range(8, 257, 8))
TO_512 = (*FINE, *range(272, 513, 16))


def ladders(**settings: Any) -> CaptureSizes:
    return make_capture_sizes(LadderSettings(**({"max_num_seqs": 256, "max_num_batched_tokens": 8192} | settings)))


def refusal(**settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        ladders(**settings)
    return error.value


def test_the_default_ladders_are_fine_up_to_256_and_coarse_above() -> None:
    assert ladders() == CaptureSizes(TO_512, FINE)
    assert ladders(max_num_seqs=300).rows == (*FINE, 272, 288, 300)


@pytest.mark.parametrize(
    ("max_num_seqs", "k", "tokens"),
    [
        (1, 0, (1, 2)),
        (3, 0, (1, 2, 4)),
        (3, 1, (1, 2, 4, 8)),
        (32, 0, (1, 2, 4, *range(8, 65, 8))),
        (32, 3, FINE),
        (1024, 0, TO_512),
    ],
)
def test_by_default_tokens_go_up_to_twice_a_full_decode_step_and_at_most_to_512(max_num_seqs, k, tokens) -> None:
    assert ladders(max_num_seqs=max_num_seqs, num_speculative_tokens=k).tokens == tokens


@pytest.mark.parametrize(
    ("limit", "given", "last"),
    [
        (257, 2048, (248, 256, 257)),
        (700, 1024, (672, 688, 700)),
        (768, 1024, (736, 752, 768)),
        (1024, 1024, (992, 1008, 1024)),
        (1025, 1024, (992, 1008, 1024)),
        (8192, 1000, (976, 992, 1000)),
        (8192, 3, (1, 2, 3)),
        (5, 2048, (2, 4, 5)),
        (1, 1, (1,)),
    ],
)
def test_the_largest_batch_and_a_given_largest_size_are_sizes_though_off_stride(limit, given, last) -> None:
    tokens = ladders(max_num_batched_tokens=limit, max_capture_size=given).tokens
    assert tokens[-len(last) :] == last


def test_the_largest_batch_is_a_size_within_the_default_largest_size() -> None:
    assert ladders(max_num_batched_tokens=300).tokens[-2:] == (288, 300)
    assert ladders(max_num_batched_tokens=512).tokens == TO_512
    assert ladders(max_num_batched_tokens=513).tokens == TO_512


def test_a_largest_size_above_the_largest_batch_is_a_decision() -> None:
    (decision,) = ladders(max_num_batched_tokens=700, max_capture_size=1024).decisions
    assert (decision.topic, decision.requested, decision.effective) == ("max_capture_size", 1024, 700)
    assert "max_num_batched_tokens 700" in decision.reason
    assert ladders(max_capture_size=1024).decisions == ()


@pytest.mark.parametrize("max_num_seqs", [1, 3, 5, 8, 100, 257, 700])
def test_max_num_seqs_is_always_a_row_count_and_no_token_limit_bounds_it(max_num_seqs: int) -> None:
    wide = ladders(max_num_seqs=max_num_seqs, num_speculative_tokens=3)
    assert wide.rows[-1] == max_num_seqs
    assert wide.rows == ladders(max_num_seqs=max_num_seqs, max_capture_size=2).rows


def test_the_row_limit_does_not_shorten_a_given_token_ladder() -> None:
    assert ladders(max_num_seqs=1, max_capture_size=512).tokens == TO_512


def test_interactivity_starts_with_every_size_up_to_32() -> None:
    interactive = ladders(performance_mode="interactivity")
    assert interactive.tokens == (*range(1, 33), *(size for size in TO_512 if size > 32))
    assert interactive.rows == (*range(1, 33), *(size for size in FINE if size > 32))
    few = ladders(max_num_seqs=5, performance_mode="interactivity")
    assert (few.tokens, few.rows) == (tuple(range(1, 11)), tuple(range(1, 6)))


def test_given_sizes_are_the_ladder_sorted_and_each_once() -> None:
    assert ladders(capture_sizes=[64, 3, 64, 10]) == CaptureSizes((3, 10, 64), (3, 10, 64))
    assert ladders(capture_sizes=(64, 3), max_capture_size=64).tokens == (3, 64)


def test_given_sizes_get_neither_the_largest_batch_nor_the_most_rows_added() -> None:
    given = ladders(capture_sizes=[8, 512], max_num_batched_tokens=700, max_num_seqs=100)
    assert (given.tokens, given.rows) == ((8, 512), (8,))


def test_given_sizes_make_rows_where_each_row_gets_all_its_tokens() -> None:
    given = ladders(capture_sizes=[3, 4, 8, 30, 64, 1024], max_num_seqs=16, num_speculative_tokens=3)
    assert (given.tokens, given.rows) == ((3, 4, 8, 30, 64, 1024), (1, 2, 16))
    assert given.decisions == ()


def test_given_rows_are_the_row_ladder_with_and_without_given_sizes() -> None:
    assert ladders(capture_sizes=[8], capture_rows=[7, 2, 7]) == CaptureSizes((8,), (2, 7))
    assert ladders(capture_rows=[7, 2]) == CaptureSizes(TO_512, (2, 7))


def test_given_sizes_that_no_batch_reaches_are_left_out_as_a_decision() -> None:
    given = ladders(capture_sizes=[900, 64, 701, 700], max_num_batched_tokens=700)
    assert given.tokens == (64, 700)
    (decision,) = given.decisions
    assert (decision.topic, decision.requested, decision.effective) == (
        "capture_sizes",
        [64, 700, 701, 900],
        [64, 700],
    )
    assert "max_num_batched_tokens 700" in decision.reason
    assert "701, 900" in decision.reason


def test_given_rows_that_no_batch_reaches_are_left_out_as_a_decision() -> None:
    given = ladders(capture_rows=[4, 300])
    assert given.rows == (4,)
    (decision,) = given.decisions
    assert (decision.topic, decision.requested, decision.effective) == ("capture_rows", [4, 300], [4])
    assert "max_num_seqs 256" in decision.reason


def test_sizes_all_out_of_reach_leave_an_empty_ladder_and_say_so() -> None:
    given = ladders(capture_sizes=[9000], capture_rows=[257])
    assert (given.tokens, given.rows) == ((), ())
    assert [(decision.topic, decision.effective) for decision in given.decisions] == [
        ("capture_sizes", []),
        ("capture_rows", []),
    ]


def test_given_sizes_that_make_no_rows_say_so() -> None:
    given = ladders(capture_sizes=[7, 9], num_speculative_tokens=1)
    assert given.rows == ()
    (decision,) = given.decisions
    assert (decision.topic, decision.requested, decision.effective) == ("capture_rows", None, [])


def test_interactivity_beside_given_sizes_is_an_error_that_names_both() -> None:
    with pytest.raises(ConfigError) as error:
        ladders(capture_sizes=[8], performance_mode="interactivity")
    assert "performance_mode" in error.value.message
    assert "capture_sizes" in error.value.message
    assert error.value.remedies == (Remedy("performance_mode", "balanced"), Remedy("capture_sizes", None))
    assert ladders(capture_sizes=[8], performance_mode="balanced").tokens == (8,)


@pytest.mark.parametrize(
    ("wrong", "named", "remedies"),
    [
        ({"capture_sizes": []}, "capture_sizes", {"capture_sizes": None}),
        ({"capture_rows": []}, "capture_rows", {"capture_rows": None}),
        ({"capture_sizes": [8, 0, -1]}, "0, -1", {"capture_sizes": [8]}),
        ({"capture_sizes": [0]}, "0", {"capture_sizes": None}),
        ({"capture_sizes": [8, True]}, "True", {"capture_sizes": [8]}),
        ({"capture_sizes": [8, 9.0]}, "9.0", {"capture_sizes": [8]}),
        ({"capture_sizes": [8, "16"]}, "'16'", {"capture_sizes": [8]}),
        ({"capture_sizes": "8,16"}, "'8,16'", {"capture_sizes": None}),
        ({"capture_sizes": 16}, "16", {"capture_sizes": [16]}),
        ({"capture_rows": [4, 0]}, "0", {"capture_rows": [4]}),
        (
            {"capture_sizes": [8, 64], "max_capture_size": 32},
            "max_capture_size 32",
            {"max_capture_size": 64, "capture_sizes": [8, 32]},
        ),
        (
            {"capture_sizes": [8, 64], "max_capture_size": 128},
            "max_capture_size 128",
            {"max_capture_size": 128 // 2, "capture_sizes": [8, 64, 128]},
        ),
        ({"capture_sizes": [8, 0], "max_capture_size": 9}, "0", {"capture_sizes": [8, 9]}),
        ({"capture_sizes": [8], "max_capture_size": 0}, "max_capture_size 0", {"max_capture_size": 8}),
        ({"max_capture_size": 0}, "max_capture_size", {"max_capture_size": 1}),
        ({"max_capture_size": True}, "max_capture_size", {"max_capture_size": 1}),
        ({"performance_mode": "fast"}, "balanced, interactivity", {"performance_mode": "balanced"}),
        ({"max_num_seqs": 0}, "max_num_seqs", {"max_num_seqs": 1}),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens", {"max_num_batched_tokens": 1}),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens", {"num_speculative_tokens": 0}),
    ],
)
def test_what_is_no_ladder_is_refused_with_values_that_each_work(wrong, named, remedies) -> None:
    error = refusal(**wrong)
    assert named in error.message
    assert {remedy.setting: remedy.value for remedy in error.remedies} == remedies
    for setting, value in remedies.items():
        ladders(**(wrong | {setting: value}))


def test_true_beside_one_equal_to_it_is_still_refused() -> None:
    # True == 1 to Python: a set of sizes would hide it.
    assert "True" in refusal(capture_sizes=[1, True], max_capture_size=1).message


@settings(max_examples=300, deadline=None)
@given(
    max_num_seqs=st.integers(1, 1200),
    max_num_batched_tokens=st.integers(1, 5000),
    num_speculative_tokens=st.integers(0, 5),
    max_capture_size=st.none() | st.integers(1, 6000),
    performance_mode=st.sampled_from(["balanced", "interactivity"]),
)
def test_open_ladders_ascend_and_follow_the_rules(
    max_num_seqs, max_num_batched_tokens, num_speculative_tokens, max_capture_size, performance_mode
) -> None:
    found = make_capture_sizes(
        LadderSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_speculative_tokens=num_speculative_tokens,
            max_capture_size=max_capture_size,
            performance_mode=performance_mode,
        )
    )
    on_stride = set(FINE) | set(range(272, 6001, 16))
    if performance_mode == "interactivity":
        on_stride |= set(range(1, 33))
    limit = max_capture_size or min(max_num_seqs * (1 + num_speculative_tokens) * 2, 512)
    tokens = {size for size in on_stride if size <= min(limit, max_num_batched_tokens)}
    if max_num_batched_tokens <= limit:
        tokens.add(max_num_batched_tokens)
    elif max_capture_size is not None:
        tokens.add(max_capture_size)
    assert found.tokens == tuple(sorted(tokens))
    assert found.rows == tuple(sorted({size for size in on_stride if size <= max_num_seqs} | {max_num_seqs}))


def test_the_planning_of_graphs_imports_no_torch() -> None:
    code = (
        "import sys, ostinato.plan.graphs.capture_sizes, ostinato.plan.graphs.coverage, ostinato.plan.traffic; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, check=False).returncode == 0
