"""Images with GGUF files: the same outputs as from the checkpoint that the files were made of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato import LLM, SamplingParams
from ostinato.config import EngineConfig
from ostinato.errors import ModelError, OstinatoError
from ostinato.inspection import inspect_checkpoint
from ostinato.media.processor_config import load_media_settings
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import make_plan

pytest.importorskip("gguf", reason="the package that writes GGUF files comes with the test extra")
from tests.support.gguf_images import IMAGE, VISION_FILES, write_checkpoint, write_encoder, write_text

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "max_num_seqs": 2, "cache_memory": "8MiB"}


@pytest.fixture(scope="module", params=VISION_FILES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder, name = tmp_path_factory.mktemp("images"), request.param
    write_checkpoint(folder, name)
    write_text(folder, name)
    write_encoder(folder / "mmproj-F32.gguf", name)
    return folder, name


def answer(model: Path, tokenizer: Path, limits: dict[str, int]) -> tuple[list[int], list[int], list[float]]:
    llm = LLM(str(model), tokenizer=str(tokenizer), **SETTINGS)
    image = np.random.default_rng(3).integers(0, 256, (30, 41, 3), dtype=np.uint8)
    parts = [{"type": "text", "text": "hello "}, {"type": "image", "image": image, **limits}, {"type": "text", "text": " world"}]
    [output] = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=8, temperature=0, logprobs=1))
    chosen = output.outputs[0]
    tokens = chosen.token_ids
    return output.prompt_token_ids, tokens, [step[token].logprob for step, token in zip(chosen.logprobs, tokens)]


def test_an_image_gets_the_answer_of_the_checkpoint(folder: tuple[Path, str]) -> None:
    path, name = folder
    text, checkpoint = path / "text.gguf", path / "checkpoint"
    limits = {"min_pixels": 64, "max_pixels": 2048} if name.startswith("qwen") else {}
    found = answer(text, text, limits)
    assert IMAGE in found[0]
    assert found == answer(checkpoint, text, limits)
    vision = load_spec(EngineConfig(model=str(text))).vision
    assert vision is not None
    assert load_media_settings(text, vision) == load_media_settings(checkpoint, vision)


def decisions(text: Path) -> dict[str, str]:
    config = EngineConfig(model=str(text), **SETTINGS)
    plan = make_plan(config, load_spec(config), detect("cpu"))
    return {each.topic: f"{each.effective}: {each.reason}" for each in plan.decisions}


def test_the_plan_names_the_encoders_file_or_why_images_are_refused(folder: tuple[Path, str], tmp_path: Path) -> None:
    path, name = folder
    assert "mmproj-F32.gguf" in decisions(path / "text.gguf")["encoder"]
    text = Path(shutil.copy(path / "text.gguf", tmp_path / "text.gguf"))
    assert "no file *mmproj*.gguf is beside it" in decisions(text)["model"]
