"""Where a model comes from, and what a config.json names."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ostinato.demo import checkpoint_dir
from ostinato.errors import ConfigError, ModelError
from ostinato.formats.checkpoint_json import read_checkpoint_json
from ostinato.json_io import JsonObject
from ostinato.models.checkpoint import (
    model_spec,
    read_config,
    resolve_model_dir,
)
from ostinato.models.config_json import checkpoint_dtype
from ostinato.models.named_models import looks_like_model
from ostinato.models.registry import MODELS, spec_reader
from ostinato.plan.layer_specs import AttentionSpec
from ostinato.plan.mixers import Mamba2Spec
from tests.support.checkpoints import checkpoint, recipe
from tests.support.folders import lock
from tests.support.vl_models import qwen3_vl

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
}
MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 2,
}


def test_the_embedded_models_have_names_and_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model_dir("demo") == checkpoint_dir()
    assert resolve_model_dir("demo-vl") == checkpoint_dir("demo-vl") != checkpoint_dir()
    assert resolve_model_dir(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["/no/such/directory", "./here", "a/b/c"])
def test_a_directory_that_does_not_exist_is_named(model: str) -> None:
    with pytest.raises(ModelError, match="no directory"):
        resolve_model_dir(model)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2", "did you mean smollm2?"),
        ("SmolLM2", "did you mean smollm2?"),
        ("smollm2:135m", "did you mean smollm2?"),
        ("demo_vl", "did you mean demo-vl?"),
        ("./missing.gguf", "there is no file './missing.gguf'"),
        ("O/N-GGUF:Q4_K_M", "a GGUF file of a hub id is O/N-GGUF:FILE.gguf"),
        ("https://huggingface.co/O/N", "the hub id alone: O/N"),
        ("hf.co/O/N:Q4_K_M", "the hub id alone: O/N; a GGUF file of it is OWNER/NAME:FILE.gguf"),
        ("https://huggingface.co/O/N/blob/main/m.gguf", "the hub id alone: O/N:m.gguf"),
        ("https://example.org/m.gguf", "models come from the hub"),
    ],
)
def test_a_name_that_is_no_model_is_answered_with_what_was_meant(model: str, message: str) -> None:
    assert looks_like_model(model) or model.startswith("O/N-GGUF:")
    with pytest.raises(ModelError) as refused:
        resolve_model_dir(model)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"adapter_config.json": '{"base_model_name_or_path": "O/N"}'},
            "it is an adapter of O/N, and adapters are not",
        ),
        ({}, "it is empty"),
        ({"pytorch_model.bin": ""}, "it has pytorch_model.bin, and only safetensors beside a config.json"),
        ({"model.onnx": ""}, "it has model.onnx, and only safetensors"),
        ({"m.gguf": ""}, "give one of its GGUF files: m.gguf"),
        ({"snapshots/ab/config.json": "{}"}, "give the folder in it that has one: "),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_described(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError) as refused:
        read_config(tmp_path)
    assert message in refused.value.message


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ModelError, match=r"is a file and does not end in \.gguf"):
        resolve_model_dir(str(tmp_path / "model.safetensors"))


def test_a_revision_of_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        resolve_model_dir(str(tmp_path), revision="main")


def test_a_hub_id_without_the_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'ostinato\[hub\]'"):
        resolve_model_dir("someone/some-model")


class FakeHub:
    """In place of huggingface_hub: notes what is asked for."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.asked: dict[str, object] = {}

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
        monkeypatch.setitem(sys.modules, "huggingface_hub", self)
        monkeypatch.setitem(sys.modules, "huggingface_hub.utils", SimpleNamespace(tqdm=object))
        monkeypatch.setattr("ostinato.models.hub.fetch_large", lambda *_: None)  # tests/models/test_hub.py has it
        return self

    def snapshot_download(self, model: str, **options: object) -> str:
        del options["tqdm_class"]
        self.asked = {"model": model, **options}
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_a_hub_id_is_fetched_with_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path).installed(monkeypatch)
    assert resolve_model_dir("someone/some-model", "v2", files=("config.json",)) == tmp_path
    asked = {"model": "someone/some-model", "revision": "v2", "cache_dir": None, "allow_patterns": ["config.json"]}
    assert hub.asked == asked | {"ignore_patterns": ["original/*", "consolidated*"]}


