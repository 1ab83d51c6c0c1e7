"""`ostinato bench speculative`: the figures from plain numbers, and the report on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato import ConfigError, EngineConfig
from ostinato.bench.engine_driver import plan_of
from ostinato.bench.profile import Roofline
from ostinato.bench.speculative import DraftRound, SpeculativeBench, make_prompts, speculative_figures, verify_floor
from ostinato.bench.statistics import RoundTrace
from ostinato.cli.main import main
from tests.support.checkpoints import VOCAB_SIZE, checkpoint

TINY = [
    "--threads",
    "1",
    "--dtype",
    "float32",
    "--cache-memory",
    "16MiB",
    "--capture-sizes",
    "8",
    "--capture-rows",
    "2",
]


def bench_of(prompts: Path | None = None, rounds: int = 2) -> SpeculativeBench:
    return SpeculativeBench("ngram", (2,), (1, 3), prompt_len=9, output_len=6, rounds=rounds, prompts=prompts)


def test_acceptance_at_a_position_is_of_the_drafts_whose_predecessors_were_kept() -> None:
    trace = RoundTrace(20, [[1, 2, 3]], [1, 2, 3])
    rounds = [DraftRound(trace, (10, 8, 4), (8, 6, 3)), DraftRound(trace, (10, 8, 0), (8, 2, 0))]
    figures = speculative_figures(rounds, [DraftRound(trace), DraftRound(trace)], k=3)
    assert figures["acceptance"] == [0.8, 0.5, 0.75]
    assert figures["tokens_per_step"] == 1 + 27 / 20
    unused = speculative_figures([DraftRound(trace, (0, 0), (0, 0))], [DraftRound(trace)], k=2)
    assert (unused["acceptance"], unused["tokens_per_step"]) == ([None, None], 1.0)


def test_speed_is_that_of_a_round_over_the_same_round_without_drafts() -> None:
    # Two requests, prefilled after 1 s; then 4 tokens each, one per second, or two per step of 1.2 s.
    plain = RoundTrace(20, [[1, 2, 3, 4, 5]] * 2, [1, 2, 3, 4, 5])
    drafted = RoundTrace(20, [[1, 2.2, 2.2, 3.4, 3.4]] * 2, [1, 2.2, 3.4])
    figures = speculative_figures([DraftRound(drafted, (4,), (4,))], [DraftRound(plain)], k=1)
    assert figures["decode_tokens_per_second"]["median"] == pytest.approx(8 / 2.4)
    assert figures["speed"]["median"] == pytest.approx((8 / 2.4) / (8 / 4))
    assert figures["total_speed"]["median"] == pytest.approx((10 / 3.4) / (10 / 5))
    assert figures["acceptance"] == [1.0]
    assert figures["tokens_per_step"] == 2.0
    assert figures["step_milliseconds"] == pytest.approx(1200)
    assert figures["step_cost"] == pytest.approx(1.2)


def test_a_speed_up_by_wrong_tokens_shows_as_outputs_that_are_not_equal() -> None:
    plain = RoundTrace(20, [[1, 2, 3]] * 2, [1, 2, 3], ((5, 6, 7), (8, 9, 10)))
    drafted = RoundTrace(20, [[1, 2, 2]] * 2, [1, 2], ((5, 6, 7), (8, 9, 9)))
    rounds = [DraftRound(drafted, (1,), (1,))]
    assert speculative_figures(rounds, [DraftRound(plain)], k=1)["equal_outputs"] == 0.5
    assert speculative_figures(rounds, rounds, k=1)["equal_outputs"] == 1.0


def test_a_step_costs_what_it_takes_before_any_request_ends() -> None:
    trace = RoundTrace(20, [[1, 2, 3], [1, 2]], [1, 2, 9])
    figures = speculative_figures([DraftRound(trace)], [DraftRound(trace)], k=0)
    assert figures["step_milliseconds"] == pytest.approx(1000)


def test_each_round_has_prompts_of_its_own_which_all_variants_share(tmp_path: Path) -> None:
    config = EngineConfig(model=str(checkpoint("nemotron_h")))
    random = make_prompts(config, bench_of())
    assert set(random.by_round) == {(size, number) for size in (1, 3) for number in (-1, 0, 1)}
    assert all(len(ids) == 9 and max(ids) < VOCAB_SIZE for each in random.by_round.values() for ids in each)
    assert random.ignore_eos
    problems = make_prompts(EngineConfig(model="demo"), bench_of())
    texts = [tuple(ids) for each in problems.by_round.values() for ids in each]
    assert len(set(texts)) == len(texts) == 12
    assert not problems.ignore_eos
    file = tmp_path / "prompts.txt"
    file.write_text("Q: one\n\nQ: two\n")
    lines = make_prompts(EngineConfig(model="demo"), bench_of(file, rounds=1))
    assert [len(each) for each in lines.by_round.values()] == [1, 1, 3, 3]
    assert lines.source == str(file)


def test_a_file_without_prompts_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no prompts"):
        make_prompts(EngineConfig(model="demo"), bench_of(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="cannot be read"):
        make_prompts(EngineConfig(model="demo"), bench_of(tmp_path / "missing"))


@pytest.mark.slow
def test_the_report_has_every_number_of_drafts_and_the_controllers_choice(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "speculative", str(checkpoint("nemotron_h")), "--method", "ngram", "--num-drafts", "2,1"]
    sizes = ["--batch-sizes", "1,2", "--rounds", "1", "--prompt-len", "9", "--output-len", "12"]
    with pytest.raises(SystemExit) as ended:
        main([*command, *sizes, *TINY, "--json"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert [(each["batch_size"], each["k"], each["is_adaptive"]) for each in report["results"]] == [
        (size, k, is_adaptive) for size in (1, 2) for k, is_adaptive in ((0, False), (1, False), (2, False), (2, True))
    ]
    for result in report["results"]:
        assert result["output_tokens"] == 12 * result["batch_size"]
        assert len(result["acceptance"]) == result["k"]
        assert 1 <= result["tokens_per_step"] <= 1 + result["k"]
    plain = [each for each in report["results"] if each["k"] == 0]
    assert all(each["speed"]["median"] == each["step_cost"] == 1 for each in plain)
    assert report["controller"]["batch_sizes"]
    assert all("floor_milliseconds" in each for each in report["results"])


def test_the_floor_is_of_bytes_while_they_take_longer_and_then_of_operations() -> None:
    config = EngineConfig(model=str(checkpoint("llama")))
    plan = plan_of(config)

    def floor(roofs: Roofline | None, rows: int, k: int) -> float:
        found = verify_floor(config, plan, roofs, rows, k, context=10)
        assert found is not None
        return found

    slow_memory, slow_products = Roofline(1e6, 1e30), Roofline(1e30, 1e6)
    # Weights, which are nearly all, are read once; each token's products are made.
    assert floor(slow_memory, 1, 0) < floor(slow_memory, 1, 3) < 1.2 * floor(slow_memory, 1, 0)
    assert floor(slow_products, 1, 3) == pytest.approx(4 * floor(slow_products, 1, 0), rel=0.05)
    assert floor(Roofline(1e6, 1e6), 2, 3) >= max(floor(slow_memory, 2, 3), floor(slow_products, 2, 3))
    assert verify_floor(config, plan, None, 1, 0, context=10) is None
    experts = EngineConfig(model=str(checkpoint("nemotron_h")))
    assert verify_floor(experts, plan_of(experts), slow_memory, 1, 3, context=10) is None


@pytest.mark.parametrize(
    ("accept", "least", "most", "ranks"),
    [
        ("0", 0, 0, "1"),
        ("0.6", 0.4, 0.8, "1"),
        ("1", 1, 1, "1"),
        pytest.param("0.6", 0.4, 0.8, "2", marks=pytest.mark.ranks),
    ],
)
def test_drafts_are_right_with_the_probability_asked_for(
    accept: str, least: float, most: float, ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "speculative", str(checkpoint("nemotron_h_head")), "--method", "mtp", "--num-drafts", "2"]
    command += ["--tensor-parallel-size", ranks]
    sizes = ["--batch-sizes", "4", "--rounds", "1", "--prompt-len", "9", "--output-len", "48"]
    with pytest.raises(SystemExit) as ended:
        main([*command, *sizes, "--accept", accept, *TINY, "--json"])
    assert ended.value.code == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [each["output_tokens"] for each in results] == [4 * 48] * 3
    fixed = next(each for each in results if each["k"] == 2 and not each["is_adaptive"])
    shares = [share for share in fixed["acceptance"] if share is not None]
    assert shares
    assert all(least <= share <= most for share in shares)


def test_what_is_compared_cannot_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "speculative", "demo", "--speculative", "mtp:3"])
    assert ended.value.code == 2
    assert "--method" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["mtp:3", "MTP", "draft", "draft:", "none"])
def test_a_method_is_named_without_its_number_of_drafts(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "speculative", "demo", "--method", method])
    assert ended.value.code == 2
    assert "--num-drafts" in capsys.readouterr().err


def test_a_model_without_a_head_names_the_methods_that_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "speculative", str(checkpoint("llama"))])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "no prediction head" in error
    assert "--method ngram or draft:PATH" in error
