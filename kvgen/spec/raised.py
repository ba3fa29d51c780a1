"""What Python says of names and calls that kvgen does not have, in a spec's own words."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from kvgen.errors import FieldError

P = ParamSpec("P")
R = TypeVar("R")

_UNKNOWN = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"(\w+)\(\) missing \d+ required (?:keyword-only|positional) arguments?: (.+)")
_BY_POSITION = re.compile(r"(\w+)\(\) takes \d+ positional arguments? but")
_IMPORT = re.compile(r"cannot import name '(\w+)' from '(kvgen(?:\.\w+)*)'")


def worded(error: BaseException) -> tuple[str, str]:
    """(the argument to blame, or "", and the message) of an error that is none of kvgen's own."""
    text = str(error)
    if isinstance(error, AttributeError) and getattr(error.obj, "__name__", "").startswith("kvgen."):
        return "", text
    if isinstance(error, ImportError) and (match := _IMPORT.match(text)):
        return "", _no_such_name(match[1], match[2])
    if isinstance(error, TypeError):
        if (match := _UNKNOWN.match(text)) and (preset := _preset(match[1])):
            known = list(inspect.signature(preset).parameters)
            near = _near(match[2], known)
            return match[2], f"presets.{match[1]}.{match[2]}: unknown field; {match[1]} has {', '.join(known)}{near}"
        if (match := _MISSING.match(text)) and (preset := _preset(match[1])):
            missing = " and ".join(re.findall(r"'(\w+)'", match[2]))
            fields = ", ".join(inspect.signature(preset).parameters)
            return "", f"presets.{match[1]}: {missing} missing, without a default; {match[1]} has {fields}"
        if (match := _BY_POSITION.match(text)) and (preset := _preset(match[1])):
            first = next(iter(inspect.signature(preset).parameters))
            return "", f"presets.{match[1]}: got a field by position; name it, as in {match[1]}({first}=...)"
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


def _preset(name: str) -> Callable[..., object] | None:
    """The preset that a TypeError's function is, by its name."""
    from kvgen.spec import presets

    return getattr(presets, name) if name in presets.__all__ else None


def preset(function: Callable[P, R]) -> Callable[P, R]:
    """A preset, whose call with other fields than it has is a FieldError that lists them."""

    @wraps(function)
    def made(*arguments: P.args, **fields: P.kwargs) -> R:
        try:
            return function(*arguments, **fields)
        except TypeError as error:
            blamed, said = worded(error)
            if not said.startswith(f"presets.{function.__name__}"):
                raise
            raise FieldError([(blamed, said)]) from None

    return made
