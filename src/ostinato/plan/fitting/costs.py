"""Costs of limits: the bytes that they take besides weights, blocks and slots."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.ops.facts import ops_called_by
from ostinato.plan.encoder.choice import encoder_activations, encoder_memory
from ostinato.plan.encoder.needs import EncoderMemory
from ostinato.plan.fitting.settle import ResolvedConfig
from ostinato.plan.graphs.coverage import FULL_MODES
from ostinato.plan.graphs.ladders import LadderLimit
from ostinato.plan.kernels import backend_of, not_capturable_in_decode, ops_of, splits_of
from ostinato.plan.limits import Limits
from ostinato.plan.memory.activations import activation_bytes
from ostinato.plan.memory.cache_split import NO_ENCODER, MemoryBudget, cache_bytes_left
from ostinato.plan.memory.graph_memory import Capture, LargestGraphs, graph_bytes
from ostinato.plan.memory.torch_memory import workspace_bytes


@dataclass(frozen=True)
class MemoryCosts:
    """Bytes that some limits take besides weights, blocks and slots."""

    activations: int
    graphs: int
    encoder: EncoderMemory

    def room(self, budget: MemoryBudget) -> int:
        """Return the bytes that are left for blocks and slots; negative if not even the costs fit."""
        return cache_bytes_left(budget, self.activations, self.graphs + self.encoder.total)


def costs_of(settled: ResolvedConfig, limits: Limits, reach: LadderLimit, cache_tokens: int | None = None) -> MemoryCosts:
    """Return the costs of these limits, with an encoder cache of `cache_tokens` tokens, or of the minimum."""
    encoder = settled.encoder
    activations = activation_bytes(
        settled.distinct_layers,
        settled.dtype,
        tokens=limits.max_num_batched_tokens,
        rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        gathers_states=_gathers_states(settled),
        tokens_per_row=settled.slots_per_request,
        native=ops_of(settled.kernels, "native"),
        threads=settled.threads or 1,
        triton=ops_of(settled.kernels, "triton"),
        kv_cache_dtype=settled.kv_cache_dtype,
    )
    if settled.device.kind == "cuda":
        activations += workspace_bytes(settled.device.capability, streams=2)
    if encoder is not None:
        # Images are encoded before the text part runs.
        activations = max(activations, encoder_activations(encoder, limits))
    return MemoryCosts(
        activations,
        graph_cost(settled, limits, settled.captured(limits, reach)),
        NO_ENCODER if encoder is None else encoder_memory(encoder, limits, cache_tokens),
    )


def graph_cost(settled: ResolvedConfig, limits: Limits, captured: LargestGraphs) -> int:
    """Return the bytes of all graphs if these are the largest."""
    # Without graphs, the mode that would cover a batch has full graphs, if their kernels can be captured.
    can_be_full = settled.graph_mode == "none" and not not_capturable_in_decode(settled.kernels)
    gathers_states = _gathers_states(settled) and (settled.graph_mode in FULL_MODES or can_be_full)
    references = {*ops_of(settled.kernels, "reference")} - ops_called_by("encoder")
    return graph_bytes(
        settled.distinct_layers,
        settled.dtype,
        captured,
        limits=limits,
        block_size=settled.config.block_size,
        has_panes=settled.budget.pane_window > 0,
        capture=Capture(
            backend_of(settled.device.kind),
            frozenset(splits_of(settled.kernels)),
            gathers_states,
            holds_references=bool(references - {"sample"}),
            triton=frozenset(ops_of(settled.kernels, "triton")),
        ),
    )


def _gathers_states(settled: ResolvedConfig) -> bool:
    """Return whether a decode step gathers all rows' states into one tensor, as the reference does on a GPU."""
    triton = ops_of(settled.kernels, "triton")
    return settled.device.kind == "cuda" and any(
        array is not None and mixer.state[array].dtype == "state" and operation not in triton
        for mixer in settled.distinct_layers.state_layers
        for operation, array in mixer.operations.items()
    )
