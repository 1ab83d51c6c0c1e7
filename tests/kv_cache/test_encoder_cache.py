"""The encoder cache gives images their cells, and keeps what stands there until the room is needed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kv_cache.encoder_cache import EncoderCache, PinnedImage

SIZES = {"a": 1, "b": 2, "c": 3, "d": 3, "e": 5, "f": 8}
"""Tokens of the images that the random programs are about."""


def test_an_image_gets_a_cell_per_token_and_never_the_null_one() -> None:
    cache = EncoderCache(6)
    assert cache.pin("r", [("cat", 2), ("dog", 3)]) == [PinnedImage((1, 2), True), PinnedImage((3, 4, 5), True)]
    assert (cache.capacity, cache.num_pinned, cache.num_cached) == (5, 5, 0)
    cache.check_integrity()


def test_what_one_request_has_taken_is_a_hit_for_another_in_the_same_step_and_after_both() -> None:
    cache = EncoderCache(6)
    [first] = cache.pin("r", [("cat", 2)])
    assert cache.pin("s", [("cat", 2)]) == [PinnedImage(first.cells, is_new=False)]
    cache.finish_step(succeeded=True)
    cache.unpin_all("r")
    cache.unpin_all("s")
    assert (cache.num_pinned, cache.num_cached, cache.num_items) == (0, 2, 1)
    assert cache.pin("t", [("cat", 2)]) == [PinnedImage(first.cells, is_new=False)]
    counters = cache.counters
    assert (counters.misses, counters.encoded_tokens, counters.hits, counters.hit_tokens) == (1, 2, 2, 4)


def test_an_image_that_stands_twice_in_a_prompt_is_encoded_once() -> None:
    cache = EncoderCache(4)
    assert cache.num_fitting([("cat", 3), ("cat", 3)]) == 2
    first, second = cache.pin("r", [("cat", 3), ("cat", 3)])
    assert first == second
    assert (cache.counters.misses, cache.counters.hits) == (1, 0)
    cache.check_integrity()


def test_the_least_recently_used_image_that_nobody_holds_makes_room() -> None:
    cache = EncoderCache(7)
    for name in ("cat", "dog", "owl"):
        cache.pin("r", [(name, 2)])
        cache.finish_step(succeeded=True)
        cache.unpin_except("r", ())
    cache.pin("r", [("cat", 2)])
    cache.unpin_except("r", ())
    assert cache.pin("r", [("fox", 2)])[0].is_new
    assert [cache.pin("s", [(name, 2)])[0].is_new for name in ("cat", "owl")] == [False, False]
    assert cache.counters.evicted_items == 1
    assert cache.num_fitting([("dog", 2)]) == 0  # all is held
    cache.check_integrity()


def test_what_is_there_is_not_evicted_for_another_image_of_the_same_row() -> None:
    cache = EncoderCache(6)
    cache.pin("r", [("cat", 2), ("dog", 2)])
    cache.finish_step(succeeded=True)
    cache.unpin_all("r")
    assert cache.num_fitting([("owl", 3), ("cat", 2)]) == 2
    owl, cat = cache.pin("s", [("owl", 3), ("cat", 2)])
    assert (owl.is_new, cat.is_new) == (True, False)
    cache.check_integrity()


def test_a_row_finds_room_for_as_many_of_its_images_as_can_be_held_together() -> None:
    cache = EncoderCache(8)
    cache.pin("r", [("cat", 3)])
    assert cache.num_fitting([("dog", 4), ("owl", 1)]) == 1
    assert cache.num_fitting([("cat", 3), ("dog", 2), ("cat", 3), ("owl", 2), ("fox", 1)]) == 4
    assert cache.num_fitting([("fox", 5)]) == 0


def test_what_a_failed_step_was_to_encode_is_forgotten_and_what_stood_there_before_is_not() -> None:
    cache = EncoderCache(9)
    cache.pin("r", [("cat", 3)])
    cache.finish_step(succeeded=True)
    cache.pin("r", [("dog", 2)])
    cache.unpin_all("r")
    cache.finish_step(succeeded=False)
    cache.check_integrity()
    cat, dog = cache.pin("s", [("cat", 3), ("dog", 2)])
    assert (cat.is_new, dog.is_new) == (False, True)


def test_nobody_goes_on_holding_what_a_failed_step_was_to_encode() -> None:
    cache = EncoderCache(9)
    cache.pin("r", [("cat", 3)])
    with pytest.raises(AssertionError, match="pinned by a request that is still running"):
        cache.finish_step(succeeded=False)


def test_images_of_a_request_that_went_wrong_are_forgotten_unless_another_one_holds_them() -> None:
    cache = EncoderCache(9)
    cache.pin("r", [("cat", 3), ("dog", 2)])
    cache.pin("s", [("dog", 2)])
    cache.finish_step(succeeded=True)
    cache.unpin_all("r", may_be_corrupt=True)
    cache.check_integrity()
    cat, dog = cache.pin("s", [("cat", 3), ("dog", 2)])
    assert (cat.is_new, dog.is_new) == (True, False)


def test_a_request_that_goes_on_keeps_only_the_images_that_it_still_needs() -> None:
    cache = EncoderCache(9)
    cache.pin("r", [("cat", 3), ("dog", 2)])
    cache.finish_step(succeeded=True)
    cache.unpin_except("r", {"dog"})
    assert (cache.num_pinned, cache.num_cached, cache.pinned_by("r")) == (2, 3, {"dog"})
    cache.unpin_except("r", ())
    assert (cache.num_pinned, cache.num_cached, cache.pinned_by("r")) == (0, 5, frozenset())
    cache.check_integrity()


def test_the_check_finds_a_cell_that_leaked_and_a_pin_that_nobody_has() -> None:
    leaked, pinned = EncoderCache(5), EncoderCache(5)
    leaked._free.pop()
    with pytest.raises(AssertionError, match="a cell leaked"):
        leaked.check_integrity()
    pinned.pin("r", [("cat", 2)])
    pinned._pinned["cat"].num_holders += 1
    with pytest.raises(AssertionError, match="another number of holders"):
        pinned.check_integrity()


@dataclass
class Model:
    """What should be true, kept in the simplest way: who holds what, and what stands in which cell."""

    held: dict[str, set[str]] = field(default_factory=dict)
    content: dict[int, str] = field(default_factory=dict)
    recency: list[str] = field(default_factory=list)
    """Images that were ever let go, the last one at the end."""

    def pinned(self) -> set[str]:
        return {digest for digests in self.held.values() for digest in digests}

    def let_go(self, digests: set[str]) -> None:
        for digest in sorted(digests - self.pinned()):
            self.recency = [each for each in self.recency if each != digest] + [digest]


steps = st.lists(
    st.tuples(
        st.sampled_from("rst"),
        st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4),
        st.sampled_from(["take", "take", "take", "keep", "release", "fail", "suspect"]),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(num_cells=st.integers(9, 16), program=steps)
def test_random_programs_read_what_was_written_and_evict_the_least_recent_only_when_they_must(
    num_cells: int, program: list[tuple[str, list[str], str]]
) -> None:
    cache, model = EncoderCache(num_cells), Model()
    for name, wanted, action in program:
        before = model.held.get(name, set())
        if action == "take":
            take(cache, model, name, wanted)
            cache.finish_step(succeeded=True)
        elif action == "fail" and not before:
            # A step that fails ends its request; nobody else has taken what it was to encode.
            was_there = set(cache._idle) | set(cache._pinned)
            take(cache, model, name, wanted)
            cache.unpin_all(name)
            gone = model.held.pop(name, set())
            model.let_go(gone & was_there)
            cache.finish_step(succeeded=False)
            assert set(cache._idle) | set(cache._pinned) <= was_there
        elif action == "keep":
            kept = before & set(wanted)
            cache.unpin_except(name, set(wanted))
            model.held[name] = kept
            model.let_go(before - kept)
        elif action in ("release", "suspect"):
            cache.unpin_all(name, may_be_corrupt=action == "suspect")
            model.held.pop(name, None)
            model.let_go(before)
            if action == "suspect":
                assert not set(cache._idle) & before
        cache.check_integrity()
        assert set(cache._pinned) == model.pinned()
        assert cache.request_ids() == {each for each, digests in model.held.items() if digests}
        # What is cached are the images that were let go last, in that order.
        idle = list(cache._idle)
        assert idle == [each for each in model.recency if each in cache._idle]


def take(cache: EncoderCache, model: Model, name: str, wanted: list[str]) -> None:
    """As many of the wanted images as fit, written where they are new and else found as they were written."""
    items = [(digest, SIZES[digest]) for digest in wanted]
    count = cache.num_fitting(items)
    needed = [sum(SIZES[each] for each in {*wanted[:n], *model.pinned()}) for n in (count, count + 1)]
    assert needed[0] <= cache.capacity
    assert count == len(wanted) or needed[1] > cache.capacity, "an image that fits was turned away"
    if count == 0:
        return
    there = set(cache._idle) | set(cache._pinned)
    idle_before = list(cache._idle)
    for digest, held in zip(wanted, cache.pin(name, items[:count]), strict=False):
        assert held.is_new == (digest not in there)
        assert len(held.cells) == SIZES[digest]
        if held.is_new:
            model.content |= dict.fromkeys(held.cells, digest)
        assert {model.content[cell] for cell in held.cells} == {digest}
    evicted = [each for each in idle_before if each not in cache._idle and each not in wanted[:count]]
    unwanted = [each for each in idle_before if each not in wanted[:count]]
    assert evicted == unwanted[: len(evicted)], "what was evicted is not what was least recently used"
    model.held.setdefault(name, set()).update(wanted[:count])


def test_what_nobody_holds_can_be_forgotten() -> None:
    cache = EncoderCache(9)
    cache.pin("first", [("a", 2)])
    cache.pin("second", [("b", 3)])
    cache.finish_step(succeeded=True)
    cache.unpin_all("second")
    cache.clear()
    cache.check_integrity()
    assert [held.is_new for held in cache.pin("third", [("a", 2), ("b", 3)])] == [False, True]
