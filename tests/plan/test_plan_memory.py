"""Sizes of blocks, slots and activations, and the split of the memory, in plain numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostinato.ops import scratch
from ostinato.ops.sizes import MAX_GROUP_TOKENS
from ostinato.plan.graphs.arena import CallTrace, TraceCall
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.memory.activations import activation_bytes
from ostinato.plan.memory.split import (
    MemoryBudget,
    cache_bytes_left,
    cache_need,
    fit_memory,
    kv_block_bytes,
    slots_per_request,
    state_slot_bytes,
)
from ostinato.plan.quantization import BlockQuantization
from tests.support.plan_cases import ATTENTION, MAMBA2, MIB, attention_layer, hybrid, mamba2_layer, mlp_layer, model

BUDGET = MemoryBudget(
    available=1000,
    weights=300,
    cache_size=None,
    cache_is_given=False,
    block_size=16,
    kv_block=10,
    state_slot=50,
    slots_per_request=1,
)


def test_a_request_has_one_slot_and_one_more_for_each_speculative_token() -> None:
    assert [slots_per_request(), slots_per_request(3)] == [1, 4]


@pytest.mark.parametrize(("block_size", "dtype", "size"), [(16, "bfloat16", 2), (32, "float32", 4)])
def test_a_block_holds_keys_and_values_of_all_attention_layers(block_size: int, dtype: str, size: int) -> None:
    two_layers = hybrid()
    assert kv_block_bytes(two_layers, block_size, dtype) == 2 * (2 * 2 * 64) * block_size * size


def test_a_slot_holds_conv_states_in_the_models_dtype_and_ssm_states_in_their_own() -> None:
    conv, ssm = 3 * (1024 + 2 * 128), 16 * 64 * 128
    assert state_slot_bytes(hybrid(), "bfloat16", "float32") == 4 * (conv * 2 + ssm * 4)
    assert state_slot_bytes(hybrid(), "float32", "bfloat16") == 4 * (conv * 4 + ssm * 2)


def test_a_layer_with_attention_and_state_counts_in_both_pools() -> None:
    parallel = model(LayerSpec("hybrid", ATTENTION, MAMBA2))
    assert kv_block_bytes(parallel, 16, "bfloat16") == kv_block_bytes(model(attention_layer()), 16, "bfloat16")
    assert state_slot_bytes(parallel, "bfloat16", "float32") == state_slot_bytes(
        model(mamba2_layer()), "bfloat16", "float32"
    )


def test_a_model_without_attention_has_no_blocks_and_one_without_state_no_slots() -> None:
    assert kv_block_bytes(model(mamba2_layer(), mlp_layer()), 16, "float32") == 0
    assert state_slot_bytes(model(attention_layer(), mlp_layer()), "float32", "float32") == 0


def test_weights_are_counted_in_the_dtype_they_run_in_except_float32_vectors() -> None:
    one = model(mamba2_layer(parameters=1000), vocab_size=10)
    outer = 2 * 10 * 512 + 512
    assert one.weight_bytes("bfloat16") == (1000 + outer) * 2 + 48 * 4
    assert one.weight_bytes("float32") == (1000 + outer + 48) * 4


@pytest.mark.parametrize("grown", ["tokens", "rows", "max_model_len"])
def test_activations_grow_with_every_limit(grown: str) -> None:
    limits = {"tokens": 512, "rows": 8, "max_model_len": 2048}

    def size(factor: int) -> int:
        grown_limits = limits | {grown: limits[grown] * factor}
        return activation_bytes(hybrid(), "bfloat16", **grown_limits, gathers_states=True)

    assert size(1) < size(16) < size(32)


def test_activations_hold_at_least_the_logits_and_the_widest_layer() -> None:
    wide = model(mlp_layer(), vocab_size=200_000)
    size = activation_bytes(wide, "bfloat16", tokens=1024, rows=32, max_model_len=4096, gathers_states=False)
    assert size >= 32 * 200_000 * 4 * 3
    narrow = model(mlp_layer(), vocab_size=10)
    size = activation_bytes(narrow, "bfloat16", tokens=1024, rows=32, max_model_len=4096, gathers_states=False)
    assert size >= 1024 * (4096 + 512) * 2


def test_gathering_states_is_counted_for_every_row() -> None:
    def size(rows: int, gathers: bool) -> int:
        only_state = model(mamba2_layer(), vocab_size=10)
        return activation_bytes(only_state, "bfloat16", 1024, rows, 4096, gathers_states=gathers)

    assert size(101, True) - size(1, True) >= 100 * 16 * 64 * 128 * 4 * 2
    assert size(101, False) == size(1, False)


ALL_NATIVE = ("linear", "rms_norm", "attention", "ssd_scan", "moe", "sample")


def test_native_kernels_make_no_copies_and_no_masks() -> None:
    def size(max_model_len: int, native: tuple[str, ...]) -> int:
        only = model(attention_layer(), vocab_size=10)
        return activation_bytes(only, "bfloat16", 1024, 1, max_model_len, gathers_states=False, native=native)

    elements = 1024 * (2 * 512 + 2 * 512 + 256)
    assert size(1024, ()) > elements * (2 + 4) * 5 // 4
    held = 1024 * 2 * 512  # arguments of the functions that Python is in
    assert elements * 2 * 5 // 4 < size(1024, ALL_NATIVE) < (elements + held) * 2 * 5 // 4 + MIB
    # For every key of the longest context a mask has a place, and native kernels of one thread keep few sums.
    assert size(9 * 1024, ()) - size(1024, ()) > 8 * 1024 * 256 * 5
    assert size(9 * 1024, ALL_NATIVE) - size(1024, ALL_NATIVE) < 8 * 1024 * 256


def test_scratch_of_native_kernels_is_that_of_the_greediest_of_each_thread() -> None:
    def size(threads: int, vocab_size: int) -> int:
        small = model(mlp_layer(), vocab_size=vocab_size)
        return activation_bytes(small, "float32", 16, 1, 64, gathers_states=False, native=ALL_NATIVE, threads=threads)

    assert size(3, 10_000) - size(1, 10_000) == 2 * 3 * 10_000 * 4


def test_products_whose_inputs_have_an_order_keep_some_tokens_in_it_for_each_thread() -> None:
    plain, ordered = (scratch.native_linear(tokens=2000, in_size=96, in_order=each) for each in (False, True))
    assert (ordered.shared, ordered.own - plain.own) == (plain.shared, 4 * MAX_GROUP_TOKENS * 96)

    small = model(mlp_layer(), vocab_size=10)

    def size(in_order: bool) -> int:
        ordered = replace(small, quantization=BlockQuantization((), "int4_g32", has_act_order=in_order))
        return activation_bytes(ordered, "float32", 16, 1, 64, gathers_states=False, native=ALL_NATIVE, threads=3)

    assert size(True) - size(False) == 3 * 4 * 16 * small.hidden_size  # of the LM head


def test_results_of_calls_are_there_at_once_from_their_call_to_their_last_reader() -> None:
    first, second = TraceCall("linear", 6, "model", ()), TraceCall("to", 10, "float32", (0,))
    third, last = TraceCall("linear", 4, "model", (0, 1)), TraceCall("linear", 8, "model", (2,))
    assert CallTrace((first, second, third, last), 3).widest_elements == 6 + 10 + 4
    assert CallTrace((first, second, third, last), 3, entries=2).widest_elements == 10
    in_place, reader = TraceCall("rotary", 0, "model", (0,)), TraceCall("linear", 8, "model", (1,))
    assert CallTrace((first, in_place, reader), 2).widest_elements == 6 + 8


def test_native_experts_keep_what_each_choice_reads_and_computes() -> None:
    experts = ExpertsSpec(num_experts=8, top_k=3, size=512, intermediate_size=1024)
    layer = LayerSpec("mlp", None, None, experts, 512)
    assert experts.activation_elements == 3 * (2 * 1024 + 1024 + 512)

    def size(spec: LayerSpec, native: tuple[str, ...]) -> int:
        only = model(spec, vocab_size=10)
        return activation_bytes(only, "bfloat16", 1000, 1, 64, gathers_states=False, native=native)

    plain = replace(layer, experts=None)
    kept = 1000 * (512 + 3 * (512 + 1024)) * 4
    assert kept < size(layer, ALL_NATIVE) - size(plain, ALL_NATIVE) < kept * 1.3
    assert size(layer, ()) - size(plain, ()) == 1000 * experts.activation_elements * (2 + 4) * 5 // 4


def test_the_least_cache_has_null_block_null_slot_all_slots_and_one_request() -> None:
    assert cache_need(BUDGET, max_num_seqs=3, max_model_len=33) == (3 + 1) * 50 + (3 + 1) * 10


def test_the_cache_gets_what_is_left_unless_its_size_is_set() -> None:
    assert cache_bytes_left(BUDGET, activations=100) == 600
    assert cache_bytes_left(replace(BUDGET, cache_size=400), activations=100) == 400
    assert cache_bytes_left(replace(BUDGET, cache_size=650), activations=100) == 600
    given = replace(BUDGET, cache_size=650, cache_is_given=True)
    assert cache_bytes_left(given, activations=50) == 650
    assert cache_bytes_left(given, activations=51) < 0


def test_what_slots_leave_of_the_cache_goes_to_blocks() -> None:
    split = fit_memory(BUDGET, activations=100, max_num_seqs=5, max_model_len=160)
    assert split is not None
    assert (split.num_slots, split.num_blocks) == (6, 30)
    assert split.cache == 6 * 50 + 30 * 10
    assert split.weights + split.activations + split.cache <= split.available


def test_there_are_no_more_blocks_than_all_requests_at_full_length_use() -> None:
    split = fit_memory(BUDGET, activations=100, max_num_seqs=2, max_model_len=17)
    assert split is not None
    assert split.num_blocks == 2 * 2 + 1


def test_slots_are_counted_for_every_speculative_token() -> None:
    split = fit_memory(replace(BUDGET, slots_per_request=3), 0, max_num_seqs=2, max_model_len=16)
    assert split is not None
    assert split.num_slots == 2 * 3 + 1


@pytest.mark.parametrize(("budget", "blocks", "slots"), [({"kv_block": 0}, 0, 3), ({"state_slot": 0}, 5, 0)])
def test_a_pool_that_the_model_does_not_use_is_empty(budget: dict, blocks: int, slots: int) -> None:
    split = fit_memory(replace(BUDGET, **budget), 0, max_num_seqs=2, max_model_len=32)
    assert split is not None
    assert (split.num_blocks, split.num_slots) == (blocks, slots)


def test_what_does_not_fit_by_one_byte_does_not_fit() -> None:
    need = cache_need(BUDGET, 2, 16)
    activations = BUDGET.available - BUDGET.weights - need
    assert fit_memory(BUDGET, activations, 2, 16) is not None
    assert fit_memory(BUDGET, activations + 1, 2, 16) is None


def test_the_sizes_of_a_nemotron_h_8b_are_those_that_are_published() -> None:
    mamba2 = replace(MAMBA2, num_heads=128, num_groups=8)
    spec = model(*[mamba2_layer(mamba2)] * 24)
    assert state_slot_bytes(spec, "bfloat16", "float32") // MIB == 97
