"""LLM in programs of several threads and processes: the same tokens, fair turns, and an end that gives all back."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, ForkError, RequestError, SamplingParams
from ostinato.engine.shared_engine import FairLock
from ostinato.ops.arrays import TorchArrays
from tests.support.patience import PATIENCE
from tests.support.text_checkpoint import SETTINGS, text_checkpoint

PROMPTS = [f"thread {i} of many: " for i in range(8)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(text_checkpoint()), **SETTINGS)


def params(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": seed, **changes})


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives for each number, all at the same time. A thread that hangs fails the test."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> Any:
        barrier.wait(PATIENCE)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [each.result(timeout=PATIENCE) for each in [pool.submit(begin, number) for number in range(count)]]


def assert_empty(llm: LLM) -> None:
    assert not llm.engine.has_unfinished
    stats = llm.stats()["cache"]
    assert stats["blocks_used"] == stats["slots_used"] == 0
    llm.engine.scheduler.check_integrity()


def alone(llm: LLM, number: int) -> str:
    [output] = llm.generate(PROMPTS[number], params(number))
    return output.outputs[0].text


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_calls_from_many_threads_give_what_each_gives_alone(overlap: str) -> None:
    llm = LLM(str(text_checkpoint()), **SETTINGS, overlap=overlap)
    expected = [alone(llm, number) for number in range(8)]

    def work(number: int) -> list[str]:
        generator = random.Random(number)
        texts = []
        for _ in range(6):
            if generator.random() < 0.5:
                texts.append(alone(llm, number))
            else:
                texts.append("".join(llm.stream(PROMPTS[number], params(number))))
            if generator.random() < 0.3:
                left = llm.stream(PROMPTS[number], params(number))
                next(left)
                left.close()
        return texts

    assert in_threads(8, work) == [[text] * 6 for text in expected]
    assert_empty(llm)


def test_torch_has_one_thread_during_a_step_of_native_kernels_and_as_many_as_before_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ostinato.runner.model_runner.choose_arrays", lambda plan, spec: TorchArrays("cpu"))
    llm = LLM(str(text_checkpoint()), **SETTINGS)
    run, seen = llm.engine.runner.graphs.run, set()

    def noted(inputs: Any) -> Any:
        seen.add(torch.get_num_threads())
        return run(inputs)

    monkeypatch.setattr(llm.engine.runner.graphs, "run", noted)
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone(llm, 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)
    assert seen == {1 if {each.implementation for each in llm.plan.kernels.values()} == {"native"} else 2}


def test_requests_of_several_threads_run_in_the_same_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run, wait, added, sizes = llm.engine.runner.execute, llm._shared.wait_for_update, threading.Barrier(4), []

    def counted(batch: Any) -> Any:
        sizes.append(len(batch.rows))
        return run(batch)

    def wait_for_all(call: Any) -> None:
        if not sizes:
            added.wait(PATIENCE)
        wait(call)

    monkeypatch.setattr(llm.engine.runner, "execute", counted)
    monkeypatch.setattr(llm._shared, "wait_for_update", wait_for_all)
    in_threads(4, lambda number: alone(llm, number))
    assert max(sizes) == 4
    assert len(sizes) < 40, "24 steps, and those of the prompts"


def test_a_thread_that_runs_the_steps_lets_the_others_in(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of two tokens, which begins when another thread's long one is running, ends before it."""
    run, steps, short = llm.engine.runner.execute, iter(range(1000)), ThreadPoolExecutor(1)
    asked: list[Any] = []

    def begin_another(batch: Any) -> Any:
        if next(steps) == 5:
            asked.append(short.submit(llm.generate, PROMPTS[1], params(1, max_tokens=2)))
            while not llm._shared._access._waiting:
                time.sleep(0.001)
        return run(batch)

    monkeypatch.setattr(llm.engine.runner, "execute", begin_another)
    [long] = llm.generate(PROMPTS[0], params(0, max_tokens=60))
    [output] = asked[0].result(PATIENCE)
    assert output.times.last_token < long.times.last_token


def test_an_error_of_one_thread_is_not_anothers(llm: LLM) -> None:
    def work(number: int) -> str:
        if number % 2:
            with pytest.raises(RequestError, match="max_model_len"):
                llm.generate("a b " * 60, params(number))
            return ""
        return alone(llm, number)

    texts = in_threads(6, work)
    assert texts == [alone(llm, number) if number % 2 == 0 else "" for number in range(6)]
    assert_empty(llm)


