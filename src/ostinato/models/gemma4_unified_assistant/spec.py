"""Assistant of Gemma 4 Unified: that of Gemma 4, for another target."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.gemma4_assistant.spec import assistant_spec
from ostinato.models.gemma4_unified_text.spec import model_spec as text_spec
from ostinato.plan.model import ModelSpec

TARGETS, TARGET_SIZE = ("gemma4_unified", "gemma4_unified_text"), 3840


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma4_unified_assistant` config.json. ModelError for layers with keys of their own."""
    return assistant_spec(config, text_spec, "gemma4_unified_assistant", TARGETS, TARGET_SIZE)
