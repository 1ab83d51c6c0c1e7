"""Reference of `ostinato verify`: the plain path, and drafts that are right at some positions and wrong at others.

The plain path is eager, without prefix cache and drafts, with full prompts, one request at a time. With the drafts,
every number of accepted drafts occurs, however good a drafter is. Runs of requests to their end, with preemptions now
and then, serve both sides of a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ostinato.config import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from ostinato.media.media_prompt import MediaPrompt
from ostinato.ops.arrays import host_values, noise_keys, numpy_dtype
from ostinato.ops.noise import gumbel
from ostinato.ops.reference.sample import restrict
from ostinato.ops.seeds import mix64
from ostinato.ops.sizes import MAX_INT8
from ostinato.ops.step_inputs import Array
from ostinato.plan.memory.cache_modes import INT8
from ostinato.runner.inputs import make_step_inputs
from ostinato.runner.step_logits import logit_positions
from ostinato.sampling.logits_processing import process_logits
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.state import PendingToken, SamplingState
from ostinato.scheduler.batch import Batch, BatchRow, MediaToEncode, MediaUse
from ostinato.verify.compare import TIE_EPS, Divergence, Scores, compare
from ostinato.verify.test_prompts import Prompt

FIRST_PREEMPTION, GAP = 3, 5
"""Steps before all requests are preempted first, and then second; gaps double, so that every request ends."""


class VerifyRequest(NamedTuple):
    """Token ids with their sampling parameters, salt and images."""

    prompt: Sequence[int]
    params: SamplingParams
    cache_salt: str | None = None
    media: MediaPrompt | None = None


def complete(engine: EngineCore, requests: Sequence[tuple[Any, ...]], preempts: bool = False) -> list[list[int]]:
    """Run requests, the fields of a `VerifyRequest` each, as `run_to_end` does, and return their tokens."""
    outputs = run_to_end(engine, [VerifyRequest(*request) for request in requests], preempts)
    return [output.outputs[0].token_ids for output in outputs]


def run_to_end(engine: EngineCore, requests: Sequence[VerifyRequest], preempts: bool = False) -> list[RequestOutput]:
    """Run requests that come at once to their end, and return their outputs.

    Raises the error that ended one of them, and AssertionError if memory is still in use afterwards.
    """
    ids = [
        engine.add_request(request.prompt, request.params, cache_salt=request.cache_salt, media=request.media)
        for request in requests
    ]
    outputs: dict[str, RequestOutput] = {}
    step, next_preemption, gap = 0, FIRST_PREEMPTION, GAP
    while engine.has_unfinished:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.finished:
                outputs[output.request_id] = output
        step += 1
        if preempts and step == next_preemption:
            for request_id in ids:
                engine.preempt(request_id)
            next_preemption, gap = next_preemption + gap, 2 * gap
    engine.scheduler.check_integrity()
    usage = engine.scheduler.cache.usage()
    assert usage.blocks_used == usage.window_blocks_used == usage.slots_used == 0, "finished requests hold memory"
    return [outputs[request_id] for request_id in ids]


@dataclass(frozen=True)
class ReferenceCase:
    """A request, and its tokens by the plain path. `number` is that of its prompt.

    `unstopped` are the tokens without the stop of its prompt, () if it has none.
    """

    number: int
    kind: str
    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: tuple[int, ...] = ()
    unstopped: tuple[int, ...] = ()
    cache_salt: str | None = None
    media: MediaPrompt | None = None

    def request(self, done: int = 0) -> VerifyRequest:
        """Return the request, to continue after the first `done` tokens of the output."""
        prompt, params = [*self.prompt, *self.tokens[:done]], self.params
        params = params.replace(max_tokens=(params.max_tokens or 0) - done, min_tokens=max(0, params.min_tokens - done))
        media = None if self.media is None else replace(self.media, token_ids=prompt)
        return VerifyRequest(prompt, params, self.cache_salt, media)


class PlainPath:
    """An engine of the plain path. Its tokens come from one step each; its scores from the whole text in one step."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the engine; `config` is as `settings.plain_config` returns it."""
        self.engine = EngineCore(config)

    def cases(self, prompts: Sequence[Prompt], kind: str, params: SamplingParams) -> list[ReferenceCase]:
        """Return one case for each prompt, in their order."""
        cases: list[ReferenceCase] = []
        for number, prompt in enumerate(prompts):
            media, salt = prompt.media, f"{kind} {number}" if prompt.salted else None
            text: tuple[int, ...] = ()
            if prompt.after is not None:
                before = cases[prompt.after]
                text, media, salt = before.prompt + (before.unstopped or before.tokens), before.media, before.cache_salt
            whole = tuple(prompt.whole(text, self.engine.plan.settings.block_size))
            case = self._run(ReferenceCase(number, kind, whole, params, cache_salt=salt, media=media))
            if prompt.stop_at is not None and prompt.stop_at + 1 < len(case.tokens):
                case = self._run(replace(case, params=self._stopped(case, prompt.stop_at), unstopped=case.tokens))
            cases.append(case)
        return cases

    def _run(self, case: ReferenceCase) -> ReferenceCase:
        [tokens] = complete(self.engine, [replace(case, tokens=()).request()])
        return replace(case, tokens=tuple(tokens))

    def _stopped(self, case: ReferenceCase, place: int) -> SamplingParams:
        """Return parameters that end the output at a place, by a stop string or, where that is possible, by a token."""
        token, params = case.tokens[place], case.params
        text, is_new = self.engine.tokenizer.decode([token]), token not in case.tokens[:place]
        if text and (params.greedy or not is_new):
            return params.replace(stop=(text,), min_tokens=place + 1)
        # Below `min_tokens` a token that stops is ruled out, which would change the output.
        return params.replace(stop_token_ids=(token,)) if is_new else params

    def scores(self, case: ReferenceCase, place: int) -> Scores:
        """Return the scores of the token after the first `place` tokens of the case's output."""
        [logits] = text_logits(self.engine, case.prompt, case.tokens[:place], 1, case.media)
        return self._scores(case, place, logits)

    def contradictions(self, case: ReferenceCase) -> list[Divergence]:
        """Return where the tokens, computed in one step each, differ from those of the whole text in one step."""
        count = len(case.tokens)
        logits = text_logits(self.engine, case.prompt, case.tokens[:-1], count, case.media)
        scores = [self._scores(case, place, logits[place]) for place in range(count)]
        best = [score.best[0][0] for score in scores]
        return compare(case.tokens, best, scores.__getitem__, lambda done: best[done:])

    def _scores(self, case: ReferenceCase, place: int, logits: Array) -> Scores:
        """Return the scores from `logits` [vocab], processed as for sampling the token at `place`."""
        params = case.params
        # The seed is the request's own, so its first sample has it unchanged.
        state = SamplingState(params, case.prompt, list(case.tokens[:place]), seed=params.seed or 0)
        return token_scores(self.engine, state, logits)


