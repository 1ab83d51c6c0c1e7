"""What the plan makes of `kv_cache_dtype`: bytes of blocks, what fits, what a step reads, and what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.cache_files import cache_fingerprint
from ostinato.errors import ConfigError
from ostinato.ops.kernel_cost import StepShape
from ostinato.plan.kernel_costs import kernel_work
from ostinato.plan.layer_specs import IndexerSpec
from ostinato.plan.memory.activations import activation_bytes
from ostinato.plan.memory.cache_modes import bytes_per_token
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from tests.support.plan_cases import ATTENTION, GIB, attention_layer, cpu, gpu, hybrid, mamba2_layer, model


def planned(spec: ModelSpec, **settings: Any) -> Plan:
    return make_plan(EngineConfig(**settings), spec, cpu(64 * GIB))


@pytest.mark.parametrize("inside", [False, True])
def test_a_token_of_8_bits_takes_its_elements_and_a_scale_for_each_head(inside: bool) -> None:
    attention = replace(ATTENTION, values_in_keys=inside)
    heads = ATTENTION.num_kv_heads * (1 if inside else 2)
    assert bytes_per_token(attention, "int8") == heads * (ATTENTION.head_dim + 4)
    assert bytes_per_token(attention, "bfloat16") == heads * ATTENTION.head_dim * 2
    indexer = IndexerSpec(num_heads=3, head_dim=20, budget=8, ratio=2)
    selecting = replace(attention, indexer=indexer)
    assert bytes_per_token(selecting, "int8") == bytes_per_token(attention, "int8") + 20 + 4
    assert bytes_per_token(selecting, "bfloat16") == bytes_per_token(attention, "bfloat16") + 20 * 2
    sharing = replace(attention, indexer=replace(indexer, is_gated=True, is_shared=True))
    for dtype in ("int8", "bfloat16"):
        assert bytes_per_token(sharing, dtype) == bytes_per_token(attention, dtype), "it caches no key of an indexer"


@pytest.mark.parametrize("device", [cpu(64 * GIB), gpu(80 * GIB)])
def test_with_8_bits_the_same_memory_holds_more_tokens_and_the_plan_says_what_they_take(device: Any) -> None:
    spec = model(attention_layer(), attention_layer(), dtype="bfloat16")
    plain, small = (make_plan(EngineConfig(**each), spec, device) for each in ({}, {"kv_cache_dtype": "int8"}))
    assert (plain.settings.kv_cache_dtype, small.settings.kv_cache_dtype) == ("bfloat16", "int8")
    per_token = 2 * bytes_per_token(ATTENTION, "int8")
    assert small.memory.kv_block == 16 * per_token == 16 * small.model.kv_bytes_per_token
    assert small.memory.kv_block / plain.memory.kv_block == (ATTENTION.head_dim + 4) / (2 * ATTENTION.head_dim)
    [decision] = [each for each in small.decisions if each.topic == "kv_cache_dtype"]
    assert f"{per_token} bytes per token in place of {plain.model.kv_bytes_per_token}" in decision.reason
    assert not [each for each in plain.decisions if each.topic == "kv_cache_dtype"]


def test_keys_with_gates_are_not_kept_in_8_bits() -> None:
    """Their selection reads them as they are: integers without their scales would select other blocks."""
    indexer = IndexerSpec(num_heads=3, head_dim=20, budget=8, ratio=2, is_gated=True)
    spec = model(replace(attention_layer(), attention=replace(ATTENTION, indexer=indexer)))
    with pytest.raises(ConfigError, match="keys with gates") as caught:
        planned(spec, kv_cache_dtype="int8")
    assert [(each.setting, each.value) for each in caught.value.remedies] == [("kv_cache_dtype", "auto")]


def test_without_attention_the_setting_has_no_effect_and_the_plan_says_so() -> None:
    plan = planned(model(mamba2_layer()), kv_cache_dtype="int8")
    [decision] = [each for each in plan.decisions if each.topic == "kv_cache_dtype"]
    assert decision.reason.startswith("without effect")
    assert plan.memory.num_blocks == 0


def test_a_step_reads_and_writes_fewer_bytes_and_computes_as_much() -> None:
    step = StepShape(rows=3, tokens_per_row=1, context=10, decodes=True)
    plain, small = (kernel_work(hybrid(), "bfloat16", "float32", step, kept)["attention"] for kept in (None, "int8"))
    assert plain is not None
    assert small is not None
    assert small.flops == plain.flops
    of_layers = sum(bytes_per_token(each, "int8") for each in hybrid().attention_layers)
    assert small.num_bytes == 3 * 12 * of_layers


def test_a_reference_widens_the_integers_that_it_gathers() -> None:
    """To float32: what a long context takes grows by 5 bytes for each element, and not by 2."""
    only = model(attention_layer())

    def grows(kept: str | None) -> int:
        short, long = (
            activation_bytes(only, "bfloat16", 8, 1, length, gathers_states=False, kv_cache_dtype=kept)
            for length in (10_000, 20_000)
        )
        return long - short

    elements = 10_000 * ATTENTION.kv_elements_per_token
    assert grows("int8") - grows(None) == pytest.approx(1.25 * elements * (5 - 2), rel=0.01)


def test_blocks_of_8_bits_are_no_others() -> None:
    """Neither in files nor in a request that moves."""
    identities = [cache_fingerprint(planned(hybrid(), **each)) for each in ({}, {"kv_cache_dtype": "int8"})]
    assert identities[0] != identities[1]
    assert identities[1]["kv_cache_dtype"] == "int8"


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        ("fp8", "int8", "keeps more of each number"),
        ("fp8_e5m2", "int8", "keeps more of each number"),
        ("q8_0", "int8", "one scale for each token's head"),
        ("q4_0", "int8", "no fewer than 8 bits"),
        ("bfloat16", "auto", "the dtype of the model"),
        ("f16", "auto", "the dtype of the model"),
        ("int3", "int8", "should be 'auto' or 'int8'"),
        ("thin", None, "should be 'auto' or 'int8'"),
    ],
)
def test_dtypes_of_other_engines_are_answered_with_what_there_is(theirs: str, ours: str | None, why: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype = '{theirs}': .*{why}") as caught:
        EngineConfig(kv_cache_dtype=theirs)
    assert [each.value for each in caught.value.remedies] == ([] if ours is None else [ours])
    assert all(EngineConfig(kv_cache_dtype=each.value) for each in caught.value.remedies)


@pytest.mark.parametrize("theirs", ["int8", "fp8"])
def test_running_states_of_8_bits_are_refused_with_where_there_are_some_and_why(theirs: str) -> None:
    with pytest.raises(
        ConfigError, match=r"ssm_checkpoint_dtype int8\); running states of 8 bits take longer"
    ) as caught:
        EngineConfig(ssm_state_dtype=theirs)
    assert [(each.setting, each.value) for each in caught.value.remedies] == [("ssm_state_dtype", "float32")]
