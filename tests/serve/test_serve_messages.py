"""/v1/messages with Anthropic's own client."""

import json

import anthropic
import httpx2
import pytest

from tests.serve.test_serve_images import drawn, url_of
from tests.serve.test_serve_images import served as seeing  # noqa: F401 (a fixture)
from tests.support.chat_templates import HERMES, TAGS, THINKING
from tests.support.patience import PATIENCE
from tests.support.serving import serving
from tests.support.text_checkpoint import text_checkpoint

QUESTION = "Ava has 17 apples and buys 25 more. How many apples has she?"
USER = [{"role": "user", "content": QUESTION}]
ASKED = {"model": "demo", "max_tokens": 64, "messages": USER}
WEATHER = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TINY = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "Hm?"}]}
SEED = {"extra_body": {"seed": 1, "temperature": 1}}
CALL = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


def of(served, **settings):
    return anthropic.Anthropic(base_url=served.url, **{"api_key": "none", "max_retries": 0, **settings})


@pytest.fixture(scope="module")
def served():
    with serving(max_num_seqs=4) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return of(served)


@pytest.fixture(scope="module")
def thinking():
    model = str(text_checkpoint(chat_template=THINKING, tags=TAGS))
    with serving({"served_model_name": "tiny"}, model=model, max_num_seqs=4, max_model_len=512) as served:
        yield of(served), served


@pytest.fixture(scope="module")
def hermes():
    model = str(text_checkpoint(chat_template=HERMES))
    with serving({"served_model_name": "tiny"}, model=model, max_num_seqs=4, max_model_len=512) as served:
        yield served


def rendered(served, **body):
    """The prompt that a body makes, as text."""
    from ostinato.serve.api.anthropic_request import CountTokensRequest
    from ostinato.serve.api.generation_run import model_of
    from ostinato.serve.chat.conversation import render

    context = model_of(served.engine, served.lifecycle.settings, "tiny").context
    return render(context, CountTokensRequest.model_validate(body).to_conversation(context).conversation).text


def test_a_message_is_the_answer_of_a_chat(served, client):
    message = client.messages.create(**ASKED, system="Be brief.")
    told = [{"role": "system", "content": "Be brief."}, *USER]
    chat = served.client().chat.completions.create(model="demo", messages=told, temperature=0, max_tokens=64)
    [block] = message.content
    assert (block.type, block.text) == ("text", chat.choices[0].message.content)
    assert (message.role, message.type, message.model) == ("assistant", "message", "demo")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == chat.usage.completion_tokens
    again = client.messages.create(**ASKED, system=[{"type": "text", "text": "Be brief."}])
    assert again.usage.cache_read_input_tokens == 16
    assert again.usage.input_tokens + 16 == chat.usage.prompt_tokens


def test_a_stream_tells_of_every_block_in_order_and_is_the_whole_message(client):
    whole = client.messages.create(**ASKED)
    events = list(client.messages.create(**ASKED, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0].message.content == []
    assert events[0].message.usage.cache_read_input_tokens == 16
    assert events[-2].usage.output_tokens == whole.usage.output_tokens
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)


def test_an_answer_says_why_it_ended(client):
    cut = client.messages.create(**{**ASKED, "max_tokens": 3})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = client.messages.create(**ASKED, stop_sequences=["=", "####"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "=")
    assert "=" not in stopped.content[0].text


def test_an_answer_that_fills_the_model_says_so(thinking):
    client, _ = thinking
    with client.messages.stream(**{**TINY, "max_tokens": 32000}, extra_body={"ignore_eos": True}) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "model_context_window_exceeded"


def test_an_assistants_message_at_the_end_is_continued(served, client):
    begun = [*USER, {"role": "assistant", "content": "17 + 25 ="}]
    message = client.messages.create(**{**ASKED, "messages": begun})
    more = {"continue_final_message": True, "add_generation_prompt": False}
    chat = served.client().chat.completions.create(model="demo", messages=begun, extra_body=more, max_tokens=64)
    assert message.content[0].text == chat.choices[0].message.content
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == chat.usage.prompt_tokens


def test_tokens_are_counted_as_the_message_has_them(client):
    message = client.messages.create(**ASKED, system="Be brief.")
    counted = client.messages.count_tokens(model="demo", messages=USER, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_a_conversation_with_tools_reaches_the_template_in_its_own_order(hermes):
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "d"}]},
    ]
    text = rendered(hermes, messages=messages, system="s", tools=[WEATHER])
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert text == f"weather system: suser: a\nbassistant: c{call}tool: sunuser: danswer:"


