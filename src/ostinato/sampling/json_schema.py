"""JSON schemas in the form that llguidance enforces exactly. Imports no grammar library.

- An object with `properties` or `patternProperties` is closed unless `additionalProperties` says otherwise. Names count
  that any part of the schema for the same value knows: those of `allOf`, `anyOf`, `oneOf` and `$ref`.
- References lead to definitions of their own, so a part of a schema can be enforced alone.
- Annotations and unreachable definitions are left out, and formats become patterns.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from ostinato.json_io import JsonMapping, JsonObject
from ostinato.sampling.schema_limits import (
    COUNTS,
    MAX_NUMBER,
    Place,
    SchemaCost,
    check_numbers,
    check_object,
    enforceable_multiples,
    path,
)

MAX_PARTS = 20_000
"""Most parts of a schema and names of properties, once those that are joined know of each other."""
_MAX_PLACE = 350
"""Most keys and indices that lead to a schema; a guide is nested less deep."""
_MAX_COMPARED = 100
"""Most alternatives of `oneOf` that are compared with each other."""
ONE_SCHEMA = (
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
)
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LITERAL = ("type", "const", "enum", "required", "pattern", *COUNTS)
_UNENFORCED = (
    *("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies"),
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef"),
)
"""Keywords that restrict and cannot be enforced.

Exceptions are `not` and `uniqueItems` that are false, and `uniqueItems` of few values, whose arrays are listed.
"""
_MAX_LISTED = 5
"""Most values of items whose arrays without repeats are all listed: five make 326."""
_LISTS = frozenset(("type", "title", "description", "default", "examples", "$comment"))
"""Keywords that may stand beside the `enum` of such items."""
_TYPES_LISTED: dict[str, tuple[type, ...]] = {
    "any": (str, int, bool, type(None)),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
}
"""Type that such items may name -> types of their values."""
_BESIDE_ITEMS = frozenset(("prefixItems", "additionalItems", "enum", "const"))
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

# Times are those that `datetime.fromisoformat` and other languages' readers take, which is less than RFC 3339 allows:
# no year 0, no leap seconds, T and Z as capitals, and fractions down to nanoseconds.
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# At most 63 characters, and no hyphens in the third and fourth place: those would announce a name in Punycode.
_LABEL = (
    "[a-zA-Z0-9]([a-zA-Z0-9-]{0,2}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-]([a-zA-Z0-9-][a-zA-Z0-9]|[a-zA-Z0-9]-)[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?"
)
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_HEX = "[0-9a-fA-F]{1,4}"
_LAST = f"({_HEX}:{_HEX}|{_IPV4})"
# RFC 3986, IPv6address: the groups before and after `::`.
_IPV6 = "|".join(
    [
        f"({_HEX}:){{6}}{_LAST}",
        f"::({_HEX}:){{5}}{_LAST}",
        *(f"(({_HEX}:){{0,{before}}}{_HEX})?::({_HEX}:){{{4 - before}}}{_LAST}" for before in range(5)),
        f"(({_HEX}:){{0,5}}{_HEX})?::{_HEX}",
        f"(({_HEX}:){{0,6}}{_HEX})?::",
    ]
)
_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-%s[0-9a-fA-F]{3}-%s[0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
FORMATS = {
    "date": (_DAY,),
    "time": (_TIME,),
    "date-time": (f"{_DAY}T{_TIME}",),
    "hostname": (_HOST, ".{1,253}"),
    "email": (rf"{_ATOM}(\.{_ATOM})*@({_HOST}|\[{_IPV4}\]|\[IPv6:({_IPV6})\])", "[^@]{1,64}@.{1,253}"),
    "ipv4": (_IPV4,),
    "ipv6": (_IPV6,),
    "uuid": (_UUID % ("[0-9a-fA-F]", "[0-9a-fA-F]"),),
    **{f"uuid{version}": (_UUID % (version, "[89abAB]"),) for version in range(1, 9)},
}
"""Patterns of formats (RFC 3339, 1123, 5321, 2673, 4291 and 9562). A text matches all."""
_LIBRARY_FORMATS = ("duration", "uri")
_UNENFORCED_FORMATS = (
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
    *("relative-json-pointer", "regex"),
)
"""All other formats of the standard. Names that it does not know, such as `password` or `path`, are annotations."""
_SAME_PATTERN = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    )
}
"""A pattern of zod for addresses -> the same without look-ahead, which the library does not have."""


def enforceable(schema: object) -> JsonObject:
    """Return the schema for the library. ValueError with keyword, place and legal values for what it cannot enforce."""
    return SchemaRewriter(schema).document(schema)


def follow_pointer(value: object, pointer: str) -> object:
    """Return the value that a JSON pointer (RFC 6901) in the fragment of a reference leads to, or None."""
    for part in unquote(pointer).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = value[int(key)] if re.fullmatch("[0-9]{1,6}", key) and int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


class _Known:
    """Names and patterns of properties that a schema and its parts for the same value mention."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.patterns: dict[str, None] = {}
        self.is_open = False
        """True if one of them allows any other property explicitly."""

    def add(self, other: _Known) -> None:
        self.names |= other.names
        self.patterns |= other.patterns
        self.is_open = self.is_open or other.is_open

    def key(self) -> tuple[Any, ...]:
        return (*self.names, None, *self.patterns, self.is_open)


