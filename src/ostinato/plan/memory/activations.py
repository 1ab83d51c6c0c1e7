"""Activations: what a step takes beside weights and cache, which depends on the kernels that run. Pure functions of
plain numbers."""

from __future__ import annotations

from collections.abc import Collection

from ostinato.plan.kernels import ENCODER_ONLY
from ostinato.plan.memory.passes import Pass, drafter_pass, own_pass
from ostinato.plan.model import DTYPE_BYTES, LayerSpec, ModelSpec
from ostinato.plan.native_scratch import native_scratch

LOGIT_COPIES = 9
"""Floats per logit while sampling: raw, float32 and processed copies, and a sort with its 64-bit indices; 8
were seen with top-p."""

NATIVE_LOGIT_COPIES = 4
"""The same where the kernel that samples is native, which sorts in scratch of its own."""

ATTENTION_SLAB = 256
"""Tokens of a prompt chunk that attend at a time, so that a causal mask has no more rows than these."""

EXPANDED = 2**22
"""Elements of 8-bit weights that a reference expands at a time."""


def activation_bytes(
    model: ModelSpec,
    dtype: str,
    tokens: int,
    rows: int,
    max_model_len: int,
    gathers_states: bool,
    tokens_per_row: int = 1,
    native: Collection[str] = (),
    threads: int = 1,
) -> int:
    """Bytes that one step of `tokens` tokens in `rows` rows needs at most, beside weights and cache, without encoding
    images.

    Counted are, as alive at once: the residual stream and its normed form; the greediest layer's intermediate results,
    with what its kernels allocate; or, after the last layer, the logits of `tokens_per_row` positions per row, each
    with its drafts, and their copies while sampling; or as much of the drafter; and a quarter more, since allocators
    hold on to some of what was freed.

    `native` are the operations with a native kernel, whose scratch on `threads` threads is kept from step to step.
    References widen what they read: where any of the model's operations has one, all but logits is counted as a
    float32 copy too. `gathers_states`: whether a decode step gathers all rows' states into one tensor, as the
    references do on a GPU.
    """
    has_references = any(op not in native and op not in ENCODER_ONLY for op in model.ops)
    width = DTYPE_BYTES[dtype]
    element = width + 4 if has_references else width

    def scratch(layer: LayerSpec) -> int:
        """Of the greediest reference."""
        return max(
            0 if "attention" in native else _attention_scratch(layer, width, tokens, max_model_len),
            0 if "ssd_scan" in native else _scan_scratch(layer, rows if gathers_states else 1),
            0 if "linear" in native or model.quantization is None else _expanded_scratch(layer),
        )

    def layers_of(way: Pass) -> int:
        widest = max(
            (
                tokens * (layer.activation_elements + (0 if "moe" in native else layer.expert_elements)) * element
                + scratch(layer)
                for layer in way.layers
            ),
            default=0,
        )
        return max(widest, tokens * way.join_elements * element)

    own, drafter = own_pass(model), drafter_pass(model)
    # A drafter's logits are of one position per row, so that they never decide.
    copies = NATIVE_LOGIT_COPIES if "sample" in native else LOGIT_COPIES
    positions = min(rows * tokens_per_row, tokens)
    logits = positions * model.vocab_size * copies * 4
    peak = tokens * own.kept_elements * element + max(layers_of(own), logits)
    layers = own.layers
    if drafter is not None:
        peak = max(peak, tokens * drafter.kept_elements * element + layers_of(drafter))
        layers += drafter.layers
    head = (model.hidden_size, model.vocab_size)
    kept = native_scratch(layers, head, native, tokens, positions, max_model_len, threads)
    return peak + peak // 4 + kept


def _attention_scratch(layer: LayerSpec, width: int, tokens: int, max_model_len: int) -> int:
    """Of one row at a time: its gathered keys and values, and a slab's causal mask, as bool and as float32."""
    if layer.attention is None:
        return 0
    gathered = max_model_len * layer.attention.kv_elements_per_token * width
    return gathered + min(tokens, ATTENTION_SLAB, max_model_len) * max_model_len * (1 + 4)


def _scan_scratch(layer: LayerSpec, states: int) -> int:
    """Of one chunk: decay and weights [heads, chunk, chunk] and scores [groups, chunk, chunk]; and three
    copies of `states` SSM states (before, added, after); all in float32."""
    if layer.mamba2 is None:
        return 0
    mamba2 = layer.mamba2
    chunk = (2 * mamba2.num_heads + mamba2.num_groups) * mamba2.chunk_size**2
    return 4 * (chunk + 3 * states * mamba2.ssm_state_elements)


def _expanded_scratch(layer: LayerSpec) -> int:
    """Of 8-bit weights: a slab, and its scales spread out, in float32."""
    largest = max((linear.in_size * linear.out_size for linear in (*layer.linears, *layer.experts)), default=0)
    return 2 * 4 * min(EXPANDED, largest)
