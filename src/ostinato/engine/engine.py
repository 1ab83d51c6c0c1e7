"""The engine: one model, its plan, and the loop that turns requests into outputs."""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.cache.files.exchange import keep_in_files
from ostinato.config import EngineConfig
from ostinato.engine.cache_files import open_files
from ostinato.engine.generation import Generation
from ostinato.engine.move.arrive import arrive
from ostinato.engine.move.identity import engine_identity
from ostinato.engine.move.leave import export_request
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.run.cache_bytes import bytes_of
from ostinato.engine.run.order import InTurn, OneAhead, Order, Started
from ostinato.engine.run.runner import Runner, StartProgress
from ostinato.engine.scheduling import make_scheduler
from ostinato.engine.speculation import Speculation
from ostinato.engine.stats import engine_stats
from ostinato.engine.text.chat_template import Message
from ostinato.engine.text.texts import load_texts
from ostinato.engine.text.tokenizer import Tokenizer, load_tokenizer
from ostinato.errors import ConfigError, ForkError, ModelError, RankError, Remedy, RequestError
from ostinato.media.input import RenderedChat, load_media_input, render_chat
from ostinato.media.prompt import MediaPrompt
from ostinato.models.checkpoint import checkpoint_of, load_spec, resolve_model_dir
from ostinato.models.pooling import PoolingKind
from ostinato.observe.counts import EngineCounts, Meter
from ostinato.observe.phases import Phases
from ostinato.ops.seeds import seed_of_request
from ostinato.plan.device.detect import detect
from ostinato.plan.graphs.traffic import Traffic
from ostinato.plan.identity import cache_identity
from ostinato.plan.layouts.requests import RequestLengths
from ostinato.plan.plan import Plan, make_plan
from ostinato.sample.grammar import Grammar, GrammarCompiler
from ostinato.sample.guide import Guide
from ostinato.sample.params import SamplingParams, check_token_ids
from ostinato.schedule.batch import StepResult
from ostinato.schedule.request import FinishReason, RequestUpdate

if TYPE_CHECKING:
    from ostinato.engine.ranks.leader import Leader
    from ostinato.plan.model import ModelSpec

_pid: int | None = None
"""The process whose engines have threads."""


