"""The persistent buffers: padded as they are indexed, and nothing of an earlier step shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import CaptureError
from ostinato.graphs.buffers import BufferAddresses, StepBuffers
from ostinato.ops.step_inputs import StepInputs
from ostinato.plan.memory.graph_memory import buffer_bytes
from tests.support.graph_steps import CPU, lay, step_of

PER_TOKEN = ("token_ids", "positions", "kv_cells")
PER_ROW = ("start_positions", "kv_lens", "read_slots", "write_slots", "block_tables")


def full_buffers() -> StepBuffers:
    """As a step of all rows, tokens, columns and slots leaves them."""
    buffers = StepBuffers(6, 12, 5, 3, CPU)
    lay(buffers, step_of([9] * 6, [[7] * 5] * 6, [[8, 8, 8]]), 6, 6)
    lay(buffers, step_of([9] * 12, [[7] * 5]), 1, 12)
    lay(buffers, step_of([9] * 6, [[7] * 5] * 6, [[8, 8, 8]]), 6, 12)
    return buffers


def test_every_tensor_of_a_step_has_a_buffer_and_counts_as_memory() -> None:
    buffers = StepBuffers(6, 12, 5, 3, CPU)
    named = buffers.tensors
    assert named.keys() == {name for name, value in vars(step_of([1])).items() if isinstance(value, torch.Tensor)}
    view = buffers.view(6, 12, 3, 0)
    assert all(getattr(view, name).shape == buffer.shape for name, buffer in named.items())
    assert buffers.num_bytes == 3 * 12 * 8 + (7 + 3 * 6 + 6 * 5 + 6 * 3) * 4


def test_a_model_that_takes_images_has_two_more_buffers_which_are_padded_with_zeros_per_token() -> None:
    buffers, plain = StepBuffers(6, 12, 5, 3, CPU, takes_images=True), StepBuffers(6, 12, 5, 3, CPU)
    assert buffers.num_bytes - plain.num_bytes == 12 * ((3 + 1) * 8 + 4)
    assert buffers.num_bytes == buffer_bytes(12, 6, 5, 3, takes_images=True)
    for tokens in (12, 2):
        positions, cells = torch.arange(3 * tokens).view(tokens, 3) + 1, torch.arange(tokens) + 1
        inputs = replace(step_of([9] * tokens), rope_positions=positions, media_cells=cells, last_seen=cells.int())
        lay(buffers, inputs, 1, 12)
    view = buffers.view(1, 12, 1, 0)
    assert view.rope_positions is not None
    assert view.media_cells is not None
    assert view.rope_positions.tolist() == [[1, 2, 3], [4, 5, 6], *[[0, 0, 0]] * 10]
    assert view.media_cells.tolist() == [1, 2, *[0] * 10]
    assert (plain.view(1, 12, 1, 0).rope_positions, plain.view(1, 12, 1, 0).media_cells) == (None, None)


def test_a_model_with_window_blocks_has_two_more_buffers_which_are_padded_as_those_of_blocks() -> None:
    buffers, plain = StepBuffers(6, 12, 5, 3, CPU, max_window_blocks=4), StepBuffers(6, 12, 5, 3, CPU)
    assert buffers.num_bytes - plain.num_bytes == 12 * 8 + 6 * 4 * 4
    assert buffers.num_bytes == buffer_bytes(12, 6, 5, 3, max_window_blocks=4)
    buffers.arrays["window_kv_cells"][:] = 9
    buffers.write_window_tables([(0, 3, 4)] * 6)
    buffers.pad(2, 2, 4, 6)
    view = buffers.view(4, 6, 1, 4)
    assert view.window_kv_cells is not None
    assert view.window_block_tables is not None
    assert view.window_kv_cells.tolist() == [9, 9, 0, 0, 0, 0]
    assert view.window_block_tables.tolist() == [[0, 3, 4, 0]] * 2 + [[0] * 4] * 2
    with buffers.cleared():
        assert not buffers.arrays["window_block_tables"].any()
    buffers.write_window_tables([(0, 3, 4)] * 6)
    assert buffers.arrays["window_block_tables"].tolist() == [[0, 3, 4, 0]] * 6


def test_padding_rows_are_null_rows_without_tokens() -> None:
    buffers = full_buffers()
    lay(buffers, step_of([1, 2], [[3, 4], [5, 6]], [[7]]), 4, 4)
    view = buffers.view(4, 4, 1, 4)
    assert view.token_ids.tolist() == [1, 2, 0, 0]
    assert view.kv_cells.tolist() == [32, 33, 0, 0]
    assert view.positions.tolist() == [5, 6, 0, 0]
    assert view.row_starts.tolist() == [0, 1, 2, 2, 2]
    assert view.kv_lens.tolist() == [6, 6, 0, 0]
    assert view.start_positions.tolist() == [5, 5, 0, 0]
    assert view.read_slots.tolist() == [1, 2, 0, 0]
    assert view.write_slots.tolist() == [[7], [7], [0], [0]]
    assert view.block_tables.tolist() == [[3, 4, 0, 0, 0], [5, 6, 0, 0, 0], [0] * 5, [0] * 5]


def test_more_tokens_than_rows_are_padded_each_by_its_own_count() -> None:
    buffers = full_buffers()
    lay(buffers, step_of([1, 2, 3], [[4]]), 1, 8)
    view = buffers.view(1, 8, 1, 0)
    assert view.token_ids.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert view.row_starts.tolist() == [0, 3]
    assert view.block_tables.tolist() == [[4, 0, 0, 0, 0]]


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepInputs, int, int]:
    """A step of 1 to 6 rows and 1 to 12 tokens, and the rows and tokens that it is padded to."""
    rows, slots = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    tokens = rows if rows > 1 else draw(st.integers(1, 12))
    step = step_of([draw(st.integers(1, 99))] * tokens, [[9] * draw(st.integers(1, 5))] * rows, [[3] * slots])
    return step, draw(st.integers(rows, 6)), draw(st.integers(tokens, 12))


@given(st.lists(steps(), min_size=1, max_size=6))
def test_after_any_steps_the_buffers_hold_the_last_one_and_zeros(history: list[tuple[StepInputs, int, int]]) -> None:
    buffers, fresh = full_buffers(), StepBuffers(6, 12, 5, 3, CPU)
    for inputs, rows, tokens in history:
        lay(buffers, inputs, rows, tokens)
    lay(fresh, inputs, rows, tokens)
    count, real_tokens, slots = inputs.read_slots.shape[0], inputs.token_ids.shape[0], inputs.write_slots.shape[1]
    ours, right = (each.view(rows, tokens, slots, 0) for each in (buffers, fresh))
    for name in (*PER_TOKEN, *PER_ROW, "row_starts"):
        torch.testing.assert_close(getattr(ours, name), getattr(right, name), rtol=0, atol=0)
    for name in PER_TOKEN:
        assert torch.equal(getattr(ours, name)[:real_tokens], getattr(inputs, name))
        assert not getattr(ours, name)[real_tokens:].any()
    for name in PER_ROW:
        assert not getattr(ours, name)[count:].any()
    assert torch.equal(ours.block_tables[:count, : inputs.block_tables.shape[1]], inputs.block_tables)
    assert (ours.row_starts[count:] == real_tokens).all()


def test_cleared_buffers_are_padding_everywhere() -> None:
    buffers = full_buffers()
    buffers.clear()
    assert not any(buffer.any() for buffer in buffers.tensors.values())


def test_what_stood_in_buffers_that_were_cleared_comes_back_also_after_an_error() -> None:
    buffers = full_buffers()
    before = {name: array.copy() for name, array in buffers.arrays.items()}
    with pytest.raises(ValueError, match="in between"), buffers.cleared():
        raise ValueError("in between")
    for name, array in buffers.arrays.items():
        assert (array == before[name]).all(), name


def test_a_buffer_that_is_gone_is_named() -> None:
    inputs = full_buffers().view(1, 2, 1, 0)
    captured = BufferAddresses(inputs)
    with pytest.raises(CaptureError, match=r"\.positions moved or went"):
        captured.check(replace(inputs, positions=None))  # type: ignore[arg-type]


def test_filling_and_viewing_leave_the_buffers_where_they_are() -> None:
    buffers = full_buffers()
    before = BufferAddresses(buffers.view(6, 12, 3, 0))
    lay(buffers, step_of([1, 2], [[3], [4]]), 4, 4)
    before.check(buffers.view(1, 2, 1, 0))
    buffers.clear()
    before.check(buffers.view(6, 12, 3, 0))


@pytest.mark.parametrize(("rows", "tokens"), [(1, 4), (2, 1)])
def test_a_step_larger_than_its_padding_is_refused(rows: int, tokens: int) -> None:
    with pytest.raises(AssertionError, match="than it is padded to"):
        lay(full_buffers(), step_of([1, 2], [[3], [4]]), rows, tokens)
