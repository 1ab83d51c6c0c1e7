"""AsyncLLM: what asyncio programs do with a model. The engine behind it has tests of its own (test_async_engine.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing
from functools import partial
from typing import Any

import numpy as np
import pytest

from ostinato import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams
from ostinato.engine.async_llm import _whole
from ostinato.engine.input_processor import PromptInput
from ostinato.engine.outputs import CompletionOutput, RequestOutput, RequestTimes
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.output_deltas import OutputDelta
from ostinato.engine.process.request_streams import RequestStream
from ostinato.errors import EngineStopped, StepFailed
from tests.support.engine_probe import Probe, without_native_kernels
from tests.support.patience import PATIENCE
from tests.support.text_checkpoint import SETTINGS, text_checkpoint

PROMPTS = [f"task {i} of many: " for i in range(6)]
ALIKE = {**SETTINGS, "kernels": "reference"}
"""In this process and in the engine's."""


def params(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": seed, **changes})


def run(use: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with AsyncLLM(str(text_checkpoint()), **ALIKE) as llm:
            given = await use(llm)
            assert await nothing_is_left(llm)
            return given

    return asyncio.run(main())


async def nothing_is_left(llm: AsyncLLM) -> bool:
    """Once what was aborted has reached the engine."""
    async with asyncio.timeout(PATIENCE):
        while True:
            cache = (await llm.stats())["cache"]
            if cache["blocks_used"] == cache["slots_used"] == 0:
                return True
            await asyncio.sleep(0.01)


@pytest.mark.slow
def test_overlapping_calls_give_what_llm_gives() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with LLM(str(text_checkpoint()), **ALIKE) as plain:
        expected = [plain.generate(prompt, params(i))[0].outputs[0].text for i, prompt in enumerate(PROMPTS)]
        [chat] = plain.chat(messages, params(9))

    async def use(llm: AsyncLLM) -> None:
        each = await asyncio.gather(*(llm.generate(prompt, params(i)) for i, prompt in enumerate(PROMPTS)))
        assert [output.outputs[0].text for [output] in each] == expected
        together = await llm.generate(PROMPTS, [params(i) for i in range(6)])
        assert [output.prompt for output in together] == PROMPTS
        assert [output.outputs[0].text for output in together] == expected
        assert together[0].prompt_token_ids == llm.get_tokenizer().encode(PROMPTS[0])
        assert await llm.generate([]) == []
        pieces = [piece async for piece in llm.stream(PROMPTS[2], params(2))]
        assert "".join(pieces) == expected[2]
        [answer] = await llm.chat(messages, params(9))
        assert (answer.prompt, answer.outputs) == (chat.prompt, chat.outputs)
        streamed = [piece async for piece in llm.stream_chat(messages, params(9))]
        assert "".join(streamed) == chat.outputs[0].text
        assert llm.plan.settings.dtype == "float32"

    run(use)


@pytest.mark.slow
def test_what_is_cancelled_or_left_early_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(reference=without_native_kernels())
    monkeypatch.setattr("ostinato.engine.async_llm.AsyncEngine.start", partial(AsyncEngine.start, make=probe))

    async def use(llm: AsyncLLM) -> None:
        probe.delay = 0.05  # so that none ends by itself
        calls = [asyncio.create_task(llm.generate(PROMPTS, params(1, max_tokens=80))) for _ in range(3)]
        async with aclosing(llm.stream(PROMPTS[0], params(2, max_tokens=80))) as pieces:
            async for _ in pieces:
                break
        for call in calls:
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended)
        probe.delay = 0
        assert await nothing_is_left(llm)
        [output] = await llm.generate(PROMPTS[0], params(3))
        assert output.outputs[0].finish_reason == "length"

    with closing(probe):
        run(use)


@pytest.mark.slow
def test_a_prompt_that_cannot_be_served_is_refused_and_the_others_of_its_call_end() -> None:
    async def use(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match=r"prompt 2 of 3: .*max_model_len"):
            await llm.generate([PROMPTS[0], "a b " * 60, PROMPTS[1]], params(1))
        with pytest.raises(RequestError, match="stream gives one output, and n is 2"):
            await anext(llm.stream(PROMPTS[0], params(1, n=2)))
        with pytest.raises(RequestError, match="list of messages"):
            await llm.chat({"role": "user", "content": "hi"}, params(1))  # type: ignore[arg-type]

    run(use)


@pytest.mark.slow
def test_calls_that_wait_are_told_of_the_end_and_later_ones_too() -> None:
    async def main() -> None:
        llm = AsyncLLM(str(text_checkpoint()), **ALIKE)
        with pytest.raises(RequestError, match="not started; use `async with`"):
            await llm.generate(PROMPTS[0])
        await llm.start()
        with pytest.raises(RequestError, match="started before"):
            await llm.start()
        pieces = llm.stream(PROMPTS[0], params(1, max_tokens=80))
        await anext(pieces)
        await llm.close()
        with pytest.raises(EngineStopped):
            async for _ in pieces:
                pass
        with pytest.raises(RequestError, match="closed"):
            await llm.generate(PROMPTS[0])
        await llm.close()

    asyncio.run(main())


@pytest.mark.slow
def test_it_belongs_to_one_loop() -> None:
    async def use(llm: AsyncLLM) -> None:
        def elsewhere() -> None:
            with pytest.raises(RequestError, match="another event loop"):
                asyncio.run(llm.generate(PROMPTS[0], params(1)))

        await asyncio.to_thread(elsewhere)

    run(use)


def test_settings_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="max_num_seq"):
        AsyncLLM("demo", max_num_seq=4)  # type: ignore[call-arg]


