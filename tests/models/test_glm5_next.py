"""GLM-5.3's text: odd configurations against transformers, its facts from config.json, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, ModelError
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import model_spec as loaded_spec
from ostinato.models.checkpoint import read_config
from ostinato.models.glm5_next.spec import model_spec
from ostinato.models.loader import build_model, load_weights
from ostinato.models.weight_table import with_weight_table
from ostinato.ops.dispatch import select_ops
from ostinato.plan.memory.cache_modes import bytes_per_token
from ostinato.plan.mixers import GatedDeltaSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from tests.models.test_config_defaults import KINDS, OF_LENGTH, is_as_in_transformers
from tests.models.test_loader import copy_of
from tests.models.test_models import BLOCK_SIZE, CPU, poisoned_memory
from tests.support.checkpoints import checkpoint, random_prompt, randomize
from tests.support.plan_cases import cpu
from tests.support.recipes import glm5_next

NAME = "glm5_next"


def config_with(**changes: object) -> PretrainedConfig:
    config = glm5_next()
    whole = config.to_dict()
    return type(config)(**whole | {"text_config": whole["text_config"] | changes})


def spec_of(**changes: object) -> ModelSpec:
    whole = glm5_next().to_dict()
    return model_spec(whole | {"dtype": "float32", "text_config": whole["text_config"] | changes})


FIVE = {"num_hidden_layers": 5, "layer_types": ["indexed_attention"] * 5}
ODD: dict[str, dict[str, Any]] = {
    "no tail": {"index_kpool_always_select_tail": False},
    "blocks of one token, no tail": {"index_kpool": 1, "index_topk": 7, "index_kpool_always_select_tail": False},
    "one block": {"index_kpool": 5, "index_topk": 5},
    "no budget is reached": {"index_topk": 300},
    "one stream, one iteration": {"hc_mult": 1, "hc_sinkhorn_iters": 1},
    "five streams, many iterations": {"hc_mult": 5, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6},
    "no bound of decays, two taps": {"linear_lower_bound": None, "linear_conv_kernel_dim": 2},
    "no biases, one group, weights as they are": {
        "attention_bias": False,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
    },
    "attention alone, every other choice shared": {
        **FIVE,
        "indexer_types": ["full", "shared", "full", "shared", "full"],
    },
    "delta nets alone": {"layer_types": ["linear_attention"] * 5},
    "the usual layers": {"layer_types": None, "indexer_types": None, "mlp_layer_types": None, "num_hidden_layers": 6},
    "tight activations": {"swiglu_limit": 0.1},
    "loose activations, one shared expert": {"swiglu_limit": 1000.0, "n_shared_experts": 1},
    "values wider than keys, one head": {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "v_head_dim": 30,
        "qk_nope_head_dim": 7,
    },
}
LENGTH = 100


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("changes", ODD.values(), ids=ODD)
@torch.inference_mode()
def test_odd_configs_compute_what_transformers_does(changes: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    config = config_with(**changes)
    config.tie_word_embeddings = tied
    theirs = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(theirs, seed=3)
    theirs.save_pretrained(tmp_path)
    prompt = random_prompt(LENGTH, seed=3)
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
    assert (torch.cat(parts) - expected).abs().max() < 1e-4 * expected.abs().max()


AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "names of layers of other models": {"layer_types": ["full_attention", *["linear_attention"] * 8, "full_attention"]},
    "a pattern of indexers": {"layer_types": ["indexed_attention"] * 10, "index_topk_pattern": "FSFFSFFSFS"},
    "a list of indexers": {"layer_types": ["indexed_attention"] * 10, "index_topk_pattern": ["full", "shared"] * 5},
    "a period of indexers": {"layer_types": ["indexed_attention"] * 10, "index_topk_freq": 2},
    "a period of indexers from the first on": {
        "layer_types": ["indexed_attention"] * 10,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
    },
    "sizes of delta nets in a dict": {
        "linear_attn_config": {"head_dim": 20, "num_heads": 6, "short_conv_kernel_size": 3, "gate_lower_bound": -1.5}
    },
    "a safe gate": {"linear_lower_bound": None, "linear_attn_config": {"head_dim": 20, "gate_lower_bound": None}},
    "no safe gate": {"linear_lower_bound": None, "linear_attn_config": {"safe_gate": False}},
    "no bound": {"linear_lower_bound": None},
}


@pytest.mark.parametrize("given", AS_PUBLISHED.values(), ids=AS_PUBLISHED)
@pytest.mark.parametrize("is_flat", [False, True])
def test_a_published_config_is_read_as_transformers_does(given: dict[str, Any], is_flat: bool) -> None:
    given = {"num_hidden_layers": 10, **given}
    theirs = transformers.AutoConfig.for_model("glm5_next_text", **given)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads")
    sizes += ("n_routed_experts", "num_experts_per_tok", "kv_lora_rank", "q_lora_rank", "v_head_dim")
    text = {name: getattr(theirs, name) for name in (*sizes, "qk_nope_head_dim")} | given
    spec = model_spec({"model_type": NAME, **(text if is_flat else {"text_config": text})})
    hyper = spec.hyperparameters
    for i, layer in enumerate(spec.layers):
        assert (layer.attention is not None) == (theirs.layer_types[i] == "indexed_attention")
        assert (layer.experts is not None) == (theirs.mlp_layer_types[i] == "sparse")
        if layer.attention is not None:
            indexer = layer.attention.indexer
            assert indexer is not None
            assert indexer.is_shared == (theirs.indexer_types[i] == "shared")
            assert (indexer.num_heads, indexer.head_dim) == (theirs.index_n_heads, theirs.index_head_dim)
            assert (indexer.budget, indexer.ratio) == (theirs.index_topk, theirs.index_kpool)
        else:
            heads, size = theirs.linear_num_heads, theirs.linear_head_dim
            width = theirs.linear_conv_kernel_dim
            assert layer.mixer == GatedDeltaSpec(heads, heads, size, size, width, per_channel=True)
    assert hyper.decay_bound == (theirs.linear_lower_bound or 0.0)
    assert (hyper.streams, hyper.stream_eps, hyper.iterations) == (4, theirs.hc_eps, theirs.hc_sinkhorn_iters)
    assert (hyper.clamp[1], hyper.norm_eps, spec.tied_embeddings) == (theirs.swiglu_limit, theirs.rms_norm_eps, False)
    assert (hyper.moe.scaling, hyper.moe.normalize) == (theirs.routed_scaling_factor, theirs.norm_topk_prob)


@pytest.mark.parametrize("is_null", [False, True], ids=["absent", "null"])
def test_what_the_text_leaves_out_is_as_in_transformers_or_asked_for(is_null: bool) -> None:
    config = glm5_next()
    whole, compared, faults = config.to_dict(), 0, []
    for key in sorted(whole["text_config"].keys() - KINDS - OF_LENGTH):
        changed = copy.deepcopy(whole)
        if is_null:
            changed["text_config"][key] = None
        else:
            del changed["text_config"][key]
        alike = is_as_in_transformers(type(config), changed, key)
        compared += alike is not None
        if alike is False:
            faults.append(key)
    assert not faults
    assert compared >= 10


@pytest.mark.slow
def test_the_published_sizes_have_the_parameters_of_transformers() -> None:
    config = transformers.AutoConfig.for_model(NAME, text_config={}, vision_config={})
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(config)
    count = sum(parameter.numel() for name, parameter in theirs.named_parameters() if "visual" not in name)
    count += sum(buffer.numel() for name, buffer in theirs.named_buffers() if "e_score" in name)
    assert with_weight_table(model_spec(config.to_dict())).num_parameters == count


def test_the_plan_counts_a_key_and_its_gates_in_layers_with_an_indexer_of_their_own() -> None:
    spec = with_weight_table(spec_of())
    assert [bytes_per_token(each, "float32") for each in spec.attention_layers] == [
        4 * (20 + 36),
        4 * 20,
        4 * (20 + 36),
    ]
    plan = make_plan(EngineConfig(model=str(checkpoint(NAME)), device="cpu"), spec, cpu(2**32))
    assert plan.model.kv_bytes_per_token == 4 * (3 * 20 + 2 * 36)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim = 8; supported: 0"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"q_lora_rank": None}, "'q_lora_rank'"),
        ({"q_lora_rank": 0}, "q_lora_rank = 0"),
        ({"index_topk": 13}, "index_topk = 13 tokens in blocks of index_kpool = 3"),
        ({"index_kpool": 0}, "index_kpool = 0"),
        ({"indexer_types": ["full", "shared", "full", "full", "full"]}, "shared indexer in layer 1"),
        ({"indexer_types": ["full", "full", "shared", "full", "shared"]}, "shared indexer in layer 4"),
        ({"indexer_types": ["none"] * 5}, "indexer_types none; supported: full, shared"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types sliding_attention"),
        ({"linear_lower_bound": 0.5}, "linear_lower_bound = 0.5; it should be below 0, or null"),
        ({"linear_attn_config": [1]}, "linear_attn_config"),
        ({"swiglu_limit": 0.0}, "swiglu_limit = 0.0"),
        ({"hc_mult": 0}, "hc_mult = 0"),
        ({"hc_mult": 65}, "hc_mult above 64"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters = 0"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported: silu"),
        ({"model_type": "glm4"}, "model_type = 'glm4'; supported: 'glm5_next_text'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(**changes)


def test_a_plan_says_what_of_a_checkpoint_is_not_run() -> None:
    assert spec_of().left_out == "the encoder of images is not run; requests are text"
    both = spec_of(num_nextn_predict_layers=1).left_out
    assert both == "the encoder of images is not run; requests are text; the prediction head is not run"
    text = glm5_next().to_dict()["text_config"]
    assert model_spec(text | {"model_type": NAME}).left_out is None


def test_tensors_of_a_prediction_head_are_left_out(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for prefix in ("model.language_model.", "model."):
            tensors[f"{prefix}layers.5.eh_proj.weight"] = torch.ones(3)
            tensors[f"{prefix}layers.4.shared_head.norm.weight"] = torch.ones(3)

    model = build_model(WeightAllocator(select_ops({}), CPU, "float32"), loaded_spec(read_config(checkpoint(NAME))))
    load_weights(model, copy_of(NAME, tmp_path, add))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "these are not kept in 8 bits"),
        ({"deterministic": True}, "deterministic needs native kernels, and there are none for"),
        ({"kernels": "native"}, "select_blocks"),
    ],
)
def test_settings_that_need_what_is_not_there_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    spec = with_weight_table(spec_of())
    with pytest.raises(ConfigError, match=message):
        make_plan(EngineConfig(model=str(checkpoint(NAME)), device="cpu", **settings), spec, cpu(2**32))
