"""Weight table and calls of a model for the plan, both read off a sketch, a model without memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from ostinato.layers.module import Module, ModuleList
from ostinato.layers.sketch import Sketch
from ostinato.models.base import Assistant, CausalLM, PredictionHead
from ostinato.models.registry import make_model
from ostinato.ops.operations import COLLECTIVE_OPS, OPERATIONS
from ostinato.ops.step_inputs import (
    EncoderInputs,
    LayerCache,
    StepInputs,
    Table,
    encoder_sizes,
    encoder_table,
    step_sizes,
    step_table,
)
from ostinato.plan.graphs.arena import CallTrace
from ostinato.plan.layer_specs import LayerSpec, VisionSpec
from ostinato.plan.model import DrafterSpec, ModelSpec
from ostinato.plan.tensor_parallel import Rank
from ostinato.plan.weights import Weight

NO_MEMORY = LayerCache(states=defaultdict(lambda: None))  # type: ignore[arg-type, return-value]
"""Memory of a sketch's layer: every array that it asks for is absent."""


def with_weight_table(spec: ModelSpec) -> ModelSpec:
    """Return `spec` with the weights, operations and calls of its model, its encoder and its prediction head."""
    table = _table(spec, Rank(0, spec.ranks))
    if spec.ranks == 1:
        return table
    last = _table(spec, Rank(spec.ranks - 1, spec.ranks))
    if table.head is not None and last.head is not None:
        calls = replace(table.head.calls, on_last_rank=last.head.calls)
        step_calls = replace(table.head.step_calls, on_last_rank=last.head.step_calls)
        table = replace(table, head=replace(table.head, calls=calls, step_calls=step_calls))
    return replace(table, calls=replace(table.calls, on_last_rank=last.calls))


def _table(spec: ModelSpec, rank: Rank) -> ModelSpec:
    """Return `spec` with what a sketch of this rank's part of the model finds."""
    sketch = Sketch(rank)
    # Layers of one kind are alike, so one of each is enough.
    kinds = tuple(dict.fromkeys(spec.layers))
    model = make_model(sketch, replace(spec, layers=kinds, drafter=spec.head))
    backbone, head, encoder = model.backbone, model.head, model.encoder
    blocks = dict(zip(kinds, backbone.layers, strict=True))
    layers = {layer: _layer(sketch, model, layer, block) for layer, block in blocks.items()}
    apart = [module for module in (backbone.layers, head, encoder) if module is not None]
    weights, ops = _rows(model, without=apart), set[str]()
    for decoding, count in ((0, 1), (1, 2)):  # A step of both kinds of rows joins their results.
        ops |= _names(_own(_step(sketch, model, decoding, count)))
    hidden, logits_of = sketch.trace.input((1, spec.hidden_size), sketch.dtype), cast("Any", model.compute_logits)
    ops |= _names(sketch.trace.run(lambda: logits_of(hidden))) - set(COLLECTIVE_OPS)
    backbone.layers = ModuleList(blocks[layer] for layer in spec.layers)
    step = _step(sketch, model, decode_rows=1)
    own = _own(step)
    table = replace(
        spec,
        layers=tuple(layers[layer] for layer in spec.layers),
        weights=weights,
        backbone=f"{model.name_of(backbone)}.",
        ops=tuple(sorted(ops | _names(own))),
        calls=own,
    )
    if spec.vision is not None and encoder is not None:
        rows = _rows(encoder, model.name_of(encoder))
        vision = replace(spec.vision, weights=rows, calls=encoder_calls(sketch, encoder, spec.vision))
        table = replace(table, vision=vision, ops=tuple(dict.fromkeys((*table.ops, *sorted(_names(vision.calls))))))
    if spec.head is not None and head is not None:
        table = replace(table, head=_head(sketch, model, head, spec.head, step))
    return table


def _head(sketch: Sketch, model: CausalLM, head: PredictionHead, spec: DrafterSpec, step: CallTrace) -> DrafterSpec:
    """Return the spec of a prediction head with its weights and calls.

    `step` has the model's calls, followed by those with which the head follows it.
    """
    inputs = _step_inputs(sketch, model, decode_rows=1)
    hidden = sketch.trace.input((1, spec.hidden_elements), sketch.dtype)
    memory = [NO_MEMORY] * (len(head.blocks) + 1)
    draft = sketch.trace.run(lambda: head(hidden, model.embedding(inputs.token_ids), inputs, memory))
    follows = step.calls[step.result + 1 :]
    ops = _names(CallTrace((*follows, *draft.calls))) - {
        "embedding",
        "sharded_embedding",
    }  # These belong to the model.
    rows = zip(spec.layers, head.blocks, strict=True)
    return replace(
        spec,
        layers=tuple(_layer(sketch, model, layer, block) for layer, block in rows),
        weights=_rows(head, model.name_of(head), without=[head.blocks]),
        places=tuple(model.name_of(block) for block in head.blocks),
        ops=tuple(sorted(ops)),
        calls=draft,
        step_calls=step,
    )


