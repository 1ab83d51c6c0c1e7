"""Conversations over several replicas: what routing keeps of one engine's hits, and how evenly the work falls."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.replica_traffic import Traffic, at_random, power_of_two, simulate


@pytest.mark.parametrize("per_replica", [8, 20], ids=["light", "heavy"])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_conversations_keep_nine_tenths_of_one_engines_hits_and_no_replica_has_half_again_its_share(
    num_replicas: int, per_replica: int
) -> None:
    traffic = Traffic(sessions=per_replica * num_replicas)
    one = simulate(traffic, 1)
    routed = simulate(traffic, num_replicas)
    assert routed.hit_rate >= 0.9 * one.hit_rate
    assert routed.most_of_mean <= 1.5
    for pick in (at_random, power_of_two):
        assert simulate(traffic, num_replicas, pick).hit_rate < 0.9 * one.hit_rate


def test_the_router_promises_what_the_caches_then_give() -> None:
    outcome = simulate(Traffic(sessions=24), 2)
    assert outcome.promised_tokens == pytest.approx(outcome.cached_tokens, rel=0.05)


def test_one_conversation_stays_on_one_replica() -> None:
    outcome = simulate(Traffic(sessions=1, turns=12), 4)
    assert sorted(outcome.work)[:3] == [0, 0, 0]


def test_conversations_are_kept_together_though_replicas_tell_seldom() -> None:
    traffic = Traffic(sessions=24)
    assert simulate(traffic, 2, publish_seconds=20.0).hit_rate >= 0.9 * simulate(traffic, 1).hit_rate


def test_routing_imports_no_torch() -> None:
    code = "import sys, ostinato.replicas.router; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
