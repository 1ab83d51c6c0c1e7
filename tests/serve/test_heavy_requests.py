"""What a small body may not do on the event loop, a worker does."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.sampling.params import SamplingParams
from ostinato.serve.api.tokenize import TokenizeRequest
from ostinato.serve.body_workers.context import MAX_LOOP_CHARACTERS, NeedsWorker, RequestContext
from ostinato.serve.chat.conversation import Conversation, render
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.settings import ServeSettings

TALK = [{"role": "user", "content": "x"}]


def work(template="{{ messages[0].content }}", on_loop=True, media=None):
    text = SimpleNamespace(
        chat_template=ChatTemplate({"default": template}),
        media=media,
        encode=lambda *_: [1],
        formats=SimpleNamespace(has_channels=False),
    )
    return RequestContext(text, ServeSettings(), "m", SamplingParams(), on_loop=on_loop)


def conversation(messages=TALK):
    return Conversation(messages, None, {}, True, False)


def test_a_template_that_takes_many_steps_is_rendered_by_a_worker():
    template = "{% for a in range(30000) %}{% endfor %}ok"
    with pytest.raises(NeedsWorker):
        render(work(template), conversation())
    assert render(work(template, on_loop=False), conversation()).text == "ok"


def test_a_template_that_takes_too_many_steps_there_too_is_an_error():
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ApiError, match="steps") as caught:
        render(work(template, on_loop=False), conversation())
    assert caught.value.status == 400


def test_images_are_never_decoded_on_the_loop():
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]
    with pytest.raises(NeedsWorker):
        render(work(media=object()), conversation(picture))


def test_a_long_text_is_not_tokenised_on_the_loop():
    assert work().encode("x" * MAX_LOOP_CHARACTERS, True, "prompt") == [1]
    with pytest.raises(NeedsWorker):
        work().encode("x" * (MAX_LOOP_CHARACTERS + 1), True, "prompt")
    assert work(on_loop=False).encode("x" * (MAX_LOOP_CHARACTERS + 1), True, "prompt") == [1]


def test_texts_of_many_tokens_are_not_looked_up_on_the_loop():
    text = SimpleNamespace(
        encode=lambda *_: list(range(1000)), token_texts=SimpleNamespace(text_of=str), max_model_len=2000
    )
    body = TokenizeRequest(prompt="x", return_token_strs=True)
    with pytest.raises(NeedsWorker):
        body.prepare(RequestContext(text, ServeSettings(), "m", SamplingParams()))
    assert (
        len(json.loads(body.prepare(RequestContext(text, ServeSettings(), "m", None, on_loop=False)))["tokens"]) == 1000
    )
