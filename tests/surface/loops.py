"""The kernels of a disassembled cubin, and their loops."""

from __future__ import annotations

import re
from typing import Final

_LINE: Final = re.compile(r"^(\.L_x_\d+):|^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", re.M)
_BRANCH: Final = re.compile(r"BRA[.\w]*\s.*`\((\.L_x_\d+)\)")
_KERNEL: Final = re.compile(r"^\s*\.section\s+\.text\.(\w+),", re.M)


def kernels(sass: str) -> dict[str, str]:
    """The text of each kernel, by its entry."""
    _, *found = _KERNEL.split(sass)
    return dict(zip(found[::2], found[1::2], strict=True))


def instructions(sass: str) -> list[str]:
    """All of them but the padding at the end."""
    return [m[2] for m in _LINE.finditer(sass) if m[2] and not m[2].startswith("NOP")]


def loops(sass: str) -> list[list[str]]:
    """The instructions between each backward branch and where it leads, in the order of the branches; not the endless one
    that follows every kernel."""
    lines, found = [m[1] or m[2] for m in _LINE.finditer(sass)], []
    labels = {line: i for i, line in enumerate(lines) if line.startswith(".L_x")}
    for i, line in enumerate(lines):
        branch = _BRANCH.search(line)
        if branch and labels[branch[1]] < i - 1:
            found.append([x for x in lines[labels[branch[1]] : i + 1] if not x.startswith(".L_x")])
    return found
