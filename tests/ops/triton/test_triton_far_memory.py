"""Memory as large as a GPU's: slots, blocks, cells and tokens that lie more than 2^31 elements behind the first one."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import pytest
import torch

from ostinato.ops.dispatch import triton_kernel
from tests.ops.triton.test_triton_state import scan_inputs
from tests.support.triton_kernels import DEVICE, assert_close, reference, require_triton

require_triton()

pytestmark = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="the memory of these tests is the CPU's, most of it unused"
)

NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux: pages that nobody touches need no memory."""

HALF = torch.float16


def far(near: torch.Tensor) -> tuple[torch.Tensor, int]:
    """-> (a tensor whose last entries are those of `near`, the number of the first of these), so that all but the first
    of them lie beyond 2^31 elements."""
    first = -(-(2**31) // prod(near.shape[1:]))
    shape = (first + len(near), *near.shape[1:])
    whole = unused(prod(shape), near.dtype).view(shape)
    whole[first:] = near
    return whole, first


def unused(elements: int, dtype: torch.dtype) -> torch.Tensor:
    size = elements * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE), dtype=dtype)


def stretched(x: torch.Tensor) -> torch.Tensor:
    """`x`, whose third token lies 2^31 elements behind the first, as the last of a long prompt do."""
    apart = 2**30 + 16
    made = unused(apart * len(x), x.dtype).as_strided(x.shape, (apart, *x.stride()[1:]))
    made.copy_(x)
    return made


def check_far(name: str, memory: Mapping[str, torch.Tensor], ids: Mapping[str, torch.Tensor], **others: Any) -> None:
    """The kernel with `memory` moved far away, and `ids` with it, does what the reference does near by."""
    moved, first = {}, 0
    for key, near in memory.items():
        moved[key], first = far(near)
    own = triton_kernel(name)(
        **others, **moved, **{key: torch.where(each > 0, each + first, 0) for key, each in ids.items()}
    )
    near_by = {key: each.clone() for key, each in memory.items()}
    assert_close(own, reference(name)(**others, **near_by, **ids))
    for key, right in near_by.items():
        assert_close(moved[key][first:], right)


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def named(names: str, values: list[Any]) -> dict[str, Any]:
    return dict(zip(names.split(), values, strict=True))


SSM = "x dt A_log B C D dt_bias"
PROMPT = {"row_starts": ints(0, 3), "start_positions": ints(13)}
SLOTS = {"read_slots": ints(1), "write_slots": ints([2])}
SCANNED = {"read_slots": ints(1), "write_slots": ints(2)}


def state_update() -> None:
    inputs = named(SSM, scan_inputs(1, HALF, heads=2, head_dim=6, groups=1, size=8))
    check_far("state_update", {"ssm_states": torch.randn(4, 2, 6, 8)}, SLOTS, dt_limit=(0.0, 9.0), **inputs)


def ssd_scan() -> None:
    inputs = named(SSM, scan_inputs(3, HALF, heads=2, head_dim=6, groups=1, size=8))
    others = {**inputs, **PROMPT, "dt_limit": (0.0, 9.0), "chunk_size": 16}
    check_far("ssd_scan", {"ssm_states": torch.randn(4, 2, 6, 8)}, SCANNED, **others)


def selective_inputs(tokens: int) -> dict[str, Any]:
    x, dt = torch.randn(2, tokens, 6)
    b, c = torch.randn(2, tokens, 8)
    return named(SSM, [x, dt, torch.randn(6, 8), b, c, torch.randn(6), torch.randn(6) - 2])


def selective_update() -> None:
    check_far("selective_update", {"states": torch.randn(4, 6, 8)}, SLOTS, **selective_inputs(1))


def selective_scan() -> None:
    check_far("selective_scan", {"states": torch.randn(4, 6, 8)}, SCANNED, **selective_inputs(3), **PROMPT)


def delta_inputs(tokens: int) -> dict[str, Any]:
    q, k = torch.randn(2, tokens, 2, 8)
    v, (a, b) = torch.randn(tokens, 2, 8), torch.randn(2, tokens, 2)
    made = named("q k v a b A_log dt_bias", [q, k, v, a, b, torch.randn(2), torch.randn(2)])
    return {**made, "decay_bound": 0.0, "beta_scale": 1.0, "keys_take_turns": False}


def delta_update() -> None:
    check_far("delta_update", {"states": torch.randn(4, 2, 8, 8)}, SLOTS, **delta_inputs(1))


def delta_scan() -> None:
    check_far("delta_scan", {"states": torch.randn(4, 2, 8, 8)}, SCANNED, **delta_inputs(3), **PROMPT)


