"""The __global__ functions of a kernel of the user's, as they are written: names, and parameters beside those that are passed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_COMMENT: Final = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)  # and string
_GLOBAL: Final = re.compile(r"\b__global__\b")
# After __global__: specifiers such as __launch_bounds__(256) on either side of void, then the name.
_NAMED: Final = re.compile(r"[^;{}]*?\bvoid\s+(?:__\w+__\s*\([^)]*\)\s*)*(\w+)\s*\(")
_QUALIFIERS: Final = re.compile(r"\b(?:const|volatile|__grid_constant__|__restrict__|std)\b|::")
_DECLARED: Final = re.compile(r"[\w>*&\]]\s+[*&]*\w+$|[*&]\s*\w+$|\w\s*\[\w*\]$")  # a type, then a name
_BYTES: Final = {
    **dict.fromkeys(("bool", "char", "signed char", "unsigned char", "int8_t", "uint8_t"), 1),
    **dict.fromkeys(("short", "unsigned short", "int16_t", "uint16_t", "half", "__half", "__nv_bfloat16"), 2),
    **dict.fromkeys(("float", "int", "unsigned", "unsigned int", "signed int", "signed", "int32_t", "uint32_t"), 4),
    **dict.fromkeys(("double", "long long", "unsigned long long", "int64_t", "uint64_t", "size_t"), 8),
}
_FLOATS: Final = ("float", "double", "half", "__half", "__nv_bfloat16")
_WORDS: Final = {"unsigned", "signed", "long", "short", "int", "char", "double"}
_PASSED: Final = {"ptr": 8, "u32": 4, "i32": 4, "u64": 8, "i64": 8, "f32": 4}
_ADVICE: Final = "make params and the kernel's parameters the same, in the same order"


def entries(text: str) -> dict[str, bool]:
    """The __global__ functions of a text, and whether each is extern "C"."""
    code, found = _code(text), {}
    for head in _heads(code):
        before = max(code.rfind(c, 0, head.start()) for c in ";}")
        own = re.search(r'extern\s+"C"', code[before + 1 : head.start(1)])
        found[head[1]] = bool(own or re.search(r'extern\s+"C"\s*\{', code[: head.start()]))
    return found


def mismatch(text: str, entry: str, passed: Sequence[tuple[str, str]]) -> tuple[int, str] | None:
    """Where the entry is written with other parameters than the launcher passes: the line of its name, and what is wrong.

    `passed` are name and kind, the cache first: "ptr", a scalar's type, or the size in bytes of a struct. None where nothing is
    wrong, and where only the compiler can know: types of the user's own, lists that the preprocessor makes.
    """
    code = _code(text)
    head = next((head for head in _heads(code) if head[1] == entry), None)
    written = None if head is None else _written(code, head.end())
    if head is None or written is None:
        return None
    said = _compared(written, passed)
    return None if said is None else (code.count("\n", 0, head.start(1)) + 1, said)


def _compared(written: Sequence[str], passed: Sequence[tuple[str, str]]) -> str | None:
    for number, (text, (name, kind)) in enumerate(zip(written, passed, strict=False), start=1):
        if not _fits(text, kind):
            advice = f"the first parameter is `const __grid_constant__ Cache {name}`" if number == 1 else _ADVICE
            return (
                f"parameter {number} ({name}): the kernel takes `{text}`, the launcher passes {_shown(kind)}; {advice}"
            )
    count = len(written)
    if count < len(passed):
        name, kind = passed[count]
        return (
            f"parameter {count + 1} ({name}): the kernel takes {count} parameters, the launcher passes {len(passed)}, this one "
            f"{_shown(kind)}; {_ADVICE}"
        )
    if count > len(passed):
        return (
            f"parameter {len(passed) + 1}: the kernel takes `{written[len(passed)]}` that the launcher does not pass ({count} "
            f"parameters, not {len(passed)}); describe it in params, or drop it in the kernel"
        )
    return None


def _code(text: str) -> str:
    """The text without comments and strings other than "C"; line breaks stay."""
    return _COMMENT.sub(lambda m: m[0] if m[0] == '"C"' else re.sub(r"[^\n]", " ", m[0]), text)


def _heads(code: str) -> list[re.Match[str]]:
    """Every __global__ function, from behind __global__ to behind its opening parenthesis."""
    found = (_NAMED.match(code, mark.end()) for mark in _GLOBAL.finditer(code))
    return [head for head in found if head is not None]


def _written(code: str, begin: int) -> list[str] | None:
    """The parameters of a list that opens before `begin`, each on one line; None where only the preprocessor knows them."""
    found, depth, last, end = list[str](), 1, begin, begin
    for end in range(begin, len(code)):
        depth += (code[end] in "(<[{") - (code[end] in ")>]}")
        if not depth or (code[end] == "," and depth == 1):
            found.append(" ".join(code[last:end].split()))
            last = end + 1
        if not depth:
            break
    if depth or "#" in code[begin:end]:
        return None
    if found in ([""], ["void"]):
        return []
    return found if all(_DECLARED.search(text) and _plain(_type(text)) for text in found) else None


def _plain(its: str) -> bool:
    """True for a type of one name, or of several of C's own: any other word may be the preprocessor's."""
    first, *words = re.sub(r"<.*>", "", its).split() or [""]
    return not words or {first, *words} <= _WORDS or (first in ("struct", "enum", "class") and len(words) == 1)


def _type(text: str) -> str:
    """A parameter's type without its name and qualifiers; "*" for a pointer."""
    if "*" in text or "[" in text:
        return "*"
    return " ".join(_QUALIFIERS.sub(" ", text).split()[:-1])


def _fits(text: str, kind: str) -> bool:
    """True where a parameter may be what the launcher passes, also for types that the text does not explain."""
    its = _type(text)
    if its == "*":
        return kind in _PASSED and _PASSED[kind] == 8
    if its not in _BYTES:
        return True
    return kind in _PASSED and _BYTES[its] == _PASSED[kind] and (its in _FLOATS) == (kind == "f32")


def _shown(kind: str) -> str:
    if kind == "ptr":
        return "a pointer (8 bytes)"
    return f"{kind} ({_PASSED[kind]} bytes)" if kind in _PASSED else f"{kind} bytes"
