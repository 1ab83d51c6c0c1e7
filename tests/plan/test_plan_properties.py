"""For any model, device and settings: a plan fits, keeps what was given, and lowers the rest no further than
needed; and where there is none, every remedy works and is the nearest that does."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, OstinatoError, Remedy
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.layer_specs import AttentionSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.speculation import with_drafter
from tests.support.plan_cases import (
    MIB,
    VISION,
    attention_layer,
    cpu,
    gpu,
    mamba2_layer,
    mlp_layer,
    model,
    weights,
    with_head,
    with_vision,
)

DEFAULTS = {"cuda": {"memory_utilization": 0.9}, "cpu": {"memory_utilization": 1.0}}
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    attention = AttentionSpec(16, draw(st.sampled_from([1, 4, 16])), 64)
    mamba2 = Mamba2Spec(16, 64, draw(st.sampled_from([16, 128])), 1, 4, 128)
    parameters = st.integers(1000, 10_000_000)
    kinds = [
        attention_layer(attention, draw(parameters)),
        mamba2_layer(mamba2, draw(parameters)),
        mlp_layer(draw(parameters)),
    ]
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))
    maximum = draw(st.sampled_from([None, 100, 2048, 131072]))
    spec = model(*layers, vocab_size=draw(st.sampled_from([100, 50_000])), max_position_embeddings=maximum)
    if draw(st.booleans()):
        smallest = draw(st.sampled_from([1, 64, 1000]))
        spec = with_vision(spec, replace(VISION, smallest_item=smallest, weights=weights(draw(parameters))))
    spec = replace(spec, ops=draw(st.sampled_from([spec.ops, (*spec.ops, "attention", "ssd_scan", "state_update")])))
    few = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    draft = replace(spec, layers=tuple(few), vision=None)
    # A draft model that is attached is used where one is asked for, and only there.
    return with_drafter(EngineConfig(speculative="draft:some/dir:1"), with_head(spec, kinds[0], kinds[2]), draft)


@st.composite
def devices(draw: st.DrawFn) -> DeviceSpec:
    memory = draw(st.integers(20, 4000)) * MIB + draw(st.integers(0, 1000))
    return draw(st.sampled_from([cpu, gpu]))(memory)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    values: dict[str, Any] = {
        "max_num_seqs": draw(st.integers(1, 2000)),
        "max_num_batched_tokens": draw(st.integers(17, 10_000)),
        "max_model_len": draw(st.integers(2, 200_000)),
        "memory_utilization": draw(st.integers(1, 100)) / 100,
        "cache_memory": draw(st.integers(1, 4000)) * MIB,
        "block_size": draw(st.sampled_from([16, 64])),
        "expected_prefix_tokens": draw(st.integers(1, 10_000)),
        "enable_prefix_caching": False,
        "graph_mode": draw(st.sampled_from(["none", "piecewise", "full_decode_only", "full_and_piecewise"])),
        "max_capture_size": draw(st.integers(1, 3000)),
        "capture_rows": draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4)),
        "speculative": draw(st.sampled_from(["ngram", "mtp", "draft:some/dir"])) + f":{draw(st.integers(1, 9))}",
        "encoder_token_budgets": draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=4)),
        "encoder_max_items_per_batch": draw(st.integers(1, 2000)),
        "encoder_cache_tokens": draw(st.integers(1, 200_000)),
        "encoder_graph_mode": draw(st.sampled_from(["none", "auto", "always"])),
        "video_pruning_rate": 0.5,
    }
    chosen = draw(st.lists(st.sampled_from(sorted(values)), unique=True, max_size=5))
    return EngineConfig(**{name: values[name] for name in chosen})


def outcome(config: EngineConfig, spec: ModelSpec, device: DeviceSpec) -> Plan | OstinatoError:
    try:
        return make_plan(config, spec, device)
    except (CapacityError, ConfigError) as error:
        return error


def works(config: EngineConfig, spec: ModelSpec, device: DeviceSpec, **changes: Any) -> bool:
    try:
        return isinstance(outcome(config.with_settings(**changes), spec, device), Plan)
    except ConfigError:
        return False


def one_draft_more(config: EngineConfig, value: str | None) -> str | None:
    speculative = config.speculative
    assert speculative is not None
    count = 1 if value is None else int(value.rpartition(":")[2]) + 1
    asked = speculative.num_speculative_tokens
    assert count <= asked
    more = speculative.with_tokens(count)
    assert isinstance(more, str)
    return more if count < asked else None


def one_budget_more(config: EngineConfig, value: list[int] | None) -> list[int] | None:
    """With the largest that was left out, or the smallest, if there is one that may stay. Any given ones are nearer
    than open ones."""
    asked = list(config.encoder_token_budgets or ())
    if value is None:
        return asked[:-1] or None
    if value == asked[: len(value)]:
        more = asked[: len(value) + 1]
    else:
        more = asked[-len(value) - 1 :]
    return more if more != asked else None


def size_unit(size: int) -> int:
    """What a size is rounded to."""
    units = ((1024 * MIB, 100), (MIB, 100), (1024, 1))
    return next((unit for unit, least in units if size % unit == 0 and size // unit >= least), 1)


def closer(config: EngineConfig, device: DeviceSpec, remedy: Remedy) -> Any:
    """The value next to a remedy's, on the side of what was asked for; None if that is what was asked for.

    What was asked for by leaving a setting open is more of it, except for the cache, which was left small.
    """
    if remedy.setting == "memory_utilization":
        asked = config.memory_utilization or DEFAULTS[device.kind]["memory_utilization"]
        below = round(remedy.value - 0.01, 2)
        return below if below > asked else None
    if remedy.setting in ("graph_mode", "encoder_graph_mode", "capture_rows"):
        return None
    if remedy.setting == "encoder_token_budgets":
        return one_budget_more(config, remedy.value)
    if remedy.setting == "speculative":
        return one_draft_more(config, remedy.value)
    asked = getattr(config, remedy.setting)
    if asked is None and remedy.setting == "cache_memory" and device.kind == "cpu":
        asked = min(4 * 1024 * MIB, device.memory_bytes // 4)
        if asked == remedy.value:
            return None
    unit = size_unit(remedy.value) if remedy.setting == "cache_memory" else 1
    if asked is None:
        return remedy.value - unit if remedy.setting == "cache_memory" else remedy.value + 1
    step = unit if asked > remedy.value else -unit
    return remedy.value + step if remedy.value + step != asked else None


@settings(max_examples=150, deadline=None)
@given(configs(), models(), devices())
@pytest.mark.slow
def test_a_plan_fits_and_keeps_what_was_given(config, spec, device) -> None:
    plan = outcome(config, spec, device)
    if not isinstance(plan, Plan):
        return
    memory, effective = plan.memory, plan.settings
    assert memory.used <= memory.available
    assert memory.available <= device.memory_bytes * (config.memory_utilization or 1)
    assert memory.cache == memory.num_blocks * memory.kv_block + memory.num_slots * memory.state_slot
    assert config.cache_memory is None or memory.cache <= config.cache_memory
    drafting = with_drafter(config, spec)
    assert memory.slots_per_request == 1 + config.num_speculative_tokens
    if drafting.keeps_state:
        assert memory.num_slots == effective.max_num_seqs * memory.slots_per_request + 1 + memory.num_checkpoints
    if drafting.attention_layers:
        one_request = -(-effective.max_model_len // effective.block_size)
        assert one_request < memory.num_blocks
        if not config.enable_prefix_caching:
            assert memory.num_blocks <= effective.max_num_seqs * one_request + 1
    drafter = 0 if drafting.drafter is None else drafting.drafter.weight_bytes(effective.dtype)
    assert memory.weights == spec.weight_bytes(effective.dtype) + drafter
    assert (0 if plan.speculative is None else plan.speculative.weights) == drafter
    least = effective.max_num_seqs * memory.slots_per_request + effective.block_size
    assert effective.max_num_batched_tokens >= least
    for name in LIMITS:
        if config.is_given(name):
            assert getattr(effective, name) == getattr(config, name)
    check_encoder(config, spec, plan)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def check_encoder(config: EngineConfig, spec: ModelSpec, plan: Plan) -> None:
    encoder, memory = plan.encoder, plan.memory
    if spec.vision is None:
        assert encoder is None
        assert memory.encoder_graphs == memory.encoder_cache == 0
        return
    assert encoder is not None
    assert (memory.encoder_graphs, memory.encoder_cache) == (encoder.graph_bytes, encoder.cache_bytes)
    assert memory.activations >= encoder.activation_bytes
    assert encoder.cache_bytes == encoder.num_cells * encoder.cell_bytes
    assert encoder.max_item_tokens == min(plan.settings.max_num_batched_tokens, plan.settings.max_model_len)
    if config.is_given("encoder_cache_tokens"):
        assert encoder.num_cells == (config.encoder_cache_tokens or 0) + 1
    else:
        assert encoder.max_item_tokens < encoder.num_cells <= 4 * encoder.max_item_tokens + 1
    if encoder.graph_mode == "none":
        assert (encoder.token_budgets, encoder.graph_bytes) == ((), 0)
        return
    assert config.video_pruning_rate == 0
    assert 1 <= encoder.max_items_per_batch <= min(encoder.token_budgets)
    if config.encoder_token_budgets is not None:
        assert encoder.token_budgets == config.encoder_token_budgets
    else:
        assert encoder.token_budgets[-1] == encoder.max_item_tokens


@settings(max_examples=150, deadline=None)
@given(configs(), models(), devices())
@pytest.mark.slow
def test_every_remedy_works_and_is_the_nearest_that_does(config, spec, device) -> None:
    error = outcome(config, spec, device)
    if isinstance(error, Plan):
        return
    # A mode has no order, so that more than one may be near.
    ordered = [remedy.setting for remedy in error.remedies if not remedy.setting.endswith("graph_mode")]
    assert len(set(ordered)) == len(ordered)
    for remedy in error.remedies:
        assert works(config, spec, device, **{remedy.setting: remedy.value})
        next_value = closer(config, device, remedy)
        if next_value is not None:
            assert not works(config, spec, device, **{remedy.setting: next_value})


@settings(max_examples=150, deadline=None)
@given(configs(), models(), devices())
@pytest.mark.slow
def test_no_remedy_is_left_out_that_a_coarse_search_finds(config, spec, device) -> None:
    error = outcome(config, spec, device)
    # Where open limits were lowered in vain, what rounding leaves over may happen to hold the slots of given rows.
    if not isinstance(error, CapacityError) or error.message.startswith("even with"):
        return
    candidates: dict[str, list[Any]] = {
        "max_num_seqs": [1, 4, 30, 200, 500],
        "max_num_batched_tokens": [17, 100, 1000, 3000],
        "max_model_len": [2, 50, 1000, 20_000],
        "expected_prefix_tokens": [1, 100, 1000],
        "memory_utilization": [1.0],
        "graph_mode": ["none"],
        "max_capture_size": [1, 10, 100, 1000] if config.graph_mode != "full_decode_only" else [],
        "cache_memory": [size * MIB for size in (1, 8, 32, 128, 512, 1024, 2048)],
        "speculative": [None],
        "encoder_graph_mode": ["none"] if spec.vision is not None else [],
        "encoder_max_items_per_batch": [1, 10, 100] if config.encoder_max_items_per_batch else [],
        "encoder_cache_tokens": [1, 100, 10_000] if config.encoder_cache_tokens else [],
    }
    if config.speculative is not None:
        fewer = range(1, config.speculative.num_speculative_tokens)
        candidates["speculative"] += [config.speculative.with_tokens(count) for count in fewer]
    named = {remedy.setting for remedy in error.remedies}
    for setting, values in candidates.items():
        if setting not in named:
            assert not any(works(config, spec, device, **{setting: value}) for value in values), setting


@settings(max_examples=150, deadline=None)
@given(models(), devices(), st.sampled_from([None, "ngram:2", "mtp:1", "mtp:7", "draft:some/dir:3"]))
@pytest.mark.slow
def test_open_values_are_lowered_in_order_and_only_as_far_as_needed(spec, device, speculative) -> None:
    open_config = EngineConfig(speculative=speculative)
    plan, tokens_per_row = outcome(open_config, spec, device), 1 + open_config.num_speculative_tokens
    if not isinstance(plan, Plan):
        return
    wanted = {decision.topic: decision.requested for decision in plan.decisions}
    found = {name: getattr(plan.settings, name) for name in LIMITS}
    lowered = {name for name in LIMITS if name in wanted and wanted[name] != found[name] and wanted[name]}
    default_top = {"cuda": 512, "cpu": min(64 * tokens_per_row, 512)}[device.kind]
    is_smaller = bool({"max_capture_size", "capture_rows"} & wanted.keys())

    def given_graphs(rows: int) -> dict[str, Any]:
        """So many rows, and the graphs that go with them: those of the open max_num_seqs; or those of a given one,
        where not even one request fits beside these."""
        top = min(2 * rows * tokens_per_row, default_top) if is_smaller else default_top
        full = {"capture_rows": [rows]} if plan.capture.graph_mode == "full_and_piecewise" else {}
        return {"max_num_seqs": rows, "max_capture_size": top, **full}

    if is_smaller:
        least = given_graphs(1) | {"max_num_batched_tokens": 272, "max_model_len": 16, "max_capture_size": default_top}
        assert not works(open_config, spec, device, **least)
        [reached] = [decision.effective for decision in plan.decisions if decision.topic == "max_capture_size"]
        if reached < 2 * tokens_per_row:
            # Not even those of one row fit.
            assert not works(open_config, spec, device, **least | given_graphs(1))
            return
    given_so = open_config.with_settings(**found)
    assert works(given_so, spec, device, **given_graphs(found["max_num_seqs"]))
    one_row_more = found["max_num_seqs"] + 1
    if "max_num_seqs" in lowered and one_row_more * tokens_per_row + 16 <= found["max_num_batched_tokens"]:
        assert not works(given_so, spec, device, **given_graphs(one_row_more))
    if "max_num_batched_tokens" in lowered:
        one_more = found["max_num_batched_tokens"] + 1
        assert not works(given_so, spec, device, **given_graphs(1), max_num_batched_tokens=one_more)
    if "max_model_len" in lowered:
        longer = found["max_model_len"] + 16
        assert not works(open_config, spec, device, **given_graphs(1), max_model_len=longer, max_num_batched_tokens=272)


@st.composite
def smaller_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Values that a user might give to make an open config smaller, as small as open ones are lowered to."""
    sizes = st.lists(st.integers(1, 64), min_size=1, max_size=3)
    values: dict[str, Any] = {
        "max_num_seqs": draw(st.integers(1, 40)),
        "max_num_batched_tokens": draw(st.integers(256, 2000)),
        "max_model_len": 16 * draw(st.integers(1, 100)),
        "max_capture_size": draw(st.integers(1, 64)),
        "capture_rows": draw(sizes),
    }
    if draw(st.booleans()):
        values["capture_sizes"] = draw(sizes)
        values["max_capture_size"] = max(values["capture_sizes"])
    return {name: values[name] for name in draw(st.sets(st.sampled_from(sorted(values)), min_size=1))}


