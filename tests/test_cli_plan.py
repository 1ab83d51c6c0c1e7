"""The command line: `ostinato plan`, its flags, and how errors are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ostinato.cli.main import main
from ostinato.config import ALIASES, EngineConfig
from ostinato.plan.plan import JSON_SECTIONS, Plan

CONFIG = {
    "model_type": "nemotron_h", "dtype": "bfloat16", "hidden_size": 1024, "vocab_size": 32000,
    "hybrid_override_pattern": "M-M*-" * 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "mamba_num_heads": 32, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "chunk_size": 128, "intermediate_size": 4096, "max_position_embeddings": 8192,
    "mlp_hidden_act": "relu2",
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of `ostinato` with these arguments."""
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    out, err = capsys.readouterr()
    return int(exit.value.code or 0), out, err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status, out, err = run(capsys, "plan", *arguments, "--json")
    assert err == ""
    return status, json.loads(out)


def test_the_plan_of_a_directory_with_only_a_config_is_printed_as_json(capsys, checkpoint) -> None:
    status, data = run_json(capsys, checkpoint, "--device", "h200-141gb")
    assert status == 0
    assert list(data) == list(JSON_SECTIONS)
    assert data["device"]["name"] == "h200-141gb"
    assert data["settings"]["max_num_seqs"] == data["memory"]["max_num_seqs"] == 256
    assert data["memory"]["num_slots"] == 257 + data["state_cache"]["num_checkpoints"]
    assert Plan.from_json(data).to_json() == data


def test_the_tables_fit_80_columns_and_carry_no_colour(capsys, checkpoint) -> None:
    status, out, _ = run(capsys, "plan", checkpoint, "--device", "l4-24gb", "--max-num-seqs", "100")
    assert status == 0
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\x1b" not in out
    words = ("weights", "activations", "reference", "max_num_batched_tokens", "state_cache_mode", "decisions")
    for word in words:
        assert word in out


def test_decisions_are_told_with_their_reason(capsys, checkpoint) -> None:
    _, out, _ = run(capsys, "plan", checkpoint, "--device", "l4-24gb", "--device-memory", "3GiB")
    assert "max_num_seqs: 256 -> " in out
    assert "the most that fits" in out


def test_every_setting_is_a_flag_and_reaches_the_plan(capsys, checkpoint) -> None:
    status, data = run_json(
        capsys, "--model", checkpoint, "--device", "l4-24gb", "--dtype", "float16", "--ssm-state-dtype",
        "bfloat16", "--max-num-seqs", "7", "--max-num-batched-tokens", "300", "--max-model-len", "500",
        "--block-size", "32", "--no-enable-chunked-prefill", "--memory-utilization", "0.5",
        "--cache-memory", "1GiB", "--scheduling-policy", "priority", "--seed", "9", "--threads", "3",
        "--random-weights", "--no-enable-prefix-caching", "--state-cache-mode", "none", "--state-block-size",
        "320", "--checkpoint-policy", "boundaries", "--eviction-policy", "lru", "--expected-prefix-tokens", "100",
    )  # fmt: skip
    assert status == 0
    settings = data["settings"]
    assert settings == {
        "dtype": "float16", "ssm_state_dtype": "bfloat16", "device": "cuda", "max_num_seqs": 7,
        "max_num_batched_tokens": 300, "max_model_len": 500, "block_size": 32,
        "enable_chunked_prefill": False, "enable_prefix_caching": False, "state_cache_mode": "none",
        "state_block_size": 320, "checkpoint_policy": "boundaries", "eviction_policy": "lru",
        "scheduling_policy": "priority", "seed": 9, "threads": 3,
        "rope": None,
    }  # fmt: skip
    assert data["memory"]["cache"] <= 2**30
    assert data["memory"]["available"] == data["device"]["memory_bytes"] // 2


def test_the_help_names_every_setting_and_alias_in_full_and_has_an_example(capsys) -> None:
    status, out, _ = run(capsys, "plan", "--help")
    assert status == 0
    assert "Example: ostinato plan" in out
    for setting in EngineConfig.model_fields:
        assert "--" + setting.replace("_", "-") in out
    unbroken = "".join(out.split())
    for alias in ALIASES:
        assert "--" + alias.replace("_", "-") in unbroken


