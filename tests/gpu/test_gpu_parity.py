"""On a GPU, with its kernels and its graphs, every architecture gives the tokens and logits of transformers; and in
half precision it strays no further from float32 than the reference does."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import RECIPES, random_prompt
from tests.support.gpu import assert_full_graphs, fast_engine, forced_logits, plain_engine
from tests.support.int8_cache import INT8_NAMES, INT8_TOLERANCE, int8_case
from tests.support.parity import add, check, complete, decided_case, run, run_with_preemptions, sampled_case

pytestmark = pytest.mark.gpu

LENGTHS = (150, 3, 47, 81)
STEPS = 24
DRAFTING = [("nemotron_h_head", "mtp:3"), ("nemotron_h_dense", "ngram:2"), ("mamba2", "ngram:3")]


@pytest.mark.parametrize("name", RECIPES)
def test_a_batch_that_joins_has_the_tokens_of_transformers(name: str, device: str) -> None:
    engine = fast_engine(name, device)
    cases = [decided_case(name, length) for length in LENGTHS]
    outputs = []
    for case in cases:
        outputs.append(add(engine, case))
        for _ in range(3):
            engine.step()
    run(engine)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)
    assert_full_graphs(engine)


@pytest.mark.parametrize("name", RECIPES)
def test_preempted_and_cached_requests_have_them_too(name: str, device: str) -> None:
    engine = fast_engine(name, device, max_num_batched_tokens=37, max_capture_size=37)
    cases = [decided_case(name, length) for length in (150, 47)]
    outputs = [add(engine, case, prompt_logprobs=True) for case in cases]
    run_with_preemptions(engine, outputs)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)
        complete(engine, case)


@pytest.mark.parametrize("name", ["nemotron_h_dense", "falcon_h1"])
def test_sampled_tokens_are_those_of_the_noise_on_a_cpu(name: str, device: str) -> None:
    complete(fast_engine(name, device), sampled_case(name, 47))


@pytest.mark.parametrize("name", INT8_NAMES)
def test_keys_and_values_of_8_bits_give_the_logits_of_a_cache_that_rounds_alike(name: str, device: str) -> None:
    engine = fast_engine(name, device, kv_cache_dtype="int8", max_num_batched_tokens=37, max_capture_size=37)
    cases = [int8_case(name), int8_case(name, 40)]
    outputs = [add(engine, case) for case in cases]
    run_with_preemptions(engine, outputs)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output, INT8_TOLERANCE)


@pytest.mark.parametrize(("name", "speculative"), DRAFTING)
def test_drafts_change_no_token(name: str, speculative: str, device: str) -> None:
    engine = fast_engine(name, device, speculative=speculative, speculative_adaptive="off")
    cases = [decided_case(name, 47), sampled_case(name, 47)]
    outputs = [add(engine, case) for case in cases]
    run(engine)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)
    assert_full_graphs(engine)


@pytest.mark.parametrize("name", RECIPES)
def test_every_replay_equals_the_eager_step(name: str, device: str) -> None:
    """A CaptureError would be the outputs' error."""
    engine = fast_engine(name, device, check_replay=True)
    cases = [decided_case(name, length) for length in LENGTHS]
    outputs = [add(engine, case) for case in cases]
    run(engine)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", RECIPES)
def test_half_precision_is_as_near_to_float32_as_the_reference(name: str, dtype: str, device: str) -> None:
    """Of each position, by its largest error. Where rounding decides which experts a token meets, a position may be far
    off on either side: of models that have some, the middle one alone counts."""
    texts = [random_prompt(length + STEPS, seed=length) for length in LENGTHS]
    room = {"max_num_batched_tokens": 512, "max_capture_size": 512}
    plain = plain_engine(name, device, max_num_batched_tokens=512)
    exact = forced_logits(plain, texts, LENGTHS)
    reference, fast = (
        (forced_logits(engine, texts, LENGTHS) - exact).abs().amax(-1)
        for engine in (
            plain_engine(name, device, dtype=dtype, max_num_batched_tokens=512),
            fast_engine(name, device, dtype=dtype, **room),
        )
    )
    rounding = 1e-3 * exact.abs().max()
    assert fast.isfinite().all()
    assert fast.median() <= 2 * reference.median() + rounding
    if "moe" not in plain.spec.ops:
        assert fast.max() <= 3 * reference.max() + rounding
