"""What pages show: blocks of code with the file that their first line names, and commands in indented blocks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.cli.conftest import Folder

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE: Final = re.compile(r"^```(\w+)\n(.*?)^```", re.S | re.M)
_FILE: Final = re.compile(r"(?:#|//) (\S+\.\w+)\n")
_COMMAND: Final = re.compile(r"^    (?=(?:kvgen|pip|make|python) )(.+)$", re.M)

# Each program as `python PROGRAM` runs it, in a process that has kvgen and NumPy already: what it raises, by its name.
_RUNNER: Final = """
import json, runpy, sys, traceback
raised = {}
for program in sys.argv[1:]:
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException:
        raised[program] = traceback.format_exc()
print(json.dumps(raised))
"""


def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return [(m[1], m[2]) for m in _FENCE.finditer(page.read_text(encoding="utf-8"))]


def files(page: Path) -> dict[str, str]:
    """Text by the file name in its first line, of the blocks that have one; without that line."""
    found = {}
    for _, text in fences(page):
        match = _FILE.match(text)
        if match:
            found[match[1]] = text[match.end() :]
    return found


def commands(page: Path) -> list[str]:
    """The commands that a page tells to type, without comments."""
    return [re.sub(r"\s+#.*", "", m[1]) for m in _COMMAND.finditer(page.read_text(encoding="utf-8"))]


def project(root: Path, *pages: Path) -> Folder:
    """A project with the files of these pages."""
    (root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    for page in pages:
        for name, text in files(page).items():
            if name != "pyproject.toml":
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
    return Folder(root)


def run(root: Path, *programs: str) -> tuple[dict[str, str], str]:
    """What the programs that do not end well raise, by their names; and all that is printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER, *programs], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    raised: dict[str, str] = json.loads(last)
    return raised, "\n".join(printed)
