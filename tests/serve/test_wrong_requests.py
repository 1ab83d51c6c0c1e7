"""Requests that are wrong in odd ways: each gets an error that names what is wrong, and the server answers the next."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.patience import PATIENCE
from tests.support.serving import serving

TALK = [{"role": "user", "content": "2 + 2 ="}]
OPTIONS = {"model": "demo", "stream": False, "options": {"num_predict": 2}}
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 2},
    "/v1/completions": {"prompt": "2 + 2 =", "max_tokens": 2},
    "/v1/responses": {"input": "2 + 2 =", "max_output_tokens": 2},
    "/v1/messages": {"messages": TALK, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": TALK},
    "/v1/embeddings": {"input": "a"},
    "/api/chat": {"messages": TALK, **OPTIONS},
    "/api/generate": {"prompt": "2 + 2 =", **OPTIONS},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5, 6]},
}
"""A request that is right for each endpoint."""
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
EMBEDDINGS, OLLAMA, EMBED, TOKENIZE = "/v1/embeddings", "/api/chat", "/api/embed", "/tokenize"
HALF = b"\xed\xa0\x80"
"""Half of a surrogate pair, as if it were a character of UTF-8."""


@pytest.fixture(scope="module")
def served():
    with serving(max_num_seqs=4, graph_mode="none") as served:
        yield served


def raw(path: str, fields: bytes) -> bytes:
    """The right body of an endpoint, with further fields as they are written."""
    begin = json.dumps(RIGHT[path]).encode().removesuffix(b"}")
    return begin + (b", " if RIGHT[path] else b"") + fields + b"}"


def post(served, path: str, body: bytes, **headers: str) -> httpx2.Response:
    given = {"Content-Type": "application/json"} | {name.replace("_", "-"): each for name, each in headers.items()}
    return httpx2.post(f"{served.url}{path}", content=body, headers=given, timeout=PATIENCE)


WRITTEN: dict[str, tuple[bytes, str]] = {
    "a member twice": (b'"seed": 1, "seed": 2', "seed"),
    "a member twice, once in escapes": (b'"seed": 1, "s\\u0065ed": 2', "seed"),
    "a member of an inner object twice": (b'"zz": [{"a": {"deep": 1, "deep": 1}}]', "deep"),
    "half a pair as bytes": (b'"user": "' + HALF + b'"', "UTF-8"),
    "half a pair as bytes in a name": (b'"' + HALF + b'": 1', "UTF-8"),
    "half a pair as an escape": (b'"user": "\\ud800"', "user"),
    "half a pair as an escape in a name": (b'"\\ud800": 1', "name of a field"),
    "half a pair, and a character": (b'"user": ["\\ud83d\\u0041"]', "user[0]"),
    "an overlong character": (b'"user": "\xc0\x80"', "UTF-8"),
    "Latin-1": (b'"user": "\xe9"', "UTF-8"),
    "a control character": (b'"user": "a\x01"', "control character"),
    "a zero in front": (b'"seed": 01', "JSON"),
    "a plus in front": (b'"seed": +1', "JSON"),
    "a number of 5,000 digits": (b'"user": ' + b"9" * 5000, "digits"),
    "300 lists": (b'"user": ' + b"[" * 300 + b"]" * 300, "200 deep"),
    "a comma behind": (b'"user": 1,', "JSON"),
    "a comment": (b'"user": /* me */ 1', "JSON"),
    "an unknown member": (b'"zzz": 1', "zzz"),
    "an unknown member of no name": (b'"": 1', "unknown parameter"),
    "200 unknown members": (b", ".join(b'"k%d": 1' % i for i in range(200)), "100 things"),
    "a second body": (b'"user": 1}{"user": 1', "Extra data"),
}
"""Further fields, as they are written -> what the error names."""


@pytest.mark.parametrize("path", RIGHT)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_body_that_no_client_writes_is_refused_by_every_endpoint(served, path, name):
    fields, named = WRITTEN[name]
    answer = post(served, path, raw(path, fields))
    assert answer.status_code == 400
    assert named in answer.text


def test_a_mark_of_utf_8_in_front_is_no_fault(served):
    assert post(served, TEXT, b"\xef\xbb\xbf" + json.dumps(RIGHT[TEXT]).encode()).status_code == 200


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "messages": [
            *TALK,
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        ]
    }


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def output(value: Any) -> dict[str, Any]:
    return {"output_config": {"format": {"type": "json_schema", "schema": value}}}


FILE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


def said(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts), **more}]}


VALUES: dict[str, tuple[str, dict[str, Any], str]] = {
    "an id of Arabic digits": (TEXT, {"logit_bias": {"\u0665": 1}}, "logit_bias"),
    "an id with a zero in front": (TEXT, {"logit_bias": {"05": 1}}, "logit_bias"),
    "an id of 5,000 digits": (TEXT, {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    "an id with a space": (OLLAMA, {"logit_bias": {" 5": 1}}, "logit_bias"),
    "a stop string of nothing": (RESPONSES, {"stop": ["a", ""]}, "stop"),
    "a stop sequence of nothing": (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
    "a stop option of nothing": (OLLAMA, {"options": {"stop": ""}}, "options.stop"),
    "an expression of no text": (CHAT, {"guided_regex": "[^\\s\\S]"}, "guided_regex"),
    "an expression that looks ahead": (MESSAGES, {"guided_regex": "(?=a)b"}, "guided_regex"),
    "choices of nothing": (RESPONSES, {"guided_choice": []}, "guided_choice"),
    "two forms": (TEXT, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    "a schema of itself": (CHAT, schema({"$ref": "#"}), "schema"),
    "a schema of another machine": (CHAT, schema({"$ref": "http://127.0.0.1:1/x"}), "$ref"),
    "a schema of a file": (OLLAMA, {"format": {"$ref": "file:///etc/passwd"}}, "$ref"),
    "a schema of no type": (MESSAGES, output({"type": 1}), "format"),
    "a schema of an infinite number": (CHAT, schema({"const": float("inf")}), "const"),
    "a schema without a schema": (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    "arguments of half a pair": (CHAT, call('{"a": "\\ud800"}'), "arguments"),
    "arguments that are a list": (CHAT, call("[1]"), "arguments"),
    "arguments of 3,000 lists": (CHAT, call('{"a": ' + "[" * 3000 + "]" * 3000 + "}"), "arguments"),
    "arguments of 5,000 digits": (CHAT, call('{"a": ' + "9" * 5000 + "}"), "arguments"),
    "a tool of no name": (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "name"),
    "a tool of a text's form": (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "null"}}]}, "input_schema"),
    "a choice without tools": (CHAT, {"tool_choice": "required"}, "tool_choice"),
    "an image of this machine": (CHAT, said(FILE), "messages[0].content[0]"),
    "a document": (MESSAGES, said({"type": "document", "source": {"type": "text", "data": "x"}}), "content[0].type"),
    "a variable that is a field": (CHAT, {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    "a template": (CHAT, {"chat_template": "{{ 1 / 0 }}"}, "chat_template"),
    "a thread": (MESSAGES, {"thread": {"type": "create"}}, "thread_unsupported_request"),
    "a thread to count": ("/v1/messages/count_tokens", {"thread": {"type": "create"}}, "thread"),
    "an answer of before": (RESPONSES, {"previous_response_id": "x"}, "previous_response_id"),
    "a file of before": (RESPONSES, {"input": said({"type": "input_file"})["messages"]}, "content[0].type"),
    "a prompt of true": (TEXT, {"prompt": [True]}, "prompt"),
    "a prompt of three levels": (TEXT, {"prompt": [[[5]]]}, "prompt"),
    "an input of two kinds": (EMBEDDINGS, {"input": ["a", 5]}, "input"),
    "an id of 20 digits": ("/detokenize", {"tokens": [2**64]}, "tokens"),
    "dimensions of a million": (EMBED, {"dimensions": 10**6}, "dimensions"),
    "options of sampling for a vector": (EMBED, {"options": {"temperature": 1}}, "options.temperature"),
    "an option in capitals": (OLLAMA, {"options": {"Temperature": 1}}, "did you mean temperature"),
    "a context of a billion": (OLLAMA, {"options": {"num_ctx": 10**9}}, "options.num_ctx"),
    "more least than most": (TEXT, {"min_tokens": 5}, "min_tokens"),
    "both a prompt and messages": (TOKENIZE, {"messages": TALK}, "either"),
}  # fmt: skip
"""An endpoint, fields in place of its right ones, and what the error names."""


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_no_client_sends_is_refused_by_its_name(served, name):
    path, fields, named = VALUES[name]
    answer = post(served, path, json.dumps({**RIGHT[path], **fields}).encode())
    assert answer.status_code == 400
    assert named in answer.text.replace('\\"', '"')


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Type": ""}, 415),
        ({"Content_Type": ";;;"}, 415),
        ({"Content_Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content_Encoding": "gzip"}, 415),
        ({"Expect": "what"}, 417),
        ({"Host": "evil.example"}, 421),
        ({"traceparent": "ff-" + "0" * 32}, 200),
        ({"X_Request_Id": "a" * 5000}, 200),
        ({"X_Forwarded_For": "'; drop"}, 200),
        ({"X_Stainless_Timeout": "nan"}, 200),
    ],
)
def test_a_header_that_no_client_sends_is_refused_or_left_alone(served, headers, status):
    assert post(served, TEXT, json.dumps(RIGHT[TEXT]).encode(), **headers).status_code == status


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/..%2fplan", "/v1/models/%00", "/v1/models/%ff", "/v1/models/demo%20", "/V1/models", "//v1/models",
        "/page/../../etc/passwd", "/..%2f..%2fetc/passwd", "/%", "/health/", "/health;x", "/v1/batches", "/.env",
    ],
)  # fmt: skip
def test_a_path_that_is_not_served_is_404_in_the_form_of_an_error(served, path):
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=PATIENCE)
    connection.request("GET", path)  # a client of a higher level would mend it
    answer = connection.getresponse()
    assert answer.status == 404
    assert json.loads(answer.read())["error"]["message"]
    connection.close()


ODD: tuple[Any, ...] = (
    None, True, -1, 1.5, 2**64, float("nan"), "x", "\0", [], [None], [[]], [""], {}, {"a": 1}, {"type": "x"}, [1, "x"],
)  # fmt: skip


def fields_of(document: dict[str, Any], kind: dict[str, Any]) -> Iterator[str]:
    while "$ref" in kind:
        kind = document["components"]["schemas"][kind["$ref"].rpartition("/")[2]]
    yield from kind.get("properties", ())


@pytest.mark.slow
@pytest.mark.parametrize("path", RIGHT)
def test_a_field_of_a_wrong_type_is_named_and_the_server_answers_afterwards(served, path):
    document = httpx2.get(f"{served.url}/openapi.json", timeout=PATIENCE).json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    tried = 0
    for number, field in enumerate(fields_of(document, body)):
        for value in ODD[number % 4 :: 4]:  # each value at a quarter of the fields
            answer = post(served, path, json.dumps({**RIGHT[path], field: value}).encode())
            assert answer.status_code < 500 or answer.status_code == 504, (field, value, answer.text)
            told = field in answer.text or "is not served here" in answer.text  # a text that names no model
            assert answer.status_code == 200 or told, (field, value, answer.text)
            tried += 1
    assert tried >= 4
    assert post(served, path, json.dumps(RIGHT[path]).encode()).status_code == 200