class Engine:
    """Serves requests on one model. One thread calls it: `add` at any time, `step` while `has_unfinished`.

    With `overlap`, a step may be on its way between two calls: the one ahead.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: StartProgress = lambda what, done, total: None,
        phases: Phases | None = None,
    ) -> None:
        """Plans, loads the weights, and captures the graphs of the plan, unless that is left to their first use.
        `phases` notes how long each part takes, as `plan.measured` does.

        Raises ModelError, ConfigError or CapacityError, the latter two before any weight is read but where the graphs
        take more memory than was planned; CaptureError if a step of the model cannot be captured. ForkError in
        a fork of a process that has made an engine.
        """
        _check_process()
        phases = phases or Phases()
        self.spec = load_spec(config)
        plan = make_plan(config, self.spec, detect(config.device))
        phases.end("plan")
        self.directory = checkpoint_of(config)
        self.tokenizer, self.chat_template = load_texts(config, self.directory)
        self._default_params = _default_params(self.tokenizer, self.directory)
        draft_directory = _draft_directory(plan, self.tokenizer)
        phases.end("tokenizer")
        own, of_draft = (None, None) if config.random_weights else (self.directory, draft_directory)
        self._leader = _start_ranks(plan, self.spec, own)
        try:
            group = None if self._leader is None else self._leader.group
            self.runner = Runner(plan, self.spec, own, progress, of_draft, phases, group)
            if self._leader is not None:
                self._leader.wait_ready()
                self.runner.together = self._leader.together
            if plan.settings.capture == "startup":
                self.runner.capture(progress)
        except BaseException:
            if self._leader is not None:
                self._leader.close()
            raise
        phases.end("capture")
        self.plan: Plan = replace(plan, measured=self.runner.measured | {"start_seconds": dict(phases.seconds)})
        self.speculation: Speculation | None = None
        if plan.speculative is not None:
            self.speculation = Speculation(plan.speculative, lambda: self.runner.num_captured)
        self.scheduler = make_scheduler(plan, None if self.speculation is None else self.speculation.controller.choose)
        self._weights = [path for path in (self.directory, draft_directory) if path is not None]
        if not self.has_ranks:
            self.scheduler.cache.memory = bytes_of(self.runner.memory, plan.settings.block_size)
        if plan.cache_files is not None:
            identity, memory = cache_identity(plan), self.scheduler.cache.memory
            assert memory is not None, "files are refused where several ranks have a part of each block"
            files = open_files(plan.cache_files, identity, config.model, self._weights, memory)
            self.scheduler.cache.store.files = files
        # A tokenizer may know end tokens that the model cannot give.
        self._eos_token_ids = frozenset(i for i in self.tokenizer.eos_token_ids if i < self.spec.vocab_size)
        remote = config.allow_remote_images
        self.media = load_media_input(self.directory, self.spec.vision, self.tokenizer, plan, remote)
        self._grammars = GrammarCompiler(self.tokenizer, self.spec.vocab_size, self._eos_token_ids)
        self.counts = EngineCounts()
        self.meter = Meter()
        self.request_lengths = RequestLengths()
        self._order: Order = (OneAhead if plan.settings.overlap == "on" else InTurn)(self.runner)
        self._running: Started | None = None
        self._kept: dict[str, RequestOutput] = {}
        """Changed by steps of which no call of `step` has told yet."""
        self._generations: dict[str, Generation] = {}
        self._of_sample: dict[str, Generation] = {}
        self._num_added = 0
        self._identity: dict[str, Any] | None = None
        phases.end("scheduler")

    @property
    def has_unfinished(self) -> bool:
        """Whether there is a request, or a step on its way, to be seen to, or an output to be told of."""
        return self.scheduler.has_unfinished or self._running is not None or bool(self._kept)

    def add(
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
    ) -> str:
        """Takes in a request and returns its id.

        `prompt` is text or token ids, or the text that `media`, which has token ids of its own, was made of. Without
        `params`, those of `default_params` apply. `add_special_tokens` is for text that already holds them, such as a
        rendered chat template. Requests find in the prefix cache what requests of the same `cache_salt` have left
        there, and nothing else. Waiting requests of different `client`s take turns. The guide of `params` is compiled
        here, unless `grammar` is what `compile_guide` made of it. With `pooling`, the output's `embedding` is made of
        the prompt's hidden states, and its text means nothing; `params` should be `POOLED`. Raises RequestError, and
        changes nothing, if the request can never be served.
        """
        _check_salt(cache_salt)
        if not isinstance(priority, int):
            raise RequestError(f"priority {priority!r} should be a whole number; lower ones come first")
        if priority != 0 and self.plan.settings.scheduling_policy == "fcfs":
            message = f"priority {priority} has no effect under scheduling_policy fcfs; choose the policy priority"
            raise RequestError(message, [Remedy("scheduling_policy", "priority")])
        params = params or self.default_params()
        text = prompt if isinstance(prompt, str) else None
        if media is not None:
            token_ids = media.token_ids
        elif isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt, add_special_tokens)
        else:
            token_ids = _as_ids(prompt)
        self._check_vocabulary(token_ids)
        if media is not None and media.spans and self.plan.encoder is None:
            raise RequestError("the prompt has images, and this model takes text only; choose a model with vision")
        check_token_ids(params, self.spec.vocab_size, self._eos_token_ids)
        if grammar is None and params.guide is not None:
            grammar = self.compile_guide(params.guide)
        if (None if grammar is None else grammar.guide) != params.guide:
            raise RequestError("the grammar that came with the request is not that of its guide")
        request_id = self._free_id() if request_id is None else request_id
        generation = Generation(
            request_id,
            text,
            token_ids,
            params,
            self.tokenizer,
            self._eos_token_ids,
            max_model_len=self.plan.settings.max_model_len,
            priority=priority,
            cache_salt=cache_salt,
            default_seed=seed_of_request(self.plan.settings.seed, self._num_added),
            grammar=grammar,
            media=media,
            client=client,
            pooling=pooling,
        )
        self._enter(generation)
        self._num_added += 1
        self.counts.requests += 1
        self.counts.prompt_tokens += len(token_ids)
        self.meter.prompt_tokens.observe(len(token_ids))
        return request_id

    def _enter(self, generation: Generation) -> None:
        """Hands the unfinished samples of a request to the scheduler. RequestError if one can never be served, or an id
        is in use; nothing is changed then."""
        request_id = generation.output.request_id
        # The scheduler forgets a sample that has ended; its id stays in use until its request has ended.
        if request_id in self._generations or any(r.request_id in self._of_sample for r in generation.requests):
            raise RequestError(f"a request with the id {request_id!r} is unfinished; choose another id")
        if any(self.scheduler.is_ending(request.request_id) for request in generation.requests):
            self._settle()
        added = []
        try:
            for request, output in zip(generation.requests, generation.output.outputs, strict=True):
                if not output.finished:
                    self.scheduler.add(request)
                    added.append(request.request_id)
        except RequestError:
            for sample_id in added:
                self.scheduler.abort(sample_id)
            raise
        self._generations[request_id] = generation
        self._of_sample |= {request.request_id: generation for request in generation.requests}

    def export_request(self, request_id: str) -> bytes | None:
        """Ends a request here, and returns what another engine of the same plan needs to go on with it: its tokens,
        and what was computed of them. None if no such request is unfinished.

        Its memory is free when this returns; the next call of `step` tells of its output, whose end is `moved`. The
        bytes hold the prompt. As long as no other engine has taken them in, this one may take them back.
        """
        self._settle()
        generation = self._generations.get(request_id)
        if generation is None:
            return None
        exported = export_request(generation, self.scheduler.cache, self.identity)
        for request in generation.requests:
            self.scheduler.finish(request.request_id, FinishReason.MOVED)
        generation.move()
        self._forget(generation)
        self._kept[request_id] = generation.output
        self.scheduler.moves.exported += 1
        self.scheduler.moves.exported_bytes += len(exported)
        return exported

    def import_request(self, exported: bytes, *, request_id: str | None = None, grammar: Grammar | None = None) -> str:
        """Goes on with a request that another engine of the same plan has exported, where that left off; returns its
        id, which is the one that it had unless `request_id` is given. `output` has what it has so far.

        Where there is no room for it now, it waits, before those who have not begun. Its guide is compiled here, unless
        `grammar` is what `compile_guide` made of it. Raises DamagedExport or ForeignExport, which says what differs;
        RequestError if it can never be served here, or its id is in use. Nothing is changed then.
        """
        moves = self.scheduler.moves
        try:
            generation = arrive(
                exported,
                request_id,
                identity=self.identity,
                tokenizer=self.tokenizer,
                vocab_size=self.spec.vocab_size,
                eos_token_ids=self._eos_token_ids,
                scheduler=self.scheduler,
                compile_guide=self.compile_guide if grammar is None else lambda guide: grammar,
            )
            self._enter(generation)
        except RequestError:
            moves.refused += 1
            raise
        moves.imported += 1
        moves.imported_bytes += len(exported)
        return generation.output.request_id

    @property
    def identity(self) -> dict[str, Any]:
        """What another engine must have in common with this one to go on with its requests."""
        if self._identity is None:
            self._identity = engine_identity(self.plan, self._weights)
        return self._identity

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the outputs that it changed.

        An exception while the batch is computed ends the requests of that batch, whose outputs then carry it; the
        others go on, but after a RankError, which is raised too. What interrupts it (a KeyboardInterrupt) ends them
        too, and is raised again. Logits that are not finite end only the request that they are for.
        """
        begin = time.perf_counter()
        if self._running is None:
            self._running = self._start()
        scheduled = time.perf_counter()
        if self._running is not None:
            self._finish(self._running, begin, scheduled - begin, goes_on=self._order.is_ahead)
        changed, self._kept = self._kept, {}
        return list(changed.values())

    def _start(self) -> Started | None:
        batch = self.scheduler.schedule()
        if not batch.rows:
            return None
        if batch.first:
            self._note_first(batch.first)
        return self._order.start(batch)

    def _start_ahead(self) -> Started | None:
        batch = self.scheduler.schedule_ahead()
        return None if batch is None else self._order.start(batch)

    def _finish(self, running: Started, begin: float, bookkeeping: float, *, goes_on: bool) -> None:
        """Starts the step ahead, if it `goes_on`, waits for the one that is running, and takes in its result."""
        batch = running.batch
        self._running = None
        following: Started | None = None
        result: StepResult | None = None
        finished = scheduling = time.perf_counter()
        try:
            following = self._start_ahead() if goes_on else None
            bookkeeping += time.perf_counter() - scheduling
            result = running.result()
            finished = time.perf_counter()
            updates = self.scheduler.update(result)
        except RankError as error:
            self._deliver(self.scheduler.fail(batch, error))
            raise
        except Exception as error:
            if not self.scheduler.is_in_flight(batch):
                raise  # taking the result in went wrong: a bug, and no step to fail
            result, following, updates = None, None, self.scheduler.fail(batch, error)
        except BaseException as error:
            if self.scheduler.is_in_flight(batch):
                untold = dict(self._kept)
                self._deliver(self.scheduler.fail(batch, RuntimeError(f"the step was interrupted: {error!r}")))
                self._kept = untold  # the exception tells of the others
            raise
        self._running = following
        bookkeeping += time.perf_counter() - finished
        self._deliver(updates)
        generated = sum([len(update.token_ids) for update in updates])
        seconds = time.perf_counter() - begin
        computed = batch.num_tokens
        self.counts.count_step(len(batch.rows), batch.num_decode_rows, computed, generated, seconds, bookkeeping)
        self.meter.step.observe(seconds)
        self.meter.step_tokens.observe(computed)
        if self.speculation is not None and result is not None:
            self.speculation.count_step(batch, result, seconds)

    def _settle(self) -> None:
        """Waits for the step that is on its way, if there is one: then none is in flight. The next call of `step` tells
        what it changed."""
        if self._running is not None:
            self._finish(self._running, time.perf_counter(), 0.0, goes_on=False)

    def output(self, request_id: str) -> RequestOutput | None:
        """The output of an unfinished request, which steps update in place; None if there is no such request."""
        generation = self._generations.get(request_id)
        return None if generation is None else generation.output

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once and returns what it has so far; None if no such request is unfinished."""
        generation = self._generations.get(request_id)
        if generation is None:
            return None
        for request in generation.requests:
            self.scheduler.abort(request.request_id)
        generation.abort()
        self._forget(generation)
        if not self.scheduler.has_unfinished:
            self._settle()
        self._kept.pop(request_id, None)
        return generation.output

    def preempt(self, request_id: str) -> bool:
        """Takes the memory of a running request or sample, as lack of memory would, so that it is computed again; False
        if it is not running. No token changes by it."""
        self._settle()
        return self.scheduler.preempt(request_id)

    def compile_guide(self, guide: Guide) -> Grammar:
        """What `add` makes of a guide; any thread may call it, so that a large one holds up no step.

        The first one takes longer, up to some seconds for a large vocabulary. Raises RequestError if it cannot be
        compiled, or the checkpoint has no tokenizer that it could be compiled for.
        """
        return self._grammars.compile(guide)

    def reset_prefix_cache(self) -> bool:
        """Forgets every prefix and every encoded image that no running request holds. False if some prefixes are held,
        and so can still be found."""
        self._settle()
        if self.scheduler.encoder_cache is not None:
            self.scheduler.encoder_cache.forget()
        return self.scheduler.cache.store.forget()

    @property
    def has_ranks(self) -> bool:
        """Whether other processes share the model."""
        return self._leader is not None

    def check_ranks(self) -> None:
        """RankError if one of the other ranks has ended, which a step would tell too."""
        if self._leader is not None:
            self._leader.check()

    def close(self) -> None:
        """Keeps in files what the prefix cache has, if the plan says so, and ends the threads and processes that it has
        started. Nothing is computed afterwards."""
        self._settle()
        keep_in_files(self.scheduler.cache.store)
        self._order.close()
        if self._leader is not None:
            self._leader.close()

    def default_params(self) -> SamplingParams:
        """What generation_config.json asks for; greedy where it does not ask for sampling."""
        return self._default_params

    def render_chat(self, messages: Sequence[Message], **chat_template_kwargs: Any) -> str:
        """The prompt that the checkpoint's chat template makes of a conversation, special tokens included."""
        return self.render_chat_media(messages, **chat_template_kwargs).text

    def render_chat_media(self, messages: Sequence[Message], **chat_template_kwargs: Any) -> RenderedChat:
        """The prompt of a conversation, and what `add` needs of its images. Any thread may call it; loading images
        takes its time. RequestError if one cannot be taken, or the template refuses the conversation."""

        def render(plain: Sequence[Message]) -> str:
            return self.chat_template.render(plain, **chat_template_kwargs)

        return render_chat(messages, render, self.media, chat_template_kwargs)

    def traffic(self) -> Traffic:
        """Shapes of steps and lengths of requests since the start. Samples of one request count as requests."""
        steps = self.runner.graphs.counts.traffic
        return replace(steps, requests=self.request_lengths if self.request_lengths.num_requests else None)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and the cache's present use, as plain data."""
        return engine_stats(self.counts, self.request_lengths, self.scheduler, self.runner, self.speculation)

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        """Adds what a step gave to the outputs, and notes those that it changed."""
        changed = self._kept
        ended: dict[str, Generation] = {}
        now = time.monotonic()
        for update in updates:
            generation = self._of_sample[update.request_id]
            is_stopped = generation.take(update, now, self.meter)
            if is_stopped:
                self.scheduler.finish(update.request_id, FinishReason.STOP)
            output = generation.output
            changed[output.request_id] = output
            if is_stopped or update.finish_reason is not None:
                ended[output.request_id] = generation
        for generation in ended.values():
            if generation.output.finished:  # all of its samples
                generation.measure(now, self.meter)
                generation.count_lengths(self.request_lengths)
                self._forget(generation)

    def _note_first(self, request_ids: Sequence[str]) -> None:
        """A step is about to compute the first part of these requests' samples."""
        now = time.monotonic()
        for request_id in request_ids:
            times = self._of_sample[request_id].output.times
            if times.scheduled is None:
                times.scheduled = now
                self.meter.queue.observe(now - times.arrival)

    def _free_id(self) -> str:
        """An id for a request that came without one; a caller may have used the next by name."""
        numbered = (f"request-{number}" for number in itertools.count(self._num_added))
        return next(name for name in numbered if name not in self._generations)

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        outside = [token for token in token_ids if not 0 <= token < self.spec.vocab_size]
        if outside:
            raise RequestError(
                f"the prompt holds token ids outside the model's vocabulary, such as {outside[0]}; "
                f"they must be from 0 to {self.spec.vocab_size - 1}"
            )

    def _forget(self, generation: Generation) -> None:
        del self._generations[generation.output.request_id]
        for request in generation.requests:
            del self._of_sample[request.request_id]


