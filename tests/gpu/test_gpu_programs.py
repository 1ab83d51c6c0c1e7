"""Random programs on a GPU: requests come and go, are aborted and preempted, hit and are drafted for, in batches of any
make; each has the tokens that transformers gives it alone."""

from __future__ import annotations

import random

import pytest

from ostinato.engine.outputs import RequestOutput
from ostinato.verify.verify import Trial, has_passed, verify
from tests.support.checkpoints import checkpoint
from tests.support.gpu import fast_engine
from tests.support.parity import Case, add, check, decided_case, sampled_case

pytestmark = pytest.mark.gpu

PROGRAMS = [
    ("nemotron_h_head", "mtp:3"),
    ("nemotron_h_dense", None),
    ("falcon_h1", "ngram:2"),
    ("granitemoehybrid", None),
    ("qwen3", "ngram:3"),
]
LENGTHS = (3, 16, 47, 81, 150)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "speculative"), PROGRAMS)
def test_random_programs_give_every_request_its_own_tokens(
    name: str, speculative: str | None, seed: int, device: str
) -> None:
    rng = random.Random(f"{name} {seed}")
    pool = [*(decided_case(name, length) for length in LENGTHS), sampled_case(name, 47)]
    budget = rng.choice((33, 64, 256))
    engine = fast_engine(name, device, speculative=speculative, max_num_batched_tokens=budget, max_capture_size=budget)
    asked: list[tuple[Case, RequestOutput]] = []
    arrivals = [rng.randrange(120) for _ in range(10)]
    step = 0
    while engine.has_unfinished or step <= max(arrivals):
        for _ in range(arrivals.count(step)):
            case = rng.choice(pool)
            asked.append((case, add(engine, case, prompt_logprobs=rng.random() < 0.3)))
        under_way = [output.request_id for _, output in asked if not output.finished]
        if under_way and rng.random() < 0.04:
            engine.scheduler.preempt(rng.choice(under_way))
        if under_way and rng.random() < 0.02:
            engine.abort(rng.choice(under_way))
        engine.step()
        engine.scheduler.check_integrity()
        step += 1
    assert len(asked) == len(arrivals)
    for case, output in asked:
        if output.outputs[0].finish_reason != "abort":
            check(case, output)


@pytest.mark.parametrize("name", ["nemotron_h_head", "falcon_h1"])
def test_every_fast_path_is_verified(name: str, device: str) -> None:
    settings = {"model": str(checkpoint(name)), "device": device, "threads": 1, "capture": "lazy"}
    report = verify(settings, Trial(extent="quick", num_prompts=1, max_tokens=12), lambda *_: None)
    assert has_passed(report), report["summary"]
