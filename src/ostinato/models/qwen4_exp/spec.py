"""Qwen4 (model_type `qwen4_exp`): the text model of a checkpoint with an encoder of images, which is not run."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.gemma3.spec import spec_of_text
from ostinato.models.qwen3_vl.spec import text_of_kind
from ostinato.models.qwen4_exp_text.spec import head_left_out
from ostinato.models.qwen4_exp_text.spec import model_spec as text_spec
from ostinato.plan.model import ModelSpec

LEFT_OUT = "the encoder of images is not run; requests are text"


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of the text part of a `qwen4_exp` config.json. ModelError as for `qwen4_exp_text`."""
    text = text_of_kind(config, "qwen4_exp_text")
    tied = config.get("tie_word_embeddings", False)
    left_out = "; ".join(filter(None, (LEFT_OUT, head_left_out(text))))
    return spec_of_text({**config, "tie_word_embeddings": tied}, text_spec, "qwen4_exp", left_out, {})
