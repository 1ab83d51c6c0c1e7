"""Functions that cannot be tools, and calls of ToolChat that mean nothing, are refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from ostinato import LLM, AsyncLLM, RequestError, SamplingParams, ToolChat
from ostinato.serve.chat.tool_chat import FunctionTool
from tests.support.text_checkpoint import SETTINGS, text_checkpoint


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def later(a: int) -> int:
    return a


async def several_later(a: int) -> AsyncIterator[int]:
    yield a


def several(a: int) -> Iterator[int]:
    yield a


class Adder:
    def __call__(self, a: int) -> int:
        return a


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(text_checkpoint()), **SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (later, "the function later cannot be a tool: its result comes later"),
        (several, "the function several cannot be a tool: its result comes later"),
        (several_later, "the function several_later cannot be a tool: its result comes later"),
        (partial(add, 1), "a tool is a function that has a name"),
        (Adder(), "a tool is a function that has a name"),
        (5, "a tool is a function that has a name, and not 5"),
        ("add", "a tool is a function that has a name, and not 'add'"),
    ],
)
def test_what_returns_no_result_or_has_no_name_is_no_tool(function: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        FunctionTool(function)


def test_a_result_is_text_that_a_prompt_can_hold() -> None:
    def name() -> str:
        return "a\udcffb"

    assert FunctionTool(name).call({}) == "a?b"


@pytest.mark.parametrize(
    ("functions", "given", "message"),
    [
        (add, {}, "an LLM and a list of functions, and not LLM and function"),
        ([add], {"max_rounds": None}, "max_rounds must be a whole number of at least 1, not None"),
        ([add], {"max_rounds": 1.5}, "max_rounds must be a whole number of at least 1, not 1.5"),
        ([add], {"max_rounds": 0}, "max_rounds must be a whole number of at least 1, not 0"),
        ([add, add], {}, "add"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(llm: LLM, functions: Any, given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ToolChat(llm, functions, tool_call_parser="generic", **given)
    with pytest.raises(RequestError, match="an LLM and a list of functions, and not AsyncLLM and list"):
        ToolChat(AsyncLLM(), [add])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "message"), [(SamplingParams(n=2), "one output, and n is 2"), ({"n": 1}, "should be SamplingParams")]
)
def test_an_answer_has_one_output_and_its_parameters(llm: LLM, params: Any, message: str) -> None:
    chat = ToolChat(llm, [add], tool_call_parser="generic")
    with pytest.raises(RequestError, match=message):
        next(chat.answer([{"role": "user", "content": "hi"}], params))
