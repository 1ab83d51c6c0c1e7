"""Embeddings: the hidden states of transformers, whatever chunks, batches, hits and preemptions they are made of."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostinato import LLM
from ostinato.errors import ModelError, RequestError
from ostinato.sampling.pooler import (
    POOLING_PARAMS,
    EmbeddingOptions,
    HiddenStatePooler,
    Pooling,
    PoolingKind,
    finish_embedding,
    load_pooling,
)
from tests.support.checkpoints import checkpoint, oracle, random_prompt
from tests.support.engines import make_engine

RECIPES = ("qwen3", "gemma3_text", "nemotron_h_dense", "falcon_h1", "mamba2", "olmo_hybrid")
SMALL = {"dtype": "float32", "threads": 1, "max_num_seqs": 4, "max_model_len": 256, "cache_memory": "16MiB"}
LENGTHS = (1, 2, 15, 33, 97, 130)
KINDS: tuple[PoolingKind, ...] = ("last", "mean")


@cache
def expected(name: str, prompt: tuple[int, ...], kind: str) -> np.ndarray:
    with torch.inference_mode():
        hidden = oracle(name).base_model(torch.tensor([prompt])).last_hidden_state[0]
    return (hidden[-1] if kind == "last" else hidden.double().mean(0)).float().numpy()


def check(vectors: list[np.ndarray], name: str, prompts: list[list[int]], kind: str) -> None:
    for vector, prompt in zip(vectors, prompts, strict=True):
        right = expected(name, tuple(prompt), kind)
        assert vector.dtype == np.float32
        assert np.abs(vector - right).max() <= 1e-4 * max(1.0, np.abs(right).max()), len(prompt)


@pytest.mark.parametrize("name", RECIPES)
def test_they_are_the_hidden_states_of_transformers_in_chunks_and_batches(name: str) -> None:
    prompts = [random_prompt(length, length) for length in LENGTHS]
    with LLM(str(checkpoint(name)), max_num_batched_tokens=32, **SMALL) as llm:
        for kind in KINDS:
            # 33 and 97 end with a chunk of one token. The second time there is something in the prefix cache.
            check(llm.embed(prompts, pooling=kind, normalize=False), name, prompts, kind)
            check(llm.embed(prompts[::-1], pooling=kind, normalize=False), name, prompts[::-1], kind)
            for prompt in prompts[3:5]:
                check(llm.embed(prompt, pooling=kind, normalize=False), name, [prompt], kind)


@pytest.mark.parametrize(
    "settings", [{"graph_mode": "none"}, {"speculative": "ngram:3", "speculative_adaptive": "off"}, {"overlap": "on"}]
)
def test_every_way_of_running_steps_gives_them(settings: dict[str, object]) -> None:
    name, prompts = "nemotron_h_dense", [[5, 6, 7] * 11, *(random_prompt(length, length) for length in (20, 65))]
    with LLM(str(checkpoint(name)), max_num_batched_tokens=32, **SMALL, **settings) as llm:
        for kind in KINDS:
            check(llm.embed(prompts, pooling=kind, normalize=False), name, prompts, kind)


def test_the_last_state_takes_hits_of_the_prefix_cache_and_a_mean_takes_none() -> None:
    prompt = random_prompt(90, 1)
    engine = make_engine("nemotron_h_dense", max_num_batched_tokens=32)
    cached = []
    for kind in ("last", "last", "mean", "mean"):
        request = engine.add_request(prompt, POOLING_PARAMS, pooling=kind)
        output = engine.output(request)
        assert output is not None
        while engine.has_unfinished:
            engine.step()
        assert output.embedding is not None
        check([output.embedding], "nemotron_h_dense", [prompt], kind)
        cached.append(output.num_cached_tokens)
    assert cached[0] == cached[2] == cached[3] == 0
    assert cached[1] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_prompt_begins_anew(kind: PoolingKind) -> None:
    prompts = [random_prompt(90, 3), random_prompt(80, 4)]
    engine = make_engine("nemotron_h_dense", max_num_batched_tokens=32)
    ids = [engine.add_request(prompt, POOLING_PARAMS, pooling=kind) for prompt in prompts]
    outputs = [engine.output(request) for request in ids]
    engine.step()
    engine.step()
    assert engine.preempt(ids[0])
    while engine.has_unfinished:
        engine.step()
    check([output.embedding for output in outputs if output is not None], "nemotron_h_dense", prompts, kind)


def test_others_are_generated_in_the_same_steps() -> None:
    prompt = random_prompt(40, 2)
    engine = make_engine("nemotron_h_dense", max_num_batched_tokens=32)
    alone = engine.add_request(prompt, POOLING_PARAMS.replace(max_tokens=8))
    text = engine.output(alone)
    vector = engine.output(engine.add_request(prompt, POOLING_PARAMS, pooling="mean", cache_salt="a"))
    while engine.has_unfinished:
        engine.step()
    assert text is not None
    assert vector is not None
    assert vector.embedding is not None
    assert len(text.outputs[0].token_ids) == 8
    assert text.embedding is None
    check([vector.embedding], "nemotron_h_dense", [prompt], "mean")


def test_vectors_have_length_one_and_as_many_elements_as_were_asked_for() -> None:
    prompt = random_prompt(20, 1)
    with LLM(str(checkpoint("qwen3")), **SMALL) as llm:
        [plain] = llm.embed(prompt, normalize=False)
        [unit] = llm.embed(prompt)
        [short] = llm.embed(prompt, dimensions=10)
        assert llm.embed([]) == []
        with pytest.raises(RequestError, match="dimensions 65 should be from 1 to 64"):
            llm.embed(prompt, dimensions=65)
        with pytest.raises(RequestError, match="dimensions True should be from 1 to 64"):
            llm.embed(prompt, dimensions=True)
        with pytest.raises(RequestError, match="pooling 'cls' should be last or mean"):
            llm.embed(prompt, pooling="cls")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="prompt 2 of 2"):
            llm.embed([prompt, [7] * 257])
    # The prefix cache has most of a prompt that comes again: fewer tokens are computed, perhaps in another order.
    np.testing.assert_allclose(unit, plain / np.linalg.norm(plain), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(short, plain[:10] / np.linalg.norm(plain[:10]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([np.linalg.norm(unit), np.linalg.norm(short)], 1, rtol=1e-6)


def test_a_vector_of_zeros_stays_one_and_one_that_is_not_finite_is_an_error() -> None:
    assert not finish_embedding(np.zeros(4, np.float32), True).any()
    with pytest.raises(ValueError, match="not finite"):
        finish_embedding(np.array([1, np.nan], np.float32), True)


def test_a_pool_counts_every_token_once() -> None:
    pool = HiddenStatePooler("mean")
    pool.add(np.full(2, 9.0, np.float32), 0, 4)  # and then it was preempted
    pool.add(np.full(2, 3.0, np.float32), 0, 3)
    pool.add(np.full(2, 1.0, np.float32), 3, 1)
    assert pool.vector().tolist() == [1.0, 1.0]


def described(directory: Path, modules: object, config: object = None) -> Path:
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling/config.json").write_text(json.dumps(config))
    return directory


def modules(*kinds: str) -> list[dict[str, object]]:
    paths = {"Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return [
        {"idx": i, "name": str(i), "path": paths.get(kind, ""), "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]


FLAGS = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_max_tokens": False}


@pytest.mark.parametrize(
    ("kinds", "config", "right"),
    [
        (("Transformer", "Pooling", "Normalize"), {**FLAGS, "pooling_mode_lasttoken": True}, Pooling("last", True)),
        (("Transformer", "Pooling"), {**FLAGS, "pooling_mode_mean_tokens": True}, Pooling("mean", False)),
        (("Transformer", "Pooling"), {"pooling_mode": "mean"}, Pooling("mean", False)),
    ],
)
def test_a_checkpoint_says_how_it_pools(
    tmp_path: Path, kinds: tuple[str, ...], config: dict[str, object], right: Pooling
) -> None:
    assert load_pooling(tmp_path) == Pooling("last", True)
    assert load_pooling(described(tmp_path, modules(*kinds), config)) == right


@pytest.mark.parametrize(
    ("kinds", "config", "says"),
    [
        (
            ("Transformer", "Pooling"),
            {**FLAGS, "pooling_mode_cls_token": True},
            "to pool by cls_token; implemented are",
        ),
        (("Transformer", "Pooling"), {"pooling_mode": ["mean", "max"]}, "by mean and max"),
        (("Transformer", "Pooling"), FLAGS, "by nothing"),
        *((("Transformer", "Pooling"), {"pooling_mode": odd}, "to pool by") for odd in (5, True, {}, [["mean"]], [])),
        (("Transformer", "Pooling"), [], "should be an object"),
        (("Transformer", "Pooling", "Dense"), {"pooling_mode": "mean"}, "by Transformer, Pooling, Dense; implemented"),
        (("Transformer",), {}, "by Transformer; implemented"),
    ],
)
def test_what_is_not_implemented_is_named(
    tmp_path: Path, kinds: tuple[str, ...], config: dict[str, object], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        load_pooling(described(tmp_path, modules(*kinds), config))


def test_a_damaged_description_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="should be a list"):
        load_pooling(described(tmp_path, {}))
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ModelError, match=r"modules.json cannot be read"):
        load_pooling(tmp_path)


def test_arguments_of_another_type_are_numbers_or_refused_by_name() -> None:
    def resolve(pooling: Any = None, normalize: Any = None, dimensions: Any = None) -> EmbeddingOptions:
        return EmbeddingOptions.resolve(checkpoint("qwen3"), 64, pooling, normalize, dimensions)

    asked = resolve("mean", np.True_, np.int64(8))
    assert (asked.kind, asked.normalize, asked.dimensions) == ("mean", True, 8)
    for odd in ("", 5, ["last"], np.array(["last", "mean"]), b"last"):
        with pytest.raises(RequestError, match="should be last or mean"):
            resolve(pooling=odd)
    for odd in (0, "", 1, np.array([True, False])):
        with pytest.raises(RequestError, match="should be True or False"):
            resolve(normalize=odd)
    for odd in (True, 8.0, "8", 65, np.array([8])):
        with pytest.raises(RequestError, match="should be from 1 to 64"):
            resolve(dimensions=odd)
