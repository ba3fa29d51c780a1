"""What a score function cannot do, said at the line of the user's Python that does it."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from typing import Final, NoReturn

from kvgen.spec.sources import shown_path

# The functions that kvgen.score has.
FUNCTIONS: Final = ("exp", "exp2", "log", "log2", "tanh", "sqrt", "abs", "minimum", "maximum", "floor", "where")
_HOME: Final = str(Path(__file__).resolve().parent.parent)


class TraceError(ValueError):
    """A score function does what no expression is."""


def refusal(file: str, line: int, message: str) -> TraceError:
    """`function: specs/x.py:12 (`return s ** 2`): got ...`."""
    text = linecache.getline(file, line).strip()
    return TraceError(f"function: {shown_path(file)}:{line}{f' (`{text}`)' if text else ''}: {message}")


def refuse(message: str) -> NoReturn:
    """Raise TraceError at the user's line that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HOME):
        frame = frame.f_back
    raise refusal(frame.f_code.co_filename, frame.f_lineno, message)
