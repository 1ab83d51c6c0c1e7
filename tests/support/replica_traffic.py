"""Conversations over several replicas in simulated time: each a real scheduler and cache, with a runner that computes
nothing, and a queue that it works off one request after the other."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from ostinato.kv_cache.eviction import EvictionCosts
from ostinato.kv_cache.index_snapshot import prefix_hit_keys
from ostinato.kv_cache.prefix_index import BlockHashes
from ostinato.replicas.index_sync import IndexPublisher
from ostinato.replicas.router import PromptTimes, ReplicaRouter
from ostinato.scheduler.scheduler import Scheduler
from tests.support.fake_runner import VOCABULARY, FakeRunner
from tests.support.scheduler_steps import BLOCK, make_caching_scheduler, request_of, runner_for

TOKEN_SECONDS = 0.01
OUTPUT_SECONDS = 0.005
TIMES = PromptTimes(EvictionCosts(), 1 / TOKEN_SECONDS)


@dataclass
class Traffic:
    """`sessions` conversations of `turns` turns, which begin in the first `window` seconds with one system prompt."""

    sessions: int
    turns: int = 6
    system: int = 40
    message: int = 16
    output: int = 6
    window: float = 20.0
    think: float = 4.0
    seed: int = 0


@dataclass
class Replica:
    scheduler: Scheduler
    runner: FakeRunner
    publisher: IndexPublisher = field(default_factory=IndexPublisher)
    keys: frozenset[int] = frozenset()
    """What it has to tell, as of its last request that ended."""
    waiting: deque[tuple[int, list[int]]] = field(default_factory=deque)
    """(session, prompt); the first one is being served."""
    answer: list[int] = field(default_factory=list)
    work: float = 0.0

    def serve(self, name: str, prompt: list[int], num_outputs: int) -> tuple[list[int], int]:
        """-> (the answer, tokens taken from the cache)"""
        request = request_of(name, prompt, num_outputs)
        self.scheduler.add(request)
        while self.scheduler.has_unfinished:
            self.scheduler.update(self.runner.run(self.scheduler.schedule()))
        assert request.cache_report is not None
        return list(request.output_token_ids), request.cache_report.cached_tokens


@dataclass
class Outcome:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    promised_tokens: int = 0
    """Hits that the router expected."""
    work: list[float] = field(default_factory=list)
    """Seconds, by replica."""

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def most_of_mean(self) -> float:
        """The work of the most loaded replica over the mean."""
        return max(self.work) * len(self.work) / sum(self.work)


Pick = Callable[[random.Random, list[int]], int]
"""(a source of chance, each replica's unfinished requests) -> a replica's number"""


def at_random(rng: random.Random, loads: list[int]) -> int:
    return rng.randrange(len(loads))


def power_of_two(rng: random.Random, loads: list[int]) -> int:
    return min(rng.sample(range(len(loads)), 2), key=lambda number: loads[number])


def simulate(traffic: Traffic, num_replicas: int, pick: Pick | None = None, publish_seconds: float = 1.0) -> Outcome:
    """Run the traffic to its end; `pick` takes the place of the router."""
    rng = random.Random(traffic.seed)
    schedulers = [
        make_caching_scheduler(num_blocks=9000, num_slots=3000, max_model_len=2000) for _ in range(num_replicas)
    ]
    replicas = [Replica(scheduler, runner_for(scheduler)) for scheduler in schedulers]
    router = ReplicaRouter(BLOCK, TIMES, OUTPUT_SECONDS)
    for number in range(num_replicas):
        router.add(str(number))
    system = [rng.randrange(VOCABULARY) for _ in range(traffic.system)]
    texts = [
        [[rng.randrange(VOCABULARY) for _ in range(rng.randint(4, 2 * traffic.message))] for _ in range(traffic.turns)]
        for _ in range(traffic.sessions)
    ]
    pauses = [[rng.expovariate(1 / traffic.think) for _ in range(traffic.turns)] for _ in range(traffic.sessions)]
    said = [list(system) for _ in range(traffic.sessions)]
    turns = [0] * traffic.sessions
    outcome, order = Outcome(), count()
    # (time, order, what, session or replica)
    events = [(rng.uniform(0, traffic.window), next(order), "ask", each) for each in range(traffic.sessions)]
    events.append((0.0, next(order), "publish", 0))
    heapq.heapify(events)

    def begin(number: int, now: float) -> None:
        """Serve the first of a replica's queue, until `work` seconds later."""
        replica = replicas[number]
        session, prompt = replica.waiting[0]
        replica.answer, cached = replica.serve(f"{session} {turns[session]}", prompt, traffic.output)
        work = TIMES.seconds(cached, len(prompt)) + traffic.output * OUTPUT_SECONDS
        replica.work += work
        outcome.prompt_tokens += len(prompt)
        outcome.cached_tokens += cached
        heapq.heappush(events, (now + work, next(order), "end", number))

    left = traffic.sessions * traffic.turns
    while left:
        now, _, what, which = heapq.heappop(events)
        if what == "publish":
            for number, replica in enumerate(replicas):
                changes = replica.publisher.changes(replica.keys)
                assert changes is None or router.apply(str(number), changes)
            router.check_integrity()
            heapq.heappush(events, (now + publish_seconds, next(order), "publish", 0))
        elif what == "ask":
            said[which] += texts[which][turns[which]]
            prompt = list(said[which])
            if pick is None:
                chain = BlockHashes(BLOCK)
                chain.extend(lambda start, end, prompt=prompt: tuple(prompt[start:end]), len(prompt))  # type: ignore[misc]
                choice = router.route(f"{which} {turns[which]}", chain, len(prompt), now, traffic.output, str(which))
                assert choice is not None
                number = int(choice.name)
                outcome.promised_tokens += choice.hit
            else:
                number = pick(rng, [len(replica.waiting) for replica in replicas])
            replicas[number].waiting.append((which, prompt))
            if len(replicas[number].waiting) == 1:
                begin(number, now)
        else:
            replica = replicas[which]
            session, _ = replica.waiting.popleft()
            replica.keys = prefix_hit_keys(replica.scheduler.cache.store.index, True)
            said[session] += replica.answer
            router.note_end(f"{session} {turns[session]}")
            left -= 1
            turns[session] += 1
            if turns[session] < traffic.turns:
                at = now + pauses[session][turns[session] - 1]
                heapq.heappush(events, (at, next(order), "ask", session))
            if replica.waiting:
                begin(which, now)
    outcome.work = [replica.work for replica in replicas]
    return outcome
