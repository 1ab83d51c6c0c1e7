"""What clients are told of what went wrong: in words of the API alone, and the same whoever asked before them."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from ostinato.config import EngineConfig
from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.observe.request_record import ResponseCounts
from ostinato.serve.api.openapi_page import DOCUMENT
from ostinato.serve.app import make_api
from ostinato.serve.chat.answer_formats import THINK
from ostinato.serve.chat.answer_parser import detect_formats
from ostinato.serve.chat.conversation import template_kwargs
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.other_paths import PATHS
from ostinato.serve.settings import ServeSettings
from tests.support.chat_templates import THINKING
from tests.support.patience import PATIENCE
from tests.support.serving import serving
from tests.support.told import public_names, strange_words

PROMPT = [5, 6, 7, 8]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
ASKED = [{"role": "user", "content": "2 + 2 ="}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**more: Any) -> tuple[str, Any]:
    return CHAT, {"messages": ASKED, "max_tokens": 2, **more}


def completion(**more: Any) -> tuple[str, Any]:
    return COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, **more}


WRONG: dict[str, tuple[str, Any]] = {
    "no JSON": (CHAT, b'{"messages": '),
    "no object": (CHAT, []),
    "no messages": (CHAT, {}),
    "another model": chat(model="gpt-none"),
    "an unknown field": chat(temprature=1),
    "a number as text": chat(max_tokens="many"),
    "a temperature below zero": chat(temperature=-1),
    "no role": chat(messages=[{"content": "a"}]),
    "an unknown role": chat(messages=[{"role": "robot", "content": "a"}]),
    "an unknown part": chat(messages=[{"role": "user", "content": [{"type": "smell"}]}]),
    "a picture for a model of text": chat(messages=[{"role": "user", "content": [PICTURE]}]),
    "a tool without a name": chat(tools=[{"type": "function", "function": {}}]),
    "a choice of no tool": chat(tool_choice="required"),
    "a choice of another tool": chat(tools=[FUNCTION], tool_choice={"type": "function", "function": {"name": "g"}}),
    "a schema that is none": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "thing"}}}
    ),
    "variables of no template": chat(chat_template_kwargs={"add_generation_prompt": False, "tokenize": False}),
    "a variable that the template does not know": chat(chat_template_kwargs={"bogus": 1}),
    "a variable of no template of messages": (
        MESSAGES,
        {"model": "demo", "max_tokens": 2, "messages": ASKED, "chat_template_kwargs": {"bogus": 1}},
    ),
    "a variable of no template of responses": (RESPONSES, {"input": "a", "chat_template_kwargs": {"max_tokens": 1}}),
    "options of a stream that is none": chat(stream_options={"include_usage": True}),
    "too many log-probabilities": chat(logprobs=True, top_logprobs=10**6),
    "a bias for no token": chat(logit_bias={"1000000": 1}),
    "a bias for what is no token id": chat(logit_bias={"word": 1}),
    "a seed that is too large": chat(seed=2**64),
    "a least above the most": chat(min_tokens=5),
    "what is stored": chat(store=True),
    "a form as text": chat(response_format="json_object"),
    "more than may be unfinished": completion(n=100),
    "a prompt without tokens": completion(prompt=[]),
    "token ids of no vocabulary": completion(prompt=[10**6]),
    "a prompt with no room": completion(prompt=PROMPT * 100),
    "an expression that is none": completion(guided_regex="["),
    "a grammar that is none": completion(guided_grammar="start: ("),
    "a priority without its policy": completion(priority=3),
    "a deadline of no time": completion(timeout=-1),
    "a deadline too short": completion(max_tokens=100, ignore_eos=True, timeout=1e-6),
    "a response of nothing": (RESPONSES, {"input": 5}),
    "a response to none": (RESPONSES, {"input": "a", "previous_response_id": "resp_none"}),
    "a message without its length": (MESSAGES, {"messages": ASKED}),
    "a message of an unknown block": (MESSAGES, {"max_tokens": 2, "messages": [{"role": "user", "content": [{}]}]}),
    "nothing to embed": (EMBEDDINGS, {"input": []}),
    "an unknown form of embeddings": (EMBEDDINGS, {"input": "a", "encoding_format": "base65"}),
    "no such page": ("/v1/nothing", {}),
}
"""Where it goes, and what."""


@pytest.fixture(scope="module")
def served():
    with serving({"max_waiting": 1}, max_num_seqs=2, graph_mode="none", max_model_len=256) as served:
        yield served


@pytest.fixture(scope="module")
def public() -> frozenset[str]:
    api = make_api(Lifecycle(EngineConfig(model="demo"), ServeSettings()), ResponseCounts()).app
    return public_names(api.openapi()) | {DOCUMENT}


def post(served: Any, path: str, body: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    return httpx2.post(f"{served.url}{path}", content=content, headers=headers, timeout=PATIENCE)


def told(answer: httpx2.Response) -> str:
    message = answer.json()["error"]["message"]
    assert isinstance(message, str)
    return message


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_in_words_of_the_api_and_the_same_after_other_requests(served, public, name):
    path, body = WRONG[name]
    answer = post(served, path, body)
    assert 400 <= answer.status_code < 500 or answer.status_code == 504, answer.text
    assert not strange_words(told(answer), public, json.dumps(body) if not isinstance(body, bytes) else ""), answer.text
    assert post(served, *completion()).status_code == 200
    assert post(served, path, body).json() == answer.json()


@pytest.mark.parametrize(
    ("name", "param", "words"),
    [
        ("a bias for no token", "logit_bias", "between 0 and 767"),
        ("a bias for what is no token id", "logit_bias", "logit_bias='word': should be a whole number"),
        ("a seed that is too large", "seed", "less than 18446744073709551616"),
        ("a least above the most", "min_tokens", "min_tokens (5) is above max_tokens (2)"),
        ("what is stored", "store", "store: not served; nothing is stored"),
        ("a form as text", "response_format", "response_format: should be an object"),
        ("a variable that the template does not know", "chat_template_kwargs.bogus", "bogus is no variable of this"),
        ("a variable of no template of responses", "chat_template_kwargs.max_tokens", "give max_tokens beside"),
    ],
)
def test_the_field_that_is_wrong_is_named_beside_the_message(served, name, param, words):
    error = post(served, *WRONG[name]).json()["error"]
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ],
)
def test_a_field_that_the_template_would_ignore_is_refused_by_name(served, path, more, param):
    error = post(served, path, asking(path, **more)).json()["error"]
    assert param in (error.get("param") or error["message"])
    assert "is no variable of this model's chat template" in error["message"]
    nothing = {**more, **({"reasoning_effort": "none"} if path == CHAT else {})}
    nothing.pop("verbosity", None)
    if path == CHAT:
        assert post(served, path, asking(path, **nothing)).status_code == 200


ALWAYS = "{{ messages[0].content }}{% if add_generation_prompt %}<think>{% endif %}"
OFF: list[dict[str, Any]] = [{"thinks": False}, {"reasoning_effort": "none"}]


def variables_of(template: str, thinks: bool | None = None, reasoning_effort: str | None = None) -> dict[str, Any]:
    chat_template = ChatTemplate({"default": template})
    text: Any = SimpleNamespace(chat_template=chat_template, formats=detect_formats(chat_template))
    return template_kwargs(text, None, reasoning_effort, thinks=thinks, tools=())


@pytest.mark.parametrize("asked", OFF)
def test_a_model_that_always_thinks_refuses_by_name_not_to(asked):
    assert detect_formats(ChatTemplate({"default": ALWAYS})).reasoning == THINK
    with pytest.raises(ApiError, match="sets enable_thinking, and enable_thinking is no variable") as caught:
        variables_of(ALWAYS, **asked)
    assert caught.value.param == ("thinking" if "thinks" in asked else "reasoning_effort")


@pytest.mark.parametrize("asked", OFF)
@pytest.mark.parametrize("template", [THINKING, "{{ messages[0].content }}"])
def test_a_model_that_can_do_without_thinking_is_asked_to(template, asked):
    assert variables_of(template, **asked)["enable_thinking"] is False


def test_a_template_that_reads_the_effort_takes_none():
    assert variables_of(ALWAYS + "{{ reasoning_effort }}", reasoning_effort="none")["reasoning_effort"] == "none"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"role": "nobody", "content": "hi"}]},
        {"max_tokens": "many"},
        {"max_tokens": 1.5},
        {"n": 0},
        {"top_p": None, "stream": "yes"},
        {"stop": 3},
        {"logit_bias": []},
        {"timeout": -1},
        {"stream_options": {"include_usage": "yes"}},
    ],
)
def test_a_client_is_told_in_our_words_what_is_wrong(served, body):
    asked = {"messages": ASKED, **body} if body else body
    message = told(post(served, CHAT, asked))
    assert not re.search("[Ii]nput should|[Ff]ield required|[Vv]alue error|a valid|unable to|greater than", message)


@pytest.mark.parametrize(
    ("path", "body", "advice"),
    [
        (CHAT, {"message": ASKED}, "unknown parameter: message; did you mean messages?"),
        ("/tokenize", {"content": "a"}, "unknown parameter: content; here it is prompt"),
        ("/detokenize", {"ids": [1]}, "unknown parameter: ids; here it is tokens"),
        ("/v1/embeddings", {"text": "a"}, "unknown parameter: text; here it is input"),
        (COMPLETIONS, {}, "prompt: is required"),
    ],
)
def test_a_mistyped_field_is_named_rather_than_the_one_that_is_missing(served, path, body, advice):
    assert told(post(served, path, body)) == advice


NEVER = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
"""A schema that no guide enforces."""
OLLAMA = "/api/chat"


def asking(path: str, **more: Any) -> dict[str, Any]:
    """Return a short request of each API, with further fields."""
    short: dict[str, dict[str, Any]] = {
        CHAT: {"messages": ASKED, "max_completion_tokens": 4},
        COMPLETIONS: {"prompt": PROMPT, "max_tokens": 4},
        RESPONSES: {"input": "a", "max_output_tokens": 4},
        MESSAGES: {"messages": ASKED, "max_tokens": 4},
        OLLAMA: {"messages": ASKED, "stream": False},
    }
    return short[path] | more


def form(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields by which each API asks for JSON of a schema."""
    return {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        COMPLETIONS: {"structured_outputs": {"json": schema}},
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        OLLAMA: {"format": schema},
    }


