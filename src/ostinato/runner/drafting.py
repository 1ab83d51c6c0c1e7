"""Drafter of an engine according to the plan: its weights, its part of the cache memory, its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ostinato.graphs.step_graphs import StepGraphs
from ostinato.models.base import Assistant, CausalLM
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.plan.speculation import draft_capture
from ostinato.runner.graph_setup import make_graphs
from ostinato.runner.inputs import write_next_tokens, write_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from ostinato.spec_decode.model_drafters import (
    DraftModelProposer,
    MtpProposer,
    PredictionHeadForward,
    Proposer,
    RunDraftBatch,
    TokenSelector,
    single_token_row,
)
from ostinato.spec_decode.ngram import NgramProposer

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
    own, drafter = memory[len(spec.layers) :], spec.drafter
    assert drafter is not None, "methods other than ngram have a drafter"
    capture = draft_capture(plan.capture, drafter.method, settings.max_num_seqs, settings.max_num_batched_tokens)
    draft: CausalLM | None = None
    if drafter.model is not None:
        of_draft = drafter.model.with_fixed_ropes(settings.max_model_len)
        draft = make_model(replace(of_draft, quantization=speculative.quantization), draft_directory)
    if draft is not None and not isinstance(draft, Assistant):
        forward = partial(_forward_draft, draft, own)
        graphs = make_graphs(plan, capture, draft, forward, own, max_tokens=settings.max_num_batched_tokens)
        return Drafter(DraftModelProposer(draft, _run_draft_batch(graphs, settings.block_size), choose), draft, graphs)
    if draft is not None:
        draft.check_weights()
    head = PredictionHeadForward(model, draft or model.head, own, settings.max_num_seqs)
    others = {"drafts.hidden": head.hidden}
    others |= {f"embedding.{name}": array for name, array in model.embedding.local_tensors()}
    graphs = make_graphs(plan, capture, draft or model, head, own, max_tokens=settings.max_num_seqs, others=others)
    steps = (GraphHeadStepRunner if draft is None else AssistantStepRunner)(graphs, settings.block_size)
    return Drafter(MtpProposer(head, steps, choose), draft, graphs)


class GraphHeadStepRunner:
    """Steps of a prediction head, as `HeadStepRunner`. Only the first of successive steps is written as a whole."""

    def __init__(self, graphs: StepGraphs, block_size: int) -> None:
        self._graphs = graphs
        self._block_size = block_size

    def first(self, rows: Sequence[BatchRow], tokens: Sequence[int], depth: int) -> Array:
        self._rows = tuple(single_token_row(row, token, depth) for row, token in zip(rows, tokens, strict=True))
        batch = Batch(self._rows, len(rows))
        self._inputs = write_step_inputs(self._graphs.buffers, batch, self._block_size)
        return self._graphs.run(self._inputs)

    def next(self, tokens: Sequence[int]) -> Array:
        write_next_tokens(self._graphs.buffers, self._rows, tokens, self._block_size)
        return self._graphs.run(self._inputs)


class AssistantStepRunner:
    """Steps of an assistant, as `HeadStepRunner`. All drafts of a row attend from its last stored key.

    Their rotary positions are those of the row's token, which has no key yet.
    """

    def __init__(self, graphs: StepGraphs, block_size: int) -> None:
        self._graphs = graphs
        self._block_size = block_size

    def first(self, rows: Sequence[BatchRow], tokens: Sequence[int], depth: int) -> Array:  # noqa: ARG002
        steps = tuple(
            row._replace(token_ids=(token,), start=row.start - 1, read_slot=0, write_slots=(0,), num_drafts=0)
            for row, token in zip(rows, tokens, strict=True)
        )
        self._inputs = write_step_inputs(self._graphs.buffers, Batch(steps, len(steps)), self._block_size)
        self._graphs.buffers.arrays["positions"][: len(steps)] += 1
        return self._graphs.run(self._inputs)

    def next(self, tokens: Sequence[int]) -> Array:
        self._graphs.buffers.arrays["token_ids"][: len(tokens)] = tokens
        return self._graphs.run(self._inputs)


def _forward_draft(draft: CausalLM, memory: Sequence[LayerCache], inputs: StepInputs) -> Array:
    hidden: Array = draft(inputs, memory)
    return hidden


def _run_draft_batch(graphs: StepGraphs, block_size: int) -> RunDraftBatch:
    return lambda batch: graphs.run(write_step_inputs(graphs.buffers, batch, block_size))
