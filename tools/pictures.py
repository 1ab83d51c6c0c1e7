"""Makes the pictures of the pages anew: `python tools/pictures.py page peers drawing examples`, or some of them.

page: Chromium shows the server's page (docs/page.png) after a conversation, while others ask too. peers: the chart of a
processor's record of benchmarks (docs/peers.png). drawing: an example that training never saw.
examples: those that the server's page offers to ask demo-vl about (src/ostinato/serve/page/examples). The chart of
steps is measured: `ostinato bench graphs demo --json > steps.json`, then `python tools/plot_bench.py steps.json
docs/step-time.png`.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

DOCS = ROOT / "docs"
RECORD = ROOT / "benchmarks/results/amd-zen-5/report.json"
QUESTIONS = (
    "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?",
    "Tom collects 125 stamps. He loses 17 of them and then gets 48 more. How many stamps does he have now?",
    "A box holds 6 pencils. Mia buys 8 boxes and gives 12 pencils to Leo. How many pencils does Mia have left?",
)
EXAMPLES = {"two-shapes": 5, "three-shapes": 12, "dark": 3}
"""Name -> which of the drawings that evaluation uses."""
PAGE_EXAMPLES = ROOT / "src/ostinato/serve/page/examples"
ANSWERS = ("#### 33", "#### 156", "#### 36")
SIZE = (1440, 1080)
BUSY_SECONDS = 60


def page() -> None:
    """Draw docs/page.png."""
    from tests.support.browser import browsing
    from tests.support.serving import serving

    with serving(max_num_seqs=8) as served, browsing() as browser:
        browser.open(served.url)
        browser.resize(*SIZE)
        browser.until(lambda: browser.text(".welcome h2"))
        browser.click("show-engine")
        others = threading.Thread(target=_ask_for, args=(served, BUSY_SECONDS))
        others.start()
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
            browser.type("question", question + "\n")
            browser.until(lambda answer=answer: answer in browser.text("#messages"))
            browser.until(lambda: not browser.script("return document.body.classList.contains('answering')"))
        time.sleep(BUSY_SECONDS - 5)  # the charts show two minutes
        browser.driver.save_screenshot(str(DOCS / "page.png"))
        others.join()


def _ask_for(served, seconds: float) -> None:
    """Others' questions, a few at a time, as they come."""
    drawn, client, end = random.Random(0), served.client(), time.monotonic() + seconds

    def ask(number: int, other: int) -> None:
        text = f"Ava has {number} apples and buys {other} more. How many apples has she?"
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": text}], max_tokens=48)

    while time.monotonic() < end:
        burst = [threading.Thread(target=ask, args=(drawn.randint(2, 99), drawn.randint(2, 99))) for _ in range(3)]
        for each in burst[: drawn.randint(1, 3)]:
            each.start()
        time.sleep(drawn.expovariate(4))


def peers() -> None:
    """Draw docs/peers.png."""
    from benchmarks.peers.plot import draw

    draw(json.loads(RECORD.read_text(encoding="utf-8")), DOCS / "peers.png")


def drawing() -> None:
    """Draw docs/examples/drawing.png."""
    from ostinato.demo.drawings import held_out

    held_out(0, 6)[5][0].images()[0].save(DOCS / "examples/drawing.png")


def examples() -> None:
    """src/ostinato/serve/page/examples, of what training never saw."""
    from ostinato.demo.drawings import held_out

    drawn = held_out(0, max(EXAMPLES.values()) + 1)
    for name, number in EXAMPLES.items():
        [picture] = drawn[number][0].images()
        picture.save(PAGE_EXAMPLES / f"{name}.png", optimize=True)


PICTURES = {"page": page, "peers": peers, "drawing": drawing, "examples": examples}

if __name__ == "__main__":
    wanted = sys.argv[1:]
    if unknown := [name for name in wanted if name not in PICTURES]:
        sys.exit(f"there is no picture {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    for name in wanted or PICTURES:
        PICTURES[name]()
        print(f"{name}: made", flush=True)
