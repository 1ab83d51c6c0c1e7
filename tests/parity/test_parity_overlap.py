"""One step ahead changes nothing: whether requests come together, in chunks, are preempted, aborted or end unforeseen,
they get the tokens and logits of transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from ostinato.plan.device.detect import detect
from ostinato.sampling.params import SamplingParams
from tests.support.checkpoints import random_prompt
from tests.support.parity import NEW, PROMPT, Case, decided_case, has_state, make_engine, serve_one_by_one

NAMES = ("nemotron_h_dense", "bamba", "falcon_h1", "granitemoehybrid", "jamba", "mamba2", "llama")


def overlap_engine(name: str, **settings: Any) -> EngineCore:
    return make_engine(name, overlap="on", max_num_batched_tokens=64, **settings)


def serve(engine: EngineCore, cases: list[Case], preempt_at: tuple[int, ...] = ()) -> None:
    """Those that are aborted have a step on its way."""
    serve_one_by_one(engine, cases, preempt_at, steps_between=5)
    usage = engine.scheduler.cache.usage()
    assert usage.blocks_used == usage.slots_used == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_step_ahead_gives_the_tokens_and_logits_of_the_oracle(name: str) -> None:
    engine = overlap_engine(name, **({"state_cache_mode": "align"} if has_state(name) else {}))
    cases = [decided_case(name, PROMPT), decided_case(name, 17)]
    serve(engine, cases)
    serve(engine, cases, preempt_at=(4, 11))
    stats = engine.stats()
    assert stats["steps_ahead"] > NEW
    assert stats["void_rows"] > 0
    assert stats["preemptions"] > 0
    assert stats["prefix_cache"]["cached_tokens"] > 0


# Random programs


def random_request(rng: random.Random, seed: int) -> tuple[list[int], SamplingParams]:
    """Of any kind: with stop tokens, penalties, a guide, several samples, log-probabilities."""
    prompt = random_prompt(rng.choice((3, 15, 16, 17, 40, 90)), rng.randrange(4))
    settings: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.9)),
        "seed": seed,
        "max_tokens": rng.randint(1, 40),
        "ignore_eos": True,
        "n": rng.choice((1, 1, 1, 2)),
        "stop_token_ids": rng.sample(range(131), 8) if rng.random() < 0.6 else [],
        "logprobs": rng.choice((None, None, 1)),
        **rng.choice(({}, {}, {}, {}, {"presence_penalty": 0.6}, {"min_tokens": 3}, {"top_k": 20, "top_p": 0.9})),
    }
    return prompt, SamplingParams(**settings)


def run_program(engine: EngineCore, seed: int) -> list[Any]:
    """What each of some requests got, which come, are aborted and lose their memory at random."""
    rng = random.Random(seed)
    requests = [random_request(rng, number) for number in range(10)]
    aborted = {f"{seed}/{number}" for number in range(10) if rng.random() < 0.2}
    outputs: dict[str, RequestOutput] = {}
    number = 0
    while number < len(requests) or engine.has_unfinished:
        if number < len(requests) and rng.random() < 0.3:
            id = engine.add_request(*requests[number], request_id=f"{seed}/{number}")
            output = engine.output(id)
            assert output is not None
            outputs[id] = output
            number += 1
        engine.step()
        if outputs and rng.random() < 0.06:
            engine.preempt(rng.choice(sorted(outputs)))
        if outputs and rng.random() < 0.1:
            chosen = rng.choice(sorted(outputs))
            if chosen in aborted:
                engine.abort(chosen)
        engine.scheduler.check_integrity()
    usage = engine.scheduler.cache.usage()
    assert usage.blocks_used == usage.slots_used == 0
    return [
        [(each.token_ids, each.finish_reason, each.stop_reason) for each in outputs[id].outputs]
        for id in sorted(outputs)
        if id not in aborted
    ]


@pytest.mark.parametrize("name", ["nemotron_h_dense", "llama"])
def test_random_programs_give_the_tokens_of_steps_in_turn(name: str) -> None:
    if not detect("cpu").native.isa:
        pytest.skip("without native kernels, the same request may have other tokens in another batch")
    settings = {"max_num_seqs": 3, "cache_memory": "1MiB", "deterministic": True}
    in_turn, ahead = (make_engine(name, overlap=overlap, **settings) for overlap in ("off", "on"))
    for seed in range(3):
        assert run_program(ahead, seed) == run_program(in_turn, seed)
    stats = ahead.stats()
    assert stats["steps_ahead"] > 50
    assert stats["void_rows"] > 0
    assert stats["preemptions"] > 0
    assert stats["steps_not_ahead"]["token"] > 0
