"""deterministic=True: a request's log-probabilities are the same bits, whatever else is in its batch, however its
prompt is cut, cached, preempted or speculated, in graphs or without, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from ostinato import SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import ConfigError
from ostinato.models.registry import MODELS
from ostinato.plan.device.detect import detect
from ostinato.sampling.pooler import POOLING_PARAMS
from tests.support.assistants import ARCHITECTURES as ASSISTANTS
from tests.support.checkpoints import random_prompt
from tests.support.parity import cached, has_state, make_engine, run, run_with_preemptions, shrink
from tests.support.recipes import HEADED, IN_REFERENCES, RECIPES
from tests.support.turns import in_turns
from tests.support.vision_parity import images, make_prompt, text
from tests.support.vision_parity import make_engine as make_seeing_engine
from tests.support.vl_models import VL_RECIPES


@pytest.fixture(autouse=True)
def _native() -> None:
    facts = detect("cpu").native
    if facts.isa is None:
        pytest.skip(facts.reason)


LENGTH, NEW = 90, 24
ARCHITECTURES = {name: make().model_type for name, make in (RECIPES | VL_RECIPES).items()}
NAMES = tuple(name for name in RECIPES if ARCHITECTURES[name] in MODELS.keys() - IN_REFERENCES)
SEEING = tuple(name for name in VL_RECIPES if ARCHITECTURES[name] in MODELS)
Scores = list[tuple[int, float, tuple[tuple[int, float], ...]]]


def test_every_architecture_of_the_registry_is_tried() -> None:
    assert {ARCHITECTURES[name] for name in (*NAMES, *SEEING)} == set(MODELS) - ASSISTANTS - IN_REFERENCES


def dtypes(test: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """Run `test(name, dtype)` for every model in bfloat16, and in turn in float32."""
    cells = in_turns(
        [(name, dtype) for name in NAMES for dtype in ("bfloat16", "float32")],
        test.__name__,
        always=lambda name, dtype: dtype == "bfloat16",
    )
    return pytest.mark.parametrize(("name", "dtype"), cells)(test)


def deterministic_engine(name: str, dtype: str = "bfloat16", **settings: Any) -> EngineCore:
    defaults = {"deterministic": True, "graph_mode": "none", "max_num_batched_tokens": 256}
    return make_engine(name, dtype=dtype, **(defaults | settings))


def ask(engine: EngineCore, length: int = LENGTH, seed: int = 0, prompt_scores: bool = False) -> RequestOutput:
    params = SamplingParams(
        temperature=0.9,
        seed=3,
        max_tokens=NEW,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=3 if prompt_scores else None,
    )
    output = engine.output(engine.add_request(random_prompt(length, seed), params))
    assert output is not None
    return output


def scores(output: RequestOutput) -> Scores:
    """Each token with its log-probability and those of the best: floats that are equal only if all bits are."""
    assert output.error is None
    [only] = output.outputs
    assert only.logprobs is not None
    scored = [each for each in (*(output.prompt_logprobs or ()), *only.logprobs) if each is not None]
    return [(each.token_id, each.logprob, tuple(each.top)) for each in scored]


@cache
def alone(name: str, dtype: str) -> Scores:
    """The plain path: no graph, no cache, the prompt at once, nobody else."""
    engine = deterministic_engine(name, dtype, enable_prefix_caching=False)
    output = ask(engine)
    run(engine)
    return scores(output)


@dtypes
def test_the_rest_of_the_batch_changes_no_bit(name: str, dtype: str) -> None:
    engine = deterministic_engine(name, dtype, max_num_seqs=16, cache_memory="64MiB")
    before = [ask(engine, 5 + 7 * i, seed=20 + i) for i in range(6)]
    for _ in range(4):
        engine.step()
    output = ask(engine)
    after = [ask(engine, 40 + i, seed=40 + i) for i in range(3)]
    run(engine)
    assert scores(output) == alone(name, dtype)
    assert all(each.error is None for each in (*before, *after))


@dtypes
def test_the_cuts_of_a_prompt_change_no_bit(name: str, dtype: str) -> None:
    for tokens in (20, 33, 77):
        engine = deterministic_engine(name, dtype, max_num_batched_tokens=tokens, max_num_seqs=4)
        output = ask(engine)
        run(engine)
        assert scores(output) == alone(name, dtype), f"cut at {tokens} tokens"


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_a_hit_and_a_preemption_change_no_bit(name: str, mode: str) -> None:
    if not has_state(name) and mode != "none":
        pytest.skip("a model without state has no state-cache mode")
    engine = deterministic_engine(name, state_cache_mode=mode)
    cold = ask(engine)
    run_with_preemptions(engine, [cold], at=(1, 6, 13))
    warm = ask(engine)
    run(engine)
    assert cached(warm) == (0 if has_state(name) and mode == "none" else 80)
    assert scores(cold) == scores(warm) == alone(name, "bfloat16")


WAYS = in_turns(
    [
        (name, dtype, *way)
        for name in NAMES
        for dtype in ("bfloat16", "float32")
        for way in (("full_and_piecewise", 1), ("piecewise", 2), ("none", 2))
    ],
    "graphs and threads",
    always=lambda name, dtype, graph_mode, threads: dtype == "bfloat16" and threads == 1,
)


@pytest.mark.parametrize(("name", "dtype", "graph_mode", "threads"), WAYS)
def test_graphs_and_threads_change_no_bit(name: str, dtype: str, graph_mode: str, threads: int) -> None:
    engine = deterministic_engine(name, dtype, graph_mode=graph_mode, threads=threads, capture="lazy")
    output, other = ask(engine), ask(engine, 31, seed=9)
    run(engine)
    assert scores(output) == alone(name, dtype)
    assert other.error is None


@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_bit(name: str) -> None:
    engine = deterministic_engine(name, speculative="ngram:3", speculative_adaptive="off")
    output, other = ask(engine), ask(engine, 31, seed=9)
    run(engine)
    assert scores(output) == alone(name, "bfloat16")
    assert other.error is None


PICTURE = (text(9), images((8, 12), seed=4), text(31), images((4, 8), (8, 8), seed=5), text(6))


@pytest.mark.parametrize(("name", "dtype"), list(zip(SEEING, cycle(("bfloat16", "float32")), strict=False)))
def test_in_a_prompt_with_images_no_path_changes_a_bit(name: str, dtype: str) -> None:
    """Neither others with images of their own, nor chunks, a preemption and a hit, nor graphs and threads."""

    def asked(others: int = 0, preempts: bool = False, **settings: Any) -> list[Scores]:
        defaults = {"deterministic": True, "dtype": dtype, "max_num_seqs": 8}
        engine = make_seeing_engine(name, **(defaults | settings))
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=NEW, ignore_eos=True, logprobs=3)

        def output_of(number: int) -> RequestOutput:
            parts = PICTURE if number == 0 else (text(4 + number), images((4, 4 + 4 * number), seed=7 + number))
            prompt = make_prompt(name, parts, number)
            output = engine.output(engine.add_request(prompt.token_ids, params, media=prompt))
            assert output is not None
            return output

        beside = [output_of(number) for number in range(1, 1 + others)]
        for _ in range(2):
            engine.step()
        found = [output_of(0)]
        run_with_preemptions(engine, found if preempts else [], at=(1, 6, 13))
        found.append(output_of(0))
        run(engine)
        assert all(each.error is None for each in beside)
        return [scores(each) for each in found]

    cold, warm = asked(enable_prefix_caching=False)
    assert cold == warm
    for settings in (
        {"others": 5},
        {"max_num_batched_tokens": 33, "max_num_seqs": 4, "others": 2, "preempts": True},
        {"graph_mode": "full_and_piecewise", "encoder_graph_mode": "always", "threads": 2, "capture": "lazy"},
        {"speculative": "ngram:3", "speculative_adaptive": "off"},
    ):
        assert asked(**settings) == [cold, cold], settings


@pytest.mark.parametrize("name", HEADED)
def test_drafts_of_a_head_change_no_bit(name: str) -> None:
    engine = deterministic_engine(name, speculative="mtp:3", speculative_adaptive="off")
    output = ask(engine)
    run(engine)
    assert engine.stats()["speculation"]["drafts_proposed"] > 0
    assert scores(output) == alone(name, "bfloat16")


def test_the_cuts_of_a_prompt_change_no_bit_of_the_mean_of_its_hidden_states() -> None:
    def mean(tokens: int) -> bytes:
        engine = deterministic_engine("llama", max_num_batched_tokens=tokens, enable_prefix_caching=False)
        output = engine.output(engine.add_request(random_prompt(LENGTH, 0), POOLING_PARAMS, pooling="mean"))
        run(engine)
        assert output is not None
        assert output.embedding is not None
        return output.embedding.tobytes()

    assert {mean(tokens) for tokens in (256, 33, 20)} == {mean(77)}


@pytest.mark.parametrize("states", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["nemotron_h", "mamba2", "jamba"])
def test_states_that_are_rounded_stochastically_have_the_same_bits_by_any_way(name: str, states: str) -> None:
    """Their noise depends on a token's position alone. It does change what comes out."""
    rounded = {"ssm_state_dtype": states, "ssm_state_rounding": "stochastic"}
    engine = deterministic_engine(name, enable_prefix_caching=False, **rounded)
    plain = ask(engine)
    run(engine)
    expected = scores(plain)
    assert expected != alone(name, "bfloat16")

    engine = deterministic_engine(name, state_cache_mode="all", max_num_batched_tokens=33, max_num_seqs=4, **rounded)
    others = [ask(engine, 5 + 7 * i, seed=20 + i) for i in range(2)]
    cold = ask(engine)
    run_with_preemptions(engine, [cold], at=(3, 8, 13))
    warm = ask(engine)
    run(engine)
    assert cached(warm) > 0
    assert scores(cold) == scores(warm) == expected
    assert all(each.error is None for each in others)

    engine = deterministic_engine(name, speculative="ngram:3", speculative_adaptive="off", **rounded)
    drafted = ask(engine)
    run(engine)
    assert scores(drafted) == expected