def token_scores(engine: EngineCore, state: SamplingState, logits: Array) -> Scores:
    """Return the scores of the next token of `state` from its `logits` [vocab], with its noise if it is sampled."""
    params, position = state.params, len(state.prompt_token_ids) + len(state.output_token_ids)
    values = host_values(logits)[None].copy()
    process_logits(values, [PendingToken(state, position)])
    largest = float(np.abs(values[np.isfinite(values)]).max())
    if not params.greedy:
        values = restrict(values, np.array([params.draw_settings], np.float64))
        values[0] += gumbel(noise_keys([(state.seed, position)])[0], np.arange(values.shape[1], dtype=np.int32))
        largest /= params.temperature
    order = np.argsort(-values[0], kind="stable")[:2]  # the lowest of equal ones comes first, as in sampling
    first, second = zip(order.tolist(), values[0, order].tolist(), strict=True)
    tolerance = TIE_EPS * _rounding(engine) * largest
    return Scores((first, second), tolerance, lambda token: float(values[0, token]))


def _rounding(engine: EngineCore) -> float:
    """Return eps of the activations' dtype, or of states', keys' and values' if that is coarser."""
    settings = engine.plan.settings
    kept = (settings.ssm_state_dtype,) if engine.spec.has_recurrence else ()
    coarse = 1 / MAX_INT8 if settings.kv_cache_dtype == INT8 else 0.0
    return max(coarse, *(float(ml_dtypes.finfo(numpy_dtype(dtype)).eps) for dtype in (settings.dtype, *kept)))


