"""lm_eval and vLLM's load generator against the server, as they are. `make soak` runs them, where LM_EVAL and VLLM name
their programs; each lives in an environment of its own."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.serving import serving

CHECKPOINT = Path(__file__).parents[2] / "src/ostinato/demo/checkpoint"
LM_EVAL, VLLM = os.environ.get("LM_EVAL"), os.environ.get("VLLM")
SUMS = [
    ("Ava has 17 apples and buys 25 more. How many apples has she?", "42"),
    ("Leo had 50 cards and lost 8. How many cards are left?", "42"),
    ("Mia buys 8 boxes of 6 pencils. How many pencils is that?", "48"),
]
STATED = {"function": "regex", "regex_pattern": "#### (-?[0-9]+)"}
TASK = {
    "task": "sums",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 48},
    "filter_list": [{"name": "stated", "filter": [STATED, {"function": "take_first"}]}],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
CHOICES = {
    "task": "choices",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture(scope="module")
def served():
    with serving(max_num_seqs=8) as served:
        yield served


def task(folder, definition, documents):
    data = folder / f"{definition['task']}.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents))
    files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    (folder / f"{definition['task']}.yaml").write_text(yaml.safe_dump({**definition, **files}))


def run(folder, *command):
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "HOME": str(folder)}
    path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, env={**path, **offline}, cwd=folder, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.skipif(LM_EVAL is None, reason="LM_EVAL names no program")
def test_lm_eval_generates_and_scores(served, tmp_path):
    task(tmp_path, TASK, [{"question": question, "answer": answer} for question, answer in SUMS])
    scored = [
        {"question": SUMS[0][0], "choices": ["17 + 25 = 42. #### 42", "17 + 25 = 31. #### 31"], "label": 0},
        {"question": SUMS[2][0], "choices": ["8 * 6 = 41. #### 41", "8 * 6 = 48. #### 48"], "label": 1},
    ]
    task(tmp_path, CHOICES, scored)
    for kind, path, more, tasks in (
        ("local-completions", "completions", [f"tokenizer={CHECKPOINT}"], "sums,choices"),
        ("local-chat-completions", "chat/completions", [], "sums"),
    ):
        of_model = ",".join(["model=demo", f"base_url={served.url}/v1/{path}", "num_concurrent=4", *more])
        flags = ["--model", kind, "--model_args", of_model, "--tasks", tasks, "--include_path", str(tmp_path)]
        if kind == "local-chat-completions":
            flags.append("--apply_chat_template")
        run(tmp_path, LM_EVAL, *flags, "--output_path", str(tmp_path / kind))
        [written] = (tmp_path / kind).rglob("results_*.json")
        results = json.loads(written.read_text())["results"]
        if kind == "local-completions":
            assert results["sums"]["exact_match,stated"] == 1
            assert results["choices"]["acc,none"] == 1
        else:
            assert results["sums"]["sample_len"] == len(SUMS)


@pytest.mark.skipif(VLLM is None, reason="VLLM names no program")
@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("openai", "/v1/completions"),
        ("openai-chat", "/v1/chat/completions"),
        ("openai-embeddings", "/v1/embeddings"),
    ],
)
def test_vllm_bench_serve_loads_the_server(served, tmp_path, backend, path):
    where = ["--backend", backend, "--base-url", served.url, "--endpoint", path, "--model", "demo"]
    load = ["--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8", "--num-prompts", "8"]
    saved = ["--save-result", "--result-filename", "result.json", "--result-dir", str(tmp_path)]
    run(tmp_path, *VLLM.split(), "bench", "serve", *where, "--tokenizer", str(CHECKPOINT), *load, *saved)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 8
