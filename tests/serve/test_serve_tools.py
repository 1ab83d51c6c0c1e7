"""Tool calls and reasoning with OpenAI's own client, of tiny random models, whose grammar makes them well-formed."""

import json

import anthropic
import ollama
import openai
import pytest

from ostinato.serve.chat.conversation import generic_messages
from tests.support.chat_templates import HERMES, TAGS, THINKING
from tests.support.serving import serving
from tests.support.text_checkpoint import text_checkpoint

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOTHING = {"type": "object", "additionalProperties": False}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}
VERDICT_SCHEMA = {**NOTHING, "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
MESSAGES = [{"role": "user", "content": "Hm?"}]
ASKED = {"model": "tiny", "messages": MESSAGES, "temperature": 1, "seed": 1, "max_tokens": 300}


def serve(template, tags=(), **settings):
    return serving(
        {"served_model_name": "tiny"}, model=str(text_checkpoint(chat_template=template, tags=tags)),
        max_num_seqs=4, max_model_len=512, cache_memory="8MiB", **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def hermes():
    with serve(HERMES) as served:
        yield served.client()


@pytest.fixture(scope="module")
def drafting():
    """As `hermes`, with drafts."""
    with serve(HERMES, speculative="ngram:3", speculative_adaptive="off") as served:
        yield served


@pytest.fixture(scope="module")
def thinking():
    """Its tags are special tokens."""
    with serve(THINKING, TAGS) as served:
        yield served.client(), served.engine


def joined(chunks):
    """A streamed answer's parts, as those of `parts`."""
    content, reasoning, calls, reason = "", "", {}, None
    for chunk in chunks:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.type == "function"
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, reasoning, [tuple(call) for call in calls.values()], reason


def parts(answer):
    [choice] = answer.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    reasoning = getattr(choice.message, "reasoning_content", None) or ""
    return choice.message.content or "", reasoning, calls, choice.finish_reason


def test_a_named_tool_is_called_with_arguments_of_its_schema(hermes):
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = {**ASKED, "tools": [WEATHER, CLOCK], "tool_choice": choice}
    content, _, [(name, arguments)], reason = parts(hermes.chat.completions.create(**asked))
    assert (content, name, reason) == ("", "weather", "tool_calls")
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("seed", range(6))
def test_required_calls_are_the_same_streamed_and_whole(hermes, seed):
    asked = {**ASKED, "tools": [WEATHER, CLOCK], "tool_choice": "required", "seed": seed}
    whole = parts(hermes.chat.completions.create(**asked))
    assert whole[2]
    assert all(name in ("weather", "clock") and isinstance(json.loads(text), dict) for name, text in whole[2])
    assert joined(hermes.chat.completions.create(**asked, stream=True)) == whole


def test_without_parallel_calls_there_is_one(hermes):
    asked = {**ASKED, "tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(4):
        assert len(parts(hermes.chat.completions.create(**{**asked, "seed": seed}))[2]) == 1


def test_the_clients_own_parsing_and_streaming_helpers_understand_calls(hermes):
    asked = {**ASKED, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = hermes.chat.completions.parse(**asked).choices[0].message.tool_calls
    assert call.function.parsed_arguments["city"] in ("Rome", "Oslo")
    with hermes.chat.completions.stream(**asked) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def test_a_conversation_goes_on_with_what_the_tool_said(hermes):
    asked = {**ASKED, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    message = hermes.chat.completions.create(**asked).choices[0].message
    said = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    messages = [*MESSAGES, message.model_dump(), said]
    assert hermes.chat.completions.create(**{**asked, "messages": messages}).choices[0].message.tool_calls


def test_what_a_client_has_added_to_an_answer_may_come_back_with_it(hermes):
    asked = {**ASKED, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    message = hermes.chat.completions.create(**asked).choices[0].message.model_dump()
    said = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sun"}

    def answer():
        given = {**ASKED, "messages": [*MESSAGES, message, said], "max_tokens": 8}
        return hermes.chat.completions.create(**given).choices[0].message.content

    plain = answer()
    message |= {"provider_specific_fields": {"refusal": None}, "annotations": []}
    message["tool_calls"][0]["provider_specific_fields"] = {"signature": "x"}
    assert answer() == plain


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_model_that_may_choose_gives_text_unless_it_calls(hermes, choice):
    asked = {**ASKED, "tools": [CLOCK], "max_tokens": 20, **({} if choice is None else {"tool_choice": choice})}
    content, _, calls, reason = whole = parts(hermes.chat.completions.create(**asked))
    assert (bool(content), calls) == (True, [])
    assert reason in ("stop", "length")
    assert joined(hermes.chat.completions.create(**asked, stream=True)) == whole


def test_calls_of_strict_tools_are_well_formed_wherever_they_come(hermes):
    asked = {**ASKED, "tools": [WEATHER], "max_tokens": 40}
    for seed in range(4):
        whole = parts(hermes.chat.completions.create(**{**asked, "seed": seed}))
        assert joined(hermes.chat.completions.create(**{**asked, "seed": seed}, stream=True)) == whole
        assert "<tool_call>" not in whole[0]


def test_tools_are_told_to_the_model_unless_it_may_call_none(hermes):
    def tokens(**more):
        asked = {**ASKED, "max_tokens": 1, **more}
        return hermes.chat.completions.create(**asked).usage.prompt_tokens

    assert tokens() == tokens(tools=[CLOCK], tool_choice="none") < tokens(tools=[CLOCK])


def test_of_several_tools_only_those_allowed_are_called(hermes):
    def choice(mode, *names):
        named = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}

    asked = {**ASKED, "tools": [WEATHER, CLOCK]}
    told = hermes.chat.completions.create(**{**asked, "max_tokens": 1}).usage.prompt_tokens
    for seed in range(4):
        answer = hermes.chat.completions.create(**asked | {"seed": seed, "tool_choice": choice("required", "clock")})
        assert {name for name, _ in parts(answer)[2]} == {"clock"}
        assert answer.usage.prompt_tokens == told
    with pytest.raises(openai.BadRequestError, match="no tool is named 'bomb'; tools: weather, clock"):
        hermes.chat.completions.create(**asked, tool_choice=choice("auto", "bomb"))
    with pytest.raises(openai.BadRequestError, match="mode"):
        hermes.chat.completions.create(**asked, tool_choice=choice("perhaps", "clock"))
    nested = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    answer = hermes.responses.create(**{key: NESTED[key] for key in ("model", "input", "tools")}, tool_choice=nested)
    assert {item.name for item in answer.output if item.type == "function_call"} == {"clock"}


def test_a_call_that_was_cut_off_can_be_sent_back(hermes):
    asked = {**ASKED, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    message = hermes.chat.completions.create(**asked).choices[0].message.model_dump()
    [call] = message["tool_calls"]
    whole = call["function"]["arguments"]
    for end in range(len(whole)):
        call["function"]["arguments"] = whole[:end]
        said = {"role": "tool", "tool_call_id": call["id"], "content": "sun"}
        hermes.chat.completions.create(**{**ASKED, "messages": [*MESSAGES, message, said], "max_tokens": 1})
    call["function"]["arguments"] = "}"
    with pytest.raises(openai.BadRequestError, match="JSON object"):
        hermes.chat.completions.create(**{**ASKED, "messages": [*MESSAGES, message], "max_tokens": 1})


@pytest.mark.parametrize(
    ("asked", "holds"),
    [
        ({"json": VERDICT_SCHEMA}, lambda text: json.loads(text).keys() == {"ok"}),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"regex": "a{3}b"}, lambda text: text == "aaab"),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    ],
)
def test_structured_outputs_are_asked_for_as_of_vllm(hermes, asked, holds):
    bias = {"temperature": 1, "max_tokens": 400, "extra_body": {"structured_outputs": asked, "top_k": 5}}
    answer = hermes.chat.completions.create(model="tiny", messages=MESSAGES, seed=3, **bias)
    assert holds(answer.choices[0].message.content) or answer.choices[0].finish_reason == "length"
    completion = hermes.completions.create(model="tiny", prompt="Hm", seed=3, **bias)
    assert holds(completion.choices[0].text) or completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"grammar": "start: /a/"}, "give json, regex or choice"),
        ({"json": VERDICT_SCHEMA, "regex": "a"}, "one form"),
        ({"xml": 1}, "xml"),
    ],
)
def test_structured_outputs_that_are_not_served_are_refused_by_name(hermes, asked, said):
    with pytest.raises(openai.BadRequestError, match=said):
        hermes.chat.completions.create(**{**ASKED, "extra_body": {"structured_outputs": asked}})


