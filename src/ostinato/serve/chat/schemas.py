"""Values that a model wrote without quotes, typed by the tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ostinato.serve.chat.json_scan import load_json

# Templates render earlier calls' values as Python prints them, so models write these too.
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


def argument_json(value: str, parameters: Mapping[str, Any], key: str) -> str:
    """Return the JSON text of the value that a model wrote for the parameter `key`.

    If the schema allows a string, the value is that string; but `null` is null, if that is allowed too. Otherwise the
    value is JSON if it can be read as JSON, and a string if not.
    """
    schema = parameter_schema(parameters, key)
    if allows(schema, "string", parameters):
        if value == "null" and allows(schema, "null", parameters):
            return value
        return _string(value)
    literal = _PYTHON_LITERALS.get(value.strip(), value.strip())
    try:
        load_json(literal)
    except ValueError:
        return _string(value)
    return literal


def parameter_schema(parameters: Mapping[str, Any], key: str) -> Any:
    """Return the schema of one parameter, {} if there is none."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return parameters.get("additionalProperties", {})


def allows(schema: Any, kind: str, root: Mapping[str, Any]) -> bool:
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


def _names(schema: Mapping[str, Any], kind: str) -> bool:
    if "type" in schema:
        named = schema["type"]
        return kind == named or (isinstance(named, list) and kind in named)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    expected = str if kind == "string" else type(None)
    return isinstance(values, list) and any(isinstance(value, expected) for value in values)


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema itself, or the one that it refers to; None for a missing one or circular references."""
    followed: set[str] = set()
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        if reference in followed:
            return None
        followed.add(reference)
        schema = _look_up(reference, root)
    return schema


def _look_up(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a local JSON pointer (RFC 6901) such as `#/$defs/Unit`, or None."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
