"""Sources of weights in a checkpoint's files: the tensors with their values, and whether these are quantised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ostinato.formats import quantization_config
from ostinato.formats.checkpoint_json import is_gguf
from ostinato.formats.mapped_files import SafetensorsFile
from ostinato.formats.quantization_config import FLOATS
from ostinato.layers.allocation import BlockView, QuantizedView, WeightTarget
from ostinato.models.base import CausalLM
from ostinato.models.weight_shards import TensorShard
from ostinato.plan.quantization import StoredWeights

INTEGERS = ("I64", "I32")
"""Types of tensors of ids."""

VALUES = "values"
"""Part of a source that is the tensor of the weight's own name."""


@dataclass
class TensorSource:
    """Tensors of one weight: part -> (mapped file, name there).

    The part is `VALUES`, or the name that the checkpoint's format gives it.
    """

    parts: dict[str, tuple[SafetensorsFile, str]] = field(default_factory=dict)
    is_transposed: bool = False
    """True if the tensor is stored transposed."""
    is_quantised: bool = False
    in_turns: bool = False
    """True if gates and values take turns (`CausalLM.in_turns`)."""

    @property
    def main(self) -> tuple[SafetensorsFile, str]:
        """File and name of the tensor with the values."""
        return next(self.parts[part] for part in (*quantization_config.PACKED, VALUES) if part in self.parts)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the tensors by part, mapped from their files, which may be several."""
        return {part: file.tensor(name) for part, (file, name) in self.parts.items()}


@dataclass(frozen=True)
class CheckpointMismatch:
    """Reasons why a checkpoint cannot be loaded: names of tensors, and sentences on their shapes and types."""

    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]
    mistyped: list[str] = field(default_factory=list)
    not_quantised: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        lists = (self.missing, self.unexpected, self.misshapen, self.mistyped, self.not_quantised, self.differing)
        return any(lists)

    def message(self, checkpoint: Path, *beside: Path) -> str:
        of = "metadata" if is_gguf(checkpoint) else "config.json"
        files = " and ".join(map(str, (checkpoint, *beside)))
        parts = [f"The weights in {files} do not match {'their' if beside else 'its'} {of}."]
        lists = (
            ("missing", self.missing),
            ("left over", self.unexpected),
            ("wrong shape", self.misshapen),
            ("wrong type", self.mistyped),
            ("other values than another copy of the same weight", self.differing),
            ("not quantised, and not among the modules that its quantization_config leaves out", self.not_quantised),
        )
        parts += [f"{title} ({len(names)}): {', '.join(names)}." for title, names in lists if names]
        return "\n".join(parts)


def names_in(model: CausalLM, files: Sequence[SafetensorsFile]) -> set[str]:
    """Return `model`'s names of the tensors in the files."""
    names = {model.checkpoint_name(name) for file in files for name in file.names}
    return {name for name in names if name is not None}


def find_sources(
    model: CausalLM,
    files: Sequence[SafetensorsFile],
    places: Mapping[str, WeightTarget],
    shares: Mapping[str, TensorShard],
) -> tuple[dict[str, TensorSource], CheckpointMismatch]:
    """Return the source of each target, and what is missing, left over or of another shape or type.

    `shares` are those of the targets that are a part of a tensor.
    """
    stored = model.spec.stored_quantization
    tables = {name for _, _, row in model.weights() if row.stays_on_disk for name in row.names}
    sources: dict[str, TensorSource] = {}
    unexpected, misshapen, mistyped, differing = [], [], [], []
    for file in files:
        for source_name in file.names:
            name = model.checkpoint_name(source_name)
            if name is None:
                continue
            place, part = (name, VALUES) if stored is None else quantization_config.split(stored, name, VALUES)
            has_parts = place in places and place not in tables and len(places[place].shape) > 1
            if place not in places or (part != VALUES and not has_parts):
                unexpected.append(source_name)
                continue
            source = sources.setdefault(place, TensorSource())
            if part in source.parts and not _equal(source.parts[part], file.tensor(source_name)):
                differing.append(source_name)
            source.parts[part] = (file, source_name)
            shape, kind = file.shape(source_name) or [1], file.dtype(source_name)
            of_place = list(shares.get(place, places[place]).shape)
            source.in_turns = place.endswith(model.in_turns)
            if part == VALUES:
                source.is_transposed = place.endswith(model.transposed)
                expected = [*of_place[:-2], *reversed(of_place[-2:])] if source.is_transposed else of_place
                quantised = None if stored is None or place in tables else quantization_config.type_of_values(stored)
                source.is_quantised = kind == quantised
                known = INTEGERS if place.endswith(model.integers) else FLOATS
                if kind not in known and not source.is_quantised:
                    mistyped.append(f"{source_name} is {kind}, expected {', '.join(known[:-1])} or {known[-1]}")
            else:
                assert stored is not None, "only quantised weights have parts"
                if part == "weight_shape" and shape in ([2], [len(of_place)]):
                    shape = file.tensor(source_name).tolist()
                expected = quantization_config.shape(stored, part, of_place, shape)
                if kind not in (types := quantization_config.types(stored, part)):
                    wanted = " or ".join(types)
                    mistyped.append(f"{source_name} is {kind}, expected {wanted}")
            if shape != expected and place.endswith(model.transposable):
                source.is_transposed = shape == [*expected[:-2], expected[-1], expected[-2]]
            if shape != expected and (part != VALUES or not source.is_transposed or place.endswith(model.transposed)):
                misshapen.append(f"{source_name} is {shape}, expected {expected}")
    missing = [name for name in places if name not in sources and model.value_if_absent(name) is None]
    not_quantised = []
    for name, source in sources.items():
        if stored is None:
            continue
        absent, extra = quantization_config.complete(stored, source.parts, source.is_quantised)
        missing += [quantization_config.name_of(stored, name, part) for part in absent]
        unexpected += [source.parts[part][1] for part in extra]
        source.is_quantised |= VALUES not in source.parts
        if is_as_stored(stored, places[name]) and not source.is_quantised and not absent:
            not_quantised.append(name)
    return sources, CheckpointMismatch(
        sorted(missing), sorted(unexpected), misshapen, mistyped, not_quantised, differing
    )


def is_as_stored(stored: StoredWeights, place: WeightTarget) -> bool:
    """Return whether a target takes a checkpoint's quantised weights without a change of their values."""
    return isinstance(place, QuantizedView | BlockView) and stored.fits(
        place.name if isinstance(place, BlockView) else None
    )


def _equal(first: tuple[SafetensorsFile, str], second: np.ndarray) -> bool:
    """Return whether a tensor of a file, which may be the same one, equals another."""
    file, name = first
    tensor = file.tensor(name)
    return tensor.dtype == second.dtype and np.array_equal(tensor, second)
