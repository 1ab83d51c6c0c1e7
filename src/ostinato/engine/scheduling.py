"""Construction of the scheduler from the plan."""

from __future__ import annotations

from ostinato.cache.encoder_cache import EncoderCache
from ostinato.cache.eviction import EvictionCosts
from ostinato.cache.manager import CacheManager
from ostinato.cache.placement import PrefixCachePolicy
from ostinato.plan.plan import Plan
from ostinato.plan.windows import sliding_window_spec
from ostinato.schedule.limits import SchedulerLimits
from ostinato.schedule.scheduler import ChooseNumDrafts, Scheduler


def make_scheduler(plan: Plan, choose_drafts: ChooseNumDrafts | None = None) -> Scheduler:
    """Return a scheduler over an empty cache, with the plan's limits, counts and policies."""
    settings, memory, state = plan.settings, plan.memory, plan.state_cache
    costs = EvictionCosts(
        flops_per_token=state.prefill_flops.per_token,
        flops_per_pair=state.prefill_flops.per_pair,
        block_bytes=memory.kv_block,
        slot_bytes=memory.state_slot,
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
    )
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        policy=settings.scheduling_policy,
        max_item_tokens=0 if plan.encoder is None else plan.encoder.max_item_tokens,
        graph_tokens=_graph_tokens(plan),
    )
    policy = PrefixCachePolicy(
        prefix_caching=settings.enable_prefix_caching,
        mode=settings.state_cache_mode,
        state_block_size=settings.state_block_size,
        branches=settings.checkpoint_policy == "boundaries+branches",
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
