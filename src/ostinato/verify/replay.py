"""Replay of a record: the same requests, step for step, on this machine, and what comes out otherwise.

Batches are compared as long as nothing but the requests decides on them: from an engine's start on, with the same
schedule. After that, or with other settings, the tokens of each output are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from ostinato.config import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.engine.flight.flight_recorder import StepLog, schedule_facts
from ostinato.engine.flight.record_files import HASH_CHECK, PieceKind, RecordHead, RequestHead, RowRecord, StepRecord
from ostinato.engine.migration.wire_format import ByteParts, RequestSnapshot, differences, unpack_snapshot
from ostinato.engine.output_processor import RequestState
from ostinato.errors import RecordError
from ostinato.json_io import JsonObject
from ostinato.sampling.state import SamplingState
from ostinato.scheduler.batch import Batch
from ostinato.scheduler.request import FinishReason, RequestUpdate
from ostinato.scheduler.request_queues import Client
from ostinato.verify.compare import Verdict
from ostinato.verify.record_reader import OutputTrace, Record, RecordEvent, Traces
from ostinato.verify.reference_run import text_logits, token_scores

OWN_FILES = ("cache_offload", "cache_dir", "record", "record_limit", "record_images", "download_dir")
"""Settings for files of the recorded engine. A replay uses only those that the user gives."""
ENDED_OUTSIDE = (FinishReason.ABORT.value, FinishReason.MOVED.value)


class TimedStep(NamedTuple):
    """A step of the replay, in seconds since its start, with (request and output, computed tokens, given tokens)."""

    begin: float
    seconds: float
    rows: list[tuple[str, int, int]]


class ReplayLog(StepLog):
    """Log of the replaying engine, kept to be compared, and handed on to its recorder if it has one."""

    def __init__(self, engine: EngineCore) -> None:
        super().__init__(engine)
        self.traces = Traces()
        self.steps: deque[StepRecord] = deque()
        """Steps that were not compared yet."""
        self.timeline: list[TimedStep] = []
        self._recorder = engine.step_log
        self._num_steps = 0
        self._start = self._step_begin = time.perf_counter()

    def begin_segment(self) -> None:
        """Number the unfinished outputs anew, as the recorder does."""
        self._begin()
        self.traces.begin_segment()
        for state in self._engine.output_processor.request_states.values():
            super().note_request(state, is_resumed=True)

    def note_begin(self) -> None:
        """Note that a step begins."""
        self._step_begin = time.perf_counter()

    def note(self, kind: PieceKind, request_id: str = "") -> None:
        if self._recorder is not None:
            self._recorder.note(kind, request_id)
        super().note(kind, request_id)

    def note_request(self, state: RequestState, *, has_media: bool = True, is_resumed: bool = False) -> None:
        if self._recorder is not None:
            self._recorder.note_request(state, has_media=has_media, is_resumed=is_resumed)
        super().note_request(state, has_media=False, is_resumed=is_resumed)

    def note_step(self, batch: Batch, updates: Sequence[RequestUpdate], *, is_called: bool, has_failed: bool) -> None:
        if self._recorder is not None:
            self._recorder.note_step(batch, updates, is_called=is_called, has_failed=has_failed)
        super().note_step(batch, updates, is_called=is_called, has_failed=has_failed)

    def add_request(self, head: RequestHead, snapshot: RequestSnapshot, _: ByteParts) -> None:
        self.traces.add_request(snapshot, is_resumed=head.resumed)

    def add_step(self, step: StepRecord) -> None:
        self._num_steps += 1
        self.steps.append(step)
        self.traces.add_step(step, self._num_steps)
        rows = [(self.traces.of(row).name, row.computed, len(row.token_ids)) for row in step.rows]
        now = time.perf_counter()
        self.timeline.append(TimedStep(self._step_begin - self._start, now - self._step_begin, rows))
        self._step_begin = now

    def add_event(self, kind: PieceKind, request_id: str) -> None: ...

    def note_gap(self, reason: str) -> None: ...

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def stats(self) -> JsonObject:
        return {} if self._recorder is None else self._recorder.stats()


@dataclass(frozen=True)
class Difference:
    """The first difference of an output, or of a batch. `step` is the record's, counted from 1."""

    kind: str
    """`batch`, `tokens`, `end`, `log-probabilities` or `failure`."""
    step: int
    request_id: str | None = None
    index: int = 0
    place: int | None = None
    recorded: object = None
    replayed: object = None
    is_tie: bool = False

    @property
    def text(self) -> str:
        who = "" if self.request_id is None else f" of request {self.request_id}, output {self.index}"
        where = "" if self.place is None else f", token {self.place}"
        verdict = "a tie" if self.is_tie else "different"
        return f"step {self.step}: {verdict}, {self.kind}{who}{where}: recorded {self.recorded}, here {self.replayed}"


