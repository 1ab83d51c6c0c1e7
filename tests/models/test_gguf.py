"""Models from GGUF files: transformers on the expanded weights is the oracle."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from transformers.convert_slow_tokenizer import TikTokenConverter

from ostinato import LLM, SamplingParams
from ostinato.config import EngineConfig
from ostinato.engine.text.tokenizer import load_tokenizer
from ostinato.errors import ModelError
from ostinato.inspection import inspect_checkpoint
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import load_spec
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.plan.device.detect import detect
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.quantization import BlockQuantization
from ostinato.plan.rope import resolve_rope
from ostinato.runner.inputs import make_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow
from tests.models.test_models import BLOCK_SIZE, CPU, poisoned_memory

pytest.importorskip("gguf", reason="the package that writes GGUF files comes with the test extra")
from tests.support.gguf_files import CONFIGS, split_gguf, with_biases, write_gguf
from tests.support.gguf_hybrids import HYBRIDS

PROMPT = tuple(range(5, 45))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def file_of(folder: Path, architecture: str, kind: str = "Q8_0", **options: Any) -> Path:
    path = folder / f"{architecture.replace(' ', '-')}-{kind}-{'-'.join(map(str, options.values()))}.gguf"
    return path if path.exists() else write_gguf(path, architecture, kind, **options)


def logits_of(path: Path) -> torch.Tensor:
    spec = load_spec(EngineConfig(model=str(path)))
    if spec.rope is not None:
        spec = replace(spec, rope=resolve_rope(spec.rope, len(PROMPT))[0])
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec)
    load_weights(model, path)
    row = BatchRow("r", PROMPT, 0, tuple(range(1, 4)), 0, (2,), num_logits=len(PROMPT))
    return model.compute_logits(model(make_step_inputs(Batch((row,), 0), BLOCK_SIZE, CPU), poisoned_memory(spec)))


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        *[(name, kind) for name in ("llama", "qwen2", "qwen3") for kind in ("F32", "Q8_0", "Q4_0", "Q5_1")],
        *[(name, "Q8_0") for name in CONFIGS if name not in ("llama", "qwen2", "qwen3")],
        *[(name, "F32" if name == "falcon-h1" else "Q8_0") for name in HYBRIDS],
    ],
)
def test_logits_equal_transformers_on_the_expanded_weights(folder: Path, architecture: str, kind: str) -> None:
    path = file_of(folder, architecture, kind)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path.with_suffix(""), dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    error = (logits_of(path) - expected).abs().max() / expected.abs().max()
    assert error < 1e-4


TEXTS = [
    "hello world",
    "  two  spaces\tand\n\n\nlines \r\n end ",
    "I'LL say it's 12345 ½ ² and 3.14",
    "Ünïcödé e\u0301 日本語 🙂🙂 \u200b\ufeff",
    "def f(x):\n    return x**2  # the_end\n",
    "",
]


def with_pattern(name: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    """How transformers' own tokenizers cut text before it is merged."""
    if name == "qwen2":
        backend = transformers.Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer
    elif name == "gpt-2":
        backend = transformers.GPT2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer
    else:
        pattern = TikTokenConverter().pattern
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        last = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return tokenizers.pre_tokenizers.Sequence([split, last])
    return backend.pre_tokenizer


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2"])
def test_text_is_cut_as_transformers_cuts_it(folder: Path, pre: str) -> None:
    own = load_tokenizer(file_of(folder, "llama", pre=pre))
    assert own._backend is not None
    oracle = with_pattern(pre)
    for text in TEXTS:
        cut = [piece for piece, _ in own._backend.pre_tokenizer.pre_tokenize_str(text)]
        assert cut == [piece for piece, _ in oracle.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "smollm"])
def test_text_comes_back_from_its_tokens(folder: Path, pre: str) -> None:
    own = load_tokenizer(file_of(folder, "llama", pre=pre))
    for text in TEXTS:
        given = "Ünïcödé é 日本語 🙂🙂 \u200b\ufeff" if pre == "qwen2" and text.startswith("Ü") else text  # NFC
        assert own.decode(own.encode(text)) == given


def test_smollm_takes_digits_one_by_one(folder: Path) -> None:
    assert len(load_tokenizer(file_of(folder, "llama", pre="smollm")).encode("1212")) == 4
    assert len(load_tokenizer(file_of(folder, "llama", pre="llama-bpe")).encode("12", add_special_tokens=False)) == 1


