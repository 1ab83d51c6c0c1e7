"""What a release is made of, beside its archives: checks, the notes, the bill of materials and the checksums.

`python tools/release.py dist` checks the archives in the folder `dist`, and writes into it the section of CHANGELOG.md
about this version (notes.md), a CycloneDX bill of materials (--environment names the Python of an environment with the
wheel in it) and SHA256SUMS. --tag v1.2.3 is the tag to be released: then the changelog needs a date, and every
architecture a wheel. `make release-check` runs it here, .github/workflows/wheels.yml for a release.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MAX_WHEEL_BYTES = 25 * 10**6
ARCHITECTURES = ("x86_64", "aarch64")
_VERSION = re.compile(r'__version__ = "(.+)"')
_PAGE_LIBRARIES = ROOT / "src/ostinato/serve/page/third_party/versions.json"
_CHECKED = ("*.whl", "*.tar.gz", "*.cdx.json")


def version() -> str:
    found = _VERSION.search((ROOT / "src/ostinato/_version.py").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def changelog_section(text: str, released: str) -> tuple[str, str]:
    """What the heading of a version says behind its name, and the text under it."""
    pattern = rf"^## \[{re.escape(released)}\](?: - ([^\n]+))?\n(.*?)(?=^## \[|\Z)"
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    return ("", "") if found is None else (found[1] or "", found[2].strip() + "\n")


def problems(folder: Path, tag: str | None) -> list[str]:
    """What keeps the archives in `folder` from being released, in sentences."""
    released = version()
    dated, notes = changelog_section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), released)
    wheels, sources = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    found = [
        f"{path.name} is not of version {released}" for path in [*wheels, *sources] if f"-{released}" not in path.name
    ]
    found += [
        f"{wheel.name} has {wheel.stat().st_size / 1e6:.1f} MB, and may have {MAX_WHEEL_BYTES / 1e6:.0f} MB"
        for wheel in wheels
        if wheel.stat().st_size > MAX_WHEEL_BYTES
    ]
    if not wheels:
        found.append(f"{folder} has no wheel; `make wheels` builds one")
    if not notes:
        found.append(f"CHANGELOG.md says nothing about {released}")
    if tag is None:
        return found
    if tag != f"v{released}":
        found.append(f"the tag is {tag}, and src/ostinato/_version.py says {released}: it should be v{released}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", dated):
        found.append(f"CHANGELOG.md has {dated or 'nothing'} in place of the date of {released}, such as 2026-12-01")
    if not sources:
        found.append(f"{folder} has no source archive; `python -m build --sdist` makes one")
    there = {wheel.stem.rpartition("-")[2] for wheel in wheels}
    return found + [
        f"{folder} has no wheel for {architecture}"
        for architecture in ARCHITECTURES
        if not any(platform.endswith(architecture) for platform in there)
    ]


def write_bill(python: Path, target: Path) -> None:
    """Writes the bill of an environment's packages, of the page's libraries and of what kernels contain."""
    program = Path(sys.executable).with_name("cyclonedx-py")
    command = [str(program), "environment", "--pyproject", str(ROOT / "pyproject.toml"), str(python)]
    told = subprocess.run([*command, "--output-reproducible"], check=True, capture_output=True, text=True).stdout
    bill: dict[str, Any] = json.loads(told)
    bill["metadata"]["component"]["version"] = version()
    # The wheel's own entry is the bill's subject already; pip and setuptools are the environment's.
    kept = [part for part in bill["components"] if part["name"] not in ("ostinato", "pip", "setuptools")]
    bill["components"] = [*kept, *bundled_components()]
    refs = {part.get("bom-ref") for part in bill["components"]} | {bill["metadata"]["component"].get("bom-ref")}
    bill["dependencies"] = [
        {**entry, "dependsOn": [ref for ref in entry.get("dependsOn", []) if ref in refs]}
        for entry in bill.get("dependencies", [])
        if entry["ref"] in refs
    ]
    target.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")


def bundled_components() -> list[dict[str, Any]]:
    """Components that lie in the wheel itself, as CycloneDX writes them."""
    libraries = json.loads(_PAGE_LIBRARIES.read_text(encoding="utf-8"))["libraries"]
    named = [("npm", library["package"], library["version"], library["licence"]) for library in libraries]
    named.append(("pypi", "nanobind", metadata("nanobind")["Version"], "BSD-3-Clause"))
    return [
        {
            "type": "library",
            "bom-ref": f"bundled-{name}",
            "name": name,
            "version": number,
            "licenses": [{"license": {"id": licence}}],
            "purl": f"pkg:{kind}/{name.replace('@', '%40')}@{number}",
        }
        for kind, name, number, licence in named
    ]


def checksums(folder: Path) -> str:
    """What `sha256sum --check` reads."""
    files = sorted(path for pattern in _CHECKED for path in folder.glob(pattern))
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag")
    parser.add_argument("--environment", type=Path, help="the Python of an environment with the wheel")
    asked = parser.parse_args()
    found = problems(asked.folder, asked.tag)
    if found:
        sys.exit("\n".join(["this cannot be released:", *(f"  - {problem}" for problem in found)]))
    _, notes = changelog_section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version())
    (asked.folder / "notes.md").write_text(notes, encoding="utf-8")
    if asked.environment is not None:
        write_bill(asked.environment, asked.folder / f"ostinato-{version()}.cdx.json")
    (asked.folder / "SHA256SUMS").write_text(checksums(asked.folder), encoding="utf-8")
    for path in sorted(asked.folder.iterdir()):
        print(f"{path.stat().st_size:>12,} B  {path.name}", *([_modules(path)] if path.suffix == ".whl" else []))


def _modules(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".so")]
    return "with " + ", ".join(sorted(Path(name).name.partition(".")[0].removeprefix("_native_") for name in modules))


if __name__ == "__main__":
    main()
