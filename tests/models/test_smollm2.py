"""The real model that has a name: transformers, with the weights that its blocks stand for, is the oracle.

Its file is 98 MB and comes with no extra of the tests: `ostinato fetch smollm2` brings it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from ostinato import LLM, SamplingParams
from ostinato.engine.text.chat_template import load_chat_template
from ostinato.engine.text.tokenizer import load_tokenizer
from ostinato.formats.checkpoint_json import gguf_header
from ostinato.models.checkpoint import resolve_model_dir
from ostinato.models.named_models import find_file

pytest.importorskip("gguf", reason="the package that reads GGUF files comes with the test extra")
import gguf

from tests.support.gguf_files import NAMES

FILE = find_file("smollm2")
pytestmark = pytest.mark.skipif(
    FILE is None, reason="the file of smollm2 is not here; `ostinato fetch smollm2` brings it"
)

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write a line about the sea.",
    "What is 2 + 2?",
    "Explain gravity to a child.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "What does a compiler do?",
    "Why is the sky blue?",
    "List the days of the week.",
    "What is photosynthesis?",
    "Say something kind.",
    "How do I boil an egg?",
    "What is a prime number?",
    "Write a Python function that adds two numbers.",
    "What is the largest ocean?",
    "Tell me a joke.",
    "What are the seasons?",
    "How many legs has a spider?",
]
ALPHABET = "abcdefghijk XYZ  \n\n\t\r019'.,;:!?()[]{}<>|=+-*/\\\"#éßñøЖдя日本語한글العربية🙂👍🏽\u0301\u200b\u00a0½²"


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    """Llama of transformers, with the values that the `gguf` package gives."""
    reader = gguf.GGUFReader(resolve_model_dir("smollm2"))
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    values = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    theirs = {}
    for name, parameter in model.named_parameters():
        stem, _, part = name.removeprefix("model.layers.").rpartition(".")
        layer, _, inner = stem.partition(".")
        value = values[f"blk.{layer}.{NAMES[inner]}.{part}" if inner in NAMES else f"{NAMES[stem]}.{part}"]
        if inner in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = 9 if inner == "self_attn.q_proj" else 3
            value = value.reshape(heads, -1, 2, 576).swapaxes(1, 2)
        theirs[name] = torch.from_numpy(value.reshape(parameter.shape).copy())
    model.load_state_dict(theirs, strict=False)
    model.tie_weights()
    return model.eval()


def test_greedy_answers_equal_those_of_transformers(oracle: transformers.PreTrainedModel) -> None:
    llm = LLM("smollm2", dtype="float32", max_model_len=512, max_num_seqs=8, cache_memory="256MiB")
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    answers = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], greedy)
    assert "Paris" in answers[0].outputs[0].text
    for answer in answers:
        prompt, tokens = list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)
        with torch.no_grad():
            # Each token is the best one behind those before it, so that transformers would have chosen them all.
            best = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].argmax(dim=-1)
        assert tokens == best.tolist()


def texts(count: int) -> list[str]:
    draw = random.Random(11)
    code = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py")))
    found = []
    for number in range(count):
        if number % 2:
            begin = draw.randrange(len(code))
            found.append(code[begin : begin + draw.randrange(1, 120)])
        else:
            found.append("".join(draw.choices(ALPHABET, k=draw.randrange(60))))
    return found


def test_texts_have_the_tokens_that_transformers_gives_them() -> None:
    metadata = gguf_header(resolve_model_dir("smollm2")).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = transformers.GPT2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    cuts = tokenizers.pre_tokenizers
    # As its own tokenizer.json has it.
    theirs.backend_tokenizer.pre_tokenizer = cuts.Sequence([cuts.Digits(True), cuts.ByteLevel(add_prefix_space=False)])
    theirs.backend_tokenizer.add_special_tokens(tokens[:17])
    own = load_tokenizer(resolve_model_dir("smollm2"))
    for text in texts(10_000):
        assert own.encode(text) == theirs.encode(text, add_special_tokens=False), json.dumps(text)
        assert own.decode(own.encode(text), skip_special_tokens=False) == text


def test_conversations_become_the_prompts_that_transformers_makes_of_them() -> None:
    directory = resolve_model_dir("smollm2")
    tokenizer = load_tokenizer(directory)
    template = load_chat_template(directory, tokenizer.special_tokens)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.to_json()))
    conversations = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n there "}],
        [{"role": role, "content": f"{role} says"} for role in ("user", "assistant", "user")],
    ]
    for messages in conversations:
        expected = theirs.apply_chat_template(
            messages, chat_template=template.text, tokenize=False, add_generation_prompt=True
        )
        assert template.render(messages) == expected
        [end] = tokenizer.encode("<|im_end|>")
        assert end in tokenizer.eos_token_ids