SCHEMA_FIELD = {
    CHAT: "response_format.json_schema.schema",
    COMPLETIONS: "structured_outputs.json",
    RESPONSES: "text.format.schema",
    MESSAGES: "output_config.format.schema",
    OLLAMA: "format",
}


def tool(path: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a demand to call a tool, in each API's form."""
    if path == MESSAGES:
        return {"tools": [{"name": "f", "input_schema": parameters}], "tool_choice": {"type": "any"}}
    of_function = {"name": "f", "parameters": parameters}
    flat = {"type": "function", **of_function}
    return {
        "tools": [flat if path == RESPONSES else {"type": "function", "function": of_function}],
        "tool_choice": "required",
    }


PARAMETERS_FIELD = {
    CHAT: "tools[0].function.parameters",
    RESPONSES: "tools[0].parameters",
    MESSAGES: "tools[0].input_schema",
    OLLAMA: "tools[0].function.parameters",
}
NAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    **{
        f"a schema at {path}": (path, form(NEVER)[path], f"{name}: $.properties.a.not cannot be enforced")
        for path, name in SCHEMA_FIELD.items()
    },
    **{
        f"a pattern at {path}": (path, form({"type": "string", "pattern": "("})[path], f"{name} cannot be compiled: ")
        for path, name in SCHEMA_FIELD.items()
    },
    **{
        f"a tool at {path}": (path, tool(path, NEVER), f"{name}: $.properties.a.not cannot be enforced")
        for path, name in PARAMETERS_FIELD.items()
    },
    **{
        f"a form without an end at {path}": (
            path,
            {**form({"type": "object"})[path], "ignore_eos": True},
            f"{name} says where the output ends, and ignore_eos that it does not",
        )
        for path, name in SCHEMA_FIELD.items()
    },
    "no choice": (COMPLETIONS, {"guided_choice": []}, "guided_choice: it should have at least one text"),
    "a long pattern": (COMPLETIONS, {"guided_regex": "a" * 5000}, "guided_regex: it has 5000 characters, and may have"),
    "stop sequences": (MESSAGES, {"stop_sequences": [""]}, "stop_sequences=['']: an empty string would stop at once"),
    "two options": (
        OLLAMA,
        {"options": {"temperature": -1, "repeat_penalty": 0}},
        "options.temperature=-1.0: should be at least 0; options.repeat_penalty=0.0: ",
    ),
    "a least of a chat": (CHAT, {"min_tokens": 9}, "min_tokens (9) is above max_completion_tokens (4)"),
    "a least of a response": (RESPONSES, {"min_tokens": 9}, "min_tokens (9) is above max_output_tokens (4)"),
    "a least of Ollama's": (
        OLLAMA,
        {"min_tokens": 9, "options": {"num_predict": 4}},
        "min_tokens (9) is above options.num_predict (4)",
    ),
    "another tool of a response": (
        RESPONSES,
        {**tool(RESPONSES, {}), "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name: no tool is named 'g'",
    ),
    "a tool choice of a response": (
        RESPONSES,
        {**tool(RESPONSES, {}), "tool_choice": {"type": "function", "name": 1}},
        'tool_choice must be "none", "auto", "required", {"type": "function", "name": ...} or of the type ',
    ),
    "allowed tools of a response": (
        RESPONSES,
        {**tool(RESPONSES, {}), "tool_choice": {"type": "allowed_tools", "mode": "any", "tools": []}},
        'tool_choice of the type allowed_tools has "mode": "auto" or "required", "tools": [{"type": "function", ',
    ),
}
"""What is asked, and what the message begins with."""


@pytest.mark.parametrize("name", NAMED)
def test_an_error_names_the_fields_of_the_api_that_was_asked(served, name):
    path, more, begins = NAMED[name]
    answer = post(served, path, asking(path, **more))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if path == OLLAMA else error["message"]
    assert message.startswith(begins), message
    if path not in (OLLAMA, MESSAGES):
        assert begins.startswith(error["param"]), error


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_context_ends_before_max_tokens_says_so_in_each_api(served, stream):
    """A limit larger than the context is no error, and which of the two ended an answer is told."""
    more = {"ignore_eos": True, "stream": stream}
    limits = {
        CHAT: {"messages": ASKED, "max_tokens": 100_000},
        COMPLETIONS: {"prompt": PROMPT, "max_tokens": 100_000},
        RESPONSES: {"input": "2 + 2 =", "max_output_tokens": 100_000},
        MESSAGES: {"messages": ASKED, "max_tokens": 100_000, "model": "demo"},
    }
    full = {MESSAGES: "model_context_window_exceeded"}
    for path, body in limits.items():
        said = post(served, path, {**body, **more}).text
        assert full.get(path, '"stop_reason":"max_model_len"') in said, path
    for path, body in limits.items():
        short = {name: 2 if value == 100_000 else value for name, value in body.items()}
        said = post(served, path, {**short, **more}).text
        assert not {"max_model_len", "exceeded"} & set(re.findall("[a-z_]+", said)), path


@pytest.mark.parametrize(
    ("path", "meant"), [("/chat/completions", CHAT), ("/v1/v1/completions", COMPLETIONS), ("/none", None)]
)
def test_a_path_that_is_none_is_answered_with_those_that_are(served, path, meant):
    answer = post(served, path, {})
    assert answer.status_code == 404
    nearest = "r" if meant is None else f"did you mean {meant}? R"
    assert told(answer).startswith(f"there is no {path} here; {nearest}equests go to {CHAT}, {COMPLETIONS}, ")
    assert told(answer).endswith("/openapi.json describes all")


@pytest.mark.parametrize(
    ("path", "here"),
    [
        ("/props", "GET /plan, and /about"),
        (
            "/score",
            "none, as there are no classifiers and no rerankers; vectors of POST /v1/embeddings can be compared",
        ),
    ],
)
def test_a_path_of_another_engine_is_answered_with_what_takes_its_place(served, path, here):
    answers = [post(served, path, {}), httpx2.get(f"{served.url}{path}", timeout=PATIENCE)]
    assert [told(answer) for answer in answers] == [f"there is no {path} here; in its place: {here}"] * 2


def test_no_path_of_another_engine_is_served_here(served):
    described = httpx2.get(f"{served.url}/openapi.json", timeout=PATIENCE).json()["paths"]
    theirs = {path for table in PATHS.values() for paths in table.values() for path in paths.split()}
    assert not theirs & described.keys()
    named = {path for table in PATHS.values() for here in table for path in re.findall("/[a-z0-9_/]+", here)}
    assert named <= {*described, "/about"}


@pytest.mark.parametrize("path", ["/v1", "/doc", "/v1/", "/model"])
def test_a_page_that_is_none_is_answered_with_those_that_are(served, path):
    answer = httpx2.get(f"{served.url}{path}", timeout=PATIENCE)
    assert answer.status_code == 404
    listed = "GET is for /, /docs, /openapi.json, /health, "
    assert re.match(rf"there is no {path} here; (did you mean \S+\? )?{listed}", told(answer))
    assert ", /v1/models, /v1/models/{name}, " in told(answer)
    assert f"requests go to {CHAT}, " in told(answer)


def test_a_page_that_is_an_endpoint_but_for_its_beginning_is_named(served):
    assert f" here; did you mean {CHAT}?" in told(httpx2.get(f"{served.url}/chat/completions", timeout=PATIENCE))


NULLS = {"priority": None, "timeout": None, "cache_salt": None}


@pytest.mark.parametrize("stream", [False, True])
def test_null_in_a_field_is_as_if_it_were_left_out_in_each_api(served, stream):
    options = {"stream_options": {"include_usage": None, "continuous_usage_stats": None}} if stream else {}
    bodies: list[tuple[str, dict[str, Any]]] = [
        chat(**options, structured_outputs={"json_object": False}),
        completion(**options),
        (RESPONSES, {"input": "a", "max_output_tokens": 2, **options}),
        (MESSAGES, {"messages": ASKED, "max_tokens": 2}),
    ]
    for path, body in bodies:
        assert post(served, path, {**body, **NULLS, "stream": stream}).status_code == 200, path
    assert post(served, EMBEDDINGS, {"input": "a", **NULLS}).status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "br, gzip"])
