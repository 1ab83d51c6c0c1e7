"""/v1/responses with OpenAI's own client."""

import json

import httpx2
import openai
import pydantic
import pytest

from tests.chat_templates import TAGS, THINKING
from tests.serving import serving
from tests.text_checkpoint import text_checkpoint

QUESTION = "Ava has 17 apples and buys 25 more. How many apples has she?"
ASKED = {"model": "demo", "input": QUESTION, "temperature": 0}
CLOCK = {
    "type": "function",
    "name": "clock",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"enum": ["utc", "cet"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def served():
    with serving(max_num_seqs=4) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.client()


@pytest.fixture(scope="module")
def thinking():
    model = str(text_checkpoint(chat_template=THINKING, tags=TAGS))
    with serving({"served_model_name": "tiny"}, model=model, max_num_seqs=4, max_model_len=512) as served:
        client = served.client()
        yield client, str(served.engine.tokenizer.token_id("</think>"))


def test_a_response_is_the_answer_of_a_chat(client):
    response = client.responses.create(**ASKED, metadata={"a": "b"})
    chat = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": QUESTION}], temperature=0)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.object, response.metadata) == ("completed", "response", {"a": "b"})
    assert [item.type for item in response.output] == ["message"]
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert client.responses.create(**ASKED).usage.input_tokens_details.cached_tokens == 16


def test_a_stream_tells_of_every_part_in_order_and_ends_with_the_whole(client):
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert kinds[4] == "response.output_text.delta"
    assert "".join(deltas) == events[-4].text == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.id == events[0].response.id


def test_the_clients_streaming_helper_and_classes_work(client):
    class Verdict(pydantic.BaseModel):
        right: bool

    parsed = client.responses.parse(**ASKED, text_format=Verdict, max_output_tokens=40)
    assert isinstance(parsed.output_parsed, Verdict)
    with client.responses.stream(**ASKED, text_format=Verdict, max_output_tokens=40) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_conversation_is_given_as_items(client):
    first = client.responses.create(**ASKED)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "Ben has 3 apples and buys 4 more. How many apples has he?"},
    ]
    response = client.responses.create(model="demo", input=items, instructions="Be brief.", temperature=0)
    assert response.output_text.endswith("#### 7")


def test_an_answer_that_is_cut_off_is_incomplete(client):
    asked = {**ASKED, "max_output_tokens": 3}
    response = client.responses.create(**asked)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 3
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output_text == response.output_text


def test_reasoning_and_calls_are_items_of_their_own(thinking):
    client, end = thinking
    asked = {
        "model": "tiny", "input": "Hm?", "tools": [CLOCK], "tool_choice": {"type": "function", "name": "clock"},
        "temperature": 1, "extra_body": {"logit_bias": {end: 5}, "seed": 3}, "max_output_tokens": 200,
    }  # fmt: skip
    response = client.responses.create(**asked)
    *thoughts, call = response.output
    assert (call.type, call.name, call.status) == ("function_call", "clock", "completed")
    assert json.loads(call.arguments)["zone"] in ("utc", "cet")
    assert all(item.type == "reasoning" and item.content[0].text for item in thoughts)
    assert response.usage.output_tokens_details.reasoning_tokens > 0 or not thoughts
    events = list(client.responses.create(**asked, stream=True))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    assert [item.type for item in done] == [item.type for item in response.output]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments == done[-1].arguments
    given = [
        {"role": "user", "content": "Hm?"},
        *[item.model_dump() for item in response.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"},
    ]
    following = {**asked, "input": given, "tool_choice": "none", "max_output_tokens": 4}
    assert client.responses.create(**following).usage.output_tokens <= 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 1}}}}, "text.format"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
    ],
)
def test_what_is_wrong_is_refused_by_the_name_of_its_field(served, body, param):
    response = httpx2.post(f"{served.url}/v1/responses", json={"input": "x", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_a_stream_that_fails_says_so_and_the_client_raises(served, client):
    events = []
    for seconds in (0.3, 3, 30):  # until it has begun in time, and not ended
        served.probe.delay = seconds / 20
        extra = {"ignore_eos": True, "timeout": seconds}
        with pytest.raises(openai.APIError, match="deadline"):
            events.extend(client.responses.create(**ASKED, stream=True, extra_body=extra))
        if events:
            break
    served.probe.reset()
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert "deadline" in events[-1].response.error.message