def test_fields_that_ask_for_nothing_are_taken_and_variables_cannot_be_arguments(hermes):
    hermes.completions.create(model="tiny", prompt="Hm", max_tokens=1, suffix="", best_of=1)
    with pytest.raises(openai.BadRequestError, match="not served"):
        hermes.completions.create(model="tiny", prompt="Hm", max_tokens=1, best_of=2)
    with pytest.raises(openai.BadRequestError, match="not served"):
        hermes.completions.create(model="tiny", prompt="Hm", max_tokens=1, suffix="x")
    with pytest.raises(openai.BadRequestError, match="verbosity is no variable of this model's chat template"):
        hermes.chat.completions.create(**{**ASKED, "max_tokens": 1, "extra_body": {"verbosity": "low"}})
    for name in ("self", "messages", "tools", "template_name", "continue_final_message"):
        with pytest.raises(openai.BadRequestError, match=f"chat_template_kwargs.{name} cannot be set there"):
            hermes.chat.completions.create(**ASKED, extra_body={"chat_template_kwargs": {name: 1}})


@pytest.mark.slow
def test_a_template_whose_calls_are_of_no_known_form_says_so_when_the_server_starts(caplog):
    strange = HERMES.replace("<tool_call>", "<@").replace("</tool_call>", "@>")
    with caplog.at_level("WARNING", "ostinato.serve"), serve(strange) as served:
        assert "the chat template takes tools, but shows none of the known forms of tool calls: Hermes" in caplog.text
        with pytest.raises(openai.BadRequestError, match=r"none of the known forms of tool calls: Hermes.*Llama 3"):
            served.client().chat.completions.create(**ASKED, tools=[CLOCK])
        answer = served.client().chat.completions.create(**ASKED, tools=[CLOCK], tool_choice="required")
        assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"clock"}


PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}answer:{% endif %}"
)


@pytest.mark.slow
def test_a_call_can_be_demanded_though_the_template_takes_no_tools():
    ways = [{"type": "function", "function": {"name": "clock"}}, "required"]
    with serve(PLAIN) as served:
        client = served.client()
        for choice in ways:
            asked = {**ASKED, "tools": [CLOCK], "tool_choice": choice, "max_tokens": 120, "parallel_tool_calls": False}
            answer = client.chat.completions.create(**asked)
            whole = content, _, calls, reason = parts(answer)
            assert (content, {name for name, _ in calls}, reason) == ("", {"clock"}, "tool_calls")
            assert joined(client.chat.completions.create(**asked, stream=True)) == whole
            plain = client.chat.completions.create(**{**ASKED, "max_tokens": 1})
            assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 50
        flat = {"type": "function", **CLOCK["function"]}
        answer = client.responses.create(
            model="tiny", input="Hm?", tools=[flat], tool_choice="required", max_output_tokens=99
        )
        assert [item.name for item in answer.output if item.type == "function_call"]
        for more in ({}, {"tool_choice": "auto"}):
            with pytest.raises(
                openai.BadRequestError, match=r'demand a call by tool_choice "required", or start .*generic'
            ):
                client.chat.completions.create(**ASKED, tools=[CLOCK], **more)
        assert client.models.list().data[0].tool_call_parser is None


