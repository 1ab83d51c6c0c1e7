"""What a config.json leaves out, or sets to null, means what it means to transformers, or is asked for by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers

from ostinato.errors import ModelError
from ostinato.models.registry import spec_reader
from ostinato.plan.model import ModelSpec
from tests.support.recipes import RECIPES
from tests.support.vl_models import VL_RECIPES

KINDS = {"model_type", "dtype", "transformers_version", "architectures"}

OF_LENGTH = {"max_position_embeddings", "model_max_length"}
"""Without them a request may have any length, and the plan says so."""

WHY_ELSEWHERE = {
    ("bailing_hybrid", "num_nextn_predict_layers"): "a head that is not named is not run",
    (
        "hrm_text",
        "num_layers_per_stack",
    ): "transformers writes the number of uses beside it, and would read it as layers",
    ("ministral3", "rope_parameters"): "the frequencies are the same, by defaults of yarn",
    ("nemotron_h", "mamba_ssm_cache_dtype"): "float32 in both",
    ("nemotron_h_dense", "mamba_ssm_cache_dtype"): "float32 in both",
    ("mellum", "num_local_experts"): "the other name of num_experts, which is asked for",
    ("qwen3_moe", "num_local_experts"): "the other name of num_experts, which is asked for",
}
"""Values whose absence differs, and why it may."""


def spec_of(config: dict[str, Any]) -> ModelSpec | str:
    """The spec without its weight table, or the message of a refusal."""
    read = spec_reader(config["model_type"])
    try:
        return read(copy.deepcopy(config) | {"dtype": "float32"})
    except ModelError as error:
        return str(error)


def is_as_in_transformers(kind: type[transformers.PreTrainedConfig], changed: dict[str, Any], key: str) -> bool | None:
    """Whether a config changed at `key` means the same, or is refused by that name; None if it means nothing there."""
    try:
        theirs = kind(**copy.deepcopy(changed)).to_dict()
    except Exception:  # transformers takes no such value, or asks for it
        return None
    expected, ours = spec_of(theirs), spec_of(changed)
    if isinstance(expected, str):
        return None
    return ours == expected or (isinstance(ours, str) and key in ours)


@pytest.mark.parametrize("is_null", [False, True], ids=["absent", "null"])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_left_out_is_as_in_transformers_or_asked_for(name: str, is_null: bool) -> None:
    config = RECIPES[name]()
    stated, compared, faults = config.to_dict(), 0, []
    for key in sorted(stated.keys() - KINDS - OF_LENGTH):
        if (name, key) in WHY_ELSEWHERE:
            continue
        changed = {**stated, key: None} if is_null else {other: stated[other] for other in stated if other != key}
        alike = is_as_in_transformers(type(config), changed, key)
        compared += alike is not None
        if alike is False:
            faults.append(key)
    assert not faults
    assert compared >= 10


@pytest.mark.parametrize("name", RECIPES)
def test_numbers_of_key_heads_are_those_of_transformers_or_asked_for(name: str) -> None:
    """At an architecture's default sizes, with fewer key heads than heads in most."""
    whole = transformers.AutoConfig.for_model(RECIPES[name]().model_type).to_dict()
    expected, ours = spec_of(whole), spec_of({key: whole[key] for key in whole if key != "num_key_value_heads"})
    assert ours == expected or "num_key_value_heads" in str(ours)


@pytest.mark.parametrize("name", VL_RECIPES)
@pytest.mark.parametrize("place", [None, "vision_config", "text_config"])
def test_what_a_model_with_images_leaves_out_is_as_in_transformers(name: str, place: str | None) -> None:
    config = VL_RECIPES[name]()
    compared, faults = 0, []
    whole = config.to_dict()
    keys = (whole if place is None else whole[place]).keys() - KINDS - OF_LENGTH - {"num_local_experts"}
    if name.startswith("nemotron") and place == "text_config":
        keys -= {"mamba_ssm_cache_dtype", "mtp_layers_block_type"}  # float32 in both; a head not named is not run
    for key in sorted(keys):
        changed = copy.deepcopy(whole)
        del (changed if place is None else changed[place])[key]
        alike = is_as_in_transformers(type(config), changed, key)
        compared += alike is not None
        if alike is False:
            faults.append(key)
    assert not faults
    assert compared >= 5


@pytest.mark.parametrize("name", [*RECIPES, *VL_RECIPES])
def test_other_names_of_values_are_read_or_asked_for_by_the_usual_name(name: str) -> None:
    """transformers takes some values under two names (`attribute_map`), and the other name wins."""
    config = (RECIPES | VL_RECIPES)[name]()
    whole, faults = config.to_dict(), []
    for place in (None, "vision_config", "text_config"):
        kind = config if place is None else getattr(config, place, None)
        for other, usual in {} if kind is None else type(kind).attribute_map.items():
            changed = copy.deepcopy(whole)
            values = changed if place is None else changed[place]
            if usual not in values or (name, usual) in WHY_ELSEWHERE:
                continue
            values[other] = values.pop(usual)
            if spec_of(changed) != spec_of(whole) and usual not in str(spec_of(changed)):
                faults.append((place, other))
    assert not faults


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl", "lfm3_vl", "gemma4"])
@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 60.0, "rope_parameters": None},
        {"rope_theta": 3.0, "rope_parameters": {"rope_type": "default", "rope_theta": 60.0}},
        {"rope_scaling": {"type": "axial", "rope_theta": 60.0}, "rope_parameters": {"rope_theta": 3.0}},
    ],
    ids=["apart", "default", "scaling"],
)
def test_the_theta_of_an_encoder_is_read_in_the_spellings_of_transformers(name: str, spelling: dict[str, Any]) -> None:
    config = VL_RECIPES[name]()
    changed = config.to_dict()
    changed["vision_config"] |= spelling
    theirs = type(config)(**copy.deepcopy(changed)).vision_config.rope_parameters
    assert (theirs["rope_type"], theirs["rope_theta"]) == ("axial", 60.0)
    ours = spec_of(changed)
    assert isinstance(ours, ModelSpec)
    assert ours.encoder_hyperparameters.theta == 60.0


@pytest.mark.parametrize("name", RECIPES)
def test_a_rotary_embedding_apart_is_as_in_transformers_or_asked_for(name: str) -> None:
    """Some architectures read `rope_theta` outside of `rope_parameters`, some for a kind of layers, some not at all."""
    config = RECIPES[name]()
    stated = config.to_dict()
    changed = {key: value for key, value in stated.items() if key != "rope_parameters"} | {"rope_theta": 77.0}
    if "rope_parameters" in stated and (name, "rope_parameters") not in WHY_ELSEWHERE:
        assert is_as_in_transformers(type(config), changed, "rope_") is not False
