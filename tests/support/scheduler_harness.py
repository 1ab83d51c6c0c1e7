"""Drives a scheduler over the fake runner and checks from outside that each step and each output is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ostinato.errors import RequestError
from ostinato.kv_cache.checkpoints import PrefixCachePolicy
from ostinato.kv_cache.encoder_cache import EncoderCache
from ostinato.kv_cache.eviction import EvictionCosts, EvictionPolicy
from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.marks import Mark
from ostinato.kv_cache.prefix_index import BlockHashes, MediaSpan, xxh3_hash
from ostinato.kv_cache.sliding_window import SlidingWindowSpec
from ostinato.scheduler.batch import Batch, BatchRow
from ostinato.scheduler.limits import SchedulerLimits
from ostinato.scheduler.request import FinishReason, Request, RequestUpdate, StopConditions
from ostinato.scheduler.scheduler import Scheduler
from tests.support.fake_files import FakeMemory
from tests.support.fake_runner import FIRST_PART, IMAGE, FakeRunner, continuation


@dataclass
class Wish:
    """What a request asks for."""

    prompt: list[int]
    """As the model takes it: from `FIRST_PART` on, parts of images."""
    stop: StopConditions
    priority: int = 0
    prompt_logprobs: bool = False
    salt: str | None = None
    client: str | None = None
    marks: tuple[Mark, ...] = ()


@dataclass
class Follower:
    """What is known of a request from outside: what it should get, and what it got."""

    request: Request
    prompt: list[int]
    expected: list[int]
    expected_reason: FinishReason
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    was_ended: bool = False
    """Ended from outside or by a failed step, not by its own stop conditions."""
    num_computed: int = 0
    num_preemptions: int = 0
    """Of those after which it has begun again."""
    has_begun: bool = False
    came_with: int = 0
    """Tokens that were computed elsewhere, and whose blocks and state came with it."""
    pinned: set[int] = field(default_factory=set)
    """Its marks that were seen to be pinned."""
    was_told: bool = False
    """Whether it was told elsewhere what the cache gave to it."""

    @property
    def known(self) -> list[int]:
        """The prompt as the model takes it, and what it got so far."""
        return [*self.prompt, *self.token_ids]


@dataclass(frozen=True)
class Sizes:
    """Of the cache, with the null block and the null slot; 0 blocks or 0 slots: the model needs none."""

    num_blocks: int
    num_slots: int
    block_size: int
    num_window_blocks: int = 0
    window: int = 1
    """Of layers whose keys are in window blocks, if there are any."""
    num_packed: int = 0
    """Places of packed checkpoints."""


def expected_output(prompt: Sequence[int], stop: StopConditions, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The request's whole output and how it ends, worked out token by token and without a scheduler."""
    output = continuation(prompt, min(stop.max_tokens, max_model_len - len(prompt)))
    for count, token_id in enumerate(output, start=1):
        is_stop = token_id in stop.stop_token_ids
        is_eos = token_id in stop.eos_token_ids and not stop.ignore_eos
        if count >= stop.min_tokens and (is_stop or is_eos):
            return output[:count], FinishReason.STOP
    return output, FinishReason.LENGTH


