"""Bodies made to hold up the endpoints of messages and embeddings: none takes the event loop for longer than 20 ms."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.serve.test_serve_attacks import post, without_stall
from tests.support.serving import serving
from tests.support.stalls import watched


@pytest.fixture(scope="module")
def served():
    with serving({"max_messages": 2000}, max_num_seqs=2, graph_mode="none") as served:
        yield served


@pytest.fixture(scope="module")
def longest(served):
    async def thread():
        return threading.get_ident()

    with watched(served.on_loop(thread())) as longest:
        yield longest


def message(content: Any = "2 + 2 =", **more: Any) -> bytes:
    return json.dumps({"max_tokens": 2, "messages": [{"role": "user", "content": content}], **more}).encode()


def embedding(**body: Any) -> bytes:
    return json.dumps(body).encode()


TEXT = {"type": "text", "text": "a"}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT] * 100}
TALK = [{"role": role, "content": "a"} for role in ("user", "assistant")]
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
ATTACKS = {
    "messages": ("/v1/messages", lambda: message(messages=TALK * 1001), "max_messages"),
    "blocks": ("/v1/messages", lambda: message([TEXT] * 5000), "max_parts"),
    "blocks in results": ("/v1/messages", lambda: message([RESULT] * 50), "max_parts"),
    "blocks of the system": ("/v1/messages", lambda: message(system=[TEXT] * 5000), "max_parts"),
    "tools": ("/v1/messages", lambda: message(tools=[{**TOOL, "name": f"f{i}"} for i in range(300)]), "max_tools"),
    "stop sequences": ("/v1/messages", lambda: message(stop_sequences=["a"] * 5000), "stop_sequences"),
    "nesting": ("/v1/messages", lambda: b'{"messages":' + b"[" * 5_000_000 + b"]" * 5_000_000 + b"}", "200 deep"),
    "an image that is none": (
        "/v1/messages",
        lambda: message(
            [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 10**6}}]
        ),
        "image",
    ),
    "counted messages": ("/v1/messages/count_tokens", lambda: embedding(messages=TALK * 1001), "max_messages"),
    "inputs": ("/v1/embeddings", lambda: embedding(input=["a"] * 100_000), "max_inputs"),
    "token ids": ("/v1/embeddings", lambda: embedding(input=[[1] * 1000] * 600), "max_values"),
    "an id that is none": ("/v1/embeddings", lambda: embedding(input=[*[5] * 400_000, 10**6]), "token id"),
    "a long text": ("/v1/embeddings", lambda: embedding(input="ab " * 4_000_000), "maximum context length"),
}
"""Where it goes, what makes the body, and what its refusal names."""


@pytest.mark.parametrize("name", ATTACKS)
def test_a_body_holds_the_loop_no_longer_than_20_ms_and_is_refused_by_the_name_of_a_limit(served, longest, name):
    path, make, told = ATTACKS[name]
    answer = without_stall(served, longest, make(), path)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_many_messages_and_many_inputs_within_the_limits_are_served_without_a_stall(served, longest):
    many = message(messages=[{"role": "user", "content": [TEXT] * 20}, TALK[1]] * 40 + TALK[:1])
    assert without_stall(served, longest, many, "/v1/messages").status_code == 200
    answer = without_stall(served, longest, embedding(input=["a", "b"] * 100), "/v1/embeddings")
    assert len(answer.json()["data"]) == 200


def test_small_bodies_that_are_as_bad_as_they_can_be_do_not_stall_the_loop_either(served, longest):
    for path, body in (
        ("/v1/messages", message([TEXT] * 300)),
        ("/v1/messages", message(messages=TALK * 150 + TALK[:1])),
        ("/v1/messages", message([{"type": "image", "source": {"type": "url", "url": 1}}])),
        ("/v1/embeddings", embedding(input=["a"] * 1000)),
        ("/v1/embeddings", embedding(input=list(range(5, 500)))),
    ):
        without_stall(served, longest, body, path)


LONG = "a" * 16_000_000
REPEATED = {"instructions": LONG, "metadata": {"note": LONG}, "tools": [{**FUNCTION, "description": LONG}]}


@pytest.mark.parametrize("field", REPEATED)
def test_what_a_response_repeats_of_its_request_is_sent_without_a_stall_whole_and_streamed(served, longest, field):
    asked = {"input": "2 + 2 =", "max_output_tokens": 2, "tool_choice": "none", field: REPEATED[field]}
    whole = without_stall(served, longest, json.dumps(asked).encode(), "/v1/responses").json()
    assert whole["status"] == "incomplete"
    assert told(whole, field) == told(asked, field)
    answer = without_stall(served, longest, json.dumps({**asked, "stream": True}).encode(), "/v1/responses")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    responses = [event["response"] for event in events if "response" in event]
    assert [response["status"] for response in responses] == ["in_progress", "in_progress", "incomplete"]
    assert all(told(response, field) == told(asked, field) for response in responses)


def told(response: dict[str, Any], field: str) -> Any:
    return response[field][0]["description"] if field == "tools" else response[field]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_system_text_as_long_as_a_body_may_be_is_read_without_a_stall(served, longest, path):
    asked = json.loads(message(system=LONG))
    if path.endswith("count_tokens"):
        del asked["max_tokens"]
    assert without_stall(served, longest, json.dumps(asked).encode(), path).status_code == 200


@pytest.mark.slow
def test_a_key_is_needed_at_every_endpoint():
    with serving({"api_key": ("secret",)}, graph_mode="none") as served:
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"):
            assert post(served, message(), path).status_code == 401
