"""What a kernel of the user's takes, written into its generated file: the line that compiled code is compared with.

Such a file is the banner, this line and the user's text. Everything that reads the file alone (the launcher's compile, the
compile cache, cubins made ahead of time) thus knows the entry, what the launcher will pass, and where the text came from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

HEADER_LINES: Final = 3  # the banner's two, and this one

_HEADER: Final = re.compile(r"(?:(?://|#line) [^\n]*\n){2,3}// entry: (\w+)\(([^)\n]*)\) of ([^\n]+)\n")
_COPIED: Final = re.compile(r"(?:// [^\n]*\n){2}// text of ([^\n]+)\n")
_BYTES: Final = {"ptr": 8, "u32": 4, "i32": 4, "u64": 8, "i64": 8, "f32": 4}
_PTX: Final = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)\s[^\[]*?(?:\[(\d+)\])?\s*$")


@dataclass(frozen=True)
class Signature:
    """An extern "C" function, the (name, kind) of its parameters, and the file it was written in.

    A kind is "ptr", a scalar's type, or the size in bytes of what is passed by value.
    """

    entry: str
    params: tuple[tuple[str, str], ...]
    source: str

    def line(self) -> str:
        """The line in the generated file."""
        params = ", ".join(f"{name} {kind}" for name, kind in self.params)
        return f"// entry: {self.entry}({params}) of {self.source}\n"

    def mismatch(self, ptx: str) -> str | None:
        """Where the compiled entry takes something else, None if nowhere."""
        found = re.search(rf"\.entry\s+{self.entry}\s*\(([^)]*)\)", ptx)
        if found is None:
            return None
        taken = [_taken(item) for item in found[1].split(",") if item.strip()]
        for number, ((name, kind), got) in enumerate(zip(self.params, taken, strict=False), start=1):
            size, is_float = got
            if size != _size(kind) or (kind in _BYTES and is_float != (kind == "f32")):
                takes = f"{_described(*got)}{' (no float)' if size == _size(kind) and not is_float else ''}"
                what = f"parameter {number} ({name}): the kernel takes {takes}, the launcher passes {_wanted(kind)}"
                return f"{what}; {_advice(number, name)}"
        if len(taken) < len(self.params):
            name, kind = self.params[len(taken)]
            number = len(taken) + 1
            return (
                f"parameter {number} ({name}): the kernel takes {len(taken)} parameters, the launcher passes "
                f"{len(self.params)}, this one {_wanted(kind)}; {_advice(number, name)}"
            )
        if len(taken) > len(self.params):
            number = len(self.params) + 1
            return (
                f"parameter {number}: the kernel takes {_described(*taken[number - 1])} that the launcher does not pass "
                f"({len(taken)} parameters, not {len(self.params)}); describe it in params, or drop it in the kernel"
            )
        return None


def read_signature(text: str) -> Signature | None:
    """The signature that a generated file or its flattened text carries; None where the kernel is kvgen's own."""
    match = _HEADER.match(text)
    if match is None:
        return None
    pairs = (item.strip().partition(" ") for item in match[2].split(",") if item.strip())
    return Signature(match[1], tuple((name, kind) for name, _, kind in pairs), match[3])


def header_line(source: str) -> str:
    """The line above the text of a header of the user's, in its copy."""
    return f"// text of {source}\n"


def written_in(text: str) -> str | None:
    """The file that the user wrote a generated file's text in, below HEADER_LINES lines of kvgen's; None: kvgen wrote it."""
    signature, copied = read_signature(text), _COPIED.match(text)
    return signature.source if signature else copied[1] if copied else None


def _taken(item: str) -> tuple[int, bool]:
    """(bytes, whether it is a float) of a `.param` of PTX."""
    match = _PTX.search(item)
    if match is None:
        return 0, False
    return int(match[2]) // 8 * int(match[3] or 1), match[1] == "f" and not match[3]


def _size(kind: str) -> int:
    return _BYTES[kind] if kind in _BYTES else int(kind)


def _described(size: int, is_float: bool) -> str:
    return f"{size} bytes{' (a float)' if is_float else ''}"


def _wanted(kind: str) -> str:
    return f"{kind} ({_BYTES[kind]} bytes)" if kind in _BYTES else f"{kind} bytes"


def _advice(number: int, name: str) -> str:
    if number == 1:
        return f"the first parameter is `const __grid_constant__ Cache {name}`"
    return "make params and the kernel's parameters the same, in the same order"
