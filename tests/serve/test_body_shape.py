import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.serve.body_workers import json_complexity
from ostinato.serve.body_workers.json_complexity import (
    MAX_DEPTH,
    check_shape,
    check_small_body,
    fits_event_loop,
    shape_of,
)
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.json_bodies import Body, validated
from ostinato.serve.settings import ServeSettings

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.sampled_from(['"', "\\", '\\"', "[{,:}]", '\\\\"']),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def counted(value):
    """(depth, keys, values, empty lists and objects) of what was built."""
    if not isinstance(value, list | dict):
        return 0, 0, 1, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    depth, keys, values, empty = map(list, zip(*inner, strict=True)) if inner else ([0], [0], [0], [0])
    own = len(value) if isinstance(value, dict) else 0
    return 1 + max(depth), own + sum(keys), 1 + sum(values), sum(empty) + (not value)


@given(VALUES, st.booleans(), st.integers(1, 9))
def test_the_shape_of_a_body_is_that_of_what_json_makes_of_it(value, is_ascii, piece):
    body = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_complexity, "_PIECE", piece)  # where it is cut makes no difference
        found = shape_of(body)
    depth, keys, values, empty = counted(value)
    assert (found.depth, found.keys) == (depth, keys)
    assert found.values == values + empty


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        (b"[" * (MAX_DEPTH + 1), "nested_too_deep", "200 deep"),
        (b'{"a":' * (MAX_DEPTH + 1), "nested_too_deep", "200 deep"),
        (b'{"a":0,"b":0,"c":0}', "body_too_complex", "3 keys, and may have 2 (max_keys)"),
        (b"[1,2,3,4,5,6,7,8]", "body_too_complex", "9 values, and may have 8 (max_values)"),
    ],
)
def test_what_is_too_much_is_refused_by_the_name_of_its_limit(body, code, told):
    settings = ServeSettings(max_keys=2, max_values=8)
    for check in (check_shape, check_small_body):
        with pytest.raises(ApiError) as caught:
            check(body, settings)
        assert caught.value.code == code
        assert told in caught.value.message
    check_shape(b'{"a":"[[[[,,,,,,,,::::::","b":0}', settings)


def test_a_body_is_light_if_it_is_short_and_has_few_values():
    assert fits_event_loop(b'{"prompt":"x"}')
    assert not fits_event_loop(b" " * (json_complexity.LIGHT_BYTES + 1))
    assert not fits_event_loop(b"0," * json_complexity.LIGHT_VALUES)


def test_a_body_with_more_errors_than_a_person_reads_is_refused_without_naming_them():
    with pytest.raises(ApiError, match="more than 100 things are wrong with it") as caught:
        validated(Body, {f"field{i}": i for i in range(1000)})
    assert caught.value.status == 400
    assert len(caught.value.message) < 100