@pytest.mark.slow
def test_embeddings_are_those_of_an_llm() -> None:
    async def use(llm: AsyncLLM) -> list[np.ndarray]:
        return [*await llm.embed(PROMPTS), *await llm.embed(PROMPTS[0], pooling="mean", dimensions=8)]

    with LLM(str(text_checkpoint()), **ALIKE) as llm:
        right = [*llm.embed(PROMPTS), *llm.embed(PROMPTS[0], pooling="mean", dimensions=8)]
    for vector, expected in zip(run(use), right, strict=True):
        np.testing.assert_allclose(vector, expected, atol=1e-4)


@pytest.mark.slow
def test_sampling_params_is_another_name_of_params_and_no_variable_of_a_template() -> None:
    async def use(llm: AsyncLLM) -> None:
        messages, few = (
            [{"role": "user", "content": "hi"}],
            SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        )
        outputs = [*await llm.generate("ab", sampling_params=few), *await llm.chat(messages, sampling_params=few)]
        assert [len(each.outputs[0].token_ids) for each in outputs] == [3, 3]
        assert [piece async for piece in llm.stream("ab", sampling_params=few)]
        assert [piece async for piece in llm.stream_chat(messages, sampling_params=few)]
        with pytest.raises(RequestError, match="two names of one thing"):
            await llm.generate("ab", few, sampling_params=few)
        with pytest.raises(RequestError, match="use_tqdm is no variable"):
            await llm.chat(messages, few, use_tqdm=False)

    run(use)


def test_the_error_of_a_failed_request_is_in_its_output_and_that_of_a_lost_one_is_raised() -> None:
    async def main() -> None:
        times = RequestTimes(0.0)
        ends = [CompletionOutput(0, finish_reason="error")]
        failed = RequestOutput("failed", None, [1], ends, times, error=StepFailed("broken"))
        stream = RequestStream("failed", 1, lambda: None)
        stream.put(OutputDelta("failed", [], 0, times, failed))
        stream.end(failed.error)
        assert await _whole(stream, PromptInput("a prompt")) is failed
        lost = RequestStream("lost", 1, lambda: None)
        lost.end(EngineStopped("stopped"))
        with pytest.raises(EngineStopped):
            await _whole(lost, PromptInput("a prompt"))

    asyncio.run(main())
