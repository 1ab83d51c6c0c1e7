"""Checkpoints on disk to weights in memory: every form in which they come, and one error for all that is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ostinato
from ostinato import EngineConfig, ModelError, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.formats.checkpoint_json import folder_advice
from ostinato.formats.mapped_files import INDEX, SINGLE, SafetensorsFile
from ostinato.layers.allocation import WeightAllocator, checkpoint_views
from ostinato.models.checkpoint import load_spec, model_spec, read_config
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import NumpyArrays, TorchArrays, dtype_name, host_values
from ostinato.ops.dispatch import select_ops
from ostinato.plan.tensor_parallel import Rank
from tests.support.checkpoints import checkpoint, oracle, random_prompt
from tests.support.tensors import as_tensor

TIED = "granitemoehybrid_dense"
UNTIED = "bamba"


def load(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The weights that a model has after loading, under the names that the checkpoint gives them."""
    model = build_model(
        WeightAllocator(select_ops({}), TorchArrays("cpu"), dtype_name(dtype)), model_spec(read_config(directory))
    )
    for weight in model.parameters():
        weight.data.fill_(float("nan"))
    load_weights(model, directory)
    return dict(checkpoint_views(model))


def copy_of(name: str, directory: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None) -> Path:
    """A checkpoint of its own for the test, with `change` applied to its tensors."""
    copy = directory / name
    shutil.copytree(checkpoint(name), copy)
    if change is not None:
        tensors = load_file(copy / SINGLE)
        change(tensors)
        save_file(tensors, copy / SINGLE, metadata={"format": "pt"})
    return copy


@cache
def sharded_source(name: str) -> Path:
    directory = checkpoint(name).with_name(checkpoint(name).name + "-sharded")
    oracle(name).save_pretrained(directory, max_shard_size="40KB")
    return directory


def sharded(name: str, directory: Path) -> Path:
    copy = directory / "sharded"
    shutil.copytree(sharded_source(name), copy)
    assert len(list(copy.glob("*.safetensors"))) > 2
    return copy


def assert_equal(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(given[name], tensor), name


def test_every_tensor_that_does_not_match_is_in_one_error(tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".mamba.A_log")]:
            del tensors[name]
        tensors["model.layers.0.mamba.surprise"] = torch.zeros(1)
        tensors["unknown.weight"] = torch.zeros(1)
        tensors["model.final_layernorm.weight"] = torch.zeros(63)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()

    with pytest.raises(ModelError) as caught:
        load(copy_of(UNTIED, tmp_path, damage))
    missing, left_over, misshapen = caught.value.message.splitlines()[1:]
    assert missing == "missing (2): model.layers.0.mamba.A_log, model.layers.2.mamba.A_log."
    assert left_over == "left over (2): model.layers.0.mamba.surprise, unknown.weight."
    assert misshapen.startswith("wrong shape (2): ")
    assert "lm_head.weight is [130, 64], expected [131, 64]" in misshapen
    assert "model.final_layernorm.weight is [63], expected [64]" in misshapen


def test_a_mismatch_is_found_before_any_tensor_is_read(tmp_path: Path) -> None:
    directory = copy_of(UNTIED, tmp_path, lambda tensors: tensors.update(surprise=torch.zeros(1)))
    model = build_model(
        WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), model_spec(read_config(directory))
    )
    for weight in model.parameters():
        weight.data.zero_()
    with pytest.raises(ModelError):
        load_weights(model, directory)
    assert not any(weight.any() for weight in model.parameters())


@pytest.mark.parametrize("name", [TIED, UNTIED])
def test_a_sharded_checkpoint_loads_like_a_whole_one(name: str, tmp_path: Path) -> None:
    assert_equal(load(sharded(name, tmp_path)), load(checkpoint(name)))


