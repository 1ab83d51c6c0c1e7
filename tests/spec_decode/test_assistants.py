"""Drafts of Gemma 4's assistants: they are those of transformers, follow from the accepted text alone, and change no
token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from ostinato import EngineConfig, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.errors import ConfigError, ModelError
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.base import Assistant
from ostinato.models.checkpoint import load_spec, model_spec
from ostinato.models.loader import load_weights
from ostinato.models.registry import make_model
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.plan.memory.activations import activation_bytes
from ostinato.plan.plan import Plan, make_plan
from ostinato.scheduler.batch import Batch
from tests.spec_decode.test_speculation_drafts import GRAPHS, cases_of, check_proposals, finds, serve
from tests.support import vision_parity
from tests.support.assistants import (
    AssistantReference,
    assistant_checkpoint,
    assistant_config,
    assistant_of,
    assistant_oracle,
    changed_checkpoint,
    storing_oracle,
)
from tests.support.checkpoints import checkpoint, random_prompt, recipe
from tests.support.folders import shared_folder
from tests.support.gguf_files import CONFIGS, write_gguf
from tests.support.heads import Recorder
from tests.support.parity import make_engine, run
from tests.support.plan_cases import GIB, cpu
from tests.support.speculation import Watched, at_random, drafting_engine, outputs_of, script
from tests.support.tensors import as_tensor
from tests.support.vl_models import VL_RECIPES

ASSISTANTS = [
    ("gemma4_text", "plain", "all", 3, "full_and_piecewise"),
    ("gemma4_text", "clusters", "align", 2, "none"),
    ("gemma4", "untied", "none", 4, "full_and_piecewise"),
    ("gemma4", "plain", "all", 1, "none"),
    ("gemma4_unified", "wide", "align", 2, "full_and_piecewise"),
    ("gemma4_unified_text", "clusters", "all", 2, "none"),
]
"""Recipe, kind of the assistant, mode of the state cache, k, graph mode."""


@pytest.mark.parametrize(("name", "kind", "mode", "k", "graph_mode"), ASSISTANTS)
@pytest.mark.slow
def test_drafts_of_an_assistant_follow_from_the_accepted_text_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str, mode: str, k: int, graph_mode: str
) -> None:
    cases = cases_of(name)
    engine = drafting_engine(
        name, f"draft:{assistant_checkpoint(name, kind)}:{k}", state_cache_mode=mode, graph_mode=graph_mode,
        max_num_batched_tokens=40, **GRAPHS[graph_mode],
    )  # fmt: skip
    recorder, watched = Recorder(monkeypatch, engine), Watched(engine)
    # Its own drafts are thrown away for some of which any number is right.
    script(engine, outputs_of(cases), at_random(k), keep=True)
    serve(engine, cases)
    assert {accepted for given, accepted in watched.verdicts() if given == k} == set(range(k + 1))
    check_proposals(
        recorder.proposals, k, lambda target, text: AssistantReference(target, kind, text), name, cases, finds(engine)
    )


@pytest.mark.parametrize(("name", "kind"), [("gemma4_text", "plain"), ("gemma4_text", "clusters")])
@pytest.mark.slow
def test_greedy_drafts_are_those_of_the_generator_of_transformers(name: str, kind: str) -> None:
    """For prompts within the window, where its mask and the target's agree."""
    engine = drafting_engine(name, f"draft:{assistant_checkpoint(name, kind)}:4")
    assert engine.runner.drafter is not None
    target, assistant = storing_oracle(name), assistant_oracle(name, kind)
    assistant.generation_config.num_assistant_tokens = 4
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    propose = engine.runner.drafter.proposer.propose

    def watched(batch: Batch) -> list[tuple[int, ...]]:
        drafts = propose(batch)
        for row, own in zip(batch.rows, drafts, strict=True):
            if own:
                state = row.sampling_state
                seen.append(([*state.prompt_token_ids, *state.output_token_ids], own))
        return drafts

    engine.runner.drafter = replace(engine.runner.drafter, proposer=Fake(watched))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for seed in range(5):
        engine.add_request(random_prompt(12 + seed, seed), params)
    run(engine)
    assert len(seen) > 40
    for text, own in seen:
        generator = SinglePositionMultiTokenCandidateGenerator(
            assistant, target.get_input_embeddings(), GenerationConfig(max_length=1000)
        )
        with torch.inference_mode():
            result = target(
                torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True
            )
            theirs, _ = generator.get_candidates(torch.tensor([text]), {}, result, False, 0)
        assert theirs[0, len(text) :].tolist()[: len(own)] == list(own)


