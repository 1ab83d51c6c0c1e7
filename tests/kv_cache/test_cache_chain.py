"""Chains of blocks, and the tree that finds them again: what is the same text, and what only looks like it."""

from __future__ import annotations

import pytest

from ostinato.kv_cache.prefix_index import BlockHashes, IndexEntry, MediaSpan, PrefixIndex
from tests.support.scheduler_steps import make_caching_scheduler, make_request, report_of, run_all, runner_for, text

B = 4


def chain_of(tokens: tuple[int, ...], **fields: object) -> BlockHashes:
    chain = BlockHashes(B, **fields)
    chain.extend(lambda start, end: tokens[start:end], len(tokens))
    return chain


def add_all(index: PrefixIndex, chain: BlockHashes, now: int = 0) -> list[IndexEntry]:
    """Enter all blocks of a chain, from block id 1 on; those that are there already stay."""
    path = index.walk(chain, len(chain.keys))
    for number in range(len(path), len(chain.keys)):
        entry = index.add(path[-1] if path else None, chain, number, len(index) + 1, now)
        assert entry is not None
        path.append(entry)
    return path


def one_hash(_before: int, _content: bytes) -> int:
    return 7


# Chains


def test_only_full_blocks_are_hashed_and_a_chain_grows_by_what_is_new() -> None:
    tokens, asked = text(11), []
    chain = BlockHashes(B)
    for num_tokens in (3, 4, 7, 11):
        chain.extend(lambda start, end: (asked.append(start), tokens[start:end])[1], num_tokens)
    assert asked == [0, 4]
    assert chain.keys == chain_of(tokens).keys
    assert chain.token_ids == [tokens[:4], tokens[4:8]]


def test_a_block_has_another_hash_where_anything_before_it_differs() -> None:
    first, second = chain_of((1, 2, 3, 4, *text(8))), chain_of((1, 2, 3, 5, *text(8)))
    assert not set(first.keys) & set(second.keys)
    assert len(set(first.keys)) == 3


def test_equal_blocks_at_other_positions_of_a_text_have_other_hashes() -> None:
    assert len(set(chain_of((9,) * 16).keys)) == 4


def test_a_salt_changes_all_hashes_and_an_empty_one_is_a_salt_too() -> None:
    keys = [chain_of(text(8), salt=salt).keys for salt in (None, "", "one", "two")]
    assert len({key for each in keys for key in each}) == 8
    assert chain_of(text(8), salt="one").keys == keys[2]


def test_an_image_changes_the_hash_of_each_block_that_it_reaches_into_and_of_those_after_it() -> None:
    plain = chain_of(text(20))
    image = chain_of(text(20), media=[MediaSpan(5, 9, "digest")])
    assert [a == b for a, b in zip(plain.keys, image.keys, strict=True)] == [True, False, False, False, False]
    assert [image.digests(index) for index in range(5)] == [(), ("digest",), ("digest",), (), ()]


def test_an_image_that_ends_at_a_boundary_is_not_in_the_next_block() -> None:
    chain = chain_of(text(12), media=[MediaSpan(4, 8, "digest")])
    assert [chain.digests(index) for index in range(3)] == [(), ("digest",), ()]


def test_two_images_in_one_block_count_in_their_order() -> None:
    one, other = MediaSpan(0, 1, "a"), MediaSpan(2, 3, "b")
    assert chain_of(text(4), media=[one, other]).digests(0) == ("a", "b")
    swapped = [MediaSpan(0, 1, "b"), MediaSpan(2, 3, "a")]
    assert chain_of(text(4), media=[one, other]).keys != chain_of(text(4), media=swapped).keys


# The tree


def test_a_walk_ends_at_the_first_block_that_is_not_indexed() -> None:
    index = PrefixIndex()
    path = add_all(index, chain_of(text(12)))
    other = chain_of((*text(8), 1, 1, 1, 1, *text(4)))
    assert index.walk(other, 4) == path[:2]
    assert index.walk(chain_of(text(12)), 1) == path[:1]
    assert index.walk(chain_of(text(12, seed=1)), 3) == []
    index.check_integrity()


@pytest.mark.parametrize(
    "other",
    [
        chain_of(text(8, seed=1), block_hash=one_hash),
        chain_of(text(8), salt="one", block_hash=one_hash),
        chain_of(text(8), media=[MediaSpan(0, 2, "digest")], block_hash=one_hash),
    ],
    ids=["tokens", "salt", "image"],
)
def test_a_collision_of_hashes_is_a_miss_and_is_not_entered(other: BlockHashes) -> None:
    index = PrefixIndex()
    first = chain_of(text(4), block_hash=one_hash)
    path = add_all(index, first)
    assert index.walk(first, 1) == path
    assert index.walk(other, 2) == []
    assert index.add(None, other, 0, 2, now=0) is None
    assert len(index) == 1
    index.check_integrity()


def test_the_same_block_after_another_parent_is_a_miss_though_the_hash_is_the_same() -> None:
    index = PrefixIndex()
    by_content = {}

    def last_block_only(_before: int, content: bytes) -> int:
        return by_content.setdefault(content, len(by_content))

    same = (5, 5, 5, 5)
    add_all(index, chain_of((1, 1, 1, 1, *same), block_hash=last_block_only))
    other = chain_of((2, 2, 2, 2, *same), block_hash=last_block_only)
    first = index.add(None, other, 0, 9, now=0)
    assert first is not None
    assert index.walk(other, 2) == [first]
    assert index.add(first, other, 1, 10, now=0) is None
    index.check_integrity()


