"""The command line: `ostinato plan`, its flags, and how errors are told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ostinato.cli.main import main
from ostinato.config import EngineConfig
from ostinato.plan.plan import Plan
from ostinato.plan.render.graph_tables import short_sizes
from ostinato.plan.traffic import Traffic
from ostinato.setting_names import ALIASES
from ostinato.units import MiB, exact_bytes

CONFIG = {
    "model_type": "nemotron_h", "dtype": "bfloat16", "hidden_size": 1024, "vocab_size": 32000,
    "hybrid_override_pattern": "M-M*-" * 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "mamba_num_heads": 32, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "chunk_size": 128, "intermediate_size": 4096, "max_position_embeddings": 8192,
    "mlp_hidden_act": "relu2",
}  # fmt: skip

REQUESTS = str(Path(__file__).parents[2] / "docs/examples/requests.json")
SECTIONS = [section.name for section in fields(Plan)]


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
    assert list(data) == SECTIONS
    assert data["device"]["name"] == "h200-141gb"
    assert data["settings"]["max_num_seqs"] == 256
    assert data["memory"]["num_slots"] == 257 + data["memory"]["num_checkpoints"]
    assert Plan.from_json(data).to_json() == data


def test_the_tables_fit_80_columns_and_carry_no_colour(capsys, checkpoint) -> None:
    status, out, _ = run(capsys, "plan", checkpoint, "--device", "l4-24gb", "--max-num-seqs", "100")
    assert status == 0
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\x1b" not in out
    words = ("weights", "activations", "triton", "max_num_batched_tokens", "state_cache_mode", "decisions")
    for word in words:
        assert word in out


def test_the_first_line_says_that_it_fits_and_how_fast(capsys, checkpoint) -> None:
    _, data = run_json(capsys, checkpoint, "--device", "l4-24gb", "--max-num-seqs", "100")
    _, out, _ = run(capsys, "plan", checkpoint, "--device", "l4-24gb", "--max-num-seqs", "100")
    tokens = (data["memory"]["num_blocks"] - 1) * data["settings"]["block_size"]
    assert out.startswith(f"It fits: 100 requests, a cache of {tokens:,} tokens, at most ")
    assert re.search(r"[\d,]+ tokens/s\s*$", out.partition("\n")[0])
    slow, _, _ = run(capsys, "plan", checkpoint, "--kernels", "reference")[1].partition("model")
    assert " ".join(slow.split()).endswith("; speed not predicted")  # only native kernels are measured


def test_what_the_model_does_not_have_has_no_lines(capsys, tmp_path: Path) -> None:
    plain = {
        "model_type": "llama", "dtype": "bfloat16", "hidden_size": 64, "vocab_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(plain))
    status, out, _ = run(capsys, "plan", str(tmp_path), "--device", "l4-24gb")
    assert status == 0
    assert not re.findall(r"(?i).*(?:ssm|slot|state).*", out)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hybrid_override_pattern": "M-M-"}))
    status, out, _ = run(capsys, "plan", str(tmp_path), "--device", "l4-24gb")
    assert status == 0
    assert not re.findall(r"(?:^ keys and values|^ blocks|^ block_size).*", out, flags=re.MULTILINE)


def test_the_graphs_are_told_with_what_runs_eagerly_and_what_would_cover_it(capsys, checkpoint) -> None:
    _, out, _ = run(capsys, "plan", checkpoint, "--device", "l4-24gb", "--max-num-seqs", "32")
    words = " ".join(out.split())
    assert "piecewise, tokens 1, 2, 4, 8..64 by 8" in words
    assert "decode 1..32 rows: full, at most 7 padding rows" in words
    assert "65..8192 tokens: eager; max_capture_size 8192 would cover them, with" in words
    _, out, _ = run(capsys, "plan", checkpoint, "--device", "l4-24gb", "--kernels", "reference")
    assert "cannot hold attention (reference)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((), ""),
        ((7,), "7"),
        ((1, 2, 3), "1, 2, 3"),
        ((1, 2, 3, 4, 9), "1..4, 9"),
        ((1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), 700), "1, 2, 4, 8..256 by 8, 272..512 by 16, 700"),
    ],
)
def test_sizes_that_are_equally_far_apart_are_written_as_a_range(sizes: tuple[int, ...], text: str) -> None:
    assert short_sizes(sizes) == text


@pytest.fixture
def traffic(tmp_path: Path) -> str:
    file = tmp_path / "traffic.json"
    Traffic(decode={1: Counter({3: 50, 5: 10, 30: 2})}, mixed=Counter({60: 5, 700: 20, 1024: 1})).save(file)
    return str(file)


def test_sizes_are_chosen_from_traffic_and_their_flags_work(capsys, checkpoint, traffic) -> None:
    asked = (checkpoint, "--device", "cpu", "--device-memory", "16GiB")
    status, data = run_json(capsys, *asked, "--traffic", traffic, "--num-sizes", "2")
    assert status == 0
    assert Plan.from_json(data).to_json() == {name: data[name] for name in SECTIONS}
    assert data["traffic"]["flags"] == ["--capture-sizes 700,1024", "--capture-rows 5,30"]
    assert data["traffic"]["tokens"]["planned"]["eager"] == 21
    assert data["traffic"]["tokens"]["chosen"] == {
        "sizes": [700, 1024], "replayed": 26, "eager": 0, "padding": 5 * 640, "mean_padding": 5 * 640 / 26,
    }  # fmt: skip
    flags = [word for flag in data["traffic"]["flags"] for word in flag.split()]
    status, again = run_json(capsys, *asked, *flags)
    assert (status, again["capture"]["tokens"], again["capture"]["rows"]) == (0, [700, 1024], [5, 30])
    _, out, _ = run(capsys, "plan", *asked, "--traffic", traffic, "--num-sizes", "2")
    assert "--capture-sizes 700,1024\n" in out
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.fixture
def requests(tmp_path: Path) -> str:
    file = tmp_path / "requests.json"
    file.write_text('{"requests": {"prompt_tokens": {"512": 1}, "output_tokens": {"128": 1}}}')
    return str(file)


def test_layouts_are_estimated_from_requests(capsys, checkpoint, requests) -> None:
    asked = (checkpoint, "--device", "h100-80gb", "--traffic", requests)
    status, data = run_json(capsys, *asked, "--rate", "2000", "--deadline", "400:40")
    assert status == 0
    assert "traffic" not in data
    (load,) = data["layouts"]["loads"]
    assert load["in_time"] >= 0.99
    assert load["share"] < 1
    _, out, _ = run(capsys, "plan", *asked, "--replicas", "1,2")
    assert "requests that engines carry" in out
    assert "0% of prompts from the prefix cache" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines()) <= 80
    _, out, _ = run(capsys, "plan", *asked, "--rate", "2000", "--replicas", "1")
    assert "queue grows" in out


def test_a_model_without_states_has_no_lines_about_states_and_slots(capsys, checkpoint) -> None:
    hybrid = run(capsys, "plan", checkpoint, "--device", "l4-24gb")[1]
    llama = {
        "model_type": "llama", "dtype": "bfloat16", "hidden_size": 1024, "vocab_size": 32000, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 4096, "max_position_embeddings": 8192,
    }  # fmt: skip
    Path(checkpoint, "config.json").write_text(json.dumps(llama))
    status, plain, _ = run(capsys, "plan", checkpoint, "--device", "l4-24gb")
    assert status == 0
    for word in ("slots", "SSM"):
        assert re.search(rf"\b{word}\b", hybrid)
        assert not re.search(rf"\b{word}\b", plain)


def test_requests_without_step_times_are_not_silent(capsys, checkpoint, requests) -> None:
    asked = ("plan", checkpoint, "--device", "cpu", "--device-memory", "16GiB", "--kernels", "reference")
    status, _, err = run(capsys, *asked, "--traffic", requests)
    assert (status, "not estimated: not predicted" in " ".join(err.split())) == (0, True)


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
        "--overlap", "off",
        "--random-weights", "--no-enable-prefix-caching", "--state-cache-mode", "none", "--state-block-size",
        "320", "--checkpoint-policy", "boundaries", "--eviction-policy", "lru", "--expected-prefix-tokens", "100",
        "--max-pinned-checkpoints", "1", "--max-checkpoint-ttl", "60",
        "--graph-mode", "piecewise", "--capture-rows", "1,4", "--max-capture-size", "64",
        "--performance-mode", "interactivity", "--capture", "lazy", "--strict", "--check-replay",
        "--no-prefer-graph-sizes", "--speculative", "ngram:2", "--speculative-adaptive", "off",
        "--quantization", "int8_g128", "--ssm-state-rounding", "stochastic", "--kv-cache-dtype", "int8",
    )  # fmt: skip
    assert status == 0
    settings = data["settings"]
    assert settings == {
        "dtype": "float16", "ssm_state_dtype": "bfloat16", "ssm_checkpoint_dtype": "auto",
        "ssm_state_rounding": "stochastic", "device": "cuda",
        "kv_cache_dtype": "int8", "max_num_seqs": 7,
        "activation_dtype": "auto",
        "quantization": {
            "group_size": 128, "ignore": [], "ignores_stacks": False, "int8_activations": False, "storage": "int8",
        },
        "max_num_batched_tokens": 300, "max_model_len": 500, "block_size": 32,
        "enable_chunked_prefill": False, "enable_prefix_caching": False, "state_cache_mode": "none",
        "state_block_size": 320, "checkpoint_policy": "boundaries", "eviction_policy": "lru",
        "graph_mode": "piecewise", "capture": "lazy", "prefer_graph_sizes": False, "strict": True,
        "check_replay": True, "scheduling_policy": "priority", "seed": 9, "threads": 3,
        "ropes": [], "deterministic": False, "model": checkpoint, "revision": None,
        "download_dir": None, "tokenizer": None, "chat_template": None, "random_weights": True,
        "memory_utilization": 0.5, "cache_memory": 2**30, "expected_prefix_tokens": 100,
        "max_pinned_checkpoints": 1, "max_checkpoint_ttl": 60, "kernels": "auto",
        "capture_sizes": None, "capture_rows": [1, 4], "max_capture_size": 64,
        "performance_mode": "interactivity", "speculative": "ngram:2", "speculative_adaptive": "off",
        "encoder_graph_mode": "auto", "encoder_token_budgets": None, "encoder_max_items_per_batch": None,
        "encoder_cache_tokens": None, "video_pruning_rate": 0.0, "allow_remote_images": False,
        "tensor_parallel_size": 1, "overlap": "off", "cache_offload": None, "cache_dir": None,
        "record": None, "record_limit": 2**30, "record_images": False,
    }  # fmt: skip
    assert data["capture"]["tokens"] == [*range(1, 33), 40, 48, 56, 64]
    assert (data["speculative"]["method"], data["speculative"]["num_speculative_tokens"]) == ("ngram", 2)
    assert not data["speculative"]["adaptive"]
    assert data["memory"]["cache"] <= 2**30
    assert data["memory"]["available"] == data["device"]["memory_bytes"] // 2


@pytest.mark.parametrize("method", ["mtp:3", "ngram:2", "draft:{draft}:4"])
def test_speculation_is_told_in_lines_of_80_columns(capsys, tmp_path: Path, method: str) -> None:
    target, draft = tmp_path / "target", tmp_path / "a:draft"
    for directory, changes in (
        (target, {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*-"}),
        (draft, {"hybrid_override_pattern": "M*-"}),
    ):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    asked = (str(target), "--device", "cpu", "--device-memory", "16GiB", "--speculative", method.format(draft=draft))
    _, data = run_json(capsys, *asked)
    k = int(method[-1])
    assert data["memory"]["slots_per_request"] == data["speculative"]["slots_per_request"] == 1 + k
    assert data["capture"]["tokens_per_row"] == {2: [1, 2, 3], 3: [1, 2, 4], 4: [1, 2, 3, 5]}[k]
    _, out, _ = run(capsys, "plan", *asked)
    assert max(len(line) for line in out.splitlines()) <= 80
    words = " ".join(out.split())
    assert f"speculation method {method.partition(':')[0]}: drafts" in words
    assert f"{k} of each request in a step, which verifies 1 + {k} tokens" in words
    assert f"decode, {1 + k} tokens 1..32 rows: full, at most 7 padding rows" in words
    assert "speculative_adaptive on: steps do without drafts where these do not pay" in words
    assert ("with the drafter's" in words) == ("drafter nemotron_h" in words) == (method != "ngram:2")
    graphs = "drafter's graphs full, rows 1, 2, 4, 8..32 by 8; of 1 token each"
    assert (graphs in words) == (method != "ngram:2")
    assert (f"{graphs} piecewise, tokens 1, 2, 4, 8..256 by 8" in words) == method.startswith("draft")
    assert "state_cache_mode: auto -> all" in words
    assert f"num_speculative_tokens {k} makes no difference" in words


def test_without_speculation_none_is_told(capsys, checkpoint) -> None:
    _, out, _ = run(capsys, "plan", checkpoint, "--device", "cpu", "--device-memory", "16GiB")
    assert "speculation" not in out


def test_speculation_is_also_given_as_vllm_does(capsys, checkpoint) -> None:
    given = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6}'
    _, data = run_json(capsys, checkpoint, "--device", "l4-24gb", "--speculative-config", given)
    assert (data["speculative"]["num_speculative_tokens"], data["speculative"]["prompt_lookup_max"]) == (5, 6)


def test_the_help_names_every_setting_and_alias_in_full_and_has_an_example(capsys) -> None:
    status, out, _ = run(capsys, "plan", "--help")
    assert status == 0
    assert "Example: ostinato plan" in out
    for setting in EngineConfig.model_fields:
        assert "--" + setting.replace("_", "-") in out
    _, out, _ = run(capsys, "plan", "--help-all")
    for alias in ALIASES:
        assert "--" + alias.replace("_", "-") in out


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
    assert "- --max-num-seqs " in err


@pytest.mark.parametrize("device", ["cpu", "l4-24gb"])
@pytest.mark.parametrize("memory", ["1MiB", "200MiB"])
def test_too_little_device_memory_is_named_with_the_least_that_works(capsys, checkpoint, device, memory) -> None:
    asked = (checkpoint, "--device", device, "--kernels", "reference")
    status, data = run_json(capsys, *asked, "--device-memory", memory)
    message = data["error"]["message"]
    assert status == 2
    assert "may be used: weights" in message
    assert "cache_memory" not in message
    [remedy] = data["error"]["remedies"]
    assert remedy["setting"] == "device_memory"
    least = remedy["value"]
    assert f"it needs a device of at least {exact_bytes(least)} or a smaller model" in message
    assert run_json(capsys, *asked, "--device-memory", exact_bytes(least))[0] == 0
    assert run_json(capsys, *asked, "--device-memory", exact_bytes(least - MiB))[0] == 2
    assert f"  - --device-memory {exact_bytes(least)}\n" in run(capsys, "plan", *asked, "--device-memory", memory)[2]


def test_more_device_memory_is_a_remedy_beside_those_of_settings(capsys, checkpoint) -> None:
    asked = (checkpoint, "--device", "l4-24gb", "--max-num-seqs", "5000", "--device-memory")
    _, data = run_json(capsys, *asked, "4GiB")
    least = {each["setting"]: each["value"] for each in data["error"]["remedies"]}["device_memory"]
    assert f", or raise device_memory to at least {exact_bytes(least)}" in data["error"]["message"]
    assert run_json(capsys, *asked, exact_bytes(least))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        (["--device", "abacus"], "ConfigError", "h200-141gb"),
        (["--max-num-seqz", "3"], "ConfigError", "--max-num-seqs"),
        (["--max-num-seqs", "many"], "ConfigError", "whole number"),
        (["--dtype", "int8"], "ConfigError", "bfloat16"),
        (["--device-memory", "lots"], "ConfigError", "--device-memory 'lots' is not a size; write it like 4GiB"),
        (["--model", "/no/such/place"], "ConfigError", "twice"),
        (["--num-sizes", "3"], "ConfigError", "--traffic"),
        (["--rate", "3"], "ConfigError", "--rate is about the requests of a --traffic FILE, and there is none"),
        (["--replicas", "2"], "ConfigError", "prompt_tokens"),
        (["--traffic", REQUESTS, "--num-sizes", "2"], "ConfigError", "--num-sizes is about steps, of which"),
        (["--traffic", "/no/such/place.json"], "ConfigError", "cannot be read"),
        (["--capture-sizes", "1,x"], "ConfigError", "whole number"),
        (["--speculative", "eagle:3"], "ConfigError", "ngram:4, mtp:3 or draft:PATH:4"),
        (["--speculative", "mtp:3"], "ConfigError", "methods that it can do: ngram, draft"),
        (["--speculative", "draft:/no/such/place:3"], "ModelError", "/no/such/place"),
        (["--speculative-adaptive", "sometimes"], "ConfigError", "'on' or 'off'"),
        (["--output", "/no/such/place/plan.json"], "ConfigError", "make its folder first: mkdir -p /no/such/place"),
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


def test_kernels_names_the_row_of_each_product_and_why_earlier_rows_decline(capsys, checkpoint) -> None:
    asked = ["kernels", checkpoint, "--isa", "x86_64_v4_bf16", "--quantization", "int4"]
    status, out, _ = run(capsys, *asked, "--json")
    data = json.loads(out)
    assert (status, data["module"], data["dtype"]) == (0, "x86_64_v4_bf16", "bfloat16")
    rows = {each["name"]: {m: at["row"] for m, at in each["tokens"].items()} for each in data["products"]}
    assert rows["mixer.out_proj"] == {
        "1": "gemv_i16_block_vnni",
        "8": "gemm_bf16_dequant_avx512bf16",
        "32": "gemm_bf16_dequant_avx512bf16",
        "512": "gemm_bf16_block_avx512bf16",
    }
    assert rows["attention"]["1"] == "attention_f32_in_place_avx512"
    status, out, _ = run(capsys, *asked)
    assert status == 0
    assert "mixer.out_proj (2048 x 1024, int4_g128)\n  m = 1: gemv_i16_block_vnni\n" in out
    assert "  m = 8, 32: gemm_bf16_dequant_avx512bf16\n" in out
    assert "    not gemv_i16_block_vnni: it takes 1 to 2 tokens, not 8\n" in out
    # Of a kernel with several rows, one reason is told, and none where another of its rows is taken.
    assert (
        out.count("(2048 x 1024, int4_g128)\n  m = 1: gemv_i16_block_vnni\n    not gemm_s8_s8_vnni: tokens are bf") == 1
    )
    assert "not gemv_i16_block_vnni: tokens are" not in out
    _, fixed, _ = run(capsys, *asked, "--deterministic")
    assert "  m = 1, 8, 32, 512: gemv_bf16_any_avx512bf16\n" in fixed


def test_kernels_without_a_model_lists_the_rows_of_a_module(capsys) -> None:
    status, out, _ = run(capsys, "kernels", "--isa", "x86_64_v3", "--why")
    assert status == 0
    assert (
        "gemv_i16_block_avx2\n  m: 1 to 3 tokens; tokens in bfloat16, float16\n  weights: blocks but float8 and MXFP4\n"
        in out
    )
    assert "  why: Zen 3, GFLOP/s" in out
    assert "avx512" not in out
    status, out, _ = run(capsys, "kernels", "--isa", "x86_64_v3", "--json")
    rows = json.loads(out)["rows"]
    assert [row["name"] for row in rows if row["fallback"]][:1] == ["gemv_i16_s8_avx2"]
    status, _, err = run(capsys, "kernels", "--isa", "x86_64_v9")
    assert status == 2
    assert "x86_64_v3, x86_64_v4" in err


@pytest.mark.parametrize(
    ("memory", "asked", "named"), [("16GB", "auto", "int8"), ("8GB", "auto", "int4"), ("8GB", "int8", "int4")]
)
def test_where_nothing_else_helps_the_nearest_bits_of_weights_that_fit_are_named(capsys, memory, asked, named) -> None:
    model = str(Path(__file__).parents[2] / "benchmarks/models/nemotron-h-8b")
    flags = ("plan", model, "--device", "cpu", "--device-memory", memory, "--quantization")
    status, _, err = run(capsys, *flags, asked)
    assert (status, "quantise the weights, which changes answers a little" in " ".join(err.split())) == (2, True)
    assert f"--quantization {named}" in err
    assert run(capsys, *flags, named)[0] == 0


def test_what_no_quantization_fits_says_how_much_memory_it_needs(capsys) -> None:
    model = str(Path(__file__).parents[2] / "benchmarks/models/nemotron-h-8b")
    status, _, err = run(capsys, "plan", model, "--device", "cpu", "--device-memory", "3GB")
    assert (status, "no single setting can make it fit" in " ".join(err.split())) == (2, True)
