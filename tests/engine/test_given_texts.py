"""A tokenizer and a chat template in place of the checkpoint's: in LLM, in the server's processes, and on the command
line, before a weight is read."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, AsyncLLM, ConfigError, EngineConfig, ModelError, OstinatoError, SamplingParams
from ostinato.cli.main import main
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import Plan, make_plan
from ostinato.serve.body_workers.context import WorkerContext
from ostinato.serve.settings import ServeSettings
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.text_checkpoint import SETTINGS, text_checkpoint

HI = [{"role": "user", "content": "hi"}]
SHOUTED = "{% for message in messages %}{{ message.content | upper }}!{% endfor %}"


@pytest.fixture
def swapped(tmp_path: Path) -> Path:
    """A tokenizer in which `A` and `B` have changed places, with a chat template of its own; no checkpoint."""
    place = tmp_path / "swapped"
    place.mkdir()
    parts = json.loads((text_checkpoint() / "tokenizer.json").read_text())
    vocabulary = parts["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (place / "tokenizer.json").write_text(json.dumps(parts))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}?"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


@pytest.fixture
def shouted(tmp_path: Path) -> Path:
    file = tmp_path / "shouted.jinja"
    file.write_text(SHOUTED)
    return file


def without_weights(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(text_checkpoint(), directory)
    (directory / "model.safetensors").unlink()
    return directory


def plan_of(**settings: Any) -> Plan:
    config = EngineConfig(model=str(text_checkpoint()), **settings)
    return make_plan(config, load_spec(config), detect("cpu"))


def test_a_given_tokenizer_reads_and_writes_in_place_of_the_checkpoints_own(swapped: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with (
        LLM(str(text_checkpoint()), **SETTINGS) as plain,
        LLM(str(text_checkpoint()), tokenizer=swapped, **SETTINGS) as other,
    ):
        own, given = plain.generate("AAB", params)[0], other.generate("BBA", params)[0]
        assert own.prompt_token_ids == given.prompt_token_ids
        assert own.outputs[0].token_ids == given.outputs[0].token_ids
        turned = str.maketrans("AB", "BA")
        assert own.outputs[0].text.translate(turned) == given.outputs[0].text
        assert other.get_tokenizer().eos_token_ids == plain.get_tokenizer().eos_token_ids
        assert other.engine.render_chat(HI) == "hi?", "its template comes with it"


def test_a_given_template_goes_before_those_of_the_checkpoint_and_of_the_tokenizer(
    swapped: Path, shouted: Path
) -> None:
    for others in ({}, {"tokenizer": str(swapped)}):
        with LLM(str(text_checkpoint()), chat_template=shouted, **others, **SETTINGS) as llm:
            [output] = llm.chat(HI, SamplingParams(max_tokens=1))
            assert output.prompt_token_ids == llm.get_tokenizer().encode("HI!", add_special_tokens=False)


def test_the_servers_processes_use_what_was_given(swapped: Path, shouted: Path) -> None:
    async def main() -> None:
        given = {"tokenizer": str(swapped), "chat_template": str(shouted)}
        async with AsyncLLM(str(text_checkpoint()), **given, **SETTINGS) as llm:
            [output] = await llm.chat([{"role": "user", "content": "ab"}], SamplingParams(max_tokens=1))
            own = llm.get_tokenizer()
            assert own.decode(output.prompt_token_ids) == "AB!"
            assert own.token_id("A") != text_tokens()["A"]
            assert output.prompt_token_ids[0] == own.encode("A", add_special_tokens=False)[0]
            started = llm._started().started
            text = WorkerContext(started, ServeSettings(), "model", remote=False).request_context().text
            assert text.chat_template.render(HI) == "HI!"
            assert text.tokenizer.encode("AB") == own.encode("AB")

    asyncio.run(main())


def text_tokens() -> dict[str, int]:
    vocabulary: dict[str, int] = json.loads((text_checkpoint() / "tokenizer.json").read_text())["model"]["vocab"]
    return vocabulary


def test_the_plan_says_what_is_used_in_place_of_what(swapped: Path, shouted: Path) -> None:
    plan = plan_of(tokenizer=str(swapped), chat_template=str(shouted))
    reasons = {each.topic: each.reason for each in plan.decisions}
    assert f"{VOCAB_SIZE} of the model's {VOCAB_SIZE} token ids have a text" in reasons["tokenizer"]
    assert reasons["chat_template"] == "as given, in place of the tokenizer's"
    assert (plan.settings.tokenizer, plan.settings.chat_template) == (str(swapped), str(shouted))
    assert not {"tokenizer", "chat_template"} & {each.topic for each in plan_of().decisions}


def larger(place: Path) -> None:
    parts = json.loads((place / "tokenizer.json").read_text())
    parts["added_tokens"].append({**parts["added_tokens"][0], "id": VOCAB_SIZE, "content": "<one more>"})
    (place / "tokenizer.json").write_text(json.dumps(parts))


def empty(place: Path) -> None:
    (place / "tokenizer.json").unlink()


def broken(place: Path) -> None:
    (place / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (larger, ConfigError, f"has token ids up to {VOCAB_SIZE}, and the model's are from 0 to {VOCAB_SIZE - 1}"),
        (empty, ConfigError, r"tokenizer\.json is not there or names no tokens; give a directory"),
        (broken, ModelError, r"tokenizer\.json cannot be read"),
        (shutil.rmtree, ModelError, "the tokenizer: there is no directory"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_weights_are_read(
    damage: Any, kind: type[OstinatoError], message: str, swapped: Path, tmp_path: Path
) -> None:
    damage(swapped)
    with pytest.raises(kind, match=message) as refused:
        LLM(str(without_weights(tmp_path)), tokenizer=str(swapped), **SETTINGS)
    if kind is ConfigError:
        assert [(each.setting, each.value) for each in refused.value.remedies] == [("tokenizer", None)]
    with pytest.raises(kind, match=message):
        plan_of(tokenizer=str(swapped))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fine\n{% for message in messages %}\nno end", "at line 3: Unexpected end of template"),
        ("a\n\n{{ messages | loudly }}", "at line 3: No filter named 'loudly'"),
        ("{{ messages }", "at line 1: unexpected '}'"),
        (" \n", "is empty"),
        ("# Read me\n", "does not use `messages`"),
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "it is not text in UTF-8"),
    ],
)
def test_a_template_that_does_not_parse_is_an_error_with_line_and_cause_before_weights_are_read(
    text: str | bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jinja"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    directory = without_weights(tmp_path)
    with pytest.raises(ConfigError, match="the chat template") as refused:
        LLM(str(directory), chat_template=file, **SETTINGS)
    assert str(file) in refused.value.message
    assert message in refused.value.message
    for command in ("plan", "chat", "eval"):
        with pytest.raises(SystemExit) as ended:
            main([command, str(directory), "--chat-template", str(file), "--max-model-len", "96"])
        err = capsys.readouterr().err
        assert ended.value.code == 2
        assert message in err
        assert "  - leave out --chat-template\n" in err