def test_a_file_of_a_hub_id_is_fetched_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path).installed(monkeypatch)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "m.Q4_0.gguf").write_bytes(b"GGUF")
    assert resolve_model_dir("someone/some-model:sub/m.Q4_0.gguf", "v2") == tmp_path / "sub" / "m.Q4_0.gguf"
    assert hub.asked["allow_patterns"] == ["sub/m.Q4_0.gguf"]
    assert (hub.asked["model"], hub.asked["revision"]) == ("someone/some-model", "v2")
    with pytest.raises(ModelError, match=r"someone/some-model on the hub holds no file 'm-00002-of-00002\.gguf'"):
        resolve_model_dir("someone/some-model:m-00002-of-00002.gguf")
    assert hub.asked["allow_patterns"] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


@pytest.mark.parametrize("model", ["maybe", "gpt2", "a/b/c", "../weights", "-x/y", "", "a/b:../c.gguf", "a/b:c"])
def test_what_is_no_directory_and_no_hub_id_is_not_looked_for_on_the_hub(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeHub(tmp_path).installed(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no directory|is no checkpoint") as caught:
        read_config(resolve_model_dir(model))
    assert ("OWNER/NAME" in caught.value.message) == (model in ("maybe", "gpt2"))


def test_a_failed_fetch_says_what_the_hub_said(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(OSError("404 Not Found")).installed(monkeypatch)
    with pytest.raises(ModelError, match="404 Not Found"):
        resolve_model_dir("someone/some-model")


def test_a_missing_or_broken_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == LLAMA


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"hidden_size": ' + b"1" * 5000 + b"}", "a number of thousands of digits"),
        (b'{"model_type": "\xff"}', "not text in UTF-8"),
        (b'{"model_type": ["\\uD800"]}', "half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_file_that_is_no_json_is_named_whatever_is_wrong(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        read_checkpoint_json(tmp_path, name)
    assert str(tmp_path / name) in caught.value.message


SIZES = ("hidden_size", "num_hidden_layers", "max_position_embeddings", "rope_theta", "head_dim")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [10**400, 10**30, 2**40, 0])
def test_sizes_that_no_model_has_are_refused_before_anything_is_planned(name: str, value: int) -> None:
    if (name, value) in (("rope_theta", 10**30), ("rope_theta", 2**40), ("max_position_embeddings", 2**40)):
        return  # numbers that a model may have
    with pytest.raises(ModelError, match=r"config\.json"):
        model_spec(LLAMA | {name: value})


def test_more_layers_than_any_model_has_are_refused_before_they_are_planned() -> None:
    with pytest.raises(ModelError, match="a num_hidden_layers above 1,024, which no model has"):
        model_spec(LLAMA | {"num_hidden_layers": 1025})


@pytest.mark.parametrize("name", ["nemotron_h", "mamba2"])
def test_a_state_layer_without_states_is_refused(name: str) -> None:
    key = "ssm_state_size" if name == "nemotron_h" else "state_size"
    with pytest.raises(ModelError, match="a state layer without heads, groups, states"):
        model_spec(recipe(name).to_dict() | {key: 0})


def test_the_chunk_size_of_mamba2_has_no_default() -> None:
    """Those of other mixers have the default None."""
    sizes = dict.fromkeys(("num_heads", "head_dim", "state_size", "num_groups", "conv_kernel"), 1)
    with pytest.raises(TypeError, match="chunk_size"):
        Mamba2Spec(**sizes)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("key", "value"), [("num_position_embeddings", 0), ("num_position_embeddings", 2**40), ("depth", 2**20)]
)
def test_a_size_of_a_vision_encoder_is_checked_too(key: str, value: int) -> None:
    config = qwen3_vl().to_dict()
    config["vision_config"][key] = value
    with pytest.raises(ModelError, match=r"should be a whole number of at least 1|which no model has"):
        model_spec(config)


@pytest.mark.parametrize("value", [2**40, "1", [1]], ids=str)
@pytest.mark.parametrize(
    ("name", "key"),
    [("nemotron_h", "moe_latent_size"), ("ministral3", "max_position_embeddings"), ("falcon_mamba", "state_size")],
)
def test_a_number_that_a_part_of_a_model_reads_is_checked_too(name: str, key: str, value: object) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        model_spec(recipe(name).to_dict() | {key: value})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": math.nan},
        {"rope_type": "yarn", "factor": "4"},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": "x"},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
        {"rope_type": "dynamic", "factor": -3.5},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [math.nan] * 8},
        {"rope_type": "default", "rope_theta": math.inf},
        {"rope_type": "proportional", "partial_rotary_factor": 2**31},
    ],
    ids=str,
)
def test_a_rotary_embedding_without_finite_frequencies_is_refused_whatever_the_length(rope: JsonObject) -> None:
    with pytest.raises(ModelError, match=r"above 0|which should be"):
        model_spec(LLAMA | {"max_position_embeddings": 256, "rope_parameters": rope})


