"""Tools as OpenAI's API defines them: their validation, and the choice of those that an answer must call.

Values that a model wrote without quotes are typed by the tool's JSON schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ostinato.errors import Remedy, RequestError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.sampling.json_schema import follow_pointer
from ostinato.serve.chat.incremental_text import load_json

# Templates render earlier calls' values as Python prints them, so models write these too.
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


def argument_json(value: str, parameters: Mapping[str, object], key: str) -> str:
    """Return the JSON text of the value that a model wrote for the parameter `key`.

    If the schema allows a string, the value is that string; but `null` is null, if that is allowed too. Otherwise the
    value is JSON if it can be read as JSON, and a string if not.
    """
    schema = parameter_schema(parameters, key)
    if allows(schema, "string", parameters):
        if value == "null" and allows(schema, "null", parameters):
            return value
        return _string(value)
    literal = PYTHON_LITERALS.get(value.strip(), value.strip())
    try:
        load_json(literal)
    except ValueError:
        return _string(value)
    return literal


def parameter_schema(parameters: Mapping[str, object], key: str) -> object:
    """Return the schema of one parameter, {} if there is none."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return parameters.get("additionalProperties", {})


def allows(schema: object, kind: str, root: Mapping[str, object]) -> bool:
    """Return whether a schema names `kind` ("string", "null") among its types, enum, const or alternatives.

    References are looked up in `root`, the tool's `parameters`. A schema that names no type allows nothing here.
    """
    seen: set[int] = set()
    pending = [schema]
    while pending:
        choice = resolve(pending.pop(), root)
        if not isinstance(choice, Mapping) or id(choice) in seen:
            continue
        seen.add(id(choice))
        if _names(choice, kind):
            return True
        if "type" not in choice:
            for keyword in ("anyOf", "oneOf", "allOf"):
                choices = choice.get(keyword)
                pending += choices if isinstance(choices, list) else ()
    return False


def _names(schema: Mapping[str, object], kind: str) -> bool:
    if "type" in schema:
        named = schema["type"]
        return kind == named or (isinstance(named, list) and kind in named)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    expected = str if kind == "string" else type(None)
    return isinstance(values, list) and any(isinstance(value, expected) for value in values)


def resolve(schema: object, root: Mapping[str, object]) -> object:
    """Return the schema itself, or the one that it refers to; None for a missing one or circular references."""
    followed: set[str] = set()
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        if reference in followed:
            return None
        followed.add(reference)
        schema = _look_up(reference, root)
    return schema


def _look_up(reference: str, root: Mapping[str, object]) -> object:
    """Return the target of a local JSON pointer (RFC 6901) such as `#/$defs/Unit`, or None."""
    if not reference.startswith("#"):
        return None
    return follow_pointer(root, reference.removeprefix("#"))


def _string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


ToolSpelling = Sequence[tuple[str, str]]
"""Parts of errors that name fields of a tool or a choice in chat completions, and the same in another API's form."""
CHAT_SPELLING: ToolSpelling = ()
RESPONSES_SPELLING: ToolSpelling = (
    ('"function": {"name": ...}}', '"name": ...}'),
    ('"allowed_tools": {"mode"', '"mode"'),
    ("...}]}", "...}]"),
    ("tool_choice.allowed_tools", "tool_choice"),
    (".function", ""),
)
ANTHROPIC_SPELLING: ToolSpelling = (
    (".function.parameters", ".input_schema"),
    (".function.", "."),
    ('tool_choice "required"', 'tool_choice "any"'),
)


def spelled(text: str, spelling: ToolSpelling) -> str:
    """Return an error's text, or a place, as an API spells it. It begins with the names, before what a client sent."""
    for ours, theirs in spelling:
        text = text.replace(ours, theirs, 1)
    return text


_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_NO_PARAMETERS: JsonMapping = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str
    parameters: JsonMapping
    """The JSON schema of the arguments, an object."""
    strict: bool = False
    """True if the model may only write arguments that follow the schema."""
    place: str = field(default="", compare=False)
    """Place of `parameters` in the request's body."""

    def refusal(self, problem: str) -> RequestError:
        """Return the error for parameters that cannot be enforced."""
        if self.place:
            return RequestError(f"{self.place}: {problem}", setting=self.place)
        return RequestError(f"tool {self.name}: parameters: {problem}")


