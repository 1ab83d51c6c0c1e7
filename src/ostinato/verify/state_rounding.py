"""Check of states of 16 bits: each stored value is the nearest to what a float32 state would be.

Paths that round alike are equal, so their tokens do not show how they round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ostinato.engine.core import EngineCore
from ostinato.json_io import JsonObject
from ostinato.ops.arrays import dtype_name, host_values, numpy_dtype
from ostinato.ops.sizes import SCAN_CHUNK
from ostinato.ops.step_inputs import LayerCache
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from ostinato.verify.compare import Verdict

DTYPES = ("bfloat16", "float16")
NUM_DRAFTS = 2
OTHERS = 0.05
"""Largest part of other values, where float32 differs in its last bits. Without rounding half of them are others."""


def check_states(engine: EngineCore, text: Sequence[int]) -> JsonObject:
    """Return the verdict, and for each dtype of 16 bits the numbers of values, and of those that are not the nearest.

    `engine` is that of the plain path. Models without recurrent states in 16 bits have no dtypes.
    """
    mixers = [mixer for mixer in engine.spec.state_layers if mixer.state.recurrent_elements]
    names = DTYPES if mixers and not any(mixer.needs_float32 for mixer in mixers) else ()
    # No state is rounded within such a prompt.
    length = min((SCAN_CHUNK, *(mixer.chunk_size or 1 for mixer in mixers)))
    dtypes = {name: _count(engine, text, length, name) for name in names}
    is_right = all(figures["others"] <= OTHERS * figures["values"] for figures in dtypes.values())
    return {"verdict": Verdict.EQUAL if is_right else Verdict.DIFFERENT, "dtypes": dtypes}


def _count(engine: EngineCore, text: Sequence[int], length: int, dtype: str) -> dict[str, int]:
    """Count values after a prompt, and after the first token of a verify step.

    Each step runs from the same memory with states of `dtype` and of float32.
    """
    token, *drafts = text[length : length + 1 + NUM_DRAFTS]
    blocks = tuple(range(1, 2 + len(text[: length + NUM_DRAFTS]) // engine.runner.block_size))
    prompt = BatchRow("", tuple(text[:length]), 0, blocks, 0, (1,), window_block_table=blocks)
    verified = BatchRow("", (token,), length, blocks, 1, (2, 3, 4), num_drafts=NUM_DRAFTS, window_block_table=blocks)
    recurrent = [
        (number, array.name)
        for number, layer in enumerate(engine.spec.cached_layers)
        for array in (layer.mixer.state.arrays if layer.mixer is not None else ())
        if array.dtype == "state"
    ]
    narrow, wide = (_memory(engine, recurrent, each, len(blocks)) for each in (dtype, "float32"))
    counts = {"values": 0, "others": 0}
    for batch, ahead in ((Batch((prompt,), 0), ()), (Batch((verified,), 1, NUM_DRAFTS), tuple(drafts))):
        for own, other in zip(narrow, wide, strict=True):
            for name, kept in own.tensors.items():
                engine.runner.arrays.write(other.tensors[name], host_values(kept))
        runner, slot = engine.runner, batch.rows[0].write_slots[0]
        with runner.arrays.inference_mode():
            step = make_step_inputs(batch, runner.block_size, runner.arrays, [ahead], vision=runner.vision)
            for memory in (narrow, wide):
                runner.model(step, memory)
        for number, name in recurrent:
            stored, exact = (host_values(memory[number].states[name][slot]) for memory in (narrow, wide))
            counts["values"] += stored.size
            counts["others"] += int((stored != exact.astype(numpy_dtype(dtype))).sum())
    return counts


def _memory(engine: EngineCore, recurrent: Sequence[tuple[int, str]], dtype: str, num_blocks: int) -> list[LayerCache]:
    """Return zeros for the memory of one request, with recurrent states in `dtype`."""
    memory, arrays = [], engine.runner.arrays
    for number, layer in enumerate(engine.runner.layer_memory):
        blocks: JsonObject = {
            name: arrays.zeros((1 + num_blocks, *kept.shape[1:]), dtype_name(kept.dtype))
            for name, kept in layer.block_tensors.items()
        }
        states = {
            name: arrays.zeros((5, *kept.shape[1:]), dtype if (number, name) in recurrent else dtype_name(kept.dtype))
            for name, kept in layer.states.items()
        }
        memory.append(replace(layer, **blocks, states=states, noise=None, packed_states=()))
    return memory