def as_tokens(text: Sequence[int]) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """A text as the model takes it -> its tokens, and its images. An image begins with part 0."""
    spans: list[MediaSpan] = []
    for position, part in enumerate(text):
        if part >= FIRST_PART and part % FIRST_PART == 0:
            spans.append(MediaSpan(position, position + 1, str(part // FIRST_PART - 1)))
        elif part >= FIRST_PART:
            spans[-1] = replace(spans[-1], end=position + 1)
    return [IMAGE if part >= FIRST_PART else part for part in text], tuple(spans)


class Harness:
    """A scheduler, and a follower for each request that it took in.

    If `num_hashes` is given, the blocks of all texts have no more hashes than that, so that many collide. Requests
    have memory for `k` drafts, and steps give their rows `num_drafts`, which is 0 or `k` and may be set between steps.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        sizes: Sizes,
        policy: PrefixCachePolicy,
        eviction: EvictionPolicy = "marconi",
        costs: EvictionCosts | None = None,
        num_hashes: int | None = None,
        k: int = 0,
        num_cells: int = 0,
        max_pins: int = 0,
        max_pinned_blocks: int = 0,
    ) -> None:
        self.num_hashes = num_hashes
        self.k = self.num_drafts = k
        self.limits, self.policy = limits, policy
        block_size, self.has_attention, has_state = sizes.block_size, sizes.num_blocks > 0, sizes.num_slots > 0
        costs = costs or EvictionCosts()
        self.rules = (
            SlidingWindowSpec(sizes.window, block_size, limits.max_num_batched_tokens)
            if sizes.num_window_blocks
            else None
        )
        self.cache = CacheManager(
            sizes.num_blocks,
            sizes.num_slots,
            block_size,
            1 + k,
            eviction,
            costs,
            sizes.num_window_blocks,
            self.rules,
            max_pins,
            max_pinned_blocks,
            sizes.num_packed,
        )
        self.capacity = (sizes.num_blocks - 1) * block_size if self.has_attention else 1000
        if (
            self.rules is not None
            and self.rules.blocks_per_request + self.rules.shared_blocks > sizes.num_window_blocks - 1
        ):
            self.capacity = min(self.capacity, (sizes.num_window_blocks - 1) * block_size)
        self.encoder_cache = EncoderCache(num_cells) if num_cells else None
        self.scheduler = Scheduler(limits, self.cache, policy, lambda num_decoding: self.num_drafts, self.encoder_cache)
        window = None if self.rules is None else sizes.window
        self.runner = FakeRunner(block_size, self.has_attention, has_state, window=window)
        if sizes.num_packed:
            memory = self.cache.memory = FakeMemory(self.runner)
            self.runner.packed_contents = lambda id: self.cache.store.packed_states.contents(memory, id)
        self.followers: dict[str, Follower] = {}
        self.batch: Batch | None = None
        self.num_arrived = 0
        self.verified: Counter[tuple[int, int, int]] = Counter()
        """Of rows in steps with drafts: (drafts that it might get, those it got, those that were kept)."""

    def arrive(self, wish: Wish) -> None:
        name = f"r{self.num_arrived}"
        self.num_arrived += 1
        payload = wish.prompt if wish.prompt_logprobs else None
        prompt, media = as_tokens(wish.prompt)
        request = Request(name, prompt, wish.stop, wish.priority, wish.prompt_logprobs, payload, wish.salt, media)
        request.client = wish.client
        # Time is counted in requests here.
        request.marks, request.arrival = wish.marks, float(self.num_arrived)
        if self.num_hashes is not None and self.policy.prefix_caching:
            files = self.cache.store.files
            root = None if files is None else files.root
            request.block_hashes = BlockHashes(self.cache.block_size, wish.salt, media, self._hash, root)
        try:
            self.scheduler.add(request)
        except RequestError:
            assert self._can_never_be_served(request)
        else:
            assert not self._can_never_be_served(request)
            expected = expected_output(wish.prompt, wish.stop, self.limits.max_model_len)
            self.followers[name] = Follower(request, list(wish.prompt), *expected)

    def schedule(self) -> None:
        batch = self.scheduler.schedule()
        assert bool(batch.rows) == self.scheduler.has_unfinished
        self._check_batch(batch)
        self.batch = batch if batch.rows else None

    def update(self, broken: frozenset[str] = frozenset()) -> None:
        """Run the step in flight; the rows of the requests in `broken` end with an error."""
        batch = self._take_batch()
        unfinished = {row.request_id for row in batch.rows if not self._is_finished(row.request_id)}
        result = self.runner.run(batch, broken)
        if batch.num_drafts > 0:
            for row, given in zip(batch.rows[: batch.num_decode_rows], result.rows, strict=False):
                self.verified[row.num_drafts, given.num_drafts, len(given.token_ids) - 1] += 1
        updates = self.scheduler.update(result)
        assert {update.request_id for update in updates if update.error is not None} == broken & unfinished
        self._follow(updates)
        self._check_marks()
        self.check()

    def fail(self) -> None:
        batch = self._take_batch()
        unfinished = {row.request_id for row in batch.rows if not self._is_finished(row.request_id)}
        indexed = self._indexed()
        self.runner.fail(batch)
        error = ValueError("the step broke down")
        updates = self.scheduler.fail(batch, error)
        assert {update.request_id for update in updates} == unfinished
        assert all(u.error is error and u.finish_reason == FinishReason.ERROR for u in updates)
        self._follow(updates)
        assert self._indexed() == indexed, "a failed step changed the index"
        self.check()

    def end(self, name: str, reason: FinishReason) -> None:
        follower = self.followers[name]
        assert self.scheduler.finish(name, reason) == (not self._is_finished(name))
        if follower.finish_reason is None:
            follower.finish_reason, follower.was_ended = reason, True
        is_in_flight = self.batch is not None and any(row.request_id == name for row in self.batch.rows)
        assert (name in self.cache.request_ids()) >= is_in_flight, "memory was freed while a step writes to it"
        self.check()

    def preempt(self, name: str) -> None:
        is_running = self.followers[name].request.status == "running"
        assert self.scheduler.preempt(name) == is_running
        self.check()

    def forget(self) -> None:
        """Only what requests hold stays in the index."""
        is_empty = self.cache.store.clear()
        assert is_empty == (len(self.cache.store.index) == 0)
        store = self.cache.store
        assert [pool.num_idle for pool in (store.blocks, store.slots, store.window_blocks, store.packed)] == [0] * 4
        assert is_empty or self.cache.request_ids()
        self.check()

    def step(self) -> None:
        self.schedule()
        if self.batch is not None:
            self.update()

    def check(self) -> None:
        """The scheduler agrees with itself, and the index with what was computed."""
        self.scheduler.check_integrity()
        self.runner.check_index(self.cache.store.index)

    def finish_all(self) -> None:
        """Whatever is unfinished ends as it would have ended alone, and then nothing is held but by the index."""
        if self.batch is not None:
            self.update()
        # Each step advances the first in rank, or gives some other request a token, which it keeps.
        bound = len(self.followers) * sum(f.request.max_num_tokens for f in self.followers.values())
        for _ in range(bound):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, "requests are unfinished after more steps than they need"
        for follower in self.followers.values():
            assert follower.finish_reason == follower.request.finish_reason
            if not follower.was_ended:
                assert follower.token_ids == follower.expected
                assert follower.finish_reason == follower.expected_reason
                if follower.request.wants_prompt_logprobs:
                    assert follower.prompt_logprobs == follower.prompt[1:]
        self._check_reports()
        usage = self.cache.usage()
        assert (usage.blocks_used, usage.slots_used, usage.window_blocks_used) == (0, 0, 0)
        assert self.cache.store.window_blocks.num_free + usage.window_blocks_cached == usage.window_blocks_total
        assert self.cache.blocks.num_free + usage.blocks_cached == usage.blocks_total
        assert self.cache.slots.num_free + self.cache.store.packed.num_free + usage.slots_cached == usage.slots_total
        assert self.encoder_cache is None or not self.encoder_cache.request_ids()

    def _hash(self, before: int, content: bytes) -> int:
        assert self.num_hashes is not None
        return xxh3_hash(before, content) % self.num_hashes

    def _indexed(self) -> tuple[set[int], set[int], set[int]]:
        """The blocks, slots and window blocks of the index."""
        index = self.cache.store.index
        slots, window_blocks = (
            {checkpoint.slot for checkpoint in index.checkpoints},
            {window_block.id for window_block in index.window_blocks},
        )
        return {entry.block for entry in index}, slots, window_blocks

    def _take_batch(self) -> Batch:
        batch, self.batch = self.batch, None
        assert batch is not None
        return batch

    def _is_finished(self, name: str) -> bool:
        return self.followers[name].finish_reason is not None

    def _can_never_be_served(self, request: Request) -> bool:
        num_prompt, limits = len(request.prompt_token_ids), self.limits
        return (
            num_prompt == 0
            or num_prompt + 1 > limits.max_model_len
            or (not limits.enable_chunked_prefill and num_prompt > limits.max_num_batched_tokens)
            or self._greatest_length(request) - 1 > self.capacity
            or self._has_too_large_images(request)
        )

    def _has_too_large_images(self, request: Request) -> bool:
        if not request.media:
            return False
        assert self.encoder_cache is not None
        sizes = {span.digest: span.end - span.start for span in request.media}
        num_cells = self.encoder_cache.capacity
        return (
            request.media[-1].end == len(request.prompt_token_ids)
            or max(sizes.values()) > min(self.limits.max_item_tokens, num_cells)
            or (not self.limits.enable_chunked_prefill and sum(sizes.values()) > num_cells)
        )

    def _greatest_length(self, request: Request) -> int:
        return min(len(request.prompt_token_ids) + request.stop.max_tokens, self.limits.max_model_len)

    def _check_batch(self, batch: Batch) -> None:
        """The batch keeps the limits, its rows are in order, no request was overtaken by another of its client, and
        nothing shared is written."""
        assert len(batch.rows) <= self.limits.max_num_seqs
        assert batch.num_drafts == (self.num_drafts if any(row.num_drafts for row in batch.rows) else 0)
        assert batch.num_tokens <= self.limits.max_num_batched_tokens
        assert len({row.request_id for row in batch.rows}) == len(batch.rows)
        self.scheduler.check_integrity()
        self.runner.check_index(self.cache.store.index)
        self.runner.check_writes(batch, self.cache.store.index)
        begun = []
        for index, row in enumerate(batch.rows):
            follower = self.followers[row.request_id]
            if self._begins(row):
                begun.append(follower.request)
            self._check_row(row, is_decode=index < batch.num_decode_rows)
        for client in {request.client for request in begun}:
            latest = max(request.service_order for request in begun if request.client == client)
            requests = (f.request for f in self.followers.values() if f.request.client == client)
            assert all(latest < r.service_order for r in requests if r.status == "waiting"), "one was overtaken"

    def _begins(self, row: BatchRow) -> bool:
        """Whether this is the first row of a request, or the first since it was preempted."""
        follower = self.followers[row.request_id]
        return not follower.has_begun or follower.num_preemptions < follower.request.num_preemptions

    def _check_row(self, row: BatchRow, is_decode: bool) -> None:
        """The row continues where its request stands, or begins after what others, or it itself, have computed."""
        follower = self.followers[row.request_id]
        known = follower.known
        assert follower.finish_reason is None
        assert len(row.token_ids) > 0
        assert list(row.token_ids) == as_tokens(known)[0][row.start : row.end]
        self._check_media(row, known)
        if self._begins(row):
            self._check_hit(follower, row.start)
        else:
            assert row.start == follower.num_computed
        self.runner.check_reads(row, known)
        self._check_window_blocks(row)
        assert row.samples == (row.end == len(known))
        assert is_decode == (row.start > 0 and row.start == len(known) - 1)
        if not self.limits.enable_chunked_prefill and not row.samples:
            assert follower.request.num_preemptions > 0 or follower.request.was_imported, (
                "a prompt was cut without chunked prefill"
            )
            assert len(known) > self.limits.max_num_batched_tokens
        if is_decode:
            self._check_drafts(row, follower.request)
        else:
            assert row.num_drafts == 0, "drafts behind tokens of a prompt"
        follower.num_computed, follower.has_begun = row.end, True
        follower.num_preemptions = follower.request.num_preemptions

    def _check_media(self, row: BatchRow, known: Sequence[int]) -> None:
        """A row has the cells of all images that its tokens stand for, and of no others."""
        wanted = [span for span in as_tokens(known)[1] if span.start < row.end and span.end > row.start]
        assert [(use.start, use.end) for use in row.media] == [(span.start, span.end) for span in wanted]

    def _check_window_blocks(self, row: BatchRow) -> None:
        """A request has no more window blocks than its window and the row's tokens need."""
        if self.rules is not None:
            size, tokens = self.rules.block_size, len(row.token_ids) + row.num_drafts
            held = sum(window_block > 0 for window_block in self.cache.request_cache(row.request_id).window_block_table)
            assert held <= -(-(self.rules.window - 1) // size) + -(-tokens // size) + 1

    def _check_drafts(self, row: BatchRow, request: Request) -> None:
        """A row has as many drafts as its length lets it have, unless there is no more memory for them."""
        length = self._greatest_length(request)
        assert row.end + row.num_drafts < length, "a draft that is never computed without speculation"
        if row.num_drafts < min(self.num_drafts, length - 1 - row.end):
            holding = self.cache.request_cache(row.request_id)
            lacks_blocks = self.has_attention and row.end + row.num_drafts == holding.capacity
            lacks_slots = self.runner.has_state and 1 + row.num_drafts == len(holding.write_slots)
            window_blocks = self.cache.window_blocks
            lacks_window_blocks = (
                window_blocks is not None
                and not window_blocks.num_unreserved
                and row.end + row.num_drafts == holding.capacity
            )
            assert (
                (lacks_blocks and not self.cache.blocks.num_available)
                or lacks_window_blocks
                or (lacks_slots and not self.cache.slots.num_available)
            ), "a row has fewer drafts than there is room for"

    def _check_hit(self, follower: Follower, hit: int) -> None:
        request, known = follower.request, follower.known
        if hit == follower.came_with and not follower.has_begun:
            return  # what it reads there is checked as any other
        assert hit % self.cache.block_size == 0
        assert hit < len(known)
        if hit == 0:
            return
        assert self.policy.prefix_caching, "a hit though the cache is off"
        if request.wants_prompt_logprobs:
            delivered = 1 + len(follower.prompt_logprobs)
            assert min(hit, len(request.prompt_token_ids)) <= delivered, "tokens were skipped whose logprobs are owed"
        assert any(
            other.request.cache_salt == request.cache_salt and other.known[:hit] == known[:hit]
            for other in self.followers.values()
            if other.has_begun or other.came_with
        ), "a hit on what no request of this salt has had"

    def _check_marks(self) -> None:
        """A prompt that shares no more than a mark which was just pinned hits up to there."""
        for follower in self.followers.values():
            request = follower.request
            if request.cache_report is None or not request.marks or request.block_hashes is None:
                continue
            pinned = {end for end, is_pinned in request.cache_report.marks.items() if is_pinned}
            assert request.cache_report.marks.keys() == {mark.boundary(self.cache.block_size) for mark in request.marks}
            for end in pinned - follower.pinned:
                path = self.cache.store.index.walk(request.block_hashes, end // self.cache.block_size)
                # Another request may have taken the place of this pin in the same step.
                if path and path[-1].end == end and path[-1].pin is not None:
                    assert self.cache.store.match(request.block_hashes, end).hit == end
            follower.pinned |= pinned

    def _check_reports(self) -> None:
        """What requests were told adds up to their prompts, and the statistics to what they were told."""
        cached, misses = 0, dict.fromkeys(self.scheduler.prefix_counters.misses, 0)
        for follower in self.followers.values():
            report = follower.request.cache_report
            if follower.was_told:
                assert report is not None
                continue
            assert (report is not None) == follower.has_begun, "what was admitted has a report, and nothing else"
            if report is None:
                continue
            assert report.cached_tokens + sum(report.misses.values()) == len(follower.request.prompt_token_ids)
            assert all(tokens > 0 for tokens in report.misses.values())
            is_unwanted = not self.policy.prefix_caching or follower.request.wants_prompt_logprobs
            assert ("not_wanted" in report.misses) == is_unwanted
            cached += report.cached_tokens
            for cause, tokens in report.misses.items():
                misses[cause] += tokens
        counters = self.scheduler.prefix_counters
        assert (counters.cached_tokens, counters.misses) == (cached, misses)

    def _follow(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            follower = self.followers[update.request_id]
            assert follower.finish_reason is None
            follower.token_ids += update.token_ids
            # Drafts that were accepted are computed, and the last token is not.
            follower.num_computed += max(0, len(update.token_ids) - 1)
            follower.prompt_logprobs += [entry.token_id for entry in update.prompt_logprobs]
            follower.finish_reason = update.finish_reason
            follower.was_ended = update.error is not None
            assert follower.token_ids == follower.expected[: len(follower.token_ids)]
            assert follower.token_ids == follower.request.output_token_ids
