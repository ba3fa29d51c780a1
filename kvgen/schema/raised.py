"""What Python says of names and calls that kvgen does not have, in a spec's own words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_IMPORT = re.compile(r"cannot import name '(\w+)' from '(kvgen(?:\.\w+)*)'")


def worded(error: BaseException) -> tuple[str, str]:
    """(the argument to blame, or "", and the message) of an error that is none of kvgen's own."""
    text = str(error)
    if isinstance(error, AttributeError) and getattr(error.obj, "__name__", "").startswith("kvgen."):
        return "", text
    if isinstance(error, ImportError) and (match := _IMPORT.match(text)):
        return "", _no_such_name(match[1], match[2])
    if isinstance(error, MemoryError) and not text:
        return "", "MemoryError: this line asks for more memory than there is"
    return "", f"{type(error).__name__}: {text}"


def _no_such_name(name: str, module: str) -> str:
    import importlib

    try:
        known = importlib.import_module(module).__dir__()
    except (ImportError, AttributeError):
        known = []
    return f"{module}.{name}: {module} has no such name{_near(name, known)}"


def _near(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
