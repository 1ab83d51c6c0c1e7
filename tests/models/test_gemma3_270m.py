"""Gemma 3 270M, a real model that has a name: transformers, with the weights that its blocks stand for, is the oracle.

Its file is 253 MB and comes with no extra of the tests: `ostinato fetch gemma3-270m` brings it.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from ostinato import LLM, SamplingParams
from ostinato.engine.text.tokenizer import load_tokenizer
from ostinato.models.checkpoint import resolve_model_dir
from ostinato.models.named_models import find_file

pytest.importorskip("gguf", reason="the package that reads GGUF files comes with the test extra")
import gguf

from tests.support.gguf_files import GEMMA_NORMS, NAMES

FILE = find_file("gemma3-270m")
pytestmark = pytest.mark.skipif(
    FILE is None, reason="the file of gemma3-270m is not here; `ostinato fetch gemma3-270m` brings it"
)

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "Water boils at a temperature of",
    "In 1969, Neil Armstrong",
    "La capitale de l'Allemagne est",
    "1, 2, 3, 4, 5,",
    "The best way to learn a language is",
    # Longer than the window of 512 tokens.
    " ".join(f"Line {i}: the number {i * 7} is followed by {i * 7 + 1}." for i in range(60)),
]


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    """Gemma 3 of transformers, with the values that the `gguf` package gives. Files store norms plus 1."""
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        sliding_window=512,
        query_pre_attn_scalar=256,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = gguf.GGUFReader(resolve_model_dir("gemma3-270m")).tensors
    values = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}
    names, theirs = NAMES | GEMMA_NORMS, {}
    for name, parameter in model.named_parameters():
        stem, _, part = name.removeprefix("model.layers.").rpartition(".")
        layer, _, inner = stem.partition(".")
        value = values[f"blk.{layer}.{names[inner]}.{part}" if inner in names else f"{names[stem]}.{part}"]
        theirs[name] = torch.from_numpy(value.reshape(parameter.shape).copy()) - int("norm" in name)
    model.load_state_dict(theirs, strict=False)
    model.tie_weights()
    return model.eval()


def test_greedy_tokens_equal_those_of_transformers(oracle: transformers.PreTrainedModel) -> None:
    llm = LLM("gemma3-270m", dtype="float32", max_model_len=2048, max_num_seqs=4, cache_memory="256MiB")
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    for output in llm.generate(PROMPTS, greedy):
        prompt, answer = list(output.prompt_token_ids), output.outputs[0]
        tokens = list(answer.token_ids)
        with torch.no_grad():
            # Each token is the best one behind those before it, so that transformers would have chosen them all.
            logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(dim=-1).tolist()
        expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        actual = torch.tensor([each.logprob for each in answer.logprobs or ()])
        assert (actual - expected).abs().max() < 1e-4 * logits.abs().max()


def test_runs_of_blanks_lines_and_tags_are_tokens_of_their_own() -> None:
    tokenizer = load_tokenizer(resolve_model_dir("gemma3-270m"))
    assert tokenizer.encode("hello")[0] == tokenizer.bos_token_id == 2
    for text, count in (("a\n\n\nb", 3), ("a    b", 3), ("<h1>x</h1>", 3), ("\t\t", 1), ("🙂 ½ ґ", 4)):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert (len(tokens), tokenizer.decode(tokens)) == (count, text)
