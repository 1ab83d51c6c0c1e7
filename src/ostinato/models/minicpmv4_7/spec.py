"""MiniCPM-V 4.7 (model_type `minicpmv4_7`): the text model, which is Qwen3.5's, of a checkpoint with an encoder.

The encoder of images is not run.
"""

from __future__ import annotations

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.gemma3.spec import spec_of_text
from ostinato.models.qwen3_5_text.spec import model_spec as text_spec
from ostinato.models.qwen3_vl.spec import part
from ostinato.plan.model import ModelSpec

LEFT_OUT = "the encoder of images is not run; requests are text"


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of the text part of a `minicpmv4_7` config.json. ModelError as for `qwen3_5_text`."""
    kind = part(config, "text_config").get("model_type", "qwen3_5_text")
    if kind != "qwen3_5_text":
        raise ModelError(f"config.json has a text part of model_type = {kind!r}; supported: 'qwen3_5_text'")
    tied = config.get("tie_word_embeddings", False)
    return spec_of_text({**config, "tie_word_embeddings": tied}, text_spec, "minicpmv4_7", LEFT_OUT, {})
