"""Passes of a token through layers in one step, and the width of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.plan.layers import LayerSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.states import Mixer


@dataclass(frozen=True)
class Pass:
    """One pass through layers.

    `kept_elements` per token are alive from its start to its end, `join_elements` only before the first layer, as
    `LayerSpec.activation_elements` are within one.
    """

    kept_elements: int
    layers: tuple[LayerSpec, ...]
    join_elements: int = 0

    @property
    def widest_elements(self) -> int:
        """Elements per token at the peak between its start and its end, besides `kept_elements`."""
        return max(self.join_elements, *(layer.activation_elements for layer in self.layers), 0)

    @property
    def state_layers(self) -> tuple[Mixer, ...]:
        return tuple(layer.mixer for layer in self.layers if layer.mixer is not None)


def model_pass(model: ModelSpec) -> Pass:
    """Return the pass through the model itself, where the residual stream and its normed form stay alive."""
    return Pass(2 * model.hidden_size, model.layers)


def drafter_pass(model: ModelSpec) -> Pass | None:
    """Return the pass through the drafter, or None without one.

    A prediction head also keeps the model's hidden states alive. Before its first layer it joins them with the tokens'
    embeddings: both normed, and side by side.
    """
    drafter = model.drafter
    if drafter is None:
        return None
    if drafter.model is not None:
        return model_pass(drafter.model)
    return Pass(3 * drafter.hidden_elements, drafter.layers, 4 * drafter.hidden_elements)


def with_distinct_layers(model: ModelSpec) -> ModelSpec:
    """Return the model with one of each kind of layer: its peak is the same, and it is quicker to search."""
    drafter = model.drafter
    if drafter is not None:
        draft = None if drafter.model is None else with_distinct_layers(drafter.model)
        drafter = replace(drafter, layers=tuple(dict.fromkeys(drafter.layers)), model=draft)
    return replace(model, layers=tuple(dict.fromkeys(model.layers)), drafter=drafter)
