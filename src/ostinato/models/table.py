"""The weight table of a model: read off a sketch of it, which is the model without memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ostinato.layers.module import Module
from ostinato.layers.sketch import Sketch
from ostinato.models.registry import make_model
from ostinato.plan.model import ModelSpec
from ostinato.plan.weights import Weight


def with_weights(spec: ModelSpec) -> ModelSpec:
    """`spec` with the weights of its model, each layer's and its encoder's and prediction head's among them."""
    # Layers of one kind are alike, so that one of each is enough.
    kinds = tuple(dict.fromkeys(spec.layers))
    model = make_model(Sketch(), replace(spec, layers=kinds, drafter=spec.head))
    backbone, head, encoder = model.backbone, model.head, model.encoder
    apart = [module for module in (backbone.layers, head, encoder) if module is not None]
    by_kind = {layer: replace(layer, weights=_rows(block)) for layer, block in zip(kinds, backbone.layers, strict=True)}
    table = replace(
        spec,
        layers=tuple(by_kind[layer] for layer in spec.layers),
        weights=_rows(model, without=apart),
        backbone=f"{model.name_of(backbone)}.",
    )
    if table.vision is not None and encoder is not None:
        table = replace(table, vision=replace(table.vision, weights=_rows(encoder, model.name_of(encoder))))
    if table.head is not None and head is not None:
        pairs = zip(table.head.layers, head.blocks, strict=True)
        layers = tuple(replace(layer, weights=_rows(block)) for layer, block in pairs)
        outer = _rows(head, model.name_of(head), without=[head.blocks])
        table = replace(table, head=replace(table.head, layers=layers, weights=outer))
    return table


def _rows(module: Module, name: str = "", without: Iterable[Module] = ()) -> tuple[Weight, ...]:
    return tuple(row for _, _, row in module.weights(name, without))