def text_logits(
    engine: EngineCore, prompt: Sequence[int], output: Sequence[int], count: int, media: MediaPrompt | None = None
) -> Array:
    """Compute the logits of the last `count` tokens of a prompt, with its images, and its output, in one step.

    There is no graph. Returns [count, vocab] float32. The engine has no request, and nothing is cached: all its memory
    is free.
    """
    runner, memory, block_size = engine.runner, engine.plan.memory, engine.plan.settings.block_size
    text = (*prompt, *output)
    num_blocks = -(-len(text) // block_size) if memory.num_blocks else 0
    row = BatchRow(
        request_id="",
        token_ids=text,
        start=0,
        block_table=tuple(range(1, 1 + num_blocks)),
        window_block_table=tuple(range(1, 1 + -(-len(text) // block_size))) if memory.num_window_blocks else (),
        write_slots=(min(1, memory.num_slots),),
        num_logits=count,
        num_scored=count,
        rope=None if media is None else media.rope,
        media=_encoded(engine, media),
        prompt_end=len(prompt) if engine.spec.is_prefix_lm else 0,
    )
    batch = Batch((row,), num_decode_rows=0)
    with runner.arrays.inference_mode():
        inputs = make_step_inputs(batch, block_size, runner.arrays, vision=runner.vision)
        hidden = runner.model(inputs, runner.layer_memory)
        return runner.model.compute_logits(hidden[logit_positions(batch).scored])


def _encoded(engine: EngineCore, media: MediaPrompt | None) -> tuple[MediaUse, ...]:
    """Encode the images of a prompt into the first cells of the encoder cache, which forgets what it held."""
    if media is None:
        return ()
    assert engine.runner.image_encoder is not None, "a model with images in its prompts has an encoder"
    engine.reset_prefix_cache()
    uses, first = [], 1
    for start, end, item in media.spans:
        cells = range(first, first + end - start)
        engine.runner.image_encoder.run([MediaToEncode(item.digest, item, cells)])
        uses.append(MediaUse(start, end, cells))
        first = cells.stop
    return tuple(uses)


WRONG, RIGHT = 1, 2
"""Numbers of positions, out of every five, whose draft is made wrong and made right."""


class ReferenceDrafts:
    """Steering that corrects and misleads drafts with the plain path's tokens.

    The outcome for a draft depends on position and prefix alone, so it is the same whenever the prefix comes. Drafts of
    outputs that are stopped are right, so that they go on behind the stop.
    """

    def __init__(self, vocab_size: int, cases: Sequence[ReferenceCase]) -> None:
        self._vocab_size = vocab_size
        self._tokens = {(case.params.greedy, case.prompt): case.unstopped or case.tokens for case in cases}
        self._stopped = {(case.params.greedy, case.prompt) for case in cases if case.unstopped}

    def token(self, state: SamplingState, position: int, own: int) -> int:
        right = self._right(state, position)
        if right and _key(state) in self._stopped:
            return right[0]
        return self._steered(position, own, right[0] if right else None)

    def drafts(self, row: BatchRow, own: tuple[int, ...]) -> Sequence[int]:
        """Return steered drafts; if the row has room for more than `own`, right ones are sometimes added."""
        right = self._right(row.sampling_state, row.end)
        if right and _key(row.sampling_state) in self._stopped:
            return right[: row.num_drafts]
        # Half of the rows whose drafter finds nothing get no draft.
        count = max(len(own), len(right)) if mix64(row.end) % 2 else len(own)
        steered = []
        for place in range(min(count, row.num_drafts)):
            known = right[place] if place < len(right) else None
            found = own[place] if place < len(own) else right[place]
            steered.append(self._steered(row.end + place, found, known))
        return steered

    def _steered(self, position: int, own: int, right: int | None) -> int:
        """Return the draft for a position in place of `own`; `right` is the right token, if it is known."""
        known = own if right is None else right
        dice = mix64(position) % 5
        changed = (known + 1) % self._vocab_size if dice < WRONG else known
        return changed if dice < WRONG + RIGHT else own

    def _right(self, state: SamplingState, position: int) -> tuple[int, ...]:
        """Return the plain path's tokens from a position on, as far as they are known."""
        return self._tokens.get(_key(state), ())[position - len(state.prompt_token_ids) :]


def _key(state: SamplingState) -> tuple[bool, tuple[int, ...]]:
    return state.params.greedy, tuple(state.prompt_token_ids)
