"""Gemma 3 of 4B and more (model_type `gemma3`): the text model of a checkpoint that has an encoder of images too.

The encoder is not run: a token of an image sees those after it in the image, and attention here sees only those before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import checkpoint_dtype, flag
from ostinato.models.gemma3_text.spec import SHARDED_DIMS as SHARDED_DIMS
from ostinato.models.gemma3_text.spec import model_spec as text_spec
from ostinato.models.qwen3_vl.spec import part
from ostinato.plan.model import ModelSpec

VOCABULARY = 262_208
"""Default of a config.json without `vocab_size`."""
LEFT_OUT = "the encoder of images is not run, since its images need attention in both directions; requests are text"


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of the text part of a `gemma3` config.json. ModelError as for `gemma3_text`."""
    return spec_of_text(config, text_spec, "gemma3", LEFT_OUT, {"vocab_size": VOCABULARY})


def spec_of_text(
    config: JsonObject,
    text_spec: Callable[[JsonObject], ModelSpec],
    architecture: str,
    left_out: str,
    defaults: JsonMapping,
) -> ModelSpec:
    """Return what `text_spec` makes of a config's text part, whose dtype and ties the whole config may give.

    `left_out` says what of the checkpoint is not run. `defaults` are those of the text part.
    """
    text = {**defaults, **part(config, "text_config")}
    text["dtype"] = checkpoint_dtype({**text, **config})
    text["tie_word_embeddings"] = flag(config, "tie_word_embeddings", flag(text, "tie_word_embeddings", True))
    return replace(text_spec(text), architecture=architecture, left_out=left_out)
