"""Registry of architectures: the module and class of each model."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ostinato.json_io import JsonObject
from ostinato.layers.module import ModelBuilder
from ostinato.models.base import CausalLM
from ostinato.plan.model import ModelSpec

MODELS = {
    "arcee": "arcee.model:Arcee",
    "bailing_hybrid": "bailing_hybrid.model:BailingHybrid",
    "bamba": "bamba.model:Bamba",
    "cohere2": "llama.model:Llama",
    "ernie4_5": "llama.model:Llama",
    "exaone4": "llama.model:Llama",
    "falcon_h1": "falcon_h1.model:FalconH1",
    "falcon_mamba": "mamba.model:Mamba",
    "gemma2": "gemma3_text.model:Gemma3",
    "gemma3": "gemma3.model:Gemma3VL",
    "gemma3_text": "gemma3_text.model:Gemma3",
    "gemma4": "gemma4.model:Gemma4VL",
    "gemma4_assistant": "gemma4_assistant.model:Gemma4Assistant",
    "gemma4_text": "gemma4_text.model:Gemma4",
    "gemma4_unified": "gemma4_unified.model:Gemma4Unified",
    "gemma4_unified_assistant": "gemma4_assistant.model:Gemma4Assistant",
    "gemma4_unified_text": "gemma4_text.model:Gemma4",
    "glm5_next": "glm5_next.model:Glm5Next",
    "gpt_oss": "gpt_oss.model:GptOss",
    "granite": "llama.model:Llama",
    "granite_swa": "granite_swa.model:GraniteSwa",
    "granitemoe": "granitemoehybrid.model:GraniteMoeHybrid",
    "granitemoe_swa": "granite_swa.model:GraniteSwa",
    "granitemoehybrid": "granitemoehybrid.model:GraniteMoeHybrid",
    "hrm_text": "hrm_text.model:HrmText",
    "jamba": "jamba.model:Jamba",
    "kimi_linear": "kimi_linear.model:KimiLinear",
    "lfm2": "lfm2.model:Lfm2",
    "lfm2_moe": "lfm2.model:Lfm2Moe",
    "lfm2_vl": "lfm2_vl.model:Lfm2VL",
    "lfm3": "lfm3.model:Lfm3",
    "lfm3_vl": "lfm3_vl.model:Lfm3VL",
    "llama": "llama.model:Llama",
    "mamba": "mamba.model:Mamba",
    "mamba2": "mamba.model:Mamba2",
    "mellum": "llama.model:Llama",
    "minicpmv4_7": "minicpmv4_7.model:MiniCPMV",
    "ministral3": "llama.model:Llama",
    "mistral": "llama.model:Llama",
    "mixtral": "llama.model:Llama",
    "nemotron_h": "nemotron_h.model:NemotronH",
    "nemotron_h_omni": "nemotron_h_omni.model:NemotronHOmni",
    "olmo3": "llama.model:Llama",
    "olmo_hybrid": "olmo_hybrid.model:OlmoHybrid",
    "phi3": "llama.model:Llama",
    "qwen2": "llama.model:Llama",
    "qwen3": "llama.model:Llama",
    "qwen3_5": "qwen3_5.model:Qwen35VL",
    "qwen3_5_moe": "qwen3_5.model:Qwen35MoeVL",
    "qwen3_5_text": "qwen3_5_text.model:Qwen35",
    "qwen3_5_moe_text": "qwen3_next.model:Qwen3Next",
    "qwen3_moe": "llama.model:Llama",
    "qwen3_next": "qwen3_next.model:Qwen3Next",
    "qwen3_vl": "qwen3_vl.model:Qwen3VL",
    "qwen3_vl_moe": "qwen3_vl.model:Qwen3VLMoe",
    "qwen4_exp": "qwen4_exp_text.model:Qwen4",
    "qwen4_exp_text": "qwen4_exp_text.model:Qwen4",
    "seed_oss": "llama.model:Llama",
    "smollm3": "llama.model:Llama",
    "youtu": "youtu.model:Youtu",
    "zamba2": "zamba2.model:Zamba2",
}
"""Module and class of each architecture's model, by the `model_type` of config.json.

The folder's `spec.py` reads config.json: `model_spec` that of the folder's own architecture, and `NAME_spec` that of
another whose `model_type` is NAME.
"""

NOT_IMPLEMENTED = {
    "zamba": "Zamba of the first generation is not implemented; the second, whose model_type is zamba2, is",
}
"""Advice for each `model_type` that is not implemented."""


def spec_reader(architecture: str) -> Callable[[JsonObject], ModelSpec]:
    """Return the function that reads the config.json of an architecture."""
    folder = MODELS[architecture].partition(".")[0]
    name = "model_spec" if folder == architecture else f"{architecture}_spec"
    reader: Callable[[JsonObject], ModelSpec] = getattr(import_module(f"ostinato.models.{folder}.spec"), name)
    return reader


def make_model(build: ModelBuilder, spec: ModelSpec) -> CausalLM:
    """Build the model of `spec`, with the weights that `build` allocates."""
    module, name = MODELS[spec.architecture].split(":")
    model: CausalLM = getattr(import_module(f"ostinato.models.{module}"), name)(build, spec)
    return model
