"""What frameworks make of a server: `python client_frameworks.py NAME URL` asks it four things with one of them and
prints what came, as JSON; with `calculator` behind, it answers one problem with a tool. It runs in the environment that
has them, and uses nothing of Ostinato.

Each is used as its own pages show it. A tool is demanded where it is first asked for, and left to the model afterwards;
a calculator is never demanded.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel

QUESTION = "Mia buys 8 boxes of 6 pencils. How many pencils is that?"
SHOP_QUESTION = "What does the shop say?"
PROBLEM = "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?"
MODEL, KEY = "demo", "none"


class Verdict(BaseModel):
    """Whether a shop is open."""

    shop: Literal["north", "south"]
    is_open: bool


def shop_says(shop: Literal["north", "south"]) -> str:
    """What a shop says.

    Args:
        shop: Which one.
    """
    CALLED.append(shop)
    return "Ava has 17 apples and buys 25 more. How many apples has she?"


def calculate(expression: str) -> str:
    """The value of an expression.

    Args:
        expression: A sum or a difference of two numbers.
    """
    CALLED.append(expression)
    left, sign, right = expression.split()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))


CALLED: list[str] = []
"""What a tool was called with."""
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"type": "function", "function": {"name": "calculate", "parameters": EXPRESSION}}
TOOL = {
    "type": "function",
    "function": {
        "name": "shop_says",
        "description": "What a shop says.",
        "parameters": {
            "type": "object",
            "properties": {"shop": {"enum": ["north", "south"], "type": "string"}},
            "required": ["shop"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(ask: Any) -> str:
    """Runs the calculator for an answer's calls until one has none. `ask(messages)` returns OpenAI's answer."""
    messages: list[Any] = [asked(PROBLEM)]
    while True:
        message = ask(messages).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            said = calculate(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


class LiteLLM:
    package = "litellm"

    def __init__(self, url: str) -> None:
        self.where = {"model": f"openai/{MODEL}", "api_base": url, "api_key": KEY}

    def calculator(self) -> str:
        import litellm

        return answered(lambda messages: litellm.completion(**self.where, messages=messages, tools=[CALCULATOR]))

    def plain(self) -> str:
        import litellm

        return litellm.completion(**self.where, messages=[asked(QUESTION)]).choices[0].message.content

    def streamed(self) -> list[str]:
        import litellm

        chunks = litellm.completion(**self.where, messages=[asked(QUESTION)], stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in chunks]

    def tool(self) -> str:
        import litellm

        messages: list[Any] = [asked(SHOP_QUESTION)]
        answer = litellm.completion(**self.where, messages=messages, tools=[TOOL], tool_choice="required")
        messages.append(answer.choices[0].message)
        for call in answer.choices[0].message.tool_calls:
            said = shop_says(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": said})
        return litellm.completion(**self.where, messages=messages, tools=[TOOL]).choices[0].message.content

    def schema(self) -> Verdict:
        import litellm

        answer = litellm.completion(**self.where, messages=[asked(SHOP_QUESTION)], response_format=Verdict)
        return Verdict.model_validate_json(answer.choices[0].message.content)


class LangChain:
    package = "langchain-openai"

    def __init__(self, url: str) -> None:
        from langchain_openai import ChatOpenAI

        self.model = ChatOpenAI(model=MODEL, base_url=url, api_key=KEY)

    def calculator(self) -> str:
        from langchain_core.messages import HumanMessage
        from langchain_core.tools import tool

        made, messages = tool(calculate), [HumanMessage(PROBLEM)]
        while True:
            messages.append(self.model.bind_tools([made]).invoke(messages))
            if not messages[-1].tool_calls:
                return str(messages[-1].text)
            messages += [made.invoke(call) for call in messages[-1].tool_calls]

    def plain(self) -> str:
        return self.model.invoke(QUESTION).content

    def streamed(self) -> list[str]:
        return [chunk.content for chunk in self.model.stream(QUESTION)]

    def tool(self) -> str:
        from langchain_core.messages import HumanMessage
        from langchain_core.tools import tool

        made = tool(shop_says)
        messages: list[Any] = [HumanMessage(SHOP_QUESTION)]
        messages.append(self.model.bind_tools([made], tool_choice="shop_says", strict=True).invoke(messages))
        messages += [made.invoke(call) for call in messages[-1].tool_calls]
        return self.model.bind_tools([made], strict=True).invoke(messages).content

    def schema(self) -> Verdict:
        return self.model.with_structured_output(Verdict).invoke(SHOP_QUESTION)


class LangChainOllama(LangChain):
    package = "langchain-ollama"

    def __init__(self, url: str) -> None:
        from langchain_ollama import ChatOllama

        self.model = ChatOllama(model=MODEL, base_url=url.removesuffix("/v1"))


class LangChainAnthropic(LangChain):
    package = "langchain-anthropic"

    def __init__(self, url: str) -> None:
        from langchain_anthropic import ChatAnthropic

        self.model = ChatAnthropic(model=MODEL, base_url=url.removesuffix("/v1"), api_key=KEY)


class PydanticAI:
    package = "pydantic-ai-slim"

    def __init__(self, url: str) -> None:
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        self.model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=KEY))

    def calculator(self) -> str:
        from pydantic_ai import Agent

        return Agent(self.model, tools=[calculate]).run_sync(PROBLEM).output

    def plain(self) -> str:
        from pydantic_ai import Agent

        return Agent(self.model).run_sync(QUESTION).output

    def streamed(self) -> list[str]:
        from pydantic_ai import Agent

        async def stream() -> list[str]:
            async with Agent(self.model).run_stream(QUESTION) as result:
                return [text async for text in result.stream_text(delta=True, debounce_by=None)]

        return asyncio.run(stream())

    def tool(self) -> str:
        from pydantic_ai import Agent
        from pydantic_ai.capabilities import AbstractCapability

        class FirstACall(AbstractCapability[None]):
            def get_model_settings(self) -> Any:
                return lambda step: {"tool_choice": "required" if step.run_step == 1 else "auto"}

        return Agent(self.model, tools=[shop_says], capabilities=[FirstACall()]).run_sync(SHOP_QUESTION).output

    def schema(self) -> Verdict:
        from pydantic_ai import Agent, NativeOutput

        by_tool = Agent(self.model, output_type=Verdict).run_sync(SHOP_QUESTION).output
        assert isinstance(by_tool, Verdict)
        return Agent(self.model, output_type=NativeOutput(Verdict)).run_sync(SHOP_QUESTION).output


class Instructor:
    package = "instructor"

    def __init__(self, url: str) -> None:
        import instructor
        import openai

        self.openai = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
        self.modes = {mode: instructor.from_openai(self.openai, mode=mode) for mode in (
            instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)}  # fmt: skip
        self.tools = self.modes[instructor.Mode.TOOLS]

    def plain(self) -> str:
        answer = self.tools.chat.completions.create(model=MODEL, messages=[asked(QUESTION)], response_model=None)
        return answer.choices[0].message.content

    def streamed(self) -> list[str]:
        given = {"model": MODEL, "messages": [asked(QUESTION)], "response_model": None, "stream": True}
        return [chunk.choices[0].delta.content or "" for chunk in self.tools.chat.completions.create(**given)]

    def tool(self) -> str:
        """The model that it makes is the call; the rest is its client's."""
        Says = type("shop_says", (Verdict,), {"__doc__": "What a shop says."})
        messages: list[Any] = [asked(SHOP_QUESTION)]
        says, answer = self.tools.create_with_completion(
            model=MODEL, messages=messages, response_model=Says, max_retries=0
        )
        message = answer.choices[0].message
        [call] = message.tool_calls
        said = {"role": "tool", "tool_call_id": call.id, "content": shop_says(says.shop)}
        messages += [message.model_dump(), said]
        last = self.tools.chat.completions.create(model=MODEL, messages=messages, response_model=None)
        return last.choices[0].message.content

    def schema(self) -> Verdict:
        for client in self.modes.values():
            verdict = client.create(
                model=MODEL, messages=[asked(SHOP_QUESTION)], response_model=Verdict, max_retries=0, max_tokens=200
            )
        # A part of it at a time, as it comes.
        *_, last = self.tools.create_partial(model=MODEL, messages=[asked(SHOP_QUESTION)], response_model=Verdict)
        assert last.model_dump() == verdict.model_dump()
        return verdict


