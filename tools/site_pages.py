"""Puts the pages and their pictures into a folder as they lie in the tree, for the site: `site_pages.py FOLDER`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALONE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "src/ostinato/demo/README.md", "benchmarks/README.md")
BESIDE_PAGES = {".md", ".png", ".json", ".css"}


def pages() -> list[Path]:
    """What the site is made of, as paths from the root."""
    return sorted([*map(Path, ALONE), *(path for path in _in_docs() if path.suffix == ".md")])


def _in_docs() -> list[Path]:
    return [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*") if path.suffix in BESIDE_PAGES]


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for path in {*pages(), *_in_docs()}:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
