"""Start of an engine: process check, the checkpoint's defaults, and the model, on one rank or several."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.cache.memory import CacheMemory
from ostinato.engine.ranks.memory import RankedCacheMemory
from ostinato.engine.run.cache_bytes import LayerCacheMemory
from ostinato.engine.run.runner import ModelRunner, ProgressFn
from ostinato.engine.text.tokenizer import Tokenizer, load_tokenizer
from ostinato.errors import ConfigError, ForkError, ModelError, Remedy, RequestError
from ostinato.models.checkpoint import resolve_model_dir
from ostinato.observe.phases import StartupTimer
from ostinato.plan.plan import Plan
from ostinato.sample.params import SamplingParams

if TYPE_CHECKING:
    from ostinato.engine.ranks.leader import LeaderRank
    from ostinato.plan.model import ModelSpec

_pid: int | None = None
"""Id of the process whose engines have threads."""


def check_not_forked() -> None:
    """Raise ForkError if the threads that torch and the kernels have started are another process's."""
    global _pid
    if _pid is not None and _pid != os.getpid():
        raise ForkError(f"process {_pid} has made an engine, and process {os.getpid()} is a fork of it")
    _pid = os.getpid()


def start_runner(
    plan: Plan,
    spec: ModelSpec,
    directory: Path | None,
    draft_directory: Path | None,
    progress: ProgressFn,
    phases: StartupTimer,
) -> tuple[ModelRunner, LeaderRank | None]:
    """Return the model with its weights and the graphs captured at the start, and the leader of the other ranks.

    The leader is None on a single rank. Without `directory`, weights are random.
    """
    leader = _start_ranks(plan, spec, directory, draft_directory)
    try:
        runner = ModelRunner(plan, spec, directory, progress, draft_directory, phases, leader)
        if leader is not None:
            leader.wait_ready()
        if plan.settings.capture == "startup":
            runner.capture(progress)
    except BaseException:
        if leader is not None:
            leader.close(at_once=True)
        raise
    return runner, leader


def _start_ranks(plan: Plan, spec: ModelSpec, directory: Path | None, draft_directory: Path | None) -> LeaderRank | None:
    if spec.ranks == 1:
        return None
    from ostinato.engine.ranks.leader import LeaderRank

    return LeaderRank(plan, spec, directory, draft_directory)


def make_cache_memory(plan: Plan, runner: ModelRunner, leader: LeaderRank | None) -> CacheMemory:
    """Return the memory of blocks, window blocks and slots of all ranks, as bytes."""
    own = LayerCacheMemory(runner.layer_memory, plan.settings.block_size)
    return own if leader is None else RankedCacheMemory(own, leader, plan.settings.tensor_parallel_size)


def find_draft_directory(plan: Plan, tokenizer: Tokenizer) -> Path | None:
    """Return the draft model's directory, if there is one. ConfigError if its tokens stand for other texts."""
    if plan.speculative is None or plan.speculative.model is None:
        return None
    directory = resolve_model_dir(plan.speculative.model, download_dir=plan.settings.download_dir)
    if not tokenizer.agrees_with(load_tokenizer(directory)):
        k = plan.speculative.num_speculative_tokens
        message = (
            f"the draft model {plan.speculative.model} has other tokens than the model, though as many: its drafts "
            "would be other texts; choose a draft model with the same tokenizer, or another method"
        )
        raise ConfigError(message, [Remedy("speculative", f"ngram:{k}")])
    return directory


def load_default_params(tokenizer: Tokenizer, directory: Path) -> SamplingParams:
    """Return the parameters of generation_config.json. ModelError if they are not possible."""
    try:
        return SamplingParams(**tokenizer.sampling_defaults)
    except RequestError as error:
        path = directory / "generation_config.json"
        raise ModelError(f"{path} asks for sampling that cannot be done: {error.message}") from None
