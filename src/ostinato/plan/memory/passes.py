"""Passes: the ways of a token through layers in one step, and how wide each is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.plan.layers import LayerSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.states import Mixer


@dataclass(frozen=True)
class Pass:
    """One way through layers. `kept_elements` per token are alive from its begin to its end, `join_elements` only
    before the first layer, as `LayerSpec.activation_elements` are within one."""

    kept_elements: int
    layers: tuple[LayerSpec, ...]
    join_elements: int = 0

    @property
    def widest_elements(self) -> int:
        """Per token, of the greediest moment between its begin and its end."""
        return max(self.join_elements, *(layer.activation_elements for layer in self.layers), 0)

    @property
    def state_layers(self) -> tuple[Mixer, ...]:
        return tuple(layer.mixer for layer in self.layers if layer.mixer is not None)


def own_pass(model: ModelSpec) -> Pass:
    """Through the model itself: kept are the residual stream and its normed form."""
    return Pass(2 * model.hidden_size, model.layers)


def drafter_pass(model: ModelSpec) -> Pass | None:
    """Through what makes drafts, where something with weights does.

    A prediction head keeps the model's hidden states too, and before its first layer joins them with the tokens': both
    normed, and side by side.
    """
    drafter = model.drafter
    if drafter is None:
        return None
    if drafter.model is not None:
        return own_pass(drafter.model)
    return Pass(3 * drafter.hidden_elements, drafter.layers, 4 * drafter.hidden_elements)


def of_each_kind(model: ModelSpec) -> ModelSpec:
    """The model with one of each kind of layer: as greedy as it at its greediest, and quicker to look through."""
    drafter = model.drafter
    if drafter is not None:
        draft = None if drafter.model is None else of_each_kind(drafter.model)
        drafter = replace(drafter, layers=tuple(dict.fromkeys(drafter.layers)), model=draft)
    return replace(model, layers=tuple(dict.fromkeys(model.layers)), drafter=drafter)
