"""The trial of a guide in a worker: a process that may die compiles it first, within limits of time and memory."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ostinato.sampling.grammar import STACK_BYTES
from ostinato.sampling.guide import Guide
from ostinato.serve.http.json_bodies import Body


class GuideTrial(Body):
    """A guide as a body that a worker reads; preparing it is the trial."""

    guide: str
    """Fields of Guide as JSON, which has been checked."""

    def prepare(self, work: Any) -> None:
        """Compile the guide and take its first tokens. RequestError if that cannot be done."""
        with _room_for_a_stack():
            work.grammars.try_out(Guide.model_construct(**json.loads(self.guide)))


@contextmanager
def _room_for_a_stack() -> Iterator[None]:
    """Allow the addresses of the stack that a guide is compiled on, most of which stay unused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft < 0:
        yield
        return
    more = soft + STACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (more if hard < 0 else min(more, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