@pytest.mark.slow
def test_the_generic_form_is_described_enforced_and_named_for_a_template_that_takes_no_tools(caplog):
    said = {"tool_choice": "auto", "parallel_tool_calls": False, "tools": [CLOCK], "max_tokens": 80}
    with (
        caplog.at_level("INFO", "ostinato.serve"),
        serving(
            {"served_model_name": "tiny", "tool_call_parser": "generic"}, max_num_seqs=4, max_model_len=512,
            model=str(text_checkpoint(chat_template=PLAIN)), cache_memory="8MiB",
        ) as served,
    ):  # fmt: skip
        client = served.client()
        assert "in the generic form" in caplog.text
        assert client.models.list().data[0].tool_call_parser == "generic"
        begins = begins_with(served.engine, "<")
        answer = client.chat.completions.create(**{**ASKED, **said, "logit_bias": begins})
        content, _, calls, _ = whole = parts(answer)
        assert "<tool_call>" not in content
        assert all(name == "clock" for name, _ in calls)
        assert joined(client.chat.completions.create(**{**ASKED, **said, "logit_bias": begins}, stream=True)) == whole
        forced = {**said, "tool_choice": "required"}
        message = client.chat.completions.create(**{**ASKED, **forced}).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"}
        history = {**ASKED, **said, "messages": [*MESSAGES, message.model_dump(exclude_none=True), result]}
        assert client.chat.completions.create(**history).usage.prompt_tokens > answer.usage.prompt_tokens


def test_calls_and_results_are_text_for_a_template_that_knows_neither():
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    turns = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "So:", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "one"}]},
        {"role": "user", "content": "And now?"},
    ]
    written = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    first, answer, results = generic_messages(turns)
    assert (first, answer) == (turns[0], {"role": "assistant", "content": f"So:\n{written}\n{written}"})
    assert results["role"] == "user"
    texts = [part["text"] for part in results["content"]]
    assert texts == [
        "<tool_response>\nnoon\n</tool_response>",
        "<tool_response>",
        "one",
        "</tool_response>",
        "And now?",
    ]


CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


@pytest.mark.slow
def test_the_embedded_model_calls_a_calculator_for_each_equation_and_no_other_tool():
    """Rounds as clients of OpenAI, Anthropic and Ollama make them, and through Responses."""
    question = "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?"
    function = CALCULATE["function"]
    with serving(max_num_seqs=4) as served:
        client = served.client()
        asked = {"model": "demo", "tools": [CALCULATE], "max_tokens": 60}
        messages = [{"role": "user", "content": question}]
        expressions = []
        while (answer := client.chat.completions.create(**asked, messages=messages).choices[0]).message.tool_calls:
            assert joined(client.chat.completions.create(**asked, messages=messages, stream=True)) == parts(
                client.chat.completions.create(**asked, messages=messages)
            )
            [call] = answer.message.tool_calls
            expressions.append(json.loads(call.function.arguments)["expression"])
            result = {"role": "tool", "tool_call_id": call.id, "content": {"17 + 25": "42"}.get(expressions[-1], "33")}
            messages += [answer.message.model_dump(exclude_none=True), result]
        assert (expressions, answer.message.content) == (["17 + 25", "42 - 9"], "#### 33")

        theirs = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
        tool = {"name": "calculate", "description": "", "input_schema": function["parameters"]}
        asked = {"model": "demo", "tools": [tool], "max_tokens": 60}
        messages, results = [{"role": "user", "content": question}], ["42", "33"]
        while (message := theirs.messages.create(**asked, messages=messages)).stop_reason == "tool_use":
            [block] = message.content
            result = {"type": "tool_result", "tool_use_id": block.id, "content": results.pop(0)}
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        assert (results, message.content[0].text) == ([], "#### 33")

        llama, results = ollama.Client(host=served.url), ["42", "33"]
        assert "tools" in llama.show("demo").capabilities
        messages = [{"role": "user", "content": question}]
        while (message := llama.chat("demo", messages, tools=[CALCULATE]).message).tool_calls:
            messages += [message, {"role": "tool", "tool_name": "calculate", "content": results.pop(0)}]
        assert (results, message.content) == ([], "#### 33")

        flat, results = {"type": "function", **function}, ["42", "33"]
        items = [{"role": "user", "content": question}]
        while True:
            [item] = client.responses.create(model="demo", input=items, tools=[flat]).output
            if item.type != "function_call":
                break
            output = {"type": "function_call_output", "call_id": item.call_id, "output": results.pop(0)}
            items += [item.model_dump(exclude_none=True), output]
        assert (results, item.content[0].text) == ([], "#### 33")

        for tools in ([CLOCK], [CALCULATE, CLOCK]):
            with pytest.raises(
                openai.BadRequestError, match=r"calls one tool, whose only required parameter .*generic"
            ):
                client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "?"}], tools=tools)


