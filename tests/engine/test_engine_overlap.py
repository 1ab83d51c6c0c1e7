"""One step ahead in an engine: what waits, what is void and counted, and what becomes of a step that fails."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.errors import ConfigError, Remedy
from ostinato.sampling.guide import Guide
from ostinato.scheduler.batch import Batch
from tests.support.checkpoints import random_prompt
from tests.support.engines import greedy, make_engine, run

PROMPT = random_prompt(20, seed=3)


def ahead(**settings: Any) -> EngineCore:
    return make_engine(overlap="on", **settings)


def fail_at(monkeypatch: pytest.MonkeyPatch, engine: EngineCore, step: int) -> None:
    """The engine's `step`-th step breaks down when it is computed."""
    launch, count = engine.runner.launch, 0

    def failing(batch: Batch, before: Any = None) -> Any:
        nonlocal count
        count += 1
        if count == step:
            raise ValueError("broken")
        return launch(batch, before)

    monkeypatch.setattr(engine.runner, "launch", failing)


def test_steps_of_decoding_requests_are_scheduled_ahead_and_known_ends_make_no_row_void() -> None:
    engine = ahead()
    engine.add_request(PROMPT, greedy(max_tokens=12))
    run(engine)
    stats = engine.stats()
    assert (stats["steps"], stats["steps_ahead"], stats["void_rows"]) == (12, 11, 0)


def test_an_unforeseen_end_makes_the_row_ahead_void_and_leaves_no_memory_behind() -> None:
    plain = make_engine()
    plain.add_request(PROMPT, greedy(), request_id="a")
    [output] = run(plain)["a"].outputs
    stop = output.token_ids[5]
    engine = ahead()
    engine.add_request(PROMPT, greedy(stop_token_ids=[stop]), request_id="a")
    [ended] = run(engine)["a"].outputs
    assert ended.token_ids == output.token_ids[: output.token_ids.index(stop) + 1]
    assert engine.stats()["void_rows"] == 1
    assert engine.stats()["cache"]["slots_used"] == engine.stats()["cache"]["blocks_used"] == 0


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.3}, {"min_tokens": 12}, {"guide": Guide(regex="[ab]{40}")}]
)
def test_requests_whose_choice_looks_back_wait_for_their_token(params: dict[str, Any]) -> None:
    engine = EngineCore(EngineConfig(model="demo", overlap="on", threads=1, cache_memory="16MiB", max_num_seqs=2))
    engine.add_request("How many?", greedy(ignore_eos=False, **params))
    run(engine)
    stats = engine.stats()
    assert stats["steps_ahead"] == 0
    assert stats["steps_not_ahead"]["token"] > 5


@pytest.mark.parametrize("step", [1, 4])
def test_a_failed_step_ends_its_requests_and_the_step_ahead_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    engine = ahead(max_num_seqs=1)
    fail_at(monkeypatch, engine, step)
    for request_id in ("a", "b"):
        engine.add_request(PROMPT, greedy(), request_id=request_id)
    done = run(engine)
    assert str(done["a"].error) == "broken"
    assert done["b"].error is None
    assert len(done["b"].outputs[0].token_ids) == 12
    assert engine.stats()["failed_steps"] == 1
    engine.scheduler.check_integrity()


def test_an_id_can_be_used_again_while_a_void_row_of_it_is_on_its_way() -> None:
    engine = ahead()
    engine.add_request(PROMPT, greedy(max_tokens=100), request_id="other")
    engine.add_request(PROMPT, greedy(max_tokens=100), request_id="a")
    for _ in range(4):
        engine.step()
    engine.abort("a")
    assert engine.scheduler.is_memory_in_use("a")
    engine.add_request(PROMPT, greedy(max_tokens=3), request_id="a")
    assert len(run(engine)["a"].outputs[0].token_ids) == 3


def test_overlap_with_speculation_is_refused_with_what_works_and_auto_says_why_it_is_off() -> None:
    with pytest.raises(ConfigError, match="set overlap to off or auto") as caught:
        ahead(speculative="ngram:2")
    assert Remedy("overlap", "off") in caught.value.remedies
    [decision] = [each for each in make_engine().plan.decisions if each.topic == "overlap"]
    assert (decision.requested, decision.effective) == ("auto", "off")
