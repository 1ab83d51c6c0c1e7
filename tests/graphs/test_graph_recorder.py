"""The recorder: what a replay could not repeat is refused at capture, and named."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from ostinato.errors import CaptureError
from ostinato.graphs.recorder import CallRecorder
from ostinato.graphs.tensor_refs import RecordedCall
from ostinato.ops.operations import ops_called_by
from ostinato.ops.step_inputs import StepInputs
from tests.support.graph_steps import Steps, Toy

Function = Callable[[torch.Tensor], object]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def capture(function: Callable[[Toy, StepInputs], torch.Tensor], splits: tuple[str, ...] = ()) -> None:
    toy = Toy()
    toy.capture(lambda inputs: function(toy, inputs), splits)


READS: dict[str, tuple[str, Function]] = {
    "item": ("item", lambda x: x[0, 0].item()),
    "tolist": ("tolist", lambda x: x.tolist()),
    "numpy": ("numpy", lambda x: x.numpy()),
    "an array": ("numpy", lambda x: np.asarray(x)),
    "bool": ("is_nonzero", lambda x: bool((x > 0).any())),
    "float": ("item", lambda x: float(x.sum())),
    "a branch": ("is_nonzero", lambda x: x if x.sum() > 0 else -x),
    "a range": ("item", lambda x: list(range(x[0, 0].long()))),
    "an end of a slice": ("item", lambda x: x[: x[0, 0].long()]),
    "an index of one element": ("item", lambda x: x[x[0, 0].long()]),
    "membership": ("item", lambda x: 1.0 in x),
    "nonzero": ("nonzero", lambda x: x.nonzero()),
    "argwhere": ("argwhere", lambda x: torch.argwhere(x)),
    "where of a condition": ("where", lambda x: torch.where(x > 0)),
    "a mask as index": ("index", lambda x: x[x > 0]),
    "assignment by a mask": ("index_put_", lambda x: x.__setitem__(x[:, 0] > 0, 1.0)),
    "masked_select": ("masked_select", lambda x: x.masked_select(x > 0)),
    "unique": ("_unique2", lambda x: x.unique()),
    "repeats": ("repeat_interleave", lambda x: torch.repeat_interleave(x[:, 0].long().abs())),
    "one-hot of unknown size": ("one_hot", lambda x: torch.nn.functional.one_hot(x.long().abs())),
    "bincount": ("bincount", lambda x: x[:, 0].long().abs().bincount()),
    "equality": ("equal", lambda x: torch.equal(x, x + 1)),
    "closeness": ("allclose", lambda x: torch.allclose(x, x + 1)),
    "a split at values": ("tensor_split", lambda x: torch.tensor_split(x, x[0, :1].long())),
    "another device": ("to", lambda x: x.to("meta")),
}


@pytest.mark.parametrize("what", READS)
def test_a_value_read_on_the_host_is_refused_by_name_and_shape(what: str) -> None:
    name, read = READS[what]

    def forward(toy: Toy, inputs: StepInputs) -> torch.Tensor:
        x = toy.table[inputs.token_ids] @ toy.weight
        read(x)
        return x

    with pytest.raises(CaptureError, match=rf"^{name} reads the values of a tensor of shape \[.*\] on the host"):
        capture(forward)


@pytest.mark.parametrize("what", sorted(READS.keys() - {"another device"}))
def test_inside_a_kernel_the_same_is_allowed(what: str) -> None:
    _, read = READS[what]

    def forward(toy: Toy, inputs: StepInputs) -> torch.Tensor:
        def kernel(x: torch.Tensor) -> torch.Tensor:
            read(x)
            return x + 1

        return toy.hook.wrap("attention", kernel)(toy.table[inputs.token_ids])

    capture(forward)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[torch.arange(3)],
        lambda x: x.index_put_((torch.arange(3),), torch.ones(6)),
        lambda x: x.masked_fill(x > 0, 0.0),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: torch.nn.functional.one_hot(x.long().abs(), 100),
        lambda x: torch.repeat_interleave(x, 2, dim=0),
        lambda x: torch.repeat_interleave(x, torch.full((8,), 2), dim=0, output_size=16),
        lambda x: list(x),
        lambda x: x.shape[0] * x.stride(0) * x.element_size(),
    ],
)
def test_what_only_looks_like_a_host_read_is_recorded(use: Function) -> None:
    def forward(toy: Toy, inputs: StepInputs) -> torch.Tensor:
        x = toy.table[inputs.token_ids] + 1
        use(x)
        return x

    capture(forward)


@pytest.mark.parametrize(("name", "read"), [("item", lambda x: x.sum().item()), ("to", lambda x: x.to("meta"))])
def test_where_a_device_allows_no_reads_in_kernels_the_kernel_is_named(name: str, read: Function) -> None:
    toy = Toy()

    def reads(x: torch.Tensor) -> torch.Tensor:
        read(x)
        return x + 1

    kernel = toy.hook.wrap("moe", reads)

    def run(splits: tuple[str, ...]) -> None:
        recorder = CallRecorder(toy.persistent(), splits, kernels_may_read=False)
        toy.hook.recorder = recorder
        with recorder:
            toy.hook.split("moe", kernel, (toy.table[toy.padding().token_ids],))

    run(("moe",))  # A part that is left out may do what it likes.
    with pytest.raises(CaptureError, match=rf"^the kernel moe reads values on the host \({name}\).*piecewise"):
        run(())


@pytest.mark.parametrize(
    ("recipe", "kernel"), [("llama", "attention"), ("mamba2", "causal_conv1d"), ("nemotron_h", "causal_conv1d")]
)
def test_the_reference_kernels_of_a_model_read_on_the_host(recipe: str, kernel: str) -> None:
    steps = Steps(recipe, kernels="reference")
    hook = steps.runner.model.build.ops.hook
    recorder = CallRecorder(steps.backend._persistent, (), kernels_may_read=False)
    hook.recorder = recorder
    with recorder, pytest.raises(CaptureError, match=f"^the kernel {kernel} reads values on the host"):
        steps.forward(steps.padding(1, 16, False))


@pytest.mark.parametrize(
    "recipe",
    ["bamba", "falcon_h1_normed", "granitemoehybrid", "llama", "mamba2", "nemotron_h", "nemotron_h_dense", "qwen3"],
)
def test_a_decode_step_is_kernels_alone(recipe: str) -> None:
    """Other operations than views would stand between the native calls of a tape."""
    steps = Steps(recipe)
    calls = calls_of(steps, steps.padding(4, 4, True), ())
    assert {call.kind for call in calls} == {"kernel"}
    # `concat` joins what rows of both kinds give, and all rows decode here.
    others = ops_called_by("prefill", "encoder") | {"concat"}
    assert {call.name for call in calls} == set(steps.engine.spec.ops) - others


def test_what_a_prediction_head_follows_in_a_decode_step_is_kernels_alone() -> None:
    steps = Steps("nemotron_h_head", speculative="mtp:2")
    calls = calls_of(steps, steps.padding(4, 4, True), ())
    assert {call.kind for call in calls} == {"kernel"}
    assert {call.name for call in calls} == {*steps.engine.spec.ops, "concat", "token_shift"} - ops_called_by(
        "prefill", "encoder"
    )


def test_a_piecewise_graph_holds_the_write_of_keys_and_values_and_leaves_out_attention_alone() -> None:
    steps = Steps("llama")
    calls = calls_of(steps, steps.padding(1, 16, False), ("attention", "state"))
    left_out = {call.name for call in calls if call.kind == "split"}
    assert left_out == {"attention"}
    assert {call.name for call in calls} - left_out == set(steps.engine.spec.ops) - {"attention"}


def calls_of(steps: Steps, inputs: StepInputs, splits: tuple[str, ...]) -> list[RecordedCall]:
    recorder = CallRecorder(steps.backend._persistent, splits)
    steps.runner.model.build.ops.hook.recorder = recorder
    with recorder:
        steps.forward(inputs)
    return recorder.calls


def test_a_tensor_that_is_no_persistent_buffer_is_refused_with_operation_shape_and_argument() -> None:
    stranger, row = torch.ones(8, 6), torch.ones(6)
    with pytest.raises(CaptureError, match=r"^add reads .* shape \[8, 6\] \(torch.float32, argument 1\).*cache memory"):
        capture(lambda toy, inputs: toy.table[inputs.token_ids] + stranger)
    with pytest.raises(CaptureError, match=r"^layer_norm reads .* shape \[6\] \(torch.float32, argument 2\)"):
        capture(lambda toy, inputs: torch.layer_norm(toy.table[inputs.token_ids], (6,), row))
    with pytest.raises(CaptureError, match=r"^index_put_ reads .* shape \[8, 6\] .*argument 0"):
        capture(lambda toy, inputs: stranger.index_put_((inputs.token_ids,), toy.table[:8]))


def test_a_kernel_and_a_part_that_get_such_a_tensor_are_named() -> None:
    stranger = torch.ones(8, 6)

    def plus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    with pytest.raises(CaptureError, match=r"^rotary reads .* argument y\)"):
        capture(lambda toy, inputs: toy.hook.wrap("rotary", plus)(toy.table[inputs.token_ids], y=stranger))
    with pytest.raises(CaptureError, match=r"^state reads .* argument 1\)"):
        capture(lambda toy, inputs: toy.hook.split("state", plus, (toy.table[inputs.token_ids], stranger)), ("state",))


def test_a_tensor_made_of_python_values_is_refused_as_such() -> None:
    with pytest.raises(CaptureError, match=r"^a tensor of shape \[2\] .* is made of Python values during capture"):
        capture(lambda toy, inputs: toy.table[inputs.token_ids][:, :2] + torch.tensor([1.0, 2.0]))


def test_memory_that_torch_gave_back_and_native_code_got_is_not_taken_for_computed() -> None:
    """The addresses of tensors that are gone are given out again, and prove nothing."""
    toy = Toy()
    recorder = CallRecorder(toy.persistent(), ())
    with recorder:
        x = toy.table[:8] + 1
        pointer, shape = x.untyped_storage().data_ptr(), x.shape
        del x
        held = (ctypes.c_float * 48).from_buffer_copy(bytes(192))
        reused = torch.frombuffer(held, dtype=torch.float32)
        recorder._live[reused.untyped_storage().data_ptr()] = recorder._live[pointer]
        with pytest.raises(CaptureError, match="no persistent buffer"):
            reused.view(shape) + 1


def test_native_code_that_fills_a_tensor_around_the_recorder_is_refused() -> None:
    storage_pointers: list[int] = []

    def through_the_storage(x: torch.Tensor) -> None:
        storage_pointers.append(x.untyped_storage().data_ptr())
        ctypes.memset(storage_pointers[-1], 0, x.untyped_storage().nbytes())

    def forward(toy: Toy, inputs: StepInputs, use: Function) -> torch.Tensor:
        x = toy.table[inputs.token_ids]
        y = torch.empty_like(x)
        through_the_storage(y)
        use(y)
        return x + y

    message = r"reads a tensor of shape .* that no recorded call has written; something wrote to it around the recorder"
    for name, use in (("add", lambda y: None), ("mul_", lambda y: y.mul_(2)), ("mul_", lambda y: y[1:].mul_(2))):
        with pytest.raises(CaptureError, match=f"^{name} {message}"):
            capture(lambda toy, step, use=use: forward(toy, step, use))


@pytest.mark.parametrize("take", [lambda x: x.data_ptr(), lambda x: x.__dlpack__(), lambda x: np.from_dlpack(x)])
def test_the_address_of_a_tensor_is_for_kernels_alone(take: Function) -> None:
    def forward(toy: Toy, inputs: StepInputs, name: str | None) -> torch.Tensor:
        def native(x: torch.Tensor) -> torch.Tensor:
            take(x)
            return x + 1

        return (toy.hook.wrap(name, native) if name else native)(toy.table[inputs.token_ids])

    capture(lambda toy, step: forward(toy, step, "linear"))
    with pytest.raises(CaptureError, match=r"of a tensor of shape \[8, 6\] is taken during capture.*through ops/"):
        capture(lambda toy, step: forward(toy, step, None))


def test_a_tensor_that_gets_other_memory_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"^resize_ gives a tensor of shape \[8, 6\] other memory"):
        capture(lambda toy, inputs: toy.table[inputs.token_ids].resize_(9, 6))


def test_the_result_must_be_computed_by_the_step() -> None:
    with pytest.raises(CaptureError, match=r"^the result of the step is no tensor that the step computed"):
        capture(lambda toy, inputs: toy.table[:8])


@pytest.mark.parametrize("part", [lambda x, inputs: x, lambda x, inputs: (x + 1)[:3], lambda x, inputs: x.sum()])
def test_a_part_that_is_left_out_returns_one_new_tensor_with_an_entry_per_token(
    part: Callable[..., torch.Tensor],
) -> None:
    with pytest.raises(CaptureError, match=r"^state must return one new tensor with an entry per token"):
        capture(lambda toy, inputs: toy.hook.split("state", part, (toy.table[inputs.token_ids],), inputs), ("state",))


def test_a_part_that_is_left_out_gets_the_step_itself_and_no_computed_tensors_beside_it() -> None:
    def part(x: torch.Tensor, *_: object) -> torch.Tensor:
        return x + 1

    def copies(toy: Toy, inputs: StepInputs) -> torch.Tensor:
        return toy.hook.split("state", part, (toy.table[inputs.token_ids],), dataclasses.replace(inputs))

    def computes(toy: Toy, inputs: StepInputs) -> torch.Tensor:
        x = toy.table[inputs.token_ids]
        return toy.hook.split("state", part, (x,), x + 1)

    with pytest.raises(CaptureError, match="gets a copy of the step"):
        capture(copies, ("state",))
    with pytest.raises(CaptureError, match=r"^state gets a computed tensor of shape \[8, 6\] beside its step"):
        capture(computes, ("state",))


def test_a_capture_outside_of_inference_mode_sees_the_same() -> None:
    with (
        torch.inference_mode(False),
        pytest.raises(CaptureError, match=r"^tolist reads"),
    ):
        capture(lambda toy, inputs: torch.tensor(inputs.token_ids.tolist()))
