"""What weights take while they are loaded: they lie where the file is mapped, or are copied once, bit by bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ostinato.formats.mapped_files import SINGLE
from ostinato.layers.allocation import WeightAllocator, checkpoint_views
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model, load_weights
from ostinato.models.random_weights import PERIOD, randomize_weights
from ostinato.ops import huge_pages
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what memory is made of is Linux's business")

SMALL = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32768}
"""128 MiB of embeddings alone in bfloat16: no tensor may be held twice"""

LARGER = LARGE | {"vocab_size": 65536}
"""With 8-bit weights no smaller than those in bfloat16, so that what else is in memory matters as little."""

LOAD = """
import json, sys
from pathlib import Path
import torch
from ostinato import EngineConfig
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.loader import load_weights
from ostinato.models.random_weights import randomize_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.models.loader import build_model
from ostinato.models.checkpoint import load_spec

def kibibytes(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])

directory, how = Path(sys.argv[1]), sys.argv[2]
config, ops = EngineConfig(model=str(directory), quantization=sys.argv[3]), select_ops({})
spec = load_spec(config)
torch.empty(10, dtype=torch.bfloat16).copy_(torch.randn(10)).amax().isfinite()  # what torch takes once
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kibibytes("VmRSS")
model = build_model(WeightAllocator(ops, TorchArrays("cpu"), "bfloat16"), spec)
if how == "random":
    randomize_weights(model, 0)
else:
    load_weights(model, directory)
