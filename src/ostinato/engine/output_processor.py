"""Output processor: the unfinished requests of an engine, and the outputs that they build up.

A request of a caller has n samples, each a request in the scheduler, and one output.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from ostinato.engine.outputs import CompletionOutput, RequestOutput, RequestTimes
from ostinato.engine.text.detokenizer import Detokenizer, StopChecker
from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.errors import RequestError
from ostinato.kv_cache.marks import Mark
from ostinato.media.media_prompt import MediaPrompt
from ostinato.observe.counts import EngineHistograms
from ostinato.plan.traffic import RequestLengths
from ostinato.sampling.grammar import Grammar
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.pooler import HiddenStatePooler, PoolingKind
from ostinato.sampling.state import SamplingState
from ostinato.scheduler.request import FinishReason, Request, RequestUpdate, StopConditions
from ostinato.scheduler.scheduler import Scheduler


class RequestState:
    """State of one request in the engine. `requests` are what the scheduler sees, `output` what the caller gets."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        *,
        max_model_len: int,
        priority: int,
        cache_salt: str | None,
        default_seed: int,
        grammar: Grammar | None = None,
        media: MediaPrompt | None = None,
        client: str | None = None,
        pooling: PoolingKind | None = None,
        arrival: float | None = None,
        marks: Sequence[Mark] = (),
    ) -> None:
        """Create the samples of a request and its empty output.

        `default_seed` is for a request whose parameters bring none; `grammar` is that of its guide, `media` holds its
        images. With `pooling`, the output is an embedding, and its tokens mean nothing. `arrival` is now if None.
        """
        self.params, self.media, self.pooling = params, media, pooling
        stop = StopConditions(
            max_tokens=max_model_len if params.max_tokens is None else params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=frozenset(params.stop_token_ids),
            eos_token_ids=eos_token_ids,
            ignore_eos=params.ignore_eos,
        )
        self.seed = seed = default_seed if params.seed is None else params.seed
        """The seed in effect; each sample derives its own from it."""
        self.requests: list[Request] = []
        self._sample_outputs: dict[str, _SampleOutput] = {}
        self._pooler: HiddenStatePooler | None = None
        outputs = []
        arrival = time.monotonic() if arrival is None else arrival
        for index in range(params.n):
            sample_id = request_id if params.n == 1 else f"{request_id}/{index}"
            request = Request(
                sample_id,
                prompt_token_ids,
                stop,
                priority=priority,
                # All samples have the same prompt, so the first alone scores it.
                wants_prompt_logprobs=params.prompt_logprobs is not None and index == 0,
                cache_salt=cache_salt,
                media=() if media is None else media.in_chain(cache_salt),
                rope=None if media is None else media.rope,
                client=client,
                marks=marks,
                arrival=arrival,
                has_output=pooling is None,
                # A mean needs all hidden states, which the prefix cache does not have.
                skips_prefix_cache=pooling == "mean",
            )
            request.sampling_state = state = SamplingState(
                params,
                prompt_token_ids,
                request.output_token_ids,
                () if params.ignore_eos else eos_token_ids,
                sample_index=index,
                seed=seed,
                grammar=grammar,
                pooler=None if pooling is None else HiddenStatePooler(pooling),
            )
            request.num_lookback_outputs = state.num_lookback_outputs
            output = CompletionOutput(index)
            if params.logprobs is not None:
                output.logprobs, output.cumulative_logprob = [], 0.0
            self.requests.append(request)
            self._pooler = state.pooler
            self._sample_outputs[sample_id] = _SampleOutput(output, params, tokenizer, prompt_token_ids)
            outputs.append(output)
        times = RequestTimes(arrival)
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, outputs, times)
        if params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]

    def apply(self, update: RequestUpdate, now: float, meter: EngineHistograms) -> bool:
        """Add one sample's result of a step at time `now`.

        Returns True if a stop string ends the sample, which the scheduler cannot see.
        """
        # All samples have the same prompt, and the first one has the report of its cache hit.
        self.output.cache = self.requests[0].cache_report
        if update.prompt_logprobs and self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs.extend(update.prompt_logprobs)
        sample_output = self._sample_outputs[update.request_id]
        if update.token_ids:
            self._record_token_times(sample_output, len(update.token_ids), now, meter)
        if update.error is not None:
            self.output.error = update.error
        elif update.finish_reason is not None and self._pooler is not None:
            self.output.embedding = self._pooler.vector()
        return sample_output.take(update)

    def _record_token_times(
        self, sample_output: _SampleOutput, count: int, now: float, meter: EngineHistograms
    ) -> None:
        """Note the time of `count` new tokens of a sample."""
        times = self.output.times
        times.last_token = now
        if times.first_token is None:
            times.first_token = now
            meter.first_token.observe(now - times.arrival)
        if sample_output.last_token is not None:
            meter.inter_token.observe((now - sample_output.last_token) / count, count)
        sample_output.last_token = now

    def record_latencies(self, now: float, meter: EngineHistograms) -> None:
        """Observe how long a request that has ended took, and its length."""
        times = self.output.times
        meter.whole.observe(now - times.arrival)
        meter.output_tokens.observe(sum(len(output.token_ids) for output in self.output.outputs))
        if times.first_token is not None and times.last_token is not None and times.scheduled is not None:
            meter.prefill.observe(times.first_token - times.scheduled)
            meter.decode.observe(times.last_token - times.first_token)

    def record_lengths(self, lengths: RequestLengths) -> None:
        """Count the samples of an ended request, each as a request; all after the first find the prompt cached."""
        prompt, cached = len(self.output.prompt_token_ids), self.output.num_cached_tokens or 0
        for output in self.output.outputs:
            lengths.count(prompt, len(output.token_ids), cached)
            cached = prompt

    def restore_sample(self, done: CompletionOutput) -> None:
        """Restore one sample's output from another engine, before the first update.

        ValueError if its text is not that of its tokens, or its tokens should have ended it.
        """
        sample_output = self._sample_outputs[self.requests[done.index].request_id]
        if done.finished:
            sample_output.output = self.output.outputs[done.index] = done
            return
        logprobs = None if done.logprobs is None else tuple(done.logprobs)
        due = None if sample_output.output.logprobs is None else len(done.token_ids)
        if (None if logprobs is None else len(logprobs)) != due:
            raise ValueError("it has log-probabilities of other tokens than its own")
        # The tokens are added one by one, as they came, so that the same text is held back.
        is_stopped = sample_output.take(RequestUpdate("", tuple(done.token_ids), logprobs))
        if is_stopped or sample_output.output.text != done.text:
            raise ValueError("its text is not that of its tokens")
        sample_output.output.cumulative_logprob = done.cumulative_logprob

    def mark_moved(self) -> None:
        """Mark every unfinished output as moved to another engine, which also returns the text that is held back."""
        for sample_output in self._sample_outputs.values():
            if not sample_output.output.finished:
                sample_output.output.finish_reason = FinishReason.MOVED.value

    def mark_aborted(self) -> None:
        """Mark every unfinished output as aborted; its tokens and text stay."""
        for sample_output in self._sample_outputs.values():
            sample_output.finish(FinishReason.ABORT)