def test_a_compressed_body_is_refused_by_its_header(served, coding):
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    answer = httpx2.post(f"{served.url}{CHAT}", content=b"{}", headers=headers, timeout=PATIENCE)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert told(answer).endswith(f"without the header Content-Encoding: {coding}")
    plain = {**headers, "Content-Encoding": "Identity"}
    assert "messages: is required" in told(httpx2.post(answer.url, content=b"{}", headers=plain, timeout=PATIENCE))


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/pull"), ("GET", "/api/blobs"), ("DELETE", "/api/x")])
def test_a_client_of_ollamas_is_told_in_its_own_form_where_to_go(served, method, path):
    answer = httpx2.request(method, f"{served.url}{path}", timeout=PATIENCE)
    assert answer.status_code == 404
    assert answer.json().keys() == {"error"}
    assert answer.json()["error"].startswith(f"{path} is not served; of Ollama's API there are /api/chat, ")
    assert answer.json()["error"].endswith(f"For clients of OpenAI's the base_url is {served.url}/v1")


def test_the_api_is_a_page_that_loads_nothing_from_elsewhere(served):
    answer = httpx2.get(f"{served.url}/docs", timeout=PATIENCE)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    document = httpx2.get(f"{served.url}/openapi.json", timeout=PATIENCE).json()
    for path, operations in document["paths"].items():
        assert all(f"<code>{method.upper()} {path}</code></h2>" in answer.text for method in operations)
    assert "<code>temperature</code>" in answer.text
    targets = set(re.findall('(?:href|src)="([^"]*)"', answer.text))
    assert {target for target in targets if not target.startswith("#")} == {
        "openapi.json",
        "page/icon.svg",
        "page/styles/base.css",
        "page/styles/docs.css",
    }
    assert all(f'id="{target[1:]}"' in answer.text for target in targets if target.startswith("#"))


