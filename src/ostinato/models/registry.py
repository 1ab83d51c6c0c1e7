"""From a ModelSpec to its model. A new architecture is one line here and one folder beside this file."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from ostinato.layers.build import Build
from ostinato.layers.linear import place_matrices
from ostinato.models.base import CausalLM
from ostinato.plan.model import ModelSpec

MODELS = {
    "bamba": "Bamba",
    "falcon_h1": "FalconH1",
    "granitemoehybrid": "GraniteMoeHybrid",
    "llama": "Llama",
    "mamba2": "Mamba2",
    "nemotron_h": "NemotronH",
    "qwen3": "Qwen3",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
}


def build_model(build: Build, spec: ModelSpec) -> CausalLM:
    """The model of `spec`, its weights allocated on `build.device` and not yet written."""
    module = import_module(f"ostinato.models.{spec.architecture}.model")
    make = getattr(module, MODELS[spec.architecture])
    if spec.quantization is None:
        model: CausalLM = make(build, spec)
    else:
        model = make(replace(build, defers_matrices=True), spec)
        place_matrices(model, build, spec.quantization, spec.tied_embeddings)
    return model.eval()
