"""What is planned: defaults, lowering, decisions, contradictions, and the plan as data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, ModelError
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.render.tables import rope_text
from ostinato.plan.rope import RopeSpec
from tests.support.plan_cases import (
    ATTENTION,
    GIB,
    MIB,
    attention_layer,
    cpu,
    gpu,
    hybrid,
    mamba2_layer,
    mlp_layer,
    model,
)

AS_PLANNED = {"max_capture_size": 512}
"""The graphs of the default max_num_seqs of a GPU, which a given one would have fewer of."""


def decided(plan: Plan) -> dict[str, tuple[object, object]]:
    assert len({decision.topic for decision in plan.decisions}) == len(plan.decisions)
    assert all(decision.reason for decision in plan.decisions)
    return {decision.topic: (decision.requested, decision.effective) for decision in plan.decisions}


@pytest.mark.parametrize(
    ("device", "rows", "tokens", "threads"), [(gpu(80 * GIB), 256, 8192, None), (cpu(64 * GIB), 32, 1024, 4)]
)
def test_defaults_depend_on_the_kind_of_device(device, rows, tokens, threads) -> None:
    settings = make_plan(EngineConfig(), hybrid(), device).settings
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (rows, tokens)
    assert (settings.max_model_len, settings.block_size, settings.threads) == (4096, 16, threads)
    assert (settings.dtype, settings.ssm_state_dtype, settings.device) == ("bfloat16", "float32", device.kind)
    assert settings.enable_chunked_prefill
    assert (settings.scheduling_policy, settings.seed, settings.ropes) == ("fcfs", 0, ())


def test_more_threads_than_there_are_cores_are_kept_and_told_of() -> None:
    plan = make_plan(EngineConfig(threads=999), hybrid(), cpu(64 * GIB))
    assert (plan.settings.threads, decided(plan)["threads"]) == (999, (999, 999))
    assert "threads" not in decided(make_plan(EngineConfig(threads=4), hybrid(), cpu(64 * GIB)))


def test_a_gpu_is_used_to_nine_tenths_and_a_given_utilization_is_kept() -> None:
    assert make_plan(EngineConfig(), hybrid(), gpu(10 * GIB)).memory.available == 9 * GIB
    config = EngineConfig(memory_utilization=0.5)
    assert make_plan(config, hybrid(), gpu(10 * GIB)).memory.available == 5 * GIB


@pytest.mark.parametrize(
    ("memory", "cache"),
    [(64 * GIB, 4 * GIB), (8 * GIB, 2 * GIB)],
)
def test_the_cache_of_a_cpu_is_4_gib_or_a_quarter(memory: int, cache: int) -> None:
    long = hybrid(max_position_embeddings=200_000)
    plan = make_plan(EngineConfig(max_num_seqs=64), long, cpu(memory))
    assert cache - plan.memory.kv_block < plan.memory.cache <= cache
    assert "cache_memory" not in decided(plan)


def test_the_default_cache_of_a_cpu_shrinks_beside_large_weights_as_a_decision() -> None:
    large = model(mamba2_layer(), attention_layer(), mlp_layer(parameters=1_700_000_000))
    plan = make_plan(EngineConfig(), large, cpu(4 * GIB))
    requested, effective = decided(plan)["cache_memory"]
    assert requested == GIB
    assert effective == 4 * GIB - plan.memory.weights - plan.memory.activations - plan.memory.graphs
    assert plan.memory.cache <= effective < requested


def test_counts_include_null_block_and_null_slot() -> None:
    config = EngineConfig(max_num_seqs=4, max_model_len=100, enable_prefix_caching=False)
    memory = make_plan(config, hybrid(), gpu(10 * GIB)).memory
    assert (memory.num_slots, memory.num_blocks) == (4 + 1, 4 * 7 + 1)
    assert memory.slots_per_request == 1


def test_blocks_that_no_request_could_use_are_left_out_as_a_decision() -> None:
    config = EngineConfig(max_num_seqs=1, max_model_len=32, enable_prefix_caching=False)
    plan = make_plan(config, hybrid(), gpu(10 * GIB))
    possible, effective = decided(plan)["num_blocks"]
    assert effective == plan.memory.num_blocks == 3
    assert possible > 1000


def test_open_rows_are_lowered_first_and_only_as_far_as_needed() -> None:
    plan = make_plan(EngineConfig(), hybrid(), gpu(GIB // 2))
    requested, rows = decided(plan)["max_num_seqs"]
    assert requested == 256
    assert 1 < rows < 256
    assert plan.settings.max_num_seqs == rows
    assert (plan.settings.max_num_batched_tokens, plan.settings.max_model_len) == (8192, 4096)
    with pytest.raises(CapacityError):
        make_plan(EngineConfig(max_num_seqs=rows + 1, **AS_PLANNED), hybrid(), gpu(GIB // 2))


def test_tokens_are_lowered_after_rows_and_before_the_length() -> None:
    plan = make_plan(EngineConfig(), hybrid(), gpu(200 * MIB))
    _, tokens = decided(plan)["max_num_batched_tokens"]
    assert 256 < tokens < 8192
    assert plan.settings.max_model_len == 4096
    with pytest.raises(CapacityError):
        make_plan(
            EngineConfig(max_num_seqs=1, max_num_batched_tokens=tokens + 1, max_model_len=4096, **AS_PLANNED),
            hybrid(),
            gpu(200 * MIB),
        )


def test_the_length_is_lowered_only_if_one_request_still_does_not_fit() -> None:
    long = hybrid(max_position_embeddings=10**6)
    plan = make_plan(EngineConfig(), long, gpu(300 * MIB))
    requested, length = decided(plan)["max_model_len"]
    assert requested == 10**6
    assert length % 16 == 0
    assert plan.settings.max_num_batched_tokens <= 272
    one_request = EngineConfig(max_num_seqs=1, max_num_batched_tokens=256, max_model_len=length + 16, **AS_PLANNED)
    with pytest.raises(CapacityError):
        make_plan(one_request, long, gpu(300 * MIB))


def test_a_cache_too_small_for_one_request_shortens_requests_and_spares_rows_and_tokens() -> None:
    attention_only = model(attention_layer(), mlp_layer(), max_position_embeddings=10**6)
    plan = make_plan(EngineConfig(cache_memory="2MiB"), attention_only, cpu(64 * GIB))
    block = 2 * 2 * 64 * 16 * 2
    assert plan.settings.max_model_len == (2 * MIB // block - 1) * 16
    assert (plan.settings.max_num_seqs, plan.settings.max_num_batched_tokens) == (32, 1024)


def test_tokens_and_length_are_not_lowered_to_make_room_for_given_rows() -> None:
    with pytest.raises(CapacityError) as error:
        make_plan(EngineConfig(max_num_seqs=500), hybrid(), cpu(2 * GIB))
    assert "even with" not in error.value.message


def test_decisions_about_one_setting_are_one_decision() -> None:
    plan = make_plan(EngineConfig(max_num_batched_tokens=200), hybrid(), gpu(GIB // 3))
    requested, effective = decided(plan)["max_num_seqs"]
    assert requested == 256
    assert effective == plan.settings.max_num_seqs < 200 - 16


def test_open_tokens_are_raised_for_given_rows_as_a_decision() -> None:
    config = EngineConfig(max_num_seqs=1020, cache_memory="8GiB")
    plan = make_plan(config, hybrid(), cpu(64 * GIB))
    assert decided(plan)["max_num_batched_tokens"] == (1024, 1036)


def test_open_rows_give_way_to_given_tokens_as_a_decision() -> None:
    plan = make_plan(EngineConfig(max_num_batched_tokens=40), hybrid(), cpu(64 * GIB))
    assert decided(plan)["max_num_seqs"] == (32, 24)


def test_given_rows_and_tokens_that_contradict_are_refused_with_both_remedies() -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(EngineConfig(max_num_seqs=300, max_num_batched_tokens=300), hybrid(), gpu(80 * GIB))
    remedies = {remedy.setting: remedy.value for remedy in error.value.remedies}
    assert remedies == {"max_num_batched_tokens": 316, "max_num_seqs": 284}


def test_remedies_of_a_contradiction_also_fit_the_memory() -> None:
    device = gpu(GIB // 2)
    config = EngineConfig(max_num_seqs=300, max_num_batched_tokens=300)
    with pytest.raises(ConfigError) as error:
        make_plan(config, hybrid(), device)
    [remedy] = error.value.remedies
    assert remedy.setting == "max_num_seqs"
    assert remedy.value < 284
    make_plan(config.with_settings(max_num_seqs=remedy.value), hybrid(), device)


def test_tokens_too_few_for_one_row_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(EngineConfig(max_num_batched_tokens=16), hybrid(), cpu(64 * GIB))
    assert [(remedy.setting, remedy.value) for remedy in error.value.remedies] == [("max_num_batched_tokens", 17)]


def test_a_length_beyond_the_models_is_refused_with_the_longest() -> None:
    with pytest.raises(ConfigError, match="4096") as error:
        make_plan(EngineConfig(max_model_len=4097), hybrid(), gpu(80 * GIB))
    assert error.value.remedies[0].value == 4096


def test_without_a_maximum_in_the_config_the_length_is_32768_as_a_decision() -> None:
    endless = hybrid(max_position_embeddings=None)
    assert decided(make_plan(EngineConfig(), endless, gpu(80 * GIB)))["max_model_len"] == (None, 32768)
    plan = make_plan(EngineConfig(max_model_len=100_000), endless, gpu(80 * GIB))
    assert plan.settings.max_model_len == 100_000


def test_every_rotary_embedding_of_a_model_is_told_with_its_layers() -> None:
    far, near = RopeSpec("dynamic", 1e6, 64, 4096, {"factor": 4.0}), RopeSpec("default", 1e4, 64, 4096, {})
    still = attention_layer(replace(ATTENTION, rotates=False))
    layers = (attention_layer(), attention_layer(replace(ATTENTION, rope=1)), still, *[attention_layer()] * 3)
    plan = make_plan(EngineConfig(), replace(model(*layers, rope=far), other_ropes=(near,)), gpu(80 * GIB))
    assert [(each.layers, each.rope.theta) for each in plan.settings.ropes] == [((0, 3, 4, 5), 1e6), ((1,), 1e4)]
    assert rope_text(plan.settings.ropes) == "default, theta 1e+06: layers 0, 3-5\ndefault, theta 10000: layers 1"
    assert rope_text(plan.settings.ropes[1:]) == "default, theta 10000"
    assert Plan.from_json(plan.to_json()).settings.ropes == plan.settings.ropes


def test_dynamic_rope_allows_its_factor_and_is_fixed_for_the_length() -> None:
    rope = RopeSpec("dynamic", 10000.0, 64, 4096, {"factor": 4.0})
    plan = make_plan(EngineConfig(max_model_len=16384), hybrid(rope=rope), gpu(80 * GIB))
    [of_layers] = plan.settings.ropes
    assert of_layers.rope.kind == "default"
    assert of_layers.rope.theta > 10000.0
    assert "rope" in decided(plan)
    with pytest.raises(ConfigError):
        make_plan(EngineConfig(max_model_len=16385), hybrid(rope=rope), gpu(80 * GIB))
    assert make_plan(EngineConfig(), hybrid(rope=rope), gpu(80 * GIB)).settings.max_model_len == 4096


def test_yarn_allows_its_factor_beyond_the_maximum_in_the_config() -> None:
    rope = RopeSpec("yarn", 10000.0, 64, 4096, {"factor": 4.0})
    plan = make_plan(EngineConfig(max_model_len=16384), hybrid(rope=rope), gpu(80 * GIB))
    assert plan.settings.max_model_len == 16384
    with pytest.raises(ConfigError):
        make_plan(EngineConfig(max_model_len=16385), hybrid(rope=rope), gpu(80 * GIB))


def test_a_dtype_other_than_the_checkpoints_is_a_decision() -> None:
    assert "dtype" not in decided(make_plan(EngineConfig(dtype="bfloat16"), hybrid(), gpu(80 * GIB)))
    plan = make_plan(EngineConfig(dtype="float16"), hybrid(), gpu(80 * GIB))
    assert decided(plan)["dtype"] == ("float16", "float16")
    assert plan.settings.dtype == "float16"


@pytest.mark.parametrize(
    ("asked", "wished", "effective", "warned"),
    [
        ("auto", None, "float32", False),
        ("auto", "bfloat16", "bfloat16", True),
        ("float32", "bfloat16", "float32", False),
        ("float16", "float32", "float16", True),
    ],
)
def test_the_dtype_of_states_is_the_users_else_the_checkpoints(asked, wished, effective, warned) -> None:
    spec = hybrid(ssm_state_dtype=wished)
    plan = make_plan(EngineConfig(ssm_state_dtype=asked), spec, gpu(80 * GIB))
    assert plan.settings.ssm_state_dtype == effective
    assert ("ssm_state_dtype" in decided(plan)) == warned
    if warned:
        [reason] = [d.reason for d in plan.decisions if d.topic == "ssm_state_dtype"]
        assert "chunking" in reason


def test_checkpoints_in_8_bits_are_more_than_twice_as_many_in_the_same_memory() -> None:
    config = EngineConfig(cache_memory="2GiB", max_num_seqs=4, expected_prefix_tokens=64)
    whole, packed = (
        make_plan(config.with_settings(ssm_checkpoint_dtype=dtype), hybrid(), cpu(64 * GIB))
        for dtype in ("auto", "int8")
    )
    assert packed.memory.num_checkpoints > 2.5 * whole.memory.num_checkpoints
    assert max(packed.memory.cache, whole.memory.cache) <= 2 * GIB
    conv, ssm = 3 * (1024 + 2 * 128), 16 * 64 * 128
    assert packed.memory.packed_state == 4 * (conv * 2 + ssm + ssm // 32 * 4)
    # Running requests have slots, and so have the checkpoints taken last.
    assert packed.memory.num_slots == 1 + 4 + 4 + 4
    assert packed.memory.num_packed == packed.memory.num_checkpoints - 8
    [reason] = [d.reason for d in packed.decisions if d.topic == "ssm_checkpoint_dtype"]
    assert "perplexity" in reason
    assert whole.memory.packed_state == whole.memory.num_packed == 0


@pytest.mark.parametrize(
    ("settings", "spec", "device", "remedies"),
    [
        ({"ssm_state_dtype": "bfloat16"}, hybrid(), cpu(64 * GIB), {"ssm_state_dtype", "ssm_checkpoint_dtype"}),
        ({}, hybrid(ssm_state_dtype="float16"), cpu(64 * GIB), {"ssm_state_dtype", "ssm_checkpoint_dtype"}),
        ({}, hybrid(), gpu(80 * GIB), {"ssm_checkpoint_dtype"}),
    ],
)
def test_checkpoints_in_8_bits_need_states_in_float32_on_a_cpu(settings, spec, device, remedies) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(EngineConfig(ssm_checkpoint_dtype="int8", **settings), spec, device)
    assert {remedy.setting for remedy in error.value.remedies} == remedies


def test_checkpoints_in_8_bits_have_no_effect_without_a_recurrence() -> None:
    plan = make_plan(EngineConfig(ssm_checkpoint_dtype="int8"), model(attention_layer()), gpu(80 * GIB))
    assert "without effect" in next(d.reason for d in plan.decisions if d.topic == "ssm_checkpoint_dtype")


def test_a_state_dtype_that_nothing_supports_is_refused() -> None:
    with pytest.raises(ModelError, match="float8"):
        make_plan(EngineConfig(), hybrid(ssm_state_dtype="float8"), gpu(80 * GIB))


@pytest.mark.parametrize(
    ("spec", "empty"),
    [(model(mamba2_layer(), mlp_layer()), "num_blocks"), (model(attention_layer()), "num_slots")],
)
def test_a_pool_that_the_model_does_not_use_is_empty(spec, empty: str) -> None:
    memory = make_plan(EngineConfig(), spec, gpu(10 * GIB)).memory
    counts = {"num_blocks": memory.num_blocks, "num_slots": memory.num_slots}
    assert counts.pop(empty) == 0
    assert min(counts.values()) > 1


def test_given_threads_and_seed_are_kept() -> None:
    plan = make_plan(EngineConfig(threads=3, seed=17), hybrid(), gpu(80 * GIB))
    assert (plan.settings.threads, plan.settings.seed) == (3, 17)


def test_the_json_has_all_sections_and_null_for_those_that_are_not_built() -> None:
    data = make_plan(EngineConfig(), hybrid(), gpu(GIB)).to_json()
    assert list(data) == [
        "model", "device", "settings", "capture", "memory", "state_cache", "hit_law", "pins",
        "cache_files", "speculative", "encoder", "kernels", "prediction", "decisions", "measured",
    ]  # fmt: skip
    assert [name for name, section in data.items() if section is None] == ["cache_files", "speculative", "encoder"]
    assert {"weights", "activations", "graphs", "kv_block", "state_slot", "num_blocks"} <= set(data["memory"])
    assert set(data["decisions"][0]) == {"topic", "requested", "effective", "reason"}
    assert set(data["kernels"]) == {"linear", "rms_norm", "sample"}
    assert data["kernels"]["linear"]["implementation"] == "reference"
    assert data["measured"] == {}


def test_a_saved_plan_is_loaded_as_it_was(tmp_path: Path) -> None:
    rope = RopeSpec("yarn", 10000.0, 64, 4096, {"factor": 4.0, "truncate": False})
    plan = make_plan(EngineConfig(threads=2), hybrid(rope=rope), gpu(GIB))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text()) == plan.to_json()


def test_the_same_inputs_give_the_same_plan() -> None:
    assert make_plan(EngineConfig(), hybrid(), gpu(GIB)) == make_plan(EngineConfig(), hybrid(), gpu(GIB))


def test_the_model_is_summed_up_in_figures() -> None:
    summary = make_plan(EngineConfig(), hybrid(), gpu(10 * GIB)).model
    assert summary.layers == {"mamba2": 4, "mlp": 2, "attention": 2}
    assert summary.parameters == hybrid().num_parameters
    assert summary.kv_bytes_per_token == 2 * 256 * 2
    assert summary.state_bytes_per_request == 4 * (3 * 1280 * 2 + 131072 * 4)


def test_without_chunked_prefill_the_plan_says_which_prompts_will_be_refused() -> None:
    config = EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=512, max_num_seqs=4)
    plan = make_plan(config, hybrid(), gpu(80 * GIB))
    assert plan.settings.max_model_len > 512
    assert decided(plan)["enable_chunked_prefill"] == (False, False)
