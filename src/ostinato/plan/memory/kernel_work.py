"""The work of each kernel in a step: the bytes that it must move, and its floating-point operations."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.plan.memory.flops import pair_flops
from ostinato.plan.model import DTYPE_BYTES, LayerSpec, ModelSpec, saved_bytes


@dataclass(frozen=True)
class StepShape:
    """`rows` rows of `tokens_per_row` tokens, each with `context` tokens before it; `decodes`: whether they are decode
    rows."""

    rows: int
    tokens_per_row: int
    context: int
    decodes: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.tokens_per_row

    @property
    def pairs(self) -> float:
        """Of a token and one that it attends to: an earlier one of its row or itself."""
        count = self.tokens_per_row
        return self.rows * (count * self.context + count * (count + 1) / 2)


@dataclass(frozen=True)
class KernelWork:
    """`num_bytes` are the least that must pass between memory and processor: weights once, states from read slots and
    to write slots, keys and values. What a step computes on its way counts for nothing: in decoding it stays in the
    caches. `flops` count a multiplication and an addition as two."""

    num_bytes: float = 0
    flops: float = 0

    def __add__(self, other: KernelWork) -> KernelWork:
        return KernelWork(self.num_bytes + other.num_bytes, self.flops + other.flops)


def kernel_work(model: ModelSpec, dtype: str, ssm_state_dtype: str, step: StepShape) -> dict[str, KernelWork | None]:
    """By operation, of all of the model's layers; `logits` is the LM head's product, for one position of each row.

    Operations that only pass over activations are left out. None for the experts of a step with several tokens, which
    reads those that its tokens choose: that is not known beforehand.
    """
    width, state_width = DTYPE_BYTES[dtype], DTYPE_BYTES[ssm_state_dtype]
    works: dict[str, KernelWork] = {}

    def note(name: str, num_bytes: float, flops: float) -> None:
        works[name] = works.get(name, KernelWork()) + KernelWork(num_bytes, flops)

    for i, layer in enumerate(model.layers):
        met = layer.expert_parameters - layer.inactive_parameters
        products = _product_parameters(layer)
        note("linear", products * width, 2 * products * step.tokens)
        if met:
            experts = [linear.under(f"{model.backbone}layers.{i}.") for linear in layer.expert_weights]
            saved = saved_bytes(experts, model.quantization, dtype) * met / layer.expert_parameters
            note("moe", met * width - saved, 2 * met * step.tokens)
        if layer.attention is not None:
            keys = step.context + 2 * step.tokens_per_row  # all are read, the new ones written before
            num_bytes = step.rows * keys * layer.attention.kv_elements_per_token * width
            note("attention", num_bytes, pair_flops(layer.attention) * step.pairs)
        if layer.mamba2 is not None:
            mamba2 = layer.mamba2
            # A row without a context reads no state: it begins with zeros.
            moved = step.rows * ((1 if step.context else 0) + (step.tokens_per_row if step.decodes else 1))
            taps = mamba2.conv_dim * mamba2.conv_kernel
            note("causal_conv1d", (moved * mamba2.conv_state_elements + taps) * width, 2 * taps * step.tokens)
            states = moved * mamba2.ssm_state_elements * state_width + layer.float32_parameters * 4
            # Each token is added to the state and reads it; a scan by chunks does no less.
            flops = 4 * mamba2.ssm_state_elements * step.tokens
            note("state_update" if step.decodes else "ssd_scan", states, flops)
    *in_layers, head = model.linears
    products = head.in_size * head.out_size
    note("logits", products * width - saved_bytes([head], model.quantization, dtype), 2 * products * step.rows)
    note("linear", -saved_bytes(in_layers, model.quantization, dtype), 0)
    return {name: None if name == "moe" and step.tokens > 1 else work for name, work in works.items()}


def _product_parameters(layer: LayerSpec) -> int:
    """Weights and biases of a layer's `linear` operations, routers among them. Norms over the hidden size are left in:
    they are too small to tell."""
    others = layer.expert_parameters
    if layer.mamba2 is not None:
        others += layer.mamba2.conv_dim * layer.mamba2.conv_kernel
    return layer.parameters - others
