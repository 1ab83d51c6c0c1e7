"""axe-core, which finds what keeps people from using a page: taken from npm once, for tests alone."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Browser
from tests.support.patience import PATIENCE

VERSION = "4.14.1"
DIGEST = "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
FOLDER = Path(__file__).parents[2] / "build/npm"


@cache
def axe_source() -> str:
    """The script. Skips where npm is not there or does not reach its registry."""
    archive = FOLDER / f"axe-core-{VERSION}.tgz"
    if not archive.is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("checks of accessibility need npm, which brings axe-core")
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [npm, "pack", "--silent", f"axe-core@{VERSION}"]
        try:
            subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, timeout=PATIENCE)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"axe-core could not be taken from npm: {error}")
    content = archive.read_bytes()
    found = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    assert found == DIGEST, f"{archive} is not the axe-core {VERSION} that was published"
    with tarfile.open(archive) as package:
        member = package.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


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