def read_tools(value: object) -> tuple[Tool, ...]:
    """Return the tools of a request: objects `{"type": "function", "function": {"name", "description", "parameters"}}`.

    RequestError, which names the field, if one is wrong.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RequestError(f"tools must be a list, not {_kind(value)}")
    tools = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(value))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise RequestError(f"tools[{index}].function.name: there are two tools {tool.name!r}; names must differ")
        seen.add(tool.name)
    return tools


def read_choice(tools: Sequence[Tool], tool_choice: object) -> tuple[tuple[Tool, ...], object]:
    """Return the tools that an answer may call, and the choice among them.

    `{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}` gives the tools that it
    names and its mode; any other choice gives all tools and itself. RequestError if a choice of allowed tools is
    malformed or names a tool that is not among `tools`.
    """
    if not (isinstance(tool_choice, dict) and tool_choice.get("type") == "allowed_tools"):
        return tuple(tools), tool_choice
    match tool_choice:
        case {"allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as named, **others}, **rest} if (
            not others and rest.keys() == {"type"}
        ):
            names = [_allowed_name(entry) for entry in named]
        case _:
            raise RequestError(
                'tool_choice of the type allowed_tools has "allowed_tools": {"mode": "auto" or "required", "tools": '
                '[{"type": "function", "function": {"name": ...}}]}'
            )
    known = {tool.name: tool for tool in tools}
    for name in names:
        if name not in known:
            are = ", ".join(known) or "none are given"
            raise RequestError(f"tool_choice.allowed_tools: no tool is named {name!r}; tools: {are}")
    return tuple(tool for tool in tools if tool.name in names), mode


def _allowed_name(entry: object) -> str:
    match entry:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise RequestError('tool_choice.allowed_tools.tools: each is {"type": "function", "function": {"name": ...}}')


def forced_tools(tools: Sequence[Tool], tool_choice: object) -> tuple[Tool, ...]:
    """Return the tools that the answer must call one of; none for None, "auto" and "none".

    `tool_choice` is "none", "auto", "required" or `{"type": "function", "function": {"name": ...}}`. RequestError if it
    is anything else, or names or needs a tool that is not among `tools`.
    """
    if tool_choice in (None, "none", "auto"):
        return ()
    if tool_choice == "required":
        if not tools:
            raise RequestError('tool_choice "required" needs tools to choose from', [Remedy("tool_choice", "auto")])
        return tuple(tools)
    match tool_choice:
        case {"type": "function", "function": {"name": str(name), **others}, **rest} if not others and not rest:
            chosen = tuple(tool for tool in tools if tool.name == name)
            if not chosen:
                known = ", ".join(tool.name for tool in tools) or "none are given"
                raise RequestError(f"tool_choice.function.name: no tool is named {name!r}; tools: {known}")
            return chosen
    raise RequestError(
        'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or of the '
        "type allowed_tools"
    )


def _read_tool(value: object, field: str) -> Tool:
    tool = _object(value, field, {"type", "function"})
    if tool.get("type") != "function":
        raise RequestError(f'{field}.type must be "function", not {tool.get("type")!r}')
    field += ".function"
    function = _object(tool.get("function"), field, {"name", "description", "parameters", "strict"})
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{field}.name must be 1 to 128 letters, digits, _ or -, not {name!r}")
    description = function.get("description")
    if not isinstance(description, str | None):
        raise RequestError(f"{field}.description must be a string, not {_kind(description)}")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{field}.strict must be true or false, not {_kind(function['strict'])}")
    parameters = read_parameters(function.get("parameters"), f"{field}.parameters")
    return Tool(name, description or "", parameters, bool(function.get("strict")), f"{field}.parameters")


def read_parameters(value: object, field: str) -> JsonMapping:
    """Return the schema of a function's arguments. RequestError, which names `field`, if it is none."""
    if value is None:
        return _NO_PARAMETERS
    if not isinstance(value, dict):
        raise RequestError(f"{field} must be a JSON schema, which is an object, not {_kind(value)}")
    if value.get("type", "object") != "object":
        raise RequestError(f'{field}.type must be "object", since arguments are one, not {value["type"]!r}')
    properties = value.get("properties", {})
    if not isinstance(properties, dict):
        raise RequestError(f"{field}.properties must be an object, not {_kind(properties)}")
    for key, schema in properties.items():
        if not isinstance(schema, dict | bool):
            raise RequestError(f"{field}.properties.{key} must be a JSON schema, not {_kind(schema)}")
    required = value.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise RequestError(f"{field}.required must be a list of strings")
    return {**value, "type": "object"}


def _object(value: object, field: str, known: set[str]) -> JsonObject:
    if not isinstance(value, dict):
        raise RequestError(f"{field} must be an object, not {_kind(value)}")
    for key in value:
        if key not in known:
            path = f"{field}.{key}"
            raise RequestError(f"{path} is unknown; it may be {', '.join(sorted(known))}", setting=path)
    return value


def _kind(value: object) -> str:
    kinds = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return kinds.get(type(value), "a list" if isinstance(value, list) else "an object")
