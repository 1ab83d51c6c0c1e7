"""The work of kernels, from a model's spec, against what its weights and its cache really are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ostinato import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.layers.linear import Linear
from ostinato.layers.mlp import Experts
from ostinato.ops.kernel_cost import KernelCost, StepShape
from ostinato.plan.kernel_costs import kernel_work
from ostinato.plan.layer_specs import AttentionSpec, ExpertsSpec, IndexerSpec, LayerSpec
from ostinato.plan.memory.split import kv_block_bytes
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization import Quantization
from ostinato.plan.weights import Weight
from tests.support.checkpoints import checkpoint
from tests.support.plan_cases import weights

ATTENTION = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=8)
MAMBA2 = Mamba2Spec(num_heads=4, head_dim=8, state_size=16, num_groups=1, conv_kernel=4, chunk_size=32)
SPEC = ModelSpec(
    architecture="none",
    dtype="bfloat16",
    vocab_size=100,
    hidden_size=32,
    max_position_embeddings=None,
    tied_embeddings=True,
    layers=(
        LayerSpec("attention", ATTENTION, weights=weights(5000)),
        LayerSpec("mamba2", None, MAMBA2, weights=weights(7000, 12)),
    ),
    weights=(Weight((100, 32), "embedding", can_be_quantised=True, is_lm_head=True), *weights(32)),
    ssm_state_dtype=None,
    rope=None,
    ops=(),
    hyperparameters=None,
)


WITH_EXPERTS = replace(
    SPEC.layers[0],
    experts=ExpertsSpec(num_experts=4, top_k=1, size=10, intermediate_size=50, is_gated=False),
    weights=(
        *weights(1000),
        Weight((4, 50, 10), "experts", ("up",), can_be_quantised=True),
        Weight((4, 10, 50), "experts", ("down",), can_be_quantised=True),
    ),
)
"""Of 4 experts with 500 parameters inward and 500 outward, one of which a token meets; and 1000 others."""


def work(step: StepShape, spec: ModelSpec = SPEC) -> dict[str, Any]:
    return kernel_work(spec, "bfloat16", "float32", step)


def test_a_decode_step_reads_weights_once_and_moves_states_keys_and_values_of_each_row() -> None:
    found = work(StepShape(rows=3, tokens_per_row=1, context=10, decodes=True))
    taps = MAMBA2.conv_dim * 4
    assert found["linear"] == KernelCost((12000 - taps) * 2, 2 * 3 * (12000 - taps))
    assert found["attention"] == KernelCost(3 * 12 * 32 * 2, 4 * 6 * 8 * 3 * 11)
    assert found["state_update"] == KernelCost(3 * 2 * 512 * 4 + 12 * 4, 4 * 512 * 3)
    assert found["causal_conv1d"] == KernelCost((3 * 2 * 3 * MAMBA2.conv_dim + taps) * 2, 2 * taps * 3)
    assert found["logits"] == KernelCost(100 * 32 * 2, 2 * 100 * 32 * 3)
    assert "ssd_scan" not in found


def test_a_decode_step_with_drafts_writes_a_state_after_each_token() -> None:
    found = work(StepShape(rows=3, tokens_per_row=4, context=10, decodes=True))
    assert found["state_update"].num_bytes == 3 * (1 + 4) * 512 * 4 + 12 * 4
    assert found["logits"] == KernelCost(100 * 32 * 2, 2 * 100 * 32 * 3 * 4)


def test_a_prompt_begins_with_no_state_and_attends_to_itself() -> None:
    found = work(StepShape(rows=1, tokens_per_row=20, context=0, decodes=False))
    assert found["ssd_scan"] == KernelCost(512 * 4 + 12 * 4, 4 * 512 * 20)
    assert found["attention"] == KernelCost(40 * 32 * 2, 4 * 6 * 8 * (20 * 21 / 2))
    assert "state_update" not in found


@pytest.mark.parametrize("window", [1, 2, 10, 11, 12, 20, 100])
@pytest.mark.parametrize(("tokens", "context"), [(1, 10), (1, 0), (4, 10), (20, 0), (20, 30)])
def test_a_window_bounds_what_attention_reads_and_computes(window: int, tokens: int, context: int) -> None:
    layer = replace(SPEC.layers[0], attention=replace(ATTENTION, window=window))
    found = work(StepShape(3, tokens, context, decodes=False), replace(SPEC, layers=(layer,)))["attention"]
    seen = [range(max(0, at - window + 1), at + 1) for at in range(context, context + tokens)]
    read = {key for keys in seen for key in keys}
    assert found == KernelCost(3 * (len(read) + tokens) * 32 * 2, 4 * 6 * 8 * 3 * sum(map(len, seen)))


def test_a_token_alone_reads_the_experts_that_its_router_chooses_and_several_read_nobody_knows_which() -> None:
    spec = replace(SPEC, layers=(WITH_EXPERTS,))
    alone = work(StepShape(rows=1, tokens_per_row=1, context=0, decodes=True), spec)
    assert alone["moe"] == KernelCost(1000 * 2, 2 * 1000)
    assert alone["linear"].num_bytes == 1000 * 2
    assert work(StepShape(rows=2, tokens_per_row=1, context=0, decodes=True), spec)["moe"] is None


def test_experts_of_a_recorded_step_are_those_that_its_tokens_chose() -> None:
    spec = replace(SPEC, layers=(WITH_EXPERTS, SPEC.layers[0], WITH_EXPERTS))
    step = StepShape(rows=5, tokens_per_row=1, context=0, decodes=True)
    found = kernel_work(spec, "bfloat16", "float32", step, experts_read=[3, 2])["moe"]
    assert found == KernelCost((3 + 2) * 1000 * 2, 2 * 5 * 2 * 1000)


def test_of_experts_of_8_bits_a_token_reads_its_share() -> None:
    spec = replace(SPEC, layers=(WITH_EXPERTS,), quantization=Quantization())
    alone = work(StepShape(rows=1, tokens_per_row=1, context=0, decodes=True), spec)
    assert alone["moe"] == KernelCost((4000 + (4 * 50 + 4 * 10) * 4) / 4, 2 * 1000)


def test_matrices_of_8_bits_are_read_as_such() -> None:
    matrix = Weight((64, 32), "linear", ("q", "k"), can_be_quantised=True)
    layers = (replace(SPEC.layers[0], weights=(matrix, *weights(5000 - 64 * 32))), SPEC.layers[1])
    spec = replace(SPEC, layers=layers, quantization=Quantization(ignore=("lm_head",)))
    step = StepShape(rows=1, tokens_per_row=1, context=0, decodes=True)
    assert work(step)["linear"].num_bytes - work(step, spec)["linear"].num_bytes == 64 * 32 - 64 * 4
    assert work(step, spec)["logits"] == work(step)["logits"]
    assert work(step, replace(spec, quantization=Quantization()))["logits"].num_bytes == 100 * (32 + 4)


@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "falcon_h1", "qwen3"])
def test_weights_of_a_kernel_are_those_of_the_modules_that_call_it(name: str) -> None:
    engine = EngineCore(EngineConfig(model=str(checkpoint(name)), dtype="float32", threads=1, cache_memory="8MiB"))
    spec, modules = engine.spec, list(engine.runner.model.modules())
    linears = sum(each.weight.nbytes for each in modules if isinstance(each, Linear))
    if not spec.tied_embeddings:
        linears -= engine.runner.model.lm_head.weight.nbytes
    found = kernel_work(spec, "float32", "float32", StepShape(1, 1, 0, decodes=True))
    assert found["linear"] is not None
    assert found["linear"].num_bytes == pytest.approx(linears, rel=0.05)  # tiny models have large norms
    experts = sum(each.up.weight.nbytes + each.down.weight.nbytes for each in modules if isinstance(each, Experts))
    assert sum(layer.expert_parameters for layer in spec.layers) * 4 == experts


def test_values_that_lie_in_keys_are_neither_kept_nor_moved_twice() -> None:
    """As in multi-head latent attention: half the bytes in blocks and in a step, with the same work."""
    latent = replace(ATTENTION, values_in_keys=True)
    assert latent.kv_elements_per_token == ATTENTION.num_kv_heads * ATTENTION.head_dim
    apart = replace(SPEC, layers=SPEC.layers[:1])
    inside = replace(apart, layers=(replace(SPEC.layers[0], attention=latent),))
    assert kv_block_bytes(apart, 16, "bfloat16") == 2 * kv_block_bytes(inside, 16, "bfloat16")
    step = StepShape(3, 1, 50, decodes=True)
    whole, half = work(step, apart)["attention"], work(step, inside)["attention"]
    assert (whole.num_bytes, whole.flops) == (2 * half.num_bytes, half.flops)


def test_a_parameter_of_no_elements_has_rows_and_no_bytes() -> None:
    """A quantised model may hold one: the plan asks every weight for its rows."""
    empty = Weight((0,), "per_head", in_float32=True)
    assert (empty.out_size, empty.num_elements) == (1, 0)
    assert Weight((6, 5, 4), "experts").out_size == 30


@pytest.mark.parametrize("is_gated", [False, True])
def test_attention_to_selected_blocks_reads_these_and_all_keys_of_the_indexer(is_gated: bool) -> None:
    """But none of the latter while every token selects all that it sees; nor does a layer that shares a choice."""

    def found(context: int, rows: int = 1, tokens_per_row: int = 1, **of_indexer: bool) -> KernelCost:
        indexer = IndexerSpec(num_heads=3, head_dim=10, budget=16, ratio=4, is_gated=is_gated, **of_indexer)
        attention = replace(ATTENTION, indexer=indexer)
        spec = replace(SPEC, layers=(replace(SPEC.layers[0], attention=attention),))
        works = work(StepShape(rows, tokens_per_row, context, decodes=True), spec)
        return sum((works[name] for name in attention.operations), KernelCost())

    of_index, of_heads, scored = (2 if is_gated else 1) * 10 * 2, 2 * 2 * 8 * 2, 2 * 3 * 10
    plain = 4 * 6 * 8
    assert found(18) == KernelCost(of_index + (15 + 2) * of_heads, 16 * plain), "of 19 positions 4 blocks are complete"
    assert found(19) == KernelCost((1 + 20) * of_index + (15 + 2) * of_heads, 16 * plain + scored * 20 / 4)
    assert found(5, rows=3).num_bytes == 3 * (of_index + (5 + 2) * of_heads)
    prompt = found(0, tokens_per_row=21)
    assert prompt.num_bytes == (21 + 21) * of_index + 2 * 21 * of_heads
    assert prompt.flops == (16 * 17 / 2 + 5 * 16) * plain + scored * (20 + 21) / 4
    if is_gated:
        assert found(100, is_shared=True) == KernelCost((15 + 2) * of_heads, 16 * plain)
