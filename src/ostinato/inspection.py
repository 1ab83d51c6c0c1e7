"""Checkpoint inspection for `ostinato inspect`: its contents, and whether and how it would run here.

The tensors come from the headers of the files alone, and are compared by name and type with those that the model needs.
Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.config import EngineConfig
from ostinato.engine.text.chat_template import load_chat_template
from ostinato.engine.text.tokenizer import load_default_params, load_tokenizer
from ostinato.errors import OstinatoError
from ostinato.files import find_in_checkpoint, is_file, matches
from ostinato.formats import quantization_config
from ostinato.formats.checkpoint_json import gguf_header, is_gguf, read_checkpoint_json
from ostinato.formats.gguf.architectures import checkpoint_name, may_be_absent
from ostinato.formats.gguf.reader import SUPPORTED
from ostinato.formats.gguf.tensor_names import NO_WEIGHTS
from ostinato.formats.gguf.tokenizer import PREFIX
from ostinato.formats.mapped_files import SafetensorsFile, weight_files
from ostinato.json_io import JsonObject
from ostinato.layers.sketch import Sketch
from ostinato.models.checkpoint import load_spec, read_config
from ostinato.models.registry import make_model
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.plan.weights import of_all_experts
from ostinato.serve.chat.answer_parser import detect_formats, takes_tools


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint. `type` is a type of blocks in GGUF files, of numbers in others."""

    name: str
    type: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def stored_tensors(checkpoint: Path, files: list[Path] | None = None) -> list[Stored]:
    """Return the tensors of a GGUF file, or of `files` of a directory: without them, of all its safetensors files.

    Raises ModelError for a file that is damaged.
    """
    if is_gguf(checkpoint):
        places = gguf_header(checkpoint).tensors.values()
        return [Stored(place.name, place.type.name, place.shape, place.num_bytes) for place in places]
    names = [str(file.relative_to(checkpoint)) for file in files or matches(checkpoint, "*.safetensors")]
    return [tensor for name in names for tensor in _safetensors(checkpoint, name)]