def test_a_checkpoint_that_may_not_be_searched_is_not_there_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    with monkeypatch.context() as locked:
        lock(locked, model)
        with pytest.raises(ModelError, match=r"no config\.json.*: Permission denied"):
            read_config(model)
        lock(locked, tmp_path)
        with pytest.raises(ModelError, match=r"no directory .*: Permission denied"):
            resolve_model_dir(str(model))
    for name, why in (
        ("a" * 5000, "File name too long"),
        ("~nobody-at-all/x", "no directory '~nobody"),
        ("a\0b/", "null"),
    ):
        with pytest.raises(ModelError, match=why):
            resolve_model_dir(f"./{name}" if "~" not in name else name)


@pytest.mark.parametrize("target", ["/etc/hostname", "../secret.json", "missing.json", "../missing.json"])
def test_a_link_out_of_the_checkpoint_or_to_nowhere_is_refused_by_name(tmp_path: Path, target: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (model / "config.json").symlink_to(target)
    with pytest.raises(ModelError, match=rf"{model}/config\.json leads to "):
        read_config(model)


def test_links_within_the_checkpoint_and_to_the_blobs_of_a_hub_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--someone--model"
    snapshot, blobs, own = cache / "snapshots" / "abc", cache / "blobs", tmp_path / "own"
    for folder in (snapshot, blobs, own):
        folder.mkdir(parents=True)
    (blobs / "1234").write_text(json.dumps(LLAMA))
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    (own / "config.json").symlink_to(snapshot / "config.json")
    (tmp_path / "link").symlink_to(snapshot)
    (tmp_path / "mounted" / "..data").mkdir(parents=True)
    (tmp_path / "mounted" / "..data" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "mounted" / "config.json").symlink_to("..data/config.json")
    for directory in (snapshot, own, tmp_path / "link", tmp_path / "mounted"):
        assert read_config(directory) == LLAMA


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["names no architecture", "llama", "nemotron_h"]),
        ({"model_type": "gpt2"}, ["gpt2", "llama", "nemotron_h"]),
        ({**LLAMA, "quantization_config": {"quant_method": "awq"}}, ["awq"]),
        ({**LLAMA, "hidden_size": None}, ["hidden_size"]),
        ({**LLAMA, "hidden_size": "64"}, ["hidden_size", "whole number"]),
        ({"model_type": ["llama"]}, ["llama", "known"]),
        ({**LLAMA, "max_position_embeddings": "8192"}, ["max_position_embeddings", "8192"]),
        ({**LLAMA, "num_attention_heads": 0}, ["llama", "config.json"]),
        ({**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 3}, ["4 attention heads", "3"]),
        ({**LLAMA, "head_dim": 7}, ["7", "pairs"]),
        ({**LLAMA, "vocab_size": 0}, ["0 tokens"]),
        ({**MAMBA2, "time_step_limit": 3}, ["mamba2", "config.json"]),
        ({**MAMBA2, "n_groups": 3}, ["3 groups"]),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_name(config: dict, words: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        model_spec(config)
    assert all(word in error.value.message for word in words)


def test_every_architecture_of_the_registry_has_its_reader() -> None:
    for name in MODELS:
        with pytest.raises(ModelError, match=r"config\.json"):
            model_spec({"model_type": name})
        assert callable(spec_reader(name))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": None}, "float32"),
        ({}, "float32"),
    ],
)
def test_the_dtype_is_read_in_either_spelling(config: dict, dtype: str) -> None:
    assert checkpoint_dtype(config) == dtype
    assert checkpoint_dtype({"dtype": None}, config) == dtype
    assert checkpoint_dtype({"torch_dtype": "float16"}, config) == "float16"


