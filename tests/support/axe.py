"""axe-core, which finds what keeps people from using a page: taken from npm once, for tests alone."""

from __future__ import annotations

from typing import Any

from tests.support.browser import Browser
from tests.support.registries import from_npm

VERSION = "4.14.1"
DIGEST = "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="


def axe_source() -> str:
    """The script. Skips where npm is not there or does not reach its registry."""
    return from_npm("axe-core", VERSION, DIGEST, "axe.min.js").decode()


def violations(page: Browser) -> list[str]:
    """What axe finds on the page as it is, a line for each element; all of its rules are on but experimental ones."""
    page.driver.execute_script(axe_source())
    found: Any = page.wait_for(
        "const { violations } = await axe.run(document, { resultTypes: ['violations'] });"
        "return violations.flatMap(({ id, help, nodes }) => nodes.map(({ html, failureSummary }) =>"
        " `${id}: ${help}: ${html} ${failureSummary}`))"
    )
    assert isinstance(found, list), found
    return found