def causal_conv1d(decode_rows: int = 1) -> None:
    tokens = 1 if decode_rows else 3
    others = {"x": torch.randn(tokens, 12), "weight": torch.randn(4, 12), "bias": torch.randn(12)}
    others |= {"row_starts": ints(0, tokens), "num_decode_rows": decode_rows}
    check_far("causal_conv1d", {"conv_states": torch.randn(4, 3, 12)}, SLOTS, **others)


def prompts_convolution() -> None:
    causal_conv1d(decode_rows=0)


def attention() -> None:
    """A block table is an id for each 16 keys, and the last block has five."""
    caches = {name: torch.randn(4, 16, 2, 8).half() for name in ("k_cache", "v_cache")}
    others = {"q": torch.randn(1, 4, 8).half(), "row_starts": ints(0, 1), "kv_lens": ints(21), "scale": 0.3}
    check_far("attention", caches, {"block_tables": ints([3, 2])}, start_positions=ints(20), **others)


def rotary() -> None:
    caches = {name: torch.randn(64, 2, 8).half() for name in ("k_cache", "v_cache")}
    q, k, v = torch.randn(3, 2, 2, 8).half()
    cells = {"kv_cells": torch.tensor([17, 40])}
    others = {"q": q, "k": k, "v": v, "angles": torch.randn(2, 2, 4), "key_multiplier": 1.0}
    moved = {}
    for key, near in caches.items():
        moved[key], first = far(near)
    own = triton_kernel("rotary")(
        **others,
        **{key: each[: len(each) // 16 * 16].view(-1, 16, 2, 8) for key, each in moved.items()},
        kv_cells=cells["kv_cells"] + first,
    )
    near_by = {key: each.clone().view(-1, 16, 2, 8) for key, each in caches.items()}
    assert_close(own, reference("rotary")(**others, **near_by, **cells))
    for key, right in near_by.items():
        assert_close(moved[key][first:], right.flatten(0, 1))


def inject_media() -> None:
    media = {"media": torch.randn(4, 2, 8)}
    check_far("inject_media", media, {"media_cells": torch.tensor([0, 3])}, x=torch.zeros(2, 8), row=1, add=True)


def embedding() -> None:
    check_far("embedding", {"weight": torch.randn(4, 8).half()}, {"token_ids": torch.tensor([3, 1])}, multiplier=2.0)


CASES: list[Callable[[], None]] = [
    state_update, ssd_scan, selective_update, selective_scan, delta_update, delta_scan, causal_conv1d,
    prompts_convolution, attention, rotary, inject_media, embedding,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_memory_beyond_two_billion_elements_is_found(case: Callable[[], None]) -> None:
    torch.manual_seed(0)
    case()


def check_stretched(name: str, tokens: tuple[str, ...], **arguments: Any) -> None:
    """With the arguments `tokens` far apart the kernel gives the same."""
    far_apart = {key: stretched(arguments[key]) for key in tokens}
    assert torch.equal(triton_kernel(name)(**arguments | far_apart), triton_kernel(name)(**arguments))


def test_tokens_of_long_prompts_are_found() -> None:
    scan = named(SSM, scan_inputs(3, HALF, heads=2, head_dim=6, groups=1, size=8))
    rows = {**PROMPT, **SCANNED}
    check_stretched(
        "ssd_scan", ("x", "dt", "B", "C"), **scan, **rows,
        ssm_states=torch.zeros(4, 2, 6, 8), dt_limit=(0.0, 9.0), chunk_size=16,
    )  # fmt: skip
    check_stretched("selective_scan", ("x", "dt", "B", "C"), **selective_inputs(3), **rows, states=torch.zeros(4, 6, 8))
    check_stretched("delta_scan", ("q", "k", "v", "a", "b"), **delta_inputs(3), **rows, states=torch.zeros(4, 2, 8, 8))
    q, k, v = torch.randn(3, 3, 2, 8).half()
    cache = torch.randn(4, 16, 2, 8).half()
    of_rows = {"row_starts": ints(0, 3), "start_positions": ints(13), "kv_lens": ints(16), "block_tables": ints([1])}
    check_stretched("attention", ("q",), q=q, k_cache=cache, v_cache=cache, **of_rows, scale=0.3)
    check_stretched("encoder_attention", ("q", "k", "v"), q=q, k=k, v=v, starts=ints(0, 3))
    check_stretched("rms_norm", ("x",), x=q, weight=torch.ones(8), eps=1e-6)
    cells = {"k_cache": cache.clone(), "v_cache": cache.clone(), "kv_cells": torch.arange(16, 19)}
    angles = torch.randn(2, 3, 4)
    check_stretched("rotary", ("q", "k", "v"), q=q, k=k, v=v, angles=angles, key_multiplier=1.0, **cells)
