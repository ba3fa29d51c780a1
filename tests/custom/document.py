"""The code of docs/custom_kernels.md: blocks whose first line names their file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "custom_kernels.md"
_BLOCK: Final = re.compile(r"```(?:python|cuda)\n(?:#|//) (\S+)\n(.*?)```", re.S)


def blocks() -> dict[str, str]:
    """Text by file name."""
    return {name: text for name, text in _BLOCK.findall(DOCUMENT.read_text(encoding="utf-8"))}
