"""Ostinato: an inference engine for hybrid language models.

What is exported here is imported on first use, so that planning and `--help` never import torch.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ostinato._version import __version__ as __version__

if TYPE_CHECKING:
    from ostinato.config import EngineConfig as EngineConfig
    from ostinato.engine.async_llm import AsyncLLM as AsyncLLM
    from ostinato.engine.llm import LLM as LLM
    from ostinato.engine.outputs import CompletionOutput as CompletionOutput
    from ostinato.engine.outputs import RequestOutput as RequestOutput
    from ostinato.engine.planning import plan_model as plan_model
    from ostinato.errors import CapacityError as CapacityError
    from ostinato.errors import ConfigError as ConfigError
    from ostinato.errors import ContextLengthError as ContextLengthError
    from ostinato.errors import EngineFailed as EngineFailed
    from ostinato.errors import EngineStopped as EngineStopped
    from ostinato.errors import ForkError as ForkError
    from ostinato.errors import MediaError as MediaError
    from ostinato.errors import ModelError as ModelError
    from ostinato.errors import OstinatoError as OstinatoError
    from ostinato.errors import PromptsFailed as PromptsFailed
    from ostinato.errors import RequestError as RequestError
    from ostinato.errors import StepFailed as StepFailed
    from ostinato.sampling.guide import Guide as Guide
    from ostinato.sampling.params import SamplingParams as SamplingParams
    from ostinato.scheduler.batch import TokenLogprobs as TokenLogprobs
    from ostinato.serve.chat.tool_chat import ToolChat as ToolChat
    from ostinato.verify.verify import verify_model as verify_model

_HOMES = {
    name: f"ostinato.{module}"
    for module, names in {
        "config": ("EngineConfig",),
        "engine.async_llm": ("AsyncLLM",),
        "engine.llm": ("LLM",),
        "engine.outputs": ("CompletionOutput", "RequestOutput"),
        "engine.planning": ("plan_model",),
        "errors": (
            "CapacityError",
            "ConfigError",
            "ContextLengthError",
            "EngineFailed",
            "EngineStopped",
            "ForkError",
            "MediaError",
            "ModelError",
            "OstinatoError",
            "PromptsFailed",
            "RequestError",
            "StepFailed",
        ),
        "sampling.guide": ("Guide",),
        "sampling.params": ("SamplingParams",),
        "scheduler.batch": ("TokenLogprobs",),
        "serve.chat.tool_chat": ("ToolChat",),
        "verify.verify": ("verify_model",),
    }.items()
    for name in names
}
"""Module of each exported name. The imports above tell type checkers the same, which a test holds to it."""

__all__ = sorted(_HOMES)


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
