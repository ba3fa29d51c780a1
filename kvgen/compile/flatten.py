"""One self-contained text out of a kernel and the headers beside it: what NVRTC compiles and what digests cover."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Final

from kvgen.compile.signature import HEADER_LINES, written_in
from kvgen.errors import ToolError

INCLUDE: Final = re.compile(r'\s*#\s*include\s*"([^"]+)"\s*(?://.*|/\*.*\*/\s*)?')


def resolve(base: str, include: str) -> str:
    """The path that `include` means in the file `base`."""
    parts: list[str] = []
    for part in (PurePosixPath(base).parent / include).parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def flatten(path: str, read: Callable[[str], str]) -> str:
    """The text of `path` with every `#include "..."` replaced by that file, each file once, under `#line` directives.

    Paths are relative, with forward slashes; `read` returns a file's text. The result names those paths only, so it is
    the same on every machine. A kernel or header of the user's is named as the file it was written in.
    """
    seen: set[str] = set()

    def lines_of(name: str) -> list[str]:
        seen.add(name)
        out = [f'#line 1 "{name}"']
        text = read(name)
        source = written_in(text)
        shown, ahead = (source, HEADER_LINES) if source else (name, 0)
        for number, line in enumerate(text.splitlines(), start=1):
            if ahead and number == ahead + 1:
                out.append(f'#line 1 "{shown}"')
            match = INCLUDE.fullmatch(line)
            if match is None:
                out.append("" if line.strip() == "#pragma once" else line)
                continue
            target = resolve(name, match[1])
            if target.startswith(("..", "/")):
                raise ToolError(f"{name}:{number}: #include {match[1]!r} leaves the generated folder")
            if target not in seen:
                out += lines_of(target)
            out.append(f'#line {number + 1 - ahead} "{shown}"')
        return out

    return "\n".join(lines_of(path)) + "\n"