class _SampleOutput:
    """One sample's output: detokenized up to a stop string."""

    def __init__(
        self, output: CompletionOutput, params: SamplingParams, tokenizer: Tokenizer, prompt: Sequence[int]
    ) -> None:
        self.output = output
        self.last_token: float | None = None
        self.min_tokens = params.min_tokens
        self.detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, context=prompt)
        self.stop = StopChecker(params.stop, params.include_stop_str_in_output)

    def take(self, update: RequestUpdate) -> bool:
        """Add the update's tokens up to one that completes a stop string.

        Returns True if one does and the scheduler has not ended the sample yet.
        """
        output = self.output
        stop_string = None
        for token_id in update.token_ids:
            output.token_ids.append(token_id)
            armed = len(output.token_ids) >= self.min_tokens
            text, stop_string = self.stop.append(self.detokenizer.append((token_id,)), enabled=armed)
            output.text += text
            if stop_string is not None:
                break
        if update.logprobs is not None and output.logprobs is not None:
            new = update.logprobs[: len(output.token_ids) - len(output.logprobs)]
            output.logprobs.extend(new)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(logprob.logprob for logprob in new)
        if stop_string is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP.value, stop_string
            return update.finish_reason is None
        if update.finish_reason is not None:
            output.stop_reason = update.stop_reason
            self.finish(update.finish_reason)
        return False

    def finish(self, reason: FinishReason) -> None:
        """End the output unless it has ended, and add the text that was held back."""
        if self.output.finished:
            return
        self.output.finish_reason = reason.value
        armed = len(self.output.token_ids) >= self.min_tokens
        text, stop_string = self.stop.append(self.detokenizer.flush(), enabled=armed)
        self.output.text += text + self.stop.flush()
        if stop_string is not None:
            self.output.finish_reason, self.output.stop_reason = FinishReason.STOP.value, stop_string


