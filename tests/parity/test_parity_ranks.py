"""Ranks that are processes give the tokens and logits of transformers, as one process does; and end with each other.

`make ranks` runs the tests marked `ranks` too: all other recipes, with every number of ranks up to 4.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ostinato import LLM, SamplingParams
from ostinato.config import EngineConfig
from ostinato.distributed.leader import LeaderRank
from ostinato.distributed.rank_messages import RankReady, RankStart, WriteMemory
from ostinato.engine.core import EngineCore
from ostinato.errors import ConfigError, ModelError, RankError
from ostinato.models.checkpoint import load_spec, model_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.memory.activations import PROMPT_POSITIONS
from ostinato.plan.plan import make_plan
from ostinato.plan.tensor_parallel import Rank, sharding_problems
from ostinato.sampling import sampler
from tests.models.test_ranks import CASES
from tests.parity.test_parity_speculation import GRAPHS, Cell, serve
from tests.support import vision_parity
from tests.support.checkpoints import checkpoint, random_prompt, recipe
from tests.support.parity import (
    PROMPT,
    add,
    cached,
    check,
    complete,
    decided_case,
    make_engine,
    run,
    run_with_preemptions,
    sampled_case,
    shrink,
    warm,
)
from tests.support.patience import PATIENCE
from tests.support.recipes import HEADED
from tests.support.speculation import Watched, drafting_engine
from tests.support.vision_parity import images
from tests.support.vl_models import VL_RECIPES

QUICK = [("llama", 2), ("nemotron_h", 2)]
VL_QUICK = ["qwen3_5_moe"]


def in_ranks(name: str, ranks: int, **settings: object) -> EngineCore:
    return make_engine(name, tensor_parallel_size=ranks, **settings)


def pids(engine: EngineCore) -> list[int]:
    leader = engine._leader
    assert isinstance(leader, LeaderRank)
    return leader.pids


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def marked(quick: list[tuple[str, int]]) -> pytest.MarkDecorator:
    """All cases, those that are not `quick` for `make ranks` alone."""
    cases = [pytest.param(*case, marks=() if case in quick else pytest.mark.ranks) for case in CASES]
    return pytest.mark.parametrize(("name", "ranks"), cases)


@pytest.mark.parametrize("name", ["nemotron_h", "llama"])
@pytest.mark.slow
def test_ranks_take_a_step_ahead_and_give_the_tokens_of_transformers(name: str) -> None:
    """The other ranks get the tokens that the first one has sampled and not yet read."""
    engine = in_ranks(name, 2, overlap="on", max_num_batched_tokens=64)
    cases = [decided_case(name, length) for length in (47, 3, 81)] + [sampled_case(name, 47)]
    outputs = [add(engine, case) for case in cases]
    run(engine)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)
    assert engine.stats()["steps_ahead"] > 0
    engine.close()


@marked(QUICK)
def test_ranks_give_the_tokens_of_transformers(name: str, ranks: int) -> None:
    """In chunks, together, from graphs, from the prefix cache, sampled, and after their memory was taken."""
    engine = in_ranks(name, ranks, max_num_batched_tokens=64)
    case, sampled = decided_case(name, PROMPT), sampled_case(name, 47)
    outputs = [add(engine, case, prompt_logprobs=True), add(engine, sampled)]
    run(engine)
    check(case, outputs[0])
    check(sampled, outputs[1])
    assert cached(complete(engine, case)) >= PROMPT // 2
    again = add(engine, case, salt="another")
    run_with_preemptions(engine, [again])
    check(case, again)
    steps = engine.stats()["graphs"]["steps"]
    assert steps["full"] > 0
    assert steps["piecewise"] > 0
    processes = pids(engine)
    engine.close()
    assert len(processes) == ranks - 1
    assert not any(is_running(pid) for pid in processes)


@marked(QUICK[-1:])
def test_ranks_give_them_with_drafts_and_without_graphs(name: str, ranks: int) -> None:
    engine = in_ranks(name, ranks, speculative="ngram:3", graph_mode="none", speculative_adaptive="off")
    try:
        case = decided_case(name, 47)
        warm(engine, case.prompt)
        complete(engine, case)
    finally:
        engine.close()


DRAFTS = [
    *(
        Cell(name, "all", "mtp", 3, "full_and_piecewise")
        for name in HEADED
        if not sharding_problems(model_spec(recipe(name).to_dict()), 2)
    ),
    Cell("nemotron_h", "align", "other", 2, "full_and_piecewise"),
    Cell("llama", "none", "itself", 3, "none"),
    Cell("llama", "none", "other", 2, "full_and_piecewise"),
]
"""The last draft model is whole on each rank, for two cannot share it."""
QUICK_DRAFTS = ("nemotron_h_head",)


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if cell.name in QUICK_DRAFTS else pytest.mark.ranks) for cell in DRAFTS],
    ids=lambda cell: f"{cell.name}-{cell.method}",
)
def test_drafts_with_weights_are_those_of_all_ranks_and_change_nothing(cell: Cell) -> None:
    """By the model's head and by a second model: in chunks, preempted, from the prefix cache, greedy and sampled."""
    engine = drafting_engine(
        cell.name, cell.speculative, state_cache_mode=cell.mode, graph_mode=cell.graph_mode, tensor_parallel_size=2,
        **GRAPHS[cell.graph_mode],
    )  # fmt: skip
    try:
        watched = Watched(engine)
        serve(engine, cell)
        assert any(accepted for _, accepted in watched.verdicts())
        if cell.method == "itself":
            assert all(accepted == given for given, accepted in watched.verdicts())
    finally:
        engine.close()


