"""The page at `/` in headless Chromium, before a real server of the embedded model."""

import json

import httpx2
import pytest

from tests.support.browser import browsing
from tests.support.serving import serving

QUESTION = "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?"
ANSWER = "#messages .assistant:last-child .text"
FACTS = "#messages .assistant:last-child .facts"
ENTER, ESCAPE, TAB, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue008"

SCRIPTED = """const [answer, real] = [arguments[0], window.fetch];
window.fetch = (path, options) => path !== "./v1/chat/completions" ? real(path, options)
  : Promise.resolve(new Response(answer));"""
"""The next answers are this text, whatever the model would say."""


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def served():
    speculative = {"method": "ngram", "num_speculative_tokens": 2}
    settings = {"speculative": speculative, "speculative_adaptive": "off", "cache_memory": "16MiB"}
    with serving(max_num_seqs=4, **settings) as served:
        yield served


@pytest.fixture
def page(browser, served):
    """The page, opened anew, once it knows the server."""
    browser.open(served.url)
    browser.until(lambda: browser.text("#status") == "demo · ready")
    return browser


@pytest.fixture
def steps(page, served):
    """The engine's probe, which holds its steps, now that the page is open."""
    assert page.text("#status") == "demo · ready"
    served.probe.hold()
    yield served.probe
    served.probe.go()


def answered(page, question, **options):
    """What the page shows as the answer, complete."""
    for name, value in options.items():
        page.script("document.getElementById(arguments[0]).value = arguments[1]", name, value)
    page.type("question", question + ENTER)
    page.until(lambda: page.text(FACTS))
    return page.text(ANSWER)


def chunks(*deltas, end="data: [DONE]\n\n"):
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end


def test_a_question_sent_with_enter_gets_the_answer_that_the_api_gives(page, served):
    shown = answered(page, QUESTION, temperature=0)
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    reply = httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
    assert shown.split() == reply["choices"][0]["message"]["content"].split()
    assert "#### 33" in shown
    assert page.text("#messages .user") == QUESTION
    assert f"{reply['usage']['completion_tokens']} answered" in page.text(FACTS)


def test_an_answer_is_shown_while_it_grows_and_read_aloud_as_a_whole(page, steps):
    page.type("question", QUESTION + ENTER)
    steps.allowed += 8
    early = page.until(lambda: page.text(ANSWER))
    assert page.text("#announcement") == ""
    assert page.text(FACTS) == ""
    steps.allowed += 1000
    page.until(lambda: page.text(FACTS))
    assert page.text(ANSWER).startswith(early[:-1])
    assert len(page.text(ANSWER)) > len(early)
    assert page.text("#announcement") == page.text(ANSWER)
    assert page.script("return document.querySelector('[role=log]').ariaLive") == "off"


def test_shift_and_enter_make_a_line(page):
    page.type("question", "one" + SHIFT + ENTER)
    page.type("question", "two")
    assert page.script("return document.getElementById('question').value") == "one\ntwo"
    assert page.text("#messages .user") == ""


def test_escape_stops_an_answer_and_ends_its_request(page, served, steps):
    aborted = served.stats()["finished"]["abort"]
    page.type("question", QUESTION + ENTER)
    steps.allowed += 8
    page.until(lambda: page.text(ANSWER))
    assert page.focused() == "question"
    page.press(ESCAPE)
    page.until(lambda: page.text(FACTS) == "stopped")
    served.unfinished(0)
    steps.go()
    served.until(lambda: served.stats()["finished"]["abort"] == aborted + 1)
    assert page.script("return document.getElementById('stop').hidden")


def test_a_conversation_goes_on_until_a_new_one_begins(page):
    answered(page, QUESTION)
    alone = page.text(FACTS).split(" asked")[0]
    answered(page, QUESTION)
    assert int(page.text(FACTS).split()[0]) > int(alone.split()[0])
    page.click("reset")
    assert page.text("#messages .user") == ""
    assert page.focused() == "question"
    answered(page, QUESTION)
    assert page.text(FACTS).split(" asked")[0] == alone


