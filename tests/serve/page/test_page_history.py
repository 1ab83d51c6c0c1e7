"""Conversations that the browser keeps: opened, exported, imported and deleted."""

import base64
import json

import pytest

from ostinato.serve.api.page import DIRECTORY
from tests.support.page_chat import ANSWER, ENTER, ESCAPE, answered, asked, begun, chunks, script_answers

PICTURE = "data:image/png;base64," + base64.b64encode((DIRECTORY / "examples/two-shapes.png").read_bytes()).decode()
DOWNLOADS = """window.saved = [];
const real = URL.createObjectURL;
URL.createObjectURL = (blob) => { blob.text().then((text) => window.saved.push(text)); return real(blob); };
HTMLAnchorElement.prototype.click = function () { window.savedAs = this.download; };"""
"""What the page would save as a file is in window.saved."""


@pytest.fixture
def talked(page):
    """The page after two conversations: one? of one question, two? of two."""
    script_answers(page, *(chunks({"content": f"**{name}**"}) for name in ("a", "b", "c", "d", "e")))
    answered(page, "one?")
    page.click("new")
    answered(page, "two?")
    answered(page, "two more?")
    page.until(lambda: titles(page) == ["two?", "one?"])
    return page


def titles(page):
    return page.script("return [...document.querySelectorAll('#conversations .open')].map((it) => it.textContent)")


def said(page):
    return page.script("return [...document.querySelectorAll('#messages .text')].map((it) => it.textContent)")


def reopened(page, served):
    page.open(served.url, keep=True)
    page.until(lambda: page.text(".welcome h2"))


def saved(page):
    return json.loads(page.until(lambda: page.script("return window.saved"))[-1])


def file_of(tmp_path, data):
    path = tmp_path / "conversations.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def conversations(*messages):
    told = {"title": "t", "model": "demo", "changed": 1, "messages": list(messages)}
    return {"format": "ostinato-conversations", "version": 1, "conversations": [told]}


def test_conversations_are_there_when_the_page_is_opened_again(talked, served):
    reopened(talked, served)
    assert titles(talked) == ["two?", "one?"]
    talked.press_button("#conversations .open", 1)
    talked.until(lambda: said(talked) == ["one?", "a"])
    assert talked.text("#messages strong") == "a"
    script_answers(talked, chunks({"content": "on"}))
    answered(talked, "and?")
    assert [each["content"] for each in asked(talked)[-1]["messages"]] == ["one?", "**a**", "and?"]
    talked.until(lambda: titles(talked) == ["one?", "two?"])


def test_the_address_names_the_conversation_that_is_open(talked, served):
    talked.driver.refresh()
    talked.until(lambda: said(talked) == ["two?", "b", "two more?", "c"])
    talked.click("new")
    talked.driver.refresh()
    talked.until(lambda: talked.text(".welcome h2"))
    talked.open(f"{served.url}/#c=0123", keep=True)
    talked.until(lambda: "not kept in this browser" in talked.text("#notice-text"))


def test_a_conversation_is_deleted_and_brought_back(talked):
    talked.press_button("#conversations li:first-child .small", 2)
    talked.until(lambda: titles(talked) == ["one?"])
    assert talked.text("#notice-text") == "Deleted: two?"
    assert said(talked) == []
    talked.press_button("#notice-actions button")
    talked.until(lambda: said(talked) == ["two?", "b", "two more?", "c"])
    assert set(titles(talked)) == {"one?", "two?"}


@pytest.mark.parametrize("how", ["one", "all"])
def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(page, served, steps, how):
    page.type("question", "Ava has 3 apples and buys 4 more. How many has she?" + ENTER)
    begun(page, steps)
    page.until(lambda: titles(page))
    if how == "one":
        page.press_button("#conversations .small", 2)
    else:
        page.click("delete-all")
        page.press_button("#sure button[value=yes]")
    page.until(lambda: titles(page) == [])
    served.unfinished(0)
    steps.go()
    page.until(lambda: page.script("return document.getElementById('stop').hidden"))
    reopened(page, served)
    assert titles(page) == []


