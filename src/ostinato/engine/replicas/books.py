"""What a front keeps of its replicas and of the requests that it has given them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ostinato.engine.process.messages import Observation, Started, Submit
from ostinato.engine.replicas.messages import Link
from ostinato.engine.replicas.placement import Placement
from ostinato.plan.plan import Plan
from ostinato.replicas.router import Router


@dataclass
class Replica:
    """One that has said Hello."""

    link: Link
    max_num_seqs: int
    observation: Observation | None = None
    takes_new: bool = True
    is_short_of_time: bool = False
    """Whether it drains, and what it has is soon cut off."""
    last_settled: float = 0.0


class Stage(Enum):
    """How far a move has come."""

    LEAVES = "leaves"
    """The source exports it."""
    ARRIVES = "arrives"
    """The source keeps it, and the target fetches it."""
    RETURNS = "returns"
    """The source takes it back."""


@dataclass
class Move:
    """A request on its way from a replica that drains to another one."""

    source: str
    target: str | None
    """None: it is taken back."""
    stage: Stage = Stage.LEAVES
    size: int | None = None
    """Bytes that the source keeps; None until it has exported them."""
    has_last: bool = False
    """Whether the last gain of the source is here."""
    refused: set[str] = field(default_factory=set)
    """Replicas that do not go on with it."""


@dataclass
class Request:
    """One that has not ended. `replica`: where it is; None while none takes it. Of one that arrives, it is the replica
    that fetches it."""

    asked: Submit
    replica: str | None = None
    is_added: bool = False
    """Whether a replica has said that it can be served."""
    has_begun: bool = False
    """Whether it has gained something."""
    num_gained: int = 0
    """Tokens, of all its outputs."""
    move: Move | None = None
    stays: str | None = None
    """Why it has not moved from a replica that drains, when that was last looked at."""
    must_stay: bool = False
    """Whether that is not looked at again."""


@dataclass
class Books:
    """By name, and by id."""

    replicas: dict[str, Replica] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    placement: Placement | None = None
    """None until the first replica has come."""

    @property
    def placed(self) -> Placement:
        """Where there has been a replica."""
        assert self.placement is not None, "there is one from the first replica on"
        return self.placement

    @property
    def router(self) -> Router:
        return self.placed.router

    @property
    def plan(self) -> Plan:
        """Of the replicas."""
        return self.placed.plan

    @property
    def taking(self) -> dict[str, Link]:
        """The replicas that take new requests."""
        return {name: each.link for name, each in self.replicas.items() if each.takes_new}


def agrees(one: Started, other: Started) -> bool:
    """Whether two replicas give the same answers and the same hashes."""
    names = ("model", "revision", "tokenizer", "max_model_len", "block_size", "dtype", "quantization", "seed")
    same = all(getattr(one.plan.settings, name) == getattr(other.plan.settings, name) for name in names)
    return same and one.vocab_size == other.vocab_size