class SchemaRewriter:
    """Rewriter of schemas whose references point into one document, `root`."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._bases: dict[int, str] = {}
        self._resources: JsonObject = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._targets: dict[tuple[str, str], tuple[Any, str]] = {}
        self._known: dict[int, _Known] = {}
        self._definitions: dict[tuple[Any, ...], str] = {}
        self._pending: list[tuple[str, Any, Place, str, _Known]] = []
        self._cost = SchemaCost(MAX_PARTS)
        self._index()

    def document(self, schema: object, place: Place = ()) -> JsonObject:
        """Return the root, or its part at `place`, with the definitions that it needs. ValueError as `enforceable`."""
        self._definitions, self._cost = {}, SchemaCost(MAX_PARTS)
        base = self._bases.get(id(self._root), "")
        made = self._schema(schema, place, base, _Known())
        document = made if isinstance(made, dict) else {} if made else {"anyOf": [False]}
        definitions = {}
        while self._pending:
            name, target, place, base, outer = self._pending.pop()
            definitions[name] = self._schema(target, place, base, outer)
        self._cost.check()
        return {**document, "$defs": definitions} if definitions else document

    def resolved(self, schema: object, annotations: Collection[str]) -> object:
        """Return a part of the root, or the schema that it refers to if it has nothing else but `annotations`.

        ValueError for circular references.
        """
        followed = set[int]()
        while isinstance(schema, Mapping) and "$ref" in schema and schema.keys() <= {"$ref", *annotations}:
            if id(schema) in followed:
                raise ValueError(f"$ref {schema['$ref']!r} leads back to itself")
            followed.add(id(schema))
            schema, _ = self._target(schema["$ref"], (), self._bases.get(id(schema), ""))
        return schema

    def _index(self) -> None:
        """Find the schemas that have names of their own: `$id` and `$anchor`."""
        waiting = [(self._root, "")] if isinstance(self._root, Mapping) else []
        while waiting:
            schema, base = waiting.pop()
            self._cost.add(1, ())
            identity = schema.get("$id")
            if identity is not None and "$ref" in schema and schema is not self._root:
                raise ValueError(f"$id {identity!r} beside $ref: drafts read that differently; put $ref into allOf")
            if isinstance(identity, str) and not identity.startswith("#"):
                base = urldefrag(urljoin(base, identity))[0]
                self._resources.setdefault(base, schema)
            elif isinstance(identity, str):
                self._anchors[base, identity[1:]] = schema
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := schema.get(key), str):
                    self._anchors[base, name] = schema
            self._bases[id(schema)] = base
            parts = [schema.get(key) for key in ONE_SCHEMA]
            for key in (*SCHEMA_LISTS, *NAMED_SCHEMAS):
                value = schema.get(key)
                if isinstance(value, list):
                    parts += value
                elif isinstance(value, Mapping) and key in NAMED_SCHEMAS:
                    parts += value.values()
            waiting += [(part, base) for part in parts if isinstance(part, Mapping)]

    def _target(self, reference: object, place: Place, base: str) -> tuple[Any, str]:
        """Return the schema that a reference leads to, and the base of references in it."""
        if not isinstance(reference, str):
            raise ValueError(f"{path(place)} is no text")
        if (base, reference) in self._targets:
            return self._targets[base, reference]
        uri, fragment = base, reference[1:]
        if not reference.startswith("#"):
            uri, fragment = urldefrag(urljoin(base, reference))
        target = self._resources.get(uri)
        if fragment:
            by_name = self._anchors.get((uri, unquote(fragment)))
            target = follow_pointer(target, fragment) if fragment.startswith("/") else by_name
        if not isinstance(target, Mapping | bool):
            raise ValueError(
                f"{path(place)} is {reference!r}: which is not present in the schema; a reference such as "
                "#/$defs/NAME, to a schema in the same document, works"
            )
        found = self._targets[base, reference] = target, self._bases.get(id(target), uri)
        return found

    def _mentioned(self, schema: object, place: Place, base: str) -> _Known:
        """Return the properties that a schema mentions, with those of its parts for the same value."""
        waiting, entered = [(schema, base)], set[int]()
        while waiting:
            part, base = waiting[-1]
            if id(part) in self._known or not isinstance(part, Mapping):
                waiting.pop()
                continue
            inner = self._parts(part, _IN_PLACE, place, self._bases.get(id(part), base))
            if id(part) not in entered:
                entered.add(id(part))
                waiting += [(each, inner_base) for each, inner_base in inner if id(each) not in entered]
                continue
            known = self._known[id(part)] = _own(part)
            for each, _ in inner:
                known.add(self._known.get(id(each), _Known()))
            self._cost.add(len(known.names), place)
        return self._known.get(id(schema), _Known())

    def _parts(
        self, schema: Mapping[str, object], keys: tuple[str, ...], place: Place, base: str
    ) -> list[tuple[Any, str]]:
        parts: list[tuple[Any, str]] = []
        for key in keys:
            value = schema.get(key)
            if key == "$ref" and key in schema:
                parts.append(self._target(value, (*place, key), base))
            elif isinstance(value, list):
                parts += ((part, base) for part in value)
        return parts

    def _schema(self, schema: object, place: Place, base: str, outer: _Known) -> Any:
        """Return a schema in the library's form. `outer` are properties that other schemas for its value mention."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"{path(place)} should be a schema: an object, true or false")
        if len(place) > _MAX_PLACE:
            raise ValueError(f"the schema is nested too deep, at {path(place)}")
        if schema.get("not") == {} or schema.get("not") is True:
            return False
        base = self._bases.get(id(schema), base)
        self._cost.add_schema(schema, place)
        arrays = self._arrays_without_repeats(schema, place, base)
        for key in _UNENFORCED:
            is_enforced = key == "uniqueItems" and arrays is not None
            if key in schema and not is_enforced and not (key in ("not", "uniqueItems") and schema[key] is False):
                raise ValueError(f"{path((*place, key))} cannot be enforced; leave {key} out")
        made: JsonObject = {key: schema[key] for key in _LITERAL if key in schema}
        if isinstance(made.get("pattern"), str):
            made["pattern"] = _SAME_PATTERN.get(made["pattern"], made["pattern"])
        made |= {key: int(made[key]) for key in COUNTS if isinstance(made.get(key), float) and made[key].is_integer()}
        check_numbers(made, place)
        self._bound(schema, made, place)
        self._apply(schema, made, place, base, outer)
        if arrays:
            self._cost.add(sum(1 + len(array) for array in arrays), place)
            made = {key: value for key, value in made.items() if key not in COUNTS} | {"enum": arrays}
        else:
            self._items(schema, made, place, base)
        self._object(schema, made, place, base, outer)
        self._format(schema, made, place)
        check_object(place, made)
        return made

    def _bound(self, schema: Mapping[str, object], made: JsonObject, place: Place) -> None:
        """Add bounds. One beyond all numbers that can be enforced counts as the last of these."""
        for key in _BOUNDS:
            value = schema.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                upper = key in ("maximum", "exclusiveMaximum")
                if (upper and value > MAX_NUMBER) or (key in ("minimum", "exclusiveMinimum") and value < -MAX_NUMBER):
                    made.setdefault("maximum" if upper else "minimum", MAX_NUMBER if upper else -MAX_NUMBER)
                    continue
                check_numbers({key: value}, place)
                if key == "multipleOf":
                    made[key], *more = enforceable_multiples(value, (*place, key))
                    made |= {"allOf": [{key: each} for each in more]} if more else {}
                    continue
            if key in schema:
                made[key] = value

    def _apply(self, schema: JsonMapping, made: JsonObject, place: Place, base: str, outer: _Known) -> None:
        """Add the schemas that the same value follows. Each knows the properties of those that it is joined with."""
        parts = {key: self._parts(schema, (key,), place, base) for key in _IN_PLACE}
        for key in _IN_PLACE:
            if key not in schema:
                continue
            beside = _Known()
            for known in (outer, _own(schema)):
                beside.add(known)
            for other, others in parts.items():
                if other != key or key == "allOf":
                    for part, part_base in others:
                        beside.add(self._mentioned(part, (*place, other), part_base))
            if key == "$ref":
                # The definition's own place: one that counts all references on the way would grow with each.
                local = str(schema[key]).removeprefix("#/").split("/")
                made[key] = self._reference(*parts[key][0], tuple(local), beside)
                continue
            if not isinstance(schema[key], list):
                raise ValueError(f"{path((*place, key))} should be a list of schemas")
            to = key
            if key == "oneOf":
                if self._all_differ(schema[key], place, base):
                    to = "anyOf"  # the library compares less
                else:
                    beside.is_open = True  # what a closed alternative refuses may fit two open ones
            schemas = [self._schema(each, (*place, key, i), base, beside) for i, each in enumerate(schema[key])]
            if to in made:
                made.setdefault("allOf", []).append({to: schemas})
            else:
                made[to] = schemas

    def _reference(self, target: object, base: str, place: Place, outer: _Known) -> str:
        key = (id(target), outer.key())
        if key not in self._definitions:
            name = self._definitions[key] = str(len(self._definitions))
            self._pending.append((name, target, place, base, outer))
        return f"#/$defs/{self._definitions[key]}"

    def _arrays_without_repeats(self, schema: JsonMapping, place: Place, base: str) -> list[list[object]] | None:
        """Return all arrays of a schema with `uniqueItems` if its items list few values, [] if one item is the most.

        Otherwise, or without `uniqueItems`, return None.
        """
        least, most, items = schema.get("minItems", 0), schema.get("maxItems", _MAX_LISTED), schema.get("items")
        if schema.get("uniqueItems") is not True or not (type(least) is int and type(most) is int):
            return None
        if most <= 1:
            return []
        if isinstance(items, Mapping) and items.keys() == {"$ref"}:
            items, _ = self._target(items["$ref"], (*place, "items"), base)
        if schema.get("type") != "array" or schema.keys() & _BESIDE_ITEMS or not isinstance(items, Mapping):
            return None
        listed = [True, False] if items.get("type") == "boolean" and items.keys() <= _LISTS else items.get("enum")
        types = _TYPES_LISTED.get(str(items.get("type", "any")), ())
        if not items.keys() <= {*_LISTS, "enum"} or not isinstance(listed, list) or len(listed) > _MAX_LISTED:
            return None
        if not all(type(value) in types for value in listed) or len({(type(each), each) for each in listed}) < len(
            listed
        ):
            return None
        lengths = range(max(least, 0), min(most, len(listed)) + 1)
        return [list(array) for length in lengths for array in itertools.permutations(listed, length)] or None

    def _items(self, schema: Mapping[str, object], made: JsonObject, place: Place, base: str) -> None:
        prefix, rest = schema.get("prefixItems"), schema.get("items")
        if isinstance(rest, list):  # before the draft of 2020
            prefix, rest = rest, schema.get("additionalItems")
        if prefix is not None:
            if not isinstance(prefix, list):
                raise ValueError(f"{path((*place, 'prefixItems'))} should be a list of schemas")
            where = (*place, "prefixItems")
            made["prefixItems"] = [self._schema(each, (*where, i), base, _Known()) for i, each in enumerate(prefix)]
        if rest is not None:
            made["items"] = self._schema(rest, (*place, "items"), base, _Known())

    def _object(self, schema: JsonMapping, made: JsonObject, place: Place, base: str, outer: _Known) -> None:
        for key in ("properties", "patternProperties"):
            if key in schema:
                if not isinstance(schema[key], Mapping):
                    raise ValueError(f"{path((*place, key))} should be an object")
                where = (*place, key)
                made[key] = {
                    name: self._schema(value, (*where, name), base, _Known()) for name, value in schema[key].items()
                }
        others = schema.get("additionalProperties", True)
        if others is not False:
            others = self._schema(others, (*place, "additionalProperties"), base, _Known())
        if "properties" in made or "patternProperties" in made:
            everything = _Known()
            everything.add(outer)
            everything.add(self._mentioned(schema, place, base))
            if "additionalProperties" not in schema and not everything.is_open and not {"const", "enum"} & made.keys():
                others = False
                own, patterns = made.get("properties", {}), made.get("patternProperties", {})
                # In one order everywhere, which is that of the joined schema.
                names = made["properties"] = {name: own.get(name, True) for name in everything.names}
                patterns |= {pattern: True for pattern in everything.patterns if pattern not in patterns}
                if patterns:
                    made["patternProperties"] = patterns
                self._cost.add(len(names) + len(patterns), place)
        others = self._named(schema, made, others, place, base)
        self._other_names(made, others, place)
        least = made.get("minProperties", 0)
        if isinstance(least, int) and least > 1 and (others is not False or "patternProperties" in made):
            raise ValueError(
                f"{path((*place, 'minProperties'))} is {least}; it may be more than 1 only where "
                "additionalProperties is false, since a name that the schema does not know could come twice"
            )

    def _named(self, schema: Mapping[str, object], made: JsonObject, others: object, place: Place, base: str) -> Any:
        """Enforce `propertyNames` that list names or have one pattern, and return the schema of other names."""
        where, rule = (*place, "propertyNames"), schema.get("propertyNames", True)
        for _ in range(10):
            if isinstance(rule, Mapping) and "$ref" in rule:
                rule = self._target(rule["$ref"], (*where, "$ref"), base)[0]
        limits = rule = self._schema(rule, where, base, _Known())
        beside = {"properties", "patternProperties"} & made.keys()
        limits = {} if isinstance(limits, bool) else limits
        match {key: limits[key] for key in limits if (key, limits[key]) != ("type", "string")}:
            case {**more} if not more and rule is not False:
                return others
            case {"enum": [*names], **more} if not (more or beside) and all(isinstance(name, str) for name in names):
                part = schema.get("additionalProperties", True)
                if isinstance(part, Mapping):
                    part = {"$ref": self._reference(part, base, (*place, "additionalProperties"), _Known())}
                made["properties"] = dict.fromkeys(names, part)
                return False
            case {"pattern": str(pattern), **more} if not (more or beside):
                made["patternProperties"] = {pattern: others}
                return False
        raise ValueError(f"{path(where)} can be enforced if it is one enum, pattern or format, without properties")

    def _other_names(self, made: JsonObject, others: object, place: Place) -> None:
        """Add the schema of properties without names in the schema. Where there are some, keys have one spelling.

        The library lets only other keys be spelled with escapes, in which they could be one of the names.
        """
        names = made.get("properties", {})
        spelled = next((name for name in names if _CONTROL.search(name)), None)
        if spelled is not None and (others is not False or made.get("patternProperties")):
            raise ValueError(
                f"{path((*place, 'properties'))} has the name {json.dumps(spelled)}: a control character has two "
                "spellings, so it works only where additionalProperties is false and patternProperties are absent"
            )
        if others is False or not (names or made.get("patternProperties")):
            if others is not True:
                made["additionalProperties"] = others
            return
        if made.get("patternProperties"):
            raise ValueError(
                f"{path((*place, 'patternProperties'))}: other names cannot be told apart from those that match; "
                "additionalProperties: false works"
            )
        lengths = [len(name) for name in names]
        if (max(lengths) > 60 or sum(lengths) > 4096) and others not in (True, {}):
            raise ValueError(
                f"{path((*place, 'properties'))} has names of more than 60 characters, or more than 4096 together; "
                "beside these, additionalProperties may only be true or false"
            )
        pattern = "" if others in (True, {}) else f"^{_none_of(set(names))}$"
        made["patternProperties"], made["additionalProperties"] = {pattern: others}, False

    def _format(self, schema: Mapping[str, object], made: JsonObject, place: Place) -> None:
        name = schema.get("format")
        patterns = FORMATS.get(name, ()) if isinstance(name, str) else ()
        if name in _UNENFORCED_FORMATS:
            known = ", ".join(sorted([*FORMATS, *_LIBRARY_FORMATS]))
            raise ValueError(f"{path((*place, 'format'))} is {name!r}; formats that can be enforced are {known}")
        if name in _LIBRARY_FORMATS:
            made["format"] = name
        for pattern in patterns:
            if "pattern" in made:
                kind = {"type": "string"} if made.get("type") == "string" else {}
                made.setdefault("allOf", []).append({**kind, "pattern": f"^({pattern})$"})
            else:
                made["pattern"] = f"^({pattern})$"

    def _all_differ(self, schemas: list[Any], place: Place, base: str) -> bool:
        """Return whether no value follows two of the schemas, as far as types and constants show."""
        if len(schemas) > _MAX_COMPARED:
            return False
        return all(
            self._differ(first, second, place, base)
            for number, first in enumerate(schemas)
            for second in schemas[number + 1 :]
        )

    def _differ(self, first: object, second: object, place: Place, base: str, depth: int = 3) -> bool:
        for _ in range(10):
            first, second = (
                self._target(each["$ref"], place, base)[0] if isinstance(each, Mapping) and "$ref" in each else each
                for each in (first, second)
            )
        if first is False or second is False:
            return True
        if not depth or not (isinstance(first, Mapping) and isinstance(second, Mapping)):
            return False
        values = [_values(first), _values(second)]
        if values[0] is not None and values[1] is not None:
            return not values[0] & values[1]
        kinds = [_kinds(first), _kinds(second)]
        if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
            return True
        if kinds != [{"object"}, {"object"}]:
            return False
        shared = [key for key in _names(first, "properties") if key in _names(second, "properties")]
        return any(
            self._differ(first["properties"][key], second["properties"][key], place, base, depth - 1)
            for key in shared
            if key in _names(first, "required") or key in _names(second, "required")
        )


