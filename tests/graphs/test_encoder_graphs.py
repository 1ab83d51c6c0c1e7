"""The encoder's graphs: packs of images give each image what it gets alone, whatever stands in the padding."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import CaptureError
from ostinato.graphs.buffers import EncoderBuffers
from ostinato.graphs.encoder_graphs import BudgetTimes, time_both
from tests.support.encoder_stand_in import CPU, VISION, Encoding, image, inputs_of, plan_of, write

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


def poison(encoding: Encoding) -> None:
    """NaN, and indices that exist but are wrong, wherever no image was written."""
    encoding.backend.arena.poison()
    whole = encoding.graphs._buffers.arrays
    whole["patches"].fill(np.nan)
    whole["tap_weights"].fill(np.nan)
    whole["taps"].fill(VISION.num_positions - 1)
    whole["positions"].fill(1 << 40)
    whole["starts"].fill(3)


@pytest.mark.parametrize("native", [True, False])
def test_padding_cannot_reach_a_real_row(native: bool) -> None:
    encoding = Encoding(native=native)
    encoding.graphs.capture_all()
    for sizes in ((3,), (5, 2), (1, 1, 1), (9, 2, 2), (16,), (1,)):
        items = [image(size, seed) for seed, size in enumerate(sizes)]
        poison(encoding)
        for item, own in zip(items, encoding.run(*items), strict=True):
            torch.testing.assert_close(own, encoding.alone(item), **CLOSE)
    assert encoding.graphs.counts.to_json()["misses"] == 0


def test_nothing_of_the_pack_before_is_left() -> None:
    encoding = Encoding()
    encoding.run(image(16, 1))
    after_large = encoding.run(image(3))[0]
    assert torch.equal(after_large, Encoding().run(image(3))[0])


@pytest.fixture(scope="module")
def captured() -> Encoding:
    encoding = Encoding(plan_of((3, 6, 13, 40), 3))
    with torch.inference_mode():
        encoding.graphs.capture_all()
    return encoding


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 45), min_size=1, max_size=12))
def test_whatever_is_packed_every_image_gets_what_it_gets_alone(captured: Encoding, sizes: list[int]) -> None:
    items = [image(size, seed) for seed, size in enumerate(sizes)]
    poison(captured)
    before = captured.graphs.counts.to_json()
    given = captured.run(*items)
    after = captured.graphs.counts.to_json()
    for item, own in zip(items, given, strict=True):
        torch.testing.assert_close(own, captured.alone(item), **CLOSE)
    large = sum(size > 40 for size in sizes)
    assert after["misses"] - before["misses"] == large
    assert after["hits"] - before["hits"] == len(sizes) - large
    assert after["tokens"] - before["tokens"] == sum(sizes)


def test_results_are_not_overwritten_by_what_is_encoded_next() -> None:
    encoding = Encoding()
    first = encoding.run(image(4), image(7))
    kept = [each.clone() for each in first]
    encoding.run(image(4, 9), image(7, 9), image(16, 9))
    assert all(map(torch.equal, first, kept))


def test_counts_say_what_ran_how_and_with_how_much_padding() -> None:
    encoding = Encoding()
    encoding.run(image(3), image(20), image(17))
    encoding.run(image(5), image(2))
    counts = encoding.graphs.counts.to_json()
    assert {name: counts[name] for name in ("hits", "misses", "tokens", "padding")} == {
        "hits": 3, "misses": 2, "tokens": 47, "padding": 2,
    }  # fmt: skip
    assert counts["seconds"] > 0
    by_budget = {each["budget"]: (each["packs"], each["items"], each["padding"]) for each in counts["budgets"]}
    assert by_budget == {4: (1, 1, 1), 8: (1, 2, 1)}
    [eager] = counts["eager"]
    assert (eager["reason"], eager["packs"], eager["tokens"]) == ("larger than the largest budget", 2, 37)


def test_without_graphs_every_image_runs_eagerly_and_alone() -> None:
    encoding = Encoding(plan_of((), 4, "none"))
    encoding.graphs.capture_all()
    items = [image(3), image(3, 1)]
    for item, own in zip(items, encoding.run(*items), strict=True):
        torch.testing.assert_close(own, encoding.alone(item), **CLOSE)
    assert encoding.graphs.num_bytes == encoding.graphs.num_captured == 0
    [eager] = encoding.graphs.counts.to_json()["eager"]
    assert (eager["reason"], eager["packs"], eager["items"]) == ("encoder graphs are off", 2, 2)


def test_capture_begins_with_the_largest_and_says_how_far_it_is() -> None:
    encoding, said = Encoding(), []
    encoding.graphs.capture_all(lambda what, done, total: said.append((what.split(";")[0], done, total)))
    assert said == [
        ("Capturing encoder graphs (16 tokens", 0, 3),
        ("Capturing encoder graphs (8 tokens", 1, 3),
        ("Capturing encoder graphs (4 tokens", 2, 3),
        ("Capturing encoder graphs", 3, 3),
    ]
    assert encoding.graphs.num_captured == 3
    buffers = EncoderBuffers(64, 4, VISION.patch_elements, CPU, "float32").num_bytes
    assert encoding.graphs.num_bytes == buffers + encoding.backend.arena.size
    assert buffers == 64 * (12 * 4 + 4 * 8 + 4 * 4 + 2 * 8) + 5 * 4


def test_left_to_their_first_use_graphs_are_captured_then() -> None:
    encoding = Encoding()
    assert encoding.graphs.num_captured == 0
    encoding.run(image(3))
    encoding.run(image(4))
    assert encoding.graphs.num_captured == 1
    assert encoding.graphs.counts.to_json()["hits"] == 2


class Turns:
    """A clock that moves by what each run is said to take."""

    def __init__(self, graph: float, eager: float) -> None:
        self.now, self.seconds, self.runs = 0.0, {"graph": graph, "eager": eager}, []

    def run(self, way: str) -> None:
        self.runs.append(way)
        self.now += self.seconds[way]

    def time(self, budget: int = 8) -> BudgetTimes:
        return time_both(
            budget, lambda: self.run("graph"), lambda: self.run("eager"), lambda: None, clock=lambda: self.now
        )


def test_short_packs_are_timed_a_few_times_in_turns_and_long_ones_once() -> None:
    short, long = Turns(0.001, 0.002), Turns(0.3, 0.2)
    assert short.time() == BudgetTimes(8, pytest.approx(0.001), pytest.approx(0.002))
    assert short.runs == ["eager", "graph"] * 5
    assert long.time().graph_loses
    assert long.runs == ["eager", "graph"]


def losing(*budgets: int) -> Any:
    """In place of `time_both`: graphs of these budgets lose."""

    def times(budget: int, graph: Any, eager: Any, wait: Any) -> BudgetTimes:  # noqa: ARG001
        torch.testing.assert_close(graph(), eager(), **CLOSE)
        return BudgetTimes(budget, 2.0, 1.0) if budget in budgets else BudgetTimes(budget, 1.0, 2.0)

    return times


def test_a_budget_at_which_the_graph_loses_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.graphs.encoder_graphs.time_both", losing(8))
    encoding = Encoding(plan_of(mode="auto"))
    encoding.graphs.capture_all()
    items = [image(3), image(4, 1), image(9)]
    for item, own in zip(items, encoding.run(*items), strict=True):
        torch.testing.assert_close(own, encoding.alone(item), **CLOSE)
    encoding.run(image(5), image(2))
    counts = encoding.graphs.counts.to_json()
    [eager] = counts["eager"]
    assert eager["reason"] == "eager was faster when both were timed"
    assert (eager["items"], eager["padding"]) == (2, 0)
    figures = encoding.graphs.figures()
    assert figures["decides"] == "encoder_graph_mode"
    assert [(each["budget"], each["runs"]) for each in figures["timed"]] == [
        (4, "graph"), (8, "eager"), (16, "graph"),
    ]  # fmt: skip
    assert figures["timed"][1] == {"budget": 8, "graph_seconds": 2.0, "eager_seconds": 1.0, "runs": "eager"}


def test_always_uses_every_graph_and_times_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.graphs.encoder_graphs.time_both", lambda *_: pytest.fail("timed"))
    encoding = Encoding(plan_of(mode="always"))
    encoding.graphs.capture_all()
    encoding.run(image(5))
    assert encoding.graphs.counts.to_json()["hits"] == 1
    assert [each["graph_seconds"] for each in encoding.graphs.figures()["timed"]] == [None] * 3


def test_a_buffer_that_was_replaced_is_an_error_that_names_it() -> None:
    encoding = Encoding()
    encoding.run(image(4))
    tensors = encoding.graphs._buffers.tensors
    tensors["taps"] = tensors["taps"].clone()
    with pytest.raises(CaptureError, match=r"^encoder buffers\.taps moved"):
        encoding.run(image(4))


def test_check_replay_finds_what_was_baked_in() -> None:
    encoding = Encoding(check_replay=True)
    encoding.run(image(5))
    numbers, encode = count(), encoding.model.encode
    encoding.graphs._encode = lambda inputs: encode(inputs) + next(numbers)
    with pytest.raises(CaptureError, match="encoded images"):
        encoding.run(image(12))


def test_buffers_are_padded_with_indices_that_exist_and_images_without_patches() -> None:
    buffers = EncoderBuffers(32, 3, VISION.patch_elements, CPU, "float32")
    write(buffers, [image(2), image(3), image(3)])
    buffers.pad(32, 3, 32)
    real = inputs_of([image(1), image(2)])
    view = write(buffers, [image(1), image(2)])
    buffers.pad(12, 2, 16)
    assert view.num_tokens == 12
    assert view.starts.tolist() == [0, 4, 12, 12]
    for name in ("patches", "taps", "tap_weights", "positions"):
        assert torch.equal(getattr(view, name), getattr(real, name))
    padding = buffers.view(16)
    assert not any(getattr(padding, name)[12:].any() for name in ("taps", "tap_weights", "positions"))
