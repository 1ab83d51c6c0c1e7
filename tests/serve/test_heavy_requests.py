"""What a small body may not do on the event loop, a worker does."""

from __future__ import annotations

import json
import tracemalloc
from types import SimpleNamespace

import httpx2
import pytest

from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.sampling.params import SamplingParams
from ostinato.serve.api.tokenize import TokenizeRequest
from ostinato.serve.body_workers.context import MAX_LOOP_CHARACTERS, NeedsWorker, RequestContext
from ostinato.serve.chat.answer_formats import AnswerFormats
from ostinato.serve.chat.answer_parser import detect_formats
from ostinato.serve.chat.conversation import Conversation, render
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.settings import ServeSettings
from tests.support.patience import PATIENCE
from tests.support.serving import serving

TALK = [{"role": "user", "content": "x"}]


def context_of(template="{{ messages[0].content }}", on_loop=True, media=None, forks=False):
    text = SimpleNamespace(
        chat_template=ChatTemplate({"default": template}),
        media=media,
        encode=lambda *_: [1],
        formats=SimpleNamespace(has_channels=False, tools=None),
    )
    return RequestContext(text, ServeSettings(), "m", SamplingParams(), on_loop=on_loop, forks=forks)


def conversation(messages=TALK):
    return Conversation(messages, None, {}, True, False)


def test_a_template_that_takes_many_steps_is_rendered_by_a_worker():
    template = "{% for a in range(30000) %}{% endfor %}ok"
    with pytest.raises(NeedsWorker):
        render(context_of(template), conversation())
    assert render(context_of(template, on_loop=False), conversation()).text == "ok"


@pytest.mark.slow
def test_a_template_that_takes_too_many_steps_there_too_is_an_error():
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ApiError, match="steps") as caught:
        render(context_of(template, on_loop=False), conversation())
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x'|center(10**9) }}",
        "{{ range(10**5)|list|sort|tojson(indent=9999) }}",
        "{{ ('a ' * 10**6)|wordwrap(1) }}",
        "{{ ([[1]] * 10**5)|sum(start=[])|length }}",
        "{% for i in range(10**5) %}{{ range(10**5)|groupby('real')|list|length }}{% endfor %}",
        "{{ '%999999999d' % 1 }}",
    ],
)
def test_what_a_template_does_uncounted_is_never_done_on_the_loop_and_ended_in_a_worker(template):
    with pytest.raises(NeedsWorker):
        render(context_of(template), conversation())
    with pytest.raises(ApiError, match=r"more than 0\.3 seconds of the processor or 100 MiB") as caught:
        render(context_of(template, on_loop=False, forks=True), conversation())
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_worker_renders_the_same_text_and_the_same_errors():
    template = "{{ messages[0].content|center(9) }}{% if messages|length > 1 %}{{ raise_exception('one!') }}{% endif %}"
    in_worker = context_of(template, on_loop=False, forks=True)
    assert render(in_worker, conversation()).text == "    x    "
    with pytest.raises(ApiError, match="refused the conversation: one!"):
        render(in_worker, conversation([*TALK, *TALK]))
    long = [{"role": "user", "content": "\N{ROCKET}" * 10**7}]
    assert render(in_worker, conversation(long)).text == long[0]["content"]


def test_images_are_never_decoded_on_the_loop():
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]
    with pytest.raises(NeedsWorker):
        render(context_of(media=object()), conversation(picture))


def test_a_long_text_is_not_tokenised_on_the_loop():
    assert context_of().encode("x" * MAX_LOOP_CHARACTERS, True, "prompt") == [1]
    with pytest.raises(NeedsWorker):
        context_of().encode("x" * (MAX_LOOP_CHARACTERS + 1), True, "prompt")
    assert context_of(on_loop=False).encode("x" * (MAX_LOOP_CHARACTERS + 1), True, "prompt") == [1]


def test_a_costly_template_costs_nothing_when_its_forms_are_looked_for():
    tracemalloc.start()
    try:
        assert detect_formats(ChatTemplate({"default": "{{ 'x'|center(10**9) }}"})) == AnswerFormats()
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_server_refuses_what_its_template_takes_too_much_for_and_serves_the_rest(tmp_path):
    path = tmp_path / "costly.jinja"
    path.write_text("{{ messages[0].content|center(messages[0].content|int) }}")
    with serving(chat_template=str(path), graph_mode="none", max_num_seqs=2, max_model_len=256) as served:

        def ask(content):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            return httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE)

        refused = ask("1000000000")
        assert refused.status_code == 400
        assert "0.3 seconds of the processor or 100 MiB" in refused.json()["error"]["message"]
        assert ask("9").status_code == 200
        workers = served.lifecycle.workers
        assert (workers.num_done, workers.num_ended_early) == (2, 0)


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
    # A text that can have so many is not even encoded there.
    del text.encode
    with pytest.raises(NeedsWorker):
        TokenizeRequest(prompt="x" * 300, return_token_strs=True).prepare(
            RequestContext(text, ServeSettings(), "m", SamplingParams())
        )
