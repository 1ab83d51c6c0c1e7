"""The encoder's budgets: what each of the four ways to give them comes to, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.json_io import from_plain, to_json_data
from ostinato.plan.encoder.budgets import EncoderBudgets, encoder_budgets
from ostinato.plan.encoder.encoder_plan import EncoderPlan

SIZES = st.integers(1, 20_000)
BUDGET_LISTS = st.lists(SIZES, min_size=1, max_size=6)
NO_SIZES = st.one_of(st.integers(max_value=0), st.booleans(), st.floats(), st.text(max_size=3))


def budgets(min_budget: int = 64, max_budget: int = 8192, **settings: Any) -> EncoderBudgets:
    return encoder_budgets(min_budget=min_budget, max_budget=max_budget, **settings)


def refusal(**settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        budgets(**settings)
    return error.value


def repaired(settings: dict[str, Any], error: ConfigError) -> list[EncoderBudgets]:
    """What each remedy of an error comes to."""
    names = {"encoder_token_budgets": "token_budgets", "encoder_max_items_per_batch": "max_items_per_batch"}
    return [budgets(**settings | {names[remedy.setting]: remedy.value}) for remedy in error.remedies]


@pytest.mark.parametrize(
    ("settings", "token_budgets", "items"),
    [
        # Neither is given.
        ({}, (64, 128, 256, 512, 1024, 2048, 4096, 8192), 64),
        ({"max_budget": 5000}, (64, 128, 256, 512, 1024, 2048, 4096, 5000), 64),
        ({"max_budget": 1024}, (64, 128, 256, 512, 1024), 16),
        ({"max_budget": 65}, (64, 65), 1),
        ({"max_budget": 64}, (64,), 1),
        ({"min_budget": 1, "max_budget": 1}, (1,), 1),
        ({"min_budget": 3, "max_budget": 100}, (3, 6, 12, 24, 48, 96, 100), 3),
        # The smallest image is larger than the largest that is served.
        ({"max_budget": 32}, (32,), 1),
        # Only the budgets are given.
        ({"token_budgets": [512, 2048]}, (512, 2048), 128),
        ({"token_budgets": [2048, 512, 2048]}, (512, 2048), 128),
        ({"token_budgets": [16, 4096]}, (16, 4096), 16),
        ({"token_budgets": [1]}, (1,), 1),
        ({"token_budgets": [16384], "max_budget": 4096}, (16384,), 64),
        ({"token_budgets": [512], "max_budget": 32}, (512,), 1),
        # Only the items are given.
        ({"max_items_per_batch": 1}, (64, 128, 256, 512, 1024, 2048, 4096, 8192), 1),
        ({"max_items_per_batch": 64}, (64, 128, 256, 512, 1024, 2048, 4096, 8192), 64),
        ({"max_items_per_batch": 100}, (100, 200, 400, 800, 1600, 3200, 6400, 8192), 100),
        ({"max_items_per_batch": 8192}, (8192,), 8192),
        ({"max_items_per_batch": 32, "max_budget": 32}, (32,), 32),
        # Both are given.
        ({"token_budgets": [64, 4096], "max_items_per_batch": 64}, (64, 4096), 64),
        ({"token_budgets": [7], "max_items_per_batch": 1}, (7,), 1),
        ({"token_budgets": [16384], "max_items_per_batch": 10_000}, (16384,), 10_000),
    ],
)
def test_each_way_to_give_the_settings_comes_to_budgets_that_hold_the_items(settings, token_budgets, items) -> None:
    assert budgets(**settings) == EncoderBudgets(token_budgets, items)


@pytest.mark.parametrize(
    ("settings", "remedies"),
    [
        ({"token_budgets": [64, 256], "max_items_per_batch": 65}, [64, [256]]),
        ({"token_budgets": [64, 256], "max_items_per_batch": 300}, [64, [300]]),
        ({"token_budgets": [8], "max_items_per_batch": 9, "max_budget": 8}, [8, [9]]),
        ({"max_items_per_batch": 8193}, [8192]),
        ({"max_items_per_batch": 33, "max_budget": 32}, [32]),
        ({"token_budgets": []}, [None]),
        ({"token_budgets": [0, 64, -1]}, [[64]]),
        ({"token_budgets": [True, 2.0, "64"]}, [None]),
        ({"token_budgets": 64}, [[64]]),
        ({"token_budgets": "64"}, [None]),
        ({"max_items_per_batch": 0}, [1]),
        ({"max_items_per_batch": True}, [1]),
        ({"max_items_per_batch": 2.0}, [1]),
    ],
)
def test_what_contradicts_itself_or_is_no_size_is_refused_with_values_that_work(settings, remedies) -> None:
    error = refusal(**settings)
    assert [remedy.value for remedy in error.remedies] == remedies
    assert "encoder_" in error.message
    for outcome in repaired(settings, error):
        assert outcome.max_items_per_batch <= min(outcome.token_budgets)


def test_a_contradiction_of_the_two_settings_has_a_remedy_for_each() -> None:
    error = refusal(token_budgets=[64, 256], max_items_per_batch=65)
    assert [remedy.setting for remedy in error.remedies] == ["encoder_max_items_per_batch", "encoder_token_budgets"]
    assert "lower encoder_max_items_per_batch to at most 64" in error.message


@pytest.mark.parametrize("name", ["min_budget", "max_budget"])
@pytest.mark.parametrize("value", [0, -64, True, 64.0, "64", None])
def test_the_model_s_own_sizes_are_checked_too(name: str, value: Any) -> None:
    assert f"{name} = {value!r}" in refusal(**{name: value}).message


@given(SIZES, SIZES, st.none() | BUDGET_LISTS, st.none() | SIZES)
def test_no_budget_is_smaller_than_the_items_however_they_are_given(smallest, largest, given_budgets, items) -> None:
    settings = {
        "min_budget": smallest,
        "max_budget": largest,
        "token_budgets": given_budgets,
        "max_items_per_batch": items,
    }
    try:
        outcome = budgets(**settings)
    except ConfigError as error:
        assert items is not None
        assert items > (min(given_budgets) if given_budgets else largest)
        outcomes = repaired(settings, error)
        assert len(outcomes) == (2 if given_budgets else 1)
        assert all(outcome.max_items_per_batch <= min(outcome.token_budgets) for outcome in outcomes)
        return
    assert 1 <= outcome.max_items_per_batch <= min(outcome.token_budgets)
    assert items in (None, outcome.max_items_per_batch)
    assert list(outcome.token_budgets) == sorted(set(outcome.token_budgets))
    if given_budgets is not None:
        assert set(outcome.token_budgets) == set(given_budgets)
        return
    assert outcome.token_budgets[-1] == largest
    assert outcome.token_budgets[0] == min(largest, max(smallest, items or 1))
    doubled = outcome.token_budgets[:-1]
    assert all(second == 2 * first for first, second in pairwise(doubled))
    assert not doubled or doubled[-1] < largest <= 2 * doubled[-1]


@given(BUDGET_LISTS, st.lists(NO_SIZES, min_size=1, max_size=3), NO_SIZES)
def test_what_is_no_whole_number_above_zero_is_never_taken_for_one(sizes, wrong, items) -> None:
    assert refusal(token_budgets=[*sizes, *wrong]).remedies[0].value == sorted(set(sizes))
    assert refusal(max_items_per_batch=items).remedies[0].value == 1


@pytest.mark.parametrize("given", [[1024, 64, 64], (64, 1024), "64,1024", {1024, 64}])
def test_the_config_takes_budgets_as_a_list_or_as_text(given: object) -> None:
    assert EngineConfig(encoder_token_budgets=given).encoder_token_budgets == (64, 1024)


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"encoder_token_budgets": [0, 64]}, [64]),
        ({"encoder_token_budgets": "64,-1"}, [64]),
        ({"encoder_token_budgets": [True]}, None),
        ({"encoder_token_budgets": [64.0]}, None),
        ({"encoder_token_budgets": []}, None),
        ({"encoder_max_items_per_batch": 0}, 1),
        ({"encoder_cache_tokens": 0}, 1),
        ({"video_pruning_rate": -0.1}, 0.0),
        ({"video_pruning_rate": 1.0}, 0.99),
        ({"video_pruning_rate": float("inf")}, 0.99),
    ],
)
def test_the_config_refuses_what_is_no_size_with_the_nearest_that_is(settings: dict, nearest: object) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**settings)
    [(name, _)] = settings.items()
    assert [(remedy.setting, remedy.value) for remedy in error.value.remedies] == [(name, nearest)]
    assert name in error.value.message
    EngineConfig(**{name: nearest})


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"encoder_max_items_per_batch": True}, "whole number"),
        ({"encoder_max_items_per_batch": 2.0}, "whole number"),
        ({"encoder_token_budgets": 64}, "not a list of whole numbers"),
        ({"encoder_token_budgets": "64,many"}, "encoder_token_budgets has 'many'"),
        ({"encoder_graph_mode": "full"}, "'auto', 'always' or 'none'"),
        ({"encoder_graph_mode": None}, "'auto', 'always' or 'none'"),
        ({"video_pruning_rate": "half"}, "number"),
        ({"video_pruning_rate": True}, "number"),
        ({"video_pruning_rate": float("nan")}, "at least 0"),
        ({"allow_remote_images": 1}, "true or false"),
    ],
)
def test_the_config_refuses_values_of_the_wrong_kind_with_what_is_possible(settings: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as error:
        EngineConfig(**settings)
    assert next(iter(settings)) in error.value.message


def test_images_have_defaults_that_leave_all_to_the_plan() -> None:
    config = EngineConfig()
    assert (config.encoder_token_budgets, config.encoder_max_items_per_batch) == (None, None)
    assert (config.encoder_graph_mode, config.encoder_cache_tokens) == ("auto", None)
    assert (config.video_pruning_rate, config.allow_remote_images) == (0.0, False)


def test_an_encoder_s_plan_is_read_back_as_it_was_written() -> None:
    plan = EncoderPlan((64, 1024), 16, 1024, "auto", "asked for", "tape", 4097, 4096, 4097 * 4096, 10, 20, 0.5, True)
    data = to_json_data(plan)
    assert data["token_budgets"] == [64, 1024]
    assert from_plain(EncoderPlan, data) == plan