@settings(max_examples=150, deadline=None)
@given(
    models(),
    st.sampled_from([cpu, gpu]),
    st.integers(-2000, 500),
    st.sampled_from([None, "ngram:2", "mtp:1", "mtp:7", "draft:some/dir:3"]),
    st.sampled_from(["piecewise", "full_decode_only", "full_and_piecewise", None]),
    smaller_settings(),
)
@pytest.mark.slow
def test_what_fits_with_smaller_values_fits_with_open_ones(spec, kind, kibibytes, speculative, mode, smaller) -> None:
    """On devices whose memory is about what the least config needs."""
    asked = {"speculative": speculative, **({} if mode is None else {"graph_mode": mode})}
    open_config = EngineConfig(**asked, enable_prefix_caching=False)
    least = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "max_model_len": 16, "capture_sizes": [1]}
    roomy = outcome(open_config.with_settings(**least), spec, kind(2**40))
    if not isinstance(roomy, Plan):
        return
    memory = roomy.memory
    needed = memory.beside_cache + 2 * memory.kv_block + (1 + memory.slots_per_request) * memory.state_slot
    device = kind(int((needed + kibibytes * 1024) / (0.9 if kind is gpu else 1)))
    if isinstance(outcome(open_config, spec, device), CapacityError):
        assert not works(open_config, spec, device, **smaller)
        assert not works(open_config, spec, device, **smaller | least)
