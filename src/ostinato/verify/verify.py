"""The whole verification: prompts, the plain path, and every way of the matrix compared with it.

States of 16 bits are checked too: each stored value is the nearest to what a float32 state would be. Paths that round
alike are equal, so their tokens do not show how they round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from ostinato.config import EngineConfig
from ostinato.config_fields import is_count
from ostinato.engine.core import EngineCore
from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject
from ostinato.models.checkpoint import load_spec
from ostinato.ops.arrays import dtype_name, host_values, numpy_dtype
from ostinato.ops.sizes import SCAN_CHUNK
from ostinato.ops.step_inputs import LayerCache
from ostinato.plan.effective_settings import choose_chunks
from ostinato.plan.limits import min_batched_tokens
from ostinato.plan.model import ModelSpec
from ostinato.runner.inputs import make_step_inputs
from ostinato.sampling.params import SamplingParams
from ostinato.scheduler.batch import Batch, BatchRow
from ostinato.setting_names import plain_numbers
from ostinato.verify.cells import CACHES, KINDS, Cell, TokenMismatch, run_ways
from ostinato.verify.compare import Verdict, verdict_of
from ostinato.verify.engine_configs import base_config, check_length, check_memory, plain_config, way_config, with_cache
from ostinato.verify.matrix import MatrixSize, can_draft, make_matrix, named, small_chunks, speculations
from ostinato.verify.reference_run import PlainPath, ReferenceCase
from ostinato.verify.test_prompts import Prompt, PromptTexts, longest_text, make_prompts, make_texts

if TYPE_CHECKING:
    from os import PathLike


SAMPLED: JsonObject = {"temperature": 0.8, "repetition_penalty": 1.1}
"""Sampling parameters of the sampled requests.

The penalty depends on the tokens before a token, prompt or output alike, so a text continues the same from anywhere; a
parameter that cuts logits off at a threshold would not be a matter of the best two.
"""
NO_DRAFT = "speculation by a draft model: this model has an encoder, so it is none; give one with --draft"


@dataclass(frozen=True)
class Trial:
    """Parameters of a verification; `lines` are a user's prompts, `draft` a checkpoint that drafts, if any."""

    extent: MatrixSize = "pairs"
    num_prompts: int = 3
    """Number of prompts besides those of chosen lengths, if there are no `lines`."""
    max_tokens: int = 24
    seed: int = 0
    lines: tuple[str, ...] = ()
    draft: str | None = None


def verify(settings: JsonObject, trial: Trial, progress: Callable[[str, int, int], None]) -> JsonObject:
    """Compare each cell's tokens with the plain path's, and return the report.

    The report has, for each cell, whether its tokens are equal, and where they first are not. `settings` are of the
    engine; those that are axes of the matrix fix these axes. `progress` receives the stage, the number of finished
    cells and the number of all. Raises OstinatoError if there is nothing to verify.
    """
    begin = time.perf_counter()
    config = base_config(settings)
    model = load_spec(config)
    config, _ = choose_chunks(config, model)
    methods = speculations(config, model, trial.draft)
    most_drafts = max((method.num_speculative_tokens for method in methods if method is not None), default=0)
    texts = make_texts(config, model, trial.lines, trial.num_prompts, trial.seed)
    small = small_chunks(config, most_drafts)
    assert config.state_block_size is not None, "the base of all ways has it"
    prompts = make_prompts(texts.text, texts.others, config.block_size, config.state_block_size, small, model.vision)
    longest = longest_text(prompts, trial.max_tokens)
    config = check_length(config, model, longest)
    whole = max(longest, min_batched_tokens(config.max_num_seqs or 1, 1 + most_drafts, config.block_size))
    chunks = small if config.max_num_batched_tokens is not None else (whole, *small)
    config = with_cache(config, methods, len(KINDS) * len(prompts))
    matrix = make_matrix(config, methods, chunks, trial.extent)
    of_plain = plain_config(config, longest)
    check_memory(of_plain, [way_config(config, **way.settings) for way in matrix.ways])

    num_cells = len(CACHES) * len(matrix.ways)
    progress("the plain path", 0, num_cells)
    plain = PlainPath(of_plain)
    params = _params(trial, texts)
    cases = [case for kind in KINDS for case in plain.cases(prompts, kind, params[kind])]
    contradictions = [
        TokenMismatch(case.kind, case.number, divergence) for case in cases for divergence in plain.contradictions(case)
    ]
    states = check_states(plain.engine, max((case.prompt for case in cases), key=len))
    cells: list[Cell] = []
    for cell in run_ways(config, matrix.ways, plain, prompts, cases):
        cells.append(cell)
        progress("cells", len(cells), num_cells)
    return {
        "command": "verify",
        "model": _model_facts(config, model),
        "settings": _settings(config, plain, trial, whole),
        "axes": matrix.axes | {"speculative": tuple(map(named, matrix.axes["speculative"])), "cache": CACHES},
        "extent": {"name": trial.extent, "ways": len(matrix.ways), "possible_ways": matrix.num_possible},
        "left_out": matrix.left_out if can_draft(model, trial.draft) else (NO_DRAFT, *matrix.left_out),
        "prompts": _prompt_facts(prompts, cases),
        "plain": {
            "verdict": verdict_of([contradiction.divergence for contradiction in contradictions]),
            "found": [contradiction.to_json() for contradiction in contradictions],
        },
        "states": states,
        "cells": [cell.to_json() for cell in cells],
        "summary": {
            **{verdict.value: count for verdict, count in _count(cells).items()},
            "cells": len(cells),
            "seconds": round(time.perf_counter() - begin, 1),
        },
    }


