"""What a request wants of its output's form: `response_format`, `guided_json`, `guided_regex`, `guided_choice`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field

from ostinato.serve.http.errors import ApiError
from ostinato.serve.protocol.common import Body, Generating


class JsonSchema(Body):
    model_config = ConfigDict(serialize_by_alias=True)

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The JSON schema of the output; null: any object."""
    strict: bool | None = None
    """The output follows the schema whatever this is."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


@dataclass(frozen=True)
class Wish:
    """One form that the output is to have: a field of Guide and its value; `param` is where the request says so."""

    param: str
    kind: str
    value: Any


def wishes_of(body: Generating) -> list[Wish]:
    """What the `guided_` fields ask for."""
    fields = (("guided_json", "json_schema"), ("guided_regex", "regex"), ("guided_choice", "choice"))
    return [Wish(param, kind, getattr(body, param)) for param, kind in fields if getattr(body, param) is not None]


def one_wish(wishes: Sequence[Wish | None]) -> Wish | None:
    """The form that is asked for. ApiError if there are several."""
    given = [wish for wish in wishes if wish is not None]
    if len(given) > 1:
        named = " and ".join(wish.param for wish in given)
        raise ApiError(400, f"{named} are given, and an output has one form", param=given[1].param)
    return given[0] if given else None


def format_wish(asked: ResponseFormat | None) -> Wish | None:
    """What `response_format` asks for. ApiError for a type json_schema without a schema."""
    if asked is None:
        return None
    if asked.type == "json_schema":
        if asked.json_schema is None:
            message = "response_format.json_schema should be given with this type"
            raise ApiError(400, message, param="response_format.json_schema")
        if (schema := asked.json_schema.schema_) is not None:
            return Wish("response_format", "json_schema", schema)
        return Wish("response_format", "json_object", True)
    if asked.json_schema is not None:
        message = "response_format.json_schema goes with the type json_schema"
        raise ApiError(400, message, param="response_format.json_schema")
    return Wish("response_format", "json_object", True) if asked.type == "json_object" else None
