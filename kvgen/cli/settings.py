"""What holds for every verb: how much is said, which project, whether there is colour. Flags for it stand before or behind it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FLAGS: Final = ("-q", "--quiet", "-v", "--verbose")
_PROJECT: Final = "--project"


@dataclass(frozen=True)
class Settings:
    """`quiet` leaves out all but findings, errors and what was asked for; `verbose` says what is looked at and how long it took.

    `project` is where the search for the project begins; None: in the working folder.
    """

    quiet: bool = False
    verbose: bool = False
    project: Path | None = None


_current: ContextVar[Settings] = ContextVar("kvgen_cli_settings", default=Settings())  # noqa: B039 - frozen


def settings() -> Settings:
    """Those of the command that runs."""
    return _current.get()


def choose(given: Settings) -> None:
    """Set them for the command that runs."""
    _current.set(given)


def colour() -> bool | None:
    """Whether output is coloured: never with NO_COLOR, always with FORCE_COLOR, else (None) where it goes to a terminal.

    A variable that is empty counts as not set (no-color.org, force-color.org); NO_COLOR wins.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


def parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of a command line that hold for every verb, wherever they stand; and the rest. What is behind `--` is rest."""
    front: list[str] = []
    rest: list[str] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word == "--":
            rest += [word, *left]
            break
        if word in _FLAGS or word.startswith(f"{_PROJECT}="):
            front.append(word)
        elif word == _PROJECT:
            front += [word, *left[:1]]
            left = left[1:]
        else:
            rest.append(word)
    return front, rest
