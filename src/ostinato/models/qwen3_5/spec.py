"""Qwen3.5: its text model with positions in time, height and width, and Qwen3-VL's encoder without DeepStack."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import part
from ostinato.models.qwen3_5_text.spec import model_spec as text_spec
from ostinato.models.qwen3_next.spec import qwen3_5_moe_text_spec
from ostinato.models.qwen3_vl.spec import vl_spec
from ostinato.plan.model import ModelSpec

SECTIONS = (11, 11, 10)
TOKENS = {"image": 248056, "video": 248057, "vision_start": 248053, "vision_end": 248054}
"""Defaults of a config.json without these values."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_5` config.json, whose text and vision parts are separate dicts."""
    return _around(config, "qwen3_5", text_spec)


def qwen3_5_moe_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_5_moe` config.json: experts and a shared one in every layer."""
    return _around(config, "qwen3_5_moe", qwen3_5_moe_text_spec)


def _around(config: JsonObject, architecture: str, text_spec: Callable[[JsonObject], ModelSpec]) -> ModelSpec:
    """Return the spec of the whole model, with the text part that `text_spec` reads."""
    kind = {"model_type": f"{architecture}_text"}
    spec = vl_spec(
        config,
        architecture,
        lambda text: text_spec(kind | text),
        tokens=TOKENS,
        deepstack=(),
        sections=SECTIONS,
    )
    given = part(config, "vision_config").get("deepstack_visual_indexes")
    if given:
        raise ModelError(f"config.json has deepstack_visual_indexes = {given!r}; supported: none")
    return spec
