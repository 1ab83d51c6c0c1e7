"""Qwen4's text model: its facts from config.json, its tables on disk, and what is refused. Parity tests hold its
values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ostinato import SamplingParams
from ostinato.config import EngineConfig
from ostinato.errors import ModelError
from ostinato.layers.allocation import WeightAllocator
from ostinato.layers.ngram import NgramEmbedding
from ostinato.models.checkpoint import load_spec, read_config
from ostinato.models.checkpoint import model_spec as loaded_spec
from ostinato.models.loader import build_model, load_weights
from ostinato.models.qwen4_exp_text.spec import model_spec
from ostinato.models.random_weights import PERIOD, randomize_weights
from ostinato.models.weight_table import with_weight_table
from ostinato.ops.arrays import TorchArrays, dtype_name
from ostinato.ops.dispatch import select_ops
from ostinato.plan.mixers import NgramDeltaSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from tests.models.test_loader import copy_of
from tests.models.test_models import BLOCK_SIZE, CPU, poisoned_memory
from tests.support.checkpoints import checkpoint, oracle, random_prompt, randomize
from tests.support.parity import make_engine, run
from tests.support.plan_cases import cpu
from tests.support.recipes import qwen4_exp, qwen4_exp_text

NAME = "qwen4_exp_text"
TABLES = "model.layers.0.ple.ple_embedding"


def spec_of(**changes: object) -> ModelSpec:
    return model_spec(qwen4_exp_text().to_dict() | {"dtype": "float32"} | changes)


def tables_of(directory: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """The parts of the first layer's table, in a model of this dtype with the checkpoint's weights."""
    spec = with_weight_table(spec_of())
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), dtype_name(dtype)), spec)
    load_weights(model, directory)
    embedding = model.backbone.layers[0].ple.ple_embedding
    assert isinstance(embedding, NgramEmbedding)
    return [part.weight for part in embedding.ngram_embedding]


def test_hashes_and_tables_are_those_of_transformers() -> None:
    spec = spec_of()
    for number in (0, 2):
        theirs, mixer = oracle(NAME).model.layers[number].ple.ple_embedding, spec.layers[number].mixer
        assert isinstance(mixer, NgramDeltaSpec)
        assert mixer.ngrams.multipliers == tuple(theirs.layer_multipliers.tolist())
        assert mixer.ngrams.sizes == tuple(theirs.ngram_heads_vocab_sizes.tolist())
        assert mixer.ngrams.starts == tuple(theirs.ngram_heads_offsets.tolist())
        assert mixer.ngrams.table_rows == theirs.ngram_embedding.num_embeddings


ODD = {
    "two streams, no n-grams": {"hc_count": 2, "ple_layer_ids": []},
    "five streams of rank 1, bigrams": {"hc_count": 5, "hc_lowrank": 1, "ngram_size": 2, "heads_per_ngram": 3},
    "one head, one part, two taps": {"heads_per_ngram": 1, "split_ngram_parts": 1, "ple_conv_kernel_size": 2},
    "more parts than rows": {
        "ngram_vocab_size_base": 3,
        "make_ngram_vocab_size_divisible_by": 1,
        "split_ngram_parts": 50,
    },
    "blocks of one token": {"indexer_compress_ratio": 1, "indexer_budget": 7},
    "one block": {"indexer_compress_ratio": 5, "indexer_budget": 5},
    "no budget is reached": {"indexer_budget": 300},
    "whole heads rotate": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        "indexer_head_dim": 26,
    },
    "as many key heads, silu, no biases": {
        "num_key_value_heads": 4,
        "output_gate_type": None,
        "attention_bias": False,
        "norm_topk_prob": True,
    },
    "tied, the usual interval": {"tie_word_embeddings": True, "layer_types": None, "eos_token_id": 2},
    "attention alone": {"layer_types": ["indexed_attention"] * 4, "ple_layer_ids": None},
}
LENGTH = 100


@pytest.mark.slow
@pytest.mark.parametrize("changes", ODD.values(), ids=ODD)
@torch.inference_mode()
def test_odd_configs_compute_what_transformers_does(changes: dict[str, Any], tmp_path: Path) -> None:
    config = qwen4_exp_text()
    config = type(config)(**config.to_dict() | changes)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(theirs, seed=3)
    theirs.save_pretrained(tmp_path)
    prompt = [2, *random_prompt(LENGTH - 1, seed=3)]
    expected = theirs(torch.tensor([prompt]), use_cache=False).logits[0]
    spec = loaded_spec(read_config(tmp_path))
    model = build_model(WeightAllocator(select_ops({}), CPU, "float32"), spec)
    load_weights(model, tmp_path)
    memory, parts, start = poisoned_memory(spec), [], 0
    for end in (1, 3, 44, 45, LENGTH):
        table = tuple(range(1, -(-end // BLOCK_SIZE) + 1))
        row = BatchRow("r", tuple(prompt[start:end]), start, table, read_slot=2 if start else 0, write_slots=(2,))
        batch = Batch((row,), num_decode_rows=int(start > 0 and end - start == 1))
        parts.append(model.compute_logits(model(make_step_inputs(batch, BLOCK_SIZE, CPU), memory)))
        start = end
    assert (torch.cat(parts) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_stay_in_the_mapped_file_in_its_dtype(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    def convert(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if ".shard_" in name:
                tensors[name] = tensors[name].to(stored)

    directory = copy_of(NAME, tmp_path, convert)
    tables = tables_of(directory, dtype)
    expected = oracle(NAME).model.layers[0].ple.ple_embedding.ngram_embedding.weight.to(stored)
    assert torch.equal(torch.cat(tables), expected)
    file = (directory / "model.safetensors").resolve()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    ranges = [tuple(int(each, 16) for each in line.split()[0].split("-")) for line in mapped]
    assert all(any(begin <= table.data_ptr() < end for begin, end in ranges) for table in tables)


def test_a_checkpoint_with_other_hashes_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{TABLES}.layer_multipliers"] += 2

    with pytest.raises(ModelError, match="layer_multipliers has other values than follow from"):
        tables_of(copy_of(NAME, tmp_path, change), torch.float32)


def test_integers_of_a_prediction_head_are_neither_read_nor_compared(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("qweight", "layer_multipliers"):
            tensors[f"mtp.{TABLES.removeprefix('model.')}.{name}"] = torch.ones(3, dtype=torch.int32)

    assert tables_of(copy_of(NAME, tmp_path, add), torch.float32)


def test_quantised_tables_are_refused(tmp_path: Path) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        name = f"{TABLES}.ngram_embedding.shard_0.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(-(-len(tensors[name]) // 32), 1)

    directory, method = copy_of(NAME, tmp_path, quantise), {"quant_method": "fp8", "weight_block_size": [32, 32]}
    spec = loaded_spec(read_config(directory) | {"quantization_config": method})
    model = build_model(WeightAllocator(select_ops({}), CPU, "float32"), spec)
    with pytest.raises(ModelError, match=r"(?s)left over .*shard_0.weight_scale_inv.*shard_0.weight is F8_E4M3, exp"):
        load_weights(model, directory)


def test_random_tables_of_any_size_take_no_memory_of_their_own() -> None:
    spec = with_weight_table(spec_of(ngram_vocab_size_base=200_000, split_ngram_parts=3))
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "bfloat16"), spec)
    randomize_weights(model, 0)
    parts = [part.weight for part in model.backbone.layers[0].ple.ple_embedding.ngram_embedding]
    assert sum(len(part) for part in parts) > 1_200_000
    assert all(part.untyped_storage().nbytes() <= 2 * 2 * PERIOD for part in parts)
    assert all(part[: len(part) : 1000].isfinite().all() for part in parts)


def test_the_plan_counts_tables_as_disk_and_says_so() -> None:
    """At 6 heads of 20 million rows of 10 elements, they are more than the memory of the machine."""
    spec = with_weight_table(spec_of(ngram_vocab_size_base=20_000_000))
    assert spec.disk_bytes == 4 * 10 * sum(
        layer.mixer.ngrams.table_rows for layer in spec.layers if isinstance(layer.mixer, NgramDeltaSpec)
    )
    device = cpu(2**30)
    assert spec.disk_bytes > device.memory_bytes
    plan = make_plan(EngineConfig(model="m", device="cpu", max_model_len=256, cache_memory="8MiB"), spec, device)
    [decision] = [each for each in plan.decisions if each.topic == "tables"]
    assert decision.effective == "8.94 GiB on disk"
    assert plan.memory.weights == spec.weight_bytes("float32") < 2**24


def test_the_tables_of_a_draft_model_are_on_disk_too() -> None:
    config = EngineConfig(
        model=str(checkpoint("qwen3")), device="cpu", max_model_len=256, speculative=f"draft:{checkpoint(NAME)}:2"
    )
    [decision] = [each for each in make_plan(config, load_spec(config), cpu(2**32)).decisions if each.topic == "tables"]
    assert decision.effective == "36.9 KiB on disk"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hc_count": 1}, "hc_count = 1"),
        ({"hc_count": 65}, "hc_count above 64"),
        ({"output_gate_type": "gelu"}, "output_gate_type = 'gelu'; supported: silu, sigmoid"),
        ({"indexer_kv_heads": 2}, "2 heads of keys"),
        ({"indexer_budget": 13}, "selects 13 tokens in blocks of 3"),
        ({"indexer_head_dim": 10}, "rotates 12 elements of heads, more than indexer_head_dim = 10"),
        (
            {f"indexer_{each}": None for each in ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")},
            "indexer",
        ),
        ({"ple_layer_ids": [2]}, r"ple_layer_ids = \[2\]; supported: layers with linear attention"),
        ({"ple_layer_ids": [9]}, "should be numbers of layers, 1 to 4"),
        ({"ple_embed_dim": 61}, "ple_embed_dim = 61"),
        ({"eos_token_id": None}, "eos_token_id = None"),
        ({"split_ngram_parts": 0}, "split_ngram_parts = 0"),
        ({"split_ngram_parts": 2**14}, "up to 4,096 heads|1 to 16,384 parts"),
        ({"heads_per_ngram": 1000, "ple_embed_dim": 3000}, "3000 heads each"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(**changes)


@pytest.mark.parametrize("name", ["mtp_num_hidden_layers", "num_nextn_predict_layers"])
def test_a_plan_says_that_a_prediction_head_is_not_run(name: str) -> None:
    assert spec_of().left_out is None
    assert spec_of(**{name: 1}).left_out == "the prediction head is not run"
    config = qwen4_exp().to_dict()
    config["text_config"] |= {name: 1}
    assert loaded_spec(config).left_out == (
        "the encoder of images is not run; requests are text; the prediction head is not run"
    )


def test_keys_of_8_bits_are_those_of_the_indexer_too_and_kernels_agree_on_them() -> None:
    """Log-probabilities of a prompt beyond the budget, from native kernels, references, and exact keys."""

    def scored(**settings: Any) -> torch.Tensor:
        engine = make_engine(NAME, graph_mode="none", **settings)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=1)
        output = engine.output(engine.add_request(random_prompt(LENGTH, seed=3), params))
        run(engine)
        assert output is not None
        kinds = {str(each) for layer in engine.runner.layer_memory for each in layer.block_tensors}
        assert ("index_scales" in kinds) == ("kv_cache_dtype" in settings)
        return torch.tensor([each.logprob for each in output.prompt_logprobs or () if each is not None])

    native, reference = (scored(kv_cache_dtype="int8", kernels=each) for each in ("auto", "reference"))
    torch.testing.assert_close(native, reference, atol=1e-3, rtol=0)
    apart = (native - scored()).abs()
    assert apart.max() > 1e-4
    assert apart.median() < 0.05