def test_progress_counts_every_tensor_of_every_shard(tmp_path: Path) -> None:
    directory = sharded(UNTIED, tmp_path)
    model = build_model(
        WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), model_spec(read_config(directory))
    )
    seen: list[tuple[int, int]] = []
    load_weights(model, directory, lambda done, total: seen.append((done, total)))
    total = len(dict(checkpoint_views(model)))
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = sharded(UNTIED, tmp_path)
    victim = sorted(directory.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        load(directory)


@pytest.mark.parametrize(
    "index",
    [
        "{ not json",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": "x"}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": [1]}}',
        b"\xff\xfe\x00",
    ],
)
def test_a_broken_index_is_named(tmp_path: Path, index: str | bytes) -> None:
    directory = sharded(UNTIED, tmp_path)
    (directory / INDEX).write_bytes(index if isinstance(index, bytes) else index.encode())
    with pytest.raises(ModelError, match="not a safetensors index") as caught:
        load(directory)
    assert str(directory / INDEX) in caught.value.message


@pytest.mark.parametrize("name", ["../other.safetensors", "/tmp/other.safetensors"])
def test_a_shard_out_of_the_checkpoint_is_refused_by_name(tmp_path: Path, name: str) -> None:
    directory = sharded(UNTIED, tmp_path)
    shutil.copy(next(directory.glob("*.safetensors")), tmp_path / "other.safetensors")
    index = json.loads((directory / INDEX).read_text())
    weight = next(iter(index["weight_map"]))
    name = name.replace("/tmp", str(tmp_path))
    (directory / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {weight: name}}))
    with pytest.raises(ModelError, match="out of the checkpoint's directory"):
        load(directory)


def test_weights_may_be_links_to_another_disk(tmp_path: Path) -> None:
    directory = sharded(UNTIED, tmp_path)
    file = next(directory.glob("*.safetensors"))
    (tmp_path / "disk").mkdir()
    shutil.move(file, tmp_path / "disk" / file.name)
    file.symlink_to(tmp_path / "disk" / file.name)
    load(directory)


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1])
def test_a_truncated_file_is_named_wherever_it_ends(tmp_path: Path, kept: float) -> None:
    """`kept` is a number of bytes, a part of them, or all but one."""
    directory = copy_of(TIED, tmp_path)
    path = directory / SINGLE
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept == 0.5 else int(kept)])
    with pytest.raises(ModelError, match="truncated") as caught:
        load(directory)
    assert str(path) in caught.value.message


def test_weights_that_may_not_be_read_are_not_called_truncated(tmp_path: Path) -> None:
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(ModelError, match=rf"{SINGLE} cannot be read: Is a directory$"):
        SafetensorsFile(tmp_path / SINGLE)


def test_a_folder_that_may_not_be_listed_is_not_called_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder_advice(tmp_path).endswith("; it is empty")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert folder_advice(tmp_path).endswith("(OWNER/NAME)")


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    directory = copy_of(TIED, tmp_path)
    (directory / SINGLE).write_text("<html>not found</html>" * 100)
    with pytest.raises(ModelError, match=SINGLE):
        load(directory)


def test_a_checkpoint_without_weights_says_what_would_do(tmp_path: Path) -> None:
    directory = copy_of(TIED, tmp_path)
    (directory / SINGLE).unlink()
    with pytest.raises(ModelError, match="safetensors") as caught:
        load(directory)
    assert str(directory) in caught.value.message


@pytest.mark.parametrize("name", [TIED, "mamba2"])
def test_a_head_beside_tied_embeddings_is_known_and_not_loaded(name: str, tmp_path: Path) -> None:
    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        [embedding] = [tensor for key, tensor in tensors.items() if "embed" in key]
        tensors["lm_head.weight"] = torch.full_like(embedding, 7.0)

    assert_equal(load(copy_of(name, tmp_path, add_head)), load(checkpoint(name)))


def test_rotary_frequencies_of_older_checkpoints_are_known_and_not_loaded(tmp_path: Path) -> None:
    def add_frequencies(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(12)

    assert_equal(load(copy_of("llama", tmp_path, add_frequencies)), load(checkpoint("llama")))


def test_a_head_that_is_not_tied_must_be_there(tmp_path: Path) -> None:
    directory = copy_of(UNTIED, tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"missing \(1\): lm_head.weight"):
        load(directory)


def test_tensors_of_a_prediction_head_are_known_and_not_loaded(tmp_path: Path) -> None:
    def add_mtp(tensors: dict[str, torch.Tensor]) -> None:
        tensors["mtp.layers.0.enorm.weight"] = torch.ones(64)
        tensors["mtp.layers.0.mixer.in_proj.weight"] = torch.ones(3, 5)

    assert_equal(load(copy_of("nemotron_h", tmp_path, add_mtp)), load(checkpoint("nemotron_h")))
    with pytest.raises(ModelError, match=r"left over \(2\): mtp"):
        load(copy_of(UNTIED, tmp_path, add_mtp))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [TIED, "nemotron_h"])
