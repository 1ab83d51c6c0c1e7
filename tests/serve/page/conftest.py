"""The page before a real server of the embedded model, in headless Chromium."""

import pytest

from tests.support.browser import browsing
from tests.support.serving import serving


@pytest.fixture(scope="package")
def browser():
    """One for all files, as is the server. `open` leaves nothing in it of the page before."""
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="package")
def served():
    speculative = {"method": "ngram", "num_speculative_tokens": 2}
    settings = {"speculative": speculative, "speculative_adaptive": "off", "cache_memory": "16MiB"}
    with serving(max_num_seqs=4, **settings) as served:
        yield served


@pytest.fixture
def page(browser, served):
    """The page, opened anew, once it knows the server and its model."""
    browser.open(served.url)
    browser.until(lambda: browser.text("#status") == "demo · ready" and browser.text(".welcome h2"))
    return browser


@pytest.fixture
def steps(page, served):
    """The engine's probe, which holds its steps, now that the page is open."""
    assert page.text("#status") == "demo · ready"
    served.unfinished(0)  # what a page before left must not take the steps of this one
    served.probe.hold()
    yield served.probe
    served.probe.go()