def test_special_tokens_template_and_ends_come_from_the_metadata(folder: Path) -> None:
    tokenizer = load_tokenizer(file_of(folder, "llama"))
    assert tokenizer.encode("<s>hello</s>") == [0, tokenizer.encode("hello")[0], 1]
    assert tokenizer.decode([0, 1]) == ""
    assert (tokenizer.bos_token, tokenizer.eos_token, set(tokenizer.eos_token_ids)) == ("<s>", "</s>", {1})
    assert load_tokenizer(file_of(folder, "llama", pre="llama-bpe")).encode("a")[0] == 0


def test_a_file_runs_and_the_plan_says_what_becomes_of_its_blocks(folder: Path) -> None:
    path = file_of(folder, "qwen2")
    config = EngineConfig(model=str(path), cache_memory="16MiB")
    plan = make_plan(config, load_spec(config), detect("cpu"))
    decision = next(each for each in plan.decisions if each.topic == "weights")
    assert "Q8_0" in decision.requested
    assert decision.effective == "Q8_0 as they lie, the others bfloat16"
    settings: dict[str, Any] = {"cache_memory": "16MiB", "max_num_seqs": 2, "threads": 1}
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    llm = LLM(str(path), dtype="float32", **settings)
    chat = llm.chat([{"role": "user", "content": "hello"}], greedy)
    raw = llm.generate("<s>user\nhello</s><s>assistant:", greedy)
    assert chat[0].outputs[0].token_ids == raw[0].outputs[0].token_ids
    small = LLM(str(path), quantization="int8", **settings)
    assert len(small.generate("hello", greedy)[0].outputs[0].token_ids) == 6


@pytest.mark.parametrize(
    ("kind", "effective", "reason"),
    [
        ("Q8_0", "Q8_0 as they lie, the others bfloat16", "all are copied while loading"),
        ("Q4_0", "Q4_0 as they lie, the others bfloat16", "blocks run as they lie"),
        ("Q5_1", "bfloat16", "no kernel for a GPU reads Q5_1 as they lie"),
    ],
)
def test_on_a_gpu_blocks_run_as_they_lie_where_kernels_read_all_of_them(
    folder: Path, kind: str, effective: str, reason: str
) -> None:
    config = EngineConfig(model=str(file_of(folder, "qwen2", kind)), dtype="bfloat16")
    plan = make_plan(config, load_spec(config), CATALOGUE["h100-80gb"])
    decision = next(each for each in plan.decisions if each.topic == "weights")
    assert decision.effective == effective
    assert reason in decision.reason
    assert {plan.kernels[op].implementation for op in ("linear", "embedding")} == {"triton"}


def test_a_hybrid_runs_with_weights_that_are_quantised_anew(folder: Path) -> None:
    path = file_of(folder, "granitehybrid of experts")
    llm = LLM(str(path), quantization="int8", cache_memory="16MiB", max_num_seqs=2, threads=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    assert len(llm.generate("hello", greedy)[0].outputs[0].token_ids) == 6


@pytest.fixture(scope="module")
def parts(folder: Path) -> list[Path]:
    return split_gguf(file_of(folder, "llama"), 3)


def test_any_part_of_a_split_model_opens_all_of_it(folder: Path, parts: list[Path]) -> None:
    whole = logits_of(file_of(folder, "llama"))
    assert all(torch.equal(logits_of(part), whole) for part in parts)
    assert load_tokenizer(parts[2]).encode("hello") == load_tokenizer(file_of(folder, "llama")).encode("hello")


def test_a_part_that_is_missing_or_of_another_model_is_named(tmp_path: Path, parts: list[Path]) -> None:
    for part in parts:
        shutil.copy(part, tmp_path)
    first, second, third = (tmp_path / part.name for part in parts)
    second.unlink()
    with pytest.raises(ModelError, match=f"one of 3 files of a model; {second.name} should lie beside it"):
        load_spec(EngineConfig(model=str(third)))
    shutil.copy(first, second)
    with pytest.raises(ModelError, match=r"no part of the same model as .* it has tensor"):
        load_spec(EngineConfig(model=str(first)))
    shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match=r"their names should be renamed-00001-of-00003\.gguf"):
        load_spec(EngineConfig(model=str(tmp_path / "renamed.gguf")))


