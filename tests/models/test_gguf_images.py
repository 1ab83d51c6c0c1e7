"""Images with GGUF files: the same outputs as from the checkpoint that the files were made of."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.config import EngineConfig
from ostinato.engine.cache_files import checkpoint_digest
from ostinato.errors import ModelError
from ostinato.inspection import inspect_checkpoint
from ostinato.layers.allocation import WeightAllocator
from ostinato.media.processor_config import load_media_settings
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import load_spec
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import make_plan

pytest.importorskip("gguf", reason="the package that writes GGUF files comes with the test extra")
from tests.support.gguf_files import write_gguf
from tests.support.gguf_images import IMAGE, VISION_FILES, write_checkpoint, write_encoder, write_text

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "max_num_seqs": 2, "cache_memory": "8MiB"}


SLOW = ("qwen3vl", "qwen35")
"""Kinds that differ from others only in having no experts."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in VISION_FILES],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder, name = tmp_path_factory.mktemp("images"), request.param
    write_checkpoint(folder, name)
    write_text(folder, name)
    write_encoder(folder / "mmproj-F32.gguf", name)
    return folder, name


def answer(model: Path, tokenizer: Path, limits: dict[str, int]) -> tuple[list[int], list[int], list[float]]:
    llm = LLM(str(model), tokenizer=str(tokenizer), **SETTINGS)
    image = np.random.default_rng(3).integers(0, 256, (30, 41, 3), dtype=np.uint8)
    parts = [
        {"type": "text", "text": "hello "},
        {"type": "image", "image": image, **limits},
        {"type": "text", "text": " world"},
    ]
    [output] = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=8, temperature=0, logprobs=1))
    chosen = output.outputs[0]
    tokens = chosen.token_ids
    return (
        output.prompt_token_ids,
        tokens,
        [step[token].logprob for step, token in zip(chosen.logprobs, tokens, strict=True)],
    )


def test_an_image_gets_the_answer_of_the_checkpoint(folder: tuple[Path, str]) -> None:
    path, name = folder
    text, checkpoint = path / "text.gguf", path / "checkpoint"
    limits = {"min_pixels": 64, "max_pixels": 2048} if name.startswith("qwen") else {}
    found = answer(text, text, limits)
    assert IMAGE in found[0]
    expected = answer(checkpoint, text, limits)
    assert found[:2] == expected[:2]
    assert found[2] == pytest.approx(expected[2], abs=2e-6)
    vision = load_spec(EngineConfig(model=str(text))).vision
    assert vision is not None
    assert load_media_settings(text, vision) == load_media_settings(checkpoint, vision)


def decisions(text: Path) -> dict[str, str]:
    config = EngineConfig(model=str(text), **SETTINGS)
    plan = make_plan(config, load_spec(config), detect("cpu"))
    return {each.topic: f"{each.effective}: {each.reason}" for each in plan.decisions}


def test_the_plan_names_the_encoders_file_or_why_images_are_refused(folder: tuple[Path, str], tmp_path: Path) -> None:
    path = folder[0]
    assert "mmproj-F32.gguf" in decisions(path / "text.gguf")["encoder"]
    text = Path(shutil.copy(path / "text.gguf", tmp_path / "text.gguf"))
    assert "no file *mmproj*.gguf is beside it" in decisions(text)["model"]
    assert load_spec(EngineConfig(model=str(text))).vision is None
    assert inspect_checkpoint(text, detect("cpu")).refused == []
    assert inspect_checkpoint(path / "text.gguf", detect("cpu")).refused == []


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    write_checkpoint(folder, "gemma3")
    write_text(folder, "gemma3")
    return folder


def beside(gemma: Path, folder: Path, **how: Any) -> Path:
    """The text in a folder with an encoder that is written so."""
    for name in ("text.gguf", "weights.pt"):
        shutil.copy(gemma / name, folder / name)
    write_encoder(folder / "mmproj-a.gguf", "gemma3", **how)
    return folder / "text.gguf"


def load(text: Path) -> CausalLM:
    spec = load_spec(EngineConfig(model=str(text)))
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec)
    load_weights(model, text)
    return model


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "llama", "mmproj-a.gguf is no encoder of images (architecture 'llama')"),
        ("clip.projector_type", "qwen3vl_merger", "mmproj-a.gguf is of another model: its projector_type is"),
        ("clip.vision.projection_dim", 80, "projection_dim is 80, and the text's embedding_length 64"),
        ("clip.use_gelu", False, "mmproj-a.gguf has clip.use_gelu = False"),
        ("general.architecture", [1, 2], "mmproj-a.gguf is no encoder of images"),
        ("clip.projector_type", [1, 2], "mmproj-a.gguf is of another model: its projector_type is"),
        ("clip.vision.projection_dim", [64, 64], "mmproj-a.gguf is of another model: its projection_dim is"),
    ],
)
def test_an_encoder_of_another_model_is_refused_by_name(
    gemma: Path, tmp_path: Path, key: str, value: Any, words: str
) -> None:
    text = beside(gemma, tmp_path, **{key: value})
    assert words in decisions(text)["model"]
    assert load_spec(EngineConfig(model=str(text))).vision is None


