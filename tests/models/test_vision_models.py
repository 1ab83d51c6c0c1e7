"""Models with an encoder of images against transformers, below the engine."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.graphs.step_graphs import weight_storages
from ostinato.graphs.tape import TapeBackend
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.gemma3.model import Gemma3VL
from ostinato.models.gemma4.model import Gemma4VL, shrinking
from ostinato.models.loader import build_model, load_weights
from ostinato.models.random_weights import randomize_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.plan.device.detect import detect
from ostinato.plan.quantization import Quantization
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from tests.support.checkpoints import random_prompt
from tests.support.vl_models import (
    BLOCK_SIZE,
    CPU,
    END,
    IMAGE,
    IN_A_LINE,
    START,
    VIDEO,
    VL_RECIPES,
    encoder_inputs,
    image_inputs,
    of_images,
    ops_of,
    oracle_encode,
    poisoned_memory,
    random_items,
    types_of,
    vl_checkpoint,
    vl_model,
    vl_oracle,
    vl_spec,
    with_media,
)

PROJECTION = "model.per_layer_model_projection"
"""Gemma 4's matrix for the small embeddings of all layers."""

GRIDS = {
    "one token": [(2, 2)],
    "as many patches as positions": [(14, 14)],
    "wide and high": [(2, 30), (24, 4)],
    "several": [(6, 8), (2, 2), (10, 4), (8, 8)],
}


@pytest.mark.parametrize("name", VL_RECIPES)
def test_the_spec_counts_the_bytes_that_the_model_allocates(name: str) -> None:
    spec = vl_spec(name)
    for dtype in ("float32", "bfloat16"):
        build = WeightAllocator(select_ops({}), TorchArrays("meta"), dtype)
        weights = list(build_model(build, spec).parameters())
        assert sum(weight.numel() for weight in weights) == spec.num_parameters
        assert sum(weight.numel() * weight.element_size() for weight in weights) == spec.weight_bytes(dtype)


@pytest.mark.parametrize("quantization", [Quantization(None), Quantization(32)])
@pytest.mark.parametrize("name", VL_RECIPES)
def test_the_text_part_is_quantised_and_the_encoder_stays_as_it_is(name: str, quantization: Quantization) -> None:
    """The embedding is the LM head in one of the recipes, so that it is quantised there."""
    spec = replace(vl_spec(name), quantization=quantization)
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "bfloat16"), spec)
    load_weights(model, vl_checkpoint(name))
    weights = dict(model.named_parameters())
    assert sum(weight.numel() * weight.element_size() for weight in weights.values()) == spec.weight_bytes("bfloat16")
    quantised = {path for path, weight in weights.items() if weight.dtype == torch.int8}
    is_gemma = name.startswith("gemma")
    is_omni = name.startswith("nemotron")
    layers = "model.layers" if is_gemma or is_omni else "model.language_model.layers"
    assert {path for path in quantised if path != "lm_head.weight" and not path.startswith((layers, PROJECTION))} <= {
        f"{layers.removesuffix('.layers')}.embed_tokens.weight"
    }
    expected = {f"{layers}.{0 if 'vl' in name else 1}.self_attn.qkv.weight"}
    expected |= {f"{layers}.1.mlp.{'shared_expert.' if name == 'qwen3_5_moe' else ''}down_proj.weight"}
    if is_gemma:
        expected = {f"{layers}.0.self_attn.qkv.weight", f"{layers}.1.mlp.down_proj.weight"}
    if not ("vl" in name or is_gemma):
        delta_nets = [number for number, layer in enumerate(spec.layers) if layer.mixer is not None]
        expected |= {f"{layers}.{number}.linear_attn.in_proj.weight" for number in delta_nets}
        assert len(delta_nets) == len(spec.layers) - 1 or is_omni
    if is_omni:
        expected = {f"{layers}.{part}.weight" for part in ("2.mixer.qkv", "3.mixer.up_proj")}
    elif name in IN_A_LINE and not is_gemma:
        expected = {f"{layers}.{part}.weight" for part in ("0.conv.in_proj", "1.self_attn.qkv", "1.feed_forward.w2")}
    assert expected <= quantised
    assert (f"{layers.removesuffix('.layers')}.embed_tokens.weight" in quantised) == spec.tied_embeddings
    if name.endswith("moe"):
        assert f"{layers}.0.mlp.experts.up.weight" in quantised
        assert f"{layers}.0.mlp.gate.weight" not in quantised


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["reference", "native"])
@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("name", VL_RECIPES)
def test_the_encoder_gives_what_transformers_gives(name: str, grids: list[tuple[int, int]], kind: str) -> None:
    items, spec = random_items(name, grids, seed=1), vl_spec(name)
    assert spec.vision is not None
    encoded = vl_model(name, ops_of(name, kind)).encode(encoder_inputs(items, spec.vision))
    given, expected = of_images(encoded, items, spec.vision), oracle_encode(name, items)
    assert given.shape == expected.shape
    assert given.shape[1] == spec.vision.hidden_rows
    assert (given - expected).abs().max() < 1e-5 * expected.abs().max()