@pytest.mark.parametrize("path", ["/v1/models", "/", "/health", "/metrics", "/openapi.json", "/page/dom.js", "/none"])
def test_a_head_is_answered_as_a_get_without_its_body(served, path):
    # A connection of its own: bytes of a body would be read as the next answer.
    with httpx2.Client(timeout=PATIENCE) as client:
        head, whole = client.head(f"{served.url}{path}"), client.get(f"{served.url}{path}")
    assert head.status_code == whole.status_code
    assert head.content == b""
    ignored = {"x-request-id", "date", *(("content-length",) if path == "/metrics" else ())}
    for name in head.headers.keys() | whole.headers.keys():
        assert name in ignored or head.headers.get(name) == whole.headers.get(name), name
    assert int(head.headers["content-length"]) > 0


@pytest.mark.parametrize("path", ["/v1/models", CHAT])
def test_a_path_with_a_slash_too_many_is_told_the_right_one(served, path):
    answer = httpx2.request("GET" if path != CHAT else "POST", f"{served.url}{path}/", json={}, timeout=PATIENCE)
    assert answer.status_code == 404
    assert f"there is no {path}/ here" in told(answer)
    assert f"here; did you mean {path}?" in told(answer)


def test_a_preflight_without_cors_is_told_which_setting_allows_it(served):
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    answer = httpx2.options(f"{served.url}{CHAT}", headers=headers, timeout=PATIENCE)
    assert answer.status_code == 403
    assert "--cors-origin https://page.example" in told(answer)
    assert answer.json()["error"]["code"] == "cors_origin"
    assert "--cors-origin https://example.org" in told(
        httpx2.options(f"{served.url}{CHAT}", headers={**headers, "Origin": "null"}, timeout=PATIENCE)
    )


