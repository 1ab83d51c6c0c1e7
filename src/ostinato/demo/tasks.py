"""Tasks of `ostinato eval`, whatever the kind of question, and the judging of answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ostinato.json_io import JsonObject

from . import drawings
from .problems import Problem, extract_result, held_out


@dataclass(frozen=True)
class Task:
    """A question with its right answer, the parts of its message, and a judge of answers."""

    question: str
    answer: str
    content: str | list[JsonObject]
    is_right: Callable[[str], bool]


def word_problems(seed: int, count: int) -> list[Task]:
    """Return held-out arithmetic word problems. An answer is right if the number after #### is the result."""
    return [_word_problem(problem) for problem in held_out(seed, count)]


def questions_about_drawings(seed: int, count: int) -> list[Task]:
    """Return held-out drawings with a question each. An answer is right if it is the expected one, word by word."""
    return [_about_drawing(turn) for (turn,) in drawings.held_out(seed, count, "question")]


def _word_problem(problem: Problem) -> Task:
    return Task(problem.question, problem.answer, problem.question, lambda text: extract_result(text) == problem.result)


def _about_drawing(turn: drawings.DrawingTurn) -> Task:
    text = turn.question.text
    content: list[dict[str, object]] = [{"type": "image", "image": image} for image in turn.images()]
    content.append({"type": "text", "text": text})
    return Task(text, turn.question.answer, content, lambda answer: drawings.is_right(answer, turn))
