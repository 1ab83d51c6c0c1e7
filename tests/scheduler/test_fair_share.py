"""Waiting requests of several clients take turns."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from ostinato.scheduler.request import Request, StopConditions
from ostinato.scheduler.request_queues import Client, FairShare, RequestQueues, weighted_share


def request(name, client, priority=0):
    return Request(name, [1], StopConditions(1), priority=priority, client=client)


def arrived(*requests, by_priority=False):
    queues = RequestQueues()
    for each in requests:
        queues.add(each, by_priority)
    return queues


def order(queues):
    return [each.request_id for each in queues.waiting]


def test_one_with_many_outputs_waits_behind_the_first_of_each_other_client():
    many = [request(f"many/{i}", "many") for i in range(16)]
    queues = arrived(*many, request("b0", "b"), request("c0", "c"), request("b1", "b"))
    assert order(queues)[:6] == ["many/0", "b0", "c0", "many/1", "b1", "many/2"]


def test_the_requests_of_one_client_or_of_none_are_served_as_they_come():
    for client in (None, "a"):
        assert order(arrived(*(request(str(i), client) for i in range(20)))) == [str(i) for i in range(20)]


def test_who_comes_later_does_not_wait_for_turns_that_have_passed_nor_get_them_back():
    queues = arrived(*(request(f"a{i}", "a") for i in range(6)))
    for _ in range(3):
        queues.start(queues.next_waiting())
    queues.add(request("b0", "b"), False)
    queues.add(request("b1", "b"), False)
    # The turn of a2, which has begun, is the present one.
    assert order(queues) == ["b0", "a3", "b1", "a4", "a5"]
    queues.check_integrity()


def test_priority_comes_before_turns():
    queues = arrived(request("a0", "a", 1), request("a1", "a", 0), request("b0", "b", 1), by_priority=True)
    assert order(queues) == ["a1", "a0", "b0"] or order(queues) == ["a1", "b0", "a0"]


@given(st.lists(st.integers(0, 5), max_size=200), st.integers(0, 5))
def test_nobody_waits_for_more_than_one_of_each_other_client_before_his_first(clients, last):
    queues = arrived(*(request(str(i), client) for i, client in enumerate(clients) if client != last))
    queues.add(request("last", last), False)
    before = [each.client for each in queues.waiting[: order(queues).index("last")]]
    assert len(set(before)) == len(before)


def test_clients_whose_turns_have_passed_are_forgotten():
    turns = FairShare()
    for i in range(10_000):
        turns.advance(turns.assign(f"client {i}") + 1)
    assert turns.num_known <= 65


def test_a_client_of_weight_three_is_served_three_times_for_once_of_another():
    heavy, light = Client("heavy", 3), Client("light")
    arrivals = [request(f"{client}{i}", client) for i in range(12) for client in (light, heavy)]
    served = [name[:5] for name in order(arrived(*arrivals))]
    for rounds in range(1, 4):
        assert served[: 4 * rounds].count("heavy") == 3 * rounds
    assert sorted(served) == ["heavy"] * 12 + ["light"] * 12


@given(st.integers(1, 1000), st.integers(0, 50))
def test_whatever_the_weight_another_client_waits_for_no_more_than_that_many_before_his_first(weight, num_before):
    heavy = Client("heavy", weight)
    queues = arrived(*(request(f"h{i}", heavy) for i in range(num_before)))
    queues.add(request("other", Client("other")), False)
    assert order(queues).index("other") <= min(weight, num_before)


def test_a_client_is_its_name_and_keeps_its_weight_on_its_way_to_another_process():
    sent = pickle.loads(pickle.dumps(Client("key a", 4)))
    assert sent == Client("key a", 2) == "key a"
    assert sent.weight == 4


def test_a_weight_multiplies_a_share_but_leaves_room_for_another():
    assert [weighted_share(10, 100, Client("a", weight)) for weight in (1, 2, 9, 10, 1000)] == [10, 20, 90, 90, 90]
    assert weighted_share(10, 12, Client("a", 5)) == 10
    assert weighted_share(10, 100, "a") == weighted_share(10, 100, None) == 10