def prompt_with_images(sizes: list[int]) -> tuple[list[int], list[int]]:
    """Text around images of these numbers of tokens -> token ids and the cell of each token."""
    special = (IMAGE, START, END)
    token_ids, cells, cell = [], [], 1
    for i, size in enumerate(sizes):
        before = [token for token in random_prompt(11 + 9 * i, seed=i) if token not in special]
        token_ids += [*before, START, *[IMAGE] * size, END]
        cells += [0] * (len(before) + 1) + list(range(cell, cell + size)) + [0]
        cell += size
    after = [token for token in random_prompt(20, seed=99) if token not in special]
    return token_ids + after, cells + [0] * len(after)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["reference", "native"])
@pytest.mark.parametrize("cuts", [[], [15, 16, 17, 60]], ids=["whole", "cut within an image"])
@pytest.mark.parametrize("name", VL_RECIPES)
def test_logits_of_text_with_images_equal_transformers(name: str, cuts: list[int], kind: str) -> None:
    """The images' outputs, which transformers' encoder gives, lie in cells; those that no token takes are NaN."""
    grids = [(4, 6), (8, 8), (2, 10)]
    items, spec, oracle = random_items(name, grids, seed=2), vl_spec(name), vl_oracle(name)
    assert spec.vision is not None
    token_ids, cells = prompt_with_images([item.num_tokens for item in items])
    if spec.vision.is_bidirectional and cuts:
        # Before an image, and behind one: a step computes all of its tokens.
        cuts = [11, 12, 12 + items[0].num_tokens, 14 + items[0].num_tokens]
    ids, images = torch.tensor([token_ids]), image_inputs(name, items)
    types = (ids == IMAGE).int()
    expected = oracle(
        input_ids=ids,
        **types_of(name, ids),
        **images,
        use_cache=False,
    ).logits[0]
    rope = torch.arange(len(token_ids)).expand(3, 1, -1)
    if name not in IN_A_LINE:
        rope, _ = oracle.model.get_rope_index(
            ids, types, **{key: images[key] for key in ("image_grid_thw", "target_sizes") if key in images}
        )
        assert not torch.equal(rope[0], rope[2])  # else time, height and width could be taken for one another
    model = vl_model(name, ops_of(name, kind))
    encoded = oracle_encode(name, items)
    memory = poisoned_memory(spec, len(token_ids) // BLOCK_SIZE + 2, encoded)
    parts, start = [], 0
    for end in [*cuts, len(token_ids)]:
        table = tuple(range(1, -(-end // BLOCK_SIZE) + 1))
        row = BatchRow("r", tuple(token_ids[start:end]), start, table, read_slot=2 if start else 0, write_slots=(2,))
        step = make_step_inputs(Batch((row,), num_decode_rows=int(start > 0 and end - start == 1)), BLOCK_SIZE, CPU)
        step = with_media(step, rope[:, 0, start:end].T, torch.tensor(cells[start:end]), spec.vision)
        parts.append(model.compute_logits(model(step, memory)))
        start = end
    assert (torch.cat(parts) - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("name", VL_RECIPES)
def test_text_alone_stands_in_a_line(name: str) -> None:
    prompt = [token for token in random_prompt(90, seed=5) if token not in (IMAGE, VIDEO, START, END)]
    spec, model, length = vl_spec(name), vl_model(name), len(prompt)
    row = BatchRow("r", tuple(prompt), 0, tuple(range(1, length // BLOCK_SIZE + 2)), read_slot=0, write_slots=(2,))
    step = make_step_inputs(Batch((row,), num_decode_rows=0), BLOCK_SIZE, CPU)
    assert spec.vision is not None
    step = with_media(step, step.positions.unsqueeze(1).expand(-1, 3), torch.zeros_like(step.positions), spec.vision)
    encoded = torch.full((2, spec.vision.hidden_rows, spec.hidden_size), torch.nan)
    logits = model.compute_logits(model(step, poisoned_memory(spec, length // BLOCK_SIZE + 2, encoded)))
    expected = vl_oracle(name)(torch.tensor([prompt]), use_cache=False).logits[0]
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("quantization", [None, Quantization(None), Quantization(32)])
def test_experts_with_rows_for_columns_are_read_like_others(tmp_path: Path, quantization: Quantization | None) -> None:
    """Published checkpoints hold them as [experts, in, out]."""
    name = "qwen3_vl_moe"
    shutil.copytree(vl_checkpoint(name), tmp_path / "turned")
    file = tmp_path / "turned" / "model.safetensors"
    tensors = load_file(file)
    stacks = [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(stacks) == 4
    save_file(tensors | {key: tensors[key].mT.contiguous() for key in stacks}, file, metadata={"format": "pt"})
    spec = replace(model_spec(read_config(vl_checkpoint(name))), quantization=quantization)
    models = []
    for directory in (vl_checkpoint(name), tmp_path / "turned"):
        models.append(build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec))
        load_weights(models[-1], directory)
    for plain, turned in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(plain, turned)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["reference", "native"])
@pytest.mark.parametrize("name", VL_RECIPES)
def test_a_tape_of_text_with_images_replays_for_other_images(name: str, kind: str) -> None:
    """The captured step has no image; the replayed one has some of every cell, at other places than in the line."""
    model, spec = vl_model(name, ops_of(name, kind)), vl_spec(name)
    assert spec.vision is not None
    length = 40
    encoded = torch.randn(9, spec.vision.hidden_rows, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    row = BatchRow("r", tuple(random_prompt(length, seed=1)), 0, (1, 2, 3), read_slot=0, write_slots=(2,))
    step = make_step_inputs(Batch((row,), num_decode_rows=0), BLOCK_SIZE, CPU)
    step = with_media(
        step, step.positions.unsqueeze(1).repeat(1, 3), torch.zeros(length, dtype=torch.int64), spec.vision
    )
    assert step.media_cells is not None
    assert step.rope_positions is not None
    memory = poisoned_memory(spec, 5, encoded)
    persistent = weight_storages(model) | {
        value.untyped_storage().data_ptr(): "a buffer"
        for holder in (step, *memory)
        for value in (*vars(holder).values(), *getattr(holder, "states", {}).values())
        if isinstance(value, torch.Tensor)
    }
    backend = TapeBackend(model.build.ops.hook, persistent, CPU)
    tape = backend.capture(lambda captured: model(captured, memory), step, ())
    without = model(step, memory)
    assert torch.equal(tape.replay(step), without)
    step.media_cells[10:19] = torch.arange(1, 10)
    step.rope_positions[12:, 1] += 7
    expected = model(step, memory)
    backend.arena.poison()
    assert torch.equal(tape.replay(step), expected)
    assert not torch.allclose(expected[19:], without[19:], atol=1e-2)


@torch.inference_mode()
def test_an_image_gives_the_same_bits_in_any_company() -> None:
    """With native kernels that keep the order of their sums, from which the encoder cache takes what another request
    had encoded."""
    isa = detect("cpu").native.isa
    if isa is None:
        pytest.skip("no native module is built: run make native")
    name, spec = "qwen3_vl", vl_spec("qwen3_vl")
    assert spec.vision is not None
    model = vl_model(name, select_ops(dict.fromkeys(spec.ops, "native"), isa, deterministic=True))
    items = random_items(name, [(10, 14), (4, 6), (8, 20)], seed=7)
    together = model.encode(encoder_inputs(items, spec.vision)).split([item.num_tokens for item in items])
    for item, rows in zip(items, together, strict=True):
        assert torch.equal(model.encode(encoder_inputs([item], spec.vision)), rows)


@pytest.mark.parametrize("name", VL_RECIPES)
def test_random_weights_give_finite_outputs(name: str) -> None:
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), vl_spec(name))
    randomize_weights(model, seed=0)
    items, vision = random_items(name, [(4, 4)], seed=1), vl_spec(name).vision
    assert vision is not None
    assert model.encode(encoder_inputs(items, vision)).isfinite().all()


def test_gemma3_has_the_same_weights_under_the_names_of_the_hub() -> None:
    """Its checkpoints have the parts outside of `model.`, and those of SigLIP's pooling head beside them."""
    model = vl_model("gemma3")
    assert isinstance(model, Gemma3VL)
    for name in vl_oracle("gemma3").state_dict():
        hub = name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)
        hub = hub.replace("lm_head.", "language_model.lm_head.").replace(
            "vision_tower.", "vision_tower.vision_model.", 1
        )
        assert model.checkpoint_name(hub) == model.checkpoint_name(name)
    assert model.checkpoint_name("vision_tower.vision_model.head.probe") is None


def test_means_of_gemma4_stay_near_the_size_of_patches_which_float16_holds() -> None:
    """Powers of 2 round nothing."""
    vision = vl_spec("gemma4").vision
    assert vision is not None
    for size in (48, 768, 1152):
        factor = shrinking(replace(vision, hidden_size=size))
        assert math.frexp(factor)[0] == 0.5
        assert 0.7 < factor * size**0.5 < 1.42


def test_gemma4_unified_has_the_same_weights_under_the_names_of_the_hub() -> None:
    """Its checkpoints have the embedder's parts outside of the projection's module, and an embedder of sounds."""
    model = vl_model("gemma4_unified")
    assert isinstance(model, Gemma4VL)
    written = load_file(vl_checkpoint("gemma4_unified") / "model.safetensors")
    assert {model.checkpoint_name(name) for name in written} == {
        model.checkpoint_name(name) for name in vl_oracle("gemma4_unified").state_dict()
    }
    assert "model.vision_embedder.pos_embedding" in written
    assert model.checkpoint_name("model.embed_audio.embedding_projection.weight") is None