@dataclass
class Replayed:
    """Result of a replay."""

    head: RecordHead
    steps: int = 0
    batches: int = 0
    """Steps whose batches were compared."""
    requests: int = 0
    differences: list[Difference] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Reasons why tokens alone were compared."""
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Requests that could not be replayed."""
    last_step: list[str] = field(default_factory=list)
    """Rows of the last step, if it was given."""
    outputs: dict[tuple[int, int], OutputTrace] = field(default_factory=dict)
    """Outputs of the replay, by the serial number of the record's request and their own index."""
    timeline: list[TimedStep] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        if not self.differences:
            return Verdict.EQUAL
        return Verdict.TIE if all(each.is_tie for each in self.differences) else Verdict.DIFFERENT

    def to_json(self) -> JsonObject:
        return {
            "verdict": self.verdict.value,
            "steps": self.steps,
            "batches": self.batches,
            "requests": self.requests,
            "differences": [asdict(each) for each in self.differences],
            "tokens_only": self.reasons,
            "notes": self.notes,
            "left_out": self.left_out,
            "last_step": self.last_step,
        }


def replay_config(record: Record, changes: Mapping[str, object], directory: Path | None = None) -> EngineConfig:
    """Return the config of a record's engine with changes. With `directory`, the replay is recorded there.

    Of the settings in `OWN_FILES`, only those among the changes are in it.
    """
    names = EngineConfig.model_fields.keys() - OWN_FILES
    kept = {name: value for name, value in record.head.settings.items() if name in names}
    asked = {**kept, **changes}
    if directory is not None:
        asked |= {"record": str(directory), "record_images": True}
    return EngineConfig(**asked)


