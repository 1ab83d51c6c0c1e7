"""The settings below the question: sampling, system prompt and tools."""

import json

import pytest

from tests.support.page_chat import ENTER, answered, asked, chunks, script_answers
from tests.support.serving import serving

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
YES = chunks({"content": "yes"})


def set_field(page, name, text):
    page.script(
        "const it = document.getElementById(arguments[0]); it.value = arguments[1];"
        "it.dispatchEvent(new Event('input'))",
        name,
        text,
    )


def test_what_is_set_goes_with_the_question_and_what_is_not_is_left_to_the_model(page):
    script_answers(page, YES)
    answered(page, "?")
    assert asked(page)[0] == {
        "messages": [{"role": "user", "content": "?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 1024,
    }
    answered(page, "!", temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, max_completion_tokens=7, seed=3)
    told = asked(page)[1]
    assert {name: told[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 3,
    }
    assert told["max_completion_tokens"] == 7
    assert page.text("#settings-told").startswith("temperature 0.7 · top-p 0.9")


def test_fields_show_what_the_model_would_take(page):
    shown = page.script("return [...document.querySelectorAll('#sampling input')].map((it) => it.placeholder)")
    assert shown == ["0", "1", "0", "0", "1", "as many as fit", "none"]


def test_the_page_samples_where_the_model_says_nothing_about_it(page):
    ours = {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.1}
    about = {"sampling": {"temperature": 0}, "chat_sampling": ours, "max_model_len": 4096, "takes_tools": False}
    told = page.script(
        "return import('/page/chat/settings.js').then(({ Settings }) => {"
        "  const it = Object.create(Settings.prototype); it.inputs = new Map(); it.check = () => null;"
        "  it.know(arguments_of); return it.request(); })".replace("arguments_of", json.dumps(about))
    )
    assert told == ours


@pytest.mark.parametrize(
    ("field", "text", "problem"),
    [
        ("temperature", "hot", "Temperature is a number from 0 to 2"),
        ("temperature", "2.1", "Temperature is a number from 0 to 2"),
        ("temperature", "-1", "Temperature is a number from 0 to 2"),
        ("top-p", "0", "Top-p is a number above 0 to 1"),
        ("top-k", "1.5", "Top-k is a whole number from 0 on"),
        ("min-p", "1.1", "Min-p is a number from 0 to 1"),
        ("max-completion-tokens", "0", "Max tokens is a whole number from 1 to 4096"),
        ("max-completion-tokens", "5000", "Max tokens is a whole number from 1 to 4096"),
        ("seed", "Infinity", "Seed is a whole number from 0 on"),
    ],
)
def test_what_cannot_be_is_said_at_its_field_and_not_sent(page, field, text, problem):
    script_answers(page, YES)
    set_field(page, field, text)
    assert page.text(f"#{field}-note") == problem
    assert page.script("return document.getElementById(arguments[0]).ariaInvalid", field) == "true"
    page.type("question", "?" + ENTER)
    assert page.focused() == field
    assert page.script("return document.getElementById('settings').open")
    assert page.count("#messages .message") == 0
    assert asked(page) == []
    set_field(page, field, "")
    assert page.text(f"#{field}-note") != problem
    page.type("question", ENTER)
    page.until(lambda: len(asked(page)) == 1)


def test_a_model_with_less_room_than_the_usual_length_can_be_asked_at_once(browser):
    with serving(max_num_seqs=1, graph_mode="none", max_model_len=300) as served:
        browser.open(served.url)
        browser.until(lambda: browser.text(".welcome h2"))
        assert "#### 42" in answered(browser, "Ava has 17 apples and buys 25 more. How many apples has she?")
        set_field(browser, "max-completion-tokens", "301")
        assert browser.text("#max-completion-tokens-note") == "Max tokens is a whole number from 1 to 300"


def test_settings_stay_when_the_page_is_opened_again(page, served):
    set_field(page, "temperature", "0.3")
    set_field(page, "system", "Be brief.")
    page.open(served.url, keep=True)
    page.until(lambda: page.text(".welcome h2"))
    script_answers(page, YES)
    answered(page, "?")
    assert asked(page)[0]["temperature"] == 0.3
    assert asked(page)[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_tools_are_offered_where_the_model_takes_them_and_checked(page):
    assert page.script("return document.getElementById('tools-field').hidden")
    page.wait_for(
        """const real = window.fetch;
        window.fetch = async (path, options) => {
          const response = await real(path, options);
          if (path !== "./about") return response;
          return new Response(JSON.stringify({ ...(await response.json()), takes_tools: true }));
        };
        const live = window.fetch;
        window.fetch = async (path, options) => {
          const response = await live(path, options);
          if (path !== "./live") return response;
          return new Response(JSON.stringify({ ...(await response.json()), model: "other" }));
        };"""
    )
    page.until(lambda: not page.script("return document.getElementById('tools-field').hidden"))
    script_answers(page, YES)
    set_field(page, "tools", "{")
    page.type("question", "?" + ENTER)
    assert page.text("#tools-note").startswith("Tools are JSON: ")
    set_field(page, "tools", '[{"name": "weather"}]')
    assert page.text("#tools-note").startswith("Tools are a list of")
    assert page.focused() == "tools"
    set_field(page, "tools", json.dumps(TOOLS))
    page.type("question", ENTER)
    page.until(lambda: len(asked(page)) == 1)
    assert asked(page)[0]["tools"] == TOOLS
