"""Quantised models in ranks: each has its part of the integers, scales and blocks of the whole matrix, however the
checkpoint has them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ostinato import EngineConfig
from ostinato.errors import ConfigError
from ostinato.layers.allocation import BlockView, QuantizedView, WeightAllocator, checkpoint_views
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import load_spec
from ostinato.models.loader import build_model, load_weights
from ostinato.models.random_weights import randomize_weights
from ostinato.models.weight_shards import TensorShard
from ostinato.ops.arrays import TorchArrays, host_values
from ostinato.ops.dispatch import select_ops
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.quant.dequantize import dequantize
from ostinato.ops.quant.quantize import BY_TORCH
from ostinato.ops.quant.quantize import dequantize as of_integers
from ostinato.plan.rope import resolve_rope
from ostinato.plan.tensor_parallel import Rank
from tests.models.test_ranks import logits
from tests.support.checkpoints import checkpoint
from tests.support.quantized_checkpoints import compressed
from tests.support.rank_threads import Threads
from tests.support.stored_formats import stored


def load(model: Path, rank: Rank, meeting: Threads | None = None, **settings: Any) -> CausalLM:
    spec = load_spec(EngineConfig(model=str(model), tensor_parallel_size=rank.of, **settings))
    if spec.rope is not None:
        spec = replace(spec, rope=resolve_rope(spec.rope, 512)[0])
    ops = select_ops({}, ranks=None if meeting is None else meeting.of(rank.number))
    built = build_model(WeightAllocator(ops, TorchArrays("cpu"), "float32", rank=rank), spec)
    load_weights(built, model)
    return built


def check_ranks(model: Path, ranks: int, **settings: Any) -> CausalLM:
    """Ranks compute what one process does of the same integers. -> the first rank's model"""
    meeting = Threads(ranks)
    models = [load(model, Rank(number, ranks), meeting, **settings) for number in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        found, *_ = threads.map(logits, models)
    expected = logits(load(model, Rank(0, 1), **settings))
    torch.testing.assert_close(found, expected, atol=2e-5 * expected.abs().max().item(), rtol=0)
    return models[0]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("llama", 4), ("nemotron_h", 2), ("falcon_mamba", 3), ("qwen3_next", 2), ("lfm2_moe", 2), ("kimi_linear", 2)],
)
def test_what_is_quantised_while_loading_has_the_integers_of_the_whole(name: str, ranks: int) -> None:
    first = check_ranks(checkpoint(name), ranks, quantization="int8")
    assert any(tensor.dtype == torch.int8 for tensor in first.parameters())


