"""The report of a checkpoint: what it is, and what would run, or why nothing would. Imports no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.config import EngineConfig
from ostinato.engine.text.chat_template import load_chat_template
from ostinato.errors import OstinatoError
from ostinato.formats.gguf.tokenizer import PREFIX
from ostinato.formats.parts import gguf_header, is_gguf, read_checkpoint_json
from ostinato.inspection.match import mismatches
from ostinato.inspection.tensors import Stored, stored_tensors
from ostinato.models.checkpoint import load_spec, read_config
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.plan.plan import make_plan
from ostinato.serve.chat.detection import detect_formats, takes_tools


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
    tokenizer: dict[str, Any] | None = None
    template: dict[str, Any] | None = None
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
    tensors = _told(report, lambda: stored_tensors(path)) or []
    report.tensors = _by_type(tensors)
    if not tensors and not report.refused:
        report.refused.append("it holds no weights: no GGUF file and no *.safetensors")
    config = _told(report, lambda: read_config(path)) or {}
    report.architecture = config.get("model_type") or _word(path)
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
        return sorted(each.name for each in path.iterdir() if each.is_file())
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


def _tokenizer(path: Path) -> dict[str, Any] | None:
    """Return facts about the tokenizer; None if prompts can be given as token ids alone."""
    parts = read_checkpoint_json(path, "tokenizer.json")
    if not parts:
        return None
    settings, model = read_checkpoint_json(path, "tokenizer_config.json"), parts.get("model") or {}
    facts: dict[str, Any] = {"model": model.get("type"), "tokens": len(model.get("vocab") or ())}
    if is_gguf(path):
        metadata = gguf_header(path).metadata
        facts |= {"as_stored": metadata.get(f"{PREFIX}model"), "pre_tokenizer": metadata.get(f"{PREFIX}pre")}
    ends = read_checkpoint_json(path, "generation_config.json").get("eos_token_id")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: settings.get(name) for name in names if settings.get(name) is not None}
    special = {name: value.get("content") if isinstance(value, dict) else value for name, value in special.items()}
    return facts | {"special_tokens": special, "end_token_ids": ends, "begins_with_bos": settings.get("add_bos_token")}


def _template(path: Path) -> dict[str, Any] | None:
    """Return facts about the chat template; None if the model cannot chat."""
    template = load_chat_template(path)
    if not template.text:
        return None
    formats = detect_formats(template)
    return {
        "characters": len(template.text),
        "takes_tools": takes_tools(template),
        "tool_calls": None if formats.tools is None else formats.tools.name,
        "reasoning": None if formats.reasoning is None else f"{formats.reasoning.begin} {formats.reasoning.end}",
    }
