"""The page's Markdown, code and formulas, in a browser, on a page without any protection but its own."""

import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ostinato.serve.api.page import DIRECTORY
from tests.support.browser import browsing


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def browser():
    with (
        browsing() as browser,
        ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=DIRECTORY)) as files,
    ):
        threading.Thread(target=files.serve_forever, daemon=True).start()
        browser.driver.get(f"http://127.0.0.1:{files.server_port}/icon.svg")
        browser.driver.get(f"http://127.0.0.1:{files.server_port}/styles/base.css")
        yield browser
        files.shutdown()


def rendered(browser, text):
    return browser.wait_for(
        """const { markdown } = await import("/text/markdown.js");
        const node = document.createElement("div");
        document.body.replaceChildren(node);
        node.append(...markdown(arguments[0]));
        return node.innerHTML;""",
        text,
    )


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "<p>plain</p>"),
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("**bold** and *slanted*", "<p><strong>bold</strong> and <em>slanted</em></p>"),
        ("**bold with `code`**", "<p><strong>bold with <code>code</code></strong></p>"),
        ("2 * 3 * 4 and a ** b", "<p>2 * 3 * 4 and a ** b</p>"),
        ("`a < b` and ``a `tick` ``", "<p><code>a &lt; b</code> and <code>a `tick` </code></p>"),
        ("# Title\ntext", "<h3>Title</h3><p>text</p>"),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("> said\n> so", "<blockquote><p>said\nso</p></blockquote>"),
        ("one\n\n---\n\ntwo", "<p>one</p><hr><p>two</p>"),
        (
            "| a | b |\n|---|:-:|\n| 1 | **2** |",
            '<div class="wide" tabindex="0" role="group" aria-label="Table"><table>'
            '<thead><tr><th>a</th><th class="to-center">b</th></tr></thead>'
            '<tbody><tr><td>1</td><td class="to-center"><strong>2</strong></td></tr></tbody></table></div>',
        ),
        (
            "[there](https://example.org/a)",
            '<p><a href="https://example.org/a" rel="noreferrer noopener" target="_blank">there</a></p>',
        ),
        ("> " * 70 + "deep\n\nend", f'<p class="plain">{"&gt; " * 70}deep</p><p>end</p>'),
        ("17 + 25 = 42. #### 42", "<p>17 + 25 = 42. #### 42</p>"),
        ("it costs $5, not $6 or $7", "<p>it costs $5, not $6 or $7</p>"),
        ("", ""),
    ],
)
def test_markdown_becomes_elements(browser, text, html):
    assert rendered(browser, text) == html


CODE = "```python\ndef f(a):\n    return a < 1  # why\n```\nafter"


def test_code_has_its_language_a_button_that_copies_it_and_colours(browser):
    rendered(browser, CODE)
    browser.until(lambda: browser.count(".code .hljs-keyword") == 2)
    assert browser.text(".code code") == "def f(a):\n    return a < 1  # why"
    assert browser.text(".code-bar span") == "python"
    assert browser.text(".hljs-comment") == "# why"
    assert browser.text("p") == "after"
    browser.script(
        "window.copied = []; Object.defineProperty(navigator, 'clipboard',"
        "{ configurable: true, value: { writeText: async (text) => { window.copied.push(text); } } })"
    )
    browser.press_button(".code-bar button")
    assert browser.until(lambda: browser.script("return window.copied")) == ["def f(a):\n    return a < 1  # why"]


@pytest.mark.parametrize("language", ["", "nothing-known", "../../../secret", "constructor", "__proto__"])
def test_code_in_a_language_that_is_not_known_stays_plain(browser, language):
    rendered(browser, f"```{language}\n<b> & so on\n```")
    assert browser.text(".code code") == "<b> & so on"
    assert browser.count(".code code *") == 0


def test_code_that_still_grows_is_code_already(browser):
    rendered(browser, "```\nstill grow")
    assert browser.text(".code code") == "still grow"


@pytest.mark.parametrize(
    ("text", "display"),
    [
        ("so $a^2 + b^2$ it is", False),
        ("so \\(a^2 + b^2\\) it is", False),
        ("$$a^2 + b^2$$", True),
        ("\\[\na^2\n+ b^2\n\\]\nafter", True),
        ("- in a list $$a^2 + b^2$$", True),
    ],
)
def test_formulas_are_set_once_one_appears(browser, text, display):
    rendered(browser, text)
    browser.until(lambda: browser.count(".maths .katex"))
    assert browser.count(".maths.display") == display
    assert "".join(browser.text(".maths annotation").split()) == "a^2+b^2"
    assert browser.count(".maths math") == 1


def test_a_formula_that_cannot_be_read_is_shown_as_it_was_written(browser):
    rendered(browser, "$\\frac{a$ and $\\href{javascript:document.title='broken'}{a}$ and `$x$`")
    browser.until(lambda: browser.count(".maths .katex, .maths .katex-error") == 2)
    assert browser.text(".katex-error") == "\\frac{a"
    assert browser.count(".maths a") == 0
    assert browser.text("code") == "$x$"


