"""Every architecture against transformers, below the engine: one row through the model's forward."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import EngineConfig, ModelError
from ostinato.layers.allocation import WeightAllocator, checkpoint_views
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model, deinterleaved_index, load_weights
from ostinato.ops.arrays import TorchArrays, dtype_name
from ostinato.ops.dispatch import select_ops
from ostinato.ops.step_inputs import LayerCache
from ostinato.plan.model import ModelSpec
from ostinato.plan.speculation import with_drafter
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from tests.support.checkpoints import RECIPES, checkpoint, oracle_logits, random_prompt
from tests.support.parity import make_engine
from tests.support.recipes import HEADED

BLOCK_SIZE = 16
PROMPT = 150
CPU = TorchArrays("cpu")


def load(name: str) -> tuple[CausalLM, ModelSpec]:
    directory = checkpoint(name)
    spec = model_spec(read_config(directory))
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec)
    load_weights(model, directory)
    return model, spec


def poisoned_memory(spec: ModelSpec) -> list[LayerCache]:
    """Blocks for one prompt and three slots, all NaN: what was not written must not be read."""
    nan = float("nan")
    memory: list[LayerCache] = []
    for layer in spec.layers:
        parts = {}
        if layer.attention is not None and layer.attention.keys_of is not None:
            memory.append(memory[layer.attention.keys_of])
            continue
        if layer.attention is not None:
            shape = (
                PROMPT // BLOCK_SIZE + 2,
                BLOCK_SIZE,
                layer.attention.num_kv_heads,
                layer.attention.head_dim,
            )
            parts |= {"k_cache": torch.full(shape, nan), "v_cache": torch.full(shape, nan)}
            if layer.attention.indexer is not None and layer.attention.indexer.entry_size:
                parts["index_cache"] = torch.full((*shape[:2], 1, layer.attention.indexer.entry_size), nan)
        arrays = () if layer.mixer is None else layer.mixer.state.arrays
        states = {array.name: torch.full((3, *array.shape), nan) for array in arrays}
        memory.append(LayerCache(**parts, states=states))
    return memory


@torch.inference_mode()
def logits_in_steps(name: str, cuts: list[int]) -> torch.Tensor:
    """Logits of the prompt, computed in steps that end at `cuts`; one-token steps are decode rows."""
    model, spec = load(name)
    memory = poisoned_memory(spec)
    prompt = random_prompt(PROMPT, seed=1)
    parts, start = [], 0
    for end in [*cuts, PROMPT]:
        table = tuple(range(1, -(-end // BLOCK_SIZE) + 1))
        row = BatchRow("r", tuple(prompt[start:end]), start, table, read_slot=2 if start else 0, write_slots=(2,))
        batch = Batch((row,), num_decode_rows=int(start > 0 and end - start == 1))
        parts.append(model.compute_logits(model(make_step_inputs(batch, BLOCK_SIZE, CPU), memory)))
        start = end
    return torch.cat(parts)


@pytest.mark.parametrize("cuts", [[], [37, 38, 101, 149]], ids=["whole", "in odd chunks and single tokens"])
@pytest.mark.parametrize("name", RECIPES)
def test_logits_equal_transformers(name: str, cuts: list[int]) -> None:
    expected = oracle_logits(name, random_prompt(PROMPT, seed=1))
    error = (logits_in_steps(name, cuts) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("name", RECIPES)
def test_the_spec_counts_the_bytes_that_the_model_allocates(name: str) -> None:
    spec = model_spec(read_config(checkpoint(name)))
    for dtype in ("float32", "bfloat16"):
        build = WeightAllocator(select_ops({}), TorchArrays("meta"), dtype)
        weights = list(build_model(build, spec).parameters())
        on_disk = spec.disk_bytes // 4
        assert sum(weight.numel() for weight in weights) + on_disk == spec.num_parameters
        assert sum(weight.numel() * weight.element_size() for weight in weights) == spec.weight_bytes(dtype)


@pytest.mark.parametrize("name", [*RECIPES, *HEADED])
def test_the_weight_table_has_the_names_and_shapes_that_the_model_loads(name: str) -> None:
    spec = model_spec(read_config(checkpoint(name)))
    if name in HEADED:
        spec = spec_with_head(checkpoint(name))
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("meta"), "bfloat16"), spec)
    table = [*spec.table, *(spec.drafter.table if spec.drafter is not None else ())]
    loaded = {path: view.shape for path, view in checkpoint_views(model)}
    assert {path for weight in table for path in weight.names} == loaded.keys()
    assert sum(weight.num_elements for weight in table) == sum(shape.numel() for shape in loaded.values())
    whole = {weight.names[0]: weight.stored_shape or weight.shape for weight in table if len(weight.names) == 1}
    assert whole
    assert all(loaded[path] == shape for path, shape in whole.items())


# Prediction heads


def spec_with_head(directory: Path) -> ModelSpec:
    """The spec of a model whose head makes drafts."""
    return with_drafter(EngineConfig(speculative="mtp:1"), model_spec(read_config(directory)))


def load_into(spec: ModelSpec, directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The weights after loading, under the model's names for what a checkpoint holds."""
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), dtype_name(dtype)), spec)
    for weight in model.parameters():
        weight.data.fill_(float("nan"))
    load_weights(model, directory)
    return dict(checkpoint_views(model))


