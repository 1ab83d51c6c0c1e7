"""`ostinato verify`: what is right is equal, what is broken is found, with the place and the logits there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ostinato import EngineConfig
from ostinato.cli.main import main
from ostinato.cli.verify import print_report
from ostinato.engine.text.tokenizer import load_tokenizer
from ostinato.graphs.buffers import StepBuffers
from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.prefix_index import BlockHashes
from ostinato.ops.reference import selective, ssd
from ostinato.runner.draft_override import OverriddenProposer
from ostinato.sampling import sampler
from ostinato.sampling.sampler import LogitChunks, SampleKernel
from ostinato.sampling.state import SamplingState
from ostinato.scheduler import decode, prefill
from ostinato.scheduler import request as scheduled
from ostinato.scheduler.batch import BatchRow, RowResult
from ostinato.scheduler.request import Request
from ostinato.scheduler.scheduler import Scheduler
from ostinato.spec_decode.ngram import NgramProposer
from ostinato.verify.engine_configs import base_config, plain_config
from ostinato.verify.reference_run import PlainPath, complete
from ostinato.verify.test_prompts import Prompt
from ostinato.verify.verify import Trial, check_states, has_passed, verify
from tests.support.checkpoints import checkpoint, oracle_logits, random_prompt
from tests.support.engines import greedy, make_engine, sampled
from tests.support.text_checkpoint import text_checkpoint
from tests.support.vl_models import vl_checkpoint

SMALL = Trial(num_prompts=1, max_tokens=8)
ONE_WAY = {"speculative": "ngram:3", "graph_mode": "none", "max_num_batched_tokens": 64, "state_cache_mode": "all"}
"""Of the engine's settings, so that there are but two ways: with and without preemption."""


def verified(name: str, trial: Trial = SMALL, **settings: Any) -> dict[str, Any]:
    return verify({"model": str(checkpoint(name)), "threads": 1, **settings}, trial, lambda what, done, total: None)


def verdicts(report: dict[str, Any]) -> set[str]:
    return {cell["verdict"] for cell in report["cells"]}


