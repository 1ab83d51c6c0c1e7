"""Gemma 4 (model_type `gemma4`): the text model of a checkpoint that has encoders of images and sounds too.

The encoders are not run: tokens of an image see those after them in the image, and attention here those before alone.
"""

from __future__ import annotations

from dataclasses import replace

from ostinato.json_io import JsonObject
from ostinato.models.config_json import checkpoint_dtype, flag
from ostinato.models.gemma4_text.spec import SHARDED_DIMS as SHARDED_DIMS
from ostinato.models.gemma4_text.spec import model_spec as text_spec
from ostinato.models.qwen3_vl.spec import part
from ostinato.plan.model import ModelSpec

LEFT_OUT = (
    "encoders of images and sounds are not run, since images need attention in both directions; requests are text"
)


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of the text part of a `gemma4` config.json. ModelError as for `gemma4_text`."""
    text = part(config, "text_config")
    text = {**text, "dtype": checkpoint_dtype({**text, **config})}
    text["tie_word_embeddings"] = flag(config, "tie_word_embeddings", flag(text, "tie_word_embeddings", True))
    return replace(text_spec(text), architecture="gemma4", left_out=LEFT_OUT)