weights = list(model.parameters())
assert all(weight.amax().isfinite() for weight in weights)  # reads them all
print(json.dumps([1024 * (kibibytes("VmHWM") - before), sum(weight.nbytes for weight in weights)]))
"""


def configure(directory: Path, sizes: dict[str, int]) -> Path:
    config = sizes | {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 16,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def build(directory: Path) -> CausalLM:
    return build_model(
        WeightAllocator(select_ops({}), TorchArrays("cpu"), "bfloat16"), model_spec(read_config(directory))
    )


def save(directory: Path, sizes: dict[str, int], dtype: torch.dtype | None, offset: int) -> dict[str, torch.Tensor]:
    """Writes a random checkpoint whose first tensor begins `offset` bytes behind a cache line, with `dtype` instead of
    the model's own if one is given. -> its tensors"""
    model = build(configure(directory, sizes))
    randomize_weights(model, seed=0)
    tensors = {name: view.to(dtype or view.dtype).contiguous() for name, view in checkpoint_views(model)}
    header, end = {}, 0
    for name, tensor in tensors.items():
        code = {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * ((offset - 8 - len(text)) % huge_pages.CACHE_LINE)
    with (directory / SINGLE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
    return tensors


def load(directory: Path) -> CausalLM:
    model = build(directory)
    load_weights(model, directory)
    return model


def is_mapped(tensor: torch.Tensor, file: Path) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if str(file) in line and int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            return True
    return False


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [
        pytest.param(None, 0, id="mapped"),
        pytest.param(None, 8, id="copied"),
        pytest.param(torch.float32, 0, id="converted"),
    ],
)
@pytest.mark.slow
def test_loading_takes_at_most_30_percent_more_than_the_weights(
    dtype: torch.dtype | None, offset: int, tmp_path: Path
) -> None:
    save(tmp_path, LARGE, dtype, offset)
    assert_peak(tmp_path, "checkpoint")


@pytest.mark.slow
def test_random_weights_take_at_most_30_percent_more_than_themselves(tmp_path: Path) -> None:
    assert_peak(configure(tmp_path, LARGE), "random")


@pytest.mark.parametrize(
    ("how", "quantization"),
    [
        ("checkpoint", "int8_g128"),
        ("random", "int8"),
        pytest.param("checkpoint", "int8", marks=pytest.mark.long),
        pytest.param("random", "int8_g128", marks=pytest.mark.long),
    ],
)
def test_8_bit_weights_take_at_most_30_percent_more_than_themselves(
    how: str, quantization: str, tmp_path: Path
) -> None:
    if how == "checkpoint":
        save(tmp_path, LARGER, None, offset=0)
    assert_peak(configure(tmp_path, LARGER), how, quantization)


def assert_peak(directory: Path, how: str, quantization: str = "none") -> None:
    command = [sys.executable, "-c", LOAD, str(directory), how, quantization]
    taken, weights = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert weights > 1.5e8
    assert 0.95 * weights < taken <= 1.3 * weights  # one large tensor held twice would be 1.39


def test_a_weight_that_lies_in_the_file_as_the_model_wants_it_is_not_copied(tmp_path: Path) -> None:
    tensors = save(tmp_path, SMALL, None, offset=0)
    model = load(tmp_path)
    places = dict(checkpoint_views(model))
    for name in ("lm_head.weight", "model.layers.1.mixer.up_proj.weight", "model.layers.0.mixer.in_proj.weight"):
        assert is_mapped(places[name], tmp_path / SINGLE), name
    for name in ("model.layers.2.mixer.q_proj.weight", "model.layers.0.mixer.conv1d.weight"):
        assert not is_mapped(places[name], tmp_path / SINGLE), name
    for name, tensor in tensors.items():
        assert torch.equal(places[name], tensor), name


def test_weights_across_cache_lines_are_copied_onto_them(tmp_path: Path) -> None:
    tensors = save(tmp_path, SMALL, None, offset=8)
    model = load(tmp_path)
    assert all(weight.data_ptr() % huge_pages.CACHE_LINE == 0 for weight in model.parameters())
    for name, place in checkpoint_views(model):
        assert torch.equal(place, tensors[name]), name


def test_a_model_outlives_its_files(tmp_path: Path) -> None:
    tensors = save(tmp_path, SMALL, None, offset=0)
    model = load(tmp_path)
    shutil.rmtree(tmp_path)
    for name, place in checkpoint_views(model):
        assert torch.equal(place, tensors[name]), name


def test_a_weight_that_is_written_to_leaves_its_file_alone(tmp_path: Path) -> None:
    save(tmp_path, SMALL, None, offset=0)
    content = (tmp_path / SINGLE).read_bytes()
    load(tmp_path).lm_head.weight.data.fill_(1.0)
    assert (tmp_path / SINGLE).read_bytes() == content


def test_no_two_rows_of_a_random_matrix_are_equal(tmp_path: Path) -> None:
    model = build(configure(tmp_path, LARGE | {"vocab_size": 3 * PERIOD // 1024}))
    randomize_weights(model, seed=0)
    weight = model.lm_head.weight
    assert len(weight.unique(dim=0)) == len(weight)
    assert weight.float().var().item() == pytest.approx(1 / 1024, rel=0.01)


@pytest.mark.parametrize(
    "elements", [0, 1, huge_pages.HUGE_PAGE // 2 - 1, huge_pages.HUGE_PAGE // 2, 3 * huge_pages.HUGE_PAGE // 4]
)
@pytest.mark.parametrize("fills_slowly", [False, True])
def test_an_empty_tensor_holds_what_is_written_to_it(elements: int, fills_slowly: bool) -> None:
    tensor = TorchArrays("cpu").empty((elements, 1), "bfloat16", fills_slowly=fills_slowly)
    values = (torch.arange(elements) % 251).to(torch.bfloat16).unsqueeze(1)
    tensor.copy_(values)
    assert tensor.is_contiguous()
    assert torch.equal(tensor, values)
    if tensor.nbytes >= huge_pages.HUGE_PAGE:
        assert tensor.data_ptr() % huge_pages.HUGE_PAGE == 0


@pytest.mark.parametrize("begin", [0, 1, 4095])
@pytest.mark.parametrize("size", [0, 1, 4096, 12288])
def test_dropped_parts_of_a_file_are_read_again(begin: int, size: int, tmp_path: Path) -> None:
    content = bytes(i % 253 for i in range(20000))
    (tmp_path / "file").write_bytes(content)
    mapped = np.memmap(tmp_path / "file", mode="c")
    huge_pages.drop(mapped[begin : begin + size])
    assert bytes(mapped.tolist()) == content
