"""What the engine has done so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ostinato.schedule.batch import Batch
from ostinato.schedule.scheduler import Scheduler


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made; times in seconds."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, those computed again after a preemption included."""
    decode_rows: int = 0
    prefill_rows: int = 0
    step_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    """Of those, what choosing batches and taking their results in took: requests, blocks, slots, the prefix index."""

    def count_step(self, batch: Batch, computed: int, generated: int, seconds: float, bookkeeping: float) -> None:
        self.generated_tokens += generated
        self.computed_tokens += computed
        self.decode_rows += batch.num_decode_rows
        self.prefill_rows += len(batch.rows) - batch.num_decode_rows
        self.step_seconds += seconds
        self.bookkeeping_seconds += bookkeeping

    def to_json(self, scheduler: Scheduler, graphs: Mapping[str, Any]) -> dict[str, Any]:
        """These counts, those of scheduler and graphs, and the cache's present use."""
        counters = asdict(scheduler.counters)
        counters["finished"] = {reason.value: count for reason, count in counters["finished"].items()}
        return {
            **asdict(self),
            **counters,
            "graphs": dict(graphs),
            "waiting": scheduler.num_waiting,
            "running": scheduler.num_running,
            "cache": asdict(scheduler.cache.usage()),
            "prefix_cache": {
                **asdict(scheduler.prefix_counters),
                **asdict(scheduler.cache.store.counters),
            },
        }


def encoder_cache_use(scheduler: Scheduler) -> dict[str, int]:
    """What the encoder cache has counted, and its present use, in cells: one holds a token of an image."""
    cache = scheduler.encoder_cache
    assert cache is not None, "only models that take images have one"
    return {
        **asdict(cache.counters),
        "items": cache.num_items,
        "cells_used": cache.num_pinned,
        "cells_cached": cache.num_cached,
        "cells_total": cache.capacity,
    }
