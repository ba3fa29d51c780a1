"""Progress bars, for verbs that would be silent for a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvgen.cli.settings import settings

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Steps:
    """A bar's steps, or those of none: `at` names the one that begins, a call ends it."""

    def __init__(self, bar: Progress | None = None, task: TaskID | None = None) -> None:
        self._bar, self._task = bar, task

    def at(self, name: str) -> None:
        """Show what the step is about, as "llama3_8b/decode sm_90a"."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, at=name)

    def __call__(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)


@contextmanager
def progress(title: str, total: int) -> Iterator[Steps]:
    """A progress bar on stderr that vanishes at the end: title, steps of `total`, seconds, and the name of the step.

    Silent where stderr is no terminal, whatever FORCE_COLOR says, and with -q.
    """
    if not sys.stderr.isatty() or settings().quiet or total < 2:
        yield Steps()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    from kvgen.runtime.first_compile import silent

    # Where a name has no room beside the bar, it goes on below.
    name = TextColumn("{task.fields[at]}", markup=False, table_column=Column(overflow="fold"))
    bar = (BarColumn(bar_width=12), MofNCompleteColumn(), TimeElapsedColumn(), name)
    screen = Console(file=sys.stderr, highlight=False)
    with silent(), Progress(TextColumn("{task.description}"), *bar, console=screen, transient=True) as shown:
        yield Steps(shown, shown.add_task(title, total=total, at=""))
