"""/v1/embeddings with OpenAI's own client."""

import json
import shutil
import threading

import httpx2
import numpy as np
import openai
import pytest

from ostinato import LLM
from tests.support.patience import PATIENCE
from tests.support.serving import serving
from tests.support.text_checkpoint import text_checkpoint

SETTINGS = {"max_num_seqs": 4, "max_model_len": 96, "cache_memory": "8MiB", "threads": 1, "dtype": "float32"}
TEXTS = ["a cab", "be", "dig a hole", "the end of it"]


@pytest.fixture(scope="module")
def model():
    return str(text_checkpoint("qwen3"))


@pytest.fixture(scope="module")
def served(model):
    limits = {"served_model_name": "tiny", "max_waiting": 2, "max_inputs": 64}
    with serving(limits, model=model, graph_mode="none", **SETTINGS) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.client()


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, **SETTINGS) as llm:
        yield llm


def vectors(answer):
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return np.array([each.embedding for each in answer.data])


def test_embeddings_are_those_of_an_llm_in_the_order_of_the_inputs(client, llm):
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    np.testing.assert_allclose(vectors(answer), llm.embed(TEXTS), atol=1e-5)
    count = sum(len(llm.get_tokenizer().encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    assert (answer.object, answer.model) == ("list", "tiny")


def test_both_encodings_are_the_same_vector(client):
    floats = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    # The client asks for base64 by itself, and decodes it.
    by_itself = client.embeddings.create(model="tiny", input=TEXTS)
    # Not bit by bit: the two requests' steps may hold other rows.
    np.testing.assert_allclose(vectors(by_itself), vectors(floats), atol=1e-5)
    packed = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="base64")
    assert isinstance(packed.data[0].embedding, str)


def test_inputs_may_be_token_ids_and_more_than_have_room_at_once(client, llm):
    ids = [[5 + i % 7, *range(20, 20 + i)] for i in range(40)]
    np.testing.assert_allclose(vectors(client.embeddings.create(model="tiny", input=ids)), llm.embed(ids), atol=1e-5)
    [alone] = vectors(client.embeddings.create(model="tiny", input=ids[3]))
    np.testing.assert_allclose(alone, llm.embed(ids[3])[0], atol=1e-5)


def test_dimensions_and_pooling_are_as_asked(client, llm):
    short = vectors(client.embeddings.create(model="tiny", input=TEXTS, dimensions=8))
    np.testing.assert_allclose(short, llm.embed(TEXTS, dimensions=8), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-6)
    asked = {"pooling": "mean", "normalize": False}
    mean = vectors(client.embeddings.create(model="tiny", input=TEXTS, extra_body=asked))
    np.testing.assert_allclose(mean, llm.embed(TEXTS, **asked), atol=1e-4)


def test_inputs_that_are_too_long_are_cut_if_that_is_asked_for(client, llm):
    long = list(range(20, 120)) * 2
    for given, most in ((-1, 96), (7, 7)):
        answer = client.embeddings.create(model="tiny", input=long, extra_body={"truncate_prompt_tokens": given})
        np.testing.assert_allclose(vectors(answer), llm.embed(long[:most]), atol=1e-5)
        assert answer.usage.prompt_tokens == most


def test_a_large_request_is_read_by_a_worker(served, llm):
    ids = [list(range(20, 110))] * 60  # more values than the event loop reads
    answer = httpx2.post(f"{served.url}/v1/embeddings", json={"input": ids}, timeout=PATIENCE).json()
    assert len(answer["data"]) == 60
    np.testing.assert_allclose(answer["data"][59]["embedding"], llm.embed(ids[0])[0], atol=1e-5)


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"input": []}, "input", "empty list"),
        ({"input": ""}, "input", "a prompt is empty"),
        ({"input": ["a", []]}, "input", "a prompt is empty"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1, or at least 1"),
        ({"input": [1.5]}, "input", "a prompt is text or a list of token ids"),
        ({"input": [131]}, "input", "131"),
        ({"input": ["a"] * 65}, "input", "65 inputs are given, and a request may have 64"),
        ({"input": [[5] * 97]}, "input", "maximum context length is 96 tokens. However, your input resulted in 97"),
        ({"dimensions": 0}, "dimensions", "at least 1"),
        ({"dimensions": 65}, "dimensions", "should be from 1 to 64"),
        ({"pooling": "cls"}, "pooling", "'last' or 'mean'"),
        ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"colour": 1}, "colour", "unknown parameter"),
    ],
)
def test_what_is_wrong_is_named(served, more, param, says):
    answer = httpx2.post(f"{served.url}/v1/embeddings", json={"input": "a", **more}, timeout=PATIENCE)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["param"] == param


def test_a_model_that_pools_otherwise_is_told_of_and_may_be_asked_by_name(model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (other / "modules.json").write_text(json.dumps(modules))
    (other / "1_Pooling").mkdir()
    (other / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    with serving(model=str(other), graph_mode="none", **SETTINGS) as served:
        client = served.client()
        with pytest.raises(openai.BadRequestError, match="by cls_token; implemented are lasttoken and mean"):
            client.embeddings.create(model="other", input="a")
        named = {"pooling": "last", "normalize": True}
        assert client.embeddings.create(model="other", input="a", extra_body=named).data


@pytest.mark.slow
def test_a_full_queue_turns_a_request_away_and_leaves_nothing(served):
    served.until(lambda: served.engine.num_unfinished == 0)
    served.probe.hold()
    body = {"prompt": [5, 6], "max_tokens": 4, "n": 6}
    client = served.client()
    thread = threading.Thread(target=lambda: client.completions.create(model="tiny", **body))
    thread.start()
    served.unfinished(1)
    answer = httpx2.post(f"{served.url}/v1/embeddings", json={"input": TEXTS}, timeout=PATIENCE)
    assert answer.status_code == 429
    served.probe.go()
    thread.join(PATIENCE)
    served.until(lambda: served.num_kept() == 0)
    assert served.engine.queue_limit.num_unfinished == 0
