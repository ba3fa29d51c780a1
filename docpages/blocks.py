"""Text of pages: docstrings as Markdown, and blocks that a script writes between `<!-- NAME -->` and `<!-- end of NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Callable


def filled(text: str, blocks: dict[str, Callable[[], str]]) -> str:
    """`text` with these blocks written anew. Raises ValueError where it has no place for one."""
    for name, block in blocks.items():
        pattern = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.S)
        if not pattern.search(text):
            raise ValueError(f"there is no <!-- {name} --> ... <!-- end of {name} -->")
        found = block() + "\n"
        text = pattern.sub(lambda _, found=found: found, text)  # type: ignore[misc]
    return text


def block_of(text: str, name: str) -> str:
    """What stands in one block."""
    match = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end of {name} -->", text, re.S)
    if match is None:
        raise ValueError(f"there is no block {name}")
    return match[1]


def markdown(doc: str) -> str:
    """A docstring as Markdown: its text is not emphasised where it multiplies, code spans stay as they are."""
    parts = re.split(r"(`[^`]*`)", doc)
    return "".join(part if part.startswith("`") else part.replace("*", r"\*") for part in parts)
