"""Progress bars, for verbs that would be silent for a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvgen.cli.settings import settings


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr that vanishes at the end; call what it gives for each of `total` steps.

    Silent where stderr is no terminal, whatever FORCE_COLOR says, and with -q.
    """
    if not sys.stderr.isatty() or settings().quiet or total < 2:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(file=sys.stderr, highlight=False), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
