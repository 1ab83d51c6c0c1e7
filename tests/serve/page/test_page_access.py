"""The page for everybody: by keyboard, by screen reader, on a phone, in either scheme."""

import json

import pytest

from tests.support.axe import violations
from tests.support.page_chat import (
    ANSWER,
    ENTER,
    ESCAPE,
    QUESTION,
    SHIFT,
    TAB,
    answered,
    chunks,
    refused,
    script_answers,
)

RICH = """# A title

Some *text* with `code`, [a link](https://example.org/) and $a^2$.

```python
def f(a): return "b" + str(1)  # why
```

| a | b |
|---|---|
| 1 | 2 |

$$\\frac{a}{b}$$
"""
REASONED = ({"reasoning_content": "thinking"}, {"content": RICH})
CALL = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": '{"a": 1}'}}


def show_all(page):
    """A page with an answer of every kind, an error, a wrong setting and a notice."""
    script_answers(page, chunks(*REASONED), chunks({"tool_calls": [CALL]}), refused(500, "it failed"))
    answered(page, "first?")
    page.until(lambda: page.count(".katex") == 2 and page.count(".hljs-keyword"))
    answered(page, "second?")
    answered(page, "third?")
    page.script(
        "document.querySelectorAll('details').forEach((each) => (each.open = true));"
        "const it = document.getElementById('temperature'); it.value = 'hot'; it.dispatchEvent(new Event('input'))"
    )
    page.press_button("#conversations .small", 2)
    page.until(lambda: page.text("#notice-text").startswith("Deleted"))