def verify_model(
    model: str | PathLike[str] = "demo",
    *,
    extent: MatrixSize = "pairs",
    prompts: Sequence[str] = (),
    num_prompts: int = 3,
    max_tokens: int = 24,
    draft: str | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
    **settings: Any,
) -> JsonObject:
    """Compare every fast path of a model with the plain one, as `ostinato verify`, and return its report.

        report = verify_model("demo", extent="quick")
        assert report["passed"], report["summary"]

    `extent` is quick, pairs or full. `prompts` take the place of `num_prompts` made-up ones; `draft` is the checkpoint
    of a draft model. The settings are those of `LLM`; one that is an axis of the comparison fixes it. `progress` is
    called with a stage, and with how many of how many cells are done. Raises OstinatoError if nothing can be compared.
    """
    if extent not in get_args(MatrixSize):
        raise ConfigError(f"extent = {extent!r}: should be {', '.join(get_args(MatrixSize))}")
    counts = plain_numbers({"num_prompts": num_prompts, "max_tokens": max_tokens, "seed": seed})
    for name, value in counts.items():
        least = 1 if name == "max_tokens" else 0
        if not is_count(value, least):
            raise ConfigError(f"{name} = {value!r}: should be a whole number of at least {least}")
    lines = (prompts,) if isinstance(prompts, str) else tuple(prompts) if isinstance(prompts, Iterable) else (None,)
    if not all(isinstance(line, str) for line in lines):
        raise ConfigError(f"prompts = {prompts!r}: should be a list of texts")
    trial = Trial(extent, lines=lines, draft=draft, **counts)
    report = verify({**settings, "model": model, "seed": seed}, trial, progress or (lambda *_: None))
    return {**report, "passed": has_passed(report)}


def has_passed(report: JsonObject) -> bool:
    """Return whether no cell is different or has an error, and the plain path and its states are right."""
    verdicts = (report["plain"]["verdict"], report["states"]["verdict"])
    return not (report["summary"]["different"] or report["summary"]["error"]) and Verdict.DIFFERENT not in verdicts


def _params(trial: Trial, texts: PromptTexts) -> dict[str, SamplingParams]:
    """Return the sampling parameters by kind. Random tokens are no text, so an end token among them ends nothing."""
    common: JsonObject = {"max_tokens": trial.max_tokens, "ignore_eos": not texts.ends}
    return {
        "greedy": SamplingParams(temperature=0, **common),
        "sampled": SamplingParams(seed=trial.seed, **SAMPLED, **common),
    }


def _count(cells: Sequence[Cell]) -> Counter[Verdict]:
    """Count the cells of each verdict."""
    counts = Counter(dict.fromkeys(Verdict, 0))
    counts.update(cell.verdict for cell in cells)
    return counts


def _model_facts(config: EngineConfig, model: ModelSpec) -> JsonObject:
    return {
        "name": config.model,
        "architecture": model.architecture,
        "parameters": model.num_parameters,
        "random_weights": config.random_weights,
    }


def _settings(config: EngineConfig, plain: PlainPath, trial: Trial, whole: int) -> JsonObject:
    """Return the settings that all cells have in common."""
    effective = plain.engine.plan.settings
    return {
        "device": effective.device,
        "dtype": effective.dtype,
        "ssm_state_dtype": effective.ssm_state_dtype,
        "ssm_state_rounding": effective.ssm_state_rounding,
        "kv_cache_dtype": effective.kv_cache_dtype,
        "threads": effective.threads,
        "block_size": effective.block_size,
        "state_block_size": effective.state_block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": effective.max_model_len,
        "whole_prompt_tokens": whole,
        "max_tokens": trial.max_tokens,
        "seed": trial.seed,
        "sampled": SAMPLED,
    }


