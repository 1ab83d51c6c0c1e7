"""A guide of a JSON schema allows only valid texts, or is refused by name."""

from __future__ import annotations

import json
import random
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from ostinato.errors import RequestError
from ostinato.sampling.guide import Guide
from ostinato.sampling.schema_limits import enforceable_multiples
from tests.support.docs_pages import ROOT
from tests.support.json_schema_suite import STORED, follows, matcher, verdicts


def groups() -> list[tuple[str, Any, list[tuple[Any, bool, str]]]]:
    return json.loads(STORED.read_text())["groups"]


def test_every_case_of_the_json_schema_test_suite_has_its_verdict() -> None:
    changed = []
    for keyword, schema, tests in groups():
        found = verdicts(schema, [(data, valid) for data, valid, _ in tests])
        changed += [
            (keyword, schema, data, f"{verdict}, now {now}")
            for (data, _, verdict), now in zip(tests, found, strict=True)
            if now != verdict
        ]
    assert not changed


def test_no_invalid_instance_is_allowed_but_for_keywords_that_the_page_names() -> None:
    wrong = [(schema, data) for _, schema, tests in groups() for data, _, verdict in tests if verdict == "wrong"]
    page = (ROOT / "docs/structured-output.md").read_text()
    named = {
        "contentMediaType": lambda schema: "contentMediaType" in schema,
        "contentEncoding": lambda schema: "contentEncoding" in schema,
        r"\S": lambda schema: r"\S" in schema.get("pattern", ""),
    }
    assert all(f"`{name}`" in page for name in named)
    assert [case for case in wrong if not any(applies(case[0]) for applies in named.values())] == []
    verdicts = [verdict for _, _, tests in groups() for _, _, verdict in tests]
    assert len(verdicts) > 2400
    assert verdicts.count("accepted") > 550


