"""An engine on a tiny checkpoint, and ways to run requests through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato import EngineConfig, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from tests.support.checkpoints import checkpoint, random_prompt

NAME = "nemotron_h"
PROMPT = random_prompt(40, seed=5)


def make_engine(name: str = NAME, **settings: Any) -> EngineCore:
    defaults = {"max_model_len": 96, "max_num_seqs": 4, "cache_memory": "8MiB", "threads": 1, "dtype": "float32"}
    return EngineCore(EngineConfig(model=str(checkpoint(name)), **(defaults | settings)))


def assert_empty(engine: EngineCore) -> None:
    """No request is left, and no memory is held."""
    assert not engine.has_unfinished
    engine.scheduler.check_integrity()
    usage = engine.scheduler.cache.usage()
    assert usage.blocks_used == usage.slots_used == 0


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **changes})


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "seed": 7, **changes})


def run(engine: EngineCore) -> dict[str, RequestOutput]:
    """Steps until nothing is left."""
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check_integrity()
    assert_empty(engine)
    return done


def complete(engine: EngineCore, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    request_id = engine.add_request(prompt, params)
    output = run(engine)[request_id]
    assert output.error is None, output.error
    return output


def tokens_of(engine: EngineCore, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[int]:
    return complete(engine, prompt, params).outputs[0].token_ids
