import pytest

from ostinato.engine.process.admission import LONGEST_RETRY, WINDOW, Admission, Overloaded
from ostinato.errors import RequestError


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def admission(clock):
    return Admission(max_running=2, max_waiting=3, clock=lambda: clock[0])


def refused(admission, count=1):
    with pytest.raises(Overloaded) as caught:
        admission.enter(count)
    return caught.value.retry_after


def test_as_many_are_taken_as_may_run_and_wait(admission):
    for _ in range(5):
        admission.enter(1)
    refused(admission)
    admission.leave(1)
    admission.enter(1)
    assert admission.num_unfinished == 5


def test_who_can_never_be_taken_is_told_so(admission):
    with pytest.raises(RequestError) as caught:
        admission.enter(6)
    assert not isinstance(caught.value, Overloaded)


def test_one_that_was_turned_away_is_to_come_again_when_enough_have_ended_at_the_rate_of_late(admission, clock):
    for _ in range(10):  # one every four seconds
        admission.enter(1)
        clock[0] += 4
        admission.leave(1)
    admission.enter(5)
    assert refused(admission) in (4, 5)
    assert refused(admission, 3) in (11, 12, 13)


def test_without_a_known_rate_it_is_a_second_and_never_more_than_the_longest(admission, clock):
    admission.enter(5)
    assert refused(admission) == 1
    admission.leave(2)
    clock[0] += WINDOW - 1
    admission.enter(2)
    assert 1 <= refused(admission, 5) <= LONGEST_RETRY


def test_what_was_refused_by_the_engine_does_not_count_as_ended(admission, clock):
    for _ in range(10):
        admission.enter(1)
        clock[0] += 1
        admission.give_back(1)
    assert admission.drain_rate() is None


def test_a_client_has_its_share_and_leaves_the_rest_to_others(clock):
    admission = Admission(2, 6, clock=lambda: clock[0], max_per_client=2)
    admission.enter(2, "a")
    with pytest.raises(Overloaded, match="max_requests_per_client") as caught:
        admission.enter(1, "a")
    assert caught.value.retry_after == 1
    with pytest.raises(RequestError) as never:
        admission.enter(3, "b")
    assert not isinstance(never.value, Overloaded)
    admission.enter(2, "b")
    admission.enter(1)  # nobody's
    assert (admission.num_unfinished, admission.num_clients) == (5, 2)
    admission.leave(1, "a")
    admission.enter(1, "a")
    admission.give_back(2, "a")
    admission.leave(2, "b")
    assert admission.num_clients == 0
