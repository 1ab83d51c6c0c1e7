"""Router of requests to replicas: a prompt goes to the replica that computes it soonest.

Prefix hit and queue are counted in seconds. The router knows every replica's load and cache, and the requests that it
has sent.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Literal

from ostinato.kv_cache.eviction import EvictionCosts
from ostinato.kv_cache.prefix_index import BlockHashes
from ostinato.replicas.index_sync import IndexChanges, PublishedIndex

MAX_LOAD_SHARE = 1.25
"""Largest ratio of a busy replica's work to the mean work. A busy replica above it gets no further request."""


class ChoiceReason(StrEnum):
    """Reason why a replica was chosen."""

    LONGEST_HIT = "longest_hit"
    """No other replica has more of the prompt cached, and this one has a part."""
    SHORTER_QUEUE = "shorter_queue"
    """Another replica has more of the prompt, but waiting in its queue would cost more time than that saves."""
    LESS_LOADED = "less_loaded"
    """Another replica would be sooner, but was given more than its share of the work."""
    NOTHING_CACHED = "nothing_cached"
    """No replica has any of the prompt cached."""
    TWO_CHOICES = "two_choices"
    """The replica had fewer requests than another one, both drawn at random."""
    ROUND_ROBIN = "round_robin"
    """The replica was next in turn."""


RoutingPolicy = Literal["prefix", "two_choices", "round_robin"]
"""Rule for choosing a replica.

`prefix` chooses by the cached prefix (`choose`). `two_choices` takes the less busy of two random replicas
(`less_busy_of_two`), `round_robin` one after the other: both serve as baselines.
"""


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Estimate of prompt times: the FLOPs of a prompt at a constant rate, in FLOPs per second."""

    costs: EvictionCosts
    flops_per_second: float

    @classmethod
    def of_step(cls, costs: EvictionCosts, num_tokens: int, seconds: float) -> PromptTimes:
        """Return times at the rate of a planned step, which computes a prompt of `num_tokens` tokens in `seconds`."""
        return cls(costs, costs.flops(0, num_tokens) / seconds)

    def seconds(self, hit: int, num_tokens: int) -> float:
        """Return the time of a prompt of `num_tokens` tokens, the first `hit` of them cached."""
        return self.costs.flops(hit, num_tokens) / self.flops_per_second


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may get the request. Times are in seconds."""

    name: str
    hit: int = 0
    """Tokens of the prompt that it has cached, up to a checkpoint."""
    queue: float = 0.0
    """Work that it has to do before the request."""
    recent: float = 0.0
    """Work that it was given lately."""
    is_own: bool = False
    """True if the request's session was here last."""
    num_requests: int = 0
    """Number of its unfinished requests."""


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """A replica's `name`, the `hit` expected there, in tokens, and the `reason`."""

    name: str
    hit: int
    reason: ChoiceReason


def choose_replica(candidates: Sequence[Candidate], num_tokens: int, times: PromptTimes) -> ReplicaChoice:
    """Choose the replica that finishes a prompt of `num_tokens` tokens first, after its queue.

    Among equals: the session's own, then the longest hit, the one given the least work, the first by name. The order of
    `candidates` does not matter; there is at least one.
    """
    assert candidates, "a request needs a replica to go to"
    mean = sum(candidate.recent for candidate in candidates) / len(candidates)
    fair = [
        candidate for candidate in candidates if candidate.queue <= 0 or candidate.recent <= MAX_LOAD_SHARE * mean
    ] or list(candidates)

    def rank(candidate: Candidate) -> tuple[float, bool, int, float, str]:
        return (
            candidate.queue + times.seconds(candidate.hit, num_tokens),
            not candidate.is_own,
            -candidate.hit,
            candidate.recent,
            candidate.name,
        )

    best, soonest = min(fair, key=rank), min(candidates, key=rank)
    longest = max(candidate.hit for candidate in candidates)
    if longest == 0:
        reason = ChoiceReason.NOTHING_CACHED
    elif best.hit == longest:
        reason = ChoiceReason.LONGEST_HIT
    else:
        reason = ChoiceReason.SHORTER_QUEUE if best is soonest else ChoiceReason.LESS_LOADED
    return ReplicaChoice(best.name, best.hit, reason)


