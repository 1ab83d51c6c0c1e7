"""The conversation on the page: questions, answers, what is done with both, and what goes wrong."""

import re

import httpx2
import pytest

from tests.support.page_chat import (
    ANSWER,
    ENTER,
    ESCAPE,
    FACTS,
    QUESTION,
    SHIFT,
    answered,
    asked,
    begun,
    chunks,
    refused,
    script_answers,
)
from tests.support.patience import PATIENCE
from tests.support.serving import serving

PAUSED = """const real = window.fetch;
window.fetch = (path, options) => path !== "./v1/chat/completions" ? real(path, options)
  : new Promise((done, failed) => options.signal.addEventListener("abort", () => failed(options.signal.reason)));"""
COPIED = """window.copied = [];
Object.defineProperty(navigator, "clipboard", {
  value: { writeText: async (text) => { window.copied.push(text); } } });"""


def roles(page):
    """[role, content] of what the last request told."""
    return [(each["role"], each["content"]) for each in asked(page)[-1]["messages"]]


def test_a_question_sent_with_enter_gets_the_answer_that_the_api_gives(page, served):
    shown = answered(page, QUESTION, temperature=0)
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    reply = httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    assert shown.split() == reply["choices"][0]["message"]["content"].split()
    assert "#### 33" in shown
    assert page.text("#messages .user .text") == QUESTION
    assert page.text(FACTS).startswith(f"{reply['usage']['completion_tokens']} tokens · ")


def test_an_answer_is_shown_while_it_grows_and_read_aloud_as_a_whole(page, steps):
    page.type("question", QUESTION + ENTER)
    early = begun(page, steps)
    assert page.text("#announcement") == ""
    assert page.text(FACTS) == ""
    assert page.script("return document.getElementById('messages').ariaBusy") == "true"
    steps.go()
    page.until(lambda: page.text(FACTS))
    assert page.text(ANSWER).startswith(early[:-1])
    assert len(page.text(ANSWER)) > len(early)
    assert page.text("#announcement").strip() == page.text(ANSWER)
    assert page.script("return document.querySelector('[role=log]').ariaLive") == "off"


ENDS = """const log = document.getElementById("messages").getBoundingClientRect();
return [...document.querySelectorAll("#messages .assistant:last-child :is(.facts, .actions button)")]
  .map((each) => each.getBoundingClientRect().bottom <= log.bottom + 1);"""


def test_the_end_of_an_answer_and_what_can_be_done_with_it_are_seen_on_a_phone(page):
    page.resize(390, 844, phone=True)
    for _ in range(3):  # more than a screen
        answered(page, QUESTION, temperature=0)
    assert page.script("const log = document.getElementById('messages'); return log.scrollHeight > log.clientHeight")
    page.until(lambda: page.script(ENDS) == [True, True, True])


@pytest.mark.parametrize("takes_room", ["a long question", "a keyboard", "a turn"])
def test_the_end_of_an_answer_stays_in_sight_when_there_is_less_room_for_it(page, takes_room):
    page.resize(390, 844, phone=True)
    for _ in range(3):
        answered(page, QUESTION, temperature=0)
    page.until(lambda: page.script(ENDS) == [True, True, True])
    if takes_room == "a long question":
        page.type("question", (SHIFT + ENTER).join("abcdefgh"))
    else:
        page.resize(*((390, 480) if takes_room == "a keyboard" else (844, 390)), phone=True)
    page.until(lambda: page.script(ENDS) == [True, True, True])


def test_who_reads_what_was_before_stays_there(page, steps):
    page.resize(390, 844, phone=True)
    steps.go()
    for _ in range(3):
        answered(page, QUESTION, temperature=0)
    steps.hold()
    page.type("question", QUESTION + ENTER)
    begun(page, steps)
    page.script("document.getElementById('messages').scrollTop = 0")
    steps.go()
    page.until(lambda: page.count(".facts") == 4)
    assert page.script("return document.getElementById('messages').scrollTop") == 0


def test_shift_and_enter_make_a_line(page):
    page.type("question", "one" + SHIFT + ENTER)
    page.type("question", "two")
    assert page.script("return document.getElementById('question').value") == "one\ntwo"
    assert page.count("#messages .user") == 0


