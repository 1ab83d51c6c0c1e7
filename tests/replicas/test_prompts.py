"""What the router is asked about a request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ostinato.config import EngineConfig
from ostinato.kv_cache.prefix_index import BlockHashes
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect, find_device
from ostinato.plan.plan import make_plan
from ostinato.replicas.placement import AnswerLengths, ConversationTracker, hash_prompt, predict_times
from tests.support.scheduler_steps import BLOCK, make_caching_scheduler, runner_for, serve, text


def chain(tokens: Sequence[int], salt: str | None = None) -> BlockHashes:
    return hash_prompt(tokens, BLOCK, salt)


def test_the_chain_is_the_one_that_a_replica_has_of_the_same_prompt() -> None:
    scheduler = make_caching_scheduler()
    request = serve(scheduler, runner_for(scheduler), text(30), cache_salt="one")
    assert request.block_hashes is not None
    assert request.block_hashes.keys[: 30 // BLOCK] == chain(text(30), "one").keys
    assert chain(text(30)).keys != chain(text(30), "one").keys


def test_a_turn_belongs_to_the_conversation_that_it_goes_on_from() -> None:
    conversations = ConversationTracker()
    first = conversations.session(chain(text(30)))
    assert conversations.session(chain(text(30))) == first, "the same prompt again"
    assert conversations.session(chain(text(50))) == first
    assert conversations.session(chain(text(70))) == first
    other = conversations.session(chain(text(30, 1)))
    assert other != first
    assert conversations.session(chain(text(50), "a salt")) not in (first, other)


def test_a_prompt_without_a_full_block_is_a_conversation_of_its_own() -> None:
    conversations = ConversationTracker()
    short = chain(text(BLOCK - 1))
    assert conversations.session(short) != conversations.session(short)


def test_so_many_conversations_are_remembered_those_of_last() -> None:
    conversations = ConversationTracker(max_sessions=2)
    sessions = [conversations.session(chain(text(30, seed))) for seed in range(3)]
    assert conversations.session(chain(text(30, 2))) == sessions[2]
    assert conversations.session(chain(text(30, 0))) != sessions[0]


def test_the_length_of_an_answer_is_expected_from_those_before_and_never_above_its_most() -> None:
    lengths = AnswerLengths()
    assert lengths.expected(None) == 0
    lengths.note(100)
    assert (lengths.expected(None), lengths.expected(40)) == (100, 40)
    for _ in range(1000):
        lengths.note(10)
    assert lengths.expected(None) == 10


def test_times_are_the_plans_and_without_them_flops_stand_for_both() -> None:
    config = EngineConfig(model="benchmarks/models/nemotron-h-8b")
    plan = make_plan(config, load_spec(config), find_device("h100-80gb"))
    times, per_output = predict_times(plan)
    prompt = plan.prediction.steps[-1]
    assert times.seconds(0, prompt.tokens_per_row) == pytest.approx(prompt.seconds)
    assert 0 < per_output < prompt.seconds
    config = EngineConfig(model="demo", threads=1)
    plan = make_plan(config, load_spec(config), detect("cpu", environ={}))
    times, per_output = predict_times(plan)
    assert (
        per_output
        == times.seconds(0, 1)
        == plan.state_cache.prefill_flops.per_token + (plan.state_cache.prefill_flops.per_pair)
    )