@marked([])
def test_ranks_with_8_bit_weights_give_the_tokens_of_one_process(name: str, ranks: int) -> None:
    found = []
    for of in (1, ranks):
        engine = make_engine(name, tensor_parallel_size=of, quantization="int8", max_num_batched_tokens=64)
        params = [
            SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True) for temperature in (0, 1)
        ]
        outputs = [engine.output(engine.add_request(random_prompt(90, 3), each)) for each in params]
        run(engine)
        engine.close()
        found.append([each.outputs[0].token_ids for each in outputs if each is not None])
    assert found[0] == found[1]


FILES: dict[str, tuple[str, dict[str, str]]] = {
    "mamba2": ("Q8_0", {}),
    "granitehybrid": ("Q8_0", {}),
    "qwen35 with a head": ("F32", {"speculative": "mtp:2"}),
    "qwen35moe of experts": ("F32", {}),
}
"""GGUF architectures, each with a type that two ranks can share, and what makes drafts."""


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name == "mamba2" else pytest.mark.ranks) for name in FILES]
)
@pytest.mark.slow
def test_ranks_answer_from_a_gguf_file_as_one_process_does(architecture: str, tmp_path: Path) -> None:
    """With its tokenizer and its template, greedy and sampled."""
    pytest.importorskip("gguf", reason="the package that writes GGUF files comes with the test extra")
    from tests.support.gguf_files import write_gguf

    kind, drafts = FILES[architecture]
    path = write_gguf(tmp_path / "model.gguf", architecture, kind)
    settings: dict[str, Any] = {"dtype": "float32", "threads": 1, "cache_memory": "16MiB", "max_num_seqs": 4, **drafts}
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=16, ignore_eos=True) for temperature in (0, 0.7)
    ]
    found = []
    for ranks in (1, 2):
        with LLM(str(path), tensor_parallel_size=ranks, **settings) as llm:
            outputs = [llm.chat([{"role": "user", "content": "hello world"}], each)[0] for each in params]
            outputs += llm.generate(["the 12"], params[1])
        found.append([each.outputs[0].token_ids for each in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in VL_QUICK else pytest.mark.ranks) for name in VL_RECIPES]
)
def test_ranks_see_images(name: str) -> None:
    """Each encodes them: two in one prompt, one of which a later turn has again; in chunks, and after a preemption."""
    engine = vision_parity.make_engine(name, tensor_parallel_size=2, max_num_batched_tokens=48)
    try:
        first = vision_parity.decided_case(name, (5, images((4, 6), (8, 4)), 9))
        second = vision_parity.decided_case(name, (7, images((4, 6)), 5), before=first)
        vision_parity.serve(engine, first, preempt_at=(3, 20))
        vision_parity.serve(engine, second)
    finally:
        engine.close()


WAYS = pytest.mark.parametrize("shares_memory", [True, pytest.param(False, marks=pytest.mark.ranks)])
"""What ranks give each other goes through memory, or over a process group where there is none."""


def connect(monkeypatch: pytest.MonkeyPatch, shares_memory: bool) -> None:
    if not shares_memory:
        monkeypatch.setattr("ostinato.distributed.shared_memory.has_shared_memory", lambda: False)


@pytest.mark.slow
def test_ranks_pack_their_parts_of_a_checkpoint_and_a_hit_has_the_bits_of_the_cold_prompt() -> None:
    settings = {"ssm_checkpoint_dtype": "int8", "deterministic": True, "graph_mode": "none", "max_num_seqs": 3}
    engine = make_engine("nemotron_h", tensor_parallel_size=2, state_block_size=32, **settings)
    shrink(engine, num_blocks=200, num_slots=6, num_packed=24)
    outputs = []
    for seed in (0, 1, 2, 3, 0):
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
        outputs.append(engine.output(engine.add_request(random_prompt(90, seed), params)))
        run(engine)
    cold, *_, again = outputs
    assert cold is not None
    assert again is not None
    assert cached(again) == 80
    assert engine.stats()["prefix_cache"]["unpacked_checkpoints"] > 0
    assert again.outputs[0].logprobs == cold.outputs[0].logprobs
    engine.close()