@pytest.mark.parametrize("how", ["escape", "button"])
def test_stop_ends_an_answer_and_its_request_and_keeps_what_was_said(page, served, steps, how):
    aborted = served.stats()["finished"]["abort"]
    page.type("question", QUESTION + ENTER)
    early = begun(page, steps)
    assert page.focused() == "question"
    if how == "escape":
        page.press(ESCAPE)
    else:
        page.click("stop")
    page.until(lambda: page.text(FACTS) == "stopped")
    assert page.text(ANSWER).startswith(early)
    served.unfinished(0)
    steps.go()
    served.until(lambda: served.stats()["finished"]["abort"] == aborted + 1)
    assert page.script("return document.getElementById('stop').hidden")


def prompt_tokens(page):
    """What an answer's details say of its prompt."""
    return int(re.search(r"prompt: (\d+) tokens", page.text(FACTS)).group(1))


def test_an_answer_says_how_long_and_how_fast_it_was_and_the_rest_when_asked(page):
    answered(page, QUESTION)
    shown, more = ".facts summary", ".facts p"
    assert re.fullmatch(r"\d+ tokens · [\d,.]+ tok/s", page.text(shown))
    assert "first token after" not in page.seen()
    page.press_button(shown)
    assert re.search(r"prompt: \d+ tokens, \d+ of them cached · .* · first token after \d+ ms · whole", page.text(more))
    assert page.text(more) in page.seen()
    hovered = page.script("return document.querySelector('.facts').title")
    assert hovered.split("\n") == page.text(more).split(" · ")


@pytest.mark.parametrize(("finish", "said"), [("length", "cut at max tokens"), ("content_filter", "content filter")])
def test_an_answer_that_ended_early_says_so_at_once(page, finish, said):
    script_answers(page, chunks({"content": "yes"}, finish=finish))
    answered(page, "?")
    assert page.text(".facts summary") == said


def test_a_conversation_goes_on_until_a_new_one_begins(page):
    answered(page, QUESTION)
    alone = prompt_tokens(page)
    answered(page, QUESTION)
    assert prompt_tokens(page) > alone
    page.click("new")
    assert page.count("#messages .message") == 0
    assert page.focused() == "question"
    answered(page, QUESTION)
    assert prompt_tokens(page) == alone


def test_the_first_view_says_what_the_model_is_and_a_question_of_it_can_be_clicked(page):
    assert "arithmetic word problems" in page.text(".welcome")
    assert "It takes text." in page.text(".welcome")
    assert page.count(".example") in (3, 4)
    question = page.text(".example")
    page.press_button(".example")
    page.until(lambda: page.text(FACTS))
    assert page.text("#messages .user .text") == question
    assert "#### " in page.text(ANSWER)
    assert page.count(".welcome") == 0


def test_an_answer_is_given_once_more_and_what_followed_it_is_gone(page):
    script_answers(page, *(chunks({"content": text}) for text in ("one", "two", "three")))
    answered(page, "first?")
    answered(page, "second?")
    page.press_button("#messages .regenerate", 0)
    page.until(lambda: page.text(ANSWER) == "three")
    assert page.count("#messages .user") == 1
    assert roles(page) == [("user", "first?")]


def test_an_answer_that_was_cut_goes_on_where_it_ended(page):
    whole = answered(page, QUESTION, temperature=0)
    assert page.count("#messages .continue") == 0
    page.click("new")
    answered(page, QUESTION, temperature=0, max_completion_tokens=12)
    assert page.text(ANSWER).split() != whole.split()
    page.script("document.getElementById('max-completion-tokens').value = 99")
    page.press_button("#messages .continue")
    page.until(lambda: page.text(ANSWER).split() == whole.split())
    page.until(lambda: page.count("#messages .assistant .actions"))
    assert page.count("#messages .continue") == 0
    assert page.count("#messages .assistant") == 1


def test_a_question_is_edited_in_its_place_and_asked_again(page):
    script_answers(page, *(chunks({"content": text}) for text in ("one", "two", "three")))
    answered(page, "first?")
    answered(page, "second?")
    page.press_button("#messages .edit", 0)
    page.script("document.activeElement.value = ''")
    page.press("other?")
    page.press_button(".editing .primary")
    page.until(lambda: page.text(ANSWER) == "three")
    assert roles(page) == [("user", "other?")]
    assert page.text("#messages .user .text") == "other?"