def conversation(tokens: int) -> Any:
    """One of so many tokens, in the embedded model's template: a word is one."""
    return [{"role": "user", "content": " apples" * (tokens - 2)}]


LONG = {
    "completions": (COMPLETIONS, lambda tokens: {"prompt": [5] * tokens, "max_tokens": 1}, "prompt", 255),
    "chat": (CHAT, lambda tokens: {"messages": conversation(tokens), "max_tokens": 1}, "messages", 255),
    "responses": (RESPONSES, lambda tokens: {"input": conversation(tokens), "max_output_tokens": 1}, "input", 255),
    "messages": (MESSAGES, lambda tokens: {"messages": conversation(tokens), "max_tokens": 1}, None, 255),
    "embeddings": (EMBEDDINGS, lambda tokens: {"input": [5] * tokens}, "input", 256),
}
"""API -> its path, a body of so many tokens of prompt, the field that holds it, and the most tokens."""


@pytest.mark.parametrize("api", LONG)
def test_a_prompt_that_fits_is_taken_and_one_more_token_is_too_many_in_the_clients_words(served, api):
    path, body, param, most = LONG[api]
    assert post(served, path, body(most)).status_code == 200
    for tokens, is_counted in ((most + 1, True), (5000, False)):
        answer = post(served, path, body(tokens))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        if api == "messages":
            assert error["message"].startswith("prompt is too long: ")
            count = int(error["message"].split()[4])
            assert f"{count} tokens > {most} maximum" in error["message"]
            assert count == tokens if is_counted else most < count
            continue
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert error["message"].startswith("This model's maximum context length is 256 tokens. However, your ")
        assert f"Please reduce the length of the {param} to {most} tokens" in error["message"]
        if is_counted:
            assert f"your {param} resulted in {tokens} tokens." in error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_the_error_of_a_long_prompt_is_the_same_from_a_worker_and_in_a_stream(served, stream):
    answer = post(served, *completion(prompt=[5] * 1500, stream=stream))
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "resulted in 1500 tokens" in told(answer)


