"""The trial of a guide in a worker: a process that may die compiles it first, within limits of time and memory."""

from __future__ import annotations

import json
import resource
from typing import Any

from ostinato.sampling.guide import Guide
from ostinato.serve.http.json_bodies import Body


class GuideTrial(Body):
    """A guide as a body that a worker reads; preparing it is the trial."""

    guide: str
    """Fields of Guide as JSON, which has been checked."""

    def prepare(self, work: Any) -> None:
        """Compile the guide and take its first tokens. RequestError if that cannot be done."""
        # The hard limit has room for the stack of the compiling thread, which stays mapped after the thread has ended.
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        work.grammars.try_out(Guide.model_construct(**json.loads(self.guide)))