def test_an_interrupted_thread_leaves_the_others_no_deadlock(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What interrupts a step ends the requests of that step; whoever waits is told, and the next call works."""
    run, steps = llm.engine.runner.execute, iter(range(1000))

    def interrupted(batch: Any) -> Any:
        if next(steps) == 7:
            raise KeyboardInterrupt
        return run(batch)

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    ends = []

    def work(number: int) -> None:
        try:
            alone(llm, number)
        except (KeyboardInterrupt, RuntimeError) as error:
            ends.append(type(error))

    in_threads(4, work)
    assert ends.count(KeyboardInterrupt) == 1
    monkeypatch.undo()
    assert alone(llm, 0) == alone(llm, 0)
    assert_empty(llm)


def test_streams_that_are_garbage_are_aborted_wherever_they_are_collected(llm: LLM) -> None:
    """Also by a collection inside a step of the same thread, where waiting for the engine would be a deadlock."""
    for number in range(20):
        stream = llm.stream(PROMPTS[number % 8], params(number))
        next(stream)
        circle: list[Any] = [stream]
        circle.append(circle)
        del stream, circle
        before = gc.get_threshold()
        gc.set_threshold(1)
        try:
            alone(llm, 1)
        finally:
            gc.set_threshold(*before)
    gc.collect()
    alone(llm, 1)
    assert_empty(llm)


def test_threads_get_the_lock_in_the_order_in_which_they_ask() -> None:
    lock, order = FairLock(), []
    lock.acquire()
    assert not lock.try_acquire()
    threads = []
    for number in range(5):
        thread = threading.Thread(target=lambda number=number: (lock.acquire(), order.append(number), lock.release()))
        thread.start()
        threads.append(thread)
        while len(lock._waiting) <= number:
            pass
    lock.release()
    for thread in threads:
        thread.join(PATIENCE)
    assert order == list(range(5))
    assert lock.try_acquire()


# The end


def test_a_closed_llm_gives_its_memory_back_and_says_so() -> None:
    with LLM(str(text_checkpoint()), **SETTINGS, overlap="on") as llm:
        text = alone(llm, 0)
        weights = weakref.ref(llm.engine.runner.model)
        engine = weakref.ref(llm.engine)
    gc.collect()
    assert weights() is None
    assert engine() is None
    for call in (lambda: alone(llm, 0), llm.stats, llm.get_tokenizer, lambda: list(llm.stream(PROMPTS[0]))):
        with pytest.raises(RequestError, match="closed"):
            call()
    llm.close()
    assert "max_model_len" in repr(llm)
    assert text


def test_calls_that_wait_are_told_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, is_closing = LLM(str(text_checkpoint()), **SETTINGS), threading.Event()
    begun, run = threading.Barrier(4, is_closing.set), llm.engine.runner.execute

    def last_one(batch: Any) -> Any:
        while is_closing.is_set() and not llm._shared._access._waiting:  # so that no call ends by itself
            time.sleep(0.001)
        return run(batch)

    monkeypatch.setattr(llm.engine.runner, "execute", last_one)

    def work(number: int) -> str:
        if number == 3:
            begun.wait(PATIENCE)
            llm.close()
            return "closed"
        stream = llm.stream(PROMPTS[number], params(number, max_tokens=90))
        next(stream)
        begun.wait(PATIENCE)
        try:
            return "".join(stream)
        except RequestError as error:
            return error.message

    *messages, _ = in_threads(4, work)
    assert all("closed" in message for message in messages)


# Processes


def _in_a_fork(use: Callable[[], Any], results: Any) -> None:
    try:
        use()
        results.put("no error")
    except ForkError as error:
        results.put(error.message)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_told_to_spawn(llm: LLM) -> None:
    """It would wait for ever for the threads of the kernels."""
    alone(llm, 0)
    context = multiprocessing.get_context("fork")
    for use in (lambda: alone(llm, 0), llm.stats, lambda: LLM(str(text_checkpoint()), **SETTINGS)):
        results = context.SimpleQueue()
        process = context.Process(target=_in_a_fork, args=(use, results))
        process.start()
        message = results.get()
        process.join(PATIENCE)
        assert "get_context('spawn')" in message
    assert alone(llm, 0) == alone(llm, 0)


@pytest.mark.slow
def test_a_spawned_process_has_an_llm_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import multiprocessing
            from ostinato import LLM, SamplingParams

            def text(number):
                params = SamplingParams(max_tokens=24, ignore_eos=True, seed=number)
                with LLM({str(text_checkpoint())!r}, **{SETTINGS!r}) as llm:
                    return llm.generate(f"thread {{number}} of many: ", params)[0].outputs[0].text

            if __name__ == "__main__":
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(ascii([text(3), *pool.map(text, [3])]))
        """)
    )
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True, timeout=PATIENCE)
    first, second = eval(done.stdout)
    assert first == second
