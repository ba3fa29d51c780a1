"""JSON from outside: one reader, bounded in size and depth, that takes what RFC 8259 takes and nothing that is ambiguous.

The standard library's own accepts NaN and Infinity, numbers that overflow to infinity, the last of two values under one key,
halves of surrogate pairs and any depth that its stack allows. Here each is a `ToolError` of one line; NaN and Infinity pass where
the caller allows them (`constants`), because Python programs write them into files that others read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from kvgen.errors import ToolError
from kvgen.files import AnyPath, named, read_bytes

DEPTH: Final = 64  # levels of lists and objects; what kvgen reads has at most six
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def shown(value: object) -> str:
    """A value as an error message shows it: short, ASCII, and never a whole container."""
    if isinstance(value, str):
        return ascii(value if len(value) <= 60 else value[:60] + "...")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"an object of {len(value)} fields"
    return f"a {type(value).__name__}"


def read_object(path: AnyPath, *, limit: int, constants: bool = False) -> dict[str, Any]:
    """The JSON object in a regular file of at most `limit` bytes; `constants` as for `parse_object`. Raises ToolError."""
    return parse_object(read_bytes(path, limit=limit), named(path), constants=constants)


def parse_object(data: bytes, source: str, *, constants: bool = False) -> dict[str, Any]:
    """The JSON object in UTF-8 `data`, which may begin with a byte order mark; messages begin with `source`.

    `constants`: NaN, Infinity and -Infinity are floats, as Python's json module writes them. Raises ToolError.
    """
    try:
        value = json.loads(
            data.decode("utf-8-sig"),
            parse_constant=float if constants else _no_constant,
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        raise _too_deep(source) from None
    except UnicodeDecodeError as error:
        raise ToolError(f"{source}: not JSON: no UTF-8 (byte {error.start})") from None
    except ValueError as error:  # or an integer of thousands of digits
        raise ToolError(f"{source}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ToolError(f"{source}: got {shown(value)}; it must be a JSON object, {{...}}")
    _check(value, source)
    return value


def _check(value: object, source: str) -> None:
    """Raise for what is nested too deep, and for text that has no encoding."""
    level: list[object] = [value]
    for _ in range(DEPTH):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += [*item, *item.values()]
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str) and _SURROGATE.search(item):
                raise ToolError(f"{source}: not JSON: the string {shown(item)} has half of a surrogate pair")
        level = inner
        if not level:
            return
    raise _too_deep(source)


def _too_deep(source: str) -> ToolError:
    return ToolError(f"{source}: nested too deep: more than {DEPTH} levels")


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text if len(text) <= 20 else text[:20] + '...'} is larger than any float")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} is given twice in one object")
    return found
