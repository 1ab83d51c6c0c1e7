"""Gemma 4 (model_type `gemma4`): the text model of a checkpoint that has encoders of images and sounds too.

The encoders are not run.
"""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.gemma3.spec import spec_of_text
from ostinato.models.gemma4_text.spec import model_spec as text_spec
from ostinato.plan.model import ModelSpec

LEFT_OUT = "the encoders of images and sounds are not run; requests are text"


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of the text part of a `gemma4` config.json. ModelError as for `gemma4_text`."""
    return spec_of_text(config, text_spec, "gemma4", LEFT_OUT, {})