@pytest.mark.ranks
def test_ranks_without_shared_memory_give_the_tokens_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, shares_memory=False)
    engine = in_ranks("nemotron_h", 2, max_num_batched_tokens=64)
    try:
        outputs = [add(engine, case) for case in (decided_case("nemotron_h", PROMPT), sampled_case("nemotron_h", 47))]
        run(engine)
        check(decided_case("nemotron_h", PROMPT), outputs[0])
        check(sampled_case("nemotron_h", 47), outputs[1])
    finally:
        engine.close()


@WAYS
def test_a_rank_that_dies_ends_the_engine_with_a_message(shares_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, shares_memory)
    with LLM(str(checkpoint("llama")), tensor_parallel_size=2, dtype="float32", max_model_len=256, threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        engine = llm.engine
        output = engine.output(engine.add_request([5, 6, 7], params))
        engine.step()
        os.kill(pids(engine)[0], signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 of 2 ranks .*ended by signal 9"):
            run(engine)
        assert output is not None
        assert isinstance(output.error, RankError)
        with pytest.raises(RankError, match="rank 1 of 2 ranks"):
            llm.generate([[5, 6, 7]], params)


@pytest.mark.slow
def test_what_interrupts_a_step_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = in_ranks("llama", 2)
    processes = pids(engine)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.runner.graphs, "run", interrupt)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=3))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not any(is_running(pid) for pid in processes)
    assert not engine.scheduler.has_unfinished


@pytest.mark.slow
def test_an_error_between_two_chunks_of_logits_ends_its_request_and_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks compute the chunks that are left, and so must the first."""
    engine = in_ranks("llama", 2)
    score, calls = sampler.score_tokens, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("broken")
        return score(*args)

    monkeypatch.setattr(sampler, "score_tokens", failing)
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    output = engine.output(engine.add_request(list(range(1, 4 * PROMPT_POSITIONS)), params))
    run(engine)
    assert output is not None
    assert str(output.error) == "broken"
    complete(engine, decided_case("llama", PROMPT))
    engine.check_ranks()
    engine.close()


def waiting_engine(monkeypatch: pytest.MonkeyPatch, patience: float, shares_memory: bool) -> EngineCore:
    """An engine with a request, whose other rank lives and does nothing."""
    connect(monkeypatch, shares_memory)
    monkeypatch.setattr("ostinato.distributed.rank_messages.RANK_TIMEOUT", patience)
    engine = in_ranks("llama", 2)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=3))
    os.kill(pids(engine)[0], signal.SIGSTOP)
    return engine


@WAYS
@pytest.mark.slow
def test_a_rank_that_lives_and_does_not_come_ends_the_engine_with_a_message(
    shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = waiting_engine(monkeypatch, 0.5, shares_memory)
    processes = pids(engine)
    with pytest.raises(RankError, match=r"another of the 2 ranks .* lives, and has not answered for 0.5 s"):
        run(engine)
    assert not any(is_running(pid) for pid in processes)
    with pytest.raises(RankError, match="has not answered"):
        engine.check_ranks()


@pytest.mark.slow
def test_a_rank_that_lives_and_takes_nothing_ends_the_engine_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given more than lies in a pipe."""
    engine = waiting_engine(monkeypatch, 0.5, True)
    processes = pids(engine)
    assert engine._leader is not None
    with pytest.raises(RankError, match=r"another of the 2 ranks .* lives, and has not answered for 0.5 s"):
        engine._leader.write([WriteMemory("block", 0, bytes(2**24))])
    assert not any(is_running(pid) for pid in processes)


@pytest.mark.slow
def test_ranks_end_where_their_engine_cannot_begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[int] = []
    close = LeaderRank.close

    def noted(leader: LeaderRank, at_once: bool = False) -> None:
        started.extend(leader.pids)
        close(leader, at_once)

    monkeypatch.setattr(LeaderRank, "close", noted)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="cannot be used"):
        in_ranks("llama", 2, cache_dir=str(tmp_path / "file"))
    assert started
    assert not any(is_running(pid) for pid in started)


@pytest.mark.slow
def test_ranks_end_where_an_engine_that_closes_is_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = in_ranks("llama", 2, cache_dir=str(tmp_path))
    processes = pids(engine)
    directory = engine.scheduler.cache.store.files.directory
    complete(engine, decided_case("llama", PROMPT))

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, "flush", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert not any(is_running(pid) for pid in processes)
    assert directory._writer is None


