"""Calls of presets with other fields than they have, in a spec's own words."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from kvgen.errors import FieldError

P = ParamSpec("P")
R = TypeVar("R")

_UNKNOWN: Final = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_MISSING: Final = re.compile(r"(\w+)\(\) missing \d+ required (?:keyword-only|positional) arguments?: (.+)")
_BY_POSITION: Final = re.compile(r"(\w+)\(\) takes \d+ positional arguments? but")


def preset(function: Callable[P, R]) -> Callable[P, R]:
    """A preset, whose call with other fields than it has is a FieldError that lists them."""

    @wraps(function)
    def made(*arguments: P.args, **fields: P.kwargs) -> R:
        try:
            return function(*arguments, **fields)
        except TypeError as error:
            said = _worded(str(error), function)
            if said is None:
                raise
            raise FieldError([said]) from None

    return made


def _worded(text: str, function: Callable[..., object]) -> tuple[str, str] | None:
    """(the argument to blame, or "", and the message) of a TypeError of the preset's own call; None of any other."""
    name, known = function.__name__, list(inspect.signature(function).parameters)
    has = f"{name} has {', '.join(known)}"
    if (match := _UNKNOWN.match(text)) and match[1] == name:
        near = difflib.get_close_matches(match[2], known, n=1)
        return match[
            2
        ], f"presets.{name}.{match[2]}: unknown field; {has}{f'; did you mean {near[0]}?' if near else ''}"
    if (match := _MISSING.match(text)) and match[1] == name:
        missing = " and ".join(re.findall(r"'(\w+)'", match[2]))
        return "", f"presets.{name}: {missing} missing, without a default; {has}"
    if (match := _BY_POSITION.match(text)) and match[1] == name:
        return "", f"presets.{name}: got a field by position; name it, as in {name}({known[0]}=...)"
    return None
