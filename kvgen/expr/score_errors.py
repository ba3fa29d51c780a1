"""What a score function cannot do, at the line of the user's Python that does it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NoReturn

# The functions that kvgen.score has.
FUNCTIONS: Final = ("exp", "exp2", "log", "log2", "tanh", "sqrt", "abs", "minimum", "maximum", "floor", "where")
_HOME: Final = str(Path(__file__).resolve().parent.parent)


class TraceError(Exception):
    """A score function does what no expression is, at this line of this file."""

    def __init__(self, file: str, line: int, message: str) -> None:
        super().__init__(f"{file}:{line}: {message}")
        self.file, self.line, self.message = file, line, message


def refuse(message: str) -> NoReturn:
    """Raise TraceError at the user's line that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HOME):
        frame = frame.f_back
    raise TraceError(frame.f_code.co_filename, frame.f_lineno, message)
