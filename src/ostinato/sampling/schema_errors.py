"""The part of a schema to which the grammar library's refusal applies: the library names no place."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping

from ostinato.json_io import JsonMapping, JsonObject
from ostinato.sampling.json_schema import (
    NAMED_SCHEMAS,
    ONE_SCHEMA,
    SCHEMA_LISTS,
    SchemaRewriter,
    follow_pointer,
)
from ostinato.sampling.schema_limits import Place, path

_SECONDS = 0.25
"""Most seconds of a processor for a search."""
_REQUIRED_PROPERTY = re.compile("required property '(.*)' is unsatisfiable$")
_REQUIRED_ITEM = re.compile(r"required item is unsatisfiable$|prefixItems\[\d+\] is unsatisfiable")


def located_reason(root: JsonMapping, reason: str, refusal: Callable[[JsonObject], str]) -> str:
    """Return the reason against a schema, with the place of the smallest part to which one applies alone.

    `refusal` returns the library's reason against a schema in its form, empty if it has none. Parts are tried one by
    one, for a bounded time.
    """
    rewriter, end, part = SchemaRewriter(root), time.thread_time() + _SECONDS, root
    place: Place = ()
    parts = list(_inner_schemas(root, root, reason))
    while parts and _empty_key(part) is None and time.thread_time() < end:
        keys, inner, fits = parts.pop(0)
        where = keys if "$ref" in part and keys[0] not in part else (*place, *keys)
        try:
            why = refusal(rewriter.document(inner, where))
        except ValueError:
            continue
        if why and (fits or why == reason):
            place, part, reason = where, inner, why
            parts = list(_inner_schemas(root, part, reason))
    empty = _empty_key(part)
    return f"{path((*place, empty))} has no entries, so no value follows it" if empty else f"{path(place)}: {reason}"


def _empty_key(schema: JsonMapping) -> str | None:
    return next((key for key in ("enum", "anyOf", "oneOf", "type") if schema.get(key) == []), None)


def _inner_schemas(root: object, schema: JsonMapping, reason: str) -> Iterator[tuple[Place, JsonMapping, bool]]:
    """Yield the parts of a schema that the library refused for a `reason`: keys, part, and whether any reason fits it.

    Otherwise only a part with the same reason is to blame: one that may be left out may be anything. Local references
    lead to keys of the `root`.
    """
    name, is_item = _REQUIRED_PROPERTY.search(reason), _REQUIRED_ITEM.search(reason) is not None
    for key in (*ONE_SCHEMA, *SCHEMA_LISTS, *NAMED_SCHEMAS):
        value = schema.get(key)
        if isinstance(value, Mapping) and key not in NAMED_SCHEMAS:
            yield (key,), value, is_item and key == "items"
        elif isinstance(value, Mapping | list):
            for inner_key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
                fits = is_item and key in ("items", "prefixItems")
                fits = fits or (name is not None and key == "properties" and inner_key == name[1])
                if isinstance(inner, Mapping):
                    yield (key, inner_key), inner, fits
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return
    if isinstance(inner := follow_pointer(root, reference[1:]), Mapping):
        yield tuple(reference[2:].split("/")), inner, True
