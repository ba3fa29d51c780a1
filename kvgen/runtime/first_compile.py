"""A line on stderr where a call compiles for long: which kernel, which stage, and how to compile ahead. Said once a process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

VARIABLE: Final = "KVGEN_PROGRESS"
SECONDS: Final = 2.0  # of a compile that needs no word

_said = threading.Event()
_silent = threading.Event()


class Stage:
    """The stage that a compile is in; its caller sets `name` when the next one begins."""

    def __init__(self, name: str) -> None:
        self.name = name


@contextmanager
def told(kernel: str, arch: str, stage: str, ahead: str) -> Iterator[Stage]:
    """Around the compile of one kernel: where it takes longer than `SECONDS`, and nothing was said before, a line with the stage
    that it is in then, and with `ahead`, how to avoid it. KVGEN_PROGRESS=0 switches that off."""
    now = Stage(stage)
    if _said.is_set() or _silent.is_set() or os.environ.get(VARIABLE) == "0":
        yield now
        return

    def say() -> None:
        if not _said.is_set() and sys.stderr is not None:
            _said.set()
            print(
                f"kvgen: the first call of {kernel} compiles for {arch}; {now.name} after {SECONDS:g} s. {ahead} Said once; "
                f"{VARIABLE}=0 says nothing.",
                file=sys.stderr,
                flush=True,
            )

    timer = threading.Timer(SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield now
    finally:
        timer.cancel()


@contextmanager
def silent() -> Iterator[None]:
    """Say nothing inside: a progress bar does."""
    _silent.set()
    try:
        yield
    finally:
        _silent.clear()
