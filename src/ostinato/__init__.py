"""Ostinato: an inference engine for hybrid language models.

What is exported here is imported on first use, so that planning and `--help` never import torch.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ostinato._version import __version__ as __version__

if TYPE_CHECKING:
    from ostinato.config import EngineConfig
    from ostinato.engine.async_llm import AsyncLLM
    from ostinato.engine.llm import LLM
    from ostinato.engine.outputs import CompletionOutput, RequestOutput
    from ostinato.engine.planning import plan_model
    from ostinato.errors import (
        CapacityError,
        ConfigError,
        ContextLengthError,
        EngineFailed,
        EngineStopped,
        ForkError,
        MediaError,
        ModelError,
        OstinatoError,
        PromptsFailed,
        RequestError,
        StepFailed,
    )
    from ostinato.sampling.guide import Guide
    from ostinato.sampling.params import SamplingParams
    from ostinato.scheduler.batch import TokenLogprobs
    from ostinato.serve.chat.tool_chat import ToolChat
    from ostinato.verify.verify import verify_model

_HOMES = {
    "LLM": "ostinato.engine.llm",
    "AsyncLLM": "ostinato.engine.async_llm",
    "CompletionOutput": "ostinato.engine.outputs",
    "Guide": "ostinato.sampling.guide",
    "RequestOutput": "ostinato.engine.outputs",
    "SamplingParams": "ostinato.sampling.params",
    "ToolChat": "ostinato.serve.chat.tool_chat",
    "EngineConfig": "ostinato.config",
    "plan_model": "ostinato.engine.planning",
    "verify_model": "ostinato.verify.verify",
    "TokenLogprobs": "ostinato.scheduler.batch",
    "CapacityError": "ostinato.errors",
    "ConfigError": "ostinato.errors",
    "ContextLengthError": "ostinato.errors",
    "EngineFailed": "ostinato.errors",
    "EngineStopped": "ostinato.errors",
    "ForkError": "ostinato.errors",
    "MediaError": "ostinato.errors",
    "ModelError": "ostinato.errors",
    "OstinatoError": "ostinato.errors",
    "PromptsFailed": "ostinato.errors",
    "RequestError": "ostinato.errors",
    "StepFailed": "ostinato.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "EngineConfig",
    "EngineFailed",
    "EngineStopped",
    "ForkError",
    "Guide",
    "MediaError",
    "ModelError",
    "OstinatoError",
    "PromptsFailed",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StepFailed",
    "TokenLogprobs",
    "ToolChat",
    "plan_model",
    "verify_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from ostinato.other_engines import missing_attribute

        raise missing_attribute("ostinato", name)
    # Imports leave no garbage, and looking for it would take a sixth of torch's import time.
    collects = gc.isenabled()
    gc.disable()
    try:
        value = getattr(import_module(_HOMES[name]), name)
    finally:
        if collects:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
