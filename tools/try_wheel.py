"""Tries an installed wheel as its user would, by `python try_wheel.py all` or `python try_wheel.py native`.

To be run with the Python of an environment that has nothing but the wheel and what it asks for, outside the tree.
It holds what the package's sources are (the page, the embedded models, py.typed), kernels for the instruction sets that
it should have, and nothing else; and it answers, chats, plans, verifies and serves. `make wheel-test` and the wheels'
workflow run it.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import distribution, version
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import ostinato
from ostinato.plan.device.isa_table import TABLE
from ostinato.plan.device.kernel_support import detect_native, installed_modules

SOURCES = Path(__file__).resolve().parents[1] / "src/ostinato"
PROGRAM = Path(sysconfig.get_path("scripts")) / "ostinato"
QUESTION = "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?"


def main(kernels: str) -> None:
    check_files()
    check_kernels(kernels)
    check_commands()
    check_server()
    print(f"ostinato {version('ostinato')} with {', '.join(sorted(installed_modules()))}: as it should be")


def check_files() -> None:
    """The package is the installed one, and has the files of the sources."""
    place = Path(ostinato.__file__).parent
    expect(SOURCES not in (place, place.resolve()), f"{place} is the tree's own package, not an installed one")
    expect(ostinato.__version__ == version("ostinato"), "the version of the package is not that of its metadata")
    wanted = {path.relative_to(SOURCES) for path in SOURCES.rglob("*") if path.is_file() and is_source(path)}
    installed = {Path(path) for path in distribution("ostinato").files or () if is_source(Path(path))}
    found = {path.relative_to("ostinato") for path in installed if path.parts[0] == "ostinato"}
    expect(
        wanted == found, f"missing: {sorted(map(str, wanted - found))}; too many: {sorted(map(str, found - wanted))}"
    )
    others = {path.parts[0] for path in installed} - {"ostinato", f"ostinato-{version('ostinato')}.dist-info", ".."}
    # The kernels need no library that the wheel's repair would copy into it.
    expect(not others, f"the wheel also holds {sorted(others)}")
    expect("Apache License" in license_text(), "the wheel lacks its licence")


def is_source(path: Path) -> bool:
    return "__pycache__" not in path.parts and path.suffix != ".so"


def license_text() -> str:
    return distribution("ostinato").read_text("licenses/LICENSE") or ""


def check_kernels(kernels: str) -> None:
    """`all`: every instruction set of this kind of machine; `native`: the best that it runs alone."""
    chosen, installed = detect_native(), installed_modules()
    expect(chosen.isa is not None, chosen.reason)
    every = {isa.name for isa in TABLE[platform.machine()] if not isa.is_stand_in}
    wanted = every if kernels == "all" else {chosen.isa}
    expect(installed == wanted, f"the wheel has {sorted(installed)}, and should have {sorted(map(str, wanted))}")
    print(chosen.reason)


def check_commands() -> None:
    expect(version("ostinato") in run("--version"), "--version")
    expect(run("generate", QUESTION) == "17 + 25 = 42. 42 - 9 = 33. #### 33\n", "generate")
    expect(" native " in run("plan", "demo"), "the plan of the embedded model has no native kernels")
    expect("42 - 9 = 33" in run("chat", "demo", typed=QUESTION), "chat")
    expect(re.search(r"\d+ cells: \d+ equal; ", run("verify", "demo", "--quick")) is not None, "verify")


def run(*arguments: str, typed: str = "") -> str:
    command = [str(PROGRAM), *arguments]
    result = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=600)
    print("$ ostinato", *arguments, result.stdout, result.stderr, sep="\n")
    expect(result.returncode == 0, f"{command} ended with {result.returncode}")
    return result.stdout


def check_server() -> None:
    """It serves the page, every file that the page names, and an answer."""
    command = [str(PROGRAM), "serve", "demo", "--port", "0", "--max-num-seqs", "2"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = next((line.split()[2] for line in server.stderr or () if "listening on" in line), None)
        expect(url is not None, "the server ended before it listened")
        page = urlopen(f"{url}/", timeout=60).read().decode()
        named = [name for name in re.findall(r'(?:src|href)="([^":]+)"', page) if not name.startswith("#")]
        expect(any(name.endswith(".js") for name in named), f"the page names {named}")
        for name in named:
            expect(bool(urlopen(f"{url}/{name.lstrip('/')}", timeout=60).read()), f"{name} is empty")
        wait_until_loaded(url)
        asked = json.dumps({"messages": [{"role": "user", "content": QUESTION}]}).encode()
        request = Request(f"{url}/v1/chat/completions", asked, {"Content-Type": "application/json"})
        answer = json.load(urlopen(request, timeout=60))["choices"][0]["message"]["content"]
        expect("42 - 9 = 33" in answer, f"the server answered {answer}")
    finally:
        server.terminate()
        server.communicate(timeout=60)


def wait_until_loaded(url: str) -> None:
    """A server listens before it has loaded, and answers 503 until then."""
    for _ in range(600):
        try:
            urlopen(f"{url}/health", timeout=60)
            return
        except HTTPError as error:
            expect(error.code == 503, f"/health answered {error.code}")
            time.sleep(0.5)
    expect(False, "the server did not load within five minutes")


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(f"try_wheel: {otherwise}")


if __name__ == "__main__":
    main(sys.argv[1])