@pytest.mark.parametrize("name", ["nemotron_h", "jamba", "qwen3_next", "kimi_linear"])
def test_checkpoints_in_8_bits_change_no_bit_though_states_are_rounded(name: str) -> None:
    """They are rounded at every block boundary, with or without a checkpoint; slots are so few that all are packed."""
    packed = {"ssm_checkpoint_dtype": "int8"}
    engine = deterministic_engine(name, enable_prefix_caching=False, **packed)
    plain = ask(engine)
    run(engine)
    expected = scores(plain)
    assert expected != alone(name, "bfloat16")

    for mode, tokens in (("all", 33), ("align", 256)):
        engine = deterministic_engine(
            name, state_cache_mode=mode, state_block_size=32, max_num_batched_tokens=tokens, max_num_seqs=3, **packed
        )
        shrink(engine, num_blocks=200, num_slots=6, num_packed=24)
        others = [ask(engine, 5 + 40 * i, seed=20 + i) for i in range(2)]
        cold = ask(engine)
        run_with_preemptions(engine, [cold], at=(3, 8, 13))
        others += [ask(engine, 50, seed=30 + i) for i in range(3)]
        run(engine)
        warm = ask(engine)
        run(engine)
        counters = engine.stats()["prefix_cache"]
        assert counters["packed_checkpoints"] > 4
        assert counters["unpacked_checkpoints"] > 0
        assert cached(warm) > 0
        assert scores(cold) == scores(warm) == expected
        assert all(each.error is None for each in others)

    engine = deterministic_engine(name, speculative="ngram:3", speculative_adaptive="off", **packed)
    drafted = ask(engine)
    run(engine)
    assert scores(drafted) == expected


