"""What tests of the page do in its chat: ask, read the answer, and have the server say what they want."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.support.browser import Browser
from tests.support.engine_probe import Probe

QUESTION = "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?"
ANSWER = "#messages .assistant:last-of-type .text"
FACTS = "#messages .assistant:last-of-type .facts"
ENTER, ESCAPE, TAB, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue008"

SCRIPTED = """const [answers, real] = [arguments[0], window.fetch];
window.asked = [];
window.fetch = (path, options) => {
  if (path !== "./v1/chat/completions") return real(path, options);
  window.asked.push(JSON.parse(options.body));
  const [text, status, headers] = answers.length > 1 ? answers.shift() : answers[0];
  return Promise.resolve(new Response(text, { status, headers }));
};"""


def script_answers(page: Browser, *answers: str | tuple[str, int, dict[str, str]]) -> None:
    """The next answers are these, whatever the model would say; the last one from then on. An answer is a stream, or a
    body with its status and headers."""
    page.script(SCRIPTED, [(each, 200, {}) if isinstance(each, str) else each for each in answers])


def begun(page: Browser, steps: Probe) -> str:
    """What the page shows of an answer first. A held engine goes on until then, a step at a time: how many that takes
    depends on what the cache has of the question, and on whether the first tokens can be seen.
    """
    allowed = [0.0]

    def shown() -> str:
        if steps.held and time.monotonic() > allowed[0]:
            steps.held, steps.allowed = 0, steps.steps + 1
            allowed[0] = time.monotonic() + 0.3  # the page has time to show it
        return page.text(ANSWER)

    return page.until(shown)


def asked(page: Browser) -> list[dict[str, Any]]:
    """The bodies of the requests that scripted answers have replied to."""
    return page.script("return window.asked")


def chunks(*deltas: dict[str, Any], end: str = "data: [DONE]\n\n", finish: str | None = None) -> str:
    """A stream of an answer."""
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]} for delta in deltas]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end


def refused(status: int, message: str, *, param: str | None = None, **headers: str) -> tuple[str, int, dict[str, str]]:
    """An answer that is an error."""
    error = {"error": {"message": message, "param": param, "code": None}}
    return json.dumps(error), status, {name.replace("_", "-"): value for name, value in headers.items()}


def answered(page: Browser, question: str, **options: str | float) -> str:
    """What the page shows as the answer, complete. `options` are settings by the ids of their fields."""
    for name, value in options.items():
        page.script(
            "const it = document.getElementById(arguments[0]); it.value = arguments[1];"
            "it.dispatchEvent(new Event('input'))",
            name.replace("_", "-"),
            str(value),
        )
    before = page.count("#messages .assistant .actions")
    page.type("question", question + ENTER)
    page.until(lambda: page.count("#messages .assistant .actions") > before)
    return page.text(ANSWER)