def less_busy_of_two(candidates: Sequence[Candidate], draws: Random) -> ReplicaChoice:
    """Choose the replica with fewer requests of two that `draws` picks, whatever they have cached."""
    pair = draws.sample(list(candidates), min(2, len(candidates)))
    best = min(pair, key=lambda candidate: candidate.num_requests)
    return ReplicaChoice(best.name, best.hit, ChoiceReason.TWO_CHOICES)


HALF_LIFE = 60.0
"""Seconds after which work that was given counts half."""

UNPUBLISHED_SECONDS = 60.0
"""Seconds for which a session's last prompt counts as cached before its replica has reported it.

It may be evicted meanwhile, so reports decide later.
"""

MAX_SESSIONS = 2**16


@dataclass(slots=True)
class _ReplicaLoad:
    published: PublishedIndex = field(default_factory=PublishedIndex)
    takes_new: bool = True
    num_sent: int = 0
    queue: float = 0.0
    recent: float = 0.0
    recent_at: float = 0.0

    def recent_work(self, now: float) -> float:
        fading: float = 0.5 ** (max(0.0, now - self.recent_at) / HALF_LIFE)
        return self.recent * fading

    def give(self, work: float, now: float) -> None:
        self.num_sent += 1
        self.queue += work
        self.recent = self.recent_work(now) + work
        self.recent_at = max(self.recent_at, now)


@dataclass(slots=True)
class _Sent:
    """An unfinished request: its replica, and its work there in seconds."""

    replica: str
    prompt: float
    output: float


@dataclass(frozen=True, slots=True)
class _Session:
    """Last replica of a session, and the depth and block hash of its last prompt there.

    The blocks will be cached before they are reported. `since` is when the prompt was sent.
    """

    replica: str
    depth: int
    key: int
    since: float


