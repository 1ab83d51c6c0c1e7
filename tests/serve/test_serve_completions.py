import json

import httpx2
import openai
import pytest

from tests.support.patience import PATIENCE
from tests.support.serving import events, serving

QUESTION = "Q: Ava has 17 apples and buys 25 more. How many apples has she?\nA:"


@pytest.fixture(scope="module")
def served():
    with serving(max_num_seqs=4) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.client()


def post(served, **body):
    return httpx2.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE)


def test_health_is_200_after_the_servers_own_first_step(served):
    assert httpx2.get(f"{served.url}/health", timeout=PATIENCE).status_code == 200
    assert served.stats()["steps"] >= 1


def test_a_stream_gives_the_text_and_usage_of_the_whole_answer(served):
    whole = post(served, prompt=QUESTION, max_tokens=32, temperature=0).json()
    response = post(
        served, prompt=QUESTION, max_tokens=32, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, done = events(response)
    assert done == "[DONE]"
    *pieces, usage = [json.loads(chunk) for chunk in chunks]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert pieces[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


CHAT = {"messages": [{"role": "user", "content": "Mia buys 8 boxes of 6 pencils. How many pencils is that?"}]}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": QUESTION}),
        ("chat/completions", CHAT),
        ("completions", {"prompt": ["a", "b"], "n": 2}),
    ],
    ids=["completions", "chat", "several"],
)
def test_each_event_of_a_stream_can_tell_of_the_tokens_so_far(served, path, asked):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**asked, "max_tokens": 8, "ignore_eos": True, "stream": True, "stream_options": options}
    *chunks, done = events(httpx2.post(f"{served.url}/v1/{path}", json=body, timeout=PATIENCE))
    assert done == "[DONE]"
    *pieces, last = [json.loads(chunk) for chunk in chunks]
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert 1 <= counts[0] <= counts[-1] == last["usage"]["completion_tokens"] == 8 * 2 * asked.get("n", 0.5)
    assert {piece["usage"]["prompt_tokens"] for piece in pieces} == {last["usage"]["prompt_tokens"]}
    assert all(piece["usage"]["total_tokens"] > piece["usage"]["prompt_tokens"] for piece in pieces)
    assert last["choices"] == []