class LlamaIndex:
    package = "llama-index-llms-openai-like"

    def __init__(self, url: str) -> None:
        from llama_index.llms.openai_like import OpenAILike

        given = {"model": MODEL, "api_base": url, "api_key": KEY, "max_retries": 0, "context_window": 768}
        given |= {"is_chat_model": True, "is_function_calling_model": True}
        self.model = OpenAILike(**given)
        self.structured = OpenAILike(**given, should_use_structured_outputs=True)

    def calculator(self) -> str:
        from llama_index.core.llms import ChatMessage
        from llama_index.core.tools import FunctionTool

        made, messages = FunctionTool.from_defaults(calculate), self.said(PROBLEM)
        while True:
            answer = self.model.chat_with_tools([made], chat_history=messages)
            messages.append(answer.message)
            calls = self.model.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
            if not calls:
                return answer.message.content
            for call in calls:
                given = {"tool_call_id": call.tool_id, "name": call.tool_name}
                said = made(**call.tool_kwargs).content
                messages.append(ChatMessage(role="tool", content=said, additional_kwargs=given))

    def said(self, text: str) -> list[Any]:
        from llama_index.core.llms import ChatMessage

        return [ChatMessage(role="user", content=text)]

    def plain(self) -> str:
        return self.model.chat(self.said(QUESTION)).message.content

    def streamed(self) -> list[str]:
        return [chunk.delta for chunk in self.model.stream_chat(self.said(QUESTION))]

    def tool(self) -> str:
        from llama_index.core.llms import ChatMessage
        from llama_index.core.tools import FunctionTool

        made, messages = FunctionTool.from_defaults(shop_says), self.said(SHOP_QUESTION)
        answer = self.model.chat_with_tools([made], chat_history=messages, tool_required=True, strict=True)
        messages.append(answer.message)
        for call in self.model.get_tool_calls_from_response(answer):
            said = made(**call.tool_kwargs).content
            given = {"tool_call_id": call.tool_id, "name": call.tool_name}
            messages.append(ChatMessage(role="tool", content=said, additional_kwargs=given))
        return self.model.chat_with_tools([made], chat_history=messages, strict=True).message.content

    def schema(self) -> Verdict:
        by_tool = self.model.as_structured_llm(Verdict).chat(self.said(SHOP_QUESTION)).raw
        assert isinstance(by_tool, Verdict)
        return self.structured.as_structured_llm(Verdict).chat(self.said(SHOP_QUESTION)).raw


