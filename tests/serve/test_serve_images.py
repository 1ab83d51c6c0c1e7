"""Images in requests to the server, from OpenAI's client to the model's answer."""

from __future__ import annotations

import base64
import io
import threading
from typing import Any

import httpx2
import openai
import pytest
from PIL import Image

from ostinato import LLM, SamplingParams
from tests.engine.test_llm_images import SMALL, checkpoint, gemma4_checkpoint
from tests.media.test_media_header import png, webp
from tests.support.media_cases import IMAGE, drawn
from tests.support.patience import PATIENCE
from tests.support.serving import serving

NUM_TOKENS = 8


@pytest.fixture(scope="module")
def served():
    with serving({"served_model_name": "seer", "max_images": 3}, model=str(checkpoint()), **SMALL) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm():
    return LLM(str(checkpoint()), **SMALL)


def url_of(picture: Image.Image, kind: str = "PNG") -> str:
    content = io.BytesIO()
    picture.save(content, kind)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(content.getvalue()).decode()


def image(picture: Image.Image, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(picture), **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def talk(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TALK = talk(text("what"), image(drawn(40, 48)), text("and"), image(drawn(24, 24, 1)))
ASKED = {"model": "seer", "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}


def alone(llm: LLM, messages: Any) -> Any:
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    return output


def test_images_are_answered_as_the_engine_alone_answers_them(client: Any, llm: LLM) -> None:
    answer = client.chat.completions.create(messages=TALK, **ASKED)
    expected = alone(llm, TALK)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_gemma4_answers_images_over_http_as_its_engine_alone_does() -> None:
    """Images and frames that keep their proportions."""
    model = str(gemma4_checkpoint())
    video = talk({"type": "video", "video": [url_of(drawn(24, 24, seed)) for seed in range(2)], "fps": 1})
    own = LLM(model, **SMALL)
    expected = [alone(own, messages) for messages in (TALK, video)]
    with serving({"served_model_name": "seer"}, model=model, **SMALL) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        for messages, right in zip((TALK, video), expected, strict=True):
            answer = client.chat.completions.create(messages=messages, **ASKED)
            assert answer.choices[0].message.content == right.outputs[0].text
            assert answer.usage.prompt_tokens == len(right.prompt_token_ids)


def test_a_stream_gives_what_the_whole_answer_gives(client: Any) -> None:
    whole = client.chat.completions.create(messages=TALK, **ASKED).choices[0].message.content
    chunks = client.chat.completions.create(messages=TALK, stream=True, **ASKED)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_a_video_is_answered(client: Any, llm: LLM) -> None:
    frames = [url_of(drawn(24, 24, seed)) for seed in range(3)]
    messages = talk({"type": "video", "video": frames, "fps": 2}, text("what?"))
    answer = client.chat.completions.create(messages=messages, **ASKED)
    assert answer.choices[0].message.content == alone(llm, messages).outputs[0].text


def test_responses_take_images(client: Any, llm: LLM) -> None:
    picture = drawn(32, 32, 4)
    answer = client.responses.create(
        model="seer",
        temperature=0,
        max_output_tokens=NUM_TOKENS,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "what?"},
                    {"type": "input_image", "image_url": url_of(picture), "detail": "auto"},
                ],
            }
        ],
        extra_body={"ignore_eos": True},
    )
    expected = alone(llm, talk(text("what?"), image(picture)))
    assert answer.output_text == expected.outputs[0].text
    assert answer.usage.input_tokens == len(expected.prompt_token_ids)


def test_tokenize_counts_the_tokens_of_images(served: Any, llm: LLM) -> None:
    answer = httpx2.post(f"{served.url}/tokenize", json={"model": "seer", "messages": TALK}, timeout=PATIENCE).json()
    rendered = llm.engine.render_chat_media(TALK)
    assert rendered.media is not None
    assert answer["tokens"] == rendered.media.token_ids


