"""`ostinato chat` shows images to models that see them."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from PIL import Image

from ostinato import LLM, SamplingParams
from ostinato.cli.chat import ChatSession, _attach
from ostinato.cli.main import main
from ostinato.engine.outputs import CompletionOutput, RequestOutput, RequestTimes
from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.errors import RequestError
from ostinato.media.load import MediaSources
from ostinato.media.media_input import MediaInput, render_chat
from ostinato.media.media_prompt import Placeholders
from tests.engine.test_llm_images import SMALL, checkpoint
from tests.support.media_cases import END, IMAGE, START, TEMPLATE, VIDEO, drawn, encode, media_settings, vision_spec


class _Engine:
    """Renders as an engine with vision does."""

    def __init__(self) -> None:
        own = Placeholders(IMAGE, VIDEO, START, END, IMAGE, IMAGE)
        self.media = MediaInput(vision_spec(), media_settings(), own, encode, MediaSources(True, False), 64, 1000)
        self.template = ChatTemplate({"default": TEMPLATE})

    def render_chat_media(self, messages: Any, **kwargs: Any) -> Any:
        return render_chat(messages, lambda plain: self.template.render(plain, **kwargs), self.media)

    def render_chat(self, messages: Any, **kwargs: Any) -> str:
        return self.render_chat_media(messages, **kwargs).text


class _Seer:
    """Stands for an LLM, and answers every message with `seen`."""

    def __init__(self) -> None:
        self.engine = _Engine()
        self.asked: list[Any] = []
        self.fails = False

    def stream_chat(self, messages: Any, _params: Any, **kwargs: Any) -> Any:
        self.engine.render_chat_media(messages, **kwargs)
        self.asked.append(messages)
        if self.fails:
            raise RequestError("no")
        return self._pieces()

    def _pieces(self) -> Any:
        yield "seen"
        output = CompletionOutput(0)
        output.text, output.finish_reason = "seen", "stop"
        return RequestOutput("r", "", [], [output], RequestTimes(arrival=0.0))


@pytest.fixture
def seer() -> _Seer:
    return _Seer()


@pytest.fixture
def talk(seer: _Seer) -> ChatSession:
    return ChatSession(seer, SamplingParams(temperature=0), None, {})  # type: ignore[arg-type]


@pytest.fixture
def picture(tmp_path: Any) -> str:
    path = tmp_path / "a picture.png"
    drawn(64, 96).save(path)
    return str(path)


def kinds(message: Any) -> Any:
    content = message["content"]
    return content if isinstance(content, str) else [part["type"] for part in content]


def test_images_go_with_the_next_message_and_stay_in_the_conversation(
    seer: _Seer, talk: ChatSession, picture: str
) -> None:
    talk.attach(picture)
    talk.attach(picture)
    talk.answer("what?")
    talk.answer("sure?")
    assert [kinds(message) for message in seer.asked[0]] == [["image", "image", "text"]]
    assert [kinds(message) for message in seer.asked[1]] == [["image", "image", "text"], "seen", "sure?"]


def test_an_image_is_read_when_it_is_shown(seer: _Seer, talk: ChatSession, picture: str) -> None:
    talk.attach(picture)
    Image.new("RGB", (8, 8)).save(picture)
    talk.answer("what?")
    assert seer.asked[0][0]["content"][0]["image"].size == (96, 64)


def test_a_message_that_failed_keeps_its_images_for_the_next(seer: _Seer, talk: ChatSession, picture: str) -> None:
    talk.attach(picture)
    seer.fails = True
    talk.answer("what?")
    seer.fails = False
    talk.answer("again?")
    assert kinds(seer.asked[1][0]) == ["image", "text"]
    talk.attach(picture)
    talk.reset()
    talk.answer("and now?")
    assert kinds(seer.asked[2][0]) == "and now?"


def test_the_command_takes_a_path_with_spaces_and_says_what_is_wrong(
    talk: ChatSession, picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (picture, f'"{picture}"', "", "/absent.png", "http://example.org/a.png"):
        _attach(talk, source)
    assert len(talk.attached) == 2
    said = capsys.readouterr().err
    assert said.count("(goes with the next message)") == 2
    assert "the path of an image is missing" in said
    assert "/absent.png cannot be read" in said
    assert "allow_remote_images" in said


def test_a_model_of_text_alone_refuses_an_image_at_once(picture: str) -> None:
    llm = LLM("demo", threads=1, max_num_seqs=4, cache_memory="16MiB")
    talk = ChatSession(llm, SamplingParams(temperature=0), None, {})
    with pytest.raises(RequestError, match="takes text only"):
        talk.attach(picture)
    with pytest.raises(RequestError, match="takes text only"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}}]}])


def test_the_command_answers_about_the_image_that_it_is_given(
    picture: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    answers = []
    for flags, typed in (
        (["--image", picture], "what?\n"),
        ([], f"/image {picture}\nwhat?\n"),
        ([], "what?\n"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as ended:
            main(["chat", "--model", str(checkpoint()), *small, "--max-tokens", "12", "--temperature", "0", *flags])
        assert ended.value.code in (None, 0)
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_the_command_ends_at_once_for_an_image_that_cannot_be_taken(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.png"
    path.write_text("no image")
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--model", str(checkpoint()), "--threads", "1", "--image", str(path)])
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "PNG, JPEG, WEBP, GIF and BMP files are read" in told
    assert str(path) in told
