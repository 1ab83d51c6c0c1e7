"""The architectures. A new one is one line here and one folder beside this file."""

from __future__ import annotations

from importlib import import_module

from ostinato.layers.module import Builder
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
"""`model_type` of a config.json, which is the folder's name too -> the class of its model."""


def make_model(build: Builder, spec: ModelSpec) -> CausalLM:
    """The model of `spec`, with the weights that `build` gives."""
    module = import_module(f"ostinato.models.{spec.architecture}.model")
    model: CausalLM = getattr(module, MODELS[spec.architecture])(build, spec)
    return model
