"""/v1/responses with OpenAI's own client."""

import json

import httpx2
import openai
import pydantic
import pytest

from tests.support.chat_templates import TAGS, THINKING
from tests.support.patience import PATIENCE
from tests.support.serving import serving
from tests.support.text_checkpoint import text_checkpoint

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
    with serving({"served_model_name": ["tiny", "little"]}, model=model, max_num_seqs=4, max_model_len=512) as served:
        client = served.client()
        yield client, str(served.engine.tokenizer.token_id("</think>"))


def test_each_of_a_models_names_is_served(thinking):
    client, _ = thinking
    assert [model.id for model in client.models.list()] == ["tiny", "little"]
    assert client.models.retrieve("little").id == "little"
    for name in ("tiny", "little"):
        assert client.completions.create(model=name, prompt="a", max_tokens=1).model == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny' and 'little'"):
        client.completions.create(model="other", prompt="a", max_tokens=1)


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


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}


def flat(logprobs):
    """(token, log-probability, its rivals) of each token: equal to others' where they are equal but for rounding."""
    return [
        (each.token, pytest.approx(each.logprob, abs=1e-4), [pytest.approx(top.logprob, abs=1e-4) for top in rivals])
        for each in logprobs
        for rivals in [each.top_logprobs]
    ]


def plain(logprobs):
    return [(each.token, each.logprob, [top.logprob for top in each.top_logprobs]) for each in logprobs]


def streamed_logprobs(events):
    """Those of all pieces of text, checked against those of every event that repeats them."""
    pieces = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    [done] = [event.logprobs for event in events if event.type == "response.output_text.done"]
    [part] = [
        event.part.logprobs
        for event in events
        if event.type == "response.content_part.done" and event.part.type == "output_text"
    ]
    [message] = [item for item in events[-1].response.output if item.type == "message"]
    assert plain(pieces) == plain(done) == plain(part) == plain(message.content[0].logprobs)
    return pieces


@pytest.mark.parametrize("most", [None, 6])
def test_log_probabilities_are_those_of_a_chat(client, most):
    asked = {**ASKED, "max_output_tokens": most, **LOGPROBS}
    response = client.responses.create(**asked)
    [message] = response.output
    found = message.content[0].logprobs
    chat = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=most,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    expected = chat.choices[0].logprobs.content
    assert plain(found) == flat(expected)
    assert [each.bytes for each in found] == [each.bytes for each in expected]
    assert [len(each.top_logprobs) for each in found] == [3] * response.usage.output_tokens
    assert response.top_logprobs == 3
    assert plain(streamed_logprobs(list(client.responses.create(**asked, stream=True)))) == flat(found)


def test_log_probabilities_come_with_the_text_of_their_tokens(client):
    text, tokens = "", ""
    for event in client.responses.create(**ASKED, **LOGPROBS, max_output_tokens=12, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
            tokens += "".join(each.token for each in event.logprobs)
            assert tokens == text
    assert text


def test_log_probabilities_are_given_to_those_who_ask(client):
    for more in ({}, {"include": []}, {"top_logprobs": 0}, {"include": ["reasoning.encrypted_content"]}):
        asked = {**ASKED, **more, "max_output_tokens": 3}
        assert client.responses.create(**asked).output[0].content[0].logprobs == []
        assert streamed_logprobs(list(client.responses.create(**asked, stream=True))) == []
    alone = client.responses.create(**ASKED, include=LOGPROBS["include"], max_output_tokens=3).output[0].content[0]
    assert [(len(each.token) > 0, each.top_logprobs) for each in alone.logprobs] == [(True, [])] * 3
    with client.responses.stream(**ASKED, **LOGPROBS) as stream:
        final = stream.get_final_response()
    assert len(final.output[0].content[0].logprobs) == final.usage.output_tokens


def test_log_probabilities_of_a_message_are_of_its_own_tokens(thinking):
    client, end = thinking
    asked = {
        "model": "tiny", "input": "Hm?", "temperature": 1, "max_output_tokens": 60,
        **LOGPROBS,
    }  # fmt: skip
    num_with_both = 0
    for seed in range(8):
        extra = {"logit_bias": {end: 4}, "seed": seed}
        response = client.responses.create(**asked, extra_body=extra)
        [*reasoning, last] = response.output
        if not reasoning or last.type != "message":
            continue
        num_with_both += 1
        [part] = last.content
        tokens = b"".join(bytes(each.bytes) for each in part.logprobs).decode("utf-8", "replace")
        assert tokens.removesuffix("</s>") == part.text
        assert 0 < len(part.logprobs) < response.usage.output_tokens
        events = list(client.responses.create(**asked, extra_body=extra, stream=True))
        assert plain(streamed_logprobs(events)) == flat(part.logprobs)
    assert num_with_both > 0


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
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "x"}]}, "input[0].arguments"),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "x"}]}]},
            "input[0].output[0].type",
        ),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 1}}}}, "text.format.schema"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": LOGPROBS["include"]}, "top_logprobs"),
    ],
)
def test_what_is_wrong_is_refused_by_the_name_of_its_field(served, body, param):
    response = httpx2.post(f"{served.url}/v1/responses", json={"input": "x", **body}, timeout=PATIENCE)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


@pytest.mark.slow
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
