"""Speculation in the plan: what makes drafts, which methods a model can do, and what is decided for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, ModelError
from ostinato.models.checkpoint import load_spec, model_spec
from ostinato.plan.kernel_costs import prefill_flops
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.rope import RopeSpec
from ostinato.plan.speculation import available_methods, draft_capture, with_drafter
from tests.support.drafter_cases import DRAFT, EXPERTS, MTP, NEMOTRON_H, NGRAM, decided, drafting, planned, remedies
from tests.support.plan_cases import (
    GIB,
    MAMBA2,
    MIB,
    attention_layer,
    cpu,
    hybrid,
    mamba2_layer,
    mlp_layer,
    model,
    with_head,
)

# What makes drafts


def test_the_head_of_a_nemotron_h_has_a_join_and_norms_beside_layers_like_the_models() -> None:
    spec = model_spec({**NEMOTRON_H, "mtp_hybrid_override_pattern": "*-"})
    head = spec.head
    assert head is not None
    attention = 2 * 64 * 64 + 2 * 64 * 32 + 64
    mlp = 2 * 64 * 96 + 64
    enorm, hnorm, final, eh_proj = 64, 64, 64, 2 * 64 * 64
    assert [layer.parameters for layer in head.layers] == [attention, mlp]
    assert head.outer_parameters == enorm + hnorm + final + eh_proj
    assert head.num_parameters == attention + mlp + enorm + hnorm + final + eh_proj
    assert (head.method, head.hidden_elements, head.model) == ("mtp", 64, None)
    assert set(head.ops) == {"attention", "concat", "linear", "rms_norm", "rotary", "token_shift"}
    assert (spec.drafter, "attention" in spec.ops, "token_shift" in spec.ops) == (None, False, False)
    assert spec.num_parameters == model_spec({**NEMOTRON_H, "num_nextn_predict_layers": 0}).num_parameters


def test_experts_may_stand_in_the_head_alone() -> None:
    spec = model_spec({**NEMOTRON_H, **EXPERTS, "mtp_hybrid_override_pattern": "*E"})
    assert spec.head is not None
    router, expert, shared, norm = 4 * 64, 2 * 64 * 48, 2 * 64 * 32, 64
    assert spec.head.layers[1].parameters == router + 4 * expert + shared + norm
    assert spec.head.layers[1].float32_parameters == 4
    assert ("moe" in spec.head.ops, "moe" in spec.ops) == (True, False)
    assert model_spec({**NEMOTRON_H, "mtp_hybrid_override_pattern": "*-"}).hyperparameters.moe is None


def test_there_is_no_head_unless_config_json_counts_one() -> None:
    without = {**NEMOTRON_H, "num_nextn_predict_layers": 0, "mtp_hybrid_override_pattern": "*-"}
    assert model_spec(without).head is None
    assert model_spec(NEMOTRON_H).head is None


def test_a_head_of_impossible_sizes_is_a_model_error_whatever_the_model_has() -> None:
    with pytest.raises(ModelError, match="4 attention heads"):
        model_spec({**NEMOTRON_H, "num_key_value_heads": 3, "mtp_hybrid_override_pattern": "*-"})


def test_the_methods_of_a_model_are_those_that_it_has_the_parts_for() -> None:
    assert available_methods(hybrid()) == ("ngram", "draft")
    assert available_methods(with_head(hybrid())) == ("ngram", "mtp", "draft")
    assert available_methods(with_head(hybrid(), mamba2_layer())) == ("ngram", "draft")


@pytest.mark.parametrize(
    ("spec", "word"),
    [(hybrid(), "no prediction head"), (with_head(hybrid(), mamba2_layer()), "head has state layers")],
)
def test_a_method_that_the_model_cannot_do_is_refused_with_those_it_can(spec: ModelSpec, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as error:
        drafting(MTP, spec)
    assert error.value.message.endswith("methods that it can do: ngram, draft")
    assert remedies(error.value) == {"speculative": "ngram:3"}
    drafting("ngram:3", spec)
    assert with_drafter(EngineConfig(), spec).drafter is None


def test_a_draft_model_of_another_vocabulary_is_refused_with_both_sizes_and_what_else_drafts() -> None:
    draft = model(attention_layer(), vocab_size=1024)
    with pytest.raises(ConfigError, match="1024 tokens, and the model one of 1000") as error:
        drafting(DRAFT, hybrid(), draft)
    assert "some/dir" in error.value.message
    assert remedies(error.value) == {"speculative": "ngram:3"}
    with pytest.raises(ConfigError) as error:
        drafting(DRAFT, with_head(hybrid()), draft)
    assert [remedy.value for remedy in error.value.remedies] == ["ngram:3", "mtp:3"]


def test_more_drafts_than_a_request_can_ever_have_are_refused_with_the_most() -> None:
    with pytest.raises(ConfigError, match="max_model_len 20 can have") as error:
        planned("ngram:18", hybrid(), max_model_len=20)
    assert remedies(error.value) == {"speculative": "ngram:17", "max_model_len": 21}
    assert planned("ngram:17", hybrid(), max_model_len=20).speculative is not None
    with pytest.raises(ConfigError, match="leave room for none") as error:
        planned("ngram:1", hybrid(), max_model_len=3)
    assert remedies(error.value) == {"speculative": None, "max_model_len": 4}


def test_a_drafter_that_the_settings_do_not_ask_for_is_taken_off_again() -> None:
    attached = drafting(MTP, with_head(hybrid()))
    assert attached.drafter == attached.head
    assert with_drafter(EngineConfig(), attached) == with_drafter(EngineConfig(speculative=NGRAM), attached)
    drafted = drafting(DRAFT, hybrid(), model(mlp_layer()))
    assert with_drafter(EngineConfig(speculative="draft:some/dir:1"), drafted) == drafted
    alone = make_plan(EngineConfig(), attached, cpu(64 * GIB))
    assert alone == make_plan(EngineConfig(), hybrid(), cpu(64 * GIB))
    assert alone.speculative is None


# Decisions


@pytest.mark.parametrize("speculative", [NGRAM, MTP, DRAFT])
def test_the_finest_state_cache_is_chosen_with_speculation_too_and_that_is_said(speculative: str) -> None:
    plan = planned(speculative, with_head(hybrid()), hybrid())
    decision = decided(plan)["state_cache_mode"]
    assert (decision.requested, decision.effective, plan.settings.state_cache_mode) == ("auto", "all", "all")
    assert "num_speculative_tokens 3 makes no difference" in decision.reason


def test_a_draft_model_that_cannot_write_states_inside_a_chunk_decides_the_mode_too() -> None:
    draft = model(mamba2_layer(replace(MAMBA2, scan_writes_states=False)))
    assert planned(DRAFT, hybrid(), draft).settings.state_cache_mode == "align"
    with pytest.raises(ConfigError, match="one cannot"):
        planned(DRAFT, hybrid(), draft, state_cache_mode="all")


def test_checkpoints_lie_on_the_chunks_of_both_models() -> None:
    draft = model(mamba2_layer(replace(MAMBA2, chunk_size=192)))
    assert planned(None, hybrid()).settings.state_block_size == 256
    assert planned(DRAFT, hybrid(), draft).settings.state_block_size == 384


def test_a_draft_model_runs_in_the_dtypes_of_the_model_as_decisions() -> None:
    draft = model(mamba2_layer(), dtype="float32", ssm_state_dtype="bfloat16")
    plan = planned(DRAFT, hybrid(), draft)
    found = decided(plan)
    assert (found["draft.dtype"].requested, found["draft.dtype"].effective) == ("float32", "bfloat16")
    states = found["draft.ssm_state_dtype"]
    assert (states.requested, states.effective) == ("bfloat16", "float32")
    alike = decided(planned(DRAFT, hybrid(), hybrid()))
    assert not [topic for topic in alike if topic.startswith("draft.")]
    without_state = planned(DRAFT, hybrid(), model(mlp_layer(), ssm_state_dtype="bfloat16"))
    assert "draft.ssm_state_dtype" not in decided(without_state)


def test_a_draft_model_made_for_shorter_texts_is_told() -> None:
    found = decided(planned(DRAFT, hybrid(), model(mlp_layer(), max_position_embeddings=1000)))
    assert (found["draft.max_model_len"].requested, found["draft.max_model_len"].effective) == (1000, 4096)
    assert "draft.max_model_len" not in decided(planned(DRAFT, hybrid(), model(mlp_layer())))


def test_the_rope_of_a_draft_model_is_resolved_for_the_longest_request() -> None:
    rope = RopeSpec("dynamic", 10000.0, 64, 1024, {"factor": 2.0})
    plan = planned(DRAFT, hybrid(rope=rope), model(attention_layer(), rope=rope), max_model_len=2048)
    assert plan.speculative is not None
    [of_draft], [of_model] = plan.speculative.ropes, plan.settings.ropes
    assert of_draft.rope == of_model.rope
    assert (of_draft.rope.kind, of_draft.rope.theta > 10000.0) == ("default", True)
    assert decided(plan)["draft.rope"].reason == decided(plan)["rope"].reason


def test_the_lengths_to_look_up_are_those_of_ngram_alone() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    plan = make_plan(EngineConfig(speculative=given), hybrid(), cpu(64 * GIB)).speculative
    assert plan is not None
    assert (plan.prompt_lookup_min, plan.prompt_lookup_max, plan.weights, plan.architecture) == (2, 5, 0, None)
    mtp = planned(MTP, with_head(hybrid())).speculative
    assert mtp is not None
    assert (mtp.prompt_lookup_min, mtp.prompt_lookup_max) == (None, None)


def test_steps_may_do_without_drafts_unless_that_is_turned_off() -> None:
    for given, adaptive in (({}, True), ({"speculative_adaptive": "off"}, False)):
        plan = planned(NGRAM, hybrid(), **given)
        assert plan.speculative is not None
        assert plan.speculative.adaptive == adaptive
    assert (
        "without effect" in decided(planned(None, hybrid(), speculative_adaptive="on"))["speculative_adaptive"].reason
    )
    assert "speculative_adaptive" not in decided(planned(None, hybrid()))


def test_a_hit_saves_the_drafters_work_too() -> None:
    spec = with_head(hybrid())
    own, head = prefill_flops(spec), prefill_flops(drafting(MTP, spec))
    assert head.per_token - own.per_token == 2 * (1_000_000 + 2_000_000 + 700_000)
    assert head.per_pair - own.per_pair == own.per_pair / 2
    draft = prefill_flops(drafting(DRAFT, spec, hybrid()))
    assert (draft.per_token, draft.per_pair) == (2 * own.per_token, 2 * own.per_pair)


def test_a_head_has_full_graphs_where_the_model_has_and_a_draft_model_all_that_the_model_has() -> None:
    for mode in ("none", "piecewise", "full_decode_only", "full_and_piecewise"):
        own = planned(MTP, with_head(hybrid()), graph_mode=mode).capture
        head, draft = (draft_capture(own, method, 32, 1024) for method in ("mtp", "draft"))
        assert (head.rows, head.tokens, head.splits) == (own.rows, (), ())
        assert (draft.rows, draft.tokens, draft.splits) == (own.rows, own.tokens, own.splits)
        assert head.tokens_per_row == draft.tokens_per_row == (1,)
        # Eager steps give their reason by it.
        assert head.graph_mode == draft.graph_mode == mode
        assert head.coverage.mode_of(5, 1, 5) == ("full" if own.rows else "eager")
        assert (
            draft.coverage
            == planned(None, hybrid(), graph_mode=mode, capture_sizes=own.tokens or None).capture.coverage
        )


# As data, and from checkpoints


@pytest.mark.parametrize("speculative", [None, NGRAM, MTP, DRAFT])
def test_the_plan_as_json_says_how_drafts_are_made(speculative: str | None) -> None:
    rope = RopeSpec("default", 10000.0, 64, 4096, {})
    plan = planned(speculative, with_head(hybrid()), model(attention_layer(), rope=rope))
    data = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(data) == plan
    if speculative is None:
        assert data["speculative"] is None
    else:
        assert (data["speculative"]["method"], data["speculative"]["num_speculative_tokens"]) == (
            plan.speculative.method,
            3,
        )


def checkpoint(directory: Path, changes: Mapping[str, object]) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(NEMOTRON_H | changes))
    return str(directory)


def test_a_spec_is_loaded_with_what_makes_its_drafts(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", {"mtp_hybrid_override_pattern": "*-"})
    draft = checkpoint(tmp_path / "a:draft", {"hybrid_override_pattern": "-"})
    assert load_spec(EngineConfig(model=target)).drafter is None
    mtp = load_spec(EngineConfig(model=target, speculative="mtp:2"))
    assert mtp.drafter == mtp.head is not None
    drafter = load_spec(EngineConfig(model=target, speculative=f"draft:{draft}:2")).drafter
    assert drafter is not None
    assert drafter.model is not None
    assert [layer.kind for layer in drafter.layers] == [layer.kind for layer in drafter.model.layers] == ["mlp"]
    with pytest.raises(ConfigError, match="no prediction head"):
        load_spec(EngineConfig(model=draft, speculative="mtp:2"))
    with pytest.raises(ModelError, match="the draft model: there is no directory"):
        load_spec(EngineConfig(model=target, speculative="draft:/no/such/place:2"))


def test_the_embedded_model_drafts_with_its_own_head() -> None:
    plan = make_plan(EngineConfig(speculative=MTP), load_spec(EngineConfig(speculative=MTP)), cpu(16 * GIB))
    assert plan.speculative is not None
    assert plan.speculative.parameters > 500_000
    assert plan.speculative.weights < 2 * MIB