def test_axe_is_there_and_finds_what_is_wrong(page):
    page.script("document.getElementById('status').append(document.createElement('img'))")
    assert [found for found in violations(page) if found.startswith("image-alt")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_axe_finds_nothing_on_the_first_view(page, size, scheme):
    page.resize(*size, phone=size[0] < 500, scheme=scheme)
    assert violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_axe_finds_nothing_in_a_conversation_with_everything_in_it(page, size, scheme):
    show_all(page)
    page.resize(*size, phone=size[0] < 500, scheme=scheme)
    page.script("document.getElementById('chat').scrollTop = 0")
    assert violations(page) == []


@pytest.mark.parametrize("side", ["engine", "history"])
def test_axe_finds_nothing_on_the_sides_of_a_phone(page, side):
    answered(page, QUESTION)
    page.resize(390, 844, phone=True)
    page.click(f"show-{side}")
    assert violations(page) == []


def test_axe_finds_nothing_while_a_question_is_edited_or_all_is_to_be_deleted(page):
    answered(page, QUESTION)
    page.press_button("#messages .edit")
    assert violations(page) == []
    page.click("delete-all")
    page.until(lambda: page.script("return document.getElementById('sure').open"))
    assert violations(page) == []


def test_everything_is_reached_by_tab_and_shows_that_it_has_the_focus(page):
    script_answers(page, chunks({"content": "yes"}))
    answered(page, "Hello")
    page.until(lambda: page.count("#conversations li"))
    page.click("show-engine")
    page.script("document.activeElement.blur(); document.querySelector('.skip').focus()")
    order, seen = [page.focused()], []
    for _ in range(45):
        page.press(TAB)
        order.append(page.focused())
        seen.append(
            page.script(
                "const it = document.activeElement, box = it.id === 'question' ? it.closest('.box') : it;"
                "const style = getComputedStyle(box);"
                "return style.outlineStyle === 'solid' || style.boxShadow !== 'none'"
            )
        )
        if order[-1] == "Settings":
            page.press(ENTER)
        if order[-1] == "The whole plan as JSON":
            break
    fields = ["temperature", "top-p", "top-k", "min-p", "repetition-penalty", "max-completion-tokens", "seed", "system"]
    assert order == [
        *("Skip to the question", "show-history", "theme", "show-engine"),
        *("new", "search", "Hello", "✎", "↓", "×", "export", "import", "delete-all"),
        *("messages", "Copy", "Edit", "details", "Copy", "Regenerate"),
        *("question", "send", "Settings", *fields),
        *(
            "engine",
            "batch",
            "checkpoint",
            "blocks",
            "slots",
            "graph",
            "What was decided, and why",
            "The whole plan as JSON",
        ),
    ]
    assert all(seen)


def test_a_conversation_is_led_by_the_keyboard_alone(page):
    script_answers(page, *(chunks({"content": text}) for text in ("one", "two", "three")))
    page.press("first?", ENTER)
    page.until(lambda: page.text(ANSWER) == "one")
    assert page.focused() == "question"
    page.press(SHIFT + TAB)
    assert page.focused() == "Regenerate"
    page.driver.switch_to.active_element.send_keys(ENTER)
    page.until(lambda: page.text(ANSWER) == "two")


def test_the_sides_are_opened_and_closed_and_say_so(page):
    for side, is_open in (("history", True), ("engine", False)):
        shown = f"return document.getElementById('{side}').offsetWidth > 0"
        expanded = f"return document.getElementById('show-{side}').ariaExpanded"
        for now in (is_open, not is_open, is_open):
            assert [page.script(shown), page.script(expanded)] == [now, str(now).lower()]
            page.click(f"show-{side}")


def test_the_sides_are_as_they_were_left_when_the_page_is_opened_again(page, served):
    page.click("show-engine")
    page.click("show-history")
    page.open(served.url, keep=True)
    page.until(lambda: page.text(".welcome h2"))
    assert page.script("return document.getElementById('engine').hidden") is False
    assert page.script("return document.getElementById('history').hidden") is True


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_one_side_at_a_time_without_scrolling_sideways(page, scheme):
    page.resize(390, 844, phone=True, scheme=scheme)
    answered(page, QUESTION + " " + "x" * 200)
    reached = """return ['chat', 'engine', 'history'].filter((it) => {
      const box = document.getElementById(it).getBoundingClientRect();
      const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
      return box.width && document.getElementById(it).contains(top);
    })"""
    wider = """return [...document.querySelectorAll('html, body, main, nav, aside, header, section, figure, p, dl, dd')]
      .filter((it) => it.scrollWidth > it.clientWidth + 1 && it.clientWidth > 1 && it.id !== 'status')
      .map((it) => it.id || it.outerHTML)"""
    assert page.script(reached) == ["chat"]
    for side in ("engine", "history"):
        page.click(f"show-{side}")
        assert page.script(reached) == [side]
        assert page.script(wider) == []
        page.click(f"show-{side}")
        assert page.script(reached) == ["chat"]
    assert page.script(wider) == []


def test_a_phone_has_one_row_on_top_and_no_word_of_keys_that_it_has_not(page):
    page.resize(390, 844, phone=True)
    assert page.script("return document.querySelector('header').offsetHeight") <= 56
    tops = page.script(
        "return [...document.querySelector('header').children].map((it) => it.getBoundingClientRect())"
        ".map(({ top, height }) => top + height / 2)"
    )
    assert max(tops) - min(tops) <= 2
    assert "Shift" not in page.seen()
    assert "Esc" not in page.seen()
    page.resize(1440, 900)
    assert "Shift+Enter" in page.seen()


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
    texts = [(ink, paper) for ink in ("ink", "dim", "accent", "third", "fourth") for paper in (*papers, "raised")]
    texts += [("on-accent", "accent"), ("third", "alarm"), ("ink", "alarm")]
    shapes = [(ink, paper) for ink in ("edge", "second") for paper in papers]
    assert min(page.script(CONTRASTS, texts)) >= 4.5
    assert min(page.script(CONTRASTS, shapes)) >= 3
    is_dark = page.script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert is_dark == (scheme == "dark")


GROUND = "return getComputedStyle(document.body).backgroundColor"
DARK, LIGHT = "rgb(20, 23, 26)", "rgb(247, 246, 243)"


@pytest.mark.parametrize(("scheme", "grounds"), [("light", (LIGHT, DARK)), ("dark", (DARK, LIGHT))])
def test_the_theme_is_the_systems_until_it_is_switched_and_stays_as_it_was_chosen(page, served, scheme, grounds):
    page.resize(1280, 900, scheme=scheme)
    assert page.script(GROUND) == grounds[0]
    page.click("theme")
    assert page.script(GROUND) == grounds[1]
    page.open(served.url, keep=True)
    page.resize(1280, 900, scheme=scheme)
    assert page.script(GROUND) == grounds[1]
    page.click("theme")
    assert page.script(GROUND) == grounds[0]


@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_settings_lie_over_the_chat_and_move_nothing(page, size):
    answered(page, QUESTION)
    page.resize(*size, phone=size[0] < 500)
    place = "return document.querySelector('.assistant').getBoundingClientRect().top"
    is_open = "return document.getElementById('settings').open"
    seen = """const box = document.querySelector('#settings .sheet').getBoundingClientRect();
    return [box.top >= 0, box.left >= 0, box.right <= innerWidth, box.bottom <= innerHeight]"""
    before = page.script(place)
    page.press_button("#settings summary")
    assert page.script(is_open)
    assert page.script(seen) == [True] * 4
    assert page.script(place) == before
    page.press(ESCAPE)
    assert not page.script(is_open)
    assert page.focused() == "Settings"
    page.press_button("#settings summary")
    page.click("status")
    assert not page.script(is_open)


def test_words_of_the_engines_side_say_what_they_mean_to_a_mouse_a_finger_and_a_keyboard(page):
    page.click("show-engine")
    for number in range(page.count(".term")):
        shown = "return getComputedStyle(document.querySelectorAll('.term')[arguments[0]], '::after').content"
        assert page.script(shown, number) == "none"
        page.script("document.querySelectorAll('.term')[arguments[0]].focus()", number)
        meaning = page.script("return document.querySelectorAll('.term')[arguments[0]].dataset.meaning", number)
        assert page.script(shown, number) == json.dumps(meaning)
    assert page.count(".term") >= 5
