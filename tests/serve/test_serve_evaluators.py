"""Programs that measure or ask a server, as they are. `make soak` installs and runs llm, lm_eval, aiperf and guidellm,
and vLLM's where VLLM names it: each lives in an environment of its own, of up to six gigabytes."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.serving import serving

CHECKPOINT = Path(__file__).parents[2] / "src/ostinato/demo/checkpoint"
LM_EVAL, VLLM, GUIDELLM, AIPERF, LLM = (
    os.environ.get(name) for name in ("LM_EVAL", "VLLM", "GUIDELLM", "AIPERF", "LLM")
)
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


def run(folder, *command, is_offline=True, **more):
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if is_offline else {}
    path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**path, **offline, "HF_HOME": str(folder / "hub"), "HOME": str(folder), **more}
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


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


@pytest.mark.skipif(GUIDELLM is None, reason="GUIDELLM names no program")
def test_guidellm_loads_the_server(served, tmp_path):
    run(
        tmp_path,
        *(GUIDELLM, "run", "--backend", f"kind=openai_http,target={served.url}", "--disable-progress"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=8"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--tokenizer", f"kind=hf_auto,model={CHECKPOINT}"),
    )
    [found] = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {"successful": 8, "errored": 0, "incomplete": 0, "total": 8}
    assert found["metrics"]["output_token_count"]["successful"]["total_sum"] == 8 * 8


@pytest.mark.skipif(AIPERF is None, reason="AIPERF names no program")
def test_aiperf_loads_the_server_and_counts_the_tokens_of_each_chunk(served, tmp_path):
    run(
        tmp_path,
        *(AIPERF, "profile", "--model", "demo", "--url", served.url, "--endpoint-type", "chat", "--streaming"),
        *("--use-server-token-count", "--per-chunk-usage", "--tokenizer", str(CHECKPOINT), "--ui", "none"),
        *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8", "--extra-inputs", "ignore_eos:true"),
        *("--request-count", "8", "--concurrency", "4"),
        is_offline=False,  # else it takes no tokenizer from a folder
    )
    [exported] = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(exported.read_text())
    assert found["request_count"]["avg"] == 8
    assert found["error_summary"] == []
    assert found["output_sequence_length"]["avg"] == 8


@pytest.mark.skipif(LLM is None, reason="LLM names no program")
def test_llm_answers_and_follows_schemas_in_its_own_form_and_in_jsons(served, tmp_path):
    model = {"model_id": "here", "model_name": "demo", "api_base": f"{served.url}/v1", "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump([model]))
    said = run(tmp_path, LLM, "-m", "here", f"{SUMS[2][0]}", LLM_USER_PATH=str(tmp_path))
    assert "#### 48" in said
    shop = {"shop": {"enum": ["north", "south"]}, "is_open": {"type": "boolean"}}
    as_json = json.dumps({"type": "object", "properties": shop, "required": list(shop)})
    for schema, names in ((as_json, shop.keys()), ("apples int, cards int", {"apples", "cards"})):
        for more in ((), ("--no-stream",)):
            said = run(tmp_path, LLM, "-m", "here", "--schema", schema, *more, "How many?", LLM_USER_PATH=str(tmp_path))
            assert json.loads(said).keys() == names