def _prompt_facts(prompts: Sequence[Prompt], cases: Sequence[ReferenceCase]) -> list[JsonObject]:
    """Describe each prompt, with its number of tokens by kind of request, which differs in second turns."""
    facts = []
    for number, prompt in enumerate(prompts):
        lengths = {case.kind: len(case.prompt) for case in cases if case.number == number}
        facts.append({"about": prompt.about, "after": prompt.after, "tokens": lengths})
    return facts


STATE_DTYPES = ("bfloat16", "float16")
CHECKED_DRAFTS = 2
MAX_OTHERS = 0.05
"""Largest part of other values, where float32 differs in its last bits. Without rounding half of them are others."""


def check_states(engine: EngineCore, text: Sequence[int]) -> JsonObject:
    """Return the verdict, and for each dtype of 16 bits the numbers of values, and of those that are not the nearest.

    `engine` is that of the plain path. Models without recurrent states in 16 bits have no dtypes.
    """
    mixers = [mixer for mixer in engine.spec.state_layers if mixer.state.recurrent_elements]
    names = STATE_DTYPES if mixers and not any(mixer.needs_float32 for mixer in mixers) else ()
    # No state is rounded within such a prompt.
    length = min((SCAN_CHUNK, *(mixer.chunk_size or 1 for mixer in mixers)))
    dtypes = {name: _differences(engine, text, length, name) for name in names}
    is_right = all(figures["others"] <= MAX_OTHERS * figures["values"] for figures in dtypes.values())
    return {"verdict": Verdict.EQUAL if is_right else Verdict.DIFFERENT, "dtypes": dtypes}


def _differences(engine: EngineCore, text: Sequence[int], length: int, dtype: str) -> dict[str, int]:
    """Count values after a prompt, and after the first token of a verify step.

    Each step runs from the same memory with states of `dtype` and of float32.
    """
    token, *drafts = text[length : length + 1 + CHECKED_DRAFTS]
    blocks = tuple(range(1, 2 + len(text[: length + CHECKED_DRAFTS]) // engine.runner.block_size))
    prompt = BatchRow("", tuple(text[:length]), 0, blocks, 0, (1,), window_block_table=blocks)
    verified = BatchRow(
        "", (token,), length, blocks, 1, (2, 3, 4), num_drafts=CHECKED_DRAFTS, window_block_table=blocks
    )
    recurrent = [
        (number, array.name)
        for number, layer in enumerate(engine.spec.cached_layers)
        for array in (layer.mixer.state.arrays if layer.mixer is not None else ())
        if array.dtype == "state"
    ]
    narrow, wide = (_memory(engine, recurrent, each, len(blocks)) for each in (dtype, "float32"))
    counts = {"values": 0, "others": 0}
    for batch, ahead in ((Batch((prompt,), 0), ()), (Batch((verified,), 1, CHECKED_DRAFTS), tuple(drafts))):
        for own, other in zip(narrow, wide, strict=True):
            for name, kept in own.tensors.items():
                engine.runner.arrays.write(other.tensors[name], host_values(kept))
        runner, slot = engine.runner, batch.rows[0].write_slots[0]
        with runner.arrays.inference_mode():
            step = make_step_inputs(batch, runner.block_size, runner.arrays, [ahead], vision=runner.vision)
            for memory in (narrow, wide):
                runner.model(step, memory)
        for number, name in recurrent:
            stored, exact = (host_values(memory[number].states[name][slot]) for memory in (narrow, wide))
            counts["values"] += stored.size
            counts["others"] += int((stored != exact.astype(numpy_dtype(dtype))).sum())
    return counts


def _memory(engine: EngineCore, recurrent: Sequence[tuple[int, str]], dtype: str, num_blocks: int) -> list[LayerCache]:
    """Return zeros for the memory of one request, with recurrent states in `dtype`."""
    memory, arrays = [], engine.runner.arrays
    for number, layer in enumerate(engine.runner.layer_memory):
        blocks: JsonObject = {
            name: arrays.zeros((1 + num_blocks, *kept.shape[1:]), dtype_name(kept.dtype))
            for name, kept in layer.block_tensors.items()
        }
        states = {
            name: arrays.zeros((5, *kept.shape[1:]), dtype if (number, name) in recurrent else dtype_name(kept.dtype))
            for name, kept in layer.states.items()
        }
        memory.append(replace(layer, **blocks, states=states, noise=None, packed_states=()))
    return memory
