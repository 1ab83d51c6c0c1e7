"""Progress bars for loading and for batches: on a terminal only, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def start_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar of tensors loaded, then of graphs captured; yields a function of (what is done, done, total)."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Loading weights", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


@contextmanager
def generation_progress(num_requests: int) -> Iterator[Callable[[int], None]]:
    """A bar of finished requests with the tokens per second; yields a function of a finished request's tokens.

    One request alone gets no bar: it would be empty until it is full.
    """
    if num_requests < 2 or not sys.stderr.isatty():
        yield lambda tokens: None
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
