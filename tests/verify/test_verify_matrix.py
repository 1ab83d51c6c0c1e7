"""What `verify` runs: the ways that a model has, the prompts' lengths, and drafts that are right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from ostinato import CapacityError, ConfigError, SamplingParams
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import make_plan
from ostinato.runner.draft_override import OverriddenProposer, OverriddenSelector
from ostinato.sampling.sampler import SampleKernel
from ostinato.sampling.state import PendingToken, SamplingState
from ostinato.scheduler.batch import Batch, BatchRow
from ostinato.verify.engine_configs import base_config, check_length, check_memory, way_config, with_cache
from ostinato.verify.matrix import MatrixSize, VerifyMatrix, make_matrix, named, small_chunks, speculations
from ostinato.verify.reference_run import ReferenceCase, ReferenceDrafts
from ostinato.verify.test_prompts import Prompt, longest_text, make_prompts
from tests.support.checkpoints import checkpoint

BLOCK, STATE_BLOCK, CHUNKS = 16, 32, (37, 64)
AXES = ("state_cache_mode", "speculative", "graph_mode", "max_num_batched_tokens", "overlap", "preemption")


def matrix(name: str, extent: MatrixSize = "pairs", draft: str | None = None, **settings: Any) -> VerifyMatrix:
    config = base_config({"model": name if name == "demo" else str(checkpoint(name)), **settings})
    config = config.with_settings(max_model_len=256)
    methods = speculations(config, load_spec(config), draft)
    k = max((method.num_speculative_tokens for method in methods if method is not None), default=0)
    return make_matrix(config, methods, (256, *small_chunks(config, k)), extent)


def values(made: VerifyMatrix, axis: str) -> list[Any]:
    return [named(value) if axis == "speculative" else value for value in made.axes[axis]]


# The matrix


@pytest.mark.slow
def test_a_hybrid_with_a_head_has_every_mode_and_every_method() -> None:
    made = matrix("demo")
    assert values(made, "state_cache_mode") == ["none", "align", "all"]
    assert values(made, "speculative") == ["none", "ngram:4", "mtp:3", "draft:demo:2"]
    assert values(made, "graph_mode") == ["none", "piecewise", "full_decode_only", "full_and_piecewise"]
    assert values(made, "max_num_batched_tokens") == [256, 37, 64]
    assert made.num_possible == 3 * 4 * 3 * 2 * (4 + 1)
    [reason] = made.left_out
    assert "set overlap to off" in reason


def test_a_model_without_state_layers_has_one_mode_and_none_without_a_head() -> None:
    made = matrix("llama")
    assert values(made, "state_cache_mode") == ["none"]
    assert [str(value).split(":")[0] for value in values(made, "speculative")] == ["none", "ngram", "draft"]


@pytest.mark.slow
def test_every_pair_of_values_occurs_in_the_ways_that_are_run() -> None:
    made = matrix("demo")
    for first, second in combinations(AXES, 2):
        pairs = {(getattr(way, first), getattr(way, second)) for way in made.ways}
        impossible = 3 if (first, second) == ("speculative", "overlap") else 0  # drafts with a step ahead
        assert len(pairs) == len(made.axes[first]) * len(made.axes[second]) - impossible, f"{first} and {second}"
    assert len(made.ways) < made.num_possible / 10


@pytest.mark.slow
def test_quick_has_fewer_ways_but_all_modes_with_all_methods_and_every_value() -> None:
    quick, pairs = matrix("demo", "quick"), matrix("demo")
    assert len({(way.state_cache_mode, way.speculative) for way in quick.ways}) == len(quick.ways) == 12
    for axis in AXES:
        assert {getattr(way, axis) for way in quick.ways} == set(quick.axes[axis])
    assert len(quick.ways) < len(pairs.ways) < matrix("demo", "full").num_possible


def test_full_has_every_way_and_those_of_one_engine_stand_together() -> None:
    ways = matrix("nemotron_h_dense", "full").ways
    assert len(ways) == len(set(ways)) == 3 * 4 * 3 * 2 * (3 + 1)
    changes = sum(one.settings != other.settings for one, other in pairwise(ways))
    assert changes == len(ways) // 2 - 1


def test_a_setting_that_is_given_pins_its_axis() -> None:
    given = {"state_cache_mode": "align", "speculative": "ngram:2", "graph_mode": "piecewise"}
    made = matrix("demo", "full", **given, max_num_batched_tokens=64)
    assert {axis: values(made, axis) for axis in given} == {axis: [value] for axis, value in given.items()}
    assert len(made.ways) == 4  # 256 and the given 64, with preemption and without


def test_a_mode_that_makes_no_difference_may_be_given() -> None:
    made = matrix("llama", state_cache_mode="align")
    assert values(made, "state_cache_mode") == ["align"]
    assert not any("align" in reason for reason in made.left_out)


def test_what_cannot_be_is_left_out_and_the_reason_is_told() -> None:
    made = matrix("demo", enable_chunked_prefill=False)
    assert values(made, "state_cache_mode") == ["none", "all"]
    assert values(made, "max_num_batched_tokens") == [256]
    assert any("align" in reason and "enable_chunked_prefill" in reason for reason in made.left_out)


def test_what_is_asked_for_and_cannot_be_is_an_error() -> None:
    with pytest.raises(ConfigError, match="align"):
        matrix("demo", state_cache_mode="align", enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="leave out one of them"):
        matrix("demo", draft="demo", speculative="mtp:3")


def test_axes_without_any_combination_are_an_error_that_names_them() -> None:
    config = base_config({"model": "demo"}).with_settings(max_model_len=256)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens.* as given"):
        make_matrix(config, (None,), (), "quick")


def test_a_draft_model_of_another_vocabulary_is_to_be_left_out() -> None:
    with pytest.raises(ConfigError, match="vocabulary of 768 tokens") as error:
        matrix("nemotron_h_dense", draft="demo")
    assert [str(remedy) for remedy in error.value.remedies] == ["leave out draft"]


def test_a_draft_model_takes_the_models_own_place() -> None:
    path = str(checkpoint("llama"))
    assert values(matrix("nemotron_h_dense", draft=path), "speculative") == ["none", "ngram:4", f"draft:{path}:2"]


# Settings


def test_open_settings_are_chosen_and_given_ones_are_kept() -> None:
    chosen = base_config({"model": "demo"})
    assert (chosen.dtype, chosen.max_num_seqs, chosen.state_block_size) == ("float32", 4, 32)
    assert chosen.speculative_adaptive == "off"
    given = {"dtype": "bfloat16", "max_num_seqs": 3, "state_block_size": 64, "capture_sizes": (5,)}
    kept = way_config(base_config({"model": "demo", **given}), max_num_batched_tokens=64)
    assert {name: getattr(kept, name) for name in given} == given
    assert kept.capture_rows is None


def test_a_step_of_the_largest_size_has_a_graph_unless_that_would_be_large() -> None:
    config = base_config({"model": "demo"})
    assert way_config(config, max_num_batched_tokens=37).capture_sizes == (8, 24, 37)
    assert way_config(config, max_num_batched_tokens=4000).capture_sizes == (8, 24, 64)


def test_texts_that_are_too_long_are_an_error_before_anything_is_loaded() -> None:
    config = base_config({"model": "demo"})
    model = load_spec(config)
    assert check_length(config, model, 165).max_model_len == 165
    with pytest.raises(ConfigError, match="--max-tokens"):
        check_length(config, model, 5000)
    with pytest.raises(ConfigError, match="max_model_len is 100") as raised:
        check_length(config.with_settings(max_model_len=100), model, 165)
    assert [(each.setting, each.value) for each in raised.value.remedies] == [("max_model_len", 165)]


def test_two_engines_that_do_not_fit_side_by_side_are_an_error() -> None:
    config = base_config({"model": "demo", "max_model_len": 256})
    sized = with_cache(config, [None], 24)
    assert sized.cache_memory is not None
    check_memory(sized, [sized])
    half = make_plan(sized, load_spec(sized), detect("auto")).memory.available // 2
    large = sized.with_settings(cache_memory=half)
    check_memory(sized, [sized, large])
    with pytest.raises(CapacityError, match="together that is more"):
        check_memory(large, [sized, large])


# Prompts


def prompts(others: Sequence[Sequence[int]] = ((7,) * 20,)) -> list[Prompt]:
    return make_prompts(range(100, 5000), others, BLOCK, STATE_BLOCK, CHUNKS)


def test_prompts_end_on_and_off_every_boundary() -> None:
    lengths = [len(prompt.tokens) for prompt in prompts() if prompt.after is None]
    assert min(lengths) < BLOCK
    assert any(length % STATE_BLOCK == 0 for length in lengths)
    assert any(length > STATE_BLOCK and length % BLOCK == 1 for length in lengths)
    assert any(length > STATE_BLOCK and length % BLOCK > 1 for length in lengths)
    for chunk in CHUNKS:
        assert any(length > chunk and length % chunk == 0 for length in lengths)


def test_several_prompts_share_a_prefix_that_ends_inside_a_block() -> None:
    sharing = [prompt.tokens for prompt in prompts() if prompt.about.startswith("shared prefix")]
    assert len(sharing) == 3
    common = next(i for i, tokens in enumerate(zip(*sharing, strict=False)) if len(set(tokens)) > 1)
    assert common > STATE_BLOCK
    assert common % BLOCK


def test_second_turns_go_on_from_an_output_and_one_ends_at_a_block_whatever_its_length() -> None:
    second = [prompt for prompt in prompts() if prompt.after is not None]
    assert len(second) == 3 + 2
    [to_block] = [prompt for prompt in second if prompt.ends_block]
    for length in range(90, 90 + BLOCK + 1):
        before = list(range(length))
        whole = to_block.whole(before, BLOCK)
        assert whole[:length] == before
        assert len(whole) > length
        assert len(whole) % BLOCK == 0


def test_stopped_outputs_end_where_all_that_was_computed_fills_blocks_and_another_turn_follows() -> None:
    made = prompts()
    stopped = [(number, prompt) for number, prompt in enumerate(made) if prompt.stop_at is not None]
    assert len(stopped) == 2
    for number, prompt in stopped:
        assert prompt.salted
        assert prompt.stop_at is not None
        assert (len(prompt.tokens) + prompt.stop_at) % BLOCK == 0
        assert [later.after for later in made].count(number) == 1


def test_prompts_with_images_share_one_and_differ_in_the_pixels_of_another() -> None:
    vision = load_spec(base_config({"model": "demo-vl"})).vision
    assert vision is not None
    made = make_prompts(range(100, 5000), (), BLOCK, STATE_BLOCK, CHUNKS, vision)
    first, second = (prompt.media for prompt in made if prompt.media is not None)
    assert first is not None
    assert second is not None
    assert first.token_ids == second.token_ids
    digests = [[span.item.digest for span in media.spans] for media in (first, second)]
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]
    for start, end, item in first.spans:
        assert set(first.token_ids[start:end]) == {vision.image_token_id}
        assert end - start == item.num_tokens == len(item.patches) // vision.patches_per_token


def test_the_longest_text_counts_outputs_and_the_turns_before() -> None:
    made = [Prompt("", (1, 2, 3)), Prompt("", (4, 5), after=0)]
    assert longest_text(made, max_tokens=10) == 3 + 10 + 2 + 10


# Drafts


class Fixed:
    """Proposes the same for every row."""

    def __init__(self, drafts: tuple[int, ...]) -> None:
        self.drafts = drafts

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        return [self.drafts[: row.num_drafts] for row in batch.rows]


EXPECTED = tuple(range(50, 90))
PROMPT = (1, 2, 3)
GREEDY = SamplingParams(temperature=0)


STATE = SamplingState(GREEDY, list(PROMPT), [], seed=0)
CASE = ReferenceCase(0, "greedy", PROMPT, GREEDY, EXPECTED)


def steered(drafts: tuple[int, ...], known: bool = True) -> list[tuple[int, tuple[int, ...]]]:
    """(place in the output, drafts) of rows with room for four at every place of a known or an unknown output."""
    proposer = OverriddenProposer(Fixed(drafts), ReferenceDrafts(1000, [CASE] if known else []))
    found = []
    for place in range(1, 30):
        row = BatchRow(
            "a", (0,), len(PROMPT) + place - 1, (), num_drafts=4, num_logits=5, samples=True, sampling_state=STATE
        )
        [steered] = proposer.propose(Batch((row,), 1, 4))
        found.append((place, steered))
    return found


def num_right(place: int, drafts: tuple[int, ...]) -> int:
    """Drafts that are the expected tokens, up to the first that is not."""
    for count, token in enumerate(drafts):
        if token != EXPECTED[place + count]:
            return count
    return len(drafts)


@pytest.mark.parametrize("drafts", [(0, 0, 0, 0), (0,)], ids=["all wrong", "few and wrong"])
def test_some_drafts_become_right_so_that_every_number_of_accepted_drafts_occurs(drafts: tuple[int, ...]) -> None:
    assert {num_right(*each) for each in steered(drafts)} >= {0, 1, 2, 3}


def test_a_drafter_that_is_always_right_is_rejected_at_every_depth() -> None:
    accepted_counts = set()
    for place in range(1, 30):
        proposer = OverriddenProposer(Fixed(EXPECTED[place : place + 4]), ReferenceDrafts(1000, [CASE]))
        row = BatchRow(
            "a", (0,), len(PROMPT) + place - 1, (), num_drafts=4, num_logits=5, samples=True, sampling_state=STATE
        )
        [drafts] = proposer.propose(Batch((row,), 1, 4))
        accepted_counts.add(num_right(place, drafts))
    assert accepted_counts == {0, 1, 2, 3, 4}


def test_drafts_that_are_chosen_one_by_one_are_steered_as_those_of_a_proposer_are() -> None:
    """And one that was not chosen, whose logits were not finite, stays away."""
    for place, drafts in steered((7, 7, 7, 7)):
        first = len(PROMPT) + place
        pending_tokens = [PendingToken(STATE, first + depth, drafts[:depth]) for depth in range(4)]

        def choose(_: torch.Tensor, pending_tokens: Sequence[PendingToken], __: SampleKernel) -> dict[int, int]:
            return {number: 7 for number in range(len(pending_tokens)) if number != 2}

        steer = OverriddenSelector(choose, ReferenceDrafts(1000, [CASE]))
        chosen = steer(torch.empty(0), pending_tokens, torch.argmax)
        assert chosen == {number: drafts[number] for number in (0, 1, 3)}


def test_where_nothing_is_found_some_rows_get_drafts_and_others_none() -> None:
    assert {len(drafts) for _, drafts in steered(())} == {0, 4}


def test_drafts_of_an_unknown_text_are_its_drafters_or_others() -> None:
    found = {token for _, drafts in steered((7, 7, 7, 7), known=False) for token in drafts}
    assert found == {7, 8}
