"""The workloads of the prefix benchmark: what their prompts share, and what they do not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ostinato.bench.prefix_workloads import WORKLOADS, Answer, PromptRequest, Sizes, cut, make_asks

SIZES = Sizes(shared_len=40, new_len=8, output_len=6, sessions=3, turns=3, conversation_len=64)
VOCABULARY = 50_000
"""So many tokens that random texts do not begin alike."""


def answers_to(asks: Sequence[PromptRequest]) -> dict[int, list[int]]:
    """Answers whose tokens lie outside the vocabulary and all differ."""
    return {n: [VOCABULARY + n * 1000 + i for i in range(ask.output_len)] for n, ask in enumerate(asks)}


def prompts_of(name: str, sizes: Sizes = SIZES, number: int = 0) -> tuple[list[PromptRequest], list[list[int]]]:
    asks = make_asks(name, sizes, VOCABULARY, number)
    answers = answers_to(asks)
    return asks, [ask.prompt(answers) for ask in asks]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def test_questions_share_the_system_prompt_and_nothing_else() -> None:
    asks, prompts = prompts_of("system")
    assert len(prompts) == 9
    assert all(ask.after is None for ask in asks)
    assert {common(one, other) for one in prompts for other in prompts if one is not other} == {40}
    lengths = {len(prompt) - 40 for prompt in prompts}
    assert len(lengths) > 1
    assert lengths <= set(range(4, 13))


def test_tails_share_the_examples_of_their_own_set() -> None:
    _, prompts = prompts_of("few-shot")
    assert len(prompts) == 9
    for i, one in enumerate(prompts):
        for j, other in enumerate(prompts[:i]):
            assert common(one, other) == (40 if i % 3 == j % 3 else 0)


def test_a_turn_of_a_chat_continues_all_that_was_said() -> None:
    asks, prompts = prompts_of("chat")
    answers = answers_to(asks)
    assert [ask.after for ask in asks] == [None] * 3 + [0, 1, 2, 3, 4, 5]
    for number in range(3, 9):
        said = prompts[number - 3] + answers[number - 3]
        assert prompts[number][: len(said)] == said
        assert len(said) + 4 <= len(prompts[number]) <= len(said) + 12
    assert common(prompts[0], prompts[1]) == 40


def test_a_template_that_strips_thinking_leaves_the_prompt_before_it_as_the_shared_part() -> None:
    asks, prompts = prompts_of("thinking")
    answers = answers_to(asks)
    for number in range(3, 9):
        before = prompts[number - 3]
        assert common(prompts[number], before + answers[number - 3]) == len(before)
        assert prompts[number][len(before) : len(before) + 2] == answers[number - 3][4:]
        assert not set(answers[number - 3][:4]) & set(prompts[number])


def test_agents_continue_a_context_at_a_point_inside_what_it_added() -> None:
    asks, prompts = prompts_of("agents", Sizes(40, 8, 6, sessions=4, turns=4, conversation_len=64))
    answers = answers_to(asks)
    assert len(asks) == 1 + 3 * 4
    inherited, leaves_at = {0: 40}, {}
    for number, ask in enumerate(asks):
        assert ask.prompt_len == len(prompts[number])
        if ask.after is None:
            assert number == 0
            continue
        context = prompts[ask.after] + answers[ask.after]
        point = common(context, prompts[number])
        assert inherited[ask.after] < point < len(context)
        assert leaves_at.setdefault(ask.after, point) == point
        inherited[number] = point
    # Two of each level are continued, by half of the next level each.
    parents = [ask.after for ask in asks[5:]]
    assert all(parents.count(parent) == 2 for parent in parents)


def test_the_second_turn_is_one_prompt_asked_warm_and_cold_after_a_conversation_of_the_given_length() -> None:
    for number in range(4):
        asks, prompts = prompts_of("second-turn", number=number)
        first, *others = asks
        assert first.role == "setup"
        assert first.prompt_len + first.output_len == 64
        assert {ask.role for ask in others} == {"counted", "cold"}
        assert [ask.after for ask in others] == [0, 1]
        assert prompts[1] == prompts[2]
        assert prompts[1][:64] == prompts[0] + answers_to(asks)[0]
        assert len(prompts[1]) == 64 + 8


def test_of_a_rewritten_history_the_second_prompt_shares_what_is_before_the_mark_and_nothing_else() -> None:
    asks, prompts = prompts_of("rewritten-history")
    assert len(asks) == 4 * SIZES.turns
    roles = []
    for first in range(0, len(asks), 2):
        setup, edited = asks[first : first + 2]
        length = setup.prompt_len - 16
        assert 48 <= length <= 64
        assert common(prompts[first], prompts[first + 1]) == length
        assert (edited.prompt_len, edited.after) == (length + 8, first)
        assert (setup.role, setup.marks, edited.marks) == ("setup", edited.marks, setup.marks)
        assert edited.marks == ((length,) if edited.role == "counted" else ())
        assert all(common(prompts[first], other) == 0 for other in prompts[:first])
        roles.append(edited.role)
    assert roles.count("counted") == roles.count("unmarked") == SIZES.turns
    assert [asks[i].prompt_len for i in range(1, 13, 4)] == [asks[i].prompt_len for i in range(3, 13, 4)]


def test_a_short_conversation_has_a_shorter_answer() -> None:
    [first, *_], _ = prompts_of("second-turn", Sizes(40, 8, 600, 3, 3, conversation_len=2))
    assert (first.prompt_len, first.output_len) == (1, 1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_use_only_answers_that_were_waited_for(name: str) -> None:
    for number in range(10):
        asks = make_asks(name, Sizes(40, 1, 1, sessions=5, turns=5, conversation_len=20), VOCABULARY, number)
        for index, ask in enumerate(asks):
            waited, each = set(), ask.after
            while each is not None:
                assert each < index
                waited.add(each)
                each = asks[each].after
            assert {piece.of for piece in ask.pieces if isinstance(piece, Answer)} <= waited
            assert all(ask.pieces)


@pytest.mark.parametrize("name", WORKLOADS)
def test_rounds_share_nothing_and_repeat_between_runs(name: str) -> None:
    _, first = prompts_of(name)
    _, again = prompts_of(name)
    _, second = prompts_of(name, number=1)
    assert first == again
    assert not any(common(one, other) for one in first for other in second)


def test_a_cut_ends_inside_a_piece() -> None:
    pieces = ((1, 2, 3), Answer(0, 4, 6), (7,))
    assert list(cut(pieces, 2)) == [(1, 2)]
    assert list(cut(pieces, 3)) == [(1, 2, 3)]
    assert list(cut(pieces, 4)) == [(1, 2, 3), Answer(0, 4, 5)]
    assert list(cut(pieces, 6)) == list(pieces)