@pytest.mark.parametrize("num_slots", [0, 20])
def test_requests_of_one_hash_get_what_they_would_get_alone(num_slots: int) -> None:
    scheduler = make_caching_scheduler("all" if num_slots else "none", num_slots=num_slots)
    runner = runner_for(scheduler)
    requests = [make_request(name, 14, max_tokens=9) for name in "abc"]
    for request in requests:
        request.block_hashes = BlockHashes(B, block_hash=one_hash)
        scheduler.add(request)
    run_all(scheduler, runner)
    assert [report_of(request)[0] for request in requests] == [0, 0, 0]
    assert len(scheduler.cache.store.index) == 1
    again = make_request("a", 14, max_tokens=9)
    again.block_hashes = BlockHashes(B, block_hash=one_hash)
    scheduler.add(again)
    run_all(scheduler, runner)
    assert again.output_token_ids == requests[0].output_token_ids
    # One block was entered; with state layers no checkpoint was due there.
    assert report_of(again)[0] == (0 if num_slots else B)


def test_entries_and_checkpoints_are_counted_out_when_they_are_removed() -> None:
    index = PrefixIndex()
    stem = add_all(index, chain_of(text(8)))
    twig = add_all(index, chain_of((*text(4), 1, 1, 1, 1)))
    assert (stem[0].num_children, list(index.leaves)) == (2, [stem[1], twig[1]])
    assert not stem[0].is_evictable
    index.add_checkpoint(twig[1], slot=3, is_interior=False, now=1)
    with pytest.raises(AssertionError, match="checkpoint"):
        index.remove(twig[1])
    checkpoint = index.checkpoint_of(3)
    assert checkpoint is not None
    index.remove_checkpoint(checkpoint)
    assert index.checkpoint_of(3) is None
    for entry in (stem[1], twig[1]):
        index.remove(entry)
        index.check_integrity()
    assert list(index.leaves) == [stem[0]]
    assert stem[1] not in index


def test_an_entry_where_a_request_stands_cannot_be_removed() -> None:
    index = PrefixIndex()
    (entry,) = add_all(index, chain_of(text(4)))
    entry.num_holders = 1
    with pytest.raises(AssertionError, match="needed"):
        index.remove(entry)


def test_what_a_checkpoint_saves_begins_at_the_checkpoint_before_it_whichever_came_first() -> None:
    index = PrefixIndex()
    path = add_all(index, chain_of(text(20)))
    last = index.add_checkpoint(path[4], slot=1, is_interior=False, now=0)
    assert index.previous_checkpoint_end(last) == 0
    middle = index.add_checkpoint(path[2], slot=2, is_interior=False, now=0)
    assert (index.previous_checkpoint_end(last), index.previous_checkpoint_end(middle)) == (12, 0)
    first = index.add_checkpoint(path[0], slot=3, is_interior=False, now=0)
    assert (index.previous_checkpoint_end(last), index.previous_checkpoint_end(middle)) == (12, 4)
    index.remove_checkpoint(middle)
    assert index.previous_checkpoint_end(last) == 4
    index.remove_checkpoint(first)
    assert index.previous_checkpoint_end(last) == 0
    index.check_integrity()


def test_a_checkpoint_that_stands_again_is_the_base_of_those_after_it_again() -> None:
    index = PrefixIndex()
    path = add_all(index, chain_of(text(12)))
    last = index.add_checkpoint(path[2], slot=1, is_interior=False, now=0)
    index.remove_checkpoint(index.add_checkpoint(path[1], slot=2, is_interior=False, now=0))
    index.add_checkpoint(path[0], slot=3, is_interior=False, now=0)
    assert index.previous_checkpoint_end(last) == 4
    index.add_checkpoint(path[1], slot=2, is_interior=False, now=0)
    assert index.previous_checkpoint_end(last) == 8
    index.check_integrity()


def test_a_checkpoint_of_another_branch_is_nobodys_base() -> None:
    index = PrefixIndex()
    stem = add_all(index, chain_of(text(12)))
    twig = add_all(index, chain_of((*text(4), 1, 1, 1, 1, 2, 2, 2, 2)))
    end = index.add_checkpoint(stem[2], slot=1, is_interior=False, now=0)
    index.add_checkpoint(twig[1], slot=2, is_interior=False, now=0)
    assert index.previous_checkpoint_end(end) == 0
    index.check_integrity()


def test_a_salt_that_looks_like_an_image_is_none() -> None:
    # A file is found by its name alone: nobody compares the salt and the images of what stands before it.
    tokens = tuple(range(8))
    image = BlockHashes(4, "salt", [MediaSpan(0, 4, "digest")], root=bytes(16))
    chains = [image, *(BlockHashes(4, "salt" + tail, root=bytes(16)) for tail in ("mediadigest", ""))]
    for chain in chains:
        chain.extend(lambda start, end: tokens[start:end], 8)
    assert len({chain.file_keys[-1] for chain in chains}) == 3