def test_weights_are_converted_from_any_dtype_to_any(
    name: str, stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    """Decays, time steps and a router's correction stay in float32, whatever the model runs in."""

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({key: tensor.to(stored) for key, tensor in tensors.items()})

    exact = load(checkpoint(name))
    for key, tensor in load(copy_of(name, tmp_path, convert), wanted).items():
        in_float32 = key.endswith((".A_log", ".D", ".dt_bias", "e_score_correction_bias"))
        assert tensor.dtype == (torch.float32 if in_float32 else wanted), key
        assert torch.equal(tensor, exact[key].to(stored).to(tensor.dtype)), key


@pytest.mark.parametrize("name", ["falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "qwen3"])
def test_random_weights_give_finite_logits_over_200_steps_in_bfloat16(name: str) -> None:
    engine = EngineCore(
        EngineConfig(
            model=str(checkpoint(name)),
            random_weights=True,
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=2,
            cache_memory="16MiB",
            threads=1,
        )
    )
    model, largest = engine.runner.model, []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        values = type(model).compute_logits(model, hidden)
        largest.append(as_tensor(values).abs().max().item())
        return values

    model.compute_logits = logits  # type: ignore[method-assign]
    request = engine.add_request(
        random_prompt(40, seed=0), SamplingParams(temperature=1, max_tokens=200, ignore_eos=True)
    )
    output = engine.output(request)
    while engine.has_unfinished:
        engine.step()
    assert output is not None
    assert len(output.outputs[0].token_ids) == 200
    assert output.error is None
    assert 0 < max(largest) < 1e3


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("granitemoehybrid", {"quantization": "int8"}),
        ("bamba", {"quantization": "none"}),
        ("kimi_linear", {"quantization": "none", "dtype": "float16"}),
        ("nemotron_h", {"quantization": "int4_g32", "dtype": "bfloat16"}),
        ("qwen3_next", {"quantization": "none", "dtype": "bfloat16"}),
        ("llama", {"quantization": "none", "dtype": "bfloat16", "tensor_parallel_size": 2}),
        ("qwen3", {"quantization": "int8", "tensor_parallel_size": 2}),
    ],
)
def test_arrays_of_numpy_and_of_torch_get_the_same_bits(name: str, settings: dict[str, Any]) -> None:
    """A weight's bits are those of its checkpoint's tensors, whatever library the model computes with."""
    spec = load_spec(EngineConfig(model=str(checkpoint(name)), **settings))
    rank = Rank(spec.ranks - 1, spec.ranks)
    loaded: list[dict[str, np.ndarray]] = []
    for arrays in (NumpyArrays(), TorchArrays("cpu")):
        build = WeightAllocator(select_ops({}), arrays, settings.get("dtype", "float32"), rank=rank)
        model = build_model(build, spec)
        load_weights(model, checkpoint(name))
        loaded.append({path: host_values(weight) for path, weight in model.named_parameters()})
    given, expected = loaded
    assert given.keys() == expected.keys()
    for path, weight in expected.items():
        assert given[path].dtype == weight.dtype, path
        assert given[path].tobytes() == weight.tobytes(), path


WITHOUT_TORCH = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, Blocked())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_what_loads_weights_imports_no_torch() -> None:
    modules = [
        *(
            "layers.allocation",
            "models.loader",
            "models.gguf_loader",
            "models.quantized_loader",
            "models.weight_shards",
        ),
        *("models.weight_shards", "models.random_weights", "models.tensor_sources", "sampling.pooler", "inspection"),
        *("formats.unpack", "formats.mapped_files", "ops.quant.quantize", "ops.quant.dequantize", "ops.huge_pages"),
        *(f"models.{path.parent.name}.model" for path in Path(ostinato.__file__).parent.glob("models/*/model.py")),
    ]
    command = [sys.executable, "-c", WITHOUT_TORCH, *(f"ostinato.{module}" for module in modules)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