def _safetensors(directory: Path, name: str) -> Iterator[Stored]:
    """Yield the tensors of a safetensors file."""
    file = find_in_checkpoint(directory, name, may_leave=True)
    if file is None:
        return
    tensors = SafetensorsFile(file)
    for name in tensors.names:
        kind, shape = tensors.dtype(name), tuple(tensors.shape(name))
        bits = re.search(r"\d+", kind)  # as in F8_E4M3; of BOOL there are 8
        yield Stored(name, kind, shape, math.prod(shape) * (int(bits[0]) if bits else 8) // 8)


_SHOWN = 5
_VALUES = "values"
"""The part of a weight that is the tensor with the weight's name."""


def mismatches(spec: ModelSpec, tensors: Iterable[Stored], of_gguf: bool) -> list[str]:
    """Return sentences on what keeps these tensors from being loaded. Shapes are compared when weights are loaded."""
    model, tensors = make_model(Sketch(), spec), list(tensors)
    found = set() if of_gguf else {model.checkpoint_name(tensor.name) for tensor in tensors}
    expected = {
        name for _, _, row in model.weights() for name in ((row.whole_name,) if row.whole_name in found else row.names)
    }
    if of_gguf:
        expected = {of_all_experts(name) for name in expected}
    stored = spec.stored_quantization
    parts: dict[str, dict[str, Stored]] = {}
    unexpected, types = [], set[str]()
    for tensor in tensors:
        types.add(tensor.type)
        if of_gguf and tensor.name in NO_WEIGHTS:
            continue
        known = checkpoint_name(spec, tensor.name) if of_gguf else tensor.name
        name = None if known is None else model.checkpoint_name(known)
        if known is not None and name is None:  # it is known, but not loaded
            continue
        place, part = re.sub(r":\w+$", "", name or ""), _VALUES
        if stored is not None:
            place, part = quantization_config.split(stored, place, _VALUES)
        if place in expected:
            parts.setdefault(place, {})[part] = tensor
        else:
            unexpected.append(tensor.name)
    missing = [name for name in expected if name not in parts]
    if of_gguf:
        missing = [name for name in missing if not may_be_absent(spec.architecture, name)]
    if stored is not None:
        for place, of_place in parts.items():
            is_quantised = _VALUES in of_place and of_place[_VALUES].type == quantization_config.type_of_values(stored)
            absent, extra = quantization_config.complete(stored, of_place, is_quantised)
            missing += [quantization_config.name_of(stored, place, part) for part in absent]
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


@dataclass(frozen=True)
class OfType:
    """Tensors of one type, all of them together."""

    type: str
    tensors: int
    parameters: int
    bytes: int


@dataclass
class CheckpointReport:
    """All that can be read of a checkpoint. `refused` says why it cannot run; without such reasons it can."""

    path: str
    files: list[str] = field(default_factory=list)
    architecture: str | None = None
    """The `model_type`; for a GGUF file with an unknown architecture, the file's own word for it."""
    context_length: int | None = None
    tensors: list[OfType] = field(default_factory=list)
    tokenizer: JsonObject | None = None
    template: JsonObject | None = None
    layers: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    """Implementation that the plan chooses, by operation."""
    dtype: str | None = None
    weights: list[str] = field(default_factory=list)
    """Decisions on the stored weights, in the plan's words."""
    refused: list[str] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return not self.refused


def inspect_checkpoint(path: Path, device: DeviceSpec) -> CheckpointReport:
    """Return the report of a GGUF file or a directory; what cannot be read or run is a sentence in it."""
    report = CheckpointReport(str(path), _files(path))
    files = None if is_gguf(path) else _told(report, lambda: weight_files(path))
    tensors = _told(report, lambda: stored_tensors(path, files)) or []
    report.tensors = _by_type(tensors)
    config = _told(report, lambda: read_config(path)) or {}
    kind = config.get("model_type")
    report.architecture = kind if kind and isinstance(kind, str) else _word(path)
    inner = config.get("text_config") or config
    report.context_length = inner.get("max_position_embeddings")
    report.tokenizer = _told(report, lambda: _tokenizer(path))
    report.template = _told(report, lambda: _template(path))
    if not config:
        return report
    engine = EngineConfig(model=str(path))
    spec = _told(report, lambda: load_spec(engine))
    if spec is None:
        return report
    report.layers = dict(Counter(layer.kind for layer in spec.layers))
    if tensors:
        report.refused += mismatches(spec, tensors, is_gguf(path))
    plan = _told(report, lambda: make_plan(engine, spec, device))
    if plan is not None:
        report.kernels = {name: choice.implementation for name, choice in plan.kernels.items()}
        report.dtype = plan.settings.dtype
        chosen = (each for each in plan.decisions if each.topic in ("weights", "quantization"))
        report.weights = [f"{each.requested} -> {each.effective}: {each.reason}" for each in chosen]
    return report


def _told(report: CheckpointReport, read: Any) -> Any:
    """Return the result of `read`; on an error, add its message once to the report and return None."""
    try:
        return read()
    except OstinatoError as error:
        if error.message not in report.refused:
            report.refused.append(error.message)
        return None


def _files(path: Path) -> list[str]:
    if not is_gguf(path):
        return [each.name for each in matches(path, "*") if is_file(each)]
    try:
        files = {tensor.file.name for tensor in gguf_header(path).tensors.values()}
    except OstinatoError:
        files = set()
    return sorted(files | {path.name})


def _word(path: Path) -> str | None:
    if not is_gguf(path):
        return None
    try:
        word = gguf_header(path).metadata.get("general.architecture")
    except OstinatoError:
        return None
    return word if isinstance(word, str) else None


def _by_type(tensors: list[Stored]) -> list[OfType]:
    """Return the totals by type, those with most bytes first."""
    types = dict.fromkeys(tensor.type for tensor in tensors)
    found = []
    for kind in types:
        each = [tensor for tensor in tensors if tensor.type == kind]
        sizes = (sum(tensor.num_elements for tensor in each), sum(tensor.num_bytes for tensor in each))
        found.append(OfType(kind, len(each), *sizes))
    return sorted(found, key=lambda of_type: -of_type.bytes)


def _tokenizer(path: Path) -> JsonObject | None:
    """Return facts about the tokenizer; None if prompts can be given as token ids alone.

    ModelError if an engine would refuse it, or the sampling defaults beside it.
    """
    load_default_params(load_tokenizer(path), path)
    parts = read_checkpoint_json(path, "tokenizer.json")
    if not parts:
        return None
    settings, model = read_checkpoint_json(path, "tokenizer_config.json"), parts.get("model") or {}
    facts: JsonObject = {"model": model.get("type"), "tokens": len(model.get("vocab") or ())}
    if is_gguf(path):
        metadata = gguf_header(path).metadata
        facts |= {"as_stored": metadata.get(f"{PREFIX}model"), "pre_tokenizer": metadata.get(f"{PREFIX}pre")}
    ends = read_checkpoint_json(path, "generation_config.json").get("eos_token_id")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: settings.get(name) for name in names if settings.get(name) is not None}
    special = {name: value.get("content") if isinstance(value, dict) else value for name, value in special.items()}
    return facts | {"special_tokens": special, "end_token_ids": ends, "begins_with_bos": settings.get("add_bos_token")}


def _template(path: Path) -> JsonObject | None:
    """Return facts about the chat template; None if the model cannot chat."""
    template = load_chat_template(path)
    if not template.text:
        return None
    added = read_checkpoint_json(path, "tokenizer.json").get("added_tokens") or []
    ids = {token.get("content"): token.get("id") for token in added if isinstance(token, dict)}
    formats = detect_formats(template, ids.get)
    return {
        "characters": len(template.text),
        "takes_tools": takes_tools(template),
        "tool_calls": None if formats.tools is None else formats.tools.name,
        "reasoning": None if formats.reasoning is None else f"{formats.reasoning.begin} {formats.reasoning.end}",
    }
