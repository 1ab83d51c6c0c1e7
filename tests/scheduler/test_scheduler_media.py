"""Images in the scheduler: which rows need their cells, who encodes them, who waits, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ostinato.errors import RequestError
from ostinato.kv_cache.checkpoints import PrefixCachePolicy
from ostinato.kv_cache.encoder_cache import EncoderCache
from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.prefix_index import MediaSpan
from ostinato.scheduler.batch import Batch, MediaUse
from ostinato.scheduler.limits import SchedulerLimits
from ostinato.scheduler.request import Request, StopConditions
from ostinato.scheduler.scheduler import Scheduler
from tests.support.fake_runner import FIRST_PART, FakeRunner
from tests.support.scheduler_harness import as_tokens
from tests.support.scheduler_steps import BLOCK, answer, shape

CAT, DOG, OWL = range(3)


def image(number: int, size: int) -> list[int]:
    return [FIRST_PART * (1 + number) + part for part in range(size)]


def make_scheduler(num_cells: int, caching: bool = False, num_blocks: int = 100, **limits: Any) -> Scheduler:
    """`num_cells` without the null one."""
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 200, "max_item_tokens": 16, **limits}
    cache, policy = CacheManager(num_blocks, 0, BLOCK), PrefixCachePolicy(prefix_caching=caching)
    return Scheduler(SchedulerLimits(**values), cache, policy, encoder_cache=EncoderCache(1 + num_cells))


def request_of(name: str, text: Sequence[int], max_tokens: int = 1, **fields: Any) -> Request:
    tokens, media = as_tokens(text)
    return Request(name, tokens, StopConditions(max_tokens), media=media, **fields)


def encoded(batch: Batch) -> list[tuple[str, int]]:
    """(digest, tokens) of the images that a step encodes."""
    return [(item.digest, len(item.cells)) for item in batch.images_to_encode]


def step(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    scheduler.update(answer(batch))
    scheduler.check_integrity()
    return batch


def test_a_row_has_the_cells_of_its_images_and_the_step_encodes_them() -> None:
    scheduler = make_scheduler(10)
    scheduler.add(request_of("r", [1, *image(CAT, 3), 2, *image(DOG, 4), 3]))
    batch = step(scheduler)
    assert batch.rows[0].media == (MediaUse(1, 4, (1, 2, 3)), MediaUse(5, 9, (4, 5, 6, 7)))
    assert [(item.digest, item.cells) for item in batch.images_to_encode] == [("0", (1, 2, 3)), ("1", (4, 5, 6, 7))]
    assert scheduler.encoder_cache is not None
    assert scheduler.encoder_cache.num_pinned == 0


def test_an_image_that_a_chunk_cuts_is_encoded_once_and_held_until_its_last_token_is_computed() -> None:
    scheduler = make_scheduler(6, max_num_batched_tokens=3)
    cache = scheduler.encoder_cache
    assert cache is not None
    scheduler.add(request_of("r", [1, *image(CAT, 6), 2, 3]))
    seen = []
    while scheduler.has_unfinished:
        batch = step(scheduler)
        seen.append((shape(batch)[0][1:], encoded(batch), cache.num_pinned))
    assert seen == [((0, 3), [("0", 6)], 6), ((3, 3), [], 6), ((6, 3), [], 0)]


def test_a_chunk_cuts_no_image_whose_tokens_see_each_other_and_waits_for_room_for_it() -> None:
    scheduler = make_scheduler(20, caching=True, max_num_batched_tokens=9, whole_images=True)
    prompt = [1, 2, 3, 4, 5, *image(CAT, 5), 6, *image(DOG, 8), 7]
    scheduler.add(request_of("r", prompt))
    assert [shape(step(scheduler)) for _ in range(3)] == [[("r", 0, 5)], [("r", 5, 6)], [("r", 11, 9)]]
    # Another request leaves room for 7 tokens of the 8 until it ends. The first blocks are hits, within an image too.
    scheduler.add(request_of("other", [8] * 9, max_tokens=3))
    step(scheduler)
    scheduler.add(request_of("again", [*prompt[:-1], 9]))
    shapes = []
    while scheduler.has_unfinished:
        shapes.append(shape(step(scheduler)))
    again = [each for row in shapes for each in row if each[0] == "again"]
    assert [(start, count) for _, start, count in again] == [(16, 4)]
    assert scheduler.encoder_cache is not None
    assert scheduler.encoder_cache.num_pinned == 0


def test_a_chunk_ends_before_an_image_that_finds_no_room() -> None:
    scheduler = make_scheduler(5)
    scheduler.add(request_of("r", [1, *image(CAT, 3), 2, *image(DOG, 4), 3]))
    assert shape(step(scheduler)) == [("r", 0, 5)]
    assert shape(step(scheduler)) == [("r", 5, 5)]


def test_a_row_that_begins_with_an_image_without_room_waits_while_another_one_holds_the_cells() -> None:
    scheduler = make_scheduler(6, max_num_batched_tokens=4)
    scheduler.add(request_of("a", [1, *image(CAT, 5), 2]))
    scheduler.add(request_of("b", [*image(DOG, 4), 3]))
    assert shape(step(scheduler)) == [("a", 0, 4)]
    assert shape(step(scheduler)) == [("a", 4, 3)]  # one token is left, and no cell for the dog
    assert shape(step(scheduler)) == [("b", 0, 4)]


def test_a_request_waits_where_its_text_ends_and_those_behind_it_go_on_with_theirs() -> None:
    scheduler = make_scheduler(6, max_num_batched_tokens=8)
    scheduler.add(request_of("a", [*[1] * 4, *image(CAT, 6), 2]))
    scheduler.add(request_of("b", [3, 4, *image(DOG, 2), 3]))
    scheduler.add(request_of("c", [5] * 20))
    assert shape(step(scheduler)) == [("a", 0, 8)]
    assert shape(step(scheduler)) == [("a", 8, 3), ("b", 0, 2), ("c", 0, 3)]
    assert shape(step(scheduler)) == [("b", 2, 3), ("c", 3, 5)]


def test_a_stream_of_small_images_does_not_starve_a_request_with_a_large_one() -> None:
    """Else there would always be one of them in the midst of its image."""
    scheduler = make_scheduler(10, max_num_batched_tokens=9)
    scheduler.add(request_of("text", [1] * 8))
    scheduler.add(request_of("s0", [*image(CAT, 5), 2]))
    assert shape(step(scheduler)) == [("text", 0, 8), ("s0", 0, 1)]
    scheduler.add(request_of("large", [3, *image(DOG, 9), 2]))
    for number in range(1, 5):
        scheduler.add(request_of(f"s{number}", [*image(CAT, 5), 2]))
    assert shape(step(scheduler)) == [("s0", 1, 5), ("large", 0, 1)]
    assert shape(step(scheduler)) == [("large", 1, 9)]


def test_two_requests_about_one_image_share_its_cells_and_it_is_encoded_once() -> None:
    scheduler = make_scheduler(5)
    scheduler.add(request_of("a", [1, *image(CAT, 5), 2]))
    scheduler.add(request_of("b", [2, *image(CAT, 5), 3]))
    batch = step(scheduler)
    assert encoded(batch) == [("0", 5)]
    assert batch.rows[0].media[0].cells == batch.rows[1].media[0].cells
    scheduler.add(request_of("c", [4, *image(CAT, 5), 3]))
    assert encoded(step(scheduler)) == []


def test_what_a_failed_step_was_to_encode_is_encoded_again_also_where_its_request_was_aborted() -> None:
    scheduler = make_scheduler(5)
    for is_aborted in (False, True):
        scheduler.add(request_of("a", [1, *image(CAT, 5), 2]))
        batch = scheduler.schedule()
        assert encoded(batch) == [("0", 5)]
        if is_aborted:
            scheduler.abort("a")
            assert scheduler.encoder_cache is not None
            assert scheduler.encoder_cache.num_pinned == 5  # the step still writes there
        scheduler.fail(batch, ValueError("the step broke down"))
        scheduler.check_integrity()
    scheduler.add(request_of("b", [1, *image(CAT, 5), 2]))
    assert encoded(step(scheduler)) == [("0", 5)]


def test_an_image_of_an_aborted_request_stays_for_others_if_its_step_succeeds() -> None:
    scheduler = make_scheduler(5)
    scheduler.add(request_of("a", [1, *image(CAT, 5), 2]))
    batch = scheduler.schedule()
    scheduler.abort("a")
    scheduler.update(answer(batch))
    scheduler.check_integrity()
    scheduler.add(request_of("b", [1, *image(CAT, 5), 2]))
    assert encoded(step(scheduler)) == []


def test_a_preempted_request_lets_its_image_go_and_takes_it_again() -> None:
    scheduler = make_scheduler(6, max_num_batched_tokens=3)
    cache = scheduler.encoder_cache
    assert cache is not None
    scheduler.add(request_of("a", [1, *image(CAT, 6), 2]))
    step(scheduler)
    scheduler.preempt("a")
    scheduler.check_integrity()
    assert (cache.num_pinned, cache.num_cached) == (0, 6)
    batch = step(scheduler)
    assert (shape(batch), encoded(batch)) == ([("a", 0, 3)], [])
    scheduler.preempt("a")
    cache.pin("another", [("x", 6)])
    cache.finish_step(succeeded=True)
    cache.unpin_all("another")
    assert encoded(step(scheduler)) == [("0", 6)]


def test_without_chunked_prefill_a_prompt_waits_until_all_of_its_images_fit() -> None:
    scheduler = make_scheduler(6, enable_chunked_prefill=False)
    scheduler.add(request_of("a", [1, *image(CAT, 3), 2]))
    scheduler.add(request_of("b", [*image(DOG, 2), 1, *image(OWL, 3), 2]))
    assert shape(step(scheduler)) == [("a", 0, 5)]
    assert shape(step(scheduler)) == [("b", 0, 7)]


def run(scheduler: Scheduler, runner: FakeRunner) -> list[Batch]:
    batches = []
    while scheduler.has_unfinished:
        batches.append(scheduler.schedule())
        scheduler.update(runner.run(batches[-1]))
        scheduler.check_integrity()
    return batches


def test_a_second_turn_about_the_same_image_hits_through_it_and_encodes_nothing() -> None:
    scheduler = make_scheduler(8, caching=True)
    runner = FakeRunner(BLOCK, has_state=False)
    first = [1, *image(CAT, 5), 2, 3, 4]
    scheduler.add(request_of("a", first, max_tokens=4))
    run(scheduler, runner)
    second = request_of("b", [*first, 5, 6, 7])
    scheduler.add(second)
    [batch] = run(scheduler, runner)
    assert shape(batch) == [("b", 8, 4)]
    assert (batch.images_to_encode, batch.rows[0].media) == ((), ())


def test_another_image_of_the_same_size_misses_from_its_first_block_on() -> None:
    scheduler = make_scheduler(8, caching=True)
    runner = FakeRunner(BLOCK, has_state=False)
    text = [1, 2, 3, 4, 5]
    scheduler.add(request_of("a", [*text, *image(CAT, 5), 2, 3, 4]))
    run(scheduler, runner)
    scheduler.add(request_of("b", [*text, *image(DOG, 5), 2, 3, 4]))
    [batch] = run(scheduler, runner)
    assert shape(batch) == [("b", 4, 9)]
    assert encoded(batch) == [("1", 5)]
    scheduler.add(request_of("c", [*text, *image(DOG, 5), 2, 3, 5]))
    assert shape(run(scheduler, runner)[0]) == [("c", 12, 1)]


def test_a_hit_that_ends_within_an_image_needs_the_whole_of_it() -> None:
    scheduler = make_scheduler(8, caching=True)
    runner = FakeRunner(BLOCK, has_state=False)
    text = [1, 2, *image(CAT, 5), 2, 3, 4]
    scheduler.add(request_of("a", [*text[:7], 9]))
    run(scheduler, runner)
    scheduler.encoder_cache.pin("other", [("x", 8)])  # type: ignore[union-attr]
    scheduler.encoder_cache.finish_step(succeeded=True)  # type: ignore[union-attr]
    scheduler.encoder_cache.unpin_all("other")  # type: ignore[union-attr]
    scheduler.add(request_of("b", text))
    [batch] = run(scheduler, runner)
    assert shape(batch) == [("b", 4, 6)]
    assert encoded(batch) == [("0", 5)]
    assert [(use.start, use.end) for use in batch.rows[0].media] == [(2, 7)]


@pytest.mark.parametrize(
    ("text", "limits", "message", "remedies"),
    [
        ([*image(CAT, 5)], {}, "ends with an image", []),
        ([*image(CAT, 9), 1], {"max_item_tokens": 8}, "at most 8 are encoded", [("max_num_batched_tokens", 9)]),
        ([*image(CAT, 13), 1], {}, "the encoder cache holds 12", [("encoder_cache_tokens", 13)]),
        (
            [*image(CAT, 5), *image(DOG, 5), *image(OWL, 4), 1],
            {"enable_chunked_prefill": False},
            "images of 14 tokens together",
            [("encoder_cache_tokens", 14), ("enable_chunked_prefill", True)],
        ),
    ],
)
def test_what_could_never_be_served_is_refused_when_it_arrives(
    text: list[int], limits: dict[str, Any], message: str, remedies: list[tuple[str, Any]]
) -> None:
    scheduler = make_scheduler(12, **limits)
    with pytest.raises(RequestError, match=message) as caught:
        scheduler.add(request_of("r", text))
    assert [(each.setting, each.value) for each in caught.value.remedies] == remedies
    assert not scheduler.has_unfinished


def test_what_fits_exactly_is_served() -> None:
    scheduler = make_scheduler(12, max_item_tokens=12)
    scheduler.add(request_of("r", [*image(CAT, 12), 1]))
    assert encoded(step(scheduler)) == [("0", 12)]
    scheduler = make_scheduler(12, enable_chunked_prefill=False)
    scheduler.add(request_of("r", [*image(CAT, 5), *image(DOG, 4), *image(OWL, 3), 1]))
    assert encoded(step(scheduler)) == [("0", 5), ("1", 4), ("2", 3)]


def test_an_image_that_stands_twice_in_a_prompt_is_encoded_once() -> None:
    scheduler = make_scheduler(5)
    media = (MediaSpan(0, 5, "0"), MediaSpan(6, 11, "0"))
    tokens, _ = as_tokens([*image(CAT, 5), 1, *image(CAT, 5), 2])
    scheduler.add(Request("r", tokens, StopConditions(1), media=media))
    batch = step(scheduler)
    assert encoded(batch) == [("0", 5)]
    assert [use.cells for use in batch.rows[0].media] == [(1, 2, 3, 4, 5)] * 2
