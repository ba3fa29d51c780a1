"""The digest of a kernel's code: of its flattened text without comments, blank lines, indentation and `#line` directives.

Recorded facts (registers, instructions, cycles) count for every text with this digest, because comments do not reach the
machine code. Cubins have the exact `text_digest`: their line tables, in builds with line information, name the lines of one text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from kvgen.compile.program import text_digest

# Tokens in which a comment, a quote or a newline is something else. Text between two tokens is copied. A prefix of a literal
# (u8, L, ...) stands before its token; behind any other word character, R" and ' begin no literal: 0x1'0000.
_TOKEN: Final = re.compile(
    r"""
      (?P<comment> //(?:\\\n|[^\n])* | /\*.*?\*/)
    | (?P<raw> R(?:(?<=\bR)|(?<=\bu8R)|(?<=\b[uUL]R))"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)")
    | (?P<literal> "(?:\\.|[^"\\\n])*" | '(?:(?<!\w')|(?<=\bu8')|(?<=\b[uUL]'))(?:\\.|[^'\\\n])+')
    | (?P<splice> \\\n)
    | (?P<open> /\* | R(?:(?<=\bR)|(?<=\bu8R)|(?<=\b[uUL]R))")
    """,
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE: Final = "\n#line "
# The text's own lines are in the machine code then: every character counts.
_NAMES_LINES: Final = re.compile(
    r"\b(?:__LINE__|__FILE__|__builtin_(?:LINE|FILE|COLUMN|source_location)|source_location|assert)\b"
)


def code_digest(text: str) -> str:
    """The hex SHA-256 of the code of a flattened text: equal for two texts that differ in comments, blank lines, indentation
    and `#line` directives alone.

    A text that names its own lines (`__LINE__`, `assert`, ...) has the digest of every character, `text_digest`.
    """
    found = hashlib.sha256()
    first, *others = f"\n{text}".split(_DIRECTIVE)
    for part in (first, *(other.partition("\n")[2] for other in others)):
        code = _code(part)
        if code is None:
            return text_digest(text)
        found.update(code)
    return found.hexdigest()


@lru_cache(maxsize=4096)  # headers stand in many kernels
def _code(text: str) -> bytes | None:
    """The lines of code, stripped, each ended by a newline. None where the text names its own lines, or where a block comment or
    raw string has no end, because an `#include` or `#line` stands in it."""
    pieces = list(_pieces(text))
    if None in pieces:
        return None
    lines = "".join(piece for piece in pieces if piece is not None).split("\n")
    code = "".join(f"{line}\n" for line in (line.strip() for line in lines) if line)
    return None if _NAMES_LINES.search(code) else code.encode()


def _pieces(text: str) -> Iterator[str | None]:
    """The text cut at its tokens: a comment is a space, a splice is nothing, a newline inside a literal is no end of a line."""
    at = 0
    for token in _TOKEN.finditer(text):
        yield text[at : token.start()]
        at = token.end()
        match token.lastgroup:
            case "comment":
                yield " "
            case "splice":
                yield ""
            case "open":
                yield None
            case _:
                yield token[0].replace("\n", "\0")
    yield text[at:]