@dataclass(frozen=True)
class Fake:
    """A proposer of one function."""

    propose: Callable[[Batch], list[tuple[int, ...]]]


def test_logits_of_clusters_are_those_of_transformers() -> None:
    """Row by row: transformers gives the tokens of other clusters one number in all rows."""
    text = recipe("gemma4_text").get_text_config()
    config = assistant_config(text, "clusters", vocab_size=132)
    config.num_centroids, config.centroid_intermediate_top_k = 12, 5
    theirs = assistant_of(config, seed=5)
    directory = shared_folder("assistant")
    theirs.save_pretrained(directory)
    ops = select_ops(dict.fromkeys(("linear", "embedding", "concat", "rms_norm"), "reference"), None)
    model = make_model(WeightAllocator(ops, TorchArrays("cpu"), "float32"), model_spec(config.to_dict()))
    assert isinstance(model, Assistant)
    load_weights(model, directory)
    model.check_weights()
    hidden = torch.randn(7, 48, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = [theirs.masked_embedding(row[None, None], theirs.lm_head.weight)[0, 0] for row in hidden]
        own = as_tensor(model.draft_logits(hidden))
        torch.testing.assert_close(own, torch.stack(expected), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model.next_hidden(hidden), theirs.post_projection(hidden))


def test_a_token_that_is_none_is_refused_when_clusters_are_loaded() -> None:
    own, directory = assistant_checkpoint("gemma4_text", "clusters"), shared_folder("assistant")
    (directory / "config.json").write_bytes((own / "config.json").read_bytes())
    tensors = load_file(own / "model.safetensors")
    tensors["masked_embedding.token_ordering"][3] = 131
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"token_ordering has a token 131; they are 0 to 130"):
        drafting_engine("gemma4_text", f"draft:{directory}:2")


@pytest.mark.parametrize(
    ("target", "changes", "expected"),
    [
        ("llama", {}, "makes drafts for gemma4 and gemma4_text, and the model is llama"),
        (
            "gemma4_text",
            {"model_type": "gemma4_unified_assistant"},
            "makes drafts for gemma4_unified and gemma4_unified_text, and the model is gemma4_text",
        ),
        ("gemma4_text", {"backbone_hidden_size": 96}, r"96 elements \(backbone_hidden_size\), and the model's have 64"),
        ("gemma4_text", {"text": {"sliding_window": 30}}, "2 heads of 12 in a window of 30 in layers with a window"),
        (
            "gemma4_text",
            {"text": {"num_key_value_heads": 4}},
            "4 heads of 12 in a window of 40 in layers with",
        ),
        ("gemma4", {}, "4 heads of 20 in layers without a window, and the model's have 2 heads of 16"),
        ("gemma4_text", {"text": {"vocab_size": 132}}, "a vocabulary of 132 tokens, and the model one of 131"),
    ],
)
def test_an_assistant_of_another_model_is_refused(target: str, changes: dict[str, Any], expected: str) -> None:
    directory = changed_checkpoint("gemma4_text", "plain", **changes)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_spec(EngineConfig(model=str(checkpoint(target)), speculative=f"draft:{directory}:2"))
    assert [(each.setting, each.value) for each in caught.value.remedies] == [("speculative", "ngram:2")]