MARK = {"cache_control": {"type": "ephemeral"}}


def prepared(served, **body):
    """A body as the engine gets it, and its prompt."""
    from ostinato.serve.api.anthropic_request import MessagesRequest
    from ostinato.serve.api.generation_run import model_of

    context = model_of(served.engine, served.lifecycle.settings, "tiny").context
    chat = MessagesRequest.model_validate({"max_tokens": 5, **body}).prepare(context)
    return chat, context.text.tokenizer


def test_marks_are_located_where_the_template_gives_out_what_they_follow(hermes):
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}, **MARK}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"}
    result["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **MARK}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "d"}]},
    ]
    chat, tokenizer = prepared(
        hermes, messages=messages, system=[{"type": "text", "text": "s", **MARK}], tools=[WEATHER]
    )
    assert chat.missing_marks == ()
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    parts = ("weather system: s", "user: a", f"\nbassistant: c{call}", "tool: sun")
    whole = tokenizer.decode(chat.token_ids)
    assert whole == "".join(parts) + "user: danswer:"
    places = ("system[0]", "messages[0].content[0]", "messages[1].content[1]", "messages[2].content[0]")
    assert tuple(chat.marks) == places
    for number, mark in enumerate(chat.marks.values()):
        assert tokenizer.decode(chat.token_ids[: mark.position]) == "".join(parts[: number + 1])
    assert [mark.ttl for mark in chat.marks.values()] == [300, 300, 300, 3600]


def test_a_text_that_has_the_word_which_marks_are_located_by_has_its_marks_where_they_stand(hermes):
    text = "a OstinatoCacheMark b"
    content = [{"type": "text", "text": text, **MARK}, {"type": "text", "text": "c"}]
    chat, tokenizer = prepared(hermes, messages=[{"role": "user", "content": content}])
    [mark] = chat.marks.values()
    assert tokenizer.decode(chat.token_ids[: mark.position]).endswith(text)


def test_marks_after_tools_and_after_the_last_message_are_located_too(hermes):
    second = {**WEATHER, "name": "tides"}
    body = {"messages": TINY["messages"], "tools": [{**WEATHER, **MARK}, second], **MARK}
    chat, tokenizer = prepared(hermes, **body)
    texts = [tokenizer.decode(chat.token_ids[: mark.position]) for mark in chat.marks.values()]
    assert texts == ["weather", "weather tides user: Hm?"]
    # Without a choice, the template is given no tools.
    chat, _ = prepared(hermes, **body, tool_choice={"type": "none"})
    assert (len(chat.marks), chat.missing_marks) == (1, ("tools[0]",))


def test_a_mark_after_a_tool_is_one_too_where_the_template_describes_no_tools(client):
    expression = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    tool = {"name": "calculate", "input_schema": expression, **MARK}
    message = client.messages.create(**{**ASKED, "max_tokens": 4}, tools=[tool])
    assert message.usage.cache_control_not_kept == ["tools[0]"]


@pytest.mark.slow
def test_a_mark_after_a_tool_in_the_generic_form_stands_behind_its_parameters():
    model, settings = str(text_checkpoint()), {"served_model_name": "tiny", "tool_call_parser": "generic"}
    with serving(settings, model=model, max_num_seqs=4, max_model_len=512) as served:
        tools = [{"name": name, "input_schema": {"type": "object", "minProperties": 1}} for name in ("a", "tides")]
        tools[0] |= MARK
        chat, tokenizer = prepared(served, messages=TINY["messages"], tools=tools)
        [mark] = chat.marks.values()
        text = tokenizer.decode(chat.token_ids[: mark.position])
        assert text.rstrip("}\n").endswith('"minProperties": 1')
        assert "tides" not in text