def test_reasoning_is_shown_apart_from_the_answer(page):
    page.script(
        SCRIPTED, chunks({"reasoning_content": "17 and "}, {"reasoning_content": "25"}, {"content": "It is **42**."})
    )
    assert answered(page, "?") == "It is 42."
    assert page.text(".reasoning div") == "17 and 25"
    assert page.script("return document.querySelector('.reasoning').open") is False


def test_an_answer_is_rendered_as_markdown_and_never_as_markup(page):
    hostile = "<img src=x onerror=\"document.title='broken'\"> [a](javascript:document.title='broken')\n\n- **b**"
    page.script(SCRIPTED, chunks({"content": hostile}))
    assert "<img src=x" in answered(page, "?")
    assert page.text(f"{ANSWER} li strong") == "b"
    assert page.script("return document.querySelectorAll('#messages img, #messages a').length") == 0
    assert page.driver.title == "Ostinato"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (chunks({"content": "so"}, end=""), "the answer broke off"),
        (chunks({"content": "so"}, end='data: {"error":{"message":"no more"}}\n\ndata: [DONE]\n\n'), "no more"),
    ],
)
def test_an_answer_that_fails_says_why_and_gives_the_question_back(page, answer, message):
    page.script(SCRIPTED, answer)
    assert answered(page, "How many?") == "so"
    assert page.text(FACTS) == message
    assert page.script("return document.getElementById('question').value") == "How many?"


@pytest.fixture
def slow_steps(served):
    """No request of many tokens ends while the page is looked at."""
    served.probe.delay = 0.1
    yield served.probe
    served.probe.delay = 0


def test_the_engines_side_shows_what_traffic_does(page, served, slow_steps):
    steps = page.text("#steps-text")
    prompts = [f"Q: Ava has {n} apples and buys 25 more.\nA:" for n in range(4)]
    body = {"prompt": prompts, "n": 4, "max_tokens": 1000, "ignore_eos": True, "temperature": 1, "stream": True}
    with httpx2.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60):
        page.until(lambda: page.text("#running") == "4 of 4" and page.text("#rate") not in ("–", "0"))
        assert page.text("#batch-figure").split("waiting ")[1].split()[0] == "12"
        for figure, least in (("rate", 8), ("batch", 16), ("steps", 2)):
            plot = f"#{figure}-figure .plot span"
            page.until(lambda plot=plot, least=least: int(page.text(plot).replace(",", "")) >= least)
    slow_steps.delay = 0
    served.until(lambda: served.stats()["running"] == 0)
    page.until(lambda: page.text("#running") == "0 of 4")
    assert page.text("#steps-text") != steps
    assert "steps replayed a graph" in page.text("#steps-text")
    assert "≤" in page.text("#first-token")
    assert "≤" in page.text("#inter-token")
    assert "Since the start" in page.text("#padding-text")
    assert "recomputed tail" in page.text("#prefix")
    for kind in ("blocks", "slots"):
        total = served.stats()["cache"][f"{kind}_total"]
        assert page.text(f"#{kind}-text").endswith(f"of {total:,}")
        assert page.script("return document.querySelector(arguments[0]).offsetWidth", f"#{kind} .cached") > 1
    assert page.script("return document.querySelectorAll('#steps-figure polygon').length") == 3
    assert page.text("#drafts-text").startswith("ngram, up to 2 ahead. Right, by place: ")
    assert page.script("return document.getElementById('drafts-figure').offsetHeight") > 50


def test_the_plan_is_shown_with_every_decision_and_its_reason(page, served):
    plan = served.engine.plan.to_json()
    shown = page.text("#decisions")
    for decision in plan["decisions"]:
        assert decision["topic"].replace("_", " ") in shown
        assert decision["reason"] in shown
    assert "1 to 4 rows as one full graph" in shown
    assert "would have graphs with max_capture_size 1024" in shown
    assert plan["kernels"]["attention"]["reason"] in shown
    assert "weights 12.4 MiB" in page.text("#memory-parts")
    assert '"num_slots"' in page.text("#plan-json")


