"""Online checks: some finished requests, computed again from nothing when the engine is idle, and compared.

A check has memory of its own and computes eagerly, in chunks of a few tokens. Between two chunks it looks whether a
request has come. It compares the token at each place with the one that the plain path would have taken there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ostinato.config import EngineConfig
from ostinato.engine.process.engine_messages import MakeEngine
from ostinato.errors import ConfigError, Remedy
from ostinato.json_io import JsonObject
from ostinato.observe.counts import ProgressFn
from ostinato.ops.seeds import MASK64, mix64
from ostinato.ops.step_inputs import Array, LayerCache
from ostinato.scheduler.batch import Batch, BatchRow
from ostinato.units import format_bytes

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore
    from ostinato.engine.output_processor import RequestState
    from ostinato.sampling.grammar import GrammarState

log = logging.getLogger("ostinato.engine")

MAX_TOKENS = 4096
"""Tokens of a request above which it is not checked. The memory of checks has room for one of this length."""
MAX_WAITING = 16
"""Requests that wait to be checked. Beyond that they are left out, and counted."""
CHUNK = 8
"""Tokens between two looks whether a request has come."""


@dataclass
class CheckCounts:
    """Counts of online checks. Those left out have images, are too long, or were too many."""

    checked: int = 0
    different: int = 0
    ties: int = 0
    """Tokens that rounding decides, in equal outputs and different ones."""
    interrupted: int = 0
    """Checks that waited for a request, each time that they did."""
    left_out: int = 0
    failed: int = 0


class OnlineChecks:
    """Checks of one engine, on its thread.

    `note_request` is called for each request, `advance` between two steps while there is nothing else to do, and
    `pause` when there is. An error of a check ends the checks, and no request.
    """

    def __init__(self, engine: EngineCore, rate: float) -> None:
        """Check about `rate` of all requests. ConfigError if several ranks share the model."""
        if engine.has_ranks:
            message = "verify_rate is for an engine in one process, and tensor_parallel_size is above 1"
            raise ConfigError(message, [Remedy("verify_rate", 0.0), Remedy("tensor_parallel_size", 1)])
        self._engine, self._threshold = engine, int(rate * 2**64)
        self.counts = CheckCounts()
        self._num_requests = 0
        self._chosen: deque[RequestState] = deque()
        self._current: Iterator[None] | None = None
        settings = engine.plan.settings
        longest = min(MAX_TOKENS, settings.max_model_len)
        self._num_blocks = -(-longest // settings.block_size)
        self._longest = self._num_blocks * settings.block_size
        memory = engine.plan.memory
        num_bytes = self._num_blocks * (memory.kv_block + memory.window_block) + 2 * memory.state_slot
        log.info(
            "verify_rate: %g%% of requests are checked, in up to %s of memory beside the plan's",
            *(100 * rate, format_bytes(num_bytes)),
        )

    def note_request(self, state: RequestState) -> None:
        """Choose a request, or not. Which are chosen depends on their number alone."""
        self._num_requests += 1
        if mix64(self._num_requests) & MASK64 >= self._threshold or state.pooling is not None:
            return
        if state.media is not None or len(self._chosen) == MAX_WAITING:
            self.counts.left_out += 1
            return
        self._chosen.append(state)

    def pause(self) -> None:
        """Note that a request has come. The check that was begun continues when the engine is idle again."""
        self.counts.interrupted += self._current is not None

    def advance(self) -> bool:
        """Compute one chunk of a check; return False if there is none to do."""
        if self.counts.failed:
            return False
        if self._current is None:
            state = self._next()
            if state is None:
                return False
            self._current = self._check(state)
        try:
            next(self._current)
        except StopIteration:
            self._current = None
        except Exception as error:
            self.counts.failed += 1
            self._current = None
            log.error("the online checks end, one of them failed: %s", error, exc_info=error)
        return True

    def stats(self) -> JsonObject:
        return asdict(self.counts)

    def _next(self) -> RequestState | None:
        """Return the next request that has ended by itself."""
        for _ in range(len(self._chosen)):
            state = self._chosen.popleft()
            output = state.output.outputs[0]
            if not output.finished:
                self._chosen.append(state)
                continue
            num_tokens = len(state.output.prompt_token_ids) + len(output.token_ids)
            if output.finish_reason not in ("stop", "length") or not output.token_ids:
                continue
            if num_tokens <= self._longest:
                return state
            self.counts.left_out += 1
        return None

    @cached_property
    def _layers(self) -> list[LayerCache]:
        """Memory of one request, made when it is first used."""
        from ostinato.runner.cache_memory import allocate_layers

        plan, runner = self._engine.plan, self._engine.runner
        memory, count = plan.memory, self._num_blocks + 1
        own = replace(
            memory,
            num_blocks=count if memory.num_blocks else 0,
            num_window_blocks=count if memory.num_window_blocks else 0,
            num_slots=2 if memory.num_slots else 0,
        )
        return allocate_layers(self._engine.spec, replace(plan, memory=own), runner.arrays)

    def _check(self, request_state: RequestState) -> Iterator[None]:
        """Compute a request's first output again, and compare it. Yields after each chunk."""
        from ostinato.sampling.state import SamplingState
        from ostinato.verify.reference_run import token_scores

        engine, params, output = self._engine, request_state.params, request_state.output
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        done: list[int] = []
        guidance: GrammarState | None = request_state.requests[0].sampling_state.guidance
        state = SamplingState(
            params,
            prompt,
            done,
            () if params.ignore_eos else request_state.requests[0].stop.eos_token_ids,
            seed=request_state.seed,
            grammar=None if guidance is None else guidance.grammar,  # compiling takes up to a second
        )
        text, first, end = [*prompt, *tokens[:-1]], len(prompt) - 1, 0
        whole = len(prompt) if engine.spec.is_prefix_lm else 0
        while end < len(text):
            start, end = end, min(max(end + CHUNK, whole), len(text))
            for row, logits in enumerate(self._logits(text, start, end, min(end - start, end - first), whole)):
                place = max(start, first) - first + row
                scores = token_scores(engine, state, logits)
                best, came = scores.best[0][0], tokens[place]
                if best != came and not scores.is_tie(came):
                    self._report(request_state, place, best, came)
                    return
                self.counts.ties += best != came
                done.append(came)
            yield
        self.counts.checked += 1

    def _logits(self, text: list[int], start: int, end: int, count: int, prompt_end: int) -> list[Array]:
        """Compute tokens `start` to `end - 1` -> logits [vocab] of the last `count`; `prompt_end` as in `BatchRow`."""
        from ostinato.runner.inputs import make_step_inputs
        from ostinato.runner.step_logits import logit_positions

        engine, runner, memory = self._engine, self._engine.runner, self._engine.plan.memory
        table, slot = tuple(range(1, self._num_blocks + 1)), min(1, memory.num_slots)
        count = max(0, count)
        row = BatchRow(
            request_id="",
            token_ids=tuple(text[start:end]),
            start=start,
            block_table=table if memory.num_blocks else (),
            window_block_table=table if memory.num_window_blocks else (),
            read_slot=slot if start else 0,
            write_slots=(slot,),
            num_logits=count,
            num_scored=count,
            prompt_end=prompt_end,
        )
        batch = Batch((row,), num_decode_rows=0)
        with runner.arrays.inference_mode():
            step = make_step_inputs(batch, engine.plan.settings.block_size, runner.arrays, vision=runner.vision)
            hidden = runner.model(step, self._layers)
            if not count:
                return []
            return list(runner.model.compute_logits(hidden[logit_positions(batch).scored]))

    def _report(self, state: RequestState, place: int, best: int, came: int) -> None:
        """Count and log an output that is not the plain path's, with its record, if there is one."""
        self.counts.checked += 1
        self.counts.different += 1
        record = (self._engine.stats()["record"] or {}).get("folder")
        how = "give --record to replay the next one" if record is None else f"ostinato replay {record}"
        log.error(
            "request %s: token %d is %d, and the plain path gives %d; %s",
            *(state.output.request_id, place, came, best, how),
        )


def make_checked_engine(make: MakeEngine, rate: float, config: EngineConfig, progress: ProgressFn) -> EngineCore:
    """Return the engine that `make` makes, with online checks."""
    engine = make(config, progress)
    engine.online_checks = OnlineChecks(engine, rate)
    return engine
