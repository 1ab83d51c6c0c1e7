"""Scratch memory of a step's kernels for the layers of a model, by the rules in the operations' facts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from ostinato.json_io import JsonObject
from ostinato.ops.operations import OPERATIONS, call_with_known
from ostinato.ops.scratch import Scratch
from ostinato.ops.ukernels import ROWS_OF
from ostinato.plan.layer_specs import LayerSpec, layer_sizes


def native_scratch(
    layers: Iterable[LayerSpec],
    head: tuple[int, int],
    native: Collection[str],
    tokens: int,
    positions: int,
    max_model_len: int,
    threads: int,
    in_order: bool = False,
    *,
    group_size: int = 0,
    ukernels: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> int:
    """Return an upper bound of the bytes that the kernels of `native` keep: shared by all threads, and per thread.

    `head` are the input and output sizes of the LM head; `positions` are sampled. With `in_order`, inputs of
    matmuls may have another order in their weights (act-order); `group_size` inputs of 8-bit weights share a scale, 0:
    a row. `ukernels` are the micro-kernels that an operation may choose; all of the table for one without any.
    """
    step: dict[str, object] = {
        "tokens": tokens,
        "max_model_len": max_model_len,
        "threads": threads,
        "in_order": in_order,
    }
    step |= {"group_size": group_size}
    step |= {f"{op}_rows": [row for row in ROWS_OF[op] if row.name in names] for op, names in ukernels.items() if names}
    needed = [Scratch(0), *_in_layers("native", native, layers, step)]
    needed += _of_head("native", native, head, positions, step)
    return max(scratch.shared for scratch in needed) + threads * max(scratch.own for scratch in needed)


def triton_scratch(
    layers: Iterable[LayerSpec],
    head: tuple[int, int],
    triton: Collection[str],
    *,
    tokens: int,
    rows: int,
    decode_tokens: int,
    positions: int,
    element_bytes: int,
    in_order: bool = False,
) -> int:
    """Return the bytes that the largest call of a Triton kernel allocates.

    The step has `tokens` tokens in `rows` rows, or `decode_tokens` tokens of decode rows, whose attention alone
    allocates. `head`, `positions` and `in_order` are as for `native_scratch`.
    """
    step = {"tokens": tokens, "rows": rows, "element_bytes": element_bytes, "in_order": in_order}
    needed = [Scratch(0), *_in_layers("triton", {*triton} - {"attention"}, layers, step)]
    if "attention" in triton:
        needed += _in_layers("triton", ["attention"], layers, step | {"tokens": decode_tokens})
    needed += _of_head("triton", triton, head, positions, step)
    return max(scratch.shared for scratch in needed)


def reference_scratch(
    layer: LayerSpec,
    native: Collection[str],
    tokens: int,
    max_model_len: int,
    *,
    kv_bytes: int,
    is_quantized: bool,
    states: int,
    gathering_ranks: int = 0,
) -> int:
    """Return the bytes that the largest reference of a layer allocates; operations of `native` have none.

    `kv_bytes` are those of an element of the keys and values that are read; `states` is the number of rows whose states
    are taken at once; `gathering_ranks` is the number of ranks that gather their sharded inputs, if they do.
    """
    step = {"tokens": tokens, "max_model_len": max_model_len, "kv_bytes": kv_bytes, "states": states}
    needed = [Scratch(0), *_in_layers("reference", OPERATIONS.keys() - {"linear", *native}, [layer], step)]
    if is_quantized and "linear" not in native:
        # The reference of `moe` dequantizes by the rule of `linear`.
        matrices = (*layer.linears, *layer.expert_weights)
        needed += (_scratch("reference", "linear", {"elements": matrix.num_elements}) for matrix in matrices)
    if gathering_ranks and "gather_act_order" not in native:
        widest = max((sizes["in_size"] for sizes in layer_sizes("linear", layer)), default=0)
        sizes = step | {"elements": gathering_ranks * widest}
        needed.append(_scratch("reference", "gather_act_order", sizes))
    return max(scratch.shared for scratch in needed)


def _in_layers(
    implementation: str, ops: Collection[str], layers: Iterable[LayerSpec], step: Mapping[str, object]
) -> Iterator[Scratch]:
    """Yield the scratch memory of the operations' calls in the layers, as far as there are rules for it."""
    for layer in layers:
        for op, rule, sizes in _ruled_calls(implementation, layer):
            if op in ops:
                yield call_with_known(rule, {**sizes, **step})


@lru_cache(maxsize=4096)
def _ruled_calls(implementation: str, layer: LayerSpec) -> Sequence[tuple[str, Callable[..., Scratch], JsonObject]]:
    """Return the calls of a layer that have a rule for their scratch memory: operation, rule and sizes."""
    rows = [(op, operation.implementation(implementation)) for op, operation in OPERATIONS.items()]
    return [
        (op, row.scratch, sizes)
        for op, row in rows
        if row is not None and row.scratch is not None
        for sizes in layer_sizes(op, layer)
    ]


def _of_head(
    implementation: str, ops: Collection[str], head: tuple[int, int], positions: int, step: Mapping[str, object]
) -> Iterator[Scratch]:
    """Yield the scratch memory of the LM head and of sampling."""
    in_size, vocab_size = head
    sizes = {**step, "in_size": in_size, "out_size": vocab_size, "vocab_size": vocab_size}
    sizes |= {"tokens": positions, "positions": positions}
    yield from (_scratch(implementation, op, sizes) for op in ("linear", "sample") if op in ops)


def _scratch(implementation: str, op: str, sizes: Mapping[str, object]) -> Scratch:
    row = OPERATIONS[op].implementation(implementation)
    return Scratch(0) if row is None or row.scratch is None else call_with_known(row.scratch, sizes)
