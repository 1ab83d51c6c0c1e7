"""The shipped checkpoint of the embedded vision-language model, as transformers sees it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jinja2
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ostinato.demo import checkpoint_dir
from ostinato.demo.canvas import draw
from ostinato.demo.drawings import held_out, is_right
from tests.support.shipped_template import render

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from demo_vl_training.data import Encoder
from demo_vl_training.evaluate import answer
from demo_vl_training.export import processor_configs
from demo_vl_training.tokenizer import CHAT_TEMPLATE, special_ids

DIRECTORY = checkpoint_dir("demo-vl")
TOKENIZER = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


def chat(messages: list[dict[str, object]], begin_answer: bool = True) -> str:
    return render(DIRECTORY, messages, begin_answer)


def test_the_directory_has_what_a_checkpoint_has_and_at_most_ten_megabytes():
    names = {path.name for path in DIRECTORY.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert {"preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja"} <= names
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 10_000_000


def test_the_tensors_are_those_of_the_config():
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_pretrained(DIRECTORY))
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    with safe_open(DIRECTORY / "model.safetensors", framework="pt") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {name: part.get_shape() for name, part in found.items()} == expected
        assert {part.get_dtype() for part in found.values()} == {"BF16"}


def test_config_tokenizer_and_generation_agree_on_special_tokens():
    config = json.loads((DIRECTORY / "config.json").read_text())
    generation = json.loads((DIRECTORY / "generation_config.json").read_text())
    ids = special_ids(TOKENIZER)
    assert config["eos_token_id"] == generation["eos_token_id"] == ids["end"]
    assert config["image_token_id"] == ids["image"]
    assert config["video_token_id"] == ids["video"]
    assert config["vision_start_token_id"] == ids["vision_start"]
    assert config["vision_end_token_id"] == ids["vision_end"]
    assert config["text_config"]["vocab_size"] == TOKENIZER.get_vocab_size()


def test_the_files_are_those_that_training_writes():
    for name, values in processor_configs().items():
        assert json.loads((DIRECTORY / name).read_text()) == values
    assert (DIRECTORY / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_transformers_reads_the_same_tokens_template_and_pictures():
    other = AutoTokenizer.from_pretrained(DIRECTORY)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "a red circle"},
        {"role": "user", "content": "Where is it?"},
    ]
    text = chat(messages)
    assert other.encode(text) == TOKENIZER.encode(text).ids
    assert other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    processor = Qwen2VLImageProcessorPil.from_pretrained(DIRECTORY)
    scene = held_out(0, 1)[0][0].shown[0]
    grid = processor(draw(scene), return_tensors="np")["image_grid_thw"][0].tolist()
    assert list(Encoder(TOKENIZER).sequence(held_out(0, 1)[0]).picture_grids[0]) == grid


def test_the_template_writes_turns_as_qwen3_vl_does():
    shown = [{"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "same?"}]
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    first = f"<|im_start|>user\n{picture}{picture}same?<|im_end|>\n"
    assert chat([{"role": "user", "content": shown}]) == first + "<|im_start|>assistant\n"
    assert chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": shown}], False) == first
    turns = [{"role": "user", "content": [{"type": "video"}]}, {"role": "assistant", "content": "yes"}]
    clip = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
    assert chat(turns, False) == clip + "<|im_start|>assistant\nyes<|im_end|>\n"


@pytest.mark.parametrize(
    "message", [{"role": "tool", "content": "x"}, {"role": "user", "content": [{"type": "input_audio"}]}]
)
def test_the_template_refuses_what_it_does_not_know_by_name(message: dict[str, object]):
    with pytest.raises(jinja2.TemplateError, match=r"tool|input_audio"):
        chat([message])


@pytest.mark.parametrize(("family", "least"), [("question", 19), ("talk", 18), ("another", 18), ("two", 18)])
def test_held_out_conversations_are_answered(family: str, least: int):
    conversations = held_out(0, 20, family)
    answers = answer(DIRECTORY, conversations)
    wrong = [
        (text, talk[-1].question.answer)
        for text, talk in zip(answers, conversations, strict=True)
        if not is_right(text, talk[-1])
    ]
    assert len(wrong) <= 20 - least, wrong