def test_the_names_of_vllm_are_flags_too_but_not_beside_our_own(capsys, checkpoint) -> None:
    _, data = run_json(capsys, checkpoint, "--device", "l4-24gb", "--gpu-memory-utilization", "0.5")
    assert data["memory"]["available"] == data["device"]["memory_bytes"] // 2
    status, data = run_json(capsys, checkpoint, "--gpu-memory-utilization", "0.5", "--memory-utilization", "0.6")
    assert status == 2
    assert "two names" in data["error"]["message"]


def test_what_does_not_fit_ends_with_2_and_remedies_that_work(capsys, checkpoint) -> None:
    asked = [checkpoint, "--device", "l4-24gb", "--device-memory", "4GiB"]
    status, data = run_json(capsys, *asked, "--max-num-seqs", "5000")
    assert status == 2
    assert data["error"]["type"] == "CapacityError"
    [remedy] = [entry for entry in data["error"]["remedies"] if entry["setting"] == "max_num_seqs"]
    assert f"max_num_seqs to at most {remedy['value']}" in data["error"]["message"]
    assert run_json(capsys, *asked, "--max-num-seqs", str(remedy["value"]))[0] == 0
    assert run_json(capsys, *asked, "--max-num-seqs", str(remedy["value"] + 1))[0] == 2


def test_errors_are_told_on_stderr_with_their_remedies(capsys, checkpoint) -> None:
    status, out, err = run(
        capsys, "plan", checkpoint, "--device", "l4-24gb", "--device-memory", "4GiB", "--max-num-seqs", "5000"
    )
    assert (status, out) == (2, "")
    assert err.startswith("CapacityError: ")
    assert "set max_num_seqs to" in err


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        (["--device", "abacus"], "ConfigError", "h200-141gb"),
        (["--max-num-seqz", "3"], "ConfigError", "--max-num-seqs"),
        (["--max-num-seqs", "many"], "ConfigError", "integer"),
        (["--dtype", "int8"], "ConfigError", "bfloat16"),
        (["--device-memory", "lots"], "ConfigError", "4GiB"),
        (["--model", "/no/such/place"], "ConfigError", "twice"),
        (["--output", "/no/such/place/plan.json"], "ConfigError", "cannot be saved"),
    ],
)
def test_bad_flags_end_with_2_and_say_what_is_possible(capsys, checkpoint, arguments, kind, word) -> None:
    status, data = run_json(capsys, checkpoint, *arguments)
    assert status == 2
    assert data["error"]["type"] == kind
    assert word in data["error"]["message"]
    status, out, err = run(capsys, "plan", checkpoint, *arguments)
    assert (status, out) == (2, "")
    assert err


def test_a_directory_that_does_not_exist_is_a_model_error(capsys) -> None:
    status, data = run_json(capsys, "/no/such/place")
    assert status == 2
    assert data["error"]["type"] == "ModelError"


def test_device_memory_replaces_that_of_this_machine(capsys, checkpoint) -> None:
    _, data = run_json(capsys, checkpoint, "--device-memory", "40GiB")
    assert data["device"]["memory_bytes"] == 40 * 2**30
    assert "as given" in data["device"]["source"]


def test_the_plan_is_also_saved(capsys, checkpoint, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    _, data = run_json(capsys, checkpoint, "--device", "l4-24gb", "--output", str(saved))
    assert Plan.load(saved).to_json() == data


def test_the_version_is_told(capsys) -> None:
    status, out, _ = run(capsys, "--version")
    assert status == 0
    assert out.startswith("ostinato ")


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["plan", "CHECKPOINT", "--json"]])
def test_planning_and_help_import_no_torch(arguments: list[str], checkpoint: str) -> None:
    arguments = [checkpoint if argument == "CHECKPOINT" else argument for argument in arguments]
    code = (
        "import sys; from ostinato.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as exit: assert not exit.code, exit.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL)
