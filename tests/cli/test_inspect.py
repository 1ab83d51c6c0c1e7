"""`ostinato inspect`: what a checkpoint is, and what keeps it from running."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ostinato import LLM
from ostinato.cli.main import main
from ostinato.demo import checkpoint_dir
from ostinato.errors import ModelError
from ostinato.formats.mapped_files import INDEX, SINGLE, SafetensorsFile
from ostinato.inspection import inspect_checkpoint
from ostinato.plan.device.detect import detect
from tests.support.checkpoints import checkpoint
from tests.support.recipes import RECIPES
from tests.support.stored_formats import EXPANDED, FORMS, stored
from tests.support.text_checkpoint import text_checkpoint


def inspected(capsys: pytest.CaptureFixture[str], path: Path, status: int) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(path), "--json"])
    assert ended.value.code == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_embedded_model_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "demo"])
    assert ended.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    for part in ("nemotron_h", "3 mamba2", "4,096 tokens", "BF16 61", "eos_token <|end|>", "takes tools no"):
        assert part in words


@pytest.mark.parametrize("name", RECIPES)
def test_every_checkpoint_that_runs_is_said_to_run(name: str) -> None:
    report = inspect_checkpoint(checkpoint(name), detect("cpu"))
    assert report.refused == []
    assert "linear" in report.kernels


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_that_is_quantised_is_said_to_run_and_at_what_cost(form: str, tmp_path: Path) -> None:
    stored("llama", tmp_path, form)
    report = inspect_checkpoint(tmp_path, detect("cpu"))
    assert report.refused == []
    [told] = report.weights
    if form in EXPANDED:
        assert "become float32 while loading, since " in told
        assert "KiB instead of about " in told
    else:
        assert "as the checkpoint has them" in told
        assert re.search(r"the weights take \d+ KiB instead of \d+ KiB", told)


@pytest.mark.parametrize(
    ("form", "part", "words"),
    [
        ("gptq-act-order", "g_idx", "missing: model.layers.0.mlp.down_proj.g_idx"),
        ("awq", "qweight", "missing: model.layers.0.mlp.down_proj.qweight"),
        ("fp8-blocks", "weight_scale_inv", "missing: model.layers.0.mlp.down_proj.weight_scale_inv"),
    ],
)
def test_a_part_of_a_quantised_weight_that_is_missing_is_named(
    form: str, part: str, words: str, tmp_path: Path
) -> None:
    stored("llama", tmp_path, form)
    file = tmp_path / "model.safetensors"
    kept = {name: each for name, each in load_file(file).items() if name != f"model.layers.0.mlp.down_proj.{part}"}
    save_file(kept, file, metadata={"format": "pt"})
    [reason] = inspect_checkpoint(tmp_path, detect("cpu")).refused
    assert words in reason


def test_what_is_missing_and_what_is_left_over_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), directory)
    config = json.loads((directory / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers + 1}))
    report = inspected(capsys, directory, 1)
    assert report["runs"] is False
    assert f"tensors are missing: model.layers.{layers}.input_layernorm.weight" in report["refused"][0]
    assert report["tokenizer"] is None
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers - 1}))
    assert "tensors are not known: model.layers." in inspected(capsys, directory, 1)["refused"][0]


def test_a_checkpoint_of_unknown_architecture_still_shows_its_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(text_checkpoint(), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "hyena"}))
    report = inspected(capsys, directory, 1)
    assert report["architecture"] == "hyena"
    assert report["tensors"][0]["parameters"] > 0
    assert [
        reason
        for reason in report["refused"]
        if "'hyena' is not known; the known ones are arcee, bailing_hybrid" in reason
    ]


def test_a_directory_with_nothing_in_it_and_a_damaged_file_are_reports_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "holds no weights" in inspected(capsys, tmp_path, 1)["refused"][0]
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    [reason] = inspected(capsys, tmp_path / "m.gguf", 1)["refused"]
    assert "damaged or truncated" in reason
    (tmp_path / "model.safetensors").write_bytes((2**40).to_bytes(8, "little"))
    assert "header too large" in inspected(capsys, tmp_path, 1)["refused"][0]


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("tokenizer.json", {"model": "x"}, "cannot be read as a tokenizer"),
        ("tokenizer.json", {"model": {"type": "BPE"}}, "cannot be read as a tokenizer"),
        ("tokenizer_config.json", {"eos_token": "\ud800"}, "half of a surrogate pair"),
        ("generation_config.json", {"eos_token_id": ["x"]}, "should be a token id"),
        ("generation_config.json", {"repetition_penalty": -1}, "asks for sampling that cannot be done"),
        ("config.json", {"model_type": math.nan}, "is not known"),
    ],
)
def test_what_an_engine_refuses_is_refused_by_inspect_too(
    file: str, content: dict[str, object], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoint_dir(), directory)
    (directory / file).write_text(json.dumps(content))
    assert word in " ".join(inspected(capsys, directory, 1)["refused"])
    with pytest.raises(ModelError):
        LLM(str(directory))
    with pytest.raises(SystemExit):
        main(["inspect", str(directory)])


@pytest.mark.parametrize("index", ["{", '{"weight_map": {"a": "absent.safetensors"}}', "[]"])
def test_an_index_that_the_loader_refuses_is_one_for_inspect_also_beside_a_whole_file(
    index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), directory)
    (directory / INDEX).write_text(index)
    report = inspected(capsys, directory, 1)
    assert INDEX in report["refused"][0]
    assert report["tensors"][0]["parameters"] > 0
    # A file that a whole index does not name is not loaded, and so not compared.
    weights = load_file(directory / SINGLE)
    (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, SINGLE)}))
    save_file({"old": next(iter(weights.values()))}, directory / "old.safetensors")
    assert not inspected(capsys, directory, 0)["refused"]


TENSOR = '{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
HEADERS = {
    "nested 10,000 deep": '{"a":' + "[" * 10_000 + "]" * 10_000 + "}",
    "huge sizes": TENSOR.replace("[4]", f"[{10**400}]").join(('{"a":', "}")),
    "sizes whose product is huge": TENSOR.replace("[4]", f"[{2**62},{2**62}]").join(('{"a":', "}")),
    "negative offsets": TENSOR.replace("[0,16]", "[-16,0]").join(('{"a":', "}")),
    "offsets beyond the file": TENSOR.replace("[0,16]", "[16,32]").join(('{"a":', "}")),
    "tensors that overlap": f'{{"a":{TENSOR},"b":{TENSOR}}}',
    "one name twice": f'{{"a":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}},"a":{TENSOR}}}',
    "another type": TENSOR.replace("F32", "F33").join(('{"a":', "}")),
    "another shape": TENSOR.replace("[4]", "[5]").join(('{"a":', "}")),
    "no object": "[1]",
    "no UTF-8": b'{"\xff":1}',
}


@pytest.mark.parametrize("wrong", HEADERS)
def test_a_header_that_does_not_describe_its_file_is_an_error_for_inspect_and_the_loader(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    header, file = HEADERS[wrong], tmp_path / "model.safetensors"
    header = header if isinstance(header, bytes) else header.encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert str(file) in inspected(capsys, tmp_path, 1)["refused"][0]
    with pytest.raises(ModelError, match=str(file)):
        SafetensorsFile(file)


@pytest.mark.parametrize("lost", [1, 1000])
def test_a_file_that_was_cut_is_an_error_that_names_it(
    lost: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-lost])
    assert f"{file} cannot be read" in inspected(capsys, tmp_path, 1)["refused"][0]


def test_a_gguf_file_is_described_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package that writes GGUF files comes with the test extra")
    from tests.support.gguf_files import write_gguf

    path = write_gguf(tmp_path / "m.gguf", "granitehybrid of experts")
    code = f"""
import sys
from ostinato.cli.main import main
from ostinato.errors import ModelError
from ostinato.formats.mapped_files import INDEX, SINGLE, SafetensorsFile
try:
    main(["inspect", {str(path)!r}, "--device", "cpu", "--json"])
finally:
    assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["architecture"] == "granitemoehybrid"
    assert {each["type"] for each in report["tensors"]} == {"Q8_0", "F32"}
    assert report["tokenizer"]["pre_tokenizer"] == "qwen2"
    assert report["layers"] == {"mamba2": 2, "attention": 1}
    assert (report["refused"], report["runs"]) == ([], True)
