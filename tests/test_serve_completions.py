import json

import httpx2
import pytest

from tests.serving import events, serving

QUESTION = "Q: Ava has 17 apples and buys 25 more. How many apples has she?\nA:"


@pytest.fixture(scope="module")
def served():
    with serving(max_num_seqs=4) as served:
        yield served


def post(served, **body):
    return httpx2.post(f"{served.url}/v1/completions", json=body, timeout=60)


def test_health_is_200_after_the_servers_own_first_step(served):
    assert httpx2.get(f"{served.url}/health").status_code == 200
    assert served.engine.engine.stats()["steps"] >= 1


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


def test_several_prompts_and_samples_come_in_order(served):
    body = post(served, prompt=[QUESTION, [5, 6, 7]], n=2, seed=1, temperature=1, max_tokens=4).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    alone = post(served, prompt=[5, 6, 7], n=2, seed=1, temperature=1, max_tokens=4).json()
    assert [c["text"] for c in body["choices"][2:]] == [c["text"] for c in alone["choices"]]


def test_an_unknown_parameter_is_refused_by_name(served):
    response = post(served, prompt="x", foo=1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "foo"


def test_nothing_is_left_behind(served):
    post(served, prompt=QUESTION, max_tokens=4)
    served.until(lambda: served.engine.num_unfinished == 0)
    assert served.engine.admission.num_unfinished == 0