def test_many_requests_at_once_get_each_their_own_image(client: Any, llm: LLM) -> None:
    talks = [talk(image(drawn(24, 32, seed)), text("what?")) for seed in range(6)]
    answers: dict[int, str] = {}

    def ask(place: int) -> None:
        answer = client.chat.completions.create(messages=talks[place], **ASKED)
        answers[place] = answer.choices[0].message.content

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(talks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[place] for place in range(len(talks))] == [alone(llm, each).outputs[0].text for each in talks]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "/etc/hostname"}}, "files are not read"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}, "files are not read"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "allow_remote_images"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:text/plain;base64,aGk="}}, "data:image/png"),
        ({"type": "image_url", "image_url": {"url": url_of(drawn(8, 8))[:90]}}, "read|broken"),
        ({"type": "image_url", "image_url": {"url": url_of(drawn(8, 8)), "detail": "ultra"}}, "should be auto"),
        ({"type": "image_url", "image_url": {"url": url_of(Image.new("L", (4, 1000)))}}, "at most 200 times"),
        ({"type": "image_url"}, "needs image_url"),
        ({"type": "image_url", "image_url": {"url": "x"}, "size": 3}, "and not size"),
        ({"type": "video", "video": [url_of(drawn(8, 8))], "fps": 1}, "at least 2 frames"),
    ],
)
def test_what_is_no_image_is_refused_by_its_place(served: Any, part: Any, message: str) -> None:
    body = {"model": "seer", "messages": talk(text("x"), part)}
    answer = httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1]" + (
        ".size" if "size" in part else ""
    )  # an unknown member is named
    assert any(each in error["message"] for each in message.split("|"))


def test_responses_name_the_place_as_the_client_wrote_it(served: Any) -> None:
    part = {"type": "input_image", "image_url": "/etc/hostname"}
    given = [{"role": "user", "content": "first"}, {"role": "user", "content": [part]}]
    body = {"model": "seer", "instructions": "look", "input": given}
    error = httpx2.post(f"{served.url}/v1/responses", json=body, timeout=PATIENCE).json()["error"]
    assert error["param"] == "input[1].content[0]"
    given[1]["content"] = [{"type": "input_image", "file_id": "f"}]  # type: ignore[dict-item]
    error = httpx2.post(f"{served.url}/v1/responses", json=body, timeout=PATIENCE).json()["error"]
    assert error["param"] == "input[1].content[0].file_id"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([image(drawn(8, 8))] * 4, "at most 3"),
        ([{"type": "video", "video": ["x"] * 4, "fps": 1}], "at most 3"),
        ([text(f"an {IMAGE} typed")], "stands for an image"),
    ],
)
def test_what_a_conversation_may_not_hold_is_refused(served: Any, parts: Any, message: str) -> None:
    answer = httpx2.post(
        f"{served.url}/v1/chat/completions", json={"model": "seer", "messages": talk(*parts)}, timeout=PATIENCE
    )
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_the_server_goes_on_after_all_that(client: Any) -> None:
    assert client.chat.completions.create(messages=TALK, **ASKED).choices[0].message.content


def test_images_are_decoded_in_a_process_of_their_own_which_is_not_used_again(served: Any, client: Any) -> None:
    workers = served.lifecycle.workers
    done = workers.num_done
    client.chat.completions.create(messages=TALK, **ASKED)
    assert workers.num_done == done + 1
    assert workers.num_running == len(workers._idle) == 0


def test_an_image_of_absurd_size_costs_its_header_alone(served: Any, client: Any) -> None:
    served.lifecycle.workers._budgets._uses.clear()
    for content, kind, told in (
        (webp(8000, 8000), "webp", "8000x8000 pixels is too large"),
        (png(2**24, 1), "png", "16777216x1 pixels is too narrow"),
    ):
        url = f"data:image/{kind};base64," + base64.b64encode(content).decode()
        with pytest.raises(openai.BadRequestError, match=told):
            client.chat.completions.create(messages=talk({"type": "image_url", "image_url": {"url": url}}), **ASKED)
    assert all(not use.pixels for use in served.lifecycle.workers._budgets._uses.values())


@pytest.mark.slow
def test_the_pixels_of_a_request_and_of_a_client_are_bounded(served: Any, client: Any, monkeypatch: Any) -> None:
    budgets = served.lifecycle.workers._budgets
    monkeypatch.setattr(budgets, "_pixels", 40 * 48)
    client.chat.completions.create(messages=TALK, **ASKED)
    with pytest.raises(openai.RateLimitError, match="client_pixels"):
        client.chat.completions.create(messages=TALK, **ASKED)
    budgets._uses.clear()
    client.chat.completions.create(messages=TALK, **ASKED)
    budgets._uses.clear()
