"""Where in a checkpoint's files the values of each weight stand, and whether they are quantised there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ostinato.errors import ModelError
from ostinato.layers.build import Target
from ostinato.models.base import CausalLM
from ostinato.plan.quantization import Quantization

PACKED = 4
"""8-bit weights in one int32 of a packed tensor."""

PARTS = ("weight_packed", "weight_scale", "weight_shape")
"""What stands for a `weight` in a checkpoint of compressed-tensors. In format int-quantized an int8 tensor stands under
that name itself, beside a `weight_scale`."""


@dataclass
class Source:
    """The tensors that hold one weight: part -> (file, name there). The part is the tensor's own, or one of `PARTS`."""

    parts: dict[str, tuple[Path, str]] = field(default_factory=dict)
    is_transposed: bool = False
    """Whether it has rows for columns."""

    @property
    def main(self) -> tuple[Path, str]:
        """The file and the name of the tensor with the values."""
        return self.parts.get("weight_packed") or self.parts["values"]

    @property
    def scale(self) -> tuple[Path, str] | None:
        return self.parts.get("weight_scale")


@dataclass(frozen=True)
class Mismatch:
    """What keeps a checkpoint from being loaded: names of tensors, and sentences on their shapes."""

    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]

    def message(self, directory: Path) -> str:
        parts = [f"The weights in {directory} do not match its config.json."]
        lists = (("missing", self.missing), ("left over", self.unexpected), ("wrong shape", self.misshapen))
        parts += [f"{title} ({len(names)}): {', '.join(names)}." for title, names in lists if names]
        return "\n".join(parts)


def find_sources(
    model: CausalLM, files: list[Path], places: Mapping[str, Target]
) -> tuple[dict[str, Source], Mismatch]:
    """The source of each place, and what is missing, left over or of another shape."""
    stored = model.spec.stored_quantization
    sources: dict[str, Source] = {}
    integers: set[str] = set()
    unexpected, misshapen = [], []
    for file in files:
        with opened(file) as tensors:
            for source_name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                name = model.checkpoint_name(source_name)
                if name is None:
                    continue
                place, part = _place_and_part(name) if stored is not None else (name, "values")
                if place not in places or (part != "values" and len(places[place].shape) < 2):
                    unexpected.append(source_name)
                    continue
                found = tensors.get_slice(source_name)
                of_place = list(places[place].shape)
                shape, expected = list(found.get_shape()), _shape(part, of_place, stored)
                if part == "weight_shape" and shape in ([2], [len(of_place)]):
                    shape = tensors.get_tensor(source_name).tolist()
                    # Of a stack it may be that of one matrix of all rows.
                    expected = of_place if len(shape) > 2 else [math.prod(of_place[:-1]), of_place[-1]]
                source = sources.setdefault(place, Source())
                if shape != expected and place.endswith(model.transposable):
                    source.is_transposed = shape == [*expected[:-2], expected[-1], expected[-2]]
                if shape != expected and not source.is_transposed:
                    misshapen.append(f"{source_name} is {shape}, expected {expected}")
                if part == "values" and stored is not None and found.get_dtype() == "I8":
                    integers.add(place)
                source.parts[part] = (file, source_name)
    missing = [name for name in places if name not in sources]
    for name, source in sources.items():
        if "weight_packed" not in source.parts and "values" not in source.parts:
            missing.append(f"{name}_packed")
        elif source.scale is None and ("weight_packed" in source.parts or name in integers):
            missing.append(f"{name}_scale")
        elif source.scale is not None and "weight_packed" not in source.parts and name not in integers:
            unexpected.append(source.scale[1])
    return sources, Mismatch(sorted(missing), sorted(unexpected), misshapen)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file, mapped. ModelError if it cannot be read."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}. It may be truncated; download it again.") from error


def _place_and_part(name: str) -> tuple[str, str]:
    parent, _, last = name.rpartition(".")
    return (f"{parent}.weight", last) if last in PARTS else (name, "values")


def _shape(part: str, place: list[int], stored: Quantization | None) -> list[int]:
    """That a tensor should have."""
    *rows, columns = place
    if part == "weight_packed":
        return [*rows, -(-columns // PACKED)]
    if part == "weight_scale":
        group_size = stored.group_size if stored is not None else None
        return [*rows, 1 if group_size is None else -(-columns // group_size)]
    return [2] if part == "weight_shape" else place