def response_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def of_parameters(properties):
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}


SHORT_WORD = {"type": "string", "pattern": "^[a-e ]{1,40}$"}
VERDICT = {**NOTHING, "properties": {"ok": {"type": "boolean"}, "why": SHORT_WORD}, "required": ["ok", "why"]}
BESIDE = {**ASKED, "tools": [WEATHER, CLOCK], "response_format": response_format(VERDICT)}
NESTED = {
    "model": "tiny", "input": "Hm?", "temperature": 1, "max_output_tokens": 300,
    "tools": [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": VERDICT}},
}  # fmt: skip


def begins_with(engine, text):
    """A bias for answers that begin with a character."""
    [token] = engine.tokenizer.encode(text)
    return {str(token): 4}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("first", ["<", "{"])
def test_an_answer_of_a_form_calls_a_tool_or_has_that_form(drafting, first, strict):
    client, seen = drafting.client(), []
    tools = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in (WEATHER, CLOCK)]
    asked = {**BESIDE, "tools": tools, "logit_bias": begins_with(drafting.engine, first)}
    for seed in range(4):
        whole = parts(client.chat.completions.create(**{**asked, "seed": seed}))
        assert joined(client.chat.completions.create(**{**asked, "seed": seed}, stream=True)) == whole
        content, _, calls, reason = whole
        seen.append(bool(calls))
        if calls:
            assert (content, reason) == ("", "tool_calls")
            assert {name for name, _ in calls} <= {"weather", "clock"}
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        else:
            assert json.loads(content).keys() == VERDICT["properties"].keys()
            assert reason == "stop"
    assert (first == "<") in seen


@pytest.mark.parametrize("first", ["<", "{"])
def test_drafts_change_nothing_of_such_an_answer(hermes, drafting, first):
    client = drafting.client()
    for seed in range(3):
        asked = {**BESIDE, "logit_bias": begins_with(drafting.engine, first), "seed": seed}
        expected = parts(hermes.chat.completions.create(**asked))
        assert parts(client.chat.completions.create(**asked)) == expected
    assert drafting.stats()["speculation"]["drafts_accepted"] > 0


@pytest.mark.parametrize("first", ["<", "{"])
def test_responses_call_a_tool_or_have_the_form_too(drafting, first):
    extra = {"logit_bias": begins_with(drafting.engine, first), "seed": 2}
    response = drafting.client().responses.create(**NESTED, extra_body=extra)
    kinds = {item.type for item in response.output}
    assert kinds == ({"function_call"} if first == "<" else {"message"})
    if first == "{":
        assert json.loads(response.output_text).keys() == VERDICT["properties"].keys()
    events = list(drafting.client().responses.create(**NESTED, extra_body=extra, stream=True))
    last = events[-1].response
    assert [item.type for item in last.output] == [item.type for item in response.output]
    assert last.output_text == response.output_text


def test_a_choice_that_leaves_none_is_kept_beside_a_form(drafting):
    client = drafting.client()
    bias = begins_with(drafting.engine, "<")
    content, _, calls, _ = parts(client.chat.completions.create(**BESIDE, tool_choice="none", logit_bias=bias))
    assert json.loads(content).keys() == VERDICT["properties"].keys()
    assert not calls
    bias = begins_with(drafting.engine, "{")
    for choice in ("required", {"type": "function", "function": {"name": "clock"}}):
        content, _, calls, _ = parts(client.chat.completions.create(**BESIDE, tool_choice=choice, logit_bias=bias))
        assert calls
        assert not content


