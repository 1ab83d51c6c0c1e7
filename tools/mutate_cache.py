"""Breaks the prefix cache on purpose, one way after the other, and sees whether the tests find each.

    .venv/bin/python tools/mutate_cache.py [--match WORD] [TESTS...]

Some mutations have to be found by `ostinato verify --quick`, whose texts begin with "verify:".
Each mutation is an edit of a temporary copy of the package; the repository is not touched. A mutation whose text is
not found exactly once does not apply any more: mend it. Exits with 1 if one survives or does not apply.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cache_mutations import MUTATIONS, Mutation

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "src" / "ostinato"

# The programs come last: they take longest, and a test that names what is broken says more.
TESTS = (
    "tests/kv_cache/test_pool.py",
    "tests/kv_cache/test_cache_chain.py",
    "tests/kv_cache/test_cache_placement.py",
    "tests/kv_cache/test_cache_eviction.py",
    "tests/kv_cache/test_cache_report.py",
    "tests/kv_cache/test_cache_marks.py",
    "tests/kv_cache/test_cache_manager.py",
    "tests/kv_cache/test_cache_hits.py",
    "tests/kv_cache/test_cache_tier.py",
    "tests/kv_cache/test_cache_directory.py",
    "tests/kv_cache/test_cache_windows.py",
    "tests/kv_cache/test_window_blocks.py",
    "tests/scheduler/test_scheduler.py",
    "tests/scheduler/test_scheduler_shares.py",
    "tests/scheduler/test_scheduler_drafts.py",
    "tests/scheduler/test_scheduler_memory.py",
    "tests/scheduler/test_scheduler_moves.py",
    "tests/scheduler/test_scheduler_properties.py",
    "tests/kv_cache/test_encoder_cache.py",
    "tests/scheduler/test_scheduler_media.py",
    "tests/scheduler/test_scheduler_prefix_lm.py",
)

LIMIT_IN_BASELINES = 10
"""Time limit of one run, in times of the run without a mutation. Tests that do not end have found the mutation too."""


def apply(mutation: Mutation, package: Path) -> str | None:
    """Edit the copy of the package; returns why that cannot be done, if so."""
    file = package / mutation.path
    source = file.read_text()
    for before, after in mutation.edits:
        if source.count(before) != 1:
            return f"stands {source.count(before)} times in {mutation.path}: {before.strip()!r}"
        source = source.replace(before, after)
    file.write_text(source)
    return None


def run_tests(tests: list[str], copy: Path, limit: float | None) -> str | None:
    """The first test that fails with the copy's package within `limit` seconds; None if all pass."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(copy), str(REPOSITORY)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / "hypothesis"),
    }
    # What conftest.py sets up is for tests with torch, which none of these needs; importing it takes longest.
    options = ["-x", "-q", "--noconftest", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"no end after {limit:.0f} s"
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if found is None:
        sys.exit(f"pytest did not run the tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found.group(1)


def run_verify(arguments: tuple[str, ...], copy: Path) -> str | None:
    """What `ostinato verify --quick` finds with the copy's package; None if all is equal."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "ostinato", "verify", *arguments, "--quick", "--json"]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    try:
        report = json.loads(done.stdout)
    except ValueError:
        sys.exit(f"verify gave no report:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    counts = [f"{report['summary'][name]} cells {name}" for name in ("different", "error")]
    rest = [f"{name} {report[name]['verdict']}" for name in ("plain", "states")]
    return f"verify {' '.join(arguments)}: {', '.join(counts + rest)}"


def copy_package(folder: Path) -> Path:
    package = folder / "ostinato"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "checkpoint", "checkpoint-*"))
    for checkpoint in (PACKAGE / "demo").glob("checkpoint*"):
        (package / "demo" / checkpoint.name).symlink_to(checkpoint)
    return package


def check_mutation(
    mutation: Mutation | None, tests: list[str], limit: float | None = None
) -> tuple[str | None, str | None]:
    """(why it does not apply, the test that found it) of a mutation, or of the package as it is."""
    with tempfile.TemporaryDirectory(prefix="mutate-cache-") as folder:
        copy = Path(folder)
        package = copy_package(copy)
        problem = apply(mutation, package) if mutation is not None else None
        if problem:
            return problem, None
        verify = () if mutation is None else mutation.verify
        return None, run_verify(verify, copy) if verify else run_tests(tests, copy, limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="test files, instead of all of the cache's")
    parser.add_argument("--match", default="", help="only mutations whose description has this in it")
    options = parser.parse_args()
    chosen = [each for each in MUTATIONS if options.match in each.what]
    for arguments in dict.fromkeys(each.verify for each in chosen if each.verify):
        with tempfile.TemporaryDirectory(prefix="mutate-cache-") as folder:
            copy_package(Path(folder))
            if (failed := run_verify(arguments, Path(folder))) is not None:
                print(f"without a mutation: {failed}")
                return 1
    limit = None
    if not all(each.verify for each in chosen):
        began = time.monotonic()
        _, failed = check_mutation(None, options.tests)
        if failed is not None:
            print(f"the tests fail without a mutation: {failed}")
            return 1
        limit = LIMIT_IN_BASELINES * (time.monotonic() - began)
        print(f"without a mutation the tests pass; a run may take {limit:.0f} s", flush=True)
    survivors = 0
    for each in chosen:
        began = time.monotonic()
        problem, found = check_mutation(each, options.tests, limit)
        survivors += found is None
        verdict = f"found by {found}" if found else f"does not apply: {problem}" if problem else "SURVIVED"
        print(f"{each.what}\n    {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations were found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