def test_the_page_says_how_the_server_is_and_comes_alive_by_itself(page, served, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(served.lifecycle, "_engine", None)
        page.until(lambda: page.text("#status") == "the model is being loaded")
        assert page.script("return document.getElementById('unknown').hidden") is False
        page.type("question", "Hello" + ENTER)
        page.until(lambda: page.text(FACTS) == "the model is being loaded")
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
        assert "state cache mode" in browser.text("#decisions")


def test_the_page_works_under_a_path(browser):
    with serving({"root_path": "/llm/a"}, max_num_seqs=1, graph_mode="none") as other:
        browser.open(f"{other.url}/llm/a")
        browser.until(lambda: browser.text("#status") == "demo · ready")
        assert browser.script("return location.pathname") == "/llm/a/"
        assert "#### 33" in answered(browser, QUESTION, temperature=0)
        browser.until(lambda: "state cache mode" in browser.text("#decisions"))
        loaded = browser.script("return performance.getEntriesByType('resource').map(each => each.name)")
        assert all(each.startswith(f"{other.url}/llm/a/") for each in loaded)


def test_the_page_asks_no_other_host_and_the_console_stays_empty(page, served):
    page.requested()
    page.open(served.url)
    answered(page, QUESTION)
    page.until(lambda: page.text("#rate") != "–")
    asked = page.requested()
    assert f"{served.url}/v1/chat/completions" in asked
    assert [url for url in asked if not url.startswith((served.url, "about:"))] == []
    assert page.errors() == []


def test_everything_is_reached_by_tab_and_shows_that_it_has_the_focus(page):
    page.script("document.activeElement.blur(); document.querySelector('.skip').focus()")
    order, outlines = [page.focused()], []
    for _ in range(10):
        page.press(TAB)
        order.append(page.focused())
        outlines.append(page.script("return getComputedStyle(document.activeElement).outlineStyle"))
        if order[-1] == "Options":
            page.press(ENTER)
    assert order == [
        "Skip to the question",
        "messages",
        "question",
        "Options",
        "system",
        "temperature",
        "max-tokens",
        "reset",
        "send",
        "engine",
        "The whole plan as JSON",
    ]
    assert set(outlines) == {"solid"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_chat_and_engine_in_turn_without_scrolling_sideways(page, scheme):
    page.resize(390, 844, phone=True, scheme=scheme)
    answered(page, QUESTION + " " + "x" * 200)
    visible = "return ['chat', 'engine'].filter((it) => document.getElementById(it).offsetHeight > 0)"
    wider = """return [...document.querySelectorAll('html, main, header, section, figure, p, dl, dd')]
      .filter((it) => it.scrollWidth > it.clientWidth + 1 && it.clientWidth > 1).map((it) => it.id || it.outerHTML)"""
    for view in ("chat", "engine", "chat"):
        page.click(f"show-{view}")
        assert page.script(visible) == [view]
        assert page.script(wider) == []
        assert page.script(f"return document.getElementById('show-{view}').ariaPressed") == "true"


CONTRASTS = """const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
function light(name) {
  const probe = document.createElement('i');
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  canvas.fillStyle = getComputedStyle(probe).color;
  probe.remove();
  canvas.fillRect(0, 0, 1, 1);
  const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((it) => it / 255)
    .map((it) => it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4);
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] + 0.05;
}
return arguments[0].map(([ink, paper]) => Math.max(light(ink) / light(paper), light(paper) / light(ink)));"""
"""The contrast of each pair of colours, as WCAG 2 defines it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_controls_stand_out_in_either_scheme(page, scheme):
    page.resize(1280, 900, scheme=scheme)
    papers = ("ground", "sheet")
    texts = [(ink, paper) for ink in ("ink", "dim", "accent", "third") for paper in papers] + [("on-accent", "accent")]
    shapes = [(ink, paper) for ink in ("edge", "second") for paper in papers]
    assert min(page.script(CONTRASTS, texts)) >= 4.5
    assert min(page.script(CONTRASTS, shapes)) >= 3
    is_dark = page.script("return getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 26)"
    assert is_dark == (scheme == "dark")