@pytest.mark.parametrize("first", ["<tool_call>", "{"])
def test_a_model_that_thinks_chooses_afterwards(thinking, first):
    client, engine = thinking
    bias = {str(engine.tokenizer.token_id("</think>")): 20, **begins_with(engine, first)}
    whole = parts(client.chat.completions.create(**BESIDE, logit_bias=bias))
    assert joined(client.chat.completions.create(**BESIDE, logit_bias=bias, stream=True)) == whole
    content, _, calls, reason = whole
    assert (bool(calls), reason) == ((True, "tool_calls") if first == "<tool_call>" else (False, "stop"))
    assert calls or json.loads(content).keys() == VERDICT["properties"].keys()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        (
            {"tools": [CLOCK], "response_format": response_format({"type": "text"})},
            "response_format.json_schema.schema",
        ),
        ({"tools": [of_parameters({"a": {"type": "text"}})], "response_format": {"type": "json_object"}}, "tools"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(hermes, body, param):
    with pytest.raises(openai.BadRequestError) as caught:
        hermes.chat.completions.create(**{**ASKED, **body})
    assert caught.value.param == param


def ends_at_once(engine):
    """Bias that ends the reasoning after a token or so."""
    return {str(engine.tokenizer.token_id("</think>")): 20}


def test_reasoning_is_split_off_and_counted(thinking):
    client, engine = thinking
    asked = {**ASKED, "max_tokens": 24, "logit_bias": {str(engine.tokenizer.token_id("</think>")): 3}}
    seen = set()
    for seed in range(8):
        answer = client.chat.completions.create(**{**asked, "seed": seed})
        content, reasoning, _, _ = whole = parts(answer)
        assert joined(client.chat.completions.create(**{**asked, "seed": seed}, stream=True)) == whole
        counted = answer.usage.completion_tokens_details.reasoning_tokens
        assert 0 < counted <= 24 or not reasoning
        assert not (content and counted == 24)
        assert "think>" not in reasoning
        seen.add((bool(content), bool(reasoning)))
    assert (True, True) in seen


def test_without_thinking_all_is_content(thinking):
    client, _ = thinking
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    content, reasoning, _, _ = parts(client.chat.completions.create(**{**ASKED, "max_tokens": 8}, extra_body=extra))
    assert content
    assert not reasoning
    effort = client.chat.completions.create(**{**ASKED, "max_tokens": 8}, reasoning_effort="none")
    assert parts(effort)[:2] == (content, "")


def test_a_model_that_thinks_calls_tools_afterwards(thinking):
    client, engine = thinking
    asked = {**ASKED, "tools": [WEATHER], "tool_choice": "required", "logit_bias": ends_at_once(engine)}
    content, _, calls, reason = whole = parts(client.chat.completions.create(**asked))
    assert (content, reason) == ("", "tool_calls")
    assert json.loads(calls[0][1])["city"] in ("Rome", "Oslo")
    assert joined(client.chat.completions.create(**asked, stream=True)) == whole


def test_a_model_that_thinks_answers_in_the_form_asked_for_afterwards(thinking):
    client, engine = thinking
    schema = {**NOTHING, "properties": {"a": {"enum": ["x/y", "z"]}}, "required": ["a"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    wishes = [
        ({"response_format": format_}, ['{"a":"x/y"}', '{"a":"z"}']),
        ({"guided_choice": ["a/b", 'c"']}, ["a/b", 'c"']),
        ({"guided_regex": "(a/b|c\\/d\n)"}, ["a/b", "c/d\n"]),
    ]
    for wish, legal in wishes:
        asked = {**ASKED, "logit_bias": ends_at_once(engine), "extra_body": wish, "max_tokens": 100}
        content, _, _, reason = whole = parts(client.chat.completions.create(**asked))
        assert content.replace(" ", "").replace("\n", "") in [text.replace("\n", "") for text in legal]
        assert reason == "stop"
        assert joined(client.chat.completions.create(**asked, stream=True)) == whole


@pytest.mark.slow
def test_no_end_token_shows_where_tags_are_special_tokens(thinking):
    client, engine = thinking
    bias = {str(engine.tokenizer.token_id("</think>")): 20, str(engine.tokenizer.eos_token_id): 19.5}
    for seed in range(5):
        answer = client.chat.completions.create(**{**ASKED, "seed": seed, "max_tokens": 40, "logit_bias": bias})
        content, reasoning, _, reason = parts(answer)
        assert reason == "stop"
        assert "</s>" not in content + reasoning
