"""Drafts that repeat the request's own text, as a naive search would find them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ostinato.sampling.params import SamplingParams
from ostinato.sampling.state import SamplingState
from ostinato.scheduler.batch import Batch, BatchRow
from ostinato.spec_decode.ngram import NgramProposer


def state(prompt: list[int], output: list[int]) -> SamplingState:
    return SamplingState(SamplingParams(), prompt, output, seed=0)


def decode(*requests: tuple[str, SamplingState], num_drafts: int = 4) -> Batch:
    rows = tuple(
        BatchRow(name, (0,), 0, (), num_drafts=num_drafts, sampling_state=payload) for name, payload in requests
    )
    return Batch(rows, len(rows), num_drafts)


def propose(prompt: Sequence[int], *, most: int = 4, shortest: int = 1, longest: int = 4) -> tuple[int, ...]:
    proposer = NgramProposer(shortest, longest)
    return proposer.propose(decode(("a", state(list(prompt), [])), num_drafts=most))[0]


def naive(text: list[int], shortest: int, longest: int, most: int) -> tuple[int, ...]:
    """What follows the last earlier occurrence of the longest end of the text that has one."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                extended = list(text)
                for i in range(most):
                    extended.append(extended[end + i])
                return tuple(extended[len(text) :])
    return ()


def test_what_followed_the_last_two_tokens_before_is_proposed() -> None:
    assert propose([5, 6, 7, 8, 9, 1, 5, 6], most=3) == (7, 8, 9)


def test_a_longer_match_wins_over_a_later_one() -> None:
    assert propose([1, 2, 3, 40, 9, 3, 50, 1, 2, 3], most=1) == (40,)


def test_of_equally_long_matches_the_last_one_wins() -> None:
    assert propose([2, 3, 40, 2, 3, 50, 2, 3], most=1) == (50,)


def test_a_match_shorter_than_the_shortest_that_counts_gives_no_drafts() -> None:
    assert propose([3, 40, 9, 3], shortest=2) == ()
    assert propose([3, 40, 9, 3], shortest=1) == (40, 9, 3, 40)


def test_a_repetition_goes_on_beyond_the_end_of_the_text() -> None:
    assert propose([1, 2, 1, 2], most=5) == (1, 2, 1, 2, 1)
    assert propose([7, 7, 7], most=4) == (7, 7, 7, 7)


def test_a_text_whose_end_is_new_gives_no_drafts() -> None:
    assert propose([1, 2, 3]) == ()
    assert propose([1]) == ()


def test_a_row_gets_no_more_drafts_than_it_has_room_for() -> None:
    proposer, text = NgramProposer(1, 4), state([1, 2, 3, 4, 1], [])
    rows = [BatchRow(str(n), (0,), 0, (), num_drafts=n, sampling_state=text) for n in (4, 2, 0)]
    assert proposer.propose(Batch(tuple(rows), 3, 4)) == [(2, 3, 4, 1), (2, 3), ()]


def test_a_prefill_row_gets_no_drafts() -> None:
    proposer, text = NgramProposer(1, 4), state([1, 2, 3, 4, 1], [])
    rows = (
        BatchRow("a", (1,), 4, (), num_drafts=4, sampling_state=text),
        BatchRow("b", (1, 2, 3, 4), 0, (), sampling_state=None),
    )
    assert proposer.propose(Batch(rows, 1, 4)) == [(2, 3, 4, 1), ()]


def test_a_new_request_with_the_id_of_an_old_one_gets_drafts_from_its_own_text() -> None:
    proposer = NgramProposer(1, 4)
    assert proposer.propose(
        decode(("a", state([1, 2, 3, 4, 1], []))),
    ) == [(2, 3, 4, 1)]
    assert proposer.propose(decode(("a", state([1, 9, 8, 7, 1], [])))) == [(9, 8, 7, 1)]


def test_a_request_that_was_away_is_found_again_whole() -> None:
    proposer, output = NgramProposer(1, 4), [2]
    text = state([1, 2, 3], output)
    assert proposer.propose(decode(("a", text))) == [(3, 2, 3, 2)]
    assert proposer.propose(decode(("b", state([1, 1], [])))) == [(1, 1, 1, 1)]
    output += [3, 9, 1, 2]
    assert proposer.propose(decode(("a", text))) == [(3, 2, 3, 9)]


def test_a_request_is_read_once_also_after_steps_without_it_and_nothing_is_kept_when_it_has_ended() -> None:
    class Watched(list[int]):
        """A prompt that says how often it was read from its beginning."""

        reads = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            type(self).reads += 1
            return super().__iter__()

    proposer, text = NgramProposer(1, 4), SamplingState(SamplingParams(), Watched([1, 2, 1]), [], seed=0)
    for _ in range(3):
        proposer.propose(decode(("a", text)))
    assert Watched.reads == 1
    proposer.propose(decode())
    proposer.propose(decode(("a", text)))
    assert Watched.reads == 1
    del text
    assert not proposer._indexes


def test_the_work_of_a_step_does_not_grow_with_the_text() -> None:
    class Token(int):
        """A token that counts how often one is made part of a key."""

        uses = 0

        def __ror__(self, other: int) -> int:
            Token.uses += 1
            return int(self) | other

    output = [Token(i % 17) for i in range(1000)]
    proposer, text = NgramProposer(1, 4), state([0] * 10, output)
    proposer.propose(decode(("a", text)))
    Token.uses = 0
    for token in range(50):
        output.append(Token(token))
        proposer.propose(decode(("a", text)))
    assert 0 < Token.uses <= 50 * 2 * 4


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    steps=st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=4), max_size=8),
    shortest=st.integers(1, 3),
    further=st.integers(0, 2),
    most=st.integers(1, 5),
)
def test_drafts_are_those_of_a_naive_search(
    prompt: list[int], steps: list[list[int]], shortest: int, further: int, most: int
) -> None:
    longest = shortest + further
    output: list[int] = []
    proposer, text = NgramProposer(shortest, longest), state(prompt, output)
    for tokens in [[], *steps]:
        output += tokens
        expected = naive([*prompt, *output], shortest, longest, most)
        assert proposer.propose(decode(("a", text), num_drafts=most)) == [expected]


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=3, max_size=3),
    steps=st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=3), max_size=10),
)
def test_requests_that_come_and_go_keep_to_their_own_texts(
    prompts: list[list[int]], steps: list[list[tuple[int, int]]]
) -> None:
    proposer = NgramProposer(1, 3)
    outputs: list[list[int]] = [[] for _ in prompts]
    texts = [state(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    for step in steps:
        present = dict(step)
        for i, token in present.items():
            outputs[i].append(token)
        drafts = proposer.propose(decode(*((str(i), texts[i]) for i in present), num_drafts=3))
        assert drafts == [naive([*prompts[i], *outputs[i]], 1, 3, 3) for i in present]
