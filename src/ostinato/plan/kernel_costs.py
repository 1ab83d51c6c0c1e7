"""Work of each kernel in a step, for all layers, and the operations that a cached prefix saves in a prefill.

The rules for a kernel are in its operation's row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ostinato.ops.kernel_cost import KernelCost, StepShape, pair_flops
from ostinato.ops.operations import OPERATIONS, call_with_known, prefill_op
from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec, layer_sizes
from ostinato.plan.memory.cache_modes import bytes_per_token
from ostinato.plan.mixers import Mixer, StateDtype
from ostinato.plan.model import ModelSpec
from ostinato.plan.weights import Weight


@dataclass(frozen=True)
class PrefillFlops:
    """Floating-point operations of a prefill.

    `per_token` is for each token, `per_pair` for each pair of a token and one that it attends to: an earlier one or
    itself.
    """

    per_token: float
    per_pair: float

    def until(self, tokens: int) -> float:
        """Return the operations of the first `tokens` tokens of a prompt."""
        return self.per_token * tokens + self.per_pair * tokens * (tokens + 1) / 2


@dataclass(frozen=True)
class StateCachePlan:
    """Work that a hit saves. The settings say how prefixes are kept, the memory split how many."""

    prefill_flops: PrefillFlops


def prefill_flops(model: ModelSpec) -> PrefillFlops:
    """Return the work of all layers that compute prompts, a head's and a draft model's included.

    Embeddings cost none, and only a prompt's last token needs the LM head. Every parameter that a token uses counts as
    one multiplication and one addition; of the experts, those that the router chooses.
    """
    met = sum(layer.used_parameters - layer.inactive_parameters for layer in model.prefill_layers)
    if model.drafter is not None and model.drafter.method == "mtp":
        met += model.drafter.outer_parameters
    scans = sum(mixer.scan_flops for mixer in model.state_layers)
    attention = [layer.attention for layer in model.prefill_layers if layer.attention is not None]
    pairs = sum(pair_flops(layer.num_heads, layer.head_dim) for layer in attention)
    return PrefillFlops(per_token=float(2 * met + scans), per_pair=float(pairs))


LOGITS = "logits"
"""Separate name of the LM head's `linear`, for one position of a prompt row, or all positions of a decode row."""


@dataclass(frozen=True)
class KernelCostPart:
    """Work of one operation on data stored in one dtype: weights, states, or keys and values.

    `storage` is that dtype (`int8` for weights of 8 bits).
    """

    name: str
    storage: str
    work: KernelCost

    @property
    def operation(self) -> str:
        return "linear" if self.name == LOGITS else self.name


def kernel_work(
    model: ModelSpec,
    dtype: str,
    ssm_state_dtype: str,
    step: StepShape,
    kv_cache_dtype: str | None = None,
    experts_read: Sequence[int] = (),
) -> dict[str, KernelCost | None]:
    """Return the work by operation, for all of the model's layers, and that of `logits`.

    `kv_cache_dtype` is that of keys and values, None: the model's. Operations that only pass over activations are left
    out. `experts_read` are the experts that the step's tokens choose in each layer that has experts. Without it None
    for the experts of a step with several tokens: their choice is not known beforehand.
    """
    works: dict[str, KernelCost] = {}
    for part in kernel_parts(model, dtype, ssm_state_dtype, step, kv_cache_dtype, experts_read):
        works[part.name] = works.get(part.name, KernelCost()) + part.work
    is_unknown = step.tokens > 1 and not experts_read
    return {name: None if name == "moe" and is_unknown else work for name, work in works.items()}


