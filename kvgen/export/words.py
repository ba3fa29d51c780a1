"""Text of specs in C++ files: names that are identifiers there, and comments that end where their line does."""

from __future__ import annotations

import re
from typing import Final, Literal

from kvgen.errors import ToolError
from kvgen.layout.dtypes import DTYPES
from kvgen.schema.kernel_set import C_NAMES

# What C++ has besides C_NAMES, and the types of kvgen.h and of every header: a member called so would hide its own type.
_TYPES: Final = frozenset(
    re.findall(
        r"\w+",
        "and break class continue else except for if import not or return try while std kvgen exported size_t uintptr_t int16_t "
        "uint16_t Arch Blocks Cache Fault Grid PageAddresses Pools Report Tables TensorMap",
    )
).union(d.c for d in DTYPES.values())
# The functions that headers call without their namespace.
_FUNCTIONS: Final = frozenset(
    re.findall(
        r"\w+",
        "address_of aligned blocks ceil_div device_pointer launch layer_of least load most name_of offset_by overlaps pages_of "
        "problem report_of runs_on use",
    )
)
# The variables beside sizes in the functions that work them out.
_LOCALS: Final = frozenset(
    re.findall(r"\w+", "arguments cache held layer longest max_cache_length max_seq_length pools tables")
)
_TAKEN: Final = {"member": _TYPES, "function": _TYPES | _FUNCTIONS, "size": _TYPES | _FUNCTIONS | _LOCALS}
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_WIDTH: Final = 124  # characters of a line of comment


def identifier(name: str, where: str, kind: Literal["member", "function", "size"] = "member") -> str:
    """`name`, where C++ takes it as a member, a function or a size; raises ToolError, which says `where` it comes from."""
    if not _NAME.fullmatch(name) or "__" in name or name in C_NAMES or name in _TAKEN[kind] or name.startswith("CU"):
        raise ToolError(
            f"{where}: got {name!r}; the exported header needs a name that is free in C++ (no keyword, no name of kvgen.h, no "
            "double underscore, not CU...); rename it in the spec"
        )
    return name


def comment(text: str, indent: int = 0) -> tuple[str, ...]:
    """`text` as lines of `//` comments, wrapped, without the slashes: nothing in them ends or continues a comment."""
    lines: list[str] = []
    for paragraph in _paragraphs(text.strip().splitlines()):
        line = ""
        for word in shown(paragraph).split():
            if line and len(line) + 1 + len(word) > _WIDTH - indent - 3:
                lines.append(line)
                line = ""
            line = f"{line} {word}".strip()
        lines.append(line)
    # A backslash at the end of a line would draw the next one into the comment.
    return tuple(f"{line}." if line.endswith("\\") else line for line in lines)


def _paragraphs(lines: list[str]) -> list[str]:
    """Lines that belong together as one, empty lines kept; a list's items stay apart."""
    found: list[str] = []
    for line in lines:
        if found and found[-1] and line.strip() and not re.match(r"\s*[-*] |\s{4}", line):
            found[-1] = f"{found[-1]} {line.strip()}"
        else:
            found.append(line.strip())
    return found


def shown(text: str) -> str:
    """`text` in printable characters; others, such as those that turn the direction of writing, by their number."""
    printed = "".join(ch if ch.isprintable() or ch == "\t" else f"U+{ord(ch):04X}" for ch in text)
    return printed.replace("??", "? ?")  # trigraphs, one of which is a backslash


def title(name: str) -> str:
    """The beginning of the names of an operation's types."""
    return "".join(part.title() for part in name.split("_"))