def printed(report: dict[str, Any]) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        print_report(report, console)
    return captured.get()


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run_main(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as exit_info:
            main(["verify", *arguments])
        captured = capsys.readouterr()
        return Outcome(int(exit_info.value.code or 0), captured.out, captured.err)

    return run_main


# What is right


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bamba", {"state_cache_mode": "all", "max_num_batched_tokens": 37}),
        ("falcon_h1", {"state_cache_mode": "align", "max_num_batched_tokens": 64}),
        ("granitemoehybrid", {"state_cache_mode": "all", "speculative": "ngram:2"}),
        ("mamba2", {"graph_mode": "full_and_piecewise", "speculative": "ngram:3", "state_cache_mode": "align"}),
        ("nemotron_h_dense_head", {"speculative": "mtp:3", "graph_mode": "full_and_piecewise"}),
        ("nemotron_h_stateless_head", {"speculative": "mtp:2", "max_num_batched_tokens": 37}),
        ("llama", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_part_of_an_architecture_is_equal_and_shown(name: str, settings: dict[str, Any]) -> None:
    report = verified(name, Trial(extent="quick", num_prompts=1, max_tokens=8), **settings)
    assert has_passed(report)
    assert report["plain"]["verdict"] == "equal"
    assert verdicts(report) == {"equal"}, printed(report)
    assert [cell["notes"] for cell in report["cells"] if cell["notes"]] == []
    for cell in report["cells"]:
        counts = cell["counts"]
        assert (counts["preemptions"] > 0) == cell["preemption"]
        assert (counts["steps_ahead"] > 0) == (cell["overlap"] == "on")
        assert (counts["drafts_proposed"] > 0) == (cell["speculative"] != "none")
        eager = cell["graph_mode"] == "none"
        assert (counts["full_steps"] + counts["piecewise_steps"] == 0) == eager


def test_a_warm_cell_finds_what_the_cold_one_left() -> None:
    cells = verified("nemotron_h_dense", **ONE_WAY)["cells"]
    assert [(cell["preemption"], cell["cache"]) for cell in cells] == [
        (False, "cold"), (False, "warm"), (True, "cold"), (True, "warm"),
    ]  # fmt: skip
    for cold, warm in (cells[:2], cells[2:]):
        assert warm["counts"]["cached_tokens"] > cold["counts"]["cached_tokens"] + 300


def test_requests_are_preempted_more_and_more_seldom_and_come_to_their_end() -> None:
    engine = make_engine(max_model_len=512, max_num_batched_tokens=37, enable_prefix_caching=False)
    requests = [(random_prompt(60, seed), greedy(max_tokens=60)) for seed in range(3)]
    undisturbed = complete(engine, requests)
    assert complete(engine, requests, preempts=True) == undisturbed
    assert 3 * 3 < engine.stats()["preemptions"] < 3 * 8


# What is broken


def read_wrong_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after the first token of a verify step goes on, however many drafts were kept."""
    advance = CacheManager.accept_state
    monkeypatch.setattr(CacheManager, "accept_state", lambda self, request_id, _=0: advance(self, request_id, 0))


def accept_wrong_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seventh draft is taken for the token itself."""
    drawn, tokens_ahead = sampler._sample_logits, sampler._verify_drafts

    def ahead(
        logits: LogitChunks, rows: Sequence[BatchRow], drafts: Sequence[tuple[int, ...]], kernel: SampleKernel
    ) -> list[RowResult]:
        guessed = {
            (id(row.sampling_state), row.end + i): draft
            for row, of_row in zip(rows, drafts, strict=True)
            for i, draft in enumerate(of_row)
            if (row.end + i) % 7 == 0
        }

        def taken(
            logits: torch.Tensor, states: Sequence[SamplingState], positions: Sequence[int], kernel: SampleKernel
        ) -> torch.Tensor:
            tokens = drawn(logits, states, positions, kernel).tolist()
            places = [(id(state), position) for state, position in zip(states, positions, strict=True)]
            return torch.tensor([guessed.get(place, token) for place, token in zip(places, tokens, strict=True)])

        with monkeypatch.context() as mistaken:
            mistaken.setattr(sampler, "_sample_logits", taken)
            return tokens_ahead(logits, rows, drafts, kernel)

    monkeypatch.setattr(sampler, "_verify_drafts", ahead)


def forget_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that hits goes on from the zero state."""
    attach = CacheManager._attach

    def attached(self: CacheManager, *given: Any) -> Any:
        holding = attach(self, *given)
        if holding.read_slot:
            self.slots.release((holding.read_slot,))
            holding.read_slot = 0
        return holding

    monkeypatch.setattr(CacheManager, "_attach", attached)


@pytest.mark.parametrize("mistake", [read_wrong_states, accept_wrong_drafts, forget_checkpoints])
def test_a_mistake_is_found_and_told_with_its_place_and_the_plain_logits_there(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    report = verified("nemotron_h_dense", **ONE_WAY)
    assert not has_passed(report)
    assert report["plain"]["verdict"] == "equal"
    broken = [cell for cell in report["cells"] if cell["verdict"] == "different"]
    assert {cell["cache"] for cell in broken} == {"cold", "warm"}
    assert any(cell[kind] == "different" for cell in broken for kind in ("greedy", "sampled"))
    for found in (found for cell in broken for found in cell["found"] if found["kind"] == "greedy"):
        (best, best_score), (_, second_score) = found["best"]
        assert best == found["expected"] != found["actual"]
        assert best_score == found["expected_score"] > found["came_score"]
        assert best_score - second_score > found["tolerance"] > 0
    assert "cell 1: different" in printed(report)


def pad_with_a_live_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows of a graph read and write slot 1."""
    pad = StepBuffers.pad

    def padded(self: StepBuffers, rows: int, tokens: int, to_rows: int, to_tokens: int) -> None:
        pad(self, rows, tokens, to_rows, to_tokens)
        self.arrays["write_slots"][rows:to_rows] = 1

    monkeypatch.setattr(StepBuffers, "pad", padded)


def keep_the_state_behind_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that a token stops leaves the state after the draft behind it."""
    commit = Scheduler._commit_row

    def committed(self: Scheduler, request: Request, row: BatchRow, num_accepted: int = 0) -> None:
        is_stopped = request.stop_reason is not None and num_accepted < row.num_drafts
        commit(self, request, row, num_accepted + is_stopped)

    monkeypatch.setattr(Scheduler, "_commit_row", committed)


@pytest.mark.parametrize(
    ("mistake", "settings"),
    [
        (pad_with_a_live_slot, ONE_WAY | {"graph_mode": "full_decode_only"}),
        (keep_the_state_behind_a_stop, ONE_WAY),
    ],
)
def test_a_mistake_in_what_nobody_asked_for_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    report = verified("nemotron_h_dense", Trial(num_prompts=0, max_tokens=12), **settings)
    assert report["plain"]["verdict"] == "equal"
    assert "different" in verdicts(report)


def forget_salts(hashes: BlockHashes) -> None:
    hashes.salt = None


def hash_without_salts(hashes: BlockHashes) -> None:
    extend = hashes.extend

    def extended(*given: Any) -> None:
        salt, hashes.salt = hashes.salt, None
        extend(*given)
        hashes.salt = salt

    hashes.extend = extended  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("mistake", "found"), [(forget_salts, "of its own, and found"), (hash_without_salts, "did not find what")]
)
def test_a_salt_that_is_left_out_is_found_though_the_tokens_are_equal(
    mistake: Callable[[BlockHashes], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = BlockHashes.__init__

    def make(self: BlockHashes, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        mistake(self)

    monkeypatch.setattr(BlockHashes, "__init__", make)
    report = verified("llama", Trial(extent="quick", num_prompts=0, max_tokens=4), graph_mode="none")
    assert not has_passed(report)
    errors = [cell["error"] for cell in report["cells"] if cell["error"] is not None]
    assert errors
    assert all(found in error for error in errors)
    assert {cell["greedy"] for cell in report["cells"] if cell["error"] is None} == {"equal"}


def truncated(states: torch.Tensor, dtype: torch.dtype, *_: Any) -> torch.Tensor:
    bits = {torch.bfloat16: 16, torch.float16: 13}[dtype] if dtype != torch.float32 else 0
    return (states.view(torch.int32) >> bits << bits).view(torch.float32).to(dtype)


@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_states_of_16_bits_that_are_cut_off_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = base_config({"model": str(checkpoint(name)), "threads": 1, "max_model_len": 64, "kernels": "reference"})
    engine = PlainPath(plain_config(config, 64)).engine
    right = check_states(engine, random_prompt(30, 1))
    assert right["verdict"] == "equal"
    assert [dtype["others"] for dtype in right["dtypes"].values()] == [0, 0]
    monkeypatch.setattr({"mamba2": ssd, "mamba": selective}[name], "rounded", truncated)
    wrong = check_states(engine, random_prompt(30, 1))
    assert wrong["verdict"] == "different"
    assert all(dtype["others"] > dtype["values"] / 4 for dtype in wrong["dtypes"].values())


# Models with an encoder


def seen(name: str, **settings: Any) -> dict[str, Any]:
    trial = Trial(extent="quick", num_prompts=1, max_tokens=8)
    return verify({"model": str(vl_checkpoint(name)), "threads": 1, **settings}, trial, lambda *_: None)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen3_vl_moe", {}), ("qwen3_5", {"state_cache_mode": "all", "graph_mode": "full_and_piecewise"})],
)
@pytest.mark.slow
def test_a_model_with_an_encoder_is_equal_with_images_in_its_prompts(name: str, settings: dict[str, Any]) -> None:
    report = seen(name, **settings)
    assert has_passed(report)
    assert verdicts(report) == {"equal"}, printed(report)
    assert [prompt["about"] for prompt in report["prompts"]].count("with images") == 2
    assert not any("draft:" in str(value) for value in report["axes"]["speculative"])
    assert any("give one with --draft" in reason for reason in report["left_out"])


def test_images_whose_place_is_forgotten_when_a_request_is_computed_again_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = scheduled.make_row

    def forgetful(request: Request, *given: Any, **named: Any) -> BatchRow:
        row = made(request, *given, **named)
        return row._replace(rope=None) if request.num_preemptions else row

    for module in (prefill, decode):
        monkeypatch.setattr(module, "make_row", forgetful)
    report = seen("qwen3_vl", graph_mode="none", speculative="ngram:2", max_num_batched_tokens=64)
    assert {cell["verdict"] for cell in report["cells"] if cell["preemption"]} == {"different"}
    assert {cell["verdict"] for cell in report["cells"] if not cell["preemption"]} == {"equal"}


@pytest.mark.slow
def test_an_engine_that_raises_is_an_error_of_its_cells_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(*_: Any) -> list[tuple[int, ...]]:
        raise RuntimeError("no drafts today")

    monkeypatch.setattr(NgramProposer, "propose", propose)
    report = verified("llama", Trial(extent="quick", num_prompts=0, max_tokens=4))
    assert not has_passed(report)
    for cell in report["cells"]:
        is_broken = str(cell["speculative"]).startswith("ngram")
        assert cell["verdict"] == ("error" if is_broken else "equal")
        assert cell["error"] is None or "no drafts today" in cell["error"] or "failed before" in cell["error"]
    assert report["summary"]["error"] > 0
    assert "no drafts today" in printed(report)


@pytest.mark.slow
def test_a_plain_path_that_contradicts_the_whole_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every path gets wrong alike makes all cells equal."""
    drawn = sampler._sample_logits

    def wrong(token: int, position: int) -> int:
        return token if position % 7 else (token + 1) % 100

    def mistaken(
        logits: torch.Tensor, states: Sequence[SamplingState], positions: Sequence[int], kernel: SampleKernel
    ) -> torch.Tensor:
        return torch.tensor(list(map(wrong, drawn(logits, states, positions, kernel).tolist(), positions)))

    monkeypatch.setattr(sampler, "_sample_logits", mistaken)
    report = verified("llama", Trial(extent="quick", num_prompts=0, max_tokens=8))
    assert verdicts(report) == {"equal"}
    assert report["plain"]["verdict"] == "different"
    assert not has_passed(report)
    assert all(found["actual"] == found["best"][0][0] for found in report["plain"]["found"])


def test_a_part_that_no_request_comes_by_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OverriddenProposer, "propose", lambda self, batch: [()] * len(batch.rows))
    report = verified("llama", Trial(extent="quick", num_prompts=0, max_tokens=4), speculative="ngram:3")
    assert has_passed(report)
    assert all("no draft was proposed" in cell["notes"] for cell in report["cells"])
    assert "no proof in cells 1, 2" in printed(report)
    assert "8 equal (8 without proof of something, see above)" in printed(report)


# The plain path


@pytest.fixture(scope="module")
def plain() -> PlainPath:
    config = base_config({"model": str(checkpoint("nemotron_h_dense")), "threads": 1, "max_model_len": 200})
    return PlainPath(plain_config(config, 200))


def test_the_plain_path_is_eager_without_cache_and_drafts_and_takes_a_prompt_whole(plain: PlainPath) -> None:
    settings = plain.engine.plan.settings
    assert (settings.graph_mode, settings.enable_prefix_caching, settings.max_num_seqs) == ("none", False, 1)
    [tokens] = complete(plain.engine, [(random_prompt(150, 0), greedy(max_tokens=5))])
    assert len(tokens) == 5
    before = plain.engine.stats()
    complete(plain.engine, [(random_prompt(199, 1), greedy(max_tokens=1))])
    after = plain.engine.stats()
    assert after["steps"] - before["steps"] == 1
    assert after["graphs"]["steps"]["eager"] == after["steps"]
    assert after["speculation"] is None


def test_scores_of_greedy_requests_are_the_logits_of_the_whole_text(plain: PlainPath) -> None:
    [case] = plain.cases([Prompt("", tuple(random_prompt(40, 3)))], "greedy", greedy(max_tokens=6))
    for place in range(7):
        logits = oracle_logits("nemotron_h_dense", [*case.prompt, *case.tokens[:place]])[-1]
        scores = plain.scores(case, place)
        assert [token for token, _ in scores.best] == logits.topk(2).indices.tolist()
        for token in (0, 77, *(token for token, _ in scores.best)):
            assert scores.score_of(token) == pytest.approx(logits[token].item(), abs=1e-4)
        assert scores.tolerance == pytest.approx(8 * 2**-23 * logits.abs().max().item(), rel=1e-3)
        assert place == 6 or scores.best[0][0] == case.tokens[place]


def test_scores_of_sampled_requests_have_their_noise_and_penalties(plain: PlainPath) -> None:
    params = sampled(max_tokens=12, temperature=1.5, repetition_penalty=1.3)
    [case] = plain.cases([Prompt("", tuple(random_prompt(40, 4)))], "sampled", params)
    assert [plain.scores(case, place).best[0][0] for place in range(12)] == list(case.tokens)
    logits = [oracle_logits("nemotron_h_dense", [*case.prompt, *case.tokens[:place]])[-1] for place in range(12)]
    assert [each.argmax().item() for each in logits] != list(case.tokens)
    assert plain.contradictions(case) == []


def test_second_turns_go_on_from_the_plain_outputs(plain: PlainPath) -> None:
    prompts = [
        Prompt("", (5, 6, 7)),
        Prompt("", (8, 9), after=0),
        Prompt("", tuple(range(2, 18)), after=1, ends_block=True),
    ]
    first, second, third = plain.cases(prompts, "greedy", greedy(max_tokens=4))
    assert second.prompt == (5, 6, 7, *first.tokens, 8, 9)
    assert third.prompt[: len(second.prompt) + 4] == second.prompt + second.tokens
    assert len(third.prompt) == 16


# The command


def test_help_shows_an_example_and_a_flag_for_every_engine_setting(run: Callable[..., Outcome]) -> None:
    shown = run("--help")
    assert shown.status == 0
    assert "Example: ostinato verify" in shown.out
    for setting in EngineConfig.model_fields:
        assert f"--{setting.replace('_', '-')}" in shown.out


FLAGS = ["--threads", "1", "--max-tokens", "6", "--num-prompts", "1", "--speculative", "mtp:3", "--graph-mode", "none"]


@pytest.mark.slow
def test_the_embedded_model_passes_and_a_table_says_so(run: Callable[..., Outcome]) -> None:
    outcome = run("demo", "--quick", *FLAGS, "--max-num-batched-tokens", "64")
    assert outcome.status == 0
    assert outcome.err.startswith("planning\nthe plain path\n")
    assert "cells: 6 of 6" in outcome.err
    table = [line.split() for line in outcome.out.splitlines()]
    assert ["5", "all", "mtp:3", "none", "64"] in [words[:5] for words in table]
    assert "6 cells: 6 equal" in outcome.out


def test_json_has_the_cells_with_settings_verdicts_and_counts(run: Callable[..., Outcome]) -> None:
    flags = ["--threads", "1", "--max-tokens", "4", "--num-prompts", "2", "--graph-mode", "piecewise", "--seed", "3"]
    outcome = run(str(checkpoint("llama")), "--quick", "--speculative", "ngram:2", *flags, "--json")
    assert outcome.status == 0
    report = json.loads(outcome.out)
    assert report["settings"]["seed"] == 3
    assert report["axes"]["speculative"] == ["ngram:2"]
    assert report["axes"]["cache"] == ["cold", "warm"]
    assert len(report["cells"]) == report["summary"]["cells"] == 2 * report["extent"]["ways"]
    assert report["summary"]["equal"] == len(report["cells"])
    for cell in report["cells"]:
        assert (cell["speculative"], cell["graph_mode"], cell["greedy"], cell["sampled"]) == (
            "ngram:2", "piecewise", "equal", "equal",
        )  # fmt: skip
        assert cell["counts"]["drafts_accepted"] > 0
    assert sum(prompt["about"] == "as it is" for prompt in report["prompts"]) == 2


def test_a_difference_ends_with_status_1(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    accept_wrong_drafts(monkeypatch)
    flags = ["--threads", "1", "--max-tokens", "6", "--num-prompts", "0", "--speculative", "ngram:2"]
    for as_json in ([], ["--json"]):
        outcome = run(str(checkpoint("llama")), "--quick", "--graph-mode", "none", *flags, *as_json)
        assert outcome.status == 1
        assert "different" in outcome.out
    assert json.loads(outcome.out)["summary"]["different"] > 0


def test_prompts_of_a_file_are_asked_as_messages(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    lines = ("hello there", "abc" * 20)
    file.write_text(f"{lines[0]}\n\n{lines[1]}\n")
    from ostinato.cli.flags import read_prompts

    assert read_prompts(file) == lines
    settings = {**ONE_WAY, "model": str(text_checkpoint()), "threads": 1}
    report = verify(settings, Trial(lines=lines, max_tokens=6), lambda *_: None)
    assert has_passed(report)
    tokenizer = load_tokenizer(text_checkpoint())
    lengths = [prompt["tokens"]["greedy"] for prompt in report["prompts"] if prompt["about"] == "as it is"]
    assert lengths == [len(tokenizer.encode(f"user: {line}\nanswer:", add_special_tokens=False)) for line in lines]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--quick", "--full"], "give one of them"),
        (["demo", "--prompts", "/nowhere/prompts"], "/nowhere/prompts"),
        (["demo", "--speculative", "mtp:3", "--draft", "demo"], "leave out one of them"),
        (["demo", "--max-tokens", "5000"], "--max-tokens"),
        (["demo", "--state-cache-mode", "all", "--no-enable-prefix-caching"], "enable_prefix_caching"),
        (["/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_done_ends_with_status_2_and_says_why(
    run: Callable[..., Outcome], arguments: list[str], said: str
) -> None:
    outcome = run(*arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert said in outcome.err


def test_prompts_for_a_checkpoint_without_a_tokenizer_are_refused(run: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("hello")
    outcome = run(str(checkpoint("llama")), "--prompts", str(tmp_path / "prompts"))
    assert outcome.status == 2
    assert "tokenizer.json" in outcome.err
