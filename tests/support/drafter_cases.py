"""Plans with speculation, and the models for them."""

from __future__ import annotations

from ostinato.config import EngineConfig
from ostinato.errors import OstinatoError
from ostinato.plan.decision import Decision
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.speculation import with_drafter
from tests.support.plan_cases import GIB, cpu

NEMOTRON_H = {
    "model_type": "nemotron_h", "dtype": "bfloat16", "hidden_size": 64, "vocab_size": 100,
    "hybrid_override_pattern": "M-M", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "conv_kernel": 4, "chunk_size": 64,
    "intermediate_size": 96, "max_position_embeddings": 2048, "num_nextn_predict_layers": 1,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip

NGRAM, MTP, DRAFT = "ngram:3", "mtp:3", "draft:some/dir:3"


def drafting(speculative: str, spec: ModelSpec, draft: ModelSpec | None = None) -> ModelSpec:
    """The model with what makes its drafts; `draft` is the model in some/dir."""
    return with_drafter(EngineConfig(speculative=speculative), spec, draft)


def planned(speculative: str | None, spec: ModelSpec, draft: ModelSpec | None = None, **settings: object) -> Plan:
    """The plan on a large CPU."""
    config = EngineConfig(speculative=speculative, **settings)
    return make_plan(config, with_drafter(config, spec, draft), cpu(64 * GIB))


def decided(plan: Plan) -> dict[str, Decision]:
    """By topic, of which each is decided once."""
    assert len({decision.topic for decision in plan.decisions}) == len(plan.decisions)
    return {decision.topic: decision for decision in plan.decisions}


def remedies(error: OstinatoError) -> dict[str, object]:
    """The values by setting."""
    return {remedy.setting: remedy.value for remedy in error.remedies}
