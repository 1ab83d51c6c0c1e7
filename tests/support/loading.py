"""Models of checkpoints, loaded for the references on a CPU without an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ostinato.config import EngineConfig
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import load_spec, model_spec, read_config
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization import Quantization


def load_model(spec: ModelSpec, directory: Path, dtype: str = "float32") -> CausalLM:
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), dtype), spec)
    load_weights(model, directory)
    return model


def load_checkpoint(directory: Path, quantization: Quantization | None = None) -> CausalLM:
    return load_model(replace(model_spec(read_config(directory)), quantization=quantization), directory)


def load_with(directory: Path, dtype: str = "float32", **settings: Any) -> CausalLM:
    """The model of an engine with these settings."""
    return load_model(load_spec(EngineConfig(model=str(directory), **settings)), directory, dtype)
