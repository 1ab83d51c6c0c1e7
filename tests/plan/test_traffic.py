"""Traffic: the histogram and its file, the padding of a ladder, and sizes that no other choice pads less."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError, Remedy
from ostinato.plan.traffic import LadderPadding, Traffic, choose_sizes, expected_padding

COUNTS = st.dictionaries(st.integers(1, 14), st.integers(0, 9), max_size=9)


def judged(counts: dict[int, int], ladder: tuple[int, ...]) -> tuple[int, int]:
    """(batches without a graph, padding), from the definition."""
    uncovered = padding = 0
    for size, count in counts.items():
        holding = [captured for captured in ladder if captured >= size]
        uncovered += 0 if holding else count
        padding += (min(holding) - size) * count if holding else 0
    return uncovered, padding


@settings(max_examples=400, deadline=None)
@given(COUNTS, st.integers(1, 5), st.none() | st.integers(1, 15))
def test_no_other_sizes_cover_more_or_pad_less(counts, num_sizes, largest) -> None:
    chosen = choose_sizes(counts, num_sizes, largest)
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) <= num_sizes
    # Every ladder of that length, not only those of sizes that occur.
    possible = range(1, min(14, largest or 14) + 1)
    ladders = [ladder for n in range(num_sizes + 1) for ladder in combinations(possible, n)]
    assert all(size in possible for size in chosen)
    assert judged(counts, chosen) == min(judged(counts, ladder) for ladder in ladders)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(1, 2000), st.integers(1, 10**6), min_size=1, max_size=60), st.integers(1, 12))
def test_the_bounded_search_finds_what_the_plain_recurrence_finds(counts, num_sizes) -> None:
    sizes = sorted(counts)
    infinity = float("inf")
    least: list[float] = [0.0] + [infinity] * len(sizes)
    for _ in range(min(num_sizes, len(sizes))):
        least = [infinity] + [
            min(
                least[cut] + sum((sizes[end - 1] - size) * counts[size] for size in sizes[cut:end])
                for cut in range(end)
            )
            for end in range(1, len(sizes) + 1)
        ]
    chosen = choose_sizes(counts, num_sizes)
    assert judged(counts, chosen) == (0, least[-1])


def test_one_size_is_the_largest_that_occurs_and_enough_sizes_pad_nothing() -> None:
    counts = {3: 100, 7: 1, 20: 5, 9: 0}
    assert choose_sizes(counts, 1) == (20,)
    assert choose_sizes(counts, 2) == (3, 20)
    assert choose_sizes(counts, 3) == choose_sizes(counts, 30) == (3, 7, 20)


def test_sizes_above_the_largest_are_not_chosen_and_the_rest_is_covered() -> None:
    assert choose_sizes({3: 1, 7: 1, 900: 10**6}, 1, largest=512) == (7,)
    assert choose_sizes({900: 5}, 4, largest=512) == ()
    assert choose_sizes({}, 4) == ()


@pytest.mark.parametrize("num_sizes", [0, -1])
def test_choosing_no_size_is_refused(num_sizes: int) -> None:
    with pytest.raises(ConfigError) as error:
        choose_sizes({3: 1}, num_sizes)
    assert error.value.remedies == (Remedy("num_sizes", 1),)


def test_padding_is_counted_where_a_graph_holds_the_batch() -> None:
    found = expected_padding({3: 2, 4: 1, 9: 5}, (4, 8))
    assert found == LadderPadding(covered=3, uncovered=5, padding=2)
    assert found.mean == pytest.approx(2 / 3)
    assert expected_padding({3: 2}, ()) == LadderPadding(0, 2, 0)
    assert expected_padding({}, (4,)).mean == 0.0


@given(COUNTS, st.lists(st.integers(1, 14), unique=True).map(sorted).map(tuple))
def test_padding_is_that_of_the_definition(counts, ladder) -> None:
    found = expected_padding(counts, ladder)
    assert (found.uncovered, found.padding) == judged(counts, ladder)
    assert found.covered + found.uncovered == sum(counts.values())


def some_traffic() -> Traffic:
    traffic = Traffic()
    for rows in (10, 2, 2):
        traffic.count(rows, 1, rows)
    traffic.count(2, 5, 10)
    for tokens in (300, 40, 300):
        traffic.count(3, None, tokens)
    return traffic


def test_steps_are_counted_by_rows_where_uniform_and_by_tokens_where_mixed() -> None:
    data = some_traffic().to_json()
    assert data == {"decode": {"1": {"2": 2, "10": 1}, "5": {"2": 1}}, "mixed": {"40": 1, "300": 2}}
    assert list(data["decode"]["1"]) == ["2", "10"]


def test_rows_weigh_as_many_tokens_as_each_has() -> None:
    assert some_traffic().row_weights() == {2: 2 + 5, 10: 1}


def test_traffic_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    some_traffic().save(path)
    loaded = Traffic.load(path)
    assert loaded == some_traffic()
    loaded.count(2, 5, 10)
    assert loaded.decode[5] == {2: 2}
    assert Traffic.from_json(Traffic().to_json()) == Traffic()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ([], "traffic"),
        ({"mixed": {}}, "decode"),
        ({"decode": {}, "mixed": {}, "extra": 1}, "extra"),
        ({"decode": [], "mixed": {}}, "decode = []"),
        ({"decode": {"0": {}}, "mixed": {}}, "decode has the key '0'"),
        ({"decode": {"1": 5}, "mixed": {}}, "decode.1 = 5"),
        ({"decode": {"1": {"x": 5}}, "mixed": {}}, "decode.1 has the key 'x'"),
        ({"decode": {"1": {"4": -5}}, "mixed": {}}, "decode.1.4 = -5"),
        ({"decode": {}, "mixed": {"8": 1.5}}, "mixed.8 = 1.5"),
        ({"decode": {}, "mixed": {"8": True}}, "mixed.8 = True"),
        ({"decode": {}, "mixed": {"08": 1}}, "mixed has the key '08'"),
        ({"decode": {}, "mixed": {"-8": 1}}, "mixed has the key '-8'"),
    ],
)
def test_data_of_another_form_is_refused_by_the_name_of_its_field(data, named) -> None:
    with pytest.raises(ConfigError) as error:
        Traffic.from_json(data)
    assert named in error.value.message


@pytest.mark.parametrize("content", [None, b"{", b"\xff", b'{"decode": {}, "mixed": {"8": null}}'])
def test_a_file_that_is_no_traffic_is_refused_by_its_name(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "traffic.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        Traffic.load(path)
    assert str(path) in error.value.message
