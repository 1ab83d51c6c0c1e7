import pytest

from ostinato.serve.body_workers.pool import MAX_CLIENTS, ClientQuota
from ostinato.serve.http.api_errors import ApiError


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def budgets(clock):
    return ClientQuota(10.0, 1000, clock=lambda: clock[0])


@pytest.mark.parametrize(("seconds", "pixels", "told"), [(12.5, 0, "client_seconds"), (0, 1250, "client_pixels")])
def test_who_has_used_more_than_his_budget_waits_until_it_is_back(budgets, clock, seconds, pixels, told):
    budgets.check("a")
    budgets.charge("a", seconds, pixels)
    with pytest.raises(ApiError, match=told) as caught:
        budgets.check("a")
    assert caught.value.status == 429
    wait = int(caught.value.headers["Retry-After"])
    assert wait == 15
    budgets.check("b")
    clock[0] += wait + 0.01
    budgets.check("a")


def test_those_who_use_little_are_never_refused(budgets, clock):
    for _ in range(100):
        budgets.check("a")
        budgets.charge("a", 1.0, 100)
        clock[0] += 6.1


def test_a_bounded_number_of_clients_is_remembered_and_the_heaviest_is_one_of_them(budgets):
    budgets.charge("heavy", 20.0, 0)
    for i in range(3 * MAX_CLIENTS):
        budgets.charge(f"client {i}", 0.001, 0)
    assert len(budgets._uses) <= MAX_CLIENTS + 1
    with pytest.raises(ApiError):
        budgets.check("heavy")
