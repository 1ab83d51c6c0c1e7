"""Tables of a front: its replicas and the requests that it has given them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ostinato.engine.process.engine_messages import EngineStarted, StatsSnapshot, SubmitRequest
from ostinato.plan.plan import Plan
from ostinato.replicas.placement import ReplicaPlacement
from ostinato.replicas.replica_messages import ReplicaLink
from ostinato.replicas.router import ReplicaRouter


@dataclass
class ReplicaState:
    """A replica that has said Hello."""

    link: ReplicaLink
    max_num_seqs: int
    observation: StatsSnapshot | None = None
    accepts_requests: bool = True
    is_deadline_near: bool = False
    """True if it drains and its remaining requests will soon be cut off."""
    last_settled: float = 0.0


class MoveStage(Enum):
    """Stage of a migration."""

    LEAVES = "leaves"
    """The source exports the request."""
    ARRIVES = "arrives"
    """The source keeps the export, and the target fetches it."""
    RETURNS = "returns"
    """The source imports the request again."""


@dataclass
class RequestMove:
    """Migration of a request from a replica that drains to another one."""

    source: str
    target: str | None
    """Name of the replica that imports the request; None if the source itself does."""
    stage: MoveStage = MoveStage.LEAVES
    size: int | None = None
    """Bytes that the source keeps; None until it has exported them."""
    has_last: bool = False
    """True if the last delta of the source is here."""
    refused: set[str] = field(default_factory=set)
    """Replicas that refused to import the request."""


@dataclass
class TrackedRequest:
    """An unfinished request and its replica; None while no replica takes it.

    During an import, it is the replica that fetches the request.
    """

    submitted: SubmitRequest
    replica: str | None = None
    is_added: bool = False
    """True if a replica has said that the request can be served."""
    has_begun: bool = False
    """True once the request has an output delta."""
    num_gained: int = 0
    """Number of tokens of all its outputs."""
    move: RequestMove | None = None
    stays: str | None = None
    """Reason why it has not moved from a replica that drains, at the last look."""
    must_stay: bool = False
    """True if the reason is final."""


@dataclass
class RequestTable:
    """Request table: replicas by name, and requests by id."""

    replicas: dict[str, ReplicaState] = field(default_factory=dict)
    requests: dict[str, TrackedRequest] = field(default_factory=dict)
    placement: ReplicaPlacement | None = None
    """The placement; None until the first replica has joined."""

    @property
    def placed(self) -> ReplicaPlacement:
        """The placement, once there has been a replica."""
        assert self.placement is not None, "there is one from the first replica on"
        return self.placement

    @property
    def router(self) -> ReplicaRouter:
        return self.placed.router

    @property
    def plan(self) -> Plan:
        """Plan of the replicas."""
        return self.placed.plan

    @property
    def taking(self) -> dict[str, ReplicaLink]:
        """Replicas that take new requests."""
        return {name: replica.link for name, replica in self.replicas.items() if replica.accepts_requests}


def agrees(one: EngineStarted, other: EngineStarted) -> bool:
    """Return whether two replicas give the same answers and the same hashes."""
    names = ("model", "revision", "tokenizer", "max_model_len", "block_size", "dtype", "quantization", "seed")
    same = all(getattr(one.plan.settings, name) == getattr(other.plan.settings, name) for name in names)
    return same and one.vocab_size == other.vocab_size