UNKNOWN = {
    "max_token": "did you mean max_tokens?",
    "topP": "did you mean top_p?",
    "repeat_penalty": "here it is repetition_penalty",
    "n_predict": "here it is max_tokens",
    "num_predict": "here it is max_tokens",
    "num_ctx": "here that is a setting of the server, --max-model-len",
    "options": "here that is another API, such as Ollama",
    "keep_alive": "here that is not needed",
    "enable_thinking": "here that is chat_template_kwargs",
    "content": "here it is messages",
    "guide": "here it is response_format",
    "reasoning": "here it is reasoning_effort",
    "lark": "here it is guided_regex, or guided_json: grammars are read by",
    "grammar": "here it is guided_regex, or guided_json: grammars are read by",
    "prompt": "here it is messages",
    "add_special_tokens": "here that is not served",
    "truncate_prompt_tokens": "here that is not served",
    "system": "here it is messages",
    "qqqq": "/openapi.json has all",
}
"""Unknown field of a chat -> the advice."""


def test_an_unknown_field_is_answered_with_the_one_that_is_meant(served):
    for name, advice in UNKNOWN.items():
        error = post(served, *chat(**{name: 1})).json()["error"]
        assert error["message"].startswith(f"unknown parameter: {name}; {advice}"), name
        assert (error["param"], error["code"]) == (name, "unknown_parameter")


