"""No step that a CUDA graph holds reads a value on the host: each model's, on tensors without memory, with the kernels
that the plan chooses on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import EngineConfig, SamplingParams
from ostinato.graphs.buffers import EncoderBuffers
from ostinato.models.checkpoint import load_spec
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import triton_kernel
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.memory.activations import LARGE_SEGMENT
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.speculation import with_drafter
from ostinato.runner.inputs import write_step_inputs
from ostinato.sampling.sampler import sample_rows
from ostinato.sampling.state import SamplingState
from ostinato.scheduler.batch import Batch, BatchRow
from tests.support.checkpoints import checkpoint
from tests.support.logit_table import LogitTable
from tests.support.recipes import HEADED, IN_REFERENCES, RECIPES
from tests.support.triton_kernels import require_triton
from tests.support.vl_models import VL_RECIPES, vl_checkpoint
from tests.support.without_memory import (
    BLOCK_SIZE,
    META,
    HostRead,
    LeavesOut,
    OnDevice,
    collected_launches,
    meta_buffers,
    meta_memory,
    meta_model,
)

require_triton()

READ_ON_HOST = {"qwen4_exp", "qwen4_exp_text"}
"""Models with tables on disk, whose rows are read on the host."""
MODELS = [*(name for name in RECIPES if name not in READ_ON_HOST | IN_REFERENCES), *HEADED, *VL_RECIPES]
DRAFTS = 3


def planned(name: str, device: str = "h100-80gb", **settings: Any) -> tuple[Plan, ModelSpec]:
    directory = vl_checkpoint(name) if name in VL_RECIPES else checkpoint(name)
    settings |= {"speculative": {"method": "mtp", "num_speculative_tokens": DRAFTS}} if name in HEADED else {}
    common = {"model": str(directory), "dtype": "bfloat16", "max_num_seqs": 4, "max_model_len": 128}
    config = EngineConfig(**(common | settings))
    spec = with_drafter(config, load_spec(config))
    plan = make_plan(config, spec, CATALOGUE[device])
    return plan, spec


def assert_full_graphs(plan: Plan) -> None:
    """Of Triton kernels alone, for every decode step; and piecewise ones."""
    assert {op for op, choice in plan.kernels.items() if choice.implementation != "triton"} == set()
    assert all(choice.launches for choice in plan.kernels.values())
    assert plan.capture.graph_mode == "full_and_piecewise"
    assert {entry.mode for entry in plan.capture.coverage.decode} == {"full"}
    assert plan.capture.tokens
    assert plan.prediction.steps[0].launches
    if plan.encoder is not None:
        assert plan.encoder.token_budgets


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_has_full_graphs_on_a_gpu(name: str) -> None:
    assert_full_graphs(planned(name)[0])


@pytest.mark.parametrize(
    "settings", [{}, {"quantization": "int8"}, {"quantization": "int8_g128"}, {"dtype": "float16"}]
)
@pytest.mark.parametrize("device", CATALOGUE)
def test_so_it_has_on_every_gpu_of_the_catalogue_with_drafts_and_eight_bit_weights(
    device: str, settings: dict[str, Any]
) -> None:
    for name, drafts in (("granitemoehybrid", "ngram:3"), ("qwen3_next", None)):
        assert_full_graphs(planned(name, device, speculative=drafts, **settings)[0])


def test_so_it_has_with_a_draft_model() -> None:
    drafted = {"method": "draft", "model": str(checkpoint("qwen3")), "num_speculative_tokens": 2}
    assert_full_graphs(planned("qwen3", speculative=drafted)[0])


def decode_rows(count: int, drafts: int) -> Batch:
    rows = [
        BatchRow(str(i), (5,), 20 + i, (1 + 2 * i, 2 + 2 * i), 1 + i, tuple(range(8 + 4 * i, 9 + 4 * i + drafts)))
        for i in range(count)
    ]
    return Batch(tuple(rows), count, drafts)


@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_reads_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, spec = planned(name)
    model, memory = meta_model(spec, plan.kernels), meta_memory(spec)
    with torch.inference_mode(), collected_launches(monkeypatch) as launches:
        for drafts in (0, DRAFTS):
            buffers = meta_buffers(spec, 4, 16, 1 + DRAFTS)
            inputs = write_step_inputs(
                buffers, decode_rows(3, drafts), BLOCK_SIZE, [(7,) * drafts] * 3 if drafts else ()
            )
            buffers.pad(3, inputs.num_tokens, 4, 4 * (1 + drafts))
            captured = buffers.view(4, 4 * (1 + drafts), 1 + drafts, 4)
            with OnDevice():
                hidden = model(captured, memory)
                logits = model.compute_logits(hidden)
            assert logits.shape == (4 * (1 + drafts), spec.vocab_size)
    assert launches


@pytest.mark.parametrize("name", MODELS)
def test_a_piecewise_step_reads_nothing_on_the_host_outside_of_the_parts_that_it_leaves_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, spec = planned(name)
    model, memory, buffers = meta_model(spec, plan.kernels), meta_memory(spec), meta_buffers(spec, 4, 16, 1 + DRAFTS)
    with torch.inference_mode(), collected_launches(monkeypatch), OnDevice() as device:
        model.build.ops.hook.recorder = left = LeavesOut(device, plan.capture.splits)
        hidden = model(buffers.view(1, 16, 1, 0), memory)
    assert hidden.shape[0] == 16
    assert set(left.left_out) == set(plan.capture.splits)


@pytest.mark.parametrize("name", VL_RECIPES)
def test_encoding_images_reads_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, spec = planned(name)
    assert spec.vision is not None
    how = (spec.vision.patch_elements, TorchArrays("meta"), "bfloat16", spec.vision.taps, spec.vision.has_windows)
    buffers = EncoderBuffers(64, 3, *how)
    with torch.inference_mode(), collected_launches(monkeypatch) as launches:
        model = meta_model(spec, plan.kernels)
        with OnDevice():
            model.encode(buffers.view(64))
    assert launches


SAMPLED = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 1},
    {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}, "min_tokens": 4},
]


@pytest.mark.parametrize("which", [*range(len(SAMPLED)), None])
def test_sampling_brings_back_the_tokens_and_nothing_else(which: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = SAMPLED if which is None else [SAMPLED[which]] * 3
    states = [SamplingState(SamplingParams(**each), [1, 2, 3], [4], eos_token_ids=[1], seed=5) for each in chosen]
    rows = [
        row._replace(sampling_state=state, num_logits=1, samples=True)
        for row, state in zip(decode_rows(3, 0).rows, states, strict=True)
    ]
    logits = torch.empty(3, 4000, device=META)
    brought: list[torch.Tensor] = []

    def draw(*args: Any) -> torch.Tensor:
        brought.append(triton_kernel("sample")(*args))
        return torch.zeros(3, dtype=torch.int32)  # what a copy to the host would be

    with torch.inference_mode(), collected_launches(monkeypatch) as launches:
        results = sample_rows(LogitTable(logits, rows), rows, kernel=draw)
    assert [result.token_ids for result in results] == [(0,)] * 3
    assert [(each.device, tuple(each.shape)) for each in brought] == [(META, (3,))]
    assert launches


@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "llama", "mamba2"])
def test_a_full_graph_needs_no_more_memory_than_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, spec = planned(name)
    model, memory, buffers = meta_model(spec, plan.kernels), meta_memory(spec), meta_buffers(spec, 4, 16, 1)
    with torch.inference_mode(), collected_launches(monkeypatch), OnDevice() as device:
        hidden = model(buffers.view(4, 4, 1, 4), memory)
        del hidden
    assert 0 < device.most_bytes <= plan.memory.graphs - LARGE_SEGMENT


def test_a_read_on_the_host_is_found_out() -> None:
    x = torch.ones(4, device=META)
    with OnDevice():
        for read in (lambda: x.tolist(), lambda: x.nonzero(), lambda: x.cpu(), lambda: x + torch.ones(4)):
            with pytest.raises((HostRead, NotImplementedError)):
                read()
    plan, spec = planned("llama", kernels="reference")
    with torch.inference_mode(), OnDevice(), pytest.raises(HostRead):
        meta_model(spec, plan.kernels)(meta_buffers(spec, 4, 16, 1).view(4, 4, 1, 4), meta_memory(spec))