def test_a_marked_prefix_is_created_once_and_then_read_whatever_follows_it(client):
    story = {"type": "text", "text": "Ben has 12 pens and Cleo has 15 books. " * 8, **MARK}

    def usage(question):
        messages = [{"role": "user", "content": [story, {"type": "text", "text": question}]}]
        counted = client.messages.count_tokens(model="demo", messages=messages).input_tokens
        told = client.messages.create(model="demo", max_tokens=4, messages=messages).usage
        assert told.input_tokens + told.cache_creation_input_tokens + told.cache_read_input_tokens == counted
        return told.cache_creation_input_tokens, told.cache_read_input_tokens

    created, read = usage(QUESTION)
    assert (created > 64, (created + read) % 16, read) == (True, 0, 0)
    assert [usage(question) for question in ("How many pens?", "Who has more?")] == [(0, created)] * 2


def test_marks_that_are_not_kept_are_named_in_the_usage(client):
    # The demo's template ignores system messages.
    message = client.messages.create(**ASKED, system=[{"type": "text", "text": "Be brief.", **MARK}])
    assert message.usage.cache_control_not_kept == ["system[0]"]


LONG = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]


@pytest.mark.parametrize(
    ("settings", "not_kept"),
    [
        ({"max_checkpoint_ttl": 600}, ["messages[0].content[0].cache_control.ttl"]),
        ({"max_pinned_checkpoints": 0}, ["messages[0].content[0]", "cache_control"]),
        ({"enable_prefix_caching": False}, ["messages[0].content[0]", "cache_control"]),
    ],
)
def test_what_the_server_keeps_not_or_less_long_is_named_by_its_place(settings, not_kept):
    with serving(graph_mode="none", max_num_seqs=2, **settings) as served:
        asked = {**ASKED, "max_tokens": 2, "messages": [{"role": "user", "content": LONG}], "extra_body": MARK}
        message = of(served).messages.create(**asked)
        assert message.usage.cache_control_not_kept == not_kept
        first = next(iter(of(served).messages.create(**asked, stream=True)))
        assert first.message.usage.cache_control_not_kept == not_kept


@pytest.mark.parametrize(
    ("control", "words"),
    [
        ({"type": "lasting"}, "cache_control should be"),
        ({"type": "ephemeral", "ttl": "1d"}, "ttl should be 5m or 1h"),
        ({"type": "ephemeral", "ttl": int("9" * 400)}, "a number of seconds up to 1,000,000,000"),
        ({"type": "ephemeral", "ttl": 0}, "a number of seconds up to"),
    ],
)
def test_marks_that_are_not_valid_are_refused_by_their_place(client, control, words):
    content = [{"type": "text", "text": QUESTION, "cache_control": control}]
    with pytest.raises(anthropic.BadRequestError, match=words):
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": content}]})


def test_more_marks_than_a_request_may_have_are_refused(client):
    content = [{"type": "text", "text": "a", **MARK}] * 5
    with pytest.raises(anthropic.BadRequestError, match="5 marks are too many; a request may have 4"):
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": content}]})


def test_a_call_is_a_block_also_in_a_stream(hermes):
    client = of(hermes)
    message = client.messages.create(**TINY, **SEED, **CALL)
    [block] = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
    assert block.id.startswith("toolu_")
    assert block.input in ({"city": "Rome"}, {"city": "Oslo"})
    with client.messages.stream(**TINY, **SEED, **CALL) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (final.content[0].input, final.stop_reason) == (block.input, "tool_use")
    assert "input_json" in kinds
    back = [*TINY["messages"], {"role": "assistant", "content": final.content}]
    result = {"type": "tool_result", "tool_use_id": final.content[0].id, "content": "sun", "is_error": False}
    back.append({"role": "user", "content": [result]})
    named = {"type": "tool", "name": "weather"}
    again = client.messages.create(**{**TINY, "messages": back}, **SEED, tools=[WEATHER], tool_choice=named)
    assert again.stop_reason == "tool_use"
    assert client.messages.create(**TINY, tools=[WEATHER], tool_choice={"type": "none"}).stop_reason != "tool_use"


