"""The blocks of README.md that come from the repository and from a run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SPEC: Final = "specs/llama3_70b_tp8.py"
KERNEL: Final = "generated/llama3_8b/append.cu"


def spec_block() -> str:
    """A spec of the repository, whole."""
    return f"```python\n# {SPEC}\n{(ROOT / SPEC).read_text(encoding='utf-8')}```"


def kernel_block() -> str:
    """The phases of a generated kernel from K on."""
    text = (ROOT / KERNEL).read_text(encoding="utf-8")
    phases = text[text.index("  // K: ") : text.rindex("}\n")]
    return f"```cuda\n{phases}```"


def demo_block() -> str:
    """What `kvgen demo` prints on the CPU machine."""
    command = [sys.executable, "-m", "kvgen", "demo", "--device", "cpu"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return "```text\n" + "\n".join(line.rstrip() for line in done.stdout.strip().splitlines()) + "\n```"


BLOCKS: Final[dict[str, Callable[[], str]]] = {"spec": spec_block, "kernel": kernel_block}
RUNS: Final[dict[str, Callable[[], str]]] = {"demo": demo_block}


def without_times(text: str) -> list[list[str]]:
    """The words of each line, seconds left out: what two runs of the demo have in common."""
    lines = [re.sub(r"\b\d+\.\d+ s\b", "? s", line).split() for line in text.splitlines()]
    return [words for words in lines if words and words[0] != "next:" and not words[0].startswith("```")]
