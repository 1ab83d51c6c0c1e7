"""Check of states of 16 bits: what is stored is the nearest value to what a float32 state would be.

Paths that round alike are equal to each other, so tokens do not show how a state is rounded. Each step runs from the
same memory with states of 16 bits and of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ostinato.engine.core import EngineCore
from ostinato.ops.sizes import SCAN_CHUNK
from ostinato.ops.step_inputs import LayerCache
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from ostinato.verify.compare import Verdict

DTYPES = ("bfloat16", "float16")
NUM_DRAFTS = 2
NUM_SLOTS = 3 + NUM_DRAFTS
"""The null slot, one behind a prompt, and one behind each token of a verify step."""
OTHERS = 0.05
"""Part of the values that may be others: where float32 itself differs in its last bits. Cutting bits off makes half."""


@torch.inference_mode()
def check_states(engine: EngineCore, text: Sequence[int]) -> dict[str, Any]:
    """Return the verdict on states of 16 bits, and for each dtype the numbers of values and of those not the nearest.

    `engine` is that of the plain path. A model without recurrent states, or whose states are float32 only, has no
    dtypes.
    """
    mixers = [mixer for mixer in engine.spec.state_layers if mixer.state.recurrent_elements]
    names = DTYPES if mixers and not any(mixer.needs_float32 for mixer in mixers) else ()
    # A prompt within which no state is rounded.
    length = min((mixer.chunk_size or 1 for mixer in mixers), default=1)
    dtypes = {name: _count(engine, text, min(length, SCAN_CHUNK), getattr(torch, name)) for name in names}
    is_right = all(each["others"] <= OTHERS * each["values"] for each in dtypes.values())
    return {"verdict": Verdict.EQUAL if is_right else Verdict.DIFFERENT, "dtypes": dtypes}


def _count(engine: EngineCore, text: Sequence[int], length: int, dtype: torch.dtype) -> dict[str, int]:
    """Count the values that a prompt's end and a verify step's first token leave in the state layers."""
    narrow, wide = (_memory(engine, each) for each in (dtype, torch.float32))
    counts = {"values": 0, "others": 0}
    token, *drafts = text[length : length + 1 + NUM_DRAFTS]
    blocks = tuple(range(1, 1 + -(-(length + 1 + NUM_DRAFTS) // engine.runner.block_size)))
    tables: dict[str, Any] = {"block_table": blocks, "window_block_table": blocks}
    prompt = BatchRow("", tuple(text[:length]), 0, write_slots=(1,), **tables)
    slots = tuple(range(2, NUM_SLOTS))
    verified = BatchRow("", (token,), length, read_slot=1, write_slots=slots, num_drafts=NUM_DRAFTS, **tables)
    for batch, ahead, slot in (
        (Batch((prompt,), 0), [()], 1),
        (Batch((verified,), 1, NUM_DRAFTS), [tuple(drafts)], 2),
    ):
        for own, other in zip(narrow, wide, strict=True):
            for name, kept in own.tensors.items():
                other.tensors[name].copy_(kept)
        step = make_step_inputs(
            batch, engine.runner.block_size, engine.runner.device, ahead, takes_images=engine.runner.takes_images
        )
        for memory in (narrow, wide):
            engine.runner.model(step, memory)
        for number, (own, other) in enumerate(zip(narrow, wide, strict=True)):
            for name in own.states:
                if _recurs(engine, number, name):
                    stored, exact = own.states[name][slot], other.states[name][slot]
                    counts["values"] += stored.numel()
                    counts["others"] += int((stored != exact.to(dtype)).sum())
    return counts


def _memory(engine: EngineCore, dtype: torch.dtype) -> list[LayerCache]:
    """Return memory like the engine's, for one request, with recurrent states in `dtype`; all zeros."""
    memory = []
    for number, layer in enumerate(engine.runner.layer_memory):
        blocks = {name: torch.zeros_like(kept[: 2 + SCAN_CHUNK]) for name, kept in layer.block_tensors.items()}
        states = {
            name: kept.new_zeros((NUM_SLOTS, *kept.shape[1:]), dtype=dtype if _recurs(engine, number, name) else None)
            for name, kept in layer.states.items()
        }
        memory.append(replace(layer, **blocks, states=states, noise=None))
    return memory


def _recurs(engine: EngineCore, number: int, name: str) -> bool:
    layers = engine.spec.cached_layers
    mixer = layers[number].mixer if number < len(layers) else None
    return mixer is not None and mixer.state[name].dtype == "state"
