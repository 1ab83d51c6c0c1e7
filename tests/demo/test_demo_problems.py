"""The generator of word problems: what it promises to training, evaluation and the model's users."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from ostinato.demo.problems import (
    FAMILIES,
    RESULT_MARK,
    extract_result,
    held_out,
    is_held_out,
    training_problem,
)

EQUATION = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def equations_of(answer: str) -> str:
    """The chain of equations of a worked answer, without its result."""
    return answer.split(f". {RESULT_MARK}")[0]


def training_problems(count: int, seed: int = 0) -> list:
    rng = random.Random(seed)
    return [training_problem(rng) for _ in range(count)]


def test_the_same_seed_draws_the_same_problems_and_another_seed_others():
    assert held_out(3, 40) == held_out(3, 40)
    assert held_out(3, 40) != held_out(4, 40)
    assert training_problems(40, seed=3) == training_problems(40, seed=3)


def test_more_held_out_problems_begin_with_the_fewer():
    assert held_out(3, 60)[:25] == held_out(3, 25)


def test_held_out_questions_differ_from_each_other():
    problems = held_out(0, 300)
    assert len({problem.question for problem in problems}) == 300


def test_training_never_draws_a_held_out_chain_and_evaluation_draws_no_other():
    assert not any(is_held_out(equations_of(problem.answer)) for problem in training_problems(4000))
    assert all(is_held_out(equations_of(problem.answer)) for problem in held_out(0, 200))


def test_about_one_chain_in_sixteen_is_held_out():
    chains = [f"{a} + {b} = {a + b}" for a in range(100) for b in range(100)]
    assert 0.05 < sum(map(is_held_out, chains)) / len(chains) < 0.08


def test_every_equation_is_right_and_stays_between_0_and_999():
    for problem in training_problems(4000) + held_out(0, 200):
        lines = equations_of(problem.answer).split(". ")
        assert 1 <= len(lines) <= 5
        for line in lines:
            a, sign, b, result = EQUATION.fullmatch(line).groups()
            assert OPERATIONS[sign](int(a), int(b)) == int(result)
            assert 0 <= int(result) <= 999


def test_the_stated_result_is_that_of_the_last_equation():
    for problem in training_problems(2000):
        last = equations_of(problem.answer).split(" = ")[-1]
        assert problem.answer.endswith(f"{last}. #### {problem.result}")
        assert extract_result(problem.answer) == problem.result == int(last)


def test_operands_are_told_in_the_question_or_computed_before():
    words = {"twice": 2, "doubles": 2, "double": 2, "doubled": 2, "triples": 3, "triple": 3, "tripled": 3}
    for problem in training_problems(4000):
        known = {int(number) for number in re.findall(r"\d+", problem.question)}
        known |= {value for word, value in words.items() if word in problem.question}
        for a, _, b, result in EQUATION.findall(problem.answer):
            assert {int(a), int(b)} <= known, problem
            known.add(int(result))


def test_every_family_occurs_with_several_numbers_of_steps():
    problems = training_problems(4000)
    assert {problem.family for problem in problems} == set(FAMILIES)
    steps = Counter(problem.answer.count("=") for problem in problems)
    assert min(steps[1], steps[2], steps[3]) > 200


def test_most_problems_of_a_family_are_phrased_differently():
    by_family: dict[str, set[str]] = {}
    for problem in training_problems(6000):
        by_family.setdefault(problem.family, set()).add(re.sub(r"\d+", "0", problem.question))
    assert min(map(len, by_family.values())) >= 20


def test_unseen_words_are_drawn_only_when_wanted():
    rng = random.Random(1)
    words = Counter(word for _ in range(3000) for word in training_problem(rng, unseen=0.0).question.split())
    rare = [word for problem in training_problems(500) for word in problem.question.split() if word not in words]
    assert len(set(rare)) > 100


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (" 17 + 25 = 42. 42 - 9 = 33. #### 33", 33),
        ("#### 0", 0),
        ("####7", 7),
        ("#### 33 and then #### 5", 33),
        ("17 + 25 = 42", None),
        ("####", None),
        ("", None),
    ],
)
def test_the_result_is_read_from_a_generated_answer(text: str, result: int | None):
    assert extract_result(text) == result
