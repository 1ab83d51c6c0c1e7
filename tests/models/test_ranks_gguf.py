"""GGUF files in ranks: each reads its part of the blocks, where they lie if its rows lie together, and all compute what
one process does of the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato import EngineConfig
from ostinato.errors import ConfigError
from ostinato.layers.allocation import BlockView, QuantizedView, checkpoint_views
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import load_spec
from ostinato.plan.quantization import BlockQuantization
from ostinato.plan.tensor_parallel import Rank, sharding_problems
from tests.models.test_ranks_quantized import check_ranks, load

pytest.importorskip("gguf", reason="the package that writes GGUF files comes with the test extra")
from tests.support.gguf_files import write_gguf
from tests.support.gguf_hybrids import HYBRIDS

PLAIN = ("llama", "qwen2", "qwen3", "deepseek2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def file_of(folder: Path, architecture: str, kind: str) -> Path:
    path = folder / f"{architecture.replace(' ', '-')}-{kind}.gguf"
    return path if path.exists() else write_gguf(path, architecture, kind)


def blocks_of(model: CausalLM) -> dict[str, BlockView]:
    return {name: view for name, view in checkpoint_views(model) if isinstance(view, BlockView)}


@pytest.mark.parametrize("architecture", [*PLAIN, *HYBRIDS])
def test_ranks_compute_what_one_process_does_of_values(folder: Path, architecture: str) -> None:
    """Cuts anywhere in a row, of each order of rows and each change of values that files have."""
    check_ranks(file_of(folder, architecture, "F32"), 2)


@pytest.mark.parametrize("architecture", [*PLAIN, *HYBRIDS])
def test_ranks_compute_what_one_process_does_of_blocks(folder: Path, architecture: str) -> None:
    path = file_of(folder, architecture, "Q8_0")
    config = EngineConfig(model=str(path), tensor_parallel_size=2)
    if any(row.in_size == 96 for row in load_spec(EngineConfig(model=str(path))).table):
        # Parts of 48 columns are no whole number of blocks of 32.
        with pytest.raises(ConfigError, match="rows of 48"):
            load_spec(config)
        check_ranks(path, 2, quantization="int8")
        return
    first = check_ranks(path, 2)
    assert blocks_of(first)


def test_4_bit_blocks_are_those_of_the_file(folder: Path) -> None:
    """Each rank has its rows, or its blocks of each row, and all of them make the whole."""
    path = file_of(folder, "granitehybrid", "Q4_0")
    whole = blocks_of(load(path, Rank(0, 1)))
    parts = [blocks_of(load(path, Rank(number, 2))) for number in range(2)]
    assert any(part.bytes.numel() < whole[name].bytes.numel() for name, part in parts[0].items())
    for name, all_of_it in whole.items():
        rows = {tuple(row) for row in all_of_it.flat().bytes.tolist()}
        for part in parts:
            has_whole_rows = part[name].in_size == all_of_it.in_size
            for row in part[name].flat().bytes.tolist():
                assert tuple(row) in rows if has_whole_rows else any(_holds(each, tuple(row)) for each in rows)


def _holds(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return part in (whole[: len(part)], whole[-len(part) :])


def test_rows_that_lie_together_stay_in_the_files_pages_and_the_plan_counts_them(folder: Path) -> None:
    path = file_of(folder, "mamba2", "Q8_0")
    spec = load_spec(EngineConfig(model=str(path), tensor_parallel_size=2))
    assert isinstance(spec.quantization, BlockQuantization)
    mapped = {name for row in spec.table if spec.quantization.is_mapped(row) for name in row.names}
    assert mapped == {"backbone.embeddings.weight", "lm_head.weight"}  # others are cut in parts, or in each row
    model = load(path, Rank(1, 2))
    assert sum(tensor.nbytes for tensor in model.parameters()) == spec.weight_bytes("float32")
    whole, part = load(path, Rank(0, 1)).lm_head.weight, model.lm_head.weight
    assert part.tolist() == whole[160:].tolist()


def test_queries_of_fewer_key_heads_than_ranks_come_in_the_checkpoints_order(folder: Path) -> None:
    check_ranks(file_of(folder, "llama", "F32"), 4)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_blocks_that_are_made_anew_are_cut_afterwards(folder: Path, quantization: str) -> None:
    first = check_ranks(file_of(folder, "llama", "Q8_0"), 2, quantization=quantization)
    kinds = {type(view) for _, view in checkpoint_views(first)}
    assert (QuantizedView in kinds) == (quantization == "int8")


def test_a_cut_within_a_block_is_refused_with_numbers_that_work(folder: Path) -> None:
    path = file_of(folder, "llama", "Q8_0")
    whole = load_spec(EngineConfig(model=str(path)))
    assert not sharding_problems(whole, 2)
    config = EngineConfig(model=str(path), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"rows of 48, .*Q8_0 of 32 elements; what works is 1$") as caught:
        load_spec(config)
    for remedy in caught.value.remedies:
        load_spec(config.with_settings(**{remedy.setting: remedy.value}))
