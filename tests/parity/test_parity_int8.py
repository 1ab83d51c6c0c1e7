"""Keys and values of 8 bits: requests get the logits of transformers with a cache that rounds alike, and the same
tokens on every path: in chunks, in batches, preempted, from hits of every length, from files, moved, with drafts and
from graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.engine.outputs import RequestOutput
from tests.support import vision_parity as vision
from tests.support.checkpoints import checkpoint, random_prompt, recipe
from tests.support.int8_cache import INT8_NAMES, INT8_TOLERANCE, LENGTH, RoundingCache, int8_case, int8_engine
from tests.support.parity import (
    BLOCK,
    Case,
    add,
    cached,
    check,
    make_engine,
    run,
    run_with_preemptions,
    warm,
)
from tests.support.vl_models import vl_oracle


def agree(case: Case, output: RequestOutput) -> None:
    check(case, output, INT8_TOLERANCE)


@pytest.mark.parametrize("name", INT8_NAMES)
def test_a_prompt_attends_to_what_was_written_of_its_own_keys(name: str) -> None:
    """Each of its log-probabilities is that of transformers, and another one without rounding."""
    case, engines = int8_case(name), [int8_engine(name), make_engine(name, graph_mode="none")]
    outputs = [add(engine, case, prompt_logprobs=True) for engine in engines]
    for engine in engines:
        run(engine)
    agree(case, outputs[0])
    own, exact = (
        torch.tensor([each.logprob for each in output.prompt_logprobs or () if each is not None]) for output in outputs
    )
    assert float((own - exact).abs().max()) > 1e-3


PATHS: dict[str, dict[str, Any]] = {
    "chunks of 21": {"max_num_batched_tokens": 21},
    "blocks of 32": {"block_size": 32},
    "full graphs": {"graph_mode": "full_and_piecewise", "capture_sizes": (16, 61), "capture_rows": (2, 4)},
    "copied drafts": {"speculative": "ngram:3", "speculative_adaptive": "off"},
    "the reference": {"kernels": "reference"},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", INT8_NAMES)
def test_a_batch_that_is_preempted_gets_the_same_tokens(name: str, path: str) -> None:
    engine = int8_engine(name, **PATHS[path])
    cases = [int8_case(name), int8_case(name, 40)]
    outputs = [add(engine, case) for case in cases]
    run_with_preemptions(engine, outputs)
    for case, output in zip(cases, outputs, strict=True):
        agree(case, output)


@pytest.mark.parametrize("name", INT8_NAMES)
def test_a_hit_of_every_length_gives_the_same_tokens(name: str) -> None:
    engine, case = int8_engine(name, cache_memory="64MiB"), int8_case(name)
    lengths = range(BLOCK, LENGTH, BLOCK)
    for length in lengths:
        warm(engine, case.prompt[: length + 1], salt=str(length))
    run(engine)
    outputs = {length: add(engine, case, salt=str(length)) for length in lengths}
    run(engine)
    for length, output in outputs.items():
        agree(case, output)
        assert cached(output) == length


@pytest.mark.parametrize(("name", "speculative"), [("qwen3_5_text_head", "mtp:2"), ("qwen3_5_text", "draft:llama:2")])
def test_a_head_and_a_draft_model_keep_integers_too(name: str, speculative: str) -> None:
    method, *model, k = speculative.split(":")
    engine = int8_engine(
        name,
        speculative=":".join((method, *(str(checkpoint(each)) for each in model), k)),
        speculative_adaptive="off",
    )
    own = [layer for layer in engine.runner.layer_memory if layer.k_cache is not None]
    assert len(own) > sum(kind == "full_attention" for kind in recipe(name).layer_types)
    assert {str(layer.k_cache.dtype) for layer in own if layer.k_cache is not None} == {"int8"}
    output = add(engine, int8_case(name))
    run(engine)
    agree(int8_case(name), output)
    assert engine.stats()["speculation"]["drafts_proposed"] > 0


def test_a_block_that_comes_back_from_a_file_brings_its_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.plan.cache_files.CORE_RATE", 1.0)
    case = int8_case("llama")
    for hit in (0, LENGTH // BLOCK * BLOCK):
        engine = int8_engine("llama", cache_dir=str(tmp_path), cache_offload="64MiB")
        output = add(engine, case)
        run(engine)
        agree(case, output)
        assert engine.stats()["prefix_cache"]["file_tokens"] == hit
        engine.close()


@pytest.mark.slow
def test_a_request_that_moves_takes_its_scales_along() -> None:
    here, there = int8_engine("nemotron_h"), int8_engine("nemotron_h")
    case = int8_case("nemotron_h")
    request = add(here, case).request_id
    for _ in range(9):
        here.step()
    exported = here.export_request(request)
    assert exported is not None
    output = there.output(there.import_request(exported))
    assert output is not None
    run(there)
    agree(case, output)


def test_latents_are_rounded_once_for_keys_and_values() -> None:
    """A hit, chunks and a batch give what the plain path does."""
    plain = int8_engine("kimi_linear", enable_prefix_caching=False)
    [attention] = {(layer.v_cache, layer.v_scales) for layer in plain.runner.layer_memory if layer.k_cache is not None}
    assert attention == (None, None)
    prompt = random_prompt(LENGTH, seed=1)
    expected = add(plain, Case(prompt, [], torch.empty(0)))
    run(plain)
    engine = int8_engine("kimi_linear", max_num_batched_tokens=21)
    warm(engine, prompt[:64])
    run(engine)
    outputs = [add(engine, Case(each, [], torch.empty(0))) for each in (prompt, random_prompt(30, seed=2))]
    run(engine)
    given, wanted = (
        torch.tensor([each.logprob for each in output.outputs[0].logprobs or ()]) for output in (outputs[0], expected)
    )
    assert outputs[0].outputs[0].token_ids == expected.outputs[0].token_ids
    torch.testing.assert_close(given, wanted, atol=0.05, rtol=0)


def test_prompts_with_images_get_the_logits_of_transformers() -> None:
    """Whole, and in chunks that cut the image; of a prompt whose answer has no token of an image."""
    name = "qwen3_vl"
    settings = {"kv_cache_dtype": "int8", "max_num_seqs": 1, "enable_prefix_caching": False}
    engines = [vision.make_engine(name, **settings, max_num_batched_tokens=tokens) for tokens in (256, 17)]
    parts, nothing = (vision.text(9), vision.images((6, 8)), vision.text(12)), torch.empty(0)
    for seed in range(10):
        case = vision.Case(vision.make_prompt(name, parts, seed), [], nothing)
        outputs = [vision.add(engine, case, prompt_logprobs=True) for engine in engines]
        for engine in engines:
            vision.run(engine)
        tokens = outputs[0].outputs[0].token_ids
        if not vision.SPECIAL & set(tokens):
            break
    model = vl_oracle(name)
    with torch.inference_mode():
        rounding = RoundingCache(config=model.config.text_config)
        inputs = vision.oracle_inputs(name, case.prompt, tokens)
        logits = model(**inputs, past_key_values=rounding, use_cache=True).logits[0]
    for output in outputs:
        vision.check(replace(case, tokens=tokens, logits=logits[:-1]), output, INT8_TOLERANCE)
