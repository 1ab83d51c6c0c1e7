"""Tapes: a replay with other values in the buffers gives what the model gives, for every architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ostinato import EngineConfig
from ostinato.errors import CaptureError
from ostinato.graphs.buffers import check_unmoved
from ostinato.graphs.replay_check import compare_replay
from ostinato.models.checkpoint import load_spec
from ostinato.ops.operations import OPERATIONS
from ostinato.ops.step_inputs import StepInputs
from tests.support.checkpoints import RECIPES
from tests.support.graph_steps import Forward, Steps, Toy
from tests.support.recipes import HEADED
from tests.support.vl_models import VL_RECIPES

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_of_a_model_give_its_hidden_states_and_write_its_cache(recipe: str) -> None:
    steps = Steps(recipe)
    piecewise = steps.backend.capture(steps.forward, steps.padding(1, 48, False), ("attention", "state", "moe"))
    whole = steps.backend.capture(steps.forward, steps.padding(8, 8, True), ())
    for number in range(3):
        graph, rows, tokens = (piecewise, None, 48) if number == 0 else (whole, 8, 8)
        inputs, view = steps.next_step(rows, tokens)
        before = steps.states()
        steps.backend.arena.poison()
        given = graph.replay(view)[: inputs.token_ids.shape[0]].clone()
        written = steps.states()
        steps.restore(before)
        torch.testing.assert_close(given, steps.forward(inputs), **CLOSE)
        for own, right in zip(written, steps.states(), strict=True):
            # What was never written may be anything, also NaN.
            torch.testing.assert_close(own, right, equal_nan=True, **CLOSE)
        steps.restore(before)
        steps.finish()


def test_steps_of_all_architectures_call_nothing_but_operations(tmp_path: Path) -> None:
    """Neither their own steps nor those of their drafts: what a step computes has a kernel."""
    for name, recipe in (RECIPES | HEADED | VL_RECIPES).items():
        recipe().save_pretrained(tmp_path / name)
        spec = load_spec(EngineConfig(model=str(tmp_path / name), speculative="mtp:1" if name in HEADED else None))
        traces = [spec.calls] if spec.drafter is None else [spec.calls, spec.drafter.calls, spec.drafter.step_calls]
        called = {call.operation for trace in traces for call in trace.calls}
        assert called, f"{name} was not sketched"
        assert called <= OPERATIONS.keys(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "recipe", ["kimi_linear", "falcon_h1", "mamba2", "qwen3_next", "lfm3", "ministral3", "falcon_mamba"]
)
def test_torch_computes_nothing_between_the_kernels_of_a_step(recipe: str, dtype: str) -> None:
    """Of decode rows, of a prompt, and of a decode row before a prompt."""
    steps = Steps(recipe, dtype=dtype)
    for rows, tokens, num_decode_rows in ((8, 8, 8), (1, 48, 0), (2, 16, 1)):
        steps.buffers.clear()
        inputs = steps.buffers.view(rows, tokens, 1, num_decode_rows)
        tape = steps.backend.capture(steps.forward, inputs, ())
        assert not [call.name for call in tape.calls if call.kind != "kernel"]


@pytest.mark.parametrize("recipe", ["falcon_h1", "nemotron_h"])
def test_decode_rows_can_be_replayed_piecewise_as_well(recipe: str) -> None:
    steps = Steps(recipe)
    graph = steps.backend.capture(steps.forward, steps.padding(1, 16, False), ("attention", "state"))
    steps.next_step(None, 64)
    steps.finish()
    inputs, view = steps.next_step(None, 16)
    before = steps.states()
    given = graph.replay(view)[: inputs.token_ids.shape[0]].clone()
    steps.restore(before)
    torch.testing.assert_close(given, steps.forward(inputs), **CLOSE)


def test_capturing_keeps_no_more_memory_than_the_step_itself_does() -> None:
    """Recorded calls name places; what they computed is gone."""
    toy = Toy()
    alive: list[Callable[[], bool]] = []

    def forward(inputs: StepInputs) -> torch.Tensor:
        x = toy.table[inputs.token_ids]
        for _ in range(4):
            x = x + 1
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()).expired)
        return x

    toy.capture(forward)
    assert [expired() for expired in alive] == [True] * 4


def ways(toy: Toy) -> dict[str, Forward]:
    """Functions of a step with everything that a tape must keep track of."""

    def embed(inputs: StepInputs) -> torch.Tensor:
        return toy.table[inputs.token_ids]

    def multiple_outputs(inputs: StepInputs) -> torch.Tensor:
        values, indices = embed(inputs).topk(3, dim=-1)
        ordered = values.sort(dim=-1)
        return torch.cat((ordered.values, (indices + ordered.indices).float()), -1)

    def in_place(inputs: StepInputs) -> torch.Tensor:
        x = embed(inputs) @ toy.weight
        x.add_(1).mul_(x)
        F.silu(x, inplace=True)
        return x

    def in_place_on_slices(inputs: StepInputs) -> torch.Tensor:
        gate_up = embed(inputs) @ toy.weight
        gate_up[:, :3] *= 0.7
        gate_up[:, :2] *= 3.0
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def views_of_views(inputs: StepInputs) -> torch.Tensor:
        x = (embed(inputs) @ toy.weight).unflatten(-1, (3, 2)).transpose(0, 1)[1:][:, 2:]
        x = x.reshape(2, -1).t().unsqueeze(0).squeeze_(0)
        return x[::2].expand(8 * 3 // 4, 2)

    def views_of_other_dtypes(inputs: StepInputs) -> torch.Tensor:
        x = embed(inputs) * 2
        return x[2:].view(torch.int32).clone().view(torch.float32)

    def writes_into_empty(inputs: StepInputs) -> torch.Tensor:
        x = embed(inputs)
        out = torch.empty_like(x)
        out[:4] = x[4:] + 1
        out[4:] = 0
        torch.sin(x[:4], out=out[4:])
        return out

    def writes_to_the_cache(inputs: StepInputs) -> torch.Tensor:
        toy.cache.index_copy_(0, inputs.kv_cells, embed(inputs))
        return toy.cache[inputs.kv_cells - 1] + toy.cache[inputs.kv_cells]

    def aliases(inputs: StepInputs) -> torch.Tensor:
        x = embed(inputs)
        same = x.contiguous().reshape(8, 6).to(torch.float32)
        same += 1
        return x + same

    def keyword_arguments(inputs: StepInputs) -> torch.Tensor:
        x = torch.nn.functional.layer_norm(embed(inputs), normalized_shape=(6,), weight=toy.weight[0], eps=1e-3)
        return torch.add(input=x, other=inputs.positions.unsqueeze(-1), alpha=0.5)

    def lists(inputs: StepInputs) -> torch.Tensor:
        added = torch._foreach_add([embed(inputs), toy.weight[:1]], 1.0)
        [single] = torch._foreach_mul([added[0]], 2.0)
        return torch.stack((single, added[0] + added[1]))

    def constants(inputs: StepInputs) -> torch.Tensor:
        x = embed(inputs) - torch.full((6,), 2.0)
        x[1:3] = 7
        x[0] = x[1]
        return torch.where(x > 0, x, torch.zeros(())) + torch.arange(6)

    def arithmetic(inputs: StepInputs) -> torch.Tensor:
        x = embed(inputs)
        return 1 - (x + 1) * 2 - x.exp() + torch.cat((-x.cos(), x.sin() - 2), -1)[:, :6] + (x.int() + 1).cos()

    def empty_tensors(inputs: StepInputs) -> torch.Tensor:
        x = embed(inputs)
        return torch.cat((x[:0] + 1, x, torch.zeros(0, 6), x[:0]))

    def the_result_is_a_view(inputs: StepInputs) -> torch.Tensor:
        return (embed(inputs) @ toy.weight)[1:, 2:].t()

    return {name: value for name, value in locals().items() if callable(value) and name != "embed"}


@pytest.mark.parametrize("name", ways(Toy()))
def test_a_tape_replays(name: str) -> None:
    toy = Toy()
    forward = ways(toy)[name]
    tape = toy.capture(forward)
    for tokens in ([3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 0, 2], [19] * 8):
        inputs = toy.write(tokens)
        toy.cache.zero_()
        toy.backend.arena.poison()
        given = tape.replay(inputs).clone()
        toy.cache.zero_()
        torch.testing.assert_close(given, forward(toy.buffers.view(1, 8, 1, 0)), rtol=0, atol=0)


def test_kernels_are_replayed_as_one_call_and_may_read_their_inputs() -> None:
    toy = Toy()
    workspace = torch.empty(8, 6)

    def up_to_the_length(x: torch.Tensor, kv_lens: torch.Tensor, *, scale: float) -> torch.Tensor:
        return x * scale * kv_lens.tolist()[0]

    def in_place(x: torch.Tensor) -> torch.Tensor:
        x.numpy()[:] += 1
        return x

    def in_its_own_memory(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x, out=workspace)

    first, second, third = map(toy.hook.wrap, "abc", (up_to_the_length, in_place, in_its_own_memory))

    def forward(inputs: StepInputs) -> torch.Tensor:
        x = second(first(toy.table[inputs.token_ids], inputs.kv_lens, scale=0.5))
        y = third(x) + 1
        return third(y) * 2 + x

    tape = toy.capture(forward)
    for tokens in ([1, 2, 3], [4] * 8):
        step = toy.write(tokens)
        given = tape.replay(step).clone()
        torch.testing.assert_close(given, forward(toy.buffers.view(1, 8, 1, 0)))
    assert len(tape.calls) == 8


def test_a_part_left_out_runs_on_real_tokens_with_the_step_of_now_and_leaves_padding_zero() -> None:
    toy = Toy()
    seen: list[tuple[int, StepInputs]] = []

    def part(x: torch.Tensor, inputs: StepInputs, factor: float) -> torch.Tensor:
        seen.append((x.shape[0], inputs))
        return x * factor

    tape = toy.capture(
        lambda step: toy.hook.split("state", part, (toy.table[step.token_ids],), step, 3.0) + 1, ["state"]
    )
    step = toy.write([5, 6, 7])
    toy.backend.arena.poison()
    given = tape.replay(step)
    assert seen[-1] == (3, step)
    torch.testing.assert_close(given[:3], toy.table[5:8] * 3 + 1)
    torch.testing.assert_close(given[3:], torch.ones(5, 6))


def test_parts_of_other_names_are_recorded_into_the_tape() -> None:
    toy = Toy()
    calls: list[None] = []

    def part(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return x + 1

    tape = toy.capture(lambda inputs: toy.hook.split("moe", part, (toy.table[inputs.token_ids],)), ["state"])
    tape.replay(toy.write([1]))
    assert len(calls) == 1


def test_one_arena_serves_several_tapes_and_its_growth_leaves_them_valid() -> None:
    toy = Toy()

    def narrow(inputs: StepInputs) -> torch.Tensor:
        return toy.table[inputs.token_ids] + 1

    def wide(inputs: StepInputs) -> torch.Tensor:
        return toy.table[inputs.token_ids].repeat(1, 20).sin().sum(-1, keepdim=True)

    small, first_size = toy.capture(narrow), toy.backend.num_bytes
    large = toy.capture(wide)
    assert first_size < toy.backend.num_bytes == toy.backend.arena.size
    size = toy.backend.num_bytes
    again = toy.capture(narrow)
    assert toy.backend.num_bytes == size
    for tokens in ([1, 2], [3] * 8):
        step = toy.write(tokens)
        whole = toy.buffers.view(1, 8, 1, 0)
        for tape, forward in ((small, narrow), (large, wide), (again, narrow)):
            toy.backend.arena.poison()
            torch.testing.assert_close(tape.replay(step).clone(), forward(whole))
    begin, end = toy.backend.arena.memory.data_ptr(), toy.backend.arena.memory.data_ptr() + size
    assert all(begin <= tape.replay(step).data_ptr() < end for tape in (small, large, again))


def test_a_step_buffer_that_moved_is_an_error_that_names_it() -> None:
    toy = Toy()
    tape = toy.capture(lambda inputs: toy.table[inputs.token_ids] + inputs.positions.unsqueeze(-1))
    toy.buffers.tensors["positions"] = toy.buffers.tensors["positions"].clone()
    with pytest.raises(CaptureError, match=r"^step buffers\.positions moved"):
        tape.replay(toy.write([1, 2]))


def test_a_weight_or_cache_that_moved_is_named_by_the_full_check() -> None:
    toy = Toy()
    before = toy.persistent()
    check_unmoved(before, toy.persistent())
    toy.weight = toy.weight.clone()
    toy.cache = toy.cache.clone()
    with pytest.raises(CaptureError, match=r"^cache memory\.0, weights\.weight moved"):
        check_unmoved(before, toy.persistent())


def test_a_python_number_that_changes_from_step_to_step_is_found_by_check_replay() -> None:
    toy = Toy()
    number = 1.0

    def forward(inputs: StepInputs) -> torch.Tensor:
        return toy.table[inputs.token_ids] * number

    tape = toy.capture(forward)
    step = toy.write([1, 2, 3])
    compare_replay("toy", tape.replay, forward, step, [])
    number = 2.0
    with pytest.raises(CaptureError, match=r"the graph \(toy\) gives other hidden states .* Python value"):
        compare_replay("toy", tape.replay, forward, step, [])


def test_a_native_write_that_the_recorder_cannot_see_is_found_by_check_replay() -> None:
    toy = Toy()
    alias = toy.cache.numpy()

    def forward(inputs: StepInputs) -> torch.Tensor:
        alias[32:] += 1
        return toy.cache[inputs.kv_cells] + 1

    tape = toy.capture(forward)
    with pytest.raises(CaptureError, match="other hidden states"):
        compare_replay("toy", tape.replay, forward, toy.write([1, 2, 3]), [])


def test_a_tape_is_silent_for_its_recorder_after_a_failed_capture() -> None:
    toy = Toy()
    with pytest.raises(CaptureError):
        toy.capture(lambda inputs: inputs.token_ids.tolist())
    assert toy.hook.recorder is None
    assert toy.table[1:2].tolist()