def test_a_damaged_encoder_is_an_error_with_its_name_unless_another_fits(gemma: Path, tmp_path: Path) -> None:
    text = beside(gemma, tmp_path)
    whole = tmp_path / "mmproj-a.gguf"
    (tmp_path / "mmproj-b.gguf").write_bytes(whole.read_bytes()[:-200])
    assert decisions(text)["encoder"].startswith("mmproj-a.gguf")
    with pytest.raises(ModelError, match=r"architecture 'clip'.*give the file of the text beside it"):
        load_spec(EngineConfig(model=str(whole)))
    whole.unlink()
    with pytest.raises(ModelError, match=r"mmproj-b\.gguf of \d+ bytes is damaged or truncated"):
        load_spec(EngineConfig(model=str(text)))


def test_what_only_has_an_encoders_name_is_named(gemma: Path, tmp_path: Path) -> None:
    text = Path(shutil.copy(gemma / "text.gguf", tmp_path / "text.gguf"))
    os.mkfifo(tmp_path / "mmproj-a.gguf")
    (tmp_path / "mmproj-b.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "mmproj-c.gguf").mkdir()
    assert "mmproj-a.gguf is no file; mmproj-b.gguf is no file; mmproj-c.gguf is no file" in decisions(text)["model"]
    (tmp_path / "mmproj-d.gguf").write_text("a note")
    with pytest.raises(ModelError, match=r"mmproj-d\.gguf is no GGUF file"):
        load_spec(EngineConfig(model=str(text)))


def test_the_plan_names_an_encoder_beside_a_text_that_takes_none(tmp_path: Path) -> None:
    llama = write_gguf(tmp_path / "text.gguf", "llama")
    assert "model" not in decisions(llama)
    (tmp_path / "mmproj-a.gguf").touch()
    assert "mmproj-a.gguf is not read: encoders of images are read beside texts of gemma3" in decisions(llama)["model"]


def test_an_encoder_with_tensors_of_a_text_is_refused(gemma: Path, tmp_path: Path) -> None:
    text = beside(gemma, tmp_path, rename=lambda stored: stored.replace("v.blk.1.ln1", "blk.1.attn_norm"))
    assert "belong to no encoder of images: blk.1.attn_norm.weight" in decisions(text)["model"]


@pytest.mark.parametrize("name", ["v.blk.1.attn_q.bias", "v.position_embd.weight"])
def test_a_tensor_that_an_encoder_lacks_is_named(gemma: Path, tmp_path: Path, name: str) -> None:
    text = beside(gemma, tmp_path, rename=lambda stored: None if stored == name else stored)
    with pytest.raises(ModelError, match=r"mmproj-a\.gguf do not match(.|\n)*missing \(1\): vision_tower\."):
        load(text)
    assert inspect_checkpoint(text, detect("cpu")).refused


def test_a_metadata_that_an_encoder_lacks_is_named(gemma: Path, tmp_path: Path) -> None:
    text = beside(gemma, tmp_path, **{"clip.vision.block_count": None})
    with pytest.raises(ModelError, match=r"mmproj-a\.gguf has no clip\.vision\.block_count"):
        load_spec(EngineConfig(model=str(text)))


def weights(text: Path) -> dict[str, torch.Tensor]:
    return {row.names[0]: getattr(module, attribute) for module, attribute, row in load(text).weights()}


def test_an_older_file_with_the_two_names_of_an_mlp_exchanged_has_the_same_weights(gemma: Path, tmp_path: Path) -> None:
    """Published files of Gemma 3 have both forms."""
    folders = [tmp_path / "new", tmp_path / "old"]
    for folder in folders:
        folder.mkdir()
    expected = weights(beside(gemma, folders[0]))
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    turned = weights(
        beside(gemma, folders[1], rename=lambda stored: ".".join(other.get(part, part) for part in stored.split(".")))
    )
    assert all(torch.equal(values, turned[name]) for name, values in expected.items())


def test_an_encoder_in_blocks_is_expanded_and_the_largest_file_is_taken(gemma: Path, tmp_path: Path) -> None:
    text = beside(gemma, tmp_path, kind="Q8_0")
    exact, digest = weights(text), checkpoint_digest(text)
    write_encoder(tmp_path / "mmproj-b.gguf", "gemma3")
    assert decisions(text)["encoder"].startswith("mmproj-b.gguf")
    assert checkpoint_digest(text) != digest
    whole = weights(text)
    assert exact.keys() == whole.keys()
    names = [name for name, values in whole.items() if not torch.equal(values, exact[name])]
    assert names
    assert all(name.startswith(("vision_tower.", "multi_modal")) for name in names)
    assert all((whole[name] - exact[name]).abs().max() < 0.02 for name in names)
