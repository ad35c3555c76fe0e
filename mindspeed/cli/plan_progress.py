"""The progress bar of planning commands, on standard error; nothing where that is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that is told how many parts are done, and how many there are."""
    with named_progress() as tell:
        yield lambda done, of: tell(title, done, of)


@contextmanager
def named_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that is told what is done, how much of it, and how much there is."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