@pytest.mark.parametrize(
    ("target", "kind"), [("gemma4_text", "clusters"), ("gemma4", "untied"), ("gemma4_unified", "wide")]
)
@pytest.mark.ranks
def test_ranks_share_an_assistant(target: str, kind: str) -> None:
    speculative = f"draft:{assistant_checkpoint(target, kind)}:3"
    params = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True) for t in (0, 1.5)]
    given, seen = [], []
    for settings in ({}, {"speculative": speculative}, {"speculative": speculative, "tensor_parallel_size": 2}):
        engine = make_engine(target, speculative_adaptive="off", **settings)
        try:
            outputs = [engine.output(engine.add_request(random_prompt(60, 2), each)) for each in params]
            watched = Watched(engine)
            run(engine)
        finally:
            engine.close()
        assert all(output is not None and output.error is None for output in outputs)
        given.append([output.outputs[0].token_ids for output in outputs if output is not None])
        seen.append(watched.verdicts())
    assert given[0] == given[1] == given[2]
    assert sum(seen[1].values()) > 20
    assert seen[1] == seen[2]


def test_an_assistant_that_ranks_cannot_share_is_refused() -> None:
    directory = changed_checkpoint("gemma4", "plain", text={"intermediate_size": 81})
    with pytest.raises(ConfigError, match=r"2 ranks .* cannot share .*intermediate_size 81 is no multiple of it"):
        load_spec(
            EngineConfig(model=str(checkpoint("gemma4")), speculative=f"draft:{directory}:2", tensor_parallel_size=2)
        )


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("plain", {"text": {"enable_moe_block": True}}, "enable_moe_block = True; supported: false"),
        ("plain", {"text": {"use_double_wide_mlp": True}}, "use_double_wide_mlp = True; supported: false"),
        ("plain", {"text": {"hidden_size_per_layer_input": 8}}, "hidden_size_per_layer_input = 8; an assistant's is 0"),
        ("plain", {"text": {"num_kv_shared_layers": 2}}, "num_kv_shared_layers = 2 of 3 layers; all of an assistant's"),
        ("plain", {"text": {"sliding_window": 1}}, "sliding_window = 1, in which an assistant sees no key"),
        ("clusters", {"num_centroids": 10}, "num_centroids = 10, .* vocab_size = 131; the first should divide"),
        ("clusters", {"centroid_intermediate_top_k": 132}, "centroid_intermediate_top_k = 132"),
    ],
)
def test_what_no_assistant_has_is_refused_by_name(kind: str, changes: dict[str, Any], expected: str) -> None:
    directory = changed_checkpoint("gemma4_text", kind, **changes)
    with pytest.raises(ModelError, match=f"the draft model: .*{expected}"):
        load_spec(EngineConfig(model=str(checkpoint("gemma4_text")), speculative=f"draft:{directory}:2"))


def test_an_assistant_alone_is_no_model() -> None:
    directory = assistant_checkpoint("gemma4_text", "plain")
    with pytest.raises(ModelError, match=r"is an assistant .* give a gemma4 or gemma4_text model, and"):
        load_spec(EngineConfig(model=str(directory)))


