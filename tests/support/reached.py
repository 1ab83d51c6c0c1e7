"""A plugin, `-p tests.support.reached`: the run fails if there is a native kernel that no test called.

Kernels of every module that is built and runs here count, of a stand-in those that it has. Each worker of pytest-xdist
notes the calls that came back. Where a test failed, that is all the run says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Kernel = tuple[str, str]
"""An instruction set and a kernel's name."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reached())


class Reached:
    """The kernels that there are, and those that were called, in this process or in its workers."""

    def __init__(self) -> None:
        self.known: set[Kernel] = set()
        self.called: set[Kernel] = set()

    def pytest_collection_finish(self) -> None:
        # Only now, as conftest.py sets what torch reads when it is imported.
        from ostinato.ops.dispatch import load_extension
        from ostinato.plan.device.kernel_support import installed_modules, runnable_here

        for isa in set(runnable_here()) & set(installed_modules()):
            extension = load_extension(isa)
            # A kernel is both a function and a call that a program notes.
            for name in vars(extension).keys() & vars(extension.Program).keys():
                if not name.startswith("__"):
                    self.known.add((isa, name))
                    setattr(extension, name, self._noted((isa, name), getattr(extension, name)))

    def _noted(self, kernel: Kernel, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            function(*args)
            self.called.add(kernel)

        return call

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        self.known |= {tuple(each) for each in output.get("known", ())}
        self.called |= {tuple(each) for each in output.get("called", ())}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output |= {"known": sorted(self.known), "called": sorted(self.called)}
        elif session.exitstatus == pytest.ExitCode.OK and self._missed():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"native kernels called: {len(self.called)} of {len(self.known)}")
        for each in self._missed():
            terminalreporter.write_line(each)

    def _missed(self) -> list[str]:
        if not self.known:
            return ["no native module was found"]
        return [f"{isa}: no test called {name}" for isa, name in sorted(self.known - self.called)]