def _check_process() -> None:
    """ForkError if the threads that torch and the kernels have started are another process's."""
    global _pid
    if _pid is not None and _pid != os.getpid():
        raise ForkError(f"process {_pid} has made an engine, and process {os.getpid()} is a fork of it")
    _pid = os.getpid()


def _start_ranks(plan: Plan, spec: ModelSpec, directory: Path | None) -> Leader | None:
    """The other ranks, where several share the model."""
    if spec.ranks == 1:
        return None
    from ostinato.engine.ranks.leader import Leader  # which takes torch's distributed part, a part of a second

    return Leader(plan, spec, directory)


def _draft_directory(plan: Plan, tokenizer: Tokenizer) -> Path | None:
    """That of the draft model, if there is one. ConfigError if its tokens stand for other texts."""
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


def _default_params(tokenizer: Tokenizer, directory: Path) -> SamplingParams:
    try:
        return SamplingParams(**tokenizer.sampling_defaults)
    except RequestError as error:
        path = directory / "generation_config.json"
        raise ModelError(f"{path} asks for sampling that cannot be done: {error.message}") from None


def _check_salt(cache_salt: str | None) -> None:
    message = f"cache_salt {cache_salt!r} should be text that is not empty, or left out"
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise RequestError(message)
    try:
        (cache_salt or "").encode()  # as the prefix index hashes it
    except UnicodeEncodeError as error:
        raise RequestError(f"{message}: it cannot be encoded in UTF-8 ({error.reason})") from None


def _as_ids(prompt: Sequence[int]) -> list[int]:
    if isinstance(prompt, bytes):  # its items are integers, but no token ids
        raise RequestError("a prompt is text or a list of token ids, not bytes; decode it first")
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise RequestError(f"a prompt is text or a list of token ids, which are integers: {error}") from None
