"""The page's Markdown, in a browser, on a page without any protection but its own."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ostinato.serve.api.service import DIRECTORY
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
        browser.driver.get(f"http://127.0.0.1:{files.server_port}/page.css")
        yield browser
        files.shutdown()


def rendered(browser, text):
    return browser.wait_for(
        """const { markdown } = await import("/markdown.js");
        const node = document.createElement("div");
        document.body.replaceChildren(node);
        node.append(...markdown(arguments[0]));
        await new Promise((done) => setTimeout(done, 0));
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
        ("`a < b` and ``a `tick` ``", "<p><code>a &lt; b</code> and <code>a `tick`</code></p>"),
        ("# Title\ntext", "<h2>Title</h2><p>text</p>"),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("> said\n> so", "<blockquote><p>said\nso</p></blockquote>"),
        ("```python\n*a* < 1\n\n# b\n```\nafter", "<pre><code>*a* &lt; 1\n\n# b</code></pre><p>after</p>"),
        ("```\nstill grow", "<pre><code>still grow</code></pre>"),
        ("one\n\n---\n\ntwo", "<p>one</p><hr><p>two</p>"),
        (
            "| a | b |\n|---|:-:|\n| 1 | **2** |",
            "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
            "<tbody><tr><td>1</td><td><strong>2</strong></td></tr></tbody></table>",
        ),
        (
            "[there](https://example.org/a)",
            '<p><a href="https://example.org/a" rel="noreferrer noopener" target="_blank">there</a></p>',
        ),
        ("", ""),
    ],
)
def test_markdown_becomes_elements(browser, text, html):
    assert rendered(browser, text) == html


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=\"document.title='broken'\">",
        "<script>document.title='broken'</script>",
        "</p><svg onload=\"document.title='broken'\">",
        "[click](javascript:document.title='broken')",
        "[click](JaVaScRiPt:document.title='broken')",
        "[click](data:text/html,<script>1</script>)",
        "![picture](https://example.org/x.png)",
        '[a](https://example.org/"onmouseover="document.title=1)',
        "`<b>`\n\n```\n</code></pre><script>document.title='broken'</script>\n```",
        "| <img src=x onerror=1> | b |\n|---|---|\n| <iframe src=/> | <style>*{display:none}</style> |",
        "# <object data=x>\n\n> <embed src=x>\n\n- <form action=/><input>",
    ],
)
def test_what_a_model_writes_is_never_markup_of_the_page(browser, text):
    rendered(browser, text)
    allowed = "p,pre,code,strong,em,a,h2,ul,li,blockquote,table,thead,tbody,tr,th,td"
    names = browser.script("return [...document.querySelectorAll('div *')].map((it) => it.localName)")
    assert set(names) <= set(allowed.split(","))
    attributes = browser.script(
        "return [...document.querySelectorAll('div *')].flatMap((it) => it.getAttributeNames())"
    )
    assert set(attributes) <= {"href", "rel", "target", "start"}
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
    ],
    ids=lambda text: text[:4],
)
def test_no_text_holds_the_page_up(browser, text):
    took = browser.wait_for(
        """const { markdown } = await import("/markdown.js");
        const times = [];
        while (times.length < 3) {  // others may have the processor once
          const begin = performance.now();
          markdown(arguments[0]);
          times.push(performance.now() - begin);
        }
        return Math.min(...times);""",
        text,
    )
    assert isinstance(took, int | float), took
    assert took < 3000
