"""Drafter of an engine according to the plan: its weights, its part of the cache memory, its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.graphs.step_graphs import StepGraphs
from ostinato.models.base import CausalLM
from ostinato.ops.step_inputs import LayerCache
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.plan.speculation import draft_capture
from ostinato.runner.graph_setup import make_graphs
from ostinato.runner.inputs import write_next_tokens, write_step_inputs
from ostinato.scheduler.batch import Batch
from ostinato.spec_decode.model_drafters import (
    DraftModelProposer,
    MtpProposer,
    PredictionHeadForward,
    Proposer,
    RunDraftBatch,
    TokenSelector,
)
from ostinato.spec_decode.ngram import NgramProposer

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array

MakeModel = Callable[[ModelSpec, Path | None], CausalLM]


@dataclass(frozen=True)
class Drafter:
    """A proposer, with its draft model and its graphs, if there are any."""

    proposer: Proposer
    model: CausalLM | None = None
    graphs: StepGraphs | None = None

    @property
    def runs_layers(self) -> bool:
        """True if it runs layers, which are sharded over the ranks."""
        return self.graphs is not None


def make_drafter(
    plan: Plan,
    spec: ModelSpec,
    model: CausalLM,
    memory: Sequence[LayerCache],
    make_model: MakeModel,
    draft_directory: Path | None,
    choose: TokenSelector,
) -> Drafter | None:
    """Return the drafter of the plan's `speculative`; None without it.

    `memory` is that of all cached layers, the drafter's after the model's. `make_model` makes a second model with the
    weights in a directory, `choose` samples drafts from their logits. ModelError if weights do not match.
    """
    speculative, settings = plan.speculative, plan.settings
    if speculative is None:
        return None
    if speculative.method == "ngram":
        assert speculative.prompt_lookup_min is not None, "method ngram has lengths to look up"
        assert speculative.prompt_lookup_max is not None, "method ngram has lengths to look up"
        return Drafter(NgramProposer(speculative.prompt_lookup_min, speculative.prompt_lookup_max))
    own = memory[len(spec.layers) :]
    capture = draft_capture(plan.capture, speculative.method, settings.max_num_seqs, settings.max_num_batched_tokens)
    if speculative.method == "mtp":
        head = PredictionHeadForward(model, own, settings.max_num_seqs)
        graphs = make_graphs(
            plan, capture, model, head, own, max_tokens=settings.max_num_seqs, others={"drafts.hidden": head.hidden}
        )
        return Drafter(
            MtpProposer(model, head, GraphHeadStepRunner(graphs, settings.block_size), choose), graphs=graphs
        )
    assert spec.drafter is not None, "method draft has a drafter"
    assert spec.drafter.model is not None, "method draft has a second model"
    of_draft = spec.drafter.model.with_fixed_ropes(settings.max_model_len)
    of_draft = replace(of_draft, quantization=speculative.quantization)
    draft = make_model(of_draft, draft_directory)
    graphs = make_graphs(
        plan, capture, draft, lambda inputs: draft(inputs, own), own, max_tokens=settings.max_num_batched_tokens
    )
    return Drafter(DraftModelProposer(draft, _run_draft_batch(graphs, settings.block_size), choose), draft, graphs)


class GraphHeadStepRunner:
    """Steps of a prediction head, as `Steps`. Only the first of successive steps is written as a whole."""

    def __init__(self, graphs: StepGraphs, block_size: int) -> None:
        self._graphs = graphs
        self._block_size = block_size

    def first(self, batch: Batch) -> Array:
        self._rows = batch.rows
        self._inputs = write_step_inputs(self._graphs.buffers, batch, self._block_size)
        return self._graphs.run(self._inputs)

    def next(self, tokens: Sequence[int]) -> Array:
        write_next_tokens(self._graphs.buffers, self._rows, tokens, self._block_size)
        return self._graphs.run(self._inputs)


def _run_draft_batch(graphs: StepGraphs, block_size: int) -> RunDraftBatch:
    return lambda batch: graphs.run(write_step_inputs(graphs.buffers, batch, block_size))