class ReplicaRouter:
    """Chooses a replica for every request, and tracks the request to its end. Times are in seconds, `now` on any clock.

    `seconds_per_output` is the time that a token of an answer takes of a replica: a step's time divided by its batch
    rows.
    """

    def __init__(
        self, block_size: int, times: PromptTimes, seconds_per_output: float = 0.0, policy: RoutingPolicy = "prefix"
    ) -> None:
        self.policy = policy
        self._draws = Random(0)
        self._num_turns = 0
        self.block_size = block_size
        self.times = times
        self.seconds_per_output = seconds_per_output
        self.reasons: Counter[str] = Counter()
        self._replicas: dict[str, _ReplicaLoad] = {}
        self._sent: dict[str, _Sent] = {}
        self._sessions: OrderedDict[tuple[str | None, str], _Session] = OrderedDict()

    def add(self, name: str) -> None:
        """Add a replica that has joined, or has come back with an empty cache."""
        self.remove(name)
        self._replicas[name] = _ReplicaLoad()

    def remove(self, name: str) -> list[str]:
        """Remove a replica, and return its requests, which are forgotten."""
        self._replicas.pop(name, None)
        lost = [request_id for request_id, sent in self._sent.items() if sent.replica == name]
        for request_id in lost:
            del self._sent[request_id]
        for key in [key for key, session in self._sessions.items() if session.replica == name]:
            del self._sessions[key]
        return lost

    def drain(self, name: str) -> None:
        """Send no new requests to a replica from now on."""
        self._replicas[name].takes_new = False

    def apply(self, name: str, changes: IndexChanges) -> bool:
        """Apply a replica's report of its index. Returns False if it must report everything anew."""
        return self._replicas[name].published.apply(changes)

    def num_known(self, name: str) -> int:
        """Return at how many places a prompt may hit a replica, as far as it has told; 0 if it is not here."""
        return len(self._replicas[name].published) if name in self._replicas else 0

    def route(
        self,
        request_id: str,
        block_hashes: BlockHashes,
        num_tokens: int,
        now: float,
        num_outputs: int = 0,
        session: str | None = None,
        among: Collection[str] | None = None,
    ) -> ReplicaChoice | None:
        """Choose a replica for the request, and count the request as sent there.

        None if no replica of `among` (None: of all) takes new requests. `block_hashes` holds the prompt's `num_tokens`
        tokens, `num_outputs` are expected. Sessions of two salts differ.
        """
        assert request_id not in self._sent, f"request {request_id} has been sent already"
        # A hit ends before the last token.
        keys = block_hashes.keys[: max(0, num_tokens - 1) // self.block_size]
        session_key = None if session is None else (block_hashes.salt, session)
        earlier = None if session_key is None else self._sessions.get(session_key)
        candidates = []
        for name, replica in self._replicas.items():
            if not replica.takes_new or (among is not None and name not in among):
                continue
            depth = replica.published.depth(keys)
            is_own = earlier is not None and earlier.replica == name
            if earlier is not None and is_own and _continues_session(earlier, keys, now):
                depth = max(depth, earlier.depth)
            hit = depth * self.block_size
            work = replica.recent_work(now)
            candidates.append(Candidate(name, hit, replica.queue, work, is_own, replica.num_sent))
        if not candidates:
            return None
        if self.policy == "two_choices":
            choice = less_busy_of_two(candidates, self._draws)
        elif self.policy == "round_robin":
            turn = candidates[self._num_turns % len(candidates)]
            self._num_turns += 1
            choice = ReplicaChoice(turn.name, turn.hit, ChoiceReason.ROUND_ROBIN)
        else:
            choice = choose_replica(candidates, num_tokens, self.times)
        self.reasons[choice.reason.value] += 1
        prompt = self.times.seconds(choice.hit, num_tokens)
        sent = _Sent(choice.name, prompt, num_outputs * self.seconds_per_output)
        self._sent[request_id] = sent
        self._replicas[choice.name].give(sent.prompt + sent.output, now)
        if session_key is not None and keys:
            self._sessions[session_key] = _Session(choice.name, len(keys), keys[-1], now)
            self._sessions.move_to_end(session_key)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return choice

    def note_first_token(self, request_id: str) -> None:
        """Note the request's first token: its prompt is no work any more."""
        sent = self._sent.get(request_id)
        if sent is not None:
            self._less(sent.replica, sent.prompt)
            sent.prompt = 0.0

    def note_end(self, request_id: str) -> None:
        """Note that the request has ended in any way. An unknown request is ignored."""
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self._replicas[sent.replica].num_sent -= 1
            self._less(sent.replica, sent.prompt + sent.output)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every queue equals the unfinished work that was sent."""
        for name, replica in self._replicas.items():
            sent_here = [sent for sent in self._sent.values() if sent.replica == name]
            queue = sum(sent.prompt + sent.output for sent in sent_here)
            assert abs(replica.queue - queue) <= 1e-6 * (1 + queue), f"the queue of {name} was miscounted"
            assert replica.num_sent == len(sent_here), f"the requests of {name} were miscounted"
            assert sent_here or replica.queue == 0, f"{name} has a queue and no request"
        assert all(sent.replica in self._replicas for sent in self._sent.values()), "a request outlived its replica"
        assert all(session.replica in self._replicas for session in self._sessions.values()), (
            "a session outlived its replica"
        )
        assert len(self._sessions) <= MAX_SESSIONS, "there are too many sessions"

    def _less(self, name: str, work: float) -> None:
        replica = self._replicas[name]
        # An empty queue is exactly 0, without rounding errors: the choice compares it with 0.
        replica.queue = max(0.0, replica.queue - work) if replica.num_sent else 0.0


def _continues_session(earlier: _Session, keys: Sequence[int], now: float) -> bool:
    """Return whether the prompt with these block hashes begins with the one that its session sent lately."""
    is_late = now - earlier.since > UNPUBLISHED_SECONDS
    return not is_late and earlier.depth <= len(keys) and keys[earlier.depth - 1] == earlier.key
