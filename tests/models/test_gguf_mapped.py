"""Weights of GGUF files that stay in the file's pages, and those that are copied."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ostinato import LLM, ModelError, SamplingParams
from ostinato.config import EngineConfig
from ostinato.formats.checkpoint_json import gguf_header
from ostinato.formats.gguf.architectures import find_contiguous_tensors
from ostinato.formats.gguf.reader import TYPES, GgufTensor, Header
from ostinato.formats.mapped_files import MappedFileWatch
from ostinato.layers.allocation import WeightAllocator
from ostinato.models import checkpoint
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import load_spec
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.plan.device.detect import detect
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.plan.quantization import BlockQuantization
from ostinato.plan.weights import Weight

pytest.importorskip("gguf", reason="the package that writes GGUF files comes with the test extra")
from tests.support.allocations import peak_with_numpy
from tests.support.gguf_files import split_gguf, write_gguf

OF_TYPE = {block.name: block for block in TYPES.values()}
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="where files are mapped is read from /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mapped")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return write_gguf(folder / "llama.gguf", "llama", "Q4_1")


def loaded(path: Path) -> tuple[ModelSpec, CausalLM]:
    spec = load_spec(EngineConfig(model=str(path)))
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec)
    load_weights(model, path)
    return spec, model


def mapped_names(path: Path, model: CausalLM) -> set[str]:
    """Weights whose bytes lie where the file is mapped, by the name of the first tensor in each."""
    places = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, end = line.split()[0].split("-")
            places.append((int(begin, 16), int(end, 16)))
    return {
        row.names[0]
        for module, attribute, row in model.weights()
        if any(begin <= getattr(module, attribute).data_ptr() < end for begin, end in places)
    }


@needs_proc
def test_weights_lie_where_the_plan_says(llama: Path) -> None:
    spec, model = loaded(llama)
    layer = "model.layers.{}.{}.weight"
    inner = ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    whole = {"model.embed_tokens.weight", "lm_head.weight"}
    expected = whole | {layer.format(i, name) for i in range(2) for name in inner}
    assert mapped_names(llama, model) == expected  # and not queries and keys, whose rows lie in another order
    found = [getattr(module, name) for module, name, row in model.weights() if row.names[0] in expected]
    assert spec.mapped_bytes == sum(weight.nbytes for weight in found) > 0
    config = EngineConfig(model=str(llama), cache_memory="16MiB")
    plan = make_plan(config, spec, detect("cpu"))
    assert plan.memory.mapped_weights == spec.mapped_bytes < plan.memory.weights
    assert any("stay in the file's pages" in decision.reason for decision in plan.decisions)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", "Q4_1"), ("qwen35 with a head", "Q8_0"), ("qwen35moe of experts", "Q8_0"), ("falcon-h1", "F32")],
)
@pytest.mark.parametrize("quantization", ["auto", "none", "int8"])
def test_loading_holds_a_few_forms_of_one_tensor_beside_the_weights(
    folder: Path, architecture: str, kind: str, quantization: str
) -> None:
    path = folder / f"{architecture}-{kind}.gguf".replace(" ", "-")
    path = path if path.exists() else write_gguf(path, architecture, kind)
    spec = load_spec(EngineConfig(model=str(path), quantization=quantization))
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec)
    largest = max(tensor.num_elements for tensor in gguf_header(path).tensors.values())
    # What blocks are taken apart into has up to 8 bytes for each weight, beside the weights themselves. What torch
    # quantises with then is as much again.
    # Python keeps names and headers besides.
    assert (
        peak_with_numpy(lambda: load_weights(model, path)) - 2**17 <= (24 if quantization == "int8" else 12) * largest
    )


@needs_proc
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_weights_that_are_made_anew_leave_no_page_of_the_file(llama: Path, quantization: str) -> None:
    spec = load_spec(EngineConfig(model=str(llama), quantization=quantization))
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec)
    load_weights(model, llama)
    assert spec.mapped_bytes == 0
    assert mapped_names(llama, model) == set()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "granitehybrid"])
def test_mapped_and_copied_weights_are_the_same_bytes_and_give_the_same_tokens(
    folder: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / f"{architecture}-Q8_0.gguf"
    path = path if path.exists() else write_gguf(path, architecture, "Q8_0")
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def run() -> tuple[int, list[torch.Tensor], list[int]]:
        llm = LLM(str(path), cache_memory="16MiB", max_num_seqs=2, threads=1, dtype="float32")
        weights = list(llm.engine.runner.model.parameters())
        return llm.engine.spec.mapped_bytes, weights, llm.generate([list(range(5, 40))], greedy)[0].outputs[0].token_ids

    mapped, weights, tokens = run()
    monkeypatch.setattr(checkpoint, "find_contiguous_tensors", lambda header, model: ())
    copied, others, expected = run()
    assert mapped > 0 == copied
    assert all(np.array_equal(a, b) for a, b in zip(weights, others, strict=True))
    assert tokens == expected


def test_weights_of_a_split_model_lie_in_the_parts_that_hold_them(llama: Path) -> None:
    parts = split_gguf(llama, 3)
    weights = list(loaded(parts[0])[1].parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, loaded(llama)[1].parameters(), strict=True))


def test_a_model_outlives_its_file(folder: Path) -> None:
    path = write_gguf(folder / "gone.gguf", "qwen3", "Q8_0")
    expected = [weight.clone() for weight in loaded(path)[1].parameters()]
    spec, model = loaded(path)
    assert spec.mapped_bytes > 0
    path.unlink()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))


# Which tensors are one matrix where they lie


def place(name: str, begin: int, kind: str = "Q8_0", rows: int = 32) -> GgufTensor:
    """Of 32 columns: a block of 34 bytes per row in Q8_0."""
    return GgufTensor(name, (rows, 32), OF_TYPE[kind], begin, Path("model.gguf"))


def runs_of(model_type: str, *places: GgufTensor) -> tuple[tuple[str, ...], ...]:
    header = Header(Path("model.gguf"), 3, {}, {each.name: each for each in places})
    model = replace(load_spec(EngineConfig(model="demo")), architecture=model_type, head=None)
    found = find_contiguous_tensors(header, model)
    return tuple(tuple(name.removeprefix("model.layers.0.").removesuffix(".weight") for name in run) for run in found)


def test_what_lies_apart_or_in_another_order_is_no_run() -> None:
    size = 32 * 34
    gate, up, down, query = (
        "blk.0.ffn_gate.weight",
        "blk.0.ffn_up.weight",
        "blk.0.ffn_down.weight",
        "blk.0.attn_q.weight",
    )
    both = (("mlp.gate_proj", "mlp.up_proj"),)
    apart = (("mlp.gate_proj",), ("mlp.up_proj",))
    assert runs_of("llama", place(gate, 0), place(up, size)) == both
    assert runs_of("llama", place(up, size), place(gate, 0)) == both  # the table's order says nothing
    assert runs_of("llama", place(gate, 0), place(up, size + 32)) == apart
    assert runs_of("llama", place(up, 0), place(gate, size)) == (("mlp.up_proj", "mlp.gate_proj"),)
    assert runs_of("llama", place(gate, 0), place(down, size, "F32"), place(up, 5 * size)) == apart
    assert runs_of("llama", place(query, 0)) == ()
    assert runs_of("qwen2", place(query, 0)) == (("self_attn.q_proj",),)


def test_halves_of_one_matrix_are_a_run_only_with_the_gates_first() -> None:
    gate, up, size = "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", 32 * 34
    whole = runs_of("granitemoehybrid", place(gate, 0), place(up, size))
    assert [len(run) for run in whole] == [1]
    assert runs_of("granitemoehybrid", place(up, 0), place(gate, size)) == ()
    assert runs_of("granitemoehybrid", place(gate, 0), place(up, size + 32)) == ()
    assert runs_of("granitemoehybrid", place(gate, 0), place(up, size, "Q4_0")) == ()
    assert runs_of("granitemoehybrid", place(gate, 0)) == ()


def test_a_weight_is_mapped_if_its_tensors_follow_each_other_in_its_order() -> None:
    formats = tuple((f"{name}.weight", "Q8_0") for name in "abcd")
    chosen = BlockQuantization(formats, contiguous_tensors=(("a.weight", "b.weight"), ("c.weight",)))

    def is_mapped(*names: str) -> bool:
        names = tuple(f"{name}.weight" for name in names)
        return chosen.is_mapped(Weight((32 * len(names), 32), "linear", names, can_be_quantised=True))

    assert is_mapped("a", "b")
    assert is_mapped("b")
    assert is_mapped("c")
    assert not is_mapped("b", "a")
    assert not is_mapped("b", "c")
    assert not is_mapped("d")


@needs_proc
def test_a_mapped_file_that_is_written_to_is_noticed_and_one_that_is_replaced_is_not(
    llama: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(llama, tmp_path / "model.gguf"))
    _, model = loaded(path)
    files = MappedFileWatch([path])
    files.check()
    shutil.copy(llama, tmp_path / "other")
    (tmp_path / "other").replace(path)
    files.check()
    path.unlink()
    files.check()

    path = Path(shutil.copy(llama, tmp_path / "again.gguf"))
    _, model = loaded(path)
    files = MappedFileWatch([path])
    with path.open("r+b") as file:
        file.write(file.read(4)[::-1])
    with pytest.raises(ModelError, match="was written to while it was in use"):
        files.check()
    del model


@needs_proc
def test_a_file_whose_weights_were_copied_may_be_written_to(llama: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(llama, tmp_path / "model.gguf"))
    files = MappedFileWatch([path])
    path.write_bytes(b"")
    files.check()
