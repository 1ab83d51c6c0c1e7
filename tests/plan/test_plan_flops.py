"""The work of a prefill, counted by hand for layers of a few elements."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.models.checkpoint import model_spec
from ostinato.plan.kernel_costs import PrefillFlops, prefill_flops
from ostinato.plan.layer_specs import AttentionSpec, LayerSpec
from ostinato.plan.mixers import Mamba2Spec
from tests.support.plan_cases import mlp_layer, model, weights

SHARED = {"hidden_size": 8, "vocab_size": 10, "num_attention_heads": 2, "num_key_value_heads": 1}
NEMOTRON_H = SHARED | {
    "model_type": "nemotron_h", "hybrid_override_pattern": "E-", "intermediate_size": 6, "mamba_num_heads": 2,
    "mamba_head_dim": 8, "ssm_state_size": 4, "n_routed_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 3, "moe_shared_expert_intermediate_size": 7, "moe_latent_size": 4,
}  # fmt: skip
GRANITE = SHARED | {
    "model_type": "granitemoehybrid", "num_hidden_layers": 1, "layer_types": ["attention"], "mamba_n_heads": 2,
    "mamba_d_state": 4, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 3,
    "shared_intermediate_size": 7, "position_embedding_type": "nope",
}  # fmt: skip


def test_each_parameter_is_a_product_and_a_sum_per_token_without_embedding_and_head() -> None:
    flops = prefill_flops(model(mlp_layer(parameters=100), mlp_layer(parameters=7), vocab_size=10**6))
    assert flops == PrefillFlops(per_token=2 * 107, per_pair=0)


def test_attention_costs_a_score_and_a_value_per_query_head_and_pair() -> None:
    attention = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=5)
    flops = prefill_flops(model(LayerSpec("attention", attention)))
    scores = 6 * 5 * 2
    assert flops == PrefillFlops(per_token=0, per_pair=2 * scores)


def test_a_scan_costs_its_state_in_and_out_and_the_pairs_of_its_chunk() -> None:
    mamba2 = Mamba2Spec(num_heads=3, head_dim=2, state_size=5, num_groups=1, conv_kernel=4, chunk_size=7)
    per_chunk = {
        "states in": 7 * (3 * 2 * 5) * 2,
        "states out": 7 * (3 * 2 * 5) * 2,
        "scores": (7 * 8 // 2) * 5 * 2,
        "values": (7 * 8 // 2) * (3 * 2) * 2,
    }
    flops = prefill_flops(model(LayerSpec("mamba2", None, mamba2, weights=weights(0, 9))))
    assert flops == PrefillFlops(per_token=sum(per_chunk.values()) / 7, per_pair=0)


def test_a_prefill_costs_every_token_and_every_pair_once() -> None:
    flops = PrefillFlops(per_token=10, per_pair=3)
    assert flops.until(0) == 0
    assert flops.until(1) == 13
    assert flops.until(4) == 4 * 10 + (1 + 2 + 3 + 4) * 3


def test_only_the_chosen_experts_of_a_nemotron_h_count() -> None:
    router, latent, shared, norm = 8 * 5, 2 * 8 * 4, 2 * 8 * 7, 8
    chosen = 2 * (2 * 4 * 3)
    mlp = 2 * 8 * 6 + norm
    assert prefill_flops(model_spec(NEMOTRON_H)).per_token == 2 * (router + latent + shared + norm + chosen + mlp)


@pytest.mark.parametrize("layer_type", ["attention", "mamba"])
def test_only_the_chosen_experts_of_a_granite_count(layer_type: str) -> None:
    def per_token(experts: int, chosen: int) -> float:
        changes: dict[str, Any] = {"layer_types": [layer_type], "num_local_experts": experts}
        return prefill_flops(model_spec(GRANITE | changes | {"num_experts_per_tok": chosen})).per_token

    expert = 3 * 8 * 3
    assert per_token(5, 3) - per_token(5, 2) == 2 * expert
    # One more that is not chosen costs its row of the router.
    assert per_token(6, 2) - per_token(5, 2) == 2 * 8


def test_the_work_of_a_granite_layer_is_that_of_its_parts() -> None:
    attention, router, shared, norms = 8 * (8 + 4 + 4) + 8 * 8, 8 * 5, 3 * 8 * 7, 2 * 8
    chosen = 2 * (3 * 8 * 3)
    flops = prefill_flops(model_spec(GRANITE))
    assert flops == PrefillFlops(per_token=2 * (attention + router + shared + norms + chosen), per_pair=4 * 8)
