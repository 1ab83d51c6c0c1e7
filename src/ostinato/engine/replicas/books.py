"""What a front keeps of its replicas and of the requests that it has given them."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.engine.process.messages import Observation, Started, Submit
from ostinato.engine.replicas.messages import Link


@dataclass
class Replica:
    """One that has said Hello."""

    link: Link
    max_num_seqs: int
    observation: Observation | None = None
    takes_new: bool = True
    last_settled: float = 0.0


@dataclass
class Request:
    """One that has not ended. `replica`: where it is; None while none takes it."""

    asked: Submit
    replica: str | None = None
    is_added: bool = False
    """Whether a replica has said that it can be served."""
    has_begun: bool = False
    """Whether it has gained something."""


def agrees(one: Started, other: Started) -> bool:
    """Whether two replicas give the same answers and the same hashes."""
    names = ("model", "revision", "tokenizer", "max_model_len", "block_size", "dtype", "quantization", "seed")
    same = all(getattr(one.plan.settings, name) == getattr(other.plan.settings, name) for name in names)
    return same and one.vocab_size == other.vocab_size
