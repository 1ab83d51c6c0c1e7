"""The embedded vision-language model, asked through the engine and the commands."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.cli.main import main
from ostinato.demo.canvas import Clip, draw
from ostinato.demo.drawings import Conversation, held_out, is_right
from ostinato.demo.scenes import Scene, Shape

SMALL: dict[str, Any] = {"threads": 1, "max_num_seqs": 8, "cache_memory": "32MiB"}
GREEDY = SamplingParams(temperature=0, max_tokens=32)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo-vl", **SMALL)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A file with a red circle above a blue square, larger than what the model was trained on."""
    shapes = (Shape("circle", "red", 0.45, 0.25, 0.18, 0.0), Shape("square", "blue", 0.5, 0.72, 0.2, 0.0))
    path = tmp_path / "picture.png"
    draw(Scene(480, 480, "white", shapes, "above", 1)).save(path)
    return path


def messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The conversation up to its last answer, as LLM.chat takes it."""
    told: list[dict[str, Any]] = []
    for turn in conversation:
        content: list[dict[str, Any]] = []
        for item in turn.shown:
            if isinstance(item, Clip):
                content.append({"type": "video", "video": item.frames(), "fps": 2})
            else:
                content.append({"type": "image", "image": draw(item)})
        content.append({"type": "text", "text": turn.question.text})
        told += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.question.answer}]
    return told[:-1]


@pytest.mark.parametrize(
    ("family", "least"), [("question", 17), ("talk", 16), ("another", 17), ("two", 17), ("clip", 17)]
)
@pytest.mark.slow
def test_held_out_conversations_are_answered(llm: LLM, family: str, least: int):
    conversations = held_out(0, 20, family)
    outputs = llm.chat([messages(conversation) for conversation in conversations], GREEDY)
    answers = [output.outputs[0].text for output in outputs]
    right = [is_right(text, talk[-1]) for text, talk in zip(answers, conversations, strict=True)]
    assert sum(right) >= least, [(text, talk[-1]) for text, talk in zip(answers, conversations, strict=True)]


@pytest.mark.slow
def test_chat_describes_a_picture_from_a_file(
    picture: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is in the picture?\n"))
    flags = ["--threads", "1", "--max-num-seqs", "2", "--cache-memory", "32MiB"]
    with pytest.raises(SystemExit) as exit_info:
        main(["chat", "--model", "demo-vl", "--image", str(picture), *flags])
    assert not exit_info.value.code
    assert "a red circle above a blue square" in capsys.readouterr().out


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(*flags: str) -> Any:
        with pytest.raises(SystemExit) as exit_info:
            main(["eval", "--model", "demo-vl", "--threads", "1", "--max-num-seqs", "8", "--json", *flags])
        report = json.loads(capsys.readouterr().out)
        assert ("error" in report) == bool(exit_info.value.code)
        return report

    return run


@pytest.mark.slow
def test_eval_asks_a_model_that_sees_about_drawings(evaluate: Callable[..., Any]):
    report = evaluate("--num-problems", "20", "--max-tokens", "32")
    assert report["asked"] == "drawings"
    assert report["correct"] >= 17


@pytest.mark.slow
def test_eval_refuses_to_compare_logits_of_a_model_that_sees(evaluate: Callable[..., Any]):
    report = evaluate("--num-problems", "1", "--compare-logits", "--quantization", "int8")
    assert "text alone" in report["error"]["message"]