def test_a_dtype_that_is_not_supported_is_refused() -> None:
    with pytest.raises(ModelError, match="float8_e4m3fn"):
        checkpoint_dtype({"dtype": "float8_e4m3fn"})


@pytest.mark.parametrize("part", [None, "text_config", "vision_config"])
def test_layers_of_other_values_than_their_models_are_refused_by_name(part: str | None) -> None:
    """transformers takes `per_layer_config` for every architecture."""
    whole = LLAMA | {"rms_norm_eps": 1e-5} if part is None else qwen3_vl().to_dict()
    values = whole if part is None else whole[part]
    name, value = ("patch_size", 4) if part == "vision_config" else ("rms_norm_eps", values.get("rms_norm_eps"))
    expected = model_spec(whole)
    for unchanging in ({}, {"1": {}}, {"1": {name: value}}):
        values["per_layer_config"] = unchanging
        assert model_spec(whole) == expected
    for changing in ({"1": {name: 2}}, {"0": {"skip": ["mlp"]}}, {"1": None}, [1]):
        values["per_layer_config"] = changing
        with pytest.raises(ModelError, match="only values that the whole model has"):
            model_spec(whole)


def test_a_spec_has_the_sizes_and_parameters_of_its_config() -> None:
    spec = model_spec({**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True})
    assert spec.attention_layers == (AttentionSpec(4, 2, 16),) * 2
    attention = 64 * 64 * 2 + 2 * 64 * 32
    assert spec.num_parameters == 100 * 64 + 64 + 2 * (attention + 3 * 64 * 128 + 2 * 64)


def test_a_state_layer_has_the_sizes_of_its_config() -> None:
    config = {
        "model_type": "nemotron_h", "hidden_size": 64, "vocab_size": 100, "hybrid_override_pattern": "M*-",
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "conv_kernel": 4, "chunk_size": 64,
        "intermediate_size": 128,
    }  # fmt: skip
    spec = model_spec(config)
    assert spec.state_layers == (Mamba2Spec(8, 16, 32, 2, 4, 64),)
    assert spec.state_layers[0].in_proj_size == 2 * 128 + 2 * 2 * 32 + 8
    in_proj, conv, out_proj = 64 * 392, 256 * 5, 128 * 64
    assert spec.layers[0].parameters == in_proj + conv + 128 + out_proj + 64
    assert spec.layers[0].float32_parameters == 24


def test_a_layer_holds_at_once_what_its_calls_need_of_it() -> None:
    """Counted without the normed form of the residual stream, which is 64 wide."""
    queries, keys, values, turned = 64, 64, 64, 64
    assert model_spec(LLAMA).layers[0].activation_elements == queries + keys + values + turned - 64
    layer = model_spec(MAMBA2).layers[0]
    mixer = layer.mixer
    assert mixer is not None
    # A row that decodes and one of a prompt: the scan's half and the other one are there before they are joined, which
    # needs what was convolved no more.
    computed = mixer.intermediate_size
    assert layer.activation_elements == mixer.in_proj_size + mixer.conv_dim + computed - 64


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, importlib, ostinato, ostinato.plan.plan, ostinato.models.registry as registry;"
        "[(registry.spec_reader(name), importlib.import_module('ostinato.models.' + model.split(':')[0]))"
        " for name, model in registry.MODELS.items()];"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 5}, ["num_experts_per_tok = 5", "1 to 4", "2 of 4 groups"]),
        ({"num_experts_per_tok": 0}, ["num_experts_per_tok = 0", "1 to 4"]),
        ({"num_experts_per_tok": 9, "n_group": 1, "topk_group": 1}, ["num_experts_per_tok = 9", "1 to 8"]),
        ({"topk_group": 5}, ["topk_group = 5", "1 to 4"]),
        ({"n_group": 3}, ["n_group = 3", "8 experts"]),
        ({"n_group": 8}, ["n_group = 8", "2 or more"]),
    ],
)
def test_a_router_that_could_not_choose_as_many_experts_is_refused(changes: dict[str, int], words: list[str]) -> None:
    config = read_config(checkpoint("nemotron_h"))
    assert model_spec(config | {"num_experts_per_tok": 4}).layers[1].experts.top_k == 4
    with pytest.raises(ModelError) as caught:
        model_spec(config | changes)
    assert all(word in caught.value.message for word in words)
