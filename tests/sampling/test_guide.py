"""A guide is checked when it is made: it is of one kind, well formed, and of bounded cost."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ostinato.errors import RequestError
from ostinato.sampling.guide import MAX_GUIDE_CHARACTERS, Guide
from ostinato.sampling.params import SamplingParams


def nested(key: str, depth: int, inner: str) -> str:
    return f'{{"{key}": ' * depth + inner + "}" * depth


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of json_schema, json_object, regex, choice, lark; this one has none"),
    ({"choice": []}, "guide.choice: it should have at least one text"),
    ({"json_object": False}, "this one has none"),
    ({"regex": "a", "choice": ["a"]}, "this one has regex and choice"),
    ({"grammar": "a"}, "unknown guide grammar"),
    ({"regex": 7}, r"guide\.regex"),
    ({"choice": ["a", 7]}, r"guide\.choice"),
    ({"choice": "ab"}, r"guide\.choice"),
    ({"json_object": "yes"}, r"guide\.json_object"),
    ({"json_schema": "{"}, "is not JSON"),
    ({"json_schema": "[]"}, "a schema is a JSON object"),
    ({"json_schema": {"enum": [{1, 2}]}}, "is not JSON"),
    ({"json_schema": nested("items", 101, "true")}, "nested more than 100 deep"),
    ({"json_schema": nested("items", 9_000, "{}")}, "is not JSON|json_schema has"),
    ({"json_schema": {"const": "x" * MAX_GUIDE_CHARACTERS["json_schema"]}}, "characters, and may have 65536"),
    ({"regex": "a" * 4097}, "guide.regex: it has 4097 characters, and may have 4096"),
    ({"lark": "a" * 140_000}, "guide.lark: it has 140000 characters"),
    ({"choice": ["abcdefg"] * 2049}, "guide.choice: it has 16392 characters"),
    ({"json_schema": {"anyOf": [{"pattern": "a" * 2000}, {"patternProperties": {"b" * 2097: {}}}]}}, "4097 characters"),
    ({"json_schema": {"items": {"multipleOf": 10_001}}}, "multipleOf"),
    ({"json_schema": {"anyOf": [{"multipleOf": 101}, {"multipleOf": 103}]}}, "multipleOf"),
    ({"json_schema": {"anyOf": [{"multipleOf": 0.00001}, {"multipleOf": 3}]}}, "multipleOf"),
    ({"json_schema": {"multipleOf": 1e300}}, "multipleOf"),
    ({"json_schema": {"multipleOf": 1e-300}}, "multipleOf"),
    ({"lark": 'start: a b\na: %json {"multipleOf": 101}\nb: %json{}\nb: %json {"multipleOf": 103}'}, "multipleOf"),
    ({"lark": "start: %json " + nested("items", 101, "{}")}, "nested more than 100 deep"),
    ({"lark": "start: %json " + nested("a", 6000, "{}")}, "nested more than 100 deep"),
    ({"json_schema": {"allOf": [{"pattern": f"a{{{i}}}"} for i in range(13)]}}, "13 patterns, and may have 12"),
    ({"json_schema": {"patternProperties": {f"^a{i}$": {} for i in range(49)}}}, "has 49 patterns, and may have 48"),
    ({"json_schema": {"properties": {f"p{i}": {} for i in range(481)}}}, "more than 480 optional properties in a row"),
    ({"json_schema": {"items": {"enum": [[i] for i in range(901)]}}}, r"items\.enum has 901 alternatives"),
    ({"lark": "start: C\nC: A0" + "".join(f" & A{i}" for i in range(12))}, "joins 13 terminals"),
    ({"lark": 'start: %json{"const": -9223372036854775807}'}, "const is -9223372036854775807"),
    ({"regex": "\ud800"}, "surrogate"),
    ({"choice": ["a", "\udfff"]}, "surrogate"),
    ({"json_schema": {"const": "\ud800"}}, "surrogate"),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED)
def test_a_guide_that_cannot_be_is_a_request_error_that_says_why(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        Guide(**settings)
    with pytest.raises(RequestError, match=reason):
        SamplingParams(guide=settings)


SAFE = "numbers that can be enforced are 0 and those from 1e-100 to 9007199254740991"
COUNT = "may be a whole number from 0 to 2147483647"
NUMBERS: list[tuple[str, str]] = [
    ('{"const": -9223372036854775807}', rf"\$\.const is -9223372036854775807; {SAFE}"),
    ('{"const": -9223372036854775808}', SAFE),
    ('{"const": 9223372036854775807}', SAFE),
    ('{"const": 9223372036854775808}', SAFE),
    ('{"const": 1234567890123456789}', rf"\$\.const is 1234567890123456789; {SAFE}"),
    ('{"const": 9007199254740992.0}', SAFE),
    ('{"enum": [1, {"a": [-9223372036854775807]}]}', rf"\$\.enum\[1\]\.a\[0\] is -9223372036854775807; {SAFE}"),
    ('{"properties": {"a b": {"minimum": 9007199254740992}}}', rf'\$\.properties\["a b"\]\.minimum is .*; {SAFE}'),
    (
        '{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"exclusiveMaximum": -1e308}]}}}',
        rf"exclusiveMaximum is -1e\+308; {SAFE}",
    ),
    ('{"maximum": 1e-320}', SAFE),
    ('{"minimum": 1e400}', SAFE),
    ('{"maximum": NaN}', SAFE),
    ('{"enum": [1' + "0" * 400 + "]}", f"is a number of more than 398 digits; {SAFE}"),
    ('{"multipleOf": -2147483648}', r"\$\.multipleOf is -2147483648, and has to be greater than 0"),
    ('{"items": {"multipleOf": 0.0}}', r"items\.multipleOf is 0\.0, and has to be greater than 0"),
    ('{"minLength": -1}', rf"\$\.minLength is -1, and {COUNT}"),
    ('{"maxLength": 2147483648}', rf"\$\.maxLength is 2147483648, and {COUNT}"),
    ('{"maxItems": 1099511627776}', COUNT),
    ('{"minItems": 1.5}', COUNT),
    ('{"minProperties": -1}', COUNT),
    ('{"maxProperties": 18446744073709551616}', COUNT),
]


@pytest.mark.parametrize(("schema", "reason"), NUMBERS)
def test_a_number_that_cannot_be_enforced_is_refused_with_its_place_and_what_works(schema: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        Guide(json_schema=schema)
    with pytest.raises(RequestError, match=reason):
        Guide(lark=f'start: "a" b\nb: %json {schema}')


@pytest.mark.parametrize(
    "settings",
    [
        {"json_schema": '{"enum": [9007199254740991, -9007199254740991, -0.0, 1e-100, true]}'},
        {"json_schema": {"type": "string", "minLength": 0, "maxLength": 2**31 - 1}},
        {"json_schema": {"type": "null", "description": "x" * 200_000, "examples": [2**70]}},
        {"json_schema": {"properties": {f"p{i}": {"pattern": "a", "allOf": [{}]} for i in range(12)}}},
        {"json_schema": {"properties": {f"p{i}": {} for i in range(900)}, "required": ["p450"]}},
        {"json_schema": {"$defs": {f"d{i}": {"pattern": "a"} for i in range(50)}, "items": {"$ref": "#/$defs/d1"}}},
        {"lark": 'start: "&&&&&&&&&&&&&" /&&&&&&&&&&&&&/ // &&&&&&&&&&&&&'},
        {"json_schema": {"type": "number", "multipleOf": 0.01}},
        {"json_schema": {"multipleOf": 9999}},
        {"json_schema": {"anyOf": [{"multipleOf": 0.25}, {"multipleOf": 5}]}},
        {"json_schema": {"properties": {"multipleOf": {"type": "string"}, "pattern": {}}}},
        {"json_object": True},
        {"regex": ""},
        {"choice": [""]},
        {"lark": 'start: "a"'},
        {"lark": 'start: "%json {" %json {"multipleOf": 7}'},
    ],
)
def test_a_guide_survives_a_copy_of_its_sampling_parameters(settings: dict[str, Any]) -> None:
    params = SamplingParams(guide=settings)
    copied = params.replace(temperature=0.5)
    assert copied.guide == params.guide == Guide(**settings)
    assert len({copied.guide, params.guide, Guide(**settings)}) == 1


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}, "m": {}}}
    guide = Guide(json_schema=schema)
    assert guide.json_schema is not None
    assert list(json.loads(guide.json_schema)["properties"]) == ["z", "a", "m"]


def test_a_guide_and_ignore_eos_contradict_each_other() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(guide={"json_object": True}, ignore_eos=True)


def test_neither_torch_nor_the_grammar_library_is_imported_before_a_guide_is_compiled() -> None:
    program = (
        "import sys; from ostinato import Guide, SamplingParams; SamplingParams(guide={'regex': 'a'}); "
        "assert 'torch' not in sys.modules and 'llguidance' not in sys.modules; "
        "import ostinato.engine.core; assert 'llguidance' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