class Replay:
    """One replay of a record on a new engine."""

    def __init__(self, record: Record, config: EngineConfig, only: Collection[int] | None = None) -> None:
        """Start the engine. `only` are the serial numbers of the requests to replay; None: all."""
        self._record, self._only = record, only
        self.engine = engine = EngineCore(config)
        self._log = engine.step_log = ReplayLog(engine)
        self.result = Replayed(record.head)
        self._recorded = Traces()
        self._states: dict[int, RequestState] = {}
        """Requests by their serial numbers in the record, in the order in which they were added here."""
        self._due_aborts: dict[str, int] = {}
        self._number = 0
        identity = engine.identity
        unknown = sorted(record.head.settings.keys() - EngineConfig.model_fields.keys())
        self.result.notes += [f"{name} is a setting of the record that this version does not have" for name in unknown]
        self.result.notes += [
            f"{name} was for the recorded engine, and is left out here unless you give it"
            for name in OWN_FILES
            if name in record.head.settings and not config.is_given(name)
        ]
        self.result.notes += differences(record.head.identity, identity)
        computed = ("weights", "kernels", "instructions", "version", "deterministic", "dtype")
        self._same_kernels = all(record.head.identity.get(name) == identity.get(name) for name in computed)
        self._compares_bits = self._same_kernels and engine.plan.settings.deterministic
        self.result.reasons += self._why_tokens_only()

    def _why_tokens_only(self) -> Iterator[str]:
        head = self._record.head
        yield from head.gaps
        if head.number:
            yield f"the record begins with segment {head.number}, when the engine was at work already"
        if head.hash_check != HASH_CHECK:
            yield "the record was made by a Python that hashes numbers otherwise"
        yield from differences(head.schedule, schedule_facts(self.engine))
        if self._only is not None:
            yield "requests are left out"
        if self.engine.speculation is not None and not self._same_kernels:
            yield "other kernels may accept other drafts"

    @property
    def recorded_outputs(self) -> dict[tuple[int, int], OutputTrace]:
        """The record's outputs, as far as it was read."""
        return self._recorded.outputs

    @property
    def _is_exact(self) -> bool:
        return not self.result.reasons

    def _only_tokens(self, reason: str) -> None:
        """Compare tokens alone from here on."""
        self.result.reasons.append(reason)
        if self.engine.speculation is not None:
            self.engine.scheduler.choose_drafts = self.engine.speculation.controller.choose_num_drafts

    def run(self, until: int | None = None) -> Replayed:
        """Replay up to step `until`, or to the first difference of the same kernels, or to the end."""
        result = self.result
        for event in self._record.events():
            self._take(event)
            if result.differences or (until is not None and self._number >= until):
                break
        else:
            if not self._is_exact:
                self._run_on()
        result.steps, result.requests = self._number, len(self._states)
        result.notes += self._record.notes
        result.timeline = self._log.timeline
        serials = list(self._states)
        result.outputs = {(serials[key[0]], key[1]): trace for key, trace in self._log.traces.outputs.items()}
        if not self._is_exact and not result.differences:
            self._compare_outputs()
        self.engine.close()
        return result

    def _take(self, event: RecordEvent) -> None:
        engine = self.engine
        match event.kind:
            case PieceKind.HEAD:
                self._recorded.begin_segment()
                if self._number:
                    self._log.begin_segment()
            case PieceKind.REQUEST:
                self._take_request(event)
            case PieceKind.STEP:
                assert event.step is not None
                self._take_step(event.step)
            case PieceKind.RESET:
                engine.reset_prefix_cache()
            case PieceKind.PREEMPT if self._known(event.request_id.partition("/")[0]):
                engine.preempt(event.request_id)
            case PieceKind.ABORT | PieceKind.MOVED if self._known(event.request_id):
                recorded = self._recorded.of_request(event.request_id)
                for trace in recorded:
                    trace.end = trace.end or ENDED_OUTSIDE[event.kind is PieceKind.MOVED]
                if not self._is_exact:
                    self._due_aborts[event.request_id] = sum(len(trace.tokens) for trace in recorded)
                    self._abort_due()
                elif event.kind is PieceKind.ABORT:
                    engine.abort(event.request_id)
                else:
                    engine.export_request(event.request_id)

    def _known(self, request_id: str) -> bool:
        return request_id in self.engine.output_processor.request_states

    def _take_request(self, event: RecordEvent) -> None:
        assert event.head is not None
        snapshot, _ = unpack_snapshot(event.snapshot)
        serial = self._recorded.num_requests
        was_known = event.head.resumed and bool(self._recorded.of_request(event.request_id))
        self._recorded.add_request(snapshot, is_resumed=event.head.resumed)
        if was_known:
            return
        if event.head.images:
            what = f"request {event.request_id} has images that the record does not hold (record_images)"
            self.result.left_out.append(event.request_id)
            self._only_tokens(what)
            return
        if self._only is not None and serial not in self._only:
            return
        if event.head.imported and self._is_exact:
            self._only_tokens(f"request {event.request_id} came from another engine with what that had computed")
        state = self.engine.restore_state(event.snapshot, {})
        for request in state.requests:
            request.arrival = event.head.arrival
            if snapshot.client is not None:
                request.client = Client(snapshot.client, event.head.weight)
        self.engine.add_state(state)
        self._states[serial] = state

    def _take_step(self, step: StepRecord) -> None:
        self._number += 1
        self._recorded.add_step(step, self._number)
        if not self._is_exact:
            self._step()
            return
        log = self._log
        if not log.steps:
            if self.engine.speculation is not None:
                self.engine.scheduler.choose_drafts = lambda rows: step.drafts
            self._log.note_begin()
            if step.is_called:
                self.engine.step()
            else:
                self.engine.finish_in_flight()
        mine = log.steps.popleft() if log.steps else None
        self.result.last_step = [self._row_text(row) for row in step.rows]
        difference = self._compare_steps(step, mine)
        if difference is None:
            self.result.batches += 1
        elif difference.kind == "tokens" and not self._same_kernels:
            self._only_tokens(f"from step {self._number} on, where a token differs with other kernels")
        else:
            self.result.differences.append(difference)

    def _row_text(self, row: RowRecord) -> str:
        trace = self._recorded.of(row)
        ended = "" if row.end is None else f", ended: {row.end}"
        tokens = "void" if row.is_void else f"gave {list(row.token_ids)}"
        return f"request {trace.request_id}, output {trace.index}: computed {row.computed} tokens, {tokens}{ended}"

    def _compare_steps(self, step: StepRecord, mine: StepRecord | None) -> Difference | None:
        if mine is None:
            return Difference("batch", self._number, recorded=f"a step of {len(step.rows)} rows", replayed="no step")
        if step.has_failed != mine.has_failed:
            says = {True: "the step failed", False: "it did not"}
            return Difference("failure", self._number, recorded=says[step.has_failed], replayed=says[mine.has_failed])
        shapes = [[(row.number, row.computed) for row in each.rows] for each in (step, mine)]
        if shapes[0] != shapes[1]:
            return Difference("batch", self._number, recorded=_shape(step), replayed=_shape(mine))
        for row, other in zip(step.rows, mine.rows, strict=True):
            trace = self._recorded.of(row)
            if row.token_ids != other.token_ids:
                place = first_difference(row.token_ids, other.token_ids)
                place = min(len(row.token_ids), len(other.token_ids)) if place is None else place
                at = len(trace.tokens) - len(row.token_ids) + place
                own, came = (each.token_ids[place] if place < len(each.token_ids) else None for each in (row, other))
                return Difference("tokens", self._number, trace.request_id, trace.index, at, own, came)
            if (row.end, row.visible, row.is_void) != (other.end, other.visible, other.is_void):
                return Difference(
                    "end", self._number, trace.request_id, trace.index, None, _ending(row), _ending(other)
                )
        if step.batch_hash != mine.batch_hash:
            said = "other blocks, slots or checkpoints for the same rows"
            return Difference("batch", self._number, recorded=_shape(step), replayed=said)
        if self._compares_bits and step.bits != mine.bits:
            return Difference("log-probabilities", self._number, recorded="other bits", replayed="for the same tokens")
        return None

    def _step(self) -> None:
        """Run a step, if there is anything to do, where tokens alone are compared."""
        if self.engine.has_unfinished:
            self._log.note_begin()
            self.engine.step()
            self._log.steps.clear()
        self._abort_due()

    def _abort_due(self) -> None:
        """Abort requests that were aborted in the record, once they have as many tokens."""
        for request_id, least in list(self._due_aborts.items()):
            if not self._known(request_id):
                del self._due_aborts[request_id]
            elif sum(len(trace.tokens) for trace in self._log.traces.of_request(request_id)) >= least:
                self.engine.abort(request_id)
                del self._due_aborts[request_id]

    def _run_on(self) -> None:
        """Run until each output has as many tokens as in the record, or has ended; then abort what is left."""
        while self.engine.has_unfinished and self._lags():
            self._step()
        for request_id in list(self.engine.output_processor.request_states):
            self.engine.abort(request_id)

    def _pairs(self) -> Iterator[tuple[int, OutputTrace, OutputTrace]]:
        """Yield the serial number, the recorded and the own trace of each output that was replayed."""
        for place, serial in enumerate(self._states):
            for index in range(len(self._states[serial].requests)):
                yield serial, self._recorded.outputs[serial, index], self._log.traces.outputs[place, index]

    def _lags(self) -> bool:
        """Return whether an output has fewer tokens than in the record, or ended there and not here."""
        return any(
            mine.end is None
            and (len(mine.tokens) < len(trace.tokens) or (trace.end is not None and trace.end not in ENDED_OUTSIDE))
            for _, trace, mine in self._pairs()
        )

    def _compare_outputs(self) -> None:
        """Compare the tokens of all outputs, and find out which differences are ties."""
        for serial, trace, mine in self._pairs():
            place = first_difference(trace.tokens, mine.tokens)
            if place is not None:
                expected, came = trace.tokens[place], mine.tokens[place]
                is_tie = not self.engine.has_unfinished and self._is_tie(serial, trace, place, came)
                self.result.differences.append(
                    Difference(
                        "tokens", trace.steps[place], trace.request_id, trace.index, place, expected, came, is_tie
                    )
                )
            elif not ({None, *ENDED_OUTSIDE} & {trace.end, mine.end}) and (trace.end, trace.visible) != (
                mine.end,
                mine.visible,
            ):
                step = trace.steps[-1] if trace.steps else self._number
                there, here = (f"{each.end} after {each.visible} tokens" for each in (trace, mine))
                self.result.differences.append(
                    Difference("end", step, trace.request_id, trace.index, None, there, here)
                )
        self.result.differences.sort(key=lambda each: each.step)

    def _is_tie(self, serial: int, trace: OutputTrace, place: int, came: int) -> bool:
        """Return whether the whole text, computed at once, has both tokens within rounding of the best."""
        request_state, engine = self._states[serial], self.engine
        prompt, params = request_state.output.prompt_token_ids, request_state.params
        engine.reset_prefix_cache()
        [logits] = text_logits(engine, prompt, trace.tokens[:place], 1, request_state.media)
        state = SamplingState(
            params,
            prompt,
            trace.tokens[:place],
            () if params.ignore_eos else request_state.requests[0].stop.eos_token_ids,
            sample_index=trace.index,
            seed=request_state.seed,
            grammar=None if params.guide is None else engine.compile_guide(params.guide),
        )
        scores = token_scores(engine, state, logits)
        return scores.is_tie(came) and scores.is_tie(trace.tokens[place])


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the first place at which both have a token, and not the same."""
    return next((i for i, pair in enumerate(zip(tokens, others, strict=False)) if pair[0] != pair[1]), None)


def _shape(step: StepRecord) -> str:
    rows = ", ".join(f"{row.number}: {row.computed}" for row in step.rows)
    return f"{len(step.rows)} rows (output: tokens computed; {rows})"


def _ending(row: RowRecord) -> str:
    if row.is_void:
        return "a void row"
    return "unfinished" if row.end is None else f"{row.end} after {row.visible} tokens"


def minimise(
    record: Record, changes: Mapping[str, object], directory: Path, progress: Callable[[str, int, int], None]
) -> tuple[list[str], Replayed]:
    """Drop requests as long as one output stays different, and record what is left in `directory`.

    The output is the first that differs between the settings of the record and those with `changes`; without changes,
    between the record and this engine. Returns the ids of the requests that are left, and their replay. RecordError if
    nothing differs. Each attempt is a new engine.
    """
    progress("all requests", 0, 0)
    wanted = Replay(record, replay_config(record, changes)).run()
    different = [each for each in wanted.differences if not each.is_tie and each.request_id is not None]
    if not different:
        raise RecordError("nothing differs, so there is nothing to keep: give the settings with which it does")
    place = {name: value for name, value in changes.items() if name == "download_dir"}
    """Place of the model's files, which all attempts need; with other changes, tokens may differ."""
    expected = wanted.outputs if changes.keys() - place else None
    target = next(
        key
        for key, trace in wanted.outputs.items()
        if (trace.request_id, trace.index) == (different[0].request_id, different[0].index)
    )
    num_tried = 0

    def run(kept: Collection[int], recorded: Path | None = None) -> tuple[bool, Replayed]:
        nonlocal num_tried
        num_tried += 1
        progress(f"attempt {num_tried}, {len(kept)} requests", 0, 0)
        replay = Replay(record, replay_config(record, place, recorded), kept)
        replayed = replay.run()
        other = replay.recorded_outputs if expected is None else expected
        return first_difference(other[target].tokens, replayed.outputs[target].tokens) is not None, replayed

    serials = sorted({serial for serial, _ in wanted.outputs} - {target[0]})
    kept = _smallest(serials, lambda others: run({*others, target[0]})[0])
    _, replayed = run({*kept, target[0]}, directory)
    names = [trace.request_id for (serial, _), trace in replayed.outputs.items() if serial in {*kept, target[0]}]
    return list(dict.fromkeys(names)), replayed


def _smallest(items: list[int], holds: Callable[[list[int]], bool]) -> list[int]:
    """Return a part of `items` that `holds`, and does not without any single one (Zeller: delta debugging).

    `items` as a whole need not hold; then they are returned.
    """
    if holds([]):
        return []
    parts = 2
    while len(items) > 1:
        size = -(-len(items) // parts)
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        rest = next((left for chunk in chunks if holds(left := [i for i in items if i not in chunk])), None)
        if rest is not None:
            items, parts = rest, max(2, parts - 1)
        elif size == 1:
            break
        else:
            parts = min(len(items), 2 * parts)
    return items