def test_an_edit_can_be_left_and_changes_nothing(page):
    script_answers(page, chunks({"content": "one"}))
    answered(page, "first?")
    page.press_button("#messages .edit")
    page.press("!", ESCAPE)
    assert page.count(".editing") == 0
    assert page.text("#messages .user .text") == "first?"
    assert page.focused() == "Edit"


def test_questions_and_answers_are_copied_as_they_were_written(page):
    page.script(COPIED)
    script_answers(page, chunks({"content": "**2** < 3"}))
    answered(page, "why *so*?")
    page.press_button("#messages .user .actions button")
    page.press_button("#messages .assistant > .actions button")
    assert page.until(lambda: page.script("return window.copied")) == ["why *so*?", "**2** < 3"]
    assert page.text("#messages .user .actions button") == "Copied"


def test_reasoning_is_folded_once_the_answer_begins(page):
    script_answers(
        page, chunks({"reasoning_content": "17 and "}, {"reasoning_content": "25"}, {"content": "It is **42**."})
    )
    assert answered(page, "?") == "It is 42."
    assert page.text(".reasoning div") == "17 and 25"
    assert page.script("return document.querySelector('.reasoning').open") is False
    answered(page, "and?")
    assert roles(page)[1] == ("assistant", "It is **42**.")


CALL = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": '}}
REST = {"index": 0, "function": {"arguments": '"Oslo"}'}}


