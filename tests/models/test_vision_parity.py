"""However prompts with images are cut, cached, preempted, drafted for or captured, requests get the tokens and logits
of transformers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.vision_parity import (
    NEW,
    Case,
    add,
    cache_counts,
    check,
    decided_case,
    draft_from,
    images,
    make_engine,
    run,
    serve,
    slices,
    text,
    video,
)
from tests.support.vl_models import VL_RECIPES, vl_spec

NAMES = tuple(VL_RECIPES)

PROMPTS = {
    "one image": (text(9), images((6, 8)), text(12)),
    "several of different sizes": (text(5), images((8, 8)), text(4), images((2, 20), (10, 4)), text(7)),
    "a video": (text(6), video(3, (6, 4)), text(8)),
    "an image and a video": (images((4, 6)), text(3), video(2, (4, 4)), text(8)),
    "text only": (text(40),),
}

GRAPHS: dict[str, dict[str, Any]] = {
    "none": {},
    "piecewise": {"capture_sizes": (16, 64)},
    "full_decode_only": {"capture_rows": (2, 4)},
    "full_and_piecewise": {"capture_sizes": (16, 64), "capture_rows": (2, 4)},
}


def is_whole(name: str) -> bool:
    """Whether the tokens of an image see each other, so that a step computes all of them."""
    vision = vl_spec(name).vision
    return vision is not None and vision.is_bidirectional


def case_of(name: str, prompt: str, before: Case | None = None) -> Case:
    return decided_case(name, PROMPTS[prompt], before)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_gets_the_tokens_and_logits_of_transformers(name: str, prompt: str) -> None:
    engine, case = make_engine(name), case_of(name, prompt)
    output = add(engine, case, prompt_logprobs=True)
    run(engine)
    check(case, output)
    assert cache_counts(engine) == (len({item.digest for item in case.items}), 0)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_all_kinds_are_served_together_in_chunks_that_cut_images(name: str) -> None:
    """The chunks of 29 tokens end within images, or before those whose tokens see each other; half of the images fit
    into the encoder cache at a time."""
    engine = make_engine(name, max_num_batched_tokens=29, encoder_cache_tokens=12 if name == "gemma3" else 30)
    cases = [case_of(name, prompt) for prompt in PROMPTS]
    serve(engine, *cases)
    assert cache_counts(engine)[0] >= len({item.digest for case in cases for item in case.items})
    assert engine.stats()["encoder"]["cache"]["evicted_items"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_an_image_that_a_chunk_cuts_is_encoded_once(name: str) -> None:
    engine, case = make_engine(name, max_num_batched_tokens=17, max_num_seqs=1), case_of(name, "one image")
    output = add(engine, case)
    engine.step()
    assert engine.scheduler.encoder_cache is not None
    # The first chunk ends in the image, or before one whose tokens see each other.
    assert engine.scheduler.encoder_cache.num_pinned == (0 if is_whole(name) else 12)
    run(engine)
    check(case, output)
    assert cache_counts(engine) == (1, 0)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_in_the_second_turn_follows_a_first_turn_from_the_cache(name: str) -> None:
    engine, first = make_engine(name), case_of(name, "text only")
    serve(engine, first)
    second = decided_case(name, PROMPTS["one image"], first)
    [output] = serve(engine, second)
    assert output.num_cached_tokens == (40 + NEW - 1) // 16 * 16
    assert cache_counts(engine) == (1, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_about_an_image_hits_through_it_and_encodes_nothing(name: str) -> None:
    engine, first = make_engine(name), case_of(name, "several of different sizes")
    serve(engine, first)
    second = decided_case(name, (text(11),), first)
    [output] = serve(engine, second)
    assert output.num_cached_tokens is not None
    assert output.num_cached_tokens > first.prompt.spans[-1].end
    assert cache_counts(engine) == (len({item.digest for item in first.items}), 0)


@pytest.mark.parametrize("name", ["minicpmv4_7", "minicpmv4_7_4x"])
def test_slices_on_a_canvas_are_cut_by_chunks_and_hit_in_a_second_turn(name: str) -> None:
    parts = (text(5), slices((4, 8), (4, 4), rows=2), slices((4, 4), (4, 8), rows=1), text(6))
    engine, first = make_engine(name, max_num_batched_tokens=21), decided_case(name, parts)
    serve(engine, first)
    second = decided_case(name, (text(11),), first)
    [output] = serve(engine, second)
    assert output.num_cached_tokens is not None
    assert output.num_cached_tokens > first.prompt.spans[-1].end
    assert cache_counts(engine) == (len({item.digest for item in first.items}), 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_hit_that_ends_within_an_image_gets_the_rest_of_it(name: str) -> None:
    """The second prompt differs behind the image, in the block in which the image ends."""
    before = text(12 if name == "gemma3" else 2)
    engine, first = make_engine(name), decided_case(name, (before, images((8, 8)), text(5)))
    serve(engine, first)
    other = decided_case(name, (before, images((8, 8)), text(6)))
    [image] = first.prompt.spans
    assert image.start < 16 < image.end
    seen = other.prompt.token_ids[: image.end] == first.prompt.token_ids[: image.end]
    [output] = serve(engine, other)
    assert output.num_cached_tokens == (16 if seen else 0)
    assert cache_counts(engine) == (1, 1)


@pytest.mark.parametrize("name", NAMES)
def test_another_image_of_the_same_size_is_not_taken_for_the_first(name: str) -> None:
    engine = make_engine(name)
    one, other = (decided_case(name, (images((6, 8), seed=seed), text(30))) for seed in (0, 5))
    assert one.prompt.token_ids[:14] == other.prompt.token_ids[:14]
    for case in (one, other):
        serve(engine, case)
    assert cache_counts(engine) == (2, 0)


@pytest.mark.parametrize("encoder_graphs", ["none", "always"])
@pytest.mark.parametrize("graph_mode", GRAPHS)
@pytest.mark.parametrize("name", NAMES)
def test_graphs_change_nothing(name: str, graph_mode: str, encoder_graphs: str) -> None:
    engine = make_engine(
        name,
        graph_mode=graph_mode,
        encoder_graph_mode=encoder_graphs,
        **({} if encoder_graphs == "none" else {"encoder_token_budgets": (16, 32), "encoder_max_items_per_batch": 3}),
        max_num_batched_tokens=64,
        **GRAPHS[graph_mode],
    )
    serve(engine, *(case_of(name, prompt) for prompt in PROMPTS))
    served = {mode for mode, count in engine.stats()["graphs"]["steps"].items() if count}
    assert (
        served
        == {
            "none": {"eager"},
            "piecewise": {"piecewise"},
            "full_decode_only": {"full", "eager"},
            "full_and_piecewise": {"full", "piecewise"},
        }[graph_mode]
    )
    of_encoder = engine.stats()["encoder"]["graphs"]
    assert any(one["packs"] for one in of_encoder["budgets"]) == (encoder_graphs == "always")


@pytest.mark.parametrize("graph_mode", GRAPHS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_drafts_stand_where_tokens_stand_that_follow_images(name: str, graph_mode: str) -> None:
    """The text's own drafts, and those of a proposer that is right but for each fifth token."""
    for proposer in ("own", "mostly right"):
        engine = make_engine(name, speculative="ngram:3", speculative_adaptive="off", graph_mode=graph_mode)
        cases = [case_of(name, prompt) for prompt in PROMPTS]
        if proposer == "mostly right":
            draft_from(engine, cases)
        serve(engine, *cases)
        speculation = engine.stats()["speculation"]
        assert speculation["drafts_proposed"] > speculation["drafts_accepted"]
    assert speculation["acceptance"] > 0.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_preempted_requests_take_their_images_again(name: str) -> None:
    """Without a prefix cache they compute all of them; the encoder cache has room for some."""
    engine = make_engine(
        name, enable_prefix_caching=False, max_num_batched_tokens=32, encoder_cache_tokens=24, graph_mode="none"
    )
    cases = [case_of(name, prompt) for prompt in PROMPTS]
    serve(engine, *cases, preempt_at=(2, 5, 12, 30))
    assert engine.stats()["preemptions"] >= 8
    assert cache_counts(engine)[0] > sum(len(case.items) for case in cases)