A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "allowed", "not_allowed"),
    [
        # A set, as pydantic writes it.
        (
            {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/C"}, "minItems": 1,
             "$defs": {"C": {"type": "string", "enum": ["a", "b", "c"], "title": "C"}}},
            ['["a"]', '["b","a"]', '["c","a","b"]'],
            ["[]", '["a","a"]', '["a","b","a"]', '["d"]', '"a"'],
        ),
        (
            {**OBJECT, "properties": {"s": {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}}}},
            ['{"s":[]}', '{"s":[true,false]}', '{"s":[false]}'],
            ['{"s":[true,true]}', '{"s":[true,false,true]}', '{"s":null}'],
        ),
        (
            {"type": "array", "uniqueItems": True, "items": {"enum": [1, None, True, "x"]}, "maxItems": 2},
            ["[]", "[1,true]", '["x",null]'],
            ["[1,1]", "[null,null]", '[1,true,"x"]'],
        ),
        (
            {"type": "array", "uniqueItems": True, "items": {"type": "string"}, "maxItems": 1},
            ['["a"]', "[]"],
            ["[1]", '["a","b"]'],
        ),
        # As pydantic writes models.
        (
            {**OBJECT, "title": "T", "properties": {"a": {"title": "A", "default": 2**70}, "n": {"$ref": "#/$defs/N"}},
             "required": ["a"], "$defs": {"N": {**OBJECT, **A}}},
            ['{"a":1,"n":{"a":2}}', '{"a":1}'],
            ['{"a":1,"x":1}', '{"a":1,"n":{"x":2}}', '{"a":1,"n":{"a":2,"x":3}}'],
        ),
        ({**OBJECT, **A, "additionalProperties": True}, ['{"a":1,"x":"y"}'], ['{"a":"x"}', r'{"\u0061":"x"}']),
        (
            {**OBJECT, **A, "additionalProperties": {"type": "string"}},
            ['{"a":1,"x":"y","":"z","ab":"z"}'],
            [r'{"\u0061":"x"}', '{"a":"x"}', '{"a":1,"x":2}', '{"a":1,"a":"x"}'],
        ),
        (OBJECT, ['{"x":1}'], ["1"]),
        ({**OBJECT, "properties": {}}, ["{}"], ['{"x":1}']),
        ({**OBJECT, "required": ["x"], **A}, ['{"a":1,"x":[]}'], ['{"a":1}', '{"x":1,"y":1}']),
        ({**OBJECT, "patternProperties": {"^x": {"type": "null"}}}, ['{"xa":null}'], ['{"xa":1}', '{"b":1}']),
        # Parts for the same value know each other's properties.
        ({**OBJECT, "allOf": [A, B]}, ['{"a":1,"b":2}', "{}"], ['{"a":1,"b":2,"c":3}', '{"b":"x"}']),
        ({**OBJECT, **A, "allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": B}}, ['{"a":1,"b":2}'], ['{"c":3}']),
        ({**OBJECT, **A, "$ref": "#/$defs/b", "$defs": {"b": B}}, ['{"a":1,"b":2}'], ['{"c":3}', '{"a":"x"}']),
        ({**OBJECT, "allOf": [{**A, "additionalProperties": True}, B]}, ['{"a":1,"b":2,"c":3}'], ['{"b":"x"}']),
        ({**OBJECT, "anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":2}', '{"c":1}']),
        (
            {**OBJECT, "properties": {"k": True}, "anyOf": [A, {**B, "required": ["b"]}]},
            ['{"k":1,"a":1}', '{"k":1,"b":1}'],
            ['{"k":1,"a":1,"b":1}', '{"k":1,"c":1}', r'{"\u0061":"x"}'],
        ),
        (
            {**OBJECT, "allOf": [A, {"patternProperties": {"^x": {"type": "null"}}}]},
            ['{"a":1,"xa":null}'],
            ['{"a":1,"xa":1}', '{"b":1}'],
        ),
        # Unions whose members differ in a constant, as pydantic writes them.
        (
            {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "discriminator": {"propertyName": "k"}, "$defs": {
                kind: {**OBJECT, "properties": {"k": {"const": kind}, kind: {"type": "integer"}}, "required": ["k"]}
                for kind in "xy"}},
            ['{"k":"x","x":1}', '{"k":"y"}'],
            ['{"k":"x","y":1}', '{"k":"z"}'],
        ),
        ({**OBJECT, **A, "const": {"a": 1, "b": 2}}, ['{"a":1,"b":2}'], ["{}"]),
        # A recursive schema, a reference into properties, one through an anchor, one by an id.
        ({**OBJECT, "properties": {"next": {"$ref": "#"}}}, ['{"next":{"next":{}}}'], ['{"next":{"x":1}}']),
        (
            {**OBJECT, "properties": {"t": {**OBJECT, **A}, "b": {"$ref": "#/properties/t"}}},
            ['{"b":{"a":1}}'],
            ['{"b":{"a":"x"}}', '{"b":1}'],
        ),
        ({"items": {"$ref": "#n"}, "type": "array", "$defs": {"x": {"$anchor": "n", "const": 1}}}, ["[1]"], ["[2]"]),
        ({"$id": "http://x.org/a", "items": {"$ref": "b"}, "$defs": {"x": {"$id": "b", "const": 1}}}, ["[1]"], ["[2]"]),
        ({"prefixItems": [{"const": 1}], "items": {"$ref": "#/prefixItems/0"}, "type": "array"}, ["[1,1]"], ["[1,2]"]),
        # Bounds beyond the numbers that can be enforced count as the last of these.
        ({"type": "integer", "maximum": 2**63 - 1}, ["9007199254740991"], ["9007199254740992", "9223372036854775808"]),
        ({"type": "integer", "exclusiveMaximum": 1e400, "minimum": -(2**63)}, ["-7"], ["-9007199254740992"]),
        ({"type": "integer", "examples": [10**400], "default": 2**64, "deprecated": True}, ["1"], ['"1"']),
        ({"$defs": {"unused": {"const": 2**64}}, "type": "null"}, ["null"], ["1"]),
        ({"type": "string", "minLength": 1.0, "maxLength": 2}, ['"a"'], ['""', '"abc"']),
        # Maps by names, as pydantic and zod write them.
        ({**OBJECT, "propertyNames": {"type": "string"}, "additionalProperties": {"const": 1}}, ['{"":1}'], ['{"":2}']),
        (
            {**OBJECT, "propertyNames": {"$ref": "#/$defs/N"}, "additionalProperties": {"$ref": "#/$defs/M"},
             "$defs": {"N": {"title": "N", "type": "string", "enum": ["red", "blue"]}, "M": {"type": "integer"}}},
            ['{"red":1,"blue":2}', '{"blue":2}', "{}"],
            ['{"green":1}', '{"red":"x"}', r'{"\u0072ed":1}', '{"red":1,"red":2}'],
        ),
        ({**OBJECT, "propertyNames": {"pattern": "^[a-z]$"}}, ['{"a":1}'], ['{"A":1}', '{"ab":1}', r'{"\u0041":1}']),
        ({**OBJECT, "propertyNames": {"pattern": "string"}}, ['{"strings":1}'], ['{"a":1}']),
        ({**OBJECT, "propertyNames": {"format": "ipv4"}}, ['{"1.2.3.4":1}'], ['{"1.2.3":1}']),
        # What zod writes for values that may be absent, and for addresses.
        ({"anyOf": [{"anyOf": [{"not": {}}, {"type": "string"}]}, {"type": "null"}]}, ["null", '"a"'], ["1"]),
        (
            {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
             r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"},
            ['"a.b@c.de"', '"o\'a@x.org"'],
            ['"a..b@c.de"', '".a@c.de"', '"a.@c.de"', '"a@c"'],
        ),
        # Strings have one spelling, but for control characters.
        ({"enum": ["foo", "\n"]}, ['"foo"', r'"\n"', r'"\u000a"'], [r'"\u0066oo"', r'"f\u006fo"', r'"\ud83d\ude00"']),
        ({"type": "string", "maxLength": 1}, ['"a"', r'"\n"'], [r'"\u0061"', r'"\ud83d\ude00"', r'"\ud800"', '"ab"']),
    ],
)  # fmt: skip
def test_a_guide_allows_what_its_schema_closed_and_joined_describes(
    schema: dict[str, Any], allowed: list[str], not_allowed: list[str]
) -> None:
    found = matcher(Guide(json_schema=schema))
    assert [text for text in allowed if not follows(found, text)] == []
    assert [text for text in not_allowed if follows(found, text)] == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a\n": {}}, "additionalProperties": True}, r'has the name "a\\n": a control character'),
        ({"patternProperties": {"^x": {}}, "additionalProperties": True}, "additionalProperties: false works"),
        ({"properties": {"x" * 61: {}}, "additionalProperties": {"type": "null"}}, "names of more than 60 characters"),
        ({"minProperties": 2}, "minProperties is 2; it may be more than 1 only where"),
        ({"$ref": "other.json#/$defs/a"}, r'\$\["\$ref"\] is \'other.json#/\$defs/a\': which is not present'),
        ({"$ref": "#/$defs/a"}, "#/[$]defs/NAME, to a schema in the same document, works"),
        ({"properties": {"a": 7}}, r"\$\.properties\.a should be a schema"),
        ({"items": {"uniqueItems": True}}, r"\$\.items\.uniqueItems cannot be enforced; leave uniqueItems out"),
        (
            {
                "properties": {
                    f"p{i}": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3, 4, 5]}}
                    for i in range(20)
                }
            },
            "the schema has more than 20000 parts",
        ),
        *(
            ({"type": "array", "uniqueItems": True, **more}, r"\$\.uniqueItems cannot be enforced")
            for more in (
                {"items": {"enum": [1, 2, 3, 4, 5, 6]}},
                {"items": {"enum": ["a", 1], "type": "string"}},
                {"items": {"enum": ["a", "b"], "minLength": 1}},
                {"items": {"enum": ["a", [1]]}},
                {"items": {"enum": ["a", 1], "type": ["string"]}},
                {"items": {"enum": [1, True], "type": "integer"}},
                {"items": {"enum": ["a", "b"]}, "minItems": 3},
                {"items": {"enum": ["a", "b"]}, "enum": [["a"]]},
                {"items": {"enum": ["a", "b"]}, "type": ["array", "null"]},
                {"items": {"type": "string"}, "maxItems": 2},
                {"items": {"enum": [1, 1.0]}},
            )
        ),
        (
            {"propertyNames": {"minLength": 2}},
            r"\$\.propertyNames can be enforced if it is one enum, pattern or format",
        ),
        (
            {"propertyNames": {"enum": ["a"]}, "properties": {"a": {}}},
            "propertyNames can be enforced .*without properties",
        ),
        ({"allOf": {}}, r"\$\.allOf should be a list of schemas"),
        ({"allOf": [{"properties": {f"p{i}": {}}} for i in range(450)]}, "more than 20000 parts"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_place_and_what_works(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        Guide(json_schema=schema)
    with pytest.raises(RequestError, match=reason):
        Guide(lark=f"start: %json {json.dumps(schema)}")


def test_a_schema_whose_text_has_a_keyword_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="it has 'type' twice in one object"):
        Guide(json_schema='{"type": "string", "type": "integer"}')
    with pytest.raises(RequestError, match="a schema after %json: it has 'type' twice in one object"):
        Guide(lark='start: "a" b\nb: %json {"type": "string", "type": "integer"}')


def test_schemas_in_a_grammar_are_enforced_alike_and_texts_stay() -> None:
    schema = json.dumps({**OBJECT, **A})
    text = json.dumps(f"%json {schema}")
    found = matcher(Guide(lark=f"start: %json {schema} {text} // %json {schema}"))
    assert [follows(found, f'{{"{name}":1}}%json {schema}') for name in ("a", "x")] == [True, False]


FORMS = {
    "date": (["2020-02-29", "2000-02-29"], ["2021-02-29", "1900-02-29", "2020-04-31", "2020-13-01"]),
    "time": (
        ["12:00:00Z", "12:00:00.123456789Z", "12:00:00.5+05:30"],
        ["12:00:60Z", "23:59:60Z", "24:00:00Z", "12:00:00", "23:59:60+01:00", "12:00:00z", "12:00:00.1234567890Z"],
    ),
    "date-time": (
        ["2020-02-29T12:00:00Z", "0001-01-01T00:00:00Z", "2400-02-29T23:59:59.9-00:00"],
        [
            *("2021-02-29T12:00:00Z", "2020-02-28 12:00:00Z", "2020-01-01T12:00:60Z", "2020-02-29t12:00:00Z"),
            *("2020-02-29T12:00:00z", "0000-01-01T00:00:00Z", "0000-02-29T00:00:00Z"),
        ],
    ),
    "email": (
        ["a.b+c@x-1.org", "a@[1.2.3.4]", "a@[IPv6:::1]"],
        ["a@" + "b" * 64, "a" * 65 + "@b", ".a@b", "a..b@c", "a@-b", "a@[1.2.3.256]", "a@" + "b." * 127 + "b"],
    ),
    "hostname": (["a-b.c", "1." + "a" * 63], ["a" * 64, "-a", "a-", "xn--x", "a..b", "a.", "a_b", "a." * 127 + "a"]),
    "ipv4": (["255.0.10.1"], ["256.0.0.1", "01.0.0.1", "1.2.3"]),
    "ipv6": (
        ["::", "::1", "1::", "::ffff:192.168.0.1", "1:2:3:4:5:6:1.2.3.4", "1:2:3:4:5:6:7:8", "1:2::4:5:6:7:8"],
        [":::", "1:2:3:4:5:6:7", "1::2::3", "::1.2.3.256", "1:2:3:4:5:6:7:1.2.3.4", "12345::", "1:2:3:4:5:6:7:8::"],
    ),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08-aa98-11ea-b4aa73b441d16380"]),
    "uuid4": (["2eb8aa08-aa98-41ea-b4aa-73b441d16380"], ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"]),
    "duration": (["P1Y2M", "PT5S", "P2W"], ["P", "PT", "P1Y2W", "PT1D"]),
    "uri": (["http://a/b?c#d", "urn:x"], ["a", "//a/b", "http://a b", r"http://\a"]),
}  # fmt: skip


@pytest.mark.parametrize("format", FORMS)
def test_a_format_is_enforced_also_beside_a_pattern_and_a_length(format: str) -> None:
    good, bad = FORMS[format]
    for schema in ({"type": "string", "format": format}, {"format": format, "pattern": ".", "maxLength": 300}):
        found = matcher(Guide(json_schema=schema))
        assert [text for text in good if not follows(found, json.dumps(text))] == []
        assert [text for text in bad if follows(found, json.dumps(text))] == []


@pytest.mark.parametrize(("format", "read"), [("date", date), ("time", time), ("date-time", datetime)])
def test_dates_and_times_that_a_guide_writes_are_read_by_python(format: str, read: Any) -> None:
    rng, guided = random.Random(1), matcher(Guide(json_schema={"type": "string", "format": format}))
    good, _ = FORMS[format]
    for text in good:
        read.fromisoformat(text)
    for _ in range(30):
        found, text = guided.deep_copy(), b""
        while not found.is_stopped():
            mask = np.unpackbits(np.frombuffer(found.compute_bitmask(), np.uint8), bitorder="little")
            token = int(rng.choice(np.flatnonzero(mask)))
            assert found.try_consume_tokens([token]) == 1
            text += bytes([token])[:1] if token < 256 else b""
        read.fromisoformat(json.loads(text))


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_multiples_of_decimal_numbers_are_exact(digits: int) -> None:
    numbers = [*range(1, 100), 101, 999, 1005, 9999]
    refused = {}
    for number in numbers:
        multiple = Decimal(number).scaleb(-digits).normalize()
        try:
            found = matcher(Guide(json_schema={"type": "number", "multipleOf": float(multiple)}))
        except RequestError as error:
            refused[number] = error.message
            continue
        # A multiple is written with as many digits as the number has.
        places = max(0, -int(multiple.as_tuple().exponent))
        assert all(follows(found, f"{multiple * factor:.{places}f}") for factor in (1, 3, 100)), multiple
        if places and multiple.scaleb(places) > 1:
            assert not follows(found, f"{multiple * 3 + Decimal(1).scaleb(-places):f}"), multiple
    assert all("which cannot be enforced exactly; 0." in message for message in refused.values())
    assert len(refused) <= len(numbers) // 8
    assert digits == 4 or not {7, 14, 23, 28, 57} & refused.keys()


@pytest.mark.parametrize("multiple", ["0.00003691", "0.0929", "0.57", "0.0009286", "3.695"])
def test_multiples_of_which_several_numbers_are_made_are_exact(multiple: str) -> None:
    assert len(enforceable_multiples(float(multiple), ())) > 1
    found, unit = matcher(Guide(json_schema={"type": "number", "multipleOf": float(multiple)})), Decimal(multiple)
    last = Decimal(1).scaleb(int(unit.as_tuple().exponent))
    assert [follows(found, f"{3 * unit + more:f}") for more in (0, last, -last)] == [True, False, False]


@pytest.mark.parametrize("multiple", [0.009345, 0.009515])
def test_numbers_whose_common_multiple_the_library_cannot_compute_are_refused(multiple: float) -> None:
    with pytest.raises(ValueError, match="which cannot be enforced exactly"):
        enforceable_multiples(multiple, ())


def test_a_multiple_that_is_not_exact_is_refused_with_its_place() -> None:
    for value in (0.1 + 0.2, 10_001, 1e-10, 10_000.5):
        with pytest.raises(RequestError, match=r"\$\.items\.multipleOf is .*whole numbers from 1 to 10000, and most"):
            Guide(json_schema={"items": {"multipleOf": value}})
    found = matcher(Guide(json_schema={"type": "number", "multipleOf": 0.23, "allOf": [{"minimum": 1}]}))
    assert [follows(found, text) for text in ("0.46", "1.15", "1.16")] == [False, True, False]


def test_a_format_that_cannot_be_enforced_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"\$\.items\.format is 'iri'; formats that can be enforced are date, "):
        Guide(json_schema={"items": {"format": "iri"}})
    found = matcher(Guide(json_schema={"type": "string", "format": "password"}))
    assert [follows(found, text) for text in ('"x"', "1")] == [True, False]
