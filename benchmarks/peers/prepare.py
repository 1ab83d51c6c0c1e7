"""Makes what the engines load and is not there yet: a random checkpoint per shape, and llama.cpp's files of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.places import Places
from benchmarks.peers.process import PeerError, run
from ostinato.errors import ModelError
from ostinato.formats.gguf.reader import read_header
from ostinato.models.named_models import NAMED, named_file

TIMEOUT = 1800.0
ROOT_ON_PATH = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
}


def prepare(places: Places, shape: Path, kinds: tuple[str, ...], report: Callable[[str], None]) -> dict[str, str]:
    """Makes the checkpoint of `shape`, a directory with a config.json, and its GGUF files of `kinds`.

    Of a model that has a name in Ostinato there is one file, and it stays as it is. Returns, for each kind that could
    not be made, why. PeerError if it is the checkpoint.
    """
    model = shape.name
    if model in NAMED:
        return _link_named(places, model, kinds)
    checkpoint = places.checkpoint(model)
    if not _is_of(checkpoint, shape):
        report(f"{model}: making a checkpoint of random weights")
        shutil.rmtree(checkpoint.parent, ignore_errors=True)
        unfinished = checkpoint.with_name("unfinished")
        unfinished.mkdir(parents=True)
        run([sys.executable, "-m", "benchmarks.peers.checkpoint", str(shape), str(unfinished)], TIMEOUT, ROOT_ON_PATH)
        unfinished.rename(checkpoint)
    refused = {}
    for kind in kinds:
        if not places.gguf(model, kind).exists():
            report(f"{model}: making llama.cpp's {kind} file")
            try:
                _make_gguf(places, model, kind)
            except PeerError as error:
                refused[kind] = str(error)
    return refused


def named_kind(model: str) -> str:
    """The kind of the file of a model that has a name: `q4_k_m`."""
    return re.split(r"[.-]", Path(NAMED[model].file).stem)[-1].lower()


def vocab_size(shape: Path) -> int:
    """Of a model that is prepared."""
    if shape.name in NAMED:
        header = read_header(named_file(shape.name))
        return len(header.metadata["tokenizer.ggml.tokens"])
    size: int = json.loads((shape / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return size


def _link_named(places: Places, model: str, kinds: tuple[str, ...]) -> dict[str, str]:
    try:
        file = named_file(model)
    except ModelError as error:
        raise PeerError(str(error)) from None
    own = named_kind(model)
    link = places.gguf(model, own)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(file)
    return {kind: f"{model} is one file, of {own}" for kind in kinds if kind != own}


def _is_of(checkpoint: Path, shape: Path) -> bool:
    config = checkpoint / "config.json"
    return config.exists() and config.read_bytes() == (shape / "config.json").read_bytes()


def _make_gguf(places: Places, model: str, kind: str) -> None:
    target = places.gguf(model, kind)
    unfinished = target.with_suffix(".unfinished")
    if kind == "bf16":
        module = [sys.executable, "-m", "benchmarks.peers.to_gguf"]
        command = [*module, str(places.llama_sources), str(places.checkpoint(model)), str(unfinished)]
    else:
        if not places.gguf(model, "bf16").exists():
            _make_gguf(places, model, "bf16")
        tool = places.llama_tool("llama-quantize")
        command = [str(tool), str(places.gguf(model, "bf16")), str(unfinished), kind]
    run(command, TIMEOUT, ROOT_ON_PATH)
    unfinished.rename(target)