@pytest.mark.parametrize("form", ["pack-quantized", "int-quantized"])
def test_integers_of_a_checkpoint_are_cut(form: str, tmp_path: Path) -> None:
    compressed("llama", tmp_path, None, form)
    check_ranks(tmp_path, 2)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose parts are of whole groups of 32."""
    directory = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.3, max_position_embeddings=512)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "form", ["gptq", "awq", "ct-zeros", "fp8-blocks", "ct-float-channel", "gptq-act-order", "ct-act-order"]
)
def test_blocks_of_a_checkpoint_are_cut_between_groups(form: str, wide: Path, tmp_path: Path) -> None:
    stored(wide, tmp_path, form)
    first = check_ranks(tmp_path, 2)
    assert any(isinstance(view, BlockView) for _, view in checkpoint_views(first))


def test_groups_in_an_order_of_their_own_are_of_inputs_of_all_ranks(wide: Path, tmp_path: Path) -> None:
    """Each rank has whole groups, all of them together every input once, and takes no more than was planned."""
    stored(wide, tmp_path, "gptq-act-order")
    models = [load(tmp_path, Rank(number, 2)) for number in range(2)]
    views = [dict(checkpoint_views(model)) for model in models]
    for name in (
        f"model.layers.{layer}.{end}.weight" for layer in (0, 1) for end in ("mlp.down_proj", "self_attn.o_proj")
    ):
        orders = [view.order for view in (each[name] for each in views) if isinstance(view, BlockView)]
        first, second = (order for order in orders if order is not None)
        assert torch.equal(torch.cat([first, second]).sort().values, torch.arange(2 * len(first), dtype=torch.int32))
        assert not torch.equal(first.sort().values, torch.arange(len(first), dtype=torch.int32))
    for model in models:
        assert sum(tensor.nbytes for tensor in model.parameters()) == model.spec.weight_bytes("float32")


def test_4_bits_that_are_made_while_loading_are_those_of_the_whole(wide: Path) -> None:
    first = check_ranks(wide, 2, quantization="int4_g32")
    assert any(isinstance(view, BlockView) for _, view in checkpoint_views(first))


@pytest.mark.parametrize(
    ("form", "quantization"),
    [("gptq-act-order", "none"), ("fp8-narrow", "auto"), ("fp8-blocks", "none"), ("fp8-blocks", "int8")],
)
def test_what_is_expanded_is_cut_then(form: str, quantization: str, tmp_path: Path) -> None:
    stored("llama", tmp_path, form)
    check_ranks(tmp_path, 2, quantization=quantization)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("gptq", r"o_proj.weight \[64, 96\], 64 rows of 48, would be"),
        ("fp8-blocks", r"o_proj.weight \[64, 96\], 64 rows of 48, would be"),
        ("gptq-act-order", r"o_proj.weight \[64, 96\], 64 rows of 48, would be"),
    ],
)
def test_blocks_that_a_cut_would_divide_are_refused_with_what_works(form: str, told: str, tmp_path: Path) -> None:
    stored("llama", tmp_path, form)
    config = EngineConfig(model=str(tmp_path), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=told) as caught:
        load_spec(config)
    for remedy in caught.value.remedies:
        load_spec(config.with_settings(**{remedy.setting: remedy.value}))


def test_a_draft_model_whose_groups_a_cut_would_divide_is_whole_on_each_rank(wide: Path, tmp_path: Path) -> None:
    for model, form, ranks in (("llama", "gptq", 1), (wide, "gptq-act-order", 2)):
        directory = tmp_path / form
        stored(model, directory, form)
        spec = load_spec(
            EngineConfig(
                model=str(model if ranks == 2 else checkpoint(model)),
                tensor_parallel_size=2,
                speculative=f"draft:{directory}:2",
            )
        )
        assert spec.drafter is not None
        assert spec.drafter.model is not None
        assert (spec.ranks, spec.drafter.model.ranks) == (2, ranks)


def test_groups_that_a_cut_would_divide_are_refused_with_what_works() -> None:
    config = EngineConfig(model=str(checkpoint("llama")), tensor_parallel_size=2, quantization="int8_g128")
    with pytest.raises(ConfigError, match=r"a part of .* would be quantised in another way than the whole") as caught:
        load_spec(config)
    for remedy in caught.value.remedies:
        load_spec(config.with_settings(**{remedy.setting: remedy.value}))


@pytest.mark.parametrize(
    ("name", "ranks", "quantization"),
    [
        ("jamba", 4, "none"),
        ("nemotron_h", 2, "int8"),
        ("falcon_mamba", 3, "none"),
        ("qwen3_next", 2, "int8"),
        ("wide", 2, "int4_g32"),
    ],
)
def test_random_weights_of_ranks_are_parts_of_those_of_one_process(
    name: str, ranks: int, quantization: str, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.models.random_weights.PERIOD", 997)  # matrices are longer, and some of their rows
    model, meeting = wide if name == "wide" else checkpoint(name), Threads(ranks)

    def drawn(rank: Rank) -> CausalLM:
        spec = load_spec(EngineConfig(model=str(model), tensor_parallel_size=rank.of, quantization=quantization))
        ops = select_ops({}, ranks=None if rank.of == 1 else meeting.of(rank.number))
        built = build_model(WeightAllocator(ops, TorchArrays("cpu"), "float32", rank=rank), spec)
        randomize_weights(built, seed=3)
        return built

    models = [drawn(Rank(number, ranks)) for number in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        found, *_ = threads.map(logits, models)
    expected = logits(drawn(Rank(0, 1)))
    torch.testing.assert_close(found, expected, atol=2e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["Q8_0", "int4_g32", "int4_g128", "fp8_g128"])
def test_a_part_of_blocks_is_the_part_of_what_they_stand_for(name: str, dim: int) -> None:
    values = torch.randn(12, 512, generator=torch.Generator().manual_seed(1))
    kind = BLOCK_FORMATS[name]
    share = TensorShard((12, 512), dim, ((0, 3), (6, 9)) if dim == 0 else ((128, 256), (384, 512)))
    shape = (6, 512) if dim == 0 else (12, 256)
    place = BlockView(torch.empty(shape[0], kind.row_bytes(shape[1]), dtype=torch.uint8), name, shape[1])
    whole = share.allocate_full(place)
    assert isinstance(whole, BlockView)
    whole.quantize_into(values, BY_TORCH)
    share.copy_shard(whole, place)
    assert np.array_equal(dequantize(name, place.bytes), share.read(dequantize(name, host_values(whole.bytes))))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("group_size", [None, 32])
def test_a_part_of_integers_has_the_scales_of_whole_rows(group_size: int | None, dim: int) -> None:
    values = torch.randn(12, 128, generator=torch.Generator().manual_seed(2))
    share = TensorShard((12, 128), dim, ((0, 3), (6, 9)) if dim == 0 else ((32, 64), (96, 128)))
    rows, columns = (6, 128) if dim == 0 else (12, 64)
    groups = () if group_size is None else (columns // group_size,)
    place = QuantizedView(torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, *groups), group_size)
    whole = share.allocate_full(place)
    assert isinstance(whole, QuantizedView)
    whole.quantize_into(values, BY_TORCH)
    share.copy_shard(whole, place)
    expected = share.read(of_integers(host_values(whole.weight), host_values(whole.scale), group_size))
    assert np.array_equal(of_integers(place.weight, place.scale, group_size), expected)
