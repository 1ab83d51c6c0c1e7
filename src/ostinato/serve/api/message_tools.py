"""Conversion of tools from Anthropic's form to that of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ostinato.serve.http.errors import ApiError

_TOOL = ("name", "description", "strict")
_IGNORED = ("cache_control", "input_examples", "eager_input_streaming", "defer_loading", "allowed_callers")
"""Members of a tool that are accepted and ignored."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def nested_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return each tool as `{"type": "function", "function": ...}`.

    ApiError, which names the field, for a tool of another kind.
    """
    return None if tools is None else [_nested(tool, f"tools[{place}]") for place, tool in enumerate(tools)]


def _nested(tool: dict[str, Any], where: str) -> dict[str, Any]:
    tool = {name: value for name, value in tool.items() if value is not None}
    if tool.get("type", "custom") != "custom":
        message = f"{where}.type should be custom: tools of Anthropic's own are not served; define it with a schema"
        raise ApiError(400, message, param=f"{where}.type")
    for name in tool:
        if name not in (*_TOOL, *_IGNORED, "type", "input_schema"):
            path = f"{where}.{name}"
            raise ApiError(400, f"unknown parameter: {path}", param=path, code="unknown_parameter")
    if not isinstance(tool.get("input_schema"), dict):
        path = f"{where}.input_schema"
        raise ApiError(400, f"{path} should be a JSON schema, an object", param=path)
    function = {name: tool[name] for name in _TOOL if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def nested_choice(choice: dict[str, Any] | None) -> tuple[Any, bool]:
    """Return the choice in the form of chat completions, and whether several tools may be called at once.

    ApiError for a choice that is not valid.
    """
    if choice is None:
        return None, True
    choice = {name: value for name, value in choice.items() if value is not None}
    alone = choice.pop("disable_parallel_tool_use", False)
    match choice:
        case {"type": "auto" | "any" | "none" as kind, **others} if not others and isinstance(alone, bool):
            return _CHOICES[kind], not alone
        case {"type": "tool", "name": str(name), **others} if not others and isinstance(alone, bool):
            return {"type": "function", "function": {"name": name}}, not alone
    message = (
        'tool_choice should be {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": ...} or {"type": "none"}, '
        "and may have disable_parallel_tool_use, which is true or false"
    )
    raise ApiError(400, message, param="tool_choice")


@contextmanager
def map_error_fields() -> Iterator[None]:
    """Make errors name the fields of Anthropic's form."""
    try:
        yield
    except ApiError as error:
        message = error.message.replace(".function.parameters", ".input_schema")
        message = message.replace("tool_choice.function.name", "tool_choice.name").replace(".function.", ".")
        message = message.replace('tool_choice "required" needs', 'tool_choice "any" needs')
        raise ApiError(error.status, message, param=error.param, code=error.code) from None