def _layer(sketch: Sketch, model: CausalLM, layer: LayerSpec, block: Module) -> LayerSpec:
    """Return a layer with its weights and the most memory that its calls hold at once.

    The calls are those of a step with a decode row and a prompt row, which takes more than either alone.
    """
    step = StepInputs(**_step_buffers(sketch, model, rows=2), num_decode_rows=1)
    x = sketch.trace.input((2, model.spec.hidden_size), sketch.dtype)
    angles = None if model.spec.rope is None else sketch.trace.input((2, 2, 1), sketch.float32)
    calls = replace(sketch.trace.run(lambda: block(x, angles, step, NO_MEMORY)), entries=2)
    borrowed = tuple(row for name, module in block.borrowed.items() for row in _rows(module, name))
    # The normed residual stream is counted separately from the layers.
    widest = calls.widest_elements - model.spec.hidden_size
    return replace(layer, weights=_rows(block), shared_weights=borrowed, activation_elements=widest)


def encoder_calls(sketch: Sketch, encoder: Module, spec: VisionSpec) -> CallTrace:
    """Return the encoder's calls for one output token."""
    patches = spec.patches_per_token
    sizes = encoder_sizes(patches, 1, spec.patch_elements, spec.taps)
    inputs = EncoderInputs(**_inputs(sketch, encoder_table(sketch.dtype, spec.has_windows), sizes))
    return replace(sketch.trace.run(lambda: encoder(inputs)), entries=patches)


def _rows(module: Module, name: str = "", without: Iterable[Module] = ()) -> tuple[Weight, ...]:
    return tuple(row for _, _, row in module.weights(name, without))


def _names(calls: CallTrace) -> set[str]:
    """Return the operations among the calls; other calls are torch's."""
    return {call.operation for call in calls.calls} & OPERATIONS.keys()


def _step(sketch: Sketch, model: CausalLM, decode_rows: int, rows: int = 1) -> CallTrace:
    """Return the calls of a step with `rows` rows of one token each. The first `decode_rows` rows decode."""
    inputs = _step_inputs(sketch, model, decode_rows, rows)
    if isinstance(model, Assistant):
        states = [sketch.trace.input((rows, model.target_size), sketch.dtype) for _ in range(2)]
        memory = [NO_MEMORY] * len(model.backbone.layers)
        return sketch.trace.run(lambda: model(*states, inputs, memory))
    head, vision, drafter = model.head, model.encoder, model.spec.drafter
    behind = 0 if drafter is None or not drafter.starts_from_hidden else 1
    behind += (0 if head is None else len(head.blocks)) + (0 if vision is None else 1)
    memory = [NO_MEMORY] * (len(model.backbone.layers) + behind)
    return sketch.trace.run(lambda: model(inputs, memory))


def with_draft_calls(spec: ModelSpec) -> ModelSpec:
    """Return `spec` with the calls of its assistant's drafts, and of the steps that keep the hidden state for it."""
    drafter, (calls, step) = spec.drafter, _draft_calls(spec, 0)
    assert drafter is not None, "it is attached"
    if spec.ranks > 1:
        last, last_step = _draft_calls(spec, spec.ranks - 1)
        calls, step = replace(calls, on_last_rank=last), replace(step, on_last_rank=last_step)
    ops = tuple(sorted({*drafter.ops, *_names(calls), *_names(step)}))
    return replace(spec, drafter=replace(drafter, calls=calls, step_calls=step, ops=ops))


def _draft_calls(spec: ModelSpec, rank: int) -> tuple[CallTrace, CallTrace]:
    """Return the calls of a draft and of a step, for one token on this rank."""
    sketch, drafter = Sketch(Rank(rank, spec.ranks)), spec.drafter
    assert drafter is not None, "it is attached"
    assert drafter.model is not None, "an assistant is a model"
    target, assistant = make_model(sketch, spec), make_model(sketch, drafter.model)
    inputs = _step_inputs(sketch, assistant, decode_rows=1)
    hidden = sketch.trace.input((1, drafter.hidden_elements), sketch.dtype)
    memory = [NO_MEMORY] * len(drafter.layers)
    calls = sketch.trace.run(lambda: assistant(hidden, target.embedding(inputs.token_ids), inputs, memory))
    return calls, _step(sketch, target, decode_rows=1)


def _own(step: CallTrace) -> CallTrace:
    """Return the calls without those with which a head follows the model."""
    return CallTrace(step.calls[: step.result + 1], step.result)


def _step_inputs(sketch: Sketch, model: CausalLM, decode_rows: int, rows: int = 1) -> StepInputs:
    return StepInputs(**_step_buffers(sketch, model, rows), num_decode_rows=decode_rows)


def _step_buffers(sketch: Sketch, model: CausalLM, rows: int) -> dict[str, Any]:
    """Return the buffers of a step with one token in each of its rows."""
    table = step_table(takes_images=model.encoder is not None, is_prefix_lm=model.spec.is_prefix_lm)
    return _inputs(sketch, table, step_sizes(rows=rows, tokens=rows, blocks=1, slots=1))


def _inputs(sketch: Sketch, table: Table, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {name: sketch.trace.input(each.shape(sizes), each.dtype) for name, each in table.items()}
