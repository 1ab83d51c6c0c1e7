"""The libraries of the server's page, in `src/ostinato/serve/page/third_party`, and whether they are as published.

`python tools/page_libraries.py` compares every file with its digest in versions.json, without a network. With --fetch
it takes the versions named there from npm again (npm must be installed), and writes files and digests anew: to change a
version, change it in versions.json first.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "src/ostinato/serve/page/third_party"
VERSIONS = FOLDER / "versions.json"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def differences() -> list[str]:
    """What is not as versions.json says, in words."""
    listed = {name: told["sha256"] for library in _libraries() for name, told in library["files"].items()}
    there = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file() and path != VERSIONS}
    wrong = [name for name in listed.keys() & there if digest(FOLDER / name) != listed[name]]
    return [
        *(f"{name} is missing" for name in sorted(listed.keys() - there)),
        *(f"{name} is not in versions.json" for name in sorted(there - listed.keys())),
        *(f"{name} is not the file that was published" for name in sorted(wrong)),
    ]


def fetch() -> None:
    """Writes every file from its package, and its digest."""
    libraries = _libraries()
    for library in libraries:
        with tempfile.TemporaryDirectory() as folder:
            asked = f"{library['package']}@{library['version']}"
            subprocess.run(["npm", "pack", "--silent", asked], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            [archive] = Path(folder).glob("*.tgz")
            with tarfile.open(archive) as package:
                for name, told in library["files"].items():
                    member = package.extractfile(f"package/{told['from']}")
                    assert member is not None, f"{asked} has no {told['from']}"
                    path = FOLDER / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(member.read())
                    told["sha256"] = digest(path)
    VERSIONS.write_text(json.dumps({"libraries": libraries}, indent=1) + "\n", encoding="utf-8")


def _libraries() -> list[dict]:
    return json.loads(VERSIONS.read_text(encoding="utf-8"))["libraries"]


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--fetch"]):
        sys.exit(__doc__)
    if sys.argv[1:]:
        fetch()
    if found := differences():
        sys.exit("\n".join(found))
    print("as published: " + ", ".join(f"{each['package']} {each['version']}" for each in _libraries()))
