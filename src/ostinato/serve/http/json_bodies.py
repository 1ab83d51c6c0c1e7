"""JSON bodies of requests: their base class, and their validation. An unknown field is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from ostinato.errors import os_error_text
from ostinato.json_io import DuplicateMemberError, JsonMapping, JsonObject, is_unicode, parse_json
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.unknown_fields import MAX_IGNORED, MAX_ON_LOOP, UNKNOWN, remove_field, unknown_field
from ostinato.serve.settings import UnknownFields
from ostinato.setting_names import plain_words

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound="Body")

MAX_ERRORS = 100
"""Errors above which a body is refused without naming any: each takes a kilobyte to describe."""


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
    fields_after_prepare: ClassVar[frozenset[str]] = frozenset()
    """Fields that the endpoint still needs when the request is prepared."""
    generates: ClassVar[bool] = False
    """True if the body asks for output, for which there may be no room."""
    _ignored_fields: tuple[str, ...] = PrivateAttr(())

    def prepare(self, context: Any) -> Any:
        """Prepare the body for its endpoint with a `RequestContext`, on the event loop or in a worker process.

        ApiError or RequestError if something in it is wrong; NeedsWorker if that takes too long on the loop.
        """
        raise NotImplementedError(f"{type(self).__name__} is no whole body")

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of unknown fields that were left out, in printable ASCII."""
        return self._ignored_fields

    def without_prepared_fields(self) -> Self:
        """Return the body with only its `fields_after_prepare`; the others are None."""
        return self.model_copy(update=dict.fromkeys(type(self).model_fields.keys() - self.fields_after_prepare))

    @model_validator(mode="wrap")
    @classmethod
    def _few_errors(cls, value: object, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(value)
        except ValidationError as error:
            if error.error_count() <= MAX_ERRORS:
                raise
        raise ValueError(f"more than {MAX_ERRORS} things are wrong with it")


class EchoedBody(Body):
    """Object that clients send back as they received it.

    Their classes know more fields than this server serves, and write those as null, so null counts as a field that is
    left out.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


class _Refused(BeforeValidator):
    """Validator of a field that is not served."""

    __hash__ = object.__hash__


def unsupported_field(instead: str, but: object = None) -> BeforeValidator:
    """Return a validator for a field of OpenAI's clients that this server does not serve.

    Only null is accepted, and `but`, a value that asks for nothing.
    """

    def refuse(value: object) -> object:
        if value is not None and not (type(value) is type(but) and value == but):
            raise ValueError(f"not served; {instead}")
        return value

    return _Refused(refuse)


Ignored = Annotated[Any, Field(description="Accepted for OpenAI's clients; it changes nothing.")]


class _FailFast(FailFast):
    """Hashable subclass of pydantic's class, as a union needs."""

    __hash__ = object.__hash__


ListOf = Annotated[list[T], _FailFast()]
"""A list whose validation stops at the first wrong item."""


_HALF = re.compile("[\ud800-\udfff]")


_TYPE_OF_CURL = "application/x-www-form-urlencoded"
"""Type that `curl -d` gives a body without being told, and a page's form too."""
_OF_BROWSERS = ("origin", "referer", "sec-fetch-site")
"""Headers that browsers give what a web page sends; a proxy may take one of them away."""


def check_type(headers: Mapping[str, str], sent: bytes, *, from_curl: bool = False) -> None:
    """Raise ApiError unless there is a body, whose type is JSON, perhaps as UTF-8, and which is not compressed.

    With `from_curl`, the type that curl gives a body counts as JSON, unless a browser has sent it. A browser lets any
    web page send that type to any server, but says so in a header, which a page cannot leave out.
    """
    content_type, coding = headers.get("content-type", ""), headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        message = f"the body should be sent as it is, without the header Content-Encoding: {coding[:80]}"
        raise ApiError(415, message, code="unsupported_media_type", headers={"Accept-Encoding": "identity"})
    if not sent:
        raise ApiError(400, "the request has no body; it should be a JSON object")
    if not json.detect_encoding(sent[:4]).startswith("utf-8"):
        # Another encoding would also be counted wrongly (`serve/body_workers/json_complexity.py`).
        raise ApiError(400, "the body is not valid JSON: it is not text in UTF-8")
    media_type = content_type.partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or media_type.endswith("+json")
    if not is_json and not (
        from_curl and media_type == _TYPE_OF_CURL and not any(map(headers.__contains__, _OF_BROWSERS))
    ):
        given = f"not {content_type}" if content_type else "and there is none"
        message = f"the body should be JSON, sent with the header Content-Type: application/json, {given}"
        raise ApiError(415, message, code="unsupported_media_type")


def read_body(kind: type[BodyT], sent: bytes, context: Any, unknown: UnknownFields = "error") -> tuple[BodyT, Any]:
    """Return the body that was sent, and the result of its `prepare`. ApiError that describes the problem.

    Unless `unknown` fields are an error, they are left out, and the body's `ignored_fields` names them.
    """
    if unknown == "error":
        body = validated(kind, parsed(sent))
        return body, body.prepare(context)
    value = parsed(sent)
    ignored: list[str] = []
    while True:
        try:
            body = validated(kind, value)
            prepared = body.prepare(context)
        except ApiError as error:
            is_ignored = error.code == UNKNOWN and len(ignored) < MAX_IGNORED
            name = remove_field(value, error.param or "") if is_ignored else None
            if name is None:
                raise
            ignored.append(name)
            if len(ignored) == MAX_ON_LOOP:
                context.require_worker()
        else:
            body._ignored_fields = tuple(ignored)
            return body, prepared


def parsed(sent: bytes) -> JsonObject:
    """Return the JSON object that was sent. ApiError if it is none."""
    try:
        value = parse_json(sent)
    except DuplicateMemberError as error:
        raise ApiError(400, f"{error.name}: the body has it twice in one object", param=error.name) from None
    except ValueError as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else os_error_text(error)
        raise ApiError(400, f"the body is not valid JSON: {why}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body should be a JSON object")
    try:
        if not is_unicode(sent, value):
            _refuse_surrogates(value)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    return value


def validated(kind: type[BodyT], value: JsonObject) -> BodyT:
    """Return the body that a JSON object describes. ApiError that describes the problem."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False), value, kind) from None


def _refuse_surrogates(value: JsonObject) -> None:
    """Raise ApiError, with the place, for a body that holds half of a surrogate pair."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, str) and _HALF.search(part):
            param = path_text(path)
            raise ApiError(400, f"{param}: the text holds half of a surrogate pair, which is no Unicode", param=param)
        if isinstance(part, dict):
            if any(map(_HALF.search, part)):
                raise ApiError(400, "the name of a field is not valid Unicode")
            waiting += [((*path, key), inner) for key, inner in part.items()]
        elif isinstance(part, list):
            waiting += [((*path, place), inner) for place, inner in enumerate(part)]


def _refusal(errors: Sequence[JsonMapping], body: JsonObject, kind: type[Body]) -> ApiError:
    """Return pydantic's problems with a body as the error of one field.

    The deepest field is named: of a union's alternatives, validation of the intended one got furthest. An unknown field
    goes before one that is missing, whose name it may be meant to be.
    """
    if any(detail["type"] == "missing" for detail in errors):
        errors = sorted(errors, key=lambda detail: detail["type"] != "extra_forbidden")
    paths = [_path_in(body, detail["loc"], detail["type"]) for detail in errors]
    path = max(paths, key=len)
    found = [detail for detail, each in zip(errors, paths, strict=True) if each == path]
    words = list(dict.fromkeys(plain_words(detail) for detail in found))
    if not path:
        of_name = found[0]["type"] == "string_unicode"
        message = "the name of a field is not valid Unicode" if of_name else f"the body: {words[0]}"
        return ApiError(400, message)
    param = path_text(path)
    if found[0]["type"] == "extra_forbidden":
        return unknown_field(path_text(path[:-1]), str(path[-1]), _known_fields(kind, path[:-1]))
    return ApiError(400, f"{param}: {', or: '.join(words)}", param=param)


def _known_fields(kind: type[Body], path: Sequence[str | int]) -> list[str]:
    """Return the names of the fields that an object at `path` in a body of this kind may have."""
    kinds = [kind]
    for part in path:
        if isinstance(part, str):
            fields = (_by_name(each).get(part) for each in kinds)
            kinds = [each for field in fields if field is not None for each in _bodies_in(field.annotation)]
    return list(dict.fromkeys(name for each in kinds for name in _by_name(each)))


def _by_name(kind: type[Body]) -> dict[str, FieldInfo]:
    """Return the fields that are served, by their names in JSON."""
    return {
        field.alias or name: field
        for name, field in kind.model_fields.items()
        if not any(isinstance(each, _Refused) for each in field.metadata)
    }


def _bodies_in(annotation: object) -> list[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return [annotation]
    return [body for each in get_args(annotation) for body in _bodies_in(each)]


def path_text(path: Sequence[str | int]) -> str:
    """Return a path as text, such as `messages[0].role`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _path_in(body: object, where: Sequence[str | int], kind: str) -> list[str | int]:
    """Return the part of an error's location that is in the body. The rest names types that pydantic tried."""
    path: list[str | int] = []
    value = body
    for place, part in enumerate(where):
        is_missing = kind == "missing" and place == len(where) - 1
        if isinstance(value, dict) and isinstance(part, str) and (part in value or is_missing):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        path.append(part)
    return path