def test_thinking_is_a_block_before_the_text(thinking):
    client, _ = thinking
    config = {"format": {"type": "json_schema", "schema": {"type": "object", "additionalProperties": False}}}
    asked = {**TINY, **SEED, "output_config": config}
    message = client.messages.create(**asked)
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text"]
    assert json.loads(message.content[1].text) == {}
    assert message.usage.output_tokens_details.thinking_tokens > 0
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == kinds
    assert final.content[0].thinking == message.content[0].thinking
    answered = {**asked, "thinking": {"type": "disabled"}}
    assert [block.type for block in client.messages.create(**answered).content] == ["text"]
    back = [*TINY["messages"], {"role": "assistant", "content": final.content}, {"role": "user", "content": "So?"}]
    assert client.messages.count_tokens(model="tiny", messages=back).input_tokens > 10


def test_images_are_taken_where_the_model_takes_them(seeing):  # noqa: F811
    client = of(seeing)
    url = url_of(drawn(40, 48))
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    content = [{"type": "text", "text": "what"}, {"type": "image", "source": source}]
    message = client.messages.create(model="seer", max_tokens=8, messages=[{"role": "user", "content": content}])
    parts = [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": url}}]
    chat = seeing.client().chat.completions.create(
        model="seer", max_tokens=8, messages=[{"role": "user", "content": parts}], temperature=0
    )
    assert message.content[0].text == chat.choices[0].message.content
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    broken = [{"type": "text", "text": "x"}, {"type": "image", "source": {**source, "data": "AAAA"}}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\].content\[1\]"):
        client.messages.create(
            model="seer",
            max_tokens=8,
            messages=[{"role": "user", "content": "hm"}, {"role": "user", "content": broken}],
        )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"content\[0\].type should be text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, r"text should be a string"),
        (
            {"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
            r"messages\[1\].content\[0\].input should be an object",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\].type should be custom"),
        ({"tools": [{"name": "a"}]}, r"tools\[0\].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice should be"),
        ({"tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name: no tool is named 'b'"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: 17 stop strings"),
        ({"extra_body": {"stop": "a"}}, "stop: not served; give stop_sequences"),
        ({"extra_body": {"colour": 1}}, "unknown parameter: colour"),
    ],
)
def test_what_is_wrong_is_told_in_anthropics_form(client, more, says):
    with pytest.raises(anthropic.BadRequestError, match=says) as caught:
        client.messages.create(**{**ASKED, **more})
    body = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert caught.value.request_id is not None


def test_more_blocks_than_a_request_may_have_are_refused():
    with serving({"max_parts": 4}, graph_mode="none") as served:
        block = {"type": "text", "text": "a"}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [block] * 4}
        for content in ([block] * 5, [result]):
            with pytest.raises(anthropic.BadRequestError, match="5 parts of messages"):
                of(served).messages.create(**{**ASKED, "messages": [{"role": "user", "content": content}]})


def test_other_errors_have_anthropics_form_and_the_key_may_be_sent_as_its_clients_do(client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**ASKED, "model": "claude"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    with serving({"api_key": ("right",)}, graph_mode="none") as served:
        assert of(served, api_key="right").messages.create(**ASKED).content
        assert of(served, api_key=None, auth_token="right").messages.create(**ASKED).content
        with pytest.raises(anthropic.AuthenticationError) as caught:
            of(served, api_key="wrong").messages.create(**ASKED)
        assert caught.value.body["error"]["type"] == "authentication_error"
        assert (
            httpx2.get(f"{served.url}/v1/models", headers={"x-api-key": "right"}, timeout=PATIENCE).status_code == 200
        )


@pytest.mark.slow
def test_an_error_within_a_stream_is_an_event_of_its_own(served):
    served.probe.delay = 0.05
    body = {**ASKED, "max_tokens": 400, "stream": True, "timeout": 3, "ignore_eos": True}
    lines = [
        line for line in httpx2.post(f"{served.url}/v1/messages", json=body, timeout=PATIENCE).iter_lines() if line
    ]
    served.probe.reset()
    assert lines[-2] == "event: error"
    error = json.loads(lines[-1].removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "timeout_error")
    assert "[DONE]" not in "".join(lines)
