"""What speculation takes: weights, blocks, slots, activations, graphs and tokens; and what helps if it is too much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError
from ostinato.models.checkpoint import model_spec
from ostinato.plan.limits import Limits
from ostinato.plan.memory.activations import LOGIT_COPIES, activation_bytes
from ostinato.plan.memory.graph_memory import (
    Capture,
    LargestGraphs,
    arena_bytes,
    buffer_bytes,
    drafter_graph_bytes,
    graph_bytes,
)
from ostinato.plan.memory.split import kv_block_bytes, state_slot_bytes
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.plan.speculation import with_drafter
from tests.support.drafter_cases import DRAFT, EXPERTS, MTP, NEMOTRON_H, NGRAM, decided, drafting, planned, remedies
from tests.support.plan_cases import (
    CUDA_GRAPHS,
    GIB,
    MAMBA2,
    TAPES,
    attention_layer,
    cpu,
    gpu,
    hybrid,
    mamba2_layer,
    mlp_layer,
    model,
    with_head,
)

# Memory


def test_weights_are_those_of_the_model_and_of_what_makes_drafts() -> None:
    config = {**NEMOTRON_H, "mtp_hybrid_override_pattern": "*-"}
    in_proj, conv, out_proj = 64 * (2 * 128 + 2 * 2 * 32 + 8), 256 * (4 + 1), 128 * 64
    mamba2, float32 = in_proj + conv + 128 + out_proj + 64, 3 * 8
    attention, mlp = 2 * 64 * 64 + 2 * 64 * 32 + 64, 2 * 64 * 96 + 64
    own = 2 * 100 * 64 + 64 + 2 * mamba2 + mlp
    head = attention + mlp + 3 * 64 + 2 * 64 * 64
    plan = planned(MTP, model_spec(config))
    assert plan.memory.weights == 2 * (own + head) + 4 * 2 * float32
    assert plan.speculative is not None
    assert (plan.speculative.weights, plan.speculative.parameters) == (2 * head, head)
    assert plan.model.parameters == own + 2 * float32
    assert planned(NGRAM, model_spec(config)).memory.weights == 2 * own + 4 * 2 * float32
    full = planned(MTP, model_spec({**config, **EXPERTS, "mtp_hybrid_override_pattern": "*E"}), dtype="float16")
    experts = 4 * 64 + 4 * 2 * 64 * 48 + 2 * 64 * 32 + 64
    assert full.speculative is not None
    assert full.speculative.weights == 2 * (head - mlp + experts) + 4 * 4


def test_a_heads_layers_are_in_the_blocks_and_a_hidden_state_is_in_the_slots() -> None:
    spec = with_head(hybrid())
    own, kept = with_drafter(EngineConfig(), spec), drafting(MTP, spec)
    per_layer = 2 * 2 * 64 * 16 * 2
    assert kv_block_bytes(kept, 16, "bfloat16") == kv_block_bytes(own, 16, "bfloat16") + per_layer == 3 * per_layer
    slot = state_slot_bytes(own, "bfloat16", "float32")
    assert state_slot_bytes(kept, "bfloat16", "float32") == slot + 512 * 2
    assert state_slot_bytes(kept, "float32", "float32") == state_slot_bytes(own, "float32", "float32") + 512 * 4
    plan = planned(MTP, spec)
    assert plan.speculative is not None
    assert (plan.speculative.kv_block, plan.speculative.state_slot) == (per_layer, 1024)
    assert (plan.memory.kv_block, plan.memory.state_slot) == (3 * per_layer, slot + 1024)
    assert plan.model.kv_bytes_per_token == 2 * per_layer // 16
    assert plan.model.state_bytes_per_request == 4 * slot


def test_a_draft_models_layers_are_all_in_the_blocks_and_slots_of_the_model() -> None:
    draft = model(mamba2_layer(), attention_layer(), attention_layer(), mlp_layer(parameters=5))
    plan, alone = planned(DRAFT, hybrid(), draft), planned(None, draft)
    assert plan.speculative is not None
    assert plan.speculative.kv_block == alone.memory.kv_block
    assert plan.speculative.state_slot == alone.memory.state_slot
    assert plan.speculative.weights == alone.memory.weights
    assert (plan.speculative.model, plan.speculative.architecture) == ("some/dir", "nemotron_h")
    own = planned(None, hybrid())
    for name in ("kv_block", "state_slot", "weights"):
        assert getattr(plan.memory, name) == getattr(own.memory, name) + getattr(alone.memory, name)


@pytest.mark.parametrize("speculative", [NGRAM, MTP, DRAFT])
def test_a_request_has_1_plus_k_slots(speculative: str) -> None:
    settings = {"max_num_seqs": 5, "enable_prefix_caching": False}
    plan = planned(speculative, with_head(hybrid()), model(mlp_layer()), **settings)
    assert (plan.memory.slots_per_request, plan.memory.num_slots) == (4, 5 * 4 + 1)
    assert plan.speculative is not None
    assert (plan.speculative.num_speculative_tokens, plan.speculative.slots_per_request) == (3, 4)
    assert plan.capture.tokens_per_row == (1, 2, 4)
    assert {entry.tokens_per_row for entry in plan.capture.coverage.decode} == {1, 2, 4}
    assert plan.capture.coverage.mode_of(5, 2, 10) == "full"
    assert plan.capture.coverage.mode_of(5, 4, 20) == plan.capture.coverage.mode_of(5, 1, 5) == "full"


def test_requests_with_drafts_have_no_more_blocks_than_without() -> None:
    """Drafts end where the longest request ends."""
    settings = {"max_num_seqs": 3, "max_model_len": 100, "enable_prefix_caching": False}
    for speculative in (None, NGRAM, MTP):
        assert planned(speculative, with_head(hybrid()), **settings).memory.num_blocks == 3 * 7 + 1


def test_a_model_without_state_layers_has_slots_for_the_hidden_state_if_its_head_drafts() -> None:
    spec = with_head(model(attention_layer(), mlp_layer()))
    plan = planned(MTP, spec, max_num_seqs=2)
    assert plan.memory.state_slot == 512 * 2
    assert plan.memory.num_slots == 2 * 4 + 1 + plan.memory.num_checkpoints > 9
    assert (plan.settings.state_cache_mode, plan.memory.prefix_tokens > 0) == ("all", True)
    none = planned(MTP, spec, state_cache_mode="none")
    assert (none.memory.num_checkpoints, none.memory.prefix_tokens) == (0, 0)
    assert "without effect" in decided(none)["enable_prefix_caching"].reason
    for other in (None, NGRAM):
        lean = planned(other, spec)
        assert (lean.memory.num_slots, lean.settings.state_cache_mode) == (0, "none")


def test_activations_hold_the_logits_of_every_draft() -> None:
    spec = model(mlp_layer(), vocab_size=100_000)
    limits = {"tokens": 1000, "rows": 32, "max_model_len": 4096, "gathers_states": False}
    one, four = (activation_bytes(spec, "bfloat16", **limits, tokens_per_row=count) for count in (1, 4))
    logits, layer = 100_000 * LOGIT_COPIES * 4, 1000 * 2 * 2048 * (2 + 4)
    assert 32 * logits > layer
    assert four - one == 3 * 32 * logits * 5 // 4
    most = activation_bytes(spec, "bfloat16", **limits | {"rows": 600}, tokens_per_row=4)
    assert most == activation_bytes(spec, "bfloat16", **limits | {"rows": 1000}, tokens_per_row=4)
    by_plan = [planned(count, spec, max_num_seqs=32).memory.activations for count in (None, "ngram:1", NGRAM)]
    assert by_plan[1] - by_plan[0] == 32 * logits * 5 // 4
    assert by_plan[2] - by_plan[0] == 3 * 32 * logits * 5 // 4


def test_activations_are_those_of_the_greedier_of_model_and_drafter() -> None:
    limits = {"tokens": 1000, "rows": 1, "max_model_len": 64, "gathers_states": False}
    small, wide = model(mlp_layer(), vocab_size=10), replace(model(mlp_layer(), vocab_size=10), hidden_size=4096)

    def size(spec: ModelSpec) -> int:
        return activation_bytes(spec, "bfloat16", **limits)

    assert size(drafting(DRAFT, small, wide)) == size(wide) > size(small)
    assert size(drafting(DRAFT, wide, small)) == size(wide)
    # A head keeps the hidden states beside the residual stream and its normed form; its join is four times as wide.
    narrow = with_head(model(replace(mlp_layer(), activation_elements=1), vocab_size=10), attention_layer())
    join = replace(attention_layer(), attention=None, activation_elements=1)
    assert size(drafting(MTP, with_head(narrow, join))) == 1000 * (3 + 4) * 512 * (2 + 4) * 5 // 4
    assert size(drafting(MTP, with_head(narrow, mlp_layer()))) == 1000 * (3 * 512 + 4096) * (2 + 4) * 5 // 4


# Graphs

LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=100, max_model_len=33)


def test_a_head_has_full_graphs_of_one_token_per_row_and_a_buffer_of_hidden_states() -> None:
    spec = drafting(MTP, with_head(model(mlp_layer(), vocab_size=10), mlp_layer()))
    buffers = buffer_bytes(tokens=6, rows=6, max_blocks=3, slots_per_request=1) + 6 * 512 * 2
    of_tapes = 4 * (2 * 512 + 4096) * 2
    of_cuda_graphs = 4 * (3 * 512 + 4096) * (2 + 4) * 5 // 4
    for capture, arena in ((TAPES, of_tapes), (CUDA_GRAPHS, of_cuda_graphs)):
        size = drafter_graph_bytes(spec, "bfloat16", LargestGraphs(64, 4, 4), LIMITS, 3, capture)
        assert size == buffers + arena
        assert drafter_graph_bytes(spec, "bfloat16", LargestGraphs(64, 0, 4), LIMITS, 3, capture) == 0


def test_a_draft_model_has_graphs_of_both_ladders_and_buffers_for_every_step() -> None:
    draft = model(mlp_layer(), mamba2_layer(), vocab_size=10)
    spec = drafting(DRAFT, model(mlp_layer(), vocab_size=10), draft)
    buffers = buffer_bytes(tokens=100, rows=6, max_blocks=3, slots_per_request=1)

    def size(largest: LargestGraphs, capture: Capture = TAPES) -> int:
        return drafter_graph_bytes(spec, "bfloat16", largest, LIMITS, 3, capture)

    for capture in (TAPES, plain := replace(CUDA_GRAPHS, gathers_states=False)):
        for largest, own in ((LargestGraphs(64, 4, 4), (64, 0, 0)), (LargestGraphs(0, 4, 4), (0, 4, 1))):
            assert size(largest, capture) == buffers + arena_bytes(draft, "bfloat16", LargestGraphs(*own), capture)
        assert size(LargestGraphs(0, 0, 4), capture) == 0
        assert drafter_graph_bytes(hybrid(), "bfloat16", LargestGraphs(64, 4, 4), LIMITS, 3, capture) == 0
    gathered = size(LargestGraphs(0, 4, 4), CUDA_GRAPHS) - size(LargestGraphs(0, 4, 4), plain)
    assert gathered == 6 * 3 * MAMBA2.ssm_state_elements * 5


def test_the_models_own_graphs_hold_a_head_that_follows_it_but_no_draft_model() -> None:
    small, wide = model(mlp_layer(), vocab_size=10), mlp_layer()
    wide = replace(wide, activation_elements=100_000)
    hybrid_draft = drafting(DRAFT, small, model(mamba2_layer(), vocab_size=10))
    of_tapes, of_cuda_graphs = 64 * (2 * 512 + 100_000) * 2, 64 * (3 * 512 + 100_000) * (2 + 4) * 5 // 4
    for capture, of_head in ((TAPES, of_tapes), (CUDA_GRAPHS, of_cuda_graphs)):

        def size(spec: ModelSpec, capture: Capture = capture) -> int:
            return arena_bytes(spec, "bfloat16", LargestGraphs(64, 0, 0), capture, gathered_rows=6)

        own = size(small)
        assert size(drafting(DRAFT, small, model(wide, vocab_size=10))) == own
        assert size(drafting(MTP, with_head(small, wide))) == of_head
        assert size(hybrid_draft) == own


@pytest.mark.parametrize("speculative", [MTP, DRAFT])
def test_all_graphs_together_are_those_of_the_model_and_of_the_drafter(speculative: str) -> None:
    spec = drafting(speculative, with_head(hybrid()), hybrid())
    largest = LargestGraphs(64, 6, 4)
    for capture in (TAPES, CUDA_GRAPHS):
        size = graph_bytes(spec, "bfloat16", largest, limits=LIMITS, block_size=16, capture=capture)
        rows = 6 if capture.gathers_states else 0
        own = buffer_bytes(100, 6, 3, slots_per_request=4) + arena_bytes(spec, "bfloat16", largest, capture, rows)
        assert size == own + drafter_graph_bytes(spec, "bfloat16", largest, LIMITS, 3, capture)


@pytest.mark.parametrize("speculative", [NGRAM, MTP, DRAFT])
def test_what_covers_an_eager_range_is_told_with_the_memory_of_the_drafters_graphs_too(speculative: str) -> None:
    spec = drafting(speculative, with_head(hybrid()), hybrid())
    settings = {"max_num_seqs": 16, "graph_mode": "full_decode_only", "capture_rows": [2, 4]}
    plan = planned(speculative, spec, **settings)
    eager = [entry for entry in plan.capture.uncovered if getattr(entry.batches, "tokens_per_row", None) == 4]
    assert [(entry.batches.from_, entry.batches.to) for entry in eager] == [(5, 16)]
    changes = {change.setting: change.value for change in eager[0].changes}
    assert changes == {"capture_rows": [2, 4, 16]}
    covered = planned(speculative, spec, **settings | changes)
    assert covered.memory.graphs - plan.memory.graphs == eager[0].memory > 0


def test_a_head_needs_a_shift_by_one_token_which_piecewise_graphs_leave_out() -> None:
    spec = with_head(model(attention_layer(), mlp_layer()))
    plan = planned(MTP, spec)
    assert "token_shift" in plan.kernels
    assert plan.capture.splits == ("attention", "state")
    assert "token_shift" not in planned(NGRAM, spec).kernels
    on_a_gpu = make_plan(EngineConfig(speculative=MTP), spec, gpu(80 * GIB))
    assert not on_a_gpu.kernels["token_shift"].capturable
    assert "token_shift (reference)" in decided(on_a_gpu)["graph_mode"].reason


def test_the_kernels_of_a_draft_model_are_chosen_too() -> None:
    draft = replace(model(mlp_layer()), ops=("linear", "moe"))
    assert list(planned(DRAFT, hybrid(), draft).kernels) == ["linear", "rms_norm", "moe", "sample"]


# Limits and remedies


def test_a_step_holds_1_plus_k_tokens_of_each_request() -> None:
    plan = planned(MTP, with_head(hybrid()), max_num_seqs=300)
    raised = decided(plan)["max_num_batched_tokens"]
    assert (raised.requested, raised.effective) == (1024, 300 * 4 + 16)
    assert "holds 1 + 3 tokens of each of max_num_seqs requests" in raised.reason
    lowered = decided(planned(NGRAM, hybrid(), max_num_batched_tokens=100))["max_num_seqs"]
    assert (lowered.requested, lowered.effective) == (32, (100 - 16) // 4)


@pytest.mark.parametrize(
    ("rows", "tokens", "found"),
    [
        (100, 300, {"max_num_batched_tokens": 416, "max_num_seqs": 71, "speculative": "ngram:1"}),
        (100, 200, {"max_num_batched_tokens": 416, "max_num_seqs": 46, "speculative": None}),
        (100, 100, {"max_num_batched_tokens": 416, "max_num_seqs": 21}),
    ],
)
def test_tokens_too_few_for_the_drafts_are_refused_with_fewer_drafts_or_none(rows, tokens, found) -> None:
    config = EngineConfig(max_num_seqs=rows, max_num_batched_tokens=tokens, speculative=NGRAM)
    with pytest.raises(ConfigError, match=r"holds 1 \+ 3 tokens of each") as error:
        make_plan(config, hybrid(), cpu(64 * GIB))
    assert remedies(error.value) == found
    for setting, value in found.items():
        make_plan(config.with_settings(**{setting: value}), hybrid(), cpu(64 * GIB))
    assert ("leave out speculative" in map(str, error.value.remedies)) == (found.get("speculative", "") is None)


def test_what_fits_with_fewer_drafts_is_refused_with_the_most_that_fit() -> None:
    device = cpu(GIB)
    config = EngineConfig(max_num_seqs=60, max_num_batched_tokens=1024, speculative="mtp:8")
    with pytest.raises(CapacityError) as error:
        make_plan(config, with_head(hybrid()), device)
    fewer = remedies(error.value)["speculative"]
    assert isinstance(fewer, str)
    count = int(fewer.removeprefix("mtp:"))
    assert 1 <= count < 7
    assert f"set speculative to mtp:{count}" in error.value.message
    assert "slots of 2.03 MiB for max_num_seqs 60, 9 each" in error.value.message
    make_plan(config.with_settings(speculative=fewer), with_head(hybrid()), device)
    with pytest.raises(CapacityError):
        make_plan(config.with_settings(speculative=f"mtp:{count + 1}"), with_head(hybrid()), device)


def test_what_fits_only_without_drafts_is_refused_with_that() -> None:
    spec = hybrid()
    draft = model(mlp_layer(parameters=2_000_000_000))
    config = EngineConfig(speculative=DRAFT, max_num_seqs=4)
    with pytest.raises(CapacityError, match="leave out speculative") as error:
        make_plan(config, with_drafter(config, spec, draft), cpu(2 * GIB))
    assert ("speculative", None) in [(remedy.setting, remedy.value) for remedy in error.value.remedies]
    make_plan(config.with_settings(speculative=None), with_drafter(config, spec, draft), cpu(2 * GIB))


def test_lengths_to_look_up_are_kept_where_fewer_drafts_are_advised() -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 7}
    config = EngineConfig(max_num_seqs=100, max_num_batched_tokens=300, speculative=speculative)
    with pytest.raises(ConfigError) as error:
        make_plan(config, hybrid(), cpu(64 * GIB))
    fewer = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 7}
    assert remedies(error.value)["speculative"] == fewer


@pytest.mark.parametrize(
    ("speculative", "cache_memory", "way", "enough", "too_many"),
    [
        ("mtp:8", 27_800_000, "speculative of at most mtp:6", "mtp:6", "mtp:7"),
        ("mtp:1", 14_000_000, "no speculation", None, "mtp:1"),
    ],
)
def test_a_cache_with_no_place_for_a_prefix_names_fewer_drafts_or_none_as_a_way(
    speculative: str, cache_memory: int, way: str, enough: str | None, too_many: str
) -> None:
    config = EngineConfig(speculative=speculative, cache_memory=cache_memory, max_num_seqs=1)
    plans = [
        make_plan(config.with_settings(speculative=each), with_head(hybrid()), cpu(64 * GIB))
        for each in (speculative, too_many, enough)
    ]
    assert f", or {way}" in decided(plans[0])["num_checkpoints"].reason
    assert [plan.memory.num_checkpoints > 0 for plan in plans] == [False, False, True]
