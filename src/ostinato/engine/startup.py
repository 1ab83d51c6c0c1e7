"""Start of an engine: process check, the checkpoint's defaults, the model on its ranks, and the planned scheduler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.distributed.rank_messages import RankedCacheMemory
from ostinato.engine.text.tokenizer import Tokenizer, load_tokenizer
from ostinato.errors import ConfigError, ForkError, Remedy
from ostinato.kv_cache.checkpoints import PrefixCachePolicy
from ostinato.kv_cache.encoder_cache import EncoderCache
from ostinato.kv_cache.eviction import EvictionCosts
from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.request_cache import CacheMemory
from ostinato.models.checkpoint import resolve_model_dir
from ostinato.observe.counts import ProgressFn, StartupTimer
from ostinato.plan.memory.split import sliding_window_spec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.runner.cache_memory import LayerCacheMemory
from ostinato.runner.model_runner import ModelRunner, choose_arrays
from ostinato.scheduler.limits import SchedulerLimits, scored_tokens
from ostinato.scheduler.scheduler import ChooseNumDrafts, Scheduler

if TYPE_CHECKING:
    from ostinato.distributed.leader import LeaderRank


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


def _start_ranks(
    plan: Plan, spec: ModelSpec, directory: Path | None, draft_directory: Path | None
) -> LeaderRank | None:
    if spec.ranks == 1:
        return None
    choose_arrays(plan, spec)  # It refuses a plan that needs torch where there is none.
    from ostinato.distributed.leader import LeaderRank

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


def make_scheduler(plan: Plan, choose_drafts: ChooseNumDrafts | None = None) -> Scheduler:
    """Return a scheduler over an empty cache, with the plan's limits, counts and policies."""
    settings, memory, state = plan.settings, plan.memory, plan.state_cache
    costs = EvictionCosts(
        flops_per_token=state.prefill_flops.per_token,
        flops_per_pair=state.prefill_flops.per_pair,
        block_bytes=memory.kv_block,
        slot_bytes=memory.packed_state or memory.state_slot,
        window_block_bytes=memory.window_block,
    )
    cache = CacheManager(
        memory.num_blocks,
        memory.num_slots,
        settings.block_size,
        memory.slots_per_request,
        settings.eviction_policy,
        costs,
        memory.num_window_blocks,
        sliding_window_spec(memory, settings.block_size, settings.max_num_batched_tokens),
        plan.pins.max_pins,
        plan.pins.max_blocks,
        memory.num_packed,
    )
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        policy=settings.scheduling_policy,
        max_item_tokens=0 if plan.encoder is None else plan.encoder.max_item_tokens,
        whole_images=plan.encoder is not None and plan.encoder.whole_images,
        whole_prompts=plan.model.is_prefix_lm,
        graph_tokens=_graph_tokens(plan),
        scored_tokens=scored_tokens(plan.model.vocab_size),
    )
    policy = PrefixCachePolicy(
        prefix_caching=settings.enable_prefix_caching,
        mode=settings.state_cache_mode,
        state_block_size=settings.state_block_size,
        branches=settings.checkpoint_policy == "boundaries+branches",
        whole_prompts=plan.model.is_prefix_lm,
    )
    encoder_cache = None if plan.encoder is None else EncoderCache(plan.encoder.num_cells)
    return Scheduler(limits, cache, policy, choose_drafts, encoder_cache)


def _graph_tokens(plan: Plan) -> int:
    """Return the step size in tokens that the scheduler prefers to `max_num_batched_tokens` to fit a graph, or 0."""
    fitting = [size for size in plan.capture.tokens if size <= plan.settings.max_num_batched_tokens]
    largest = max(fitting, default=0)
    if not plan.settings.prefer_graph_sizes or largest == plan.settings.max_num_batched_tokens:
        return 0
    return largest