class OutputProcessor:
    """Unfinished requests as their callers made them, with the outputs that changed and were not returned yet."""

    def __init__(self, scheduler: Scheduler, meter: EngineHistograms, lengths: RequestLengths) -> None:
        """Create an empty table. `meter` and `lengths` record how long each finished request took and was."""
        self.request_states: dict[str, RequestState] = {}
        """Request states by request id."""
        self.state_by_sample: dict[str, RequestState] = {}
        """Request states by the id of each of their samples."""
        self._scheduler = scheduler
        self._meter, self._lengths = meter, lengths
        self._changed: dict[str, RequestOutput] = {}
        """Outputs that no call of `take_outputs` has returned yet."""

    @property
    def has_outputs(self) -> bool:
        """True if an output has changed and was not returned yet."""
        return bool(self._changed)

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs that have changed since the last call."""
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def new_request_id(self, number: int) -> str:
        """Return a free id for a request that came without one, with this number or the next free one.

        A caller may already use an id of this form.
        """
        numbered = (f"request-{index}" for index in itertools.count(number))
        return next(name for name in numbered if name not in self.request_states)

    def check_id(self, state: RequestState) -> None:
        """Raise RequestError if the id of a request, or that of one of its samples, is in use."""
        # The scheduler forgets a sample that has ended; its id stays in use until its request has ended.
        request_id = state.output.request_id
        if request_id in self.request_states or any(r.request_id in self.state_by_sample for r in state.requests):
            raise RequestError(f"a request with the id {request_id!r} is unfinished; choose another id")

    def add(self, state: RequestState) -> None:
        """Add the unfinished samples of a request, whose id is free, to the scheduler.

        RequestError if one can never be served; nothing is changed then.
        """
        added = []
        try:
            for request, output in zip(state.requests, state.output.outputs, strict=True):
                if not output.finished:
                    self._scheduler.add(request)
                    added.append(request.request_id)
        except RequestError:
            for sample_id in added:
                self._scheduler.abort(sample_id)
            raise
        self.request_states[state.output.request_id] = state
        self.state_by_sample |= {request.request_id: state for request in state.requests}

    def note_scheduled(self, request_ids: Sequence[str]) -> None:
        """Note the time at which a step computes the first part of these samples."""
        now = time.monotonic()
        for request_id in request_ids:
            times = self.state_by_sample[request_id].output.times
            if times.scheduled is None:
                times.scheduled = now
                self._meter.queue.observe(now - times.arrival)

    def process_updates(self, updates: Sequence[RequestUpdate], *, notify: bool = True) -> None:
        """Add a step's results to the outputs, and note which changed unless `notify` is False."""
        ended: dict[str, RequestState] = {}
        now = time.monotonic()
        for update in updates:
            state = self.state_by_sample[update.request_id]
            is_stopped = state.apply(update, now, self._meter)
            if is_stopped:
                self._scheduler.finish(update.request_id, FinishReason.STOP)
            output = state.output
            if notify:
                self._changed[output.request_id] = output
            if is_stopped or update.finish_reason is not None:
                ended[output.request_id] = state
        for state in ended.values():
            if state.output.finished:  # all its samples have ended
                state.record_latencies(now, self._meter)
                state.record_lengths(self._lengths)
                self._remove(state)

    def finish_moved(self, state: RequestState) -> None:
        """End a request that another engine continues."""
        for request in state.requests:
            self._scheduler.finish(request.request_id, FinishReason.MOVED)
        state.mark_moved()
        self._remove(state)
        self._changed[state.output.request_id] = state.output

    def abort(self, state: RequestState) -> None:
        """End an abandoned request without returning its output."""
        for request in state.requests:
            self._scheduler.abort(request.request_id)
        state.mark_aborted()
        self._remove(state)
        self._changed.pop(state.output.request_id, None)

    def _remove(self, state: RequestState) -> None:
        del self.request_states[state.output.request_id]
        for request in state.requests:
            del self.state_by_sample[request.request_id]
