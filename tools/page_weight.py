"""Measure the server's page: when Chromium first paints it, and how many bytes it loads.

A server of the embedded model runs in this process, on loopback. Each look is a first visit: the browser has nothing
in its cache. Run it on a quiet machine. `--times N` (10) visits; it prints the least, the median and the most.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MATHS = "```python\ndef f(): pass\n```\n\n$$\\sum_{i=1}^n i^2$$"
PAINTED = """return performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? null"""
LOADED = """const entries = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
  .filter(({ name }) => name.endsWith("/") || name.includes("/page/"));
return ["encodedBodySize", "decodedBodySize"].map((field) => entries.reduce((sum, each) => sum + each[field], 0));"""


def main(times: int) -> None:
    from tests.support.browser import browsing
    from tests.support.page_chat import answered, chunks, script_answers
    from tests.support.serving import serving

    with serving(max_num_seqs=4) as served, browsing() as page:
        paints = []
        for _ in range(times):
            page.open(served.url)
            page.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
            page.driver.get(served.url)
            paints.append(page.until(lambda: page.script(PAINTED)))
            page.until(lambda: page.text(".welcome h2"))
        print(f"first contentful paint: {min(paints):.0f}, {median(paints):.0f}, {max(paints):.0f} ms")
        print("loaded: {:,} bytes as sent, {:,} raw".format(*page.script(LOADED)))
        script_answers(page, chunks({"content": MATHS}))
        answered(page, "?")
        page.until(lambda: page.count(".katex") and page.count(".hljs-keyword"))
        page.wait_for("await document.fonts.ready")
        print("with code and formulas: {:,} bytes as sent, {:,} raw".format(*page.script(LOADED)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    main(parser.parse_args().times)
