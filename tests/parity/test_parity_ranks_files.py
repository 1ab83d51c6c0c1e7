"""What ranks have in memory goes to files and to other engines, and comes back: tokens are transformers'."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ostinato.engine.core import EngineCore
from ostinato.errors import ForeignExport, RankError
from tests.parity.test_parity_files import LAST, check_coming_back, filing_engine, from_files, quick_reading
from tests.parity.test_parity_moves import AT, moves, pair, wander
from tests.parity.test_parity_ranks import is_running, pids
from tests.support.parity import (
    PROMPT,
    add,
    cached,
    complete,
    decided_case,
    make_engine,
    sampled_case,
)

__all__ = ["quick_reading"]


@pytest.mark.usefixtures("quick_reading")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("nemotron_h", 2),
        ("gemma3_text", 2),
        *(
            pytest.param(*each, marks=pytest.mark.ranks)
            for each in (("llama", 4), ("falcon_mamba", 3), ("kimi_linear", 2))
        ),
    ],
)
def test_a_prompt_hits_files_of_ranks_after_a_restart_and_gives_the_same_tokens(
    name: str, ranks: int, tmp_path: Path
) -> None:
    case = decided_case(name, PROMPT)
    for hit in (0, LAST):
        engine = filing_engine(name, tmp_path, tensor_parallel_size=ranks)
        assert cached(complete(engine, case)) == from_files(engine) == hit
        engine.close()
    alone = filing_engine(name, tmp_path)  # has other bytes in a block
    assert cached(complete(alone, case)) == 0
    alone.close()


@pytest.mark.ranks
@pytest.mark.usefixtures("quick_reading")
@pytest.mark.parametrize(("name", "mode"), [("qwen3_next", "align"), ("lfm2", "all")])
def test_what_made_room_on_all_ranks_comes_back_while_others_run(name: str, mode: str, tmp_path: Path) -> None:
    engine = filing_engine(name, tmp_path, state_cache_mode=mode, max_num_seqs=2, tensor_parallel_size=2)
    check_coming_back(engine, name, num_slots=9)
    engine.close()


def closed(*engines: EngineCore) -> None:
    for engine in engines:
        engine.close()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("nemotron_h", {}),
        ("qwen3", {"tensor_parallel_size": 4}),
        ("gemma3_text", {}),
        ("nemotron_h_head", {"speculative": "mtp:3", "speculative_adaptive": "off"}),
    ],
)
def test_a_request_that_wanders_between_engines_of_ranks_carries_what_all_have(
    name: str, settings: dict[str, Any]
) -> None:
    engines = pair(name, **{"tensor_parallel_size": 2, **settings})
    wander(engines, [decided_case(name, PROMPT), sampled_case(name, PROMPT)], AT if not settings else (1, 2, 4, 7))
    for engine in engines:
        assert moves(engine)["carried_tokens"] > 0 == moves(engine)["recomputed_tokens"]
    closed(*engines)


@pytest.mark.ranks
def test_an_engine_of_another_number_of_ranks_refuses_what_comes() -> None:
    engines = [make_engine("nemotron_h", tensor_parallel_size=ranks) for ranks in (2, 1)]
    here, there = engines
    output = add(here, decided_case("nemotron_h", PROMPT))
    here.step()
    exported = here.export_request(output.request_id)
    assert exported is not None
    with pytest.raises(ForeignExport, match="tensor_parallel_size is 2 there and 1 here"):
        there.import_request(exported)
    closed(*engines)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sent", "told"), [(signal.SIGSTOP, "has not answered for 0.5 s"), (signal.SIGKILL, "ended by signal 9")]
)
def test_a_rank_that_does_not_give_its_bytes_ends_the_engine_with_a_message(
    sent: signal.Signals, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.distributed.rank_messages.RANK_TIMEOUT", 0.5)
    engine = make_engine("llama", tensor_parallel_size=2)
    processes = pids(engine)
    output = add(engine, decided_case("llama", 47))
    engine.step()
    os.kill(processes[0], sent)
    with pytest.raises(RankError, match=told):
        engine.export_request(output.request_id)
    assert not any(is_running(pid) for pid in processes)
    engine.close()
