"""Tool definitions are checked, and an error names the field that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.errors import RequestError
from ostinato.serve.chat.tools import Tool, forced_tools, read_tools
from tests.support.answer_cases import CLOCK, TOOLS, WEATHER


def test_tools_are_read_from_openais_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": True}, "required": ["a"], "$defs": {}}
    function = {"name": "f-1_X", "description": "Does it.", "parameters": schema, "strict": True}
    assert read_tools([{"type": "function", "function": function}]) == (Tool("f-1_X", "Does it.", schema, strict=True),)


def test_description_and_parameters_may_be_left_out() -> None:
    (tool,) = read_tools([{"type": "function", "function": {"name": "f"}}])
    assert tool == Tool("f", "", {"type": "object", "properties": {}})
    (tool,) = read_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert tool.parameters == {"type": "object"}
    assert read_tools(None) == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "tools must be a list, not an object"),
        (["f"], r"tools\[0\] must be an object, not a string"),
        ([{"type": "custom"}], r"tools\[0\].type must be \"function\""),
        ([{"type": "function"}], r"tools\[0\].function must be an object, not null"),
        ([{"type": "function", "name": "f"}], r"tools\[0\].name is unknown"),
    ],
)
def test_a_malformed_tool_is_an_error_that_names_its_field(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_tools(value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({}, r"function.name must be 1 to 128 letters"),
        ({"name": "a b"}, r"function.name must be 1 to 128 letters, digits, _ or -, not 'a b'"),
        ({"name": "f\n"}, r"function.name"),
        ({"name": ""}, r"function.name"),
        ({"name": "f" * 129}, r"function.name"),
        ({"name": 3}, r"function.name"),
        ({"name": "f", "description": 3}, "function.description must be a string, not a number"),
        ({"name": "f", "strict": "yes"}, "function.strict must be true or false"),
        ({"name": "f", "args": {}}, "function.args is unknown; it may be description, name, parameters, strict"),
        ({"name": "f", "parameters": []}, "function.parameters must be a JSON schema"),
        ({"name": "f", "parameters": {"type": "string"}}, "function.parameters.type must be \"object\""),
        ({"name": "f", "parameters": {"properties": []}}, "function.parameters.properties must be an object"),
        ({"name": "f", "parameters": {"properties": {"a": 3}}}, "function.parameters.properties.a must be"),
        ({"name": "f", "parameters": {"required": "a"}}, "function.parameters.required must be a list of strings"),
    ],
)  # fmt: skip
def test_a_malformed_function_is_an_error_that_names_its_field(function: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=r"tools\[1\]." + message):
        read_tools([{"type": "function", "function": {"name": "g"}}, {"type": "function", "function": function}])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(RequestError, match=r"tools\[1\].function.name: there are two"):
        read_tools([{"type": "function", "function": {"name": "f"}}] * 2)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_no_tool_is_forced_where_the_model_may_choose(choice: str | None) -> None:
    assert forced_tools(TOOLS, choice) == ()


def test_forced_are_all_tools_or_the_named_one() -> None:
    assert forced_tools(TOOLS, "required") == (WEATHER, CLOCK)
    assert forced_tools(TOOLS, {"type": "function", "function": {"name": "clock"}}) == (CLOCK,)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("always", "tool_choice must be"),
        (3, "tool_choice must be"),
        ({"type": "function", "name": "clock"}, "tool_choice must be"),
        ({"type": "function", "function": {"name": "clock", "x": 1}}, "tool_choice must be"),
        ({"type": "function", "function": {"name": "bomb"}}, "no tool is named 'bomb'; tools: get_weather, clock"),
    ],
)
def test_a_choice_that_means_nothing_is_refused(choice: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        forced_tools(TOOLS, choice)


def test_a_required_call_needs_tools() -> None:
    with pytest.raises(RequestError, match="needs tools"):
        forced_tools((), "required")
