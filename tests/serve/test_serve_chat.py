"""/v1/chat/completions with OpenAI's own client and the embedded model."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import httpx2
import openai
import pydantic
import pytest

from tests.support.patience import PATIENCE
from tests.support.serving import serving

QUESTION = "Ava has 17 apples and buys 25 more. How many apples has she?"
MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED = {"model": "demo", "messages": MESSAGES, "temperature": 0}


@pytest.fixture(scope="module")
def served():
    with serving(max_num_seqs=8) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.client()


def post(served, **body):
    return httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE)


def test_a_conversation_is_answered(client):
    answer = client.chat.completions.create(**ASKED)
    assert answer.object == "chat.completion"
    assert answer.model == "demo"
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.role == "assistant"
    assert choice.message.content.endswith("#### 42")
    assert choice.message.tool_calls is None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_it_is_that_of_the_engine_alone(served, client):
    engine = served.engine
    prompt = engine.chat_template.render(MESSAGES)
    text = client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=None).choices[0].text
    assert client.chat.completions.create(**ASKED).choices[0].message.content == text


def test_a_stream_is_the_whole_answer_in_pieces(client):
    whole = client.chat.completions.create(**ASKED)
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert {chunk.id for chunk in chunks} == {last.id}
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details.cached_tokens == 16


def test_the_asynchronous_client_streams_many_answers_at_once(served):
    async def ask(client, number):
        messages = [{"role": "user", "content": f"Ava has {number} apples and buys 5 more. How many has she?"}]
        stream = await client.chat.completions.create(model="demo", messages=messages, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            together = await asyncio.gather(*(ask(client, number) for number in range(10, 26)))
            return together, [await ask(client, number) for number in range(10, 26)]

    together, alone = asyncio.run(run())
    assert together == alone
    assert together[0].endswith("#### 15")


def test_several_outputs_of_one_seed_are_the_same_streamed_and_whole(client):
    asked = ASKED | {"temperature": 5.0, "seed": 5, "n": 3, "max_tokens": 12}
    whole = [choice.message.content for choice in client.chat.completions.create(**asked).choices]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole
    assert len(set(whole)) > 1


def test_logprobs_are_of_each_token_with_its_bytes_and_rivals(client):
    asked = {**ASKED, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 8}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "length"
    tokens = choice.logprobs.content
    assert len(tokens) == 8
    assert "".join(token.token for token in tokens) == choice.message.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content
    for token in tokens:
        assert [token.top_logprobs[0].token, token.top_logprobs[0].logprob] == [token.token, token.logprob]
        assert len(token.top_logprobs) == 2
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = [token for chunk in chunks for token in chunk.choices[0].logprobs.content]
    # The second time a part of the prompt may be cached, and sums of other shapes round differently.
    for found, expected in zip(streamed, tokens, strict=True):
        assert (found.token, found.bytes) == (expected.token, expected.bytes)
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [each.token for each in found.top_logprobs] == [each.token for each in expected.top_logprobs]
        logprobs = [each.logprob for each in expected.top_logprobs]
        assert [each.logprob for each in found.top_logprobs] == pytest.approx(logprobs, abs=1e-4)


def test_a_stop_string_ends_the_answer_before_it(client):
    whole = client.chat.completions.create(**ASKED).choices[0].message.content
    choice = client.chat.completions.create(**ASKED, stop=["####", "never"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (whole.split("####")[0], "stop")


def test_a_biased_token_is_chosen(served, client):
    token = served.engine.tokenizer.encode("7")[-1]
    answer = client.chat.completions.create(**ASKED, logit_bias={str(token): 100}, max_tokens=3)
    assert answer.choices[0].message.content == "777"


def test_text_parts_and_developer_messages_are_text(served, client):
    parts = [{"type": "text", "text": "Ava has 17 apples and buys 25 more."}, {"type": "text", "text": "How many?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    found = httpx2.post(
        f"{served.url}/tokenize", json={"messages": messages, "return_token_strs": True}, timeout=PATIENCE
    ).json()
    assert "".join(found["token_strs"]) == "Q: Ava has 17 apples and buys 25 more.\nHow many?\nA:"
    assert client.chat.completions.create(model="demo", messages=messages, max_tokens=1).choices


def test_a_message_can_be_continued(client):
    begun = [*MESSAGES, {"role": "assistant", "content": "17 + 25 = 42. ####"}]
    extra = {"continue_final_message": True}
    answer = client.chat.completions.create(model="demo", messages=begun, temperature=0, extra_body=extra)
    assert answer.choices[0].message.content == " 42"


def test_salts_part_what_the_prefix_cache_shares(client):
    def cached(salt):
        usage = client.chat.completions.create(**ASKED, max_tokens=1, extra_body={"cache_salt": salt}).usage
        return usage.prompt_tokens_details.cached_tokens

    assert [cached("a"), cached("a"), cached("b")] == [0, 16, 0]


@pytest.mark.parametrize("after", [0, -2, {"after": 0, "ttl": 60}, {"after": 0, "ttl": "1h"}])
def test_a_history_rewritten_after_a_breakpoint_is_read_from_the_cache_up_to_it(client, after):
    story = {"role": "user", "content": f"Ben has 12 pens and Cleo has 15 books. {after} " * 6}
    extra = {"cache_breakpoints": [after], "cache_salt": str(after)}

    def details(answer, question):
        messages = [story, {"role": "assistant", "content": answer}]
        messages = [*messages, {"role": "user", "content": question}] if after != -2 else messages
        asked = {"model": "demo", "messages": messages, "max_tokens": 2}
        usage = client.chat.completions.create(**asked, extra_body=extra).usage.prompt_tokens_details
        return getattr(usage, "cache_creation_tokens", 0), usage.cached_tokens

    created, read = details("They have 27 things.", "How many pens?")
    assert (created > 48, created % 16, read) == (True, 0, 0)
    assert details("27.", "Who has more?") == (0, created)


@pytest.mark.parametrize("after", [0, {"after": -3, "ttl": "1h"}])
def test_a_response_has_breakpoints_after_its_items(client, after):
    story = {"role": "user", "content": f"Ben has 12 pens and Cleo has 15 books. {after} " * 6}
    extra = {"cache_breakpoints": [after], "cache_salt": f"response {after}"}

    def details(answer, question):
        items = [story, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        usage = client.responses.create(model="demo", input=items, max_output_tokens=2, extra_body=extra).usage
        return usage.input_tokens_details.cache_write_tokens, usage.input_tokens_details.cached_tokens

    created, read = details("They have 27 things.", "How many pens?")
    assert (created > 48, created % 16, read) == (True, 0, 0)
    assert details("27.", "Who has more?") == (0, created)


@pytest.mark.parametrize(("prompt", "mark"), [("Ben has 12 pens. " * 8, 90), ([*range(5, 105)], {"after": -20})])
def test_a_plain_prompt_has_breakpoints_at_characters_or_at_token_ids(client, prompt, mark):
    extra = {"cache_breakpoints": [mark], "cache_salt": f"plain {mark}"}

    def details(end):
        changed = prompt[:90] + end if isinstance(prompt, str) else [*prompt[:80], *end.encode()]
        usage = client.completions.create(model="demo", prompt=changed, max_tokens=1, extra_body=extra).usage
        return getattr(
            usage.prompt_tokens_details, "cache_creation_tokens", 0
        ), usage.prompt_tokens_details.cached_tokens

    created, read = details("one end, 20 bytes ..")
    assert (created > 0, created % 16, read) == (True, 0, 0)
    assert details("another, 20 bytes ..") == (0, created)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "a b c", "cache_breakpoints": [6]}, "cache_breakpoints[0]"),
        ("completions", {"prompt": [5, 6], "cache_breakpoints": [1, {"after": 0}]}, "cache_breakpoints[1]"),
        ("completions", {"prompt": [5, 6], "cache_breakpoints": [{"after": "system"}]}, "cache_breakpoints[0]"),
        ("completions", {"prompt": ["a", "b"], "cache_breakpoints": [1]}, "cache_breakpoints"),
        ("completions", {"prompt": "a b c", "cache_breakpoints": [1] * 5}, "cache_breakpoints"),
        ("completions", {"prompt": "a b c", "cache_breakpoints": [10**400]}, "cache_breakpoints[0]"),
        ("responses", {"input": "a", "cache_breakpoints": [1]}, "cache_breakpoints[0]"),
        ("responses", {"input": "a", "cache_breakpoints": [{"after": "system"}]}, "cache_breakpoints[0]"),
        ("responses", {"input": "a", "instructions": "unread", "cache_breakpoints": [{"after": "system"}]},
         "cache_breakpoints[0]"),
        ("responses", {"input": "a", "cache_breakpoints": [{"after": 0, "mood": 1}]}, "cache_breakpoints[0].mood"),
        ("responses", {"input": [{"type": "reasoning", "summary": []}, {"role": "user", "content": "a"}],
                       "cache_breakpoints": [0]}, "cache_breakpoints[0]"),
    ],
)  # fmt: skip
def test_a_breakpoint_that_is_not_there_is_refused_by_its_place(client, path, body, param):
    asked = {"max_tokens": 1, **body} if path == "completions" else body
    answer = httpx2.post(f"{client.base_url}{path}", json=asked, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


class Verdict(pydantic.BaseModel):
    right: bool
    grade: Literal["good", "bad"]


def test_an_answer_is_parsed_into_the_class_that_was_asked_for(client):
    parsed = client.chat.completions.parse(**ASKED, response_format=Verdict, max_tokens=60)
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    assert parsed.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**ASKED, response_format=Verdict, max_tokens=60) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed


@pytest.mark.parametrize(
    ("extra", "check"),
    [
        ({"guided_regex": "[0-4]{3}"}, lambda text: len(text) == 3 and set(text) <= set("01234")),
        ({"guided_choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"guided_json": {"enum": [1, [2]]}}, lambda text: json.loads(text) in (1, [2])),
    ],
)
def test_guided_answers_are_of_their_form(client, extra, check):
    assert check(client.chat.completions.create(**ASKED, extra_body=extra).choices[0].message.content)
    answer = client.completions.create(model="demo", prompt="Q: ", temperature=0, extra_body=extra)
    assert check(answer.choices[0].text)


CALL = {"id": "y", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
NO_SCHEMA = {"name": "x", "schema": {"type": "text"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "y": 1}]}]}, "messages[0].content[0].y"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [CALL]}]}, "messages"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"store": True}, "store"),
        ({"functions": []}, "functions"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": NO_SCHEMA}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "x"}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 1000}, "n"),
        ({"cache_breakpoints": [7]}, "cache_breakpoints[0]"),
        ({"cache_breakpoints": [0, {"after": "tools"}]}, "cache_breakpoints[1]"),
        ({"cache_breakpoints": [{"after": 0, "ttl": "1d"}]}, "cache_breakpoints[0].ttl"),
        ({"cache_breakpoints": [{"after": 0, "ttl": int("9" * 400)}]}, "cache_breakpoints[0].ttl"),
        ({"cache_breakpoints": [0] * 5}, "cache_breakpoints"),
        ({"messages": [{"role": "system", "content": "unread"}, *MESSAGES], "cache_breakpoints": [0]},
         "cache_breakpoints[0]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_the_name_of_its_field(served, body, param):
    response = post(served, **{"messages": MESSAGES, **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_fields_that_change_nothing_are_taken(served):
    ignored = {
        "user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"],
        "prompt_cache_key": "k", "safety_identifier": "s", "prediction": {"type": "content", "content": "x"},
    }  # fmt: skip
    assert post(served, messages=MESSAGES, max_tokens=1, **ignored).status_code == 200


def test_another_models_name_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)


def test_nothing_is_left_behind(served):
    served.until(lambda: served.engine.num_unfinished == served.engine.queue_limit.num_unfinished == 0)


@pytest.mark.slow
def test_grammars_are_compiled_one_at_a_time_and_while_others_are_answered(served, client):
    served.probe.grammars_allowed = 0
    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(client.chat.completions.create, **ASKED, extra_body={"guided_regex": f"{digit}77"})
            for digit in (3, 4, 5)
        ]
        try:
            served.until(lambda: served.probe.compiling)
            assert client.chat.completions.create(**ASKED).choices[0].message.content.endswith("#### 42")
            assert not any(each.done() for each in waiting)
            assert served.probe.compiling == 1
        finally:
            served.probe.grammars_allowed = 1
        texts = [each.result(PATIENCE).choices[0].message.content for each in waiting]
    assert [text[0] + text[-1] for text in texts] == ["37", "47", "57"]
    assert served.probe.most_compiling == 1
