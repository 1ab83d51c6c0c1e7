"""Nemotron 3 Nano Omni (model_type `nemotron_h_omni`): the text model of a checkpoint that has encoders too.

The encoders of images and sounds are not run.
"""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.gemma3.spec import spec_of_text
from ostinato.models.nemotron_h.spec import model_spec as text_spec
from ostinato.plan.model import ModelSpec

LEFT_OUT = "the encoders of images and sounds are not run; requests are text"


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of the text part of a `nemotron_h_omni` config.json. ModelError as for `nemotron_h`."""
    text = config.get("text_config") or config.get("llm_config")  # Released checkpoints have the second name.
    return spec_of_text({**config, "text_config": text}, text_spec, "nemotron_h_omni", LEFT_OUT, {})