@pytest.mark.parametrize("name", HEADED)
def test_a_head_is_loaded_tensor_by_tensor_and_takes_the_bytes_of_its_spec(name: str) -> None:
    directory = checkpoint(name)
    spec, saved = spec_with_head(directory), load_file(directory / "model.safetensors")
    assert spec.drafter is not None
    loaded = load_into(spec, directory)
    assert loaded.keys() == {key.replace("backbone.", "model.", 1) for key in saved}
    rows = {name: weight for weight in (*spec.table, *spec.drafter.table) for name in weight.names}
    for key, tensor in saved.items():
        name = key.replace("backbone.", "model.", 1)
        given, row = loaded[name], rows[name]
        if row.neighbours is not None or row.first_part_transposed:  # Parity tests hold their order.
            given, tensor = (each.flatten().sort().values for each in (given, tensor))
        order = deinterleaved_index(len(tensor), row.row_interleave) if row.row_interleave else slice(None)
        assert torch.equal(given, tensor if row.first_part_transposed else tensor[order])
    places = {path for weight in spec.drafter.table for path in weight.names}
    assert sum(saved[path].numel() for path in places) == spec.drafter.num_parameters
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(WeightAllocator(select_ops({}), TorchArrays("meta"), dtype_name(dtype)), spec)
        held = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        name_of = str(dtype).removeprefix("torch.")
        assert held == spec.weight_bytes(name_of) + spec.drafter.weight_bytes(name_of)


def changed(directory: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(directory, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_one_error_lists_what_is_wrong_with_a_head(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["mtp.layers.0.enorm.weight"]
        del tensors["mtp.layers.1.mixer.experts.3.up_proj.weight"]
        tensors["mtp.layers.0.eh_proj.weight"] = torch.zeros(64, 64)
        tensors["mtp.layers.7.norm.weight"] = torch.zeros(64)

    directory = changed(checkpoint("nemotron_h_head"), tmp_path / "spoiled", spoil)
    with pytest.raises(ModelError) as raised:
        load_into(spec_with_head(directory), directory)
    assert raised.value.message.splitlines()[1:] == [
        "missing (2): mtp.layers.0.enorm.weight, mtp.layers.1.mixer.experts.3.up_proj.weight.",
        "left over (1): mtp.layers.7.norm.weight.",
        "wrong shape (1): mtp.layers.0.eh_proj.weight is [64, 64], expected [64, 128].",
    ]


def test_a_checkpoint_whose_head_has_no_tensors_can_run_but_not_draft(tmp_path: Path) -> None:
    def behead(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.startswith("mtp.")]:
            del tensors[key]

    directory = changed(checkpoint("nemotron_h_dense_head"), tmp_path / "beheaded", behead)
    spec = model_spec(read_config(directory))
    assert spec.head is not None
    with pytest.raises(ModelError, match=r"missing \(12\): mtp\.layers\.0\.eh_proj\.weight, .*final_layernorm"):
        load_into(spec_with_head(directory), directory)
    assert not any(weight.isnan().any() for weight in load_into(spec, directory).values())


@pytest.mark.parametrize("name", HEADED)
def test_a_head_that_makes_no_drafts_is_not_loaded(name: str) -> None:
    spec = model_spec(read_config(checkpoint(name)))
    loaded = load_into(spec, checkpoint(name))
    assert loaded
    assert spec.head is not None
    assert not loaded.keys() & {path for weight in spec.head.table for path in weight.names}
    assert sum(weight.numel() * weight.element_size() for weight in loaded.values()) == spec.weight_bytes("float32")


def test_the_plan_counts_the_weights_of_what_makes_drafts() -> None:
    """Those of a draft model with its embedding, and those of a head, which has the model's."""
    name, draft = "nemotron_h_head", "granitemoehybrid_dense"
    drafters = {
        "mtp:2": spec_with_head(checkpoint(name)).drafter,
        f"draft:{checkpoint(draft)}:2": model_spec(read_config(checkpoint(draft))),
    }
    alone = make_engine(name, graph_mode="none").plan.memory.weights
    for speculative, drafter in drafters.items():
        assert drafter is not None
        engine = make_engine(name, speculative=speculative, graph_mode="none")
        assert engine.plan.memory.weights == alone + drafter.weight_bytes("float32")
        assert engine.plan.memory.weights == engine.runner.measured["weight_bytes"]
