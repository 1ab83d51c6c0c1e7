"""The front's side of a drain: requests of a replica that ends migrate to others, and their streams notice nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ostinato.engine.process.engine_messages import EngineReply
from ostinato.engine.process.output_deltas import OutputDelta, without_move
from ostinato.errors import ForeignExport, RequestError
from ostinato.json_io import JsonObject
from ostinato.kv_cache.sliding_window import SlidingWindowSpec
from ostinato.replicas.replica_messages import AcceptMove, CancelMove, CommitMove, MovePrepared, PrepareMove
from ostinato.replicas.request_table import MoveStage, RequestMove, RequestTable, TrackedRequest
from ostinato.scheduler.request import FinishReason

log = logging.getLogger("ostinato.replicas")

MAX_MOVES_AT_ONCE = 4
"""Requests of one replica that move at a time. The others are computed there meanwhile."""
MAX_MOVE_BYTES = 2**30
"""Largest export in bytes. A larger request stays, since an engine would have to hold it in addition to its cache."""


@dataclass
class DrainCounts:
    """Counts of requests that had begun on replicas that drained, since the start."""

    moved: int = 0
    moved_bytes: int = 0
    stayed: Counter[str] = field(default_factory=Counter)
    """Requests computed to their end on the draining replica, or cut off there, by the reason why they did not move."""

    def to_json(self) -> JsonObject:
        return {"moved": self.moved, "moved_bytes": self.moved_bytes, "stayed": dict(self.stayed)}

    def __str__(self) -> str:
        why = ", ".join(f"{reason} {count}" for reason, count in sorted(self.stayed.items()))
        return f"{self.moved} requests moved, {self.stayed.total()} stayed" + (f" ({why})" if why else "")


class RequestMover:
    """Migrates begun requests from draining replicas to others that have room, request by request.

    A request is first exported by the draining replica, which keeps the export; then another replica fetches it. Until
    it has been imported there, the request can still go to a third replica or back. So it is lost only if the replica
    that keeps the export is lost before, or later the one that has imported it.
    """

    def __init__(self, table: RequestTable, lose: Callable[[str], None]) -> None:
        """Create empty counts. `lose` ends a request that is lost."""
        self.counts = DrainCounts()
        self._table, self._lose = table, lose
        self._of_replica: dict[str, DrainCounts] = {}
        self._foreign: set[tuple[str, str]] = set()
        """Pairs (from, to) of replicas with different plans, as one of them has found."""

    def look(self) -> None:
        """Begin to move the requests that can move now."""
        table = self._table
        draining = [name for name, each in table.replicas.items() if not each.accepts_requests]
        if not draining:
            return
        # Each source may have `MAX_MOVES_AT_ONCE` migrations.
        moving = Counter(each.move.source for each in table.requests.values() if each.move is not None)
        outputs = self._outputs()
        for request_id, request in table.requests.items():
            name = request.replica
            if name not in draining or not request.has_begun or request.move is not None or request.must_stay:
                continue
            if moving[name] >= MAX_MOVES_AT_ONCE:
                continue
            target = self._choose(request_id, request, name, outputs)
            if target is not None:
                moving[name] += 1
                outputs[target] += request.submitted.params.n
                request.move = RequestMove(name, target)
                table.replicas[name].link.send(PrepareMove(request_id))

    def take_left(self, name: str, message: MovePrepared) -> None:
        """Handle the answer of a replica that has exported a request, or could not."""
        request_id, size, error = message
        request = self._table.requests.get(request_id)
        if request is None or request.move is None or request.move.source != name:
            return  # the request was abandoned meanwhile
        if size is None:
            request.move = None
            if error is not None:
                self._table.router.note_end(request_id)
                self._stay(request, "failed", error)
            return
        request.move.size = size
        self._send_on(request_id, request, request.move)

    def is_last(self, request_id: str, delta: OutputDelta) -> bool:
        """Return whether a delta is the last one of the replica that exported the request."""
        request = self._table.requests.get(request_id)
        if request is None or request.move is None or delta.output is None:
            return False
        return any(sample.finish_reason == FinishReason.MOVED.value for sample in delta.output.outputs)

    def take_last(self, request_id: str, delta: OutputDelta) -> OutputDelta | None:
        """Return that delta without its end, for a stream that continues with the next replica; None if it is empty."""
        request = self._table.requests[request_id]
        assert request.move is not None
        request.move.has_last = True
        self._send_on(request_id, request, request.move)
        return without_move(delta)

    def take_reply(self, name: str, reply: EngineReply) -> bool:
        """Handle a replica's answer to an import, and return True, if it is one."""
        request = self._table.requests.get(reply.call_id)
        if request is None or request.move is None or request.replica != name or request.move.stage is MoveStage.LEAVES:
            return False
        if request.move.stage is MoveStage.ARRIVES:
            self._take_arrival(reply, request, request.move)
        else:
            request.move = None
            if reply.error is not None:
                log.error("replica %s does not take back a request: %s", name, reply.error)
                self._lose(reply.call_id)
        return True

    def drop(self, request_id: str, request: TrackedRequest) -> None:
        """Have the source drop the export of an abandoned request."""
        if request.move is not None and request.move.stage is MoveStage.ARRIVES:
            self._release(request_id, request.move)

    def note_end(self, request: TrackedRequest) -> None:
        """Count a request that has ended where it was, if that replica drains."""
        name = request.replica
        if name is None or name not in self._table.replicas or self._table.replicas[name].accepts_requests:
            return
        if request.has_begun:
            self._note_stayed(name, request)

    def lose(self, name: str) -> None:
        """Handle the loss of a replica that the table has dropped: exports kept elsewhere go to other replicas."""
        for request_id, request in list(self._table.requests.items()):
            move = request.move
            if move is None:
                if request.replica == name and request.has_begun and name in self._of_replica:
                    self._note_stayed(name, request)
            elif move.stage is MoveStage.ARRIVES and move.target == name and move.source in self._table.replicas:
                move.refused.add(name)
                self._send_on(request_id, request, move)
        self._foreign = {pair for pair in self._foreign if name not in pair}
        if (counts := self._of_replica.pop(name, None)) is not None:
            log.info("replica %s has drained: %s", name, counts)

    def drain(self, name: str) -> None:
        """Begin to move requests from a replica that drains, or has little time left."""
        self._of_replica.setdefault(name, DrainCounts())
        self.look()

    def check_integrity(self) -> None:
        """Raise AssertionError unless each moving request is where its move says."""
        for request_id, request in self._table.requests.items():
            move = request.move
            if move is None:
                continue
            assert request.has_begun, f"{request_id} moves and has not begun"
            where = move.target if move.stage is MoveStage.ARRIVES else move.source
            assert request.replica == where, f"{request_id} is not where it is said to be"
            exported = move.size is not None and move.has_last
            assert exported == (move.stage is not MoveStage.LEAVES), f"{request_id} arrives before it has left"

    def _choose(self, request_id: str, request: TrackedRequest, source: str, outputs: Counter[str]) -> str | None:
        """Choose a replica and count the request as sent there; None, with the reason noted, if it stays."""
        refused = set() if request.move is None else request.move.refused
        taking = [
            name for name, replica in self._table.replicas.items() if replica.accepts_requests and name not in refused
        ]
        alike = [name for name in taking if (source, name) not in self._foreign]
        room = [name for name in alike if self._has_room(name, request, outputs[name])]
        source_replica = self._table.replicas.get(source)
        if source_replica is not None and source_replica.is_deadline_near:
            room = room or alike  # waiting for room is better than being cut off
        if self._size(request) > MAX_MOVE_BYTES:
            request.stays, request.must_stay = "too_large", True
        elif not room:
            request.stays = "no_room" if alike else "foreign" if taking else "refused" if refused else "no_replica"
        else:
            self._table.router.note_end(request_id)
            choice = self._table.placed.choose(request_id, request.submitted, room)
            self._table.router.note_first_token(request_id)  # its prompt is computed already
            return None if choice is None else choice.name
        return None

    def _send_on(self, request_id: str, request: TrackedRequest, move: RequestMove) -> None:
        """Have another replica fetch an exported request, or the source import it again if there is none."""
        if move.size is None or not move.has_last:
            return
        if move.size > MAX_MOVE_BYTES:
            request.must_stay, request.stays, move.target = True, "too_large", None
        elif move.stage is MoveStage.ARRIVES or not self._takes(move.target):
            move.target = self._choose(request_id, request, move.source, self._outputs())
        replicas, guide = self._table.replicas, request.submitted.params.guide
        if move.target is None:
            self._table.router.note_end(request_id)
            request.replica, move.stage = move.source, MoveStage.RETURNS
            replicas[move.source].link.send(CancelMove(request_id, guide))
        else:
            request.replica, move.stage = move.target, MoveStage.ARRIVES
            replicas[move.target].link.send(AcceptMove(request_id, move.source, move.size, guide))

    def _take_arrival(self, reply: EngineReply, request: TrackedRequest, move: RequestMove) -> None:
        """Handle the other replica's answer to an import."""
        request_id, error = reply.call_id, reply.error
        assert move.target is not None
        assert move.size is not None
        if error is None:
            request.move, request.stays = None, None
            self._release(request_id, move)
            for counts in (self.counts, self._of_replica.get(move.source)):
                if counts is not None:
                    counts.moved, counts.moved_bytes = counts.moved + 1, counts.moved_bytes + move.size
            return
        if move.source not in self._table.replicas:
            self._lose(request_id)  # no replica has the request any more
            return
        move.refused.add(move.target)
        if isinstance(error, ForeignExport):
            self._foreign.add((move.source, move.target))
        log.warning("replica %s does not continue a request of %s: %s", move.target, move.source, error)
        self._send_on(request_id, request, move)
        if (
            request.move is not None
            and request.move.stage is MoveStage.RETURNS
            and not isinstance(error, ForeignExport)
        ):
            self._stay(request, "refused" if isinstance(error, RequestError) else "failed")

    def _stay(self, request: TrackedRequest, reason: str, error: Exception | None = None) -> None:
        """Note that a request is computed to its end where it is."""
        request.stays, request.must_stay = reason, True
        if error is not None:
            log.warning("a request of replica %s could not be exported: %s", request.replica, error)

    def _note_stayed(self, name: str, request: TrackedRequest) -> None:
        reason = request.stays or "ended"
        for counts in (self.counts, self._of_replica.get(name)):
            if counts is not None:
                counts.stayed[reason] += 1

    def _release(self, request_id: str, move: RequestMove) -> None:
        if move.source in self._table.replicas:
            self._table.replicas[move.source].link.send(CommitMove(request_id))

    def _takes(self, name: str | None) -> bool:
        return name in self._table.replicas and self._table.replicas[name].accepts_requests

    def _outputs(self) -> Counter[str]:
        """Return the number of outputs that each replica has, including those on their way to it."""
        outputs: Counter[str] = Counter()
        for request in self._table.requests.values():
            where = request.replica if request.move is None or request.move.target is None else request.move.target
            if where is not None:
                outputs[where] += request.submitted.params.n
        return outputs

    def _has_room(self, name: str, request: TrackedRequest, num_outputs: int) -> bool:
        """Return whether a replica could run a request at once, by its last report: batch rows, blocks and slots."""
        replica, count = self._table.replicas[name], request.submitted.params.n
        stats = {} if replica.observation is None else replica.observation.stats
        # Its last report counts requests of other fronts too.
        busy = max(num_outputs, stats.get("running", 0) + stats.get("waiting", 0))
        if busy + count > replica.max_num_seqs:
            return False
        cache = stats.get("cache")
        if cache is None:
            return True
        memory = self._table.plan.memory
        needs = {"slots": count * memory.slots_per_request}
        if memory.kv_block:
            needs["blocks"] = self._blocks(request)
        if memory.window_block:
            needs["window_blocks"] = self._window_blocks(request)
        return all(need <= cache[f"{kind}_total"] - cache[f"{kind}_used"] for kind, need in needs.items())

    def _blocks(self, request: TrackedRequest) -> int:
        """Return the number of blocks of a request, if its outputs share none."""
        size, prompt = self._table.plan.settings.block_size, len(request.submitted.prompt_token_ids)
        # Each output has one more block, which is not full.
        return (prompt * request.submitted.params.n + request.num_gained) // size + request.submitted.params.n

    def _window_blocks(self, request: TrackedRequest) -> int:
        """Return the number of window blocks of a request, if its outputs share none."""
        plan = self._table.plan
        rules = SlidingWindowSpec(plan.memory.sliding_window, plan.settings.block_size, step_tokens=1)
        count = request.submitted.params.n
        return rules.blocks_needed(-(-self._blocks(request) // count), count)

    def _size(self, request: TrackedRequest) -> int:
        """Return an upper bound on the bytes of a request's blocks and states."""
        memory = self._table.plan.memory
        states = memory.state_slot if memory.slots_per_request else 0
        window_blocks = self._window_blocks(request) * memory.window_block if memory.window_block else 0
        return self._blocks(request) * memory.kv_block + window_blocks + request.submitted.params.n * states