def test_the_plan_counts_an_assistants_weights_and_the_hidden_states_that_slots_keep() -> None:
    name, directory = "gemma4_text", assistant_checkpoint("gemma4_text", "clusters")
    config = EngineConfig(model=str(checkpoint(name)), speculative=f"draft:{directory}:2", dtype="float32")
    plan = make_plan(config, load_spec(config), cpu(8 * GIB))
    without = EngineConfig(model=str(checkpoint(name)), dtype="float32")
    alone = make_plan(without, load_spec(without), cpu(8 * GIB))
    assert plan.speculative is not None
    elements = sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values())
    assert plan.speculative.weights == 4 * elements == plan.memory.weights - alone.memory.weights
    assert (plan.speculative.method, plan.speculative.architecture) == ("assistant", "gemma4_assistant")
    assert (plan.speculative.kv_block, plan.speculative.state_slot) == (0, 4 * 64)
    assert f"drafts come from the assistant {directory}" in plan.speculative.reason
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_plan_counts_the_rows_of_the_head_that_clusters_copy() -> None:
    """Each of 64 drafts copies the vectors of 131 tokens, of 48 elements, beside which little else is alive."""
    needed = []
    for top in (1, 131):
        directory = changed_checkpoint("gemma4_text", "clusters", centroid_intermediate_top_k=top)
        config = EngineConfig(model=str(checkpoint("gemma4_text")), speculative=f"draft:{directory}:1")
        needed.append(activation_bytes(load_spec(config), "float32", 64, 64, 256, False, native=["sample"]))
    assert needed[1] >= 64 * 131 * 48 * 4 > needed[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"random_weights": True},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"dtype": "bfloat16", "deterministic": True},
        {"kv_cache_dtype": "int8"},
    ],
)
@pytest.mark.parametrize("kind", ["plain", "clusters"])
def test_random_and_quantised_weights_make_drafts_too(kind: str, settings: dict[str, Any]) -> None:
    """The tokens are those without drafts, from a model of the same weights."""
    speculative = f"draft:{assistant_checkpoint('gemma4_text', kind)}:2"
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    given = []
    for each in (None, speculative):
        engine = make_engine("gemma4_text", speculative=each, speculative_adaptive="off", **settings)
        output = engine.output(engine.add_request(random_prompt(60, 2), params))
        run(engine)
        assert output is not None
        given.append(output.outputs[0].token_ids)
    assert given[0] == given[1]
    assert engine.speculation is not None
    assert min(engine.speculation.counters.proposed) > 0


@pytest.mark.parametrize("name", ["gemma4", "gemma4_causal", "gemma4_unified"])
@pytest.mark.slow
def test_drafts_change_no_token_behind_images(name: str) -> None:
    """In chunks, with preemptions, and with the beginning from the cache."""
    directory = shared_folder("assistant")
    text_config = VL_RECIPES[name]().text_config
    assistant_of(assistant_config(text_config, "plain"), seed=4).save_pretrained(directory)
    engine = vision_parity.make_engine(
        name, speculative=f"draft:{directory}:3", speculative_adaptive="off", graph_mode="full_decode_only",
        max_num_batched_tokens=64,
    )  # fmt: skip
    parts = (vision_parity.text(30), vision_parity.images((6, 10)), vision_parity.text(12))
    first = vision_parity.decided_case(name, parts)
    second = vision_parity.decided_case(name, (vision_parity.text(11),), first)
    vision_parity.serve(engine, first, preempt_at=(4, 9))
    vision_parity.serve(engine, first, second)
    assert engine.speculation is not None
    assert min(engine.speculation.counters.proposed) > 0


def test_an_assistant_makes_drafts_for_a_gguf_file(tmp_path: Path) -> None:
    target, directory = write_gguf(tmp_path / "m.gguf", "gemma4", "F32"), tmp_path / "assistant"
    assistant_of(assistant_config(CONFIGS["gemma4"](), "plain"), seed=4).save_pretrained(directory)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    given = []
    for speculative in (None, f"draft:{directory}:2"):
        config = EngineConfig(
            model=str(target), speculative=speculative, speculative_adaptive="off", dtype="float32", threads=1,
            max_model_len=128, max_num_seqs=2, cache_memory="16MiB",
        )  # fmt: skip
        engine = EngineCore(config)
        output = engine.output(engine.add_request(list(range(3, 60)), params))
        run(engine)
        assert output is not None
        assert output.error is None
        given.append(output.outputs[0].token_ids)
    assert given[0] == given[1]
    assert engine.speculation is not None
    assert min(engine.speculation.counters.proposed) > 0
