"""Progress bars for loading and for batches: on a terminal, on stderr, and in notebooks; nowhere else."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape

from ostinato.observe.counts import no_progress
from ostinato.os_support import stderr_is_terminal

_REFRESH_SECONDS = 0.1
"""Least time between two updates of a notebook's bar."""


@contextmanager
def start_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar of tensors loaded, then of graphs captured; yield a function of (what is done, done, total)."""
    if not stderr_is_terminal():
        with _notebook_bar() as show:
            yield show
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Loading weights", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


@contextmanager
def generation_progress(num_requests: int) -> Iterator[Callable[[int], None]]:
    """Show a bar of finished requests with the tokens per second; yield a function of a finished request's tokens.

    A single request gets no bar: it would be empty until it is full.
    """
    if num_requests < 2:
        yield lambda tokens: None
        return
    if not stderr_is_terminal():
        with _notebook_bar() as show:
            ended = itertools.count(1)
            yield lambda tokens: show("Generating", next(ended), num_requests)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Generating", total=num_requests)
        generated = 0

        def advance(tokens: int) -> None:
            nonlocal generated
            generated += tokens
            elapsed = progress.tasks[0].elapsed or 0.0
            speed = f", {generated / elapsed:.0f} tokens/s" if elapsed else ""
            progress.update(task, advance=1, description=f"Generating{speed}")

        yield advance


@contextmanager
def _notebook_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar below a notebook's running cell, and remove it after the work. Outside notebooks, show nothing."""
    # Only a notebook's kernel has imported IPython and has a shell with a kernel.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        yield no_progress
        return
    from IPython.display import display

    def html(what: str = "", done: int = 0, total: int = 0) -> dict[str, str]:
        bar = f"{escape(what)} <progress value={done} max={total or 1}></progress> {done}/{total}"
        return {"text/html": bar if what else "", "text/plain": f"{what} {done}/{total}" if what else ""}

    handle, shown = display(html("Starting"), raw=True, display_id=True), 0.0

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if done == total or now - shown > _REFRESH_SECONDS:
            shown = now
            handle.update(html(what, done, total), raw=True)

    try:
        yield show
    finally:
        handle.update(html(), raw=True)