def test_a_question_that_has_no_answer_is_asked_again_when_it_is_opened_later(page, served):
    script_answers(page, chunks({"content": "so"}, end=""))
    answered(page, "why?")
    page.until(lambda: titles(page))
    reopened(page, served)
    page.press_button("#conversations .open")
    page.until(lambda: page.text(".failure .what") == "This was not answered.")
    script_answers(page, chunks({"content": "because"}))
    page.press_button(".failure .primary")
    page.until(lambda: said(page) == ["why?", "because"])
    assert page.count(".failure") == 0


def test_all_are_deleted_once_that_is_confirmed(talked, served):
    talked.click("delete-all")
    talked.press_button("#sure button[value=no]")
    assert len(titles(talked)) == 2
    talked.click("delete-all")
    talked.press_button("#sure button[value=yes]")
    talked.until(lambda: titles(talked) == [])
    reopened(talked, served)
    assert titles(talked) == []
    assert talked.script("return document.getElementById('export').disabled")


def test_what_is_exported_can_be_imported(talked, served, tmp_path):
    talked.script(DOWNLOADS)
    talked.click("export")
    data = saved(talked)
    assert [each["title"] for each in data["conversations"]] == ["two?", "one?"]
    talked.script("window.saved.length = 0")
    talked.press_button("#conversations li:last-child .small", 1)
    assert [each["title"] for each in saved(talked)["conversations"]] == ["one?"]
    assert talked.script("return window.savedAs") == "one-.json"
    talked.open(served.url)
    talked.until(lambda: talked.text(".welcome h2"))
    talked.put_files("import-file", file_of(tmp_path, data))
    talked.until(lambda: titles(talked) == ["two?", "one?"])
    assert talked.text("#notice-text") == "Imported: 2 conversations."
    talked.press_button("#conversations .open", 0)
    talked.until(lambda: said(talked) == ["two?", "b", "two more?", "c"])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("no json", "it is not JSON"),
        ("null", "it should be a file of ostinato-conversations, version 1"),
        ({"format": "other", "version": 1, "conversations": []}, "it should be a file of"),
        ({**conversations(), "conversations": {}}, "conversations should be a list"),
        (conversations("text"), "conversations[0].messages[0] should be an object"),
        (conversations({"role": "system", "text": "a"}), "messages[0].role should be user, assistant or tool"),
        (conversations({"role": "user", "text": 1}), "messages[0].text should be a text"),
        (conversations({"role": "user", "text": "", "images": ["https://example.org/x.png"]}), "images[0] should be a"),
        (conversations({"role": "user", "text": "", "images": ["data:image/svg+xml;base64,AAAA"]}), "images[0]"),
        (conversations({"role": "user", "text": "", "images": ["data:text/html;base64,AAAA"]}), "images[0]"),
        (conversations({"role": "assistant", "text": "", "calls": [{"id": "a"}]}), "calls[0].name should be a text"),
        (conversations({"role": "tool", "text": "", "id": [], "name": "a"}), "messages[0].id should be a text"),
    ],
)
def test_a_file_that_is_no_export_is_refused_with_the_place(page, tmp_path, data, why):
    page.put_files("import-file", file_of(tmp_path, data))
    page.until(lambda: why in page.text("#notice-text"))
    assert page.text("#notice-text").startswith("conversations.json was not imported: ")
    assert titles(page) == []


ATTACK = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
LINKS = "[a](javascript:document.title='broken') <a href=\"javascript:document.title='broken'\">b</a>"


def test_nothing_that_is_imported_becomes_markup_or_runs(page, tmp_path):
    call = {"id": ATTACK, "name": ATTACK, "arguments": ATTACK}
    told = conversations(
        {"role": "user", "text": ATTACK, "images": [PICTURE]},
        {"role": "assistant", "text": f"{ATTACK}\n\n{LINKS}", "reasoning": ATTACK, "facts": ATTACK, "calls": [call]},
        {"role": "tool", "id": "a", "name": ATTACK, "text": ATTACK},
        {"role": "assistant", "text": "", "calls": [call]},
    )
    told["conversations"][0] |= {"title": ATTACK, "model": ATTACK, "id": "../x", "__proto__": {"polluted": 1}}
    page.put_files("import-file", file_of(tmp_path, told))
    page.until(lambda: titles(page))
    page.press_button("#conversations .open")
    page.until(lambda: page.count(".results"))
    assert page.count("#sides img, #sides script, #sides [onerror], #sides a[href^='javascript']") == 0
    assert ATTACK in page.text(".reasoning")
    assert ATTACK in page.text(".tool code")
    assert page.driver.title == "Ostinato"
    assert page.script("return ({}).polluted === undefined")
    assert page.errors() == []