def test_what_is_there_already_stays_while_a_text_grows(browser):
    same = browser.wait_for(
        """const { Growing } = await import("/text/markdown.js");
        const node = document.createElement("div");
        const growing = new Growing(node);
        growing.show("# a\\n\\nfirst\\n\\nsec");
        const [title, first, second] = node.childNodes;
        growing.show("# a\\n\\nfirst\\n\\nsecond\\n\\n- third");
        const now = node.childNodes;
        return [now[0] === title, now[1] === first, now[2] === second, node.textContent];"""
    )
    assert same == [True, True, False, "afirstsecondthird"]


HOSTILE = [
    "<img src=x onerror=\"document.title='broken'\">",
    "<script>document.title='broken'</script>",
    "</p><svg onload=\"document.title='broken'\">",
    "[click](javascript:document.title='broken')",
    "[click](JaVaScRiPt:document.title='broken')",
    "[click](data:text/html,<script>1</script>)",
    "[click](vbscript:msgbox)",
    "[click](/v1/models)",
    "<javascript:document.title='broken'>",
    "[a]: javascript:document.title='broken'\n\n[a]",
    "![picture](https://example.org/x.png)",
    "![picture](javascript:document.title='broken')",
    '[a](https://example.org/"onmouseover="document.title=1)',
    "`<b>`\n\n```\n</code></pre><script>document.title='broken'</script>\n```",
    "```html\n<img src=x onerror=\"document.title='broken'\">\n</code><script>document.title='broken'</script>\n```",
    '```xml\n<span class="hljs-x" onclick="1">&lt;img src=x onerror=1&gt;</span>\n```',
    "```json\n\"</span><script>document.title='broken'</script>\"\n```",
    "| <img src=x onerror=1> | b |\n|---|---|\n| <iframe src=/> | <style>*{display:none}</style> |",
    "# <object data=x>\n\n> <embed src=x>\n\n- <form action=/><input>",
    "&lt;img src=x onerror=1&gt; &#60;script&#62;1&#60;/script&#62;",
    "$\\includegraphics{https://example.org/x.png}$ $\\htmlData{a=b}{c}$ $\\url{javascript:1}$",
    "$$\\text{<img src=x onerror=\"document.title='broken'\">}$$",
]
ALLOWED = "p,pre,code,strong,em,a,h3,ul,li,blockquote,table,thead,tbody,tr,th,td,span,div,button"
MATHS = "math,semantics,mrow,mi,mo,mn,mtext,mstyle,annotation,svg,path,mspace,mpadded,menclose,merror,mphantom"
HARMLESS = {
    *("href", "rel", "target", "start", "class", "type", "aria-label", "tabindex", "role", "style", "aria-hidden"),
    *("xmlns", "encoding", "mathcolor", "title", "data-label", "display", "mathvariant", "stretchy"),
}


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_writes_is_never_markup_of_the_page(browser, text):
    rendered(browser, text)
    if re.search(r"```\w", text):
        browser.until(lambda: browser.count(".code code span"))
    if "$" in text:
        browser.until(lambda: not browser.count(".maths:not(:has(.katex, .katex-error))"))
    names = browser.script("return [...document.querySelectorAll('body > div *')].map((it) => it.localName)")
    assert set(names) <= {*ALLOWED.split(","), *MATHS.split(",")}
    attributes = browser.script(
        "return [...document.querySelectorAll('body > div *')].flatMap((it) => it.getAttributeNames())"
    )
    assert set(attributes) <= HARMLESS
    links = browser.script("return [...document.querySelectorAll('div a')].map((it) => it.protocol)")
    assert set(links) <= {"https:"}
    assert browser.driver.title != "broken"


@pytest.mark.parametrize(
    "text",
    [
        "`" * 50_000,
        "`a" * 25_000,
        "*" * 50_000,
        "*a " * 20_000,
        "**a" * 20_000,
        "[" * 50_000,
        "[a](https://" * 5_000,
        ">" * 50_000,
        "- " * 25_000,
        "\n".join(" " * depth + "- a" for depth in range(300)),
        "|" * 50_000 + "\n" + "-|" * 20_000,
        "1" * 50_000,
        "$a " * 15_000,
        "\\(" * 20_000,
        "$$\n" * 5_000,
        "x" * 500_000,
    ],
    ids=lambda text: text[:4],
)
@pytest.mark.slow
def test_a_long_text_that_means_little_is_read_to_its_end(browser, text):
    shown = browser.wait_for(
        """const { markdown } = await import("/text/markdown.js");
        const node = document.createElement("div");
        node.append(...markdown(arguments[0]));
        return node.textContent.trim().slice(-7);""",
        f"{text}\n\nthe end",
    )
    assert shown == "the end"