def test_a_directory_of_gguf_files_alone_says_which_it_holds(folder: Path, tmp_path: Path) -> None:
    shutil.copy(file_of(folder, "llama"), tmp_path / "a.gguf")
    with pytest.raises(ModelError, match=r"no config\.json.*give one of its GGUF files: a\.gguf"):
        load_spec(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("architecture", ["plm", "gemma3n"])
def test_an_architecture_that_is_not_read_is_refused_beside_those_that_are(tmp_path: Path, architecture: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    known = "GGUF files are read of llama, qwen2, qwen3, .*ernie4_5, seed_oss, .*olmo2, .*gemma2, gemma3, gemma4, .*"
    with pytest.raises(ModelError, match=f"architecture '{architecture}'; {known}.*, qwen35, qwen35moe, qwen3next"):
        load_spec(EngineConfig(model=str(tmp_path / "m.gguf")))


def test_metadata_with_rows_that_are_no_whole_blocks_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = bytearray(file_of(folder, "llama").read_bytes())
    place = data.index(b"llama.embedding_length") + len(b"llama.embedding_length") + 4
    assert int.from_bytes(data[place : place + 4], "little") == 64
    data[place] = 72
    path.write_bytes(data)
    with pytest.raises(ModelError, match="rows of 72 weights cannot be blocks of Q8_0, which have 32"):
        LLM(str(path))


MIXED = {"attn_v": "Q8_0", "ffn_gate": "Q5_1", "ffn_down": "F16", "token_embd": "Q5_0"}
"""Rows of one product in two formats; gates in another than what they gate; a matrix that is no blocks."""


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_tensors_of_several_types_give_the_same_logits(tmp_path: Path, architecture: str) -> None:
    path = write_gguf(tmp_path / "mixed.gguf", architecture, "Q4_0", kinds=MIXED)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path.with_suffix(""), dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    error = (logits_of(path) - expected).abs().max() / expected.abs().max()
    assert error < 1e-4
    config = EngineConfig(model=str(path), cache_memory="16MiB")
    spec = load_spec(config)
    assert spec.quantization is not None
    rows = {name: spec.quantization for row in spec.table if spec.quantization.quantises(row) for name in row.names}
    inside = "model.layers.0.self_attn."
    assert {f"{inside}q_proj.weight", f"{inside}v_proj.weight", "model.embed_tokens.weight"} <= set(rows)
    assert not {"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"} & set(rows)
    plan = make_plan(config, spec, detect("cpu"))
    decision = next(each for each in plan.decisions if each.topic == "weights")
    assert "expanded to bfloat16, as they share a product with tensors of other types" in decision.reason
    assert Plan.from_json(plan.to_json()).settings.quantization == spec.quantization


@pytest.mark.parametrize("architecture", [name for name in (*HYBRIDS, *CONFIGS) if name.endswith("of experts")])
def test_experts_run_as_they_lie_with_inward_and_outward_matrices_of_different_types(
    tmp_path: Path, architecture: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture, "Q8_0", kinds={"up_exps": "Q4_0", "gate_exps": "Q4_0"})
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path.with_suffix(""), dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    assert (logits_of(path) - expected).abs().max() / expected.abs().max() < 1e-4
    spec = load_spec(EngineConfig(model=str(path)))
    assert isinstance(spec.quantization, BlockQuantization)
    stacks = [spec.quantization.blocks_of(row) for row in spec.experts]
    assert stacks
    assert [blocks[0][0] for blocks in stacks if blocks is not None] == ["Q4_0", "Q8_0"] * (len(stacks) // 2)


def test_experts_of_which_one_matrix_is_no_blocks_are_expanded_and_the_plan_names_them(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "nemotron_h of experts", "Q8_0", kinds={"down_exps": "F16"})
    config = EngineConfig(model=str(path), cache_memory="16MiB")
    spec = load_spec(config)
    assert not any(spec.quantization.quantises(row) for row in spec.experts)
    decision = next(each for each in make_plan(config, spec, detect("cpu")).decisions if each.topic == "weights")
    assert "share a product with tensors of other types: model.layers.2.mixer.experts.*.up_proj" in decision.reason
    assert logits_of(path).isfinite().all()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_the_plan_counts_the_bytes_of_blocks_as_they_are(folder: Path, kind: str) -> None:
    path = file_of(folder, "llama", kind)
    spec = load_spec(EngineConfig(model=str(path)))
    model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec)
    assert spec.weight_bytes("float32") == sum(each.nbytes for each in model.parameters())
    in_blocks = sum(each.nbytes for each in model.parameters() if each.dtype is torch.uint8)
    assert in_blocks == dict(spec.stored_blocks)[kind]


@pytest.mark.parametrize(
    ("architecture", "kind"), [("llama", "Q4_1"), ("qwen35moe of experts", "Q8_0"), ("gemma3", "Q8_0")]
)
def test_cache_graphs_drafts_and_a_fixed_order_give_the_plain_tokens(
    folder: Path, architecture: str, kind: str
) -> None:
    path = file_of(folder, architecture, kind)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [list(range(5, 60)), list(range(5, 40)), [7, 8, 9] * 8]

    def tokens(**settings: Any) -> list[list[int]]:
        given = {"cache_memory": "16MiB", "max_num_seqs": 4, "threads": 1, "dtype": "float32"} | settings
        llm = LLM(str(path), **given)
        outputs = [llm.generate(prompts, greedy) for _ in range(2)][-1]  # of which the second may hit the cache
        return [list(each.outputs[0].token_ids) for each in outputs]

    plain = {"graph_mode": "none", "enable_prefix_caching": False}
    expected = tokens(kernels="reference", **plain)
    ways: list[dict[str, Any]] = [
        plain,
        {"graph_mode": "full_and_piecewise", "strict": True, "check_replay": True},
        {"graph_mode": "none", "max_num_batched_tokens": 32},
        {"speculative": "ngram:2", "speculative_adaptive": "off"},
        {"quantization": "none", **plain},
    ]
    if detect("cpu").native.isa is not None:
        ways.append({"deterministic": True, "threads": 2})
    for settings in ways:
        assert tokens(**settings) == expected, settings


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.nextn_predict_layers": 1}, "prediction head"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 elements of heads of 16"),
        ({"llama.rope.scaling.type": "yarn"}, "no llama.rope.scaling.factor"),
        ({"llama.rope.scaling.type": "longrope"}, "supported: none, linear, yarn"),
        ({"llama.attention.sliding_window": 128}, "supported for llama: attention over the whole context of 512"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_spec(EngineConfig(model=str(write_gguf(tmp_path / "m.gguf", "llama", **metadata))))


def test_gemma3_has_its_windows_and_scales_by_what_llama_cpp_knows_of_it(tmp_path: Path) -> None:
    def spec_of(**metadata: Any) -> Any:
        return load_spec(EngineConfig(model=str(write_gguf(tmp_path / "m.gguf", "gemma3", **metadata))))

    spec = spec_of()
    assert [layer.attention.window for layer in spec.layers] == [12] * 5 + [None] + [12]
    assert (spec.rope.kind, spec.rope.theta) == ("linear", 20000.0)
    assert (spec.hyperparameters.scale, spec.other_ropes[0].theta) == (32**-0.5, 10000.0)
    assert spec.other_ropes[0].kind == "default"
    of_27b = spec_of(**{"gemma3.block_count": 62, "gemma3.attention.sliding_window_pattern": 31})
    assert of_27b.hyperparameters.scale == (64 // 4) ** -0.5
    assert [i for i, layer in enumerate(of_27b.layers) if layer.attention.window is None] == [30, 61]
    assert (spec.hyperparameters.logits_cap, spec.layers[0].attention.softcap) == (None, None)
    assert spec_of(**{"gemma3.final_logit_softcapping": 30.0}).hyperparameters.logits_cap == 30.0


def test_gemma2_without_caps_and_windows_has_those_of_llama_cpp(tmp_path: Path) -> None:
    names = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")
    without: dict[str, Any] = {f"gemma2.{name}": None for name in names}
    metadata = without | {"gemma2.block_count": 46, "gemma2.context_length": 8192}
    spec = load_spec(EngineConfig(model=str(write_gguf(tmp_path / "m.gguf", "gemma2", **metadata))))
    assert [layer.attention.window for layer in spec.layers[:3]] == [4096, None, 4096]
    assert {layer.attention.softcap for layer in spec.layers} == {50.0}
    assert (spec.hyperparameters.logits_cap, spec.hyperparameters.scale) == (30.0, (64 // 4) ** -0.5)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rope.dimension_count_swa", 8, "rotates some of the 16 elements of heads with a window"),
        ("feed_forward_length", [96, 96, 96, 96, 192], r"feed_forward_length = \[96, 96, .* 192\]; supported: one"),
        ("attention.head_count_kv", [2, 4], r"head_count_kv = \[2, 4\], which should be 5 whole numbers"),
    ],
)
def test_gemma4_of_another_kind_is_refused_by_name(tmp_path: Path, name: str, value: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_spec(EngineConfig(model=str(write_gguf(tmp_path / "m.gguf", "gemma4", **{f"gemma4.{name}": value}))))


@pytest.mark.parametrize(
    ("architecture", "name", "value", "words"),
    [
        ("lfm2moe", "expert_gating_func", 1, r"expert_gating_func = 1; supported for lfm2moe: 2 \(sigmoid\)"),
        ("qwen3moe", "expert_weights_norm", False, r"do not add up to 1 .*; those of qwen3moe do"),
        ("qwen35moe", "expert_gating_func", 2, r"expert_gating_func = 2; supported for qwen35moe: 1 \(softmax\)"),
        ("qwen35moe", "expert_weights_scale", 2.5, r"do not add up to 1 .*; those of qwen35moe do"),
        ("qwen3next", "expert_weights_norm", False, r"do not add up to 1 .*; those of qwen3next do"),
    ],
)
def test_experts_that_are_chosen_in_another_way_are_refused(
    tmp_path: Path, architecture: str, name: str, value: Any, words: str
) -> None:
    changed = {f"{architecture}.{name}": value}
    path = write_gguf(tmp_path / "m.gguf", f"{architecture} of experts", **changed)
    with pytest.raises(ModelError, match=words):
        load_spec(EngineConfig(model=str(path)))


def test_gates_in_one_tensor_with_what_they_gate_are_refused_by_name(tmp_path: Path) -> None:
    facts = {"qwen35moe.expert_feed_forward_length": 64}
    path = write_gguf(tmp_path / "m.gguf", "qwen35moe of experts", **facts)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"ffn_up_exps", b"ffn_guexps_"))
    with pytest.raises(ModelError, match=r"(?s)missing .*experts\.\*\.up_proj.*blk\.0\.ffn_guexps_"):
        logits_of(path)


def test_a_pre_tokenizer_that_is_not_known_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"'other'; implemented: codeshell, command-r, dbrx, "):
        load_tokenizer(file_of(folder, "llama", pre="other"))


BIASES = {
    "llama": ["attn_q attn_k attn_v", "attn_v", "attn_output", "ffn_gate", "ffn_up ffn_down"],
    "qwen3": ["attn_k", "attn_output"],
    "falcon-h1": ["ffn_down", "ssm_in"],
    "lfm2": ["shortconv.out_proj"],
}


@pytest.mark.parametrize(
    ("architecture", "biased"), [(name, biased) for name, cases in BIASES.items() for biased in cases]
)
def test_biases_that_a_file_has_in_part_are_zero_where_it_has_none(
    folder: Path, tmp_path: Path, architecture: str, biased: str
) -> None:
    plain, path = file_of(folder, architecture, "F32"), tmp_path / "m.gguf"
    names = [f"{name}.bias" for name in biased.split()]
    with_biases(plain, path, names, 0.0)
    assert torch.equal(logits_of(path), logits_of(plain))
    assert inspect_checkpoint(path, detect("cpu")).refused == []
    with_biases(plain, path, names, 0.5)
    assert not torch.equal(logits_of(path), logits_of(plain))


def test_a_bias_that_an_architecture_always_has_and_one_of_a_norm_are_still_named(folder: Path, tmp_path: Path) -> None:
    path = with_biases(file_of(folder, "llama", "F32"), tmp_path / "m.gguf", ["attn_norm.bias"], 0.5)
    with pytest.raises(ModelError, match=r"left over \(\d+\): blk\.\d\.attn_norm\.bias") as caught:
        logits_of(path)
    assert "config.json" not in caught.value.message
    path = tmp_path / "q.gguf"
    path.write_bytes(file_of(folder, "qwen2").read_bytes().replace(b"blk.0.attn_q.bias", b"blk.0.attn_x.bias"))
    with pytest.raises(ModelError, match=r"missing \(1\): model\.layers\.0\.self_attn\.q_proj\.bias") as caught:
        logits_of(path)
    assert "config.json" not in caught.value.message
