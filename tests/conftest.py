"""For every test: one thread for torch, since pytest-xdist already gives each core a process of its own; what
hypothesis draws; no wishes of the terminal. Fixtures."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from zlib import crc32

# Triton reads it when it is imported, which torch may do. Without a GPU its kernels run in its interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from ostinato.plan.device import detect as device
from ostinato.plan.device.kernel_support import NativeFacts
from tests.support.draws import IMPLEMENTATIONS, choose_draw
from tests.support.examples import FEW
from tests.support.folders import remove_shared_folders
from tests.support.selection import chosen_cases

torch.set_num_threads(1)

# A run on a machine that is slow or busy fails for nothing else than a run on any other.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", PATIENT, derandomize=True)
settings.register_profile("search", PATIENT, print_blob=True)
settings.register_profile(FEW, PATIENT, max_examples=20, derandomize=True)
settings.register_profile("soak", PATIENT, max_examples=3000, print_blob=True)
settings.load_profile("same")

# Tables and messages are as wide and as plain as where nobody asks for anything else.
for variable in ("COLUMNS", "LINES", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(variable, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference-kernels",
        action="store_true",
        help="Plan as if no native kernels were installed, so that engines run torch's alone.",
    )
    parser.addoption(
        "--gpu-device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="Where the tests of tests/gpu run. On a CPU they show that they are free of mistakes themselves.",
    )
    parser.addoption(
        "--cases",
        default="all",
        help="Run all cases of each test; one case of each that is not slow, which a person waits for; the others; or, "
        "with K/N, one case of each test and the K-th of N shares of the others.",
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        chosen_cases({}, config.getoption("--cases"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the cases that `--cases` names."""
    cases = {item.nodeid: item.get_closest_marker("slow") is not None for item in items}
    chosen = chosen_cases(cases, config.getoption("--cases"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_collection_finish() -> None:
    """Leave what was imported and collected, millions of objects, out of each collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch, so that what a test draws depends on no test before it. hypothesis does so for Python and numpy."""
    torch.default_generator.manual_seed(crc32(item.nodeid.encode()))


def pytest_unconfigure() -> None:
    remove_shared_folders()


@pytest.fixture(scope="session", autouse=True)
def _reference_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--reference-kernels"):
            absent = NativeFacts(None, "the tests run without native kernels")
            patch.setattr(device, "detect_native", lambda root: absent)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_kept_rates() -> Iterator[None]:
    """A plan knows no rates that another test, or the machine's user, has measured; a test may name their folder."""
    kept = device._kept_rates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_kept_rates", lambda *where: kept(*where) if where[-1].get("XDG_CACHE_HOME") else ())
        yield


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def every_draw(request: pytest.FixtureRequest) -> Iterator[None]:
    """The module's tests run once with each implementation of the kernel `sample`."""
    with pytest.MonkeyPatch.context() as patch:
        choose_draw(patch, request.param)
        yield