@WAYS
def test_ctrl_c_ends_all_ranks_while_one_is_waited_for(shares_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = waiting_engine(monkeypatch, PATIENCE, shares_memory)
    processes = pids(engine)
    monkeypatch.setattr(engine.runner.graphs, "run", interrupted_later(engine.runner.graphs.run))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(is_running(pid) for pid in processes)


@pytest.mark.slow
def test_ctrl_c_ends_a_command_whose_other_rank_does_not_come() -> None:
    flags = ["--tensor-parallel-size", "2", "--threads", "1", "--cache-memory", "16MiB", "--max-num-seqs", "2"]
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.argv[1:] = {['generate', 'hello', *flags]!r}; from ostinato.__main__ import main; main()"
    )
    command = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + PATIENCE
        while not (ranks := [child for child in children(command.pid) if is_rank(child)]):
            assert time.monotonic() < end
            time.sleep(0.05)
        for rank in ranks:
            os.kill(int(rank), signal.SIGSTOP)
        command.send_signal(signal.SIGINT)
        _, told = command.communicate(timeout=PATIENCE)
    finally:
        command.kill()
    assert (command.returncode, "Traceback" in told) == (130, False), told
    assert not any(is_running(int(rank)) for rank in ranks)


def interrupted_later(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, which gets the signal of Ctrl-C some time after it has begun."""

    def call(*arguments: Any) -> Any:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        return forward(*arguments)

    return call


@pytest.mark.parametrize("is_noticed", [False, True])
@pytest.mark.slow
def test_a_rank_that_dies_while_ranks_come_together_is_not_waited_for(
    is_noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[LeaderRank] = []
    spawn = LeaderRank._spawn

    def noted(leader: LeaderRank, start: RankStart) -> None:
        spawned.append(leader)
        spawn(leader, start)

    def alone(*_: object) -> None:
        os.kill(spawned[0].pids[0], signal.SIGKILL)
        if is_noticed:
            raise RuntimeError("connection refused")
        threading.Event().wait()

    monkeypatch.setattr(LeaderRank, "_spawn", noted)
    monkeypatch.setattr("ostinato.distributed.shared_memory.has_shared_memory", lambda: False)
    monkeypatch.setattr("ostinato.distributed.process_group.RankProcessGroup", alone)
    with pytest.raises(RankError, match=r"rank 1 of 2 ranks .*ended by signal 9"):
        in_ranks("llama", 2)


@pytest.mark.slow
def test_a_rank_that_waits_for_the_others_ends_with_the_first(tmp_path: Path) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), tensor_parallel_size=2, dtype="float32", device="cpu")
    spec = load_spec(config)
    leader = object.__new__(LeaderRank)
    leader._processes, leader._connections = [], []
    meeting = tmp_path / "meeting"
    leader._spawn(RankStart(make_plan(config, spec, detect("cpu")), spec, None, None, Rank(1, 2), meeting))
    assert leader._connections[0].recv() == RankReady()
    leader._connections[0].close()
    assert leader._processes[0].wait(300) == 0  # it would wait for ten minutes


@pytest.mark.slow
def test_a_stopped_rank_ends_when_the_first_one_is_killed() -> None:
    """While it is stopped: what watches its connection would wait to be continued."""
    program = (
        "import sys; from ostinato import LLM; "
        f"llm = LLM({str(checkpoint('llama'))!r}, tensor_parallel_size=2, dtype='float32', max_model_len=64, threads=1,"
        " cache_memory='4MiB'); "
        "print(*llm.engine._leader.pids, flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with first:
        try:
            assert first.stdout is not None
            rank = int(first.stdout.readline())
            end_of_rank = os.pidfd_open(rank)  # tells of this process alone, also where nobody has its status
            signal.pidfd_send_signal(end_of_rank, signal.SIGSTOP)
            end = time.monotonic() + PATIENCE
            while "State:\tT" not in Path(f"/proc/{rank}/status").read_text():
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            first.kill()
    try:
        ended, _, _ = select.select([end_of_rank], [], [], PATIENCE)
        assert ended
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(end_of_rank, signal.SIGKILL)
        os.close(end_of_rank)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_loaded_leaves_no_process(tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.layers.1.mlp.down_proj.weight")
    save_file(weights, tmp_path / "model.safetensors")
    before = children()
    with pytest.raises(ModelError, match=r"missing \(1\): model.layers.1.mlp.down_proj.weight"):
        LLM(str(tmp_path), tensor_parallel_size=2)
    assert children() <= before


def is_rank(pid: str) -> bool:
    """Whether the program of a rank has begun there."""
    with suppress(OSError):
        return b"ostinato.distributed.rank_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def children(parent: int | None = None) -> set[str]:
    """Processes of another one, or of this one."""
    parent = os.getpid() if parent is None else parent
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if f"PPid:\t{parent}\n" in status.read_text():
                found.add(status.parent.name)
    return found
