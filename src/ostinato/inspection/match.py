"""Comparison of a checkpoint's tensors, by name and type, with those that its model needs. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ostinato.formats import stored_parts
from ostinato.formats.gguf.names import GATE, ROPE_FACTORS, UP, checkpoint_name
from ostinato.formats.gguf.types import SUPPORTED
from ostinato.inspection.tensors import Stored
from ostinato.layers.sketch import Sketch
from ostinato.models.registry import make_model
from ostinato.plan.model import ModelSpec
from ostinato.plan.weights import of_all_experts

_SHOWN = 5
_VALUES = "values"
"""The part of a weight that is the tensor with the weight's name."""


def mismatches(spec: ModelSpec, tensors: Iterable[Stored], of_gguf: bool) -> list[str]:
    """Return sentences on what keeps these tensors from being loaded. Shapes are compared when weights are loaded."""
    model = make_model(Sketch(), spec)
    expected = {name for _, _, row in model.weights() for name in row.names}
    if of_gguf:
        expected = {of_all_experts(name) for name in expected}
    stored = spec.stored_quantization
    parts: dict[str, dict[str, Stored]] = {}
    unexpected, types = [], set[str]()
    for tensor in tensors:
        types.add(tensor.type)
        if of_gguf and tensor.name == ROPE_FACTORS:
            continue
        known = checkpoint_name(spec, tensor.name) if of_gguf else tensor.name
        name = None if known is None else model.checkpoint_name(known)
        if known is not None and name is None:  # it is known, but not loaded
            continue
        place, part = re.sub(f"({GATE}|{UP})$", "", name or ""), _VALUES
        if stored is not None:
            place, part = stored_parts.split(stored, place, _VALUES)
        if place in expected:
            parts.setdefault(place, {})[part] = tensor
        else:
            unexpected.append(tensor.name)
    missing = [name for name in expected if name not in parts]
    if stored is not None:
        for place, of_place in parts.items():
            is_quantised = _VALUES in of_place and of_place[_VALUES].type == stored_parts.type_of_values(stored)
            absent, extra = stored_parts.complete(stored, of_place, is_quantised)
            missing += [stored_parts.name_of(place, part) for part in absent]
            unexpected += [of_place[part].name for part in extra]
    sentences = []
    unknown = sorted(types - set(SUPPORTED)) if of_gguf else []
    if unknown:
        sentences.append(f"tensors of type {', '.join(unknown)} are not read; supported: {', '.join(SUPPORTED)}")
    lists = ("missing", sorted(missing)), ("not known", sorted(unexpected))
    return sentences + [_listed(what, names) for what, names in lists if names]


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensors are {what}: {', '.join(names[:_SHOWN])}{more}"