def _own(schema: Mapping[str, object]) -> _Known:
    """Return the properties that a schema itself mentions."""
    known = _Known()
    known.names = dict.fromkeys([*_names(schema, "properties"), *_names(schema, "required")])
    known.patterns = dict.fromkeys(_names(schema, "patternProperties"))
    known.is_open = any(
        schema.get(key, False) is not False for key in ("additionalProperties", "unevaluatedProperties")
    )
    return known


def _names(schema: Mapping[str, object], key: str) -> list[str]:
    value = schema.get(key)
    return [name for name in value if isinstance(name, str)] if isinstance(value, list | Mapping) else []


def _values(schema: Mapping[str, object]) -> set[tuple[bool, object]] | None:
    """Return all values of a schema that lists them, if they are texts, integers, true, false or null; else None."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list) or not all(isinstance(value, str | int | None) for value in values):
        return None
    return {(isinstance(value, bool), value) for value in values}


def _kinds(schema: JsonMapping) -> set[str]:
    """Return the types of a schema's values, none if they are not known."""
    named = schema.get("type", [])
    kinds = {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}
    return kinds | {"integer"} if "number" in kinds else kinds


def _none_of(names: set[str]) -> str:
    """Return a regular expression for all texts but these."""
    heads = sorted({name[0] for name in names if name})
    others = "".join(re.escape(head) for head in heads)
    choices = [f"[^{others}](?s:.)*" if heads else "(?s:.)+"]
    choices += [f"{re.escape(head)}{_none_of({name[1:] for name in names if name[:1] == head})}" for head in heads]
    return f"({'|'.join(choices)}){'' if '' in names else '?'}"