@pytest.mark.parametrize("name", ["nemotron_h", "jamba"])
def test_nor_do_checkpoints_in_8_bits_that_come_back_from_files_after_a_restart(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.plan.cache_files.CORE_RATE", 1.0)  # computing takes longer than reading
    files = {"cache_dir": str(tmp_path), "cache_offload": "64MiB", "ssm_checkpoint_dtype": "int8"}
    found = []
    for _ in range(2):
        engine = deterministic_engine(name, **files)
        output = ask(engine)
        run(engine)
        found.append((scores(output), engine.stats()["prefix_cache"]["file_tokens"]))
        engine.close()
    (cold, nothing), (restarted, from_files) = found
    assert restarted == cold
    assert nothing == 0 < from_files


@pytest.mark.parametrize("quantization", ["int8", "int8_g128"])
@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid"])
def test_with_8_bit_experts_neither_batch_nor_cuts_nor_threads_change_a_bit(name: str, quantization: str) -> None:
    engine = deterministic_engine(name, quantization=quantization, enable_prefix_caching=False)
    plain = ask(engine)
    run(engine)
    for tokens, threads in ((256, 2), (33, 1)):
        engine = deterministic_engine(
            name, quantization=quantization, max_num_batched_tokens=tokens, threads=threads, max_num_seqs=4
        )
        others = [ask(engine, 12 + 9 * i, seed=20 + i) for i in range(3)]
        output = ask(engine)
        run(engine)
        assert scores(output) == scores(plain), f"{tokens} tokens, {threads} threads"
        assert all(each.error is None for each in others)


def test_prompt_scores_are_the_same_bits_in_any_chunk() -> None:
    whole, cut = (
        deterministic_engine("nemotron_h_dense", max_num_batched_tokens=tokens, enable_prefix_caching=False)
        for tokens in (256, 23)
    )
    outputs = [ask(engine, prompt_scores=True) for engine in (whole, cut)]
    for engine in (whole, cut):
        run(engine)
    assert scores(outputs[0]) == scores(outputs[1])


def test_deterministic_without_native_kernels_is_an_error_that_says_why() -> None:
    with pytest.raises(ConfigError, match="deterministic needs native kernels") as caught:
        deterministic_engine("llama", kernels="reference")
    assert {remedy.setting for remedy in caught.value.remedies} == {"deterministic", "kernels"}


@pytest.mark.parametrize("name", ["nemotron_h", "gemma3_text", "kimi_linear", "qwen4_exp_text"])
def test_with_keys_and_values_of_8_bits_no_path_changes_a_bit(name: str) -> None:
    """Neither chunks beside others, a preemption and a hit, graphs and threads, nor drafts."""

    def asked(preempts: bool = False, **settings: Any) -> list[Scores]:
        engine = deterministic_engine(name, kv_cache_dtype="int8", **settings)
        found, other = [ask(engine)], ask(engine, 31, seed=9)
        run_with_preemptions(engine, found if preempts else [], at=(1, 6, 13))
        found.append(ask(engine))
        run(engine)
        assert other.error is None
        return [scores(each) for each in found]

    cold, warm = asked(enable_prefix_caching=False)
    assert cold == warm
    assert cold != alone(name, "bfloat16")
    for settings in (
        {"max_num_batched_tokens": 33},
        {"preempts": True},
        {"graph_mode": "full_and_piecewise", "threads": 2, "capture": "lazy"},
        {"speculative": "ngram:3", "speculative_adaptive": "off"},
    ):
        assert asked(**settings) == [cold, cold], settings
