"""EngineConfig: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from ostinato import ConfigError, EngineConfig, Guide, OstinatoError, SamplingParams
from ostinato.config_fields import Speculative
from ostinato.json_io import load_json, read_json
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.device.measured_rates import Rates
from ostinato.plan.plan import make_plan
from ostinato.plan.traffic import Traffic
from ostinato.serve.settings import ServeSettings
from ostinato.setting_names import ALIASES, plain_words
from ostinato.units import format_bytes, number_in, parse_bytes


def remedies(error: ConfigError) -> dict[str, object]:
    return {remedy.setting: remedy.value for remedy in error.remedies}


def test_everything_is_open_or_has_a_default() -> None:
    config = EngineConfig()
    assert config.model == "demo"
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (None, None, None)
    assert (config.memory_utilization, config.cache_memory, config.threads) == (None, None, None)
    assert (config.dtype, config.ssm_state_dtype, config.device) == ("auto", "auto", "auto")
    assert (config.block_size, config.enable_chunked_prefill, config.scheduling_policy) == (16, True, "fcfs")
    assert (config.enable_prefix_caching, config.state_cache_mode) == (True, "auto")
    assert (config.checkpoint_policy, config.eviction_policy) == ("boundaries+branches", "marconi")
    assert (config.state_block_size, config.expected_prefix_tokens) == (None, None)
    assert (config.graph_mode, config.performance_mode, config.capture) == (
        "full_and_piecewise", "balanced", "auto",
    )  # fmt: skip
    assert (config.capture_sizes, config.capture_rows, config.max_capture_size) == (None, None, None)
    assert (config.strict, config.check_replay, config.prefer_graph_sizes) == (False, False, True)
    assert (config.seed, config.random_weights, config.revision) == (0, False, None)
    assert (config.speculative, config.speculative_adaptive, config.num_speculative_tokens) == (None, "on", 0)


def test_every_setting_is_described() -> None:
    assert all(field.description for field in EngineConfig.model_fields.values())


@pytest.mark.parametrize(
    ("unknown", "close"),
    [("max_num_seqz", "max_num_seqs"), ("gpu_memory_utilisation", "gpu_memory_utilization")],
)
def test_an_unknown_setting_names_the_closest_known_ones(unknown: str, close: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{unknown: 1})
    assert unknown in error.value.message
    assert close in error.value.message.split("did you mean")[1]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("trust_remote_code", "leave it out"), ("enforce_eager", "graph_mode"), ("swap_space", "leave it out")],
)
def test_a_setting_that_another_engine_has_is_answered_with_what_there_is(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"{theirs} is not a setting: .*{ours}"):
        EngineConfig(**{theirs: 1})


def test_a_setting_like_no_other_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineConfig(zzz=1)


@pytest.mark.parametrize(
    "setting",
    [
        "num_speculative_tokens",
    ],
)
def test_settings_of_what_is_not_built_are_unknown(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is not a setting"):
        EngineConfig(**{setting: 1})


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"max_num_seqs": 0}, 1),
        ({"max_num_batched_tokens": -5}, 1),
        ({"max_model_len": 1}, 2),
        ({"block_size": 20}, 16),
        ({"block_size": 1000}, 256),
        ({"memory_utilization": 0}, 0.01),
        ({"memory_utilization": 1.5}, 1.0),
        ({"threads": 0}, 1),
        ({"seed": -1}, 0),
        ({"cache_memory": 0}, 1),
        ({"state_block_size": 0}, 16),
        ({"expected_prefix_tokens": 0}, 1),
        ({"max_capture_size": 0}, 1),
        ({"capture_sizes": [0, 8, 4]}, [4, 8]),
        ({"capture_rows": "4,-1"}, [4]),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_nearest_that_is_legal(settings, nearest) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**settings)
    [(name, _)] = settings.items()
    assert remedies(error.value) == {name: nearest}
    assert name in error.value.message
    assert EngineConfig(**remedies(error.value)).is_given(name)


@pytest.mark.parametrize("size", [0, -1, "nonsense"])
def test_a_size_of_files_that_is_none_is_not_answered_by_one_that_the_plan_refuses(size: int | str) -> None:
    with pytest.raises(ConfigError, match="cache_offload") as error:
        EngineConfig(cache_offload=size)
    assert remedies(error.value) == {"cache_offload": None}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"max_num_seqs": "many"}, "whole number"),
        ({"max_num_seqs": True}, "whole number"),
        ({"max_num_seqs": 2.5}, "whole number"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"ssm_state_dtype": "int8"}, "float32"),
        ({"device": "tpu"}, "cuda"),
        ({"scheduling_policy": "lifo"}, "priority"),
        ({"state_cache_mode": "some"}, "'auto', 'none', 'align' or 'all'"),
        ({"state_cache_mode": None}, "'auto', 'none', 'align' or 'all'"),
        ({"checkpoint_policy": "never"}, "boundaries"),
        ({"eviction_policy": "random"}, "lru"),
        ({"enable_prefix_caching": None}, "true or false"),
        ({"cache_memory": "4 floppies"}, "4GiB"),
        ({"enable_chunked_prefill": "yes"}, "true or false"),
        ({"seed": 2**64}, "less than"),
        ({"graph_mode": "full"}, "full_and_piecewise"),
        ({"performance_mode": "throughput"}, "interactivity"),
        ({"capture": "never"}, "lazy"),
        ({"strict": 1}, "true or false"),
        ({"speculative_adaptive": True}, "'on' or 'off'"),
        ({"capture_sizes": []}, "empty list"),
        ({"capture_sizes": ""}, "empty list"),
        ({"capture_sizes": 4}, "not a list of whole numbers"),
        ({"capture_sizes": [1, True]}, "capture_sizes has True"),
        ({"capture_rows": "1,two"}, "capture_rows has 'two'"),
        ({"capture_rows": [1, 2.5]}, "whole number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_what_is_possible(settings: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as error:
        EngineConfig(**settings)
    assert next(iter(settings)) in error.value.message


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(max_num_seqs=0, dtype="int8", zzz=1)
    assert len(error.value.message.splitlines()) == 3


@pytest.mark.parametrize(
    ("alias", "value"),
    [
        ("mamba_ssm_cache_dtype", "bfloat16"),
        ("gpu_memory_utilization", 0.5),
        ("kv_cache_memory_bytes", 1000),
        ("mamba_cache_mode", "align"),
        ("mamba_block_size", 512),
        ("cudagraph_capture_sizes", (1, 2)),
        ("max_cudagraph_capture_size", 64),
        ("speculative_config", Speculative(method="mtp", num_speculative_tokens=3)),
    ],
)
def test_the_names_of_vllm_work_but_not_beside_our_own(alias: str, value: object) -> None:
    config = EngineConfig(**{alias: value})
    assert getattr(config, ALIASES[alias]) == value
    assert config.is_given(ALIASES[alias])
    with pytest.raises(ConfigError, match=f"{ALIASES[alias]} and {alias}"):
        EngineConfig(**{alias: value, ALIASES[alias]: value})


@pytest.mark.parametrize("given", [[8, 1, 2, 2], (1, 2, 8), "1,2,8", " 8, 2,1 ", {1, 2, 8}])
def test_capture_sizes_are_given_as_a_list_or_as_text(given: object) -> None:
    assert EngineConfig(capture_sizes=given).capture_sizes == (1, 2, 8)
    assert EngineConfig(capture_rows=given).capture_rows == (1, 2, 8)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ("mtp:3", ("mtp", 3, None)),
        (" ngram : 12 ", ("ngram", 12, None)),
        ("draft:some/dir:4", ("draft", 4, "some/dir")),
        ("draft:C:\\models\\a:1:4", ("draft", 4, "C:\\models\\a:1")),
        ({"method": "mtp", "num_speculative_tokens": 3, "model": None}, ("mtp", 3, None)),
        ({"method": "draft", "num_speculative_tokens": 2, "model": Path("some/dir")}, ("draft", 2, "some/dir")),
        ('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}', ("ngram", 5, None)),
        (Speculative(method="mtp", num_speculative_tokens=1), ("mtp", 1, None)),
    ],
)
def test_speculation_is_given_as_fields_as_their_json_or_in_short_form(given: object, fields: tuple) -> None:
    config = EngineConfig(speculative=given)
    speculative = config.speculative
    assert speculative is not None
    assert (speculative.method, speculative.num_speculative_tokens, speculative.model) == fields
    assert (speculative.prompt_lookup_min, speculative.prompt_lookup_max) == (1, 4)
    assert config.num_speculative_tokens == fields[1]
    assert config.with_settings(max_num_seqs=2).speculative == speculative


@pytest.mark.parametrize(
    ("given", "word", "nearest"),
    [
        ("eagle:3", "'eagle' is no method (these are ngram, mtp, draft)", None),
        ("ngrm:4", "'ngrm' is no method", "ngram:4"),
        ("mtp", "does not say how many tokens are guessed ahead, as mtp:3 does", None),
        ("ngram:", "as ngram:4 does", None),
        ("MTP:3", "'MTP' is no method", "mtp:3"),
        ("{", "write it as ngram:4, mtp:3 or draft:PATH:4", None),
        ('{"method": "mtp", "method": "ngram", "num_speculative_tokens": 3}', "write it as", None),
        (3, "write it as ngram:4, mtp:3 or draft:PATH:4", None),
        (["mtp"], "write it as", None),
        ("mtp:0", "num_speculative_tokens 0 is not a whole number of at least 1", "mtp:1"),
        ("mtp:-3", "num_speculative_tokens -3", "mtp:1"),
        ("mtp:x", "num_speculative_tokens 'x'", None),
        ("mtp:2.5", "num_speculative_tokens '2.5'", None),
        ("draft:4", "method draft needs a model", None),
        ("draft:some/dir", "as draft:PATH:4 does", None),
        ("draft:some/dir:0", "num_speculative_tokens 0", "draft:some/dir:1"),
        ("mtp:some/dir:3", "mtp takes no model, which is for method draft, also for an assistant", "mtp:3"),
        ({"model": "some/dir", "num_speculative_tokens": 3}, "it names no method", "draft:some/dir:3"),
        ({"method": "draft", "model": "", "num_speculative_tokens": 3}, "model ''", None),
        ({"method": "mtp", "num_speculative_tokens": True}, "num_speculative_tokens True", "mtp:1"),
        ({"method": "mtp", "num_speculative_tokens": "3"}, "num_speculative_tokens '3'", None),
        ({"method": "ngram", "num_speculative_tokens": 3, "model": "x"}, "ngram takes no model", "ngram:3"),
        ({"method": "mtp", "num_speculative_tokens": 3, "depth": 1}, "depth is none of method, num_spec", "mtp:3"),
        (
            {"method": "mtp", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
            "prompt_lookup_min and prompt_lookup_max are for method ngram",
            "mtp:3",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 5},
            "prompt_lookup_min 5 is more than prompt_lookup_max 2",
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 2},
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5},
            "prompt_lookup_max 4, its default",
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 5},
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5, "prompt_lookup_max": 0},
            "prompt_lookup_max 0 is not a whole number",
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1},
        ),
    ],
)
def test_malformed_speculation_is_refused_with_the_forms_that_work_and_the_nearest(given, word, nearest) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)) as error:
        EngineConfig(speculative=given)
    assert error.value.message.startswith("speculative = ")
    assert error.value.message.endswith("write it as ngram:4, mtp:3 or draft:PATH:4")
    assert remedies(error.value) == ({} if nearest is None else {"speculative": nearest})
    if nearest is not None:
        assert EngineConfig(speculative=nearest).num_speculative_tokens > 0


@pytest.mark.parametrize("given", ["none", "Off", "", "null", False])
def test_a_word_for_no_speculation_is_refused_with_the_remedy_to_leave_it_out(given) -> None:
    with pytest.raises(ConfigError, match="leave it out for no speculation") as error:
        EngineConfig(speculative=given)
    assert [str(remedy) for remedy in error.value.remedies] == ["leave out speculative"]


def test_a_remedy_that_is_an_object_can_be_given_as_it_is_printed() -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(speculative={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5})
    [remedy] = error.value.remedies
    printed = str(remedy).removeprefix("set speculative to ")
    assert EngineConfig(speculative=printed) == EngineConfig(speculative=remedy.value)


def test_fields_of_speculation_are_checked_where_they_are_given_alone() -> None:
    with pytest.raises(ConfigError, match="mtp takes no model"):
        Speculative(method="mtp", num_speculative_tokens=3, model="some/dir")


def test_malformed_speculation_is_told_beside_other_problems() -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(speculative="mtp:0", max_num_seqs=0)
    assert remedies(error.value) == {"speculative": "mtp:1", "max_num_seqs": 1}


def test_none_leaves_a_setting_open() -> None:
    assert not EngineConfig(max_num_seqs=None).is_given("max_num_seqs")
    assert EngineConfig(max_num_seqs=None).max_num_seqs is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_plan_prints_as_null_can_be_given_as_none(device: str) -> None:
    config = EngineConfig(device=device)
    plan = make_plan(config, load_spec(config), CATALOGUE["h100-80gb"] if device == "cuda" else detect("cpu"))
    printed = plan.to_json()["settings"]
    nulls = {name for name in EngineConfig.model_fields if printed[name] is None}
    assert {"quantization", "cache_dir"} <= nulls
    for name in nulls:
        config = EngineConfig(**{name: None})
        assert config == EngineConfig(), name
        assert not config.model_fields_set, name


def test_none_is_no_value_of_a_setting_that_plans_never_leave_open() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        EngineConfig(block_size=None)


def test_changing_settings_keeps_the_others_and_checks_again() -> None:
    config = EngineConfig(max_num_seqs=4, cache_memory="1GiB")
    changed = config.with_settings(max_num_seqs=8)
    assert (changed.max_num_seqs, changed.cache_memory) == (8, 2**30)
    assert not changed.is_given("max_model_len")
    with pytest.raises(ConfigError):
        config.with_settings(max_num_seqs=0)


def test_a_config_cannot_be_changed_in_place() -> None:
    with pytest.raises(ConfigError, match=r"with_settings\(max_num_seqs=\.\.\.\)"):
        EngineConfig().max_num_seqs = 3  # type: ignore[misc]


def test_a_path_is_a_model() -> None:
    assert EngineConfig(model=Path("some/dir")).model == "some/dir"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5g", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("12345", 12345),
        ("1 TiB", 2**40),
    ],
)
def test_sizes_are_read_in_their_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert EngineConfig(cache_memory=text).cache_memory == size


@pytest.mark.parametrize("text", ["", "GiB", "-4GiB", "4 XiB", "4GiB more", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2048, "2 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (100 * 2**20, "100 MiB"),
        (5 * 2**40, "5 TiB"),
        (int(12.34 * 2**30), "12.3 GiB"),
    ],
)
def test_sizes_are_written_to_be_read(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_numbers_of_numpy_are_taken_where_python_s_own_are():
    config = EngineConfig(
        model="demo", max_num_seqs=np.int64(7), memory_utilization=np.float32(0.5), capture_sizes=[np.int32(2)],
        speculative={"method": "ngram", "num_speculative_tokens": np.int16(3)},
    )  # fmt: skip
    assert (type(config.max_num_seqs), config.max_num_seqs, config.memory_utilization) == (int, 7, 0.5)
    assert config.capture_sizes == (2,)
    assert config.speculative is not None
    assert config.speculative.num_speculative_tokens == 3
    for wrong in (True, np.True_, np.float64(7.5)):
        with pytest.raises(ConfigError, match="max_num_seqs"):
            EngineConfig(model="demo", max_num_seqs=wrong)


ODD_VALUES: list[Any] = [
    *(math.nan, math.inf, -math.inf, 0, -1, -(2**63), 2**31, 2**64, 2**200, 1e-320, -0.0, True, False, None),
    *("", "nan", "1e400", "9" * 5000, "\ud800", "\0", b"x", [], {}, (), [math.nan], [None], {1: 2}, {"\ud800": 1}),
    *(object(), {1, 2}, range(3), float, len, np.float32("nan"), np.int64(-1), np.array([1, 2])),
]


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams, ServeSettings, Guide], ids=lambda kind: kind.__name__)
def test_a_setting_of_any_value_is_taken_or_refused_in_a_message_that_can_be_read(kind: Any) -> None:
    needed = {"model": "demo"} if kind is EngineConfig else {}
    messages = []
    for name in [*kind.model_fields, "", "\ud800", "9" * 5000]:
        for value in ODD_VALUES:
            try:
                kind(**{**needed, name: value})
            except OstinatoError as error:
                messages.append(error.message)
    assert len(messages) > len(ODD_VALUES)
    assert all(len(message.encode()) < 4000 for message in messages)


def test_a_served_name_is_a_text_or_a_list_of_texts() -> None:
    for value in (1, b"x", {"a": 1}, [1]):
        with pytest.raises(ConfigError, match="it should be a name, or a list of names"):
            ServeSettings(served_model_name=value)
    assert ServeSettings(served_model_name=["a", "a", "b"]).served_model_name == ("a", "b")


def test_a_number_of_thousands_of_digits_is_no_size_and_no_number() -> None:
    assert number_in("9" * 5000) is None
    with pytest.raises(ConfigError, match=r"max_num_seqs = '9{50,}.* \.\.\. 9+'"):
        EngineConfig(model="demo", max_num_seqs="9" * 5000)


SAID = "Input should be a valid string, not a number greater than 3 after validation of it"


@pytest.mark.parametrize(
    "raised", [ValueError(SAID), AssertionError(SAID), PydanticCustomError("name", "{text}", {"text": SAID})]
)
def test_a_message_of_our_own_is_not_cut(raised: Exception) -> None:
    def refuse(_: int) -> int:
        raise raised

    own = TypeAdapter(Annotated[int, AfterValidator(refuse)])
    for value, words in ((1, SAID), (1.5, "should be a whole number")):
        with pytest.raises(ValidationError) as caught:
            own.validate_python(value)
        assert plain_words(caught.value.errors()[0]) == words


@pytest.mark.parametrize(
    "text",
    [
        '{"method": "ngram", "num_speculative_tokens": 4, "num_speculative_tokens": 2}',
        '{"method": "ngram", "num_speculative_tokens": 4, "num_sp\\u0065culative_tokens": 2}',
    ],
)
def test_a_setting_in_json_that_has_a_member_twice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="'num_speculative_tokens' twice in one object"):
        EngineConfig(model="demo", speculative=text)
    with pytest.raises(ConfigError, match="'topic' twice in one object"):
        ServeSettings(kv_events_config='{"topic": "a", "topic": "b"}')


def test_files_that_a_person_writes_may_not_have_a_member_twice_and_those_of_checkpoints_may(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"decode": {"1": 3}, "decode": {"2": 3}}')
    with pytest.raises(ConfigError, match="'decode' twice in one object"):
        Traffic.load(file)
    with pytest.raises(ConfigError, match="'decode' twice in one object"):
        load_json(Rates, file, "measured rates")
    assert read_json(file) == {"decode": {"2": 3}}
