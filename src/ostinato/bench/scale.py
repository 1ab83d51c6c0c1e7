"""Growth of costs: of a step with depth and rows, and of its bookkeeping with what the scheduler keeps.

Bookkeeping is measured on the real scheduler and the real cache, with results that no model computed: a step's
schedule and update, beside many cached blocks or many waiting requests. Neither may make a step longer. Its time is
that of the processor, which other work on the machine does not lengthen.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count

from ostinato.bench.engine_driver import check_lone_steps, with_room
from ostinato.bench.report import BenchReport, Column, ProgressCallback, Table, engine_facts, engine_lines
from ostinato.bench.statistics import spread
from ostinato.config import EngineConfig
from ostinato.json_io import JsonObject
from ostinato.kv_cache.checkpoints import PrefixCachePolicy
from ostinato.kv_cache.manager import CacheManager
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import Plan, make_plan
from ostinato.scheduler.batch import Batch, RowResult, StepResult
from ostinato.scheduler.limits import SchedulerLimits
from ostinato.scheduler.request import Request, StopConditions
from ostinato.scheduler.scheduler import Scheduler

BLOCK = 16
PROMPT_BLOCKS = 64
"""Blocks of each prompt that fills the prefix cache."""
ROWS = 8
"""Rows that decode while bookkeeping is measured."""
STEPS = 200
"""Steps of each measurement of bookkeeping."""
TURN = 10
"""Steps of an engine in its turn."""
LONGEST = 2**12
"""Tokens of the longest request: no row ends while it is measured."""
VOCABULARY = 2**17
ENGINE_STEPS = 32
"""Steps of a round on the engine."""

COLUMNS = (
    Column("cost", "cost", is_text=True),
    Column("by", "by", is_text=True),
    Column("number", "number", "count"),
    Column("median", "seconds.median", lambda seconds: f"{seconds * 1e6:,.1f} us"),
    Column("min", "seconds.min", lambda seconds: f"{seconds * 1e6:,.1f} us"),
    Column("growth", "growth", "times", help="its median over that of the smallest number"),
    Column("order", "order", "n^{:.2f}", help="the exponent that this growth would have"),
    Column("expected", "expected", is_text=True),
)


@dataclass(frozen=True)
class ScaleBench:
    """Numbers that each cost is measured at, ascending."""

    depths: tuple[int, ...]
    rows: tuple[int, ...]
    cached_blocks: tuple[int, ...]
    waiting: tuple[int, ...]
    max_num_seqs: tuple[int, ...]
    rounds: int


class FakeEngine:
    """The scheduler over a cache of `num_blocks`, and a runner that knows every result."""

    def __init__(self, num_blocks: int, max_num_seqs: int = ROWS) -> None:
        self._names = count()
        limits = SchedulerLimits(max_num_seqs, 4096, LONGEST)
        # A hybrid: blocks, and slots for the states of the running requests and of a checkpoint per prompt.
        num_slots = 2 + 2 * max_num_seqs + num_blocks // PROMPT_BLOCKS
        cache = CacheManager(num_blocks + 1 + max_num_seqs * LONGEST // BLOCK, num_slots, BLOCK)
        self.scheduler = Scheduler(limits, cache, PrefixCachePolicy(True, "all", BLOCK * PROMPT_BLOCKS))
        self._random = random.Random(0)

    def add(self, num_tokens: int, max_tokens: int) -> None:
        """Add a request with a prompt of random tokens."""
        prompt = self._random.choices(range(VOCABULARY), k=num_tokens)
        self.scheduler.add(Request(f"r{next(self._names)}", prompt, StopConditions(max_tokens)))

    def step(self) -> Batch:
        """Run a step, and return its rows."""
        batch = self.scheduler.schedule()
        self.scheduler.update(_results(batch))
        return batch

    def decode(self, rows: int = ROWS) -> None:
        """Bring `rows` requests, which do not end, to where each has computed its prompt."""
        for _ in range(rows):
            self.add(BLOCK, LONGEST - BLOCK)
        while self.step().num_decode_rows < rows:
            pass


def _results(batch: Batch) -> StepResult:
    """Return the results of a step: the token 1 for each row that samples."""
    return StepResult(tuple(RowResult(row.request_id, (1,) if row.samples else ()) for row in batch.rows))


def filled_with_blocks(num_blocks: int) -> FakeEngine:
    """Return an engine whose prefix cache has `num_blocks` blocks, with rows that decode beside them."""
    engine = FakeEngine(num_blocks)
    for _ in range(max(1, num_blocks // PROMPT_BLOCKS)):
        engine.add(PROMPT_BLOCKS * BLOCK, 1)
    while engine.scheduler.has_unfinished:
        engine.step()
    engine.decode()
    return engine


def filled_with_requests(num_waiting: int) -> FakeEngine:
    """Return an engine whose rows are all taken, and `num_waiting` requests wait for one."""
    engine = FakeEngine(0)
    engine.decode()
    for _ in range(num_waiting):
        engine.add(BLOCK, 1)
    return engine


def scale(settings: JsonObject, bench: ScaleBench, say: ProgressCallback) -> BenchReport:
    """Measure each cost at each number."""
    check_lone_steps(settings)
    results: list[JsonObject] = []
    for by, numbers, fill in (
        ("cached blocks", bench.cached_blocks, filled_with_blocks),
        ("waiting requests", bench.waiting, filled_with_requests),
    ):
        engines = {}
        for number in numbers:
            say(f"bookkeeping beside {number:,} {by}")
            engines[number] = fill(number)
        for number, seconds in step_seconds(engines).items():
            results.append(_row("bookkeeping", by, number, seconds, "n^0"))
    for waiting in bench.waiting:
        say(f"{waiting:,} prompts through the scheduler")
        results.append(_row("each prompt", "prompts", waiting, [prompt_seconds(waiting)], "n^0"))
    for number, seconds in plan_seconds(settings, bench.max_num_seqs, bench.rounds, say):
        results.append(_row("plan", "max_num_seqs", number, seconds, "n^0"))
    config, plan, measured_steps = _engine_steps(settings, bench, say)
    results += measured_steps
    _add_orders(results)
    data = {**engine_facts("scale", config, plan, **asdict(bench)), "results": results}
    lines = engine_lines(data, f"steps of {ROWS} rows for bookkeeping, {STEPS} each")
    return BenchReport(data, lines, [Table(COLUMNS, results)])


def step_seconds(engines: Mapping[int, FakeEngine]) -> dict[int, list[float]]:
    """Return the seconds of the STEPS decode steps of each engine's bookkeeping.

    The engines take turns, some steps each, as the speed of a processor changes. A turn's first step is not counted: it
    reads what the others drove out of the processor's caches.
    """
    seconds: dict[int, list[float]] = {number: [] for number in engines}
    for _ in range(STEPS // TURN):
        for number, engine in engines.items():
            for step in range(TURN + 1):
                begin = time.thread_time()
                batch = engine.step()
                if step:
                    seconds[number].append(time.thread_time() - begin)
                assert batch.num_decode_rows == len(batch.rows) == ROWS, "a decode step has every row"
    return seconds


def prompt_seconds(prompts: int) -> float:
    """Return the seconds that each of `prompts` short prompts takes from its arrival to its end."""
    engine = FakeEngine(0, max_num_seqs=256)
    begin = time.thread_time()
    for _ in range(prompts):
        engine.add(BLOCK, 1)
    while engine.scheduler.has_unfinished:
        engine.step()
    return (time.thread_time() - begin) / prompts


def plan_seconds(
    settings: JsonObject, numbers: Sequence[int], rounds: int, say: ProgressCallback
) -> Iterator[tuple[int, list[float]]]:
    """Yield each value of max_num_seqs with the seconds that a plan with it takes, in each round."""
    config, device = EngineConfig(**settings), replace(detect("cpu"), memory_bytes=2**44)
    spec = load_spec(config)
    for number in numbers:
        say(f"plan for {number:,} requests")
        asked = config.with_settings(max_num_seqs=number, max_model_len=256)
        seconds: list[float] = []
        for _ in range(rounds):
            begin = time.thread_time()
            make_plan(asked, spec, device)
            seconds.append(time.thread_time() - begin)
        yield number, seconds


def _engine_steps(
    settings: JsonObject, bench: ScaleBench, say: ProgressCallback
) -> tuple[EngineConfig, Plan, list[JsonObject]]:
    """Measure decode steps by depth, with one row, and by rows, with short prompts."""
    from ostinato.bench.step_timing import make_decode_steps, seconds_of
    from ostinato.engine.core import EngineCore

    longest = max((*bench.depths, BLOCK)) + 1
    config = with_room(settings, max_num_seqs=max((*bench.rows, 1)), max_model_len=longest)
    engine = EngineCore(config)
    results: list[JsonObject] = []
    for by, numbers in (("depth", bench.depths), ("rows", bench.rows)):
        for number in numbers:
            say(f"decode steps, {by} {number:,}")
            rows, depth = (1, number) if by == "depth" else (number, BLOCK)
            step = make_decode_steps(engine.runner, (rows,), depth, engine.spec.vocab_size)[rows]
            seconds = [
                seconds_of(engine.runner, partial(engine.runner.execute, step))
                for _ in range(ENGINE_STEPS * bench.rounds + 1)
            ]
            results.append(_row("step", by, number, seconds[1:], "n^0 to n^1"))
    engine.close()
    return config, engine.plan, results


def _row(cost: str, by: str, number: int, seconds: Sequence[float], expected: str) -> JsonObject:
    return {"cost": cost, "by": by, "number": number, "seconds": spread(seconds), "expected": expected}


def _add_orders(results: Sequence[JsonObject]) -> None:
    """Add to each row its growth over the first row of its kind, and the exponent of that growth."""
    first: dict[tuple[str, str], JsonObject] = {}
    for row in results:
        smallest = first.setdefault((row["cost"], row["by"]), row)
        row["growth"] = row["seconds"]["median"] / smallest["seconds"]["median"]
        times = row["number"] / max(smallest["number"], 1)
        row["order"] = None if times <= 1 else math.log(row["growth"]) / math.log(times)