class OpenAI:
    package = "openai"

    def __init__(self, url: str) -> None:
        import openai

        self.client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)

    def calculator(self) -> str:
        create = self.client.chat.completions.create
        return answered(lambda messages: create(model=MODEL, messages=messages, tools=[CALCULATOR]))


class Anthropic:
    package = "anthropic"

    def __init__(self, url: str) -> None:
        import anthropic

        self.client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0)

    def calculator(self) -> str:
        from anthropic import beta_tool

        given = {"model": MODEL, "max_tokens": 100, "messages": [asked(PROBLEM)]}
        [text] = self.client.beta.messages.tool_runner(**given, tools=[beta_tool(calculate)]).until_done().content
        return text.text


class Ollama:
    package = "ollama"

    def __init__(self, url: str) -> None:
        import ollama

        self.client = ollama.Client(host=url.removesuffix("/v1"))

    def calculator(self) -> str:
        messages: list[Any] = [asked(PROBLEM)]
        while True:
            message = self.client.chat(MODEL, messages, tools=[calculate]).message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                said = calculate(**call.function.arguments)
                messages.append({"role": "tool", "tool_name": call.function.name, "content": said})


FRAMEWORKS = {each.package: each for each in (LiteLLM, LangChain, PydanticAI, Instructor, LlamaIndex)}
CALCULATORS = {each.package: each for each in (
    LiteLLM, LangChain, LangChainOllama, LangChainAnthropic, PydanticAI, LlamaIndex, OpenAI, Anthropic, Ollama)
}  # fmt: skip
"""Those with tools whose results go back to the model."""


def main(name: str, url: str, what: str = "") -> None:
    if what:
        answer = CALCULATORS[name](url).calculator()
        print(json.dumps({"version": version(name), "called": CALLED, "answer": answer}))
        return
    framework = FRAMEWORKS[name](url)
    came = {
        "version": version(name),
        "plain": framework.plain(),
        "streamed": framework.streamed(),
        "tool": {"answer": framework.tool(), "called": CALLED},
        "schema": framework.schema().model_dump(),
    }
    print(json.dumps(came))


if __name__ == "__main__":
    main(*sys.argv[1:])