def kernel_parts(
    model: ModelSpec,
    dtype: str,
    ssm_state_dtype: str,
    step: StepShape,
    kv_cache_dtype: str | None = None,
    experts_read: Sequence[int] = (),
) -> Iterator[KernelCostPart]:
    """Yield the work of `kernel_work` by storage. Without `experts_read`, as if every token chose them at random."""
    kept, num_read = kv_cache_dtype or dtype, iter(experts_read)
    for i, layer in enumerate(model.layers):
        inside = f"{model.backbone}layers.{i}."
        yield from _products(model, dtype, step, "linear", _product_parameters(layer), layer.linears, inside)
        if layer.experts is not None:
            num_experts = next(num_read, None) or expected_experts(layer.experts, step.tokens)
            yield from _of_experts(model, dtype, step, layer, layer.experts, inside, num_experts)
        if layer.attention is not None:
            of_token = bytes_per_token(layer.attention, kept)
            of_index = of_token - bytes_per_token(replace(layer.attention, indexer=None), kept)
            moved = {"kv_bytes_per_token": of_token, "index_bytes_per_token": of_index}
            for name in layer.attention.operations:
                for sizes in layer_sizes(name, layer):
                    yield KernelCostPart(name, kept, _work(name, step, **sizes, **moved))
        if layer.mixer is not None:
            yield from _of_mixer(layer.mixer, {"model": dtype, "state": ssm_state_dtype}, step)
    head, each = model.lm_head, StepShape(step.rows, step.tokens_per_row if step.decodes else 1, 0, step.decodes)
    yield from _products(model, dtype, each, LOGITS, head.num_elements, [head], "")


def _products(
    model: ModelSpec,
    dtype: str,
    step: StepShape,
    name: str,
    parameters: int,
    matrices: Iterable[Weight],
    inside: str,
) -> Iterator[KernelCostPart]:
    """Yield the work of matmuls with `parameters` weights, separately for 8-bit weights.

    The parameters include those of `matrices`, whose names get the prefix `inside`.
    """
    quantization = model.quantization
    matrices = [] if quantization is None else [matrix.with_prefix(inside) for matrix in matrices]
    small = [matrix for matrix in matrices if quantization is not None and quantization.quantises(matrix)]
    elements = sum(matrix.num_elements for matrix in small)
    plain = parameters - elements
    if plain:
        yield KernelCostPart(name, dtype, _work("linear", step, parameters=plain, num_bytes=plain * DTYPE_BYTES[dtype]))
    if small and quantization is not None:
        num_bytes = sum(quantization.num_bytes(matrix) for matrix in small)
        yield KernelCostPart(name, "int8", _work("linear", step, parameters=elements, num_bytes=num_bytes))


def _of_experts(
    model: ModelSpec,
    dtype: str,
    step: StepShape,
    layer: LayerSpec,
    experts: ExpertsSpec,
    inside: str,
    num_read: float,
) -> Iterator[KernelCostPart]:
    met = experts.top_k * experts.parameters_of_each
    share = num_read / experts.num_experts
    for part in _products(model, dtype, step, "moe", layer.expert_parameters, layer.expert_weights, inside):
        all_met = part.work.flops * met / layer.expert_parameters
        yield KernelCostPart("moe", part.storage, KernelCost(part.work.num_bytes * share, all_met))


def _of_mixer(mixer: Mixer, dtypes: Mapping[StateDtype, str], step: StepShape) -> Iterator[KernelCostPart]:
    """Yield the work of the operations that read and write a part of its state, by the dtype of that part."""
    for operation, array in mixer.operations.items():
        if array is not None:
            name, storage = operation if step.decodes else prefill_op(operation), dtypes[mixer.state[array].dtype]
            yield KernelCostPart(name, storage, _work(name, step, **mixer.sizes, element_bytes=DTYPE_BYTES[storage]))


def expected_experts(experts: ExpertsSpec, tokens: int) -> float:
    """Return how many experts `tokens` tokens read, on average, if each chooses at random."""
    return experts.num_experts * (1 - (1 - experts.top_k / experts.num_experts) ** tokens)


def _work(operation: str, step: StepShape, **numbers: float) -> KernelCost:
    rule = OPERATIONS[operation].work
    assert rule is not None, f"{operation} has a rule"
    work: KernelCost = call_with_known(rule, {**numbers, "step": step})
    return work


def _product_parameters(layer: LayerSpec) -> int:
    """Return the weights and biases of a layer's `linear` operations, including routers.

    Norms over the hidden size are included too: they are too small to matter.
    """
    others = layer.expert_parameters
    if layer.mixer is not None:
        others += layer.mixer.conv_parameters
    return layer.used_parameters - others
