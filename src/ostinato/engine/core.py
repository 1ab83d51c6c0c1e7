"""The engine: one model, its plan, and the requests that its steps turn into outputs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Protocol

from ostinato.config import EngineConfig
from ostinato.engine.cache_files import cache_fingerprint, engine_identity, open_files
from ostinato.engine.executor import OverlapExecutor, StepExecutor, StepHandle, SyncExecutor
from ostinato.engine.flight.flight_recorder import FlightRecorder, StepLog
from ostinato.engine.flight.record_files import PieceKind
from ostinato.engine.input_processor import InputProcessor, check_template_kwargs
from ostinato.engine.migration.export_import import make_export, restore_request
from ostinato.engine.output_processor import OutputProcessor, RequestState
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.startup import (
    check_not_forked,
    find_draft_directory,
    make_cache_memory,
    make_scheduler,
    start_runner,
)
from ostinato.engine.stats import engine_stats
from ostinato.engine.text.chat_messages import ChatMessage
from ostinato.engine.text.tokenizer import load_default_params, load_tokenizer_and_template
from ostinato.errors import RankError, RequestError
from ostinato.formats.mapped_files import MappedFileWatch
from ostinato.json_io import JsonObject
from ostinato.kv_cache.marks import Mark
from ostinato.kv_cache.offload.save_restore import save_to_files
from ostinato.media.media_input import RenderedChat, load_media_input, render_chat
from ostinato.media.media_prompt import MediaPrompt
from ostinato.models.checkpoint import checkpoint_of, load_spec
from ostinato.observe.counts import EngineCounts, EngineHistograms, ProgressFn, StartupTimer, no_progress
from ostinato.ops.seeds import seed_of_request
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.traffic import RequestLengths, Traffic
from ostinato.plan.ukernels import explain_rows
from ostinato.sampling.grammar import Grammar, GrammarCompiler
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.pooler import PoolingKind
from ostinato.scheduler.batch import Batch, StepResult
from ostinato.scheduler.request import RequestUpdate
from ostinato.spec_decode.controller import SpeculationMonitor

log = logging.getLogger("ostinato.engine")
kernel_log = logging.getLogger("ostinato.kernels")


class IdleWork(Protocol):
    """Checks of finished requests, for times at which the engine has nothing else to do."""

    def note_request(self, state: RequestState) -> None:
        """Note a request that was added."""

    def advance(self) -> bool:
        """Do a part of the work, of some milliseconds; return False if there is none."""

    def pause(self) -> None:
        """Note that a request has come."""

    def stats(self) -> JsonObject: ...


class EngineCore:
    """Serves requests on one model. One thread calls it: `add_request` at any time, `step` while `has_unfinished`.

    With `overlap`, a step may be in flight between two calls.
    """

    def __init__(
        self, config: EngineConfig, progress: ProgressFn = no_progress, phases: StartupTimer | None = None
    ) -> None:
        """Plan, load the weights and capture the graphs of the plan, unless they are captured on first use.

        `phases` notes how long each part takes, as `plan.measured` does.

        Raises ModelError, ConfigError or CapacityError. The latter two come before any weight is read, unless the
        graphs take more memory than was planned. CaptureError if a step of the model cannot be captured. ForkError in a
        fork of a process that has made an engine.
        """
        check_not_forked()
        phases = phases or StartupTimer()
        self.spec = load_spec(config)
        plan = make_plan(config, self.spec, detect(config.device))
        phases.end("plan")
        self.directory = checkpoint_of(config)
        self.tokenizer, self.chat_template = load_tokenizer_and_template(config, self.directory)
        self._default_params = load_default_params(self.tokenizer, self.directory)
        draft_directory = find_draft_directory(plan, self.tokenizer)
        phases.end("tokenizer")
        directory, of_draft = (None, None) if config.random_weights else (self.directory, draft_directory)
        self._weights = [path for path in (self.directory, draft_directory) if path is not None]
        self.runner, self._leader = start_runner(plan, self.spec, directory, of_draft, progress, phases)
        phases.end("capture")
        try:
            self._set_up(config, replace(plan, measured=self.runner.measured | {"start_seconds": dict(phases.seconds)}))
        except BaseException:
            if self._leader is not None:
                self._leader.close(at_once=True)
            raise
        phases.end("scheduler")

    def _set_up(self, config: EngineConfig, plan: Plan) -> None:
        """Set up everything around the model."""
        self.plan = plan
        for name, choice in plan.kernels.items():
            kernel_log.debug("%s: %s (%s)", name, choice.implementation, choice.reason)
        settings, isa = plan.settings, plan.device.native.isa
        if kernel_log.isEnabledFor(logging.DEBUG) and isa is not None:
            model = replace(self.spec, quantization=settings.quantization)
            for rows in explain_rows(model, settings.dtype, isa, settings.deterministic, settings.kv_cache_dtype):
                chosen = "; ".join(f"m = {m}: {choice.row.name}" for m, choice in rows.spans)
                kernel_log.debug("%s: %s", rows.product, chosen)
        self.speculation: SpeculationMonitor | None = None
        if plan.speculative is not None:
            self.speculation = SpeculationMonitor(plan.speculative, self.runner)
        self.scheduler = make_scheduler(
            plan, None if self.speculation is None else self.speculation.controller.choose_num_drafts
        )
        self._files_in_use = MappedFileWatch(self._weights)
        memory = self.scheduler.cache.memory = make_cache_memory(plan, self.runner, self._leader)
        if plan.cache_files is not None:
            files = open_files(plan.cache_files, cache_fingerprint(plan), config.model, self._weights, memory)
            self.scheduler.cache.store.files = files
        self._eos_token_ids = self.tokenizer.end_tokens(self.spec.vocab_size)
        if outside := sorted(self.tokenizer.eos_token_ids - self._eos_token_ids):
            known = f"end at {sorted(self._eos_token_ids)}" if self._eos_token_ids else "do not end by themselves"
            message = "the checkpoint's end tokens %s are none of its %d tokens; outputs %s"
            log.warning(message, outside, self.spec.vocab_size, known)
        remote = config.allow_remote_images
        self.media = load_media_input(self.directory, self.spec.vision, self.tokenizer, plan, remote)
        self._grammars = GrammarCompiler(self.tokenizer, self.spec.vocab_size, self._eos_token_ids)
        self.input_processor = InputProcessor(
            plan, self.tokenizer, self.spec.vocab_size, self._eos_token_ids, self._default_params, self._grammars
        )
        self.counts = EngineCounts()
        self.meter = EngineHistograms()
        self.request_lengths = RequestLengths()
        self.output_processor = OutputProcessor(self.scheduler, self.meter, self.request_lengths)
        self.executor: StepExecutor = (OverlapExecutor if plan.settings.overlap == "on" else SyncExecutor)(self.runner)
        self._in_flight: StepHandle | None = None
        """The step that was submitted ahead and is not finished."""
        self._num_added = 0
        self.step_log: StepLog | None = None if config.record is None else FlightRecorder(self, config)
        """Log of all that enters the engine and of its steps, if they are recorded or replayed."""
        self.online_checks: IdleWork | None = None

    @property
    def has_unfinished(self) -> bool:
        """True while there is an unfinished request, a step in flight or an output that was not returned yet."""
        return self.scheduler.has_unfinished or self._in_flight is not None or self.output_processor.has_outputs

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
        media: MediaPrompt | None = None,
        client: str | None = None,
        pooling: PoolingKind | None = None,
        arrival: float | None = None,
        marks: Sequence[Mark] = (),
    ) -> str:
        """Add a request and return its id.

        `prompt` is text or token ids, or the text that `media` was made from; `media` has token ids of its own. Without
        `params`, those of `default_params` apply. `add_special_tokens` is False for text that already holds them, such
        as a rendered chat template. Requests share prefix cache entries only with requests of the same `cache_salt`.
        Waiting requests of different `client`s are scheduled by fair share. The guide of `params` is compiled here,
        unless `grammar` is what `compile_guide` made of it. With `pooling`, the output's `embedding` is made of the
        prompt's hidden states, and its text means nothing; `params` should be `POOLING_PARAMS`. `arrival` is the moment
        (of `time.monotonic`) from which its latencies count, if that is not now. At `marks`, checkpoints of the prompt
        are kept and pinned. Raises RequestError, and changes nothing, if the request can never be served.
        """
        checked = self.input_processor.process(
            prompt,
            params,
            add_special_tokens=add_special_tokens,
            cache_salt=cache_salt,
            priority=priority,
            grammar=grammar,
            media=media,
            marks=marks,
        )
        request_id = self.output_processor.new_request_id(self._num_added) if request_id is None else request_id
        state = RequestState(
            request_id,
            checked.text,
            checked.token_ids,
            checked.params,
            self.tokenizer,
            self._eos_token_ids,
            max_model_len=self.plan.settings.max_model_len,
            priority=priority,
            cache_salt=cache_salt,
            default_seed=seed_of_request(self.plan.settings.seed, self._num_added),
            grammar=checked.grammar,
            media=media,
            client=client,
            pooling=pooling,
            arrival=arrival,
            marks=marks,
        )
        self.add_state(state)
        self._num_added += 1
        self.counts.requests += 1
        self.counts.prompt_tokens += len(checked.token_ids)
        self.meter.prompt_tokens.observe(len(checked.token_ids))
        return request_id

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Keep requests inside the context out of the counts of requests, tokens and latencies; steps count."""
        parts: tuple[Any, ...] = (self.counts, self.meter, self.request_lengths, self.scheduler.prefix_counters)
        before, finished = deepcopy(parts), dict(self.scheduler.counters.finished)
        yield
        for part, old in zip(parts, before, strict=True):
            for field in fields(part):
                setattr(part, field.name, getattr(old, field.name))
        self.scheduler.counters.finished = finished

    def add_state(self, state: RequestState) -> None:
        """Add a request. RequestError if it can never be served, or an id is in use; nothing is changed then."""
        self.output_processor.check_id(state)
        if any(self.scheduler.is_memory_in_use(request.request_id) for request in state.requests):
            self.finish_in_flight()
        self.output_processor.add(state)
        if self.step_log is not None:
            self.step_log.note_request(state)
        if self.online_checks is not None:
            self.online_checks.note_request(state)

    def export_request(self, request_id: str) -> bytes | None:
        """End a request here and return its export, from which another engine of the same plan continues it.

        The export has its tokens and what was computed for them. None if no such request is unfinished.

        The request's memory is free when this returns. The next call of `step` returns its output, which ends with
        `moved`. The bytes hold the prompt. As long as no other engine has imported them, this one may import them
        again.
        """
        self.finish_in_flight()
        state = self.output_processor.request_states.get(request_id)
        if state is None:
            return None
        if self.step_log is not None:
            self.step_log.note(PieceKind.MOVED, request_id)
        exported = make_export(state, self.scheduler.cache, self.identity)
        self.output_processor.finish_moved(state)
        self.scheduler.migration_counts.exported += 1
        self.scheduler.migration_counts.exported_bytes += len(exported)
        return exported

    def import_request(self, exported: bytes, *, request_id: str | None = None, grammar: Grammar | None = None) -> str:
        """Import a request that another engine of the same plan has exported, and continue where it stopped.

        Returns its id, which is the old one unless `request_id` is given. `output` has what was generated so far.

        Without room for it now, it waits, ahead of the requests that have not begun. Its guide is compiled here, unless
        `grammar` is what `compile_guide` made of it. Raises DamagedExport or ForeignExport, which says what differs;
        RequestError if it can never be served here, or its id is in use. Nothing is changed then.
        """
        moves = self.scheduler.migration_counts
        try:
            state = self.restore_state(exported, self.identity, request_id, grammar)
            self.add_state(state)
        except RequestError:
            moves.refused += 1
            raise
        moves.imported += 1
        moves.imported_bytes += len(exported)
        return state.output.request_id

    def restore_state(
        self, exported: bytes, identity: JsonObject, request_id: str | None = None, grammar: Grammar | None = None
    ) -> RequestState:
        """Return the state of a request that an engine of this `identity` has exported. Errors as `import_request`."""
        return restore_request(
            exported,
            request_id,
            identity=identity,
            tokenizer=self.tokenizer,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=self._eos_token_ids,
            scheduler=self.scheduler,
            max_ttl=self.plan.pins.max_ttl,
            compile_guide=self.compile_guide if grammar is None else lambda guide: grammar,
        )

    @cached_property
    def identity(self) -> JsonObject:
        """Properties that another engine must share with this one to continue its requests."""
        return engine_identity(self.plan, self._weights)

    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs that it changed.

        An exception while the batch is computed ends the requests of that batch, whose outputs then hold it. The other
        requests continue, except after a RankError, which is raised too. An interrupt (a KeyboardInterrupt) ends the
        batch's requests too, and is raised again. Logits that are not finite end only their own request.
        """
        begin = time.perf_counter()
        handle = self._in_flight if self._in_flight is not None else self._submit(self.scheduler.schedule())
        if handle is not None:
            self._complete_step(handle, begin, time.perf_counter() - begin, run_ahead=self.executor.overlaps)
        return self.output_processor.take_outputs()

    def finish_in_flight(self) -> None:
        """Finish the step in flight, if there is one. The next call of `step` returns what it changed."""
        if self._in_flight is not None:
            self._complete_step(self._in_flight, time.perf_counter(), 0.0, run_ahead=False)

    def _submit(self, batch: Batch | None) -> StepHandle | None:
        """Submit a batch to the executor. None if there is nothing to compute."""
        if batch is None or not batch.rows:
            return None
        if batch.new_request_ids:
            self.output_processor.note_scheduled(batch.new_request_ids)
        return self.executor.submit(batch)

    def _complete_step(self, handle: StepHandle, begin: float, bookkeeping: float, *, run_ahead: bool) -> None:
        """Submit the next step if the executor overlaps (`run_ahead`), wait for `handle`, and use its result."""
        batch, scheduler, outputs = handle.batch, self.scheduler, self.output_processor
        self._in_flight = None
        ahead: StepHandle | None = None
        result: StepResult | None = None
        waited = scheduling = time.perf_counter()
        try:
            ahead = self._submit(scheduler.schedule_ahead()) if run_ahead else None
            bookkeeping += time.perf_counter() - scheduling
            result = handle.wait()
            waited = time.perf_counter()
            updates = scheduler.update(result)
        except RankError as error:  # the engine is lost
            outputs.process_updates(self._fail(batch, error))
            raise
        except Exception as error:  # the other requests continue
            if not scheduler.is_in_flight(batch):
                raise  # processing the result failed: a bug, not a failed step
            result, ahead, updates = None, None, scheduler.fail(batch, error)
        except BaseException as error:  # an interrupt, which the exception reports
            interrupted = RuntimeError(f"the step was interrupted: {error!r}")
            outputs.process_updates(self._fail(batch, interrupted), notify=False)
            if self.step_log is not None:
                self.step_log.note_gap("a step was interrupted")
            raise
        self._in_flight = ahead
        bookkeeping += time.perf_counter() - waited
        outputs.process_updates(updates)
        self._count(batch, result, updates, time.perf_counter() - begin, bookkeeping)
        if self.step_log is not None:
            is_called = run_ahead or not self.executor.overlaps
            self.step_log.note_step(batch, updates, is_called=is_called, has_failed=result is None)

    def _fail(self, batch: Batch, error: Exception) -> list[RequestUpdate]:
        """End the requests of a batch, and the step ahead of it, unless its result was already used."""
        return self.scheduler.fail(batch, error) if self.scheduler.is_in_flight(batch) else []

    def _count(
        self,
        batch: Batch,
        result: StepResult | None,
        updates: Sequence[RequestUpdate],
        seconds: float,
        bookkeeping: float,
    ) -> None:
        """Count a finished step. A failed one has no `result`, and tells nothing about drafts."""
        generated = sum([len(update.token_ids) for update in updates])
        computed = batch.num_tokens
        self.counts.count_step(len(batch.rows), batch.num_decode_rows, computed, generated, seconds, bookkeeping)
        self.meter.step.observe(seconds)
        self.meter.step_tokens.observe(computed)
        if self.speculation is not None and result is not None:
            self.speculation.count_step(batch, result, seconds)

    def output(self, request_id: str) -> RequestOutput | None:
        """Return the output of an unfinished request, which steps update in place; None if there is no such request."""
        state = self.output_processor.request_states.get(request_id)
        return None if state is None else state.output

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once and return its output so far; None if no such request is unfinished."""
        state = self.output_processor.request_states.get(request_id)
        if state is None:
            return None
        if self.step_log is not None:
            self.step_log.note(PieceKind.ABORT, request_id)
        self.output_processor.abort(state)
        if not self.scheduler.has_unfinished:
            self.finish_in_flight()
        return state.output

    def preempt(self, request_id: str) -> bool:
        """Preempt a running request or sample, as lack of memory would; its tokens stay. False if it is not running."""
        if self.step_log is not None:
            self.step_log.note(PieceKind.PREEMPT, request_id)
        self.finish_in_flight()
        return self.scheduler.preempt(request_id)

    def compile_guide(self, guide: Guide) -> Grammar:
        """Compile a guide for `add_request`. Any thread may call it, so that a large guide delays no step.

        The first one takes longer, up to some seconds for a large vocabulary. Raises RequestError if it cannot be
        compiled, or the checkpoint has no tokenizer that it could be compiled for.
        """
        return self._grammars.compile(guide)

    def reset_prefix_cache(self) -> bool:
        """Drop prefixes and encoded images that no running request uses. False if some prefixes are in use."""
        if self.step_log is not None:
            self.step_log.note(PieceKind.RESET)
        self.finish_in_flight()
        if self.scheduler.encoder_cache is not None:
            self.scheduler.encoder_cache.clear()
        return self.scheduler.cache.store.clear()

    @property
    def has_ranks(self) -> bool:
        """True if other processes share the model."""
        return self._leader is not None

    def check_ranks(self) -> None:
        """Raise RankError if one of the other ranks has ended. A step would raise it too."""
        if self._leader is not None:
            self._leader.check()

    def check_files(self) -> None:
        """Raise ModelError if a file with weights was written to since it was loaded."""
        self._files_in_use.check()

    def close(self, patience: float = math.inf) -> None:
        """Save the prefix cache to files, if the plan says so, and end the engine's threads and processes.

        Saving takes at most `patience` seconds. Nothing is computed afterwards.
        """
        try:
            self.finish_in_flight()
            with suppress(RankError):  # the part of a rank that has ended is lost
                save_to_files(self.scheduler.cache.store, patience)
        finally:
            self.executor.close()
            if self.step_log is not None:
                self.step_log.close()
            if self._leader is not None:
                self._leader.close()

    def default_params(self) -> SamplingParams:
        """Return the parameters of generation_config.json; greedy if it does not ask for sampling."""
        return self._default_params

    def render_chat(self, messages: Sequence[ChatMessage], **chat_template_kwargs: object) -> str:
        """Return the prompt that the checkpoint's chat template makes of a conversation, special tokens included."""
        return self.render_chat_media(messages, **chat_template_kwargs).text

    def render_chat_media(self, messages: Sequence[ChatMessage], **chat_template_kwargs: Any) -> RenderedChat:
        """Return the prompt of a conversation, and the media that `add_request` needs for its images.

        Any thread may call it; loading images takes time. RequestError if one cannot be loaded, or the template refuses
        the conversation.
        """
        check_template_kwargs(chat_template_kwargs, self.chat_template)

        def render(plain: Sequence[ChatMessage]) -> str:
            return self.chat_template.render(plain, **chat_template_kwargs)

        return render_chat(messages, render, self.media, chat_template_kwargs)

    def traffic(self) -> Traffic:
        """Return shapes of steps and lengths of requests since the start. Samples of one request count as requests."""
        steps = self.runner.graphs.counts.traffic
        return replace(steps, requests=self.request_lengths if self.request_lengths.num_requests else None)

    def stats(self) -> JsonObject:
        """Return counts since the start, and the cache's present use, as plain data."""
        stats = engine_stats(self.counts, self.request_lengths, self.scheduler, self.runner, self.speculation)
        of_record = None if self.step_log is None else self.step_log.stats()
        return {**stats, "record": of_record, "verify": self.online_checks and self.online_checks.stats()}
