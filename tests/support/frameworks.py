"""What people build on OpenAI's protocol, asked for a tool's call and for an answer of a schema. These packages have an
environment of their own, so this is a program: `python frameworks.py NAME URL` prints what came, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel

QUESTION = "Hm?"
MOST = 300
"""Tokens of an answer."""


class Verdict(BaseModel):
    """The schema that is asked for."""

    ok: bool


class Weather(BaseModel):
    """The weather."""

    city: Literal["Rome", "Oslo"]


WEATHER = {"name": "weather", "description": "The weather.", "parameters": Weather.model_json_schema()}


def litellm(url: str) -> dict[str, Any]:
    from litellm import completion

    def ask(**more: Any) -> Any:
        answer: Any = completion(
            model="hosted_vllm/tiny", api_base=url, api_key="none", seed=1, temperature=1, max_tokens=MOST,
            messages=[{"role": "user", "content": QUESTION}], **more,
        )  # fmt: skip
        return answer.choices[0].message

    tool = {"type": "function", "function": WEATHER}
    [call] = ask(tools=[tool], tool_choice="required").tool_calls
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": Verdict.model_json_schema()}}
    streamed = completion(
        model="hosted_vllm/tiny", api_base=url, api_key="none", stream=True, max_tokens=4,
        messages=[{"role": "user", "content": QUESTION}],
    )  # fmt: skip
    assert sum(1 for _ in streamed)
    return {"call": json.loads(call.function.arguments), "verdict": json.loads(ask(response_format=form).content)}


def langchain(url: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url, api_key="none", model="tiny", seed=1, temperature=1, max_tokens=MOST)
    [call] = (
        model.bind_tools([{"type": "function", "function": WEATHER}], tool_choice="required")
        .invoke(QUESTION)
        .tool_calls
    )
    verdict: Any = model.with_structured_output(Verdict).invoke(QUESTION)
    assert sum(1 for _ in model.stream(QUESTION, max_tokens=4))
    return {"call": call["args"], "verdict": verdict.model_dump()}


def instructor(url: str) -> dict[str, Any]:
    import instructor as patched
    from openai import OpenAI

    found = {}
    for name, mode, kind in (("call", patched.Mode.TOOLS, Weather), ("verdict", patched.Mode.JSON_SCHEMA, Verdict)):
        client = patched.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
        answer: Any = client.chat.completions.create(
            model="tiny", response_model=kind, max_retries=0, seed=1, temperature=1, max_tokens=MOST,
            messages=[{"role": "user", "content": QUESTION}],
        )  # fmt: skip
        found[name] = answer.model_dump()
    return found


def pydantic_ai(url: str) -> dict[str, Any]:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
    settings: Any = {"seed": 1, "temperature": 1, "max_tokens": MOST}

    async def ask(output: Any) -> Any:
        agent: Any = Agent(model, output_type=output, model_settings=settings)
        return (await agent.run(QUESTION)).output.model_dump()

    async def both() -> dict[str, Any]:
        return {"call": await ask(ToolOutput(Weather)), "verdict": await ask(NativeOutput(Verdict))}

    return asyncio.run(both())


def llama_index(url: str) -> dict[str, Any]:
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    more: dict[str, Any] = {"seed": 1}
    model = OpenAILike(
        model="tiny", api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True, temperature=1,
        max_tokens=MOST, additional_kwargs=more,
    )  # fmt: skip

    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather."""
        return city

    tool = FunctionTool.from_defaults(fn=weather)
    answer = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    [call] = model.get_tool_calls_from_response(answer)
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": Verdict.model_json_schema()}}
    verdict = model.complete(QUESTION, response_format=form)
    return {"call": call.tool_kwargs, "verdict": json.loads(verdict.text)}


FRAMEWORKS = {each.__name__: each for each in (litellm, langchain, instructor, pydantic_ai, llama_index)}


if __name__ == "__main__":
    print(json.dumps(FRAMEWORKS[sys.argv[1]](sys.argv[2])))
