"""The shipped checkpoint of the embedded model, as transformers and tokenizers see it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import jinja2
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, NemotronHConfig, NemotronHForCausalLM

from ostinato.demo import checkpoint_dir
from ostinato.demo.problems import extract_result, held_out
from tests.support.shipped_template import render

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from demo_training.checkpoint import read, replace_head
from demo_training.evaluate import drafted

DIRECTORY = checkpoint_dir()
TOKENIZER = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
ISSUE_QUESTION = "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?"


@pytest.fixture(scope="module")
def model() -> NemotronHForCausalLM:
    return AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()


def answer(model: NemotronHForCausalLM, prompt: str) -> str:
    ids = torch.tensor([TOKENIZER.encode(prompt).ids])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=80)
    return TOKENIZER.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=False)


def chat(messages: list[dict[str, str]]) -> str:
    return render(DIRECTORY, messages)


def test_the_directory_has_what_a_checkpoint_has_and_stays_small():
    names = {path.name for path in DIRECTORY.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert {"model.safetensors", "chat_template.jinja"} <= names
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 12_000_000


def test_the_tensors_are_those_of_the_config_and_of_the_head():
    config = NemotronHConfig.from_pretrained(DIRECTORY)
    with torch.device("meta"):
        trunk = NemotronHForCausalLM(config)
    expected = {
        name.replace("model.", "backbone.", 1): list(tensor.shape) for name, tensor in trunk.state_dict().items()
    }
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    assert config.num_nextn_predict_layers == 1
    assert config.mtp_layers_block_type == ["full_attention", "mlp"]
    expected |= {
        "mtp.layers.0.enorm.weight": [hidden],
        "mtp.layers.0.hnorm.weight": [hidden],
        "mtp.layers.0.eh_proj.weight": [hidden, 2 * hidden],
        "mtp.layers.0.norm.weight": [hidden],
        "mtp.layers.0.mixer.q_proj.weight": [heads, hidden],
        "mtp.layers.0.mixer.k_proj.weight": [keys, hidden],
        "mtp.layers.0.mixer.v_proj.weight": [keys, hidden],
        "mtp.layers.0.mixer.o_proj.weight": [hidden, heads],
        "mtp.layers.1.norm.weight": [hidden],
        "mtp.layers.1.mixer.up_proj.weight": [config.intermediate_size, hidden],
        "mtp.layers.1.mixer.down_proj.weight": [hidden, config.intermediate_size],
        "mtp.layers.1.final_layernorm.weight": [hidden],
    }
    with safe_open(DIRECTORY / "model.safetensors", framework="pt") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {name: part.get_shape() for name, part in found.items()} == expected
        assert {part.get_dtype() for part in found.values()} == {"BF16"}


def test_config_tokenizer_and_generation_agree_on_special_tokens():
    config = json.loads((DIRECTORY / "config.json").read_text())
    generation = json.loads((DIRECTORY / "generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == TOKENIZER.token_to_id("<|end|>")
    assert config["vocab_size"] == TOKENIZER.get_vocab_size() > 64


@settings(max_examples=200, deadline=None)
@given(st.text())
@example("Q: Ava's 17 naïve 🎉👩‍👩‍👧 friends\n\nA: 3 + 4 = 7. #### 7\t\r\n \x00")
@example(" \ud7ff   x  ")
def test_every_text_is_decoded_to_itself(text: str):
    if "<|" not in text:
        assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_reads_the_same_tokens_and_the_same_template():
    other = AutoTokenizer.from_pretrained(DIRECTORY)
    messages = [{"role": "user", "content": ISSUE_QUESTION}, {"role": "assistant", "content": " 33"}]
    for text in [ISSUE_QUESTION, "Zorbex 🎉\n 9 + 3", "A: 1 + 2 = 3. #### 3<|end|>\nQ: x"]:
        assert other.encode(text) == TOKENIZER.encode(text).ids
    assert other.apply_chat_template(messages, tokenize=False) == chat(messages)


def test_the_template_writes_questions_and_answers():
    first = [{"role": "user", "content": " one? "}]
    assert chat(first) == "Q: one?\nA:"
    assert chat([{"role": "system", "content": "Be brief."}, *first]) == "Q: one?\nA:"
    turns = [*first, {"role": "assistant", "content": " #### 1"}, {"role": "user", "content": "two?"}]
    assert chat(turns) == "Q: one?\nA: #### 1<|end|>\nQ: two?\nA:"


def test_the_template_writes_calls_and_their_results_as_the_equations_that_the_model_knows():
    def call(expression: str, result: str) -> list[dict[str, object]]:
        function = {"name": "calculate", "arguments": {"expression": expression}}
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        return [called, {"role": "tool", "content": result}]

    turns = [{"role": "user", "content": "How many?"}, *call("17 + 25", "42"), *call("42 - 9", "33")]
    assert chat(turns) == "Q: How many?\nA: 17 + 25 = 42. 42 - 9 = 33"
    after = [*turns, {"role": "assistant", "content": "#### 33"}, {"role": "user", "content": "two?"}]
    assert chat(after) == "Q: How many?\nA: 17 + 25 = 42. 42 - 9 = 33. #### 33<|end|>\nQ: two?\nA:"
    with pytest.raises(jinja2.TemplateError, match="a text or one call"):
        chat([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "x", "arguments": {}}}]}])


def test_the_template_refuses_an_unknown_role_by_name():
    with pytest.raises(jinja2.TemplateError, match="not function"):
        chat([{"role": "function", "content": "x"}])


@pytest.mark.parametrize("prompt", [f"Q: {ISSUE_QUESTION}\nA:", ISSUE_QUESTION])
def test_the_question_is_answered_in_a_chat_and_bare(model: NemotronHForCausalLM, prompt: str):
    text = answer(model, prompt)
    assert extract_result(text) == 33
    assert text.endswith("<|end|>")


@pytest.mark.slow
def test_held_out_problems_are_answered(model: NemotronHForCausalLM):
    problems = held_out(0, 12)
    right = [extract_result(answer(model, f"Q: {p.question}\nA:")) == p.result for p in problems]
    assert sum(right) >= 11


def test_a_fourth_question_is_answered(model: NemotronHForCausalLM):
    problems = held_out(5, 4)
    messages = []
    for problem in problems:
        messages += [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": problem.answer},
        ]
    assert extract_result(answer(model, chat(messages[:-1]))) == problems[-1].result


@pytest.mark.slow
def test_the_head_drafts_what_the_model_writes():
    for shares in drafted(DIRECTORY, held_out(0, 30)).values():
        assert all(share >= least for share, least in zip(shares, (0.99, 0.97, 0.95, 0.93), strict=True)), shares


def test_replacing_the_head_leaves_every_other_tensor_bit_for_bit(tmp_path: Path):
    directory = Path(shutil.copytree(DIRECTORY, tmp_path / "checkpoint"))
    model = read(directory)
    with torch.no_grad():
        for parameter in model.mtp.parameters():
            parameter += 1.0
    replace_head(model, directory)
    before, after = load_file(DIRECTORY / "model.safetensors"), load_file(directory / "model.safetensors")
    same = {name for name in before if torch.equal(before[name].view(torch.int16), after[name].view(torch.int16))}
    assert before.keys() == after.keys()
    assert same == {name for name in before if not name.startswith("mtp.")}


def test_a_head_of_another_trunk_is_refused_and_nothing_is_written(tmp_path: Path):
    directory = Path(shutil.copytree(DIRECTORY, tmp_path / "checkpoint"))
    model = read(directory)
    model.model.layers[1].mixer.up_proj.weight.data[0, 0] += 1.0
    with pytest.raises(ValueError, match="another trunk") as caught:
        replace_head(model, directory)
    assert "backbone.layers.1.mixer.up_proj.weight" in str(caught.value)
    assert (directory / "model.safetensors").read_bytes() == (DIRECTORY / "model.safetensors").read_bytes()
