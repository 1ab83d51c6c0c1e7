import pytest

from ostinato.engine.process.queue_limit import MAX_RETRY_SECONDS, RATE_WINDOW_SECONDS, QueueLimit
from ostinato.errors import Overloaded, RequestError


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def admission(clock):
    return QueueLimit(max_running=2, max_waiting=3, clock=lambda: clock[0])


def refused(admission, count=1):
    with pytest.raises(Overloaded) as caught:
        admission.acquire(count)
    return caught.value.retry_after


def test_as_many_are_taken_as_may_run_and_wait(admission):
    for _ in range(5):
        admission.acquire(1)
    refused(admission)
    admission.release(1)
    admission.acquire(1)
    assert admission.num_unfinished == 5


def test_who_can_never_be_taken_is_told_so(admission):
    with pytest.raises(RequestError) as caught:
        admission.acquire(6)
    assert not isinstance(caught.value, Overloaded)


def test_one_that_was_turned_away_is_to_come_again_when_enough_have_ended_at_the_rate_of_late(admission, clock):
    for _ in range(10):  # one every four seconds
        admission.acquire(1)
        clock[0] += 4
        admission.release(1)
    admission.acquire(5)
    assert refused(admission) in (4, 5)
    assert refused(admission, 3) in (11, 12, 13)


def test_without_a_known_rate_it_is_a_second_and_never_more_than_the_longest(admission, clock):
    admission.acquire(5)
    assert refused(admission) == 1
    admission.release(2)
    clock[0] += RATE_WINDOW_SECONDS - 1
    admission.acquire(2)
    assert 1 <= refused(admission, 5) <= MAX_RETRY_SECONDS


def test_what_was_refused_by_the_engine_does_not_count_as_ended(admission, clock):
    for _ in range(10):
        admission.acquire(1)
        clock[0] += 1
        admission.cancel(1)
    assert admission.drain_rate() is None


def test_a_client_has_its_share_and_leaves_the_rest_to_others(clock):
    admission = QueueLimit(2, 6, clock=lambda: clock[0], max_per_client=2)
    admission.acquire(2, "a")
    with pytest.raises(Overloaded, match="max_requests_per_client") as caught:
        admission.acquire(1, "a")
    assert caught.value.retry_after == 1
    with pytest.raises(RequestError) as never:
        admission.acquire(3, "b")
    assert not isinstance(never.value, Overloaded)
    admission.acquire(2, "b")
    admission.acquire(1)  # nobody's
    assert (admission.num_unfinished, admission.num_clients) == (5, 2)
    admission.release(1, "a")
    admission.acquire(1, "a")
    admission.cancel(2, "a")
    admission.release(2, "b")
    assert admission.num_clients == 0
