"""Pictures on the page: by button, paste and drop, where the model takes them."""

import base64

import httpx2
import pytest

from ostinato.serve.api.page import DIRECTORY
from tests.support.browser import browsing
from tests.support.page_chat import ANSWER, ENTER, FACTS, asked, chunks, script_answers
from tests.support.patience import PATIENCE
from tests.support.serving import serving

PICTURE = DIRECTORY / "examples/two-shapes.png"
GIVEN = """const [how, content, type] = arguments;
const bytes = Uint8Array.from(atob(content), (each) => each.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], "picture.png", { type }));
const target = document.getElementById("question");
const more = { bubbles: true, cancelable: true };
target.dispatchEvent(how === "paste" ? new ClipboardEvent("paste", { clipboardData: data, ...more })
  : new DragEvent("drop", { dataTransfer: data, ...more }));"""


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def seer():
    with serving(model="demo-vl", max_num_seqs=2, graph_mode="none", encoder_graph_mode="none") as served:
        yield served


@pytest.fixture
def page(browser, seer):
    browser.open(seer.url)
    browser.until(lambda: browser.text(".welcome h2") == "demo-vl")
    return browser


def give(page, how, content=None, kind="image/png"):
    if how == "button":
        page.put_files("files", str(PICTURE))
    else:
        page.script(GIVEN, how, base64.b64encode(content or PICTURE.read_bytes()).decode(), kind)


@pytest.mark.parametrize("how", ["button", "paste", "drop"])
def test_a_picture_is_taken_shown_and_asked_about(page, seer, how):
    give(page, how)
    page.until(lambda: page.count("#pictures canvas[data-drawn]") == 1)
    page.type("question", "What is in the picture?" + ENTER)
    page.until(lambda: page.text(FACTS))
    url = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is in the picture?"},
    ]
    body = {"model": "demo-vl", "messages": [{"role": "user", "content": content}]}
    reply = httpx2.post(f"{seer.url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    assert page.text(ANSWER) == reply["choices"][0]["message"]["content"].strip()
    assert "triangle" in page.text(ANSWER)
    assert page.count("#messages .user canvas[data-drawn]") == 1
    assert page.count("#pictures canvas") == 0
    assert page.errors() == []


def test_a_picture_is_taken_away_before_it_is_sent(page):
    give(page, "paste")
    give(page, "paste")
    page.until(lambda: page.count("#pictures canvas") == 2)
    page.press_button("#pictures .remove", 0)
    assert page.count("#pictures canvas") == 1
    script_answers(page, chunks({"content": "yes"}))
    page.type("question", ENTER)
    page.until(lambda: page.text(FACTS) or page.text(ANSWER))
    assert [each["type"] for each in asked(page)[0]["messages"][0]["content"]] == ["image_url"]


def test_what_is_no_picture_is_refused_by_name(page):
    give(page, "drop", b"<svg onload='1'/>", "image/svg+xml")
    page.until(lambda: page.text("#notice-text").startswith("picture.png is not a picture that the model takes"))
    give(page, "paste", b"no png")
    page.until(lambda: "this picture cannot be shown" in page.text("#pictures"))


def test_questions_to_click_come_with_their_pictures(page):
    page.until(lambda: page.count(".example canvas[data-drawn]") == 3)
    page.press_button(".example")
    page.until(lambda: page.text(FACTS))
    assert page.text(ANSWER) == "a blue triangle left of a yellow cross"
    assert "It takes text and pictures." not in page.text("#messages")


def test_a_picture_stays_with_its_conversation(page, seer):
    give(page, "paste")
    page.until(lambda: page.count("#pictures canvas") == 1)
    page.type("question", "What is in the picture?" + ENTER)
    page.until(lambda: page.text(FACTS) and page.count("#conversations li"))
    page.open(seer.url, keep=True)
    page.until(lambda: page.count("#conversations li"))
    page.press_button("#conversations .open")
    page.until(lambda: page.count("#messages .user canvas[data-drawn]") == 1)


@pytest.mark.slow
def test_a_model_of_text_alone_takes_no_picture(browser):
    with serving(max_num_seqs=1, graph_mode="none") as served:
        browser.open(served.url)
        browser.until(lambda: browser.text(".welcome h2") == "demo")
        assert browser.script("return document.getElementById('attach').hidden")
        for how in ("paste", "drop"):
            give(browser, how)
        browser.wait_for("await new Promise((done) => setTimeout(done, 0))")
        assert browser.count("#pictures canvas") == 0
        assert browser.script("return location.pathname") == "/"
