"""Inputs of graphs that are no steps: patches, four of which make one token."""

from __future__ import annotations

import pytest
import torch

from ostinato.errors import CaptureError
from ostinato.graphs.buffers import BufferAddresses
from ostinato.graphs.tape import TapeBackend
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import CallHook
from ostinato.ops.step_inputs import EncoderInputs
from tests.support.native_sets import SETS, native_kernel


def patches(count: int, fill: float = 0.0) -> EncoderInputs:
    """`count` patches of 4 elements, one segment."""
    return EncoderInputs(
        patches=torch.full((count, 4), fill),
        taps=torch.zeros(count, 4, dtype=torch.int64),
        tap_weights=torch.zeros(count, 4),
        positions=torch.zeros(count, 2, dtype=torch.int64),
        starts=torch.tensor([0, count], dtype=torch.int32),
    )


def first(inputs: EncoderInputs, count: int) -> EncoderInputs:
    named = ("patches", "taps", "tap_weights", "positions")
    return EncoderInputs(**{name: getattr(inputs, name)[:count] for name in named}, starts=inputs.starts)


@pytest.mark.parametrize("isa", SETS)
def test_native_kernels_leave_out_the_padding_of_patches_and_of_the_tokens_that_they_make(isa: str) -> None:
    buffers, weights = patches(16), torch.ones(16)
    hook = CallHook()
    norm = hook.wrap("rms_norm", native_kernel(isa, "rms_norm"))
    named = {**vars(buffers), "weights": weights, "weights.4": weights[:4].clone()}
    pointers = {t.untyped_storage().data_ptr(): name for name, t in named.items() if t is not None}
    backend = TapeBackend(hook, pointers, TorchArrays("cpu"))

    def forward(inputs: EncoderInputs) -> torch.Tensor:
        by_patch = norm(norm(inputs.patches, named["weights.4"], 0.0), named["weights.4"], 0.0)
        return norm(by_patch.reshape(-1, 16), weights, 0.0)

    with torch.inference_mode():
        tape = backend.capture(forward, buffers, ())
        assert list(map(len, tape.programs)) == [2, 1]
        buffers.patches.fill_(3.0)
        backend.arena.memory.zero_()
        given = tape.replay(first(buffers, 8))
    assert given[:2].eq(1.0).all()
    assert given[2:].eq(0.0).all()


def test_inputs_that_moved_are_named_with_their_buffers() -> None:
    buffers = patches(8)
    places = BufferAddresses(buffers)
    places.check(first(buffers, 4))
    with pytest.raises(CaptureError, match=r"^encoder buffers\.taps, .*patches moved"):
        places.check(patches(8))
