"""Ollama's API with Ollama's own client."""

import json
import re
import shutil

import httpx2
import ollama
import pytest

from ostinato.demo import checkpoint_dir
from ostinato.engine.cache_files import checkpoint_digest
from tests.serve.test_serve_images import drawn, url_of
from tests.serve.test_serve_images import served as seeing  # noqa: F401 (a fixture)
from tests.support.chat_templates import HERMES, TAGS, THINKING
from tests.support.patience import PATIENCE
from tests.support.serving import serving
from tests.support.text_checkpoint import text_checkpoint

QUESTION = "Ava has 17 apples and buys 25 more. How many apples has she?"
USER = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0, "num_predict": 64}
HM = [{"role": "user", "content": "Hm?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}


def of(served):
    return ollama.Client(host=served.url)


def post(served, path, **body):
    return httpx2.post(f"{served.url}/api/{path}", json=body, timeout=PATIENCE)


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
        yield served


def test_a_chat_is_the_answer_of_chat_completions(served, client):
    answer = client.chat("demo", USER, options=GREEDY)
    chat = served.client().chat.completions.create(model="demo", messages=USER, temperature=0, max_tokens=64)
    assert (answer.message.role, answer.message.content) == ("assistant", chat.choices[0].message.content)
    assert (answer.model, answer.done, answer.done_reason) == ("demo", True, "stop")
    assert (answer.prompt_eval_count, answer.eval_count) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert answer.total_duration >= answer.eval_duration > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", answer.created_at)


def test_a_stream_is_lines_of_json_that_make_the_whole_answer(served, client):
    whole = client.chat("demo", USER, options=GREEDY)
    parts = list(client.chat("demo:latest", USER, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", whole.eval_count)
    # Without `stream`, an answer is a stream.
    answer = post(served, "chat", messages=USER, options=GREEDY)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == whole.message.content


def test_a_prompt_is_answered_as_a_question_or_continued_as_it_is(served, client):
    chat = client.chat("demo", [{"role": "system", "content": "Be brief."}, *USER], options=GREEDY)
    answer = client.generate("demo", QUESTION, system="Be brief.", options=GREEDY)
    assert (answer.response, answer.done_reason) == (chat.message.content, "stop")
    assert "".join(part.response for part in client.generate("demo", QUESTION, options=GREEDY, stream=True))
    raw = client.generate("demo", f"Q: {QUESTION}\nA:", raw=True, options=GREEDY)
    text = served.client().completions.create(model="demo", prompt=f"Q: {QUESTION}\nA:", temperature=0, max_tokens=64)
    assert raw.response == text.choices[0].text


def test_options_are_sampling_parameters(served, client):
    cut = client.chat("demo", USER, options={"temperature": 0, "num_predict": 3})
    assert (cut.done_reason, cut.eval_count) == ("length", 3)
    stopped = client.chat("demo", USER, options={**GREEDY, "stop": ["="]})
    assert "=" not in stopped.message.content
    seeded = {"temperature": 1.0, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.1}
    seeded |= {"num_predict": 16, "presence_penalty": 0.5, "frequency_penalty": 0.5, "num_gpu": 99, "num_thread": 1}
    theirs = {"temperature": 1, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    more = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
    chat = served.client().chat.completions.create(
        model="demo", messages=USER, max_tokens=16, **theirs, extra_body=more
    )
    assert client.chat("demo", USER, options=seeded).message.content == chat.choices[0].message.content


def test_num_ctx_bounds_prompt_and_output_and_is_checked_against_the_plan(client):
    whole = client.chat("demo", USER, options={"temperature": 0})
    most = whole.prompt_eval_count + 4
    cut = client.chat("demo", USER, options={"temperature": 0, "num_ctx": most})
    assert (cut.done_reason, cut.eval_count) == ("length", 4)
    with pytest.raises(ollama.ResponseError, match="start the server with --max-model-len 100000"):
        client.chat("demo", USER, options={"num_ctx": 100_000})
    with pytest.raises(ollama.ResponseError, match="maximum context length is 8 tokens"):
        client.chat("demo", USER, options={"num_ctx": 8})


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_form_is_enforced(client, path):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    given = {"messages": USER} if path == "chat" else {"prompt": QUESTION}
    for form in (schema, "json"):
        answer = getattr(client, path)("demo", **given, format=form, options={**GREEDY, "num_predict": 200})
        text = answer.message.content if path == "chat" else answer.response
        if form == schema:
            assert json.loads(text) in ({"n": 1}, {"n": 2})
        else:
            assert text.startswith("{")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
def test_a_call_is_whole_and_its_answer_comes_back(stream):
    model = str(text_checkpoint(chat_template=HERMES))
    with serving({"served_model_name": "tiny"}, model=model, max_num_seqs=4, max_model_len=512) as served:
        body = {"messages": HM, "tools": [WEATHER], "tool_choice": "required", "stream": stream}
        body["options"] = {"seed": 1, "temperature": 1, "num_predict": 300}
        lines = [json.loads(line) for line in post(served, "chat", **body).text.splitlines()]
        calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
        assert calls[0]["function"]["name"] == "weather"
        assert calls[0]["function"]["arguments"] in ({"city": "Rome"}, {"city": "Oslo"})
        assert lines[-1]["done_reason"] in ("stop", "length")
        back = [
            *HM,
            {"role": "assistant", "content": "", "tool_calls": [{"function": calls[0]["function"]}]},
            {"role": "tool", "content": "sun", "tool_name": "weather"},
        ]
        again = of(served).chat("tiny", back, tools=[WEATHER], options={"num_predict": 4})
        assert again.done
        assert again.eval_count <= 4


def test_thinking_is_a_field_of_its_own(thinking):
    client, options = of(thinking), {"seed": 1, "temperature": 1, "num_predict": 400}
    answer = client.chat("tiny", HM, format="json", options=options, think=True)
    assert answer.message.thinking
    parts = list(client.chat("tiny", HM, format="json", options=options, think=True, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == answer.message.thinking
    assert "".join(part.message.content for part in parts) == answer.message.content
    assert not client.chat("tiny", HM, options=options, think=False).message.thinking


def test_a_model_that_does_not_think_says_so(client):
    with pytest.raises(ollama.ResponseError, match="shows no form of thinking"):
        client.chat("demo", USER, think=True)


def test_images_are_taken_where_the_model_takes_them(seeing):  # noqa: F811
    url = url_of(drawn(40, 48))
    message = {"role": "user", "content": "what", "images": [url.partition(",")[2]]}
    answer = of(seeing).chat("seer", [message], options={"temperature": 0, "num_predict": 8})
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what"}]
    chat = seeing.client().chat.completions.create(
        model="seer", max_tokens=8, messages=[{"role": "user", "content": parts}], temperature=0
    )
    assert answer.message.content == chat.choices[0].message.content
    assert "vision" in of(seeing).show("seer").capabilities


def test_embeddings_are_those_of_openais_api(served, client):
    texts = ["apples", "pears and plums"]
    theirs = served.client().embeddings.create(model="demo", input=texts, encoding_format="float")
    answer = client.embed("demo", texts)
    assert [list(vector) for vector in answer.embeddings] == [each.embedding for each in theirs.data]
    assert answer.prompt_eval_count == theirs.usage.prompt_tokens
    assert list(client.embeddings("demo", "apples").embedding) == theirs.data[0].embedding
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed("demo", "apples " * 9000, truncate=False)
    assert client.embed("demo", "apples " * 9000).embeddings


def test_num_ctx_bounds_what_a_vector_is_of(client):
    whole, cut = (client.embed("demo", QUESTION, options={"num_ctx": num_ctx}) for num_ctx in (64, 4))
    assert cut.prompt_eval_count == 4 < whole.prompt_eval_count
    assert whole.embeddings == client.embed("demo", QUESTION).embeddings != cut.embeddings


def test_an_empty_schema_is_any_json(client):
    answer = client.chat("demo", USER, options=GREEDY | {"num_predict": 4}, format={})
    assert re.match(r'[-{\["tfn\d]', answer.message.content)


def test_the_model_is_listed_and_described(served, client):
    [listed] = client.list().models
    [running] = client.ps().models
    assert (listed.model, running.model) == ("demo", "demo")
    assert listed.size == served.engine.plan.memory.weights
    assert (listed.details.family, listed.details.parameter_size) == ("nemotron_h", "3.3M")
    shown = client.show("demo")
    assert shown.modelinfo["nemotron_h.context_length"] == served.engine.plan.settings.max_model_len
    assert {"completion", "embedding"} <= set(shown.capabilities)
    assert shown.template == served.engine.chat_template.as_stored
    assert httpx2.get(f"{served.url}/api/version", timeout=PATIENCE).json() == {
        "version": httpx2.get(f"{served.url}/version", timeout=PATIENCE).json()["version"]
    }


def test_the_digest_is_of_the_checkpoint_wherever_it_is(served, client, tmp_path):
    [listed], [loaded] = client.list().models, client.ps().models
    shown = post(served, "show", model="demo").json()
    assert re.fullmatch("[0-9a-f]{64}", listed.digest)
    assert listed.digest == loaded.digest == shown["digest"] == checkpoint_digest(checkpoint_dir("demo"))
    copy = shutil.copytree(checkpoint_dir("demo"), tmp_path / "copy")
    assert checkpoint_digest(copy) == listed.digest
    (copy / "config.json").write_text("{}")
    assert checkpoint_digest(copy) != listed.digest


def test_the_digest_stays_when_the_files_have_gone(tmp_path):
    copy = shutil.copytree(checkpoint_dir("demo"), tmp_path / "copy")
    digest = checkpoint_digest(copy)
    with serving({"served_model_name": "tiny"}, model=str(copy), max_num_seqs=1) as served:
        shutil.rmtree(copy)
        [listed], shown = of(served).list().models, post(served, "show", model="tiny").json()
    assert listed.digest == shown["digest"] == digest


def test_without_its_file_a_checkpoint_is_identified_by_its_name(tmp_path):
    digests = {checkpoint_digest(tmp_path / name) for name in ("a.gguf", "b.gguf")}
    assert len(digests) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)


def test_a_request_without_a_prompt_says_that_the_model_is_loaded(client):
    for answer in (client.generate("demo"), client.chat("demo", []), client.generate("demo", keep_alive=0)):
        assert (answer.done, answer.done_reason) == (True, "load")


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (
            "chat",
            {"model": "llama3", "messages": USER},
            "the model 'llama3' is not served here; this server has 'demo'",
        ),
        ("chat", {"messages": USER, "options": {"mirostat": 2}}, "options.mirostat: not served; give temperature"),
        ("chat", {"messages": USER, "options": {"temperatur": 2}}, "temperatur"),
        ("chat", {"messages": USER, "options": {"num_predict": 0}}, "options.num_predict should be at least 1, or -1"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["?"]}]}, "messages[0].images[0]: "),
        ("generate", {"prompt": "x", "system": "s", "images": ["?"]}, "images[0]: "),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "args": 1}}]}]},
            "unknown parameter: messages[0].tool_calls[0].function.args; known are index, name, arguments",
        ),
        ("chat", {"messages": USER, "options": {"repeat_penalty": 0}}, "options.repeat_penalty=0.0: should be"),
        ("chat", {"messages": USER, "temperature": -1}, "temperature=-1.0: should be"),
        ("chat", {"messages": USER, "max_tokens": 3}, "unknown parameter: max_tokens; here it is options.num_predict"),
        ("chat", {"messages": USER, "options": {"max_tokens": 3}}, "options.max_tokens; here it is num_predict"),
        ("embed", {"input": "x", "options": {"num_ctx": 10**9}}, "options.num_ctx is 1000000000, and this server"),
        ("embed", {"input": "x", "options": {"temperature": 1}}, "options.temperature has no effect on a vector"),
        ("embed", {"input": [5, 6, 7], "truncate": False, "options": {"num_ctx": 2}}, "maximum context length is 2"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0]"),
        ("chat", {"messages": USER, "options": {"top_p": 3.0}}, "top_p"),
        ("chat", {"messages": USER, "temperature": 0, "options": {"temperature": 0}}, "give one"),
        ("generate", {"prompt": "x", "context": [1, 2]}, "context: not served; give the conversation so far"),
        ("generate", {"prompt": "x", "raw": True, "system": "s"}, "raw is asked for"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix: not served"),
        ("embed", {"input": []}, "input is an empty list"),
        ("embeddings", {"prompt": ["x"]}, "prompt should be a string"),
        ("show", {"model": "llama3"}, "is not served here"),
    ],
)
def test_what_is_wrong_is_told_in_ollamas_form(served, path, body, says):
    answer = post(served, path, **body)
    assert answer.status_code in (400, 404)
    assert answer.json().keys() == {"error"}
    assert says in answer.json()["error"]


