"""Scratch memory of a step's kernels for the layers of a model, by the rules in the operations' facts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

from ostinato.ops import scratch as rules
from ostinato.ops.operations import OPERATIONS, call_with_known
from ostinato.ops.scratch import Scratch
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import operations_of


def native_scratch(
    layers: Iterable[LayerSpec],
    head: tuple[int, int],
    native: Collection[str],
    tokens: int,
    positions: int,
    max_model_len: int,
    threads: int,
    in_order: bool = False,
) -> int:
    """Return an upper bound of the bytes that the kernels of `native` keep: shared by all threads, and per thread.

    `head` are the input and output sizes of the LM head; `positions` are sampled. With `in_order`, inputs of
    matmuls may have another order in their weights (act-order).
    """
    needed = [Scratch(0)]

    def note(op: str, **numbers: int) -> None:
        row = OPERATIONS[op].native
        if op in native and row is not None and row.scratch is not None:
            needed.append(call_with_known(row.scratch, numbers))

    for layer in layers:
        for linear in layer.linears:
            note("linear", tokens=tokens, in_size=linear.in_size, in_order=in_order)
        if layer.experts is not None:
            note(
                "moe",
                tokens=tokens,
                size=layer.experts.size,
                inner=layer.experts.intermediate_size,
                num_experts=layer.experts.num_experts,
                experts_per_token=layer.experts.top_k,
            )
        if layer.attention is not None:
            note(
                "attention",
                num_heads=layer.attention.num_heads,
                num_kv_heads=layer.attention.num_kv_heads,
                head_dim=layer.attention.head_dim,
                max_model_len=max_model_len,
                threads=threads,
            )
        for op in operations_of(layer.mixer):
            note(op, **_sizes(layer, tokens=tokens, threads=threads))
    note("linear", tokens=positions, in_size=head[0], in_order=in_order)
    note("sample", positions=positions, vocab_size=head[1])
    return max(each.shared for each in needed) + threads * max(each.own for each in needed)


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

    The step has `tokens` tokens in `rows` rows, or `decode_tokens` tokens of decode rows. `head`, `positions` and
    `in_order` are as for `native_scratch`.
    """
    needed = [0]

    def note(op: str, rule: Callable[..., int], **numbers: int) -> None:
        if op in triton:
            needed.append(rule(**numbers))

    width = {"element_bytes": element_bytes}
    for layer in layers:
        for linear in layer.linears:
            inputs = {"in_size": linear.in_size, "in_order": in_order}
            note("linear", rules.triton_linear, tokens=tokens, outputs=linear.out_size, **inputs, **width)
        if layer.experts is not None:
            note(
                "moe",
                rules.triton_moe,
                tokens=tokens,
                size=layer.experts.size,
                inner=layer.experts.inner_size,
                num_experts=layer.experts.num_experts,
                experts_per_token=layer.experts.top_k,
                **width,
            )
        if layer.attention is not None:
            attention = layer.attention
            note(
                "attention",
                rules.triton_attention,
                tokens=decode_tokens,
                rows=rows,
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
            )
        if "delta_scan" in operations_of(layer.mixer):
            sizes = _sizes(layer, tokens=tokens, rows=rows)
            note("delta_scan", partial(call_with_known, rules.triton_delta_scan, sizes))
    inputs = {"in_size": head[0], "in_order": in_order}
    note("linear", rules.triton_linear, tokens=positions, outputs=head[1], **inputs, **width)
    note("sample", rules.triton_sample, positions=positions, vocab_size=head[1])
    return max(needed)


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
    needed = [Scratch(0)]

    def note(op: str, **numbers: int) -> None:
        row = OPERATIONS[op].reference
        if op not in native and row.scratch is not None:
            needed.append(call_with_known(row.scratch, numbers))

    if layer.attention is not None:
        note(
            "attention",
            tokens=tokens,
            kv_elements=layer.attention.kv_elements_per_token,
            kv_bytes=kv_bytes,
            max_model_len=max_model_len,
        )
    for op in operations_of(layer.mixer):
        note(op, **_sizes(layer, tokens=tokens, states=states))
    if is_quantized:
        matrices = (*layer.linears, *layer.expert_weights)
        note("linear", elements=max((each.num_elements for each in matrices), default=0))
    if gathering_ranks:
        widest = max((each.in_size for each in layer.linears), default=0)
        note("gather_act_order", tokens=tokens, elements=gathering_ranks * widest)
    return max(each.shared for each in needed)


def _sizes(layer: LayerSpec, **numbers: int) -> dict[str, int]:
    """Return the sizes of a layer's mixer and of the step."""
    return numbers if layer.mixer is None else {**layer.mixer.sizes, **numbers}