PARTS = [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]
NESTED: dict[str, tuple[tuple[str, Any], str, str]] = {
    "an option": (
        chat(stream=True, stream_options={"include_use": True}),
        "stream_options.include_use",
        "include_usage",
    ),
    "a message": (chat(messages=[{"role": "user", "contents": "a"}]), "messages[0].contents", "content?"),
    "a part": (
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a", "texts": 1}]}]),
        "messages[0].content[0].texts",
        "text?",
    ),
    "a schema": (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schemas": {}}}),
        "response_format.json_schema.schemas",
        "schema?",
    ),
    "a block": (
        (
            MESSAGES,
            {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
        ),
        "messages[0].content[0].b",
        "known are type, text, citations",
    ),
    "an answer in messages": (
        chat(messages=[{"role": "assistant", "content": "a", "reasoning_text": "b"}]),
        "messages[0].reasoning_text",
        "did you mean reasoning_content?",
    ),
    "in responses": ((RESPONSES, {"input": "a", "max_token": 1}), "max_token", "max_output_tokens"),
    "in messages": ((MESSAGES, {"messages": ASKED, "max_tokens": 2, "stop_words": 1}), "stop_words", "stop_sequences"),
    "in completions, a field of chats": (
        (COMPLETIONS, {"prompt": "a", "tools": []}),
        "tools",
        "here that is /v1/chat/completions",
    ),
    "in embeddings": ((EMBEDDINGS, {"input": "a", "dimension": 3}), "dimension", "dimensions?"),
    "in tokenize": (("/tokenize", {"promt": "a"}), "promt", "prompt?"),
    "in tokenize, of what is known there": (
        ("/tokenize", {"prompt": "a", "add_special_token": 1}),
        "add_special_token",
        "add_special_tokens?",
    ),
    "of outputs in embeddings": ((EMBEDDINGS, {"input": "a", "n_predict": 1}), "n_predict", "known are input, "),
    "of likely tokens in messages": (
        (MESSAGES, {"messages": ASKED, "max_tokens": 2, "top_logprobs": 1}),
        "top_logprobs",
        "/openapi.json has all",
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_unknown_fields_are_answered_everywhere_with_what_is_known_there(served, name):
    (path, body), place, advice = NESTED[name]
    error = post(served, path, body).json()["error"]
    assert f"unknown parameter: {place}; " in error["message"]
    assert advice in error["message"]


STRAY: list[tuple[str, Any]] = [
    chat(colour=1, messages=[{**PARTS[0], "ts": 2}] * 3),
    completion(colour=1, stream=True, stream_options={"x": 1}),
    completion(colour=1, prompt=[5] * 1200, max_tokens=1),
    (MESSAGES, {"max_tokens": 2, "colour": 1, "messages": PARTS}),
    (RESPONSES, {"input": "a", "colour": 1, "max_output_tokens": 2, "tools": []}),
    (EMBEDDINGS, {"input": "a", "colour": 1}),
    ("/tokenize", {"prompt": "a", "colour": 1}),
]
"""Requests with fields that are unknown, at the top and inside."""


@pytest.mark.parametrize("mode", ["warn", "ignore"])
@pytest.mark.slow
def test_unknown_fields_can_be_ignored_with_a_header_and_a_log_line_or_in_silence(mode, caplog):
    with serving({"unknown_fields": mode}, max_num_seqs=2, graph_mode="none", max_model_len=2048) as other:
        for path, body in STRAY:
            caplog.clear()
            answer = post(other, path, body)
            assert answer.status_code == 200, answer.text
            names = answer.headers.get("x-ignored-fields")
            assert (names is None) == (mode == "ignore")
            lines = [line for line in caplog.messages if "unknown fields are ignored" in line]
            assert len(lines) == (mode == "warn")
            if mode == "warn":
                assert "colour" in names.split(", ")
                assert names in lines[0]
        assert names in (None, "colour")
        refused = post(other, *completion(temperature="warm", colour=1))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        some = post(other, *completion(**{f"f{number}": 1 for number in range(9)}))
        assert some.status_code == 200
        variable = post(
            other, CHAT, {"messages": ASKED, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": 0}}
        )
        assert variable.status_code == 200, variable.text
        many = post(other, *completion(**{f"f{number}": 1 for number in range(30)}))
        assert many.json()["error"]["code"] == "unknown_parameter"


def test_a_method_that_is_wrong_is_answered_with_the_right_one(served):
    answer = httpx2.get(f"{served.url}{CHAT}", timeout=PATIENCE)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert told(answer) == f"{CHAT} is asked with POST, not GET"


def test_an_error_of_the_engine_and_a_full_queue_are_told_in_words_of_the_api(served, public):
    served.probe.fail_rows = -1
    failed = post(served, *completion())
    served.probe.reset()
    served.probe.hold()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(post, served, *completion(n=3, temperature=1))
        try:
            served.unfinished(1)
            full = post(served, *completion())
        finally:
            served.probe.go()
        assert waiting.result().status_code == 200
    assert (failed.status_code, full.status_code) == (500, 429)
    for answer in (failed, full):
        assert not strange_words(told(answer), public), answer.text


@pytest.mark.parametrize(
    "message",
    [
        "the request has 7 of num_computed_tokens",
        "KeyError: 5",
        "SamplingState has no seed",
        "<object at 0x7f21>",
        "see ostinato.engine.core",
        "there is no /srv/models/config.json",
        "_admission is full",
    ],
)
def test_words_of_the_code_are_found_in_messages(public, message):
    assert strange_words(message, public)


@pytest.mark.slow
def test_fields_settings_and_what_the_client_sent_are_no_words_of_the_code(public):
    assert not strange_words("max_tokens, max_model_len, max_waiting; json_schema; tool_result", public)
    assert not strange_words("there is no tool get_weather", public, '{"name": "get_weather"}')