def test_a_body_as_curl_sends_it_is_read_unless_a_web_page_sends_it(served):
    body = json.dumps({"prompt": "x", "stream": False, "options": {"num_predict": 1}})
    as_curl = {"content-type": "application/x-www-form-urlencoded"}

    def status(path: str, **more: str) -> int:
        return httpx2.post(f"{served.url}{path}", content=body, headers=as_curl | more, timeout=PATIENCE).status_code

    assert status("/api/generate") == 200
    assert status("/api/generate", origin="https://example.org") == 415
    assert status("/api/generate", origin="null") == 415
    assert status("/api/generate", **{"sec-fetch-site": "cross-site"}) == 415
    assert status("/api/generate", referer="https://example.org/") == 415
    assert status("/api/generate", **{"content-type": "text/plain"}) == 415
    assert status("/v1/completions") == 415


def test_an_error_within_a_stream_is_a_line(served):
    served.probe.delay = 0.05
    body = {"messages": USER, "options": {"num_predict": 400}, "timeout": 3, "ignore_eos": True}
    *lines, last = post(served, "chat", **body).text.splitlines()
    served.probe.reset()
    assert not json.loads(lines[-1])["done"]
    assert "did not end within its deadline of 3 seconds" in json.loads(last)["error"]


@pytest.mark.slow
def test_what_pulls_and_makes_models_says_what_there_is(served):
    with pytest.raises(ollama.ResponseError, match=r"/api/pull is not served; of Ollama's API there are /api/chat,"):
        of(served).pull("llama3")