def test_hostile_answers_of_the_model_and_of_tools_run_nothing_on_the_real_page(page):
    call = {"index": 0, "id": "c", "function": {"name": ATTACK, "arguments": ATTACK}}
    script_answers(
        page, chunks({"reasoning_content": ATTACK}, {"content": f"{ATTACK}\n\n{LINKS}"}, {"tool_calls": [call]})
    )
    page.type("question", ATTACK + ENTER)
    page.until(lambda: page.count(".results"))
    page.press_button(".results textarea")
    page.press(ATTACK)
    page.press_button(".results .primary")
    page.until(lambda: page.count(".tool"))
    assert page.count("#sides img, #sides script, #sides [onerror], #sides a[href^='javascript']") == 0
    assert page.driver.title == "Ostinato"
    assert page.errors() == []


@pytest.mark.parametrize("name", ["QuotaExceededError", "UnknownError"])
def test_what_the_browser_does_not_keep_is_said_and_the_conversation_goes_on(page, name):
    page.script(f"IDBObjectStore.prototype.put = () => {{ throw new DOMException('full', '{name}'); }}")
    script_answers(page, chunks({"content": "yes"}), chunks({"content": "still"}))
    answered(page, "one?")
    page.until(lambda: page.text("#notice-text").startswith("This conversation is not kept: "))
    why = "the browser has no more room. Export or delete others." if name[0] == "Q" else "keeps nothing here"
    assert why in page.text("#notice-text")
    answered(page, "two?")
    assert page.text(ANSWER) == "still"
    assert titles(page) == []


def test_a_browser_without_a_database_says_so(page, served):
    script = page.driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument",
        {"source": "window.indexedDB && (IDBFactory.prototype.open = () => { throw new Error('forbidden'); });"},
    )
    try:
        page.open(served.url)
        told = "Conversations are not kept: the browser keeps nothing here (forbidden)."
        page.until(lambda: page.text("#notice-text") == told)
        assert "#### " in answered(page, "Ava has 3 apples and buys 4 more. How many apples has she?")
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


RENAMED = "#conversations li:first-child"


@pytest.mark.parametrize("how", ["Enter", "a press elsewhere", "Escape"])
def test_a_conversation_is_renamed_in_its_row(talked, served, how):
    talked.press_button(f"{RENAMED} .small", 0)
    assert talked.script("return document.activeElement.value") == "two?"
    talked.press("of apples", *([ENTER] if how == "Enter" else [ESCAPE] if how == "Escape" else []))
    if how == "a press elsewhere":
        talked.press_button("#messages .text")
    expected = "two?" if how == "Escape" else "of apples"
    talked.until(lambda: titles(talked) == [expected, "one?"])
    assert talked.text("#messages .text") == "two?"
    script_answers(talked, chunks({"content": "on"}))
    answered(talked, "and?")  # which keeps the conversation that is open once more
    reopened(talked, served)
    assert titles(talked) == [expected, "one?"]


def test_a_name_that_is_being_written_stays_when_an_answer_comes_meanwhile(talked):
    script_answers(talked, chunks({"content": "on"}))
    talked.type("question", "and?\n")
    talked.press_button(f"{RENAMED} .small", 0)
    talked.press("of app")
    talked.until(lambda: "on" in said(talked))
    talked.press("les", ENTER)
    talked.until(lambda: titles(talked) == ["of apples", "one?"])


def test_conversations_are_found_by_a_word_of_their_name_or_of_what_was_said(talked):
    for words, found in (("TWO MORE", ["two?"]), ("one", ["one?"]), ("**a", ["one?"]), ("?", ["two?", "one?"])):
        talked.script("document.getElementById('search').value = ''")
        talked.type("search", words)
        talked.until(lambda found=found: titles(talked) == found)
        assert talked.script("return document.getElementById('none-found').hidden")
    talked.type("search", "nothing")
    talked.until(lambda: titles(talked) == [])
    assert "No conversation has these words." in talked.seen()
    talked.click("delete-all")
    talked.press_button("#sure button[value=yes]")
    talked.until(lambda: "Conversations are kept here" in talked.seen())
    assert talked.script("return document.getElementById('search').hidden")
