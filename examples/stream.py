"""Print an answer while it is generated, piece by piece, and then another one from asyncio.

Run it:    .venv/bin/python examples/stream.py

It prints:

    50 - 8 = 42. #### 42
    17 + 25 = 42. #### 42
"""

import asyncio

from ostinato import LLM, AsyncLLM


def stream() -> None:
    """Stream in this process."""
    with LLM("demo", max_num_seqs=4) as llm:
        for piece in llm.stream("Q: Leo had 50 cards and lost 8. How many cards are left?\nA:"):
            print(piece, end="", flush=True)
    print()


async def stream_async() -> None:
    """Stream from an engine in a process of its own, so that no step holds the event loop."""
    async with AsyncLLM("demo", max_num_seqs=4) as llm:
        async for piece in llm.stream("Q: What is 17 plus 25?\nA:"):
            print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    stream()
    asyncio.run(stream_async())