def test_tool_calls_are_shown_and_what_the_tools_give_goes_back(page):
    called = chunks({"tool_calls": [CALL]}, {"tool_calls": [REST]}, finish="tool_calls")
    script_answers(page, called, chunks({"content": "It rains."}))
    page.type("question", "weather?" + ENTER)
    page.until(lambda: page.count(".results"))
    assert page.text(".call p") == "calls weather"
    assert page.text(".call code") == '{\n  "city": "Oslo"\n}'
    page.press_button(".results textarea")
    page.press('{"rain": true}')
    page.press_button(".results .primary")
    page.until(lambda: page.text(ANSWER) == "It rains.")
    told = asked(page)[-1]["messages"]
    assert told[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert told[2] == {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'}
    assert '"rain": true' in page.text(".tool code")


BROKEN = chunks({"content": "so"}, end="")
ENDED = chunks({"content": "so"}, end='data: {"error":{"message":"no more"}}\n\ndata: [DONE]\n\n')


@pytest.mark.parametrize(
    ("answer", "message", "remedy"),
    [
        (BROKEN, "the answer broke off", "Look whether the server runs"),
        (ENDED, "no more", "The server's log says more"),
        (refused(429, "too many wait", Retry_After="7"), "too many wait", "Retry in 7 s"),
        (refused(400, "temperature is wrong", param="temperature"), "temperature is wrong", "Correct temperature"),
        (refused(400, "too long", param="messages"), "too long", "begin a new conversation"),
        (refused(413, "too large"), "too large", "Take a picture away"),
        (refused(503, "the model is being loaded"), "the model is being loaded", "Wait until"),
        (refused(504, "too late"), "too late", "Allow fewer tokens"),
    ],
)
def test_what_goes_wrong_is_said_in_red_with_what_to_do_and_a_retry(page, answer, message, remedy):
    script_answers(page, answer, chunks({"content": "at last"}))
    page.type("question", "How many?" + ENTER)
    page.until(lambda: page.count(".failure"))
    assert page.text(".failure .what") == message
    assert remedy in page.text(".failure .remedy")
    assert page.script("return document.querySelector('.failure').role") == "alert"
    red, green, blue = page.script(
        "return getComputedStyle(document.querySelector('.failure .what')).color.match(/\\d+/g).map(Number)"
    )
    assert red > 2 * max(green, blue)
    page.press_button(".failure .primary")
    page.until(lambda: page.text(ANSWER) == "at last")
    assert page.count(".failure") == 0
    assert [roles(page), page.count("#messages .user")] == [[("user", "How many?")], 1]


def test_a_question_that_failed_can_be_edited_or_left_for_another(page):
    failed = refused(400, "no")
    script_answers(page, failed, failed, chunks({"content": "yes"}))
    answered(page, "one?")
    page.press_button(".failure .actions button", 1)
    assert page.script("return document.activeElement.value") == "one?"
    page.press(ESCAPE)
    page.type("question", "two?" + ENTER)
    page.until(lambda: page.text("#messages .user .text") == "two?" and page.count(".failure"))
    page.type("question", "three?" + ENTER)
    page.until(lambda: page.text(ANSWER) == "yes")
    assert roles(page) == [("user", "three?")]


def test_a_stopped_answer_that_said_nothing_can_be_asked_for_again(page):
    page.script(PAUSED)
    page.type("question", "Hello" + ENTER)
    page.until(lambda: not page.script("return document.getElementById('stop').hidden"))
    page.click("stop")
    page.until(lambda: page.text(FACTS) == "stopped")
    script_answers(page, chunks({"content": "yes"}))
    page.press_button("#messages .regenerate")
    page.until(lambda: page.text(ANSWER) == "yes")


def test_the_page_says_how_the_server_is_and_comes_alive_by_itself(page, served, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(served.lifecycle, "_engine", None)
        page.until(lambda: page.text("#status") == "the model is being loaded")
        assert page.script("return document.getElementById('unknown').hidden") is False
        page.type("question", "Hello" + ENTER)
        page.until(lambda: page.text(".failure .what") == "the model is being loaded")
    page.until(lambda: page.text("#status") == "demo · ready")
    assert page.script("return document.getElementById('unknown').hidden")
    with monkeypatch.context() as patch:
        patch.setattr(served.lifecycle, "draining", True)
        page.until(lambda: "about to end" in page.text("#status"))
    with monkeypatch.context() as patch:
        patch.setattr(served.lifecycle, "error", RuntimeError("lost"))
        page.until(lambda: "the engine has failed" in page.text("#status"))
    page.script("window.fetch = () => Promise.reject(new TypeError('refused'))")
    page.until(lambda: page.text("#status") == "the server does not answer")


@pytest.mark.slow
def test_the_page_asks_for_the_key_that_the_server_wants_and_then_works(browser):
    with serving({"api_key": ("secret",)}, max_num_seqs=1, graph_mode="none") as other:
        browser.open(other.url)
        browser.until(lambda: browser.focused() == "key-field")
        browser.type("key-field", "wrong" + ENTER)
        browser.until(lambda: browser.text("#key-note") == "The server does not know this key.")
        browser.script("document.getElementById('key-field').value = ''")
        browser.type("key-field", "secret" + ENTER)
        browser.until(lambda: browser.text("#status") == "demo · ready")
        browser.until(lambda: browser.focused() == "question")
        assert browser.script("return document.getElementById('key').hidden")
        assert "#### 33" in answered(browser, QUESTION)


@pytest.mark.slow
def test_the_page_works_under_a_path(browser):
    with serving({"root_path": "/llm/a"}, max_num_seqs=1, graph_mode="none") as other:
        browser.open(other.url)
        browser.driver.get(f"{other.url}/llm/a")
        browser.until(lambda: browser.text(".welcome h2") == "demo")
        assert browser.script("return location.pathname") == "/llm/a/"
        browser.script("performance.clearResourceTimings()")
        browser.driver.refresh()
        browser.until(lambda: browser.text(".welcome h2") == "demo")
        assert "#### 33" in answered(browser, QUESTION, temperature=0)
        loaded = browser.script("return performance.getEntriesByType('resource').map(each => each.name)")
        assert all(each.startswith(f"{other.url}/llm/a/") for each in loaded)
        assert browser.errors() == []


def test_the_page_asks_no_other_host_and_the_console_stays_empty(page, served):
    page.requested()
    page.open(served.url)
    answered(page, QUESTION)
    page.until(lambda: page.text("#rate") != "–")
    asked_for = page.requested()
    assert f"{served.url}/v1/chat/completions" in asked_for
    assert [url for url in asked_for if not url.startswith((served.url, "about:"))] == []
    assert page.errors() == []
