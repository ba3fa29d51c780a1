"""Calls whose arguments do not fit a launcher's or a cache's signature: Python's words, and what the argument is."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from kvgen.errors import CallError

_SAYS: Final = re.compile(r"([\w.]+)\(\) (?:missing|got|takes) ")


def explained(function: Callable[..., Any], doc: str | None) -> Callable[..., Any]:
    """`function`, whose TypeErrors of a wrong call say what was expected; `doc` describes its arguments, a line each."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except TypeError as error:
            better = worded(error, function, doc, arguments)
            if better is None:
                raise
            raise better from None

    return call


def worded(
    error: TypeError, function: Callable[..., Any], doc: str | None, arguments: tuple[object, ...] = ()
) -> CallError | None:
    """The error in more words where it is about the call of `function` itself; None where it is about another. `arguments` are
    those given by position."""
    match = _SAYS.match(str(error))
    if match is None or match[1] != function.__qualname__:
        return None
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    lines = dict(re.findall(r"^ *(\w+): (.+)$", doc or "", re.MULTILINE))
    said = str(error).partition(". Did you mean")[0]
    quoted = re.findall(r"'(\w+)'", said)
    if " missing " in said and (taken := _taken(function, arguments)) is not None:
        said = f"{function.__qualname__}() missing 1 required positional argument: '{taken}'; the workspace stands in its place"
        quoted = [taken]
    if " missing " in said:
        said += "".join(f"; {name}: {lines[name].rstrip('.')}" for name in quoted if name in lines)
    elif "unexpected" in said and quoted:
        near = difflib.get_close_matches(quoted[0], [p.name for p in parameters], n=1)
        said += f"; did you mean {near[0]}?" if near else ""
    name = function.__qualname__.removesuffix(".__init__")
    return CallError(f"{said}; it is called {name}({_signature(parameters)})")


def _taken(function: Callable[..., Any], arguments: tuple[object, ...]) -> str | None:
    """The argument in whose place a call has its workspace; None where it has none, or has it in its own."""
    for value, name in zip(arguments, inspect.signature(function).parameters, strict=False):
        if type(value).__name__ == "Workspace":
            return None if name == "workspace" else name
    return None


def _signature(parameters: list[inspect.Parameter]) -> str:
    words = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    return ", ".join(words)