def test_usage_in_each_event_needs_usage(served):
    answer = post(served, prompt=[5], stream=True, stream_options={"continuous_usage_stats": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options.continuous_usage_stats")
    plain = post(served, prompt=[5], stream=True, stream_options={"continuous_usage_stats": False})
    assert plain.status_code == 200


@pytest.fixture
def resettable(served, monkeypatch):
    allowed = served.lifecycle.settings.model_copy(update={"allow_cache_reset": True})
    monkeypatch.setattr(served.lifecycle, "settings", allowed)


def reset(served):
    return httpx2.post(f"{served.url}/reset_prefix_cache", timeout=PATIENCE)


@pytest.mark.usefixtures("resettable")
def test_the_prefix_cache_is_reset_where_a_setting_allows_it(served):
    body = {"prompt": QUESTION, "max_tokens": 1}
    assert post(served, **body).status_code == post(served, **body).status_code == 200
    assert post(served, **body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    answer = reset(served)
    assert (answer.status_code, answer.json()) == (200, {"reset": True})
    assert post(served, **body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.usefixtures("resettable")
def test_a_prefix_cache_in_use_is_not_reset_and_the_answer_says_when_to_try_again(served, monkeypatch):
    async def some_are_in_use():
        return False

    monkeypatch.setattr(served.lifecycle.engine, "reset_prefix_cache", some_are_in_use)
    answer = reset(served)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cache_in_use")
    assert answer.headers["retry-after"] == "1"


def test_the_prefix_cache_stays_unless_a_setting_allows_its_reset(served):
    answer = reset(served)
    assert answer.status_code == 403
    assert "--allow-cache-reset" in answer.json()["error"]["message"]


def test_several_prompts_and_samples_come_in_order(served):
    body = post(served, prompt=[QUESTION, [5, 6, 7]], n=2, seed=1, temperature=1, max_tokens=4).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    alone = post(served, prompt=[5, 6, 7], n=2, seed=1, temperature=1, max_tokens=4).json()
    assert [c["text"] for c in body["choices"][2:]] == [c["text"] for c in alone["choices"]]


def test_logprobs_name_each_token_its_best_rivals_and_where_it_stands(client):
    choice = client.completions.create(model="demo", prompt=QUESTION, max_tokens=6, temperature=0, logprobs=3).choices[
        0
    ]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert [choice.text[at:] for at in found.text_offset] == [
        "".join(found.tokens[place:]) for place in range(len(found.tokens))
    ]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())


@pytest.mark.parametrize(
    "more",
    [{}, {"echo": True}, {"echo": True, "max_tokens": 0}, {"echo": True, "max_tokens": 1, "logprobs": 0}],
    ids=["output", "echo", "prompt", "both"],
)
def test_streamed_logprobs_are_those_of_the_whole_answer(client, more):
    asked = {"model": "demo", "prompt": [QUESTION, "Q:"], "n": 2, "seed": 3, "max_tokens": 8, "logprobs": 2, **more}
    whole = client.completions.create(**asked).choices
    streamed = [{"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in whole]
    texts, reasons = ["" for _ in whole], [None for _ in whole]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            if not texts[choice.index] and "echo" in more:
                # The prompt comes first, whole, with its log-probabilities.
                prompt = asked["prompt"][choice.index // 2]
                assert choice.text.startswith(prompt)
                assert "".join(choice.logprobs.tokens).startswith(prompt)
                assert choice.logprobs.token_logprobs[0] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
            for name, values in streamed[choice.index].items():
                values += getattr(choice.logprobs, name)
    assert texts == [choice.text for choice in whole]
    assert reasons == [choice.finish_reason for choice in whole]
    for found, choice in zip(streamed, whole, strict=True):
        expected = choice.logprobs.model_dump()
        assert found["tokens"] == expected["tokens"]
        assert found["text_offset"] == expected["text_offset"]
        # Other rows were in the batch the second time, and sums of other shapes round differently.
        for name in ("token_logprobs", "top_logprobs"):
            for value, other in zip(found[name], expected[name], strict=True):
                assert value == (None if other is None else pytest.approx(other, abs=1e-4))


def test_echo_scores_the_prompt_like_an_output(served, client):
    asked = {"model": "demo", "temperature": 0}
    scored = client.completions.create(**asked, prompt=QUESTION, max_tokens=0, echo=True, logprobs=1)
    found = scored.choices[0].logprobs
    assert scored.choices[0].text == QUESTION == "".join(found.tokens)
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert found.text_offset[:2] == [0, len(found.tokens[0])]
    ids = served.engine.tokenizer.encode(QUESTION)
    ahead = client.completions.create(**asked, prompt=ids[:-1], max_tokens=1, logprobs=20).choices[0].logprobs
    assert ahead.top_logprobs[0][found.tokens[-1]] == pytest.approx(found.token_logprobs[-1], abs=1e-4)
    assert scored.usage.completion_tokens == 0
    assert scored.usage.total_tokens == len(found.tokens) == len(ids)


def test_an_echoed_answer_is_the_same_streamed_and_whole(client):
    asked = {"model": "demo", "prompt": QUESTION, "temperature": 0, "max_tokens": 5, "echo": True}
    whole = client.completions.create(**asked).choices[0].text
    assert whole.startswith(QUESTION + " ")
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == whole
    ids = {**asked, "prompt": [3, 4, 5], "logprobs": 0}
    assert len(client.completions.create(**ids).choices[0].logprobs.tokens) == 3 + 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "foo": 1}, "foo"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", {"b": 1}]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"prompt": "x", "stop": ["a", 1]}, "stop[1]"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [-1], "echo": True}, "prompt"),
    ],
)
def test_what_is_wrong_is_refused_by_the_name_of_its_field(served, body, param):
    response = post(served, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_null_is_as_left_out(served):
    assert post(served, prompt="x", max_tokens=1, suffix=None, best_of=None, stop=None, user=None).status_code == 200


@pytest.mark.parametrize(
    ("content", "headers", "status", "said"),
    [
        (b'{"prompt": "x"}', {"content-type": "text/plain"}, 415, "application/json"),
        (b'{"prompt": "x"}', {"content-type": "text/plain; application/json"}, 415, "application/json"),
        (b'{"prompt": "x"}', {"content-type": "application/x-www-form-urlencoded"}, 415, "application/json"),
        (b'{"prompt": "x"}', {}, 415, "application/json"),
        (b"", {"content-type": "application/json"}, 400, "no body"),
        (b"[1]", {"content-type": "application/json"}, 400, "a JSON object"),
        (b'{"prompt": ', {"content-type": "application/json"}, 400, "not valid JSON"),
        (b'{"prompt": "x", "\\ud800": 1}', {"content-type": "application/json"}, 400, "not valid Unicode"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_with_what_to_send(served, content, headers, status, said):
    response = httpx2.post(f"{served.url}/v1/completions", content=content, headers=headers, timeout=PATIENCE)
    assert response.status_code == status
    assert said in response.json()["error"]["message"]


def test_models_are_listed_and_found_by_name(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "ostinato"
    with pytest.raises(openai.NotFoundError, match="a/b"):
        client.models.retrieve("a/b")


def test_tokens_and_text_are_told_from_each_other(served):
    def ask(path, **body):
        return httpx2.post(f"{served.url}/{path}", json=body, timeout=PATIENCE).json()

    found = ask("tokenize", prompt=QUESTION, return_token_strs=True)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == served.engine.plan.settings.max_model_len
    assert "".join(found["token_strs"]) == QUESTION
    assert ask("detokenize", tokens=found["tokens"]) == {"prompt": QUESTION}
    question = QUESTION.removeprefix("Q: ").removesuffix("\nA:")
    assert ask("tokenize", messages=[{"role": "user", "content": question}])["tokens"] == found["tokens"]
    assert ask("tokenize")["error"]["param"] == "prompt"
    assert ask("detokenize", tokens=[2**40])["error"]["param"] == "tokens"


def test_what_is_known_of_the_tokenizer_is_told_as_vllm_tells_it(served):
    told = httpx2.get(f"{served.url}/tokenizer_info", timeout=PATIENCE).json()
    config = json.loads((served.engine.started.directory / "tokenizer_config.json").read_text())
    assert told.pop("tokenizer_class") == config.pop("tokenizer_class", "PreTrainedTokenizerFast")
    assert told.pop("chat_template") == served.engine.chat_template.text
    config.pop("chat_template", None)
    assert config.items() <= told.items()


def test_nothing_is_left_behind(served):
    post(served, prompt=QUESTION, max_tokens=4)
    served.until(lambda: served.engine.num_unfinished == served.engine.queue_limit.num_unfinished == 0)
